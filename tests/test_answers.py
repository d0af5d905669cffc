"""What is read from a model's text: letters, yes or no, numbers, phrases."""

import random

import pytest

from swarm.tasks import answers, letters

FOUR = {"A": "a fox", "B": "no", "C": "Paris", "D": "Paris, France"}
TEN = {letter: f"thing {n}" for n, letter in enumerate("ABCDEFGHIJ")}
HELD = {"A": "Vitamin C", "B": "Vitamin D", "C": "Both A and B", "D": "iron"}


@pytest.mark.parametrize(
    ("choices", "text", "letter"),
    [
        (FOUR, "C", "C"),
        (FOUR, "C.", "C"),
        (FOUR, " c)", "C"),
        (FOUR, "Answer: C", "C"),
        (FOUR, "The answer is (B).", "B"),
        (FOUR, "**B**", "B"),
        (FOUR, "B: no", "B"),
        (FOUR, "$\\boxed{\\text{B}}$", "B"),
        (FOUR, "B</s>", "B"),
        (FOUR, "B because the others are worse", "B"),
        (FOUR, "The correct option is C because", "C"),
        (FOUR, "The answer to this question is: B", "B"),
        (FOUR, "Option B", "B"),
        (FOUR, " B.\n\nQuestion: and now?\nThe answer is C.", "B"),
        (FOUR, "A", "A"),
        (FOUR, "A. a fox", "A"),
        (FOUR, "A is correct", "A"),
        (FOUR, "A, because", "A"),
        (FOUR, "A dog", None),
        (FOUR, "The answer is A dog", None),
        (FOUR, "A dog, so D", "D"),
        (TEN, "I am sure it is D", "D"),
        (TEN, "I", "I"),
        (TEN, "The answer is (I).", "I"),
        (TEN, "I think so", None),
        (TEN, "I'm", None),
        (FOUR, "Based on", None),
        (FOUR, "BC", None),
        (FOUR, "B or C", None),
        (FOUR, "A or B", None),
        (FOUR, "A B C D", None),
        (FOUR, "C.S. Lewis", None),
        (FOUR, "not A", None),
        (FOUR, "The answer is not B", None),
        (FOUR, "E", None),
        (FOUR, "", None),
        (FOUR, "No.", "B"),
        (FOUR, "no opinion", None),
        (FOUR, "nothing", None),
        (FOUR, "It is Paris", "C"),
        (FOUR, "It is Paris, France.", "D"),
        (FOUR, "Parisian", None),
        (HELD, "Vitamin C", "A"),
        (HELD, "C", "C"),
        (HELD, "Both A and B", "C"),
        (HELD, "D. iron", "D"),
    ],
)
def test_letter(choices: dict[str, str], text: str, letter: str | None) -> None:
    assert letters.read(text, choices) == letter


@pytest.mark.parametrize(
    ("choices", "text", "letter"),
    [
        (FOUR, "Answer: C", "A"),  # "A" is in the first five characters
        (FOUR, "Based on", "B"),
        (FOUR, "BC", "B"),
        (FOUR, "not A", "A"),
        (TEN, "I am sure it is D", "I"),
        (FOUR, "so it may be B", "B"),
        (FOUR, "there is nothing", "B"),  # "no" is in "nothing"
        (FOUR, "he went to paris, then on", "C"),
        (FOUR, "  \n B", "B"),  # the original strips what is generated
        (FOUR, "who can say", None),  # its "Z"
    ],
)
def test_letter_as_the_original_reads_it(
    choices: dict[str, str], text: str, letter: str | None
) -> None:
    assert letters.read_original(text, choices) == letter


