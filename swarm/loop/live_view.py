"""Terminal view of a search: live progress while it runs, and the summary table at its end.

Contains `SearchProgress` (the numbers), `render_progress` (the numbers as terminal lines), the
summary of final metrics, and `LiveView`, which prints plain lines where there is no terminal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm._util.terminal import format_duration
from swarm.executors import JobResult
from swarm.runs.describe import (
    compare_with_constants,
    compare_with_soup,
    compare_with_unbeaten,
    conclude_gain,
    describe_constant_answers,
    describe_position,
    domain_table,
    list_caveats,
)

RECENT_ITERATIONS = 5
"""Number of last iterations from which the remaining time is estimated."""


class SearchProgress:
    """Progress numbers of a running search.

    Args:
        max_iterations: Maximum number of iterations.
        budget: Maximum cost on dev in prompt-equivalents; `None` is no limit.
        clock: Returns the time in seconds.

    Attributes:
        activity: Description of the current evaluation.
        iteration: The current iteration, or the last one.
        done, total: Items of the current evaluation, counted for every position or gradient step.
        utilities: [particles][iterations], `None` where none was measured.
        lowest: The lowest utility so far.
        best: The highest utility so far; `gain` is its improvement over the previous one,
            `best_iteration` the iteration that found it.
        prompts_scored: Number of prompts scored; `saved` counts prompts saved, by cause.
        spent: Cost on dev so far, in prompt-equivalents; a gradient counts as three.
        writing: Description of the current write; empty if none.
    """

    def __init__(
        self,
        max_iterations: int,
        clock: Callable[[], float] = time.monotonic,
        budget: int | None = None,
    ) -> None:
        self.max_iterations, self.budget, self._clock = max_iterations, budget, clock
        self.activity = "starting"
        self.iteration = 0
        self.done = self.total = 0
        self.utilities: list[list[float | None]] = []
        self.best: float | None = None
        self.lowest: float | None = None
        self.gain = 0.0
        self.best_iteration = 0
        self.prompts_scored = 0
        self.saved = {"racing": 0, "known": 0, "shared": 0}
        self.writing = ""
        self.prompts = self.tokens = 0
        self.spent = 0
        self._current_cost = 0
        # Seconds and prompt-equivalents of each iteration of this process.
        self._paces: list[tuple[float, int]] = []
        self._evaluations_to_come = 0
        self._iteration_began: float | None = None
        self._began = self._clock()

    def start_evaluation(
        self, activity: str, iteration: int, positions: int, items: int, to_come: int = 0
    ) -> None:
        """Start an evaluation of this many positions on this many items.

        Args:
            activity: Description; it begins with "iteration" until the last iteration is over.
            to_come: Number of similar evaluations that follow the last iteration and this one.
        """
        self.activity, self.iteration = activity, iteration
        self.done, self.total = 0, positions * items
        self.prompts = self.tokens = 0
        self._evaluations_to_come = to_come
        self._began = self._clock()
        if self._iteration_began is None:
            self._iteration_began = self._began

    def add_job_result(self, result: JobResult) -> None:
        """Count a finished job."""
        scored = sum(len(scores) for scores in result.scores)
        self.done += result.prompts if result.gradient else scored
        self.total = max(self.total, self.done)
        self._current_cost += result.prompts * (
            3 if result.gradient is not None and result.gradient.slope.any() else 1
        )
        self.prompts += result.prompts
        self.tokens += result.tokens

    def end_iteration(self, entry: Mapping[str, Any]) -> None:
        """Count a finished iteration and its duration.

        Args:
            entry: The iteration's entry in the record.
        """
        now, before = self._clock(), self.spent
        self.add_iteration(entry)
        began = self._began if self._iteration_began is None else self._iteration_began
        if self.spent > before:  # an iteration that evaluates nothing has no pace
            self._paces.append((now - began, self.spent - before))
        self._iteration_began, self._current_cost = now, 0

    def add_iteration(self, entry: Mapping[str, Any]) -> None:
        """Count an iteration of the record, of this process or an earlier one."""
        number = len(self.utilities[0]) if self.utilities else 0
        self.utilities = self.utilities or [[] for _ in entry["utilities"]]
        for mine, utility in zip(self.utilities, entry["utilities"], strict=True):
            mine.append(utility)
        known = [u for u in entry["utilities"] if u is not None]
        highest = max(known, default=None)
        self.lowest = min((u for u in (self.lowest, *known) if u is not None), default=None)
        if highest is not None and (self.best is None or highest > self.best):
            self.gain = 0.0 if self.best is None else highest - self.best
            self.best, self.best_iteration = highest, number
        put, shared = entry.get("prompts_scored", 0), entry.get("prompts_shared", 0)
        scored = sum(count or 0 for count in entry.get("items_scored", []))
        self.prompts_scored += put - shared
        self.spent += put + entry.get("losses_computed", 0) + 3 * entry.get("gradients_computed", 0)
        self.saved["racing"] += entry.get("prompts_saved", 0)
        self.saved["known"] += max(0, scored - put)
        self.saved["shared"] += shared

    @property
    def latest_utilities(self) -> list[float | None]:
        """Utility of every particle in the last iteration."""
        return [mine[-1] for mine in self.utilities]

    @property
    def prompts_per_second(self) -> float:
        """Prompts per second in the current evaluation; 0 if there was nothing to evaluate."""
        return self.prompts / self._elapsed_seconds()

    @property
    def tokens_per_second(self) -> float:
        """Tokens read and generated per second in the current evaluation."""
        return self.tokens / self._elapsed_seconds()

    def seconds_left(self) -> float | None:
        """Return the seconds left, from the last iterations' pace; `None` if unknown.

        During the search: until the last iteration, or until the budget is spent, whichever is
        sooner. Afterwards: until the end of this evaluation and of those announced with it.
        """
        here = self._evaluation_seconds_left()
        if not self.activity.startswith("iteration"):
            following = self._evaluations_to_come
            return None if here is None else here + following * (self._elapsed_seconds() + here)
        bounds = [self._seconds_of_iterations(here), self._seconds_of_budget()]
        return min((one for one in bounds if one is not None), default=None)

    def _seconds_of_iterations(self, here: float | None) -> float | None:
        """Return the seconds until the maximum number of iterations is reached."""
        to_come = max(0, self.max_iterations - self.iteration)
        if not self._paces:
            return None if here is None else here + to_come * (self._elapsed_seconds() + here)
        recent = [seconds for seconds, _ in self._recent_paces()]
        mean = sum(recent) / len(recent)
        if self.utilities and len(self.utilities[0]) > self.iteration:
            return to_come * mean
        return to_come * mean + max(0.0 if here is None else here, mean - self._iteration_seconds())

    def _seconds_of_budget(self) -> float | None:
        """Return the seconds until the budget is spent."""
        if self.budget is None:
            return None
        recent = self._recent_paces()
        # The current iteration counts, too: the first one with gradients has another pace.
        cost = sum(one for _, one in recent) + self._current_cost
        if not cost:
            return None
        seconds = sum(one for one, _ in recent) + self._iteration_seconds()
        return max(0, self.budget - self.spent - self._current_cost) * seconds / cost

    def _recent_paces(self) -> list[tuple[float, int]]:
        """Return the last iterations' paces; the first includes the start of the workers."""
        recent = self._paces[-RECENT_ITERATIONS:]
        return recent[1:] or recent

    def _iteration_seconds(self) -> float:
        """Return the seconds since the current iteration began."""
        return 0.0 if self._iteration_began is None else self._clock() - self._iteration_began

    @property
    def share(self) -> float:
        """Share of the search that is done: of its iterations or its budget, the larger one."""
        if not self.activity.startswith("iteration"):
            return float(self.iteration > 0)
        iterations = len(self.utilities[0]) / (self.max_iterations + 1) if self.utilities else 0.0
        return min(1.0, max(iterations, self.budget_share or 0.0))

    @property
    def budget_share(self) -> float | None:
        """Share of the budget that is spent; `None` without one."""
        if self.budget is None:
            return None
        return min(1.0, (self.spent + self._current_cost) / self.budget)

    def to_status(self) -> dict[str, Any]:
        """Return the status that `swarm.runs.lock.RunLock.update_status` writes to the folder."""
        seconds, budget = self.seconds_left(), self.budget_share
        return {
            "activity": self.activity,
            "iteration": self.iteration,
            "max_iterations": self.max_iterations,
            "done": self.done,
            "total": self.total,
            "share": round(self.share, 4),
            "budget_share": None if budget is None else round(budget, 4),
            "prompts_per_second": round(self.prompts_per_second, 2),
            "seconds_left": None if seconds is None else round(seconds),
            "best": self.best,
        }

    def _elapsed_seconds(self) -> float:
        return max(self._clock() - self._began, 1e-9)

    def _evaluation_seconds_left(self) -> float | None:
        """Return the seconds that the current evaluation still takes."""
        if not self.done:
            return None
        return self._elapsed_seconds() / self.done * max(0, self.total - self.done)


