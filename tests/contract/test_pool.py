"""A pool's positions are the sums they stand for: in the engine, on disk, in PEFT, transformers."""

import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file

from swarm.engine.base_model import BaseModel
from swarm.engine.lora import LoraLayers, LoraLinear, Routing
from swarm.errors import UserError
from swarm.merging import lora_math
from swarm.pool.adapter import CONFIG_FILE, NOTE_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool

MIXTURE = [0.7, -0.4, 0.5, 0.2]
HALVES = [0.5, 0.5, 0.0, 0.0]
OTHER = [0.0, 0.9, -0.3, 0.4]
NEAR = {"rtol": 0.0, "atol": 1e-4}
Updates = dict[str, torch.Tensor]


def peft_factors(base: Path, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [8, in] and s B [out, 8] of each module of a saved adapter, as PEFT has it, float64."""
    found = {}
    loaded = PeftModel.from_pretrained(tiny.load(base), folder).get_base_model()
    for module, layer in loaded.named_modules():
        if hasattr(layer, "lora_A"):
            pair = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            a, b = (weight.detach().double() for weight in pair)
            found[module] = lora_math.pad_rank((a, b * layer.scaling["default"]), 8)
    return found


def by_hand(base: Path, pool: Pool, position: list[float]) -> Updates:
    """The update of each module, by the definition of the pool's space, float64."""
    experts = [peft_factors(base, pool.folder / name) for name in tiny.NAMES]
    found = {}
    for module in pool.modules:
        start = 4 * (len(pool.groups) == 2 and "attn" not in module)
        chosen = [
            (share, *expert[module])
            for share, expert in zip(position[start : start + 4], experts, strict=True)
            if module in expert
        ]
        if pool.space == "delta":
            found[module] = sum(share * b @ a for share, a, b in chosen)
        else:
            a, b = (sum(one[0] * one[side] for one in chosen) for side in (1, 2))
            found[module] = b @ a
    return found


def explicit(base: Path, updates: Updates) -> torch.nn.Module:
    """The base with the updates added to its weights."""
    network = tiny.load(base)
    with torch.no_grad():
        for module, delta in updates.items():
            network.get_submodule(module).weight.add_(delta.float())
    return network


def combined(pool: Pool, position: list[float]) -> Updates:
    return {m: b.double() @ a.double() for m, (a, b) in pool.combine(position).items()}


def distance(found: Updates, wanted: Updates) -> float:
    """The relative Frobenius error over all modules."""
    missed = sum(float((found[m] - wanted[m]).square().sum()) for m in wanted)
    return (missed / sum(float(delta.square().sum()) for delta in wanted.values())) ** 0.5


KINDS = [
    ("tiny_pool", "factor", "global"),
    ("mixed_pool", "factor", "attention_mlp"),
    ("tiny_pool", "delta", "global"),
    ("mixed_pool", "delta", "attention_mlp"),
]


@pytest.fixture(params=KINDS, ids=str)
def pool(request: pytest.FixtureRequest, tiny_llama: Path) -> Pool:
    """An opened pool: of one shape, and of many with coefficients for attention and the rest."""
    kind, space, groups = request.param
    folder = request.getfixturevalue(kind)
    return Pool(folder, space=space, groups=groups).open(str(tiny_llama))


def positions(pool: Pool) -> list[list[float]]:
    if len(pool.groups) == 1:
        return [MIXTURE, HALVES, [0.0] * 4]
    return [MIXTURE + OTHER, HALVES * 2, [0.0] * 8]


def test_a_position_is_its_sum_in_memory_and_on_disk(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    position = positions(pool)[0]
    wanted = by_hand(tiny_llama, pool, position)
    assert distance(combined(pool, position), wanted) < 1e-6
    pool.save(position, tmp_path / "best", {"iteration": 3})
    config = json.loads((tmp_path / "best" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (*[pool.rank] * 2, False)
    if pool.folder.name == "mixed":
        assert config["target_modules"] == list(pool.modules)
    note = json.loads((tmp_path / "best" / NOTE_FILE).read_text())
    assert (note["coefficients"], note["space"], note["iteration"]) == (position, pool.space, 3)
    assert note.get("groups", ["all"]) == pool.groups
    logits = tiny.logits(explicit(tiny_llama, wanted))
    assert (logits - tiny.logits(tiny.load(tiny_llama))).abs().max() > 0.5
    with_peft = PeftModel.from_pretrained(tiny.load(tiny_llama), tmp_path / "best")
    assert torch.allclose(tiny.logits(with_peft), logits, **NEAR)
    with_transformers = tiny.load(tiny_llama)
    with_transformers.load_adapter(str(tmp_path / "best"))
    assert torch.allclose(tiny.logits(with_transformers), logits, **NEAR)
    norms = pool.update_norms()
    for number, norm in enumerate(norms):
        unit = [float(number == other) for other in range(4)] * len(pool.groups)
        exact = sum(float(u.square().sum()) for u in by_hand(tiny_llama, pool, unit).values())
        assert norm == pytest.approx(exact**0.5, rel=1e-6) and norm > 0


@pytest.mark.parametrize("merge", [False, True])
def test_stacked_particles_are_explicit_sums(pool: Pool, tiny_llama: Path, merge: bool) -> None:
    rows = positions(pool)[: 1 if merge else None]
    network = tiny.load(tiny_llama)
    stack = LoraLayers(network, {name: pool.expert_factors(name) for name in pool.modules})
    stack.set_positions(torch.tensor(rows), merge=merge)
    stack.route_rows(torch.arange(len(rows)).repeat_interleave(2))
    with tiny.seeded(0), torch.inference_mode():
        tokens = torch.randint(4, tiny.WORDS, (2, 12))
        found = network(input_ids=tokens.repeat(len(rows), 1)).logits
    for number, row in enumerate(rows):
        alone = tiny.logits(explicit(tiny_llama, by_hand(tiny_llama, pool, row)))
        assert torch.allclose(found[2 * number : 2 * number + 2], alone, **NEAR)
    stack.clear_positions()
    assert torch.equal(tiny.logits(network), tiny.logits(tiny.load(tiny_llama)))


@pytest.mark.parametrize("kind", ["tiny_gemma", "tiny_qwen2"])
def test_other_families_save_and_load_too(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(kind)
    pool = Pool(tiny.pool(base, tmp_path / "pool", ("amber", "birch"))).open(str(base))
    pool.save([1.3, -0.3], tmp_path / "best")
    loaded = PeftModel.from_pretrained(tiny.load(base), tmp_path / "best")
    wanted = tiny.logits(explicit(base, combined(pool, [1.3, -0.3])))
    assert torch.allclose(tiny.logits(loaded), wanted, **NEAR)


def test_a_mixed_pool_is_brought_to_one_shape_with_its_scaling_in_b(mixed_pool: Path) -> None:
    pool = Pool(mixed_pool).open()
    assert pool.rank == 8
    a, b, places = pool.expert_factors("model.layers.0.mlp.up_proj")
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((4, 8, 32), (4, 64, 8), *[torch.float32] * 2)
    assert [bool(expert.any()) for expert in b] == [False, True, False, False]
    assert not a[1, 2:].any() and not b[1, :, 2:].any() and places.tolist() == [0, 1, 2, 3]
    _, b, _ = pool.expert_factors("model.layers.0.self_attn.v_proj")
    key = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    for number, scaling in ((0, 8 / 4), (2, 4 / math.sqrt(8)), (3, 5 / 4)):
        raw = load_file(mixed_pool / tiny.NAMES[number] / WEIGHTS_FILE)[key].float()
        assert torch.allclose(b[number, :, : raw.shape[1]], raw * scaling, rtol=1e-6, atol=0.0)


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


@pytest.mark.parametrize("space", ["factor", "delta"])
def test_an_expert_beyond_float16_spoils_only_the_positions_that_use_it(space: str) -> None:
    """Of three experts the second has an infinite B, and the third an infinite product."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(8, 8, bias=False, dtype=torch.float16)
    a, b = (torch.randn(3, *s, generator=generator) for s in ((2, 8), (8, 2)))
    b[1], a[2] = 1e6, 6e4
    factors = (a, b, torch.arange(3))
    if space == "delta":
        places = torch.arange(3).repeat_interleave(2)
        factors = (a.flatten(0, 1), b.transpose(0, 1).flatten(1), places)
    layer = LoraLinear(linear, factors, torch.float16, Routing())
    rows = torch.ones(1, 8, dtype=torch.float16)
    with torch.inference_mode():
        for number in range(3):
            shares = torch.eye(3)[[number]]
            layer.shares = shares[:, layer.places]
            stacked = layer(rows)
            assert bool(stacked.isfinite().all()) == (number == 0)
            layer.merge(layer.shares[0])
            assert number or torch.allclose(layer(rows), stacked, rtol=0.02, atol=0.02)
            layer.merged = None


def test_an_update_that_cancels_is_told_apart_from_its_rounding() -> None:
    """The error is relative to what is left, also where the experts nearly cancel each other."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).double() for s in ((4, 20), (30, 4)))
    near = b + 1e-4 * torch.randn(30, 4, generator=generator)
    pair, norm, error = lora_math.compress_update(
        lora_math.concatenate_factors([(0.3, a, b), (-0.3, a, near)], 20, 30), None
    )
    exact = 0.3 * (b - near) @ a
    found = pair[1].double() @ pair[0].double()
    assert norm == pytest.approx(float(exact.norm()), rel=1e-6)
    assert error == pytest.approx(float((found - exact).norm()), rel=1e-3)


def test_a_pool_opens_without_torch_and_travels_closed(tiny_pool: Path) -> None:
    code = "import sys; from swarm.api import Pool; Pool(sys.argv[1]).open().fingerprint()"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(tiny_pool)], check=True)
    pool = Pool(tiny_pool, ["dune", "birch"]).open()
    pool.check()
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.names == [] and copy.open().fingerprint() == pool.fingerprint()


def test_the_fingerprint_follows_weights_settings_order_and_groups(
    tiny_pool: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pool, tmp_path / "pool")
    prints = [Pool(tiny_pool).open().fingerprint()]
    assert Pool(folder).open().fingerprint() == prints[0] and len(prints[0]) == 16
    for experts in (["birch", "amber", "cedar", "dune"], ["amber", "birch"]):
        prints.append(Pool(folder, experts).open().fingerprint())
    for kind in ("attention_mlp", "kind", "thirds", "per_layer", "per_module"):
        prints.append(Pool(folder, groups=kind).open().fingerprint())
    tiny.change(folder / "amber", lora_alpha=9)
    prints.append(Pool(folder).open().fingerprint())
    tiny.change(folder / "amber", lora_alpha=8)
    path = folder / "amber" / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\x3c")
    prints.append(Pool(folder).open().fingerprint())
    assert len(set(prints)) == 10


def test_a_path_to_the_same_model_is_the_same_base(tiny_llama: Path, tmp_path: Path) -> None:
    """Adapters that name a folder beside others that name an id; a copy is known by its content."""
    pool = tiny.pool(tiny_llama, tmp_path / "pool")
    copy = tmp_path / "copies" / "another-name"
    shutil.copytree(tiny_llama, copy)
    tiny.change(pool / "amber", base_model_name_or_path="owner/original")
    tiny.change(pool / "birch", base_model_name_or_path=str(copy))
    for base in (BaseModel(str(tiny_llama), name="owner/original"), BaseModel(str(tiny_llama))):
        assert Pool(pool).open(base).names == ["amber", "birch", "cedar", "dune"]
    with pytest.raises(UserError, match=r"model\.path.*model\.name.*pool\.base=ignore"):
        Pool(pool).open("owner/original")
    assert len(Pool(pool, base="ignore").open("owner/original").names) == 4
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="birch: belongs to the base model"):
        Pool(pool).open(BaseModel(str(tiny_llama), name="owner/original"))


def test_a_position_is_finite_numbers_for_every_group(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool).open()
    for bad in ([1.0], [1, 2, 3, float("nan")], [1, 2, 3, float("inf")], "1234"):
        with pytest.raises(UserError, match=f"{tiny_pool}.*4 finite coefficients"):
            pool.combine(bad)
    with pytest.raises(UserError, match="no expert 'oak'; it contains: amber, birch"):
        pool.combine({"oak": 1.0})
    by_name, by_place = pool.combine({"birch": 0.5}), pool.combine([0, 0.5, 0, 0])
    assert all(map(torch.equal, sum(by_name.values(), ()), sum(by_place.values(), ())))
    with pytest.raises(UserError, match="8 finite coefficients, one an expert in each of 2 groups"):
        Pool(tiny_pool, groups="per_layer").open().combine(MIXTURE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"folder": " "}, "pool.folder"),
        ({"space": "tokens"}, r"pool.space=tokens: must be factor or delta"),
        ({"groups": "halves"}, r"pool\.groups=halves: .*global, attention_mlp, kind,"),
        ({"recipes": ["soup"]}, "ties, dare_linear or dare_ties"),
        ({"recipes": ["ties", "ties"]}, "more than once"),
    ],
)
def test_wrong_settings_are_one_line(settings: Any, words: str, tiny_pool: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Pool(**{"folder": tiny_pool, **settings})
    assert "\n" not in str(caught.value)
