"""AbstainQA: two rounds, and what a true or a false is worth."""

import random
from pathlib import Path

import pytest
import searches
import tiny
from task_items import Knowing, Silent, choice_items, played, write

from swarm.models.base import Completion, Message, Request
from swarm.stats.significance import mean_interval, plurality_vote
from swarm.tasks import abstain
from swarm.tasks.abstain import ABSTENTION, Abstain
from swarm.tasks.base import Score, mean_score, unparsed_rate
from swarm.tasks.metrics import utility_with_interval
from swarm.tasks.multiple_choice import MultipleChoice

ITEM = {"question": "Which?", "choices": {"A": "this", "B": "that"}, "answer": "B", "id": 0}
ROUND_1 = (
    "Please choose an option that best answers the question.\n"
    "Question: Which?\nA: this\nB: that\nThe answer is"
)
ROUND_2 = (
    ROUND_1 + "\nProposed answer: {}\n"
    "Is the proposed answer true or false? Directly answer with true or false."
)


class Replying:
    """Says one text to all in the first round and another in the second."""

    def __init__(self, first: str, second: str) -> None:
        self.texts = [first, second]
        self.asked: list[Request] = []

    def generate(self, requests: list[Request]) -> list[Completion]:
        self.asked += requests
        return [Completion(self.texts[len(self.asked) > 1])] * len(requests)


def made(folder: Path, **settings: object) -> Abstain:
    file = write(folder / "one.json", {"dev": [ITEM], "test": [ITEM]})
    return Abstain("one", str(file), dedupe=False, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "value", "answer"),
    [
        (" B.", "True", 1.0, "B"),
        (" A.", "True.", -1.0, "A"),
        (" B.", "False", 0.0, ABSTENTION),
        (" A.", " false, because", 0.0, ABSTENTION),
        (" B.", "I cannot say", 1.0, "B"),
        (" B.", "It is not true.", 0.0, ABSTENTION),
        (" A.", "That isn't quite true", 0.0, ABSTENTION),
        (" A.", "untrue", 0.0, ABSTENTION),
        (" A.", "The proposed answer is incorrect.", 0.0, ABSTENTION),
        (" A.", "It is not correct", 0.0, ABSTENTION),
        (" A.", "wrong", 0.0, ABSTENTION),
        (" A.", "No", 0.0, ABSTENTION),
        (" A.", "**No**, it is", 0.0, ABSTENTION),
        (" B.", "It is not false.", 1.0, "B"),
        (" B.", "Yes", 1.0, "B"),
        (" B.", "There is no doubt: true", 1.0, "B"),
        (" B.", "nothing", 1.0, "B"),
        (" no idea", "", -1.0, None),
        ("", "false", 0.0, ABSTENTION),
        (" B.", "True, it is not false", 1.0, "B"),
    ],
)
def test_values(tmp_path: Path, first: str, second: str, value: float, answer: str | None) -> None:
    task = made(tmp_path)
    items = task.items("dev")
    (score,) = played(task, items, Replying(first, second))
    assert (score.value, score.answer) == (value, answer)
    assert task.grade(items[0], answer) == value >= task.lowest
    assert score.measures == {"abstained": float(value == 0.0), "right": float(first == " B.")}


def test_prompts(tmp_path: Path) -> None:
    for settings, said, proposed in (
        ({}, " B. For", "B: that"),
        ({}, " Neither", " Neither"),
        ({"parser": "original"}, " B. For", "B. For"),
    ):
        model = Replying(said, "true")
        task = made(tmp_path, **settings)
        played(task, task.items("dev"), model)
        assert [request.prompt for request in model.asked] == [ROUND_1, ROUND_2.format(proposed)]
        assert all(request.max_new_tokens == 10 for request in model.asked)
    model = Replying("B", "true")
    task = made(tmp_path, chat=True)
    played(task, task.items("dev"), model)
    assert model.asked[1].prompt == (Message("user", ROUND_2.format("B: that")),)


