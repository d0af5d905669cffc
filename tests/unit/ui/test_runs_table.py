"""Deletion of runs, and the rows of their table."""

from pathlib import Path

import pytest
import run_folders

from swarm.errors import UserError
from swarm.runs.lock import RunLock
from swarm.ui.pages.runs import group_rows
from swarm.ui.state import AppState, RunIndex, delete_run


def test_only_runs_that_are_not_running_are_deleted(tmp_path: Path) -> None:
    home = AppState(tmp_path)
    run = run_folders.folder(tmp_path / "search" / "one")
    output = tmp_path / "search" / ".page" / "one.txt"
    output.parent.mkdir()
    output.write_text("said")
    trial = run_folders.folder(tmp_path / "search" / "sweep" / "trial_00")
    alike = run_folders.folder(tmp_path / "search" / "search" / "trial_00")
    (alike.parent / ".lock").touch()
    other = tmp_path / "search" / "other"
    other.mkdir()
    (other / "precious.txt").write_text("mine")
    link = tmp_path / "search" / "link"
    link.symlink_to(run)
    lock = RunLock(run)
    for path, reason in (
        (run, "is running"),
        (trial, "belongs to sweep"),
        (alike, "belongs to search"),
        (other, "not a run folder"),
        (link, "not a run folder"),
        (home.run_path("none"), "not a run folder"),
    ):
        with pytest.raises(UserError, match=reason):
            delete_run(path)
    assert trial.is_dir() and (other / "precious.txt").is_file() and output.is_file()
    lock.close()
    delete_run(run)
    assert not run.exists() and not output.exists()


def test_rows_are_filtered_and_grouped(tmp_path: Path) -> None:
    home = tmp_path / "search"
    for name in ("alone", "sweep/trial_00", "sweep/trial_01"):
        run_folders.folder(home / name, particles=2, iterations=1)
    runs = RunIndex(home).list_runs()

    def names(words: str = "", opened: set[str] | None = None) -> list[str]:
        return sorted(row["name"] for row in group_rows(runs, words, opened or set()))

    trials = ["sweep", "sweep/trial_00", "sweep/trial_01"]
    assert names() == ["alone", "sweep"]
    assert names(opened={"sweep"}) == ["alone", *trials]
    assert names("ALONE finished") == ["alone"]
    assert names("trial_01") == ["sweep", "sweep/trial_01"]
    assert names("nothing like it") == []
    group = next(row for row in group_rows(runs, "", {"sweep"}) if row["name"] == "sweep")
    assert (group["trials"], group["details"], group["open"]) == (2, "2 finished", True)
