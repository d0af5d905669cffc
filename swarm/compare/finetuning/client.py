"""Client of a fine-tuning API: requests with timeouts, retried if that is safe; and API keys.

API keys are never stored: a job's key is identified by a salted hash or the name of its environment
variable.
"""

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from swarm._util.threads import shared_event_loop
from swarm.compare.finetuning.params import OPENAI_BASE_URL
from swarm.models.http import Call, RetryingClient
from swarm.models.http_errors import MalformedResponse
from swarm.models.rate_limit import Limits, RateLimiter
from swarm.models.transport import HttpTransport, proxy_for

MIN_UPLOAD_BYTES_PER_S = 100_000
"""Minimum upload speed in bytes per second, for timeouts."""

PAGE_SIZE, MAX_PAGES = 100, 10
"""Jobs per page of the list, and the maximum number of pages."""


class ApiRequest(NamedTuple):
    """A request with JSON, or with a file as form data."""

    method: str
    path: str
    json: Any = None
    query: dict[str, str] | None = None
    file: tuple[str, bytes] | None = None


class FinetuningTransport(HttpTransport):
    """Transport of any request; responses are handled like those of a model."""

    def _send(self, body: ApiRequest) -> Any:
        import aiohttp

        form = None
        if body.file:
            form = aiohttp.FormData({"purpose": "fine-tune"})
            name, data = body.file
            # A new stream for each attempt, so that a retry starts at its beginning.
            form.add_field(
                "file", io.BytesIO(data), filename=name, content_type="application/jsonl"
            )
        return self.session.request(
            body.method,
            f"{self.url}/{body.path}",
            json=body.json,
            params=body.query,
            data=form,
            proxy=self.proxy,
            # A redirect could send the key to another host.
            allow_redirects=False,
        )


class FinetuningClient:
    """Client of a fine-tuning API.

    Args:
        url: As `base_url` of OpenAI's client.
        key: API key; sent in the header only.
        variable: Environment variable of the key, for messages.
        timeout: Seconds for a response including retries; uploads get more according to their size.
    """

    def __init__(self, url: str, key: str, variable: str | None, timeout: float) -> None:
        self.url, self._key, self.variable = url, key, variable
        self.limits = Limits(timeout=timeout, connect_timeout=min(10.0, timeout))

    @property
    def display_name(self) -> str:
        """Name of the server in messages."""
        return f"the fine-tuning API ({self.url})"

    def upload_file(self, name: str, data: bytes) -> str:
        """Upload a training file and return its id.

        Raises:
            RequestError: The server rejects it or is unreachable.
        """
        more = len(data) / MIN_UPLOAD_BYTES_PER_S
        content = self._request(
            ApiRequest("POST", "files", file=(name, data)), _object_reader("id"), more=more
        )
        return str(content["id"])

    def get_file(self, id: str) -> Any:
        """Return a file's metadata; errors as `upload_file`."""
        return self._request(ApiRequest("GET", f"files/{quote(id)}"), _object_reader("id"))

    def create_job(self, body: dict[str, Any]) -> Any:
        """Create a job; never retried, as the job may exist although its response was lost.

        Raises:
            RequestError: If it is `passing`, the job may exist nevertheless, except after a rate
                limit.
        """
        return self._request(
            ApiRequest("POST", "fine_tuning/jobs", body), _object_reader("id", "status"), retries=0
        )

    def get_job(self, id: str) -> Any:
        """Return a job's metadata; errors as `upload_file`."""
        return self._request(
            ApiRequest("GET", f"fine_tuning/jobs/{id}"), _object_reader("id", "status")
        )

    def list_jobs(self, since: float) -> list[Any]:
        """Return the jobs created since a time, the latest first; errors as `upload_file`."""
        found: list[Any] = []
        query = {"limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            content = self._request(
                ApiRequest("GET", "fine_tuning/jobs", query=dict(query)), _object_reader("data")
            )
            page = [one for one in content["data"] if isinstance(one, dict)]
            found += [one for one in page if (one.get("created_at") or since) >= since]
            finished = not page or (page[-1].get("created_at") or since) < since
            if finished or not content.get("has_more"):
                break
            query["after"] = str(page[-1].get("id"))
        return found

    def list_checkpoints(self, id: str) -> list[Any]:
        """Return a job's checkpoints; errors as `upload_file`."""
        return self._list_objects(f"fine_tuning/jobs/{id}/checkpoints")

    def list_events(self, id: str) -> list[Any]:
        """Return a job's events, the latest first; errors as `upload_file`."""
        return self._list_objects(f"fine_tuning/jobs/{id}/events", limit="20")

    def cancel_job(self, id: str) -> Any:
        """Cancel a job; errors as `upload_file`."""
        return self._request(
            ApiRequest("POST", f"fine_tuning/jobs/{id}/cancel"), _object_reader("id", "status")
        )

    def delete_model(self, model: str) -> None:
        """Delete a fine-tuned model permanently; errors as `upload_file`."""
        self._request(ApiRequest("DELETE", f"models/{quote(model, safe=':')}"), _object_reader())

    def _list_objects(self, path: str, **query: str) -> list[Any]:
        content = self._request(ApiRequest("GET", path, query=query), _object_reader("data"))
        return [one for one in content["data"] if isinstance(one, dict)]

    def _request(
        self, ask: ApiRequest, read: Callable[..., Any], retries: int = 3, more: float = 0.0
    ) -> Any:
        limits = Limits(
            timeout=self.limits.timeout + more,
            retries=retries,
            connect_timeout=self.limits.connect_timeout,
            # A request without retries may hit a daily limit, which the manager waits for.
            rate_limit_timeout=self.limits.rate_limit_timeout if retries else 0.0,
        )
        return shared_event_loop().run(self._send_request(ask, read, limits))

    async def _send_request(self, ask: ApiRequest, read: Callable[..., Any], limits: Limits) -> Any:
        import aiohttp

        timeouts = aiohttp.ClientTimeout(total=limits.timeout, sock_connect=limits.connect_timeout)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=timeouts,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            exchange = FinetuningTransport(
                session,
                self.display_name,
                self.url,
                proxy_for(self.url),
                self._key,
                self.variable or "api_key",
                limits,
            )
            caller = RetryingClient(self.display_name, RateLimiter(limits))
            return await caller(exchange, Call(ask, timeout=limits.timeout), read)


