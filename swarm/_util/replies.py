"""Parsing of judges' replies: reasoning, ratings, grades, scores by skill, picks and rankings.

Only the reply is parsed, never the judged text, and reasoning between tags is no verdict.
Contradictory verdicts count as none: the requested form, in double brackets, takes precedence; if
several bracketed verdicts differ (a judge may repeat an instruction of the answer), a line that
contains nothing but a verdict decides.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

THOUGHT_TAG_NAMES = r"think|thinking|thoughts?|thought_process|thinking_process|scratchpad"

OPENING_TAG = re.compile(rf"^[ \t]*<({THOUGHT_TAG_NAMES})>", re.IGNORECASE | re.MULTILINE)
"""Reasoning starts at the beginning of a line; elsewhere such a tag is part of the text."""

ORPHAN_TAG = re.compile(
    r"^[ \t]*</(?:think|thinking)>|</(?:think|thinking)>[ \t]*$", re.IGNORECASE | re.MULTILINE
)
"""End of reasoning that began before the text."""

MAX_THOUGHTS = 100
"""Maximum number of reasoning blocks; each search for an end takes linear time."""


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
    while len(kept) < MAX_THOUGHTS and (opening := OPENING_TAG.search(text, place)):
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


MAX_PARSED_CHARACTERS = 10_000
"""Characters of a reply that are parsed."""

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
RATING_END = (
    r"(?=[\s*_`\"')\]}]{0,8}(?:\Z|[.,;:!?\n–—])"
    r"|\s{1,3}(?:because|for|as|since|overall|but|though)\b)"
)
"""Text after a number that counts nothing, as it would in "3 examples"."""

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

LIST_MARK = re.compile(r"^\s{0,8}\d{1,2}[.)]\s{1,8}(?=\S)", re.MULTILINE)

MARKED_RATING = re.compile(
    r"\b(?:rating|score|grade)\b[\W_]{0,12}(?:\b(?:is|of|as|would be)\b[\W_]{0,12})?"
    + RATING_VALUE,
    re.IGNORECASE,
)
GIVEN_RATING = re.compile(
    r"\b(?:give|giving|rate|score|scoring|assign|award|deserves?|earns?)\b[^.!?\d\n]{0,40}"
    rf"{RATING_VALUE}{RATING_END}",
    re.IGNORECASE,
)
PLAIN_RATING = re.compile(rf"{RATING_VALUE}(?P<end>{RATING_END})?", re.IGNORECASE)
LONE_RATING = re.compile(rf"[\W_]*{RATING_VALUE}[\W_]*\Z", re.IGNORECASE)


def parse_rating(reply: str, clear: bool = False) -> float | None:
    """Return the rating, 1 to 10; `None` if there is none, several, or one out of range.

    The clearest form in the reply decides: after the word rating or score; "8/10" and "8 out of
    10"; a first line that is a number; "I'd give it an 8"; the reply's only number, but neither of
    the last two if it counts something, as in "3 examples". The scale, "(1-10)" or "(out of 10)",
    is no rating.

    Ratings in that form have to agree: "7-8/10" and "8/10, no, 7/10" are none, and so are "4/5" and
    "85/100", which are on another scale than requested.

    Args:
        reply: The judge's reply.
        clear: Only the first three forms count, which do not occur by chance in a text on numbers.
    """
    text = unicodedata.normalize("NFKC", strip_thoughts(reply)[:MAX_PARSED_CHARACTERS])
    text = SCALE.sub(lambda match: match[0] if match["rated"] else " ", text)
    for found in islice(_find_ratings(text), 3 if clear else None):
        if found:
            values = {_rating_value(match) for match in found}
            return values.pop() if len(values) == 1 else None
    return None


def _find_ratings(text: str) -> Iterator[list[re.Match[str]]]:
    """Yield the matches of each form, the clearest form first."""
    yield list(MARKED_RATING.finditer(text))
    yield [match for match in PLAIN_RATING.finditer(text) if match["part"]]
    first = text.strip().split("\n", 1)[0]
    yield [match] if (match := LONE_RATING.match(first)) else []
    yield list(GIVEN_RATING.finditer(text))
    only = list(PLAIN_RATING.finditer(LIST_MARK.sub("", text)))
    yield only if all(match["end"] is not None for match in only) else []


def _rating_value(match: re.Match[str]) -> float | None:
    """Return the rating of one match, if it is one."""
    if match["other"] or match["scale"] not in (None, "10"):
        return None
    value = float(match["value"].replace(",", "."))
    return value if 1 <= value <= 10 else None


NOT_APPLICABLE = "N/A"

LOWEST_SCORE, HIGHEST_SCORE = 1.0, 5.0

MAX_REPLY_CHARS = 20_000
"""Number of characters at the end of a reply to parse."""

MAX_BLOCKS = 50
"""Maximum number of brace-delimited parts to parse."""

SkillScores = dict[str, float | str | None]
"""Score by skill, `NOT_APPLICABLE`, or `None` if unparsed."""

SCORE_PATTERN = (
    r"[\s*_\"'`]{0,6}(?:score\b[\s*_\"'`]{0,6})?[:=][\s*_\"'`]{0,6}"
    # {"Completeness": {"score": 4, ...}}
    r"(?:\{\s{0,9}[\"'](?:score|rating)[\"']\s{0,3}:\s{0,3}[\"']?)?"
    r"(?P<value>-?\d{1,4}(?:[.,]\d{1,2})?(?![\w%]|[.,]\d)|n\s?/?\s?a\b|not applicable|null|none)"
    r"(?:\s{0,3}(?:/|out of)\s{0,3}(?P<scale>\d{1,4}))?"
)


def parse_skill_scores(reply: str, skills: Sequence[str]) -> SkillScores:
    """Parse the score of each of these skills, from 1 to 5.

    The last brace-delimited part that names a skill decides, whether JSON, Python or malformed;
    without one, text of the form "Skill: 4". Case, underscores and quotes are ignored, and a single
    word of a skill's name suffices if no other skill contains it. A skill with two different
    scores, or one out of range, has none.
    """
    text = _reply_end(reply).casefold()
    forms = {skill: _skill_pattern(skill, skills) for skill in skills}
    for block in _iter_blocks(text):
        if any(form.search(block) for form in forms.values()):
            text = block
            break
    return {skill: _unique_score(list(form.finditer(text))) for skill, form in forms.items()}


def _skill_pattern(skill: str, skills: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of a skill's name, or of a word unique to it, followed by a score."""
    words = _split_words(skill)
    others = {word for other in skills if other != skill for word in _split_words(other)}
    whole = r"[\s_\-]{0,3}".join(map(re.escape, words))
    names = [whole, *(re.escape(word) for word in words if word not in others)]
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(names)}){SCORE_PATTERN}")


