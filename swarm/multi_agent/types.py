"""Data types of multi-agent models: agents, answers, transcripts, events and conversations."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError, model_validator

from swarm._util.settings import (
    Number,
    Positive,
    PositiveNumber,
    Settings,
    Text,
    explain,
    field_types,
)
from swarm._util.terminal import pluralize
from swarm.models.base import Completion, Message, Model


class AgentOptions(Settings):
    """Settings of an agent besides its model.

    Attributes:
        temperature: Sampling temperature; `None` is the request's.
        max_tokens: Maximum number of new tokens; `None` is the request's.
        system: System prompt, appended to the conversation's if it has one; `None` adds none.
        count: Number of samples; each is a separate answer.
        timeout: Seconds for one answer including retries; `None` is the model's default.
    """

    temperature: Number | None = None
    max_tokens: Positive | None = None
    system: Text | None = None
    count: Positive = 1
    timeout: PositiveNumber | None = None


class AgentSettings(AgentOptions):
    """An agent in a file: the name of its model, alone or with settings."""

    model: Text | None

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given


class AgentSpec(AgentOptions):
    """An agent of a collaboration: a model, its name in transcripts, and its settings.

    Raises:
        UserError: A value is invalid.
    """

    model: Any
    name: Text

    def __init__(self, model: Model, name: str, **settings: Any) -> None:
        try:
            super().__init__(model=model, name=name, **settings)  # type: ignore[call-arg]
        except ValidationError as error:
            raise explain(error, field_types(type(self)), str(name)) from None


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Result of one call of a collaboration.

    Attributes:
        layer: From 1; the aggregator's is the last. For a consortium, the iteration.
        role: "proposer", "aggregator", "fallback" or "ranker"; for a consortium, "member",
            "reviewer", "arbiter" or "fallback".
        name: The agent's name.
        sample: Index of the agent's sample, from 0.
        prompt: The prompt sent.
        completion: The completion; `None` if the call failed.
        error: Reason for a missing or empty answer; empty on success.
    """

    layer: int
    role: str
    name: str
    sample: int
    prompt: str | Messages
    completion: Completion | None
    error: str = ""

    @property
    def text(self) -> str:
        """Text of the completion; empty if the call failed."""
        return self.completion.text if self.completion else ""


def answer_label(answer: AgentAnswer) -> str:
    """Return the model's name, with the sample number if it is not the first."""
    return f"{answer.name} #{answer.sample + 1}" if answer.sample else answer.name


def format_outcome(answer: AgentAnswer) -> str:
    """Summarize the result of a call."""
    completion = answer.completion
    if completion is None:
        return answer.error
    took = "from the cache" if completion.cached else f"{completion.seconds:.1f} s"
    empty = f", {answer.error}" if answer.error else ""
    return f"{took}, {pluralize(completion.new_tokens, 'token')}{empty}"


def format_call(answer: AgentAnswer, place: str = "layer") -> str:
    """Describe a call in one line: layer, role, model and result."""
    return f"{place} {answer.layer}, {answer.role} {answer_label(answer)}: {format_outcome(answer)}"


@dataclass(slots=True)
class Transcript:
    """Everything that led to the answer to one request.

    Attributes:
        layers: Answers of every layer in agent order, including failed ones; for a consortium, of
            every round of calls.
        final: The collaboration's completion: its text, and the total tokens, cost and seconds.
        warnings: Warnings for the user, such as a failed proposer or the use of a fallback.
    """

    layers: list[list[AgentAnswer]] = field(default_factory=list)
    final: Completion = field(default_factory=lambda: Completion(""))
    warnings: list[str] = field(default_factory=list)

    @property
    def answers(self) -> list[AgentAnswer]:
        """All answers, in layer order."""
        return [answer for layer in self.layers for answer in layer]


class CallStarted(NamedTuple):
    """Event: an agent was called; see `AgentAnswer`."""

    name: str
    role: str
    layer: int
    sample: int


OnEvent = Callable[[int, Any], None]
"""Receives every event of the n-th request, in the thread that runs the collaboration: a
`CallStarted`, an `AgentAnswer` as soon as it arrives, a `Delta` of the final answer. A consortium
also emits each `Iteration`.
"""


def prompt_to_messages(prompt: str | Messages) -> Messages:
    """Convert a prompt to turns; a string is one user turn."""
    return (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)


def add_system_text(turns: Messages, text: str | None) -> Messages:
    """Append text to the system turn, or insert a new one at the beginning."""
    if text is None:
        return turns
    for index, turn in enumerate(turns):
        if turn.role == "system":
            longer = Message("system", f"{turn.content}\n\n{text}")
            return (*turns[:index], longer, *turns[index + 1 :])
    return (Message("system", text), *turns)


def append_to_user_turn(turns: Messages, block: str) -> Messages:
    """Append text to the last user turn."""
    for place in range(len(turns) - 1, -1, -1):
        if turns[place].role == "user":
            asked = Message("user", f"{turns[place].content}\n\n{block}")
            return (*turns[:place], asked, *turns[place + 1 :])
    return (*turns, Message("user", block))


def find_unused_code(key: str, texts: Sequence[str]) -> str:
    """Return eight random hexadecimal digits, seeded by `key`, that occur in none of the texts."""
    draws = random.Random(f"code {key}")
    everything = "\n".join(texts).lower()
    while True:
        code = f"{draws.getrandbits(32):08x}"
        if code not in everything:
            return code


def shuffle_by_key(indices: Sequence[int], key: str) -> list[int]:
    """Return the indices in random order, seeded by `key`."""
    shuffled = list(indices)
    random.Random(f"order {key}").shuffle(shuffled)
    return shuffled
