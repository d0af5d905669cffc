"""One request: JSON goes, JSON comes back, or an error that says in one line what happened."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.models.failures import (
    RequestError,
    ServerFault,
    TimedOut,
    Unreachable,
    failure,
    one_line,
)
from swarm.models.pace import Limits
from swarm.models.sse import Event, Events

if TYPE_CHECKING:
    import aiohttp

_as_text = json.JSONEncoder(ensure_ascii=False).encode

SHORTEST_KEY = 8
"""Characters from which on a key is looked for in what a server says."""


@dataclass(frozen=True)
class Post:
    """Sends one body after another to a URL.

    Attributes:
        session: Carries the key in its headers, and the timeouts.
        who: The server, as messages call it.
        url, proxy: Where it goes, and through what.
        key: What no message and no answer may hold.
        api_key_env: Where the key is from, for messages.
        limits: For messages.
    """

    session: "aiohttp.ClientSession"
    who: str
    url: str
    proxy: str | None
    key: str | None
    api_key_env: str | None
    limits: Limits

    @property
    def begun(self) -> bool:
        """Never: an answer is there as a whole."""
        return False

    def without_key(self, content: Any) -> Any:
        """JSON in which no text holds the key."""
        text = json.dumps(content)
        cleaned = self._without_key(text)
        return content if cleaned == text else json.loads(cleaned)

    async def __call__(self, body: Any) -> Any:
        """The JSON that the server answers to this body.

        Raises:
            RequestError: There is none; the class says why.
        """
        import aiohttp

        try:
            async with self._sent(body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from None
        return self._content(response, raw)

    async def stream(self, body: Any, take: Callable[[Any], None]) -> bool:
        """Hand over the JSON of each event; or of the answer, where it comes as a whole.

        Returns:
            Whether the server said that this was all.

        Raises:
            RequestError: As when called.
        """
        import aiohttp

        try:
            async with self._sent(body) as response:
                return await self._streamed(response, take)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from None

    async def _streamed(
        self, response: "aiohttp.ClientResponse", take: Callable[[Any], None]
    ) -> bool:
        events, begin = Events(), b""
        chunks = response.content.iter_any()
        async for chunk in chunks:
            begin += chunk
            if begin.strip():
                break
        # No line of a stream of events begins with a brace.
        if response.status >= 300 or begin.lstrip().startswith(b"{"):
            take(self._content(response, begin + await response.content.read()))
            return True
        if self._handed(events.feed(begin), take):
            return True
        async for chunk in chunks:
            if self._handed(events.feed(chunk), take):
                return True
        return self._handed(events.rest(), take)

    def _handed(self, events: Iterable[Event], take: Callable[[Any], None]) -> bool:
        """Whether one of the events says that it was the last; they are handed over until then."""
        for event in events:
            if event.data.strip() == "[DONE]":
                return True
            text = self._without_key(event.data)
            content, sound = parsed(text)
            if not sound:
                raise ServerFault(f"{self.who}: an event is not JSON: {one_line(text)}")
            take({"error": content} if event.name == "error" else content)
        return False

    def _sent(self, body: Any) -> Any:
        """What comes back, to be entered and read."""
        # Half a surrogate pair, which many servers refuse, is sent as "?".
        data = _as_text(body).encode("utf-8", "replace")
        return self.session.post(self.url, data=data, proxy=self.proxy, allow_redirects=False)

    def _lost(self, error: Exception) -> RequestError:
        """Why nothing, or not all, came back."""
        import aiohttp

        if isinstance(error, aiohttp.ConnectionTimeoutError):
            wait = f"{self.limits.connect_timeout:g} s (limits.connect_timeout)"
            return TimedOut(f"{self.who}: no connection within {wait}")
        if isinstance(error, TimeoutError):
            wait = f"{self.limits.timeout:g} s (limits.timeout)"
            return TimedOut(f"{self.who}: no answer within {wait}")
        words = one_line(self._without_key(reason(error)))
        if isinstance(error, aiohttp.ClientConnectorError):
            words += " (is the server running, and is this its URL?)"
        return Unreachable(f"{self.who}: the connection failed: {words}")

    def _content(self, response: "aiohttp.ClientResponse", raw: bytes) -> Any:
        """The JSON of an answer that has been read.

        Raises:
            RequestError: It is none, or an error.
        """
        text = self._without_key(raw.decode("utf-8", "replace"))
        content, sound = parsed(text)
        if response.status >= 300:
            names = ("Retry-After", "Retry-After-Ms", "Location")
            told = {name: response.headers.get(name, "") for name in names}
            headers = {name: self._without_key(value) for name, value in told.items()}
            raise failure(self.who, response.status, headers, content, self.api_key_env)
        if not sound:
            raise ServerFault(f"{self.who}: the answer is not JSON: {one_line(text)}")
        return content

    def _without_key(self, text: str) -> str:
        """A server may say the key back to us; it must not be kept anywhere."""
        if self.key is None or len(self.key) < SHORTEST_KEY:
            return text
        return text.replace(self.key, "***")


def parsed(text: str) -> tuple[Any, bool]:
    """The JSON in a text, or the text itself; and whether it is JSON."""
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return text, False


def reason(error: Exception) -> str:
    """Why there is no connection, without a URL: that of a proxy may hold a password."""
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return f"the proxy says {error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL, or the proxy's, is not valid"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
