"""Parsing of replies: the confidence of an answer, and the verdict of an arbiter."""

import json
import re
from typing import Any

from swarm._util.replies import parse_json_object, parse_tags, strip_thoughts
from swarm.multi_agent.consortium.results import Verdict

NUMBER = (
    r"(?P<number>-?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:e[+-]?\d+)?)"
    r"(?:\s*(?P<percent>%|percent\b)|\s*(?:/|out of)\s*(?P<whole>\d+))?"
)

CONFIDENCE_TAG = re.compile(r"<confidence>([^<>]{0,80})</confidence>", re.IGNORECASE)
LAST_CONFIDENCE = re.compile(
    r"(?:^|(?<=[\s(*_]))[*_(\[#> ]{0,9}(?:(?:my|overall|final) )?confidence(?: level| score)?"
    rf"[*_\"' ]{{0,9}}[:=][*_\"'(\[ ]{{0,9}}(?P<said>{NUMBER})[*_`)\]\"'. ]{{0,9}}"
    r"(?:\([^()\n]*\))?[\s*_`.)]*\Z",
    re.IGNORECASE | re.MULTILINE,
)

ANSWER = re.compile(
    r"^[ \t]*<(answer|updated_response)>(.*?)(?:</\1>[ \t]*$|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
"""Tags that llm-consortium's prompts request; elsewhere such a tag is part of the text."""


def parse_confidence(said: str) -> float | None:
    """Parse a confidence from 0 to 1; `None` if it is unclear.

    Accepts 0.9, 95%, 9/10 and numbers above 10 up to 100, which are percentages. From above 1 to 10
    it may be a percentage or out of ten, which is ambiguous; above 100 or below 0 it is invalid.
    """
    found = re.search(NUMBER, said, re.IGNORECASE)
    if not found:
        return None
    number = float(found["number"].replace(",", "."))
    scale = 100.0 if found["percent"] or 10 < number <= 100 else 1.0
    scale = float(found["whole"]) if found["whole"] else scale
    return number / scale if scale and 0 <= number <= scale else None


def split_confidence(text: str) -> tuple[str, float | None]:
    """Split an answer into its text, without reasoning and tags, and its confidence.

    The confidence is in a tag or at the end, as members are asked to write it.
    """
    reply, confidence = _cut_confidence(strip_thoughts(text))
    inside = [one[2].strip() for one in ANSWER.finditer(reply) if one[2].strip()]
    if inside:
        reply = inside[-1]
        if confidence is None:
            reply, confidence = _cut_confidence(reply)
    return reply, confidence


def _cut_confidence(reply: str) -> tuple[str, float | None]:
    """Return a text without its confidence, and the confidence."""
    if tags := list(CONFIDENCE_TAG.finditer(reply)):
        last = tags[-1]
        return f"{reply[: last.start()]}{reply[last.end() :]}".strip(), parse_confidence(last[1])
    if found := LAST_CONFIDENCE.search(reply):
        return reply[: found.start()].rstrip(), parse_confidence(found["said"])
    return reply, None


VERDICT_PARTS = (
    "reasoning",
    "synthesis",
    "analysis",
    "dissent",
    "confidence",
    "refinement_areas",
    "needs_iteration",
)

EMPTY_VALUE = re.compile(r"\W*(?:none|n/a|nothing|null|no)?\W*", re.IGNORECASE)
"""Placeholders for an empty part."""

BULLET = re.compile(r"^\s*(?:[-*•–+]|\d+[.)])\s+")


def parse_verdict(reply: str) -> Verdict | None:
    """Parse the verdict in an arbiter's reply, tags or JSON; `None` if it has no synthesis."""
    answer = strip_thoughts(reply)
    found: dict[str, Any] = dict(parse_tags(answer, VERDICT_PARTS))
    if not _has_content(found.get("synthesis")):
        found = parse_json_object(answer, lambda named: _has_content(named.get("synthesis")))
    if not _has_content(found.get("synthesis")):
        return None
    confidence = found.get("confidence")
    unknown = confidence is None or isinstance(confidence, bool)
    again = re.findall(r"\w+", _to_text(found.get("needs_iteration")).lower())[:1]
    return Verdict(
        _to_text(found["synthesis"]),
        None if unknown else parse_confidence(_to_text(confidence)),
        reasoning=_to_text(found.get("reasoning")),
        analysis=_to_text(found.get("analysis")),
        dissent=_drop_empty(_to_text(found.get("dissent"))),
        needs_iteration=again in (["true"], ["yes"], ["y"], ["1"]),
        refinement_areas=parse_areas(found.get("refinement_areas")),
        raw=reply,
    )


def _has_content(value: Any) -> bool:
    """Return whether there is more than the dots of a copied template."""
    return bool(re.search(r"\w", _to_text(value)))


def _drop_empty(text: str) -> str:
    return "" if EMPTY_VALUE.fullmatch(text) else text


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_areas(value: Any) -> tuple[str, ...]:
    """Parse refinement areas: a list, <area> tags, bullets, numbers, or one per line."""
    if isinstance(value, list):
        return tuple(filter(None, (_drop_empty(_to_text(one)) for one in value)))
    text = _to_text(value)
    if tags := re.findall(r"<area>([^<]*)</area>", text, re.IGNORECASE):
        return parse_areas(tags)
    lines = [line for line in text.split("\n") if line.strip()]
    bullets = any(BULLET.match(line) for line in lines)
    found: list[str] = []
    for line in lines:
        if found and bullets and not BULLET.match(line):
            found[-1] += f" {line.strip()}"
        else:
            found.append(BULLET.sub("", line))
    return parse_areas(found)
