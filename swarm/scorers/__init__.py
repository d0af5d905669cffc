"""Scorers of texts: a rule, a classifier, a reward model, a judge; one file per kind."""