def _object_reader(*keys: str) -> Callable[[Any, float], Any]:
    """Return a reader that checks that the response is an object with these keys."""

    def check_object(response: Any, seconds: float) -> Any:
        if not isinstance(response, dict):
            raise MalformedResponse("it is not an object")
        for key in keys:
            if not isinstance(response.get(key), list if key == "data" else str):
                raise MalformedResponse(f"it has no {key!r}")
        return response

    return check_object


def format_time(at: float) -> str:
    """Format a time; the date is added if it is more than 12 hours ahead."""
    return time.strftime(
        "%H:%M" if at - time.time() < 43200 else "%Y-%m-%d %H:%M", time.localtime(at)
    )


OPENAI_KEY_VARIABLE = re.compile(r"OPENAI_API_KEY(_.*)?")
"""Environment variables that are searched for keys."""


class ApiKey(NamedTuple):
    """An API key, and the environment variable it is from, if any."""

    secret: str
    variable: str | None

    def __repr__(self) -> str:
        return f"Key({self.variable or 'given'})"


class ApiKeyRing:
    """API keys known to this process: given ones, and those of the environment.

    Args:
        salt: Salt of the database; see `JobStore.load_salt`.
        given: Keys beside those of the environment.
    """

    def __init__(self, salt: str, given: Sequence[str] = ()) -> None:
        self._salt, self._given = salt, list(given)

    def add_key(self, secret: str) -> ApiKey:
        """Remember a key for the lifetime of this object."""
        if secret not in self._given:
            self._given.append(secret)
        return ApiKey(secret, find_variable(secret))

    def hash_key(self, secret: str) -> str:
        """Return a short salted hash that identifies a key without revealing it."""
        return hashlib.sha256(f"{self._salt}:{secret}".encode()).hexdigest()[:12]

    def creation_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """Return the keys that may create a job: only that of its creator, since it is billed.

        The key with the same hash; else the current value of its variable, unless that is named as
        OpenAI's and the job belongs to another server.
        """
        name = job.get("key_variable") or ""
        present = os.environ.get(name, "").strip()
        usable = present and (
            job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL
            or not OPENAI_KEY_VARIABLE.fullmatch(name)
        )
        matching = [
            key
            for key in self._list_keys(name)
            if self.hash_key(key.secret) == job.get("key_print")
        ]
        return matching or ([ApiKey(present, name)] if usable else [])

    def access_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """Return the keys that may read a job, the most probable first.

        For OpenAI these are all known keys, as another key of the project has access, too. No other
        server is sent a key that is not meant for it.
        """
        others = (
            self._list_keys() if job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL else []
        )
        return list({key.secret: key for key in (*self.creation_keys(job), *others)}.values())

    def _list_keys(self, name: str = "") -> list[ApiKey]:
        """Return the given keys and those of the environment, including the variable `name`."""
        found = [ApiKey(secret, find_variable(secret)) for secret in self._given]
        for variable, value in sorted(os.environ.items()):
            if (OPENAI_KEY_VARIABLE.fullmatch(variable) or variable == name) and value.strip():
                found.append(ApiKey(value.strip(), variable))
        return list({key.secret: key for key in reversed(found)}.values())[::-1]


def find_variable(secret: str) -> str | None:
    """Return the environment variable that contains a key; OpenAI's names take precedence."""
    names = [name for name, value in os.environ.items() if value.strip() == secret]
    return min(
        names, key=lambda name: (not OPENAI_KEY_VARIABLE.fullmatch(name), name), default=None
    )
