"""Models that work together in text: who speaks, what was said on the way, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Model

__all__ = ["AgentAnswer", "AgentSpec", "AnswerDelta", "CallStarted", "OnEvent", "Transcript"]


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One place in a collaboration: a model, and how it is asked there.

    Attributes:
        model: Who speaks.
        name: As stages, warnings and traces call it.
        temperature: `None` is the request's.
        max_tokens: The most new tokens; `None` is the request's.
        system: What the model is told as the system's turn, after the conversation's own where it
            has one; `None` is nothing.
        count: How many samples it gives; each is an answer of its own.
        timeout: Seconds for one answer with all repetitions; `None` is the model's own setting.

    Raises:
        UserError: A value is not allowed.
    """

    model: Model
    name: str
    temperature: float | None = None
    max_tokens: int | None = None
    system: str | None = None
    count: int = 1
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise UserError(f"a slot's name: {self.name!r} is not a text")
        if not callable(getattr(self.model, "generate", None)):
            raise UserError(f"{self.name}: {self.model!r} is no model, it cannot generate")
        temperature, timeout = _finite_or_none(self.temperature), _finite_or_none(self.timeout)
        for key, fine, allowed in (
            ("temperature", temperature is not None and temperature >= 0, "null or 0 and above"),
            ("timeout", timeout is not None and timeout > 0, "null or seconds above 0"),
            ("max_tokens", _is_positive_int(self.max_tokens), "null or a whole number from 1 on"),
            ("system", isinstance(self.system, str) and self.system.strip(), "null or a text"),
            ("count", _is_positive_int(self.count), "a whole number from 1 on"),
        ):
            value = getattr(self, key)
            if not fine and (value is not None or key == "count"):
                raise UserError(f"{self.name}: {key}={value!r}: must be {allowed}")


def _is_positive_int(value: object) -> bool:
    return type(value) is int and value >= 1


def _finite_or_none(value: object) -> float | None:
    """A finite number, or `None`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < float("inf") else None
    return None


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What one call of a collaboration came to.

    Attributes:
        layer: From 1; the aggregator's is the last. Of a consortium, the iteration.
        role: "proposer", "aggregator", "fallback" or "ranker"; of a consortium, "member",
            "reviewer", "arbiter" or "fallback".
        name: The slot's.
        sample: Which of the slot's samples, from 0.
        prompt: What was asked.
        completion: What came back; `None` where nothing did.
        error: Why there is no answer, as where it was empty; empty where there is one.
    """

    layer: int
    role: str
    name: str
    sample: int
    prompt: str | tuple[Message, ...]
    completion: Completion | None
    error: str = ""

    @property
    def text(self) -> str:
        """What was said; empty where nothing came back."""
        return self.completion.text if self.completion else ""


@dataclass(slots=True)
class Transcript:
    """All that led to the answer to one request.

    Attributes:
        layers: Every layer's answers in the slots' order, those that failed too; of a consortium,
            those of every round of calls.
        final: The completion that the collaboration gives: its text, and the tokens, cost and
            seconds of all calls together.
        warnings: What a user should know: a proposer that failed, a fallback that was used.
    """

    layers: list[list[AgentAnswer]] = field(default_factory=list)
    final: Completion = field(default_factory=lambda: Completion(""))
    warnings: list[str] = field(default_factory=list)

    @property
    def answers(self) -> list[AgentAnswer]:
        """All calls, in the order of the layers."""
        return [answer for layer in self.layers for answer in layer]


@dataclass(frozen=True, slots=True)
class CallStarted:
    """An event: a slot was asked; of `layers` layers this is the `layer`-th."""

    layer: int
    layers: int
    role: str
    name: str
    sample: int


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """An event: a piece of the last answer."""

    delta: Delta


OnEvent = Callable[[int, CallStarted | AgentAnswer | AnswerDelta], None]
"""Is told of every event of the n-th request, always in the thread that runs the collaboration; of
an `Answer` as soon as it is there. A consortium tells it of each `Iteration`, too."""


def agent_names(slots: Sequence[AgentSpec]) -> list[str]:
    """Of the slots, each as often as it has samples."""
    return [slot.name for slot in slots for _ in range(slot.count)]


# A conversation: its turns, what its system turn says, and how much of it fits.

Messages = tuple[Message, ...]

CHARS_PER_TOKEN = 4
"""For estimates: nobody's tokenizer is asked. English has a little more, other scripts less."""


def prompt_to_messages(prompt: str | Messages) -> Messages:
    """A prompt as turns; a plain text is one turn of the user."""
    return (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)


def add_system_text(turns: Messages, text: str | None) -> Messages:
    """The turns with `text` at the end of the system's turn, which stands first where it is new."""
    if text is None:
        return turns
    for place, turn in enumerate(turns):
        if turn.role == "system":
            longer = Message("system", f"{turn.content}\n\n{text}")
            return (*turns[:place], longer, *turns[place + 1 :])
    return (Message("system", text), *turns)


def estimate_tokens(turns: Messages) -> int:
    """About how many tokens the turns are."""
    return ceil(sum(len(turn.content) for turn in turns) / CHARS_PER_TOKEN)


def find_exchanges(turns: Messages) -> list[list[int]]:
    """The places of each exchange before the last one: a user's turn and what follows it.

    The system's turns belong to none, and the last user's turn with what follows is the last one.
    """
    found: list[list[int]] = []
    for place, turn in enumerate(turns):
        if turn.role == "system":
            continue
        if turn.role == "user" or not found:
            found.append([])
        found[-1].append(place)
    return found[:-1]


def fit_to_context(
    turns: Messages, context: int | None, write: Callable[[Messages], Messages]
) -> tuple[Messages, int]:
    """What `write` makes of the turns, and how many of the oldest exchanges were left out for it.

    Args:
        turns: A conversation.
        context: The most tokens that may be written, by `tokens`; `None` is no limit.
        write: Puts to a conversation what else there is to say.

    Raises:
        UserError: Without any old exchange it is still too long.
    """
    old = find_exchanges(turns)
    for left_out in range(len(old) + 1):
        gone = {place for exchange in old[:left_out] for place in exchange}
        written = write(tuple(turn for place, turn in enumerate(turns) if place not in gone))
        if context is None or estimate_tokens(written) <= context:
            return written, left_out
    raise UserError(
        f"context={context}: the last question and the answers that belong to it are about "
        f"{estimate_tokens(written)} tokens, and none of them is cut; raise context, or have the "
        "proposers "
        "write less (max_tokens)"
    )
