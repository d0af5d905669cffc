"""Many JSON requests to one server at once: paced, timed, repeated, and without a leaked key."""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from swarm.errors import UserError
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
from swarm.models.rate_limit import AdaptiveThrottle, DeadlineExceeded, Limits, RateLimiter
from swarm.models.threaded import shared_event_loop
from swarm.models.transport import (
    HttpTransport,
    proxy_for,
    read_key,
    validate_env_name,
    validate_url,
)

# One call to a server, repeated as often as is allowed, until its answer is understood.

T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

FIRST_WAIT, MAX_WAIT = 0.5, 30.0
"""Seconds before the first repetition; they double, up to the longest."""

OVERTAKEN_BEFORE_BACKOFF, MAX_OVERTAKEN = 3, 10
"""Refusals of a request while others are accepted, after which it waits longer than they do, and
may fail for good."""


class Call(NamedTuple):
    """One request.

    Attributes:
        body: What is sent, as JSON.
        tokens: How many tokens it will come to, roughly; for `Limits.tokens_per_minute`.
        timeout: Seconds for the answer with all repetitions, from when our own limits let it go;
            `None`: `Limits.timeout` and `Limits.retries` alone bound it.
    """

    body: Any
    tokens: float = 0.0
    timeout: float | None = None


ParseResponse = Callable[[int, Any, float], T]
"""Makes of the n-th call's answer, and of the seconds that it took with all repetitions, what is
wanted; a `ValueError` or its like: ask again."""

OnBadRequest = Callable[[int, BadRequest], T]
"""Says what the n-th call comes to where the server refuses it, or raises."""


class Transport(Protocol):
    """Sends a body and gives what is answered."""

    @property
    def begun(self) -> bool:
        """Whether a part of the answer is with the caller already: no repetition then."""
        ...

    async def __call__(self, body: Any) -> Any:
        """One answer."""
        ...


class StreamParser(Protocol[P_co]):
    """Makes pieces of the events of a stream."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole even if nothing more comes."""
        ...

    def parse_event(self, content: Any) -> Sequence[P_co]:
        """The pieces in one event; a `ValueError` or its like: it is not as agreed."""
        ...

    def flush_pending(self) -> Sequence[P_co]:
        """The pieces that were held back until it was certain that nothing more comes."""
        ...

    def assemble_response(self) -> Any:
        """What the server would have said at once."""
        ...


class StreamingTransport(Generic[P]):
    """An exchange whose answer comes in pieces, each handed over at once."""

    def __init__(
        self, post: HttpTransport, reader: Callable[[], StreamParser[P]], emit: Callable[[P], None]
    ) -> None:
        self.post, self.reader, self.emit = post, reader, emit
        self.begun = False

    async def __call__(self, body: Any) -> Any:
        """The whole, after all pieces.

        Raises:
            RequestError: There is none; an answer that broke off is none.
        """
        reader = self.reader()

        def handle_event(content: Any) -> None:
            self._emit_pieces(parse_response(self.post.who, reader.parse_event, content))

        try:
            ended = await self.post.stream_events(body, handle_event)
        except (ConnectionFailed, RequestTimeout):
            if not reader.is_complete:
                raise
        else:
            if not (ended or reader.is_complete):
                raise ServerFault(f"{self.post.who}: the answer broke off")
        self._emit_pieces(reader.flush_pending())
        # A key that came in two halves is whole here.
        return self.post.redact_key(reader.assemble_response())

    def _emit_pieces(self, pieces: Sequence[P]) -> None:
        for piece in pieces:
            self.begun = True
            self.emit(piece)


