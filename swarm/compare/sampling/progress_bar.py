"""A progress bar for a person at a terminal or in a notebook; nobody else sees any."""

import sys
import threading
from collections.abc import Callable

SHOW_AFTER_S, REFRESH_EVERY_S = 0.5, 0.2
"""Seconds until the bar is shown, and between two updates."""


class SamplingProgressBar:
    """Progress bar as a context; shown in a terminal or a notebook only.

    Args:
        title: Text before the bar.
        count: Returns the numbers of answers received, of answers known to be requested, and of
            failures.
        silent: Never show the bar.
    """

    def __init__(
        self, title: str, count: Callable[[], tuple[int, int, int]], silent: bool = False
    ) -> None:
        self.title, self.count = title, count
        self.shown = not silent and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._ended = threading.Event()

    def __enter__(self) -> "SamplingProgressBar":
        if self.shown:
            self._thread = threading.Thread(target=self._update_bar, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self.shown:
            self._thread.join()

    def _update_bar(self) -> None:
        if self._ended.wait(SHOW_AFTER_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        failures = TextColumn("{task.fields[failures]}", style="red")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            failures,
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(self.title, failures="")
            while True:
                ended = self._ended.wait(REFRESH_EVERY_S)
                completed, total, failed = self.count()
                failure_text = f"{failed} failed" if failed else ""
                bar.update(task, completed=completed, total=total, failures=failure_text)
                if ended:
                    return
