"""Intervals, paired tests and number formats: the only statistics of the package."""
