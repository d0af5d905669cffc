"""The ablations change what they say and no more; the studies run, go on, and compare in pairs."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm import study
from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.loop.search_inputs import identity_settings
from swarm.optimizers.swarm import MemeticSwarm
from swarm.runs.folder import RunFolder
from swarm.studies import ablations, subprocess_runs
from swarm.tasks.base import Score
from swarm.tasks.metrics import paired_gain
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice

CHANGES: dict[str, dict[str, Any]] = {
    "deterministic": {"weight_randomness": False, "starting_velocity": "zero"},
    "no_repel": {"repel": 0.0},
    "no_restart": {"restart": False},
    "no_crossover": {"particles": None},
    "constant_step": {"step_length_factor": 1.0},
}


def part(key: str, *words: str) -> dict[str, Any]:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        whole = compose("search", overrides=["name=x", *words])
    found: Any = OmegaConf.to_container(whole[key])
    return dict(found)


def optimizer(*words: str) -> dict[str, Any]:
    return part("optimizer", *words)


@pytest.mark.parametrize("name", ["paper", "reference_code"])
def test_the_original_s_reward_model_is_written_down_once(name: str) -> None:
    alone = part("reward", "experiment=reference_reward")
    assert part("reward", f"experiment={name}") == alone != part("reward")
    assert alone["length_high"] == 201 and part("reward")["device"] == alone["device"]
    assert "reward:" not in (conf_folder() / "experiment" / f"{name}.yaml").read_text()
    assert part("reward", f"experiment={name}", "reward.low=null")["low"] is None


def test_every_ablation_is_known_here() -> None:
    files = (conf_folder() / "experiment").glob("ablation_*.yaml")
    assert {path.stem.removeprefix("ablation_") for path in files} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_an_ablation_changes_only_what_it_ablates(name: str) -> None:
    for before, after in (
        (
            optimizer("optimizer.inertia=0.3", "experiment=paper"),
            optimizer("optimizer.inertia=0.3", f"experiment=[paper,ablation_{name}]"),
        ),
        (optimizer("experiment=paper"), optimizer(f"experiment=[paper,ablation_{name}]")),
    ):
        assert {k: v for k, v in after.items() if before[k] != v} == CHANGES[name]


def walk(seed: int, **options: Any) -> np.ndarray:
    """Where a swarm of 4 over 4 experts goes in six steps over a slope."""
    swarm = MemeticSwarm(**{"particles": 4, **options})
    swarm.start(4, seed)
    places = []
    for _ in range(6):
        places.append(swarm.ask())
        swarm.tell(places[-1] @ np.array([0.1, 0.4, 0.3, 0.2]))
    return np.array(places)


def test_the_deterministic_swarm_draws_nothing() -> None:
    assert (walk(1, **CHANGES["deterministic"]) == walk(2, **CHANGES["deterministic"])).all()
    assert (walk(1) != walk(2)).any()


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> tuple[Path, list[str]]:
    """A run folder and the words that made it."""
    folder = tmp_path_factory.mktemp("studies")
    searches.choice_file(folder / "tiny.json", dev=20, test=20)
    words = searches.arguments(folder, tiny_llama, tiny_pool, optimizer__max_iterations=2)
    done = searches.run(words)
    assert done.returncode == 0, done.stderr
    return folder / "search" / "run", words


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in searches.environment().items():
        monkeypatch.setenv(name, value)


def table(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    study.main([*words, "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_folder_and_its_words_are_the_same_search(finished: tuple[Path, list[str]]) -> None:
    folder, words = finished
    ours, theirs = (
        subprocess_runs.load_run_config(folder),
        subprocess_runs.to_plain_config(subprocess_runs.compose_search(words, "x")),
    )
    assert identity_settings(ours) == identity_settings(theirs) and ours["seed"] == theirs["seed"]
    assert subprocess_runs.SearchProcess(ours).load_verdict() is not None
    other = subprocess_runs.override_config(ours, {"optimizer": {"repel": 0.0}})
    assert subprocess_runs.SearchProcess(other).load_verdict() is None
    assert ours["optimizer"]["repel"] == 0.05
    with pytest.raises(UserError, match="no such key"):
        subprocess_runs.override_config(ours, {"optimizer": {"wings": 2}})


def test_weak_to_strong(
    finished: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    rows = table(capsys, "weak_to_strong", str(folder), "--without", "1")
    best, without, full = rows
    run = RunFolder(folder)
    name = run.experts[run.best_expert()[1]]
    assert best["name"] == f"best expert, {name}" and best["difference"] is None
    assert best["test"] == [run.verdict.start_model.test.utility]
    assert full["difference"]["difference"] == pytest.approx(
        run.verdict.start_model.gain.difference
    )
    weak = RunFolder(without["folders"][0])
    assert weak.experts == sorted(set(run.experts) - {name})
    assert without["difference"]["difference"] == pytest.approx(
        without["test"][0] - best["test"][0]
    )
    assert without["difference"]["n"] == 20
    state = Path(without["folders"][0]) / "state.json"
    written = state.stat().st_mtime_ns
    assert table(capsys, "weak_to_strong", str(folder), "--without", "1") == rows
    assert state.stat().st_mtime_ns == written


def test_diversity(finished: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = finished
    whole, one = table(capsys, "diversity", str(folder), "--distinct", "1", "--seeds", "2")
    assert whole["name"] == "all 4" and one["name"] == "1 distinct"
    assert whole["folders"][0] == str(folder) and len(whole["test"]) == len(one["test"]) == 2
    gain = np.mean(one["test"]) - np.mean(whole["test"])
    assert one["difference"]["difference"] == pytest.approx(gain)
    run, again = map(RunFolder, one["folders"])
    assert (run.config["seed"], again.config["seed"]) == (42, 43)
    assert len(run.experts) == 4 and len({name.split(".")[0] for name in run.experts}) == 1
    # Copies of one expert are that expert, wherever the swarm goes.
    expert = RunFolder(folder).experts.index(run.experts[0].split(".")[0])
    assert run.utilities == pytest.approx(RunFolder(folder).utilities[0, expert])


def test_two_studies_in_one_folder_are_refused(
    finished: tuple[Path, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess_runs, "LOCK_TIMEOUT_S", 0)
    folder, _ = finished
    with (
        subprocess_runs.lock_study_folder(folder.parent / "run_ablations"),
        pytest.raises(SystemExit) as end,
    ):
        study.main(["ablations", str(folder)])
    assert end.value.code == 1 and "in use by another" in capsys.readouterr().err


def begin(words: list[str], wanted: Path) -> "subprocess.Popen[str]":
    """Start a study and wait until a file is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.study", *words],
        cwd=searches.ROOT,
        text=True,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not wanted.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def test_a_killed_study_ends_its_search_and_an_interrupted_one_says_how_to_go_on(
    finished: tuple[Path, list[str]],
) -> None:
    done, words = finished
    long = ["name=long", "optimizer.max_iterations=300", "optimizer.patience=300"]
    words = ["ablations", *words, *long]
    folder = done.parent / "long"
    killed = begin(words, folder / "full/answers/iteration_0001.json.gz")
    killed.kill()
    killed.communicate()
    with subprocess_runs.lock_study_folder(folder):
        # Its search kept the lock until it had ended.
        before = RunFolder(folder / "full")
        assert before.finished is None
    stopped = begin(words, folder / f"full/answers/iteration_{len(before.rounds) + 1:04d}.json.gz")
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and "Traceback" not in err, err
    assert err.endswith("stopped; the same command resumes\n")
    after = RunFolder(folder / "full")
    assert len(after.rounds) >= len(before.rounds) and after.finished is None


