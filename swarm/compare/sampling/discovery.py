"""Discovery of the endpoint that has a model; only endpoints that may have it are probed.

The endpoint found is stored beside the cached answers, for later processes.
"""

import json
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swarm.compare.sampling.backends import open_answer_cache
from swarm.compare.settings import ENDPOINT_URLS, CompareSettings, EndpointPair
from swarm.errors import InvalidArgument, NoClientForModel, UserError
from swarm.models import http
from swarm.models.http import Call
from swarm.models.http_errors import ConnectionFailed, RequestTimeout
from swarm.models.openai_protocol import chat_url
from swarm.models.rate_limit import Limits

if TYPE_CHECKING:
    from swarm.compare.settings import EndpointPair


class EndpointClient:
    """An endpoint with a key, as `Config.client_for_model` returns it.

    If the `openai` package is installed, all other attributes, such as `chat`, are those of its
    client.

    Args:
        base_url: URL without /chat/completions.
        api_key: Key of the endpoint; no string of this object contains it.
        variable: Name of the environment variable of the key.
        kept_at: Base URL of a failed endpoint whose cached answers this one continues; `None`:
            `base_url`.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        variable: str | None = None,
        kept_at: str | None = None,
    ) -> None:
        self.base_url, self.api_key, self.variable = str(base_url), api_key, variable
        self.kept_at = kept_at or self.base_url

    def __repr__(self) -> str:
        return f"Client({self.base_url!r}, key of {self.variable})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sdk, name)

    @cached_property
    def _sdk(self) -> Any:
        try:
            from openai import OpenAI
        except ImportError:
            raise UserError("this requires the openai package: pip install openai") from None
        return OpenAI(base_url=self.base_url, api_key=self.api_key)


class KeyedClient(http.HttpClient):
    """Chat client with a given key instead of one from the environment."""

    def __init__(self, name: str, client: Any, limits: Limits) -> None:
        super().__init__(name, chat_url(client.base_url), None, limits)
        variable = getattr(client, "variable", None)
        # Used in messages only; it need not be the name of a variable.
        self.api_key_env = variable or None
        self._key: str | None = client.api_key or None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a client with a key in memory cannot be stored")

    def read_api_key(self) -> str | None:
        """Return the given key."""
        return self._key


CREATE_ENDPOINT_TABLE = (
    "CREATE TABLE IF NOT EXISTS places "
    "(model TEXT, among TEXT, url TEXT, variable TEXT, time REAL, PRIMARY KEY (model, among))"
)

ORIGINS = "CREATE TABLE IF NOT EXISTS origins (model TEXT PRIMARY KEY, url TEXT)"
"""Table of the endpoint at which a model answered before it failed permanently."""


def _run_statement(statement: str, values: tuple[Any, ...]) -> list[Any]:
    """Run a statement on the tables, which are created if needed, and return its rows."""

    def work(connection: sqlite3.Connection) -> list[Any]:
        connection.execute(CREATE_ENDPOINT_TABLE)
        connection.execute(ORIGINS)
        return connection.execute(statement, values).fetchall()

    return open_answer_cache().run(work)


def _endpoints_as_json(endpoints: "Sequence[EndpointPair]") -> str:
    """Return the endpoints without their keys."""
    return json.dumps([(url, variable) for url, _, variable in endpoints])


def load_endpoint(model: str, possible: "Sequence[EndpointPair]") -> "EndpointPair | None":
    """Return the stored endpoint of a model, for this list of candidates."""
    query = "SELECT url, variable FROM places WHERE model = ? AND among = ?"
    rows = _run_statement(query, (model, _endpoints_as_json(possible)))
    return next((pair for pair in possible if (pair[0], pair[2]) in rows), None)


def save_endpoint(model: str, possible: "Sequence[EndpointPair]", client: "EndpointClient") -> None:
    """Store the endpoint of a model."""
    row = (model, _endpoints_as_json(possible), client.base_url, client.variable, time.time())
    _run_statement("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?)", row)


def forget_endpoint(model: str, origin: str | None) -> None:
    """Delete the stored endpoint, so that the model is searched again.

    Args:
        model: Name of the model.
        origin: Base URL whose cached answers another endpoint will continue; `None`: unknown.
    """
    _run_statement("DELETE FROM places WHERE model = ?", (model,))
    if origin is not None:
        _run_statement("INSERT OR REPLACE INTO origins VALUES (?, ?)", (model, origin))


def origin_of(model: str, possible: "Sequence[EndpointPair]") -> "EndpointPair | None":
    """Return the endpoint whose cached answers are continued; `None` if not configured now."""
    rows = _run_statement("SELECT url FROM origins WHERE model = ?", (model,))
    return next((pair for pair in possible if (pair[0],) in rows), None)


MODEL_NAME_PATTERNS = {
    "api.openai.com": re.compile(r"(?!tinker:)[^/]+"),
    "api.anthropic.com": re.compile(r"claude[^/]*"),
    "openrouter.ai": re.compile(r"(?!tinker:)[^/]+/.+"),
    "tinker.thinkingmachines.dev": re.compile(r"tinker:.+|[^/]+/.+"),
}
"""Pattern of the model names of a host; any other host may have any model."""

LOCAL_PREFIXES = ("local", "llm", "function", "moa", "consortium")
"""Prefixes of names that belong to no endpoint."""

FOLDER_PREFIXES = {"search": "local/search", "initial_experts": "local"}
"""Folders whose models are named by their path."""

NON_ENDPOINT_PREFIXES = {*LOCAL_PREFIXES, *FOLDER_PREFIXES}

PROBE_LIMITS = Limits(connect_timeout=10.0, timeout=30.0, retries=1)
"""Limits of probes: an unreachable endpoint must fail within seconds."""


def may_host_model(base_url: str, model: str) -> bool:
    """Return whether an endpoint can have a model of this name."""
    form = MODEL_NAME_PATTERNS.get(urlsplit(base_url).hostname or "")
    return form is None or form.fullmatch(model) is not None


class EndpointIndex:
    """Index of discovered endpoints.

    Attributes:
        found: By model: its endpoint, or the error that it has none; valid for the current pairs.
    """

    def __init__(self) -> None:
        self.found: dict[str, EndpointClient | NoClientForModel] = {}
        self._certain: set[str] = set()
        self._seen: list[EndpointPair] | None = None
        self._lock, self._locks = threading.Lock(), dict[str, threading.Lock]()

    def clear_all(self) -> None:
        """Clear the index of this process; endpoints stored by earlier processes remain."""
        with self._lock:
            self._seen = None
            self.found.clear()
            self._certain.clear()

    def find_client(self, model: str, certain: bool) -> EndpointClient:
        """Return the endpoint of a model.

        Args:
            model: Name of the model.
            certain: Probe even a single candidate; otherwise its first request decides.

        Raises:
            NoClientForModel: No endpoint has the model.
        """
        if model.partition("/")[0] in NON_ENDPOINT_PREFIXES:
            raise NoClientForModel(f"{model}: runs in this process, not at an endpoint")
        pairs = self._refresh_pairs()
        with self._lock:
            lock = self._locks.setdefault(model, threading.Lock())
        with lock:
            previous = self.found.get(model)
            failed = isinstance(previous, NoClientForModel) and not previous.lasting
            if previous is None or failed or (certain and model not in self._certain):
                self.found[model] = self._search_model(model, pairs, certain)
            found = self.found[model]
        if isinstance(found, NoClientForModel):
            raise found
        return found

    def cached_client(self, model: str) -> EndpointClient | None:
        """Return the endpoint of a model if it was found before."""
        self._refresh_pairs()
        found = self.found.get(model)
        return found if isinstance(found, EndpointClient) else None

    def candidate_endpoints(self, model: str) -> list[EndpointPair]:
        """Return the endpoints that may have a model, in order of preference."""
        return [pair for pair in self._refresh_pairs() if may_host_model(pair[0], model)]

    def mark_confirmed(self, model: str) -> None:
        """Store that the model has answered at its endpoint."""
        found = self.found.get(model)
        if model not in self._certain and isinstance(found, EndpointClient):
            self._certain.add(model)
            save_endpoint(model, self.candidate_endpoints(model), found)

    def origin(self, model: str) -> EndpointClient | None:
        """Return the endpoint where a model answered before it failed; `None` if unknown."""
        pair = origin_of(model, self.candidate_endpoints(model))
        return pair and EndpointClient(*pair)

    def mark_missing(self, model: str) -> None:
        """Forget the endpoint of a model, so that it is searched again.

        Its cached answers will be used with the endpoint found next, so that only missing samples
        are requested there.
        """
        found = self.found.pop(model, None)
        origin = (
            found.kept_at if isinstance(found, EndpointClient) and model in self._certain else None
        )
        self._certain.discard(model)
        forget_endpoint(model, origin)

    def _refresh_pairs(self) -> list[EndpointPair]:
        """Return the pairs sorted by variable; the index is cleared if they have changed."""
        pairs = sorted(validate_pairs(CompareSettings.url_key_pairs), key=lambda pair: pair[2])
        with self._lock:
            if pairs != self._seen:
                self._seen = pairs
                self.found.clear()
                self._certain.clear()
        return pairs

    def _search_model(
        self, model: str, pairs: list[EndpointPair], certain: bool
    ) -> EndpointClient | NoClientForModel:
        endpoints = [pair for pair in pairs if may_host_model(pair[0], model)]
        if not endpoints:
            return NoClientForModel(f"{model}: {_no_endpoint_message(pairs)}")
        known, origin = load_endpoint(model, endpoints), origin_of(model, endpoints)
        kept_at = origin[0] if origin else None
        if known is not None:
            self._certain.add(model)
            return EndpointClient(*known, kept_at)
        if len(endpoints) == 1 and not certain:
            return EndpointClient(*endpoints[0])
        return self._probe_endpoints(model, endpoints, kept_at)

    def _probe_endpoints(
        self, model: str, endpoints: list[EndpointPair], kept_at: str | None
    ) -> EndpointClient | NoClientForModel:
        with ThreadPoolExecutor(len(endpoints)) as threads:
            errors = list(threads.map(lambda pair: _probe_endpoint(model, pair), endpoints))
        hosting = []
        for pair, error in zip(endpoints, errors, strict=True):
            if error is None:
                hosting.append(pair)
            elif not hosting:
                _report_probe(pair, error)
        if hosting:
            found = next((pair for pair in hosting if pair[0] == kept_at), hosting[0])
            if kept_at not in (None, found[0]):
                print(
                    f"{model}: {_host(kept_at)} keeps failing; {_host(found[0])} is used for "
                    "missing answers (remove the first from url_key_pairs to use it for all)",
                    file=sys.stderr,
                )
            self._certain.add(model)
            save_endpoint(model, endpoints, client := EndpointClient(*found, kept_at))
            return client
        error = NoClientForModel(
            f"{model}: none of {len(endpoints)} endpoints has it; error of the first: {errors[0]}"
        )
        error.lasting = any(isinstance(one, ConnectionFailed | RequestTimeout) for one in errors)
        return error


ENDPOINT_INDEX = EndpointIndex()
"""Index of this process."""


def validate_pairs(pairs: Any) -> list[EndpointPair]:
    """Validate `Config.url_key_pairs`.

    Raises:
        InvalidArgument: They are malformed; the message does not contain keys.
    """
    form = "a list of (base_url, key, name of the key's variable)"
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise InvalidArgument(f"Config.url_key_pairs: must be {form}")
    found = []
    for number, pair in enumerate(pairs):
        texts = isinstance(pair, tuple | list) and all(isinstance(part, str) for part in pair)
        if not texts or len(pair) not in (2, 3):
            raise InvalidArgument(f"Config.url_key_pairs[{number}]: must be one of {form}")
        found.append((pair[0], pair[1], pair[2] if len(pair) == 3 else f"KEY_{number}"))
    return found


def _probe_endpoint(model: str, pair: EndpointPair) -> UserError | None:
    """Return why an endpoint does not have a model; `None` if it has."""
    from swarm.compare.model_adapter import ModelAdapter

    params = dict(ModelAdapter.test_request_params(model))
    timeout = params.pop("timeout", None)
    try:
        client = KeyedClient(model, EndpointClient(*pair), PROBE_LIMITS)
        client.run_calls([Call(params, timeout=timeout)], lambda _, content: content["choices"])
    except UserError as error:
        return error
    return None


def _report_probe(pair: EndpointPair, error: UserError) -> None:
    if CompareSettings.verbose:
        print(f"{pair[0]}, key of {pair[2]}: {error}", file=sys.stderr)


def _host(url: str | None) -> str:
    """Return host and port of a base URL."""
    return urlsplit(url or "").netloc


def _no_endpoint_message(pairs: list[EndpointPair]) -> str:
    """Explain why no endpoint can have a model."""
    if pairs:
        hosts = ", ".join(dict.fromkeys(urlsplit(pair[0]).netloc for pair in pairs))
        return (
            f"no model at {hosts} can have this name; add a prefix, as in local/rooms or "
            "PROVIDER/MODEL, or add an endpoint to Config.url_key_pairs"
        )
    return (
        f"the model's location is unknown: set one of {', '.join(ENDPOINT_URLS)}, or "
        "Config.url_key_pairs; or add a prefix, as in local/rooms, ollama/NAME or PROVIDER/MODEL"
    )