BLOCK_CHARS = "▁▂▃▄▅▆▇█"
ASCII_CHARS = "_.-~=+*#"
"""Eight heights, for terminals without Unicode block characters."""

MAX_SPARKLINE = 24
"""Maximum number of (last) iterations in a sparkline."""

BAR_WIDTH = 16
"""Width of the progress bar of the current evaluation, in columns."""

PIECE_GAP = "  "


def render_progress(progress: SearchProgress, width: int, height: int, blocks: bool = True) -> Text:
    """Render a running search in at most `height` lines of at most `width` columns.

    The first lines show activity and speed, then the best utility and the savings, then each
    particle: its number, a sparkline of its utilities, and the current one; "*" marks the best so
    far. If not all particles fit, the last line gives the number of the others.

    Args:
        blocks: Whether the terminal supports characters beyond ASCII.
    """
    head = wrap_pieces(_work_pieces(progress, blocks), width)
    if progress.best is not None:
        head += wrap_pieces(_best_pieces(progress), width)
    head += wrap_pieces(_saved_pieces(progress), width)
    rows = render_particles(progress, width, max(1, height - len(head)), blocks)
    lines = [*head, *rows][:height]
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True).join(lines)


def wrap_pieces(pieces: Sequence[Text | str], width: int) -> list[Text]:
    """Join pieces into lines; a piece that does not fit starts a new line and is not broken."""
    lines: list[Text] = []
    for piece in pieces:
        text = Text(piece) if isinstance(piece, str) else piece
        if lines and lines[-1].cell_len + len(PIECE_GAP) + text.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], PIECE_GAP, text)
        else:
            lines.append(text)
    return lines


