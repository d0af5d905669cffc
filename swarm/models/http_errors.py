"""Request errors: one class per kind, one-line messages that never contain a key."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from swarm.errors import UserError

MAX_MESSAGE_LENGTH = 300
"""Maximum number of characters of a server's message to repeat."""

CONTENT_ERROR_CODES = (
    "content_filter",
    "content_policy_violation",
    "context_length_exceeded",
    "string_above_max_length",
)
"""Error codes caused by the request's text; another text may be accepted."""

MAX_RETRY_AFTER_S = 120.0
"""Maximum Retry-After in seconds to honour; after a 429 it is `Limits.rate_limit_timeout`."""


class RequestError(UserError):
    """A request failed.

    Attributes:
        passing: True if the same request may succeed later.
        general: True if other requests to the same model will fail as well.
        after: Seconds to wait requested by the server, or `None`.
        content: The server's response as JSON or text; `None` if there is none.
    """

    passing = False
    general = False

    def __init__(self, message: str, after: float | None = None, content: Any = None) -> None:
        super().__init__(message)
        self.after, self.content = after, content

    def add_words(self, words: str) -> None:
        """Append words to the message."""
        self.args = (f"{self}; {words}",)


class MalformedResponse(ValueError):
    """A server's response does not have the expected form; the message explains the difference."""


class AccessDenied(RequestError):
    """401, 402, 403: the key or account is not authorized."""

    general = True


class NotFound(RequestError):
    """404: no such URL or model."""

    general = True


class BadRequest(RequestError):
    """Another 4xx: this request is refused; others may be accepted."""


class RateLimited(RequestError):
    """429: too many requests, or no quota left."""

    passing = True


class ServerFault(RequestError):
    """5xx, or a malformed response."""

    passing = True


class ConnectionFailed(RequestError):
    """Connection failed or lost."""

    passing = True


class RequestTimeout(RequestError):
    """No connection or no answer in time; also 408."""

    passing = True


ERROR_CLASS_BY_STATUS: dict[int, type[RequestError]] = {
    **dict.fromkeys((401, 402, 403), AccessDenied),
    404: NotFound,
    408: RequestTimeout,
    **dict.fromkeys((409, 425), ServerFault),
    429: RateLimited,
}


def error_from_response(
    label: str, status: int, headers: Mapping[str, str], content: Any, api_key_env: str | None
) -> RequestError:
    """Return the error for a response of status 300 or above.

    Args:
        label: The server's name and URL.
        content: Response as JSON or text, without the key.
        api_key_env: Environment variable with the key, for the hint.
    """
    kind = ERROR_CLASS_BY_STATUS.get(status, ServerFault if status >= 500 else BadRequest)
    title = HTTPStatus(status).phrase if status in list(HTTPStatus) else ""
    words = [label, f"{status} {title}".strip(), to_one_line(error_message(content))]
    message = ": ".join(filter(None, words))
    after = parse_retry_after(headers.get("Retry-After", ""))
    if (milliseconds := parse_retry_after(headers.get("Retry-After-Ms", ""))) is not None:
        after = milliseconds / 1000.0
    if kind is AccessDenied and api_key_env:
        message += f"; check the key in {api_key_env}"
    elif kind is AccessDenied:
        message += "; no key was sent: set OPENAI_API_KEY, or the variable named by api_key_env"
    elif kind is NotFound:
        message += "; check the URL and the model's name"
    elif 300 <= status < 400:
        message += f"; it points to {to_one_line(headers.get('Location') or 'an unknown location')}"
    elif kind is RateLimited and after:
        message += f"; it asks to wait {after:.0f} s"
    error = kind(message, after, content)
    too_long = (after or 0) > MAX_RETRY_AFTER_S and kind is not RateLimited
    # Waiting does not help an exhausted account.
    exhausted = "insufficient_quota" in (error_code(content), error_code(content, "type"))
    if kind.passing and (too_long or exhausted):
        error.passing, error.general = False, True
    return error


def error_code(content: Any, field: str = "code") -> str:
    """Return the machine-readable code in a server's error, or another field of it, or ""."""
    error = content.get("error") if isinstance(content, Mapping) else None
    found = error.get(field) if isinstance(error, Mapping) else None
    return found if isinstance(found, str) else ""


def error_message(content: Any) -> str:
    """Return the message in a server's error, from any of its usual fields."""
    if isinstance(content, Mapping):
        keys = ("error", "message", "detail")
        return next((error_message(content[key]) for key in keys if content.get(key)), "")
    if isinstance(content, list) and content:
        return error_message(content[0])
    return str(content)


def to_one_line(words: str) -> str:
    """Shorten a server's message to one printable line."""
    words = words.strip()[: 10 * MAX_MESSAGE_LENGTH]
    line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    return line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[:MAX_MESSAGE_LENGTH]} ..."


def parse_retry_after(value: str) -> float | None:
    """Parse a Retry-After header: a number of seconds or an HTTP date (RFC 9110)."""
    try:
        found = float(value)
    except ValueError:
        try:
            found = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, found) if found < float("inf") else None
