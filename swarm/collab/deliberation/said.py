"""What a model said, apart from what it thought and how sure it was."""

import re

THOUGHT_TAG_NAMES = r"think|thinking|thoughts?|thought_process|thinking_process|scratchpad"

OPENING_TAG = re.compile(rf"^[ \t]*<({THOUGHT_TAG_NAMES})>", re.IGNORECASE | re.MULTILINE)
"""Thoughts begin a line; elsewhere such a tag is what is spoken of."""

ORPHAN_TAG = re.compile(
    r"^[ \t]*</(?:think|thinking)>|</(?:think|thinking)>[ \t]*$", re.IGNORECASE | re.MULTILINE
)
"""The end of thoughts that began before the text."""

MAX_THOUGHTS = 100
"""Thoughts that are looked for; each is sought to the text's end."""

CONFIDENCE_NUMBER = re.compile(
    r"(?P<number>-?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:e[+-]?\d+)?)"
    r"(?:\s*(?P<percent>%|percent\b|per cent\b)|\s*(?:/|out of)\s*(?P<whole>\d+))?",
    re.IGNORECASE,
)

MARKUP, OPENING_MARKUP = r"[\s*_`#>(\[\"'-]*", r"[\s*_`(\[\"']*"
CONFIDENCE_LINE = re.compile(
    rf"^{MARKUP}(?:(?:my|overall|final)\s+)?confidence(?:\s+(?:level|score))?{OPENING_MARKUP}[:=]{OPENING_MARKUP}"
    rf"(?P<said>{CONFIDENCE_NUMBER.pattern})[\s*_`)\]\"'.]*(?:\([^()\n]*\)?[\s*_`.]*)?$",
    re.IGNORECASE,
)
CONFIDENCE_TAG = re.compile(r"<confidence>([^<>]{0,80})</confidence>", re.IGNORECASE)
TRAILING_CONFIDENCE = re.compile(
    rf"(?<=[\s(\[*_])confidence[*_]*[:=]{OPENING_MARKUP}(?P<said>{CONFIDENCE_NUMBER.pattern})[\s*_`)\].]*\Z",
    re.IGNORECASE,
)


ANSWER = re.compile(
    r"^[ \t]*<(answer|updated_response)>(.*?)(?:</\1>[ \t]*$|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
"""What llm-consortium's prompts ask members to write; elsewhere such a tag is what is spoken of."""


def thoughts_of(text: str) -> str:
    """What `without_thoughts` leaves out, without the tags."""
    said = strip_thoughts(text)
    rest = text.replace(said, "", 1) if said else text
    return re.sub(rf"</?(?:{THOUGHT_TAG_NAMES})>", "", rest, flags=re.IGNORECASE).strip()


def without_tags(text: str) -> str:
    """An answer out of its tags; the last, where there are several."""
    found = [one[2].strip() for one in ANSWER.finditer(text)]
    return next((one for one in reversed(found) if one), text)


def strip_thoughts(text: str) -> str:
    """The text without what stands between tags of thoughts.

    Thoughts without an end are all that follows; what ends without a beginning began before the
    text, as some chat templates have it.
    """
    kept: list[str] = []
    place = 0
    while len(kept) < MAX_THOUGHTS and (opening := OPENING_TAG.search(text, place)):
        kept.append(text[place : opening.start()])
        place = _find_thought_end(text, opening.end(), opening[1])
    rest = "".join([*kept, text[place:]])
    closing = None if kept else ORPHAN_TAG.search(rest)
    return rest[closing.end() if closing else 0 :].strip()


def _find_thought_end(text: str, place: int, name: str) -> int:
    """Where thoughts end that began before `place`; such tags may lie in each other."""
    depth = 1
    for tag in re.finditer(rf"<(/?){name}>", text[place:], re.IGNORECASE):
        depth += -1 if tag[1] else 1
        if not depth:
            return place + tag.end()
    closing = re.search(rf"</{name}>", text[place:], re.IGNORECASE)
    return place + closing.end() if closing else len(text)


def parse_confidence(said: str) -> float | None:
    """A confidence from 0 to 1, of what somebody wrote; `None` where it is not clear.

    Read are 0.9, 95%, 9/10 and numbers above 10 up to 100, which are percentages. From above 1 to
    10 it may be either a percentage or of ten, and beyond 100 or below 0 it is nothing: unknown.
    """
    found = CONFIDENCE_NUMBER.search(said)
    if not found:
        return None
    number = float(found["number"].replace(",", "."))
    whole = 1.0
    if found["percent"]:
        whole = 100.0
    elif found["whole"]:
        whole = float(found["whole"])
    elif 10 < number <= 100:
        whole = 100.0
    return number / whole if whole and 0 <= number <= whole else None


def split_confidence(text: str) -> tuple[str, float | None]:
    """An answer without thoughts, tags and its confidence, and that confidence.

    The confidence is looked for between tags, in the last and in the first line, and at the end.
    """
    said, confidence = _apart(strip_thoughts(text))
    inside = without_tags(said)
    if confidence is None and inside != said:
        inside, confidence = _apart(inside)
    return inside, confidence


def _apart(said: str) -> tuple[str, float | None]:
    """A text without its confidence, and that."""
    if tags := list(CONFIDENCE_TAG.finditer(said)):
        last = tags[-1]
        return f"{said[: last.start()]}{said[last.end() :]}".strip(), parse_confidence(last[1])
    lines = said.split("\n")
    for place in dict.fromkeys((len(lines) - 1, 0)):
        if found := CONFIDENCE_LINE.match(lines[place]):
            del lines[place]
            return "\n".join(lines).strip(), parse_confidence(found["said"])
    if found := TRAILING_CONFIDENCE.search(said):
        return said[: found.start()].rstrip(" \t\n([*_"), parse_confidence(found["said"])
    return said, None
