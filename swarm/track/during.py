"""A run between its beginning and its end, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarm.track.base import TrackedRun, Tracker

INTERRUPTED_CODE = 130
"""The code of what Ctrl-C ends."""


@contextmanager
def track_run(tracker: Tracker, shown: TrackedRun) -> Iterator[dict[str, Any]]:
    """Start, and finish with the summary that the block fills; else as interrupted or failed.

    Raises:
        UserError: It cannot be shown.
    """
    tracker.start(shown)
    summary: dict[str, Any] = {}
    try:
        yield summary
    except BaseException as error:
        tracker.finish(summary, INTERRUPTED_CODE if isinstance(error, KeyboardInterrupt) else 1)
        raise
    tracker.finish(summary)
