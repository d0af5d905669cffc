"""The experts that come with the toolkit: vLLM and transformers say the same."""

from dataclasses import replace

import numpy as np
import pytest
import vllm_engines

pytest.importorskip("vllm", reason="vLLM has an environment of its own: scripts/test_vllm.sh")

from hydra.utils import instantiate

from swarm.api.overrides import compose_config
from swarm.engine.base import Engine
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


def answer(engine: Engine, pool: Pool) -> tuple[list[float], list[Completion]]:
    """The utilities of nine experts on 24 items, and 200 sentences of mixtures near the base."""
    with compose_config("search", ["name=x", "task=nlgraph_mini", "task.dev_limit=24"]) as config:
        task = instantiate(config["task"])
    items = task.items("dev")
    assert len(items) == 24
    turns = [Message("user", f"{item['question']} Say why.") for item in items[:20]]
    asked = [[Request((turn,), 20) for turn in turns]] * 10
    scores = run_tasks_lockstep(task, engine, np.eye(9), items, JobUsage())
    answers = engine.generate(vllm_engines.positions(10, pool) / 4, asked)
    return [task.utility(row) for row in scores], [said for row in answers for said in row]


def test_the_shipped_experts(shipped: tuple[BaseModel, Pool]) -> None:
    found = []
    for engine in (HFEngine(), VLLMEngine(max_model_len=512, gpu_memory_utilization=0.3)):
        engine.open(*shipped, vllm_engines.DEVICE)
        found.append(answer(engine, shipped[1]))
        engine.close()
    (expected, theirs), (utilities, answers) = found
    same = [one == other for one, other in zip(answers, theirs, strict=True)]
    tokens = sum(said.new_tokens for said in answers)
    print(f"{sum(same)} of {len(same)} answers equal, {tokens} tokens; {utilities}")
    assert utilities == expected and len(set(utilities)) > 3
    assert len(same) == 200 and sum(same) >= 198
    assert tokens > 10 * len(same)
