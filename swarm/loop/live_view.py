"""Terminal view of a running search: a live view, or plain lines where there is no terminal."""

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm._util.terminal import format_duration
from swarm._util.threads import PeriodicThread
from swarm.loop.progress import SearchProgress
from swarm.loop.summary import summary_lines, summary_table
from swarm.runs.verdict import Verdict, state_verdict

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


SAVED_CAUSES = {
    "racing": "stopped early",
    "known": "answered before",
    "shared": "from other searches",
}
"""Causes of prompts that need not be asked: key of `SearchProgress.saved` -> words."""


def format_saved(saved: Mapping[str, int]) -> str:
    """Format the prompts that were not asked, by cause: "3 stopped early, 90 answered before"."""
    return ", ".join(f"{n} {SAVED_CAUSES[cause]}" for cause, n in saved.items() if n)


def _saved_pieces(progress: SearchProgress) -> list[Text | str]:
    """Return prompts saved, by cause, and what is being written."""
    pieces: list[Text | str] = []
    if saved := format_saved(progress.saved):
        total = progress.prompts_scored + sum(progress.saved.values())
        pieces = [f"of {total} prompts: {saved}"]
    return [*pieces, *([f"writing {progress.writing}"] if progress.writing else [])]


def format_time_left(progress: SearchProgress) -> list[str]:
    """Return the time left as a piece; empty if unknown."""
    seconds = progress.seconds_left()
    with_test = progress.searching and progress.estimate_seconds(progress.final_items)
    test = " with test" if with_test else ""
    return [f"at most {format_seconds(seconds)} left{test}"] if seconds else []


def format_seconds(seconds: float) -> str:
    """Format an estimate in whole seconds, at least one."""
    return format_duration(max(round(seconds), 1))


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


def iteration_pieces(number: int, best: float | None, measured: Sequence[float]) -> list[str]:
    """Return the first pieces of an iteration's line: the best so far, and this one's utilities."""
    span = f"{min(measured):.3f} to {max(measured):.3f}" if measured else "nothing new"
    return [f"iteration {number:>3}", f"best {format_utility(best)}", f"this iteration {span}"]


PLAIN_COLUMNS = 160

FIRST_REPORT_S, MAX_REPORT_GAP_S = 20.0, 600.0
"""Seconds until a line on how far an evaluation is, and the maximum until the next one.

The gaps between grow with the evaluation: 20, 40, 80 seconds.
"""


class LiveView:
    """Live view of a search in a terminal; elsewhere plain lines without escape codes.

    Those are one per iteration, one where an evaluation begins, and some during a long one.

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
        self._reports: PeriodicThread | None = None
        self._reported, self._report_at = progress.began, FIRST_REPORT_S
        self._printed: set[str] = set()

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.start()
        elif not self.console.quiet:
            self._reports = PeriodicThread(self.report_progress, 1.0, "swarm-progress")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._reports:
            self._reports.close()
            self._reports = None

    def print_line(self, line: str) -> None:
        """Print one permanent line; a terminal gets it wrapped between words."""
        # Overlong words such as paths are not broken, so that they can be copied.
        for row in wrap(line, self._line_width(), break_long_words=False, break_on_hyphens=False):
            self.console.print(Text(row), soft_wrap=True)

    def print_once(self, line: str) -> None:
        """Print a permanent line, unless this view has printed it before."""
        if line not in self._printed:
            self._printed.add(line)
            self.print_line(line)

    def report_progress(self) -> None:
        """Print how far a long evaluation is, if it is time to."""
        progress = self.progress
        if progress.began != self._reported:
            self._reported, self._report_at = progress.began, FIRST_REPORT_S
        elapsed = progress.elapsed_seconds
        if progress.done >= progress.total or elapsed < self._report_at:
            return
        self._report_at = elapsed + min(self._report_at, MAX_REPORT_GAP_S)
        line = f"{progress.activity}: {progress.done} of {progress.total} items after "
        line += format_seconds(elapsed)
        if left := progress.evaluation_seconds_left():
            line += f", about {format_seconds(left)} more"
        try:
            self.print_line(line)
        except SystemExit:  # the reader of a pipe is gone; in this thread it would end nothing
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def print_phase(self, line: str) -> None:
        """Print what begins, where no live view shows it."""
        if self._live is None:
            self.print_line(line)

    def print_iteration(self) -> None:
        """Print one permanent line for the finished iteration."""
        progress = self.progress
        measured = [u for u in progress.latest_utilities if u is not None]
        pieces = [
            *iteration_pieces(progress.iteration, progress.best, measured),
            *([f"{progress.prompts_per_second:.1f} prompts/s"] if progress.prompts else []),
            *format_time_left(progress),
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
        verdict: Verdict,
        experts: Sequence[str],
        groups: Sequence[str] = ("all",),
        folder: Path | None = None,
    ) -> None:
        """Print the verdict, the final table and the comments on it.

        Args:
            experts, groups: The pool's names.
            folder: The run folder, for the verdict's command.
        """
        self.print_line(str(state_verdict(verdict, folder)))
        self.console.print(summary_table(verdict))
        for line in summary_lines(verdict, experts, groups):
            self.print_once(line)
