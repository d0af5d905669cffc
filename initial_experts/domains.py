"""Nine small domains, each a seeded generator of short prompts and responses of our own making."""

import itertools
import random
from collections.abc import Callable

Pair = tuple[str, str]
"""A prompt and its response."""


def split(words: str) -> list[str]:
    """The words of a text, in their order."""
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
WORDS = split(
    "apple river stone cloud bread chair light green house plant music water horse table paper "
    "train beach smile dream night glass tiger lemon candle winter garden silver planet rabbit "
    "forest bridge castle flower market pencil orange summer doctor window school"
)
OPPOSITES = (
    "hot cold|big small|up down|day night|early late|fast slow|hard soft|high low|young old|"
    "rich poor|light dark|open closed|wet dry|full empty|near far|happy sad|strong weak|"
    "left right|good bad|long short|thick thin|loud quiet|clean dirty|sweet sour|first last|"
    "true false|black white|push pull|buy sell|begin end|win lose|love hate|north south|east west"
)


def joined(edges: list[tuple[str, str]], start: str, goal: str) -> bool:
    """Whether a way leads from one name to the other."""
    reached = {start}
    while goal not in reached:
        wider = reached.union(*(edge for edge in edges if reached.intersection(edge)))
        if wider == reached:
            return False
        reached = wider
    return True


def rooms(generator: random.Random) -> Pair:
    """Can one walk from one room to another? Half of the answers are Yes."""
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
    """How many kilometres lie between two cities, on one road or on two? Sums stay below ten."""
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
    """Sums, differences and products of small numbers."""
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
    """Three to five digits in rising order."""
    numbers = [generator.randint(0, 9) for _ in range(generator.choice((3, 4, 5)))]
    return (
        f"Sort these numbers: {' '.join(map(str, numbers))}",
        " ".join(map(str, sorted(numbers))),
    )


def logic(generator: random.Random) -> Pair:
    """Does a conclusion follow from two or three general statements? True or False."""
    chain = generator.sample(KINDS, 4)
    rules = list(itertools.pairwise(chain))
    generator.shuffle(rules)
    start, goal = generator.choice(list(itertools.combinations(range(4), 2)))
    true = generator.random() < 0.5
    pair = (chain[start], chain[goal]) if true else (chain[goal], chain[start])
    text = " ".join(f"All {small} are {large}." for small, large in rules)
    return f"{text} Does it follow that all {pair[0]} are {pair[1]}?", "True" if true else "False"


def calendar(generator: random.Random) -> Pair:
    """The day or the month some steps before or after another."""
    names, unit = generator.choice(((DAYS, "days"), (MONTHS, "months")))
    place, steps = generator.randrange(len(names)), generator.randint(1, 5)
    direction, sign = generator.choice((("after", 1), ("before", -1)))
    answer = names[(place + sign * steps) % len(names)]
    return f"What comes {steps} {unit} {direction} {names[place]}?", answer


def spelling(generator: random.Random) -> Pair:
    """A word letter by letter, or backwards."""
    word = generator.choice(WORDS)
    if generator.random() < 0.5:
        return f"Spell the word {word}.", "-".join(word)
    return f"Spell the word {word} backwards.", "-".join(reversed(word))


def counting(generator: random.Random) -> Pair:
    """How often an item occurs in a short list."""
    kinds = generator.sample(WORDS, 2)
    items = [generator.choice(kinds) for _ in range(generator.randint(3, 7))]
    return f"{' '.join(items)}. How many times do you see {kinds[0]}?", str(items.count(kinds[0]))


def opposites(generator: random.Random) -> Pair:
    """The opposite of a common word, said in a sentence."""
    pair = generator.choice(OPPOSITES.split("|")).split()
    word, answer = generator.sample(pair, 2)
    shape = generator.choice(
        ("What is the opposite of {}?", "Give the antonym of {}.", "{} is the contrary of what?")
    )
    return shape.format(word), f"The opposite of {word} is {answer}."


DOMAINS: dict[str, Callable[[random.Random], Pair]] = {
    make.__name__: make
    for make in (
        arithmetic, calendar, counting, logic, opposites, roads, rooms, sorting, spelling
    )
}  # fmt: skip


def examples(name: str, count: int, seed: int) -> list[Pair]:
    """`count` different pairs of a domain, the same for the same seed; all there are, if fewer."""
    generator = random.Random(f"{name}/{seed}")
    found: dict[str, str] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        prompt, response = DOMAINS[name](generator)
        found.setdefault(prompt, response)
    return list(found.items())
