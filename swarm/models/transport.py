"""One request: JSON goes, JSON comes back, or an error that says in one line what happened."""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from swarm.errors import UserError
from swarm.models.http_errors import (
    ConnectionFailed,
    RequestError,
    RequestTimeout,
    ServerFault,
    error_from_response,
    to_one_line,
)
from swarm.models.rate_limit import Limits

if TYPE_CHECKING:
    import aiohttp

# Where a server is, how it is reached, and which environment variable holds its key.


def validate_url(url: object) -> str:
    """`url` if it can be posted to and holds no secret.

    Raises:
        UserError: It is not; the message leaves a password out.
    """
    parts = split_url(url)
    if not isinstance(url, str) or parts is None:
        raise UserError(
            "base_url or url: has to begin with http:// or https:// and name a host, and a port "
            "from 1 to 65535 if any, as in http://localhost:8000/v1"
        )
    if "@" in parts.netloc or parts.query:
        raise UserError(
            f"the URL of {parts.hostname}: no user, password or key may be in it; name the "
            "environment variable that holds the key in api_key_env"
        )
    return url


def split_url(url: object) -> SplitResult | None:
    """What an http or https URL consists of; `None` if it has no possible host or port."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        return None
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def validate_env_name(name: object) -> str | None:
    """`name` if it is `None` or may be an environment variable's.

    Raises:
        UserError: It is neither. The message does not repeat it: it may be the key itself.
    """
    if name is None or (isinstance(name, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name)):
        return name
    raise UserError(
        "api_key_env: has to be the name of an environment variable (capital letters, digits "
        "and _), not the key itself; null where no key is needed"
    )


def read_key(who: str, variable: str | None) -> str | None:
    """The key in an environment variable; `None` without one.

    Raises:
        UserError: The variable is not there, or holds no key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"{who}: the environment variable {variable} is not set; put the key there, or set "
            "api_key_env=null if none is needed"
        )
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{who}: what the environment variable {variable} holds cannot be a key")
    return key


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL (HTTPS_PROXY, NO_PROXY and their like).

    Raises:
        UserError: It is none; the message does not repeat it: a password may be in it.
    """
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is not None and split_url(proxy) is None:
        raise UserError(
            f"the environment variable {parts.scheme}_proxy: has to begin with http:// or "
            "https:// and name a host, and a port from 1 to 65535 if any"
        )
    return proxy


# Server-sent events out of the bytes of a stream, wherever those are cut.

LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    """One event: its name, empty if it has none, and its text."""

    name: str
    data: str


class EventStreamParser:
    """Reads a stream chunk by chunk (WHATWG HTML, 9.2.6)."""

    def __init__(self) -> None:
        self._left = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """The events that end in this chunk."""
        waiting = self._left + chunk
        # A carriage return that comes last may be half a line's end.
        sure = len(waiting) - waiting.endswith(b"\r")
        *lines, rest = LINE_END.split(waiting[:sure])
        self._left = rest + waiting[sure:]
        for line in lines:
            yield from self._parse_line(line.decode("utf-8", "replace").removeprefix("\ufeff"))

    def flush_pending(self) -> Iterator[ServerSentEvent]:
        """What the stream ends with; some servers leave out the empty line after it."""
        return self.feed(b"\n\n")

    def _parse_line(self, line: str) -> Iterator[ServerSentEvent]:
        if not line:
            if self._data:
                yield ServerSentEvent(self._name, "\n".join(self._data))
            self._name, self._data = "", []
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif field == "event":
            self._name = value.removeprefix(" ")


_encode_json = json.JSONEncoder(ensure_ascii=False).encode

MIN_KEY_LENGTH = 8
"""Characters from which on a key is looked for in what a server says."""


@dataclass(frozen=True)
class HttpTransport:
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

    def redact_key(self, content: Any) -> Any:
        """JSON in which no text holds the key."""
        text = json.dumps(content)
        cleaned = self._redact_text(text)
        return content if cleaned == text else json.loads(cleaned)

    async def __call__(self, body: Any) -> Any:
        """The JSON that the server answers to this body.

        Raises:
            RequestError: There is none; the class says why.
        """
        import aiohttp

        try:
            async with self._send(body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from None
        return self._parse_response(response, raw)

    async def stream_events(self, body: Any, take: Callable[[Any], None]) -> bool:
        """Hand over the JSON of each event; or of the answer, where it comes as a whole.

        Returns:
            Whether the server said that this was all.

        Raises:
            RequestError: As when called.
        """
        import aiohttp

        try:
            async with self._send(body) as response:
                return await self._read_events(response, take)
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from None

    async def _read_events(
        self, response: "aiohttp.ClientResponse", take: Callable[[Any], None]
    ) -> bool:
        events, begin = EventStreamParser(), b""
        chunks = response.content.iter_any()
        async for chunk in chunks:
            begin += chunk
            if begin.strip():
                break
        # No line of a stream of events begins with a brace.
        if response.status >= 300 or begin.lstrip().startswith(b"{"):
            take(self._parse_response(response, begin + await response.content.read()))
            return True
        if self._dispatch_events(events.feed(begin), take):
            return True
        async for chunk in chunks:
            if self._dispatch_events(events.feed(chunk), take):
                return True
        return self._dispatch_events(events.flush_pending(), take)

    def _dispatch_events(
        self, events: Iterable[ServerSentEvent], take: Callable[[Any], None]
    ) -> bool:
        """Whether one of the events says that it was the last; they are handed over until then."""
        for event in events:
            if event.data.strip() == "[DONE]":
                return True
            text = self._redact_text(event.data)
            content, sound = try_parse_json(text)
            if not sound:
                raise ServerFault(f"{self.who}: an event is not JSON: {to_one_line(text)}")
            take({"error": content} if event.name == "error" else content)
        return False

    def _send(self, body: Any) -> Any:
        """What comes back, to be entered and read."""
        # Half a surrogate pair, which many servers refuse, is sent as "?".
        data = _encode_json(body).encode("utf-8", "replace")
        return self.session.post(self.url, data=data, proxy=self.proxy, allow_redirects=False)

    def _connection_error(self, error: Exception) -> RequestError:
        """Why nothing, or not all, came back."""
        import aiohttp

        if isinstance(error, aiohttp.ConnectionTimeoutError):
            wait = f"{self.limits.connect_timeout:g} s (limits.connect_timeout)"
            return RequestTimeout(f"{self.who}: no connection within {wait}")
        if isinstance(error, TimeoutError):
            wait = f"{self.limits.timeout:g} s (limits.timeout)"
            return RequestTimeout(f"{self.who}: no answer within {wait}")
        words = to_one_line(self._redact_text(describe_connection_error(error)))
        if isinstance(error, aiohttp.ClientConnectorError):
            words += " (is the server running, and is this its URL?)"
        return ConnectionFailed(f"{self.who}: the connection failed: {words}")

    def _parse_response(self, response: "aiohttp.ClientResponse", raw: bytes) -> Any:
        """The JSON of an answer that has been read.

        Raises:
            RequestError: It is none, or an error.
        """
        text = self._redact_text(raw.decode("utf-8", "replace"))
        content, sound = try_parse_json(text)
        if response.status >= 300:
            names = ("Retry-After", "Retry-After-Ms", "Location")
            told = {name: response.headers.get(name, "") for name in names}
            headers = {name: self._redact_text(value) for name, value in told.items()}
            raise error_from_response(self.who, response.status, headers, content, self.api_key_env)
        if not sound:
            raise ServerFault(f"{self.who}: the answer is not JSON: {to_one_line(text)}")
        return content

    def _redact_text(self, text: str) -> str:
        """A server may say the key back to us; it must not be kept anywhere."""
        if self.key is None or len(self.key) < MIN_KEY_LENGTH:
            return text
        return text.replace(self.key, "***")


def try_parse_json(text: str) -> tuple[Any, bool]:
    """The JSON in a text, or the text itself; and whether it is JSON."""
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return text, False


def describe_connection_error(error: Exception) -> str:
    """Why there is no connection, without a URL: that of a proxy may hold a password."""
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return f"the proxy says {error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL, or the proxy's, is not valid"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
