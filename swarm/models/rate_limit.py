"""Rate limits of a server, fixed and learned, and scheduling of its requests."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarm._util.settings import Count, Number, Positive, PositiveNumber, checked


@checked("limits")
@dataclass(frozen=True)
class Limits:
    """Limits on requests to a server; they do not affect answers.

    The limits apply per process: each worker has its own.

    Attributes:
        concurrency: Maximum number of concurrent requests.
        requests_per_minute: Requests are spaced evenly, never sent in bursts; `None` is no limit.
        connect_timeout: Seconds to establish a connection.
        timeout: Seconds for a complete request, however slowly data arrives.
        retries: Number of retries after 408, 409, 425, 5xx, a lost connection, a timeout or a
            malformed response; none later than 300 s after the first of these.
        rate_limit_timeout: Seconds to retry a rate-limited request (429), counted from its first
            refusal or from when the server last accepted another request (from the first alone
            if the server has accepted others many times since). These do not count as
            `retries`; meanwhile the rate of all requests is reduced (`AdaptiveThrottle`). 0 retries
            none.

    Raises:
        UserError: A value is invalid.
    """

    concurrency: Positive = 16
    requests_per_minute: PositiveNumber | None = None
    connect_timeout: PositiveNumber = 10.0
    timeout: PositiveNumber = 120.0
    retries: Count = 12
    rate_limit_timeout: Number = 600.0


class DeadlineExceeded(Exception):
    """A request cannot be sent before its deadline."""


class AdaptiveThrottle:
    """Rate at which a server accepts requests, learned from its 429 responses.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989) of requests per second; there
    is no limit at first. Some servers refuse a share of the requests at any rate, so the rate falls
    only if more than this share is refused, or, after a decrease, at the first refusal if the
    decrease had ended them. All requests then wait for the Retry-After of that refusal. A decrease
    is slight if the server accepted many at this rate, larger if few. Refusals of requests sent
    before it do not count. If nothing was accepted since then, a lower rate does not help: sending
    pauses instead, twice as long each time. The number of concurrent requests falls with the rate.

    The constants were simulated for token buckets, fixed windows and random refusals.

    Attributes:
        rate: Requests per second; `None` is no limit.
        active: Number of requests sent and not answered.
        accepted: Number of requests answered by the server.
        last_accepted: Time of the last answer, as of `time.monotonic`.
    """

    TOLERATED, EXCESS = 0.2, 5.0
    """Share of refusals that does not lower the rate, and the number of refusals in excess of it
    that does (a cumulative sum, Page, 1954).
    """
    ENDED = 10
    """Number of requests accepted in a row after a decrease that had ended the refusals."""
    MANY, ENOUGH = 0.95, 20
    """Factor of a small decrease, and the number of requests accepted since the last decrease that
    it requires.
    """
    FEW = 0.7
    """Factor of the decrease after fewer accepted requests."""
    SLOWLY, QUICKLY = 0.01, 0.1
    """Increase per second: after a small decrease as a share of the lowered rate (additive), after
    a large one of the current rate (TCP's slow start).
    """
    STEP = 0.05
    """Maximum increase per accepted request."""
    FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
    WINDOW = 3.0
    """Seconds over which accepted requests are counted."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.active = self.accepted = 0
        self.last_accepted = 0.0
        self._increase = self._lowered_to = 0.0
        self._changed = self._increased = self._free = 0.0
        self._since, self._refused, self._fruitless, self._excess = 0, 0, 0, 0.0
        self._quiet_until = self._paused_until = 0.0
        self._sent_at: deque[float] = deque(maxlen=1000)
        self._accepted_at: deque[float] = deque(maxlen=1000)
        self._lines: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    def __reduce__(self) -> tuple[type["AdaptiveThrottle"], tuple[()]]:
        return AdaptiveThrottle, ()

    @property
    def remaining_pause(self) -> float:
        """Seconds left of the wait requested by the server."""
        return self._quiet_until - time.monotonic()

    def send_lock(self) -> asyncio.Lock:
        """Return the running loop's lock for sending; see `RateLimiter.concurrency_gate`."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines = {loop: asyncio.Lock()}
        return self._lines[loop]

    async def wait_until_clear(self, latest: Callable[[], float]) -> bool:
        """Wait until a request may be sent; return whether the server had requested a wait.

        Args:
            latest: Returns the deadline as of `time.monotonic`.

        Raises:
            DeadlineExceeded: It cannot be sent before `latest`.
        """
        waited = False
        while (wait := self.next_send_time() - (now := time.monotonic())) > 0:
            if now + wait > latest():
                raise DeadlineExceeded
            waited = waited or self.remaining_pause > 0
            await asyncio.sleep(min(wait, 1.0))  # an answer may end a pause
        return waited

    def next_send_time(self) -> float:
        """Return when the next request may be sent, as of `time.monotonic`."""
        return max(self._quiet_until, self._paused_until, self._free)

    def is_clear(self) -> bool:
        """Return whether a request may be sent now."""
        return self.next_send_time() <= time.monotonic()

    def record_send(self) -> float:
        """Count a request sent now; return the time."""
        now = time.monotonic()
        self.active += 1
        self._sent_at.append(now)
        if self.rate is not None:
            self._free = max(now, self._free) + 1.0 / self.rate
        return now

    def record_success(self, sent: float) -> None:
        """Record an answer to a request sent at `sent`."""
        now = time.monotonic()
        self.accepted, self.last_accepted = self.accepted + 1, now
        self._fruitless, self._paused_until = 0, 0.0
        self._accepted_at.append(now)
        self._excess = max(0.0, self._excess - self.TOLERATED / (1.0 - self.TOLERATED))
        if self.rate is None or sent < self._changed:
            return
        self._since += 1
        step = min(self.STEP, self._increase * (now - self._increased))
        reference = self._lowered_to if self._increase == self.SLOWLY else self.rate
        self.rate, self._increased = self.rate + step * reference, now

    def record_refusal(self, sent: float, after: float | None, overtaken: bool = False) -> None:
        """Record a refusal of a request sent at `sent`; it lowers the rate if there are too many.

        Args:
            after: Seconds to wait requested by the server; `None` if not given.
            overtaken: True if the server repeatedly accepted other requests while refusing this
                one, so that the refusal does not reflect the rate.
        """
        if sent < self._changed or overtaken:
            return
        self._excess, self._refused = self._excess + 1.0, self._refused + 1
        alone = self.rate and self._refused == 1 and not 0 < self._since < self.ENDED
        # Refusals arrive before the answers to requests that were sent at the same time.
        if self._excess < self.EXCESS + self.TOLERATED * self.active and not alone:
            return
        now = time.monotonic()
        self._quiet_until = max(self._quiet_until, now + (after or 0.0))
        if self.rate is None:
            sent_lately = sum(sent_at > now - 1.0 for sent_at in self._sent_at)
            self._lower_rate(self.FEW * max(1, sent_lately), self.QUICKLY)
        elif not self._since:
            pause = min(self.LONGEST_PAUSE, self.FIRST_PAUSE * 2.0**self._fruitless)
            self._fruitless += 1
            # Even if the server requests less: some repeatedly request 0 s.
            self._paused_until = now + pause * random.SystemRandom().uniform(0.5, 1.0)
            self._lower_rate(self.rate, self._increase)
        elif self._since < self.ENOUGH:
            self._lower_rate(self.FEW * self.rate, self.QUICKLY)
        else:
            window = min(self.WINDOW, now - self._changed)
            accepted = sum(sent_at > now - window for sent_at in self._accepted_at)
            # The rate of a window that is too short or was mostly idle is unreliable.
            measured = window >= 1.0 and accepted >= self.ENOUGH
            rate = min(self.rate, accepted / window) if measured else self.rate
            self._lower_rate(self.MANY * rate, self.SLOWLY)

    def _lower_rate(self, rate: float, increase: float) -> None:
        self.rate = self._lowered_to = rate
        self._increase, self._since, self._refused, self._excess = increase, 0, 0, 0.0
        self._changed = self._increased = time.monotonic()
        self._free = self._changed + 1.0 / rate


class RateLimiter:
    """Decides when requests to one server may be sent, within the limits.

    All users of the instance share the limits. Pickling drops reservations.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._free = 0.0  # next start at `requests_per_minute`, as of `time.monotonic`
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._throttles: dict[str, AdaptiveThrottle] = {}

    def __reduce__(self) -> tuple[type["RateLimiter"], tuple[Limits]]:
        return RateLimiter, (self.limits,)

    def get_throttle(self, model: str) -> AdaptiveThrottle:
        """Return the throttle of one model: servers limit each model separately."""
        return self._throttles.setdefault(model, AdaptiveThrottle())

    def concurrency_gate(self) -> asyncio.Semaphore:
        """Return the running loop's semaphore; after a fork the loop differs."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            gates = {one: gate for one, gate in self._gates.items() if not one.is_closed()}
            self._gates = gates | {loop: asyncio.Semaphore(self.limits.concurrency)}
        return self._gates[loop]

    def _reserve_start(self) -> float:
        """Reserve the next start at `Limits.requests_per_minute`; return the seconds until it."""
        if not self.limits.requests_per_minute:
            return 0.0
        now = time.monotonic()
        begin = max(now, self._free)
        self._free = begin + 60.0 / self.limits.requests_per_minute
        return begin - now

    async def acquire(self, throttle: AdaptiveThrottle, latest: Callable[[], float]) -> float:
        """Wait until a request may be sent; return the time. `release` must follow.

        The concurrency slot is acquired last, after the throttle and the per-minute limit: a model
        waiting for its rate limit leaves the slots to the endpoint's other models. After a wait
        requested by the server, the per-minute limit starts anew.

        Raises:
            DeadlineExceeded: See `AdaptiveThrottle.wait_until_clear`.
        """
        gate, line = self.concurrency_gate(), throttle.send_lock()
        paced = self.limits.requests_per_minute
        if not (paced or line.locked() or gate.locked()) and throttle.is_clear():
            await gate.acquire()  # at once
            return throttle.record_send()
        async with line:
            if (delay := self._reserve_start()) > 0:
                await asyncio.sleep(delay)
            while True:
                while not throttle.is_clear() and await throttle.wait_until_clear(latest):
                    if (delay := self._reserve_start()) <= 0:
                        break
                    await asyncio.sleep(delay)
                await gate.acquire()
                # A refusal may have arrived while this request waited for the gate.
                if throttle.is_clear():
                    break
                gate.release()
            return throttle.record_send()

    def release(self, throttle: AdaptiveThrottle) -> None:
        """Release a slot after the answer."""
        throttle.active -= 1
        self.concurrency_gate().release()
