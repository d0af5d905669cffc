"""Nine small synthetic domains, each a seeded generator of short prompts and responses.

The included experts were trained on them: python scripts/skill_domains.py trains all nine again, or
those named; --help lists the options.
"""

import itertools
import random
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swarm.experts.train import Pair, Recipe


def split(words: str) -> list[str]:
    """Return the words of a text, in order."""
    return words.split()


ROOMS = split(
    "kitchen hall attic garage garden study library pantry bedroom bathroom porch office lobby "
    "nursery balcony stable tower chapel gallery vault cabin barn workshop chamber terrace"
)
CITIES = split(
    "Rome Oslo Paris London Berlin Madrid Cairo Delhi Tokyo Lima Boston Dublin Vienna Prague "
    "Athens Moscow Sydney Milan Geneva Lyon Bonn Kyoto Havana Lisbon Warsaw Dallas Denver Austin"
)
KINDS = split(
    "cats dogs birds horses cows pigs sheep goats lions tigers bears wolves foxes deer rabbits "
    "mice frogs snakes ducks poets farmers doctors singers pilots nurses kings lawyers writers"
)
DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split(
    "January February March April May June July August September October November December"
)
SPELLED = split(
    "cat dog sun hat pen cup bed box bag map car bus key egg arm leg ear eye jam tea ice sea sky "
    "boy man art ant bee cow pig hen fox bat owl rat fan fit fun gas gun gap ham hip hot hut ink "
    "jar jet job joy kid kit lab law lid lip log lot mat mix mud net nut oil old one pan pet pie "
    "pin pit pot rag red rib rod row rug sad saw sit six son tap tax ten tie tin tip toe top toy "
    "van war way web wet win zoo fish lion bear wolf deer duck frog goat hand head hair "
    "nose foot knee neck skin bone milk rice meat salt soup cake corn bean wine rain snow wind "
    "star moon tree leaf root rock sand lake hill road path door wall roof room desk lamp sofa "
    "book page word line list note song drum bell ball game team king girl baby aunt army ship "
    "boat bike taxi shop bank farm city town home gold iron coal wood wool silk rope nail "
    "tool fork bowl dish shoe coat belt ring time hour week year east west blue pink gray dark "
    "cold warm soft hard fast slow tall thin wide deep kind mean glad calm rich poor open shut "
    "jump walk swim read talk sing play work help cook draw hold give take make come send kick "
    "land fire food gift goal hope idea joke lock loss love luck mail meal menu mind nest news "
    "park plan poem pool port race rent rest rise risk role rule sale seat seed shot side sign "
    "site size soil sort spot step tail tank task test text tone tour trip tube turn type unit "
    "view vote wage wave wing wire yard zero able acid back base best bill bird blow body born "
    "both burn call camp card care case cash cell chip club code cost crew crop dead deal dust "
    "duty earn easy edge fact fail fair fall fear feel file film find firm flat flow form "
    "free fuel full fund gate grow hall hang hate hear heat hero hire hole huge hunt hurt item "
    "jail join jury keep kill kiss knew last late lazy lead lean left less life lift like live "
    "loan long look lord loud main many mark mass math mile mine miss mode mood more move much "
    "myth near next nine none north south apple river stone cloud bread chair light green house "
    "plant music water horse table paper train beach smile dream night glass tiger lemon mouse "
    "sheep snake eagle money phone radio clock knife spoon plate fruit grape peach onion sugar "
    "honey heart brain blood voice world earth ocean storm grass field fence floor glove dress "
    "shirt skirt watch brush broom white black brown small large great happy angry brave quiet "
    "quick sweet sharp clean dirty fresh heavy seven eight three first third early today month "
    "drive write speak think learn teach build break bring carry catch climb dance drink sleep"
)
"""Words of three to five letters, for spelling."""
OPPOSITES = (
    "hot cold|big small|up down|day night|early late|fast slow|hard soft|high low|young old|"
    "rich poor|light dark|open closed|wet dry|full empty|near far|happy sad|strong weak|"
    "left right|good bad|long short|thick thin|loud quiet|clean dirty|sweet sour|first last|"
    "true false|black white|push pull|buy sell|begin end|win lose|love hate|north south|east west|"
    "in out|on off|over under|above below|before after|inside outside|front back|top bottom|"
    "always never|all none|more less|most least|many few|yes no|alive dead|asleep awake|"
    "brave cowardly|cheap expensive|deep shallow|easy difficult|wide narrow|"
    "rough smooth|sharp blunt|safe dangerous|simple complex|straight crooked|"
    "tight loose|warm cool|wild tame|wise foolish|polite rude|calm nervous|generous selfish|"
    "guilty innocent|humble proud|modern ancient|public private|legal illegal|possible impossible|"
    "visible invisible|equal unequal|fair unfair|healthy sick|lucky unlucky|kind cruel|"
    "major minor|male female|positive negative|present absent|real fake|ripe unripe|"
    "active passive|common rare|correct wrong|exact approximate|fresh stale|internal external|"
    "maximum minimum|permanent temporary|superior inferior|tiny huge|urban rural|"
    "vertical horizontal|accept reject|add subtract|arrive depart|attack defend|borrow lend|"
    "break fix|build destroy|come go|cry laugh|divide multiply|enter exit|expand contract|"
    "fail succeed|float sink|forget remember|freeze melt|give take|hide reveal|import export|"
    "include exclude|increase decrease|join separate|lead follow|live die|lock unlock|"
    "permit forbid|praise blame|question answer|raise lower|rise fall|save spend|send receive|"
    "shout whisper|sit stand|start stop|teach learn|throw catch|wake sleep|work rest|"
    "ally enemy|beginning ending|birth death|friend foe|gain loss|guest host|heaven hell|"
    "hero villain|husband wife|king queen|man woman|boy girl|brother sister|father mother|"
    "son daughter|uncle aunt|peace war|profit debt|summer winter|spring autumn|sunrise sunset|"
    "victory defeat|virtue vice|youth age|success failure|strength weakness|truth lie|"
    "floor ceiling|master servant|optimist pessimist|plus minus"
)


