"""What collaborations share: each is a model, and each request goes its own way through it."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request
from swarm.models.trace import Trace, require_completions
from swarm.multi_agent.scheduler import Script, ignore_event, run_in_lockstep
from swarm.multi_agent.types import (
    AgentAnswer,
    AgentSpec,
    Messages,
    OnEvent,
    Transcript,
    fit_to_context,
    prompt_to_messages,
)

S = TypeVar("S", bound=Transcript)

log = logging.getLogger(__name__)


class Collaboration(ABC, Generic[S]):
    """A model made of models, that answers a request by a script of calls.

    Attributes:
        trace: Where every call is recorded; `None` records none.
        context: The most tokens of a prompt; `None` leaves nothing out.
    """

    trace: Trace | None
    context: int | None

    @property
    @abstractmethod
    def agent_specs(self) -> list[AgentSpec]:
        """Who may be asked."""

    @abstractmethod
    def _iterate_rounds(
        self, request: Request, logged: set[str], tell: Callable[[Any], None]
    ) -> Script[S]:
        """The way of a request; `tell` is told its own events, `logged` is in the log already."""

    @property
    def members(self) -> list[Model]:
        """The models that may be asked, each once."""
        return list({id(slot.model): slot.model for slot in self.agent_specs}.values())

    def check(self) -> None:
        """Have each member look for what it needs, where it has a `check`.

        Raises:
            UserError: Something is missing.
        """
        for model in self.members:
            getattr(model, "check", lambda: None)()

    def open(self, device: str) -> None:
        """Have each member load what it needs, where it has an `open`."""
        for model in self.members:
            getattr(model, "open", lambda device: None)(device)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`; `Completion.seconds` is the time of the whole.

        Raises:
            UserError: Of a request that came to nothing, the first.
        """
        return require_completions(self.generate_each(requests))

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        came = self.run(requests)
        return [one.final if isinstance(one, Transcript) else one for one in came]

    def run(self, requests: Sequence[Request], watch: OnEvent | None = None) -> list[S | UserError]:
        """What each request came to, with all that was said on the way; order kept.

        Args:
            requests: To be answered.
            watch: Is told of each event.
        """
        return run_in_lockstep(
            self._build_scripts(requests, watch), watch or ignore_event, self.trace
        )

    def _build_scripts(
        self, requests: Sequence[Request], watch: OnEvent | None = None
    ) -> list[Script[S]]:
        logged: set[str] = set()  # a dead member is no news at each of a thousand requests
        told: Callable[[int, Any], None] = watch or ignore_event

        def build_script(number: int, request: Request) -> Script[S]:
            own = self._iterate_rounds(request, logged, lambda event: told(number, event))
            return stop_when_decided(own, request)

        return [build_script(number, request) for number, request in enumerate(requests)]


class RequestContext(Generic[S]):
    """One request on its way through a collaboration.

    Args:
        owner: Whose.
        request: To be answered.
        stages: What it comes to, to be filled.
        logged: Warnings that the log has already, of requests that are on their way together.
    """

    def __init__(
        self, owner: Collaboration[S], request: Request, stages: S, logged: set[str]
    ) -> None:
        self.owner, self.request, self.stages, self._logged = owner, request, stages, logged
        self._left_out = 0  # the most exchanges that a prompt had no room for
        self.started = time.monotonic()

    def write_within_context(self, write: Callable[[Messages], Messages]) -> Messages:
        """What `write` makes of the conversation, or of as much of it as the context has room for.

        Raises:
            UserError: There is not even room for the last question.
        """
        turns, left_out = fit_to_context(
            prompt_to_messages(self.request.prompt), self.owner.context, write
        )
        self._left_out = max(self._left_out, left_out)
        return turns

    def time_left(self, slot: AgentSpec) -> float | None:
        """Seconds for a call: the slot's, and no more than what is left of the request's."""
        if self.request.timeout is None:
            return slot.timeout
        # A call with no time left fails by itself, as every late one does.
        left = max(0.001, self.started + self.request.timeout - time.monotonic())
        return left if slot.timeout is None else min(left, slot.timeout)

    def add_warning(self, words: str) -> None:
        """Tell it in the stages, and in the log unless that has it."""
        if words not in self.stages.warnings:
            self.stages.warnings.append(words)
        if words not in self._logged:
            self._logged.add(words)
            log.warning("%s", words)

    def build_transcript(self, final: Completion) -> S:
        """The stages, with the last answer and what all calls took."""
        if self._left_out:
            many = f"up to {self._left_out} of the oldest exchanges are"
            many = "the oldest exchange is" if self._left_out == 1 else many
            self.add_warning(f"context={self.owner.context}: {many} left out")
        calls = [answer.completion for answer in self.stages.answers if answer.completion]
        self.stages.final = replace(
            final,
            prompt_tokens=sum(call.prompt_tokens for call in calls),
            new_tokens=sum(call.new_tokens for call in calls),
            cost=sum(call.cost for call in calls),
            seconds=time.monotonic() - self.started,
            cached=all(call.cached for call in calls),
            priced=are_costs_known(calls),
        )
        return self.stages


