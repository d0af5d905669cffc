"""How hard a server may be pressed, and when the next request may go."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm.errors import UserError


@dataclass(frozen=True)
class Limits:
    """How hard a server may be pressed; none of it changes an answer.

    The limits are those of one process: of several workers each has its own.

    Attributes:
        concurrency: The most requests under way at once.
        requests_per_minute: They are sent evenly, never in bursts; `None` is no limit.
        tokens_per_minute: Likewise, of tokens read and written; estimated before a request is
            sent and put right by what the server counted. `None` is no limit.
        connect_timeout: Seconds for a connection.
        timeout: Seconds for a whole request; a silent server and a trickling one both meet it.
        retries: How often a request is repeated after 408, 409, 425, 5xx, a lost connection, a
            timeout or an answer that is not as agreed.
        rate_limit_timeout: Seconds for which a request is repeated that meets a rate limit (429):
            from its first refusal, or from when the server last accepted another request. These
            repetitions are not among `retries`; the rate of all requests is lowered meanwhile
            (`Throttle`). 0 repeats none.

    Raises:
        UserError: A value is not allowed.
    """

    concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    connect_timeout: float = 10.0
    timeout: float = 120.0
    retries: int = 6
    rate_limit_timeout: float = 600.0

    def __post_init__(self) -> None:
        for key, least in (("concurrency", 1), ("retries", 0)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise UserError(f"limits.{key}={value!r}: must be a whole number from {least} on")
        for key in ("requests_per_minute", "tokens_per_minute", "connect_timeout", "timeout"):
            value = getattr(self, key)
            if value is None and key.endswith("per_minute"):
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise UserError(f"limits.{key}={value!r}: must be a number above 0")
        most = self.rate_limit_timeout
        number = isinstance(most, (int, float)) and not isinstance(most, bool)
        if not number or not 0 <= most < float("inf"):
            raise UserError(f"limits.rate_limit_timeout={most!r}: must be a number from 0 on")


class Pacer:
    """Spreads what is sent evenly over time; `None` a minute is no limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = 60.0 / per_minute if per_minute else 0.0
        self._free = 0.0

    def reserve_slot(self, amount: float = 1.0) -> float:
        """Take the next place; gives the time, of `time.monotonic`, at which it begins."""
        if not self._seconds:
            return 0.0
        begin = max(time.monotonic(), self._free)
        self._free = begin + amount * self._seconds
        return begin

    def adjust_reservation(self, amount: float) -> None:
        """Add to what was booked; less than 0 gives some of it back."""
        self._free += amount * self._seconds


class DeadlineExceeded(Exception):
    """A request cannot go in time."""


