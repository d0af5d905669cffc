"""What the page's runs stand on: their folder, their processes, the form, the command."""

import json
import os
import re
import sys
import time
from pathlib import Path

import commands
import pytest
import run_folders
import searches
import ui_pages

from swarm._util.options import run_click
from swarm.errors import UserError, install_command
from swarm.runs.folder import RunFolder
from swarm.runs.lock import RunLock
from swarm.ui import expert_mixer
from swarm.ui.__main__ import ui
from swarm.ui.expert_mixer import list_bests, list_model_names
from swarm.ui.launcher import SearchLauncher, check_search, output_path
from swarm.ui.pages import new_search
from swarm.ui.state import AppState, RunIndex


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b/c", "a/../b", "a/.page", "/etc", ".page", "a\x00", "a\\b"]
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a run name"):
        AppState(tmp_path).run_path(name)


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_folders.folder(tmp_path / "run_0", particles=10, iterations=9)
    state = (first / "rounds.jsonl").read_bytes()
    for number in range(1, 500):
        other = tmp_path / f"run_{number}"
        other.mkdir()
        (other / "rounds.jsonl").write_bytes(state)
    part = tmp_path / "sweep" / "trial_00"
    part.mkdir(parents=True)
    (part / "rounds.jsonl").write_bytes(state)
    shelf = RunIndex(tmp_path)
    lines = shelf.list_runs()
    assert "sweep/trial_00" in {line.name for line in lines} and len(lines) == 501
    with monkeypatch.context() as patch:
        patch.setattr("swarm.ui.state._extract_facts", lambda state: pytest.fail("read again"))
        assert shelf.list_runs() == lines
    kept = (first / "rounds.jsonl").stat()
    (first / "rounds.jsonl").write_bytes(b"x" * len(state))
    os.utime(first / "rounds.jsonl", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert shelf.list_runs() == lines
    os.utime(first / "rounds.jsonl")
    assert len(shelf.list_runs()) == 500


def test_states_of_a_run(tmp_path: Path) -> None:
    run, shelf = run_folders.folder(tmp_path / "run", finished=False), RunIndex(tmp_path)
    assert shelf.list_runs()[0].state == "stopped"
    now = {"activity": "iteration 4", "iteration": 4, "max_iterations": 50, "done": 3, "total": 9}
    hold = RunLock(run, lambda: now)
    ends = time.monotonic() + 60
    while shelf.list_runs()[0].details != "iteration 4 of at most 50, 3 of 9 items":
        assert time.monotonic() < ends, shelf.list_runs()[0].details
        time.sleep(0.05)
    assert shelf.list_runs()[0].state == "running"
    note = (run / "running.json").read_text()
    hold.close()
    (run / "running.json").write_text(note)
    assert (shelf.list_runs()[0].state, shelf.list_runs()[0].details) == (
        "stopped",
        "killed after iteration 4",
    )
    (run / "running.json").unlink()
    output_path(run).parent.mkdir()
    output_path(run).write_text("10 %\r20 %\nerror: no room\nsome line\n")
    assert (shelf.list_runs()[0].state, shelf.list_runs()[0].details) == ("failed", "no room")
    os.utime(run / "rounds.jsonl", (time.time() + 5, time.time() + 5))
    assert shelf.list_runs()[0].state == "stopped"


def test_only_who_holds_the_folder_is_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match="no search is running"):
        SearchLauncher().stop_search(run)
    hold = RunLock(run)
    note = json.loads((run / "running.json").read_text())
    for wrong in ({"pid": os.getppid()}, {"host": "elsewhere"}, {"pid": "1"}):
        (run / "running.json").write_text(json.dumps(note | wrong))
        with pytest.raises(UserError, match="of another user or machine"):
            SearchLauncher().stop_search(run)
    with pytest.raises(UserError, match="already running"):
        SearchLauncher().start_search(run, [], tmp_path)
    hold.close()
    for kept, error in (("5", "no stored command"), ('["name=other"]', "belongs to another run")):
        (run / "command.json").write_text(f'{{"arguments": {kept}, "directory": "/"}}')
        with pytest.raises(UserError, match=error):
            SearchLauncher().resume_search(run)


