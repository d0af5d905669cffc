"""Resolution of model names: custom models, this project's kinds, and models at endpoints."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from swarm.compare.config import Config
from swarm.compare.sampling.backends import (
    Backend,
    BatchBackend,
    EndpointBackend,
    open_answer_cache,
)
from swarm.compare.sampling.discovery import (
    ENDPOINT_INDEX,
    FOLDER_PREFIXES,
    LOCAL_PREFIXES,
    EndpointIndex,
    KeyedClient,
)
from swarm.compare.sampling.types import SampleRequest
from swarm.compare.settings import get_max_workers
from swarm.errors import InvalidArgument, NoClientForModel
from swarm.models.base import Model
from swarm.models.cache import Cache
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits
from swarm.models.sampling import CachedModel

if TYPE_CHECKING:
    from swarm.models.providers import Provider

_backends_lock = threading.Lock()
_backends: dict[Any, Backend] = {}
_clients: dict[Any, KeyedClient] = {}


def resolve_backend(name: str) -> Backend:
    """Return the backend of a model name; may probe endpoints, so it must not run in an event loop.

    Order of precedence: custom models (`Config.models`); this project's kinds (local/, search/,
    initial_experts/, llm/, function/, moa/, consortium/); the endpoints of `Config.url_key_pairs`;
    PROVIDER/MODEL.

    Raises:
        NoClientForModel: There is no such model; or another `UserError`.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgument(f"{name!r} is not a model name")
    if name in Config.models:
        model = Config.models[name]
        return _get_or_create_backend((name, id(model)), lambda: _custom_model_backend(name, model))
    first, slash, rest = name.partition("/")
    if slash and (first in LOCAL_PREFIXES or first in FOLDER_PREFIXES):
        return _get_or_create_backend(
            name, lambda: _registry_backend(f"{FOLDER_PREFIXES.get(first, first)}/{rest}")
        )
    try:
        client = _find_client(name)
    except NoClientForModel:
        provider = _load_providers().get(first) if rest else None
        if provider is None:
            raise
        return _get_or_create_backend(name, lambda: _provider_backend(provider, rest))
    if "generate" in dir(client):
        return _get_or_create_backend(
            (name, id(client)), lambda: _custom_model_backend(name, client)
        )
    return _get_or_create_backend(
        _endpoint_key(name, client), lambda: _endpoint_backend(name, client)
    )


def kept_source(name: str) -> Backend | None:
    """Return the former endpoint of a model without one now, to read cached answers."""
    if name in Config.models or vars(Config)["client_for_model"] is not DEFAULT_CLIENT_FOR_MODEL:
        return None
    client = get_endpoint_index().origin(name)
    if client is None:
        return None
    return _get_or_create_backend(
        _endpoint_key(name, client), lambda: _endpoint_backend(name, client)
    )


def get_resolved_backend(name: str) -> Backend | None:
    """Return the backend of a name if it was resolved before with the current settings."""
    as_it_was = (
        name not in Config.models and vars(Config)["client_for_model"] is DEFAULT_CLIENT_FOR_MODEL
    )
    client = get_endpoint_index().cached_client(name) if as_it_was else None
    if client is None:
        return None
    return _backends.get(_backend_key(_endpoint_key(name, client)))


def sample_cache_keys(wants: Sequence[SampleRequest]) -> list[str]:
    """Return the cache key of each sample; the parameters of a call are processed once.

    Raises:
        UserError: A model does not exist, or does not support the parameters.
    """
    models = {name: resolve_backend(name) for name in {want.call.model for want in wants}}
    known: dict[int, tuple[str, bool]] = {}
    found = []
    for call, sample in wants:
        model = models[call.model]
        if id(call) not in known:
            known[id(call)] = model.call_key(call)
        key, one = known[id(call)]
        found.append(model.sample_key(key, 0 if one else sample))
    return found


def get_endpoint_index() -> EndpointIndex:
    """Return the index of discovered endpoints."""
    return ENDPOINT_INDEX


def _find_client(name: str) -> Any:
    """Return the endpoint of a model; a single candidate is not probed."""
    configured = vars(Config)["client_for_model"]
    if configured is not DEFAULT_CLIENT_FOR_MODEL:
        return Config.client_for_model(name)
    return get_endpoint_index().find_client(name, certain=False)


DEFAULT_CLIENT_FOR_MODEL = vars(Config)["client_for_model"]
"""Original method; scripts may replace it on `Config`."""


def _get_or_create_backend(key: Any, make: Any) -> Backend:
    """Return one backend per name and settings, so that its limits apply to all callers."""
    state = _backend_key(key)
    with _backends_lock:
        if state not in _backends:
            _backends[state] = make()
        return _backends[state]


def _backend_key(key: Any) -> Any:
    cache = str(open_answer_cache().path)
    limits = (Config.timeout, get_max_workers(), Config.requests_per_minute)
    return key, cache, Config.base, Config.pool, *limits


def _endpoint_key(name: str, client: Any) -> tuple[Any, ...]:
    kept_at = getattr(client, "kept_at", None)
    return name, client.base_url, client.api_key, getattr(client, "variable", None), kept_at


def _custom_model_backend(name: str, model: Model) -> Backend:
    if not hasattr(model, "generate"):
        raise InvalidArgument(f"Config.models[{name!r}]: has no method generate(requests)")
    fingerprint = model.fingerprint() or _model_settings(model)
    identity = ("own", name, type(model).__qualname__, fingerprint)
    return BatchBackend(CachedModel(model, open_answer_cache(), identity, name))


def _model_settings(model: Model) -> dict[str, Any]:
    """Return the public attributes that are texts or numbers, for a model without a fingerprint."""
    attributes = getattr(model, "__dict__", {}).items()
    plain = str | int | float | None
    return {key: value for key, value in attributes if key[0] != "_" and isinstance(value, plain)}


def _registry_backend(name: str) -> Backend:
    from swarm.registry.name_resolution import model_identity

    model = _load_roster(open_answer_cache(), Config.base, Config.pool).model(name)
    bare = model.model if isinstance(model, CachedModel) else model
    identity = ("named", name, model_identity(bare))
    return BatchBackend(CachedModel(bare, open_answer_cache(), identity, name))


def _provider_backend(provider: "Provider", name: str) -> Backend:
    return EndpointBackend(
        provider.create_model(name, cache=open_answer_cache(), greedy_once=False)
    )


def _endpoint_backend(name: str, client: Any) -> Backend:
    prices = (
        p.prices.get(name) for p in _load_providers().values() if p.base_url == client.base_url
    )
    model = OpenAI(
        name,
        client.base_url,
        temperature=None,
        prices=next(prices, None),
        cache=open_answer_cache(),
        client=_shared_client(client),
        greedy_once=False,
    )
    return EndpointBackend(model, getattr(client, "kept_at", None))


def _shared_client(client: Any) -> KeyedClient:
    """Return the client of one endpoint and key, whose limits apply to all of its models."""
    limits = Limits(
        concurrency=get_max_workers(),
        requests_per_minute=Config.requests_per_minute,
        timeout=Config.timeout,
    )
    settings = (client.base_url, client.api_key, limits)
    if settings not in _clients:
        _clients[settings] = KeyedClient("", client, limits)
    return _clients[settings]


@lru_cache(maxsize=4)
def _load_roster(cache: Cache, base: str | None, pool: str) -> Any:
    from swarm.registry.registry import Roster

    return Roster(base=base, pool=pool, cache=cache)


@lru_cache(maxsize=1)
def _load_providers() -> Any:
    from swarm.models.providers import Providers

    return Providers.load()
