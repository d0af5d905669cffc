"""What is read from a model's text: letters, yes or no, numbers, phrases."""

import random

import pytest

from swarm.tasks import parsing
from swarm.tasks import parsing as letters

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
    assert letters.extract_letter(text, choices) == letter


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
    assert letters.extract_letter_original(text, choices) == letter


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
        ("The answer is 3/4.", "3/4", "last", "0.75"),
        (" 2/6 of it", "1/3", "first", "1/3"),
        ("on 3/4/2020", "3/4", "last", "2020"),
        ("10/0", "10", "first", "10"),
        (" Twelve.", "12", "first", "12"),
        ("He had 5 and got 7. The answer is twelve.", "12", "last", "12"),
        ("So there are two hundred and twenty-one thousand and six", "221,006", "last", "221006"),
        ("no one knows", "1", "first", None),
        ("The first one is right.", "1", "first", None),
        ("One.", "1", "first", "1"),
        ("The answer is one.", "1", "last", "1"),
        ("a hundred and twenty", "120", "first", "120"),
        ("a thousand and twenty", "1020", "last", None),
        ("twelve and a half", "12.5", "first", None),
        ("one and a half million", "1500000", "first", None),
        ("1 1/2", "1.5", "last", "2"),
        ("One of them has 12", "12", "first", "12"),
        ("a twelve-year-old", "12", "last", None),
        (" Paris.\nLondon", "Paris", "first", "paris"),
        ("The answer is New  York!", "New York", "first", "new york"),
        ("Answer:\nParis", "Paris", "first", "paris"),
        ("...", "Paris", "first", None),
    ],
)
def test_value(text: str, gold: str, take: str, answer: str | None) -> None:
    assert parsing.extract_answer(text, parsing.answer_kind(gold), take) == answer


