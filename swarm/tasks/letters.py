"""Which of an item's lettered choices a text picks.

`read` looks in this order, and the first that is there decides:

1. a letter that opens the text: the prompt ends in "The answer is", so this is the answer;
2. a letter after "answer", "answer is", "correct option is", "boxed" and the like;
3. the only letter that stands by itself, not counting the article A, the pronoun I and "not B";
4. the only choice whose words occur as whole words.

A letter counts in 1 and 2 if something closes it ("C.", "c)", "(B)", "**B**", the end) or, for
capitals other than A and I, if a word follows; never as one of several ("B or C", "BC").
Letters inside a choice's own words ("Vitamin C") are no letters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

# What closes a letter. After "." no initial may follow ("C. S. Lewis" is read, "C.S." is not).
LETTER_CLOSER = r"""(?:[):;\]}>|*$<`\n"”!?]|\.(?!\w\.)|'(?!\w))"""
CERTAIN_LETTER_CLOSER = r"""(?:[):;\]}>|*$<`\n"”!?]|\.(?:\W|\w[^.])|'\W)"""
FILLER_WORDS = (
    r"(?i:is|be|are|was|to|of|for|the|this|that|question|would|should|must|will|can|only|option|"
    r"choice|letter|correct|answer|text|most|likely|best|probably|definitely|therefore|thus|given)"
)
LETTER_MARK = rf"(?i:\b(?:answer|boxed|correct\s+(?:option|choice|letter)))\b[\W_]*(?:{FILLER_WORDS}\b[\W_]*)*"
LETTER_OPENING = r"\A[\W_]*"
# Words that often begin a sentence that does not pick the choice of that name ("no opinion").
BARE_WORDS = {"yes", "no", "true", "false", "not", "none", "all", "both", "neither"}


@dataclass(frozen=True)
class LetterPatterns:
    """The regular expressions for one set of letters; group 1 is the letter."""

    opening: re.Pattern[str]
    marked: re.Pattern[str]
    certain_opening: re.Pattern[str]
    certain_mark: re.Pattern[str]
    alone: re.Pattern[str]
    any_letter: re.Pattern[str]


def extract_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """The key of the choice that `text` picks, or `None`; see the module for the rules."""
    patterns = _build_patterns("".join(choices))
    masked = _mask_choices(text, choices, patterns)
    if found := patterns.opening.match(masked) or patterns.marked.search(masked):
        return found.group(1).upper()
    alone = {next(filter(None, groups)).upper() for groups in patterns.alone.findall(masked)}
    if alone:
        return alone.pop() if len(alone) == 1 else None
    return _find_named_choice(text, choices)


def is_letter_final(choices: Mapping[str, str], text: str) -> bool:
    """Whether `read` gives the same for `text` and for every text that begins with it."""
    patterns = _build_patterns("".join(choices))
    if any(_contains_letter(words, patterns) for words in choices.values()):
        return False  # The letter might still turn out to be part of a choice's words.
    if patterns.opening.match(text):
        return patterns.certain_opening.match(text) is not None
    marked = patterns.marked.search(text)
    return marked is not None and bool(patterns.certain_mark.match(text, marked.start()))


def extract_letter_original(text: str, choices: Mapping[str, str]) -> str | None:
    """The original's rule: the first key in the first, else in the last five characters, else
    the first choice whose words are part of the text; without regard to word boundaries.

    Where the original answers "Z", a letter that is always wrong, this is `None`.
    """
    shown = text.strip()
    for part in (shown[:5], shown[-5:]):
        for key in choices:
            if key in part:
                return key
    return next((key for key in choices if choices[key].lower() in shown.lower()), None)


def is_original_letter_final(choices: Mapping[str, str], text: str) -> bool:
    """Whether `read_original` gives the same for every text that begins with `text`."""
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
    """A letter, as group 1, that is closed or followed as a letter that is meant is."""
    anywhere = f"[{letters}{letters.lower()}]"
    plain = "".join(sorted(set(letters) - {"A", "I"}))
    others = [f"[{plain}](?!['’\\w])"] if plain else []
    others += [r"A(?![\w'’]|\s+\w)"] if "A" in letters else []
    # Another letter joined on: "B or C", "B, C", "B/C".
    joined = rf"\s*[,/&]?\s*(?:(?:and|or|nor)\s+)*[(\[]?(?:{'|'.join(others) or '(?!)'})"
    ways = [rf"{anywhere}(?={LETTER_CLOSER}|\s*\Z)"]
    ways += [rf"[{plain}](?=[\s,])(?!{joined})"] if plain else []
    reason = r"\s+(?:is|because|since)\b|\s+[-–—=(:]|,"
    ways += [rf"A(?={reason})(?!{joined})"] if "A" in letters else []
    return f"({'|'.join(ways)})"


def _contains_letter(words: str, patterns: LetterPatterns) -> bool:
    """Whether a choice's words, if they are more than a letter, hold one by itself."""
    return len(re.findall(r"\w", words)) > 1 and bool(patterns.any_letter.search(words))


def _mask_choices(text: str, choices: Mapping[str, str], patterns: LetterPatterns) -> str:
    """`text` with "text" for every choice whose words hold a letter by itself."""
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
    # "Paris, France" holds "Paris": the longer one is meant.
    longest = [
        key
        for key, core in found.items()
        if not any(core != other and _text_pattern(core).search(other) for other in found.values())
    ]
    return longest[0] if len(longest) == 1 else None


def _text_pattern(words: str) -> re.Pattern[str]:
    spaced = r"\s+".join(map(re.escape, words.split()))
    return re.compile(rf"(?<!\w)(?<!not\s){spaced}(?!\w)", re.IGNORECASE)
