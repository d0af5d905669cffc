"""How a run stands: who waits for which answers, and what is asked of each model."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from swarm.compare.asking import ModelCall, Script, SampleRequest
from swarm.compare.asking.finding import get_endpoint_index
from swarm.compare.asking.sources import Backend
from swarm.errors import UserError
from swarm.models import Request
from swarm.models.failures import RequestError, ConnectionFailed
from swarm.models.one_by_one import GenerateSamples

MAX_FAILURES_IN_ROW = 3
"""Failures in a row, without an answer meanwhile, after which a model is asked nothing more."""


@dataclass(slots=True)
class WaitingScript:
    """A script that waits for what it wanted.

    Attributes:
        script, number: It, and its place among all.
        heard: What came, in the order of its wants.
        missing: How many have not come.
        again: Whether it has wanted something before.
    """

    script: Script[Any]
    number: int
    heard: list[Any]
    missing: int = 0
    again: bool = False


QueuedSample = tuple[SampleRequest, WaitingScript, int]
"""A want, who wants it, and its place among that one's wants."""


@dataclass(slots=True)
class PreparedCall:
    """What is asked of a model that was found; all samples of it have one of these.

    Attributes:
        asked: What is asked.
        place: The model.
        error: Why it cannot be asked.
        key: What the keys of the answers are made of.
        one: Whether all samples are the same.
        request: For sample 0; `None` until it is needed.
    """

    asked: ModelCall
    place: "ModelQueue"
    error: UserError | None = None
    key: str = ""
    one: bool = False
    request: Request | None = None


@dataclass
class ModelQueue:
    """One model in a run.

    Attributes:
        name: The model's.
        source: Where its answers are from; `None` until it is found.
        parked: Wants from the time before.
        queue: What is to be asked: the answer's key, the request, and its sample's number.
        ask: Asks an endpoint; `None` until it is used.
        under_way: Batches, or requests that are asked one by one.
        last: When it answered last, as `time.monotonic` has it.
        failures: Since then.
        error: Why nothing more is asked of it.
    """

    name: str
    source: Backend | None = None
    parked: list[QueuedSample] = field(default_factory=list)
    queue: deque[tuple[str, Request, int]] = field(default_factory=deque)
    ask: GenerateSamples | None = None
    under_way: int = 0
    last: float = 0.0
    failures: int = 0
    error: UserError | None = None

    def can_start(self) -> bool:
        """Whether something may be asked now; of an endpoint one thing until it has answered."""
        if not self.queue:
            return False
        assert self.source
        return self.under_way < (self.source.batches if self.source.met else 1)

    def record_success(self) -> None:
        """It has answered."""
        assert self.source
        if not self.source.met:
            get_endpoint_index().mark_confirmed(self.name)
        self.source.met, self.last, self.failures = self.error is None, time.monotonic(), 0

    def record_failure(self, error: UserError, began: float) -> None:
        """A request that began then has failed for good; perhaps all others would."""
        self.failures += 1
        if not isinstance(error, RequestError):
            return
        if self.source and not error.passing:
            # It is there. One that is overloaded at the beginning is not pressed harder.
            self.source.met = True
        nobody = isinstance(error, ConnectionFailed) and not self.last
        hopeless = self.failures >= MAX_FAILURES_IN_ROW or nobody
        if error.general or (error.passing and self.last < began and hopeless):
            self.error = error
            if self.source:
                self.source.met = False  # the next run begins with a single request
            # Perhaps another endpoint has it, or another key may ask for it: looked for next time.
            get_endpoint_index().mark_missing(self.name)
