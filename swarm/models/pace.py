"""How hard a server may be pressed, and when the next request may go."""

import asyncio
import time
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
        retries: How often a request is repeated after 408, 409, 425, 429, 5xx, a lost
            connection, a timeout or an answer that is not as agreed.

    Raises:
        UserError: A value is not allowed.
    """

    concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    connect_timeout: float = 10.0
    timeout: float = 120.0
    retries: int = 6

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


class Pace:
    """Spreads what is sent evenly over time; `None` a minute is no limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = 60.0 / per_minute if per_minute else 0.0
        self._free = 0.0

    def book(self, amount: float = 1.0) -> float:
        """Take the next place; gives the time, of `time.monotonic`, at which it begins."""
        if not self._seconds:
            return 0.0
        begin = max(time.monotonic(), self._free)
        self._free = begin + amount * self._seconds
        return begin

    def correct(self, amount: float) -> None:
        """Add to what was booked; less than 0 gives some of it back."""
        self._free += amount * self._seconds


class Turns:
    """When the next request to one server may go: as the limits allow and as the server asked.

    All who share it share the limits. It may be pickled; what was booked stays behind.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tokens = Pace(limits.tokens_per_minute)
        self._requests = Pace(limits.requests_per_minute)
        self._quiet_until = 0.0
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def __reduce__(self) -> tuple[type["Turns"], tuple[Limits]]:
        return Turns, (self.limits,)

    def gate(self) -> asyncio.Semaphore:
        """For as many at once as may be; of the loop we are in: after a fork there is another."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates = {loop: asyncio.Semaphore(self.limits.concurrency)}
        return self._gates[loop]

    async def booked(self, tokens: float) -> None:
        """Wait until our own limits allow one more request."""
        begin = max(self.tokens.book(tokens), self._requests.book())
        if begin and (wait := begin - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    async def heard(self) -> None:
        """Wait until the time is over that the server has asked for; then in step again."""
        while (wait := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)
            if (wait := self._requests.book() - time.monotonic()) > 0:
                await asyncio.sleep(wait)

    def hold_back(self, seconds: float) -> None:
        """What one request was told holds for all of them."""
        self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)
