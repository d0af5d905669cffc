"""Data of the page of a run, read from its folder; contains no widgets."""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swarm._util.terminal import csv_cell, format_duration, format_number
from swarm.errors import UserError
from swarm.merging.positions import describe_position
from swarm.report.document import Block, Chart, TableBlock
from swarm.report.paired_comparison import PairedComparison, changed_items_blocks
from swarm.report.sections import (
    coefficient_blocks,
    coefficient_table,
    front_blocks,
    headline_figures,
    main_charts,
    overview_blocks,
    start_end_blocks,
    summarize_verdict,
)
from swarm.runs.folder import ParticleIndex, RunFolder, load_command, state_stamp
from swarm.runs.lock import running_info
from swarm.runs.verdict import (
    Statement,
    format_gain,
    list_caveats,
    list_controls,
    shorten_text,
)
from swarm.ui.launcher import format_command, output_path, read_tail
from swarm.ui.state import AppState, describe_progress, readable

POSITION_COLUMNS = ("round", "mixture", "score", "items")

MAX_ANSWERS_SHOWN = 200
"""Maximum number of answers in the details of a position."""

LOG_LINES = 60
"""Number of lines of the log that the page of a run shows."""

METRICS_LINE = re.compile(r"(?m)^\S+ \S+ INFO [\w-]+: (?:\{.*\}|\[.*[\[{].*\])\n?")
"""Line of the log with a metric that is an object; the page shows these as tables."""


@dataclass
class RunSnapshot:
    """State of a run at one moment.

    Attributes:
        state: One of `swarm.ui.state.STATES`.
        about: Task, and reason of the end.
        left: Time left of a running search, at most; empty if unknown.
        progress: Its progress as text, and as a share of it.
        answers: Its latest answers during the first iteration, as rows of model, text and value.
        measured: Whether there are results.
        stamp: File stamp that changes with the run's state.
        output: End of the log, or of the output of the search that the application started.
        error: Error with which that search ended.
        command: Shell command of the search; empty if the folder does not contain it.
    """

    state: str
    about: str
    left: str
    progress: tuple[str, float]
    answers: list[list[str]]
    measured: bool
    stamp: tuple[int, int] | None
    output: str
    error: str
    command: str


def take_snapshot(home: AppState, name: str) -> RunSnapshot:
    """Read the present state of a run.

    Raises:
        UserError: The name is not valid for a folder.
    """
    path = home.run_path(name)
    stamp, line = state_stamp(path), home.run_index.get_run(name)
    state, details = (line.state, line.details) if line else home.run_index.find_state(path)
    facts = [f"task {line.task}"] if line else []
    if line and state in ("finished", "stopped"):
        facts.append(details)
    error = details if state == "failed" else ""
    note = (running_info(path) if state == "running" else None) or {}
    seconds, speed = note.get("seconds_left"), note.get("prompts_per_second")
    progress = [describe_progress(note) if note else f"the process is {state}"]
    progress += [f"{speed:.3g} prompts/s"] if speed is not None else []
    # Metrics that are objects fill most of the log.
    log = METRICS_LINE.sub("", read_tail(path / "log.txt", 200_000)).splitlines()[-LOG_LINES:]
    output = read_tail(output_path(path), 6_000) if error or not log else "\n".join(log)
    command = load_command(path)
    return RunSnapshot(
        state=state,
        about=", ".join(facts),
        left="" if seconds is None else format_duration(round(seconds)),
        progress=(", ".join(progress), note.get("share") or 0.0),
        answers=[
            [str(one[key]) for key in ("model", "text", "value")] for one in note.get("answers", ())
        ],
        measured=bool(line and line.score is not None),
        stamp=stamp,
        output=output,
        error=error,
        command=format_command(command["arguments"]) if command else "",
    )


class PositionTable(NamedTuple):
    """The evaluated positions of a run, in the order of the search.

    Attributes:
        columns: `POSITION_COLUMNS`, then the names of the K experts.
        rows: [P, 4 + K] iteration, particle, utility on dev, number of items (NaN if unknown), and
            the experts' coefficients, means over the groups of modules.
    """

    columns: list[str]
    rows: np.ndarray


