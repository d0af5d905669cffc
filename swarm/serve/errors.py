"""What a client is told instead of an answer: a status, and an error in OpenAI's shape."""

import hmac
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from swarm.errors import UserError
from swarm.models.http_errors import BadRequest, RateLimited, RequestError, RequestTimeout

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's word for a status; other 4xx are "invalid_request_error", 5xx "server_error"."""

ERROR_STATUSES: tuple[tuple[type[RequestError], int], ...] = (
    (BadRequest, 400),
    (RateLimited, 429),
    (RequestTimeout, 504),
    (RequestError, 502),
)
"""What an endpoint's failure is to our client; its key and its name are ours, not the client's."""


class HttpError(UserError):
    """A request that gets no answer.

    Attributes:
        status: Of HTTP.
        parameter: The field of the request that it is about, or `None`.
        reason: For programs, such as "model_not_found", or `None`.
        again: Whether the same may succeed at once or soon.
        after: Seconds after which it may be asked again, or `None`.
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
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = ERROR_TYPES.get(self.status, usual)
        told = {"message": str(self), "type": kind, "param": self.parameter, "code": self.reason}
        return {"error": told}

    @property
    def headers(self) -> dict[str, str]:
        """What the official client reads before it asks again by itself."""
        told = {"x-should-retry": "true" if self.again else "false"}
        if self.status == 401:
            told["WWW-Authenticate"] = "Bearer"
        return told | ({"Retry-After": f"{self.after:.0f}"} if self.after else {})


def http_error_from(error: BaseException, name: str) -> HttpError:
    """What a failure of a served model is to the client.

    Args:
        error: As it was raised.
        name: The model's; one of this machine refuses only what cannot be asked.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        status = next(status for kind, status in ERROR_STATUSES if isinstance(error, kind))
        return HttpError(str(error), status, again=error.passing, after=error.after)
    if isinstance(error, UserError):
        return HttpError(str(error), 400 if name.startswith("local/") else 502)
    return HttpError(f"{name}: it failed with {type(error).__name__}", 500)


# Who may ask, and what is read of it: the key, the address that was meant, the body.

MAX_BODY_BYTES = 16 * 2**20
"""Bytes of a body; a million tokens are about four million."""

LOCAL_HOST_PATTERN = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class ApiKeyGuard:
    """Lets those in who have the key.

    Without a key, a server on the loopback answers those alone who call it by an address of this
    machine: a page in a browser could otherwise have its own name point here.

    Args:
        key: `None` asks for none.
        local: Whether the server is bound to the loopback.
    """

    def __init__(self, key: str | None, local: bool) -> None:
        self._key, self.local = key.encode() if key else None, local

    async def __call__(self, request: Request) -> None:
        """Let a request in.

        Raises:
            Refused: It may not be.
        """
        if self._key is None:
            host = request.headers.get("host", "")
            if self.local and not LOCAL_HOST_PATTERN.fullmatch(host):
                raise HttpError(f"Host: {host!r:.80} is no address of this machine", 403)
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._key)
        if kind.lower() != "bearer" or not right:
            what = "the key is wrong" if given else "a key is needed: Authorization: Bearer KEY"
            raise HttpError(what, 401, reason="invalid_api_key")


async def read_json_body(request: Request) -> Any:
    """The body of a request, which has to be JSON and to say so.

    That it has to say so keeps pages of other origins out: a browser asks first, and is refused.

    Raises:
        Refused: It is something else, or too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError("Content-Type: has to be application/json", 415)
    parts, length = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            length += len(part)
            if length > MAX_BODY_BYTES:
                raise HttpError(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
    except ClientDisconnect:
        raise HttpError("the body broke off") from None
    try:
        return json.loads(b"".join(parts), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(f"the body is not JSON: {error}") from None


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