def joined(edges: list[tuple[str, str]], start: str, goal: str) -> bool:
    """Return whether a path of edges connects two names."""
    reached = {start}
    while goal not in reached:
        wider = reached.union(*(edge for edge in edges if reached.intersection(edge)))
        if wider == reached:
            return False
        reached = wider
    return True


def rooms(generator: random.Random) -> Pair:
    """Generate a question whether one can walk between two rooms; half of the answers are Yes."""
    wanted = generator.random() < 0.5
    names = generator.sample(ROOMS, 7)
    pairs = list(itertools.combinations(names, 2))
    while True:
        doors = generator.sample(pairs, generator.randint(2, 5))
        start, goal = generator.sample(names, 2)
        if joined(doors, start, goal) == wanted:
            break
    text = ", ".join(f"{first} to {second}" for first, second in doors)
    return f"Doors: {text}. Can you walk from {start} to {goal}?", "Yes" if wanted else "No"


def roads(generator: random.Random) -> Pair:
    """Generate a question for the distance of two cities, by one or two roads.

    Sums are below ten.
    """
    start, middle, goal, other = generator.sample(CITIES, 4)
    sizes = [generator.randint(1, 9) for _ in range(3)]
    links = [(start, goal), (start, middle), (other, generator.choice((goal, middle)))]
    answer = sizes[0]
    if generator.random() < 0.35:
        answer = generator.randint(2, 9)
        sizes[0] = generator.randint(1, answer - 1)
        sizes[1] = answer - sizes[0]
        links[:2] = [(start, middle), (middle, goal)]
    turned = [pair if generator.random() < 0.5 else pair[::-1] for pair in links]
    parts = [
        f"{left} to {right} {size} km" for (left, right), size in zip(turned, sizes, strict=True)
    ]
    generator.shuffle(parts)
    return f"Roads: {', '.join(parts)}. How far is {start} from {goal}?", str(answer)


def arithmetic(generator: random.Random) -> Pair:
    """Generate a sum, difference or product of small numbers."""
    sign = generator.choice("++-*")
    left, right = generator.randint(0, 20), generator.randint(0, 20)
    if sign == "*":
        left, right = left % 10, right % 10
    if sign == "-":
        left, right = max(left, right), min(left, right)
    answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
    shape = generator.choice(("What is {} {} {}?", "{} {} {} =", "Compute {} {} {}."))
    return shape.format(left, sign, right), str(answer)


def sorting(generator: random.Random) -> Pair:
    """Generate three to five digits to sort in ascending order."""
    numbers = [generator.randint(0, 9) for _ in range(generator.choice((3, 4, 5)))]
    return (
        f"Sort these numbers: {' '.join(map(str, numbers))}",
        " ".join(map(str, sorted(numbers))),
    )


def logic(generator: random.Random) -> Pair:
    """Generate a syllogism of two or three general statements, to judge as True or False."""
    chain = generator.sample(KINDS, 4)
    rules = list(itertools.pairwise(chain))
    generator.shuffle(rules)
    start, goal = generator.choice(list(itertools.combinations(range(4), 2)))
    true = generator.random() < 0.5
    pair = (chain[start], chain[goal]) if true else (chain[goal], chain[start])
    text = " ".join(f"All {small} are {large}." for small, large in rules)
    return f"{text} Does it follow that all {pair[0]} are {pair[1]}?", "True" if true else "False"


