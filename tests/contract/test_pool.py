"""The arithmetic of a pool agrees with PEFT and transformers, on real adapters of tiny models."""

import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.pool import adapter as folders
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool

MIXTURE = [0.7, -0.4, 0.5, 0.2]
NEAR = {"rtol": 0.0, "atol": 1e-5}


def with_peft(base: Path, folder: Path) -> torch.Tensor:
    """The logits of `base` with the adapter in `folder`, loaded by PEFT."""
    return tiny.logits(PeftModel.from_pretrained(tiny.load(base), folder))


def with_transformers(base: Path, folder: Path) -> torch.Tensor:
    """The same, loaded by transformers alone."""
    network = tiny.load(base)
    network.load_adapter(str(folder))
    return tiny.logits(network)


def merged(base: Path, adapter: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The logits of `base` after adding B A to its weights."""
    network = tiny.load(base)
    with torch.no_grad():
        for module, (a, b) in adapter.items():
            network.get_submodule(module).weight.add_((b.double() @ a.double()).float())
    return tiny.logits(network)


def by_hand(base: Path, folder: Path, coefficients: list[float]) -> dict[str, list]:
    """The mixture of the experts in `folder` as PEFT sees them, added up in float64 at rank 8."""
    mixed: dict[str, list] = {}
    for name, coefficient in zip(tiny.NAMES, coefficients, strict=True):
        loaded = PeftModel.from_pretrained(tiny.load(base), folder / name)
        for module, layer in loaded.get_base_model().named_modules():
            if not hasattr(layer, "lora_A"):
                continue
            a = layer.lora_A["default"].weight.double()
            b = layer.lora_B["default"].weight.double() * layer.scaling["default"]
            wide = torch.zeros(8, a.shape[1]).double(), torch.zeros(b.shape[0], 8).double()
            wide[0][: len(a)], wide[1][:, : len(a)] = a, b
            parts = mixed.setdefault(module, [0, 0])
            mixed[module] = [
                total + coefficient * part for total, part in zip(parts, wide, strict=True)
            ]
    return mixed


@pytest.fixture(params=["tiny_pool", "mixed_pool"])
def pool(request: pytest.FixtureRequest, tiny_llama: Path) -> Pool:
    """An opened pool of experts that share one shape, and one of experts that do not."""
    return Pool(request.getfixturevalue(request.param)).open(str(tiny_llama))


def test_the_module_and_open_import_no_torch(tiny_pool: Path) -> None:
    code = "import sys; from swarm.api import Pool; Pool(sys.argv[1]).open().fingerprint()"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(tiny_pool)], check=True)


def test_open_tells_names_modules_and_rank(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool).open("somebody/tiny-llama")
    assert pool.names == ["amber", "birch", "cedar", "dune"]
    assert list(pool.modules) == sorted(pool.modules) and len(pool.modules) == 6
    assert pool.modules["model.layers.1.mlp.down_proj"] == (64, 32, 4)
    assert pool.rank == 4
    assert pool.size == 2 * 4 * ((32 + 32) + (32 + 16) + (64 + 32))


@pytest.mark.parametrize("experts", [["brich"], ["amber", "brich"]])
def test_a_misspelt_expert_is_named_with_what_is_there(experts: list[str], tiny_pool: Path) -> None:
    with pytest.raises(UserError) as caught:
        Pool(tiny_pool, experts).open()
    assert str(caught.value) == (
        f"pool.experts: {tiny_pool} has no 'brich'; did you mean 'birch'? "
        "it contains: amber, birch, cedar, dune"
    )


def test_one_expert_is_no_pool(tiny_pool: Path) -> None:
    with pytest.raises(UserError, match=r"at least two .*; it contains: amber, birch, cedar, dune"):
        Pool(tiny_pool, ["birch"]).open()


def test_a_mixed_pool_is_brought_to_one_shape(mixed_pool: Path) -> None:
    pool = Pool(mixed_pool).open()
    assert pool.rank == 8
    a, b, _ = pool.expert_factors("model.layers.0.mlp.up_proj")
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((4, 8, 32), (4, 64, 8), *[torch.float32] * 2)
    assert [bool(expert.any()) for expert in b] == [False, True, False, False]
    assert not a[1, 2:].any() and not b[1, :, 2:].any()


def test_scaling_is_folded_into_b(mixed_pool: Path) -> None:
    _, b, _ = Pool(mixed_pool).open().expert_factors("model.layers.0.self_attn.v_proj")
    key = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    for number, scaling in ((0, 8 / 4), (2, 4 / math.sqrt(8)), (3, 5 / 4)):
        raw = load_file(mixed_pool / tiny.NAMES[number] / WEIGHTS_FILE)[key].float()
        assert torch.allclose(b[number, :, : raw.shape[1]], raw * scaling, rtol=1e-6, atol=0.0)


def test_one_expert_alone_is_what_peft_makes_of_it(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(pool.names):
        alone = np.eye(len(pool.names))[number]
        expected = with_peft(tiny_llama, pool.folder / name)
        assert torch.allclose(merged(tiny_llama, pool.combine(alone)), expected, **NEAR)
        pool.save(alone, tmp_path / name)
        assert torch.allclose(with_peft(tiny_llama, tmp_path / name), expected, **NEAR)


def test_a_mixture_is_the_sum_of_the_factors(pool: Pool, tiny_llama: Path) -> None:
    expected = by_hand(tiny_llama, pool.folder, MIXTURE)
    combined = pool.combine(MIXTURE)
    assert combined.keys() == expected.keys()
    for module, (a, b) in combined.items():
        assert a.dtype == b.dtype == torch.float32
        assert torch.allclose(a.double(), expected[module][0][: pool.rank], rtol=0, atol=1e-7)
        assert torch.allclose(b.double(), expected[module][1][:, : pool.rank], rtol=0, atol=1e-7)


def test_a_saved_mixture_loads_in_peft_and_in_transformers(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    pool.save(MIXTURE, tmp_path / "best")
    expected = merged(tiny_llama, pool.combine(MIXTURE))
    assert (expected - tiny.logits(tiny.load(tiny_llama))).abs().max() > 0.5
    assert torch.allclose(with_peft(tiny_llama, tmp_path / "best"), expected, **NEAR)
    assert torch.allclose(with_transformers(tiny_llama, tmp_path / "best"), expected, **NEAR)


@pytest.mark.parametrize("kind", ["tiny_gemma", "tiny_qwen2"])
def test_other_families_save_and_load_too(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(kind)
    pool = Pool(tiny.pool(base, tmp_path / "pool", ("amber", "birch"))).open(str(base))
    pool.save([1.3, -0.3], tmp_path / "best")
    expected = merged(base, pool.combine([1.3, -0.3]))
    assert torch.allclose(with_peft(base, tmp_path / "best"), expected, **NEAR)
    assert torch.allclose(with_transformers(base, tmp_path / "best"), expected, **NEAR)


def test_the_saved_config_of_a_mixed_pool_has_scale_one(mixed_pool: Path, tmp_path: Path) -> None:
    pool = Pool(mixed_pool).open()
    pool.save(MIXTURE, tmp_path / "best", {"iteration": 3})
    config = json.loads((tmp_path / "best" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (8, 8, False)
    assert config["target_modules"] == list(pool.modules)
    note = json.loads((tmp_path / "best" / folders.NOTE_FILE).read_text())
    made_of = {"experts": pool.names, "coefficients": MIXTURE, "space": "factor"}
    assert note == {"iteration": 3, **made_of}


@pytest.mark.parametrize("bad", [[1.0], [1, 2, 3, float("nan")], [1, 2, 3, float("inf")]])
def test_a_position_is_k_finite_numbers(bad: list[float], tiny_pool: Path) -> None:
    with pytest.raises(UserError, match="4 finite coefficients") as caught:
        Pool(tiny_pool).open().combine(bad)
    assert str(tiny_pool) in str(caught.value)


def test_a_pool_travels_closed(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool, ["dune", "birch"]).open()
    pool.check()
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.names == [] and copy.open().fingerprint() == pool.fingerprint()


def test_the_fingerprint_follows_weights_settings_and_order(
    tiny_pool: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pool, tmp_path / "pool")
    prints = [Pool(tiny_pool).open().fingerprint()]
    assert Pool(folder).open().fingerprint() == prints[0] and len(prints[0]) == 16
    prints.append(Pool(folder, ["birch", "amber", "cedar", "dune"]).open().fingerprint())
    prints.append(Pool(folder, ["amber", "birch"]).open().fingerprint())
    tiny.change(folder / "amber", lora_alpha=9)
    prints.append(Pool(folder).open().fingerprint())
    tiny.change(folder / "amber", lora_alpha=8)
    path = folder / "amber" / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\x3c")
    prints.append(Pool(folder).open().fingerprint())
    assert len(set(prints)) == 5


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
    with pytest.raises(UserError, match="must be check or ignore"):
        Pool(pool, base="maybe")
