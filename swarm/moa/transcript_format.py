"""Text and JSON output of the chat: turns, stages, costs and models."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm._util.terminal import format_cost, pluralize
from swarm.errors import UserError
from swarm.models.base import Message
from swarm.multi_agent import scheduler
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentAnswer, AgentSpec, Transcript


@dataclass(slots=True)
class ChatTurn:
    """One question and its answer.

    Attributes:
        question: The question.
        answers: Finished calls.
        stages: Complete transcript; `None` if the question failed or was stopped.
        error: Reason for a missing answer.
        warnings: Warnings for the user.
    """

    question: str
    answers: list[AgentAnswer] = field(default_factory=list)
    stages: Transcript | None = None
    error: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer; empty if there is none."""
        return self.stages.final.text if self.stages else ""

    @property
    def messages(self) -> tuple[Message, Message]:
        """The question and the answer, as included in later turns."""
        return Message("user", self.question), Message("assistant", self.text)


def turn_to_json(turn: ChatTurn) -> dict[str, Any]:
    """Convert a turn to JSON; an unknown cost is null."""
    layers: dict[int, list[dict[str, Any]]] = {}
    for answer in turn.answers:
        layers.setdefault(answer.layer, []).append(_call_to_json(answer))
    total = scheduler.sum_usage(turn.answers)
    final = turn.stages.final if turn.stages else None
    return {
        "question": turn.question,
        "answer": final.text if final else None,
        "error": turn.error or None,
        "finish": final.finish if final else None,
        "models": list(dict.fromkeys(answer.name for answer in turn.answers)),
        "stages": [layers[layer] for layer in sorted(layers)],
        "warnings": turn.warnings,
        "calls": {"all": total.calls, "cached": total.cached, "failed": total.failed},
        "tokens": {"prompt": total.prompt_tokens, "new": total.new_tokens},
        "cost": total.known_cost,
        "unpriced": total.unknown_costs,
        "seconds": final.seconds if final else None,
    }


def _call_to_json(answer: AgentAnswer) -> dict[str, Any]:
    """Convert one call to JSON."""
    plain = isinstance(answer.prompt, str)
    prompt = answer.prompt if plain else [turn._asdict() for turn in answer.prompt]  # type: ignore[union-attr]
    return {
        "layer": answer.layer,
        "role": answer.role,
        "model": answer.name,
        "sample": answer.sample,
        "text": answer.text,
        "error": answer.error or None,
        "prompt": prompt,
        **_completion_metrics(answer),
    }


def _completion_metrics(answer: AgentAnswer) -> dict[str, Any]:
    """Return a completion's fields other than its text; empty if there is none."""
    if answer.completion is None:
        return {}
    fields = asdict(answer.completion)
    keys = ("reasoning", "finish", "prompt_tokens", "new_tokens", "seconds", "cached")
    return {key: fields[key] for key in keys} | {"cost": answer.completion.known_cost}


def build_conversation(
    turns: Sequence[ChatTurn], question: str, system: str | None
) -> tuple[Message, ...]:
    """Build the conversation of answered turns and a new question."""
    previous = [message for turn in turns for message in turn.messages]
    first = [Message("system", system)] if system else []
    return (*first, *previous, Message("user", question))


def format_outcome(answer: AgentAnswer) -> str:
    """Summarize the result of a call."""
    if answer.completion is None:
        return "failed"
    completion = answer.completion
    took = "from the cache" if completion.cached else f"{completion.seconds:.1f} s"
    empty = ", empty" if answer.error else ""
    return f"{took}, {pluralize(completion.new_tokens, 'token')}{empty}"


def format_layer(layer: int, layers: int, calls: int, answers: Sequence[AgentAnswer]) -> str:
    """Summarize the result of a layer in one line."""
    good = sum(not answer.error for answer in answers)
    parts = "; ".join(f"{answer_label(answer)} {format_outcome(answer)}" for answer in answers)
    return f"layer {layer} of {layers}: {good} of {calls} answered ({parts or 'none yet'})"


def answer_label(answer: AgentAnswer) -> str:
    """Return the model's name, with the sample number if it is not the first."""
    return f"{answer.name} #{answer.sample + 1}" if answer.sample else answer.name


