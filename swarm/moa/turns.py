"""What was asked and what came of it: the turns of a chat, for people, programs and later turns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm.collab import AgentAnswer, Transcript
from swarm.moa import accounts
from swarm.models import Message


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
    total = accounts.sum_usage(turn.answers)
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


def build_conversation(turns: Sequence[ChatTurn], question: str, system: str | None) -> tuple[Message, ...]:
    """The turns, all of them answered, and the question."""
    before = [message for turn in turns for message in turn.messages]
    first = [Message("system", system)] if system else []
    return (*first, *before, Message("user", question))