@pytest.mark.parametrize(
    ("text", "gold", "take", "answer"),
    [
        ("Yes", "Yes", "first", "Yes"),
        (" no, there is none", "No", "first", "No"),
        ("Node 3 is not near", "No", "first", None),
        ("Nonetheless", "No", "first", None),
        ("YES or no", "No", "first", "Yes"),
        ("that is true", "False", "first", "True"),
        (" 11\n", "11", "first", "11"),
        ("The shortest path is 3 -> 5 with length 11", "11", "first", "11"),
        ("The length of the path between node 16 and node 19 is 12.", "12", "first", "12"),
        ("it goes by 16, then 19", "16", "first", "16"),
        ("10 dimes make 100, in all 150 pennies.", "150", "last", "150"),
        ("He has 3.\n#### 118\nQuestion: 4 and 5", "118", "last", "118"),
        ("So the answer is $1,234.50 in all, for 2", "1234.5", "last", "1234.5"),
        ("Answer: **36,000**", "36,000", "last", "36000"),
        ("5-3 = 2", "2", "last", "2"),
        ("it falls to -3 degrees", "-3", "last", "-3"),
        ("a debt of -$3", "-3", "last", "-3"),
        ("18kg", "18", "last", "18"),
        ("about .5", "0.5", "last", "0.5"),
        ("18.00", "18", "last", "18"),
        ("She has $1,234.50 left", "1234.5", "last", "1234.5"),
        ("= 3.50 dollars per day", "3.5", "last", "3.5"),
        ("12 apples", "12", "last", "12"),
        ("1 234 km", "1234", "last", "1234"),
        ("about 12\u00a0345\u202f678.5 people", "12345678.5", "last", "12345678.5"),
        ("by 16 19 123", "123", "last", "123"),
        ("by 1 234 5", "5", "last", "5"),
        ("1 2345", "1", "first", "1"),
        ("#### -1,000 dollars", "-1000", "last", "-1000"),
        ("6.02e3 of them", "6020", "last", "6020"),
        ("1.5E-3", "0.0015", "last", "0.0015"),
        ("1e999999999", "1", "last", "1"),
        ("12eggs", "12", "last", "12"),
        ("x18 and v2", "18", "last", None),
        ("none", "18", "last", None),
        (" Paris.\nLondon", "Paris", "first", "paris"),
        ("The answer is New  York!", "New York", "first", "new york"),
        ("Answer:\nParis", "Paris", "first", "paris"),
        ("...", "Paris", "first", None),
    ],
)
def test_value(text: str, gold: str, take: str, answer: str | None) -> None:
    assert answers.read(text, answers.kind_of(gold), take) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("18", "18", True),
        ("118", "18", False),
        ("18", "18.0", True),
        ("36000", "36,000", True),
        ("-3", "3", False),
        ("$1,234.50", "1234.5", True),
        ("a lot", "18", False),
        ("yes", "Yes", True),
        ("No", "Yes", False),
        ("paris", "Paris", True),
        ("paris france", "Paris", False),
    ],
)
def test_same_value(answer: str, gold: str, right: bool) -> None:
    assert answers.same(answer, gold) is right


def test_the_original_looks_at_the_last_words() -> None:
    text = " it is 118 so that is all I have to say about it now "
    assert answers.read_original(text, 5) == "to say about it now"
    shown = answers.read_original(text, None)
    assert shown is not None and answers.same_original(shown, "18")
    assert answers.read_original("  ", 5) is None


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (" 7", "7", True),
        ("7.", "7", True),
        ("\n 7 \nand so on", "7", True),
        ("The answer is 7", "7", False),
        ("7 8", "7", False),
        ("7, 8", "7", False),
        ("17", "7", False),
        ("07", "7", False),
        (" the opposite of WET  is dry!", "The opposite of wet is dry.", True),
        ("The opposite of wet is dry. Or", "The opposite of wet is dry.", False),
        (" \n.\n", "7", False),
    ],
)
def test_a_whole_answer(text: str, gold: str, right: bool) -> None:
    read = answers.read_whole(text)
    assert (read is not None and answers.same_whole(read, gold)) is right


def test_a_whole_answer_settles_with_its_line() -> None:
    assert not answers.settled_whole(" The opposite of wet is dry.")
    assert not answers.settled_whole("\n\n 7")
    assert answers.settled_whole("\n7\n")


@pytest.mark.parametrize("seed", range(4))
def test_nothing_changes_a_whole_answer_once_settled(seed: int) -> None:
    draw, pieces = random.Random(seed), _pieces(VALUE_PIECES)
    settled = 0
    for _ in range(1000):
        text = _text(draw, pieces)
        ends = range(len(text) + 1)
        first = next((end for end in ends if answers.settled_whole(text[:end])), None)
        if first is None:
            continue
        settled += 1
        early = answers.read_whole(text[:first])
        assert early is not None
        for end in range(first, len(text) + 1):
            assert answers.read_whole(text[:end]) == early, text[:end]
    assert settled > 100