def test_a_model_stops_once_its_word_is_said(tmp_path: Path) -> None:
    for parser, said in (("anchored", "True."), ("original", "it is FALSE")):
        model = Replying(" B", "")
        task = made(tmp_path, parser=parser)
        played(task, task.items("dev"), model)
        first, second = (request.stop_check for request in model.asked)
        assert (first is None) == (parser == "original")
        assert second is not None and second(said) and not second("it is")


def test_the_original_finds_false_anywhere(tmp_path: Path) -> None:
    for parser, value in (("anchored", 1.0), ("original", 0.0)):
        task = made(tmp_path, parser=parser)
        (score,) = played(task, task.items("dev"), Replying(" B", "True, it is not false"))
        assert score.value == value


class Doubting(Knowing):
    """Knows the letter, and holds it for false."""

    def answer(self, request: Request) -> Completion:
        if request.choices[-1:] == (" false",):
            return Completion("", (-2.0, -1.0))
        return super().answer(request)


def test_both_rounds_by_log_probability(tmp_path: Path) -> None:
    items = choice_items(4)
    file = str(write(tmp_path / "small.json", {"dev": items}))
    task = Abstain("small", file, scoring="logits")
    scores = played(task, task.items("dev"), Doubting(task.items("dev")))
    assert task.utility(scores) == 0.0
    assert all(score.measures["right"] == score.measures["abstained"] == 1.0 for score in scores)


def test_a_vote_may_abstain(tmp_path: Path) -> None:
    """Three voters of low reliability, two of which abstain."""
    task = made(tmp_path)
    answer = plurality_vote(["A", ABSTENTION, ABSTENTION], [-0.1, -0.2, -0.3])
    assert task.grade(task.items("test")[0], answer) == 0.0


def test_utility_is_the_mean(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.json", {"dev": choice_items(8)}))
    task = Abstain("small", file)
    items = task.items("dev")
    silent = played(task, items, Silent())
    assert task.utility(silent) == mean_score(silent) == -1.0 and unparsed_rate(silent) == 1.0
    assert task.highest == 1.0


def test_zeros_are_not_wrong_answers(tmp_path: Path) -> None:
    """All abstained, or none wrong: the interval of right and wrong does not reach below 0."""
    task = made(tmp_path)
    right = [Score(value, "B") for value in (1.0, 0.0) * 10]
    assert utility_with_interval(task, right) == mean_interval(
        [s.value for s in right], signed=True
    )
    zeros = [Score(0.0, ABSTENTION)] * 20
    assert utility_with_interval(task, zeros)[:3] == (0.0, 0.0, 0.0)
    assert utility_with_interval(MultipleChoice("c", "c.json"), zeros).high > 0.1


def test_a_search(tmp_path: Path, tiny_llama: Path) -> None:
    pool = tiny.pool(tiny_llama, tmp_path / "pool")
    command = searches.arguments(
        tmp_path, tiny_llama, pool, task="abstain_mmlu", racing="exact", optimizer__particles=5
    )
    done = searches.run(command)
    assert done.returncode == 0, done.stderr
    rows = searches.answers(tmp_path / "search" / "run", 0)
    assert '"abstained"' in str(rows).replace("'", '"')


PIECES = [
    *"no No not n't isn't true false untrue incorrect wrong correct yes a it".split(),
    *", . * quite is".split(),
    "\n",
]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_changes_a_word_once_settled(seed: int) -> None:
    draw, settled = random.Random(seed), 0
    for _ in range(1000):
        text = "".join(draw.choice(PIECES) + draw.choice(["", " "]) for _ in range(8))
        ends = range(len(text) + 1)
        first = next((end for end in ends if abstain.is_decided(text[:end])), None)
        if first is None:
            continue
        settled += 1
        early = abstain.verdict(text[:first])
        assert early is not None
        for end in range(first, len(text) + 1):
            assert abstain.verdict(text[:end]) == early, (text[:first], text[:end])
    assert settled > 100