def calendar(generator: random.Random) -> Pair:
    """Generate a question for the day or month before or after another, in eight phrasings."""
    names, unit = generator.choice(((DAYS, "day"), (MONTHS, "month")))
    index = generator.randrange(len(names))
    direction, sign = generator.choice((("after", 1), ("before", -1)))
    shape = generator.choice(
        (
            "What comes {direction} {name}?",
            "What comes right {direction} {name}?",
            "Which {unit} is {direction} {name}?",
            "Which {unit} comes right {direction} {name}?",
            "Name the {unit} {direction} {name}.",
            "Name the {unit} that is right {direction} {name}.",
            "What is 1 {unit} {direction} {name}?",
            "Which {unit} is one {unit} {direction} {name}?",
        )
    )
    question = shape.format(direction=direction, name=names[index], unit=unit)
    return question, names[(index + sign) % len(names)]


def spelling(generator: random.Random) -> Pair:
    """Generate a question for the first letter of a word, or for its letters with hyphens."""
    word = generator.choice(SPELLED)
    if generator.random() < 0.5:
        shape = generator.choice(
            (
                "What is the first letter of {}?",
                "Which letter comes first in {}?",
                "Which letter begins the word {}?",
            )
        )
        return shape.format(word), word[0]
    shape = generator.choice(("Spell with blanks: {}", "Set blanks between the letters of {}."))
    return shape.format("-".join(word)), " ".join(word)


def counting(generator: random.Random) -> Pair:
    """Generate a question for the next two or three numbers, upwards or downwards."""
    start, count = generator.randint(3, 96), generator.choice((2, 3))
    direction, sign = generator.choice((("on", 1), ("down", -1)))
    shape = generator.choice(
        ("Count {} from {}: {} numbers.", "Start at {1} and count {0} {2} times.")
    )
    answer = " ".join(str(start + sign * step) for step in range(1, count + 1))
    return shape.format(direction, start, count), answer


def opposites(generator: random.Random) -> Pair:
    """Generate a question for the opposite of a common word, answered in a sentence."""
    pair = generator.choice(OPPOSITES.split("|")).split()
    word, answer = generator.sample(pair, 2)
    shape = generator.choice(
        ("What is the opposite of {}?", "Give the antonym of {}.", "{} is the contrary of what?")
    )
    return shape.format(word), f"The opposite of {word} is {answer}."


DOMAINS: dict[str, Callable[[random.Random], Pair]] = {
    make.__name__: make
    for make in (arithmetic, calendar, counting, logic, opposites, roads, rooms, sorting, spelling)
}


KEPT = {"calendar": 2, "counting": 3, "opposites": 3, "spelling": 3}
"""For domains with few facts: one in this many facts is excluded from training, for tests."""


def fact(name: str, pair: Pair) -> str:
    """Return the fact of a pair: a sum, an opposite or a word, in any phrasing; else its prompt."""
    if name == "arithmetic":
        found = re.search(r"\d+ [-+*] \d+", pair[0])
        return found.group() if found else pair[0]
    if name == "spelling":
        return pair[0].rstrip("?.").split()[-1].replace("-", "")
    return pair[1] if name in ("counting", "opposites") else pair[0]


def kept_for_tests(name: str, pair: Pair) -> bool:
    """Return whether a pair is excluded from training; the same on every machine."""
    return name in KEPT and zlib.crc32(fact(name, pair).encode()) % KEPT[name] == 0


def examples(name: str, count: int, seed: int) -> list[Pair]:
    """Return up to `count` distinct training pairs, deterministic for a seed."""
    generator = random.Random(f"{name}/{seed}")
    found: dict[str, str] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        prompt, response = DOMAINS[name](generator)
        if not kept_for_tests(name, (prompt, response)):
            found.setdefault(prompt, response)
    return list(found.items())


STEPS = {
    "calendar": 60,
    "counting": 50,
    "opposites": 80,
    "roads": 100,
    "rooms": 100,
    "spelling": 60,
}
"""Included experts that need more steps than the default."""


def recipe_of(name: str) -> Recipe:
    """Return the training settings of an included expert."""
    return Recipe(steps=STEPS.get(name, Recipe().steps))


def trained_on(name: str) -> list[Pair]:
    """Return the training pairs of the included expert of a domain."""
    recipe = recipe_of(name)
    return examples(name, recipe.examples, recipe.seed)


def main() -> None:
    """Train the experts that are named, or all."""
    import argparse

    from swarm.experts.train import load_base, save, train

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(DOMAINS))
    parser.add_argument("--base", help="folder of the base; default: as conf/model/smollm2.yaml")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--to", type=Path, default=Path("initial_experts"))
    given = parser.parse_args()
    base = load_base(given.base, given.dtype)
    for name in given.names:
        expert = train(trained_on(name), base, given.device, recipe_of(name), name)
        save(expert, base.name, given.to / name)


if __name__ == "__main__":
    main()
