"""Parse answers from free text: a yes or no, a number, a phrase or a choice's letter.

The gold answer's kind decides which is looked for. Each `extract_*` has an `is_*_final`: true if no
further text can change the parsed answer, so that a model may stop.

A choice's letter (`extract_letter`) is the first of these that is found:

1. a letter that opens the text: the prompt ends in "The answer is", so this is the answer;
2. a letter after "answer", "answer is", "correct option is", "boxed" and the like;
3. the only isolated letter, not counting the article A, the pronoun I and "not B";
4. the only choice whose words occur as complete words.

A letter counts in 1 and 2 if it is closed ("C.", "c)", "(B)", "**B**", the end) or, for capitals
other than A and I, if another word follows; never as one of several ("B or C", "BC"). Letters
inside a choice's own words ("Vitamin C") do not count.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

ANSWER_KINDS = {
    "yes": "yes or no",
    "no": "yes or no",
    "true": "true or false",
    "false": "true or false",
}

DIGIT_GAP = "[ \u00a0\u2009\u202f]"
NUMBER = re.compile(
    rf"""(?:(?<![\w)])[-−])?[$€£]?[-−]?     # a sign, unless it is a minus between two terms
    (?<![\w.])                             # not the tail of a name or of another number
    (?:(?<![0-9]/)(?<![0-9]\ )[0-9]{{1,9}}/(?!0+(?![0-9]))[0-9]{{1,9}}
         (?![0-9]|[/.,][0-9]|{DIGIT_GAP}?=)
                                           # 3/4, but no date, no 1 1/2, no division with result
    |(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])   # 1,234
      |(?<![0-9]{DIGIT_GAP})[1-9][0-9]{{0,2}}(?:{DIGIT_GAP}[0-9]{{3}})+(?!{DIGIT_GAP}?[0-9]) # 1 234
      |[0-9]+)?
    (?:(?<=[0-9])(?:\.[0-9]+)?|\.[0-9]+)   # 18, 18.50, .5
    (?:e[-+]?[0-9]{{1,2}}(?![0-9]))?)       # 6.02e23
    """,
    re.VERBOSE | re.IGNORECASE,
)
NUMBER_END = re.compile(
    rf"[^0-9.,/e{DIGIT_GAP[1:-1]}]|(?:[.,/]|{DIGIT_GAP})[^0-9]|e(?:[-+][^0-9]|[^-+0-9])", re.I
)
"""Text that ends a number: no digit, and no separator or exponent that a digit could follow."""

SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORD_VALUES = {word: value for value, word in enumerate(SMALL_WORDS)}
WORD_VALUES |= {word: 20 + 10 * i for i, word in enumerate(TENS_WORDS)} | {"a": 1}
DIGIT_WORDS = "|".join(SMALL_WORDS[1:10])
BELOW_100 = rf"(?:(?:{'|'.join(TENS_WORDS)})(?:[- ](?:{DIGIT_WORDS}))?|{'|'.join(SMALL_WORDS)})"
BELOW_1000 = rf"(?:(?:a|{DIGIT_WORDS})\ hundred(?:(?:\ and)?\ {BELOW_100})?|{BELOW_100})"
NUMBER_WORDS = re.compile(
    r"(?<!hundred )(?<!thousand )(?<!hundred and )(?<!thousand and )"
    rf"(?<![\w-]){BELOW_1000}(?:\ thousand(?:(?:\ and)?\ {BELOW_1000})?)?(?![\w-])"
    r"(?!\ (?:of|more|less|fewer|times|way|half|third|quarter|hundred|thousand|million|and\ an?|"
    r"and\ one)\b)",
    re.IGNORECASE,
)
"""A number below a million in words, such as "twenty-one", where it is a quantity."""

ANSWER_MARKS = r"""(?:
    \#\#\#\#[^0-9\n]{0,16}
    |\banswer\b[^0-9\n.]{0,24}(?:\bis\b|[:=])[^0-9\n]{0,16}
    |\bboxed\{[^0-9\n]{0,8}
    )\Z"""
LENGTH_MARKS = r"""(?:
    \b(?:length|distance)\b(?:[^\n.=:]{0,80}(?:\bis\b|[:=]))?(?:\s+of\b)?[^\w\n]{0,8}
    )\Z"""
LAST_ANSWER_MARK = re.compile(ANSWER_MARKS, re.VERBOSE | re.IGNORECASE)
FIRST_ANSWER_MARK = re.compile(
    rf"\A[\W_]*\Z|{ANSWER_MARKS}|{LENGTH_MARKS}", re.VERBOSE | re.IGNORECASE
)
MARK_WINDOW = 160
"""Characters before a number in which its mark is searched; longer than any mark."""

NEXT = re.compile(
    r"\n[ \t]*\W{0,3}(?:question|problem|exercise|example|q)\b[ \t]*\#?\d*[ \t]*[:.)]",
    re.IGNORECASE,
)
"""Start of a new question that a model writes after its answer."""
LABEL = re.compile(
    r"\b(?:question|problem|exercise|example|step|part|case|figure|table|equation|line|q)\b"
    r"[ ]*\#?\Z",
    re.IGNORECASE,
)
"""Label before the number of a thing, which is no quantity."""
LISTED = re.compile(r"[.)][ \t]*(?:[^\W\d]|\n|\Z)")
"""Text after the number of a list entry, at the beginning of a line."""
ORDINAL = re.compile(r"(?:st|nd|rd|th)\b", re.IGNORECASE)
PARENTHESES = re.compile(r"\([^()\n]*\)")
TIME_BEFORE = re.compile(r"\b(?:in|after|for|over|within|during|per|every|by)[ ]+\Z", re.IGNORECASE)
TIME_AFTER = re.compile(r"[ ]*(?:seconds?|minutes?|hours?|days?|weeks?|months?|years?)\b", re.I)
CLAUSE = re.compile(r"[.;,:!?](?=\s)|\n|\b(?:so|then|therefore|thus|hence|and)\b", re.IGNORECASE)
EQUAL = re.compile(
    r"=[ \t]*(?:about|approximately|roughly|only|exactly)?[^\w\n=]{0,8}\Z", re.IGNORECASE
)
CONCLUDES = re.compile(
    r"\b(?:so|thus|therefore|hence|finally|total|in all|altogether|overall|answer|result)\b", re.I
)
TERMS = re.compile(r"[ \t\d.,$€£%()+\-−–*/×÷^=]*")
"""Characters of an arithmetic expression."""
OPERATOR = re.compile(r"[ \t)%]*[-+−–*/×÷^][ \t(]*[$€£]?\d")

ANSWER_LEAD = re.compile(r"\A[\W_]*(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:|=)", re.IGNORECASE)


def answer_kind(gold: str) -> str:
    """Return the kind of answer: "yes or no", "true or false", "number" or "phrase"."""
    stripped = gold.strip()
    if stripped.lower() in ANSWER_KINDS:
        return ANSWER_KINDS[stripped.lower()]
    return "number" if is_number(stripped) else "phrase"


def is_number(text: str) -> bool:
    """Return whether a text is a number, in any spelling of `normalize_number`."""
    return bool(NUMBER.fullmatch(text) or NUMBER_WORDS.fullmatch(text))


def extract_answer(text: str, kind: str, take: str) -> str | None:
    """Return the answer in `text`, normalized to one spelling per value; `None` if there is none.

    - yes or no, true or false: the first of the two that occurs as a complete word.
    - number: the first one that is marked: after "####", "answer is", "answer:" or in a "boxed".
      With `take` "first" also one that opens the text or follows "length", "length is" or the like.
      Without a mark the first number, or with `take` "last" the one that is stated last (see
      `stated`); a marked expression yields its result then ("The answer is 48 + 24 = 72"). Spelt
      without separators, currency or needless zeros: "$1,234.50" and "1 234.5" are "1234.5", "2e3"
      is "2000", "3/4" is "0.75". Numbers in words ("twenty-one") are read where they are marked, or
      if the text has no other number; a "one" that is not marked only if it is all of the text.
    - phrase: the first line with a word, after "the answer is" if it begins so; lower case, single
      spaces, no punctuation.
    """
    if kind == "number":
        if marked := _find_marked_number(text, take):
            result = None if take == "first" else _result(text, marked)
            return normalize_number(result or marked.group())
        numbers = NUMBER.findall(text)
        if numbers:
            return stated(text) if take == "last" else normalize_number(numbers[0])
        words = NUMBER_WORDS.findall(text)
        if re.fullmatch(r"\W*one\W*", text, re.IGNORECASE) is None:
            words = [word for word in words if word.lower() != "one"]
        return normalize_number(words[-1 if take == "last" else 0]) if words else None
    if kind == "phrase":
        return next(filter(None, map(_normalize_phrase, text.split("\n"))), None)
    found = _word_pattern(kind).search(text)
    return found.group().capitalize() if found else None


def stated(text: str) -> str | None:
    """Return the number that reasoning without a marked answer states last, or `None`.

    - A further question written by the model ("\\nQuestion 2: ...") ends the text.
    - Numbers that label something are skipped: "Question 2", "Step 3", a list entry, "2nd". So are
      those in parentheses, and "in 2 months" after another number of its clause.
    - Of the rest, the result after the last "=" counts, or a later number in a sentence that
      concludes ("so", "in total" and the like). Without "=" it is the last number.

    If only numbers remain that would be skipped, the last of them counts.
    """
    if (cut := NEXT.search(text)) and NUMBER.search(text, 0, cut.start()):
        text = text[: cut.start()]
    outside = PARENTHESES.sub(lambda found: " " * len(found.group()), text)
    for shown in (outside, text):
        if numbers := [one for one in NUMBER.finditer(shown) if not _names(shown, one)]:
            break
    else:
        every = NUMBER.findall(text)
        return normalize_number(every[-1]) if every else None
    quantities = [one for one in numbers if not _aside(shown, one, numbers)] or numbers
    result = next(filter(None, (_equated(shown, one) for one in reversed(numbers))), None)
    if result is None:
        return normalize_number(quantities[-1].group())
    found, position = result
    for one in reversed(quantities):
        sentence = re.split(r"[.!?]\s|\n", shown[: one.start()])[-1]
        if one.start() > position and CONCLUDES.search(sentence):
            return normalize_number(one.group())
    return normalize_number(found)


def _equated(text: str, number: re.Match[str]) -> tuple[str, int] | None:
    """Return the result and its index if "=" precedes a number; that of "72 = 48 + 24" is 72."""
    before = EQUAL.search(text, 0, number.start())
    if before is None:
        return None
    if not OPERATOR.match(text, number.end()):
        return number.group(), number.start()
    before_numbers = list(NUMBER.finditer(text, 0, before.start()))
    if not before_numbers or text[before_numbers[-1].end() : before.start()].strip():
        return None
    return before_numbers[-1].group(), _terms_end(text, number)


def _names(text: str, number: re.Match[str]) -> bool:
    """Return whether a number labels something, as in "Question 2"."""
    before = text[max(0, number.start() - MARK_WINDOW) : number.start()]
    line = not before.rpartition("\n")[2].strip(" \t*-")
    listed = line and not text[: number.start()].endswith("-") and LISTED.match(text, number.end())
    return bool(LABEL.search(before) or listed or ORDINAL.match(text, number.end()))


def _aside(text: str, number: re.Match[str], numbers: list[re.Match[str]]) -> bool:
    """Return whether a number is the time in a clause that has another number before it."""
    start = number.start()
    if not (TIME_BEFORE.search(text, 0, start) and TIME_AFTER.match(text, number.end())):
        return False
    begin = max((one.end() for one in CLAUSE.finditer(text, 0, start)), default=0)
    return any(begin <= one.start() < start for one in numbers)


def _terms_end(text: str, number: re.Match[str]) -> int:
    """Return the end index of the expression that begins with a number."""
    found = TERMS.match(text, number.end())
    assert found is not None, "it matches an empty expression, too"
    return found.end()


def _result(text: str, number: re.Match[str]) -> str | None:
    """Return the result of the expression that begins with a number, if it has a "=" with one."""
    terms = text[number.start() : _terms_end(text, number)]
    if "=" not in terms:
        return None
    found = NUMBER.search(terms.rpartition("=")[2])
    return found.group() if found else None


def is_answer_final(kind: str, take: str, text: str) -> bool:
    """True if `extract_answer` is the same for `text` and for every text that begins with it."""
    if kind == "number":
        marked = _find_marked_number(text, take)
        if marked is not None and marked.re is NUMBER_WORDS:
            return bool(re.match(r"[^\w\s-]", text[marked.end() :]))
        if marked is None or not NUMBER_END.match(text, marked.end()):
            return False
        # Further text may turn the number into an expression, whose result counts.
        return take == "first" or _terms_end(text, marked) < len(text)
    if kind == "phrase":
        return any(map(_normalize_phrase, text.split("\n")[:-1]))
    found = _word_pattern(kind).search(text)
    return found is not None and found.end() < len(text)


def is_same_answer(answer: str, gold: str) -> bool:
    """Return whether a parsed answer, in any spelling, has the gold answer's value."""
    kind = answer_kind(gold)
    if kind == "number":
        stripped = answer.strip()
        return is_number(stripped) and normalize_number(stripped) == normalize_number(gold.strip())
    return _normalize_phrase(answer) == _normalize_phrase(gold)


def normalize_number(number: str) -> str:
    """Normalize a number: "$1,234.50" is "1234.5", "18.00" is "18", "-0" is "0", "6/8" is "0.75".

    A fraction without a finite decimal is reduced ("2/6" is "1/3").
    """
    if NUMBER_WORDS.fullmatch(number):
        return str(_value_of_words(number))
    digits = re.sub(rf"[$€£,]|{DIGIT_GAP}", "", number).replace("−", "-")
    sign = "-" if digits.startswith("-") else ""
    numerator, _, denominator = digits.lstrip("-").partition("/")
    value = Decimal(sign + numerator)
    if denominator:
        fraction = Fraction(value) / int(denominator)
        value = Decimal(fraction.numerator) / Decimal(fraction.denominator)
        if Fraction(value) != fraction:
            return str(fraction)
    if value == 0:
        return "0"
    spelt = format(value, "f")
    return spelt.rstrip("0").rstrip(".") if "." in spelt else spelt


def _value_of_words(number: str) -> int:
    """Return the value of a match of `NUMBER_WORDS`."""
    total = current = 0
    for word in re.split(r"[- ]", number.lower()):
        if word == "thousand":
            total, current = 1000 * current, 0
        elif word == "hundred":
            current *= 100
        elif word != "and":
            current += WORD_VALUES[word]
    return total + current


def extract_line(text: str, cased: bool = False) -> str | None:
    """Return the complete first nonblank line: single spaces, no final punctuation.

    `None` if all lines are blank. "The answer is 7" is not "7", and "1 2 3" not "1 2".

    Args:
        cased: Keep upper and lower case; false returns lower case.
    """
    return next(filter(None, (_normalize_line(line, cased) for line in text.split("\n"))), None)


def is_line_final(text: str) -> bool:
    """True if the first nonblank line of `text` is that of every text that begins with it."""
    return any(_normalize_line(line) for line in text.split("\n")[:-1])


def is_same_line(answer: str, gold: str, cased: bool = False) -> bool:
    """Return whether two lines differ in white space, final punctuation and case at most.

    Args:
        cased: Case counts, too.
    """
    return _normalize_line(answer, cased) == _normalize_line(gold, cased)


def extract_original(text: str, last_words: int | None) -> str | None:
    """Return the text, or its last words, in which the original searches the gold answer.

    Words are separated by single spaces, as in the original, for which "18" is in "118" too.
    """
    shown = text.strip()
    if last_words is not None:
        shown = " ".join(shown.split(" ")[-last_words:])
    return shown or None


def _find_marked_number(text: str, take: str) -> re.Match[str] | None:
    # A number's mark depends only on the text before it: further text cannot change the first one.
    marks = FIRST_ANSWER_MARK if take == "first" else LAST_ANSWER_MARK

    def is_marked(number: re.Match[str]) -> bool:
        start = number.start()
        # The "x" stands for text further before: a number after it does not open the text.
        cut = start >= MARK_WINDOW
        return bool(marks.search("x" * cut + text[start - MARK_WINDOW if cut else 0 : start]))

    each = (filter(is_marked, one.finditer(text)) for one in (NUMBER, NUMBER_WORDS))
    found = [number for numbers in each if (number := next(numbers, None))]
    return min(found, key=lambda number: number.start(), default=None)


def _normalize_phrase(line: str) -> str:
    rest = ANSWER_LEAD.sub("", line)
    return " ".join(re.findall(r"\w+", rest.casefold()))


def _normalize_line(line: str, cased: bool = False) -> str:
    return " ".join((line if cased else line.casefold()).split()).rstrip(".,;:!? ")


def _word_pattern(kind: str) -> re.Pattern[str]:
    either = kind.replace(" or ", "|")
    return re.compile(rf"(?<![\w-])(?:{either})(?![\w'’-])", re.IGNORECASE)


# Text that closes a letter. After "." no initial may follow ("C. S. Lewis" is read, "C.S." is not).
LETTER_CLOSER = r"""(?:[):;\]}>|*$<`\n"”!?]|\.(?!\w\.)|'(?!\w))"""
CERTAIN_LETTER_CLOSER = r"""(?:[):;\]}>|*$<`\n"”!?]|\.(?:\W|\w[^.])|'\W)"""
FILLER_WORDS = (
    r"(?i:is|be|are|was|to|of|for|the|this|that|question|would|should|must|will|can|only|option|"
    r"choice|letter|correct|answer|text|most|likely|best|probably|definitely|therefore|thus|given)"
)
LETTER_MARK = (
    r"(?i:\b(?:answer|boxed|correct\s+(?:option|choice|letter)))\b[\W_]*"
    rf"(?:{FILLER_WORDS}\b[\W_]*)*"
)
LETTER_OPENING = r"\A[\W_]*"
# Words that often begin a sentence without picking the choice of that name ("no opinion").
BARE_WORDS = {"yes", "no", "true", "false", "not", "none", "all", "both", "neither"}


class LetterPatterns(NamedTuple):
    """Regular expressions for one set of letters; group 1 is the letter."""

    opening: re.Pattern[str]
    marked: re.Pattern[str]
    certain_opening: re.Pattern[str]
    certain_mark: re.Pattern[str]
    alone: re.Pattern[str]
    any_letter: re.Pattern[str]


def extract_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """Return the key of the choice that `text` picks, or `None`; see the module for the rules."""
    patterns = _build_patterns("".join(choices))
    masked = _mask_choices(text, choices, patterns)
    if found := patterns.opening.match(masked) or patterns.marked.search(masked):
        return found.group(1).upper()
    alone = {next(filter(None, groups)).upper() for groups in patterns.alone.findall(masked)}
    if alone:
        return alone.pop() if len(alone) == 1 else None
    return _find_named_choice(text, choices)


def is_letter_final(choices: Mapping[str, str], text: str) -> bool:
    """True if `extract_letter` is the same for `text` and for every text that begins with it."""
    patterns = _build_patterns("".join(choices))
    if any(_contains_letter(words, patterns) for words in choices.values()):
        return False  # Further text may make the letter part of a choice's words.
    if patterns.opening.match(text):
        return patterns.certain_opening.match(text) is not None
    marked = patterns.marked.search(text)
    return marked is not None and bool(patterns.certain_mark.match(text, marked.start()))


def extract_letter_original(text: str, choices: Mapping[str, str]) -> str | None:
    """Apply the original's rule to find the choice that `text` picks.

    The first key in the first, else in the last five characters, else the first choice whose words
    are part of the text, without regard to word boundaries. Returns `None` where the original
    answers "Z", a letter that is always wrong.
    """
    shown = text.strip()
    letters = (key for part in (shown[:5], shown[-5:]) for key in choices if key in part)
    named = (key for key in choices if choices[key].lower() in shown.lower())
    return next(letters, None) or next(named, None)


def is_original_letter_final(choices: Mapping[str, str], text: str) -> bool:
    """True if `extract_letter_original` is the same for every text that begins with `text`."""
    shown = text.lstrip()
    return len(shown) >= 5 and any(key in shown[:5] for key in choices)


@lru_cache(maxsize=64)
def _build_patterns(letters: str) -> LetterPatterns:
    capitals, small = f"[{letters}]", f"[{letters.lower()}]"
    ending = _letter_ending(letters)
    certain = rf"([{letters}{letters.lower()}])(?={CERTAIN_LETTER_CLOSER})"
    article = r"A(?=\s+(?!(?:and|or|nor|is|because|since)\b)[a-zA-Z])"
    pronoun = r"I(?![)\]*])"
    free = rf"(?<![\w'’.-])(?<!not\s)(?<!n't\s)(?!{article}|{pronoun})({capitals})"
    free += rf"(?![\w'’+-])(?!\.\w\.)|\(({small})\)"
    return LetterPatterns(
        opening=re.compile(LETTER_OPENING + ending),
        marked=re.compile(LETTER_MARK + ending),
        certain_opening=re.compile(LETTER_OPENING + certain),
        certain_mark=re.compile(LETTER_MARK + certain),
        alone=re.compile(free),
        any_letter=re.compile(rf"(?<!\w)({capitals}(?!\w)|{small}(?={LETTER_CLOSER}))"),
    )


def _letter_ending(letters: str) -> str:
    """Return a pattern of an answer's letter, as group 1: closed, or followed by other words."""
    anywhere = f"[{letters}{letters.lower()}]"
    plain = "".join(sorted(set(letters) - {"A", "I"}))
    others = [f"[{plain}](?!['’\\w])"] if plain else []
    others += [r"A(?![\w'’]|\s+\w)"] if "A" in letters else []
    # Another letter joined to it: "B or C", "B, C", "B/C".
    joined = rf"\s*[,/&]?\s*(?:(?:and|or|nor)\s+)*[(\[]?(?:{'|'.join(others) or '(?!)'})"
    ways = [rf"{anywhere}(?={LETTER_CLOSER}|\s*\Z)"]
    ways += [rf"[{plain}](?=[\s,])(?!{joined})"] if plain else []
    reason = r"\s+(?:is|because|since)\b|\s+[-–—=(:]|,"
    ways += [rf"A(?={reason})(?!{joined})"] if "A" in letters else []
    return f"({'|'.join(ways)})"


def _contains_letter(words: str, patterns: LetterPatterns) -> bool:
    """Return whether a choice's words, if more than a letter, contain an isolated letter."""
    return len(re.findall(r"\w", words)) > 1 and bool(patterns.any_letter.search(words))


def _mask_choices(text: str, choices: Mapping[str, str], patterns: LetterPatterns) -> str:
    """Return `text` with "text" in place of every choice whose words contain an isolated letter."""
    for words in sorted(choices.values(), key=len, reverse=True):
        if _contains_letter(words, patterns):
            text = _text_pattern(words.strip()).sub("text", text)
    return text


def _find_named_choice(text: str, choices: Mapping[str, str]) -> str | None:
    found = {}
    for key, words in choices.items():
        core = " ".join(words.split()).rstrip(".,;:!?")
        ending = r"(?=\s*(?:\Z|[.,;:!?)\n\"*]))" if core.casefold() in BARE_WORDS else ""
        if core and re.search(_text_pattern(core).pattern + ending, text, re.IGNORECASE):
            found[key] = core.casefold()
    # "Paris, France" contains "Paris": the longer choice is meant.
    longest = [
        key
        for key, core in found.items()
        if not any(core != other and _text_pattern(core).search(other) for other in found.values())
    ]
    return longest[0] if len(longest) == 1 else None


def _text_pattern(words: str) -> re.Pattern[str]:
    spaced = r"\s+".join(map(re.escape, words.split()))
    return re.compile(rf"(?<!\w)(?<!not\s){spaced}(?!\w)", re.IGNORECASE)
