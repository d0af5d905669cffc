"""Searches on tasks with two rounds, several parts and a scale measured on the experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scorer_models
import searches
import tiny
from hydra import compose, initialize_config_dir
from task_items import write

from swarm._util.files import conf_folder
from swarm.export.export import Export
from swarm.loop.evaluator import records_to_scores
from swarm.loop.run import Run
from swarm.runs.folder import RunFolder, read_state

Build = Callable[..., tuple[Run, Any]]


@pytest.fixture
def build(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> Build:
    """Build a small search in tmp_path/search/NAME, with these keys in place of the task's."""

    def build(name: str, **keys: Any) -> tuple[Run, Any]:
        from swarm.search import build_run

        words = searches.arguments(tmp_path, tiny_llama, tiny_pool, name)
        words = [word for word in words if not word.startswith("task")]
        keys = {"optimizer.max_iterations": 2, "ensemble": 0, **keys}
        words += [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return build_run(compose("search", words))

    return build


def test_two_rounds(build: Build, tmp_path: Path) -> None:
    file = searches.choice_file(tmp_path / "choices.json")
    run, config = build("run", task="abstain_mmlu", task__file=file)
    run.search(config)
    rows = RunFolder(tmp_path / "search" / "run").load_answers((0, 0))
    assert {row["value"] for row in rows} <= {-1.0, 0.0, 1.0}
    for row in rows:
        assert (row["answer"] == "abstain") == bool(row["measures"]["abstained"])


def test_a_mixture(build: Build, tmp_path: Path) -> None:
    keys: dict[str, Any] = {}
    for number, part in enumerate(("hearsay", "citation_prediction_classification")):
        file = searches.choice_file(tmp_path / f"{part}.json", 10 + number, 6)
        keys |= {f"task__tasks__{part}__file": file, f"task__tasks__{part}__scoring": "logits"}
    run, config = build("run", task="legal", job__items=7, **keys)
    run.search(config)
    found = RunFolder(tmp_path / "search" / "run")
    rows = found.load_answers((0, 0))
    assert [row["part"] for row in rows] == [row["id"].split("/")[0] for row in rows]
    assert found.utility_at((0, 0)) == run.task.utility(records_to_scores(rows))


def test_a_judge_on_this_machine(build: Build, tmp_path: Path) -> None:
    """Its ratings are the values, and its weights part of the run's identity."""
    items = [{"prompt": f"Prompt {n}?", "id": n} for n in range(8)]
    keys: dict[str, Any] = {
        "task": "human",
        "scorer@task.scorer": "judge_local",
        "task__scorer__model__base__path": tiny.model(tmp_path / "judge", context=1024),
        "task__scorer__max_new_tokens": 4,
        "task__file": write(tmp_path / "human.json", {"dev": items[:5], "test": items[5:]}),
        "task__max_new_tokens": 6,
        "task__chat": "false",
        "optimizer.max_iterations": 1,
    }
    run, config = build("run", **keys)
    found = run.search(config)
    rows = RunFolder(tmp_path / "search" / "run").load_answers((0, 0))
    assert all(0.1 <= row["value"] <= 1 and "judge_new_tokens" in row["measures"] for row in rows)
    assert found is not None
    state = read_state(tmp_path / "search" / "run")
    assert "scorer.model weights" in str(state["identity"])


def test_a_measured_scale_and_an_export_before_the_end(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted search can be exported, and goes on with its scale to the same result."""
    items = [{"prompt": f"Prompt {n}?", "id": n} for n in range(10)]
    keys: dict[str, Any] = {
        "task": "rm_concise",
        "task__file": write(tmp_path / "rm.json", {"dev": items[:7], "test": items[7:]}),
        "task__scorer__model": scorer_models.liking_friendly(),
        "task__max_new_tokens": 8,
        "job__items": 3,
    }
    plain, config = build("plain", **keys)
    plain.search(config)
    one, two = (tmp_path / "search" / name for name in ("plain", "stopped"))
    scale = read_state(one)["scale"]
    measures = [row["measures"] for i in range(4) for row in searches.answers(one, 0)[str(i)]]
    for name, low, high in (("reward", "low", "high"), ("length", "length_low", "length_high")):
        values = [measure[name] for measure in measures]
        assert (scale[low], scale[high]) == (min(values), max(values)) and len(set(values)) > 1
    iterate = Run._run_iteration

    def stop(run: Run, number: int) -> None:
        if number == 1:
            raise KeyboardInterrupt
        iterate(run, number)

    run, config = build("stopped", **keys)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Run, "_run_iteration", stop)
        run.search(config)
    lines = Export(str(two), str(tmp_path / "mine")).write()
    assert "the search had not ended (0 iterations done)" in lines[1]
    assert "had not ended" in (tmp_path / "mine" / "README.md").read_text()
    run, config = build("stopped", **keys)
    run.search(config)
    assert searches.differences(one, two) == []
