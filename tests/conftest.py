"""What every test may ask for: tiny models and pools, made once a session; never write to them."""

import logging
import os

# Before torch is imported: no network, and no threads fighting over tiny matrices.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endpoints
import headless_browser
import pytest
import tiny
import ui_pages


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for one file: its loop runs on in this thread, where others want their own."""
    with headless_browser.opened() as opened:
        yield opened


@pytest.fixture(scope="session")
def page_endpoint() -> Iterator[endpoints.Endpoint]:
    """What the page's models of an endpoint are."""
    with endpoints.endpoint(ui_pages.answer) as running:
        yield running


@pytest.fixture(scope="session")
def page_folder(
    page_endpoint: endpoints.Endpoint,
    tiny_llama: Path,
    tiny_pool: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Where the page is started: runs, answers, a mixture of agents and a consortium."""
    made = tmp_path_factory.mktemp("page")
    ui_pages.fill(made, tiny_llama, tiny_pool, page_endpoint)
    return made


@pytest.fixture(scope="session")
def page_url(page_folder: Path, tiny_llama: Path, tiny_pool: Path) -> Iterator[ui_pages.Page]:
    """The page, as a user starts it."""
    options = ["--device", "cpu", "--base", str(tiny_llama), "--pool", str(tiny_pool)]
    with ui_pages.served(page_folder, *options, **ui_pages.settings(page_folder)) as address:
        yield address