@dataclass
class RetryingClient(Generic[T]):
    """Makes calls to one server.

    Attributes:
        who: The server, as messages call it.
        turns: When a request may go.
        read: Is handed each answer.
        refused: What a call comes to that the server refuses; `None`: that is an error.
        throttle: The rate that the server accepts.
        repeated: Repetitions so far.
    """

    who: str
    turns: RateLimiter
    read: ParseResponse[T]
    refused: OnBadRequest[T] | None
    throttle: AdaptiveThrottle = field(default_factory=AdaptiveThrottle)
    repeated: int = 0

    async def __call__(self, exchange: Transport, number: int, call: Call) -> T:
        """What the call comes to.

        Raises:
            RequestError: It failed for good.
        """
        failed = CallFailures()
        if call.timeout is None:
            return await self._attempt_call(exchange, number, call, failed)
        try:
            async with asyncio.timeout(None) as clock:
                return await self._attempt_call(exchange, number, call, failed, clock)
        except TimeoutError:
            last = f"; {failed.summary}" if failed.times else ""
            if not last and (wait := self.throttle.remaining_pause) > 0:
                last = f"; the server asks to wait {wait:.0f} s (Retry-After)"
            raise RequestTimeout(f"{self.who}: no answer within {call.timeout:g} s{last}") from None

    async def _attempt_call(
        self,
        exchange: Transport,
        number: int,
        call: Call,
        failed: "CallFailures",
        clock: asyncio.Timeout | None = None,
    ) -> T:
        began = sent = 0.0
        while True:
            try:
                async with self._acquire_place(call, failed) as sent:
                    if not began:
                        began = sent
                        if clock and call.timeout:
                            clock.reschedule(began + call.timeout)
                    content = await exchange(call.body)
                self.throttle.record_success(sent)
                return parse_response(
                    self.who, self.read, number, content, time.monotonic() - began
                )
            except DeadlineExceeded:
                raise failed.build_final_error(self._rate_limit_timeout).with_attempt_count(
                    failed.times
                ) from None
            except BadRequest as error:
                self.throttle.record_success(sent)
                if self.refused is None:
                    raise
                return self.refused(number, error)
            except RequestError as error:
                failed.add(error, self.throttle)
                wait = (
                    failed.rate_limit_delay(sent, self.throttle, self._rate_limit_timeout)
                    if isinstance(error, RateLimited)
                    else self._retry_delay(error, failed.times - failed.limited - 1)
                )
                if wait is None or exchange.begun:
                    raise error.with_attempt_count(failed.times) from None
            if call.timeout and time.monotonic() + wait >= began + call.timeout:
                raise TimeoutError
            self.repeated += 1
            await asyncio.sleep(wait)

    def _acquire_place(
        self, call: Call, failed: "CallFailures"
    ) -> AbstractAsyncContextManager[float]:
        """A place for the call, and the time at which it goes; see `Turns.place`.

        Raises:
            TimeoutError: The server has asked to wait longer than the call's answer may take.
            TooLate: The server has accepted nothing for `Limits.rate_limit_timeout`.
        """
        if call.timeout and self.throttle.remaining_pause >= call.timeout:
            raise TimeoutError
        end = partial(failed.retry_deadline, self._rate_limit_timeout, self.throttle)
        return self.turns.acquire_place(self.throttle, call.tokens, end)

    @property
    def _rate_limit_timeout(self) -> float:
        return self.turns.limits.rate_limit_timeout

    def _retry_delay(self, error: RequestError, attempt: int) -> float | None:
        """Seconds until the call may be repeated; `None` if it may not."""
        if not error.passing or attempt >= self.turns.limits.retries:
            return None
        spread = random.SystemRandom().uniform(0.5, 1.0)
        if error.after is None:
            return float(min(MAX_WAIT, FIRST_WAIT * 2**attempt) * spread)
        self.throttle.pause_for(error.after)
        return max(error.after, FIRST_WAIT * spread)


