"""Experts: the small ones that ship, how they are trained, and others fetched from the hub."""
