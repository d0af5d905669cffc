"""Shows a run elsewhere than in its folder: Weights & Biases, TensorBoard, both or nowhere."""

from swarm.track.base import NullTracker, TrackedRun, StackedAreaChart, TrackerTable, Tracker
from swarm.track.both import MultiTracker
from swarm.track.named import TRACKER_NAMES, tracker_by_name
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB

__all__ = [
    "TRACKER_NAMES", "MultiTracker", "NullTracker", "TrackedRun", "StackedAreaChart", "TrackerTable", "TensorBoard", "Tracker", "WandB",
    "tracker_by_name",
]  # fmt: skip
