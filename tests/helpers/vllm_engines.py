"""vLLM engines on a tiny model, beside the transformers engine on the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch

from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine
from swarm.models.base import Completion, Request
from swarm.pool.pool import Pool

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
HEAD = 32
"""The smallest size of an attention head that vLLM computes with on a CPU."""
PREFIX = "a graph of 5 nodes has edges between 1 and 2, and the answer is (A) or not (B). " * 10
"""Beyond 300 tokens, so that prompts which begin with it share cached blocks."""


def family(folder: Path, kind: str = "llama") -> tuple[Path, Path]:
    """A base model whose heads vLLM knows, and experts that differ in rank and targets."""
    base = tiny.model(folder / "base", kind, head=HEAD)
    return base, tiny.mixed_pool(base, folder / "pool")


@contextmanager
def opened(base: Path, pool: Pool | FullModelPool, **options: Any) -> Iterator[VLLMEngine]:
    """A vLLM engine of its own, ended afterwards; its memory is free when the last one ends."""
    options = {"kv_cache_memory_bytes": 2**27, **options}
    engine = VLLMEngine(gpu_memory_utilization=0.3, options=options)
    exact = BaseModel(str(base), dtype="float32")
    engine.check(exact, pool)
    engine.open(exact, pool, DEVICE)
    try:
        yield engine
    finally:
        engine.close()


def reference(base: Path, pool: Pool | FullModelPool) -> HFEngine:
    """The transformers engine on the same."""
    engine = FullWeightsEngine() if isinstance(pool, FullModelPool) else HFEngine()
    engine.open(BaseModel(str(base), dtype="float32"), pool, DEVICE)
    return engine


def positions(count: int, pool: Pool | FullModelPool, seed: int = 0) -> np.ndarray:
    """Random positions."""
    size = len(pool.names) * len(pool.groups)
    return np.random.default_rng(seed).normal(0.3, 0.5, (count, size))


def scoring(prompts: Sequence[str]) -> list[Request]:
    """Requests for the log probabilities of a few words after each prompt."""
    return [Request(prompt, 0, (" yes", " no", " (A)", " 12")) for prompt in prompts]


def logprobs(rows: Sequence[Sequence[Completion]]) -> np.ndarray:
    """Of all choices, flat."""
    return np.array([value for row in rows for said in row for value in said.logprobs])