def _split_words(skill: str) -> list[str]:
    return re.findall(r"[^\W_]+", skill.casefold())


def _iter_blocks(text: str) -> Iterator[str]:
    """Yield the brace-delimited parts, last first; an unclosed one extends to the end."""
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


T = TypeVar("T")


DOUBLE_BRACKETS = re.compile(r"\[\[([^\[\]\n]{1,40})\]\]")
SINGLE_BRACKETS = re.compile(r"(?<!\[)\[([^\[\]\n]{1,40})\](?![\](])")
CUT_OFF = re.compile(r"\[[^\[\]]{0,20}\Z")
"""Truncated end of a reply: "[[1" may have been a 10."""

LABEL_PATTERN = re.compile(
    r"[\W_]*(?:(?:my|the|final|overall|rating|score|grade|verdict|answer|is)\b[\W_]*)*(?:/\s*10)?[\W_]*"
)
"""Text allowed beside the verdict on a line that contains nothing else."""

GRADE_PATTERN = re.compile(
    r"[^\w\-]*(?:(?:rating|score|grade)[^\w\-]{1,3})?"
    r"(?P<value>\d{1,4}(?:[.,]\d{1,2})?)(?:\s*/\s*10)?\W*"
)
PICK_PATTERN = re.compile(
    r"\W*(?:(?:assistant|answer|model|response|verdict)[\W_]{1,3})?(?P<pick>[abc]|tie)\W*"
)
PLAIN_PICK_PATTERN = re.compile(
    r"\b(?:verdict|winner|choice|decision|better(?: answer| one)?)\b\W{0,3}(?:is\b)?\W{0,5}"
    r"(?:(?:assistant|answer|model)\s)?\W{0,3}\b(?P<pick>[abc]|(?:a )?tie)\b"
    r"(?=[\s*_\"')\]]*(?:\Z|[.,;:!?\n]))"
)
WHOLE_PICK_PATTERN = re.compile(r"\W*(?:(?:assistant|answer|model)\s)?(?P<pick>[abc]|tie)\W*")


