"""Judging: models answer sets of questions, and another model says what the answers are worth."""
