"""A model as experiments ask it: its answers are kept by request and sample."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from swarm.compare.asking import Asked
from swarm.compare.asking.cache import kept_answers
from swarm.errors import UserError
from swarm.models import Completion, Message, Request
from swarm.models.as_json import completion_as_json, completion_of
from swarm.models.cache import Cache, key_of, sample_key
from swarm.models.cached import Cached
from swarm.models.chat import body_of
from swarm.models.openai import OpenAI

LONGEST = 1024
"""New tokens of a model on this machine where the parameters name no number."""

AT_ONCE = 32
"""Requests in one batch for a model that is asked in batches."""

PLAIN = {"model", "timeout", "messages", "max_tokens", "max_completion_tokens", "temperature",
         "seed", "stop", "logprobs", "top_logprobs"}  # fmt: skip
"""Parameters that every model understands."""


class Source(Protocol):
    """Where answers are from.

    Attributes:
        cache: Where they are kept.
        label: Whose they are, in the cache.
        at_once: How many requests go in one batch; 1 asks one by one.
        batches: The most batches under way at once.
        met: Whether it has said anything; until then one thing is asked at a time.
    """

    cache: Cache
    label: str
    at_once: int
    batches: int
    met: bool

    def request(self, asked: Asked) -> Request:
        """What is asked, as a request for sample 0.

        Raises:
            UserError: The model cannot be asked this.
        """
        ...

    def key(self, request: Request) -> str:
        """What the keys of all its answers are made of."""
        ...

    def key_of_sample(self, key: str, sample: int) -> str:
        """Under which an answer is kept."""
        ...

    def one(self, request: Request) -> bool:
        """Whether all samples of it are the same."""
        ...

    def again(self, value: Any) -> Completion:
        """A kept answer."""
        ...


class Endpoint:
    """A model behind a chat endpoint, asked one by one."""

    at_once = 1

    def __init__(self, model: OpenAI) -> None:
        assert model.cache is not None
        self.model, self.cache, self.label = model, model.cache, str(model.model)
        self.batches, self.met = model.client.limits.concurrency, False

    def request(self, asked: Asked) -> Request:
        """The parameters as they are, whatever they are."""
        field = self.model.tokens_field
        from swarm.compare.config import Config

        body = {**asked.api_kwargs}
        timeout = body.pop("timeout", None)
        if body.get("model") == asked.model:
            del body["model"]
        if "max_tokens" in body:
            body[field] = body.pop("max_tokens")
        else:
            body.setdefault(field, None)
        # Config's own is that of one attempt, and lies in the limits.
        return Request((), body=body, timeout=None if timeout == Config.timeout else timeout)

    def key(self, request: Request) -> str:
        """The endpoint is a part of it: the same name elsewhere is another model."""
        body = body_of(request, self.model.tokens_field, self.model.fixed)
        return key_of("chat", self.model.client.url, body)

    def key_of_sample(self, key: str, sample: int) -> str:
        """Beside each other in the file, so that they are found together."""
        return f"{key}:{sample}"

    def one(self, request: Request) -> bool:
        """Endpoints answer differently even with a temperature of 0."""
        return False

    def again(self, value: Any) -> Completion:
        """A kept answer, counted in the model's totals."""
        self.model.totals.cached += 1
        return self.model.completion(value, cached=True)


class Batches:
    """Any other model, asked for many answers at once, in a thread."""

    at_once = AT_ONCE
    batches = 4
    met = True

    def __init__(self, model: Cached) -> None:
        self.model, self.cache, self.label = model, model.cache, model.label

    def request(self, asked: Asked) -> Request:
        """The parameters, as far as all models understand them."""
        told = asked.api_kwargs
        if strange := sorted(key for key in told if key not in PLAIN and told[key] is not None):
            raise UserError(
                f"{asked.model}: it takes no {strange[0]}; ModelAdapter.register can leave it out "
                "for this model"
            )
        top = told.get("top_logprobs") or -1 if told.get("logprobs") else 0
        stop = told.get("stop") or ()
        longest = told.get("max_tokens") or told.get("max_completion_tokens") or LONGEST
        return Request(
            tuple(_turn(asked.model, turn) for turn in told["messages"]),
            max_new_tokens=longest,
            temperature=told.get("temperature"),
            seed=told.get("seed"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            top_logprobs=top,
        )

    def key(self, request: Request) -> str:
        """See `swarm.models.cached.Cached.key`."""
        return self.model.key(request)

    def key_of_sample(self, key: str, sample: int) -> str:
        """See `swarm.models.cached.Cached`."""
        return sample_key(key, sample)

    def one(self, request: Request) -> bool:
        """Greedy answers are one."""
        return request.temperature == 0

    def again(self, value: Any) -> Completion:
        """A kept answer."""
        return completion_of({**value, "cached": True})


def _turn(model: str, turn: Mapping[str, Any]) -> Message:
    content = turn.get("content")
    if not isinstance(content, str):
        raise UserError(f"{model}: it reads text alone, and a message's content is none")
    return Message(str(turn.get("role")), content)


def keys(asked: Asked, samples: Sequence[int]) -> list[str]:
    """Under which the answers are kept.

    Raises:
        UserError: There is no such model, or it cannot be asked this.
    """
    from swarm.compare.asking.finding import source

    found = source(asked.model)
    request = found.request(asked)
    key, one = found.key(request), found.one(request)
    return [found.key_of_sample(key, 0 if one else sample) for sample in samples]


def forget(asked: Asked, samples: Sequence[int]) -> int:
    """Keep these answers no longer; gives how many there were.

    Raises:
        UserError: As `keys`.
    """
    return kept_answers().drop(keys(asked, samples))


def keep(asked: Asked, sample: int, completion: Completion) -> None:
    """Keep an answer that was made elsewhere, unless one is kept.

    Raises:
        UserError: As `keys`.
    """
    from swarm.compare.asking.finding import source

    answer = {"prompt_tokens": 0, "new_tokens": 0, **completion_as_json(completion)}
    kept_answers().put(keys(asked, [sample])[0], answer, source(asked.model).label)
