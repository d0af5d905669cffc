"""A model whose answers are kept: what was asked once is not asked again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import UserError
from swarm.models import Completion, Delta, Model, Request, Stream, generate_each, stream
from swarm.models.as_json import completion_to_json, completion_from_json, request_to_json
from swarm.models.cache import Cache, make_cache_key, make_sample_key
from swarm.models.trace import require_completions

REQUESTS_PER_BATCH = 64
"""Requests that are asked before their answers are kept; an interrupt loses no more."""


class CachedModel:
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
        return require_completions(self.generate_each(requests))

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.attempt`."""
        asked = self._keyed_requests(requests)
        kept = self.cache.get([key for key, _ in asked])
        found: dict[str, Completion | UserError] = {k: _restore_completion(v) for k, v in kept.items()}
        new = {key: request for key, request in asked if key not in found}

        def once(keys: Sequence[str]) -> dict[str, Completion | UserError]:
            came = zip(keys, generate_each(self.model, [new[key] for key in keys]), strict=True)
            return {k: a if isinstance(a, UserError) else self._store_completion(k, a) for k, a in came}

        for first in range(0, len(new), REQUESTS_PER_BATCH):
            said, others = self.cache.once(list(new)[first : first + REQUESTS_PER_BATCH], once)
            found |= said | {key: _restore_completion(value) for key, value in others.items()}
        return [found[key] for key, _ in asked]

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.stream`; an answer that is kept comes in one piece."""
        ((key, whole),) = self._keyed_requests([request])
        if key in (kept := self.cache.get([key])):
            answer = _restore_completion(kept[key])
            yield Delta(answer.text, answer.reasoning)
            return answer
        answer = yield from stream(self.model, whole)
        return self._store_completion(key, answer)

    def request_key(self, request: Request) -> str:
        """Under which, with the sample's number, an answer is kept; greedy ones have number 0."""
        return make_cache_key("model", self.identity, request_to_json(replace(request, sample=0)))

    def _keyed_requests(self, requests: Sequence[Request]) -> list[tuple[str, Request]]:
        """The requests as the model gets them, each with the key of its answer."""
        seen: Counter[tuple[str, int]] = Counter()
        asked = []
        for request in requests:
            key = self.request_key(request)
            sample = 0 if request.temperature == 0 else request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            asked.append((make_sample_key(key, sample), replace(request, sample=sample, decided=None)))
        return asked

    def _store_completion(self, key: str, answer: Completion) -> Completion:
        return completion_from_json(self.cache.put(key, completion_to_json(answer), self.label))


def _restore_completion(value: Any) -> Completion:
    return replace(completion_from_json(value), cached=True)
