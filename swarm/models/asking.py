"""One call to a server, repeated as often as is allowed, until its answer is understood."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from swarm.models.failures import (
    BadRequest,
    RequestError,
    ServerFault,
    TimedOut,
    Unreachable,
    one_line,
)
from swarm.models.pace import Turns
from swarm.models.post import Post

T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first repetition; they double, up to the longest."""


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


Read = Callable[[int, Any, float], T]
"""Makes of the n-th call's answer, and of the seconds that it took with all repetitions, what is
wanted; a `ValueError` or its like: ask again."""

Refused = Callable[[int, BadRequest], T]
"""Says what the n-th call comes to where the server refuses it, or raises."""


class Exchange(Protocol):
    """Sends a body and gives what is answered."""

    @property
    def begun(self) -> bool:
        """Whether a part of the answer is with the caller already: no repetition then."""
        ...

    async def __call__(self, body: Any) -> Any:
        """One answer."""
        ...


class Reader(Protocol[P_co]):
    """Makes pieces of the events of a stream."""

    @property
    def ended(self) -> bool:
        """Whether the answer is whole even if nothing more comes."""
        ...

    def event(self, content: Any) -> Sequence[P_co]:
        """The pieces in one event; a `ValueError` or its like: it is not as agreed."""
        ...

    def rest(self) -> Sequence[P_co]:
        """The pieces that were held back until it was certain that nothing more comes."""
        ...

    def whole(self) -> Any:
        """What the server would have said at once."""
        ...


class Streamed(Generic[P]):
    """An exchange whose answer comes in pieces, each handed over at once."""

    def __init__(
        self, post: Post, reader: Callable[[], Reader[P]], emit: Callable[[P], None]
    ) -> None:
        self.post, self.reader, self.emit = post, reader, emit
        self.begun = False

    async def __call__(self, body: Any) -> Any:
        """The whole, after all pieces.

        Raises:
            RequestError: There is none; an answer that broke off is none.
        """
        reader = self.reader()

        def take(content: Any) -> None:
            self._hand_over(understood(self.post.who, reader.event, content))

        try:
            ended = await self.post.stream(body, take)
        except (Unreachable, TimedOut):
            if not reader.ended:
                raise
        else:
            if not (ended or reader.ended):
                raise ServerFault(f"{self.post.who}: the answer broke off")
        self._hand_over(reader.rest())
        # A key that came in two halves is whole here.
        return self.post.without_key(reader.whole())

    def _hand_over(self, pieces: Sequence[P]) -> None:
        for piece in pieces:
            self.begun = True
            self.emit(piece)


@dataclass
class Asking(Generic[T]):
    """Makes calls to one server.

    Attributes:
        who: The server, as messages call it.
        turns: When a request may go.
        read: Is handed each answer.
        refused: What a call comes to that the server refuses; `None`: that is an error.
        repeated: Repetitions so far.
    """

    who: str
    turns: Turns
    read: Read[T]
    refused: Refused[T] | None
    repeated: int = 0

    async def __call__(self, exchange: Exchange, number: int, call: Call) -> T:
        """What the call comes to.

        Raises:
            RequestError: It failed for good.
        """
        failed: list[RequestError] = []
        if call.timeout is None:
            return await self._tried(exchange, number, call, failed)
        try:
            async with asyncio.timeout(None) as clock:
                return await self._tried(exchange, number, call, failed, clock)
        except TimeoutError:
            last = f"; asked {len(failed)} times, and told at last: {failed[-1]}" if failed else ""
            raise TimedOut(f"{self.who}: no answer within {call.timeout:g} s{last}") from None

    async def _tried(
        self,
        exchange: Exchange,
        number: int,
        call: Call,
        failed: list[RequestError],
        clock: asyncio.Timeout | None = None,
    ) -> T:
        began = 0.0
        while True:
            try:
                async with self.turns.gate():
                    await self.turns.booked(call.tokens)
                    if not began:
                        began = time.monotonic()
                        if clock and call.timeout:
                            clock.reschedule(began + call.timeout)
                    await self.turns.heard()
                    content = await exchange(call.body)
                return understood(self.who, self.read, number, content, time.monotonic() - began)
            except BadRequest as error:
                if self.refused is None:
                    raise
                return self.refused(number, error)
            except RequestError as error:
                wait = None if exchange.begun else self._wait(error, len(failed))
                failed.append(error)
                if wait is None:
                    raise error.asked(len(failed)) from None
            if call.timeout and time.monotonic() + wait >= began + call.timeout:
                raise TimeoutError
            self.repeated += 1
            await asyncio.sleep(wait)

    def _wait(self, error: RequestError, attempt: int) -> float | None:
        """Seconds until the call may be repeated; `None` if it may not."""
        if not error.passing or attempt >= self.turns.limits.retries:
            return None
        spread = random.SystemRandom().uniform(0.5, 1.0)
        if error.after is None:
            return float(min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * spread)
        self.turns.hold_back(error.after)
        return max(error.after, FIRST_WAIT * spread)


def understood(who: str, function: Callable[..., T], *given: Any) -> T:
    """What the function makes of a server's words.

    Raises:
        ServerFault: It does not understand them.
    """
    try:
        return function(*given)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        words = one_line(str(error)) or type(error).__name__
        raise ServerFault(f"{who}: not the agreed answer: {words}") from None
