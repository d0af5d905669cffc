"""What is read from a model's text: letters, yes or no, numbers, phrases."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from swarm.tasks import parsing

FOUR = {"A": "a fox", "B": "no", "C": "Paris", "D": "Paris, France"}
TEN = {letter: f"thing {n}" for n, letter in enumerate("ABCDEFGHIJ")}
HELD = {"A": "Vitamin C", "B": "Vitamin D", "C": "Both A and B", "D": "iron"}


@pytest.mark.parametrize(
    ("choices", "letter", "texts"),
    [
        (FOUR, "C", "C|C.| c)|Answer: C|The correct option is C because|It is Paris"),
        (
            FOUR,
            "B",
            "The answer is (B).|**B**|B: no|$\\boxed{\\text{B}}$|B</s>|"
            "B because the others are worse|The answer to this question is: B|Option B|"
            " B.\n\nQuestion: and now?\nThe answer is C.|No.",
        ),
        (FOUR, "A", "A|A. a fox|A is correct|A, because"),
        (
            FOUR,
            None,
            "A dog|The answer is A dog|Based on|BC|B or C|A or B|A B C D|C.S. Lewis|not A|"
            "The answer is not B|E||no opinion|nothing|Parisian",
        ),
        (FOUR, "D", "A dog, so D|It is Paris, France."),
        (TEN, "D", "I am sure it is D"),
        (TEN, "I", "I|The answer is (I)."),
        (TEN, None, "I think so|I'm"),
        (HELD, "A", "Vitamin C"),
        (HELD, "C", "C|Both A and B"),
        (HELD, "D", "D. iron"),
    ],
)
def test_letter(choices: dict[str, str], letter: str | None, texts: str) -> None:
    for text in texts.split("|"):
        assert parsing.extract_letter(text, choices) == letter, text


@pytest.mark.parametrize(
    ("choices", "letter", "texts"),  # "A" is in the first five of "Answer: C", "no" in "nothing"
    [
        (FOUR, "A", "Answer: C|not A"),
        (FOUR, "B", "Based on|BC|so it may be B|there is nothing|  \n B"),
        (TEN, "I", "I am sure it is D"),
        (FOUR, "C", "he went to paris, then on"),
        (FOUR, None, "who can say"),
    ],
)
def test_letter_as_the_original_reads_it(
    choices: dict[str, str], letter: str | None, texts: str
) -> None:
    for text in texts.split("|"):
        assert parsing.extract_letter_original(text, choices) == letter, text


@pytest.mark.parametrize(
    ("kind", "take", "cases"),  # text=>answer
    [
        (
            "yes or no",
            "first",
            "Yes=>Yes| no, there is none=>No|Node 3 is not near=>|Nonetheless=>|YES or no=>Yes",
        ),
        (
            "true or false",
            "first",
            "that is true=>True",
        ),
        (
            "number",
            "first",
            " 11\n=>11|The shortest path is 3 -> 5 with length 11=>11|"
            "The length of the path between node 16 and node 19 is 12.=>12|"
            "it goes by 16, then 19=>16|1 2345=>1| 2/6 of it=>1/3|10/0=>10| Twelve.=>12|"
            "no one knows=>|The first one is right.=>|One.=>1|a hundred and twenty=>120|"
            "twelve and a half=>|one and a half million=>|One of them has 12=>12",
        ),
        (
            "number",
            "last",
            "10 dimes make 100, in all 150 pennies.=>150|"
            "He has 3.\n#### 118\nQuestion: 4 and 5=>118|"
            "So the answer is $1,234.50 in all, for 2=>1234.5|Answer: **36,000**=>36000|"
            "5-3 = 2=>2|it falls to -3 degrees=>-3|a debt of -$3=>-3|18kg=>18|about .5=>0.5|"
            "18.00=>18|She has $1,234.50 left=>1234.5|= 3.50 dollars per day=>3.5|"
            "12 apples=>12|1 234 km=>1234|about 12\xa0345\u202f678.5 people=>12345678.5|"
            "by 16 19 123=>123|by 1 234 5=>5|#### -1,000 dollars=>-1000|6.02e3 of them=>6020|"
            "1.5E-3=>0.0015|1e999999999=>1|12eggs=>12|x18 and v2=>|none=>|"
            "The answer is 3/4.=>0.75|on 3/4/2020=>2020|"
            "He had 5 and got 7. The answer is twelve.=>12|"
            "So there are two hundred and twenty-one thousand and six=>221006|"
            "The answer is one.=>1|a thousand and twenty=>|1 1/2=>2|a twelve-year-old=>",
        ),
        (
            "phrase",
            "first",
            " Paris.\nLondon=>paris|The answer is New  York!=>new york|Answer:\nParis=>paris|...=>",
        ),
    ],
)
def test_value(kind: str, take: str, cases: str) -> None:
    for case in cases.split("|"):
        text, answer = case.split("=>")
        assert parsing.extract_answer(text, kind, take) == (answer or None), text


def test_the_kind_of_an_answer_is_that_of_the_gold_one() -> None:
    golds = {"Yes": "yes or no", "false": "true or false", "36,000": "number", "3/4": "number"}
    for gold, kind in {**golds, "twelve": "number", "New York": "phrase"}.items():
        assert parsing.answer_kind(gold) == kind


REASONED = [
    (
        "Natalia sold 48/2 = 24 clips in May. Altogether 48+24 = 72 clips in April and May.",
        "72",
    ),
    ("In May she sold 48/2=24, so the sum (48+24) = 72 clips over 2 months", "72"),
    ("12/60 = $0.20 per minute. 0.20 x 50 = $10 for 50 minutes", "10"),
    (
        "He writes 3*2=6 pages twice a week, 6*2=12 pages a week and 12*52=624 pages in 52 weeks.",
        "624",
    ),
    ("x + 4 = 10\nx = 6", "6"),
    ("2x = 18, x = 9 after 2 steps", "9"),
    ("So 48 + 24 = 72 (48 in April and 24 in May)", "72"),
    ("The total is 72 = 48 + 24", "72"),
    ("Profit = $1,200 - $350 = $850 in 3 months", "850"),
    ("15% of 200 = 30", "30"),
    ("The distance = 60 * 2.5 = 150 miles", "150"),
    ("10 - 3 = 7\n7 - 2 = 5\n", "5"),
    ("-3 + 1 = -2 degrees after 5 hours", "-2"),
    ("3/4 * 80 = 60. He read 60 pages in 4 days.", "60"),
    ("She has 18 apples.\n\nQuestion 2: Tom has 5 marbles and gives away 3.", "18"),
    ("There are 20 left.\nQ: If 3 birds sit on a tree", "20"),
    ("Step 1: add 5 and 3 to get 8.\nStep 2: double it to get 16.\nStep 3: check.", "16"),
    ("1. She buys 3 pens.\n2. She pays 12 dollars.\n3. ", "12"),
    ("As in Example 2, the price is 45 dollars, see Step 4", "45"),
    ("She came 2nd with 45 points, ahead of the 3rd", "45"),
    ("She sold 72 clips (48+24).", "72"),
    ("They need 6 buses (5 full ones and 1 for the rest of the 253 children).", "6"),
    ("(10 - 4) * 3 = 18", "18"),
    ("The answer would be (72)", "72"),
    ("Natalia sold 72 clips in 2 months.", "72"),
    ("He earns $15 per hour, so in 8 hours he earns $120.", "120"),
    ("It takes him 3 hours.", "3"),
    ("She reads 20 pages a day, so she finishes in 5 days.", "5"),
    ("They paint 4 rooms in 2 days and 12 rooms in 6 days.", "12"),
    ("3 * 4 = 12 and 2 * 5 = 10, so he has 22 coins", "22"),
    ("She starts with 20, gives away 5 and then 3, leaving 12.", "12"),
    ("The bakery has 200 - 93 - 39 = 68 loaves, and 6 came back, so the result is 74.", "74"),
    ("Answer: 5 * 3 = 15\nQuestion 2: 7 and 8", "15"),
]
"""Answers as models write them to arithmetic in words, and the number that each of them gives."""


@pytest.mark.parametrize(("text", "answer"), REASONED)
def test_the_number_that_reasoning_comes_to(text: str, answer: str) -> None:
    assert parsing.extract_answer(text, "number", "last") == answer


@pytest.mark.parametrize(
    ("right", "pairs"),  # answer, gold
    [
        (
            True,
            "18=18|18=18.0|36000=36,000|$1,234.50=1234.5|6/8=0.75|12=Twelve|yes=Yes|paris=Paris",
        ),
        (False, "118=18|-3=3|a lot=18|0.33=1/3|3/4/2020=3/4|No=Yes|paris france=Paris"),
    ],
)
def test_same_value(right: bool, pairs: str) -> None:
    for pair in pairs.split("|"):
        assert parsing.is_same_answer(*pair.split("=")) is right, pair
    digits = "123456789" * 600
    assert parsing.normalize_number(digits + ".50") == digits + ".5"


def test_the_original_looks_at_the_last_words() -> None:
    text = " it is 118 so that is all I have to say about it now "
    assert parsing.extract_original(text, 5) == "to say about it now"
    assert parsing.extract_original(text, None) == text.strip()
    assert parsing.extract_original("  ", 5) is None


@pytest.mark.parametrize(
    ("cased", "gold", "right", "wrong"),
    [
        (False, "7", " 7|7.|\n 7 \nand so on", "The answer is 7|7 8|7, 8|17|07| \n.\n"),
        (False, "It is dry.", " IT is  dry!", "It is dry. Or|dry"),
        (True, "DOG SUN", " DOG  SUN.|\n DOG SUN \nand", " dog sun|Dog sun|It is DOG SUN| \n.\n"),
    ],
)
def test_a_whole_line(cased: bool, gold: str, right: str, wrong: str) -> None:
    for texts, wanted in ((right, True), (wrong, False)):
        for text in texts.split("|"):
            read = parsing.extract_line(text, cased)
            assert (read is not None and parsing.is_same_line(read, gold, cased)) is wanted, text


@pytest.mark.parametrize(
    ("check", "settled", "still_open"),
    [
        (partial(parsing.is_letter_final, FOUR), " B.\n|(C)|Answer: **D**", " B|B.|A dog|B or"),
        (partial(parsing.is_letter_final, TEN), "I) ", "I"),
        (partial(parsing.is_letter_final, HELD), "", "C.\n"),
        (
            partial(parsing.is_answer_final, "number", "first"),
            " 11\n| 3/4 of| twenty-one.",
            " 11| 11,| 11.|a path 3 -> 5 | 3/4| 3/4 | twenty",
        ),
        (partial(parsing.is_answer_final, "number", "last"), "10 dimes #### 100\n", "10 dimes "),
        (partial(parsing.is_answer_final, "yes or no", "first"), "Yes,", "No"),
        (partial(parsing.is_answer_final, "phrase", "first"), "\nParis\n", "Paris|Answer:\n"),
        (parsing.is_line_final, "\n7\n", " The opposite of wet is dry.|\n\n 7"),
    ],
)
def test_when_an_answer_settles(
    check: Callable[[str], bool], settled: str, still_open: str
) -> None:
    assert all(map(check, filter(None, settled.split("|"))))
    assert not any(map(check, still_open.split("|")))


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


def drawn(draw: random.Random, words: str, longest: int = 14) -> str:
    """A text of these pieces, in which some stand for white space."""
    pieces = words.split()
    for mark, meant in (("\\n", "\n"), ("\\s", " "), ("\\g", "\u00a0")):
        pieces = [piece.replace(mark, meant) for piece in pieces]
    count = draw.randint(0, longest)
    return "".join(draw.choice(pieces) + draw.choice(("", "", " ", "  ")) for _ in range(count))


def a_letter(draw: random.Random) -> tuple[str, Callable[[str], object], Callable[[str], bool]]:
    choices, original = draw.choice((FOUR, TEN, HELD)), draw.random() < 0.5
    read = parsing.extract_letter_original if original else parsing.extract_letter
    final = parsing.is_original_letter_final if original else parsing.is_letter_final
    return LETTER_PIECES, lambda text: read(text, choices), partial(final, choices)


def a_line(draw: random.Random) -> tuple[str, Callable[[str], object], Callable[[str], bool]]:
    cased = draw.random() < 0.5
    return VALUE_PIECES, lambda text: parsing.extract_line(text, cased), parsing.is_line_final


def a_value(draw: random.Random) -> tuple[str, Callable[[str], object], Callable[[str], bool]]:
    kind = draw.choice(("number", "number", "yes or no", "true or false", "phrase"))
    take = draw.choice(("first", "last"))
    read = partial(parsing.extract_answer, kind=kind, take=take)
    return NUMBER_PIECES, read, partial(parsing.is_answer_final, kind, take)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [a_letter, a_line, a_value])
def test_nothing_changes_an_answer_once_settled(seed: int, kind: Callable[..., tuple]) -> None:
    draw = random.Random(seed)
    settled = 0
    for _ in range(2000):
        pieces, read, is_settled = kind(draw)
        text = drawn(draw, pieces)
        ends = range(len(text) + 1)
        first = next((end for end in ends if is_settled(text[:end])), None)
        if first is None:
            continue
        settled += 1
        early = read(text[:first])
        assert early is not None
        for end in range(first, len(text) + 1):
            assert read(text[:end]) == early, (text[:first], text[:end])
    assert settled > 100
