"""What every task must do, whichever file of conf/task it comes from."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from playing import Knowing, Silent, choice_items, match_items, played, write

from swarm.errors import UserError
from swarm.models import Completion, Request
from swarm.tasks import Item, Task, unparsed

ROOT = Path(__file__).resolve().parent.parent
ORIGINAL = ROOT.parent / "shared" / "data" / "eval"
YAMLS = sorted((ROOT / "conf" / "task").glob("*.yaml"))


# How to make items for each class of task; a new kind of task adds its own here. `None`: the class
# has no file of its own, only parts that have.
MAKERS: dict[str, Callable[[int], list[dict[str, Any]]] | None] = {
    "swarm.tasks.choice.Choice": choice_items,
    "swarm.tasks.match.Match": match_items,
    "swarm.tasks.mixture.Mixture": None,
}


def composed(yaml: Path) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(f"task/{yaml.stem}").task


def with_files(config: DictConfig) -> Iterator[DictConfig]:
    """The parts of a task, or parts of parts, that have a file; of most tasks the task itself."""
    target = config["_target_"]
    assert target in MAKERS, f"say in MAKERS how to make items for {target}"
    if MAKERS[target] is not None:
        yield config
        return
    for part in config.tasks.values():
        yield from with_files(part)


def small(config: DictConfig, folder: Path) -> int:
    """Give each part a small file of its format, 12 dev and 6 test items; how many parts."""
    parts = list(with_files(config))
    for number, part in enumerate(parts):
        make = MAKERS[part["_target_"]]
        assert make is not None
        items = make(18 * len(parts))[18 * number : 18 * number + 18]
        content = {"dataset": "small", "dev": items[:12], "test": items[12:]}
        part.file = str(write(folder / f"small_{number}.json", content))
    return len(parts)


@pytest.fixture(params=YAMLS, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> DictConfig:
    return composed(request.param)


@pytest.fixture
def parts(config: DictConfig, tmp_path: Path) -> int:
    return small(config, tmp_path)


@pytest.fixture
def task(config: DictConfig, parts: int) -> Task:
    """Each task of conf/task, over a small file of its format."""
    return instantiate(config)


def test_items_have_unique_ids(task: Task, parts: int) -> None:
    for split, count in (("dev", 12 * parts), ("test", 6 * parts)):
        items = task.items(split)
        assert len({str(item["id"]) for item in items}) == len(items) == count
        assert task.items(split) == items
    with pytest.raises(UserError, match="dev, test"):
        task.items("train")


def test_play_asks_and_returns_one_score_an_item(task: Task) -> None:
    items = task.items("dev")
    game = task.play(items)
    requests = next(game)
    assert requests and all(isinstance(request, Request) for request in requests)
    again = next(pickle.loads(pickle.dumps(task)).play(items))
    assert [request.prompt for request in again] == [request.prompt for request in requests]
    backwards = played(task, items[::-1], Knowing(items))
    assert backwards[::-1] == played(task, items, Knowing(items))
    assert len(backwards) == len(items)


def test_a_model_that_knows_is_right_and_a_silent_one_is_not(task: Task) -> None:
    items = task.items("dev")
    right = played(task, items, Knowing(items))
    assert task.utility(right) == 1.0 and unparsed(right) == 0.0
    silent = played(task, items, Silent())
    assert task.utility(silent) == 0.0 and unparsed(silent) == 1.0
    assert all(score.value == 0.0 and score.answer is None for score in silent)


def test_grade_agrees_with_play(task: Task) -> None:
    items = task.items("test")
    for model in (Knowing(items), Silent()):
        for item, score in zip(items, played(task, items, model), strict=True):
            assert task.grade(item, score.answer) == score.value


def test_requests_and_tasks_travel_to_other_processes(task: Task) -> None:
    items = pickle.loads(pickle.dumps(task)).items("dev")
    requests = pickle.loads(pickle.dumps(next(task.play(items))))
    for request, answer in zip(requests, Knowing(items).generate(requests), strict=True):
        assert request.max_new_tokens > 0
        if request.decided is not None:
            assert request.decided(answer.text) in (True, False)
            assert not request.decided("")


def test_every_key_is_explained() -> None:
    for yaml in YAMLS:
        lines = yaml.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), yaml.name
        bare = [line for line in lines[1:] if line and "#" not in line]
        assert all(line.startswith("_target_:") for line in bare), (yaml.name, bare)


@pytest.mark.parametrize("yaml", YAMLS, ids=lambda path: path.stem)
def test_the_real_files_are_read(yaml: Path) -> None:
    config = composed(yaml)
    for part in with_files(config):
        file = ORIGINAL / f"{part.name}.json"
        if not file.exists():
            file = ROOT / "data" / f"{part.name}.json"
        if not file.exists():
            pytest.skip(f"{part.name}.json of the original is not on this machine")
        part.file = str(file)
    task = instantiate(config)
    for split in ("dev", "test"):
        items = task.items(split)
        assert task.utility(played(task, items, KnowingByPrompt(task, items))) == 1.0


class KnowingByPrompt(Knowing):
    """As `Knowing`, by the whole prompt: real questions repeat, and hold one another."""

    def __init__(self, task: Task, items: Sequence[Item]) -> None:
        requests = next(task.play(items))
        pairs = zip(requests, items, strict=True)
        self.golds = {str(request.prompt): str(item["answer"]) for request, item in pairs}

    def answer(self, request: Request) -> Completion:
        return Completion(f" {self.golds[str(request.prompt)]}\n")