def format_stages(turn: ChatTurn, which: str) -> Iterable[str]:
    """Yield all answers of a turn; with a number, that one and its prompt.

    Raises:
        UserError: The answer does not exist.
    """
    if not turn.answers:
        raise UserError("/stages: the last turn has no answers")
    if not which:
        for number, answer in enumerate(turn.answers, 1):
            yield from (format_heading(number, answer), answer.error or answer.text, "")
        return
    if not which.isdecimal() or not 1 <= int(which) <= len(turn.answers):
        raise UserError(f"/stages {which}: the last turn has answers 1 to {len(turn.answers)}")
    answer = turn.answers[int(which) - 1]
    yield format_heading(int(which), answer)
    if isinstance(answer.prompt, str):
        yield from ("[prompt]", answer.prompt, "")
    else:
        for message in answer.prompt:
            yield from (f"[{message.role}]", message.content, "")
    if answer.completion and answer.completion.reasoning:
        yield from ("[reasoning]", answer.completion.reasoning, "")
    yield from ("[error]" if answer.error else "[answer]", answer.error or answer.text)


def format_heading(number: int, answer: AgentAnswer) -> str:
    """Return a call's heading: number, layer, role and result."""
    requested = answer.completion and not answer.completion.cached
    cost = f", {format_answer_cost([answer])}" if requested else ""
    label = f"layer {answer.layer}, {answer.role} {answer_label(answer)}"
    return f"--- {number}: {label}: {format_outcome(answer)}{cost}"


def format_answer_cost(answers: Sequence[AgentAnswer]) -> str:
    """Format the cost of calls."""
    total = scheduler.sum_usage(answers)
    return format_cost(total.known_cost, total.unknown_costs)


def format_costs(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """Yield the usage of the last turn and of all turns."""
    for title, selected in (("last turn", turns[-1:]), ("session", turns)):
        answers = [answer for turn in selected for answer in turn.answers]
        yield f"{title}, {pluralize(len(selected), 'question')}:"
        yield from scheduler.format_usage_table(answers)


def format_history(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """Yield questions and answers."""
    for turn in turns:
        yield f">>> {turn.question}"
        yield turn.text


def summarize_mixture(mixture: MixtureOfAgents) -> str:
    """Summarize the mixture in one line."""
    last = f"{mixture.aggregator.name} {STRATEGY_PHRASES[mixture.strategy]}"
    if mixture.layers == 1:
        return f"{mixture.aggregator.name} answers alone"
    names = ", ".join(_format_agent_count(slot) for slot in mixture.proposers)
    rounds = "" if mixture.layers == 2 else f" in {mixture.layers - 1} rounds"
    one = len(mixture.proposers) == 1 and mixture.proposers[0].count == 1
    return f"{names} propose{'s' * one}{rounds}, {last}; {mixture.calls} calls per question"


def format_models(mixture: MixtureOfAgents) -> Iterable[str]:
    """Yield every agent with its settings."""
    rounds = range(1, mixture.layers)
    layers = f"layers {rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else "layer 1"
    for slot in mixture.proposers if rounds else ():
        yield f"{layers}: {_format_agent_count(slot)}{_format_agent_settings(slot)}"
    last, fallback = mixture.aggregator, mixture.fallback
    settings = _format_agent_settings(last)
    yield f"layer {mixture.layers}: {last.name} {STRATEGY_PHRASES[mixture.strategy]}{settings}"
    if fallback:
        yield f"if that fails: {fallback.name}{_format_agent_settings(fallback)}"
    yield (
        f"{mixture.calls} calls per question; quorum {mixture.quorum}, prompt {mixture.prompt.form}"
    )


STRATEGY_PHRASES = {
    "aggregate": "answers",
    "rank": "chooses one",
    "sequential": "synthesizes, a few proposals at a time",
}


def _format_agent_count(slot: AgentSpec) -> str:
    return slot.name if slot.count == 1 else f"{slot.count} x {slot.name}"


def _format_agent_settings(slot: AgentSpec) -> str:
    """Format the agent's own settings."""
    keys = ("temperature", "max_tokens", "timeout", "system")
    settings = [f"{key} {value!r}" for key in keys if (value := getattr(slot, key)) is not None]
    return f" ({', '.join(settings)})" if settings else ""
