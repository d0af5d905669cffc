"""What a running search shows: a live view in a terminal, plain lines anywhere else."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm.live.picture import wrap_pieces, format_utility, render_progress, format_time_left
from swarm.live.progress import SearchProgress
from swarm.live.verdict import domain_summary_table, summary_lines, summary_table

PLAIN_COLUMNS = 160


class LiveView:
    """A search in a terminal; where there is none, a line an iteration without escape codes.

    Args:
        progress: What it shows, which others keep up to date.
        console: Where to write; standard output by default.
    """

    def __init__(self, progress: SearchProgress, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console()
        if not self.console.is_terminal:
            # A file or a pipe has no width of its own; nothing is cut off there.
            self.console.width = max(self.console.width, PLAIN_COLUMNS)
        self._live: Live | None = None

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, transient=True,
                              refresh_per_second=4)  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def print_line(self, line: str) -> None:
        """Print one line that stays; a terminal gets it broken between words."""
        # A word that is too long, such as a path, stays whole: the terminal goes on below.
        for row in wrap(line, self._line_width(), break_long_words=False, break_on_hyphens=False):
            self.console.print(Text(row), soft_wrap=True)

    def print_iteration(self) -> None:
        """An iteration is over: one line of it stays."""
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
            *([f"saved {saved} of {progress.asked + saved} prompts"] if saved else []),
        ]
        self.console.print(wrap_pieces(pieces, self._line_width())[0], soft_wrap=True)

    def _line_width(self) -> int:
        """Columns; a file or a pipe takes any number."""
        return self.console.width if self.console.is_terminal else 10_000

    def _render(self) -> Text:
        size, encoding = self.console.size, self.console.encoding
        return render_progress(self.progress, size.width, size.height - 1, encoding.startswith("utf"))

    def print_summary(
        self, metrics: dict[str, Any], experts: Sequence[str], groups: Sequence[str] = ("all",)
    ) -> None:
        """Print the final table and what may be said of it.

        Args:
            metrics: As `swarm.verdict.judge` returns them.
            experts, groups: The pool's names.
        """
        self.console.print(summary_table(metrics))
        if by_domain := domain_summary_table(metrics):
            self.console.print(by_domain)
        for line in summary_lines(metrics, experts, groups):
            self.print_line(line)
