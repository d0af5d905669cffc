"""Trackers that show a search outside its folder: Weights & Biases, TensorBoard, both or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.trackers.base import NOTHING, SearchTracker, Tracker
from swarm.trackers.tensorboard import TensorBoard
from swarm.trackers.wandb import WandB


class MultiTracker(Tracker):
    """Logs to both trackers; a failure of one does not affect the other.

    Args:
        *arguments, **options: Those of `swarm.trackers.WandB`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.trackers: Sequence[Tracker] = (WandB(*arguments, **options), TensorBoard())

    def check(self) -> None:
        """See `Tracker`."""
        for tracker in self.trackers:
            tracker.check()

    def start(
        self, folder: Path, config: Mapping[str, Any] = NOTHING, sources: Sequence[Path] = ()
    ) -> None:
        """See `Tracker`."""
        first, second = self.trackers
        first.start(folder, config, sources)
        try:
            second.start(folder, config, sources)
        except BaseException:
            first.finish({}, 1)
            raise

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        for tracker in self.trackers:
            tracker.log_model(folder, facts)

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `Tracker`."""
        for tracker in self.trackers:
            tracker.finish(summary, code)


__all__ = ["MultiTracker", "SearchTracker", "TensorBoard", "Tracker", "WandB"]
