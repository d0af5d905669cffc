"""Postprocessing of answers: stop strings, and reasoning in <think> tags, also when streamed."""

from collections.abc import Sequence
from dataclasses import replace

from swarm.models.base import Completion, Delta, Stream


def truncate_at_stop(completion: Completion, stops: Sequence[str]) -> Completion:
    """Truncate the completion at the first stop string; its tokens remain those generated."""
    end = _find_first_stop(completion.text, stops)
    if end is None:
        return completion
    return replace(completion, text=completion.text[:end], finish="stop")


def stream_until_stop(stream: Stream, stops: Sequence[str]) -> Stream:
    """Truncate a stream at the first stop string.

    Text that may begin a stop string is held back until the next piece. The stream is consumed to
    its end to obtain the cost.
    """
    if not stops:
        return (yield from stream)
    text, sent = "", 0
    stopped = False
    while True:
        try:
            delta = next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            if not stopped and len(text) > sent:
                yield Delta(text[sent:])
            return truncate_at_stop(completion, stops)
        text += delta.text
        end_at = _find_first_stop(text, stops)
        safe = len(text) - _partial_stop_length(text, stops) if end_at is None else end_at
        if not stopped and (safe > sent or delta.reasoning):
            yield Delta(text[sent:safe], delta.reasoning, delta.tool_calls)
            sent = max(sent, safe)
        elif delta.tool_calls:
            yield Delta(tool_calls=delta.tool_calls)
        stopped = end_at is not None


def _find_first_stop(text: str, stops: Sequence[str]) -> int | None:
    found = [index for stop in stops if stop and (index := text.find(stop)) >= 0]
    return min(found, default=None)


def _partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix that may begin a stop string."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    ends = (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops))
    return next(ends, 0)


OPENING_TAGS, CLOSING_TAGS = ("<think>", "<thinking>"), ("</think>", "</thinking>")


class ThoughtSplitter:
    """Separates leading <think> ... </think> from the answer; unclosed thoughts extend to the end.

    Blank text before the thoughts is dropped; tags elsewhere are text.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._in_thoughts: bool | None = None

    def feed(self, piece: str) -> Delta:
        """Add text and return what is certain by now."""
        if self._in_thoughts is False:
            return Delta(piece)
        self._pending += piece
        if self._in_thoughts is None:
            start = self._pending.lstrip()
            tag = next(filter(start.startswith, OPENING_TAGS), "")
            if not tag and any(tag.startswith(start) for tag in OPENING_TAGS):
                return Delta()
            self._in_thoughts = bool(tag)
            if not tag:
                return self.flush_pending()
            self._pending = start.removeprefix(tag)
        return self._split_at_closing_tag()

    def flush_pending(self) -> Delta:
        """Return text held back because it might have begun a tag."""
        pending, self._pending = self._pending, ""
        return Delta(reasoning=pending) if self._in_thoughts else Delta(pending)

    def _split_at_closing_tag(self) -> Delta:
        matches = [(self._pending.find(tag), tag) for tag in CLOSING_TAGS if tag in self._pending]
        if matches:
            index, tag = min(matches)
            thought, self._pending = self._pending[:index], self._pending[index + len(tag) :]
            self._in_thoughts = False
            return Delta(self.flush_pending().text, thought)
        # Hold back the beginning of a possible tag.
        index = self._pending.rfind("<")
        if index < 0 or not any(tag.startswith(self._pending[index:]) for tag in CLOSING_TAGS):
            index = len(self._pending)
        thought, self._pending = self._pending[:index], self._pending[index:]
        return Delta(reasoning=thought)


def split_thoughts(text: str) -> Delta:
    """Split a complete text into answer and reasoning."""
    if "<" not in text:
        return Delta(text)
    splitter = ThoughtSplitter()
    first, rest = splitter.feed(text), splitter.flush_pending()
    return Delta(first.text + rest.text, first.reasoning + rest.reasoning)
