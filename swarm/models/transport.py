"""HTTP requests with JSON bodies, JSON or event-stream responses, and one-line error messages.

Also contains the validation of URLs, key variables and proxies.
"""

import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from swarm.errors import UserError
from swarm.models.http_errors import (
    ConnectionFailed,
    MalformedResponse,
    RequestError,
    RequestTimeout,
    ServerFault,
    error_from_response,
    to_one_line,
)
from swarm.models.rate_limit import Limits

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)


def validate_url(url: object) -> str:
    """Return `url` if it can be posted to and contains no secret.

    Raises:
        UserError: It is invalid; the message omits a password.
    """
    parts = split_url(url)
    if not isinstance(url, str) or parts is None:
        raise UserError(
            "base_url or url: must begin with http:// or https:// and name a host, and a port "
            "from 1 to 65535 if any, as in http://localhost:8000/v1"
        )
    if "@" in parts.netloc or parts.query:
        raise UserError(
            f"the URL of {parts.hostname}: must not contain a user, password or key; name the "
            "environment variable with the key in api_key_env"
        )
    return url


def split_url(url: object) -> SplitResult | None:
    """Split an http or https URL; `None` if its host or port is invalid."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        return None
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def validate_env_name(name: object, key: str = "api_key_env") -> str | None:
    """Return `name` if it is `None` or a valid name of an environment variable.

    Raises:
        UserError: It is neither. The message does not repeat it: it may be the key itself.
    """
    if name is None or (isinstance(name, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name)):
        return name
    raise UserError(
        f"{key}: must be the name of an environment variable (capital letters, digits "
        "and _), not the key itself; null if none is needed"
    )


def read_key(label: str, variable: str | None) -> str | None:
    """Return the key in an environment variable; `None` without a variable.

    Raises:
        UserError: The variable is not set, or contains no valid key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"{label}: the environment variable {variable} is not set; put the key there, or set "
            "api_key_env=null if none is needed"
        )
    if not key.isascii() or not key.isprintable():
        raise UserError(
            f"{label}: the value of the environment variable {variable} is not a valid key"
        )
    return key


def proxy_for(url: str) -> str | None:
    """Return the proxy for a URL from the environment (HTTPS_PROXY, NO_PROXY and similar).

    Raises:
        UserError: The proxy is invalid; the message does not repeat it: it may contain a password.
    """
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is not None and split_url(proxy) is None:
        raise UserError(
            f"the environment variable {parts.scheme}_proxy: must begin with http:// or "
            "https:// and name a host, and a port from 1 to 65535 if any"
        )
    return proxy


LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStreamParser:
    """Incremental parser of server-sent events (WHATWG HTML, 9.2.6).

    Attributes:
        pending: Bytes of the event that is not complete yet.
    """

    def __init__(self) -> None:
        self.pending = 0
        self._parts: list[bytes] = []
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """Yield name and data of each event completed by a chunk, which may be cut at any byte."""
        self.pending += len(chunk)
        held = self._parts[-1:] and self._parts[-1].endswith(b"\r")
        self._parts.append(chunk)
        if not held and LINE_END.search(chunk) is None:
            return
        buffer = b"".join(self._parts)
        # A trailing carriage return may be the first half of a CRLF.
        complete_length = len(buffer) - buffer.endswith(b"\r")
        *lines, rest = LINE_END.split(buffer[:complete_length])
        self._parts = [rest + buffer[complete_length:]]
        for line in lines:
            field, _, value = line.decode("utf-8", "replace").removeprefix("\ufeff").partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            elif field == "event":
                self._name = value.removeprefix(" ")
            elif not line:
                if self._data:
                    yield self._name, "\n".join(self._data)
                self._name, self._data = "", []
        if not self._data:
            self.pending = len(self._parts[0])


class StreamParser(Protocol[P_co]):
    """Turns the events of a stream into pieces."""

    @property
    def is_complete(self) -> bool:
        """True if the answer is complete even if the connection ends now."""

    def parse_event(self, content: Any) -> Sequence[P_co]:
        """Return the pieces in one event; raise `ValueError` or similar if it is malformed."""

    def finish(self) -> tuple[Sequence[P_co], Any]:
        """Return the pieces held back until the end, and the equivalent non-streamed response."""


MAX_BODY_BYTES, MAX_EVENT_BYTES, MAX_STREAM_BYTES = 64 * 2**20, 16 * 2**20, 2**30
"""Maximum size of a response, of one event of a stream, and of a stream; uncompressed."""

MIN_KEY_LENGTH = 8
"""Minimum length of keys to redact; shorter ones would match ordinary text."""

_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def encode_body(body: Any) -> bytes:
    """Encode a JSON body; lone surrogates, which many servers refuse, are sent as "?"."""
    return _encode_json(body).encode("utf-8", "replace")


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


