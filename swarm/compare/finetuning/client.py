"""The few requests of a fine-tuning API: bounded in time, repeated where that is harmless."""

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from swarm.compare.finetuning.params import OPENAI_BASE_URL
from swarm.models.http import Call, RetryingClient
from swarm.models.http_errors import MalformedResponse
from swarm.models.rate_limit import Limits, RateLimiter
from swarm.models.threaded import shared_event_loop
from swarm.models.transport import HttpTransport, proxy_for

MIN_UPLOAD_BYTES_PER_S = 100_000
"""Bytes a second that an upload is waited for at least."""

PAGE_SIZE, MAX_PAGES = 100, 10
"""Jobs in a page of the list, and the most pages that are read."""


class ApiRequest(NamedTuple):
    """One request: JSON, or a file as a form."""

    method: str
    path: str
    json: Any = None
    query: dict[str, str] | None = None
    file: tuple[str, bytes] | None = None


class FinetuningTransport(HttpTransport):
    """Sends any kind of request; what comes back is treated as that of a model."""

    def _send(self, body: ApiRequest) -> Any:
        import aiohttp

        form = None
        if body.file:
            form = aiohttp.FormData({"purpose": "fine-tune"})
            name, data = body.file
            # Of a stream of its own: a repetition begins at the beginning.
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
            allow_redirects=False,
        )


class FinetuningClient:
    """A fine-tuning API by its URL and a key.

    Args:
        url: As `base_url` of OpenAI's client.
        key: Goes into the header alone.
        variable: The environment variable that holds it, for messages.
        timeout: Seconds for an answer with all repetitions; an upload has more by its size.
    """

    def __init__(self, url: str, key: str, variable: str | None, timeout: float) -> None:
        self.url, self._key, self.variable = url, key, variable
        self.limits = Limits(timeout=timeout, connect_timeout=min(10.0, timeout))

    @property
    def display_name(self) -> str:
        """The server, as messages call it."""
        return f"the fine-tuning API ({self.url})"

    def upload_file(self, name: str, data: bytes) -> str:
        """Send a training file; gives its id.

        Raises:
            RequestError: The server does not take it, or is not there.
        """
        more = len(data) / MIN_UPLOAD_BYTES_PER_S
        told = self._request(
            ApiRequest("POST", "files", file=(name, data)), _object_reader("id"), more=more
        )
        return str(told["id"])

    def get_file(self, id: str) -> Any:
        """What the server knows of a file; see `upload` for errors."""
        return self._request(ApiRequest("GET", f"files/{quote(id)}"), _object_reader("id"))

    def create_job(self, body: dict[str, Any]) -> Any:
        """Make a job; asked once, as a lost answer does not say that there is none.

        Raises:
            RequestError: Where it is `passing`, there may be a job nevertheless; not where the
                server limits the rate.
        """
        return self._request(
            ApiRequest("POST", "fine_tuning/jobs", body), _object_reader("id", "status"), retries=0
        )

    def get_job(self, id: str) -> Any:
        """What the server knows of a job; see `upload` for errors."""
        return self._request(
            ApiRequest("GET", f"fine_tuning/jobs/{id}"), _object_reader("id", "status")
        )

    def list_jobs(self, since: float) -> list[Any]:
        """The jobs that were made since then, the latest first; see `upload` for errors."""
        found: list[Any] = []
        query = {"limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            told = self._request(
                ApiRequest("GET", "fine_tuning/jobs", query=dict(query)), _object_reader("data")
            )
            page = [one for one in told["data"] if isinstance(one, dict)]
            found += [one for one in page if (one.get("created_at") or since) >= since]
            over = not page or (page[-1].get("created_at") or since) < since
            if over or not told.get("has_more"):
                break
            query["after"] = str(page[-1].get("id"))
        return found

    def list_checkpoints(self, id: str) -> list[Any]:
        """A job's kept steps; see `upload` for errors."""
        return self._list_objects(f"fine_tuning/jobs/{id}/checkpoints")

    def list_events(self, id: str) -> list[Any]:
        """What has happened to a job, the latest first; see `upload` for errors."""
        return self._list_objects(f"fine_tuning/jobs/{id}/events", limit="20")

    def cancel_job(self, id: str) -> Any:
        """End a job; see `upload` for errors."""
        return self._request(
            ApiRequest("POST", f"fine_tuning/jobs/{id}/cancel"), _object_reader("id", "status")
        )

    def delete_model(self, model: str) -> None:
        """Remove a fine-tuned model for good; see `upload` for errors."""
        self._request(ApiRequest("DELETE", f"models/{quote(model, safe=':')}"), _object_reader())

    def _list_objects(self, path: str, **query: str) -> list[Any]:
        told = self._request(ApiRequest("GET", path, query=query), _object_reader("data"))
        return [one for one in told["data"] if isinstance(one, dict)]

    def _request(
        self, ask: ApiRequest, read: Callable[..., Any], retries: int = 3, more: float = 0.0
    ) -> Any:
        limits = Limits(
            timeout=self.limits.timeout + more,
            retries=retries,
            connect_timeout=self.limits.connect_timeout,
            # What is sent once alone may meet a limit of the day, which the manager waits for.
            rate_limit_timeout=self.limits.rate_limit_timeout if retries else 0.0,
        )
        return shared_event_loop().run(self._send_request(ask, read, limits))

    async def _send_request(self, ask: ApiRequest, read: Callable[..., Any], limits: Limits) -> Any:
        import aiohttp

        wait = aiohttp.ClientTimeout(total=limits.timeout, sock_connect=limits.connect_timeout)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=wait,
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
            asking: RetryingClient[Any] = RetryingClient(
                self.display_name, RateLimiter(limits), read, None
            )
            return await asking(exchange, 0, Call(ask, timeout=limits.timeout))


