"""Where an answer ends: at the first of a request's stops, which it does not hold."""

from collections.abc import Sequence
from dataclasses import replace

from swarm.models import Completion, Delta, Stream


def truncate_at_stop(completion: Completion, stops: Sequence[str]) -> Completion:
    """The completion up to the first stop; its tokens stay those that were generated."""
    end = _find_first_stop(completion.text, stops)
    if end is None:
        return completion
    return replace(completion, text=completion.text[:end], finish="stop")


def stream_until_stop(stream: Stream, stops: Sequence[str]) -> Stream:
    """The stream up to the first stop.

    A piece that may be the beginning of a stop waits for the next one. The stream is read to its
    end, for what it cost.
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
            yield Delta(text[said:safe], delta.reasoning)
            said = max(said, safe)
        ended = end_at is not None


def _find_first_stop(text: str, stops: Sequence[str]) -> int | None:
    found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return min(found, default=None)


def _partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    ends = (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops))
    return next(ends, 0)
