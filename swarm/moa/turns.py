"""Turns of a chat with a mixture of agents or another model: their JSON and their text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm._util.terminal import format_cost, pluralize
from swarm.models.base import Message
from swarm.multi_agent.scheduler import sum_usage
from swarm.multi_agent.types import AgentAnswer, Transcript


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


def build_conversation(
    turns: Sequence[ChatTurn], question: str, system: str | None
) -> tuple[Message, ...]:
    """Build the conversation of answered turns and a new question."""
    before = [
        Message(role, text)
        for turn in turns
        for role, text in (("user", turn.question), ("assistant", turn.text))
    ]
    first = [Message("system", system)] if system else []
    return (*first, *before, Message("user", question))


def turn_to_json(turn: ChatTurn) -> dict[str, Any]:
    """Convert a turn to JSON; an unknown cost is null."""
    layers: dict[int, list[dict[str, Any]]] = {}
    for answer in turn.answers:
        layers.setdefault(answer.layer, []).append(_call_to_json(answer))
    total = sum_usage(turn.answers)
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
    prompt = answer.prompt
    found = {
        "layer": answer.layer,
        "role": answer.role,
        "model": answer.name,
        "sample": answer.sample,
        "text": answer.text,
        "error": answer.error or None,
        "prompt": prompt if isinstance(prompt, str) else [turn._asdict() for turn in prompt],
    }
    if answer.completion is None:
        return found
    fields = asdict(answer.completion)
    keys = ("reasoning", "finish", "prompt_tokens", "new_tokens", "seconds", "cached")
    return {**found, **{key: fields[key] for key in keys}, "cost": answer.completion.known_cost}


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


def format_call(answer: AgentAnswer) -> str:
    """Describe a call in one line: layer, role, model and result."""
    return f"layer {answer.layer}, {answer.role} {answer_label(answer)}: {format_outcome(answer)}"


def format_answer_cost(answers: Sequence[AgentAnswer]) -> str:
    """Format the cost of calls."""
    total = sum_usage(answers)
    return format_cost(total.known_cost, total.unknown_costs)
