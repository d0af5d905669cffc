"""What a client is told instead of an answer: a status, and an error in OpenAI's shape."""

from typing import Any

from swarm.errors import UserError
from swarm.models.failures import BadRequest, RateLimited, RequestError, RequestTimeout

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
