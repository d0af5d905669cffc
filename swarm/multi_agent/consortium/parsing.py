"""Parsing of replies: the confidence of an answer, and the verdict of an arbiter."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from swarm._util.replies import strip_thoughts
from swarm.multi_agent.consortium.results import Verdict

CONFIDENCE_NUMBER = re.compile(
    r"(?P<number>-?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:e[+-]?\d+)?)"
    r"(?:\s*(?P<percent>%|percent\b|per cent\b)|\s*(?:/|out of)\s*(?P<whole>\d+))?",
    re.IGNORECASE,
)

MARKUP, OPENING_MARKUP = r"[\s*_`#>(\[\"'-]*", r"[\s*_`(\[\"']*"
CONFIDENCE_LINE = re.compile(
    rf"^{MARKUP}(?:(?:my|overall|final)\s+)?confidence(?:\s+(?:level|score))?{OPENING_MARKUP}[:=]{OPENING_MARKUP}"
    rf"(?P<confidence>{CONFIDENCE_NUMBER.pattern})[\s*_`)\]\"'.]*(?:\([^()\n]*\)?[\s*_`.]*)?$",
    re.IGNORECASE,
)
CONFIDENCE_TAG = re.compile(r"<confidence>([^<>]{0,80})</confidence>", re.IGNORECASE)
TRAILING_CONFIDENCE = re.compile(
    rf"(?<=[\s(\[*_])confidence[*_]*[:=]{OPENING_MARKUP}(?P<confidence>{CONFIDENCE_NUMBER.pattern})[\s*_`)\].]*\Z",
    re.IGNORECASE,
)


ANSWER = re.compile(
    r"^[ \t]*<(answer|updated_response)>(.*?)(?:</\1>[ \t]*$|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
"""Tags that llm-consortium's prompts request from members; elsewhere such a tag is part of the
text.
"""


def without_tags(text: str) -> str:
    """Return the content of answer tags; the last of several."""
    found = [one[2].strip() for one in ANSWER.finditer(text)]
    return next((one for one in reversed(found) if one), text)


def parse_confidence(said: str) -> float | None:
    """Parse a confidence from 0 to 1; `None` if it is unclear.

    Accepts 0.9, 95%, 9/10 and numbers above 10 up to 100, which are percentages. From above 1 to 10
    it may be a percentage or out of ten, which is ambiguous; above 100 or below 0 it is invalid.
    """
    found = CONFIDENCE_NUMBER.search(said)
    if not found:
        return None
    number = float(found["number"].replace(",", "."))
    scale = 1.0
    if found["percent"]:
        scale = 100.0
    elif found["whole"]:
        scale = float(found["whole"])
    elif 10 < number <= 100:
        scale = 100.0
    return number / scale if scale and 0 <= number <= scale else None


def split_confidence(text: str) -> tuple[str, float | None]:
    """Split an answer into its text, without reasoning and tags, and its confidence.

    The confidence may be in a tag, in the last or first line, or at the end.
    """
    reply, confidence = _apart(strip_thoughts(text))
    inside = without_tags(reply)
    if confidence is None and inside != reply:
        inside, confidence = _apart(inside)
    return inside, confidence


def _apart(reply: str) -> tuple[str, float | None]:
    """Return a text without its confidence, and the confidence."""
    if tags := list(CONFIDENCE_TAG.finditer(reply)):
        last = tags[-1]
        return f"{reply[: last.start()]}{reply[last.end() :]}".strip(), parse_confidence(last[1])
    lines = reply.split("\n")
    for index in dict.fromkeys((len(lines) - 1, 0)):
        if found := CONFIDENCE_LINE.match(lines[index]):
            del lines[index]
            return "\n".join(lines).strip(), parse_confidence(found["confidence"])
    if found := TRAILING_CONFIDENCE.search(reply):
        return reply[: found.start()].rstrip(" \t\n([*_"), parse_confidence(found["confidence"])
    return reply, None


VERDICT_FIELDS = (
    "reasoning",
    "synthesis",
    "analysis",
    "dissent",
    "confidence",
    "refinement_areas",
    "needs_iteration",
)
"""Tag names of the parts of a verdict."""

FIELD_TAG = re.compile(rf"<(/?)({'|'.join(VERDICT_FIELDS)})\s*>", re.IGNORECASE)

HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?(?:\d+[.)][ \t]*)?(?P<open>[*_]{1,3})?"
    r"(?P<name>reasoning|(?:final[ _-])?synthesis|analysis|dissent(?:ing[ _-]views?)?|confidence"
    r"|refinement[ _-]areas|needs[ _-]iteration)(?P<marks>[ \t]*[*_:]*)(?P<rest>.*)$",
    re.IGNORECASE | re.MULTILINE,
)

EMPTY_VALUE = re.compile(r"\W*(?:none|n/a|nothing|null|no)?\W*", re.IGNORECASE)
"""Placeholders for an empty part."""

SYNTHESIS_KEY = re.compile(r'"synthesis"\s*:', re.IGNORECASE)

MAX_JSON_OBJECTS, MAX_TAGS, NEIGHBOUR_CHARS = 10, 200, 40
"""Limits for replies that repeat themselves: JSON keys and the braces before each, tags, and
characters around a tag.
"""

BULLET = re.compile(r"^\s*(?:[-*•–+]|\d+[.)])\s+")


class TaggedBlock(NamedTuple):
    """A tagged part of a reply: its name, its text, and its span including the tags."""

    name: str
    text: str
    begin: int
    end: int


def parse_verdict(reply: str) -> Verdict | None:
    """Parse the verdict in an arbiter's reply; `None` if it has no synthesis.

    Tags are parsed first, then a JSON object, then headings. The last complete part of each name
    counts; tags inside another part belong to its text. The confidence is parsed by
    `parse_confidence`.
    """
    answer = strip_thoughts(reply)
    found: dict[str, Any] = {}
    blocks = list(iterate_tagged_blocks(answer))
    for block in blocks:
        if _has_content(block.text) or block.name not in found:
            found[block.name] = block.text
    if not _has_content(found.get("synthesis", "")):
        found = _parse_json_verdict(answer) or {**_parse_headings(answer), **found}
    else:
        # Some models mix tags and headings.
        outside = answer
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
    """Return whether there is more than the dots of a copied template."""
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
    """Parse refinement areas: a list, <area> tags, bullets, numbers, or one per line."""
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
    """Yield the outermost tagged parts in order; one without an end extends to the next tag."""
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
        # Truncated, or without an end tag; if it starts again later, this was a draft.
        rest = tags[number:]
        if any(one[2].lower() == name and _is_opening_tag(text, one) for one in rest):
            continue
        later = (one.start() for one in rest if not one[1] and one[2].lower() != name)
        stop = next(later, len(text))
        yield TaggedBlock(name, text[tag.end() : stop], tag.start(), stop)


def _is_opening_tag(text: str, tag: re.Match[str]) -> bool:
    """Return whether an opening tag starts a line or follows another tag."""
    before = text[max(0, tag.start() - NEIGHBOUR_CHARS) : tag.start()].rstrip(" \t")
    return not tag[1] and (not before or before[-1] in "\n>")


def _is_closing_tag(text: str, tag: re.Match[str]) -> bool:
    """Return whether a closing tag ends a line or precedes another tag."""
    after = text[tag.end() : tag.end() + NEIGHBOUR_CHARS].lstrip(" \t`*.")
    return bool(tag[1]) and (not after or after[0] in "\n<")


def _find_closing_tag(text: str, tags: Sequence[re.Match[str]], first: int) -> int | None:
    """Return the index of the tag that closes tag `first`; `None` if there is none."""
    same = [n for n in range(first + 1, len(tags)) if tags[n][2].lower() == tags[first][2].lower()]
    depth, mentioned = 1, -1
    for index, number in enumerate(same):
        tag = tags[number]
        if number == mentioned:
            continue
        if _is_opening_tag(text, tag):
            depth += 1
        elif not tag[1] and index + 1 < len(same) and tags[same[index + 1]][1]:
            closing = tags[same[index + 1]]
            if "\n" not in text[tag.start() : closing.start()]:
                mentioned = same[index + 1]  # a pair within a sentence
        elif _is_closing_tag(text, tag):
            depth -= 1
            if not depth:
                return number
    opened = [number for number in same if _is_opening_tag(text, tags[number])]
    closing_tags = [number for number in same if tags[number][1]]
    return next((n for n in closing_tags if not opened or n < opened[0]), None)


def _parse_json_verdict(text: str) -> dict[str, Any]:
    """Return the last JSON object with a synthesis, with lower-case keys."""
    decoder = json.JSONDecoder(strict=False)
    for key in list(SYNTHESIS_KEY.finditer(text))[-MAX_JSON_OBJECTS:][::-1]:
        start = key.start()
        for _ in range(MAX_JSON_OBJECTS):
            if (start := text.rfind("{", 0, start)) < 0:
                break
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            named = {re.sub(r"[ -]", "_", name.lower()): one for name, one in value.items()}
            if end > key.end() and "synthesis" in named:
                return named
    return {}


def _parse_headings(text: str) -> dict[str, Any]:
    """Parse parts under headings, such as "## Synthesis" or "**Confidence**: 0.9"."""
    headings = [
        heading
        for heading in HEADING.finditer(text)
        if ":" in heading["marks"]
        or (not heading["rest"].strip("*_ \t") and (heading["open"] or "#" in heading[0]))
    ]
    found: dict[str, Any] = {}
    for number, heading in enumerate(headings):
        end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
        content = text[heading.start("rest") : end].strip()
        if heading["open"] and ":" in heading["marks"]:
            content = content.removeprefix(heading["open"]).strip()
        name = re.sub(r"[ -]", "_", heading["name"].lower())
        key = next(key for key in VERDICT_FIELDS if key in name)
        if _has_content(content):
            found[key] = content
    return found
