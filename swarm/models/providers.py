"""Named endpoints with their key variables, limits and prices, from YAML files; sample counts."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.models.base import validate_prices
from swarm.models.http import HttpClient
from swarm.models.openai import OpenAI
from swarm.models.openai_protocol import chat_url
from swarm.models.rate_limit import Limits
from swarm.models.transport import validate_env_name, validate_url

MAX_SAMPLE_COUNT = 99
"""Maximum number of samples in a model name."""


def split_sample_count(name: str) -> tuple[str, int]:
    """Split a model name and its sample count: "qwen2:7b:3" is ("qwen2:7b", 3).

    A last part of digits only is a count; other tags belong to the name. If the name ends in
    digits, append a count: "name:8:1".

    Raises:
        UserError: The count is not between 1 and `MAX_SAMPLE_COUNT`.
    """
    head, colon, tail = name.rpartition(":")
    if not colon or not (tail.isascii() and tail.isdigit()):
        return name, 1
    if not head or not 1 <= int(tail) <= MAX_SAMPLE_COUNT:
        raise UserError(
            f"{name}: the sample count must be from 1 to {MAX_SAMPLE_COUNT}; if :{tail} is "
            f"part of the name, write {name}:1"
        )
    return head, int(tail)


def parse_counted_names(lists: Iterable[str]) -> list[tuple[str, int]]:
    """Parse comma-separated names with counts: ["a,b:3", "c"] is [("a", 1), ("b", 3), ("c", 1)].

    Raises:
        UserError: A name is missing, or a count is invalid.
    """
    lists = list(lists)
    names = [name.strip() for one in lists for name in one.split(",")]
    if not all(names):
        raise UserError(f"--reference_models {','.join(lists)}: a name is missing", 2)
    return [split_sample_count(name) for name in names]


PROVIDERS_VARIABLE = "MODEL_SWARMS_PROVIDERS"
"""Environment variable with the path of the user's file."""

OFFICIAL_API_URL = "https://api.openai.com/"
"""Endpoint whose newer models accept max_completion_tokens only; others need not support it."""

NUMBER_TYPES = (int, float, type(None))

PROVIDER_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "base_url": ((str,), "a URL"),
    "base_url_env": ((str, type(None)), "the name of an environment variable, or null"),
    "api_key_env": ((str, type(None)), "the name of an environment variable, or null"),
    "limits": ((dict,), "a mapping such as {concurrency: 16}"),
    "tokens_field": ((str, type(None)), "max_tokens, max_completion_tokens or null"),
    "samples_at_once": ((int,), "an integer, 1 or more"),
    "temperature": (NUMBER_TYPES, "a number or null"),
    "seed": ((int, type(None)), "an integer or null"),
    "body": ((dict,), "a mapping of request fields"),
    "prices": ((dict,), "a mapping such as {gpt-4o-mini: {prompt: 0.1, new: 0.4}}"),
}
"""Allowed keys of a provider: types, and their description in messages."""


class Provider:
    """One endpoint and its models, which share the endpoint's limits.

    Args:
        name: Prefix of its model names.
        settings: Keys as described in conf/providers.yaml; base_url is required.

    Raises:
        UserError: A key or value is invalid; the message begins with the key and does not repeat
            the value, which may be a secret.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        check_keys(settings)
        self.name = name
        if "base_url" not in settings:
            raise UserError("base_url is missing: set the endpoint's URL without /chat/completions")
        self.base_url = validate_url(settings["base_url"])
        self.base_url_env = _parse_env_name("base_url_env", settings)
        self.api_key_env = _parse_env_name("api_key_env", settings)
        self.limits = Limits(**settings.get("limits", {}))
        self.tokens_field: str | None = settings.get("tokens_field")
        self.samples_at_once: int = settings.get("samples_at_once", 1)
        self.request_defaults = {key: settings.get(key) for key in ("temperature", "seed", "body")}
        self.prices = {str(m): _parse_price(m, p) for m, p in settings.get("prices", {}).items()}

    def create_model(self, name: str, **settings: Any) -> OpenAI:
        """Create one of the endpoint's models.

        Args:
            name: Name at the endpoint.
            settings: Further arguments of `OpenAI`, overriding the provider's.

        Raises:
            UserError: A value is invalid.
        """
        url = self._resolve_url()
        newest = self.tokens_field is None and f"{url}/".startswith(OFFICIAL_API_URL)
        defaults: dict[str, Any] = {
            "base_url": url,
            "api_key_env": self.client.api_key_env,
            "tokens_field": "max_completion_tokens"
            if newest
            else self.tokens_field or "max_tokens",
            "samples_at_once": self.samples_at_once,
            "prices": self.prices.get(name),
            "client": self.client,
            **self.request_defaults,
        }
        return OpenAI(name, **{**defaults, **settings})

    @cached_property
    def client(self) -> HttpClient:
        """HTTP client shared by all models of the provider.

        Raises:
            UserError: The URL in the environment variable is invalid.
        """
        key = self.api_key_env
        if self.is_url_overridden and key and not os.environ.get(key, "").strip():
            key = None  # self-hosted servers often need none
        return HttpClient(self.name, chat_url(self._resolve_url()), key, self.limits)

    @property
    def is_url_overridden(self) -> bool:
        """True if an environment variable overrides the URL."""
        return bool(self.base_url_env and os.environ.get(self.base_url_env, "").strip())

    def _resolve_url(self) -> str:
        if not self.is_url_overridden:
            return self.base_url
        try:
            return validate_url(os.environ[str(self.base_url_env)].strip())
        except UserError as error:
            raise UserError(f"the environment variable {self.base_url_env}: {error}") from None


class Providers(Mapping[str, Provider]):
    """Providers by name."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._providers = dict(providers)

    @classmethod
    def load(cls, file: str | Path | None = None) -> "Providers":
        """Load the shipped providers, overridden by those of a file.

        Args:
            file: `None`: the one in $MODEL_SWARMS_PROVIDERS, or else the user's default file if it
                exists.

        Raises:
            UserError: A file is missing or invalid; the message names the file, the provider and
                the key.
        """
        shipped = conf_folder() / "providers.yaml"
        settings = read_provider_settings(shipped)
        origin = dict.fromkeys(settings, shipped)
        if (user_file := _find_user_file(file)) is not None:
            for name, changed in read_provider_settings(user_file).items():
                settings[name] = merge_settings(settings.get(name, {}), changed)
                origin[name] = user_file
        providers = {}
        for name, keys in settings.items():
            try:
                providers[name] = Provider(name, keys)
            except UserError as error:
                raise UserError(f"{origin[name]}: {name}: {error}") from None
        return cls(providers)

    def __getitem__(self, name: str) -> Provider:
        return self._providers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._providers)

    def __len__(self) -> int:
        return len(self._providers)


