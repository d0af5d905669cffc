"""The Python API: the same run as the command line's, results, tasks of one's own, evaluations."""

import asyncio
import importlib
import json
import logging
import re
import shutil
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from run_folders import write_state
from small_evaluations import searched

import swarm
from swarm import api
from swarm._util.files import conf_folder
from swarm.api import Pool, Result, Roster, UserError, evaluate, open_run, search
from swarm.api.functions import find_free_name, split_keys_and_objects
from swarm.api.overrides import describe_object, to_overrides
from swarm.api.result import best_indices
from swarm.models.base import Completion, Model, Request
from swarm.optimizers.swarm import MemeticSwarm
from swarm.runs.folder import Record, RunFolder, read_state

FEW: dict[str, Any] = {
    "particles": 4,
    "max_iterations": 2,
    "soups": 0,
    "active": None,
    "descent": None,
}


def keys(folder: Path, base: Path, pool: Path, **more: Any) -> dict[str, Any]:
    """The arguments of `search` for what `searches.arguments` says on a command line."""
    if not (folder / "tiny.json").exists():
        searches.choice_file(folder / "tiny.json", 4, 6)
    overrides = {"task.file": folder / "tiny.json", "task.scoring": "logits"}
    if not isinstance(pool, Pool):
        overrides |= {"pool.space": "factor", "pool.groups": "global", "pool.routes": 1}
    return {
        "task": "mmlu",
        "pool": pool,
        "model": base,
        "folder": folder / "search",
        "name": "run",
        "optimizer": FEW,
        "ensemble": 2,
        "overrides": overrides,
        "show": False,
        **more,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def found(home: Path, tiny_llama: Path, tiny_pool: Path) -> Result:
    """A small finished search."""
    return search(**keys(home, tiny_llama, tiny_pool))


def test_the_package_is_quick_light_and_names_no_module_twice() -> None:
    for name in ("search", "evaluate"):
        module = importlib.import_module(f"swarm.{name}")
        assert getattr(swarm, name) is module and module.main
        assert getattr(api, name).__module__ == "swarm.api.functions"
    with pytest.raises(AttributeError, match="nothing"):
        _ = api.nothing
    names = {*api.__all__} - {"search", "evaluate"}
    assert names <= {*dir(swarm)} and all(getattr(swarm, n) is getattr(api, n) for n in names)
    code = (
        "import sys, time; began = time.process_time(); import swarm.api; "
        "took = time.process_time() - began; print(took < 0.2 or took, "
        "[m for m in ('torch', 'hydra', 'numpy') if m in sys.modules])"
    )
    words, env = [sys.executable, "-c", code], searches.environment()
    out = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert out.stdout.strip() == "True []"


SAME = {"optimizer__particles": 4, "optimizer__max_iterations": 2}


def test_the_command_line_goes_on_with_it(
    found: Result, home: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    before = searches.tree(found.folder, "command.json", "report.html")
    config = json.loads((found.folder / "config.json").read_text())
    kept = json.loads((found.folder / "command.json").read_text())["arguments"]
    more = {"ensemble": 2, "minutes": "auto", "baselines": "auto"}
    assert searched(home, tiny_llama, tiny_pool, **SAME, **more) == found.folder
    assert searches.tree(found.folder, "command.json", "report.html") == before
    assert json.loads((found.folder / "config.json").read_text()) == config
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        assert compose("search", overrides=kept).optimizer.particles == 4


def test_it_goes_on_with_the_command_lines(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    given = keys(tmp_path, tiny_llama, tiny_pool)
    folder = searched(tmp_path, tiny_llama, tiny_pool, ensemble=0, noise_floor="false", **SAME)
    identity = (read_state(folder) or {})["identity"]
    overrides = {k: v for k, v in given["overrides"].items() if "pool" not in k}
    objects = given | {"overrides": overrides, "ensemble": 0, "noise_floor": False}
    objects |= {"pool": Pool(tiny_pool), "optimizer": MemeticSwarm(**FEW)}
    assert search(**objects).folder == folder
    assert (read_state(folder) or {})["identity"] == identity
    other = {**objects, "optimizer": MemeticSwarm(inertia=0.3, **FEW)}
    with pytest.raises(UserError, match=r"another search \(optimizer.inertia: 0.2 then, 0.3"):
        search(**other)


def test_the_history(found: Result) -> None:
    frame, names = found.history, ["amber", "birch", "cedar", "dune"]
    columns = ["iteration", "particle", "utility", "best", *names]
    assert [*frame.columns] == [*columns, "prompts_scored", "prompts_saved"]
    assert len(frame) == 3 * 4
    assert frame.best.iloc[-1] == found.best.utility == np.nanmax(frame.utility)
    assert np.allclose(frame[names].sum(axis=1), 1)
    assert frame.groupby("iteration").prompts_scored.first().sum() == found.verdict.cost  # type: ignore[union-attr]


def test_the_best_is_a_model(found: Result) -> None:
    best = found.best
    assert sum(best.coefficients.values()) == pytest.approx(1)
    assert [*best.coefficients.values()] == best.position
    assert (best.folder / "adapter_model.safetensors").is_file()
    text = best.generate("which answer is right", 4)
    request = Request("which answer is right", 4)
    (answer,) = best.generate([request])
    assert isinstance(answer, Completion)
    assert answer.text == text == best.generate("which answer is right", 4, chat=False)
    assert text != best.generate("which answer is right", 4, chat=True)
    bests = found.bests(4)
    assert bests[0].utility == best.utility
    assert len({tuple(one.position) for one in bests}) == len(bests)


def test_what_a_notebook_shows(found: Result) -> None:
    page = found._repr_html_()
    assert page.startswith("<pre>") and "data:image/png;base64," in page
    assert str(found.folder) in str(found) and found.best.words in str(found)
    assert found.best.words in repr(found)
    above, below = found.plot().axes
    assert len(above.lines[0].get_xdata()) == 3
    run = RunFolder(found.folder)
    assert [text.get_text() for text in below.get_legend().get_texts()] == run.experts
    shares = np.array([run.means[index] for index in best_indices(run)])
    for band, mine in zip(below.collections, np.abs(shares).sum(axis=0), strict=True):
        x, y = band.get_paths()[0].vertices.T  # its area is the sum of the shares (Gauss)
        assert abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) / 2) == pytest.approx(mine)
    assert found.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_inside_a_running_loop(
    found: Result, home: Path, tiny_llama: Path, tiny_pool: Path, capsys: Any
) -> None:
    """Of a notebook, or inside a program of Hydra's."""

    async def cell() -> Result:
        return search(**keys(home, tiny_llama, tiny_pool, show=True))

    again = asyncio.run(cell())
    assert again.verdict == found.verdict
    said = capsys.readouterr().out
    assert "worth it: " in said.lower() and "\x1b" not in said
    handlers = logging.getLogger("swarm").handlers
    assert not [one for one in handlers if isinstance(one, logging.FileHandler)]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        with pytest.raises(UserError):
            search("nothing_like_it", folder=home / "other")
        assert compose("search", overrides=["name=x"]).name == "x"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"task": "nlgraf_mini"},
            r"task=nlgraf_mini: no such option; did you mean "
            "task=nlgraph_mini",
        ),
        ({"task": lambda p, a, i: 1.0}, r"task=swarm.api.task\(items, function\)"),
        ({"task": 3}, "task=3: must be the name of an option of conf/task"),
        ({"optimizer": MemeticSwarm}, "optimizer=<class .* or an object"),
        ({"model": "smolm2"}, "did you mean model=smollm2"),
        ({"pool": ["a/one", "b/two"]}, "no such folder a/one"),
        ({"pool": []}, "pool=.*: must be a folder of adapters, a list"),
        ({"overrides": 5}, "overrides=5: must be a dict of keys"),
        ({"name": True}, "name=True: must be the name of a folder"),
        ({"pool": "no/such/folder"}, "no such folder no/such/folder"),
        ({"iterations": 3}, "Could not override 'iterations'; did you mean"),
        ({"overrides": ["optimizer.particle=3"]}, "did you mean optimizer.particles"),
        ({"dry_run": True}, "dry_run is only available on the command line"),
        ({"budget": object()}, "budget=<object .*: must be a string, a number"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        search(folder=tmp_path / "search", show=False, **given)
    assert "\n" not in str(error.value) and not (tmp_path / "search").exists()


@pytest.mark.parametrize(
    "value",
    [
        *("it's", r"a\b", r"end\\", r"\'", "a,b = {c} [d]: e", "", None, True, 3, -0.5, 1e-7),
        [1, "x, y"],
        {"dev": "a'b", "test": "c"},
        [[], {}],
    ],
)
def test_values_reach_hydra_as_they_are(value: Any) -> None:
    (word,) = to_overrides({"task.key": value})
    assert OverridesParser.create().parse_override(word).value() == value


def test_keys_have_several_forms() -> None:
    assert to_overrides({"gpus": 0, "job": {"items": 9}, "racing": "exact"}) == [
        "gpus=[0]",
        "job.items=9",
        "racing=exact",
    ]
    assert to_overrides(["gpus=0,1"]) == to_overrides("gpus=0,1") == ["gpus=[0,1]"]
    given, objects = split_keys_and_objects(
        {"pool": ["a/one", "a/two"], "model": "a/b", "task": None}
    )
    assert given == {"pool": {"folder": "a/one,a/two"}, "model": "a/b"}
    assert to_overrides(given)[1:] == ["model=local", "model.path='a/b'"]
    assert objects == {}


def test_searches_that_begin_in_the_same_second_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("x", "x-2", "x-3"):
        assert find_free_name(tmp_path, "x") == name
        (tmp_path / name).mkdir()


def contains(prompt: str, answer: str, item: dict[str, Any]) -> float:
    return float(item["word"] in answer)


ITEMS = [{"prompt": f"say {word}", "word": word} for word in "abcdefghi"]


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    made = api.task(ITEMS, contains, highest=1.0)
    assert (made.name, made.highest) == ("contains", 1.0)
    assert len(made.items("dev")) == 3 and len(made.items("test")) == 6
    split = api.task({"dev": ITEMS[:2], "test": ITEMS[2:]}, contains, test_limit=4)
    assert [len(split.items(one)) for one in ("dev", "test")] == [2, 4]
    file = tmp_path / "items.json"
    file.write_text(json.dumps(ITEMS))
    assert api.task(file, contains).items("dev") == made.items("dev")
    told = describe_object(made)
    assert told["_target_"] == "swarm.api.functions.CustomTask" and told["source"]
    assert told["source"] != describe_object(api.task(ITEMS, lambda p, a, i: 1.0))["source"]
    with pytest.raises(UserError, match=r'items: .*2 of 9 .* it has no "prompt"'):
        api.task({"dev": [*ITEMS[2:], {}, {}], "test": ITEMS}, contains).items("dev")
    with pytest.raises(UserError, match="score='no'"):
        api.task(ITEMS, "no")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="items=3: must be a list of dicts"):
        api.task(3, contains)  # type: ignore[arg-type]


