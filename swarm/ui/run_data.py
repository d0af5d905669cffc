"""Data of the page of a run, read from its folder; contains no widgets."""

import csv
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.terminal import csv_cell, format_duration, format_number
from swarm.errors import UserError
from swarm.merging.positions import describe_position
from swarm.report.document import ChangedItems, TableBlock, TextBlock
from swarm.report.page import render_changed_items
from swarm.report.paired_comparison import PairedComparison, changed_items_section
from swarm.report.sections import (
    comparison_table,
    front_table,
    headline_figures,
    start_end_section,
    summarize_verdict,
)
from swarm.runs.folder import ParticleIndex, RunFolder, load_command, state_stamp
from swarm.runs.lock import running_info
from swarm.runs.verdict import list_caveats, shorten_text
from swarm.ui import charts
from swarm.ui.launcher import format_command, output_path, read_failure, read_tail
from swarm.ui.state import UNREADABLE_ERRORS, AppState, RunSummary, describe_progress


@dataclass
class RunSeries:
    """Results of a run so far; they change only with its state.

    Attributes:
        why_not: Reason why there are no results yet; empty if there are.
        kind: "better", "worse", "unclear" or "open".
        sentences: Sentences on the result.
        figures: Short facts, as (label, value).
        comparisons: The best found against each baseline on test; `None` for fewer than two.
        charts: ECharts options by the name of the chart; a chart that does not apply is missing.
        points: Front of a task with several parts.
        baselines: Models that the best found can be compared with item by item, the first by
            default.
        changes: Sentences on the items whose answers changed.
        changed: Title and HTML of the items won and lost, as in the report.
        positions: The evaluated positions.
    """

    why_not: str = ""
    kind: str = "open"
    verdict: str = ""
    sentences: list[str] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    comparisons: TableBlock | None = None
    models: TableBlock | None = None
    domains: list[TableBlock] = field(default_factory=list)
    charts: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: TableBlock | None = None
    baselines: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    positions: "PositionTable | None" = None


@dataclass(frozen=True, slots=True)
class PositionTable:
    """The evaluated positions of a run, in the order of the search.

    Attributes:
        experts: Names of the K experts.
        rows: [P, 4 + K] iteration, particle, utility on dev, number of items (NaN if unknown), and
            the experts' coefficients, means over the groups of modules.
    """

    experts: list[str]
    rows: np.ndarray

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [*POSITION_COLUMNS, *self.experts]

    def sorted_rows(self) -> np.ndarray:
        """Return the rows, the highest utilities first."""
        return self.rows[np.argsort(-self.rows[:, 2], kind="stable")]


POSITION_COLUMNS = ("iteration", "particle", "utility", "items")


@dataclass(frozen=True, slots=True)
class PositionDetails:
    """A position in full.

    Attributes:
        title: Iteration, particle, utility and number of items.
        description: The position in words.
        coefficients: Each expert's coefficient, in each group of modules.
        answers: [item, value, answer] by item, the lowest values first; empty if the run folder
            does not contain them.
    """

    title: str
    description: str
    coefficients: TableBlock
    answers: list[list[str]]


def load_position(path: Path, index: ParticleIndex) -> PositionDetails:
    """Load a position of a run in full.

    Raises:
        UserError: The run folder is not readable.
    """
    run = RunFolder(path)
    values = run.positions[index].reshape(len(run.groups), len(run.experts))
    words = describe_position(run.experts, run.positions[index], run.groups)
    label = run.position_label(index)
    groups = run.groups if len(run.groups) > 1 else ["coefficient"]
    names, header = run.experts, ["expert", *groups]
    if len(groups) > len(names):
        names, header, values = groups, ["group", *names], values.T
    rows = [[name, *(f"{c:.4f}" for c in values[:, n])] for n, name in enumerate(names)]
    try:
        answers = sorted(run.load_answers(index), key=lambda row: row["value"])
    except (UserError, *UNREADABLE_ERRORS):
        answers = []
    return PositionDetails(
        f"Iteration {index[0]}, particle {index[1]}: "
        f"utility {format_number(run.utilities[index])} on {len(answers) or 'its'} dev items",
        f"{label}: {words}" if label else words,
        TableBlock("Coefficients", header, rows),
        [[str(row["id"]), f"{row['value']:.3g}", _format_answer(row["answer"])] for row in answers],
    )


