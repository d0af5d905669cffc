"""What is sent to a chat endpoint for a request, and under which key the answer is kept."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from swarm.models import Message, Request
from swarm.models.address import validate_url
from swarm.models.asking import Call
from swarm.models.cache import make_cache_key, make_sample_key
from swarm.secrets import HIDDEN, SECRET

CHARS_PER_TOKEN = 4
"""For the estimate of `Limits.tokens_per_minute`; the server's own count corrects it."""


class PendingSample(NamedTuple):
    """One answer that is to be had.

    Attributes:
        key: Under which it is kept.
        alike: The same key for all that a single request may ask for together.
        body: What is sent for it alone.
        timeout: See `Request.timeout`.
    """

    key: str
    alike: str
    body: dict[str, Any]
    timeout: float | None


def chat_url(base_url: object) -> str:
    """Where chats are posted to.

    Raises:
        UserError: It is no base URL; the message leaves a password out.
    """
    return validate_url(f"{base_url}".rstrip("/") + "/chat/completions")


def build_body(request: Request, tokens_field: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON for a request; its own settings go before the model's, `fixed`."""
    plain = isinstance(request.prompt, str)
    turns = (Message("user", str(request.prompt)),) if plain else request.prompt
    body = {
        "messages": [turn._asdict() for turn in turns],  # type: ignore[union-attr]
        tokens_field: request.max_new_tokens,
        **fixed,
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.seed is not None:
        body["seed"] = request.seed
    if request.stop:
        body["stop"] = list(request.stop)
    if request.top_logprobs:
        body["logprobs"] = True
    if request.top_logprobs > 0:
        body["top_logprobs"] = request.top_logprobs
    if request.body:
        body = override_fields(body, request.body)
    return body


def override_fields(body: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """A body with what a request says over it; one of `None` is left out."""
    whole = {**body, **told}
    return {key: value for key, value in whole.items() if value is not None}


def list_pending_samples(
    url: str,
    requests: Sequence[Request],
    tokens_field: str,
    fixed: Mapping[str, Any],
    greedy_once: bool = True,
) -> Iterator[PendingSample]:
    """What is to be had for the requests: another answer each.

    Args:
        greedy_once: Equal ones with a temperature of 0 have one answer.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for request in requests:
        body = build_body(request, tokens_field, fixed)
        # A key in the body is no part of the question: another one would pay for all again.
        told = {
            name: HIDDEN if isinstance(one, str) and SECRET.search(name) else one
            for name, one in body.items()
        }
        key = alike = make_cache_key("chat", url, told)
        if body.get("temperature") != 0 or not greedy_once:
            sample = request.sample + seen[key, request.sample]
            seen[key, request.sample] += 1
            key = make_sample_key(key, sample)
            if "seed" in body:
                alike, body["seed"] = key, body["seed"] + sample
        yield PendingSample(key, alike, body, request.timeout)


def group_samples(answers: Sequence[PendingSample], most: int) -> list[list[PendingSample]]:
    """The answers that go into one request each, at most so many."""
    alike: dict[Any, list[PendingSample]] = defaultdict(list)
    for answer in answers:
        alike[answer.alike, answer.timeout].append(answer)
    return [each[i : i + most] for each in alike.values() for i in range(0, len(each), most)]


def build_call(group: Sequence[PendingSample], tokens_field: str) -> Call:
    """The request for a group."""
    body, count = group[0].body, len(group)
    # A turn's content may be parts, or nothing where it is a call of tools.
    read = sum(len(turn.get("content") or "") for turn in body["messages"]) / CHARS_PER_TOKEN
    tokens = float(read + count * body.get(tokens_field, 0))
    return Call(body | ({"n": count} if count > 1 else {}), tokens, group[0].timeout)
