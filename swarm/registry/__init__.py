"""Model names of the command line and of configurations, resolved to models."""

from swarm.registry.registry import Roster as Roster
