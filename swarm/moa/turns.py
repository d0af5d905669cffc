"""Turns of a chat with a mixture of agents or another model: their JSON and their text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm._util.terminal import format_cost
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
    found = [Message("system", system)] if system else []
    for turn in turns:
        found += [Message("user", turn.question), Message("assistant", turn.text)]
    return (*found, Message("user", question))


def turn_to_json(turn: ChatTurn) -> dict[str, Any]:
    """Convert a turn to JSON; an unknown cost is null."""
    layers: dict[int, list[dict[str, Any]]] = {}
    for answer in turn.answers:
        layers.setdefault(answer.layer, []).append(_call_to_json(answer))
    total = sum_usage(turn.answers)
    final = turn.stages.final if turn.stages else None
    return {
        "question": turn.question,
        "answer": final and final.text,
        "error": turn.error or None,
        "finish": final and final.finish,
        "models": list(dict.fromkeys(answer.name for answer in turn.answers)),
        "stages": [layers[layer] for layer in sorted(layers)],
        "warnings": turn.warnings,
        "calls": {"all": total.calls, "cached": total.cached, "failed": total.failed},
        "tokens": {"prompt": total.prompt_tokens, "new": total.new_tokens},
        "cost": total.known_cost,
        "unpriced": total.unknown_costs,
        "seconds": final and final.seconds,
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
    if answer.completion:
        fields = asdict(answer.completion)
        for key in ("reasoning", "finish", "prompt_tokens", "new_tokens", "seconds", "cached"):
            found[key] = fields[key]
        found["cost"] = answer.completion.known_cost
    return found


def format_answer_cost(answers: Sequence[AgentAnswer]) -> str:
    """Format the cost of calls."""
    total = sum_usage(answers)
    return format_cost(total.known_cost, total.unknown_costs)