@dataclass
class CallFailures:
    """What the attempts of one call came to.

    Attributes:
        times: Attempts that failed.
        limited: Those that met a rate limit.
        first: When it was met first, as `time.monotonic` has it.
        overtaken: How often it was met though the server had accepted other requests since the
            time before.
        last: What the last one came to.
    """

    times: int = 0
    limited: int = 0
    first: float = 0.0
    overtaken: int = 0
    _accepted: int = 0
    last: RequestError | None = None

    @property
    def summary(self) -> str:
        """How often was asked, and what was said at last."""
        return f"asked {self.times} times, and told at last: {self.last}"

    def add(self, error: RequestError, throttle: AdaptiveThrottle) -> None:
        """Count one."""
        self.times, self.last = self.times + 1, error
        if isinstance(error, RateLimited):
            if not self.limited:
                self.first = time.monotonic()
            elif throttle.accepted > self._accepted:
                self.overtaken += 1
            self.limited, self._accepted = self.limited + 1, throttle.accepted

    def is_exhausted(self, most: float, throttle: AdaptiveThrottle) -> bool:
        """Whether so many seconds of refusals are over.

        They begin anew when the server accepts another request: this one has to wait its turn. But
        one that is refused again and again while others are accepted may never be, as one that is
        too large for a limit of tokens.
        """
        now = time.monotonic()
        overtaken = self.overtaken >= MAX_OVERTAKEN and now - self.first >= most
        return overtaken or now >= self.retry_deadline(most, throttle)

    def retry_deadline(self, most: float, throttle: AdaptiveThrottle) -> float:
        """When so many seconds of refusals are over if nothing is accepted until then."""
        return max(self.first, throttle.last_accepted) + most if self.limited else math.inf

    def rate_limit_delay(
        self, sent: float, throttle: AdaptiveThrottle, most: float
    ) -> float | None:
        """Seconds until a call may be repeated whose last failure is a rate limit; `None`: never.

        It is the least that the call waits; then the throttle says when it goes.

        Args:
            sent: When the call went, as `time.monotonic` has it.
            throttle: Is told of the refusal.
            most: `Limits.rate_limit_timeout`.
        """
        error = self.last
        assert error
        if not error.passing:
            return None
        throttle.record_refusal(sent, error.after, self.overtaken > OVERTAKEN_BEFORE_BACKOFF)
        if (error.after or 0.0) > most or self.is_exhausted(most, throttle):
            self.build_final_error(most)
            return None
        # Behind the others, the more often it was overtaken.
        behind = (
            FIRST_WAIT * 2.0**self.overtaken if self.overtaken > OVERTAKEN_BEFORE_BACKOFF else 0.0
        )
        return max(error.after or 0.0, min(MAX_WAIT, behind))

    def build_final_error(self, most: float) -> RequestError:
        """The last error, which is one for good now."""
        error = self.last
        assert error
        error.args = (f"{error}; not repeated beyond {most:g} s (limits.rate_limit_timeout)",)
        # A request that is overtaken says nothing of the others.
        error.passing, error.general = False, self.overtaken < MAX_OVERTAKEN
        return error


def parse_response(who: str, function: Callable[..., T], *given: Any) -> T:
    """What the function makes of a server's words.

    Args:
        given: Of an event its content; else a number, the content and the seconds.

    Raises:
        ServerFault: It does not understand them. The message says why in the function's own words
            (`NotAgreed`), or else what came.
    """
    try:
        return function(*given)
    except MalformedResponse as error:
        words = to_one_line(str(error))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        content = given[0] if len(given) == 1 else given[1]
        words = f"its form is another: {to_one_line(json.dumps(content, ensure_ascii=False))}"
    raise ServerFault(f"{who}: not the agreed answer: {words}")


