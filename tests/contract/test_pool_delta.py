"""The delta space is the exact sum of the experts' updates: in the engine, in PEFT and on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.lora import LoraLayers, LoraLinear, Routing
from swarm.errors import UserError
from swarm.merging import lora_math
from swarm.models.base import Request
from swarm.pool.adapter import CONFIG_FILE, NOTE_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool

MIXTURE = [0.7, -0.4, 0.5, 0.2]
HALVES = [0.5, 0.5, 0.0, 0.0]
PEFT_WEIGHT = "base_model.model.{}.lora_{}.weight"


@pytest.fixture(params=["tiny_pool", "mixed_pool"])
def pool(request: pytest.FixtureRequest, tiny_llama: Path) -> Pool:
    """A pool of one shape and one of many, in the delta space."""
    return Pool(request.getfixturevalue(request.param), space="delta").open(str(tiny_llama))


def deltas(pool: Pool, coefficients: list[float]) -> dict[str, torch.Tensor]:
    """sum_j c_j s_j B_j A_j of every module, float64, from the files and by hand."""
    total: dict[str, torch.Tensor] = {}
    for name, coefficient in zip(tiny.NAMES, coefficients, strict=True):
        alone = Pool(pool.folder).open()
        unit = [float(other == name) for other in tiny.NAMES]
        for module, (a, b) in alone.combine(unit).items():
            total[module] = total.get(module, 0) + coefficient * (b.double() @ a.double())
    return total


def explicit(base: Path, pool: Pool, coefficients: list[float]) -> torch.nn.Module:
    """The base with the sum of the updates added to its weights."""
    network = tiny.load(base)
    with torch.no_grad():
        for module, delta in deltas(pool, coefficients).items():
            network.get_submodule(module).weight.add_(delta.float())
    return network


def saved(folder: Path, modules: list[str]) -> dict[str, torch.Tensor]:
    """s B A of every module as PEFT would make it of a folder."""
    weights = load_file(folder / WEIGHTS_FILE)
    config = json.loads((folder / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / config["r"]
    pairs = {m: [weights[PEFT_WEIGHT.format(m, side)].double() for side in "AB"] for m in modules}
    return {module: scale * (b @ a) for module, (a, b) in pairs.items()}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The relative Frobenius error over all modules."""
    missed = sum(float((found[m] - wanted[m]).square().sum()) for m in wanted)
    return (missed / sum(float(delta.square().sum()) for delta in wanted.values())) ** 0.5


def test_a_position_is_the_sum_of_the_updates(pool: Pool) -> None:
    made = {m: b.double() @ a.double() for m, (a, b) in pool.combine(MIXTURE).items()}
    assert distance(made, deltas(pool, MIXTURE)) < 1e-7


def test_norms_are_those_of_the_updates(pool: Pool) -> None:
    for number, norm in enumerate(pool.update_norms()):
        unit = [float(number == other) for other in range(len(tiny.NAMES))]
        exact = sum(float(delta.square().sum()) for delta in deltas(pool, unit).values())
        assert norm == pytest.approx(exact**0.5, rel=1e-6) and norm > 0


@pytest.mark.parametrize("merge", [False, True])
def test_stacked_particles_are_explicit_sums(pool: Pool, tiny_llama: Path, merge: bool) -> None:
    positions = np.array([MIXTURE, HALVES, [0.0] * 4, [-1.0, 0.0, 2.0, 0.3]])
    network = tiny.load(tiny_llama)
    stack = LoraLayers(network, {name: pool.expert_factors(name) for name in pool.modules})
    if merge:
        positions = positions[:1]
    stack.set_positions(torch.from_numpy(positions), merge=merge)
    stack.route_rows(torch.arange(len(positions)).repeat_interleave(2))
    with tiny.seeded(0), torch.inference_mode():
        tokens = torch.randint(4, tiny.WORDS, (2, 12))
        rows = network(input_ids=tokens.repeat(len(positions), 1)).logits
    for number, row in enumerate(positions):
        alone = tiny.logits(explicit(tiny_llama, pool, row.tolist()))
        assert torch.allclose(rows[2 * number : 2 * number + 2], alone, rtol=0, atol=1e-4)
    stack.clear_positions()
    assert torch.equal(tiny.logits(network), tiny.logits(tiny.load(tiny_llama)))


@pytest.mark.parametrize("plan", ["merged", "stacked"])
def test_every_plan_answers_as_the_explicit_sum(plan: str, pool: Pool, tiny_llama: Path) -> None:
    engine = HFEngine(plan=plan)
    engine.open(BaseModel(str(tiny_llama)), pool, "cpu")
    request = Request("a graph of 5 nodes has", 0, (" yes", " no", " (A)"))
    answers = engine.generate(np.array([MIXTURE, HALVES]), [[request]] * 2)
    for mixture, (completion,) in zip((MIXTURE, HALVES), answers, strict=True):
        other = HFEngine()
        other.load_base(BaseModel(str(tiny_llama)), "cpu")
        other.set_adapters({})
        # The same code over weights that were added up by hand.
        other._model.load_state_dict(explicit(tiny_llama, pool, mixture).state_dict())
        (told,) = other.generate(np.zeros((1, 0)), [[request]])[0]
        assert completion.logprobs == pytest.approx(told.logprobs, abs=1e-4)


