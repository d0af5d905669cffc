"""Trackers by the word that a command line has for them."""

from swarm.errors import UserError
from swarm.track.base import NullTracker, Tracker
from swarm.track.both import MultiTracker
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB

TRACKER_NAMES = ("none", "wandb", "wandb-offline", "tensorboard", "both", "both-offline")


def tracker_by_name(word: str) -> Tracker:
    """The tracker; WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP say where a run appears.

    Raises:
        UserError: There is none of this name.
    """
    if word not in TRACKER_NAMES:
        raise UserError(f"tracker {word}: must be one of {', '.join(TRACKER_NAMES)}", 2)
    kind, _, mode = word.partition("-")
    if kind == "none":
        return NullTracker()
    if kind == "tensorboard":
        return TensorBoard()
    return (WandB if kind == "wandb" else MultiTracker)(mode or "online")
