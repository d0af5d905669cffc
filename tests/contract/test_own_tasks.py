"""A user's own tasks, from a yaml or with a function; and the examples of docs/tasks.md."""

import json
import re
from pathlib import Path
from typing import Any

import commands
import numpy
import pytest
import searches
from hydra.utils import instantiate
from omegaconf import OmegaConf
from task_items import phrase_items, write

from swarm.errors import UserError
from swarm.models.base import Completion
from swarm.scorers.function import FunctionScorer, FunctionTask
from swarm.tasks.base import Item, Score

EXAMPLES = searches.ROOT / "examples" / "own_tasks"
PAGE = (searches.ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
YAMLS = sorted((EXAMPLES / "task").glob("*.yaml"))
MINE = "_target_: swarm.tasks.exact_match.ExactMatch\nname: mine\nfile: mine.jsonl\n"


def search(folder: Path, base: Path, pool: Path, *more: str) -> commands.Done:
    """A small search in `folder`, without a task; a --config-dir comes first."""
    given = searches.arguments(folder, base, pool, optimizer__max_iterations=1)
    keys = [key for key in given if not key.startswith("task")]
    first = [word for word in more if word.startswith("--")]
    rest = [word for word in more if not word.startswith("--")]
    return commands.run("swarm.search", *first, *keys, *rest, cwd=folder)


def with_function(folder: Path, body: str, module: str) -> list[str]:
    (folder / f"{module}.py").write_text(f"def score(prompt, answer, item):\n{body}\n")
    write(folder / "items.json", phrase_items(12))
    return ["task=function", f"task.function={module}.score", "task.file=items.json"]


def test_a_yaml_from_any_folder(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    rows = [json.dumps({"question": f"Say {n}.", "answer": str(n)}) for n in range(12)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    (tmp_path / "my_conf" / "task").mkdir(parents=True)
    (tmp_path / "my_conf" / "task" / "mine.yaml").write_text(MINE)
    place = (tmp_path, tiny_llama, tiny_pool, "--config-dir=my_conf")
    done = search(*place, "task=mine", "task.dev_limit=3", "dry_run=true")
    assert "3 dev" in done.out and done.code == 0, done.err
    for words, said in (
        (["task=yours"], "task=yours: no such option"),
        (["task=mine", "+task.dev_limt=3"], "did you mean dev_limit?"),
        (["task=mine", "task.dev_limit=0"], "task.dev_limit=0: must be an integer, at least 1"),
        (["task=function", "task.file=mine.jsonl", "task.template='{question}'"], "is missing"),
    ):
        done = search(*place, *words)
        assert said in done.err and len(done.err.strip().splitlines()) == 1, done.err
    assert not (tmp_path / "search").exists()


def test_a_function_of_the_folder(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    body = "    assert prompt == item['prompt']\n    return len(answer) % 7"
    keys = with_function(tmp_path, body, "own_good")
    done = search(tmp_path, tiny_llama, tiny_pool, *keys, "task.max_new_tokens=8")
    assert done.code == 0, done.err
    for row in searches.answers(tmp_path / "search" / "run", 0)["0"]:
        assert row["value"] == len(row["text"]) % 7
    keys = with_function(tmp_path, "    return item['gold']", "own_bad")
    done = search(tmp_path, tiny_llama, tiny_pool, *keys, "task.max_new_tokens=4", "name=other")
    assert done.code == 1 and "'gold' (own_bad.py line 2)" in done.err
    assert "own_bad.score failed on item" in done.err.strip().splitlines()[-1]


ITEM = {"prompt": "Say it.", "id": "i7"}


def by_item(prompt: str, answer: str, item: Item) -> Any:
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
        ("test_own_tasks.ITEM", "test_own_tasks has no function ITEM"),
        ("test_own_tasks.two", r"cannot be called with \(prompt, answer, item\): too many"),
    ],
)
def test_a_wrong_path_is_told_by_check(path: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionScorer(path).check()


def test_what_a_function_may_return() -> None:
    task = FunctionTask("mine", function="test_own_tasks.by_item", highest=1)
    scorer = task.scorer
    scorer.check()
    for given, value in ((1, 1.0), (True, 1.0), (-2.5, -2.5), (numpy.float32(0.5), 0.5)):
        (score,) = scorer.score([{**ITEM, "give": given}], ["x"])
        assert score == Score(value, "x", "x")
    for wrong in (None, "1", float("nan"), float("inf"), [1], numpy.zeros(2), 10**400):
        with pytest.raises(UserError, match=r"returned .* for item 'i7': must be a finite"):
            scorer.score([{**ITEM, "give": wrong}], ["x"])
    assert scorer.score([{**ITEM, "give": 1}], [" \n"])[0].answer is None
    assert task.highest == 1.0 and not task.votes
    with pytest.raises(UserError, match=r"returned 1.5 for item 'i7', .* task.highest=1"):
        scorer.score([{**ITEM, "give": 1.5}], ["x"])


def test_the_prompt_is_the_one_that_was_put_and_the_item_stays(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", {"dev": [ITEM]})
    task = FunctionTask("mine", str(file), function=changing, template="Q: {prompt}", chat=True)
    game = task.run(task.items("dev"))
    assert next(game)[0].prompt[0].content == "Q: Say it."  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as end:
        game.send([Completion("ok")])
    assert end.value.value[0].value == len("Q: Say it.ok") and task.items("dev")[0] == ITEM


def test_the_page_shows_the_examples_as_they_are() -> None:
    def blocks(language: str) -> list[str]:
        return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)

    assert {path.read_text() for path in YAMLS} <= set(blocks("yaml"))
    assert (EXAMPLES / "stories.py").read_text() in blocks("python")
    data = [path.read_text() for path in EXAMPLES.iterdir() if path.suffix[:5] == ".json"]
    shown = [block.splitlines() for block in blocks("json") if len(block.splitlines()) == 3]
    assert len(shown) == 6
    assert all(any(all(row in text for row in rows) for text in data) for rows in shown)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_an_example_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(searches.ROOT)
    task = instantiate(OmegaConf.load(path), _convert_="all")
    assert task.name == path.stem
    assert (len(task.items("dev")), len(task.items("test"))) == (4, 8)
    task.check()
