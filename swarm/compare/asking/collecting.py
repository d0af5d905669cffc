"""Python's garbage collection, which looks at all objects each time, made rare for a while."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (250_000, 20, 100)
"""Thresholds of `gc.set_threshold`; a run makes many objects and hardly any garbage."""

_lock = threading.Lock()
_inside = 0
_before = (700, 10, 10)


@contextmanager
def rare_collections() -> Iterator[None]:
    """10,000 kept answers take six tenths of the time; over when the last thread has left."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*RARE)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
