"""JSON requests to one server: concurrent, rate-limited, with timeouts, retries and streaming.

`HttpClient` is the public class; `RetryingClient` makes one call and retries it until its answer
can be parsed. API keys never appear in messages.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from swarm._util.threads import shared_event_loop
from swarm.models.http_errors import (
    BadRequest,
    ConnectionFailed,
    MalformedResponse,
    RateLimited,
    RequestError,
    RequestTimeout,
    ServerFault,
    to_one_line,
)
from swarm.models.rate_limit import (
    AdaptiveThrottle,
    ConcurrencySlot,
    DeadlineExceeded,
    Limits,
    RateLimiter,
)
from swarm.models.transport import (
    HttpTransport,
    proxy_for,
    read_key,
    validate_env_name,
    validate_url,
)

T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

FIRST_WAIT, GROWTH, MAX_WAIT = 0.25, 1.4, 30.0
"""Seconds before the first retry, the factor of each further wait, and the maximum in seconds."""

MAX_RETRY_S = 300.0
"""Seconds after the first fault during which a call is retried; slow faults get fewer retries."""

OVERTAKEN, MAX_OVERTAKEN = 3, 10
"""Number of refusals while other requests are accepted, after which a refusal does not count for
the rate, and after which a request may fail for good.
"""


class Call(NamedTuple):
    """One request.

    Attributes:
        body: JSON request body.
        tokens: Estimated number of tokens; for `Limits.tokens_per_minute`.
        timeout: Seconds for the answer including retries, from when the client's limits let it
            start; `None`: only `Limits.timeout` and `Limits.retries` bound it.
        data: The body in its encoded form, if several calls share it; `None`: not encoded yet.
    """

    body: Any
    tokens: float = 0.0
    timeout: float | None = None
    data: bytes | None = None


ParseResponse = Callable[[Any, float], T]
"""Parses a response, given its seconds including retries; `ValueError` and the like cause a retry.
"""


class Transport(Protocol):
    """Sends a body and returns the answer."""

    @property
    def started(self) -> bool:
        """True once the caller has received a part of the answer; then there are no retries."""
        ...

    async def __call__(self, body: Any) -> Any:
        """Send one request and return its answer."""
        ...


class StreamParser(Protocol[P_co]):
    """Turns the events of a stream into pieces."""

    @property
    def is_complete(self) -> bool:
        """True if the answer is complete even if the connection ends now."""
        ...

    def parse_event(self, content: Any) -> Sequence[P_co]:
        """Return the pieces in one event; raise `ValueError` or similar if it is malformed."""
        ...

    def flush_pending(self) -> Sequence[P_co]:
        """Return the pieces that were held back until the end of the stream."""
        ...

    def assemble_response(self) -> Any:
        """Return the equivalent non-streamed response."""
        ...


class StreamingTransport(Generic[P]):
    """Transport that emits the pieces of an answer as they arrive."""

    def __init__(
        self, post: HttpTransport, reader: Callable[[], StreamParser[P]], emit: Callable[[P], None]
    ) -> None:
        self.post, self.reader, self.emit = post, reader, emit
        self.started = False

    async def __call__(self, body: Any) -> Any:
        """Return the complete response after all pieces.

        Raises:
            RequestError: The request failed or the answer was cut off.
        """
        reader = self.reader()

        def handle_event(content: Any) -> None:
            pieces = parse_response(self.post.label, content, partial(reader.parse_event, content))
            self._emit_pieces(pieces)

        try:
            complete = await self.post.stream_events(body, handle_event)
        except (ConnectionFailed, RequestTimeout):
            if not reader.is_complete:
                raise
        else:
            if not (complete or reader.is_complete):
                raise ServerFault(
                    f"{self.post.label}: the connection closed before the response was complete"
                )
        self._emit_pieces(reader.flush_pending())
        # Redact again: a key split over two events is visible only here.
        return self.post.redact_key(reader.assemble_response())

    def _emit_pieces(self, pieces: Sequence[P]) -> None:
        for piece in pieces:
            self.started = True
            self.emit(piece)


class RetryingClient:
    """Makes calls to one model, with retries.

    Args:
        label: The server's name in messages.
        turns: Rate limiter.
        throttle: Adaptive rate accepted by the server.

    Attributes:
        repeated: Number of retries so far.
    """

    def __init__(
        self, label: str, turns: RateLimiter, throttle: AdaptiveThrottle | None = None
    ) -> None:
        self.label, self.turns, self.repeated = label, turns, 0
        self.throttle = throttle or AdaptiveThrottle()

    async def __call__(self, exchange: Transport, call: Call, read: ParseResponse[T]) -> T:
        """Return the parsed answer of a call.

        Raises:
            RequestError: The call failed for good.
        """
        failed = CallFailures()
        if call.timeout is None:
            return await self._attempt_call(exchange, call, read, failed)
        try:
            async with asyncio.timeout(None) as clock:
                return await self._attempt_call(exchange, call, read, failed, clock)
        except TimeoutError:
            last = f"; {failed.summary}" if failed.times else ""
            if not last and (wait := self.throttle.remaining_pause) > 0:
                last = f"; the server asks to wait {wait:.0f} s (Retry-After)"
            raise RequestTimeout(
                f"{self.label}: no response within {call.timeout:g} s{last}"
            ) from None

    async def _attempt_call(
        self,
        exchange: Transport,
        call: Call,
        read: ParseResponse[T],
        failed: "CallFailures",
        clock: asyncio.Timeout | None = None,
    ) -> T:
        """Send a call until it is answered; every 429 and every fault is handled here."""
        start = sent = 0.0
        while True:
            try:
                async with self._acquire_slot(call, failed) as sent:
                    if not start:
                        start = sent
                        if clock and call.timeout:
                            clock.reschedule(start + call.timeout)
                    content = await exchange(call.body if call.data is None else call.data)
                self.throttle.record_success(sent)
                seconds = time.monotonic() - start
                return parse_response(self.label, content, partial(read, content, seconds))
            except DeadlineExceeded:
                raise failed.build_final_error(self._rate_limit_timeout).with_attempt_count(
                    failed.times
                ) from None
            except BadRequest:
                self.throttle.record_success(sent)
                raise
            except RequestError as error:
                failed.add(error, self.throttle)
                wait = (
                    failed.rate_limit_delay(sent, self.throttle, self._rate_limit_timeout)
                    if isinstance(error, RateLimited)
                    else self._retry_delay(error, failed)
                )
                if wait is None or exchange.started:
                    raise error.with_attempt_count(failed.times) from None
            if call.timeout and time.monotonic() + wait >= start + call.timeout:
                raise TimeoutError
            self.repeated += 1
            await asyncio.sleep(wait)

    def _acquire_slot(self, call: Call, failed: "CallFailures") -> ConcurrencySlot:
        """Return a concurrency slot and the start time; see `RateLimiter.acquire_slot`.

        Raises:
            TimeoutError: The server requested a pause longer than the call's timeout.
            DeadlineExceeded: The server accepted nothing for `Limits.rate_limit_timeout`.
        """
        if call.timeout and self.throttle.remaining_pause >= call.timeout:
            raise TimeoutError
        end = partial(failed.retry_deadline, self._rate_limit_timeout, self.throttle)
        return self.turns.acquire_slot(self.throttle, call.tokens, end)

    @property
    def _rate_limit_timeout(self) -> float:
        return self.turns.limits.rate_limit_timeout

    def _retry_delay(self, error: RequestError, failed: "CallFailures") -> float | None:
        """Return the seconds until a retry after a fault, or `None` if there must be none."""
        faults = failed.times - failed.limited
        late = time.monotonic() - failed.first_fault > MAX_RETRY_S
        if not error.passing or faults > self.turns.limits.retries or late:
            return None
        return max(error.after or 0.0, random_wait(GROWTH ** (faults - 1)))


def random_wait(factor: float) -> float:
    """Return the seconds of a wait: spread at random, so that requests do not return together."""
    return min(MAX_WAIT, FIRST_WAIT * factor) * random.SystemRandom().uniform(0.5, 1.0)


@dataclass
class CallFailures:
    """Failed attempts of one call.

    Attributes:
        times: Number of failed attempts.
        first_fault: Time of the first other failure, as of `time.monotonic`.
        limited: Number of attempts refused by a rate limit.
        first: Time of the first such refusal.
        overtaken: Number of such refusals although the server had accepted other requests since the
            previous one.
        last: Error of the last attempt.
    """

    times: int = 0
    first_fault: float = math.inf
    limited: int = 0
    first: float = 0.0
    overtaken: int = 0
    _accepted: int = 0
    last: RequestError | None = None

    @property
    def summary(self) -> str:
        """Number of attempts and the last error."""
        return f"{self.times} attempts; last error: {self.last}"

    def add(self, error: RequestError, throttle: AdaptiveThrottle) -> None:
        """Count a failed attempt."""
        self.times, self.last = self.times + 1, error
        if isinstance(error, RateLimited):
            if not self.limited:
                self.first = time.monotonic()
            elif throttle.accepted > self._accepted:
                self.overtaken += 1
            self.limited, self._accepted = self.limited + 1, throttle.accepted
        else:
            self.first_fault = min(self.first_fault, time.monotonic())

    def is_exhausted(self, limit: float, throttle: AdaptiveThrottle) -> bool:
        """Return whether `limit` seconds of refusals have passed.

        The time restarts when the server accepts another request, since this one has to wait its
        turn. A request refused again and again while others are accepted may never succeed, for
        example one larger than a token limit; it is given up as well.
        """
        now = time.monotonic()
        overtaken = self.overtaken >= MAX_OVERTAKEN and now - self.first >= limit
        return overtaken or now >= self.retry_deadline(limit, throttle)

    def retry_deadline(self, limit: float, throttle: AdaptiveThrottle) -> float:
        """Return when `limit` seconds of refusals end if nothing is accepted until then."""
        return max(self.first, throttle.last_accepted) + limit if self.limited else math.inf

    def rate_limit_delay(
        self, sent: float, throttle: AdaptiveThrottle, limit: float
    ) -> float | None:
        """Return the seconds until a rate-limited call may be retried; `None`: never.

        This is the minimum; afterwards the throttle decides.

        Args:
            sent: Time when the call was sent, as of `time.monotonic`.
            throttle: Records the refusal.
            limit: `Limits.rate_limit_timeout`.
        """
        error = self.last
        assert error
        if not error.passing:
            return None
        throttle.record_refusal(sent, error.after, self.overtaken > OVERTAKEN)
        if (error.after or 0.0) > limit or self.is_exhausted(limit, throttle):
            self.build_final_error(limit)
            return None
        # Back off behind other requests, exponentially in how often this one was overtaken.
        return max(error.after or 0.0, random_wait(2.0**self.overtaken))

    def build_final_error(self, limit: float) -> RequestError:
        """Mark the last error as final and return it."""
        error = self.last
        assert error
        error.args = (f"{error}; no retry after {limit:g} s (limits.rate_limit_timeout)",)
        # An overtaken request does not imply that others will fail.
        error.passing, error.general = False, self.overtaken < MAX_OVERTAKEN
        return error


def parse_response(label: str, content: Any, parse: Callable[[], T]) -> T:
    """Apply a parser to a server's response.

    Raises:
        ServerFault: It cannot be parsed. The message is the parser's (`MalformedResponse`) or shows
            the content.
    """
    try:
        return parse()
    except MalformedResponse as error:
        words = to_one_line(str(error))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        words = f"unexpected form: {to_one_line(json.dumps(content, ensure_ascii=False))}"
    raise ServerFault(f"{label}: invalid response: {words}")


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
        self.name, self.url, self.api_key_env = (
            name,
            validate_url(url),
            validate_env_name(api_key_env),
        )
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
    async def open_session(self) -> AsyncIterator["HttpSession"]:
        """Open connections, on the event loop of `swarm._util.threads.shared_event_loop`.

        Raises:
            UserError: There is no key.
        """
        import aiohttp

        key, proxy = self.read_api_key(), proxy_for(self.url)
        retrying = RetryingClient(self.label, self.turns, self.throttle)
        async with aiohttp.ClientSession(
            headers={"Content-Type": "application/json"}
            | ({self.header: f"{self.scheme}{key}"} if key else {}),
            timeout=aiohttp.ClientTimeout(
                total=self.limits.timeout, sock_connect=self.limits.connect_timeout
            ),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            post = HttpTransport(
                session, self.label, self.url, proxy, key, self.api_key_env, self.limits
            )
            try:
                yield HttpSession(retrying, post)
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
        found: dict[int, T] = {}
        waiting = iter(enumerate(calls))

        async def make_call(session: HttpSession, number: int, call: Call) -> T:
            try:
                return await session(call, lambda content, _: read(number, content))
            except BadRequest as error:
                return read(number, error)

        async def run_worker(session: HttpSession) -> None:
            for number, call in waiting:
                found[number] = await make_call(session, number, call)

        async with self.open_session() as session:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.limits.concurrency, len(calls))):
                        group.create_task(run_worker(session))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [found[number] for number in range(len(calls))]

    def stream(
        self, call: Call, reader: Callable[[], StreamParser[P]], read: ParseResponse[T]
    ) -> Generator[P, None, T]:
        """Make one call and yield its answer in pieces; a single piece if the server cannot stream.

        There are no retries after the first piece. Closing the generator cancels the call.

        Args:
            call: Call to make.
            reader: Creates a stream parser; each retry gets a new one.
            read: Parses the complete response.

        Raises:
            RequestError: The call failed for good; the class gives the kind of failure.
        """

        async def run_stream(emit: Callable[[P], None]) -> T:
            async with self.open_session() as session:
                exchange = StreamingTransport(session.post, reader, emit)
                return await session.retrying(exchange, call, read)

        return (yield from shared_event_loop().stream_items(run_stream))


class HttpSession(NamedTuple):
    """Open connections to a server; calling it makes one call."""

    retrying: RetryingClient
    post: HttpTransport

    async def __call__(self, call: Call, read: ParseResponse[T]) -> T:
        """See `RetryingClient.__call__`."""
        return await self.retrying(self.post, call, read)
