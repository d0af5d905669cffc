"""Shows a run elsewhere than in its folder: Weights & Biases, TensorBoard, both or nowhere."""

from swarm.track.base import Nothing, Shown, Stacked, Table, Tracker
from swarm.track.both import Both
from swarm.track.named import NAMES, named
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB

__all__ = [
    "NAMES", "Both", "Nothing", "Shown", "Stacked", "Table", "TensorBoard", "Tracker", "WandB",
    "named",
]  # fmt: skip
