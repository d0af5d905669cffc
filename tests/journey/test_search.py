"""Whole searches on the tiny model, through the command line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import searches
import tiny
from peft import PeftModel

from swarm.runs.folder import RunFolder, read_state
from swarm.runs.verdict import read_verdict


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def command(place: Path, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    return searches.arguments(place, tiny_llama, tiny_pool)


@pytest.fixture(scope="module")
def done(place: Path, command: list[str]) -> tuple[Path, str]:
    """The folder and the output of one finished search."""
    result = searches.run_process(command)
    assert result.returncode == 0, result.stderr
    return place / "search" / "run", result.stdout


def test_it_says_what_came_of_it(done: tuple[Path, str]) -> None:
    folder, output = done
    lines = output.splitlines()
    assert lines[0] == f"search {folder}: loading"
    named = r"^test: best expert \(1 of at most \d+\), 16 items, about [\d.]+ s$"
    assert re.search(named, output, re.M)
    assert re.search(r"^(Worth it|Not worth it|Not distinguishable): .* 16 test items", lines[-4])
    assert lines[-3].startswith("Use the best ")
    assert lines[-2].startswith(f"python -m swarm.export {folder} ")
    assert lines[-1] == f"report: {folder / 'report.html'}" and Path(lines[-1][8:]).is_file()
    assert "\x1b[" not in output, "colours where there is no terminal"


def test_look_stops_after_the_table_and_the_search_goes_on_from_there(
    done: tuple[Path, str], place: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(place, tiny_llama, tiny_pool, "looked")
    for _ in range(2):
        looked = searches.run_process([*command, "look=true"])
        assert looked.returncode == 0 and "Alone, " in looked.stdout, looked.stderr
        assert "search ends" not in looked.stdout
        assert len(RunFolder(place / "search" / "looked").iterations) == 1
    went_on = searches.run_process(command)
    assert "resumes after 1 round" in went_on.stdout
    assert searches.differences(done[0], place / "search" / "looked") == []


def test_the_scratchpad_has_the_originals_keys_and_the_record_every_position(
    done: tuple[Path, str],
) -> None:
    pad = json.loads((done[0] / "utility_scratchpad.json").read_text())
    rounds = (read_state(done[0]) or {})["rounds"]
    histories = [pad[f"particle_{i}_history"] for i in range(6)]
    for i, history in enumerate(histories):
        assert len(history) == len(rounds) == len(pad["g_history"])
        assert pad[f"particle_{i}_now"] == history[-1]
        assert pad[f"particle_{i}_best"] == max(history)
    assert pad["g"] == max(map(max, histories)) == pad["g_history"][-1]
    assert pad["g_worst"] == min(map(min, histories))
    assert len(set(pad["g_history"] + histories[0])) > 1, "nothing ever changed"
    positions = np.array([entry["positions"] for entry in rounds])
    assert positions.shape == (len(rounds), 6, 4) and np.allclose(positions.sum(axis=2), 1)
    assert np.array_equal(positions[0, :4], np.eye(4))


def test_the_bests_are_adapters_with_their_answers(
    done: tuple[Path, str], tiny_llama: Path
) -> None:
    folder, _ = done
    pad = json.loads((folder / "utility_scratchpad.json").read_text())
    expected = {f"particle_{i}/personal_best": pad[f"particle_{i}_best"] for i in range(6)}
    for name, utility in {"global_best": pad["g"], **expected}.items():
        facts = json.loads((folder / name / "swarm.json").read_text())
        lines = (folder / name / "answers_dev.jsonl").read_text().splitlines()
        values = [json.loads(line)["value"] for line in lines]
        assert len(values) == 12 and facts["validation_utility"] == utility
        assert sum(values) / 12 == pytest.approx(utility)
    network = PeftModel.from_pretrained(tiny.load(tiny_llama), folder / "global_best")
    assert not np.allclose(tiny.logits(network), tiny.logits(tiny.load(tiny_llama)))


def test_the_final_metrics_have_the_originals_names(done: tuple[Path, str]) -> None:
    folder, _ = done
    state = read_state(folder)
    metrics = read_verdict(state)
    first = state["rounds"][0]["utilities"][:4]
    assert metrics.start_model.dev.utility == max(first), "over the experts alone"
    assert metrics.dev.utility == max(u for entry in state["rounds"] for u in entry["utilities"])
    assert len(metrics.original_names()) == 5
    assert all(0 <= value <= 1 for value in metrics.original_names().values())
    log = (folder / "log.txt").read_text()
    assert "ending_best_single_test_accuracy: " in log


def test_a_second_run_does_nothing_again(done: tuple[Path, str], command: list[str]) -> None:
    folder, first = done
    before = searches.tree(folder)
    result = searches.run(command)
    assert result.returncode == 0, result.stderr
    assert searches.tree(folder) == before
    assert result.stdout.splitlines()[-1] == first.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("seed=7", "seed"),
        ("optimizer.inertia=0.3", "optimizer.inertia"),
        ("pool.experts=[amber,birch,cedar]", "experts"),
    ],
)
def test_going_on_with_another_search_is_refused(
    done: tuple[Path, str], command: list[str], change: str, key: str
) -> None:
    before = searches.tree(done[0])
    result = searches.run([*command, change])
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
    assert key in result.stderr and "contains another search" in result.stderr
    assert searches.tree(done[0]) == before


def test_the_same_seed_is_the_same_search_and_another_is_not(
    done: tuple[Path, str], place: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    again = searches.arguments(place, tiny_llama, tiny_pool, "again")
    other = searches.arguments(place, tiny_llama, tiny_pool, "other", seed=1)
    # Cold: in another process strings hash otherwise.
    assert searches.run_process(again).returncode == 0
    assert searches.run(other).returncode == 0
    name = "utility_scratchpad.json"
    pads = [(place / "search" / run / name).read_bytes() for run in ("run", "again", "other")]
    assert pads[0] == pads[1] != pads[2]
    assert searches.tree(done[0]).keys() == searches.tree(place / "search" / "again").keys()


def test_skipped_particles_keep_their_last_utility(
    place: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(
        place, tiny_llama, tiny_pool, "dropped", optimizer__drop_particle=0.5, test="false"
    )
    assert searches.run(command).returncode == 0
    folder = place / "search" / "dropped"
    state = read_state(folder)
    pad = json.loads((folder / "utility_scratchpad.json").read_text())
    skipped = np.argwhere(
        [[u is None for u in entry["utilities"]] for entry in state["rounds"]]
    ).tolist()
    assert skipped
    for t, i in skipped:
        assert pad[f"particle_{i}_history"][t] == pad[f"particle_{i}_history"][t - 1]
    assert not read_verdict(state).tested


def test_a_sweep_makes_a_folder_a_job(place: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    command = searches.arguments(
        place, tiny_llama, tiny_pool, "sweep", optimizer__max_iterations=1, test="false"
    )
    result = searches.run(["-m", *command, "seed=1,2"])
    assert result.returncode == 0, result.stderr
    assert not (searches.ROOT / "multirun.yaml").exists()
    for number in (0, 1):
        state = read_state(place / "search" / f"sweep_{number}")
        assert state["identity"]["seed"] == number + 1


def test_what_is_judged_follows_the_command(
    done: tuple[Path, str], place: Path, command: list[str]
) -> None:
    """Another ensemble, or other test items, are judged anew; a search is not repeated for it."""
    folder, _ = done
    rounds = read_state(folder)["rounds"]
    result = searches.run([*command, "ensemble=2"])
    assert result.returncode == 0, result.stderr
    size = len(read_verdict(read_state(folder)).vote.members)
    # A vote of one would repeat the best found.
    assert (f"vote of the top {size} (" in result.stdout) == (size > 1)
    untested = searches.run([*command, "test=false"])
    assert untested.returncode == 0 and "test, n" not in untested.stdout
    content = json.loads((place / "tiny.json").read_text())
    other = json.loads(json.dumps(content))
    other["test"][0]["answer"] = "E" if other["test"][0]["answer"] != "E" else "A"
    (place / "tiny.json").write_text(json.dumps(other))
    assert searches.run(command).returncode == 0
    (place / "tiny.json").write_text(json.dumps(content))
    seen = read_state(folder)
    assert searches.run(command).returncode == 0
    again = read_state(folder)
    assert read_verdict(seen).settings != read_verdict(again).settings
    assert seen["rounds"] == again["rounds"] == rounds