def test_the_form_s_arguments(tmp_path: Path) -> None:
    home = AppState(tmp_path, "mine", "some/folder", "cuda:1")
    chosen, given = new_search.initial_form(home)
    numbers = given | {"seed": " 007 ", "budget": "", "task.file": "my data/it's.jsonl"}
    assert new_search.build_arguments(home, "try", chosen, numbers, "") == [
        "task=nlgraph_mini",
        "model=local",
        "pool.folder=mine",
        "model.path=some/folder",
        "gpus=[1]",
        "seed=7",
        r"task.file='my data/it\'s.jsonl'",
        "name=try",
    ]
    own = tmp_path / "own" / "task" / "riddles.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# Riddles.\ndefaults:\n  - nlgraph_mini\n  - _self_\ndev_limit: 7\n")
    other = AppState(tmp_path, config_dir=own.parent.parent)
    assert new_search.group_options("task", other.config_dir)["riddles"] == "Riddles."
    own_task = new_search.default_options() | {"task": "riddles"}
    assert new_search.build_arguments(other, "try", own_task, {"seed": ""}, "") == [
        f"--config-dir={other.config_dir}",
        "task=riddles",
        "name=try",
    ]
    for name, typed, more, error in (
        ("try", {"gpus": "all"}, "", "GPUs: 'all' is not a list of numbers"),
        ("a b", {}, "", "Name: 'a b' may contain letters"),
        ("try", {"seed": "1.5"}, "", "Seed: '1.5' is not an integer"),
        ("try", {}, "a=1\n--multirun", "Further keys, line 2: '--multirun' is not a key=value"),
        ("try", {}, "name=x", "line 1: name has a field above"),
        ("try", {}, "hydra.mode=MULTIRUN", "hydra.mode cannot be set here"),
        ("try", {}, "folder=/", "folder cannot be set here"),
    ):
        with pytest.raises(UserError, match=re.escape(error)):
            new_search.build_arguments(home, name, chosen, typed, more)
    assert all(
        new_search.group_options(group)[new_search.default_options()[group]]
        for group in new_search.CONFIG_GROUPS
    )


def test_the_command_s_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        assert run_click(ui, words, "swarm.ui") in (1, 2)
        return capsys.readouterr().err

    assert told("--host", "0.0.0.0").startswith(
        "error: --host 0.0.0.0: everyone who can reach the page"
    )
    assert "--pool': the value is empty; give one or leave the option out\n" in told("--pool", " ")
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert f"nicegui is not installed: {install_command('ui')}" in told("--port", "0")


def test_the_check_tells_the_error(tmp_path: Path) -> None:
    right, said = check_search(["task=nothing", "name=bad"], tmp_path)
    assert not right and said.startswith("task=nothing") and "\n" not in said
    assert not list(tmp_path.iterdir())


def test_a_mixture_is_scored_as_a_search_would(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    more = {"pool__space": "delta", "noise_floor": "false", "test": "false"}
    words = searches.arguments(
        tmp_path, tiny_llama, tiny_pool, "done", optimizer__max_iterations=2, **more
    )
    done = commands.run("swarm.search", *words)
    assert done.code == 0, done.err
    home = AppState(tmp_path, str(tiny_pool), str(tiny_llama), "cpu")
    run = RunFolder(tmp_path / "search" / "done")
    index = (1, 4)
    mixture = dict(zip(run.experts, run.positions[index].tolist(), strict=True))
    keys = [f"task.file={tmp_path / 'tiny.json'}", "task.scoring=logits"]
    scoring = expert_mixer.score_mixture(home, mixture, "mmlu", keys, 12)
    first, *others = scoring.run()
    assert (scoring.done, scoring.total) == (12, 12)
    assert first.utility == pytest.approx(run.utilities[index]) and first.gain is None
    assert {one.name for one in others} == {"uniform soup", "nearest expert"}
    assert all(one.gain and one.items == 12 for one in others)
    home.config_dir = tmp_path / "conf"
    (home.config_dir / "task").mkdir(parents=True)
    lines = ["_target_: swarm.tasks.multiple_choice.MultipleChoice", "name: mine"]
    lines += [f"file: {tmp_path / 'tiny.json'}"]
    (home.config_dir / "task" / "mine.yaml").write_text("\n".join(lines))
    mine = expert_mixer.score_mixture(home, mixture, "mine", ["task.scoring=logits"], 12).run()
    assert mine[0].utility == first.utility
    stopped = expert_mixer.score_mixture(home, mixture, "mmlu", keys, 12)
    stopped.stop()
    with pytest.raises(UserError, match="stopped after 0 of 12 items"):
        stopped.run()
    for wrong, message in (((["x=1"], 9), "is not a task.KEY"), (([], 1), "must be 2 or more")):
        with pytest.raises(UserError, match=message):
            expert_mixer.score_mixture(home, mixture, "mmlu", *wrong)


def test_the_bests_of_a_sweep_are_models(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("swept/trial_00", "first"):
        ui_pages.run_folder(tmp_path / "search" / name, tiny_llama, tiny_pool)
    home = AppState(tmp_path, str(tiny_pool), str(tiny_llama), "cpu")
    assert [one.run for one in list_bests(home)] == ["first", "swept/trial_00"]
    assert "local/search/swept/trial_00" in list_model_names(home)
    names = [run.name for run in map(RunFolder, sorted(tmp_path.glob("search/**/trial_00")))]
    assert names == ["swept/trial_00"]