def test_coefficients_are_not_rounded_to_bfloat16() -> None:
    """A layer in bfloat16 errs by its type's rounding, not by the coefficient's on top of it."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    linear.weight.data.zero_()
    a, b, rows = (
        torch.randn(*s, generator=generator).bfloat16() for s in ((8, 64), (64, 8), (9, 64))
    )
    layer = LoraLinear(linear, (a, b, torch.arange(8)), torch.bfloat16, Routing())
    # Between two numbers of bfloat16: rounded, everything would be 0.26 % too small.
    share = 0.7519
    layer.shares = torch.full((1, 8), share)
    exact = share * (rows.double() @ a.double().T @ b.double().T)
    with torch.inference_mode():
        found = layer(rows).double()
    bias = float((found * exact).sum() / (exact * exact).sum()) - 1
    assert abs(bias) < 5e-4 and float((found - exact).norm() / exact.norm()) < 5e-3


def test_a_saved_position_is_exact_and_has_the_ranks_of_what_it_uses(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    for number, mixture in enumerate((MIXTURE, HALVES)):
        folder = tmp_path / str(number)
        pool.save(mixture, folder, {"iteration": 3})
        assert distance(saved(folder, list(pool.modules)), deltas(pool, mixture)) < 1e-7
        loaded = PeftModel.from_pretrained(tiny.load(tiny_llama), folder)
        alone = tiny.logits(explicit(tiny_llama, pool, mixture))
        assert torch.allclose(tiny.logits(loaded), alone, rtol=0, atol=1e-4)
    ranks = [json.loads((tmp_path / str(n) / CONFIG_FILE).read_text())["r"] for n in (0, 1)]
    assert ranks == ([16, 8] if pool.folder.name == "same" else [4 + 2 + 8 + 6, 6])
    note = json.loads((tmp_path / "0" / NOTE_FILE).read_text())
    assert (note["space"], note["coefficients"], note["iteration"]) == ("delta", MIXTURE, 3)
    errors = note["reconstruction_error"]
    assert (
        0 < errors["overall"] <= errors["worst"] < 1e-6 and errors["worst_module"] in pool.modules
    )


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_lower_rank_is_the_nearest_there_is_and_says_how_near(
    rank: int, mixed_pool: Path, tmp_path: Path
) -> None:
    pool = Pool(mixed_pool, space="delta", export_rank=rank).open()
    pool.save(MIXTURE, tmp_path / "best")
    exact, found = deltas(pool, MIXTURE), saved(tmp_path / "best", list(pool.modules))
    assert json.loads((tmp_path / "best" / CONFIG_FILE).read_text())["r"] == rank
    errors = json.loads((tmp_path / "best" / NOTE_FILE).read_text())["reconstruction_error"]
    assert distance(found, exact) == pytest.approx(errors["overall"], rel=1e-5)
    each = {m: distance({m: found[m]}, {m: exact[m]}) for m in exact}
    assert max(each.values()) == pytest.approx(errors["worst"], rel=1e-5)
    assert each[errors["worst_module"]] == max(each.values())
    for module, delta in exact.items():
        # The whole matrix is small here, so its own singular values say what can be reached.
        values = torch.linalg.svdvals(delta)
        nearest = float(values[rank:].norm() / values.norm())
        assert each[module] == pytest.approx(nearest, rel=1e-5, abs=1e-6)


def test_an_update_that_cancels_is_told_apart_from_its_rounding() -> None:
    """The error is relative to what is left, also where the experts nearly cancel each other."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).double() for s in ((4, 20), (30, 4)))
    near = b + 1e-4 * torch.randn(30, 4, generator=generator)
    done = lora_math.compress_update(
        lora_math.concatenate_factors([(0.3, a, b), (-0.3, a, near)], 20, 30), None
    )
    exact = 0.3 * (b - near) @ a
    found = done.pair[1].double() @ done.pair[0].double()
    assert done.norm == pytest.approx(float(exact.norm()), rel=1e-6)
    assert done.error == pytest.approx(float((found - exact).norm()), rel=1e-3)


def test_pefts_cat_is_the_delta_space(tiny_pool: Path, tiny_llama: Path, tmp_path: Path) -> None:
    loaded = PeftModel.from_pretrained(tiny.load(tiny_llama), tiny_pool / "amber", "amber")
    for name in tiny.NAMES[1:]:
        loaded.load_adapter(tiny_pool / name, name)
    loaded.add_weighted_adapter(list(tiny.NAMES), MIXTURE, "mix", combination_type="cat")
    loaded.set_adapter("mix")
    Pool(tiny_pool, space="delta").open().save(MIXTURE, tmp_path / "best")
    ours = PeftModel.from_pretrained(tiny.load(tiny_llama), tmp_path / "best")
    assert torch.allclose(tiny.logits(loaded), tiny.logits(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"export_rank": 8}, ["pool.export_rank=8", "pool.space=delta"]),
        ({"export_rank": 0, "space": "delta"}, ["pool.export_rank=0", "an integer, at least 1"]),
        ({"export_rank": True, "space": "delta"}, ["pool.export_rank"]),
        ({"space": "tokens"}, ["pool.space=tokens", "factor or delta"]),
    ],
)
def test_wrong_settings_are_one_line(settings: dict, words: list[str], tiny_pool: Path) -> None:
    with pytest.raises(UserError) as caught:
        Pool(tiny_pool, **settings)
    assert all(word in str(caught.value) for word in words)
