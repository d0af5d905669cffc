"""Consortia of small talking models: what they are told, and what they make of it."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from fake_agents import slot, speaker, whole

from swarm._util.settings import parse_settings
from swarm.errors import UserError
from swarm.models.base import Request
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.results import ConsortiumTranscript
from swarm.multi_agent.consortium.settings import ConsortiumSettings
from swarm.multi_agent.types import AgentSpec

DEAD = UserError("it is gone")


def config(**settings: Any) -> ConsortiumSettings:
    """The settings of two members and an arbiter."""
    return parse_settings(ConsortiumSettings, {"members": ["a", "b"], "arbiter": "c", **settings})


def judge(*confidences: Any, **more: Any) -> AgentSpec:
    """An arbiter that writes S1, S2, ... with these confidences, the last one again and again."""
    said = itertools.count()

    def says(request: Request) -> str:
        number = next(said)
        return written(f"S{number + 1}", confidences[min(number, len(confidences) - 1)], **more)

    return slot("arbiter", says)


def written(synthesis: str, confidence: Any = 0.9, **more: Any) -> str:
    """A verdict in the form."""
    parts = {"synthesis": synthesis, "confidence": confidence, **more}
    return "\n".join(f"<{name}>\n{value}\n</{name}>" for name, value in parts.items())


def deliberation(
    consortium: Consortium, prompt: Any = "why?", **settings: Any
) -> ConsortiumTranscript:
    """What one prompt comes to."""
    (found,) = consortium.run([Request(prompt, **settings)])
    if isinstance(found, UserError):
        raise found
    return found


def shown(request: Request) -> dict[int, str]:
    """The quoted answers in a prompt, by their numbers."""
    text = whole(request.prompt)
    if not (code := re.search(r"between tags with the code (\w+) is", text)):
        return {}
    pattern = rf'<answer-{code[1]} number="(\d+)">\n(.*?)\n</answer-{code[1]}>'
    return {int(number): one for number, one in re.findall(pattern, text, re.DOTALL)}


def heard(one: AgentSpec) -> list[str]:
    """All prompts that the slot's speaker got, as texts."""
    return [whole(request.prompt) for request in speaker(one).heard]


def confidences(found: ConsortiumTranscript) -> Sequence[float | None]:
    """Of each iteration's verdict."""
    return [one.verdict.confidence for one in found.iterations]
