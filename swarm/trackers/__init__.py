"""Trackers that display a run outside its folder: Weights & Biases, TensorBoard, both or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.trackers.base import (
    LoggedValue,
    NullTracker,
    StackedAreaChart,
    TrackedRun,
    Tracker,
    TrackerTable,
)
from swarm.trackers.tensorboard import TensorBoard
from swarm.trackers.wandb import WandB


class MultiTracker:
    """Logs to both trackers; a failure of one does not affect the other.

    Args:
        mode, project, entity, group, model, uses, link: See `swarm.trackers.WandB`.
    """

    def __init__(
        self,
        mode: str = "online",
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
        """See `swarm.trackers.Tracker`."""
        for tracker in self.trackers:
            tracker.check()

    def start(self, shown: TrackedRun) -> None:
        """See `swarm.trackers.Tracker`."""
        first, second = self.trackers
        first.start(shown)
        try:
            second.start(shown)
        except BaseException:
            first.finish({}, 1)
            raise

    def log(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        """See `swarm.trackers.Tracker`."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """See `swarm.trackers.Tracker`."""
        for tracker in self.trackers:
            tracker.log_model(folder, facts)

    def finish(self, summary: Mapping[str, Any], code: int = 0) -> None:
        """See `swarm.trackers.Tracker`."""
        for tracker in self.trackers:
            tracker.finish(summary, code)


TRACKER_NAMES = ("none", "wandb", "wandb-offline", "tensorboard", "both", "both-offline")


def tracker_by_name(word: str) -> Tracker:
    """Return a tracker by its name.

    WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP apply to Weights & Biases.

    Raises:
        UserError: The name is unknown.
    """
    if word not in TRACKER_NAMES:
        raise UserError(f"tracker {word}: must be one of {', '.join(TRACKER_NAMES)}", 2)
    kind, _, mode = word.partition("-")
    if kind == "none":
        return NullTracker()
    if kind == "tensorboard":
        return TensorBoard()
    return (WandB if kind == "wandb" else MultiTracker)(mode or "online")


__all__ = [
    "TRACKER_NAMES",
    "MultiTracker",
    "NullTracker",
    "StackedAreaChart",
    "TensorBoard",
    "TrackedRun",
    "Tracker",
    "TrackerTable",
    "WandB",
    "tracker_by_name",
]
