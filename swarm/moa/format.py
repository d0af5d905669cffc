"""What the chat's commands tell: stages, costs, models and turns, as lines of text."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm.errors import UserError
from swarm.models.base import Message
from swarm.multi_agent import scheduler
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentAnswer, AgentSpec, Transcript

# What was asked and what came of it: the turns of a chat, for people, programs and later turns.


@dataclass(slots=True)
class ChatTurn:
    """One question.

    Attributes:
        question: As it was asked.
        answers: Every call that came to an end.
        stages: The whole; `None` where it failed or was stopped.
        error: Why there is no answer.
        warnings: What else should be known.
    """

    question: str
    answers: list[AgentAnswer] = field(default_factory=list)
    stages: Transcript | None = None
    error: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer; empty where there is none."""
        return self.stages.final.text if self.stages else ""

    @property
    def messages(self) -> tuple[Message, Message]:
        """The question and the answer, as later turns are told of them."""
        return Message("user", self.question), Message("assistant", self.text)


def turn_to_json(turn: ChatTurn) -> dict[str, Any]:
    """A turn as a program reads it; a cost that nobody knows is null."""
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
        "unpriced": total.unpriced,
        "seconds": final.seconds if final else None,
    }


def _call_to_json(answer: AgentAnswer) -> dict[str, Any]:
    """One call with all that is known of it."""
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
    """What the completion says beside its text; nothing where there is none."""
    if answer.completion is None:
        return {}
    told = asdict(answer.completion)
    keys = ("reasoning", "finish", "prompt_tokens", "new_tokens", "seconds", "cached")
    return {key: told[key] for key in keys} | {"cost": answer.completion.known_cost}


def build_conversation(
    turns: Sequence[ChatTurn], question: str, system: str | None
) -> tuple[Message, ...]:
    """The turns, all of them answered, and the question."""
    before = [message for turn in turns for message in turn.messages]
    first = [Message("system", system)] if system else []
    return (*first, *before, Message("user", question))


def format_outcome(answer: AgentAnswer) -> str:
    """What a call came to, in a few words."""
    if answer.completion is None:
        return "failed"
    said = answer.completion
    took = "from the cache" if said.cached else f"{said.seconds:.1f} s"
    empty = ", empty" if answer.error else ""
    return f"{took}, {pluralize(said.new_tokens, 'token')}{empty}"


def pluralize(count: int, what: str) -> str:
    """So many of something."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_layer(layer: int, layers: int, asked: int, answers: Sequence[AgentAnswer]) -> str:
    """What a layer came to, in one line."""
    good = sum(not answer.error for answer in answers)
    parts = "; ".join(f"{answer_label(answer)} {format_outcome(answer)}" for answer in answers)
    return f"layer {layer} of {layers}: {good} of {asked} answered ({parts or 'none yet'})"


def answer_label(answer: AgentAnswer) -> str:
    """Who was asked, and which time where it is not the first."""
    return f"{answer.name} #{answer.sample + 1}" if answer.sample else answer.name


def format_stages(turn: ChatTurn, which: str) -> Iterable[str]:
    """All answers of a turn; with a number, that one and all that it was asked.

    Raises:
        UserError: There is no such answer.
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
    """A call's number, place and outcome."""
    asked = answer.completion and not answer.completion.cached
    cost = f", {scheduler.sum_usage([answer]).format_cost()}" if asked else ""
    who = f"layer {answer.layer}, {answer.role} {answer_label(answer)}"
    return f"--- {number}: {who}: {format_outcome(answer)}{cost}"


def format_costs(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """What the last turn and all of them took."""
    for title, some in (("last turn", turns[-1:]), ("session", turns)):
        answers = [answer for turn in some for answer in turn.answers]
        yield f"{title}, {pluralize(len(some), 'question')}:"
        yield from scheduler.format_usage_table(answers)


def format_history(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """Questions and answers."""
    for turn in turns:
        yield f">>> {turn.question}"
        yield turn.text


def summarize_mixture(mixture: MixtureOfAgents) -> str:
    """Who speaks, in one line."""
    last = f"{mixture.aggregator.name} {STRATEGY_PHRASES[mixture.strategy]}"
    if mixture.layers == 1:
        return f"{mixture.aggregator.name} answers alone"
    names = ", ".join(_format_agent_count(slot) for slot in mixture.proposers)
    rounds = "" if mixture.layers == 2 else f" in {mixture.layers - 1} rounds"
    one = len(mixture.proposers) == 1 and mixture.proposers[0].count == 1
    return f"{names} propose{'s' * one}{rounds}, {last}; {mixture.calls} calls a question"


def format_models(mixture: MixtureOfAgents) -> Iterable[str]:
    """Every slot, and what it says of itself."""
    rounds = range(1, mixture.layers)
    layers = f"layers {rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else "layer 1"
    for slot in mixture.proposers if rounds else ():
        yield f"{layers}: {_format_agent_count(slot)}{_format_agent_settings(slot)}"
    last, fallback = mixture.aggregator, mixture.fallback
    settings = _format_agent_settings(last)
    yield f"layer {mixture.layers}: {last.name} {STRATEGY_PHRASES[mixture.strategy]}{settings}"
    if fallback:
        yield f"if that fails: {fallback.name}{_format_agent_settings(fallback)}"
    yield f"{mixture.calls} calls a question; quorum {mixture.quorum}, prompt {mixture.prompt.form}"


STRATEGY_PHRASES = {
    "aggregate": "answers",
    "rank": "chooses one",
    "sequential": "answers, a few proposals at a time",
}


def _format_agent_count(slot: AgentSpec) -> str:
    return slot.name if slot.count == 1 else f"{slot.count} x {slot.name}"


def _format_agent_settings(slot: AgentSpec) -> str:
    """What holds for the slot alone."""
    keys = ("temperature", "max_tokens", "timeout", "system")
    told = [f"{key} {value!r}" for key in keys if (value := getattr(slot, key)) is not None]
    return f" ({', '.join(told)})" if told else ""