def test_ablations(finished: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, "ablations", str(finished[0]))
    assert [row["name"] for row in rows] == ["full", *sorted(CHANGES)]
    for row in rows:
        runs = [RunFolder(folder) for folder in row["folders"]]
        assert [run.config["seed"] for run in runs] == [42]
        assert row["dev"] == [run.verdict.dev.utility for run in runs]
        if row["difference"]:
            gain = row["test"][0] - rows[0]["test"][0]
            assert row["difference"]["difference"] == pytest.approx(gain)
            for key, value in CHANGES[row["name"]].items():
                assert all(run.config["optimizer"][key] == value for run in runs)
    text = ablations.rows_to_markdown(rows)
    assert text.count("\n| ") == 7 and all(name in text for name in CHANGES)


@pytest.fixture(scope="module")
def two(finished: tuple[Path, list[str]]) -> Path:
    """A run folder of a search over two experts."""
    run, words = finished
    experts = ",".join(RunFolder(run).experts[:2])
    done = searches.run([*words, "name=two", f"pool.experts=[{experts}]"])
    assert done.returncode == 0, done.stderr
    return run.parent / "two"


def test_the_difference_is_that_of_the_test_utilities() -> None:
    """Of a mixture too: its harmonic mean is taken by seed and not of the seeds' mean answers."""
    parts = {"a": MultipleChoice("a", "a.json"), "b": MultipleChoice("b", "b.json")}
    task, draw = Mixture("m", parts), np.random.default_rng(0)

    def seed(first: float, second: float) -> list[Score]:
        values = [*(draw.random(40) < first), *(draw.random(20) < second)]
        return [Score(float(v), None, part="b" if i >= 40 else "a") for i, v in enumerate(values)]

    own, other = [seed(0.9, 0.1), seed(0.1, 0.9)], [seed(0.4, 0.4), seed(0.4, 0.4)]
    utilities = [[task.utility(scores) for scores in runs] for runs in (own, other)]
    found = ablations.mean_gain_over_seeds(task, own, other)
    assert found.difference == pytest.approx(np.mean(utilities[0]) - np.mean(utilities[1]))
    assert found.low < found.difference < found.high < 0 and found.p < 0.05 and found.n == 60
    one = ablations.mean_gain_over_seeds(task, own[:1], other[:1])
    assert one == paired_gain(task, own[0], other[0])
    # A plain mean is tested item by item.
    plain = [[replace(score, part="") for score in scores] for scores in (*own, *other)]
    found = ablations.mean_gain_over_seeds(parts["a"], plain[:1], plain[2:3])
    assert found == paired_gain(parts["a"], plain[0], plain[2])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["weak_to_strong", "{run}", "--without", "3"], 2, "--without 3: must be from 1 to 2"),
        (["diversity", "{run}", "--distinct", "4"], 2, "--distinct 4: must be from 1 to 3"),
        (
            ["weak_to_strong", "{two}"],
            2,
            "--without needs 3 experts or more",
        ),
        (["ablations", "{run}", "--seeds", "0"], 2, "--seeds 0"),
        (["ablations", "{run}", "seed=3"], 2, "seed=3: give one run folder, or only arguments"),
        (["ablations", "nowhere"], 1, "nowhere contains no search"),
        (["ablations", "task=chess"], 2, "task=chess"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    code: int,
    told: str,
    finished: tuple[Path, list[str]],
    two: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        study.main([word.format(run=finished[0], two=two) for word in words])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == code and last.startswith("error: ") and told in last