@dataclass(frozen=True)
class HttpConnections:
    """Posts bodies to a URL.

    Attributes:
        session: Session with the key in its headers, and the timeouts.
        label: The server's name in messages.
        url, proxy: URL, and the proxy to use.
        key: Key to redact from messages and answers, which a server may repeat; it must not be
            stored anywhere.
        api_key_env: Environment variable of the key, for messages.
        limits: For messages.
    """

    session: "ClientSession"
    label: str
    url: str
    proxy: str | None
    key: str | None
    api_key_env: str | None
    limits: Limits

    async def post(self, call: Call, emit: object = None) -> Any:
        """Return the server's JSON response.

        Raises:
            RequestError: The request failed; the class gives the kind of failure.
        """
        return await self._exchange(call, self._read_response)

    async def stream(
        self, parser_class: Callable[[], StreamParser[P]], call: Call, emit: Callable[[P], None]
    ) -> Any:
        """Emit the pieces of an answer as they arrive, and return the complete response.

        Raises:
            RequestError: The request failed or the answer was cut off.
        """
        parser = parser_class()

        def take(content: Any) -> None:
            for piece in parse_response(self.label, content, partial(parser.parse_event, content)):
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
        text = json.dumps(response)
        cleaned = self._redact(text)
        return response if cleaned == text else json.loads(cleaned)

    async def _exchange(self, call: Call, read: Callable[["ClientResponse"], Awaitable[T]]) -> T:
        import aiohttp

        data = encode_body(call.body) if call.data is None else call.data
        try:
            async with self.session.post(
                self.url, data=data, proxy=self.proxy, allow_redirects=False
            ) as response:
                return await read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from None

    async def _read_response(
        self,
        response: "ClientResponse",
        chunks: AsyncIterator[bytes] | None = None,
        first: bytes = b"",
    ) -> Any:
        """Read and parse the body of a response, after its first part.

        Raises:
            RequestError: It is an error, or not JSON.
        """
        raw = bytearray(first)
        async for chunk in chunks or response.content.iter_any():
            raw += chunk
            self._check_size("the response", len(raw), MAX_BODY_BYTES)
        text = self._redact(raw.decode("utf-8", "replace"))
        if response.status < 300:
            return self._parse_json("the response", text)
        try:
            content = self._parse_json("", text)
        except ServerFault:
            content = text
        names = ("Retry-After", "Retry-After-Ms", "Location")
        headers = {name: self._redact(response.headers.get(name, "")) for name in names}
        raise error_from_response(self.label, response.status, headers, content, self.api_key_env)

    async def _read_events(self, take: Callable[[Any], None], response: "ClientResponse") -> bool:
        """Pass on the JSON of each event, or of the response if it is not a stream.

        Returns:
            True if the server marked the end of the stream.
        """
        events, chunks = EventStreamParser(), self._count_chunks(response)
        first = b""
        async for first in chunks:
            if first.strip():
                break
        # No line of an event stream begins with a brace.
        if response.status >= 300 or first.lstrip().startswith(b"{"):
            take(await self._read_response(response, chunks, first))
            return True
        if self._dispatch_events(events.feed(first), take):
            return True
        async for chunk in chunks:
            if self._dispatch_events(events.feed(chunk), take):
                return True
            self._check_size("an event", events.pending, MAX_EVENT_BYTES)
        # Some servers omit the empty line after the last event.
        return self._dispatch_events(events.feed(b"\n\n"), take)

    async def _count_chunks(self, response: "ClientResponse") -> AsyncIterator[bytes]:
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            self._check_size("the stream", size, MAX_STREAM_BYTES)
            yield chunk

    def _dispatch_events(
        self, events: Iterator[tuple[str, str]], take: Callable[[Any], None]
    ) -> bool:
        """Pass on the events; return True at the end marker."""
        for name, data in events:
            if data.strip() == "[DONE]":
                return True
            content = self._parse_json("an event", self._redact(data))
            take({"error": content} if name == "error" else content)
        return False

    def _check_size(self, part: str, size: int, limit: int) -> None:
        """Raise an error, which is not retried, if a part of a response is above its limit."""
        if size > limit:
            error = ServerFault(f"{self.label}: {part} is longer than {limit // 2**20} MiB")
            error.passing = False
            raise error

    def _parse_json(self, part: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerFault(f"{self.label}: {part} is not JSON: {to_one_line(text)}") from None

    def _redact(self, text: str) -> str:
        if self.key is None or len(self.key) < MIN_KEY_LENGTH:
            return text
        return text.replace(self.key, "***")

    def _connection_error(self, error: Exception) -> RequestError:
        """Return the error for a failed connection."""
        import aiohttp

        if isinstance(error, aiohttp.ConnectionTimeoutError):
            timeout = f"{self.limits.connect_timeout:g} s (limits.connect_timeout)"
            return RequestTimeout(f"{self.label}: no connection within {timeout}")
        if isinstance(error, TimeoutError):
            timeout = f"{self.limits.timeout:g} s (limits.timeout)"
            return RequestTimeout(f"{self.label}: no response within {timeout}")
        words = to_one_line(self._redact(describe_connection_error(error)))
        if isinstance(error, aiohttp.ClientConnectorError):
            words += " (is the server running, and is this its URL?)"
        return ConnectionFailed(f"{self.label}: the connection failed: {words}")


def describe_connection_error(error: Exception) -> str:
    """Describe a connection error without a URL, which for a proxy may contain a password."""
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return f"the proxy returned {error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL, or the proxy's, is not valid"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


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
