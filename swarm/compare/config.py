"""Settings of all experiments in this process, and the discovery of endpoints.

Only endpoints that may have a model are probed. The one found is stored beside the cached answers,
for later processes.
"""

import json
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, WrapValidator

from swarm._util.files import cache_folder
from swarm._util.settings import Positive, PositiveNumber, Text, explain, field_types
from swarm._util.terminal import suggest
from swarm.errors import InvalidArgument, NoClientForModel, UserError
from swarm.models.cache import Cache
from swarm.models.http import Call, HttpClient
from swarm.models.http_errors import BadRequest, ConnectionFailed, RequestTimeout
from swarm.models.openai import chat_url
from swarm.models.rate_limit import Limits

EndpointPair = tuple[str, str, str]
"""An endpoint: base_url, key, and name of the environment variable of the key."""

ENDPOINT_URLS = {
    "ANTHROPIC_API_KEY": "https://api.anthropic.com/v1",
    "OPENAI_API_KEY": "https://api.openai.com/v1",
    "OPENROUTER_API_KEY": "https://openrouter.ai/api/v1",
    "TINKER_API_KEY": "https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1",
}
"""Endpoint by name of the key's variable; NAME_ANYTHING belongs to the same endpoint."""

BASE_URL_VARIABLE = "OPENAI_BASE_URL"
"""If set, OpenAI's models are requested from this URL, as everywhere in this toolkit."""


def _keep_given(value: Any, check: Any) -> Any:
    check(value)
    return value


AS_GIVEN = WrapValidator(_keep_given)
"""Keeps a valid value as it is: a request with temperature 1 differs from one with 1.0."""

EXACT = ConfigDict(
    strict=True, validate_assignment=True, extra="forbid", arbitrary_types_allowed=True
)


class CompareConfig(BaseModel):
    """Settings, set as attributes of `Config`; they apply to the entire process.

    Attributes:
        timeout: Seconds for one request; a request may be retried a few times.
        reasoning_effort: Reasoning effort of OpenAI's reasoning models.
        max_workers: Maximum number of concurrent requests over all models.
        requests_per_minute: Rate limit of each pair of endpoint and key, spaced evenly; with
            `None`, only the endpoint's own limit (status 429) applies, to which the pace adapts.
        yaml_dir: Folder of `Question.from_yaml`.
        verbose: Whether to print why an endpoint does not have a model.
        base, pool: For local/ names: the base model, `None` for the one the experts name, and the
            folder of the experts.
        models: Custom models by name: any `swarm.models.base.Model`.
        roster: Registry of local/ names, instead of one of `base` and `pool`.
    """

    model_config = EXACT

    timeout: Annotated[PositiveNumber, AS_GIVEN] = 60
    reasoning_effort: str = "none"
    max_workers: Positive = 100
    requests_per_minute: PositiveNumber | None = None
    yaml_dir: str | Path = "questions"
    verbose: bool = False
    base: Text | None = None
    pool: Text = "initial_experts"
    models: dict[str, Any] = {}
    roster: Any = None

    _pairs: list[EndpointPair] | None = PrivateAttr(None)
    _folder: str | None = PrivateAttr(None)

    @property
    def url_key_pairs(self) -> list[EndpointPair]:
        """Endpoints searched for models, as (base_url, key, variable); `None` reads them again.

        By default those whose keys are in the environment.
        """
        if self._pairs is None:
            self._pairs = read_environment_pairs()
        return self._pairs

    @url_key_pairs.setter
    def url_key_pairs(self, pairs: Any) -> None:
        self._pairs = None if pairs is None else validate_pairs(pairs)

    @property
    def cache_dir(self) -> str:
        """Folder of the answer cache (answers.sqlite); by default that of all of this toolkit."""
        return self._folder or str(cache_folder())

    @cache_dir.setter
    def cache_dir(self, folder: str | Path | None) -> None:
        self._folder = str(folder) if folder else None

    @property
    def client_cache(self) -> dict[str, "EndpointClient | NoClientForModel"]:
        """Endpoint of each model looked up in this process, or the reason why it has none."""
        return _found

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a setting.

        Raises:
            UserError: It does not exist, or the value is invalid.
        """
        known = [*FIELDS, "url_key_pairs", "cache_dir"]
        if name[0] != "_" and name not in known:
            suggestion = suggest(name, known)
            raise InvalidArgument(
                f"Config.{name}: no such setting; {suggestion}there are {', '.join(known)}"
            )
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise explain(error, field_types(type(self)), "Config") from None

    def reset(self) -> None:
        """Restore all defaults and read the environment again."""
        for name, field in FIELDS.items():
            setattr(self, name, field.get_default())
        self._pairs = self._folder = None
        _found.clear()

    def client_for_model(self, model: str) -> "EndpointClient":
        """Return the endpoint of a model.

        Of several that may have it, each is asked for a single token, and the one with the lowest
        variable name that answers is used and remembered across processes.

        Raises:
            NoClientForModel: No endpoint has the model.
        """
        return find_client(model)

    @contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Override settings inside a `with` block, for all threads.

        Raises:
            UserError: A setting does not exist, or its value is invalid.
        """
        previous: dict[str, Any] = {}
        try:
            for name, value in values.items():
                before = getattr(self, name, None)
                setattr(self, name, value)
                previous[name] = before
            yield
        finally:
            for name, value in previous.items():
                setattr(self, name, value)


