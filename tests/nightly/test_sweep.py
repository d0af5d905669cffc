"""Sweeps: what is drawn, the table, and that a killed one goes on to the same table."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import endpoints
import pytest
import scorer_models
import searches
from swarm.runs.manifest import encode_state
from swarm.studies.sweep import Trial
from swarm.sweep import parse_sweep

from swarm import sweep
from swarm.errors import UserError
from swarm.studies import subprocess_runs
from swarm.studies import sweep as trials

ORIGINALS = searches.ROOT.parent / "shared" / "data" / "eval"
KEYS = ["inertia", "cognitive", "social", "repel", "step_length"]


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "swarm.sweep", *command],
        cwd=searches.ROOT,
        text=True,
        env=searches.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    process = start(command)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def arguments(folder: Path, base: Path, pool: Path, name: str, **more: Any) -> list[str]:
    small = {"optimizer__max_iterations": 2, "optimizer__particles": 4, **more}
    return ["trials=2", *searches.arguments(folder, base, pool, name, **small)]


def drawn(*words: str) -> list[dict[str, Any]]:
    return [
        {"seed": t.config["seed"], **t.drawn} for t in parse_sweep(["task=nlgraph", *words]).trials
    ]


def test_each_trial_draws_by_seed_and_number_alone() -> None:
    ten, twenty, other = drawn(), drawn("trials=20"), drawn("seed=1")
    assert ten == twenty[:10] and len({str(trial) for trial in twenty}) > 15
    assert not [a for a, b in zip(ten, other, strict=True) if a == b]
    fixed = drawn("optimizer.inertia=0.25", "optimizer.particles=4")
    assert fixed == [{k: v for k, v in t.items() if k != "optimizer.inertia"} for t in ten]
    assert len({trial["seed"] for trial in twenty}) == 20


def test_the_space_is_the_original_s_and_all_of_it_is_drawn() -> None:
    many = drawn("trials=300")
    values = {key: sorted({t[f"optimizer.{key}"] for t in many}) for key in KEYS}
    assert values == {
        "inertia": [0.1, 0.2, 0.3],
        "cognitive": [0.1, 0.2, 0.3, 0.4, 0.5],
        "social": [0.2, 0.3, 0.4, 0.5, 0.6],
        "repel": [0.01, 0.05, 0.1],
        "step_length": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
    }
    assert min(Counter(t["optimizer.inertia"] for t in many).values()) > 70
    mine = drawn("space.optimizer.repel=[7]", "~space.optimizer.social")
    assert {t["optimizer.repel"] for t in mine} == {7} and "optimizer.social" not in mine[0]


def test_a_sweep_is_named_and_placed() -> None:
    legal = parse_sweep(["task=legal", "gpus=[0,1]", "folder=here", "experiment=paper"])
    assert legal.folder == Path("here/legal_sweep")
    assert legal.trials[3].path == Path("here/legal_sweep/trial_03")
    assert legal.trials[3].config["gpus"] == [0, 1]
    assert parse_sweep(["name=mine"]).folder == Path("search/mine")
    limits = [parse_sweep(words).trials[0].config["minutes"] for words in ([], ["minutes=5"])]
    assert limits == [None, 5], "a trial's result does not depend on the machine's speed"


def test_help_says_what_is_drawn() -> None:
    done = run(["--help"])
    assert done.returncode == 0 and "trials=10 task=nlgraph" in done.stdout
    assert "inertia: [0.1, 0.2, 0.3]" in done.stdout


WRONG = [
    (["trials=0"], ["trials=0"]),
    (["seed=-1"], ["seed=-1"]),
    (["name=a/b"], ["name"]),
    (["task=chess"], ["task=chess", "nlgraph"]),
    (["optimizer.inertja=1"], ["inertja"]),
    (["optimizer.patience=0"], ["optimizer.patience"]),
    (["space.optimizer.repel=0.1"], ["space.optimizer.repel=0.1", "list"]),
    (["+space.optimizer.speed=[1]"], ["optimizer.speed", "~space"]),
    (["task.file=missing.json"], ["missing.json"]),
    (["pool.folder=nowhere"], ["nowhere"]),
    (["seed=1,2"], ["seed=1,2"]),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(
    change: list[str], words: list[str], tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    done = run([*arguments(tmp_path, tiny_llama, tiny_pool, "sweep"), *change])
    assert done.returncode in (1, 2) and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in words)
    assert done.stdout == "" and not (tmp_path / "search").exists()


def begun(folder: Path, number: int, **config: Any) -> Trial:
    place = {"folder": str(folder), "name": f"trial_{number:02d}", "seed": number}
    return Trial({**place, **config}, {"optimizer.repel": 0.1})


def ended(folder: Path, number: int, dev: float, gain: float | None, p: float = 0.5) -> Trial:
    """A trial whose folder says that it ended so."""
    trial = begun(folder, number, ensemble=3, test=gain is not None, task={"name": "x"})
    metrics: dict[str, Any] = {
        "settings": {"ensemble": 3, "test_items": None if gain is None else "abc"},
        "ending_best_validation_utility": dev,
        "ending_best_validation_items": 20,
        "starting_best_validation_utility": 0.3,
        "starting_best_validation_interval": [0.2, 0.4],
        "starting_best_expert": "lima",
    }
    if gain is not None:
        metrics |= {
            "ending_best_single_test_accuracy": 0.4 + gain,
            "ending_best_single_test_interval": [0.3, 0.6],
            "ending_best_single_test_items": 20,
            "starting_best_single_test_accuracy": 0.4,
            "starting_best_single_test_interval": [0.3, 0.6],
            "test_gain": gain,
            "test_gain_interval": [gain - 0.1, gain + 0.1],
            "test_gain_p_value": p,
        }
    identity = {"task.name": "x", "seed": number, "task items": "1234"}
    trial.path.mkdir(parents=True)
    (trial.path / "state.json").write_bytes(
        encode_state({"identity": identity, "metrics": metrics})
    )
    return trial


def test_the_best_is_chosen_by_dev_and_told_with_its_test(tmp_path: Path) -> None:
    """Not the best on test, and of equal ones the first."""
    five = [
        ended(tmp_path, 0, dev=0.40, gain=0.20, p=0.01),
        ended(tmp_path, 1, dev=0.50, gain=-0.05),
        ended(tmp_path, 2, dev=0.50, gain=0.10, p=0.2),
        begun(tmp_path, 3),
        begun(tmp_path, 4),
    ]
    summary = trials.summarize_trials(five, {five[3].path: "no memory"})
    assert summary["best"] == "trial_01"
    assert (summary["ended"], summary["failed"]) == (3, 1)
    assert (summary["gained_on_test"], summary["gained_with_p_below_0.05"]) == (2, 1)
    assert summary["gain_on_test_median"] == 0.10
    text = "\n".join(trials.format_summary(summary))
    assert "best by dev, of 3: trial_01" in text and "maximum of 3 trials" in text
    assert "0.350 [0.300, 0.600], -0.050 [-0.150, +0.050]" in text and "0.400" in text
    assert "2 of 3 gained on test, 1 of them" in text and "73 %" in text
    assert "trial_03 failed: no memory" in text and "trial_04" not in text
    trials.write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert text in (tmp_path / "summary.md").read_text()


def test_without_a_test_or_an_end_the_table_says_so(tmp_path: Path) -> None:
    untested = [ended(tmp_path, 0, dev=0.4, gain=None)]
    assert "test=false" in "\n".join(trials.format_summary(trials.summarize_trials(untested, {})))
    nothing = [begun(tmp_path, 1)]
    assert "No trial has ended" in "\n".join(
        trials.format_summary(trials.summarize_trials(nothing, {}))
    )


def test_trials_on_other_items_are_no_sweep(tmp_path: Path) -> None:
    two = [ended(tmp_path, number, dev=0.4, gain=0.1) for number in (0, 1)]
    trials.check_trials(two)
    path = two[1].path / "state.json"
    path.write_bytes(encode_state(json.loads(path.read_text().replace("1234", "5678"))))
    with pytest.raises(UserError, match=r"trial_01 contains another search \(task items"):
        trials.check_trials(two)


def summary(folder: Path, name: str) -> tuple[Any, str]:
    """The table of a sweep, as data and as text."""
    here = folder / "search" / name
    return json.loads((here / "summary.json").read_text()), (here / "summary.md").read_text()


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not path.exists():
        assert process.poll() is None or path.exists(), process.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> tuple[Path, Callable[[str], list[str]]]:
    """Where a sweep named "whole" has ended, and the command of a sweep beside it by its name."""
    folder = tmp_path_factory.mktemp("sweeps")

    def command(name: str) -> list[str]:
        return arguments(folder, tiny_llama, tiny_pool, name, seed=3)

    done = run(command("whole"))
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in summary(folder, "whole")[1].splitlines()[1:])
    # Without a terminal, each of the two searches prints a line an iteration.
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("iteration")]
    assert lines == ["0", "1", "2"] * 2
    return folder, command


def test_killed_interrupted_and_gone_on_with_it_is_the_same_table(
    whole: tuple[Path, Callable[[str], list[str]]],
) -> None:
    place, command = whole
    data, text = summary(place, "whole")
    assert [row["trial"] for row in data["trials"]] == ["trial_00", "trial_01"]
    broken = command("broken")
    folder = place / "search" / "broken"

    killed = start(broken)
    wait_for(folder / "trial_00" / "global_best", killed)
    killed.kill()
    killed.communicate()
    for _ in range(9):
        stopped = start(broken)
        wait_for(folder / "trial_01" / "answers", stopped)
        stopped.send_signal(signal.SIGINT)
        _, err = stopped.communicate(timeout=120)
        if stopped.returncode:
            break
        shutil.rmtree(folder / "trial_01")  # it had ended before the signal came
    assert stopped.returncode == 130 and "Traceback" not in err, err
    assert "stopped; the same command with name=broken resumes" in err
    last = run(broken)
    assert last.returncode == 0, last.stderr
    assert "trial_00 (of 2)" in last.stdout and "already finished" in last.stdout

    assert summary(place, "broken")[0] == data
    assert summary(place, "broken")[1] == text.replace("# whole", "# broken")
    for number in range(2):
        one, other = (place / "search" / name / f"trial_0{number}" for name in ("whole", "broken"))
        assert searches.tree(one) == searches.tree(other)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = run([*broken, "task.dev_limit=6"])
    assert changed.returncode == 1 and changed.stderr.count("\n") == 1
    assert "name=broken" in changed.stderr and "task.dev_limit" in changed.stderr
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_trial_that_fails_is_told_and_the_others_go_on(
    whole: tuple[Path, Callable[[str], list[str]]],
) -> None:
    place, command = whole
    first = shutil.copytree(place / "search/whole/trial_00", place / "search/failing/trial_00")
    good = (first / "state.json").read_bytes()
    (first / "state.json").write_text("no state")
    done = run(command("failing"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    data, text = summary(place, "failing")
    assert [row["error"] is None for row in data["trials"]] == [False, True]
    assert "trial_00 failed: " in text and "is not the state of a search" in text
    assert (data["ended"], data["failed"]) == (1, 1)
    (first / "state.json").write_bytes(good)
    mended = run(command("failing"))
    assert mended.returncode == 0 and summary(place, "failing")[0]["failed"] == 0


def test_two_sweeps_in_one_folder_are_refused(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_runs, "LOCK_TIMEOUT_S", 0)
    second = parse_sweep(arguments(tmp_path, tiny_llama, tiny_pool, "sweep"))
    with (
        subprocess_runs.lock_study_folder(second.folder),
        pytest.raises(UserError, match="in use by another"),
    ):
        sweep.run_sweep(second)
    assert not (second.folder / "trial_00").exists()


SCRIPTS = {
    "concise": ("rm_concise", "rm"),
    "legal": ("legal", "hearsay citation_prediction_classification"),
    "nlgraph": ("nlgraph", "nlgraph"),
    "phd_application": ("human_phd_application", "human_phd_application"),
}
"""The task of each script, and the data files that it fetches."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_differ_in_the_task_and_its_data_alone(name: str, tmp_path: Path) -> None:
    task, files = SCRIPTS[name]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    script = str(searches.ROOT / "scripts" / f"search_{name}.sh")
    done = subprocess.run(
        ["bash", script, "name=mine", "task.dev_limit=2"],
        cwd=tmp_path,
        text=True,
        env=searches.environment(GPUS="0,2", TRIALS="3", PYTHON=str(python)),
        capture_output=True,
    )
    fetched, swept = done.stdout.splitlines()
    assert fetched == f"python -m swarm.fetch_data {files}", done.stderr
    assert swept == (
        f"-m swarm.sweep trials=3 task={task} gpus=0,2 model=gemma_7b "
        "pool.folder=initial_experts/gemma_7b experiment=paper tracker=wandb "
        "name=mine task.dev_limit=2"
    )
    short = searches.ROOT / "scripts" / "sweep.sh"
    wrong = subprocess.run(["bash", str(short), task], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: bash scripts/sweep.sh TASK")


@pytest.mark.parametrize("name", ["concise", "phd_application"])
def test_the_scripts_with_a_reward_model_and_with_a_judge(
    name: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    if not ORIGINALS.is_dir():
        pytest.skip("this script begins with fetching the original's data")
    command = arguments(
        tmp_path,
        tiny_llama,
        tiny_pool,
        "sweep",
        task__max_new_tokens=8,
        optimizer__max_iterations=1,
        ensemble=0,
    )
    small = [w for w in command if not w.startswith(("trials=", "task=", "task.file", "task.sc"))]
    small += ["tracker=none", "task.dev_limit=2", "task.test_limit=2"]
    environment = searches.environment(
        GPUS="[]", TRIALS="1", PYTHON=sys.executable, MODEL_SWARMS_DATA_URL=ORIGINALS.as_uri()
    )
    script = str(searches.ROOT / "scripts" / f"search_{name}.sh")
    with endpoints.endpoint(lambda asked: endpoints.chat("Rating: 7/10")) as server:
        if name == "concise":
            own = [f"task.scorer.model={scorer_models.liking_friendly()}"]
        else:
            own = [
                f"task.scorer.model.base_url={server.url}",
                "task.scorer.model.model=judge",
                "task.scorer.model.api_key_env=null",
                "task.scorer.model.cache=null",
            ]
        done = subprocess.run(
            ["bash", script, *small, *own],
            env=environment,
            text=True,
            capture_output=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "best by dev, of 1: trial_00" in done.stdout
    assert bool(server.asked) == (name == "phd_application")


def test_a_dry_run_writes_nothing(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    done = run([*arguments(tmp_path, tiny_llama, tiny_pool, "sweep"), "dry_run=true"])
    assert done.returncode == 0, done.stderr
    assert "trial_01 (of 2)" in done.stdout and "Nothing is started or written" in done.stdout
    assert not (tmp_path / "search").exists()
