"""Finds the model of a name: your own, one of this project's kinds, or one at an endpoint."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import Want
from swarm.compare.asking.cache import kept_answers
from swarm.compare.asking.client import KeyedClient
from swarm.compare.asking.discovery import PLACES, SHORT, WHOLE, Places
from swarm.compare.asking.sources import Batches, Endpoint, Source
from swarm.compare.config import Config
from swarm.compare.errors import NoClientForModel, WrongValue
from swarm.compare.settings import checked_workers
from swarm.models import Model
from swarm.models.cache import Cache
from swarm.models.cached import Cached
from swarm.models.openai import OpenAI
from swarm.models.pace import Limits

if TYPE_CHECKING:
    from swarm.models.providers import Provider

RETRIES = 4
"""Of a request that may succeed later; the waits between them double."""

_lock = threading.Lock()
_found: dict[Any, Source] = {}
_clients: dict[Any, KeyedClient] = {}


def source(name: str) -> Source:
    """The model of a name; may ask endpoints for it, so it is not for an event loop.

    Your own (`Config.models`) goes before this project's kinds (local/, search/, initial_experts/,
    llm/, function/, moa/, consortium/), these before the endpoints of `Config.url_key_pairs`, and
    these before PROVIDER/MODEL.

    Raises:
        NoClientForModel: There is none; or another `UserError`.
    """
    if not isinstance(name, str) or not name.strip():
        raise WrongValue(f"{name!r} is no name of a model")
    if name in Config.models:
        model = Config.models[name]
        return _remembered((name, id(model)), lambda: _own(name, model))
    first, slash, rest = name.partition("/")
    if slash and (first in WHOLE or first in SHORT):
        return _remembered(name, lambda: _named(f"{SHORT.get(first, first)}/{rest}"))
    try:
        client = _client(name)
    except NoClientForModel:
        provider = _providers().get(first) if rest else None
        if provider is None:
            raise
        return _remembered(name, lambda: _provided(provider, rest))
    if "generate" in dir(client):
        return _remembered((name, id(client)), lambda: _own(name, client))
    return _remembered(_where(name, client), lambda: _found_at(name, client))


def kept_source(name: str) -> Source | None:
    """Where a model had answered that cannot be found now: what is kept of it can be read."""
    if name in Config.models or vars(Config)["client_for_model"] is not ORIGINAL:
        return None
    client = places().origin(name)
    if client is None:
        return None
    return _remembered(_where(name, client), lambda: _found_at(name, client))


def at_hand(name: str) -> Source | None:
    """The model of a name, if it was found before with the settings as they are."""
    as_it_was = name not in Config.models and vars(Config)["client_for_model"] is ORIGINAL
    client = places().known(name) if as_it_was else None
    if client is None:
        return None
    return _found.get(_state(_where(name, client)))


def keys_of(wants: Sequence[Want]) -> list[str]:
    """The key of each answer; what is asked is looked at once for all samples of it.

    Raises:
        UserError: There is no such model, or it cannot be asked this.
    """
    models = {name: source(name) for name in {want.asked.model for want in wants}}
    known: dict[int, tuple[str, bool]] = {}
    found = []
    for asked, sample in wants:
        model = models[asked.model]
        if id(asked) not in known:
            known[id(asked)] = model.key(asked)
        key, one = known[id(asked)]
        found.append(model.key_of_sample(key, 0 if one else sample))
    return found


def places() -> Places:
    """What is known of who has which model."""
    return PLACES


def _client(name: str) -> Any:
    """Where a model is asked, without asking for it first where one place alone is possible."""
    own = vars(Config)["client_for_model"]
    if own is not ORIGINAL:
        return Config.client_for_model(name)
    return places().client(name, certain=False)


ORIGINAL = vars(Config)["client_for_model"]
"""The method as it is here; a script may put its own in its place."""


def _remembered(key: Any, make: Any) -> Source:
    """The same model for the same name and settings, so that its limits hold for all who ask."""
    state = _state(key)
    with _lock:
        if state not in _found:
            _found[state] = make()
        return _found[state]


def _state(key: Any) -> Any:
    cache = str(kept_answers().path)
    limits = (Config.timeout, checked_workers(), Config.requests_per_minute)
    return key, cache, Config.base, Config.pool, *limits


def _where(name: str, client: Any) -> tuple[Any, ...]:
    kept_at = getattr(client, "kept_at", None)
    return name, client.base_url, client.api_key, getattr(client, "variable", None), kept_at


def _own(name: str, model: Model) -> Source:
    if not hasattr(model, "generate"):
        raise WrongValue(f"Config.models[{name!r}]: it has no method generate(requests)")
    fingerprint = model.fingerprint() if hasattr(model, "fingerprint") else _settings(model)
    identity = ("own", name, type(model).__qualname__, fingerprint)
    return Batches(Cached(model, kept_answers(), identity, name))


def _settings(model: Model) -> dict[str, Any]:
    """What a model without a fingerprint was made with, as far as texts and numbers say it."""
    told = getattr(model, "__dict__", {}).items()
    plain = str | int | float | None
    return {key: value for key, value in told if key[0] != "_" and isinstance(value, plain)}


def _named(name: str) -> Source:
    from swarm.roster.identity import identity

    model = _roster(kept_answers(), Config.base, Config.pool).model(name)
    bare = model.model if isinstance(model, Cached) else model
    told = ("named", name, identity(bare))
    return Batches(Cached(bare, kept_answers(), told, name))


def _provided(provider: "Provider", name: str) -> Source:
    return Endpoint(provider.model(name, cache=kept_answers(), greedy_once=False))


def _found_at(name: str, client: Any) -> Source:
    prices = (p.prices.get(name) for p in _providers().values() if p.base_url == client.base_url)
    model = OpenAI(
        name, client.base_url, temperature=None, prices=next(prices, None), cache=kept_answers(),
        client=_shared(client), greedy_once=False,
    )  # fmt: skip
    return Endpoint(model, getattr(client, "kept_at", None))


def _shared(client: Any) -> KeyedClient:
    """What all models of one endpoint and key are asked through: its limits are those of all."""
    limits = Limits(
        concurrency=checked_workers(),
        requests_per_minute=Config.requests_per_minute,
        timeout=Config.timeout,
        retries=RETRIES,
    )
    settings = (client.base_url, client.api_key, limits)
    if settings not in _clients:
        _clients[settings] = KeyedClient("", client, limits)
    return _clients[settings]


@lru_cache(maxsize=4)
def _roster(cache: Cache, base: str | None, pool: str) -> Any:
    from swarm.roster import Roster

    return Roster(base=base, pool=pool, cache=cache)


@lru_cache(maxsize=1)
def _providers() -> Any:
    from swarm.models.providers import Providers

    return Providers.load()
