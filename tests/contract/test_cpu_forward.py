"""The forward for CPUs against transformers' own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import tiny
import torch

from swarm.engine import cpu_forward
from swarm.engine.base_model import BaseModel
from swarm.engine.cpu_forward import CpuForward, install_cpu_forward, lay_out_tokens
from swarm.engine.decode import cache_argument, output_cache
from swarm.engine.hf import HFEngine
from swarm.models.base import Example, Request
from swarm.pool.pool import Pool

LENGTHS = (9, 9, 5, 4, 1, 1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows even for a tiny model."""
    monkeypatch.setattr(cpu_forward, "BLOCK_ELEMENTS", 200)


def both(base: Path, dtype: str) -> tuple[Any, Any]:
    """The model with its own forward, and with that for CPUs."""
    plain, fast = (BaseModel(str(base), dtype=dtype).load("cpu")[0] for _ in range(2))
    install_cpu_forward(fast, 1 << 40)
    assert "forward" in vars(fast.base_model)
    return plain, fast


def steps(model: Any, padded: bool, count: int = 4) -> Iterator[torch.Tensor]:
    """Logits of a batch after its prompts, and after each of some more tokens."""
    rows, columns = len(LENGTHS), max(LENGTHS)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (rows, columns + count), generator=draw)
    mask = torch.ones(rows, columns, dtype=torch.long)
    if padded:
        for row, length in enumerate(LENGTHS):
            mask[row, : columns - length] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, new = None, ids[:, :columns]
    for step in range(count):
        out = model(
            input_ids=new,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(model, cache),
        )
        yield out.logits[:, -1].float()
        cache, new = output_cache(out), ids[:, columns + step : columns + step + 1]
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        positions = positions[:, -1:] + 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_logits_are_those_of_transformers(
    base: Path, dtype: str, padded: bool, small_blocks: None
) -> None:
    plain, fast = both(base, dtype)
    for expected, found in zip(steps(plain, padded), steps(fast, padded), strict=True):
        # Other batches are multiplied by other kernels, in bfloat16 with 8 bits.
        error = (found - expected).abs().max() / expected.abs().max()
        assert error <= (1e-5 if dtype == "float32" else 0.03)


def test_rows_of_similar_length_attend_together() -> None:
    real = torch.tensor([[0] * (9 - length) + [1] * length for length in LENGTHS])
    layout = lay_out_tokens((6, 9), real, 0, torch.float32)
    found = [(g.rows.start, g.rows.stop, g.width, g.real is None) for g in layout.groups]
    assert found == [(0, 2, 9, True), (2, 4, 5, False), (4, 6, 1, True)]
    assert layout.real is not None and len(layout.real) == sum(LENGTHS)


@pytest.mark.parametrize("plan", ["stacked", "merged"])
def test_an_engine_answers_alike(
    base: Path, tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    """Experts of all linear layers; blocks of rows have tokens of several positions."""
    pool = Pool(tiny.mixed_pool(base, tmp_path / "pool")).open()
    positions = np.random.default_rng(0).dirichlet(np.ones(len(pool.names)), 3)
    texts = ["one", "a graph of 5 nodes has edges", "no", "the answer is not"]
    asked = [[Request(text, 5, top_logprobs=2) for text in texts] for _ in positions]
    choices = [[Request(text, 0, (" yes", " no no")) for text in texts] for _ in positions]

    def answers(replaced: bool) -> list[Any]:
        with monkeypatch.context() as patch:
            if not replaced:
                patch.setattr(cpu_forward, "ARCHITECTURES", ())
            engine = HFEngine(plan)
            engine.open(BaseModel(str(base)), pool, "cpu")
        assert ("forward" in vars(engine._model.base_model)) == replaced
        return [
            [token for row in engine.generate(positions, asked) for c in row for token in c.tokens],
            [p for row in engine.generate(positions, choices) for c in row for p in c.logprobs],
            engine.compute_gradient(positions[0], [Example("no", (" yes", " no"), 0)]).slope,
        ]

    (fresh, scores, slope), (fresh_old, scores_old, slope_old) = map(answers, (True, False))
    assert [token.text for token in fresh] == [token.text for token in fresh_old]
    both_logprobs = [[token.logprob for token in tokens] for tokens in (fresh, fresh_old)]
    assert np.allclose(*both_logprobs, rtol=0, atol=1e-5)
    assert np.allclose(scores, scores_old, rtol=0, atol=1e-5)
    assert np.array_equal(slope, slope_old)


PACKS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN packs bfloat16 weights for this processor."""


@pytest.mark.skipif(not PACKS, reason="the processor has no instructions for packed bfloat16")
def test_packed_weights_give_the_same_products(base: Path) -> None:
    model = BaseModel(str(base), dtype="bfloat16").load("cpu")[0]
    forward = CpuForward(model, packed=True)
    linear = model.base_model.layers[0].mlp.up_proj
    rows = torch.randn(7, linear.in_features).bfloat16()
    with torch.inference_mode():
        found = forward._multiply(linear, rows, None)
        expected = torch.nn.functional.linear(rows, linear.weight, linear.bias)
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-3)


def test_what_keeps_its_own_forward_or_weights(base: Path) -> None:
    """Packing needs memory and fixed weights; a gradient and other attention the original."""
    for spare, packed in ((1 << 40, PACKS), (0, False)):
        model = BaseModel(str(base), dtype="bfloat16").load("cpu")[0]
        install_cpu_forward(model, spare)
        assert (model.base_model.forward.__self__._packed is not None) == packed
    gradients = []
    for model in both(base, "float32"):
        model.get_input_embeddings().requires_grad_(True)
        ids = torch.tensor([[5, 6, 7]])
        model(input_ids=ids, position_ids=torch.arange(3)[None]).logits.sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
    model = BaseModel(str(base)).load("cpu")[0]
    model.config._attn_implementation = "eager"
    install_cpu_forward(model, 1 << 40)
    assert "forward" not in vars(model.base_model)


def test_bfloat16_runs_where_onednn_has_no_instructions_for_it(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, model__dtype="bfloat16")
    done = subprocess.run(
        [sys.executable, "-m", "swarm.search", *command],
        capture_output=True,
        env=searches.environment(ONEDNN_MAX_CPU_ISA="AVX2"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
