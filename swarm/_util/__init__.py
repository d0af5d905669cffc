"""Helpers that know nothing of models and searches: command lines, files, the terminal."""
