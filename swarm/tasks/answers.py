"""What a free text gives as its answer: a yes or no, a number or a phrase.

What is looked for follows from the gold answer's kind. Each `read` here comes with a `settled`:
whether no further text can change what is read, so that a model may stop.
"""

import re
from decimal import Decimal

PAIRS = {"yes": "yes or no", "no": "yes or no", "true": "true or false", "false": "true or false"}

GAP = "[ \u00a0\u2009\u202f]"
NUMBER = re.compile(
    rf"""(?:(?<![\w)])[-−])?[$€£]?[-−]?     # a sign, unless it is a minus between two terms
    (?<![\w.])                             # not the tail of a name or of another number
    (?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])   # 1,234
      |(?<![0-9]{GAP})[1-9][0-9]{{0,2}}(?:{GAP}[0-9]{{3}})+(?!{GAP}?[0-9])  # 1 234, no list 1 2 345
      |[0-9]+)?
    (?:(?<=[0-9])(?:\.[0-9]+)?|\.[0-9]+)   # 18, 18.50, .5
    (?:e[-+]?[0-9]{{1,2}}(?![0-9]))?        # 6.02e23
    """,
    re.VERBOSE | re.IGNORECASE,
)
ENDED = re.compile(rf"[^0-9.,e{GAP[1:-1]}]|(?:[.,]|{GAP})[^0-9]|e(?:[-+][^0-9]|[^-+0-9])", re.I)
"""What may follow a number that nothing can be added to: no digit, and no separator or exponent
that a digit could follow."""

MARKS = r"""(?:
    \#\#\#\#[^0-9\n]{0,16}
    |\banswer\b[^0-9\n.]{0,24}(?:\bis\b|[:=])[^0-9\n]{0,16}
    |\bboxed\{[^0-9\n]{0,8}
    )\Z"""
LENGTHS = r"""(?:
    \b(?:length|distance)\b(?:[^\n.=:]{0,80}(?:\bis\b|[:=]))?(?:\s+of\b)?[^\w\n]{0,8}
    )\Z"""
REASONED = re.compile(MARKS, re.VERBOSE | re.IGNORECASE)
DIRECT = re.compile(rf"\A[\W_]*\Z|{MARKS}|{LENGTHS}", re.VERBOSE | re.IGNORECASE)
WINDOW = 160
"""Characters before a number in which its mark is looked for; longer than any mark."""

LEAD = re.compile(r"\A[\W_]*(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:|=)", re.IGNORECASE)


def kind_of(gold: str) -> str:
    """The kind of answer: "yes or no", "true or false", "number" or "phrase"."""
    stripped = gold.strip()
    if stripped.lower() in PAIRS:
        return PAIRS[stripped.lower()]
    return "number" if NUMBER.fullmatch(stripped) else "phrase"


def read(text: str, kind: str, take: str) -> str | None:
    """The answer that `text` gives, in one spelling per value; `None` if there is none.

    - yes or no, true or false: the first of the two that stands as a whole word.
    - number: the first one that is marked: after "####", "answer is", "answer:" or in a "boxed".
      With `take` "first" also one that opens the text or follows "length", "length is" or the
      like. Without a mark the first or last number, as `take` says. Spelt without separators,
      currency or needless zeros: "$1,234.50" and "1 234.5" are "1234.5", "2e3" is "2000".
    - phrase: the first line that has a word, after "the answer is" if it begins so; lower case,
      single spaces, no punctuation.
    """
    if kind == "number":
        if marked := _marked(text, take):
            return plain(marked.group())
        numbers = NUMBER.findall(text)
        return plain(numbers[0 if take == "first" else -1]) if numbers else None
    if kind == "phrase":
        return next(filter(None, map(_phrase, text.split("\n"))), None)
    found = _word(kind).search(text)
    return found.group().capitalize() if found else None


def settled(kind: str, take: str, text: str) -> bool:
    """Whether `read` gives the same for `text` and for every text that begins with it."""
    if kind == "number":
        marked = _marked(text, take)
        return marked is not None and bool(ENDED.match(text, marked.end()))
    if kind == "phrase":
        return any(map(_phrase, text.split("\n")[:-1]))
    found = _word(kind).search(text)
    return found is not None and found.end() < len(text)


def same(answer: str, gold: str) -> bool:
    """Whether an answer that was read (or any spelling of it) has the gold answer's value."""
    kind = kind_of(gold)
    if kind == "number":
        stripped = answer.strip()
        return bool(NUMBER.fullmatch(stripped)) and plain(stripped) == plain(gold.strip())
    return _phrase(answer) == _phrase(gold)


def plain(number: str) -> str:
    """A number's one spelling: "$1,234.50" is "1234.5", "18.00" is "18", "-0" is "0"."""
    digits = re.sub(rf"[$€£,]|{GAP}", "", number).replace("−", "-")
    value = Decimal("-" + digits.lstrip("-") if digits.startswith("-") else digits)
    if value == 0:
        return "0"
    spelt = format(value, "f")
    return spelt.rstrip("0").rstrip(".") if "." in spelt else spelt


def read_whole(text: str) -> str | None:
    """The first line that is not blank, whole: lower case, single spaces, no final punctuation.

    `None` if all lines are blank. "The answer is 7" is not "7", and "1 2 3" not "1 2".
    """
    return next(filter(None, map(_whole, text.split("\n"))), None)


def settled_whole(text: str) -> bool:
    """Whether `read_whole` gives the same for `text` and for every text that begins with it."""
    return any(map(_whole, text.split("\n")[:-1]))


def same_whole(answer: str, gold: str) -> bool:
    """Whether two whole answers differ in case, white space and final punctuation at most."""
    return _whole(answer) == _whole(gold)


def read_original(text: str, last_words: int | None) -> str | None:
    """What the original looks for the gold answer in: the text, or its last words.

    Words are what single spaces separate, as there.
    """
    shown = text.strip()
    if last_words is not None:
        shown = " ".join(shown.split(" ")[-last_words:])
    return shown or None


def same_original(answer: str, gold: str) -> bool:
    """The original's rule: the gold answer is somewhere in the text, "18" in "118" too."""
    return gold in answer


def _marked(text: str, take: str) -> re.Match[str] | None:
    # Whether a number is marked depends on what stands before it alone: the first one stays.
    marks = DIRECT if take == "first" else REASONED
    for number in NUMBER.finditer(text):
        start = number.start()
        # The whole beginning where it is short, so that "opens the text" means just that.
        before = text[:start] if start < WINDOW else "x" + text[start - WINDOW : start]
        if marks.search(before):
            return number
    return None


def _phrase(line: str) -> str:
    rest = LEAD.sub("", line)
    return " ".join(re.findall(r"\w+", rest.casefold()))


def _whole(line: str) -> str:
    return " ".join(line.casefold().split()).rstrip(".,;:!? ")


def _word(kind: str) -> re.Pattern[str]:
    either = kind.replace(" or ", "|")
    return re.compile(rf"(?<![\w-])(?:{either})(?![\w'’-])", re.IGNORECASE)