def _object_reader(*keys: str) -> Callable[[int, Any, float], Any]:
    """Reads an object that has these keys, whose values are as agreed."""

    def check_object(number: int, told: Any, seconds: float) -> Any:
        if not isinstance(told, dict):
            raise MalformedResponse("it is no object")
        for key in keys:
            if not isinstance(told.get(key), list if key == "data" else str):
                raise MalformedResponse(f"it has no {key!r}")
        return told

    return check_object


def format_wait(seconds: float) -> str:
    """A time to wait, in words."""
    minutes = max(0, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def format_time(at: float) -> str:
    """A moment, short."""
    return time.strftime(
        "%H:%M" if at - time.time() < 43200 else "%Y-%m-%d %H:%M", time.localtime(at)
    )


# Which key a job was made with: found again by a salted hash or a variable's name, never kept.

OPENAI_KEY_VARIABLE = re.compile(r"OPENAI_API_KEY(_.*)?")
"""Environment variables that are looked into."""


class ApiKey(NamedTuple):
    """A key, and the environment variable that it is from, if any."""

    secret: str
    variable: str | None

    def __repr__(self) -> str:
        return f"Key({self.variable or 'given'})"


class ApiKeyRing:
    """The keys that this process knows: those that it was given, and those in the environment.

    Args:
        salt: Of the database; see `Store.salt`.
        given: Keys to be tried beside those of the environment.
    """

    def __init__(self, salt: str, given: Sequence[str] = ()) -> None:
        self._salt, self._given = salt, list(given)

    def add_key(self, secret: str) -> ApiKey:
        """Remember a key for as long as this object lives."""
        if secret not in self._given:
            self._given.append(secret)
        return ApiKey(secret, find_variable(secret))

    def hash_key(self, secret: str) -> str:
        """A short hash that tells a key from others and does not give it away."""
        return hashlib.sha256(f"{self._salt}:{secret}".encode()).hexdigest()[:12]

    def creation_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """The keys with which a job was made or may be made: they pay, so that no other will do.

        The one of the same hash; else what its variable holds now, but for what is OpenAI's by its
        name and would go elsewhere.
        """
        name = job.get("key_variable") or ""
        now = os.environ.get(name, "").strip()
        meant = now and (
            job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL
            or not OPENAI_KEY_VARIABLE.fullmatch(name)
        )
        mine = [
            key
            for key in self._list_keys(name)
            if self.hash_key(key.secret) == job.get("key_print")
        ]
        return mine or ([ApiKey(now, name)] if meant else [])

    def access_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """The keys that may see a job, the likeliest first.

        Of a job at OpenAI's all that are known, as another key of its project sees it too. No other
        server is sent a key that was not meant for it.
        """
        others = (
            self._list_keys() if job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL else []
        )
        return list({key.secret: key for key in (*self.creation_keys(job), *others)}.values())

    def _list_keys(self, name: str = "") -> list[ApiKey]:
        """The keys that were given, and those of the environment, with that of this name."""
        found = [ApiKey(secret, find_variable(secret)) for secret in self._given]
        for variable, value in sorted(os.environ.items()):
            if (OPENAI_KEY_VARIABLE.fullmatch(variable) or variable == name) and value.strip():
                found.append(ApiKey(value.strip(), variable))
        return list({key.secret: key for key in reversed(found)}.values())[::-1]


def find_variable(secret: str) -> str | None:
    """The environment variable that holds a key; one of OpenAI's name first."""
    names = [name for name, value in os.environ.items() if value.strip() == secret]
    return min(
        names, key=lambda name: (not OPENAI_KEY_VARIABLE.fullmatch(name), name), default=None
    )