class HttpClient:
    """Posts JSON to one URL, with a key that it reads from the environment when it is needed.

    It may be pickled, and used from several threads, beside a running event loop, after a fork.

    Args:
        name: What messages call the server.
        url: Where to post to.
        api_key_env: The name of the environment variable with the key; `None` sends no key.
        limits: How hard the server may be pressed.
        header, scheme: The header that carries the key, and what stands before it.

    Attributes:
        turns: When the next request may go.
        throttle: The rate that the server accepts, as far as it was learnt.
        repeated: How many repetitions there were.

    Raises:
        UserError: A value is not allowed.
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
        """Another model of the server; both together keep to the limits.

        What is learnt of the server's rate limits is of the one model.
        """
        other = object.__new__(type(self))
        throttle = self.turns.get_throttle(name)
        other.__dict__.update(self.__dict__, name=name, repeated=0, throttle=throttle)
        return other

    @property
    def who(self) -> str:
        """The server, as messages call it."""
        return f"{self.name} ({self.url})"

    def read_api_key(self) -> str | None:
        """What is sent as the key.

        Raises:
            UserError: There is none in the environment.
        """
        return read_key(self.who, self.api_key_env)

    @asynccontextmanager
    async def open_caller(
        self, read: ParseResponse[T], refused: OnBadRequest[T] | None = None
    ) -> AsyncIterator[Callable[[int, Call], Awaitable[T]]]:
        """Make calls one by one, on the event loop of `swarm.models.threaded.shared_event_loop`.

        What it gives makes one call by its number and its body; see `gather` for the arguments.

        Raises:
            UserError: There is no key; a call raises its `RequestError`.
        """
        async with self._open_session(self.read_api_key(), read, refused) as (asking, post):
            yield lambda number, call: asking(post, number, call)

    def check(self) -> None:
        """Look for the key, and at the proxy if there is one.

        Raises:
            UserError: There is no key, or the proxy has no possible URL.
        """
        proxy_for(self.url)
        self.read_api_key()

    def run_calls(
        self, calls: Sequence[Call], read: ParseResponse[T], refused: OnBadRequest[T] | None = None
    ) -> list[T]:
        """Make all calls, reading the answers as they come; gives them in the calls' order.

        The first call that fails for good ends the others.

        Args:
            calls: What to ask.
            read: Is handed each answer, in another thread; a `UserError` ends everything.
            refused: What a call comes to that the server refuses; `None`: that is an error.

        Raises:
            RequestError: A call failed for good; the class says how.
        """
        found = self._run_on_loop(calls, read, refused, together=True)
        return [done for done in found if not isinstance(done, UserError)]

    def run_each_call(
        self, calls: Sequence[Call], read: ParseResponse[T], refused: OnBadRequest[T] | None = None
    ) -> list[T | UserError]:
        """As `gather`, but a call that fails for good has its error in the list.

        An error that all others would meet too, as that of a wrong key, is theirs if they have not
        begun.

        Raises:
            UserError: There is no key.
        """
        return self._run_on_loop(calls, read, refused, together=False)

    def stream(
        self,
        call: Call,
        reader: Callable[[], StreamParser[P]],
        read: ParseResponse[T],
        refused: OnBadRequest[T],
    ) -> Generator[P, None, T]:
        """Make one call whose answer comes in pieces, or in one where the server knows no better.

        Once there was a piece nothing is repeated. To close the generator ends the call.

        Args:
            call: What to ask.
            reader: Makes a reader of events; each repetition has a new one.
            read, refused: See `gather`.

        Raises:
            RequestError: The call failed for good; the class says how.
        """
        key = self.read_api_key()

        async def run_stream(emit: Callable[[P], None]) -> T:
            async with self._open_session(key, read, refused) as (asking, post):
                return await asking(StreamingTransport(post, reader, emit), 0, call)

        return (yield from shared_event_loop().stream_items(run_stream))

    def _run_on_loop(
        self,
        calls: Sequence[Call],
        read: ParseResponse[T],
        refused: OnBadRequest[T] | None,
        together: bool,
    ) -> list[T | UserError]:
        key = self.read_api_key()
        return (
            shared_event_loop().run(self._run_concurrently(calls, read, refused, together, key))
            if calls
            else []
        )

    async def _run_concurrently(
        self,
        calls: Sequence[Call],
        read: ParseResponse[T],
        refused: OnBadRequest[T] | None,
        together: bool,
        key: str | None,
    ) -> list[T | UserError]:
        found: dict[int, T | UserError] = {}
        waiting = iter(enumerate(calls))
        everyones: UserError | None = None

        async def run_worker(asking: RetryingClient[T], post: HttpTransport) -> None:
            nonlocal everyones
            for number, call in waiting:
                try:
                    found[number] = everyones or await asking(post, number, call)
                except UserError as error:
                    if together:
                        raise
                    found[number] = error
                    everyones = error if getattr(error, "general", True) else everyones

        async with self._open_session(key, read, refused) as (asking, post):
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.limits.concurrency, len(calls))):
                        group.create_task(run_worker(asking, post))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [found[number] for number in range(len(calls))]

    @asynccontextmanager
    async def _open_session(
        self, key: str | None, read: ParseResponse[T], refused: OnBadRequest[T] | None
    ) -> AsyncIterator[tuple[RetryingClient[T], HttpTransport]]:
        """Connections, and how they are used."""
        import aiohttp

        proxy = proxy_for(self.url)
        asking = RetryingClient(self.who, self.turns, read, refused, self.throttle)
        async with aiohttp.ClientSession(
            headers={"Content-Type": "application/json"}
            | ({self.header: f"{self.scheme}{key}"} if key else {}),
            timeout=aiohttp.ClientTimeout(
                total=self.limits.timeout, sock_connect=self.limits.connect_timeout
            ),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            try:
                yield (
                    asking,
                    HttpTransport(
                        session, self.who, self.url, proxy, key, self.api_key_env, self.limits
                    ),
                )
            finally:
                self.repeated += asking.repeated
