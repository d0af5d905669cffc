"""Answers on their way into the cache: those that come at the same moment are written together."""

import asyncio
from typing import Any

from swarm.errors import UserError
from swarm.models.cache import Cache


class CacheWriter:
    """Keeps answers as they come, and says in the end which are kept.

    What has come in one turn of the event loop is written before the next: an answer is in the file
    before anybody is told of it.

    Args:
        cache: Where; `None` keeps nothing.
        label: Whose answers they are.
    """

    def __init__(self, cache: Cache | None, label: str | None) -> None:
        self._cache, self._label = cache, label
        self._waiting: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._error: UserError | None = None

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer; called on the event loop.

        Raises:
            UserError: An earlier one could not be written.
        """
        if self._error:
            raise self._error
        if self._cache and not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_pending)
        self._waiting[key] = answer

    def _write_pending(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            assert self._cache
            self._written |= self._cache.put_many(waiting, self._label)
        except UserError as error:
            self._error = error

    def get_stored(self, key: str, answer: Any) -> Any:
        """The answer of a key that is kept: another's, if that came first.

        Raises:
            UserError: One could not be written.
        """
        if self._error:
            raise self._error
        return self._written.get(key, answer)
