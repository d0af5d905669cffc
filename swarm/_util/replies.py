"""Parsing of models' replies: reasoning, tags, JSON, ratings, picks and rankings.

The form that the prompt asks for is read first: text between tags, JSON, or double brackets. Only
the reply is parsed, never the judged text, and reasoning between tags is no verdict. Contradictory
verdicts count as none; if several bracketed ones differ (a judge may repeat an instruction of the
answer), a line that contains nothing but a verdict decides.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CHARS = 10_000
"""Number of characters at the end of a reply that are parsed; a verdict stands last."""

THOUGHT_TAG_NAMES = r"think|thinking|thoughts?|thought_process|thinking_process|scratchpad"

OPENING_TAG = re.compile(rf"^[ \t]*<({THOUGHT_TAG_NAMES})>", re.IGNORECASE | re.MULTILINE)
"""Reasoning starts at the beginning of a line; elsewhere such a tag is part of the text."""

ORPHAN_TAG = re.compile(
    r"^[ \t]*</(?:think|thinking)>|</(?:think|thinking)>[ \t]*$", re.IGNORECASE | re.MULTILINE
)
"""End of reasoning that began before the text."""

MAX_BLOCKS = 100
"""Maximum number of tagged or JSON parts; each search for an end takes linear time."""


def thoughts_of(text: str) -> str:
    """Return the text removed by `strip_thoughts`, without the tags."""
    said = strip_thoughts(text)
    rest = text.replace(said, "", 1) if said else text
    return re.sub(rf"</?(?:{THOUGHT_TAG_NAMES})>", "", rest, flags=re.IGNORECASE).strip()


def strip_thoughts(text: str) -> str:
    """Remove reasoning between tags.

    Reasoning without an end extends to the end of the text; an end without a beginning belongs to
    reasoning that began before the text, as with some chat templates.
    """
    kept: list[str] = []
    place = 0
    while len(kept) < MAX_BLOCKS and (opening := OPENING_TAG.search(text, place)):
        kept.append(text[place : opening.start()])
        place = _find_thought_end(text, opening.end(), opening[1])
    rest = "".join([*kept, text[place:]])
    closing = None if kept else ORPHAN_TAG.search(rest)
    return rest[closing.end() if closing else 0 :].strip()


def _find_thought_end(text: str, place: int, name: str) -> int:
    """Return the end of reasoning that began before `place`; tags may be nested."""
    depth = 1
    for tag in re.finditer(rf"<(/?){name}>", text[place:], re.IGNORECASE):
        depth += -1 if tag[1] else 1
        if not depth:
            return place + tag.end()
    closing = re.search(rf"</{name}>", text[place:], re.IGNORECASE)
    return place + closing.end() if closing else len(text)


def parse_tags(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the text between the tags of each of these names; the last one with content.

    A tag begins a line or follows another tag; within a sentence it is only mentioned. Tags inside
    another part belong to its text. A part without an end extends to the next tag, unless it starts
    again, as a draft does.
    """
    any_name = "|".join(names)
    opening = re.compile(rf"(?:^|(?<=>))[ \t]*<({any_name})\s*>", re.IGNORECASE | re.MULTILINE)
    found: dict[str, str] = {}
    place = 0
    for _ in range(MAX_BLOCKS):
        if not (tag := opening.search(text, place)):
            break
        name, begin = tag[1].lower(), tag.end()
        again = re.compile(rf"(?:^|(?<=>))[ \t]*<{name}\s*>", re.IGNORECASE | re.MULTILINE)
        # An end within a sentence is only mentioned, if there is one that ends a line or a part.
        ends = (rf"</{name}\s*>(?=[ \t`*.]*(?:$|<))", rf"</{name}\s*>")
        tries = (re.compile(one, re.IGNORECASE | re.MULTILINE).search(text, begin) for one in ends)
        end = next(filter(None, tries), None)
        restart = again.search(text, begin)
        if end and not (restart and restart.start() < end.start()):
            content, place = text[begin : end.start()], end.end()
            # A draft that ended within a sentence, after which it starts again.
            content = re.split(rf"(?is)</{name}\s*>.*<{name}\s*>", content)[-1]
        else:
            following = re.compile(rf"<(?:{any_name})\s*>", re.IGNORECASE).search(text, begin)
            place = following.start() if following else len(text)
            content = text[begin:place]
        if re.search(r"\w", content) or name not in found:
            found[name] = content.strip()
    return found


