"""Who may ask, and what is read of it: the key, the address that was meant, the body."""

import hmac
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from swarm.serve.refusals import HttpError

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
