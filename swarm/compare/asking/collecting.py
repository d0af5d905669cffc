"""Python's garbage collection, which looks at all objects each time, made rare for a while."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLDS = (250_000, 20, 100)
"""Thresholds of `gc.set_threshold`; a run makes many objects and hardly any garbage."""

_gc_lock = threading.Lock()
_gc_users = 0
_saved_thresholds = (700, 10, 10)


@contextmanager
def reduce_gc_frequency() -> Iterator[None]:
    """10,000 kept answers take six tenths of the time; over when the last thread has left."""
    global _gc_users, _saved_thresholds
    with _gc_lock:
        if _gc_users == 0:
            _saved_thresholds = gc.get_threshold()
            gc.set_threshold(*GC_THRESHOLDS)
        _gc_users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0:
                gc.set_threshold(*_saved_thresholds)