class RunSeries(NamedTuple):
    """Results of a run so far; they change only with its state.

    Attributes:
        number: The one number: the gain on test, before the end the best on dev; and what it is.
        verdict: The verdict; before the end, how far the search is.
        figures: Short facts, as (label, value).
        overview: What each expert has on each kind of items.
        chart: The best so far.
        details: All else: models, domains, parts, charts, caveats.
        baselines: Models that the best found can be compared with, the first by default.
    """

    number: tuple[str, str]
    verdict: Statement
    figures: list[tuple[str, str]]
    overview: list[Block]
    chart: Chart
    details: list[Block]
    baselines: list[str]
    positions: PositionTable


@readable()
def load_run_series(path: Path) -> RunSeries:
    """Load the results of a run so far.

    Raises:
        UserError: There are none yet, or the files are damaged.
    """
    run = RunFolder(path)
    models = PairedComparison(run)
    verdict, found = summarize_verdict(models), run.verdict
    if not run.finished:
        # A report cannot know whether the search is still running; the page shows that separately.
        verdict = verdict._replace(headline="Not over yet")
    number = format_number(float(run.utilities[models.end])), "best on dev so far"
    if found:
        number = format_number(found.dev.utility), "on dev, not tested"
        if (one := found.strongest) and one.gain:
            gain, _, interval = format_gain(found, one).partition(" [")
            number = gain, f"more than the {one.label} [{interval}"
    chart, *charts = main_charts(models)
    details: list[Block] = [*start_end_blocks(models), *charts]
    details += [*coefficient_blocks(models), *front_blocks(models)]
    if found:
        details += list_caveats(found) + list_controls(found, run.path)
    return RunSeries(
        number,
        verdict,
        headline_figures(models),
        overview_blocks(models),
        chart,
        details,
        models.list_baselines(),
        tabulate_positions(run),
    )


@readable()
def load_changed_items(path: Path, baseline: str) -> list[Block]:
    """Load the items that the best found and a baseline answer differently, as in the report.

    Raises:
        UserError: The files are damaged.
    """
    return changed_items_blocks(PairedComparison(RunFolder(path)), baseline)


def tabulate_positions(run: RunFolder) -> PositionTable:
    """Tabulate the evaluated positions of a run."""
    rows = []
    for t, i in np.argwhere(np.isfinite(run.utilities)).tolist():
        items = (run.rounds[t].get("items_scored") or [None] * run.particles)[i]
        facts = [t, i, run.utilities[t, i], np.nan if items is None else items]
        rows.append([*facts, *run.means[t, i]])
    columns = [*POSITION_COLUMNS, *run.experts]
    return PositionTable(columns, np.reshape(rows, (-1, len(columns))).astype(float))


def positions_csv(path: Path) -> str:
    """Return a run's evaluated positions as CSV, with the coefficients in each group of modules."""
    run, file = RunFolder(path), io.StringIO()
    table = tabulate_positions(run)
    by_group = [f"{group}: {expert}" for group in run.groups for expert in run.experts]
    by_group *= len(run.groups) > 1
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(csv_cell, [*table.columns, *by_group]))
    for t, i, utility, items, *means in table.rows.tolist():
        index = int(t), int(i)
        position = run.positions[index].tolist() if by_group else ()
        count = "" if np.isnan(items) else int(items)
        writer.writerow([*index, utility, count, *means, *position])
    return file.getvalue()


class PositionDetails(NamedTuple):
    """A position in full: in words, each expert's coefficients, and the answers to the items."""

    title: str
    description: str
    coefficients: TableBlock
    answers: TableBlock


@readable()
def load_position(path: Path, index: ParticleIndex) -> PositionDetails:
    """Load a position of a run in full; the lowest values first, no answers if none are stored.

    Raises:
        UserError: The run folder is not readable.
    """
    run = RunFolder(path)
    position = run.positions[index]
    values = position.reshape(len(run.groups), len(run.experts))
    try:
        with readable():
            answers = sorted(run.load_answers(index), key=lambda row: row["value"])
    except UserError:
        answers = []
    shown = [
        [str(row["id"]), f"{row['value']:.3g}", shorten_text(str(row["answer"]))]
        for row in answers[:MAX_ANSWERS_SHOWN]
    ]
    label = run.position_label(index)
    return PositionDetails(
        f"Round {index[0]}, mixture {index[1]}: "
        f"{format_number(run.utilities[index])} on {len(answers) or 'its'} dev items",
        f"{label}: " * bool(label) + describe_position(run.experts, position, run.groups),
        coefficient_table("", run.experts, run.groups, values),
        TableBlock("", ["item", "value", "answer"], shown),
    )
