"""What HTTP requests consist of: URLs, keys, proxies, JSON bodies, event streams."""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from swarm.errors import UserError
from swarm.models.http_errors import MalformedResponse, ServerFault, to_one_line

T = TypeVar("T")


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
    """Incremental parser of server-sent events (WHATWG HTML, 9.2.6)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """Yield name and data of each event completed by a chunk, which may be cut at any byte."""
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


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def encode_body(body: Any) -> bytes:
    """Encode a JSON body; lone surrogates, which many servers refuse, are sent as "?".

    The order of keys stays: servers generate the properties of a schema in it.
    """
    return _encode_json(body).encode("utf-8", "replace")


def parse_json(label: str, part: str, text: str) -> Any:
    """Parse a part of a server's response.

    Raises:
        ServerFault: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServerFault(f"{label}: {part} is not JSON: {to_one_line(text)}") from None


def describe_connection_error(error: Exception) -> str:
    """Describe a connection error without a URL, which for a proxy may contain a password."""
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return f"the proxy returned {error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the URL, or the proxy's, is not valid"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def parse_response(label: str, parse: Callable[..., T], content: Any, *args: Any) -> T:
    """Apply a parser to a server's response.

    Raises:
        ServerFault: It cannot be parsed. The message is the parser's (`MalformedResponse`) or shows
            the content.
    """
    try:
        return parse(content, *args)
    except MalformedResponse as error:
        words = to_one_line(str(error))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        words = f"unexpected form: {to_one_line(json.dumps(content, ensure_ascii=False))}"
    raise ServerFault(f"{label}: invalid response: {words}")
