"""Public settings of all experiments in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarm.compare.sampling.discovery import ENDPOINT_INDEX, EndpointClient
from swarm.compare.settings import DEFAULTS, CompareSettings, SettingsProxy
from swarm.errors import InvalidArgument, NoClientForModel


class _ConfigMeta(SettingsProxy):
    """Metaclass that adds discovered endpoints to the settings."""

    @property
    def client_cache(cls) -> dict[str, EndpointClient | NoClientForModel]:
        """Endpoint of each model looked up in this process, or the reason why it has none."""
        return ENDPOINT_INDEX.found


class Config(CompareSettings, metaclass=_ConfigMeta):
    """Settings as class attributes; they apply to the entire process.

    Attributes:
        timeout: Seconds for one request; a request may be retried a few times.
        reasoning_effort: Reasoning effort of OpenAI's reasoning models.
        max_workers: Maximum number of concurrent requests over all models.
        requests_per_minute: Rate limit of each pair of endpoint and key, spaced evenly; with
            `None`, only the endpoint's own limit (status 429) applies, to which the pace adapts.
        cache_dir: Folder of the answer cache (answers.sqlite); by default the one shared by all of
            this toolkit.
        yaml_dir: Folder of `Question.from_yaml`.
        verbose: Whether to log why an endpoint does not have a model.
        url_key_pairs: Endpoints searched for models, as (base_url, key, name of the key's
            environment variable); `None`: those of the environment.
        client_cache: Discovered endpoints by model.
        base, pool: For local/ names: the base model, `None` for the one the experts name, and the
            folder of the experts.
        models: Custom models by name: any object with `generate` (`swarm.models.base.Model`).
    """

    @classmethod
    def reset(cls) -> None:
        """Restore all defaults and read the environment again."""
        for key, value in DEFAULTS.items():
            setattr(cls, key, value)
        cls.models, cls.url_key_pairs, cls.cache_dir = {}, None, None  # type: ignore[assignment]
        ENDPOINT_INDEX.clear_all()

    @classmethod
    def client_for_model(cls, model: str) -> EndpointClient:
        """Return the endpoint of a model.

        An endpoint that was found before is remembered across processes. Otherwise a single token
        is requested from every candidate, and of those that answer the one with the lowest variable
        name is used.

        Raises:
            NoClientForModel: No endpoint has the model.
        """
        return ENDPOINT_INDEX.find_client(model, certain=True)

    @classmethod
    @contextmanager
    def override(cls, **values: Any) -> Iterator[None]:
        """Override settings inside a `with` block, for all threads.

        Raises:
            InvalidArgument: A setting does not exist.
        """
        known = [*DEFAULTS, "cache_dir", "url_key_pairs", "models"]
        if strange := [key for key in values if key not in known]:
            raise InvalidArgument(
                f"Config.override: unknown setting {strange[0]}; there are {', '.join(known)}"
            )
        previous = {key: getattr(cls, key) for key in values}
        try:
            for key, value in values.items():
                setattr(cls, key, value)
            yield
        finally:
            for key, value in previous.items():
                setattr(cls, key, value)
