"""Notes on runs, deletion, and the rows of the table of runs."""

from pathlib import Path

import pytest
import run_folders

from swarm.errors import UserError
from swarm.runs.lock import RunLock
from swarm.runs.manifest import MANIFEST_FILE
from swarm.runs.run_reader import RunFolder
from swarm.ui.pages.runs import group_rows
from swarm.ui.state import AppState, RunIndex, RunNotes, delete_run, load_notes, save_notes


def test_notes_are_kept_beside_the_run_and_change_nothing_of_it(tmp_path: Path) -> None:
    run = run_folders.folder(tmp_path / "search" / "one")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    notes = RunNotes("Best yet", ("good", "long"), "Two lines\nof text", archived=True)
    save_notes(run, notes)
    assert load_notes(run) == notes
    assert {path: path.read_bytes() for path in before} == before
    assert "notes.json" not in (run / MANIFEST_FILE).read_text()
    assert RunFolder(run).finished and RunIndex(run.parent).list_runs()[0].notes == notes
    save_notes(run, RunNotes())
    assert {path for path in run.rglob("*") if path.is_file()} == set(before)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tags": 3}', '{"title": "%s"}' % ("x" * 99)])
def test_damaged_notes_are_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text(text)
    assert load_notes(tmp_path) == RunNotes()


def test_long_notes_and_missing_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="40 characters"):
        RunNotes(tags=("x" * 41,))
    with pytest.raises(UserError, match="10000 characters"):
        RunNotes(note="x" * 10_001)
    with pytest.raises(UserError, match="no longer exists"):
        save_notes(tmp_path / "none", RunNotes("a"))


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


def test_rows_are_filtered_grouped_and_archived(tmp_path: Path) -> None:
    home = tmp_path / "search"
    for name in ("alone", "hidden", "sweep/trial_00", "sweep/trial_01"):
        run_folders.folder(home / name, particles=2, iterations=1)
    save_notes(home / "alone", RunNotes("Renamed", ("keep",), "with a note"))
    save_notes(home / "hidden", RunNotes(archived=True))
    runs = RunIndex(home).list_runs()

    def names(words: str = "", opened: set[str] | None = None, archived: bool = False) -> list[str]:
        return sorted(row["name"] for row in group_rows(runs, words, opened or set(), archived))

    trials = ["sweep", "sweep/trial_00", "sweep/trial_01"]
    assert names() == ["alone", "sweep"]
    assert names(opened={"sweep"}) == ["alone", *trials]
    assert names(archived=True) == ["alone", "hidden", "sweep"]
    for words in ("renamed", "KEEP", "note keep", "alone finished"):
        assert names(words) == ["alone"], words
    assert names("trial_01") == ["sweep", "sweep/trial_01"]
    assert names("nothing like it") == []
    group = next(row for row in group_rows(runs, "", {"sweep"}, False) if row["name"] == "sweep")
    assert (group["trials"], group["details"], group["open"]) == (2, "2 finished", True)
    # An action on the row of a sweep covers the trials that the filter shows.
    assert group["members"] == sorted(trials[1:]) or group["members"] == trials[:0:-1]
    (shown,) = (row for row in group_rows(runs, "trial_01", set(), False) if row["trials"])
    assert shown["members"] == ["sweep/trial_01"]
    found = {row["name"]: row for row in group_rows(runs, "", set(), False)}
    assert found["alone"]["members"] == []
    assert (found["alone"]["title"], found["alone"]["tags"]) == ("Renamed", "keep")
