"""JSON requests to one server: concurrent, rate-limited, with timeouts, retries and streaming.

`HttpClient` is the public class; its base `RetryingClient` repeats a call until its answer can be
parsed. API keys never appear in messages.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from swarm._util.threads import shared_event_loop
from swarm.models.http_errors import (
    BadRequest,
    ConnectionFailed,
    RateLimited,
    RequestError,
    RequestTimeout,
    ServerFault,
    error_from_response,
    to_one_line,
)
from swarm.models.rate_limit import (
    AdaptiveThrottle,
    DeadlineExceeded,
    Limits,
    RateLimiter,
)
from swarm.models.transport import (
    EventStreamParser,
    describe_connection_error,
    encode_body,
    parse_json,
    parse_response,
    proxy_for,
    read_key,
    validate_env_name,
    validate_url,
)

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

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

MAX_RESPONSE_BYTES = 2**28
"""Maximum size of a response: twice that of 100,000 tokens with 20 log probabilities each."""

MIN_KEY_LENGTH = 8
"""Minimum length of keys to redact; shorter ones would match ordinary text."""


class Call(NamedTuple):
    """One request.

    Attributes:
        body: JSON request body.
        timeout: Seconds for the answer including retries, from when the client's limits let it
            start; `None`: only `Limits.timeout` and `Limits.retries` bound it.
    """

    body: Any
    timeout: float | None = None


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
        label: The model's name and server in messages.
        turns: Rate limiter.

    Attributes:
        throttle: Adaptive rate accepted by the server for this model.
        repeated: Number of retries so far.
    """

    def __init__(self, label: str, turns: RateLimiter) -> None:
        self.label, self.turns, self.repeated = label, turns, 0
        self.throttle = turns.get_throttle(label)

    async def call(
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
        if call.timeout is None:
            return await self._attempt_call(send, call, read, emit, failed)
        try:
            async with asyncio.timeout(None) as clock:
                return await self._attempt_call(send, call, read, emit, failed, clock)
        except TimeoutError:
            last = f"; {failed.times} attempts; last error: {failed.last}" if failed.last else ""
            if not last and (wait := self.throttle.remaining_pause) > 0:
                last = f"; the server asks to wait {wait:.0f} s (Retry-After)"
            words = f"{self.label}: no response within {call.timeout:g} s{last}"
            raise RequestTimeout(words) from None

    async def _attempt_call(
        self,
        send: SendCall,
        call: Call,
        read: ParseResponse[T],
        emit: Callable[[P], None] | None,
        failed: CallFailures,
        clock: asyncio.Timeout | None = None,
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
                sent = await self.turns.acquire(self.throttle, failed.deadline)
                try:
                    if not start:
                        start = sent
                        if clock and call.timeout:
                            clock.reschedule(start + call.timeout)
                    content = await send(call, note_start)
                finally:
                    self.turns.release(self.throttle)
                self.throttle.record_success(sent)
                seconds = time.monotonic() - start
                return parse_response(self.label, read, content, seconds)
            except BadRequest:
                self.throttle.record_success(sent)
                raise
            except DeadlineExceeded:
                error, wait = failed.give_up(), None
            except RequestError as failure:
                error, wait = failure, failed.add(failure, sent)
            if wait is None or started:
                if failed.times > 1:
                    error.add_words(f"{failed.times} attempts")
                raise error from None
            if call.timeout and time.monotonic() + wait >= start + call.timeout:
                raise TimeoutError
            self.repeated += 1
            await asyncio.sleep(wait)


class HttpClient(RetryingClient):
    """Posts JSON to one URL, with a key read from the environment when needed.

    It can be pickled and used from several threads, beside a running event loop, and after a fork.

    Args:
        name: The server's name in messages.
        url: URL to post to.
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        limits: Rate, concurrency and timeout limits.
        header, scheme: Header of the key, and the prefix of its value.

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
        self.url, self.api_key_env = validate_url(url), validate_env_name(api_key_env)
        self.limits = limits or Limits()
        self.header, self.scheme = header, scheme
        super().__init__(f"{name} ({url})", RateLimiter(self.limits))

    def for_model(self, name: str) -> "HttpClient":
        """Return a client for another model of the server; both share the limits.

        The adaptive rate is learned per model.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        RetryingClient.__init__(other, f"{name} ({self.url})", self.turns)
        return other

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
        headers = {self.header: f"{self.scheme}{key}"} if key else {}
        async with aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(
                total=self.limits.timeout, sock_connect=self.limits.connect_timeout
            ),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield HttpSession(self, session, proxy, key)

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

        # Calls that wait for a retry count, so that a refusal holds back the others.
        begun = asyncio.Semaphore(self.limits.concurrency)

        async def run(session: HttpSession, number: int, call: Call) -> T:
            async with begun:
                try:
                    return await session.call(call, lambda content, _: read(number, content))
                except BadRequest as error:
                    return read(number, error)

        async def run_all() -> list[T]:
            try:
                async with self.open_session() as session, asyncio.TaskGroup() as group:
                    runs = [run(session, *numbered) for numbered in enumerate(calls)]
                    tasks = [group.create_task(one) for one in runs]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return shared_event_loop().run(run_all()) if calls else []

    def stream(
        self, call: Call, parser_class: Callable[[], Any], read: ParseResponse[T]
    ) -> Generator[P, None, T]:
        """Make one call and yield its answer in pieces; a single piece if the server cannot stream.

        There are no retries after the first piece. Closing the generator cancels the call.

        Args:
            call: Call to make.
            parser_class: Creates a stream parser such as `swarm.models.openai.StreamedCompletion`;
                each retry gets a new one.
            read: Parses the complete response.

        Raises:
            RequestError: The call failed for good; the class gives the kind of failure.
        """

        async def run(emit: Callable[[P], None]) -> T:
            async with self.open_session() as session:
                return await self.call(partial(session.stream, parser_class), call, read, emit)

        return (yield from shared_event_loop().stream_items(run))


class HttpSession:
    """Open connections of a client.

    Args:
        client: The client.
        session: Session with the key in its headers, and the timeouts.
        proxy: Proxy to use.
        key: Key to redact from messages and answers.
    """

    def __init__(
        self, client: HttpClient, session: "ClientSession", proxy: str | None, key: str | None
    ) -> None:
        import aiohttp

        self.client, self.label, self._key = client, client.label, key
        self._post = partial(session.post, client.url, proxy=proxy, allow_redirects=False)
        self._faults = aiohttp.ClientError, OSError

    def call(self, call: Call, read: ParseResponse[T]) -> Awaitable[T]:
        """Return the parsed answer of a call; see `RetryingClient.call`."""
        return self.client.call(self.send, call, read)

    def send(self, call: Call, emit: object) -> Awaitable[Any]:
        """Send a call once and return the server's JSON response.

        Raises:
            RequestError: The request failed; the class gives the kind of failure.
        """
        return self._exchange(call, self._read_response)

    async def stream(
        self, parser_class: Callable[[], Any], call: Call, emit: Callable[[P], None]
    ) -> Any:
        """Send a call once, emit the pieces of its answer, and return the complete response.

        Raises:
            RequestError: The request failed or the answer was cut off.
        """
        parser = parser_class()

        def take(content: Any) -> None:
            for piece in parse_response(self.label, parser.parse_event, content):
                emit(piece)

        try:
            complete = await self._exchange(call, partial(self._read_events, take))
        except (ConnectionFailed, RequestTimeout):
            if not parser.is_complete:
                raise
        else:
            if not (complete or parser.is_complete):
                raise ServerFault(
                    f"{self.label}: the connection closed before the response was complete"
                )
        pieces, response = parser.finish()
        for piece in pieces:
            emit(piece)
        # Redact again: a key split over two events is visible only here.
        return json.loads(self._redact(json.dumps(response)))

    async def _exchange(self, call: Call, read: Callable[["ClientResponse"], Awaitable[T]]) -> T:
        try:
            async with self._post(data=encode_body(call.body)) as response:
                return await read(response)
        except self._faults as error:
            raise self._connection_error(error) from None

    async def _read_response(self, response: "ClientResponse", first: bytes = b"") -> Any:
        """Read and parse the body of a response, after its first part.

        Raises:
            RequestError: It is an error, or not JSON.
        """
        parts = [first]
        while part := await response.content.readany():
            parts.append(part)
            self._check_size(response)
        text = self._redact(b"".join(parts).decode("utf-8", "replace"))
        if response.status < 300:
            return parse_json(self.label, "the response", text)
        try:
            content = parse_json("", "", text)
        except ServerFault:
            content = text
        names = ("Retry-After", "Retry-After-Ms", "Location")
        headers = {name: self._redact(response.headers.get(name, "")) for name in names}
        variable = self.client.api_key_env
        raise error_from_response(self.label, response.status, headers, content, variable)

    async def _read_events(self, take: Callable[[Any], None], response: "ClientResponse") -> bool:
        """Pass on the JSON of each event, or of the response if it is not a stream.

        Returns:
            True if the server marked the end of the stream.
        """
        events, chunks, first = EventStreamParser(), response.content.iter_any(), b""
        async for first in chunks:
            if first.strip():
                break
        # No line of an event stream begins with a brace.
        if response.status >= 300 or first.lstrip().startswith(b"{"):
            take(await self._read_response(response, first))
            return True
        if self._dispatch_events(events.feed(first), take):
            return True
        async for chunk in chunks:
            self._check_size(response)
            if self._dispatch_events(events.feed(chunk), take):
                return True
        # Some servers omit the empty line after the last event.
        return self._dispatch_events(events.feed(b"\n\n"), take)

    def _check_size(self, response: "ClientResponse") -> None:
        if response.content.total_bytes > MAX_RESPONSE_BYTES:
            size = f"{MAX_RESPONSE_BYTES / 2**20:.0f} MiB"
            raise BadRequest(f"{self.label}: the response exceeds {size}")

    def _dispatch_events(
        self, events: Iterator[tuple[str, str]], take: Callable[[Any], None]
    ) -> bool:
        """Pass on the events; return True at the end marker."""
        for name, data in events:
            if data.strip() == "[DONE]":
                return True
            content = parse_json(self.label, "an event", self._redact(data))
            take({"error": content} if name == "error" else content)
        return False

    def _redact(self, text: str) -> str:
        """Hide the key, which a server may repeat; it must not be stored anywhere."""
        if self._key is None or len(self._key) < MIN_KEY_LENGTH:
            return text
        return text.replace(self._key, "***")

    def _connection_error(self, error: Exception) -> RequestError:
        """Return the error for a failed connection."""
        import aiohttp

        limits = self.client.limits
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            timeout = f"{limits.connect_timeout:g} s (limits.connect_timeout)"
            return RequestTimeout(f"{self.label}: no connection within {timeout}")
        if isinstance(error, TimeoutError):
            timeout = f"{limits.timeout:g} s (limits.timeout)"
            return RequestTimeout(f"{self.label}: no response within {timeout}")
        words = to_one_line(self._redact(describe_connection_error(error)))
        if isinstance(error, aiohttp.ClientConnectorError):
            words += " (is the server running, and is this its URL?)"
        return ConnectionFailed(f"{self.label}: the connection failed: {words}")