def test_an_exact_number_of_any_length() -> None:
    digits = "123456789" * 600
    assert answers.plain(digits + ".50") == digits + ".5"


@pytest.mark.parametrize(
    ("choices", "text"),
    [(FOUR, " B.\n"), (FOUR, "(C)"), (FOUR, "Answer: **D**"), (TEN, "I) ")],
)
def test_a_letter_settles(choices: dict[str, str], text: str) -> None:
    assert letters.settled(choices, text)


@pytest.mark.parametrize(
    ("choices", "text"),
    [(FOUR, " B"), (FOUR, "B."), (FOUR, "A dog"), (FOUR, "B or"), (HELD, "C.\n")],
)
def test_a_letter_is_still_open(choices: dict[str, str], text: str) -> None:
    assert not letters.settled(choices, text)


@pytest.mark.parametrize(
    ("kind", "take", "text", "expected"),
    [
        ("number", "first", " 11\n", True),
        ("number", "first", " 11", False),
        ("number", "first", " 11,", False),
        ("number", "first", " 11.", False),
        ("number", "first", "a path 3 -> 5 ", False),
        ("number", "last", "10 dimes ", False),
        ("number", "last", "10 dimes #### 100\n", True),
        ("yes or no", "first", "Yes,", True),
        ("yes or no", "first", "No", False),
        ("phrase", "first", "Paris", False),
        ("phrase", "first", "\nParis\n", True),
        ("phrase", "first", "Answer:\n", False),
    ],
)
def test_when_a_value_settles(kind: str, take: str, text: str, expected: bool) -> None:
    assert answers.settled(kind, take, text) is expected


LETTER_PIECES = (
    "A B C D I a b c d ( ) [ ] . , : ; * ** ' \" - / & \n _ ! ? $ } 1 x the is it's not and or "
    "answer Answer: answer\\sis correct\\soption boxed{ text because Paris France no fox vitamin "
    "ANSWER so option S. both"
).replace("\n", "\\n")
VALUE_PIECES = (
    "0 1 2 18 118 1,234 ,345 . , .5 - − $ -> yes no Yes No node not y n o #### answer is : = "
    "boxed{ length distance of from to \\n } x % ( ) Paris true false The ' ’ between "
    "345 67 \\g345 e e5 1e3 E-2"
)


def _text(draw: random.Random, pieces: list[str]) -> str:
    parts = [
        draw.choice(pieces) + draw.choice(("", "", " ", "  ")) for _ in range(draw.randint(0, 14))
    ]
    return "".join(parts)


def _pieces(words: str) -> list[str]:
    pieces = words.split()
    for mark, meant in (("\\n", "\n"), ("\\s", " "), ("\\g", "\u00a0")):
        pieces = [piece.replace(mark, meant) for piece in pieces]
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changes_a_letter_once_settled(seed: int) -> None:
    draw, pieces = random.Random(seed), _pieces(LETTER_PIECES)
    settled = 0
    rules = ((letters.read, letters.settled), (letters.read_original, letters.settled_original))
    for _ in range(1500):
        choices = draw.choice((FOUR, TEN, HELD))
        text = _text(draw, pieces)
        for read, is_settled in rules:
            ends = range(len(text) + 1)
            first = next((end for end in ends if is_settled(choices, text[:end])), None)
            if first is None:
                continue
            settled += 1
            early = read(text[:first], choices)
            assert early is not None
            for end in range(first, len(text) + 1):
                assert read(text[:end], choices) == early, (text[:first], text[:end])
    assert settled > 200


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changes_a_value_once_settled(seed: int) -> None:
    draw, pieces = random.Random(seed), _pieces(VALUE_PIECES)
    settled = 0
    for _ in range(1500):
        kind = draw.choice(("number", "number", "yes or no", "true or false", "phrase"))
        take = draw.choice(("first", "last"))
        text = _text(draw, pieces)
        ends = range(len(text) + 1)
        first = next((end for end in ends if answers.settled(kind, take, text[:end])), None)
        if first is None:
            continue
        settled += 1
        early = answers.read(text[:first], kind, take)
        assert early is not None
        for end in range(first, len(text) + 1):
            assert answers.read(text[:end], kind, take) == early, (kind, take, text[:end])
    assert settled > 200
