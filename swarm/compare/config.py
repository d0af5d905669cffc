"""The settings of all experiments in this process, as people see them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarm.compare.sampling.discovery import ENDPOINT_INDEX, EndpointClient
from swarm.compare.settings import DEFAULTS, CompareSettings, SettingsProxy
from swarm.errors import InvalidArgument, NoClientForModel


class _ConfigMeta(SettingsProxy):
    """Adds what was found out to what was set."""

    @property
    def client_cache(cls) -> dict[str, EndpointClient | NoClientForModel]:
        """What was found out in this process: a model's endpoint, or why it has none."""
        return ENDPOINT_INDEX.found


class Config(CompareSettings, metaclass=_ConfigMeta):
    """Settings, as attributes of the class; what is set holds for the whole process.

    Attributes:
        timeout: Seconds for one request; it may be repeated a few times.
        reasoning_effort: Of OpenAI's reasoning models.
        max_workers: The most requests under way at once, over all models.
        requests_per_minute: To each endpoint with each key, sent evenly; `None` is no limit but the
            one that the endpoint itself sets (429), to which the pace adapts.
        cache_dir: The folder of the kept answers (answers.sqlite); by default the one that all of
            this toolkit shares.
        yaml_dir: The folder of `Question.from_yaml`.
        verbose: Whether it is told why an endpoint does not have a model.
        url_key_pairs: Endpoints where models are looked for, as (base_url, key, name of the key's
            environment variable); `None`: those of the environment.
        client_cache: Endpoints that were found, by model.
        base, pool: Of local/ names: the base model, `None` for the one that the experts name; and
            the folder of the experts.
        models: Your own models by name: anything with `generate` (`swarm.models.base.Model`).
    """

    @classmethod
    def reset(cls) -> None:
        """Set everything back, and look at the environment anew."""
        for key, value in DEFAULTS.items():
            setattr(cls, key, value)
        cls.models, cls.url_key_pairs, cls.cache_dir = {}, None, None  # type: ignore[assignment]
        ENDPOINT_INDEX.clear_all()

    @classmethod
    def client_for_model(cls, model: str) -> EndpointClient:
        """Where a model is asked.

        A place that was found before is remembered, by later processes too. Otherwise all that may
        have the model are asked for a single token, and of those that answer the one with the
        lowest name of its variable is taken.

        Raises:
            NoClientForModel: Nobody has it.
        """
        return ENDPOINT_INDEX.find_client(model, certain=True)

    @classmethod
    @contextmanager
    def override(cls, **values: Any) -> Iterator[None]:
        """Other settings for a while; they hold for all threads.

        Raises:
            WrongValue: There is no such setting.
        """
        known = [*DEFAULTS, "cache_dir", "url_key_pairs", "models"]
        if strange := [key for key in values if key not in known]:
            raise InvalidArgument(
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
