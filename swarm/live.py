"""What a running search shows: a live view in a terminal, plain lines anywhere else."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.executors import Result
from swarm.words import caveats, conclusion, sentence

PLAIN_COLUMNS = 160


class View:
    """Iteration, best, every particle's utility, prompts a second and time left.

    Args:
        most: The most iterations that may come.
        console: Where to write; standard output by default.
    """

    def __init__(self, most: int, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            # A file or a pipe has no width of its own; nothing is cut off there.
            self.console.width = max(self.console.width, PLAIN_COLUMNS)
        self._most = most
        self._live: Live | None = None
        self._what = "starting"
        self._done = self._total = 0
        self._prompts = self._tokens = 0
        self._iteration = 0
        self._seconds: list[float] = []
        self._began = time.monotonic()
        self._utilities: list[float | None] = []
        self._best: float | None = None

    def __enter__(self) -> "View":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._picture, console=self.console, transient=True,
                              refresh_per_second=4)  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self.console.print(Text(line), soft_wrap=True)

    def begin(self, what: str, iteration: int, positions: int, items: int) -> None:
        """An evaluation of so many positions begins."""
        self._what, self._iteration = what, iteration
        self._done, self._total = 0, positions * items
        self._began = time.monotonic()
        self._prompts = self._tokens = 0

    def watch(self, result: Result) -> None:
        """A job is done."""
        self._done += sum(len(scores) for scores in result.scores)
        self._prompts += result.prompts
        self._tokens += result.tokens

    @property
    def prompts_per_second(self) -> float:
        """Of the evaluation at hand; 0 if nothing had to be evaluated."""
        return self._prompts / max(time.monotonic() - self._began, 1e-9)

    @property
    def tokens(self) -> int:
        """Read and generated in the evaluation at hand."""
        return self._tokens

    def end(self, utilities: Sequence[float | None], best: float | None, note: str) -> None:
        """An iteration is over.

        Args:
            utilities: Of every particle, `None` where none was measured.
            best: The highest so far.
            note: What else to say of it.
        """
        self._seconds.append(time.monotonic() - self._began)
        self._utilities, self._best = list(utilities), best
        measured = [u for u in utilities if u is not None]
        span = f"{min(measured):.3f} to {max(measured):.3f}" if measured else "none"
        self.say(
            f"iteration {self._iteration:>3}  best {_number(best)}  particles {span}  "
            f"{self.prompts_per_second:6.1f} prompts/s  {self._time_left()}{note}"
        )

    def _time_left(self) -> str:
        left = self._most - self._iteration
        recent = self._seconds[1:][-5:] or self._seconds
        if left <= 0 or not recent:
            return ""
        return f"at most {_duration(left * sum(recent) / len(recent))} left  "

    def _picture(self) -> RenderableType:
        share = self._done / self._total if self._total else 0.0
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self._what}", style="bold"),
            ProgressBar(total=1.0, completed=share, width=16),
            f"{self._done}/{self._total} items",
            f"{self.prompts_per_second:.1f} prompts/s",
            f"best {_number(self._best)}",
            self._time_left(),
        )
        cells = [
            Text(f"{i}: {_number(u)}", style="bold green" if u == self._best else "")
            for i, u in enumerate(self._utilities)
        ]
        particles = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), 8):
            particles.add_row(*cells[start : start + 8])
        return Group(head, particles)

    def verdict(
        self, metrics: dict[str, Any], experts: Sequence[str], groups: Sequence[str] = ("all",)
    ) -> None:
        """Print the final table and what may be said of it.

        Args:
            metrics: As `swarm.verdict.judge` returns them.
            experts, groups: The pool's names.
        """
        tested = "test_gain" in metrics
        table = Table(title=None)
        table.add_column("model", overflow="fold")
        table.add_column(f"dev, n = {metrics['ending_best_validation_items']}", overflow="fold")
        if tested:
            table.add_column(
                f"test, n = {metrics['ending_best_single_test_items']}", overflow="fold"
            )
        for row in table_rows(metrics):
            table.add_row(*row[: 3 if tested else 2])
        self.console.print(table)
        self.say("Brackets: 95 % intervals. The dev number of the best found is the highest of "
                 "many and so flatters it; test was never searched on.")  # fmt: skip
        for line in part_lines(metrics):
            self.say(line)
        if "spent" in metrics:
            self.say(spent_line(metrics["spent"]))
        for line in caveats(metrics):
            self.say(line)
        if tested:
            self.say(conclusion(metrics))
        words = sentence(experts, metrics["ending_best_position"], groups)
        name = metrics.get("ending_best_label")
        self.say("best found = " + (f"{name}: {words}" if name else words))


def part_lines(metrics: dict[str, Any]) -> list[str]:
    """Each part of a mixture, on dev and on test."""
    lines = []
    for split, name in (("dev", "validation"), ("test", "single_test")):
        after = metrics.get(f"ending_best_{name}_parts", {})
        before = metrics.get(f"starting_best_{name}_parts", {})
        lines += [f"{part}, {split}: {before[part]:.3f} to {after[part]:.3f}" for part in after]
    return lines


def spent_line(spent: dict[str, dict[str, float]]) -> str:
    """What scoring took, as `swarm.verdict.spent` has it."""
    sums = [f"{name} {n['first']:.6g} + {n['again']:.6g}" for name, n in spent.items()]
    return (
        f"scoring took {', '.join(sums)} (texts met for the first time + met again, which a cache "
        "gives for nothing)"
    )


def table_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """The final table's rows: model, dev, test."""
    names = {
        "starting": f"best initial expert ({metrics['starting_best_expert']})",
        "ending": "best found",
    }
    rows = []
    for when, name in names.items():
        row = [name]
        for split, value in (("validation", "validation_utility"), ("single_test", "")):
            number = metrics.get(f"{when}_best_{value or 'single_test_accuracy'}")
            if number is not None:
                row.append(_with_interval(number, metrics[f"{when}_best_{split}_interval"]))
        rows.append(row)
    if "ending_top-k_ensemble_test_accuracy" in metrics:
        number = metrics["ending_top-k_ensemble_test_accuracy"]
        vote = _with_interval(number, metrics["ending_top-k_ensemble_test_interval"])
        size = metrics["ensemble_size"]
        dev = f"{metrics['ensemble_dev_by_size'][size - 1]:.3f}"
        rows.append([f"vote of the top {size} (chosen on dev)", dev, vote])
    return rows


def _with_interval(number: float, interval: Sequence[float]) -> str:
    return f"{number:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _number(value: float | None) -> str:
    return "  -  " if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
