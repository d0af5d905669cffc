"""Experts: the small ones that are included, their training, and downloads from the hub."""
