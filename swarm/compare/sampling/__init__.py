"""Samples of many models at once: answers missing in the cache are requested concurrently."""
