"""HTTP requests with JSON bodies, JSON or event-stream responses, and one-line error messages.

Also contains the validation of URLs, key variables and proxies.
"""

import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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


class ServerSentEvent(NamedTuple):
    """One server-sent event: its name, empty if it has none, and its data."""

    name: str
    data: str


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

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events completed by this chunk, which may be cut at any byte."""
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
            yield from self._parse_line(line.decode("utf-8", "replace").removeprefix("\ufeff"))
        if not self._data:
            self.pending = len(self._parts[0])

    def flush_pending(self) -> Iterator[ServerSentEvent]:
        """Yield the last event; some servers omit the empty line after it."""
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


MAX_BODY_BYTES, MAX_EVENT_BYTES, MAX_STREAM_BYTES = 64 * 2**20, 16 * 2**20, 2**30
"""Maximum size of a response, of one event of a stream, and of a stream; uncompressed."""

_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def encode_body(body: Any) -> bytes:
    """Encode a JSON body; lone surrogates, which many servers refuse, are sent as "?"."""
    return _encode_json(body).encode("utf-8", "replace")


MIN_KEY_LENGTH = 8
"""Minimum length of keys to redact; shorter ones would match ordinary text."""


@dataclass(frozen=True)
class HttpTransport:
    """Posts bodies to a URL.

    Attributes:
        session: Session with the key in its headers, and the timeouts.
        label: The server's name in messages.
        url, proxy: URL, and the proxy to use.
        key: Key to redact from messages and answers.
        api_key_env: Environment variable of the key, for messages.
        limits: For messages.
    """

    session: "aiohttp.ClientSession"
    label: str
    url: str
    proxy: str | None
    key: str | None
    api_key_env: str | None
    limits: Limits

    @property
    def started(self) -> bool:
        """Always False: an answer arrives in one piece."""
        return False

    def redact_key(self, content: Any) -> Any:
        """Return the JSON value with the key redacted."""
        text = json.dumps(content)
        cleaned = self._redact_text(text)
        return content if cleaned == text else json.loads(cleaned)

    async def __call__(self, body: Any) -> Any:
        """Return the server's JSON response to this body, which may be encoded already.

        Raises:
            RequestError: The request failed; the class gives the kind of failure.
        """
        import aiohttp

        try:
            async with self._send(body) as response:
                raw = await self._read_body(response.content.iter_any())
        except (aiohttp.ClientError, OSError) as error:
            raise self._connection_error(error) from None
        return self._parse_response(response, raw)

    async def stream_events(self, body: Any, take: Callable[[Any], None]) -> bool:
        """Pass on the JSON of each event, or of the response if it is not a stream.

        Returns:
            True if the server marked the end of the stream.

        Raises:
            RequestError: See `__call__`.
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
        events, chunks = EventStreamParser(), self._count_chunks(response)
        first = b""
        async for first in chunks:
            if first.strip():
                break
        # No line of an event stream begins with a brace.
        if response.status >= 300 or first.lstrip().startswith(b"{"):
            take(self._parse_response(response, await self._read_body(chunks, first)))
            return True
        if self._dispatch_events(events.feed(first), take):
            return True
        async for chunk in chunks:
            if self._dispatch_events(events.feed(chunk), take):
                return True
            self._check_size("an event", events.pending, MAX_EVENT_BYTES)
        return self._dispatch_events(events.flush_pending(), take)

    async def _read_body(self, chunks: AsyncIterator[bytes], first: bytes = b"") -> bytearray:
        body = bytearray(first)
        async for chunk in chunks:
            body += chunk
            self._check_size("the response", len(body), MAX_BODY_BYTES)
        return body

    async def _count_chunks(self, response: "aiohttp.ClientResponse") -> AsyncIterator[bytes]:
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            self._check_size("the stream", size, MAX_STREAM_BYTES)
            yield chunk

    def _check_size(self, part: str, size: int, limit: int) -> None:
        """Raise an error, which is not retried, if a part of a response is above its limit."""
        if size > limit:
            error = ServerFault(f"{self.label}: {part} is longer than {limit // 2**20} MiB")
            error.passing = False
            raise error

    def _dispatch_events(
        self, events: Iterable[ServerSentEvent], take: Callable[[Any], None]
    ) -> bool:
        """Pass on the events; return True at the end marker."""
        for event in events:
            if event.data.strip() == "[DONE]":
                return True
            text = self._redact_text(event.data)
            content, is_json = try_parse_json(text)
            if not is_json:
                raise ServerFault(f"{self.label}: an event is not JSON: {to_one_line(text)}")
            take({"error": content} if event.name == "error" else content)
        return False

    def _send(self, body: Any) -> Any:
        """Return the response as a context manager."""
        data = body if isinstance(body, bytes) else encode_body(body)
        return self.session.post(self.url, data=data, proxy=self.proxy, allow_redirects=False)

    def _connection_error(self, error: Exception) -> RequestError:
        """Return the error for a failed connection."""
        import aiohttp

        if isinstance(error, aiohttp.ConnectionTimeoutError):
            timeout = f"{self.limits.connect_timeout:g} s (limits.connect_timeout)"
            return RequestTimeout(f"{self.label}: no connection within {timeout}")
        if isinstance(error, TimeoutError):
            timeout = f"{self.limits.timeout:g} s (limits.timeout)"
            return RequestTimeout(f"{self.label}: no response within {timeout}")
        description = to_one_line(self._redact_text(describe_connection_error(error)))
        if isinstance(error, aiohttp.ClientConnectorError):
            description += " (is the server running, and is this its URL?)"
        return ConnectionFailed(f"{self.label}: the connection failed: {description}")

    def _parse_response(self, response: "aiohttp.ClientResponse", raw: bytearray) -> Any:
        """Parse the body of a response.

        Raises:
            RequestError: It is an error, or not JSON.
        """
        text = self._redact_text(raw.decode("utf-8", "replace"))
        content, is_json = try_parse_json(text)
        if response.status >= 300:
            names = ("Retry-After", "Retry-After-Ms", "Location")
            known = {name: response.headers.get(name, "") for name in names}
            headers = {name: self._redact_text(value) for name, value in known.items()}
            raise error_from_response(
                self.label, response.status, headers, content, self.api_key_env
            )
        if not is_json:
            raise ServerFault(f"{self.label}: the response is not JSON: {to_one_line(text)}")
        return content

    def _redact_text(self, text: str) -> str:
        """Redact the key, which a server may repeat; it must not be stored anywhere."""
        if self.key is None or len(self.key) < MIN_KEY_LENGTH:
            return text
        return text.replace(self.key, "***")


def try_parse_json(text: str) -> tuple[Any, bool]:
    """Parse JSON, or return the text itself; and whether it is JSON."""
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return text, False


def describe_connection_error(error: Exception) -> str:
    """Describe a connection error without a URL, which for a proxy may contain a password."""
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return f"the proxy returned {error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL, or the proxy's, is not valid"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