def _format_answer(answer: Any) -> str:
    return "not read" if answer is None else shorten_text(str(answer))


def tabulate_positions(run: RunFolder) -> PositionTable:
    """Tabulate the evaluated positions of a run."""
    rows = []
    for iteration, particle in np.argwhere(np.isfinite(run.utilities)).tolist():
        items = (run.rounds[iteration].get("items_scored") or [None] * run.particles)[particle]
        utility = float(run.utilities[iteration, particle])
        found = [iteration, particle, utility, np.nan if items is None else items]
        rows.append([*found, *run.means[iteration, particle].tolist()])
    return PositionTable(run.experts, np.reshape(rows, (-1, 4 + len(run.experts))))


def positions_csv(run: RunFolder) -> str:
    """Return the evaluated positions as CSV, with the coefficients in each group of modules."""
    table, file = tabulate_positions(run), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    several = len(run.groups) > 1
    by_group = [f"{group}: {expert}" for group in run.groups for expert in run.experts]
    writer.writerow(map(csv_cell, [*table.columns, *(by_group if several else ())]))
    for row in table.rows.tolist():
        index = int(row[0]), int(row[1])
        items = "" if np.isnan(row[3]) else int(row[3])
        position = run.positions[index].tolist() if several else ()
        writer.writerow([*index, row[2], items, *row[4:], *position])
    return file.getvalue()