REASONED = [
    (
        "Natalia sold 48/2 = 24 clips in May. Altogether 48+24 = 72 clips in April and May.",
        "72",
    ),
    ("48/2 = 24. 48 + 24 = 72 clips in 2 months.", "72"),
    ("In May she sold 48/2=24, so the sum (48+24) = 72 clips over 2 months", "72"),
    ("12/60 = $0.20 per minute. 0.20 x 50 = $10 for 50 minutes", "10"),
    ("100 / 2 = 50. Betty needs 100 - 50 - 15 - 30 = 5 more dollars.", "5"),
    (
        "He writes 3*2=6 pages twice a week, 6*2=12 pages a week and 12*52=624 pages in 52 weeks.",
        "624",
    ),
    ("5 x 7 = 35 candies, 35 - 8 = 27 are left for the 3 friends", "27"),
    ("x + 4 = 10\nx = 6", "6"),
    ("2x = 18, x = 9 after 2 steps", "9"),
    ("= 3.50 dollars per day", "3.5"),
    ("The cost is 4 * $1.25 = $5.00", "5"),
    ("So 48 + 24 = 72 (48 in April and 24 in May)", "72"),
    ("The total is 72 = 48 + 24", "72"),
    ("Profit = 150 - 90 = 60", "60"),
    ("Profit = $1,200 - $350 = $850 in 3 months", "850"),
    ("15% of 200 = 30", "30"),
    ("The distance = 60 * 2.5 = 150 miles", "150"),
    ("10 - 3 = 7\n7 - 2 = 5\n", "5"),
    ("6 * 4 = 24 legs (4 legs a dog)", "24"),
    ("-3 + 1 = -2 degrees after 5 hours", "-2"),
    ("3/4 * 80 = 60. He read 60 pages in 4 days.", "60"),
    ("She has 18 apples.\n\nQuestion 2: Tom has 5 marbles and gives away 3.", "18"),
    ("Half of 36 is 18.\nQuestion: How many legs have 7 dogs?\nAnswer", "18"),
    ("The total is 42.\n\nProblem 3: A train travels at 60 km/h", "42"),
    ("There are 20 left.\nQ: If 3 birds sit on a tree", "20"),
    ("Step 1: 5 * 3 = 15\nStep 2: 15 + 2 = 17\nStep 3", "17"),
    ("Step 1: add 5 and 3 to get 8.\nStep 2: double it to get 16.\nStep 3: check.", "16"),
    ("1. She buys 3 pens.\n2. She pays 12 dollars.\n3. ", "12"),
    ("1. He has 10 eggs.\n2. He eats 3.\n3. He sells 7 eggs.", "7"),
    ("As in Example 2, the price is 45 dollars, see Step 4", "45"),
    ("It was 25 dollars in Question 2", "25"),
    ("She came 2nd with 45 points, ahead of the 3rd", "45"),
    ("She sold 72 clips (48+24).", "72"),
    ("She sold 72 clips altogether (48 in April, 24 in May)", "72"),
    ("He has 14 marbles left (20 - 6)", "14"),
    ("There are 30 students (12 boys and 18 girls).", "30"),
    ("They need 6 buses (5 full ones and 1 for the rest of the 253 children).", "6"),
    ("(10 - 4) * 3 = 18", "18"),
    ("The answer would be (72)", "72"),
    ("Natalia sold 72 clips in 2 months.", "72"),
    ("He saves 300 dollars in 6 months", "300"),
    ("She will have read 120 pages after 4 days.", "120"),
    ("He earns $15 per hour, so in 8 hours he earns $120.", "120"),
    ("In 2 months she will have 75 dollars", "75"),
    ("It takes him 3 hours.", "3"),
    ("She reads 20 pages a day, so she finishes in 5 days.", "5"),
    ("The trip takes 2.5 hours in all", "2.5"),
    ("He will be done in 12 days", "12"),
    ("They paint 4 rooms in 2 days and 12 rooms in 6 days.", "12"),
    ("10 dimes make 100, in all 150 pennies.", "150"),
    ("Each costs 2 * 3 = 6 dollars. In total he pays 18 dollars.", "18"),
    ("3 * 4 = 12 and 2 * 5 = 10, so he has 22 coins", "22"),
    ("48 - 12 = 36. Therefore, each child gets 9 sweets.", "9"),
    ("She starts with 20, gives away 5 and then 3, leaving 12.", "12"),
    ("The bakery has 200 - 93 - 39 = 68 loaves, and 6 came back, so the result is 74.", "74"),
    ("It falls to -3 degrees", "-3"),
    ("He has 1,250 stamps", "1250"),
    ("The answer is 48 + 24 = 72 clips.", "72"),
    ("#### 72\nQuestion: 4 and 5", "72"),
    ("Answer: 5 * 3 = 15\nQuestion 2: 7 and 8", "15"),
]
"""Answers as models write them to arithmetic in words, and the number that each of them gives."""


@pytest.mark.parametrize(("text", "answer"), REASONED)
def test_the_number_that_reasoning_comes_to(text: str, answer: str) -> None:
    assert parsing.extract_answer(text, "number", "last") == answer


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
        ("6/8", "0.75", True),
        ("0.33", "1/3", False),
        ("12", "Twelve", True),
        ("3/4/2020", "3/4", False),
        ("yes", "Yes", True),
        ("No", "Yes", False),
        ("paris", "Paris", True),
        ("paris france", "Paris", False),
    ],
)
def test_same_value(answer: str, gold: str, right: bool) -> None:
    assert parsing.is_same_answer(answer, gold) is right


