"""Several tasks as one: items, rounds in step, utilities, and a real search."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from task_items import Knowing, Silent, choice_items, match_items, played, write

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.tasks.abstain import Abstain
from swarm.tasks.base import Item, Score, Task, TaskRun
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.perplexity import Perplexity


class Patient(Task):
    """Asks of each item in as many rounds as it is told; right if the last reply is "yes"."""

    def __init__(self, name: str, rounds: int, count: int = 3) -> None:
        self.name, self.times, self.count = name, rounds, count

    @property
    def rounds(self) -> int:
        return self.times

    def items(self, split: str) -> Sequence[Item]:
        return [{"id": n, "question": f"{self.name} {n}"} for n in range(self.count)]

    def run(self, items: Sequence[Item]) -> TaskRun:
        said = [Completion("yes")] * len(items)
        for number in range(self.times):
            said = yield [Request(f"{item['question']} round {number}", 4) for item in items]
        return [Score(float(s.text == "yes"), s.text, s.text) for s in said]

    def grade(self, item: Item, answer: str | None) -> float:
        return float(answer == "yes")

    def utility(self, scores: Sequence[Score]) -> float:
        assert all(score.part == "" for score in scores)
        return 2 * sum(score.value for score in scores) / len(scores) - 1


class Yes(Model):
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion("yes") for _ in requests]


@pytest.fixture
def two(tmp_path: Path) -> Mixture:
    """Eight choices and four matches, of the same ids."""
    choices = [{**item, "id": n} for n, item in enumerate(choice_items(8))]
    letters = write(tmp_path / "letters.json", {"dev": choices, "test": choices[:4]})
    golds = write(tmp_path / "golds.json", {"dev": match_items(4), "test": match_items(6)[4:]})
    parts = {
        "letters": MultipleChoice("a", str(letters), dedupe=False),
        "golds": ExactMatch("b", str(golds)),
    }
    return Mixture("two", parts)


def scores_of(**values: Sequence[float]) -> list[Score]:
    return [Score(v, None, part=part) for part, row in values.items() for v in row]


def test_items_are_those_of_all_parts(two: Mixture) -> None:
    items = two.items("dev")
    ids = [*(f"letters/{n}" for n in range(8)), *(f"golds/{n}" for n in range(4))]
    assert sorted(item["id"] for item in items) == sorted(ids)
    assert [item["part"] for item in items] == ["letters"] * 8 + ["golds"] * 4
    assert items[0]["item"] in two.tasks["letters"].items("dev")
    assert len(two.items("test")) == 6
    with pytest.raises(UserError, match="dev, test"):
        two.items("train")


def test_a_part_is_asked_and_scored_as_it_is_alone(two: Mixture) -> None:
    items = two.items("dev")
    for model in (Knowing(items), Silent()):
        together = played(two, items, model)
        assert [score.part for score in together] == [item["part"] for item in items]
        for part, task in two.tasks.items():
            alone = played(task, task.items("dev"), model)
            mine = [score for score in together if score.part == part]
            assert [s.value for s in mine] == [s.value for s in alone]
            assert two.subtask_utilities(together)[part] == task.utility(alone)
        graded = [two.grade(i, s.answer) for i, s in zip(items, together, strict=True)]
        assert graded == [score.value for score in together]
    mixed = [*items[8:10], *items[:3], *items[10:], *items[3:8]]
    assert [s.part for s in played(two, mixed, Silent())] == [item["part"] for item in mixed]
    assert {s.part for s in played(two, items[:3], Silent())} == {"letters"}


def test_parts_of_different_lengths_are_played_in_step() -> None:
    task = Mixture("m", [Patient("one", 1), Patient("three", 3, 2), Patient("none", 0)])
    game = task.run(task.items("dev"))
    requests = next(game)
    rounds = []
    while True:
        rounds.append([str(request.prompt) for request in requests])
        try:
            requests = game.send([Completion(f"{request.prompt}") for request in requests])
        except StopIteration as end:
            scores = end.value
            break
    assert [len(asked) for asked in rounds] == [5, 2, 2]
    assert rounds[2] == ["three 0 round 2", "three 1 round 2"]
    assert [s.text for s in scores] == [*rounds[0][:3], *rounds[2], *["yes"] * 3]
    game = task.run(task.items("dev"))
    next(game)
    with pytest.raises(ValueError, match="4 completions of 5"):
        game.send([Completion("yes")] * 4)


@pytest.mark.parametrize(
    ("combine", "weights", "utility"),
    [
        ("harmonic", None, 2 / (1 / 0.5 + 1 / 0.25)),
        ("mean", None, 0.375),
        ("minimum", None, 0.25),
        ("weights", {"letters": 3, "golds": 1}, 0.4375),
        ("weights", {"letters": 0.0, "golds": 2}, 0.25),
    ],
)
def test_utilities_are_combined(
    two: Mixture, combine: str, weights: dict[str, float] | None, utility: float
) -> None:
    task = Mixture("m", two.tasks, combine, weights)
    scores = scores_of(letters=[1, 0, 1, 0], golds=[0, 0, 0, 1, 0, 0, 1, 0])
    assert task.subtask_utilities(scores) == {"letters": 0.5, "golds": 0.25}
    assert task.utility(scores) == task.utility(scores[::-1]) == pytest.approx(utility)


def test_the_harmonic_mean_at_and_below_zero(two: Mixture) -> None:
    assert two.utility(scores_of(letters=[1], golds=[0])) == 0.0
    assert two.utility(scores_of(letters=[0], golds=[0])) == 0.0
    task = Mixture("m", [Patient("good", 1), Patient("bad", 1)])
    scores = scores_of(good=[1, 1], bad=[0, 0])
    with pytest.raises(UserError, match=r"task.combine=harmonic: bad is -1.*minimum"):
        task.utility(scores)
    assert Mixture("m", task.tasks, "minimum").utility(scores) == -1.0


@pytest.mark.parametrize(
    "part", [Abstain("a", "a.json"), Perplexity("p"), Mixture("inner", [Abstain("a")], "mean")]
)
def test_a_harmonic_mean_is_refused_of_what_can_be_negative(part: Task, tmp_path: Path) -> None:
    good = MultipleChoice("good", "a.json")
    with pytest.raises(UserError, match=rf"combine=harmonic: {part.name} can be negative.*minimum"):
        Mixture("m", [good, part])
    assert Mixture("m", [good, part], "mean").lowest == part.lowest < 0
    with pytest.raises(UserError, match=r"by its signal=logprob .*task\.tasks\.good\.signal=both"):
        Mixture("m", {"good": MultipleChoice("good", "a.json", signal="logprob")})


def test_scores_without_their_part_are_refused(two: Mixture) -> None:
    with pytest.raises(ValueError, match="no score of the part golds"):
        two.utility(scores_of(letters=[1]))
    with pytest.raises(ValueError, match='a score of an unknown part ""'):
        two.utility([Score(1.0, "A")])


def test_a_mixture_is_a_part_like_any_other(two: Mixture) -> None:
    outer = Mixture("outer", {"inner": two, "patient": Patient("patient", 2)}, "mean")
    items = pickle.loads(pickle.dumps(outer)).items("dev")
    assert {item["part"] for item in items} == {"inner/letters", "inner/golds", "patient"}
    assert len({item["id"] for item in items}) == len(items) == 15
    scores = played(outer, items, Yes())
    assert [score.part for score in scores] == [item["part"] for item in items]
    assert [outer.grade(i, s.answer) for i, s in zip(items, scores, strict=True)] == [
        score.value for score in scores
    ]
    inner = played(two, two.items("dev"), Yes())
    assert outer.subtask_utilities(scores) == {"inner": two.utility(inner), "patient": 1.0}


ONE = Patient("one", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": None}, "task.tasks=null: must be a mapping, or a list"),
        ({"tasks": {"a/b": ONE}}, 'the name "a/b"'),
        ({"tasks": [ONE, ONE]}, "a name occurs more than once"),
        ({"weights": {"one": 1}}, "goes with task.combine=weights"),
        ({"combine": "weights", "weights": {"two": 1}}, "for each of one"),
        ({"combine": "weights", "weights": {"one": float("nan")}}, "task.weights=NaN"),
        ({"combine": "weights", "weights": {"one": 0}}, "not all 0"),
    ],
)
def test_a_wrong_key_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Mixture(**{"name": "m", "tasks": [ONE], **changes})
    assert message in str(caught.value)


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return instantiate(compose("search", [*overrides, "name=x"]).task, _convert_="all")


def test_parts_are_set_added_and_dropped_on_the_command_line() -> None:
    task = composed("task=legal", "task.tasks.hearsay.dev_limit=20", "task.combine=minimum")
    assert list(task.tasks) == ["hearsay", "citation_prediction_classification"]
    assert task.tasks["hearsay"].dev_limit == 20
    task = composed(
        "task=medical",
        "+task@task.tasks.graphs=nlgraph_mini",
        "~task.tasks.medqa",
        "task.combine=weights",
        "task.weights={medmcqa: 1, graphs: 2}",
    )
    assert list(task.tasks) == ["medmcqa", "graphs"]
    assert task.weights == {"medmcqa": 1.0, "graphs": 2.0}
    task = composed("task=culture", "+task@task.tasks.legal=legal")
    assert isinstance(task.tasks["legal"], Mixture)
