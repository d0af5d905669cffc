"""Optimizers with an ask and tell interface over mixing coefficients."""

from swarm.optimizers.base import Optimizer as Optimizer
