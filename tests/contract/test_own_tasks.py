"""A user's own tasks: from a yaml anywhere, or with a function; and what docs/tasks.md shows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches
from hydra.utils import instantiate
from omegaconf import OmegaConf
from task_items import phrase_items, write

from swarm.errors import UserError
from swarm.models.base import Completion
from swarm.runs.folder import read_state
from swarm.runs.verdict import read_verdict
from swarm.scorers.function import FunctionScorer, FunctionTask, to_finite_float
from swarm.tasks.base import Item, RequiresSetup, Score

EXAMPLES = searches.ROOT / "examples" / "own_tasks"
PAGE = (searches.ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
YAMLS = sorted((EXAMPLES / "task").glob("*.yaml"))
MINE = "_target_: swarm.tasks.exact_match.ExactMatch\nname: mine\nfile: mine.jsonl\n"


def command(folder: Path, base: Path, pool: Path, *more: str) -> list[str]:
    """The arguments of a small search in `folder`, without a task."""
    given = searches.arguments(folder, base, pool, optimizer__max_iterations=1)
    return [key for key in given if not key.startswith("task")] + list(more)


def run(
    folder: Path, arguments: list[str], root: Path = searches.ROOT
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swarm.search", *arguments],
        cwd=folder,
        text=True,
        env=searches.environment(PYTHONPATH=str(root)),
        capture_output=True,
        timeout=120,
    )


def items_file(folder: Path) -> Path:
    rows = [json.dumps({"question": f"Say {n}.", "answer": str(n)}) for n in range(12)]
    (folder / "mine.jsonl").write_text("\n".join(rows))
    return folder / "mine.jsonl"


def mine(folder: Path) -> Path:
    """A folder of a user's, with a yaml and its data."""
    items_file(folder)
    (folder / "my_conf" / "task").mkdir(parents=True)
    (folder / "my_conf" / "task" / "mine.yaml").write_text(MINE)
    return folder


