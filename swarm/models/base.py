"""A model maps requests to completions; local, remote, mixed or simulated, all are used alike."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from swarm.errors import UserError


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"."""
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a model.

    Attributes:
        prompt: Text to be continued as it stands, or turns for the model's chat template.
        max_new_tokens: The most tokens that may be generated; 0 with `choices`.
        choices: Continuations to be scored instead of generating: the completion carries the log
            probability of each. After an empty prompt they are scored as the text's beginning.
        decided: Given the text so far, whether more text cannot change what is read from it;
            a model may then stop. `None`: only the model's own end token stops it.
        temperature: Of sampling; 0 is greedy, `None` the model's own setting.
        seed: Of sampling, for models that take one; `None` is the model's own setting.
        stop: Texts at which the answer ends; it does not hold them.
        top_logprobs: How many likeliest tokens are to be told at each place; 0 tells none, -1 the
            chosen token alone.
        sample: Which of several answers to one request, from 0. Greedy answers do not differ by it.
        timeout: Seconds for this answer with all repetitions; `None` is the model's own setting. A
            model that cannot be interrupted may take longer.
        body: Fields of the request to a chat endpoint, over what the others come to; one of `None`
            is left out. Whoever sets it has to know that the model is behind one.
    """

    prompt: str | tuple[Message, ...]
    max_new_tokens: int = 16
    choices: tuple[str, ...] = ()
    decided: Callable[[str], bool] | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    sample: int = 0
    timeout: float | None = None
    body: Mapping[str, Any] | None = None


class Token(NamedTuple):
    """One token of an answer: its text, its log probability, and the likeliest at its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    Attributes:
        text: What was generated, without the prompt; empty when choices were scored.
        logprobs: Natural log probability of each of the request's choices, in their order.
        prompt_tokens: Tokens read.
        new_tokens: Tokens generated, or read beyond the prompt to score choices.
        greedy: Of each choice, whether greedy decoding says just that; empty if the model cannot
            tell.
        choice_tokens: Of each choice, its tokens; empty if the model cannot tell.
        cost: What the answer cost when it was made, in the currency of the model's prices.
        reasoning: What the model thought before it answered, where it says so apart.
        finish: Why the text ended: "stop", "length", another word of the server's, or "" where the
            model does not say.
        tokens: The answer token by token, where `Request.top_logprobs` asked for it.
        model: What the server says has answered; empty if it says nothing.
        seconds: From the request to the answer's end; of a kept answer, when it was made.
        cached: Whether the answer was kept and nothing was asked now.
        priced: Whether `cost` follows from known prices, which may be 0; `False` where an endpoint
            has answered whose prices are not known, `None` where nothing is said of prices.
    """

    text: str
    logprobs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    new_tokens: int = 0
    greedy: tuple[bool, ...] = ()
    choice_tokens: tuple[int, ...] = ()
    cost: float = 0.0
    reasoning: str = ""
    finish: str = ""
    tokens: tuple[Token, ...] = ()
    model: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)
    cached: bool = field(default=False, compare=False)
    priced: bool | None = field(default=None, compare=False)

    @property
    def known_cost(self) -> float | None:
        """The cost; `None` where no price is known."""
        return self.cost if self.priced or self.cost else None


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its gold answer, for the loss that a gradient descends.

    With one choice the loss is the cross-entropy of its tokens in nats, divided by `unit`; with
    several it is minus the log of the gold choice's share of all choices' probability.

    Attributes:
        prompt: As a request's.
        choices: The gold answer alone, or all options, each as it follows the prompt.
        gold: Which of the choices is right.
        weight: Of the example in a mean over examples.
        unit: What the nats of a single choice are divided by; `None` is its number of tokens.
        units: What the nats of each of several choices are divided by before the softmax, their
            characters for example; empty divides none.
        ends: Whether the text ends after the answer; the end-of-text token is then part of it.
        unlabelled: The loss is the entropy of the answers' distribution instead, in nats: of the
            choices' shares, or with one choice of the token that follows the prompt. Neither
            `gold` nor a single choice is looked at.
    """

    prompt: "str | tuple[Message, ...]"
    choices: tuple[str, ...]
    gold: int = 0
    weight: float = 1.0
    unit: float | None = None
    ends: bool = False
    unlabelled: bool = False
    units: tuple[float, ...] = ()


class Model(Protocol):
    """Whatever answers requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; the i-th completion belongs to the i-th request."""
        ...


