"""Batched inference for many positions at once."""

from swarm.engine.base import Engine as Engine
