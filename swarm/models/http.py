"""Many JSON requests to one server at once: paced, timed, repeated, and without a leaked key."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from swarm.errors import UserError
from swarm.models.address import validate_env_name, validate_url, proxy_for, read_key
from swarm.models.asking import RetryingClient, Call, ParseResponse, StreamParser, OnBadRequest, StreamingTransport
from swarm.models.background import shared_event_loop
from swarm.models.pace import Limits, RateLimiter
from swarm.models.post import HttpTransport

T = TypeVar("T")
P = TypeVar("P")


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
        self.name, self.url, self.api_key_env = name, validate_url(url), validate_env_name(api_key_env)
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
        """Make calls one by one, on the event loop of `swarm.models.background.line`.

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
        self, call: Call, reader: Callable[[], StreamParser[P]], read: ParseResponse[T], refused: OnBadRequest[T]
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
        self, calls: Sequence[Call], read: ParseResponse[T], refused: OnBadRequest[T] | None, together: bool
    ) -> list[T | UserError]:
        key = self.read_api_key()
        return shared_event_loop().run(self._run_concurrently(calls, read, refused, together, key)) if calls else []

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
                    HttpTransport(session, self.who, self.url, proxy, key, self.api_key_env, self.limits),
                )
            finally:
                self.repeated += asking.repeated
