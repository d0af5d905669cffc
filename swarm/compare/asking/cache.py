"""Where the answers of experiments are kept."""

from functools import lru_cache
from pathlib import Path

from swarm.compare.settings import CompareSettings
from swarm.models.cache import Cache


def open_answer_cache() -> Cache:
    """The file in `Config.cache_dir` as it is now."""
    return _open_cache_file(str(Path(CompareSettings.cache_dir).expanduser() / "answers.sqlite"))


@lru_cache(maxsize=16)
def _open_cache_file(file: str) -> Cache:
    return Cache(file)
