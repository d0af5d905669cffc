"""What every test may ask for: tiny models and pools, made once a session; never write to them."""

import logging
import os

# Before torch is imported: no network, and no threads fighting over tiny matrices.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import warm

# What a test starts as a user would has its heavy imports from a fork; warm.COLD is without.
warm.use(warm.python())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first, so that no worker is left alone with one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """The log's handlers end with a test: they write to what was standard error in it."""
    yield
    log = logging.getLogger("swarm")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of two layers with its tokenizer."""
    return tiny.model(tmp_path_factory.mktemp("base") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Gemma of two layers with its tokenizer."""
    return tiny.model(tmp_path_factory.mktemp("base") / "tiny-gemma", "gemma")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen2 of two layers with its tokenizer."""
    return tiny.model(tmp_path_factory.mktemp("base") / "tiny-qwen2", "qwen2")


@pytest.fixture(scope="session")
def tiny_pool(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts of the tiny Llama with one shape: rank 4, alpha 8, amber to dune."""
    return tiny.pool(tiny_llama, tmp_path_factory.mktemp("pools") / "same")


@pytest.fixture(scope="session")
def mixed_pool(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts of the tiny Llama that differ in rank, alpha, rsLoRA, patterns and targets."""
    return tiny.mixed_pool(tiny_llama, tmp_path_factory.mktemp("pools") / "mixed")
