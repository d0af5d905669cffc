"""What every task must do, whichever file of conf/task it comes from."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from judge_endpoints import judge_needs, judged_items, perspective_needs, toxic_items
from lm_eval_tasks import harness_files, question_items
from omegaconf import DictConfig, OmegaConf
from scorer_models import reward_items, reward_needs
from task_items import (
    STRANGE,
    Knowing,
    Mistaken,
    Saying,
    Silent,
    choice_items,
    contrary_items,
    gold,
    hostile,
    match_items,
    number_items,
    phrase_items,
    played,
    text_file,
    text_items,
    write,
    year_items,
)

from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.tasks.base import Task, unparsed_rate
from swarm.tasks.questions import Signal
from swarm.tasks.reward_model import Mode

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "conf" / "task").glob("*.yaml"))
OWN = sorted((ROOT / "examples" / "own_tasks" / "task").glob("*.yaml"))
WRITTEN = "swarm.tasks.free_text.FreeText"
REWARDED = "swarm.tasks.reward_model.RewardModelTask"

# What has to be given on the command line with an option.
GIVEN = {"mixture": [f"+task@task.tasks.{part}=nlgraph_mini" for part in ("graphs", "paths")]}


@cache
def read(yaml: Path) -> DictConfig:
    """A task's configuration as Hydra makes it, which takes longer than most tests of it."""
    with initialize_config_dir(str(yaml.parent.parent), version_base="1.3"):
        if more := GIVEN.get(yaml.stem):
            return compose("search", ["name=test", f"task={yaml.stem}", *more]).task
        return compose(f"task/{yaml.stem}").task


def settings(yaml: Path) -> str:
    """What a task's file says, but for its name and its data."""
    return repr({**OmegaConf.to_container(read(yaml)), "name": None, "file": None})


# Each is given small data here, so of those with the same settings one is enough.
YAMLS = list({settings(yaml): yaml for yaml in reversed(SHIPPED + OWN)}.values())[::-1]
SIGNALLED = [yaml for yaml in YAMLS if "signal" in read(yaml)]

# How to make items for each class of task, of a `Written` one for its scorer's class; a new kind
# adds its own here. An item's "answer" is what a good model says, whether or not the task reads
# it. `None`: the class has no file of its own, only parts that have.
MAKERS: dict[str, Callable[[int], list[dict[str, Any]]] | None] = {
    "swarm.tasks.abstain.Abstain": choice_items,
    "swarm.tasks.multiple_choice.MultipleChoice": choice_items,
    "swarm.tasks.exact_match.ExactMatch": match_items,
    "swarm.tasks.mixture.Mixture": None,
    "swarm.tasks.perplexity.Perplexity": text_items,
    "swarm.tasks.lm_eval_harness.lm_eval": question_items,
    "swarm.scorers.function.FunctionTask": phrase_items,
    "swarm.scorers.own_file.read_task": match_items,
    "swarm.scorers.rules.F1": phrase_items,
    "swarm.scorers.word_pairs.WordPairClassifier": contrary_items,
    "swarm.scorers.rules.Numeric": number_items,
    "swarm.scorers.rules.Regex": year_items,
    "swarm.scorers.llm_judge.LLMJudge": judged_items,
    "swarm.scorers.perspective.PerspectiveScorer": toxic_items,
    **{f"{REWARDED} {mode}": partial(reward_items, mode=mode) for mode in get_args(Mode)},
}

# What a class needs beside its items, as keys of its yaml; the folder is an empty one.
NEEDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "swarm.scorers.function.FunctionTask": lambda folder: {"function": "task_items.shared_words"},
    "swarm.scorers.llm_judge.LLMJudge": judge_needs,
    "swarm.scorers.perspective.PerspectiveScorer": perspective_needs,
    **dict.fromkeys((f"{REWARDED} {mode}" for mode in get_args(Mode)), reward_needs),
}

# How to write the items of a class whose data is no JSON file of dev and test, in an empty folder;
# gives the keys of its yaml.
WRITERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "swarm.tasks.perplexity.Perplexity": text_file,
    "swarm.tasks.lm_eval_harness.lm_eval": harness_files,
}


