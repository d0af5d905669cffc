"""Trackers by the word that a command line has for them."""

from swarm.errors import UserError
from swarm.track.base import Nothing, Tracker
from swarm.track.both import Both
from swarm.track.tensorboard import TensorBoard
from swarm.track.wandb import WandB

NAMES = ("none", "wandb", "wandb-offline", "tensorboard", "both", "both-offline")


def named(word: str) -> Tracker:
    """The tracker; WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP say where a run appears.

    Raises:
        UserError: There is none of this name.
    """
    if word not in NAMES:
        raise UserError(f"tracker {word}: must be one of {', '.join(NAMES)}", 2)
    kind, _, mode = word.partition("-")
    if kind == "none":
        return Nothing()
    if kind == "tensorboard":
        return TensorBoard()
    return (WandB if kind == "wandb" else Both)(mode or "online")
