"""The dry run: counts, memory and a measured speed, with the errors of a real start."""

from pathlib import Path

import commands
import pytest
import searches
import tiny
from task_items import write


@pytest.fixture
def command(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    return searches.arguments(tmp_path, tiny_llama, tiny_pool)


def search(*words: str) -> commands.Done:
    return commands.run("swarm.search", *words)


def test_a_dry_run_counts_and_writes_nothing(command: list[str], tmp_path: Path) -> None:
    before = searches.tree(tmp_path)
    done = search(*command, "dry_run=true")
    assert searches.tree(tmp_path) == before and not (tmp_path / "search").exists()
    # (6 + 4 x 6) positions on 12 items; test: both bests and 3 voters; dev once more.
    assert done.out.startswith(
        "dry run: the search takes at most 360 prompts on dev, the test after it 92 items; "
    )
    assert "the first job will show how long it takes" in done.out
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines["folder"].endswith(": new") and "4 adapters" in lines["pool"]
    assert "12 dev items, 16 test items" in lines["task"]
    assert "at most 30 mixtures (6 at the start, then 6 a round)" in lines["search"]
    assert " free (weights " in lines["memory"]
    away = search(*command, "model.path=some/base", "dry_run=true")
    assert "some/base is not on this disk" in away.out, "it is not fetched"


def test_an_earlier_run_gives_the_speed_and_is_described(
    command: list[str], tmp_path: Path
) -> None:
    words = [*command, "minutes=5", "test=false", "optimizer.max_iterations=1"]
    assert search(*words).code == 0
    known = search(*command, "name=other", "dry_run=true", "task.dev_limit=10").out
    assert f", at the speed of {tmp_path / 'search' / 'run'}." in known
    assert "at the speed" not in search(*command, "task.chat=true", "dry_run=true").out
    limited = search(*command, "name=other", "dry_run=true", "minutes=1e-5").out
    assert "it ends after about 0.0006 s (minutes=)" in limited
    before = searches.tree(tmp_path)
    assert "ended after 2 evaluated rounds" in search(*words, "dry_run=true").out
    real, dry = (search(*words, "seed=7", f"dry_run={dry}") for dry in ("false", "true"))
    assert real.code == dry.code == 1
    assert real.err == dry.err and "contains another search" in dry.err
    assert searches.tree(tmp_path) == before


def test_texts_that_a_judge_would_read_are_counted(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    items = [{"prompt": f"say {n}", "id": n} for n in range(10)]
    file = write(tmp_path / "topic.json", {"dataset": "t", "dev": items[:6], "test": items[6:]})
    judge = ["base_url=http://127.0.0.1:9/v1", "model=small", "api_key_env=null"]
    words = [
        *searches.arguments(tmp_path, tiny_llama, tiny_pool, task="human", task__file=file),
        *(f"task.scorer.model.{key}" for key in judge),
        "task.max_new_tokens=64",
        "dry_run=true",
    ]
    done = search(*(word for word in words if not word.startswith("task.scoring")))
    (line,) = [line for line in done.out.splitlines() if line.startswith("judging")]
    assert line.endswith("Judge: at most 180 texts on dev and 8 on test"), "30 x 6 and 2 x 4"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("task.file=missing.json", 1),
        ("optimizer.particles=3", 1),
        ("pool.folder=nowhere", 1),
        ("gpus=99", 1),
        ("dry_run=perhaps", 2),
        ("model.path={plain} task.chat=true", 1),
    ],
)
def test_the_errors_of_a_dry_run_are_the_real_ones(
    change: str, code: int, command: list[str], tmp_path: Path, tiny_llama: Path
) -> None:
    changes = change.format(plain=tiny.plain(tiny_llama, tmp_path / "base")).split()
    dry, real = (search(*command, f"dry_run={dry}", *changes) for dry in ("true", "false"))
    assert not (tmp_path / "search").exists(), "a run folder for what cannot run"
    assert real.code == dry.code == code, dry.err
    assert real.err == dry.err and len(dry.err.strip().splitlines()) == 1