def are_costs_known(calls: Sequence[Completion]) -> bool | None:
    """Whether the cost of all calls is known; see `Completion.priced`."""
    told = {call.priced for call in calls}
    return False if False in told else True if True in told else None


def stop_when_decided(script: Script[S], request: Request) -> Script[S]:
    """The script, which asks no more once the request is decided whatever is said.

    Raises:
        UserError: It is.
    """
    answers: Any = None
    while True:
        try:
            calls = script.send(answers)
        except StopIteration as end:
            stages: S = end.value
            return stages
        if request.decided and request.decided(""):
            raise UserError("nobody waits for the answer any more")
        answers = yield calls


def number_samples(asked: Sequence[tuple[Model, Request]], sample: int) -> list[Request]:
    """The requests with their samples numbered: a model's that are alike are answers of their own.

    Args:
        asked: What is asked of whom at one time.
        sample: Of the collaboration's own request.
    """
    alike = [
        (id(model), request.prompt, request.temperature, request.max_new_tokens)
        for model, request in asked
    ]
    total, seen = Counter(alike), Counter[object]()
    numbered = []
    for key, (_, request) in zip(alike, asked, strict=True):
        numbered.append(replace(request, sample=sample * total[key] + seen[key]))
        seen[key] += 1
    return numbered


def failure_reasons(came: Iterable[AgentAnswer]) -> list[str]:
    """Who gave no answer and why, each reason once."""
    counted = Counter(f"{answer.name}: {answer.error}" for answer in came if answer.error)
    return [why if n == 1 else f"{why} ({n} times)" for why, n in counted.items()]


# Following what goes on: the events of a collaboration, in the thread that asks for them.

E = TypeVar("E")
N = TypeVar("N")
T = TypeVar("T")


class Cancelled(Exception):
    """Nobody follows any more."""


def stream_events(run: Callable[[OnEvent], T]) -> Generator[tuple[int, Any], None, T]:
    """Runs in a thread, yields each event with its request's number, and returns what came of it.

    Closing it ends the run at its next event: what was asked is answered, nothing more is asked.

    Args:
        run: Tells its events to the watch that it is given.
    """
    events: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
    left = threading.Event()

    def forward_event(number: int, event: Any) -> None:
        if left.is_set():
            raise Cancelled
        events.put((True, (number, event)))

    def run_in_thread() -> None:
        came: T | BaseException
        try:
            came = run(forward_event)
        except BaseException as error:
            came = error
        events.put((False, came))

    threading.Thread(target=run_in_thread, name="swarm-followed", daemon=True).start()
    try:
        while True:
            more, event = events.get()
            if not more:
                break
            yield event
    finally:
        left.set()
    if isinstance(event, BaseException):
        raise event
    came: T = event
    return came


def map_events(
    events: Generator[E, None, T], change: Callable[[E], N | None]
) -> Generator[N, None, T]:
    """Yields what `change` makes of each event, unless that is `None`, and returns as `events`.

    Closing it closes them.
    """
    with closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                came: T = end.value
                return came
            if (made := change(event)) is not None:
                yield made
