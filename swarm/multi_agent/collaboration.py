"""Base class of multi-agent models, and streaming of their events."""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from swarm._util.threads import stream_from_thread
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request, sum_usage
from swarm.models.trace import Trace
from swarm.multi_agent.scheduler import AgentCall, Script, ignore_event, run_in_lockstep
from swarm.multi_agent.types import (
    AgentAnswer,
    AgentSpec,
    Messages,
    OnEvent,
    Transcript,
    prompt_to_messages,
)

E = TypeVar("E")
N = TypeVar("N")
S = TypeVar("S", bound=Transcript)
T = TypeVar("T")

log = logging.getLogger(__name__)


class Collaboration(Model, ABC, Generic[S]):
    """A model composed of other models, which answers a request by a script of calls.

    Attributes:
        trace: Trace of every call; `None` records none.
        options: Settings, among them `seed`.
    """

    trace: Trace | None = None
    options: Any

    @property
    @abstractmethod
    def agent_specs(self) -> list[AgentSpec]:
        """All agents that may be called."""

    @abstractmethod
    def _iterate_rounds(
        self, request: Request, logged: set[str], notify: Callable[[Any], None]
    ) -> Script[S]:
        """Script of a request; `notify` receives events, `logged` contains logged warnings."""

    @property
    def members(self) -> list[Model]:
        """The distinct models that may be called."""
        return list({id(slot.model): slot.model for slot in self.agent_specs}.values())

    def check(self) -> None:
        """Check all members; see `Model.check`."""
        for model in self.members:
            model.check()

    def open(self, device: str) -> None:
        """Load all members."""
        for model in self.members:
            model.open(device)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `Model.generate_each`; `Completion.seconds` is the total time."""
        transcripts = self.run(requests)
        return [one.final if isinstance(one, Transcript) else one for one in transcripts]

    def run(self, requests: Sequence[Request], watch: OnEvent | None = None) -> list[S | UserError]:
        """Return a transcript or an error per request, in order.

        Args:
            requests: Requests to answer.
            watch: Receives each event.
        """
        watch = watch or ignore_event
        return run_in_lockstep(self._build_scripts(requests, watch), watch, self.trace)

    def _build_scripts(
        self, requests: Sequence[Request], watch: OnEvent = ignore_event
    ) -> list[Script[S]]:
        logged: set[str] = set()  # a failed member is logged once for all requests
        return [
            self._iterate_rounds(request, logged, partial(watch, number))
            for number, request in enumerate(requests)
        ]


class RequestContext(Generic[S]):
    """State of one request in a collaboration.

    Args:
        owner: The collaboration.
        request: The request to answer.
        stages: Its transcript, to be filled.
        logged: Warnings already logged for requests of the same batch.
    """

    def __init__(
        self, owner: Collaboration[S], request: Request, stages: S, logged: set[str]
    ) -> None:
        self.request, self.stages, self._logged = request, stages, logged
        self._seed = owner.options.seed
        self.started = time.monotonic()

    def random_key(self, layer: int) -> str:
        """Return the seed of the randomness in the prompts of a layer or an iteration."""
        return json.dumps([self._seed, layer, self.request.sample, self.request.prompt])

    def write_prompt(self, write: Callable[[Messages], Messages]) -> str | Messages:
        """Apply `write` to the conversation; a text to which nothing is added stays a text."""
        prompt, turns = self.request.prompt, prompt_to_messages(self.request.prompt)
        written = write(turns)
        return prompt if isinstance(prompt, str) and written == turns else written

    def build_request(
        self, slot: AgentSpec, prompt: str | Messages, default_max_tokens: int | None, **asked: Any
    ) -> Request:
        """Build a request for an agent; `default_max_tokens` applies if it has no limit."""
        return replace(
            self.request,
            prompt=prompt,
            max_new_tokens=slot.max_tokens or default_max_tokens,
            temperature=self.request.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
            **asked,
        )

    def build_calls(
        self, asked: Sequence[tuple[AgentSpec, int, Request]], layer: int, role: str
    ) -> list[AgentCall]:
        """Build the calls of a round, with a different sample for each of equal requests.

        Args:
            asked: Each agent, the index of its sample, and its request.
            layer, role: See `AgentAnswer`.
        """
        keys = [
            (id(slot.model), one.prompt, one.temperature, one.max_new_tokens)
            for slot, _, one in asked
        ]
        total, seen = Counter(keys), Counter[object]()
        calls = []
        for key, (slot, sample, request) in zip(keys, asked, strict=True):
            request = replace(request, sample=self.request.sample * total[key] + seen[key])
            calls.append(AgentCall(slot, sample, request, layer, role))
            seen[key] += 1
        return calls

    def is_decided(self) -> bool:
        """Return whether the request is decided regardless of the text."""
        return bool(self.request.stop_check and self.request.stop_check(""))

    def ask(
        self, calls: list[AgentCall], layer: list[AgentAnswer] | None = None
    ) -> Generator[list[AgentCall], list[AgentAnswer], list[AgentAnswer]]:
        """Run the calls of a round and return their answers.

        Args:
            layer: Layer of the transcript that the answers extend; `None` is a new one.

        Raises:
            UserError: Choices were to be scored; or the request is decided, so that its answer is
                no longer needed.
        """
        if self.request.choices:
            raise UserError(
                "models that answer together write text and cannot score choices; have the task "
                "read the text instead (task.scoring=generate)"
            )
        if self.is_decided():
            raise UserError("the answer is no longer needed")
        answers = yield calls
        if layer is None:
            layer = []
            self.stages.layers.append(layer)
        layer += answers
        return answers

    def check_quorum(
        self, answers: Sequence[AgentAnswer], quorum: int, place: str, noun: str
    ) -> None:
        """Warn about the failed answers of a round.

        Raises:
            UserError: Fewer than `quorum` have succeeded.
        """
        missing = failure_reasons(answers)
        answered = sum(not answer.error for answer in answers)
        if answered < quorum:
            raise UserError(
                f"{place}: {answered} of {len(answers)} {noun} answered and quorum is {quorum}: "
                f"{'; '.join(missing)}"
            )
        for reason in missing:
            self.add_warning(f"{place}: {reason}")

    def time_left(self, slot: AgentSpec) -> float | None:
        """Return the seconds for a call: the agent's timeout, or the request's remaining time."""
        if self.request.timeout is None:
            return slot.timeout
        # Not 0: a call without time left should fail with the usual timeout error.
        remaining = max(0.001, self.started + self.request.timeout - time.monotonic())
        return remaining if slot.timeout is None else min(remaining, slot.timeout)

    def add_warning(self, words: str) -> None:
        """Add a warning to the transcript, and log it once."""
        if words not in self.stages.warnings:
            self.stages.warnings.append(words)
        if words not in self._logged:
            self._logged.add(words)
            log.warning("%s", words)

    def build_transcript(self, final: Completion) -> S:
        """Complete the transcript with the final answer and the total usage of all calls."""
        calls = []
        for answer in self.stages.answers:
            if answer.completion:
                calls.append(answer.completion)
                if answer.completion.finish == "length" and not answer.error:
                    self.add_warning(
                        f"{answer.name}: an answer ended at its token limit; raise max_tokens"
                    )
        usage = sum_usage(calls)
        priced = {call.priced for call in calls}
        self.stages.final = replace(
            final,
            prompt_tokens=usage.prompt_tokens,
            new_tokens=usage.new_tokens,
            cost=usage.cost,
            seconds=time.monotonic() - self.started,
            cached=all(call.cached for call in calls),
            priced=False if False in priced else True if True in priced else None,
        )
        return self.stages


def failure_reasons(answers: Iterable[AgentAnswer]) -> list[str]:
    """Return the failures by agent, each reason once."""
    counted = Counter(f"{answer.name}: {answer.error}" for answer in answers if answer.error)
    return [reason if n == 1 else f"{reason} ({n} times)" for reason, n in counted.items()]


def stream_events(run: Callable[[OnEvent], T]) -> Generator[Any, None, T]:
    """Run a function of one request in a thread; yield its events, and return its result.

    Closing the generator ends the run at its next event: calls in progress finish, no new ones
    start.

    Args:
        run: Function that reports its events to the given callback.
    """
    return stream_from_thread(lambda emit: run(lambda number, event: emit(event)), "swarm-events")


def map_events(
    events: Generator[E, None, T], change: Callable[[E], N | None]
) -> Generator[N, None, T]:
    """Yield `change(event)` for each event unless it is `None`; return the result of `events`.

    Closing the generator closes `events`.
    """
    with closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                result: T = end.value
                return result
            if (changed := change(event)) is not None:
                yield changed