def parse_json_object(text: str, accept: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return the last JSON object in a text that is accepted, with lower-case keys; else {}."""
    decoder = json.JSONDecoder(strict=False)
    place = len(text)
    for _ in range(MAX_BLOCKS):
        if (place := text.rfind("{", 0, place)) < 0:
            break
        try:
            value, _end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        named = {re.sub(r"[ -]", "_", key.strip().lower()): one for key, one in value.items()}
        if accept(named):
            return named
    return {}


RATING_DIGITS = r"\d{1,4}(?:[.,]\d{1,2})?(?![^\W_]|[.,]\d|\s*%)"
RATING_NUMBER = rf"(?<![^\W_])(?<![.,/\-⁄]){RATING_DIGITS}"
RATING_VALUE = (
    rf"(?P<value>{RATING_NUMBER})"
    # A range, such as 7-8, is no rating.
    rf"(?:\s*(?:[-–—]|to|or)\s*(?P<other>{RATING_DIGITS}))?"
    r"(?P<part>[\s*_(]{0,4}(?:/|out\s{1,3}of|of)[\s*_]{0,4}(?P<scale>\d{1,4})(?:[.,]0{1,2})?"
    r"(?!\d|[.,]\d))?"
    # Nor is 8/10/2024.
    r"(?!\s*/)"
)
TEN = r"10(?:[.,]0{1,2})?(?![^\W_]|[.,]\d|\s*[/%])"
SCALE = re.compile(
    # After a number, "out of 10" is a part of the rating instead of a separate scale.
    rf"(?P<rated>\d[\s*_(]{{0,4}})?(?:/|\bout\s{{1,3}}of\b|\(of\b)[\s*_]{{0,4}}{TEN}"
    rf"|\b(?:max(?:imum)?|scale)\b\W{{0,3}}(?:\b(?:of|is)\b\s{{1,3}})?{TEN}"
    rf"|(?:\bfrom\s{{1,3}})?(?<![\d.,/])[01]\s{{0,3}}(?:[-–—]|to)\s{{0,3}}{TEN}"
    r"|(?<![\w.,/\-])(?:0|1|10)\s{0,3}(?:=|(?:is|being|means)\b)",
    re.IGNORECASE,
)
"""The scale itself, "(1-10)", "(out of 10)" or "(10 = best)", repeated by the judge."""

MARKED_RATING = re.compile(
    r"\b(?:rating|score|grade)\b[\W_]{0,12}(?:\b(?:is|of|as|would be)\b[\W_]{0,12})?"
    + RATING_VALUE,
    re.IGNORECASE,
)
PLAIN_RATING = re.compile(RATING_VALUE, re.IGNORECASE)
LONE_RATING = re.compile(rf"[\W_]*{RATING_VALUE}[\W_]*\Z", re.IGNORECASE)


def parse_rating(reply: str) -> float | None:
    """Return the rating, 1 to 10; `None` if there is none, several, or one out of range.

    The clearest form in the reply decides: after the word rating, score or grade; "8/10" and "8 out
    of 10"; a first line that is a number. The scale, "(1-10)" or "(out of 10)", is no rating.

    Ratings in that form have to agree: "7-8/10" and "8/10, no, 7/10" are none, and so are "4/5" and
    "85/100", which are on another scale than requested.
    """
    text = SCALE.sub(lambda match: match[0] if match["rated"] else " ", _normalized(reply))
    lone = LONE_RATING.match(text.strip().split("\n", 1)[0])
    for found in (
        list(MARKED_RATING.finditer(text)),
        [match for match in PLAIN_RATING.finditer(text) if match["part"]],
        [lone] if lone else [],
    ):
        if found:
            values = {
                None
                if match["other"] or match["scale"] not in (None, "10")
                else _within(match["value"], 10)
                for match in found
            }
            return values.pop() if len(values) == 1 else None
    return None


def _within(value: str, highest: float) -> float | None:
    """Return the number, with a decimal point or comma, if it is from 1 to `highest`."""
    number = float(value.replace(",", "."))
    return number if 1 <= number <= highest else None


NOT_APPLICABLE = "N/A"

SkillScores = dict[str, float | str | None]
"""Score by skill, `NOT_APPLICABLE`, or `None` if unparsed."""

SKILL_SCORE = (
    r"[\s*_\"'`]{0,6}(?:score\b[\s*_\"'`]{0,6})?[:=][\s*_\"'`]{0,6}"
    # {"Completeness": {"score": 4, ...}}
    r"(?:\{\s{0,9}[\"'](?:score|rating)[\"']\s{0,3}:\s{0,3}[\"']?)?"
    r"(?P<value>-?\d{1,4}(?:[.,]\d{1,2})?(?![\w%]|[.,]\d)|n\s?/?\s?a\b|not applicable|null|none)"
    r"(?:\s{0,3}(?:/|out of)\s{0,3}(?P<scale>\d{1,4}))?"
)


def parse_skill_scores(reply: str, skills: Sequence[str]) -> SkillScores:
    """Parse the score of each of these skills, from 1 to 5.

    The last brace-delimited part that names a skill decides, whether JSON, Python or malformed;
    without one, text of the form "Skill: 4". Case, underscores and quotes are ignored. A skill with
    two different scores, or one out of range, has none.
    """
    text = _normalized(reply).casefold()
    forms = {}
    for skill in skills:
        words = "[ _-]{0,3}".join(re.findall(r"[^\W_]+", skill.casefold()))
        forms[skill] = re.compile(rf"(?<![^\W_]){words}{SKILL_SCORE}")
    for block in _iter_blocks(text):
        if any(form.search(block) for form in forms.values()):
            text = block
            break
    scores: SkillScores = {}
    for skill, form in forms.items():
        values: set[float | str | None] = set()
        for match in form.finditer(text):
            if not match["value"].lstrip("-")[0].isdigit():
                values.add(NOT_APPLICABLE)
            elif match["scale"] in (None, "5"):
                values.add(_within(match["value"], 5))
            else:
                values.add(None)
        scores[skill] = values.pop() if len(values) == 1 else None
    return scores


def _iter_blocks(text: str) -> Iterator[str]:
    """Yield the brace-delimited parts, last first; an unclosed one extends to the end."""
    opened, closed = [], {}
    for match in re.finditer("[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closed[opened.pop()] = match.end()
    # The outer of two nested parts comes last, and has the names of both.
    for begin in sorted([*opened, *closed], reverse=True)[:MAX_BLOCKS]:
        yield text[begin : closed.get(begin, len(text))]


DOUBLE_BRACKETS = re.compile(r"\[\[([^\[\]\n]{1,40})\]\]")
SINGLE_BRACKETS = re.compile(r"(?<!\[)\[([^\[\]\n]{1,40})\](?![\](])")
CUT_OFF = re.compile(r"\[[^\[\]]{0,20}\Z")
"""Truncated end of a reply: "[[1" may have been a 10."""

LABEL_PATTERN = re.compile(
    r"[\W_]*(?:(?:my|the|final|overall|rating|score|grade|verdict|answer|is)\b[\W_]*)*(?:/\s*10)?[\W_]*"
)
"""Text allowed beside the verdict on a line that contains nothing else."""

GRADE_MARK = re.compile(
    r"[^\w\-]*(?:(?:rating|score|grade)[^\w\-]{1,3})?"
    r"(?P<value>\d{1,4}(?:[.,]\d{1,2})?)(?:\s*/\s*10)?\W*"
)
PICK_MARK = re.compile(
    r"\W*(?:(?:assistant|answer|model|response|verdict)[\W_]{1,3})?(?P<pick>[abc]|tie)\W*"
)
NAMED_PICK = re.compile(
    r"\b(?:verdict|winner|choice|better(?: answer)?)\b\W{0,3}(?:is\b)?\W{0,5}"
    r"(?:(?:assistant|answer|model)\s)?\W{0,3}\b(?P<pick>[abc]|(?:a )?tie)\b"
    r"(?=[\s*_\"')\]]*(?:\Z|[.,;:!?\n]))"
)


def parse_grade(reply: str) -> float | None:
    """Parse a grade from 1 to 10, possibly fractional; `None` if missing or contradictory.

    Accepts "[[7]]", "[[7.5]]", "[[7/10]]" and "[[rating: 7]]"; without double brackets what
    `parse_rating` accepts. Rejects "The answer is 7", which may be the judge's answer to the
    question, and values on another scale, "[[0]]" and "[[85]]".
    """
    text = _normalized(reply)
    if verdict := _decide_marks(text, DOUBLE_BRACKETS, _read_grade):
        return verdict[0] or None
    return None if CUT_OFF.search(text) else parse_rating(text)


def parse_letter_pick(reply: str) -> str | None:
    """Parse the better answer: "A", "B" or "tie"; `None` if missing or contradictory.

    Accepts "[[A]]", "[[B]]" and "[[C]]" (neither), "[[tie]]" and "[[Answer A]]", the same in single
    brackets, "Verdict: A", and a reply that consists of the letter.
    """
    text = _normalized(reply).casefold()
    for form in (DOUBLE_BRACKETS, SINGLE_BRACKETS):
        if verdict := _decide_marks(text, form, _read_pick):
            return verdict[0]
    if whole := _read_pick(text):
        return whole
    said = {_normalize_pick(match["pick"]) for match in NAMED_PICK.finditer(text)}
    return said.pop() if len(said) == 1 else None


def _normalized(reply: str) -> str:
    return unicodedata.normalize("NFKC", strip_thoughts(reply)[-MAX_CHARS:])


def _decide_marks(
    text: str, form: re.Pattern[str], read: Callable[[str], T | None]
) -> tuple[()] | tuple[T | None]:
    """Return the verdict in brackets, ignoring other bracketed text; empty if there is none.

    The verdict is `None` if several ones differ and no line that contains nothing else decides.
    """

    def verdicts(part: str) -> set[T]:
        found = (read(match[1]) for match in form.finditer(part))
        return {one for one in found if one is not None}

    marks = verdicts(text)
    if not marks:
        return ()
    if len(marks) > 1:
        lines = (line for line in text.splitlines() if form.search(line))
        alone = [line for line in lines if LABEL_PATTERN.fullmatch(form.sub(" ", line).casefold())]
        marks = verdicts("\n".join(alone))
    return (marks.pop() if len(marks) == 1 else None,)


def _read_grade(mark: str) -> float | None:
    """Parse bracketed text as a grade; 0.0 for a number out of range."""
    match = GRADE_MARK.fullmatch(mark.casefold())
    return (_within(match["value"], 10) or 0.0) if match else None


def _read_pick(mark: str) -> str | None:
    match = PICK_MARK.fullmatch(mark)
    return _normalize_pick(match["pick"]) if match else None


def _normalize_pick(word: str) -> str:
    return "tie" if word in ("c", "tie", "a tie") else word.upper()


LEADING_NUMBER = re.compile(
    r"[\W_]*(?:(?:answer|number)[\W_]*)?(\d{1,9})(?=[\W_])(?![.,]\d)", re.IGNORECASE
)
"""Number at the beginning of a ranker's reply, once complete."""

STANDALONE_NUMBER = r"(?<![\w.,])\d{1,9}(?![.,]?\w)"
"""A number that is not part of a word or of another number."""

NAMED_NUMBER = re.compile(
    r"\b(?:answer|number|response|option|candidate|choice|choose|pick|prefer|select|best|it is)"
    rf"(?: is)?[\W_]{{1,9}}({STANDALONE_NUMBER})",
    re.IGNORECASE,
)
"""A number explicitly referred to as an answer."""


def parse_number_pick(text: str, count: int) -> int | None:
    """Parse a ranker's reply: an answer from 1 to `count`, or `None` if unclear.

    It is the number at the beginning of the reply, or else the only valid number, provided that it
    is explicitly referred to as an answer: other text contains numbers, too.
    """
    if begins := LEADING_NUMBER.match(f"{text} "):
        return int(begins[1]) if 1 <= int(begins[1]) <= count else None
    possible = {n for n in map(int, re.findall(STANDALONE_NUMBER, text)) if 1 <= n <= count}
    named = set(map(int, NAMED_NUMBER.findall(text)))
    return possible.pop() if len(possible) == 1 and possible <= named else None


def has_number_pick(text: str) -> bool:
    """Return whether a ranker's reply begins with a number; see `Request.stop_check`."""
    return LEADING_NUMBER.match(text) is not None


def parse_ranking(reply: str, labels: Sequence[int]) -> list[int] | None:
    """Parse the order in which a reply ranks the answers with these labels, best first.

    Accepts 3 > 1 > 2, a list on one line, and one answer per line, with or without its place; the
    last order counts. Missing labels are appended in their order.
    """
    rows = [row for row in strip_thoughts(reply)[-MAX_CHARS:].split("\n") if re.search(r"\d", row)]
    found: list[int] = []
    for row in reversed(rows):
        numbers = re.findall(r"\d+", row)
        if len(numbers) == len(labels) > 1 or (len(numbers) > 1 and ">" in row):
            found = _valid_labels(numbers, labels)
        if found:
            break
    else:
        # A place may precede the answer: "1. Answer 3", or an original rank tag.
        last = [re.findall(r"\d+", row)[:2][-1] for row in rows[-len(labels) :]]
        found = _valid_labels(last, labels) if len(last) == len(labels) else []
    return [*found, *(label for label in labels if label not in found)] if found else None


def _valid_labels(numbers: Sequence[str], labels: Sequence[int]) -> list[int]:
    """Return the numbers if they are distinct labels."""
    found = [int(number) for number in numbers if len(number) < 10]
    clear = len(set(found)) == len(numbers) and set(found) <= set(labels)
    return found if clear else []
