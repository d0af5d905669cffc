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
import tiny
import ui_pages

from swarm._util.options import run_click
from swarm.errors import UserError, install_command
from swarm.models.base import Request
from swarm.runs.folder import RunFolder
from swarm.runs.lock import RunLock
from swarm.ui.__main__ import ui
from swarm.ui.expert_mixer import (
    example_question,
    label_models,
    list_bests,
    list_model_names,
    list_parts,
    newest_best,
    save_mixture,
    score_mixture,
)
from swarm.ui.launcher import SearchLauncher, check_search, output_path
from swarm.ui.pages import new_search
from swarm.ui.run_data import take_snapshot
from swarm.ui.state import AppState, RunIndex


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_folders.folder(tmp_path / "run_0")
    state = (first / "rounds.jsonl").read_bytes()
    for name in ("run_1", "run_2", "sweep/trial_00"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rounds.jsonl").write_bytes(state)
    index = RunIndex(tmp_path)
    lines = index.list_runs()
    assert {line.name for line in lines} == {"run_0", "run_1", "run_2", "sweep/trial_00"}
    with monkeypatch.context() as patch:
        patch.setattr("swarm.ui.state._extract_facts", lambda path: pytest.fail("read again"))
        assert index.list_runs() == lines
    kept = (first / "rounds.jsonl").stat()
    (first / "rounds.jsonl").write_bytes(b"x" * len(state))
    os.utime(first / "rounds.jsonl", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert index.list_runs() == lines
    os.utime(first / "rounds.jsonl")
    assert len(index.list_runs()) == 3


def test_states_of_a_run(tmp_path: Path) -> None:
    home = AppState(tmp_path)
    run = run_folders.folder(home.runs_folder / "run", finished=False)

    def state() -> tuple[str, str]:
        (line,) = home.run_index.list_runs()
        return line.state, line.details

    assert state() == ("stopped", "after round 4")
    now = {"activity": "round 4", "iteration": 4, "max_iterations": 50, "done": 3, "total": 9}
    now |= {"seconds_left": 134, "answers": [{"model": "rooms", "text": "yes", "value": 1.0}]}
    hold = RunLock(run, lambda: now)
    ends = time.monotonic() + 60
    while state() != ("running", "round 4 of at most 50, 3 of 9 items"):
        assert time.monotonic() < ends, state()
        time.sleep(0.05)
    seen = take_snapshot(home, "run")
    assert (seen.left, seen.answers) == ("2 min 14 s", [["rooms", "yes", "1.0"]])
    note = (run / "running.json").read_text()
    hold.close()
    (run / "running.json").write_text(note)
    assert state() == ("stopped", "killed after round 4")
    (run / "running.json").unlink()
    output_path(run).parent.mkdir()
    output_path(run).write_text("10 %\r20 %\nerror: no room\nsome line\n")
    assert state() == ("failed", "no room")
    os.utime(run / "rounds.jsonl", (time.time() + 5, time.time() + 5))
    assert state()[0] == "stopped"


def test_only_who_holds_the_folder_is_stopped(tmp_path: Path) -> None:
    run, launcher = tmp_path / "run", SearchLauncher()
    with pytest.raises(UserError, match="no search is running"):
        launcher.stop_search(run)
    hold = RunLock(run)
    note = json.loads((run / "running.json").read_text())
    for wrong in ({"pid": os.getppid()}, {"host": "elsewhere"}, {"pid": "1"}):
        (run / "running.json").write_text(json.dumps(note | wrong))
        with pytest.raises(UserError, match="of another user or machine"):
            launcher.stop_search(run)
    with pytest.raises(UserError, match="already running"):
        launcher.start_search(run, [], tmp_path)
    hold.close()
    for words, error in (
        ("5", "no stored command"),
        ('["name=other"]', "belongs to another run"),
        ('["name=run", "token=(hidden)"]', "had a secret in its command"),
        ('["name=run"]', "was started in nowhere, which no longer exists"),
    ):
        (run / "command.json").write_text(f'{{"arguments": {words}, "directory": "nowhere"}}')
        with pytest.raises(UserError, match=error):
            launcher.resume_search(run)


def test_the_form_s_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "own").mkdir(parents=True)
    places = "mine/own\n user/lora, other/name@main ,\n\nhf://a/b"
    keys = {"task": "my data/it's.jsonl", "pool": places, "model": " ", "seed": " 007 "}
    home = AppState(tmp_path, config_dir=tmp_path / "own")
    assert new_search.build_arguments(home, "try", keys, "\na=1\n~b\n") == [
        f"--config-dir={home.config_dir}",
        "task=my data/it's.jsonl",
        "pool=mine/own,hf://user/lora,hf://other/name@main,hf://a/b",
        "seed=007",
        "a=1",
        "~b",
        "name=try",
    ]
    (tmp_path / "own" / "task").mkdir(parents=True)
    (tmp_path / "own" / "task" / "riddles.yaml").write_text("# Riddles.\n")
    assert new_search.group_options("task", home.config_dir)["riddles"] == "Riddles."
    for name, more, error in (
        ("a b", "", "Name: 'a b' may contain letters"),
        (".a", "", "Name: '.a' may contain letters"),
        ("try", "a=1\n--multirun", "Further keys: --multirun is not a key that can be set here"),
        ("try", "name=x", "name=x is not"),
        ("try", "++hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN is not"),
        ("try", "folder=/", "folder=/ is not"),
    ):
        with pytest.raises(UserError, match=re.escape(error)):
            new_search.build_arguments(home, name, {}, more)
    for name in ("", ".", "..", "../x", "a/b/c", "a/../b", "a/.page", "/etc", "a\x00", "a\\b"):
        with pytest.raises(UserError, match="is not a run name"):
            home.run_path(name)


def test_a_dropped_file_is_understood_and_costs_are_known_at_once(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = AppState(tmp_path)
    rows = "".join(f"{n} + 1,{n + 1}\n" for n in range(40))
    paths = {new_search.store_upload(home, "sums.csv", text.encode()) for text in (rows, rows[:9])}
    paths.add(new_search.store_upload(home, "sums.csv", f"question,answer\n{rows}".encode()))
    assert len(paths) == 3, "a file never replaces another one"
    path = new_search.store_upload(home, "sums.csv", f"question,answer\n{rows}".encode())
    keys = {"task": path, "pool": str(tiny_pool), "model": str(tiny_llama)}
    words = new_search.build_arguments(home, "sums", keys)
    assert check_search(words)[0]
    began = time.monotonic()
    valid, told = check_search(words)
    assert valid and time.monotonic() - began < 2, told
    cost, understood, *plan = told.splitlines()
    assert cost.startswith("The search takes at most ") and "the test after it" in cost
    assert "question -> answer" in understood and plan
    assert sorted(one.name for one in tmp_path.iterdir()) == [new_search.UPLOADS_FOLDER]


def test_mistakes_of_the_command_and_of_a_checked_search_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, error in (
        (("--host", "0.0.0.0"), "--host 0.0.0.0: everyone who can reach the page"),
        (("--config-dir", "nowhere"), "'nowhere' does not exist"),
    ):
        assert run_click(ui, words, "swarm.ui") == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and error in told and told.count("\n") == 1
    right, told = check_search(["task=nothing", "name=bad"])
    assert not right and told.startswith("task=nothing") and "\n" not in told
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert run_click(ui, ("--port", "0"), "swarm.ui") == 1
    assert f"nicegui is not installed: {install_command('ui')}" in capsys.readouterr().err


def test_a_mixture_is_scored_as_a_search_would(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    more = {"pool__space": "delta", "noise_floor": "false", "test": "false"}
    words = searches.arguments(
        tmp_path, tiny_llama, tiny_pool, "done", optimizer__max_iterations=2, **more
    )
    done = commands.run("swarm.search", *words)
    assert done.code == 0, done.err
    home = AppState(tmp_path, str(tiny_pool), str(tiny_llama), "cpu", tmp_path / "conf")
    run, index = RunFolder(tmp_path / "search" / "done"), (1, 4)
    mixture = dict(zip(run.experts, run.positions[index].tolist(), strict=True))
    keys = [f"task.file={tmp_path / 'tiny.json'}", "task.scoring=logits"]
    scoring = score_mixture(home, mixture, "mmlu", keys, 12)
    first, *others = scoring.run()
    assert (scoring.done, scoring.total) == (12, 12)
    assert first.utility == pytest.approx(run.utilities[index]) and first.gain is None
    assert {one.name for one in others} == {"mean of all", "nearest expert"}
    assert all(one.gain and one.items == 12 for one in others)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    lines = ["_target_: swarm.tasks.multiple_choice.MultipleChoice", "name: mine"]
    lines += [f"file: {tmp_path / 'tiny.json'}"]
    (tmp_path / "conf" / "task" / "mine.yaml").write_text("\n".join(lines))
    mine = score_mixture(home, mixture, "mine", ["task.scoring=logits"], 12).run()
    assert mine[0].utility == first.utility
    stopped = score_mixture(home, mixture, "mmlu", keys, 12)
    stopped.stop()
    with pytest.raises(UserError, match="stopped after 0 of 12 items"):
        stopped.run()
    with pytest.raises(UserError, match="'x'"):
        score_mixture(home, mixture, "mmlu", ["x=1"], 9).run()
    with pytest.raises(UserError, match="must be 2 or more"):
        score_mixture(home, mixture, "mmlu", [], 1)


def test_the_bests_of_a_sweep_are_models(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("swept/trial_00", "first"):
        ui_pages.run_folder(tmp_path / "search" / name, tiny_llama, tiny_pool)
    home = AppState(tmp_path, str(tiny_pool), str(tiny_llama), "cpu")
    assert list(list_bests(home)) == ["first", "swept/trial_00"]
    names = list_model_names(home)
    assert {"local/base", "local/amber", "local/search/swept/trial_00"} < set(names)
    parts = list_parts(home, "swept/trial_00")
    assert parts == {"search/swept/trial_00/global_best": 1.0, **dict.fromkeys(tiny.NAMES, 0.0)}
    shares = parts | {"amber": -0.5}
    saved = save_mixture(home, shares, "less amber")
    one, other = home.roster.model(saved), home.roster.blend(shares)
    asked = [Request("the question is", 8, temperature=0.0)]
    assert one.generate(asked)[0].text == other.generate(asked)[0].text
    with pytest.raises(UserError, match="already exists"):
        save_mixture(home, shares, "less amber")
    assert save_mixture(home, parts, "as it was") == "local/mixtures/as it was"
    assert newest_best(AppState(tmp_path / "none")) == "local/base"
    assert "Edges" in example_question(home)


def test_models_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    labels = label_models(AppState(tmp_path))
    assert labels["moa/together"] == "moa/together (needs TOGETHER_API_KEY)"
    assert labels["local/base"] == "local/base" and "consortium/classic" not in labels
