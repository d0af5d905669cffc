"""Reading the verdict that an arbiter wrote."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from swarm.multi_agent.consortium.results import Verdict

# What a model said, apart from what it thought and how sure it was.

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


# Reading the order in which a model puts answers.

RANK_TAG = re.compile(
    r"<rank\s+position\s*=\s*['\"]?(\d{1,9})['\"]?\s*>[^\d<]*(\d+)", re.IGNORECASE
)


def parse_ranking(reply: str, labels: Sequence[int]) -> list[int] | None:
    """The order in which a reply puts the answers with these numbers, best first.

    Read are 3 > 1 > 2, a list, lines with a number each, "Answer 3, Answer 1", and tags of ranks;
    of several orders the last. What the reply leaves out comes behind, in the labels' order.
    """
    said = strip_thoughts(reply)
    blocks = re.findall(
        r"<ranking>((?:(?!<ranking>).)*?)</ranking>", said, re.IGNORECASE | re.DOTALL
    )
    for text in (*reversed(blocks), said):
        if found := _find_order(text, labels):
            return [*found, *(label for label in labels if label not in found)]
    return None


def _find_order(text: str, labels: Sequence[int]) -> list[int]:
    if ranks := RANK_TAG.findall(text):
        return _valid_labels(
            [number for _, number in sorted(ranks, key=lambda one: int(one[0]))], labels
        )
    rows = [row for row in text.split("\n") if re.search(r"\d", row)]
    for row in reversed(rows):
        numbers = re.findall(r"\d+", row)
        whole = len(numbers) == len(labels) > 1 or (len(numbers) > 1 and ">" in row)
        if whole and (found := _valid_labels(numbers, labels)):
            return found
    # A line for each: behind a place in the list there may be the answer's number.
    last = []
    for row in rows:
        listed = re.match(r"\W*\d+\s*[.):]\D*?(\d+)", row)
        named = re.search(r"(?:answer|response)\W*(\d+)", row, re.IGNORECASE)
        plain = re.fullmatch(r"\W*(\d+)\W*", row)
        if match := listed or plain or named:
            last.append(match[1])
    return _valid_labels(last[-len(labels) :], labels) if len(last) >= len(labels) else []


def _valid_labels(numbers: Sequence[str], labels: Sequence[int]) -> list[int]:
    """The numbers, if each is a label and none is there twice."""
    found = [int(number) for number in numbers if len(number) < 10]
    clear = len(set(found)) == len(numbers) and set(found) <= set(labels)
    return found if clear else []


VERDICT_FIELDS = (
    "reasoning",
    "synthesis",
    "analysis",
    "dissent",
    "confidence",
    "refinement_areas",
    "needs_iteration",
)
"""The parts of a verdict, as its tags are called."""

FIELD_TAG = re.compile(rf"<(/?)({'|'.join(VERDICT_FIELDS)})\s*>", re.IGNORECASE)

HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?(?:\d+[.)][ \t]*)?(?P<open>[*_]{1,3})?"
    r"(?P<name>reasoning|(?:final[ _-])?synthesis|analysis|dissent(?:ing[ _-]views?)?|confidence"
    r"|refinement[ _-]areas|needs[ _-]iteration)(?P<marks>[ \t]*[*_:]*)(?P<rest>.*)$",
    re.IGNORECASE | re.MULTILINE,
)

EMPTY_VALUE = re.compile(r"\W*(?:none|n/a|nothing|null|no)?\W*", re.IGNORECASE)
"""What stands where there is nothing to say."""

SYNTHESIS_KEY = re.compile(r'"synthesis"\s*:', re.IGNORECASE)

MAX_JSON_OBJECTS, MAX_TAGS, NEIGHBOUR_CHARS = 10, 200, 40
"""A reply may be full of what it should have once: so many JSON keys and braces before each are
looked at, so many tags, and so many characters beside one."""

BULLET = re.compile(r"^\s*(?:[-*•–+]|\d+[.)])\s+")


class TaggedBlock(NamedTuple):
    """A part of a reply: its name, what it says, and where it lies, its tags included."""

    name: str
    text: str
    begin: int
    end: int


def parse_verdict(reply: str) -> Verdict | None:
    """The verdict in an arbiter's reply; `None` where it has no synthesis.

    Tags are read first, then a JSON object, then headings. Of a part that is there twice, the last
    one that is whole counts; tags inside another part are what that speaks of. A confidence is read
    as by `swarm.multi_agent.consortium.parsing.parse_confidence`.
    """
    said = strip_thoughts(reply)
    found: dict[str, Any] = {}
    blocks = list(iterate_tagged_blocks(said))
    for block in blocks:
        if _has_content(block.text) or block.name not in found:
            found[block.name] = block.text
    if not _has_content(found.get("synthesis", "")):
        found = _parse_json_verdict(said) or {**_parse_headings(said), **found}
    else:
        # Beside the tags some write the rest as headings.
        outside = said
        for block in reversed(blocks):
            outside = f"{outside[: block.begin]}\n{outside[block.end :]}"
        found = {**_parse_headings(outside), **found}
    synthesis = _to_text(found.get("synthesis"))
    if not _has_content(synthesis):
        return None
    return Verdict(
        synthesis,
        _parse_confidence(found.get("confidence")),
        reasoning=_to_text(found.get("reasoning")),
        analysis=_to_text(found.get("analysis")),
        dissent=_drop_empty(_to_text(found.get("dissent"))),
        needs_iteration=_parse_bool(found.get("needs_iteration")),
        refinement_areas=parse_areas(found.get("refinement_areas")),
        raw=reply,
    )


def _has_content(text: Any) -> bool:
    """Whether there is more than the dots of a form that was copied."""
    return bool(re.search(r"\w", _to_text(text)))


def _drop_empty(text: str) -> str:
    return "" if EMPTY_VALUE.fullmatch(text) else text


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_confidence(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    return parse_confidence(value if isinstance(value, str) else json.dumps(value))


def _parse_bool(value: Any) -> bool:
    words = re.findall(r"\w+", _to_text(value).lower())
    return bool(words) and words[0] in ("true", "yes", "y", "1")


def parse_areas(value: Any) -> tuple[str, ...]:
    """Refinement areas: a list, <area> tags, bullets, numbers, or a line each."""
    if isinstance(value, list):
        return tuple(filter(None, (_drop_empty(_to_text(one)) for one in value)))
    text = _to_text(value)
    if tags := re.findall(r"<area>((?:(?!<area>).)*?)</area>", text, re.IGNORECASE | re.DOTALL):
        return parse_areas(tags)
    lines = [line for line in text.split("\n") if line.strip()]
    if not any(BULLET.match(line) for line in lines):
        return parse_areas(lines)
    found: list[str] = []
    for line in lines:
        if BULLET.match(line) or not found:
            found.append(BULLET.sub("", line).strip())
        else:
            found[-1] += f" {line.strip()}"
    return parse_areas(found)


def iterate_tagged_blocks(text: str) -> Iterator[TaggedBlock]:
    """The outermost parts between tags, in their order; one without an end reaches to the next."""
    tags = list(FIELD_TAG.finditer(text))[-MAX_TAGS:]
    number = 0
    while number < len(tags):
        tag = tags[number]
        if tag[1]:
            number += 1
            continue
        name = tag[2].lower()
        end = _find_closing_tag(text, tags, number)
        if end is not None:
            yield TaggedBlock(
                name, text[tag.end() : tags[end].start()], tag.start(), tags[end].end()
            )
            number = end + 1
            continue
        number += 1
        # Cut off, or its end was forgotten; if it begins again, this was a draft.
        rest = tags[number:]
        if any(one[2].lower() == name and _is_opening_tag(text, one) for one in rest):
            continue
        later = (one.start() for one in rest if not one[1] and one[2].lower() != name)
        stop = next(later, len(text))
        yield TaggedBlock(name, text[tag.end() : stop], tag.start(), stop)


def _is_opening_tag(text: str, tag: re.Match[str]) -> bool:
    """Whether the tag opens a part by its place: where a line begins, or after another tag."""
    before = text[max(0, tag.start() - NEIGHBOUR_CHARS) : tag.start()].rstrip(" \t")
    return not tag[1] and (not before or before[-1] in "\n>")


def _is_closing_tag(text: str, tag: re.Match[str]) -> bool:
    """Whether the tag closes a part by its place: where a line ends, or before another tag."""
    after = text[tag.end() : tag.end() + NEIGHBOUR_CHARS].lstrip(" \t`*.")
    return bool(tag[1]) and (not after or after[0] in "\n<")


def _find_closing_tag(text: str, tags: Sequence[re.Match[str]], first: int) -> int | None:
    """Which tag closes the one that is the `first`; `None` if none does."""
    same = [n for n in range(first + 1, len(tags)) if tags[n][2].lower() == tags[first][2].lower()]
    depth, spoken_of = 1, -1
    for place, number in enumerate(same):
        tag = tags[number]
        if number == spoken_of:
            continue
        if _is_opening_tag(text, tag):
            depth += 1
        elif not tag[1] and place + 1 < len(same) and tags[same[place + 1]][1]:
            closing = tags[same[place + 1]]
            if "\n" not in text[tag.start() : closing.start()]:
                spoken_of = same[place + 1]  # a pair in a sentence
        elif _is_closing_tag(text, tag):
            depth -= 1
            if not depth:
                return number
    opened = [number for number in same if _is_opening_tag(text, tags[number])]
    closes = [number for number in same if tags[number][1]]
    return next((n for n in closes if not opened or n < opened[0]), None)


def _parse_json_verdict(text: str) -> dict[str, Any]:
    """The last JSON object that has a synthesis, its keys in small letters."""
    decoder = json.JSONDecoder(strict=False)
    for key in list(SYNTHESIS_KEY.finditer(text))[-MAX_JSON_OBJECTS:][::-1]:
        place = key.start()
        for _ in range(MAX_JSON_OBJECTS):
            if (place := text.rfind("{", 0, place)) < 0:
                break
            try:
                value, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            named = {re.sub(r"[ -]", "_", name.lower()): one for name, one in value.items()}
            if end > key.end() and "synthesis" in named:
                return named
    return {}


def _parse_headings(text: str) -> dict[str, Any]:
    """The parts under headings, such as "## Synthesis" or "**Confidence**: 0.9"."""
    heads = [
        head
        for head in HEADING.finditer(text)
        if ":" in head["marks"]
        or (not head["rest"].strip("*_ \t") and (head["open"] or "#" in head[0]))
    ]
    found: dict[str, Any] = {}
    for number, head in enumerate(heads):
        end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        said = text[head.start("rest") : end].strip()
        if head["open"] and ":" in head["marks"]:
            said = said.removeprefix(head["open"]).strip()
        name = re.sub(r"[ -]", "_", head["name"].lower())
        key = next(key for key in VERDICT_FIELDS if key in name)
        if _has_content(said):
            found[key] = said
    return found
