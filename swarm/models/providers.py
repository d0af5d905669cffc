"""Named endpoints with their key variables, limits and prices, from YAML files; sample counts."""

import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from swarm._util.files import conf_folder
from swarm._util.settings import Number, Positive, Settings, parse_settings
from swarm.errors import UserError
from swarm.models.base import Prices
from swarm.models.http import HttpClient
from swarm.models.openai import OpenAI, TokensField, chat_url
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


def _hide_value(error: UserError) -> UserError:
    """Return an error of settings without the value, which may be a secret."""
    return UserError(re.sub(r"^([\w.]+)=.*: must be ", r"\1: must be ", str(error)))


def _parse_limits(values: object) -> object:
    if not isinstance(values, dict):
        raise UserError("limits: must be a mapping such as {concurrency: 16}")
    try:
        return Limits(**values)
    except UserError as error:
        raise _hide_value(error) from None


class Provider(Settings):
    """One endpoint and its models, which share the endpoint's limits; see conf/providers.yaml.

    Attributes:
        name: Prefix of its model names.
    """

    name: str
    base_url: Annotated[
        str, AfterValidator(validate_url), "the endpoint's URL without /chat/completions"
    ]
    base_url_env: Annotated[
        str | None, AfterValidator(partial(validate_env_name, key="base_url_env"))
    ] = None
    api_key_env: Annotated[str | None, AfterValidator(validate_env_name)] = None
    limits: Annotated[Limits, BeforeValidator(_parse_limits)] = Limits()
    tokens_field: TokensField | None = None
    samples_at_once: Positive = 1
    temperature: Number | None = None
    seed: int | None = None
    body: dict[str, Any] = Field(default_factory=dict)
    prices: Annotated[dict[str, Prices], "such as {gpt-4o-mini: {prompt: 0.1, new: 0.4}}"] = Field(
        default_factory=dict
    )

    @classmethod
    def parse(cls, name: str, settings: Mapping[str, Any]) -> "Provider":
        """Check a provider's settings.

        Raises:
            UserError: A key or value is invalid; the message begins with the key and does not
                repeat the value, which may be a secret.
        """
        try:
            return parse_settings(cls, {**settings, "name": name})
        except UserError as error:
            raise _hide_value(error) from None

    def create_model(self, name: str, **settings: Any) -> OpenAI:
        """Create one of the endpoint's models.

        Args:
            name: Name at the endpoint.
            settings: Further arguments of `OpenAI`, overriding the provider's.

        Raises:
            UserError: A value is invalid.
        """
        url, field = self._resolve_url(), self.tokens_field
        if field is None and f"{url}/".startswith(OFFICIAL_API_URL):
            field = "max_completion_tokens"
        defaults: dict[str, Any] = {
            "base_url": url,
            "api_key_env": self.client.api_key_env,
            "tokens_field": field or "max_tokens",
            "prices": self.prices.get(name),
            "client": self.client,
        }
        same = ("samples_at_once", "temperature", "seed", "body")
        defaults |= {key: getattr(self, key) for key in same}
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


class Providers(dict[str, Provider]):
    """Providers by name."""

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
                known = settings.get(name, {})
                settings[name] = known | {
                    key: {**known.get(key, {}), **value} if isinstance(value, dict) else value
                    for key, value in changed.items()
                }
                origin[name] = user_file
        providers = cls()
        for name, keys in settings.items():
            try:
                providers[name] = Provider.parse(name, keys)
            except UserError as error:
                raise UserError(f"{origin[name]}: {name}: {error}") from None
        return providers


def read_provider_settings(file: Path) -> dict[str, dict[str, Any]]:
    """Read the settings of each provider from a YAML file.

    Raises:
        UserError: It cannot be read, or is invalid.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        found = {} if found is None else found
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # Omit the error's message and the names of aliases and tags: they quote the file, which may
        # contain secrets.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", "")
        line = f" line {mark.line + 1}" if mark else ""
        quotes = isinstance(error, (yaml.composer.ComposerError, yaml.constructor.ConstructorError))
        what = f": {problem}" if problem and not quotes else ""
        raise UserError(f"{file}{line}: is not valid yaml{what}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: must have the form PROVIDER: {{base_url: ..., ...}}")
    for name, settings in found.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"{file}: {name!r}: a provider name must not contain /")
        if not isinstance(settings, dict):
            raise UserError(f"{file}: {name}: must be a mapping such as {{base_url: ...}}")
    return found


def _find_user_file(file: str | Path | None) -> Path | None:
    """Return the path of the user's file; `None` if none is named and the default is missing."""
    if named := file or os.environ.get(PROVIDERS_VARIABLE, "").strip():
        return Path(named).expanduser()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    default = config_home / "model-swarms" / "providers.yaml"
    return default if default.is_file() else None
