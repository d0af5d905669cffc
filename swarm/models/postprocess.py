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
    text, said = "", 0
    ended = False
    while True:
        try:
            delta = next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            if not ended and len(text) > said:
                yield Delta(text[said:])
            return truncate_at_stop(completion, stops)
        text += delta.text
        end_at = _find_first_stop(text, stops)
        safe = len(text) - _partial_stop_length(text, stops) if end_at is None else end_at
        if not ended and (safe > said or delta.reasoning):
            yield Delta(text[said:safe], delta.reasoning, delta.tool_calls)
            said = max(said, safe)
        elif delta.tool_calls:
            yield Delta(tool_calls=delta.tool_calls)
        ended = end_at is not None


def _find_first_stop(text: str, stops: Sequence[str]) -> int | None:
    found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
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
        self._held = ""
        self._in: bool | None = None

    def feed(self, piece: str) -> Delta:
        """Add text and return what is certain by now."""
        if self._in is False:
            return Delta(piece)
        self._held += piece
        if self._in is None:
            begun = self._held.lstrip()
            tag = next(filter(begun.startswith, OPENING_TAGS), "")
            if not tag and any(tag.startswith(begun) for tag in OPENING_TAGS):
                return Delta()
            self._in = bool(tag)
            if not tag:
                return self.flush_pending()
            self._held = begun.removeprefix(tag)
        return self._split_at_closing_tag()

    def flush_pending(self) -> Delta:
        """Return text held back because it might have begun a tag."""
        held, self._held = self._held, ""
        return Delta(reasoning=held) if self._in else Delta(held)

    def _split_at_closing_tag(self) -> Delta:
        places = [(self._held.find(tag), tag) for tag in CLOSING_TAGS if tag in self._held]
        if places:
            place, tag = min(places)
            thought, self._held = self._held[:place], self._held[place + len(tag) :]
            self._in = False
            return Delta(self.flush_pending().text, thought)
        # Hold back the beginning of a possible tag.
        place = self._held.rfind("<")
        if place < 0 or not any(tag.startswith(self._held[place:]) for tag in CLOSING_TAGS):
            place = len(self._held)
        thought, self._held = self._held[:place], self._held[place:]
        return Delta(reasoning=thought)


def split_thoughts(text: str) -> Delta:
    """Split a complete text into answer and reasoning."""
    if "<" not in text:
        return Delta(text)
    splitter = ThoughtSplitter()
    first, rest = splitter.feed(text), splitter.flush_pending()
    return Delta(first.text + rest.text, first.reasoning + rest.reasoning)
