"""A model whose answers are kept: what was asked once is not asked again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import UserError
from swarm.models import Completion, Delta, Model, Request, Stream, attempt, stream
from swarm.models.as_json import completion_as_json, completion_of, request_as_json
from swarm.models.cache import Cache, key_of, sample_key
from swarm.models.trace import all_of

AT_ONCE = 64
"""Requests that are asked before their answers are kept; an interrupt loses no more."""


class Cached:
    """Asks a model for what is not kept of it, and keeps its answers; failures are not kept.

    A key is made of the identity and of everything in a request that changes its answer. Of equal
    requests in a call, the k-th has the k-th sample of their answer from `Request.sample` on, and
    the same again at the next call; those with a temperature of 0 have one answer. A model is not
    told when it may stop (`Request.decided`): what is kept is whole.

    Args:
        model: Whose answers are kept.
        cache: Where.
        identity: What tells the model from all others that share the cache, as JSON has it.
        label: The model's name in `python -m swarm.cache info`.
    """

    def __init__(self, model: Model, cache: Cache, identity: Sequence[Any], label: str) -> None:
        self.model, self.cache = model, cache
        self.identity, self.label = list(identity), label

    def check(self) -> None:
        """See `swarm.tasks.Prepared.check`; the model's, if it has one."""
        if check := getattr(self.model, "check", None):
            check()

    def open(self, device: str) -> None:
        """See `swarm.tasks.Prepared.open`; the model's, if it has one."""
        if opened := getattr(self.model, "open", None):
            opened(device)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`; what was answered beside a failure is kept nevertheless."""
        return all_of(self.attempt(requests))

    def attempt(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.attempt`."""
        asked = self._asked(requests)
        kept = self.cache.get([key for key, _ in asked])
        found: dict[str, Completion | UserError] = {k: _again(v) for k, v in kept.items()}
        new = {key: request for key, request in asked if key not in found}

        def once(keys: Sequence[str]) -> dict[str, Completion | UserError]:
            came = zip(keys, attempt(self.model, [new[key] for key in keys]), strict=True)
            return {k: a if isinstance(a, UserError) else self._kept(k, a) for k, a in came}

        for first in range(0, len(new), AT_ONCE):
            said, others = self.cache.once(list(new)[first : first + AT_ONCE], once)
            found |= said | {key: _again(value) for key, value in others.items()}
        return [found[key] for key, _ in asked]

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.stream`; an answer that is kept comes in one piece."""
        ((key, whole),) = self._asked([request])
        if key in (kept := self.cache.get([key])):
            answer = _again(kept[key])
            yield Delta(answer.text, answer.reasoning)
            return answer
        answer = yield from stream(self.model, whole)
        return self._kept(key, answer)

    def key(self, request: Request) -> str:
        """Under which, with the sample's number, an answer is kept; greedy ones have number 0."""
        return key_of("model", self.identity, request_as_json(replace(request, sample=0)))

    def _asked(self, requests: Sequence[Request]) -> list[tuple[str, Request]]:
        """The requests as the model gets them, each with the key of its answer."""
        seen: Counter[tuple[str, int]] = Counter()
        asked = []
        for request in requests:
            key = self.key(request)
            sample = 0 if request.temperature == 0 else request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            asked.append((sample_key(key, sample), replace(request, sample=sample, decided=None)))
        return asked

    def _kept(self, key: str, answer: Completion) -> Completion:
        return completion_of(self.cache.put(key, completion_as_json(answer), self.label))


def _again(value: Any) -> Completion:
    return replace(completion_of(value), cached=True)
