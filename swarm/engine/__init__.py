"""Batched inference for many positions at once."""
