"""Trackers that display a run outside its folder: Weights & Biases, TensorBoard, both or none."""

from swarm.trackers.base import NullTracker, StackedAreaChart, TrackedRun, Tracker, TrackerTable
from swarm.trackers.select import TRACKER_NAMES, MultiTracker, tracker_by_name
from swarm.trackers.tensorboard import TensorBoard
from swarm.trackers.wandb import WandB

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
