"""Small models that talk: each says what its function makes of a request, and keeps requests."""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Model, Request, prompt_text
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentAnswer, AgentSpec, Transcript

whole = prompt_text


class Speaker(Model):
    """Answers each request by a function, which may give a text, a completion or an error."""

    def __init__(self, name: str, says: Callable[[Request], Any] | str | None = None) -> None:
        self.name = name
        self.says = says if callable(says) else lambda request: self.own() if says is None else says
        self.heard: list[Request] = []
        self.batches: list[int] = []
        self.ready: list[str] = []
        self._lock = threading.Lock()

    def own(self) -> str:
        """A text that nobody has said before."""
        return f"<{self.name} says {len(self.heard)}>"

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `Model.generate_each`."""
        with self._lock:
            self.batches.append(len(requests))
            return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion | UserError:
        self.heard.append(request)
        said = self.says(request)
        if isinstance(said, str):
            return Completion(said, prompt_tokens=10, new_tokens=3, cost=0.5, model=self.name)
        return said

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`."""
        raise AssertionError("a collaboration attempts")

    def check(self) -> None:
        """Note it."""
        self.ready.append("checked")

    def open(self, device: str) -> None:
        """Note it."""
        self.ready.append(device)


class Streamer(Speaker):
    """Says its words one by one; `pieces` are texts, or an error at which it breaks off."""

    def __init__(self, name: str, *pieces: Any) -> None:
        super().__init__(name)
        self.pieces = pieces
        self.given = 0
        self.closed = False

    def stream(self, request: Request) -> Generator[Delta, None, Completion]:
        """See `swarm.models.base.stream`."""
        self.heard.append(request)
        try:
            for piece in self.pieces:
                if isinstance(piece, UserError):
                    raise piece
                self.given += 1
                yield Delta(piece)
            return Completion("".join(self.pieces), prompt_tokens=10, new_tokens=len(self.pieces))
        finally:
            self.closed = True


def slot(name: str, says: Any = None, **how: Any) -> AgentSpec:
    """A slot with a speaker of that name."""
    return AgentSpec(Speaker(name, says), name, **how)


def speaker(one: AgentSpec) -> Speaker:
    """The slot's model."""
    assert isinstance(one.model, Speaker)
    return one.model


def stages(mixture: MixtureOfAgents, prompt: Any = "why?", **settings: Any) -> Transcript:
    """All that led to the answer to one prompt."""
    (found,) = mixture.run([Request(prompt, **settings)])
    if isinstance(found, UserError):
        raise found
    return found


def said(layer: Sequence[AgentAnswer]) -> list[str]:
    """The texts of a layer."""
    return [answer.text for answer in layer]
