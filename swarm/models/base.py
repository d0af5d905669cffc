"""Requests, completions and the base class `Model`; stop strings, usage totals and JSON forms.

A model maps requests to completions. Local, remote, mixed and simulated models have the same
interface.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, Required

from pydantic import (
    AfterValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
)
from typing_extensions import TypedDict

from swarm._util.settings import Number
from swarm.errors import UserError


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"; "tool" only for models behind an endpoint."""
    content: str


LOCAL_TOKEN_LIMIT = 1024
"""Maximum number of new tokens of a local model if the request has no limit."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a model.

    Attributes:
        prompt: Text to continue verbatim, or turns for the model's chat template.
        max_new_tokens: Maximum number of tokens to generate; 0 with `choices`. `None` sends an
            endpoint no limit; local models then generate at most `LOCAL_TOKEN_LIMIT`.
        choices: Continuations to score instead of generating: the completion has the log
            probability of each. After an empty prompt they are scored as the beginning of a text.
        stop_check: Maps the text so far to whether more text cannot change the parsed answer; a
            model may then stop. `None`: only the model's end token stops it.
        temperature: Sampling temperature; 0 is greedy, `None` the model's default.
        seed: Sampling seed, for models that support one; `None` is the model's default.
        stop: Strings that end the answer; they are not part of it.
        top_logprobs: Number of most likely tokens to report per position; 0 reports none, -1 the
            chosen token only.
        sample: Index of one of several answers to the same request, from 0. Greedy answers do not
            depend on it.
        timeout: Seconds for this answer including retries; `None` is the model's default. A model
            that cannot be interrupted may take longer.
        body: Fields of the chat endpoint's request body; they override those derived from the other
            attributes, and a value of `None` removes a field. Only for models behind such an
            endpoint.
    """

    prompt: str | tuple[Message, ...]
    max_new_tokens: int | None = 16
    choices: tuple[str, ...] = ()
    stop_check: Callable[[str], bool] | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    sample: int = 0
    timeout: float | None = None
    body: Mapping[str, Any] | None = None

    @property
    def token_limit(self) -> int:
        """`max_new_tokens` for local models, which generate without end if they have no limit."""
        return LOCAL_TOKEN_LIMIT if self.max_new_tokens is None else self.max_new_tokens


class Token(NamedTuple):
    """A generated token, its log probability, and the most likely tokens at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The answer to one request.

    Attributes:
        text: Generated text, without the prompt; empty when choices were scored.
        logprobs: Natural log probability of each of the request's choices, in order.
        prompt_tokens: Number of tokens in the prompt.
        new_tokens: Number of tokens generated, or read beyond the prompt to score choices.
        greedy: For each choice, True if greedy decoding generates exactly it; empty if unknown.
        choice_tokens: Number of tokens of each choice; empty if unknown.
        cost: Cost of the answer when it was generated, in the currency of the model's prices.
        reasoning: The model's reasoning, where the endpoint reports it separately.
        finish: Finish reason: "stop", "length", another value of the server, or "" if unknown.
        tokens: The answer token by token, if `Request.top_logprobs` requested it.
        model: Model name reported by the server; empty if it reports none.
        seconds: Time from the request to the end of the answer; for a cached answer, the time when
            it was generated.
        cached: True if the answer came from the cache.
        priced: True if `cost` follows from known prices, which may be 0; `False` if an endpoint
            without known prices answered, `None` if prices do not apply.
        tool_calls: Calls of the tools in `Request.body`, as an endpoint reported them.
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
    tool_calls: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    @classmethod
    def from_fields(cls, fields: "CompletionFields") -> "Completion":
        """Create one from its valid non-default fields; the others are the class's attributes.

        The constructor of a frozen dataclass takes ten times as long.
        """
        found = object.__new__(cls)
        found.__dict__.update(fields)
        return found

    @property
    def known_cost(self) -> float | None:
        """The cost, or `None` if no price is known."""
        return self.cost if self.priced or self.cost else None


def prompt_text(prompt: str | tuple[Message, ...]) -> str:
    """Return a prompt without the roles of its turns."""
    return prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt)


PROMPT_FORMS = ("chat", "plain")
"""Forms of a prompt: turns for the chat template, or their text to continue."""


def with_prompt_form(model: "Model", request: Request, form: str | None = None) -> Request:
    """Return a request whose turns are in one of `PROMPT_FORMS`.

    Args:
        form: The form; `None` is that of the model's attribute `prompt_form`, else chat.

    Raises:
        UserError: The model takes turns only.
    """
    if form == "plain" and model.prompt_form is None:
        raise UserError("prompt_form: plain is possible for local models only; use chat")
    if (form or model.prompt_form) != "plain":
        return request
    return replace(request, prompt=prompt_text(request.prompt))


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its gold answer, for a gradient-based loss.

    With one choice the loss is the cross-entropy of its tokens in nats, divided by `unit`; with
    several it is the negative log of the gold choice's share of the probability of all choices.

    Attributes:
        prompt: See `Request.prompt`.
        choices: The gold answer alone, or all options, each as it follows the prompt.
        gold: Index of the correct choice.
        weight: Weight of the example in a mean over examples.
        unit: Divisor of the nats of a single choice; `None` is its number of tokens.
        units: Divisors of the nats of each of several choices before the softmax, for example their
            number of characters; empty divides none.
        final: True if the text ends after the answer, so that the end-of-text token is part of it.
        values: Score of each choice, 0 to 1, instead of `gold`: the choices are candidates, and the
            loss is that of `swarm.engine.gradient.expected_score_loss`.
        relative: Whether that loss compares the choices with each other.
        ends: `final` of each choice, where they differ.
        limit: Number of tokens from which a choice was cut, so that `final` does not apply.
        bounded: Use 1 - exp(-loss) instead, from 0 to 1: what the probability of the answer, per
            token, falls short of 1. A few confident errors do not decide its mean.
    """

    prompt: "str | tuple[Message, ...]"
    choices: tuple[str, ...]
    gold: int = 0
    weight: float = 1.0
    unit: float | None = None
    final: bool = False
    units: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    relative: bool = False
    ends: tuple[bool, ...] = ()
    limit: float = math.inf
    bounded: bool = False


