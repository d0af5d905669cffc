"""Benchmarks with judges: models answer sets of questions, and a judge model rates the answers."""