def load_changed_items(path: Path, baseline: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Load the items that the best found and a baseline answer differently.

    Returns:
        Sentences, and title and HTML of the items won and lost, as in `RunSeries`.
    """
    try:
        found = _changed_fields(PairedComparison(RunFolder(path)), baseline)
    except (UserError, *UNREADABLE_ERRORS) as error:
        return [str(error)], []
    return found["changes"], found["changed"]


@dataclass
class RunSnapshot:
    """State of a run at one moment.

    Attributes:
        line: Summary of the run; `None` if there is no state yet.
        beginning: Whether a process was started that does not hold the folder yet.
        stopping: Whether the process was asked to stop and is alive.
        note: Status of the running search (`swarm.runs.lock.running_info`).
        stamp: File stamp that changes with the run's state.
        output: End of the log, or of the output of the search that the application started; numbers
            are rounded.
        error: Error with which that search ended.
        command: Shell command of the search; empty if the folder does not contain it.
    """

    line: RunSummary | None
    beginning: bool
    stopping: bool
    note: dict[str, Any] | None
    stamp: tuple[int, int]
    output: str
    error: str
    command: str


def take_snapshot(home: AppState, name: str) -> RunSnapshot:
    """Read the present state of a run.

    Raises:
        UserError: The name is not valid for a folder.
    """
    path = home.run_path(name)
    stamp = state_stamp(path) or (0, 0)
    command, line = load_command(path), home.run_index.get_run(name)
    error = (
        "" if line and line.state != "failed" else read_failure(output_path(path), stamp[0] / 1e9)
    )
    # Metrics that are objects fill most of the log.
    log = METRICS_LINE.sub("", read_tail(path / "log.txt", 200_000))
    log, output = "\n".join(log.splitlines()[-LOG_LINES:]), read_tail(output_path(path), 6_000)
    return RunSnapshot(
        line=line,
        beginning=home.launcher.is_starting(path),
        stopping=home.launcher.is_stopping(path),
        note=running_info(path),
        stamp=stamp,
        output=round_numbers(output if error or not log else log),
        error=error,
        command=format_command(command["arguments"]) if command else "",
    )


def load_run_series(path: Path) -> RunSeries:
    """Load the results of a run so far."""
    try:
        return _build_run_series(RunFolder(path))
    except UserError as error:
        return RunSeries(why_not=str(error).removeprefix(f"{path}: "))
    except UNREADABLE_ERRORS as error:
        return RunSeries(why_not=describe_unreadable(error))


def describe_unreadable(error: Exception) -> str:
    """Describe the error in reading a run whose files are not in the expected format."""
    cause = f"{type(error).__name__}: {error}"
    return f"the files of this run are damaged or incompatible ({cause:.200})"


def _build_run_series(run: RunFolder) -> RunSeries:
    models = PairedComparison(run)
    verdict = summarize_verdict(models)
    # A report cannot know whether the search is still running; the page shows that beside the name.
    headline = verdict.headline if run.finished else "Not over yet"
    caveats = list_caveats(run.verdict) if run.verdict else []
    position = run.positions[models.places["ending"]]
    best = f"Best found: {describe_position(run.experts, position, run.groups)}."
    table, *more = (
        block for block in start_end_section(models).blocks if isinstance(block, TableBlock)
    )
    return RunSeries(
        kind=verdict.kind,
        verdict=headline,
        sentences=[verdict.sentence, best, *caveats],
        figures=headline_figures(models),
        comparisons=comparison_table(models),
        models=table,
        domains=more,
        charts=_draw_charts(run, models.places["ending"]),
        baselines=models.list_baselines(),
        positions=tabulate_positions(run),
        **_changed_fields(models),
        **_front_fields(run),
    )


def _draw_charts(run: RunFolder, best: ParticleIndex) -> dict[str, dict[str, Any]]:
    """Return the charts that apply to a run."""
    drawn = {
        "particles": charts.particle_chart(run),
        "coefficients": charts.coefficient_chart(run),
        "domains": charts.domain_chart(run),
        "modules": charts.module_chart(run, best) if len(run.groups) > 1 else {},
    }
    if run.front is not None and len(run.front.names) > 1:
        drawn["front"] = charts.front_chart(run, run.front)
    return {name: one for name, one in drawn.items() if one}


def _changed_fields(models: PairedComparison, baseline: str = "") -> dict[str, Any]:
    """Return the items won and lost, as in the report."""
    blocks = changed_items_section(models, baseline).blocks
    texts = [one for one in blocks if isinstance(one, TextBlock)]
    items = [one for one in blocks if isinstance(one, ChangedItems)]
    return {
        "changes": [line for one in texts for line in one.lines],
        "changed": [(one.title, render_changed_items(one)) for one in items],
    }


def _front_fields(run: RunFolder) -> dict[str, Any]:
    """Return the table of the front, for tasks with several parts."""
    found = run.front
    if found is None or len(found.names) < 2:
        return {}
    return {"points": front_table(run, found)}


LOG_LINES = 60
"""Number of lines of the log that the page of a run shows."""

METRICS_LINE = re.compile(r"(?m)^\S+ \S+ INFO [\w-]+: (?:\{.*\}|\[.*[\[{].*\])\n?")
"""Line of the log with a metric that is an object; the page shows these as tables."""

LONG_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{5,}(?:e[+-]?\d+)?(?![\w.])")


def round_numbers(text: str) -> str:
    """Round the numbers in a text that have more than four decimals to four digits."""

    def rounded(match: re.Match[str]) -> str:
        value = float(match[0])
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"

    return LONG_NUMBER.sub(rounded, text)


def format_progress(note: dict[str, Any]) -> tuple[str, float]:
    """Return the progress of a running search as text and as a share of its iterations."""
    parts = [describe_progress(note)]
    if isinstance(speed := note.get("prompts_per_second"), int | float):
        parts.append(f"{speed:.3g} prompts/s")
    if isinstance(seconds_left := note.get("seconds_left"), int | float):
        parts.append(f"at most {format_duration(round(seconds_left))} left")
    if isinstance(best := note.get("best"), int | float):
        parts.append(f"best {format_number(best)}")
    # Searches of earlier versions have no share.
    if isinstance(share := note.get("share"), int | float):
        return ", ".join(parts), float(share)
    done, total = note.get("done") or 0, note.get("total") or 0
    within = done / total if total else 0.0
    return ", ".join(parts), _progress_share(
        note.get("iteration"), note.get("max_iterations"), within
    )


def _progress_share(iteration: Any, maximum: Any, within: float) -> float:
    """Return the completed share of the start and all iterations."""
    if not isinstance(iteration, int) or not isinstance(maximum, int):
        return 0.0
    return max(0.0, min(1.0, (iteration + within) / (maximum + 1)))
