"""The settings of all experiments in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from swarm.compare.asking.client import Client
from swarm.compare.asking.discovery import Pair, Places, pairs_of_environment
from swarm.compare.errors import NoClientForModel, WrongValue
from swarm.models import Model
from swarm.places import cache_folder

DEFAULTS: dict[str, Any] = {
    "timeout": 60,
    "reasoning_effort": "none",
    "max_workers": 100,
    "yaml_dir": "questions",
    "verbose": False,
    "base": None,
    "pool": "initial_experts",
}


class _Settings(type):
    """What `Config` has where nobody has set it."""

    _places: Places
    _cache_dir: str | None

    @property
    def url_key_pairs(cls) -> list[Pair]:
        """The endpoints where models are looked for: (base_url, key, variable) each."""
        if cls._places.pairs is None:
            cls._places.pairs = pairs_of_environment()
        return cls._places.pairs

    @url_key_pairs.setter
    def url_key_pairs(cls, pairs: list[Pair] | None) -> None:
        cls._places.pairs = pairs

    @property
    def cache_dir(cls) -> str:
        """The folder of the kept answers; by default the one that all of this toolkit shares."""
        return cls._cache_dir or str(cache_folder())

    @cache_dir.setter
    def cache_dir(cls, folder: str | Path | None) -> None:
        cls._cache_dir = str(folder) if folder else None

    @property
    def client_cache(cls) -> dict[str, Client | NoClientForModel]:
        """What was found out in this process: a model's endpoint, or why it has none."""
        return cls._places.found


class Config(metaclass=_Settings):
    """Settings, as attributes of the class; what is set holds for the whole process.

    Attributes:
        timeout: Seconds for one request; it may be repeated a few times.
        reasoning_effort: Of OpenAI's reasoning models.
        max_workers: The most requests under way at once, over all models.
        cache_dir: The folder of the kept answers (answers.sqlite); by default the one that all of
            this toolkit shares.
        yaml_dir: The folder of `Question.from_yaml`.
        verbose: Whether it is told why an endpoint does not have a model.
        url_key_pairs: Endpoints where models are looked for, as (base_url, key, name of the key's
            environment variable); `None`: those of the environment.
        client_cache: Endpoints that were found, by model.
        base, pool: Of local/ names: the base model, `None` for the one that the experts name; and
            the folder of the experts.
        models: Your own models by name: anything with `generate` (`swarm.models.Model`).
    """

    timeout: float = DEFAULTS["timeout"]
    reasoning_effort: str = DEFAULTS["reasoning_effort"]
    max_workers: int = DEFAULTS["max_workers"]
    yaml_dir: str = DEFAULTS["yaml_dir"]
    verbose: bool = DEFAULTS["verbose"]
    base: str | None = DEFAULTS["base"]
    pool: str = DEFAULTS["pool"]
    models: ClassVar[dict[str, Model]] = {}

    _places = Places()
    _cache_dir = None

    @classmethod
    def reset(cls) -> None:
        """Set everything back, and look at the environment anew."""
        for key, value in DEFAULTS.items():
            setattr(cls, key, value)
        cls.models = {}
        cls._places, cls._cache_dir = Places(), None

    @classmethod
    def client_for_model(cls, model: str) -> Client:
        """Where a model is asked.

        A place that was found before is remembered, by later processes too. Otherwise all that may
        have the model are asked for a single token, and of those that answer the one with the
        lowest name of its variable is taken.

        Raises:
            NoClientForModel: Nobody has it.
        """
        return cls._places.client(model, certain=True)

    @classmethod
    @contextmanager
    def override(cls, **values: Any) -> Iterator[None]:
        """Other settings for a while; they hold for all threads.

        Raises:
            WrongValue: There is no such setting.
        """
        known = [*DEFAULTS, "cache_dir", "url_key_pairs", "models"]
        if strange := [key for key in values if key not in known]:
            raise WrongValue(
                f"Config.override: no setting {strange[0]}; there are {', '.join(known)}"
            )
        before = {key: getattr(cls, key) for key in values}
        try:
            for key, value in values.items():
                setattr(cls, key, value)
            yield
        finally:
            for key, value in before.items():
                setattr(cls, key, value)


def checked_workers() -> int:
    """`Config.max_workers`.

    Raises:
        WrongValue: It, or `Config.timeout`, has a value that it cannot have.
    """
    workers, timeout = Config.max_workers, Config.timeout
    if type(workers) is not int or workers < 1:
        raise WrongValue(f"Config.max_workers={workers!r}: must be a whole number from 1 on")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < inf:
        raise WrongValue(f"Config.timeout={timeout!r}: must be a number of seconds above 0")
    return workers