def test_a_function_that_cannot_travel_is_named(tmp_path: Path) -> None:
    task = api.task(ITEMS, lambda p, a, i: 1.0)
    with pytest.raises(UserError, match="task: it cannot be sent to worker processes"):
        search(task, folder=tmp_path, executor="processes", show=False)
    assert not [*tmp_path.iterdir()]


def test_evaluations(
    found: Result, home: Path, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    given = {
        "task": "mmlu",
        "device": "cpu",
        "overrides": keys(home, tiny_llama, tiny_pool)["overrides"],
    }
    best = evaluate(found, **given, out=tmp_path / "out")
    assert best.utility == found.verdict.found.test.utility
    assert (best.n, best.cost, len(best.items)) == (6, 0.0, 6)
    assert best.interval[0] <= best.utility <= best.interval[1]
    assert evaluate(found.best, **given).rows == best.rows
    again = evaluate(found, **given, out=tmp_path / "out")
    assert (again.result, again.rows) == (json.loads(json.dumps(best.result)), best.rows)
    roster = Roster(base=str(tiny_llama), pool=tiny_pool)
    expert = evaluate("local/dune", **given, roster=roster)
    assert evaluate(tiny_pool / "dune", **given, roster=roster).rows == expert.rows
    gain = best.against(expert)
    assert gain.difference == pytest.approx(best.utility - expert.utility)
    assert "items" in str(gain) and gain.n == 6


def test_evaluations_of_functions_and_models() -> None:
    task = api.task(ITEMS, contains, highest=1.0)
    right = evaluate(lambda prompt: prompt[-1], task)
    wrong = evaluate(lambda prompt: "-", task)
    assert (right.utility, wrong.utility, right.n) == (1.0, 0.0, 6)
    assert right.against(wrong).p < 0.05 and "is distinguishable" in str(right.against(wrong))

    class Paid(Model):
        """The price of every third answer is unknown."""

        def generate(self, requests: list[Request]) -> list[Completion]:
            prices = [(0.5, True), (0.0, False), (0.0, True)]
            return [
                Completion("abc", cost=cost, priced=priced)
                for _, (cost, priced) in zip(requests, cycle(prices), strict=False)
            ]

    partly = evaluate(Paid(), task)
    assert (partly.cost, partly.result["unpriced"]) == (1.0, 2)
    assert "tokens, cost 1.000000 and 2 answers, no price known, " in str(partly)
    assert "cost" not in str(right)
    with pytest.raises(UserError, match="not evaluated on the same items"):
        right.against(evaluate(lambda prompt: "-", task, "dev"))
    with pytest.raises(UserError, match=r"test_limit=2: a task object"):
        evaluate(Paid(), task, test_limit=2)
    with pytest.raises(UserError, match="model=3: must be a model's name"):
        evaluate(3, task)  # type: ignore[arg-type]
    assert evaluate(model=lambda prompt: prompt[-1], task=task).rows == right.rows


def test_a_pool_is_mixed_by_names(tiny_pool: Path, tmp_path: Path) -> None:
    pool = Pool(tiny_pool).open()
    named, listed = pool.combine({"dune": 0.4, "amber": 0.6}), pool.combine([0.6, 0, 0, 0.4])
    assert all((named[m][0] == listed[m][0]).all() for m in pool.modules)
    pool.save({"dune": 1.0}, tmp_path / "mine")
    note = json.loads((tmp_path / "mine" / "swarm.json").read_text())
    assert note["coefficients"] == [0, 0, 0, 1]
    with pytest.raises(UserError, match="no expert 'oak'; it contains: amber, birch, cedar, dune"):
        pool.combine({"oak": 1.0})
    with pytest.raises(UserError, match="a dict by expert name"):
        pool.combine("amber")  # type: ignore[arg-type]


def test_an_unfinished_run_is_opened_as_far_as_it_is(found: Result, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(found.folder, folder)
    state = read_state(folder)
    state |= {"finished": None, "verdict": None, "rounds": state["rounds"][:2]}
    write_state(folder, state)
    answers = sorted((folder / "answers").iterdir())[2:]
    for path in answers:
        path.unlink()
    Record(folder).read().forget([f"answers/{path.name}" for path in answers])
    half = open_run(folder)
    assert half.verdict is None and "Still running" in str(half)
    assert len(half.history) == 8
    with pytest.raises(UserError, match="contains no search"):
        open_run(tmp_path)


def test_the_page_runs(
    home: Path, tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every block of docs/python.md in order, small, on experts of the names that it has."""
    named = tmp_path / "initial_experts"
    for new, old in zip(
        ("arithmetic", "roads", "rooms", "spelling"), sorted(tiny_pool.iterdir()), strict=True
    ):
        shutil.copytree(old, named / new)
    page = (searches.ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    small = {"model": tiny_llama, "pool": named, "ensemble": 0, "noise_floor": False}

    def small_search(task: Any = "nlgraph_mini", **given: Any) -> Result:
        limits = {"task.dev_limit": 2, "task.test_limit": 2} if isinstance(task, str) else {}
        size = {"optimizer.max_iterations": 1, **limits}
        return search(task, **{**given, **small, "overrides": size})

    def small_evaluate(*given: Any, **more: Any) -> Any:
        mine = Roster(base=str(tiny_llama), pool=named)
        return evaluate(*given, **{"roster": mine, "device": "cpu", **more})

    monkeypatch.setattr(api, "search", small_search, raising=False)
    monkeypatch.setattr(api, "evaluate", small_evaluate, raising=False)
    monkeypatch.chdir(tmp_path)
    assert len(blocks) == 8
    space: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(block, space)
    assert {"first", "second", "sums"} == {one.name for one in Path("search").iterdir()}
    assert space["guess"].n == 10 and Path("search/first/report.html").is_file()
    assert (tmp_path / "mixed/by_hand/adapter_config.json").is_file()
