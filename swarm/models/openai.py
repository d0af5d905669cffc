"""A model behind any OpenAI-compatible chat endpoint: a vendor's, a router's or your own server."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarm.errors import UserError
from swarm.models import Completion, Message, Request
from swarm.models.address import checked_url
from swarm.models.cache import Cache, key_of
from swarm.models.failures import BadRequest, code, one_line, said
from swarm.models.http import Call, Client
from swarm.models.pace import Limits

log = logging.getLogger(__name__)

ABOUT_A_TEXT = (
    "content_filter",
    "content_policy_violation",
    "context_length_exceeded",
    "string_above_max_length",
)
"""Reasons to refuse a request that lie in its text: another text may be answered."""

CHARACTERS_A_TOKEN = 4
"""For the estimate of `Limits.tokens_per_minute`; the server's own count corrects it."""

THINKING = re.compile(r"\s*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)


@dataclass(slots=True)
class Totals:
    """What a model was asked for in this process.

    Attributes:
        requests: Answers that the endpoint gave.
        cached: Answers that were not asked for again.
        refused: Texts that the endpoint would not answer, `ABOUT_A_TEXT`; theirs are empty.
        prompt_tokens, new_tokens: As the endpoint counts them.
        cost: Of the tokens, by `prices`.
    """

    requests: int = 0
    cached: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0


class OpenAI:
    """Asks `base_url`/chat/completions; a prompt that is plain text goes as one user turn.

    What a model thinks before it answers, in a field of its own or between <think> and </think>,
    is no part of its text. Answers are kept (`cache`), refusals too, and not paid for twice. Where
    requests are alike, a model with a temperature of 0 is asked once; else the k-th of them in a
    call of `generate` is the k-th sample, and the same again at the next call.

    Args:
        model: The model's name at the endpoint; `None` has to be set before anything is asked.
        base_url: The endpoint, up to and without /chat/completions.
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        temperature: `None` leaves it to the endpoint.
        seed: For endpoints that take one; `None` sends none.
        body: Further fields of the request, such as {"reasoning_effort": "low"}.
        tokens_field: What the endpoint calls the most new tokens: "max_tokens", or
            "max_completion_tokens" as OpenAI's reasoning models want it.
        prices: Cost of a million tokens, {"prompt": ..., "new": ...}; `None` counts no cost.
        limits: How hard the endpoint may be pressed.
        cache: Where answers are kept; `None` keeps none.

    Attributes:
        totals: What was asked so far, in this process.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        model: str | None,
        base_url: str = "https://api.openai.com/v1",
        api_key_env: str | None = "OPENAI_API_KEY",
        temperature: float | None = 0.0,
        seed: int | None = None,
        body: Mapping[str, Any] | None = None,
        tokens_field: str = "max_tokens",
        prices: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        cache: Cache | None = None,
    ) -> None:
        # Before any message that repeats the URL.
        url = checked_url(f"{base_url}".rstrip("/") + "/chat/completions")
        if model is not None and (not isinstance(model, str) or not model.strip()):
            raise UserError(f"model={model!r}: must be the name of a model at {base_url}")
        if tokens_field not in ("max_tokens", "max_completion_tokens"):
            raise UserError(
                f"tokens_field={tokens_field!r} is not one of max_tokens, max_completion_tokens"
            )
        self.model, self.tokens_field = model, tokens_field
        fixed = {"model": model, "temperature": temperature, "seed": seed, **(body or {})}
        self._fixed = {key: value for key, value in fixed.items() if value is not None}
        self.temperature = self._fixed.get("temperature")
        self.prices = checked_prices(prices)
        self.client = Client(model or "the model", url, api_key_env, limits)
        self.cache = cache
        self.totals = Totals()

    def check(self) -> None:
        """See that a model is named and that the key is there.

        Raises:
            UserError: It is not so.
        """
        if self.model is None:
            raise UserError(
                f"no model is named for {self.client.url}: a judge's is "
                "task.scorer.model.model=NAME, a candidate's candidate.model.model=NAME"
            )
        self.client.check()

    def open(self, device: str) -> None:
        """Nothing to load; connections are made when something is asked."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests, many at once; see `Model.generate`.

        Raises:
            UserError: Choices are to be scored, which a chat endpoint cannot do.
            RequestError: The endpoint failed for good. What it had answered by then is kept.
        """
        self.check()
        bodies = [self._body(request) for request in requests]
        keys = self._keys(bodies)
        found = self.cache.get(keys) if self.cache else {}
        new = {key: body for key, body in zip(keys, bodies, strict=True) if key not in found}
        self.totals.cached += len(keys) - len(new)
        before = self.client.repeated
        answers = self.client.gather(*self._asking(new))
        found.update(zip(new, answers, strict=True))
        self._log(len(keys), len(new), self.client.repeated - before)
        return [Completion(**found[key], cost=self._cost(found[key])) for key in keys]

    def _body(self, request: Request) -> dict[str, Any]:
        if request.choices:
            raise UserError(
                f"{self.model}: a chat endpoint does not score choices; have the task read the "
                "text instead"
            )
        plain = isinstance(request.prompt, str)
        turns = (Message("user", str(request.prompt)),) if plain else request.prompt
        messages = [turn._asdict() for turn in turns]  # type: ignore[union-attr]
        return {"messages": messages, self.tokens_field: request.max_new_tokens, **self._fixed}

    def _keys(self, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
        """A key for each body: of equal ones the same, or another one for each sample."""
        seen: Counter[str] = Counter()
        keys = []
        for body in bodies:
            key = key_of("chat", self.client.url, body)
            keys.append(key if self.temperature == 0 else key_of(key, seen[key]))
            seen[key] += 1
        return keys

    def _asking(self, new: Mapping[str, dict[str, Any]]) -> tuple[list[Call], Any, Any]:
        """The calls, and what is done with an answer and with a refusal as soon as it is there."""
        keys, bodies = list(new), list(new.values())
        calls = [Call(body, self._estimate(body)) for body in bodies]

        def kept(number: int, answer: dict[str, Any]) -> dict[str, Any]:
            return self.cache.put(keys[number], answer) if self.cache else answer

        def read(number: int, content: Any) -> dict[str, Any]:
            answer = answer_in(content)
            spent = answer["prompt_tokens"] + answer["new_tokens"]
            if spent:
                self.client.tokens.correct(spent - calls[number].tokens)
            self._count(answer)
            return kept(number, answer)

        def refused(number: int, error: BadRequest) -> dict[str, Any]:
            if code(error.content) not in ABOUT_A_TEXT:
                raise error
            self.totals.refused += 1
            log.warning("%s; its answer counts as empty", error)
            return kept(number, {"text": "", "prompt_tokens": 0, "new_tokens": 0})

        return calls, read, refused

    def _estimate(self, body: Mapping[str, Any]) -> float:
        read = sum(len(turn["content"]) for turn in body["messages"]) / CHARACTERS_A_TOKEN
        return float(read + body[self.tokens_field])

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.totals.requests += 1
        self.totals.prompt_tokens += answer["prompt_tokens"]
        self.totals.new_tokens += answer["new_tokens"]
        self.totals.cost += self._cost(answer)

    def _cost(self, answer: Mapping[str, Any]) -> float:
        counted = {"prompt": answer["prompt_tokens"], "new": answer["new_tokens"]}
        return sum(self.prices.get(kind, 0.0) * n for kind, n in counted.items()) / 1e6

    def _log(self, wanted: int, asked: int, repeated: int) -> None:
        log.info(
            "%s: %d answers, %d of them asked for now, %d requests repeated; so far %s",
            self.client.who, wanted, asked, repeated, asdict(self.totals),
        )  # fmt: skip


def answer_in(content: Any) -> dict[str, Any]:
    """What is kept of a chat completion: its text without what was thought, and its tokens.

    Raises:
        ValueError: It is none, as where a router answers 200 and an error.
    """
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not choices:
        raise ValueError(one_line(said(content)) or "no choices")
    text = choices[0]["message"].get("content") or ""
    if isinstance(text, list):
        text = "".join(str(part["text"]) for part in text if part.get("type") == "text")
    if not isinstance(text, str):
        raise ValueError("the content is not a text")
    usage = content.get("usage") or {}
    return {
        "text": THINKING.sub("", text, count=1) if THINKING.match(text) else text,
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "new_tokens": int(usage.get("completion_tokens") or 0),
    }


def checked_prices(prices: object) -> dict[str, float]:
    """Prices of a million prompt and new tokens.

    Raises:
        UserError: They are something else.
    """
    if prices is None:
        return {}
    if isinstance(prices, Mapping) and set(prices) <= {"prompt", "new"}:
        found = {str(kind): price for kind, price in prices.items()}
        if all(isinstance(p, (int, float)) and 0 <= p < float("inf") for p in found.values()):
            return found
    raise UserError(f"prices={prices!r}: must be null or a mapping such as {{prompt: 0.1, new: 1}}")