def parse_grade(reply: str) -> float | None:
    """Parse a grade from 1 to 10, possibly fractional; `None` if missing or contradictory.

    Accepts "[[7]]", "[[7.5]]", "[[7/10]]" and "[[rating: 7]]"; without double brackets also what
    `parse_rating` accepts as clear: "Rating: 7/10", "[7]", "7 out of 10". Rejects "The
    answer is 7", which may be the judge's answer to the question, and values on another scale,
    "[[0]]" and "[[85]]".
    """
    text = _reply_end(reply)
    marks = _find_marks(text, DOUBLE_BRACKETS, _parse_grade_mark)
    if marks:
        return _decide_mark(marks, text, DOUBLE_BRACKETS, _parse_grade_mark)
    return None if CUT_OFF.search(text) else parse_rating(text, clear=True)


def parse_letter_pick(reply: str) -> str | None:
    """Parse the better answer: "A", "B" or "tie"; `None` if missing or contradictory.

    Accepts "[[A]]", "[[B]]" and "[[C]]" (neither), "[[tie]]" and "[[Answer A]]", the same in single
    brackets, "Verdict: A", and a reply that consists of the letter.
    """
    text = _reply_end(reply).casefold()
    for form in (DOUBLE_BRACKETS, SINGLE_BRACKETS):
        if marks := _find_marks(text, form, _parse_pick_mark):
            return _decide_mark(marks, text, form, _parse_pick_mark)
    if whole := WHOLE_PICK_PATTERN.fullmatch(text):
        return _normalize_pick(whole["pick"])
    said = {_normalize_pick(match["pick"]) for match in PLAIN_PICK_PATTERN.finditer(text)}
    return said.pop() if len(said) == 1 else None


def _reply_end(reply: str) -> str:
    return unicodedata.normalize("NFKC", strip_thoughts(reply)[-MAX_REPLY_CHARS:])


def _find_marks(text: str, form: re.Pattern[str], read: Callable[[str], T | None]) -> set[T]:
    """Return the verdicts in brackets, ignoring other bracketed text."""
    found = (read(match[1]) for match in form.finditer(text))
    return {verdict for verdict in found if verdict is not None}


def _decide_mark(
    marks: set[T], text: str, form: re.Pattern[str], read: Callable[[str], T | None]
) -> T | None:
    if len(marks) > 1:
        lines = (line for line in text.splitlines() if form.search(line))
        alone = [line for line in lines if LABEL_PATTERN.fullmatch(form.sub(" ", line).casefold())]
        marks = _find_marks("\n".join(alone), form, read)
    verdict = marks.pop() if len(marks) == 1 else None
    return verdict if verdict != 0 else None


def _parse_grade_mark(mark: str) -> float | None:
    """Parse bracketed text as a grade; 0.0 for a number out of range."""
    if not (match := GRADE_PATTERN.fullmatch(mark.casefold())):
        return None
    value = float(match["value"].replace(",", "."))
    return value if 1 <= value <= 10 else 0.0


def _parse_pick_mark(mark: str) -> str | None:
    match = PICK_PATTERN.fullmatch(mark)
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
    begins = LEADING_NUMBER.match(f"{text} ")
    found = [begins[1]] if begins else re.findall(STANDALONE_NUMBER, text)
    possible = {number for number in map(int, found) if 1 <= number <= count}
    if not begins:
        named = {int(number) for number in NAMED_NUMBER.findall(text)}
        possible = possible if possible <= named else set()
    return possible.pop() if len(possible) == 1 else None


def has_number_pick(text: str) -> bool:
    """Return whether a ranker's reply begins with a number; see `Request.stop_check`."""
    return LEADING_NUMBER.match(text) is not None


RANK_TAG = re.compile(
    r"<rank\s+position\s*=\s*['\"]?(\d{1,9})['\"]?\s*>[^\d<]*(\d+)", re.IGNORECASE
)


def parse_ranking(reply: str, labels: Sequence[int]) -> list[int] | None:
    """Parse the order in which a reply ranks the answers with these labels, best first.

    Accepts 3 > 1 > 2, a list, one number per line, "Answer 3, Answer 1", and rank tags; the last of
    several orders counts. Missing labels are appended in their order.
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
    # One line each: a list position may precede the answer's number.
    last = []
    for row in rows:
        listed = re.match(r"\W*\d+\s*[.):]\D*?(\d+)", row)
        named = re.search(r"(?:answer|response)\W*(\d+)", row, re.IGNORECASE)
        plain = re.fullmatch(r"\W*(\d+)\W*", row)
        if match := listed or plain or named:
            last.append(match[1])
    return _valid_labels(last[-len(labels) :], labels) if len(last) >= len(labels) else []


def _valid_labels(numbers: Sequence[str], labels: Sequence[int]) -> list[int]:
    """Return the numbers if they are distinct labels."""
    found = [int(number) for number in numbers if len(number) < 10]
    clear = len(set(found)) == len(numbers) and set(found) <= set(labels)
    return found if clear else []
