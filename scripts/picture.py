"""Draws a run's terminal as an SVG: what it printed, or, with live, its view in the midst of it.

picture.py search/nlgraph search.svg
picture.py search/quickstart live.svg live
"""

import io
import json
import re
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from swarm.errors import UserError
from swarm.executors import JobResult
from swarm.loop.terminal import Progress, SearchView, describe_iteration, render
from swarm.runs.folder import RunRecord, read_state
from swarm.runs.overview import Overview
from swarm.runs.verdict import read_verdict
from swarm.tasks.base import Score
from swarm.trackers import Tracker

COLUMNS = 80


def draw(folder: Path, picture: Path) -> None:
    """Write what the search in `folder` printed first and last to `picture`.

    Raises:
        UserError: The folder holds no finished run.
    """
    state = _state(folder)
    verdict, overview = read_verdict(state), Overview.from_state(state)
    if verdict is None or overview is None:
        raise UserError(f"{folder} contains no finished run; allowed: a folder of search/")
    view = SearchView(RunRecord(folder), Tracker(), Progress(0))
    view.console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    view.show_overview(overview)
    best = max(u for entry in state["rounds"] for u in entry["utilities"] if u is not None)
    # As it is printed, but for speed and time left, which the state does not keep.
    last = len(state["rounds"]) - 1
    view.print_line("...")
    view.print_line(describe_iteration(last, f"{best:.3f}", state["rounds"][last]))
    view.show_end(state["finished"])
    view.show_verdict(verdict, "adapter")
    view.print_line(f"report: {folder / 'report.html'}")
    _write(view.console, picture, folder)


def draw_live(folder: Path, picture: Path) -> None:
    """Write the live view as it was halfway through the last iteration of `folder`.

    The numbers are the run's own: rounds.jsonl has the utilities, log.txt the times.

    Raises:
        UserError: The folder has not two iterations.
    """
    state = _state(folder)
    if len(state.get("rounds", [])) < 2:
        raise UserError(f"{folder} has fewer than two iterations; allowed: a folder of search/")
    config = json.loads((folder / "config.json").read_text())
    clock = Clock()
    progress = Progress(config["optimizer"]["max_iterations"], clock=clock)
    last = len(state["rounds"]) - 1
    for number, (entry, seconds) in enumerate(zip(state["rounds"], _course(folder), strict=False)):
        put = entry["prompts_scored"]
        progress.start(f"round {number}: answering", put)
        share = 0.5 if number == last else 1.0
        clock.now += seconds * share
        scores = [[Score(0.0, "")] * round(put * share)]
        progress.add_job(JobResult(0, scores, round(put * share), 0))
        if number < last:
            progress.add_iteration(entry)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(render(progress, COLUMNS, 24))
    _write(console, picture, folder)


class Clock:
    """Seconds, as they went by in the run."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def _course(folder: Path) -> list[float]:
    """Seconds of each iteration, by the log."""
    line = r"^(\S+ \S+) INFO (?:search (?:begins|resumes)|iteration ).*$"
    found = re.findall(line, (folder / "log.txt").read_text(), re.MULTILINE)
    times = [datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp() for when in found]
    return [after - before for before, after in pairwise(times)]


def _state(folder: Path) -> dict[str, Any]:
    return read_state(folder) or {}


def _write(console: Console, picture: Path, folder: Path) -> None:
    drawn = console.export_svg(title=f"python -m swarm.search name={folder.name}")
    # Rich names a font on a server of others; a picture loads nothing.
    picture.write_text(re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    try:
        (draw_live if sys.argv[3:] == ["live"] else draw)(Path(sys.argv[1]), Path(sys.argv[2]))
    except (UserError, IndexError) as error:
        sys.exit(f"error: {error or 'picture.py RUN_FOLDER PICTURE.svg [live]'}")