def _work_pieces(progress: SearchProgress, blocks: bool) -> list[Text | str]:
    if not progress.total:
        return [Text(progress.activity, style="bold")]
    share = progress.done / progress.total
    full, empty = ("█", "░") if blocks else ("#", ".")
    filled = round(min(1.0, share) * BAR_WIDTH)
    pieces: list[Text | str] = [
        Text(progress.activity, style="bold"),
        full * filled + empty * (BAR_WIDTH - filled),
        f"{progress.done}/{progress.total} items",
        f"{progress.prompts_per_second:.1f} prompts/s",
        f"{progress.tokens_per_second:.0f} tokens/s",
    ]
    return [*pieces, *format_time_left(progress)]


def _best_pieces(progress: SearchProgress) -> list[Text | str]:
    pieces: list[Text | str] = [Text(f"best {format_utility(progress.best)}", style="bold green")]
    if not progress.best_iteration:
        return [*pieces, "found in iteration 0"]
    return [*pieces, f"improved by {progress.gain:.3f} in iteration {progress.best_iteration}"]


def _saved_pieces(progress: SearchProgress) -> list[Text | str]:
    """Return prompts saved, by cause, and what is being written."""
    saved = {name: count for name, count in progress.saved.items() if count}
    pieces: list[Text | str] = []
    if saved:
        total = sum(saved.values())
        parts = ", ".join(f"{name} {count}" for name, count in saved.items())
        pieces.append(f"saved {total} of {progress.prompts_scored + total} prompts ({parts})")
    return [*pieces, *([f"writing {progress.writing}"] if progress.writing else [])]


