"""JSON requests to one server: concurrent, rate-limited, with timeouts, retries and streaming.

`HttpClient` is the public class; `RetryingClient` makes one call and retries it until its answer
can be parsed. API keys never appear in messages.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from swarm._util.threads import shared_event_loop
from swarm.models.http_errors import BadRequest, RateLimited, RequestError, RequestTimeout
from swarm.models.rate_limit import (
    AdaptiveThrottle,
    ConcurrencySlot,
    DeadlineExceeded,
    Limits,
    RateLimiter,
)
from swarm.models.transport import Call as Call
from swarm.models.transport import (
    HttpConnections,
    StreamParser,
    parse_response,
    proxy_for,
    read_key,
    validate_env_name,
    validate_url,
)

T = TypeVar("T")
P = TypeVar("P")

FIRST_WAIT, GROWTH, MAX_WAIT = 0.25, 1.4, 30.0
"""Seconds before the first retry, the factor of each further wait, and the maximum in seconds."""

MAX_RETRY_S = 300.0
"""Seconds after the first fault during which a call is retried; slow faults get fewer retries."""

OVERTAKEN, MAX_OVERTAKEN = 3, 10
"""Number of refusals while other requests are accepted, after which a refusal does not count for
the rate, and after which a request may fail for good.
"""

ParseResponse = Callable[[Any, float], T]
"""Parses a response, given its seconds including retries; `ValueError` and the like cause a retry.
"""

SendCall = Callable[[Call, Any], Awaitable[Any]]
"""Sends a call once and returns its answer; the second argument takes the pieces of the answer."""


@dataclass(slots=True)
class CallFailures:
    """Failed attempts of one call, and when it may be repeated.

    Attributes:
        limits, throttle: Of the client; the throttle records the refusals.
        times: Number of failed attempts.
        refused: Number of attempts refused by a rate limit.
        first_refusal, first_fault: Times of the first of these and of the first other failure, as
            of `time.monotonic`.
        overtaken: Number of refusals although the server had accepted other requests since the
            previous one.
        last: Error of the last attempt.
    """

    limits: Limits
    throttle: AdaptiveThrottle
    times: int = 0
    refused: int = 0
    first_refusal: float = 0.0
    first_fault: float = math.inf
    overtaken: int = 0
    _accepted: int = 0
    last: RequestError | None = None

    def add(self, error: RequestError, sent: float) -> float | None:
        """Count a failed attempt, sent at `sent`; return the seconds until a retry; `None`: never.

        After a refusal this is the minimum; afterwards the throttle decides.
        """
        self.times, self.last = self.times + 1, error
        now = time.monotonic()
        if isinstance(error, RateLimited):
            return self._add_refusal(error, sent, now)
        self.first_fault = min(self.first_fault, now)
        faults = self.times - self.refused
        late = now - self.first_fault > MAX_RETRY_S
        if not error.passing or faults > self.limits.retries or late:
            return None
        return max(error.after or 0.0, random_wait(GROWTH ** (faults - 1)))

    def _add_refusal(self, error: RateLimited, sent: float, now: float) -> float | None:
        if not self.refused:
            self.first_refusal = now
        elif self.throttle.accepted > self._accepted:
            self.overtaken += 1
        self.refused, self._accepted = self.refused + 1, self.throttle.accepted
        if not error.passing:
            return None
        self.throttle.record_refusal(sent, error.after, self.overtaken > OVERTAKEN)
        limit = self.limits.rate_limit_timeout
        # A request refused again and again while others are accepted may never succeed, for
        # example one larger than a token limit.
        hopeless = self.overtaken >= MAX_OVERTAKEN and now - self.first_refusal >= limit
        if (error.after or 0.0) > limit or hopeless or now >= self.deadline():
            self.give_up()
            return None
        # Back off behind other requests, exponentially in how often this one was overtaken.
        return max(error.after or 0.0, random_wait(2.0**self.overtaken))

    def deadline(self) -> float:
        """Return when `Limits.rate_limit_timeout` ends if nothing is accepted until then.

        It begins anew when the server accepts another request, since this one has to wait its turn.
        """
        if not self.refused:
            return math.inf
        return max(self.first_refusal, self.throttle.last_accepted) + self.limits.rate_limit_timeout

    def give_up(self) -> RequestError:
        """Mark the last error, a refusal, as final and return it."""
        assert self.last
        limit = f"{self.limits.rate_limit_timeout:g} s (limits.rate_limit_timeout)"
        self.last.add_words(f"no retry after {limit}")
        # An overtaken request does not imply that others will fail.
        self.last.passing, self.last.general = False, self.overtaken < MAX_OVERTAKEN
        return self.last


def random_wait(factor: float) -> float:
    """Return the seconds of a wait: spread at random, so that requests do not return together."""
    return min(MAX_WAIT, FIRST_WAIT * factor) * random.SystemRandom().uniform(0.5, 1.0)


class RetryingClient:
    """Makes calls to one model, with retries.

    Args:
        label: The server's name in messages.
        turns: Rate limiter.
        throttle: Adaptive rate accepted by the server.

    Attributes:
        repeated: Number of retries so far.
    """

    def __init__(self, label: str, turns: RateLimiter, throttle: AdaptiveThrottle) -> None:
        self.label, self.turns, self.throttle, self.repeated = label, turns, throttle, 0

    async def __call__(
        self,
        send: SendCall,
        call: Call,
        read: ParseResponse[T],
        emit: Callable[[P], None] | None = None,
    ) -> T:
        """Return the parsed answer of a call.

        Args:
            send: Sends it once.
            call: Call to make.
            read: Parses the answer.
            emit: Takes the pieces of the answer; there are no retries after the first one.

        Raises:
            RequestError: The call failed for good.
        """
        failed = CallFailures(self.turns.limits, self.throttle)
        try:
            async with asyncio.timeout(None) if call.timeout else nullcontext() as clock:
                return await self._attempt_call(send, call, read, emit, failed, clock)
        except TimeoutError:
            last = f"; {failed.times} attempts; last error: {failed.last}" if failed.last else ""
            if not last and (wait := self.throttle.remaining_pause) > 0:
                last = f"; the server asks to wait {wait:.0f} s (Retry-After)"
            raise RequestTimeout(
                f"{self.label}: no response within {call.timeout:g} s{last}"
            ) from None

    async def _attempt_call(
        self,
        send: SendCall,
        call: Call,
        read: ParseResponse[T],
        emit: Callable[[P], None] | None,
        failed: CallFailures,
        clock: asyncio.Timeout | None,
    ) -> T:
        """Send a call until it is answered; every 429 and every fault is handled here."""
        start = sent = 0.0
        started = False

        def note_start(piece: P) -> None:
            nonlocal started
            started = True
            if emit:
                emit(piece)

        while True:
            if call.timeout and self.throttle.remaining_pause >= call.timeout:
                raise TimeoutError
            try:
                async with ConcurrencySlot(
                    self.turns, self.throttle, call.tokens, failed.deadline
                ) as sent:
                    if not start:
                        start = sent
                        if clock and call.timeout:
                            clock.reschedule(start + call.timeout)
                    content = await send(call, note_start)
                self.throttle.record_success(sent)
                seconds = time.monotonic() - start
                return parse_response(self.label, content, partial(read, content, seconds))
            except BadRequest:
                self.throttle.record_success(sent)
                raise
            except (DeadlineExceeded, RequestError) as error:
                if isinstance(error, RequestError):
                    failure, wait = error, failed.add(error, sent)
                else:
                    failure, wait = failed.give_up(), None
                if wait is None or started:
                    if failed.times > 1:
                        failure.add_words(f"{failed.times} attempts")
                    raise failure from None
            if call.timeout and time.monotonic() + wait >= start + call.timeout:
                raise TimeoutError
            self.repeated += 1
            await asyncio.sleep(wait)


MakeCall = Callable[..., Awaitable[Any]]
"""Makes a call on open connections: `call, read`, and for a stream `parser_class, emit`."""


class HttpClient:
    """Posts JSON to one URL, with a key read from the environment when needed.

    It can be pickled and used from several threads, beside a running event loop, and after a fork.

    Args:
        name: The server's name in messages.
        url: URL to post to.
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        limits: Rate, concurrency and timeout limits.
        header, scheme: Header of the key, and the prefix of its value.

    Attributes:
        turns: Rate limiter.
        throttle: Adaptive rate accepted by the server.
        repeated: Number of retries.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        name: str,
        url: str,
        api_key_env: str | None,
        limits: Limits | None = None,
        header: str = "Authorization",
        scheme: str = "Bearer ",
    ) -> None:
        self.name, self.url = name, validate_url(url)
        self.api_key_env = validate_env_name(api_key_env)
        self.limits = limits or Limits()
        self.header, self.scheme = header, scheme
        self.turns = RateLimiter(self.limits)
        self.throttle = self.turns.get_throttle(name)
        self.repeated = 0

    def for_model(self, name: str) -> "HttpClient":
        """Return a client for another model of the server; both share the limits.

        The adaptive rate is learned per model.
        """
        other = object.__new__(type(self))
        throttle = self.turns.get_throttle(name)
        other.__dict__.update(self.__dict__, name=name, repeated=0, throttle=throttle)
        return other

    @property
    def label(self) -> str:
        """The server's name and URL, for messages."""
        return f"{self.name} ({self.url})"

    def read_api_key(self) -> str | None:
        """Return the API key.

        Raises:
            UserError: The environment variable is not set.
        """
        return read_key(self.label, self.api_key_env)

    def check(self) -> None:
        """Check the key and the proxy's URL.

        Raises:
            UserError: There is no key, or the proxy's URL is invalid.
        """
        proxy_for(self.url)
        self.read_api_key()

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[MakeCall]:
        """Open connections, on the event loop of `swarm._util.threads.shared_event_loop`.

        Raises:
            UserError: There is no key.
        """
        import aiohttp

        key, proxy = self.read_api_key(), proxy_for(self.url)
        headers = {self.header: f"{self.scheme}{key}"} if key else {}
        retrying = RetryingClient(self.label, self.turns, self.throttle)
        async with aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(
                total=self.limits.timeout, sock_connect=self.limits.connect_timeout
            ),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            connections = HttpConnections(
                session, self.label, self.url, proxy, key, self.api_key_env, self.limits
            )

            def make_call(
                call: Call,
                read: ParseResponse[T],
                parser_class: Callable[[], StreamParser[P]] | None = None,
                emit: Callable[[P], None] | None = None,
            ) -> Awaitable[T]:
                post = connections.post
                send = partial(connections.stream, parser_class) if parser_class else post
                return retrying(send, call, read, emit)

            try:
                yield make_call
            finally:
                self.repeated += retrying.repeated

    def run_calls(self, calls: Sequence[Call], read: Callable[[int, Any], T]) -> list[T]:
        """Make all calls and parse the answers as they arrive; return the results in order.

        The first call that fails for good cancels the others.

        Args:
            calls: Calls to make.
            read: Parses the n-th call's response, or its `BadRequest`, in another thread; raises
                what is to be raised.

        Raises:
            RequestError: A call failed for good; the class gives the kind of failure.
        """
        return shared_event_loop().run(self._run_concurrently(calls, read)) if calls else []

    async def _run_concurrently(
        self, calls: Sequence[Call], read: Callable[[int, Any], T]
    ) -> list[T]:
        async def run(number: int, call: Call) -> T:
            try:
                found: T = await make_call(call, lambda content, _: read(number, content))
                return found
            except BadRequest as error:
                return read(number, error)

        try:
            async with self.open_session() as make_call, asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(*numbered)) for numbered in enumerate(calls)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def stream(
        self, call: Call, parser_class: Callable[[], StreamParser[P]], read: ParseResponse[T]
    ) -> Generator[P, None, T]:
        """Make one call and yield its answer in pieces; a single piece if the server cannot stream.

        There are no retries after the first piece. Closing the generator cancels the call.

        Args:
            call: Call to make.
            parser_class: Creates a stream parser; each retry gets a new one.
            read: Parses the complete response.

        Raises:
            RequestError: The call failed for good; the class gives the kind of failure.
        """

        async def run(emit: Callable[[P], None]) -> T:
            async with self.open_session() as make_call:
                found: T = await make_call(call, read, parser_class, emit)
                return found

        return (yield from shared_event_loop().stream_items(run))