class Delta(NamedTuple):
    """A piece of a streamed answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Parts of tool calls, each with the "index" of its call, as in a streamed chat completion."""


Stream = Generator[Delta, None, Completion]
"""Yields the pieces of an answer and returns the completion; closing it cancels the request."""


class Model:
    """Base of all that answers requests; a subclass defines `generate` or `generate_each`.

    Attributes:
        prices: Prices per million tokens, empty if unknown; `None`: the model costs nothing.
    """

    DESCRIPTION = "a model"
    prices: "Prices | None" = None

    @property
    def prompt_form(self) -> str | None:
        """Usual one of `PROMPT_FORMS` of a model that reads both; `None`: it reads turns only."""
        return None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; the i-th completion belongs to the i-th request.

        Raises:
            UserError: A request failed; the others may have been answered.
        """
        outcomes = self.generate_each(requests)
        for one in outcomes:
            if isinstance(one, UserError):
                raise one
        return outcomes  # type: ignore[return-value]

    def generate_each(self, requests: Sequence[Request]) -> "list[Completion | UserError]":
        """Answer all requests; a failed request gives its error instead of raising it.

        By default all requests fail if one does.
        """
        try:
            return list(self.generate(requests))
        except UserError as error:
            return [error] * len(requests)

    def stream(self, request: Request) -> Stream:
        """Stream the answer to one request; by default in a single piece.

        Raises:
            UserError: The model failed.
        """
        answer = self.generate([request])[0]
        yield Delta(answer.text, answer.reasoning)
        return answer

    def check(self) -> None:
        """Check that the model can be used, before anything is loaded or paid for.

        Raises:
            UserError: A key, a package or a file is missing.
        """

    def open(self, device: str) -> None:
        """Load what the model needs, such as weights, on a device of torch."""

    def fingerprint(self) -> Any:
        """Return what answers depend on besides the model's name and the request, as JSON.

        `None` if the name alone identifies the model.

        Raises:
            UserError: A local model's files are missing.
        """
        return None


def request_to_json(request: Request) -> dict[str, Any]:
    """Convert a request to JSON: its "prompt" or "messages", and the non-default settings.

    What does not affect the answer, such as the timeout, is left out.
    """
    if isinstance(request.prompt, str):
        found: dict[str, Any] = {"prompt": request.prompt}
    else:
        found = {"messages": [turn._asdict() for turn in request.prompt]}
    for key, value in _non_default_fields(request).items():
        if key not in ("prompt", "stop_check", "timeout"):
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


CompletionFields = dict[str, Any]
"""JSON form of an answer, as the cache holds it: the non-default fields of a `Completion`."""


_Chance = tuple[StrictStr, StrictFloat]
_JsonToken = tuple[StrictStr, StrictFloat, tuple[_Chance, ...]]


class _Fields(TypedDict, total=False):
    """Types of a completion's fields in JSON, where lists stand for tuples."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    text: Required[StrictStr]
    logprobs: tuple[StrictFloat, ...]
    prompt_tokens: StrictInt
    new_tokens: StrictInt
    greedy: tuple[StrictBool, ...]
    choice_tokens: tuple[StrictInt, ...]
    cost: StrictFloat
    reasoning: StrictStr
    finish: StrictStr
    tokens: tuple[Annotated[_JsonToken, AfterValidator(Token._make)], ...]
    model: StrictStr
    seconds: StrictFloat
    cached: StrictBool
    priced: StrictBool | None
    tool_calls: tuple[dict[str, Any], ...]


_validate_fields = TypeAdapter(_Fields).validator.validate_python


def completion_to_json(completion: Completion) -> CompletionFields:
    """Convert a completion to the JSON that `completion_fields` validates."""
    return _non_default_fields(completion)


def completion_fields(fields: Any) -> CompletionFields:
    """Validate the JSON form of a completion and return its attributes, with tuples for lists.

    Raises:
        ValueError: It is not a completion.
    """
    found: CompletionFields = _validate_fields(fields)
    return found