def format_time_left(progress: SearchProgress) -> list[str]:
    """Return the time left as a piece; empty if unknown."""
    seconds = progress.seconds_left()
    return [f"at most {format_duration(max(round(seconds), 1))} left"] if seconds else []


def render_particles(
    progress: SearchProgress, width: int, height: int, blocks: bool = True
) -> list[Text]:
    """Render the particles in at most `height` rows, with the longest sparklines that fit."""
    if not progress.utilities:
        return []
    count = len(progress.utilities)
    numbers = [format_utility(utility) for utility in progress.latest_utilities]
    fixed = len(str(count - 1)) + 1 + max(len(text) for text in numbers) + 1
    limit = min(MAX_SPARKLINE, len(progress.utilities[0]), max(0, width - fixed - 1))
    for length in range(limit, -1, -1):
        wide = fixed + (length + 1 if length else 0)
        columns = max(1, (width + len(PIECE_GAP)) // (wide + len(PIECE_GAP)))
        if -(-count // columns) <= height:
            break
    cells = [_particle_cell(progress, i, numbers, length, blocks) for i in range(count)]
    if -(-count // columns) > height:
        shown = max(0, (height - 1) * columns)
        return [*_arrange_rows(cells[:shown], columns), Text(f"and {count - shown} more particles")]
    return _arrange_rows(cells, columns)


def _arrange_rows(cells: Sequence[Text], columns: int) -> list[Text]:
    starts = range(0, len(cells), columns)
    return [Text(PIECE_GAP).join(cells[start : start + columns]) for start in starts]


def _particle_cell(
    progress: SearchProgress, particle: int, numbers: Sequence[str], length: int, blocks: bool
) -> Text:
    mine = progress.utilities[particle]
    name = str(particle).rjust(len(str(len(numbers) - 1)))
    line = draw_sparkline(mine[-length:], _utility_range(progress), blocks) + " " if length else ""
    text = numbers[particle].rjust(max(len(one) for one in numbers))
    best = progress.best is not None and progress.best in mine
    return Text(f"{name} {line}{text}{'*' if best else ' '}", style="bold green" if best else "")


def draw_sparkline(
    values: Sequence[float | None], span: tuple[float, float], blocks: bool = True
) -> str:
    """Draw a row of numbers as a row of heights, "·" for missing values.

    Args:
        span: Values of the lowest and the highest height.
    """
    heights, nothing = (BLOCK_CHARS, "·") if blocks else (ASCII_CHARS, " ")
    low, high = span
    top = len(heights) - 1

    def height_char(value: float) -> str:
        return heights[round((value - low) / (high - low) * top)] if high > low else heights[0]

    return "".join(nothing if value is None else height_char(value) for value in values)


def _utility_range(progress: SearchProgress) -> tuple[float, float]:
    return progress.lowest or 0.0, progress.best or 0.0


def format_utility(value: float | None) -> str:
    """Format a utility with three decimals; a dash if it is missing."""
    return "  -  " if value is None else f"{value:.3f}"


def summary_table(metrics: dict[str, Any]) -> Table:
    """Return the table of best initial expert and best position, on dev and, if scored, on test.

    Args:
        metrics: As returned by `swarm.loop.final_metrics.final_metrics`.
    """
    tested = "test_gain" in metrics
    made = Table()
    made.add_column("model", overflow="fold")
    made.add_column(f"dev, n = {metrics['ending_best_validation_items']}", overflow="fold")
    if tested:
        made.add_column(f"test, n = {metrics['ending_best_single_test_items']}", overflow="fold")
    compared = tested and bool(metrics.get("baselines"))
    if compared:
        made.add_column("gain of best found", overflow="fold")
    for row in summary_rows(metrics):
        made.add_row(*map(Text, row[: 2 + tested + compared]))
    return made


def domain_summary_table(metrics: dict[str, Any]) -> Table | None:
    """Return utilities by domain, on test or else on dev; `None` without several domains."""
    found = domain_table(metrics, "test" if "test_gain" in metrics else "dev")
    if found is None:
        return None
    header, rows = found
    made = Table()
    for name in header:
        made.add_column(Text(name), overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def summary_lines(
    metrics: dict[str, Any],
    experts: Sequence[str],
    groups: Sequence[str] = ("all",),
    too_long: Sequence[str] = (),
) -> list[str]:
    """Return the comments on the table, and a description of the best position.

    Args:
        metrics: As returned by `swarm.loop.final_metrics.final_metrics`.
        experts, groups: The pool's names.
        too_long: Lines on dropped or truncated items.
    """
    words = describe_position(experts, metrics["ending_best_position"], groups)
    name = metrics.get("ending_best_label")
    verdict = []
    if "test_gain" in metrics:
        compared = (compare_with_unbeaten, compare_with_constants, compare_with_soup)
        verdict = [
            conclude_gain(metrics),
            *(one for compare in compared for one in compare(metrics)),
        ]
    return [
        "Brackets: 95 % intervals. The dev score of the best found is the maximum of many and "
        "so biased upwards; test was not used by the search.",
        *subtask_lines(metrics),
        *front_lines(metrics),
        *([scoring_cost_line(metrics["scoring_cost"])] if "scoring_cost" in metrics else []),
        *list_caveats(metrics, too_long),
        *([" ".join(verdict)] if verdict else []),
        "best found = " + (f"{name}: {words}" if name else words),
    ]


def subtask_lines(metrics: dict[str, Any]) -> list[str]:
    """Return a line per part of a mixture, on dev and test, unless the domain table shows them."""
    if domain_summary_table(metrics):
        return []
    lines = []
    for split, name in (("dev", "validation"), ("test", "single_test")):
        after = metrics.get(f"ending_best_{name}_parts", {})
        before = metrics.get(f"starting_best_{name}_parts", {})
        lines += [f"{part}, {split}: {before[part]:.3f} to {after[part]:.3f}" for part in after]
    return lines


def front_lines(metrics: dict[str, Any]) -> list[str]:
    """Return the size of the front on dev and its hypervolume, if the task has parts."""
    points, (first, last) = metrics.get("front_points", 0), metrics.get("hypervolume", (0.0, 0.0))
    if points < 2:
        return []
    return [
        f"front on dev: {points} points, hypervolume {first:.4g} at the start, {last:.4g} at the "
        "end; front.json lists the points, and the report shows them"
    ]


def scoring_cost_line(spent: dict[str, dict[str, float]]) -> str:
    """Format the costs returned by `swarm.loop.final_metrics.sum_scoring_costs`."""
    sums = [f"{name} {n['first']:.6g} + {n['again']:.6g}" for name, n in spent.items()]
    return f"scoring took {', '.join(sums)} (new texts + repeated texts, which are cached)"


def summary_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the final table: model, dev, test."""
    names = {
        "starting": f"best initial expert ({metrics['starting_best_expert']})",
        "ending": "best found",
    }
    rows = []
    if constant := metrics.get("constant_answers"):
        found = constant["by_domain"]
        each = " of each domain" if len(found["answers"]) > 1 else ""
        row = [f"best constant answer{each} ({describe_constant_answers(constant)}; chosen on dev)"]
        for split in ("dev", "test"):
            if split in found:
                row.append(_format_with_interval(found[split]["utility"], found[split]["interval"]))
        rows.append([*row, _format_gain(metrics, constant)])
    for one in metrics.get("baselines", ()):
        row = [one["label"]]
        for split in ("dev", "test"):
            known = one.get(split)
            row.append(_format_with_interval(known["utility"], known["interval"]) if known else "–")
        rows.append([*row, _format_gain(metrics, one)])
    for when, name in names.items():
        row = [name]
        for split, value in (("validation", "validation_utility"), ("single_test", "")):
            number = metrics.get(f"{when}_best_{value or 'single_test_accuracy'}")
            if number is not None:
                row.append(_format_with_interval(number, metrics[f"{when}_best_{split}_interval"]))
        if when == "starting" and "test_gain" in metrics:
            keys = {"gain": "test_gain", "gain_interval": "test_gain_interval"}
            keys |= {"p_value": "test_gain_p_value"}
            row.append(_format_gain(metrics, {key: metrics[name] for key, name in keys.items()}))
        rows.append(row)
    # A vote of one is the best found.
    if "ending_top-k_ensemble_test_accuracy" in metrics and metrics["ensemble_size"] > 1:
        number = metrics["ending_top-k_ensemble_test_accuracy"]
        vote = _format_with_interval(number, metrics["ending_top-k_ensemble_test_interval"])
        size = metrics["ensemble_size"]
        dev = f"{metrics['ensemble_dev_by_size'][size - 1]:.3f}"
        rows.append([f"vote of the top {size} (chosen on dev)", dev, vote])
    return rows


def _format_gain(metrics: dict[str, Any], one: dict[str, Any]) -> str:
    """Format the gain of the best position over a model on test, with interval and p-value."""
    if "gain" not in one:
        return ""
    scale = 100.0 if metrics.get("in_points", False) else 1.0
    low, high = (f"{scale * end:+.3g}" for end in one["gain_interval"])
    return f"{scale * one['gain']:+.3g} [{low}, {high}], p = {one['p_value']:.2g}"


def _format_with_interval(number: float, interval: Sequence[float]) -> str:
    return f"{number:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


PLAIN_COLUMNS = 160


class LiveView:
    """Live view of a search in a terminal; elsewhere one line per iteration without escape codes.

    Args:
        progress: The progress shown; updated by the caller.
        console: Output console; standard output by default.
    """

    def __init__(self, progress: SearchProgress, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console()
        if not self.console.is_terminal:
            # A file or a pipe has no terminal width; do not wrap there.
            self.console.width = max(self.console.width, PLAIN_COLUMNS)
        self._live: Live | None = None

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def print_line(self, line: str) -> None:
        """Print one permanent line; a terminal gets it wrapped between words."""
        # Overlong words such as paths are not broken, so that they can be copied.
        for row in wrap(line, self._line_width(), break_long_words=False, break_on_hyphens=False):
            self.console.print(Text(row), soft_wrap=True)

    def print_phase(self, line: str) -> None:
        """Print what begins, where no live view shows it."""
        if self._live is None:
            self.print_line(line)

    def print_iteration(self) -> None:
        """Print one permanent line for the finished iteration."""
        progress = self.progress
        measured = [u for u in progress.latest_utilities if u is not None]
        span = f"{min(measured):.3f} to {max(measured):.3f}" if measured else "none"
        saved = sum(progress.saved.values())
        pieces = [
            f"iteration {progress.iteration:>3}",
            f"best {format_utility(progress.best)}",
            f"particles {span}",
            f"{progress.prompts_per_second:6.1f} prompts/s",
            *format_time_left(progress),
            *([f"saved {saved} of {progress.prompts_scored + saved} prompts"] if saved else []),
        ]
        self.console.print(wrap_pieces(pieces, self._line_width())[0], soft_wrap=True)

    def _line_width(self) -> int:
        """Return the number of columns; files and pipes are unlimited."""
        return self.console.width if self.console.is_terminal else 10_000

    def _render(self) -> Text:
        size, encoding = self.console.size, self.console.encoding
        return render_progress(
            self.progress, size.width, size.height - 1, encoding.startswith("utf")
        )

    def print_summary(
        self,
        metrics: dict[str, Any],
        experts: Sequence[str],
        groups: Sequence[str] = ("all",),
        too_long: Sequence[str] = (),
    ) -> None:
        """Print the final table and the comments on it.

        Args:
            metrics: As returned by `swarm.loop.final_metrics.final_metrics`.
            experts, groups: The pool's names.
            too_long: Lines on dropped or truncated items.
        """
        self.console.print(summary_table(metrics))
        if by_domain := domain_summary_table(metrics):
            self.console.print(by_domain)
        for line in summary_lines(metrics, experts, groups, too_long):
            self.print_line(line)


__all__ = ["LiveView", "SearchProgress", "scoring_cost_line"]
