"""Consortia: members answer, an arbiter judges, and the iteration repeats until it is confident."""
