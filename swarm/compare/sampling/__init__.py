"""Samples of many models at once: what is missing in the cache is requested concurrently."""
