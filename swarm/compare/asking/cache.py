"""Where the answers of experiments are kept."""

from functools import lru_cache
from pathlib import Path

from swarm.compare.settings import Settings
from swarm.models.cache import Cache


def kept_answers() -> Cache:
    """The file in `Config.cache_dir` as it is now."""
    return _cache(str(Path(Settings.cache_dir).expanduser() / "answers.sqlite"))


@lru_cache(maxsize=16)
def _cache(file: str) -> Cache:
    return Cache(file)
