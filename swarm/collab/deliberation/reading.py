"""Reading the verdict that an arbiter wrote."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from swarm.collab.deliberation.said import share, without_thoughts
from swarm.collab.deliberation.verdicts import Verdict

FIELDS = (
    "reasoning", "synthesis", "analysis", "dissent", "confidence", "refinement_areas",
    "needs_iteration",
)  # fmt: skip
"""The parts of a verdict, as its tags are called."""

TAG = re.compile(rf"<(/?)({'|'.join(FIELDS)})\s*>", re.IGNORECASE)

HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?(?:\d+[.)][ \t]*)?(?P<open>[*_]{1,3})?"
    r"(?P<name>reasoning|(?:final[ _-])?synthesis|analysis|dissent(?:ing[ _-]views?)?|confidence"
    r"|refinement[ _-]areas|needs[ _-]iteration)(?P<marks>[ \t]*[*_:]*)(?P<rest>.*)$",
    re.IGNORECASE | re.MULTILINE,
)

NOTHING = re.compile(r"\W*(?:none|n/a|nothing|null|no)?\W*", re.IGNORECASE)
"""What stands where there is nothing to say."""

KEY = re.compile(r'"synthesis"\s*:', re.IGNORECASE)

MOST, MOST_TAGS, NEAR = 10, 200, 40
"""A reply may be full of what it should have once: so many JSON keys and braces before each are
looked at, so many tags, and so many characters beside one."""

BULLET = re.compile(r"^\s*(?:[-*•–+]|\d+[.)])\s+")


class Block(NamedTuple):
    """A part of a reply: its name, what it says, and where it lies, its tags included."""

    name: str
    text: str
    begin: int
    end: int


def verdict(reply: str) -> Verdict | None:
    """The verdict in an arbiter's reply; `None` where it has no synthesis.

    Tags are read first, then a JSON object, then headings. Of a part that is there twice, the last
    one that is whole counts; tags inside another part are what that speaks of. A confidence is read
    as by `swarm.collab.deliberation.said.share`.
    """
    said = without_thoughts(reply)
    found: dict[str, Any] = {}
    blocks = list(tagged(said))
    for block in blocks:
        if _says_something(block.text) or block.name not in found:
            found[block.name] = block.text
    if not _says_something(found.get("synthesis", "")):
        found = _json(said) or {**_headed(said), **found}
    else:
        # Beside the tags some write the rest as headings.
        outside = said
        for block in reversed(blocks):
            outside = f"{outside[: block.begin]}\n{outside[block.end :]}"
        found = {**_headed(outside), **found}
    synthesis = _text(found.get("synthesis"))
    if not _says_something(synthesis):
        return None
    return Verdict(
        synthesis,
        _confidence(found.get("confidence")),
        reasoning=_text(found.get("reasoning")),
        analysis=_text(found.get("analysis")),
        dissent=_something(_text(found.get("dissent"))),
        needs_iteration=_yes(found.get("needs_iteration")),
        refinement_areas=areas(found.get("refinement_areas")),
        raw=reply,
    )


def _says_something(text: Any) -> bool:
    """Whether there is more than the dots of a form that was copied."""
    return bool(re.search(r"\w", _text(text)))


def _something(text: str) -> str:
    return "" if NOTHING.fullmatch(text) else text


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _confidence(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    return share(value if isinstance(value, str) else json.dumps(value))


def _yes(value: Any) -> bool:
    words = re.findall(r"\w+", _text(value).lower())
    return bool(words) and words[0] in ("true", "yes", "y", "1")


def areas(value: Any) -> tuple[str, ...]:
    """Refinement areas: a list, <area> tags, bullets, numbers, or a line each."""
    if isinstance(value, list):
        return tuple(filter(None, (_something(_text(one)) for one in value)))
    text = _text(value)
    if tags := re.findall(r"<area>((?:(?!<area>).)*?)</area>", text, re.IGNORECASE | re.DOTALL):
        return areas(tags)
    lines = [line for line in text.split("\n") if line.strip()]
    if not any(BULLET.match(line) for line in lines):
        return areas(lines)
    found: list[str] = []
    for line in lines:
        if BULLET.match(line) or not found:
            found.append(BULLET.sub("", line).strip())
        else:
            found[-1] += f" {line.strip()}"
    return areas(found)


def tagged(text: str) -> Iterator[Block]:
    """The outermost parts between tags, in their order; one without an end reaches to the next."""
    tags = list(TAG.finditer(text))[-MOST_TAGS:]
    number = 0
    while number < len(tags):
        tag = tags[number]
        if tag[1]:
            number += 1
            continue
        name = tag[2].lower()
        end = _end(text, tags, number)
        if end is not None:
            yield Block(name, text[tag.end() : tags[end].start()], tag.start(), tags[end].end())
            number = end + 1
            continue
        number += 1
        # Cut off, or its end was forgotten; if it begins again, this was a draft.
        rest = tags[number:]
        if any(one[2].lower() == name and _begins(text, one) for one in rest):
            continue
        later = (one.start() for one in rest if not one[1] and one[2].lower() != name)
        stop = next(later, len(text))
        yield Block(name, text[tag.end() : stop], tag.start(), stop)


def _begins(text: str, tag: re.Match[str]) -> bool:
    """Whether the tag opens a part by its place: where a line begins, or after another tag."""
    before = text[max(0, tag.start() - NEAR) : tag.start()].rstrip(" \t")
    return not tag[1] and (not before or before[-1] in "\n>")


def _ends(text: str, tag: re.Match[str]) -> bool:
    """Whether the tag closes a part by its place: where a line ends, or before another tag."""
    after = text[tag.end() : tag.end() + NEAR].lstrip(" \t`*.")
    return bool(tag[1]) and (not after or after[0] in "\n<")


def _end(text: str, tags: Sequence[re.Match[str]], first: int) -> int | None:
    """Which tag closes the one that is the `first`; `None` if none does."""
    same = [n for n in range(first + 1, len(tags)) if tags[n][2].lower() == tags[first][2].lower()]
    depth, spoken_of = 1, -1
    for place, number in enumerate(same):
        tag = tags[number]
        if number == spoken_of:
            continue
        if _begins(text, tag):
            depth += 1
        elif not tag[1] and place + 1 < len(same) and tags[same[place + 1]][1]:
            closing = tags[same[place + 1]]
            if "\n" not in text[tag.start() : closing.start()]:
                spoken_of = same[place + 1]  # a pair in a sentence
        elif _ends(text, tag):
            depth -= 1
            if not depth:
                return number
    opened = [number for number in same if _begins(text, tags[number])]
    closes = [number for number in same if tags[number][1]]
    return next((n for n in closes if not opened or n < opened[0]), None)


def _json(text: str) -> dict[str, Any]:
    """The last JSON object that has a synthesis, its keys in small letters."""
    decoder = json.JSONDecoder(strict=False)
    for key in list(KEY.finditer(text))[-MOST:][::-1]:
        place = key.start()
        for _ in range(MOST):
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


def _headed(text: str) -> dict[str, Any]:
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
        key = next(key for key in FIELDS if key in name)
        if _says_something(said):
            found[key] = said
    return found
