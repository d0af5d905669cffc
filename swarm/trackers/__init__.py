"""Trackers that show a search outside its folder: Weights & Biases, TensorBoard, both or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from swarm.trackers.base import SearchTracker, TrackedRun, Tracker
from swarm.trackers.tensorboard import TensorBoard
from swarm.trackers.wandb import WandB


class MultiTracker(Tracker):
    """Logs to both trackers; a failure of one does not affect the other.

    Args:
        mode, project, entity, group, model, uses, link: See `swarm.trackers.WandB`.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"] = "online",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        model: bool = True,
        uses: Sequence[str] = (),
        link: str | None = None,
    ) -> None:
        wandb = WandB(mode, project, entity, group, model, uses, link)
        self.trackers: tuple[WandB, TensorBoard] = (wandb, TensorBoard())

    def check(self) -> None:
        """See `Tracker`."""
        for tracker in self.trackers:
            tracker.check()

    def start(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        first, second = self.trackers
        first.start(run)
        try:
            second.start(run)
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


__all__ = ["MultiTracker", "SearchTracker", "TensorBoard", "TrackedRun", "Tracker", "WandB"]
