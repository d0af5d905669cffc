"""HTTP errors in OpenAI's format, API key checks, names of models, and reading of bodies."""

import hmac
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from starlette.requests import ClientDisconnect, Request

from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.http_errors import BadRequest, RateLimited, RequestError, RequestTimeout

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's error types by status; other 4xx are "invalid_request_error", 5xx "server_error"."""

ERROR_STATUSES: dict[type[RequestError], int] = {
    BadRequest: 400,
    RateLimited: 429,
    RequestTimeout: 504,
}
"""Statuses for failures of an endpoint; others, as of its key, are not the client's (502)."""

MAX_NAMES_SHOWN = 10
"""Maximum number of names in an error message."""


class HttpError(UserError):
    """A rejected or failed request.

    Attributes:
        status: HTTP status code.
        parameter: Request field concerned, or `None`.
        reason: Machine-readable code, such as "model_not_found", or `None`.
        again: True if a retry may succeed.
        after: Seconds to wait before a retry, or `None`.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        parameter: str | None = None,
        reason: str | None = None,
        again: bool = False,
        after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.parameter, self.reason = status, parameter, reason
        self.again, self.after = again, after

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        kind = ERROR_TYPES.get(self.status, default_type)
        fields = {"message": str(self), "type": kind, "param": self.parameter, "code": self.reason}
        return {"error": fields}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that control the official client's automatic retries."""
        found = {"x-should-retry": "true" if self.again else "false"}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found | ({"Retry-After": f"{self.after:.0f}"} if self.after else {})


def http_error_from(error: BaseException, name: str) -> HttpError:
    """Convert a failure of a served model to an HTTP error.

    Args:
        error: The exception.
        name: The model's name; errors of local models are caused by the request.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        status = ERROR_STATUSES.get(type(error), 502)
        return HttpError(str(error), status, again=error.passing, after=error.after)
    if isinstance(error, UserError):
        return HttpError(str(error), 400 if name.startswith("local/") else 502)
    return HttpError(f"{name}: failed with {type(error).__name__}", 500)


LOCAL_HOST_PATTERN = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class ApiKeyGuard:
    """Checks API keys.

    Without a key, a server on the loopback interface only accepts requests whose Host is this
    machine: a web page could otherwise let its host name resolve to 127.0.0.1 (DNS rebinding).

    Args:
        key: The key; `None` requires none.
        local: True if the server is bound to the loopback interface.
    """

    def __init__(self, key: str | None, local: bool) -> None:
        self._key, self.local = key.encode() if key else None, local

    async def __call__(self, request: Request) -> None:
        """Check a request.

        Raises:
            HttpError: It is rejected.
        """
        if self._key is None:
            host = request.headers.get("host", "")
            if self.local and not LOCAL_HOST_PATTERN.fullmatch(host):
                raise HttpError(f"Host: {host!r:.80} is not an address of this machine", 403)
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self._key)
        if kind.lower() != "bearer" or not right:
            message = "the key is wrong" if key else "a key is needed: Authorization: Bearer KEY"
            raise HttpError(message, 401, reason="invalid_api_key")


async def read_json_body(request: Request) -> Any:
    """Read the JSON body of a request.

    The required Content-Type keeps out web pages of other origins: browsers send a preflight
    request first, which is rejected.

    Raises:
        HttpError: It is not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError("Content-Type: must be application/json", 415)
    try:
        return json.loads(await request.body(), parse_constant=_reject_constant)
    except ClientDisconnect:
        raise HttpError("the body is incomplete") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(f"the body is not JSON: {error}") from None


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def resolve_name(name: str, models: Mapping[str, Model]) -> str:
    """Return the served model for a client's name: the full name, or a unique suffix.

    Raises:
        HttpError: It does not exist, or is ambiguous.
    """
    if name in models:
        return name
    suffix_matches = [one for one in models if one.partition("/")[2] == name]
    if len(suffix_matches) == 1:
        return suffix_matches[0]
    full_names = {one.partition("/")[2]: one for one in models} | {one: one for one in models}
    matches = suffix_matches or [full_names[one] for one in get_close_matches(name, full_names, 1)]
    suggestion = f"did you mean {' or '.join(matches)}? " if matches else ""
    more = f" and {len(models) - MAX_NAMES_SHOWN} more" if len(models) > MAX_NAMES_SHOWN else ""
    available = f"{', '.join(list(models)[:MAX_NAMES_SHOWN])}{more}"
    message = f"model {name!r:.200}: is not served; {suggestion}available models: {available}"
    raise HttpError(message, 404, "model", "model_not_found")
