"""Data of the page of a run, read from its folder; contains no widgets."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm._util.terminal import format_duration, format_number
from swarm.errors import UserError
from swarm.report.analyses.expert_importance import (
    RELIABLE_POSITIONS,
    RELIABLE_R2,
    ExpertImportance,
    measure_importance,
)
from swarm.report.document import ChangedItems, TableBlock, TextBlock
from swarm.report.html import render_changed_items
from swarm.report.paired_comparison import PairedComparison, changed_items_section
from swarm.report.pareto_front import front_table
from swarm.report.sections import headline_figures, start_end_section, summarize_verdict
from swarm.runs.describe import describe_position, list_caveats
from swarm.runs.lock import running_info
from swarm.runs.manifest import state_stamp
from swarm.runs.run_folder import load_command
from swarm.runs.run_reader import PositionIndex, RunFolder
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
        charts: ECharts options by the name of the chart; a chart that does not apply is missing.
        points: Front of a task with several parts.
        importance: Method and reliability of the importances.
        changes: Sentences on the items whose answers changed.
        changed: Title and HTML of the items won and lost, as in the report.
    """

    why_not: str = ""
    kind: str = "open"
    verdict: str = ""
    sentences: list[str] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    models: TableBlock | None = None
    domains: list[TableBlock] = field(default_factory=list)
    charts: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: TableBlock | None = None
    importance: str = ""
    changes: list[str] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class RunSnapshot:
    """State of a run at one moment.

    Attributes:
        line: Summary of the run; `None` if there is no state yet.
        beginning: Whether a process was started that does not hold the folder yet.
        note: Status of the running search (`swarm.runs.lock.running_info`).
        stamp: File stamp that changes with the run's state.
        output: End of the log, or of the output of the search that the application started; numbers
            are rounded.
        error: Error with which that search ended.
        command: Shell command of the search; empty if the folder does not contain it.
    """

    line: RunSummary | None
    beginning: bool
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
    log, output = read_tail(path / "log.txt", 6_000), read_tail(output_path(path), 6_000)
    return RunSnapshot(
        line=line,
        beginning=home.launcher.is_starting(path),
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
    kind, headline, sentences = summarize_verdict(models)
    # A report cannot know whether the search is still running; the page shows that beside the name.
    headline = headline if run.finished else "Not over yet"
    caveats = list_caveats(run.metrics, run.too_long)
    also = [caveat for caveat in caveats if caveat not in sentences]
    position = run.positions[models.places["ending"]]
    best = f"Best found: {describe_position(run.experts, position, run.groups)}."
    table, *more = (
        block for block in start_end_section(models).blocks if isinstance(block, TableBlock)
    )
    return RunSeries(
        kind=kind,
        verdict=headline,
        sentences=[sentences, best, *also],
        figures=headline_figures(models),
        models=table,
        domains=more,
        **_importance_fields(run, models.places["ending"]),
        **_changed_fields(models),
        **_front_fields(run),
    )


def _importance_fields(run: RunFolder, best: PositionIndex) -> dict[str, Any]:
    """Return the charts, and how the importances were measured."""
    found = measure_importance(run)
    drawn = {
        "particles": charts.particle_chart(run),
        "coefficients": charts.coefficient_chart(run),
        "domains": charts.domain_chart(run),
        "parallel": charts.parallel_chart(run, found),
        "modules": charts.module_chart(run, best) if len(run.groups) > 1 else {},
        "importance": charts.importance_chart(found) if found else {},
    }
    if run.front is not None and len(run.front.names) > 1:
        drawn["front"] = charts.front_chart(run, run.front)
    fields: dict[str, Any] = {"charts": {name: one for name, one in drawn.items() if one}}
    return fields | {"importance": describe_importance(found) if found else ""}


def describe_importance(found: ExpertImportance) -> str:
    """Describe how the importances were measured and how far they can be trusted."""
    sentence = (
        f"Functional ANOVA (total Sobol' indices) of a Gaussian process fitted on "
        f"{found.positions} evaluated positions, of whose utilities it explains "
        f"{max(0.0, found.r2):.0%} (leave-one-out)."
    )
    if not found.reliable:
        sentence += (
            f" At least {RELIABLE_POSITIONS} positions and {RELIABLE_R2:.0%} are needed: do not "
            "interpret the importances."
        )
    return sentence


def _changed_fields(models: PairedComparison) -> dict[str, Any]:
    """Return the items won and lost, as in the report."""
    blocks = changed_items_section(models).blocks
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