FIELDS = CompareConfig.model_fields

Config = CompareConfig()
"""The settings of this process."""


def read_environment_pairs() -> list[EndpointPair]:
    """Return the endpoints whose keys are in the environment, sorted by variable name.

    If OPENAI_BASE_URL is set, OPENAI_API_KEY belongs to that server, which may need no key.
    """
    found = []
    base_url = os.environ.get(BASE_URL_VARIABLE, "").strip()
    if base_url:
        found.append((base_url, os.environ.get("OPENAI_API_KEY", "").strip(), BASE_URL_VARIABLE))
    for variable in sorted(os.environ):
        key = os.environ[variable].strip()
        overridden = base_url and variable == "OPENAI_API_KEY"
        for prefix, url in ENDPOINT_URLS.items():
            if key and not overridden and f"{variable}_".startswith(f"{prefix}_"):
                found.append((url, key, variable))
    return found


def validate_pairs(pairs: Any) -> list[EndpointPair]:
    """Return a list of endpoints.

    Raises:
        InvalidArgument: They are malformed; the message does not contain keys.
    """
    found = []
    for number, pair in enumerate(pairs if isinstance(pairs, list | tuple) else [None]):
        texts = isinstance(pair, tuple | list) and all(isinstance(part, str) for part in pair)
        if not texts or len(pair) not in (2, 3):
            form = "a list of (base_url, key, name of the key's variable)"
            raise InvalidArgument(f"Config.url_key_pairs: must be {form}; item {number} is not")
        found.append((pair[0], pair[1], pair[2] if len(pair) == 3 else f"KEY_{number}"))
    return found


def open_answer_cache() -> Cache:
    """Open the cache file in the current `Config.cache_dir`."""
    return _open_cache_file(str(Path(Config.cache_dir).expanduser() / "answers.sqlite"))


_open_cache_file = lru_cache(maxsize=16)(Cache)


class EndpointClient:
    """An endpoint with a key, as `Config.client_for_model` returns it.

    If the `openai` package is installed, all other attributes, such as `chat`, are those of its
    client.

    Args:
        base_url: URL without /chat/completions.
        api_key: Key of the endpoint; no string of this object contains it.
        variable: Name of the environment variable of the key.
    """

    def __init__(self, base_url: str, api_key: str, variable: str | None = None) -> None:
        self.base_url, self.api_key, self.variable = base_url, api_key, variable

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


class KeyedClient(HttpClient):
    """Chat client with a given key instead of one from the environment."""

    def __init__(self, name: str, client: EndpointClient, limits: Limits) -> None:
        super().__init__(name, chat_url(client.base_url), None, limits)
        # Used in messages only; it need not be the name of a variable.
        self.api_key_env = client.variable or None
        self._key: str | None = client.api_key or None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a client with a key in memory cannot be stored")

    def read_api_key(self) -> str | None:
        """Return the given key."""
        return self._key


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

PROBE_LIMITS = Limits(connect_timeout=10.0, timeout=30.0, retries=1)
"""Limits of probes: an unreachable endpoint must fail within seconds."""

_found: dict[str, EndpointClient | NoClientForModel] = {}
"""By model: its endpoint, or the error that it has none; valid for `_pairs_of_found`."""
_pairs_of_found: list[EndpointPair] = []
_lock = threading.Lock()