def kind(config: DictConfig) -> str:
    """What MAKERS and NEEDS know a task by."""
    target: str = config["_target_"]
    if target == REWARDED:
        return f"{target} {config.mode}"
    return config.scorer["_target_"] if target == WRITTEN else target


def composed(yaml: Path) -> DictConfig:
    """One's own copy of it."""
    return copy.deepcopy(read(yaml))


def with_files(config: DictConfig) -> Iterator[DictConfig]:
    """The parts of a task, or parts of parts, that have a file; of most tasks the task itself."""
    assert kind(config) in MAKERS, f"say in MAKERS how to make items for {kind(config)}"
    if MAKERS[kind(config)] is not None:
        yield config
        return
    for part in config.tasks.values():
        yield from with_files(part)


def small(config: DictConfig, folder: Path, swapped: bool = False) -> int:
    """Give each part a small file of its format, 12 dev and 6 test items; how many parts."""
    parts = list(with_files(config))
    for number, part in enumerate(parts):
        make = MAKERS[kind(part)]
        assert make is not None
        items = make(18 * len(parts))[18 * number : 18 * number + 18]
        items = [{"id": f"{number}-{place}", **item} for place, item in enumerate(items)]
        dev, test = ("test", "dev") if swapped else ("dev", "test")
        content = {"dataset": "small", dev: items[:12], test: items[12:]}
        if kind(part) in WRITERS:
            keys = WRITERS[kind(part)](folder / f"small_{number}", content)
        else:
            keys = {"file": str(write(folder / f"small_{number}.json", content))}
        if kind(part) in NEEDS:
            keys |= NEEDS[kind(part)](folder)
        for key, value in keys.items():
            OmegaConf.update(part, key, value, force_add=True)
    return len(parts)


