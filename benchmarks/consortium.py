"""When a consortium beats the best of its members, by strategy: simulated models, no network.

A question has four choices. A member knows it with its skill; errors of members are correlated by a
difficulty that they share (a Gaussian copula), and by a trap that catches as many of those who err.
With a probability that is its skill (one draw per question) a judge prefers a right answer,
otherwise it chooses at random. Judges err independently, which favours peer-review: real models
often share their errors. From the second iteration on a member adopts the previous reply with
probability one half. Roles have no effect here.

Prints accuracy, its gain over the best member on the same questions (paired, 95 % interval), and
calls per question; half a minute on one core: python benchmarks/consortium.py [QUESTIONS]
"""

import random
import re
import sys
from collections.abc import Sequence
from statistics import NormalDist

from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.multi_agent.consortium.consortium import STRATEGIES, Consortium
from swarm.multi_agent.types import AgentSpec
from swarm.stats.significance import paired_test

QUESTIONS, NORMAL = int([*sys.argv, "300"][1]), NormalDist()
SCENES = {
    "equals, errors apart": ((0.6,) * 5, 0.0, 0.7),
    "equals, errors alike": ((0.6,) * 5, 0.8, 0.7),
    "equals, weak judge": ((0.6,) * 5, 0.3, 0.1),
    "one far ahead": ((0.85, 0.5, 0.5, 0.5, 0.5), 0.3, 0.5),
    "one far ahead, weak judge": ((0.85, 0.5, 0.5, 0.5, 0.5), 0.3, 0.1),
}


def text_of(request: Request) -> str:
    turns = request.prompt
    return turns if isinstance(turns, str) else "\n".join(turn.content for turn in turns)


def chance(*what: object) -> random.Random:
    return random.Random(" ".join(map(str, what)))


def right(question: str) -> str:
    return "ABCD"[chance("right", question).randrange(4)]


def wrong(question: str, number: int) -> str:
    rest = [letter for letter in "ABCD" if letter != right(question)]
    return rest[chance("trap", question).randrange(3) - number % 3]


class Simulated:
    """A member that answers and reviews, or an arbiter, which only judges."""

    def __init__(self, name: str, skill: float, correlation: float, judging: float) -> None:
        self.name, self.skill, self.correlation, self.judging = name, skill, correlation, judging

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(self.reply(text_of(request), request.sample)) for request in requests]

    def reply(self, text: str, sample: int) -> str:
        (question,) = set(re.findall(r"question (\d+)", text))
        shown = re.findall(r'<answer-\w+ number="(\d+)">\nThe answer is ([A-D])', text)
        if shown:
            return self.judged(question, shown, text)
        return self.answer(
            question,
            re.search(
                r"<previous-synthesis-\w+>\nThe answer is "
                r"([A-D])",
                text,
            ),
        )

    def answer(self, question: str, former: re.Match[str] | None) -> str:
        own = chance(self.name, question, bool(former))
        shared, alone = chance("shared", question).gauss(), own.gauss()
        z = self.correlation**0.5 * shared + (1 - self.correlation) ** 0.5 * alone
        knows = z < NORMAL.inv_cdf(self.skill)
        trapped = own.random() < self.correlation
        letter = right(question) if knows else wrong(question, 0 if trapped else own.randrange(3))
        sure = own.betavariate(4, 2) if knows else own.betavariate(3, 3)
        if former and own.random() < 0.5:
            letter = former[1]
        return f"The answer is {letter}\nConfidence: {sure:.2f}"

    def judged(self, question: str, shown: list[tuple[str, str]], text: str) -> str:
        own = chance(self.name, "judges", question)
        recognizes = own.random() < self.judging
        answer = right(question)
        merit = {n: (recognizes and letter == answer, own.random()) for n, letter in shown}
        order = sorted(merit, key=lambda number: merit[number], reverse=True)
        if "<synthesis>" not in text:
            return " > ".join(order) if "2 > 3 > 1" in text else order[0]
        if "The ranking: " in text and not recognizes:  # such a chair follows its members
            order = re.findall(r"\d+", text.split("The ranking: ")[1].split("\n")[0])
        letter = dict(shown)[order[0]]
        sure = 0.95 if recognizes and merit[order[0]][0] else 0.5
        return f"<synthesis>The answer is {letter}</synthesis><confidence>{sure}</confidence>"


def scores(model: Consortium | Simulated) -> tuple[list[float], float]:
    """Whether each question was answered rightly, and calls a question."""
    asked = [Request(f"This is question {n}: A, B, C or D?", 100) for n in range(QUESTIONS)]
    if isinstance(model, Simulated):
        said, calls = [one.text for one in model.generate(asked)], float(QUESTIONS)
    else:
        came = [one for one in model.run(asked) if not isinstance(one, UserError)]
        said, calls = [one.final.text for one in came], sum(len(one.answers) for one in came)
    hits = [float(f"is {right(str(n))}" in text) for n, text in enumerate(said)]
    return hits, calls / QUESTIONS


for scene, (skills, correlation, judging) in SCENES.items():
    members = [Simulated(f"m{n}", s, correlation, judging) for n, s in enumerate(skills)]
    arbiter = AgentSpec(Simulated("arbiter", 0.0, correlation, judging), "arbiter")
    best = max((scores(member)[0] for member in members), key=sum)
    print(f"\n{scene}: best member {sum(best) / QUESTIONS:.3f}, n = {QUESTIONS}")
    for strategy in STRATEGIES:
        slots = [AgentSpec(member, member.name) for member in members]
        hits, calls = scores(Consortium(slots, arbiter, strategy))
        found = paired_test(hits, best)
        gain = f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
        worth = "better" if found.low > 0 else "worse" if found.high < 0 else "not significant"
        print(f"  {strategy:12} {sum(hits) / QUESTIONS:.3f}  {gain} {worth:16}{calls:5.1f} calls")