def find_client(model: str) -> EndpointClient:
    """Return the endpoint of a model.

    Raises:
        NoClientForModel: No endpoint has the model.
    """
    if model.partition("/")[0] in (*LOCAL_PREFIXES, *FOLDER_PREFIXES):
        raise NoClientForModel(f"{model}: runs in this process, not at an endpoint")
    pairs = sorted(Config.url_key_pairs, key=lambda pair: pair[2])
    with _lock:
        if pairs != _pairs_of_found:
            _found.clear()
            _pairs_of_found[:] = pairs
        found = _found.get(model)
    if found is None or (isinstance(found, NoClientForModel) and not found.lasting):
        found = _found[model] = _search_endpoints(model, pairs)
    if isinstance(found, NoClientForModel):
        raise found
    return found


def forget_client(model: str) -> None:
    """Forget the endpoint of a model, so that it is searched again."""
    _found.pop(model, None)
    _run_statement("DELETE FROM places WHERE model = ?", (model,))


def may_host_model(base_url: str, model: str) -> bool:
    """Return whether an endpoint can have a model of this name."""
    form = MODEL_NAME_PATTERNS.get(urlsplit(base_url).hostname or "")
    return form is None or form.fullmatch(model) is not None


def _search_endpoints(
    model: str, pairs: Sequence[EndpointPair]
) -> EndpointClient | NoClientForModel:
    endpoints = [pair for pair in pairs if may_host_model(pair[0], model)]
    if not endpoints:
        hosts = ", ".join(dict.fromkeys(urlsplit(pair[0]).netloc for pair in pairs))
        reason = f"no model at {hosts} can have this name" if pairs else "its location is unknown"
        return NoClientForModel(
            f"{model}: {reason}; add a prefix, as in local/rooms, ollama/NAME or PROVIDER/MODEL, "
            f"set one of {', '.join(ENDPOINT_URLS)}, or add an endpoint to Config.url_key_pairs"
        )
    if len(endpoints) == 1:  # its first request shows whether it has the model
        return EndpointClient(*endpoints[0])
    among = json.dumps([(url, variable) for url, _, variable in endpoints])  # without the keys
    query = "SELECT url, variable FROM places WHERE model = ? AND among = ?"
    rows = _run_statement(query, (model, among))
    if known := [pair for pair in endpoints if (pair[0], pair[2]) in rows]:
        return EndpointClient(*known[0])
    with ThreadPoolExecutor(len(endpoints)) as threads:
        errors = list(threads.map(lambda pair: _probe_endpoint(model, pair), endpoints))
    for pair, error in zip(endpoints, errors, strict=True):
        if error is None:
            row = (model, among, pair[0], pair[2], time.time())
            _run_statement("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?)", row)
            return EndpointClient(*pair)
        if Config.verbose:
            print(f"{pair[0]}, key of {pair[2]}: {error}", file=sys.stderr)
    missing = NoClientForModel(
        f"{model}: none of {len(endpoints)} endpoints has it; error of the first: {errors[0]}"
    )
    missing.lasting = any(isinstance(one, ConnectionFailed | RequestTimeout) for one in errors)
    return missing


def _run_statement(statement: str, values: tuple[Any, ...]) -> list[Any]:
    """Run a statement on the table of endpoints, and return its rows."""

    def work(connection: sqlite3.Connection) -> list[Any]:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS places (model TEXT, among TEXT, url TEXT, variable TEXT, "
            "time REAL, PRIMARY KEY (model, among))"
        )
        return connection.execute(statement, values).fetchall()

    return open_answer_cache().run(work)


def is_reasoning_model(model: str) -> bool:
    """Return whether this is one of OpenAI's reasoning models, at any router."""
    return model.rsplit("/", 1)[-1].startswith(("o1", "o3", "o4", "gpt-5"))


def build_probe(model: str) -> dict[str, Any]:
    """Return the parameters of the request that probes whether an endpoint has a model."""
    params = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "timeout": 30}
    if not is_reasoning_model(model):
        return {**params, "max_tokens": 1}
    effort = "none" if model.rsplit("/", 1)[-1].startswith("gpt-5.") else "low"
    return {**params, "max_completion_tokens": 32, "reasoning_effort": effort}


def _probe_endpoint(model: str, pair: EndpointPair) -> UserError | None:
    """Return why an endpoint does not have a model; `None` if it has."""

    def read(_: int, content: Any) -> Any:
        if isinstance(content, BadRequest):
            raise content
        return content["choices"]

    params = build_probe(model)
    call = Call(params, timeout=params.pop("timeout"))
    try:
        KeyedClient(model, EndpointClient(*pair), PROBE_LIMITS).run_calls([call], read)
    except UserError as error:
        return error
    return None
