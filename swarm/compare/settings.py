"""Values of all settings of experiments in this process; set through `Config`."""

import os
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from swarm._util.files import cache_folder
from swarm.errors import InvalidArgument
from swarm.models.base import Model

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

DEFAULTS: dict[str, Any] = {
    "timeout": 60,
    "reasoning_effort": "none",
    "max_workers": 100,
    "requests_per_minute": None,
    "yaml_dir": "questions",
    "verbose": False,
    "base": None,
    "pool": "initial_experts",
}


def read_environment_pairs() -> list[EndpointPair]:
    """Return the endpoints whose keys are in the environment, sorted by variable name.

    If OPENAI_BASE_URL is set, OPENAI_API_KEY belongs to that server, which may need no key.
    """
    found = []
    base_url = os.environ.get(BASE_URL_VARIABLE, "").strip()
    if base_url:
        found.append((base_url, os.environ.get("OPENAI_API_KEY", "").strip(), BASE_URL_VARIABLE))
    for variable in sorted(os.environ):
        for prefix, url in ENDPOINT_URLS.items():
            key = os.environ[variable].strip()
            overridden = base_url and variable == "OPENAI_API_KEY"
            if key and not overridden and (variable == prefix or variable.startswith(f"{prefix}_")):
                found.append((url, key, variable))
    return found


class SettingsProxy(type):
    """Metaclass that stores settings on `CompareSettings`, whichever class they are set on."""

    _pairs: list[EndpointPair] | None
    _folder: str | None

    def __setattr__(cls, name: str, value: Any) -> None:
        if not hasattr(cls, name):
            matches = get_close_matches(name, dir(cls), 1)
            suggestion = f"; did you mean {matches[0]}?" if matches else ""
            raise InvalidArgument(f"Config.{name}: no such setting{suggestion}")
        is_setting = name in DEFAULTS or name in ("models", "_pairs", "_folder")
        type.__setattr__(CompareSettings if is_setting else cls, name, value)

    @property
    def url_key_pairs(cls) -> list[EndpointPair]:
        """Endpoints searched for models, as (base_url, key, variable)."""
        if cls._pairs is None:
            cls._pairs = read_environment_pairs()
        return cls._pairs

    @url_key_pairs.setter
    def url_key_pairs(cls, pairs: list[EndpointPair] | None) -> None:
        cls._pairs = pairs

    @property
    def cache_dir(cls) -> str:
        """Folder of the answer cache; by default the one shared by all of this toolkit."""
        return cls._folder or str(cache_folder())

    @cache_dir.setter
    def cache_dir(cls, folder: str | Path | None) -> None:
        cls._folder = str(folder) if folder else None


class CompareSettings(metaclass=SettingsProxy):
    """Current values; documented in `swarm.compare.config.Config`."""

    timeout: float = DEFAULTS["timeout"]
    reasoning_effort: str = DEFAULTS["reasoning_effort"]
    max_workers: int = DEFAULTS["max_workers"]
    requests_per_minute: float | None = DEFAULTS["requests_per_minute"]
    yaml_dir: str = DEFAULTS["yaml_dir"]
    verbose: bool = DEFAULTS["verbose"]
    base: str | None = DEFAULTS["base"]
    pool: str = DEFAULTS["pool"]
    models: ClassVar[dict[str, Model]] = {}

    _pairs = None
    _folder = None


def get_max_workers() -> int:
    """Return `Config.max_workers`.

    Raises:
        InvalidArgument: It, `Config.timeout` or `Config.requests_per_minute` is invalid.
    """
    workers, timeout = CompareSettings.max_workers, CompareSettings.timeout
    if type(workers) is not int or workers < 1:
        raise InvalidArgument(f"Config.max_workers={workers!r}: must be an integer, 1 or more")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < inf:
        raise InvalidArgument(f"Config.timeout={timeout!r}: must be a number of seconds above 0")
    pace = CompareSettings.requests_per_minute
    if pace is not None and (
        isinstance(pace, bool) or not isinstance(pace, int | float) or not 0 < pace < inf
    ):
        raise InvalidArgument(
            f"Config.requests_per_minute={pace!r}: must be a number above 0, or None for no limit"
        )
    return workers
