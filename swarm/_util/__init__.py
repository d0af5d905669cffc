"""Helpers independent of models and searches: command lines, files, the terminal."""
