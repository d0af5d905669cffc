"""What can go wrong with a request: one class a kind, one line a message, never a key in it."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from swarm.errors import UserError

MAX_MESSAGE_LENGTH = 300
"""Characters of a server's own words that a message repeats."""

CONTENT_ERROR_CODES = (
    "content_filter",
    "content_policy_violation",
    "context_length_exceeded",
    "string_above_max_length",
)
"""Reasons to refuse a request that lie in its text: another text may be answered."""

MISSING_KEY_HINT = (
    "; no key was sent: put it into OPENAI_API_KEY, or into the variable of api_key_env"
)
"""What to do about a server that wants a key and was given none."""

MAX_RETRY_AFTER_S = 120.0
"""The most seconds that a server may ask us to wait; `Limits.rate_limit_timeout` after a 429."""

QUOTA_ERROR_CODE = "insufficient_quota"
"""What an endpoint calls an account without money, which waiting does not mend."""


class RequestError(UserError):
    """A request failed.

    Attributes:
        passing: Whether the same request may succeed later.
        general: Whether other requests to the same model will fail likewise.
        after: Seconds that the server asks us to wait, or `None`.
        content: What the server said, as JSON or as text; `None` if nothing.
    """

    passing = False
    general = False

    def __init__(self, message: str, after: float | None = None, content: Any = None) -> None:
        super().__init__(message)
        self.after = after
        self.content = content

    def with_attempt_count(self, times: int) -> "RequestError":
        """The same, saying how often was asked."""
        if times == 1:
            return self
        error = type(self)(f"{self}; asked {times} times", self.after, self.content)
        error.passing, error.general = self.passing, self.general
        return error


class MalformedResponse(ValueError):
    """What a server says is not what was agreed; the message says in what."""


class AccessDenied(RequestError):
    """401, 402, 403: the key, or the account, does not allow it."""

    general = True


class NotFound(RequestError):
    """404: no such URL or model."""

    general = True


class BadRequest(RequestError):
    """Another 4xx: this request is not accepted; others may be."""


class RateLimited(RequestError):
    """429: too many requests, or no quota left."""

    passing = True


class ServerFault(RequestError):
    """5xx, or an answer that is not what was agreed."""

    passing = True


class ConnectionFailed(RequestError):
    """No connection, or a lost one."""

    passing = True


class RequestTimeout(RequestError):
    """No connection or no answer in time; 408."""

    passing = True


ERROR_CLASS_BY_STATUS: dict[int, type[RequestError]] = {
    401: AccessDenied,
    402: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    408: RequestTimeout,
    409: ServerFault,
    425: ServerFault,
    429: RateLimited,
}


def error_from_response(
    who: str, status: int, headers: Mapping[str, str], content: Any, api_key_env: str | None
) -> RequestError:
    """The error that an answer of status 300 or above stands for.

    Args:
        who: The server's name and URL.
        content: Its answer, as JSON or as text, without the key.
        api_key_env: The environment variable with the key, for the advice.
    """
    kind = ERROR_CLASS_BY_STATUS.get(status, ServerFault if status >= 500 else BadRequest)
    title = HTTPStatus(status).phrase if status in list(HTTPStatus) else ""
    message = ": ".join(
        filter(None, [who, f"{status} {title}".strip(), to_one_line(error_message(content))])
    )
    after = parse_retry_after(headers.get("Retry-After", ""))
    milliseconds = parse_retry_after(headers.get("Retry-After-Ms", ""))
    after = after if milliseconds is None else milliseconds / 1000.0
    if kind is AccessDenied:
        message += f"; check the key in {api_key_env}" if api_key_env else MISSING_KEY_HINT
    elif kind is NotFound:
        message += "; check the URL and the model's name"
    elif 300 <= status < 400:
        message += f"; it points to {to_one_line(headers.get('Location') or 'nowhere')}"
    elif kind is RateLimited and after:
        message += f"; it asks to wait {after:.0f} s"
    error = kind(message, after, content)
    long = (after or 0) > MAX_RETRY_AFTER_S and kind is not RateLimited
    if kind.passing and (long or QUOTA_ERROR_CODE in (error_code(content), error_type(content))):
        error.passing, error.general = False, True
    return error


def error_code(content: Any) -> str:
    """The machine-readable reason in a server's error, or nothing."""
    return _error_field(content, "code")


def error_type(content: Any) -> str:
    """The kind of a server's error, or nothing."""
    return _error_field(content, "type")


def _error_field(content: Any, name: str) -> str:
    error = content.get("error") if isinstance(content, Mapping) else None
    found = error.get(name) if isinstance(error, Mapping) else None
    return found if isinstance(found, str) else ""


def error_message(content: Any) -> str:
    """The words in a server's error, in whichever of the usual places they are."""
    if isinstance(content, Mapping):
        for key in ("error", "message", "detail"):
            if content.get(key):
                return error_message(content[key])
        return ""
    if isinstance(content, list) and content:
        return error_message(content[0])
    return str(content)


def to_one_line(words: str) -> str:
    """A server's words, fit for a terminal: short, one line, printable."""
    line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    return line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[:MAX_MESSAGE_LENGTH]} ..."


def parse_retry_after(value: str) -> float | None:
    """The seconds in a Retry-After header, which has a number or an HTTP date (RFC 9110)."""
    try:
        found = float(value)
    except ValueError:
        try:
            found = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, found) if found < float("inf") else None
