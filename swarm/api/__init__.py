"""The Python API: swarm.search, swarm.evaluate and their results."""