def test_the_original_looks_at_the_last_words() -> None:
    text = " it is 118 so that is all I have to say about it now "
    assert parsing.extract_original(text, 5) == "to say about it now"
    shown = parsing.extract_original(text, None)
    assert shown == text.strip()
    assert parsing.extract_original("  ", 5) is None


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
    read = parsing.extract_line(text)
    assert (read is not None and parsing.is_same_line(read, gold)) is right


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (" DOG  SUN.", "DOG SUN", True),
        ("\n DOG \nand so on", "DOG", True),
        (" dog", "DOG", False),
        ("Dog", "DOG", False),
        ("The answer is DOG", "DOG", False),
        (" \n.\n", "DOG", False),
    ],
)
def test_an_answer_in_which_case_counts(text: str, gold: str, right: bool) -> None:
    read = parsing.extract_line(text, cased=True)
    assert (read is not None and parsing.is_same_line(read, gold, cased=True)) is right


def test_a_whole_answer_settles_with_its_line() -> None:
    assert not parsing.is_line_final(" The opposite of wet is dry.")
    assert not parsing.is_line_final("\n\n 7")
    assert parsing.is_line_final("\n7\n")


@pytest.mark.parametrize("seed", range(4))
def test_nothing_changes_a_whole_answer_once_settled(seed: int) -> None:
    draw, pieces = random.Random(seed), _pieces(VALUE_PIECES)
    settled = 0
    for _ in range(1000):
        text = _text(draw, pieces)
        ends = range(len(text) + 1)
        first = next((end for end in ends if parsing.is_line_final(text[:end])), None)
        if first is None:
            continue
        settled += 1
        for cased in (False, True):
            early = parsing.extract_line(text[:first], cased)
            assert early is not None
            for end in range(first, len(text) + 1):
                assert parsing.extract_line(text[:end], cased) == early, text[:end]
    assert settled > 100


def test_an_exact_number_of_any_length() -> None:
    digits = "123456789" * 600
    assert parsing.normalize_number(digits + ".50") == digits + ".5"


@pytest.mark.parametrize(
    ("choices", "text"),
    [(FOUR, " B.\n"), (FOUR, "(C)"), (FOUR, "Answer: **D**"), (TEN, "I) ")],
)
def test_a_letter_settles(choices: dict[str, str], text: str) -> None:
    assert letters.is_letter_final(choices, text)


@pytest.mark.parametrize(
    ("choices", "text"),
    [(FOUR, " B"), (FOUR, "B."), (FOUR, "A dog"), (FOUR, "B or"), (HELD, "C.\n")],
)
def test_a_letter_is_still_open(choices: dict[str, str], text: str) -> None:
    assert not letters.is_letter_final(choices, text)


@pytest.mark.parametrize(
    ("kind", "take", "text", "expected"),
    [
        ("number", "first", " 11\n", True),
        ("number", "first", " 11", False),
        ("number", "first", " 11,", False),
        ("number", "first", " 11.", False),
        ("number", "first", "a path 3 -> 5 ", False),
        ("number", "first", " 3/4", False),
        ("number", "first", " 3/4 ", False),
        ("number", "first", " 3/4 of", True),
        ("number", "first", " twenty", False),
        ("number", "first", " twenty-one.", True),
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
    assert parsing.is_answer_final(kind, take, text) is expected


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
NUMBER_PIECES = VALUE_PIECES + " / /4 twelve Twenty -one hundred and more"


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
    rules = (
        (letters.extract_letter, letters.is_letter_final),
        (letters.extract_letter_original, letters.is_original_letter_final),
    )
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
    draw, pieces = random.Random(seed), _pieces(NUMBER_PIECES)
    settled = 0
    for _ in range(2000):
        kind = draw.choice(("number", "number", "yes or no", "true or false", "phrase"))
        take = draw.choice(("first", "last"))
        text = _text(draw, pieces)
        ends = range(len(text) + 1)
        first = next((end for end in ends if parsing.is_answer_final(kind, take, text[:end])), None)
        if first is None:
            continue
        settled += 1
        early = parsing.extract_answer(text[:first], kind, take)
        assert early is not None
        for end in range(first, len(text) + 1):
            assert parsing.extract_answer(text[:end], kind, take) == early, (kind, take, text[:end])
    assert settled > 200