class AdaptiveThrottle:
    """Rate at which a server accepts requests, learnt from those that it refuses with 429.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989), of requests a second: there
    is no limit before the first 429. A refusal lowers the rate of all requests: a little where the
    server had accepted many at this rate, more where few. Refusals of requests that were sent
    before the last decrease count once. Where nothing was accepted since then, a lower rate does
    not help: sending pauses instead, for twice as long each time. The requests under way at once
    fall with the rate. A wait that the server asks for (Retry-After) is kept by all requests.

    The constants are the best of 162 sets simulated, for token buckets, sliding and fixed windows.

    Attributes:
        rate: Requests a second; `None` is no limit.
        accepted: How many requests the server has answered.
        last_accepted: When it answered the last one, as `time.monotonic` has it.
    """

    MANY, ENOUGH = 0.95, 20
    """Decrease to this share, where so many requests were accepted since the last decrease."""
    FEW = 0.7
    """Decrease where there were fewer."""
    SLOWLY, QUICKLY = 0.01, 0.1
    """Increase a second, after a small decrease as a share of the lowered rate (additive), after a
    large one of the rate itself (TCP's slow start)."""
    STEP = 0.05
    """The largest increase by one accepted request."""
    FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
    WINDOW = 3.0
    """Seconds over which the accepted requests are counted."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.accepted, self.last_accepted = 0, 0.0
        self._increase = self._lowered_to = 0.0
        self._changed = self._increased = self._free = 0.0
        self._since, self._fruitless = 0, 0
        self._quiet_until = self._paused_until = 0.0
        self._sent: deque[float] = deque(maxlen=1000)
        self._came: deque[float] = deque(maxlen=1000)
        self._lines: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    def __reduce__(self) -> tuple[type["AdaptiveThrottle"], tuple[()]]:
        return AdaptiveThrottle, ()

    @property
    def remaining_pause(self) -> float:
        """Seconds for which the server has asked us to wait."""
        return self._quiet_until - time.monotonic()

    def pause_for(self, seconds: float) -> None:
        """Send nothing for so long: what one request was told holds for all."""
        self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)

    def send_lock(self) -> asyncio.Lock:
        """Lock for the next request to go; of the running loop, as `Turns.gate`."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines = {loop: asyncio.Lock()}
        return self._lines[loop]

    async def wait_until_clear(self, latest: Callable[[], float]) -> bool:
        """Wait until a request may go; gives whether the server had asked to wait.

        Args:
            latest: Gives the time, as `time.monotonic` has it, beyond which it does not wait.

        Raises:
            TooLate: It cannot go before `latest`.
        """
        waited = False
        while (step := self.next_wait(latest)) > 0:
            waited = waited or self.remaining_pause > 0
            await asyncio.sleep(step)
        return waited

    def next_wait(self, latest: Callable[[], float]) -> float:
        """Seconds until `earliest`, or 1 at most: an answer may end a pause; 0 or less: go.

        Raises:
            TooLate: A request cannot go before `latest`.
        """
        wait = self.next_send_time() - (now := time.monotonic())
        if wait > 0 and now + wait > latest():
            raise DeadlineExceeded
        return min(wait, 1.0)

    def next_send_time(self) -> float:
        """When the next request may go, as `time.monotonic` has it."""
        return max(self._quiet_until, self._paused_until, self._free)

    def record_send(self) -> float:
        """Count a request that goes now; gives the time."""
        now = time.monotonic()
        self._sent.append(now)
        if self.rate is not None:
            self._free = max(now, self._free) + 1.0 / self.rate
        return now

    def record_success(self, sent: float) -> None:
        """The server has answered a request that was sent then."""
        now = time.monotonic()
        self.accepted, self.last_accepted = self.accepted + 1, now
        self._fruitless, self._paused_until = 0, 0.0
        self._came.append(now)
        if self.rate is None or sent < self._changed:
            return
        self._since += 1
        step = min(self.STEP, self._increase * (now - self._increased))
        of = self._lowered_to if self._increase == self.SLOWLY else self.rate
        self.rate, self._increased = self.rate + step * of, now

    def record_refusal(self, sent: float, after: float | None, overtaken: bool = False) -> None:
        """The server has refused a request that was sent then.

        Args:
            after: Seconds that it asks us to wait; `None`: it does not say.
            overtaken: Whether the server has accepted others again and again while it refused this
                one, which then says nothing of the rate.
        """
        if after is not None:
            self.pause_for(after)
        if sent < self._changed or overtaken:
            return
        now = time.monotonic()
        if self.rate is None:
            self._lower_rate(
                self.FEW * max(1, sum(at > now - 1.0 for at in self._sent)), self.QUICKLY
            )
        elif not self._since:
            pause = min(self.LONGEST_PAUSE, self.FIRST_PAUSE * 2.0**self._fruitless)
            self._fruitless += 1
            # Also where the server asks for less, as some ask for 0 s again and again.
            self._paused_until = now + pause * random.SystemRandom().uniform(0.5, 1.0)
            self._lower_rate(self.rate, self._increase)
        elif self._since < self.ENOUGH:
            self._lower_rate(self.FEW * self.rate, self.QUICKLY)
        else:
            window = min(self.WINDOW, now - self._changed)
            came = sum(at > now - window for at in self._came)
            # Of a window that is too short, or that was quiet for other reasons, it is chance.
            told = window >= 1.0 and came >= self.ENOUGH
            self._lower_rate(
                self.MANY * (min(self.rate, came / window) if told else self.rate), self.SLOWLY
            )

    def _lower_rate(self, rate: float, increase: float) -> None:
        self.rate = self._lowered_to = rate
        self._increase, self._since = increase, 0
        self._changed = self._increased = time.monotonic()
        self._free = self._changed + 1.0 / rate


class RateLimiter:
    """When the next request to one server may go, as the limits allow.

    All who share it share the limits. It may be pickled; what was booked stays behind.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tokens = Pacer(limits.tokens_per_minute)
        self._requests = Pacer(limits.requests_per_minute)
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._throttles: dict[str, AdaptiveThrottle] = {}

    def __reduce__(self) -> tuple[type["RateLimiter"], tuple[Limits]]:
        return RateLimiter, (self.limits,)

    def get_throttle(self, model: str) -> AdaptiveThrottle:
        """What is learnt of one model's rate limit: servers limit each by itself."""
        return self._throttles.setdefault(model, AdaptiveThrottle())

    def concurrency_gate(self) -> asyncio.Semaphore:
        """For as many at once as may be; of the loop we are in: after a fork there is another."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates = {loop: asyncio.Semaphore(self.limits.concurrency)}
        return self._gates[loop]

    async def wait_for_limits(self, tokens: float) -> None:
        """Wait until our own limits allow one more request."""
        begin = max(self.tokens.reserve_slot(tokens), self._requests.reserve_slot())
        if begin and (wait := begin - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def acquire_place(
        self, throttle: AdaptiveThrottle, tokens: float, latest: Callable[[], float]
    ) -> AsyncIterator[float]:
        """Hold a place among the requests under way; gives the time at which the request goes.

        The place is taken last, once the throttle and the limits a minute let the request go: a
        model that waits for its rate limit leaves the places to the endpoint's other models. Where
        the server had asked us to wait, our own limits are kept anew from then on.

        Raises:
            TooLate: See `Throttle.clear`.
        """
        gate = self.concurrency_gate()
        async with throttle.send_lock():
            await self.wait_for_limits(tokens)
            while True:
                while await throttle.wait_until_clear(latest):
                    if (wait := self._requests.reserve_slot() - time.monotonic()) <= 0:
                        break
                    await asyncio.sleep(wait)
                await gate.acquire()
                # A refusal may have come while this request waited for the gate.
                if throttle.next_send_time() <= time.monotonic():
                    break
                gate.release()
            sent = throttle.record_send()
        try:
            yield sent
        finally:
            gate.release()
