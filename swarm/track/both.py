"""Weights & Biases and TensorBoard at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.track.base import TrackedRun, LoggedValue
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB


class MultiTracker:
    """Tells both; that one fails is nothing to the other.

    Args:
        mode, project, entity, group, model, uses: See `swarm.track.WandB`.
    """

    def __init__(
        self,
        mode: str = "online",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        model: bool = True,
        uses: Sequence[str] = (),
    ) -> None:
        wandb = WandB(mode, project, entity, group, model, uses)
        self.trackers: tuple[WandB, TensorBoard] = (wandb, TensorBoard())

    def check(self) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.check()

    def start(self, shown: TrackedRun) -> None:
        """See `swarm.track.Tracker`."""
        first, second = self.trackers
        first.start(shown)
        try:
            second.start(shown)
        except BaseException:
            first.finish({}, 1)
            raise

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.log_model(folder, facts)

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.finish(summary, code)
