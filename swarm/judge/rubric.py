"""Reads scores by skill in a judge's reply: a dictionary at its end, or lines like "Skill: 4"."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

NOT_APPLICABLE = "N/A"

LOWEST_SCORE, HIGHEST_SCORE = 1.0, 5.0

MAX_REPLY_CHARS = 20_000
"""Characters at a reply's end that are looked at."""

MAX_BLOCKS = 50
"""Parts in braces that are looked at."""

SkillScores = dict[str, float | str | None]
"""By skill: its score, `NOT_APPLICABLE`, or `None` where none can be read."""

SCORE_PATTERN = (
    r"[\s*_\"'`]{0,6}(?:score\b[\s*_\"'`]{0,6})?[:=][\s*_\"'`]{0,6}"
    # {"Completeness": {"score": 4, ...}}
    r"(?:\{\s{0,9}[\"'](?:score|rating)[\"']\s{0,3}:\s{0,3}[\"']?)?"
    r"(?P<value>-?\d{1,4}(?:[.,]\d{1,2})?(?![\w%]|[.,]\d)|n\s?/?\s?a\b|not applicable|null|none)"
    r"(?:\s{0,3}(?:/|out of)\s{0,3}(?P<scale>\d{1,4}))?"
)


def parse_skill_scores(reply: str, skills: Sequence[str]) -> SkillScores:
    """The score of each of these skills, from 1 to 5.

    The last part in braces that names one of the skills decides, be it JSON, Python or less than
    that; where there is none, all that is written as "Skill: 4". Case, underscores and quotes do
    not matter, and one word of a skill's name is enough where no other skill has it. A skill that
    is given two different scores, or one off the scale, has none.
    """
    text = unicodedata.normalize("NFKC", reply[-MAX_REPLY_CHARS:]).casefold()
    forms = {skill: _skill_pattern(skill, skills) for skill in skills}
    for block in _iter_blocks(text):
        if any(form.search(block) for form in forms.values()):
            text = block
            break
    return {skill: _unique_score(list(form.finditer(text))) for skill, form in forms.items()}


def _skill_pattern(skill: str, skills: Sequence[str]) -> re.Pattern[str]:
    """A skill's name, whole or one word that is its alone, with a score behind it."""
    words = _split_words(skill)
    others = {word for other in skills if other != skill for word in _split_words(other)}
    whole = r"[\s_\-]{0,3}".join(map(re.escape, words))
    names = [whole, *(re.escape(word) for word in words if word not in others)]
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(names)}){SCORE_PATTERN}")


def _split_words(skill: str) -> list[str]:
    return re.findall(r"[^\W_]+", skill.casefold())


def _iter_blocks(text: str) -> Iterator[str]:
    """The parts in braces, the last to open first; one that never closes goes to the end."""
    opened, closed = [], {}
    for match in re.finditer("[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closed[opened.pop()] = match.end()
    for begin in sorted([*opened, *closed], reverse=True)[:MAX_BLOCKS]:
        yield text[begin : closed.get(begin, len(text))]


def _unique_score(found: Sequence[re.Match[str]]) -> float | str | None:
    values = {_parse_score(match) for match in found}
    return values.pop() if len(values) == 1 else None


def _parse_score(match: re.Match[str]) -> float | str | None:
    if not match["value"].lstrip("-")[0].isdigit():
        return NOT_APPLICABLE
    value = float(match["value"].replace(",", "."))
    fits = LOWEST_SCORE <= value <= HIGHEST_SCORE and match["scale"] in (None, "5")
    return value if fits else None