@pytest.fixture(params=YAMLS, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> DictConfig:
    return composed(request.param)


@pytest.fixture
def parts(config: DictConfig, tmp_path: Path) -> int:
    return small(config, tmp_path)


@pytest.fixture
def task(config: DictConfig, parts: int) -> Task:
    """Each task of conf/task and of the examples, over a small file of its format."""
    return instantiate(config, _convert_="all")


@pytest.fixture
def ready(task: Task) -> Task:
    """The task as a worker has it."""
    task.check()
    task.open("cpu")
    return task


def test_items_have_unique_ids(task: Task, parts: int) -> None:
    for split, count in (("dev", 12 * parts), ("test", 6 * parts)):
        items = task.items(split)
        assert len({str(item["id"]) for item in items}) == len(items) == count
        assert task.items(split) == items
    with pytest.raises(UserError, match="dev, test"):
        task.items("train")


def test_requests_and_tasks_travel_to_other_processes(task: Task) -> None:
    items = pickle.loads(pickle.dumps(task)).items("dev")
    requests = pickle.loads(pickle.dumps(next(task.run(items))))
    again = next(pickle.loads(pickle.dumps(task)).run(items))
    assert requests and [r.prompt for r in again] == [r.prompt for r in requests]
    for request, answer in zip(requests, Knowing(items).generate(requests), strict=True):
        assert request.choices or request.max_new_tokens > 0
        if request.stop_check is not None:
            assert request.stop_check(answer.text) in (True, False)
            assert not request.stop_check("")


def test_a_model_that_is_right_scores_higher_than_one_that_is_wrong(ready: Task) -> None:
    items = ready.items("dev")
    models = (Knowing(items), Mistaken(items), Silent())
    right, wrong, silent = (played(ready, items, model) for model in models)
    assert played(ready, items[::-1], Knowing(items))[::-1] == right
    for item, *scores in zip(items, right, wrong, silent, strict=True):
        assert all(ready.grade(item, score.answer) == score.value for score in scores)
    assert ready.utility(right) > ready.utility(wrong)
    assert unparsed_rate(right) == 0.0 and unparsed_rate(silent) == 1.0
    if ready.votes:  # then an answer is right or wrong
        assert ready.utility(right) == 1.0
        assert len({score.value for score in (*wrong, *silent)}) == 1


@pytest.mark.parametrize("yaml", SIGNALLED, ids=lambda path: path.stem)
def test_right_is_above_wrong_by_every_signal(yaml: Path, tmp_path: Path) -> None:
    config = composed(yaml)
    assert config.signal == "accuracy"
    small(config, tmp_path)
    for signal in get_args(Signal):
        config.signal = signal
        task = instantiate(config, _convert_="all")
        items = task.items("dev")
        models = (Knowing(items), Mistaken(items), Silent())
        scores = [played(task, items, model) for model in models]
        right, wrong, silent = map(task.utility, scores)
        assert right == task.highest > wrong >= silent == pytest.approx(task.lowest)
        assert all(task.lowest <= s.value <= task.highest for row in scores for s in row)
        assert task.metric_task.utility(played(task.metric_task, items, Knowing(items))) == 1.0


def test_dev_and_test_are_played_alike(config: DictConfig, tmp_path: Path) -> None:
    if config["_target_"].endswith("Perplexity"):
        pytest.skip("both splits come of one text")
    tasks = []
    for swapped in (False, True):
        small(config, tmp_path / str(swapped), swapped)
        tasks.append(instantiate(config, _convert_="all"))
        tasks[-1].open("cpu")
    for split, other in (("dev", "test"), ("test", "dev")):
        one, two = tasks[0].items(split), tasks[1].items(other)
        asked = [
            [(r.prompt, r.max_new_tokens) for r in next(t.run(i))]
            for t, i in zip(tasks, (one, two), strict=True)
        ]
        assert one == two and asked[0] == asked[1]
        for model in (Knowing(one), Mistaken(one)):
            assert played(tasks[0], one, model) == played(tasks[1], two, model)


def test_no_answer_is_too_strange(ready: Task) -> None:
    # Scoring runs a model or a program twice for each text: there the chosen ones are enough.
    count = len(STRANGE) if ready.needs_setup else 200
    items, texts = ready.items("dev"), hostile(count)
    assert len(set(texts)) == len(texts) == count
    for start in range(0, len(texts), len(items)):
        some = texts[start : start + len(items)]
        mine = items[: len(some)]
        for request, text in zip(next(ready.run(mine)), some, strict=False):
            assert request.stop_check is None or request.stop_check(text) in (True, False)
        scores = played(ready, mine, Saying(some))
        assert len(scores) == len(mine) and 0.0 <= unparsed_rate(scores) <= 1.0
        for item, score in zip(mine, scores, strict=True):
            assert not math.isnan(score.value)
            assert ready.grade(item, score.answer) == score.value


def test_every_key_is_explained() -> None:
    for yaml in SHIPPED:
        lines = yaml.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), yaml.name
        bare = [line for line in lines[1:] if line and "#" not in line]
        assert all(line.startswith("_target_:") for line in bare), (yaml.name, bare)


@pytest.mark.parametrize("yaml", SHIPPED, ids=lambda path: path.stem)
def test_the_files_that_ship_are_read(yaml: Path) -> None:
    config = read(yaml)
    if not str(config.get("file")).startswith("data/") or not (ROOT / config.file).is_file():
        pytest.skip("its file is fetched")
    task = instantiate(config, _convert_="all")
    if task.needs_setup:
        pytest.skip("a model scores its answers")
    for split in ("dev", "test"):
        items = task.items(split)
        # By the whole prompt: real questions repeat, and hold one another.
        prompts = [str(request.prompt) for request in next(task.run(items))]
        golds = dict(zip(prompts, items, strict=True))

        def answer(request: Request, golds: Any = golds) -> Completion:
            item = golds[str(request.prompt)]
            right = item.get("choices", {}).get(item["answer"])
            likely = tuple(-float(choice.strip() != right) for choice in request.choices)
            return Completion(f" {gold(item)}\n", likely)

        class ByPrompt(Silent):
            def generate(self, requests: Sequence[Request]) -> list[Completion]:
                return [answer(request) for request in requests]

        assert task.utility(played(task, items, ByPrompt())) == 1.0