def read_provider_settings(file: Path) -> dict[str, dict[str, Any]]:
    """Read the settings of each provider from a YAML file.

    Raises:
        UserError: It cannot be read, or is invalid.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        # Omit the error's message and the names of aliases and tags: they quote the file, which may
        # contain secrets.
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        quotes = isinstance(error, (yaml.composer.ComposerError, yaml.constructor.ConstructorError))
        problem = "" if quotes else f": {error.problem}"
        raise UserError(f"{file}{line}: is not valid yaml{problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{file}: is not valid yaml") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"{file}: must have the form PROVIDER: {{base_url: ..., ...}}")
    for name, settings in found.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"{file}: {name!r}: a provider name must not contain /")
        if not isinstance(settings, dict):
            raise UserError(f"{file}: {name}: must be a mapping such as {{base_url: ...}}")
        try:
            check_keys(settings)
        except UserError as error:
            raise UserError(f"{file}: {name}: {error}") from None
    return found


def check_keys(settings: Mapping[Any, Any]) -> None:
    """Check the names of all keys and the types of their values.

    Raises:
        UserError: One is invalid.
    """
    for key, value in settings.items():
        _check_known_key(key, PROVIDER_KEYS, "")
        kinds, allowed = PROVIDER_KEYS[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UserError(f"{key}: must be {allowed}")
    if settings.get("samples_at_once", 1) < 1:
        raise UserError(f"samples_at_once: must be {PROVIDER_KEYS['samples_at_once'][1]}")
    if settings.get("tokens_field") not in (None, "max_tokens", "max_completion_tokens"):
        raise UserError(f"tokens_field: must be {PROVIDER_KEYS['tokens_field'][1]}")
    for key, value in settings.get("limits", {}).items():
        _check_known_key(key, [field.name for field in fields(Limits)], "limits.")
        if not isinstance(value, NUMBER_TYPES):
            raise UserError(f"limits.{key}: must be a number or null")


def merge_settings(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Override settings; mappings are merged key by key."""
    new = {
        key: {**before.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in changed.items()
    }
    return {**before, **new}


def _find_user_file(file: str | Path | None) -> Path | None:
    """Return the path of the user's file; `None` if none is named and the default is missing."""
    if named := file or os.environ.get(PROVIDERS_VARIABLE, "").strip():
        return Path(named).expanduser()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    default = config_home / "model-swarms" / "providers.yaml"
    return default if default.is_file() else None


def _check_known_key(key: object, keys: Any, above: str) -> None:
    if key in keys:
        return
    matches = get_close_matches(str(key), keys, 1)
    suggestion = f"did you mean {matches[0]}?" if matches else f"allowed: {', '.join(keys)}"
    raise UserError(f"{above}{key}: no such key; {suggestion}")


def _parse_env_name(key: str, settings: Mapping[str, Any]) -> str | None:
    try:
        return validate_env_name(settings.get(key))
    except UserError as error:
        raise UserError(str(error).replace("api_key_env", key)) from None


def _parse_price(model: object, prices: object) -> dict[str, float]:
    priced = {} if prices is None else prices
    if not isinstance(priced, dict) or not all(
        isinstance(p, NUMBER_TYPES) for p in priced.values()
    ):
        raise UserError(f"prices.{model}: must be a mapping such as {{prompt: 0.1, new: 0.4}}")
    try:
        return validate_prices(prices)
    except UserError as error:
        raise UserError(f"prices.{model}: {error}") from None
