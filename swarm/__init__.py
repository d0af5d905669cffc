"""Swarm search, combination and comparison of language models.

In Python: `from swarm.api import Pool, evaluate, search`; docs/python.md documents the API.
"""

from swarm._version import __version__ as __version__
