"""Server-sent events out of the bytes of a stream, wherever those are cut."""

import re
from collections.abc import Iterator
from typing import NamedTuple

LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    """One event: its name, empty if it has none, and its text."""

    name: str
    data: str


class EventStreamParser:
    """Reads a stream chunk by chunk (WHATWG HTML, 9.2.6)."""

    def __init__(self) -> None:
        self._left = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """The events that end in this chunk."""
        waiting = self._left + chunk
        # A carriage return that comes last may be half a line's end.
        sure = len(waiting) - waiting.endswith(b"\r")
        *lines, rest = LINE_END.split(waiting[:sure])
        self._left = rest + waiting[sure:]
        for line in lines:
            yield from self._parse_line(line.decode("utf-8", "replace").removeprefix("\ufeff"))

    def flush_pending(self) -> Iterator[ServerSentEvent]:
        """What the stream ends with; some servers leave out the empty line after it."""
        return self.feed(b"\n\n")

    def _parse_line(self, line: str) -> Iterator[ServerSentEvent]:
        if not line:
            if self._data:
                yield ServerSentEvent(self._name, "\n".join(self._data))
            self._name, self._data = "", []
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif field == "event":
            self._name = value.removeprefix(" ")