class Delta(NamedTuple):
    """A piece of an answer, as it comes."""

    text: str = ""
    reasoning: str = ""


Stream = Generator[Delta, None, Completion]
"""Gives the pieces of an answer and returns the whole; closing it ends what is under way."""


@runtime_checkable
class SupportsStreaming(Protocol):
    """A model that can give an answer piece by piece."""

    def stream(self, request: Request) -> Stream:
        """Answer one request; see `stream`."""
        ...


@runtime_checkable
class SupportsPartialFailure(Protocol):
    """A model of which one request may fail while others are answered."""

    def generate_each(self, requests: Sequence[Request]) -> "list[Completion | UserError]":
        """Answer what can be answered; see `attempt`."""
        ...


def stream(model: Model, request: Request) -> Stream:
    """Answer one request piece by piece; in one piece where the model cannot do better.

    Raises:
        UserError: As the model's.
    """
    if isinstance(model, SupportsStreaming):
        return (yield from model.stream(request))
    answer = model.generate([request])[0]
    yield Delta(answer.text, answer.reasoning)
    return answer


def generate_each(model: Model, requests: Sequence[Request]) -> "list[Completion | UserError]":
    """What each request comes to: an answer, or why there is none; order kept, nothing raised.

    A model that answers all or nothing fails in all.
    """
    if isinstance(model, SupportsPartialFailure):
        return model.generate_each(requests)
    try:
        return list(model.generate(requests))
    except UserError as error:
        return [error] * len(requests)


# Requests and completions as JSON, without what is as it is by default.

OMITTED_FIELDS = ("prompt", "decided", "timeout")
"""Of a request: the first is written in a way of its own, the others do not say what is asked."""


def request_to_json(request: Request) -> dict[str, Any]:
    """The "prompt" of a request or its "messages", and the settings."""
    if isinstance(request.prompt, str):
        asked: dict[str, Any] = {"prompt": request.prompt}
    else:
        asked = {"messages": [turn._asdict() for turn in request.prompt]}
    for key, value in _non_default_fields(request).items():
        if key not in OMITTED_FIELDS:
            asked[key] = list(value) if isinstance(value, tuple) else value
    return asked


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """What `completion_of` reads."""
    whole = asdict(completion)
    return {"text": completion.text, **{key: whole[key] for key in _non_default_fields(completion)}}


def completion_from_json(said: Mapping[str, Any]) -> Completion:
    """The completion.

    Raises:
        TypeError: It is none; or `ValueError`.
    """
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
    }
    if "tokens" in values:
        values["tokens"] = tuple(
            Token(text, logprob, tuple((word, chance) for word, chance in top))
            for text, logprob, top in values["tokens"]
        )
    return Completion(**values)


_MutableCompletion: Any = make_dataclass(
    "_Open", [(f.name, f.type, field(default=f.default)) for f in fields(Completion)], slots=True
)


def completion_from_fields(values: Mapping[str, Any]) -> Completion:
    """The completion of values that are as they should be, in half the time.

    A frozen class sets each of its attributes the long way; one that is alike and not frozen does
    not, and is then called by the other's name.
    """
    made = _MutableCompletion(**values)
    made.__class__ = Completion
    return cast(Completion, made)


def _non_default_fields(value: Any) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: one for name, one in found.items() if one != defaults[name]}


# What was asked of a model in this process, and what it cost.


@dataclass(slots=True)
class UsageTotals:
    """What a model was asked for in this process.

    Attributes:
        requests: Answers that the endpoint gave.
        cached: Answers that were not asked for again.
        refused: Texts that the endpoint would not answer; theirs are empty.
        prompt_tokens, new_tokens: As the endpoint counts them.
        cost: Of the tokens, by the model's prices.
    """

    requests: int = 0
    cached: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0

    def add(self, answer: Mapping[str, Any], cost: float) -> None:
        """Count an answer that the endpoint gave."""
        self.requests += 1
        self.prompt_tokens += answer["prompt_tokens"]
        self.new_tokens += answer["new_tokens"]
        self.cost += cost


def compute_cost(answer: Mapping[str, Any], prices: Mapping[str, float]) -> float:
    """What an answer's tokens cost."""
    if not prices:
        return 0.0
    prompt, new = prices.get("prompt", 0.0), prices.get("new", 0.0)
    return float(prompt * answer["prompt_tokens"] + new * answer["new_tokens"]) / 1e6


def validate_prices(prices: object) -> dict[str, float]:
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
