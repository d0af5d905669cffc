"""The experts that come with the toolkit: vLLM and transformers say the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import vllm_engines

pytest.importorskip("vllm", reason="vLLM has an environment of its own: scripts/test_vllm.sh")

from hydra.utils import instantiate

from swarm.api.overrides import compose_config
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine
from swarm.errors import UserError
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.models.base import Completion, Message, Request
from swarm.pool.pool import Pool

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def shipped() -> tuple[BaseModel, Pool]:
    """SmolLM2 and the nine experts that come with the toolkit."""
    with compose_config("search", ["name=x", "model=smollm2"]) as config:
        base = instantiate(config["model"])
    try:
        base.resolve()
    except UserError as error:
        pytest.skip(f"the base is not to be had here: {error}")
    base = replace(base, dtype="float32")
    return base, Pool("initial_experts").open(base.name)


Told = tuple[list[float], list[Completion]]
"""The utilities of nine experts on 24 items, and whole sentences of mixtures near the base."""


def told(engine: Any, pool: Pool, mixtures: int) -> Told:
    """What an open engine makes of the shipped experts, twenty answers a mixture."""
    with compose_config("search", ["name=x", "task=nlgraph_mini", "task.dev_limit=24"]) as config:
        task = instantiate(config["task"])
    items = task.items("dev")
    assert len(items) == 24
    turns = [Message("user", f"{item['question']} Say why.") for item in items[:20]]
    rows = vllm_engines.positions(10, pool)[:mixtures] / 4
    asked = [[Request((turn,), 20) for turn in turns]] * mixtures
    scores = run_tasks_lockstep(task, engine, np.eye(9), items, JobUsage())
    answers = [said for row in engine.generate(rows, asked) for said in row]
    return [task.utility(row) for row in scores], answers


@pytest.fixture(scope="module")
def by_transformers(shipped: tuple[BaseModel, Pool]) -> Told:
    engine = HFEngine()
    engine.open(*shipped, vllm_engines.DEVICE)
    return told(engine, shipped[1], 10)


def test_the_shipped_experts(shipped: tuple[BaseModel, Pool], by_transformers: Told) -> None:
    mixtures = 10
    engine = VLLMEngine(max_model_len=512, gpu_memory_utilization=0.3)
    engine.open(*shipped, vllm_engines.DEVICE)
    utilities, answers = told(engine, shipped[1], mixtures)
    engine.close()
    expected, theirs = by_transformers
    same = [one == other for one, other in zip(answers, theirs, strict=False)]
    tokens = sum(said.new_tokens for said in answers)
    print(f"{sum(same)} of {len(same)} answers equal, {tokens} tokens; {utilities}")
    assert utilities == expected and len(set(utilities)) > 3
    assert len(same) == 20 * mixtures and sum(same) >= 0.99 * len(same)
    assert tokens > 10 * len(same)