def _non_default_fields(value: Any) -> dict[str, Any]:
    found = {one.name: (getattr(value, one.name), one.default) for one in fields(value)}
    return {name: held for name, (held, default) in found.items() if held != default}


@dataclass(slots=True)
class Usage:
    """Number, tokens and cost of calls to models.

    Attributes:
        calls: Number of calls, including failed and cached ones that were counted.
        cached, failed: Number of cached answers and of failed calls.
        prompt_tokens, new_tokens: As counted by the models.
        cost: Sum of the known costs, in the currency of the prices.
        priced: Number of answers with a known cost, which may be 0.
        unpriced: Number of answers of endpoints without known prices.
        local: Number of answers to which prices do not apply.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0
    priced: int = 0
    unpriced: int = 0
    local: int = 0

    def add(self, *completions: Completion) -> None:
        """Count answers as calls, with their tokens and costs."""
        for one in completions:
            self.add_answer(one.prompt_tokens, one.new_tokens, one.cost, one.priced)

    def add_answer(
        self, prompt_tokens: int, new_tokens: int, cost: float, priced: bool | None
    ) -> None:
        """Count one answer as a call; see `Completion` for the arguments."""
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.new_tokens += new_tokens
        self.cost += cost
        if priced or cost:
            self.priced += 1
        elif priced is None:
            self.local += 1
        else:
            self.unpriced += 1

    def merge(self, other: "Usage") -> None:
        """Add another usage."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    @property
    def tokens(self) -> int:
        """Tokens read and generated."""
        return self.prompt_tokens + self.new_tokens

    @property
    def unknown_costs(self) -> int:
        """Number of answers that `cost` does not include."""
        return self.unpriced + self.local

    @property
    def known_cost(self) -> float | None:
        """The cost; `None` if there are answers, and the cost of none is known."""
        return None if self.unknown_costs and not self.priced else self.cost


def sum_usage(completions: Iterable[Completion]) -> Usage:
    """Sum up the usage of completions."""
    found = Usage()
    found.add(*completions)
    return found


Prices = Annotated[Mapping[Literal["prompt", "new"], Number], "such as {prompt: 0.1, new: 0.4}"]
"""Prices of a million prompt and new tokens."""


def compute_cost(answer: Mapping[str, Any], prices: Prices | None) -> float:
    """Return the cost of an answer's tokens."""
    if not prices:
        return 0.0
    prompt, new = prices.get("prompt", 0.0), prices.get("new", 0.0)
    return float(prompt * answer.get("prompt_tokens", 0) + new * answer.get("new_tokens", 0)) / 1e6


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
    text, sent, stopped = "", 0, False
    while True:
        try:
            delta = next(stream)
        except StopIteration as end:
            if not stopped and len(text) > sent:
                yield Delta(text[sent:])
            return truncate_at_stop(end.value, stops)
        text += delta.text
        end_at = _find_first_stop(text, stops)
        safe = len(stable_prefix(text, stops)) if end_at is None else end_at
        if not stopped and (safe > sent or delta.reasoning):
            yield Delta(text[sent:safe], delta.reasoning, delta.tool_calls)
            sent = max(sent, safe)
        elif delta.tool_calls:
            yield Delta(tool_calls=delta.tool_calls)
        stopped = end_at is not None


def _find_first_stop(text: str, stops: Sequence[str]) -> int | None:
    found = [index for stop in stops if stop and (index := text.find(stop)) >= 0]
    return min(found, default=None)


def stable_prefix(text: str, stops: Sequence[str]) -> str:
    """Return the text without an end that may begin a stop string."""
    overlaps = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(overlaps, default=0)]


OPENING_TAGS, CLOSING_TAGS = ("<think>", "<thinking>"), ("</think>", "</thinking>")


class ThoughtSplitter:
    """Separates leading <think> ... </think> from the answer; unclosed thoughts extend to the end.

    Blank text before the thoughts is dropped; tags elsewhere are text.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._in_thoughts: bool | None = None  # None until known

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
        ends = [(self._pending.find(tag), tag) for tag in CLOSING_TAGS if tag in self._pending]
        if ends:
            index, tag = min(ends)
            thought, self._pending = self._pending[:index], self._pending[index + len(tag) :]
            self._in_thoughts = False
            return Delta(self.flush_pending().text, thought)
        thought = stable_prefix(self._pending, CLOSING_TAGS)
        self._pending = self._pending.removeprefix(thought)
        return Delta(reasoning=thought)

    def flush_pending(self) -> Delta:
        """Return text held back because it might have begun a tag."""
        pending, self._pending = self._pending, ""
        return Delta(reasoning=pending) if self._in_thoughts else Delta(pending)


def split_thoughts(text: str) -> Delta:
    """Split a complete text into answer and reasoning."""
    if "<" not in text:
        return Delta(text)
    splitter = ThoughtSplitter()
    first, rest = splitter.feed(text), splitter.flush_pending()
    return Delta(first.text + rest.text, first.reasoning + rest.reasoning)