def test_a_key_that_the_yaml_leaves_out_can_be_set(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    arguments = ["--config-dir", "my_conf", *command(mine(tmp_path), tiny_llama, tiny_pool)]
    arguments += ["task=mine", "dry_run=true"]
    done = run(tmp_path, [*arguments, "task.parser=whole", "task.dev_limit=2"])
    assert done.returncode == 0 and "mine: 2 dev items" in done.stdout, done.stderr
    wrong = one_line(run(tmp_path, [*arguments, "task.parser=strict"]))
    assert "anchored, original, whole, cased (anchored: the number" in wrong
    assert "task.parsr" in one_line(run(tmp_path, [*arguments, "task.parsr=whole"]))


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode in (1, 2), done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_a_yaml_from_any_folder(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    arguments = ["--config-dir", "my_conf", *command(mine(tmp_path), tiny_llama, tiny_pool)]
    done = run(tmp_path, [*arguments, "task=mine"])
    assert done.returncode == 0, done.stderr
    assert "task mine (4 dev items)" in done.stdout
    metrics = read_verdict(read_state(tmp_path / "search" / "run"))
    assert metrics.found.test.n == 8
    assert 0.0 <= metrics.dev.unparsed <= 1.0
    limited = [*arguments, "task=mine", "dry_run=true", "name=other"]
    done = run(tmp_path, [*limited, "+task.dev_limit=2", "+task.test_limit=3"])
    assert "mine: 2 dev items, 3 test items" in done.stdout, done.stderr
    plain = run(tmp_path, [*limited, "task.dev_limit=2", "task.test_limit=3"])
    assert "mine: 2 dev items, 3 test items" in plain.stdout, plain.stderr


def test_a_yaml_in_the_checkout(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "elsewhere"
    for part in ("swarm", "conf"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(searches.ROOT / part, checkout / part, ignore=leave)
    folder.mkdir()
    items_file(folder)
    (checkout / "conf" / "task" / "mine.yaml").write_text(MINE)
    arguments = command(folder, tiny_llama, tiny_pool, "task=mine", "dry_run=true")
    done = run(folder, arguments, checkout)
    assert "mine: 4 dev items, 8 test items" in done.stdout, done.stderr


def test_mistakes_are_one_line(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    folder = mine(tmp_path)
    arguments = ["--config-dir", "my_conf", *command(folder, tiny_llama, tiny_pool)]
    line = one_line(run(folder, [*arguments, "task=yours"]))
    assert "task=yours: no such option" in line and " mine, " in line
    line = one_line(run(folder, [*arguments, "task=mine", "+task.dev_limt=3"]))
    assert "unexpected keyword argument 'dev_limt'" in line
    assert not (folder / "search").exists()


# A Python function.

BY_FUNCTION = ["task=function", "task.function=own.score", "task.file=items.json"]


def with_function(folder: Path, body: str) -> Path:
    (folder / "own.py").write_text(f"def score(prompt, answer, item):\n{body}\n")
    write(folder / "items.json", phrase_items(12))
    return folder


def test_a_function_of_the_folder(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    body = "    assert prompt == item['prompt']\n    return len(answer) % 7"
    arguments = command(with_function(tmp_path, body), tiny_llama, tiny_pool, *BY_FUNCTION)
    done = run(tmp_path, [*arguments, "task.max_new_tokens=8", "executor=processes"])
    assert done.returncode == 0, done.stderr
    for row in searches.answers(tmp_path / "search" / "run", 0)["0"]:
        assert row["value"] == len(row["text"]) % 7


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    return item['gold']", ["own.score failed on item", "'gold' (own.py line 2)"]),
        ("    return 'good'", ["own.score returned 'good' for item", "finite number"]),
    ],
)
def test_a_function_that_fails_is_one_line(
    body: str, words: list[str], tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    arguments = command(with_function(tmp_path, body), tiny_llama, tiny_pool, *BY_FUNCTION)
    done = run(tmp_path, [*arguments, "task.max_new_tokens=4"])
    assert done.returncode == 1
    assert all(word in done.stderr.strip().splitlines()[-1] for word in words), done.stderr


def test_no_function_is_told_before_anything_is_written(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    arguments = command(with_function(tmp_path, "    return 0"), tiny_llama, tiny_pool)
    done = run(tmp_path, [*arguments, "task=function", "task.file=items.json"])
    assert "task.function is missing" in one_line(done)
    assert not (tmp_path / "search").exists()


ITEM = {"prompt": "Say it.", "id": "i7"}


def by_item(prompt: str, answer: str, item: Item) -> Any:
    """What `Function` is called with here, for a look at what it makes of the result."""
    return item["give"]


def changing(prompt: str, answer: str, item: dict[str, Any]) -> float:
    """Changes its item, which has to stay as it is."""
    item["prompt"] = "changed"
    return len(prompt + answer)


def two(prompt: str, answer: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "task.function is missing"),
        ("score", "'score' is not module.name"),
        ("no_such_module.score", "no_such_module cannot be imported from .*No module named"),
        ("test_own_tasks.absent", "test_own_tasks has no function 'absent'"),
        ("test_own_tasks.ITEM", "test_own_tasks has no function 'ITEM'"),
        ("test_own_tasks.two", r"cannot be called with \(prompt, answer, item\): too many"),
    ],
)
def test_a_wrong_path_is_told_by_check(path: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionScorer(path).check()


def test_a_module_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken.py").write_text("x = 1\nx.y\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"AttributeError: .* \(own_broken.py line 2\)"):
        FunctionScorer("own_broken.score").check()


def test_what_a_function_may_return() -> None:
    import numpy

    scorer = FunctionScorer("test_own_tasks.by_item")
    scorer.check()
    for given, value in ((1, 1.0), (True, 1.0), (-2.5, -2.5), (numpy.float32(0.5), 0.5)):
        (score,) = scorer.score([{**ITEM, "give": given}], ["x"])
        assert score == Score(value, "x", "x")
    for given in (None, "1", float("nan"), float("inf"), [1], numpy.zeros(2), 10**400):
        assert to_finite_float(given) is None
        with pytest.raises(UserError, match=r"returned .* for item 'i7': must be a finite"):
            scorer.score([{**ITEM, "give": given}], ["x"])
    assert scorer.score([{**ITEM, "give": 1}], [" \n"])[0].answer is None


def test_the_most_that_it_returns() -> None:
    task = FunctionTask("mine", "test_own_tasks.by_item", highest=1)
    assert task.highest == 1.0 and not task.votes
    assert not hasattr(FunctionTask("mine", "test_own_tasks.by_item"), "highest")
    with pytest.raises(UserError, match=r"returned 1.5 for item 'i7', .* task.highest=1.0"):
        task.scorer.score([{**ITEM, "give": 1.5}], ["x"])
    with pytest.raises(UserError, match=r"task.highest: 'high' is neither null nor a number"):
        FunctionTask("mine", "test_own_tasks.by_item", highest="high")  # type: ignore[arg-type]


def test_the_prompt_is_the_one_that_was_put_and_the_item_stays(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", {"dev": [ITEM]})
    task = FunctionTask(
        "mine", "test_own_tasks.changing", template="Q: {prompt}", file=str(file), chat=True
    )
    items = task.items("dev")
    game = task.run(items)
    (request,) = next(game)
    assert request.prompt[0].content == "Q: Say it."  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as end:
        game.send([Completion("ok")])
    assert end.value.value[0].value == len("Q: Say it.ok") and items[0] == ITEM


# The page.


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_examples_as_they_are() -> None:
    assert sorted(blocks("yaml")) == sorted(path.read_text() for path in YAMLS)
    assert blocks("python") == [(EXAMPLES / "stories.py").read_text()]
    data = {path: path.read_text() for path in EXAMPLES.iterdir() if path.suffix[:5] == ".json"}
    shown = blocks("json")
    assert len(shown) == 6
    for block in shown:
        rows = block.splitlines()
        assert len(rows) == 3
        of = [path for path, text in data.items() if all(row in text for row in rows)]
        assert len(of) == 1, block


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_an_example_is_small_and_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(searches.ROOT)
    assert len(path.read_text().splitlines()) <= 8
    task = instantiate(OmegaConf.load(path), _convert_="all")
    assert task.name == path.stem
    assert (len(task.items("dev")), len(task.items("test"))) == (4, 8)
    if isinstance(task, RequiresSetup):
        task.check()


def test_there_is_an_example_of_every_kind() -> None:
    kinds = {word for path in YAMLS for word in re.findall(r"swarm\.[\w.]+", path.read_text())}
    assert {kind.rpartition(".")[2] for kind in kinds} == {
        "MultipleChoice",
        "ExactMatch",
        "FreeText",
        "Regex",
        "Numeric",
        "F1",
    }
    assert os.path.exists(EXAMPLES / "stories.json") and "task=function" in PAGE
