"""Swarm search, combination and comparison of language models."""

__version__ = "0.1.0"
