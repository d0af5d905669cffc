"""Intervals, paired tests and number formats: the package's only statistics."""
