"""Evaluation of any candidate on any task: experts, positions, votes, ensembles, agents."""
