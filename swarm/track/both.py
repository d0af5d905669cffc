"""Weights & Biases and TensorBoard at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.track.base import Shown, Value
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB


class Both:
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

    def start(self, shown: Shown) -> None:
        """See `swarm.track.Tracker`."""
        first, second = self.trackers
        first.start(shown)
        try:
            second.start(shown)
        except BaseException:
            first.finish({}, 1)
            raise

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.model(folder, facts)

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `swarm.track.Tracker`."""
        for tracker in self.trackers:
            tracker.finish(summary, code)
