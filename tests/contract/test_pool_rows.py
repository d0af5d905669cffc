"""Rows beside the experts of the folder: the base and static merges."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file

from swarm.errors import UserError
from swarm.executors import ray
from swarm.merging import MERGE_NAMES
from swarm.pool.adapter import WEIGHTS_FILE
from swarm.pool.pool import Pool

SPACES = ("factor", "delta")
Q = "model.layers.0.self_attn.q_proj"
ALL = {
    "base_row": True,
    "recipes": ["dare_ties", "slerp"],
    "groups": "attention_mlp",
}


def unit(pool: Pool, name: str, share: float = 1.0) -> list[float]:
    """The position of one row alone."""
    return [share * (other == name) for other in pool.names] * len(pool.groups)


def updates(pool: Pool, coefficients: list[float]) -> dict[str, torch.Tensor]:
    return {m: b.double() @ a.double() for m, (a, b) in pool.combine(coefficients).items()}


def test_the_order_of_the_rows(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool, **ALL).open()
    assert pool.names == [*tiny.NAMES, "base", "dare_ties", "slerp"]
    assert pool.groups == ["attention", "mlp"]


@pytest.mark.parametrize("space", SPACES)
def test_the_base_takes_what_the_others_leave(space: str, mixed_pool: Path, tmp_path: Path) -> None:
    plain, pool = Pool(mixed_pool, space=space).open(), Pool(mixed_pool, space=space, base_row=True)
    pool.open()
    assert not any(delta.any() for delta in updates(pool, unit(pool, "base")).values())
    for found, wanted in zip(
        pool.combine([0.3, 0, -0.2, 0, 0.9]).values(),
        plain.combine([0.3, 0, -0.2, 0]).values(),
        strict=True,
    ):
        assert all(map(torch.equal, found, wanted))
    pool.save(unit(pool, "base"), tmp_path / "nothing")
    assert not any(
        w.any() for k, w in load_file(tmp_path / "nothing" / WEIGHTS_FILE).items() if "B" in k
    )


def test_random_twins_have_the_shapes_and_norms_of_the_experts(mixed_pool: Path) -> None:
    own = Pool(mixed_pool).open()
    pools = [Pool(mixed_pool, control="random", control_seed=s).open() for s in (0, 0, 1)]
    assert all(pool.names == own.names and pool.modules == own.modules for pool in pools)
    made = [pool._rows for pool in pools]
    for expert, *twins in zip(own._rows, *made, strict=True):
        for module, shape in expert.shapes.items():
            (a, b), *pairs = (row.load_factors(module) for row in (expert, *twins))
            for first, second in pairs:
                assert (*first.shape[1:], *second.shape) == shape and first.shape == a.shape
                assert first.norm().item() == pytest.approx(a.norm().item(), rel=1e-6)
                length = (b @ a).norm().item()
                assert (second @ first).norm().item() == pytest.approx(length, rel=1e-6)
                assert not length or abs(float((first * a).sum() / a.norm() ** 2)) < 0.5
            assert torch.equal(pairs[0][0], pairs[1][0])
            assert not torch.equal(pairs[0][0], pairs[2][0])
    assert len({pool.fingerprint() for pool in (own, *pools)}) == 3


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("recipe", MERGE_NAMES)
def test_recipes_are_rows_of_their_own(recipe: str, space: str, mixed_pool: Path) -> None:
    settings: dict[str, Any] = {"space": space, "recipes": [recipe]}
    pool, again = (Pool(mixed_pool, **settings).open() for _ in range(2))
    found, other = (updates(one, unit(one, recipe)) for one in (pool, again))
    assert all(torch.equal(found[module], other[module]) for module in found)
    whole = updates(Pool(mixed_pool, **settings, density=0.9).open(), unit(pool, recipe))
    same = all(torch.equal(found[module], whole[module]) for module in found)
    assert same == (recipe in ("slerp", "model_stock"))
    half = updates(pool, unit(pool, recipe, 0.5))
    scale = 0.5 if space == "delta" else 0.25
    assert all(torch.allclose(half[m], scale * found[m], rtol=0, atol=1e-6) for m in found)


@pytest.mark.parametrize("kind", ["tiny_pool", "mixed_pool"])
def test_a_saved_mixture_of_all_rows_loads_in_peft(
    kind: str, request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path
) -> None:
    pool = Pool(request.getfixturevalue(kind), **ALL).open()
    mixture = np.random.default_rng(0).normal(size=2 * len(pool.names)).tolist()
    pool.save(mixture, tmp_path / "best")
    network = tiny.load(tiny_llama)
    with torch.no_grad():
        for module, delta in updates(pool, mixture).items():
            network.get_submodule(module).weight.add_(delta.float())
    loaded = PeftModel.from_pretrained(tiny.load(tiny_llama), tmp_path / "best")
    assert torch.allclose(tiny.logits(loaded), tiny.logits(network), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["base", "slerp"])
def test_a_folder_that_has_the_name_of_a_row(name: str, tiny_pool: Path, tmp_path: Path) -> None:
    pool = shutil.copytree(tiny_pool, tmp_path / "pool")
    (pool / "amber").rename(pool / name)
    assert name in Pool(pool).open().names
    with pytest.raises(UserError, match=f"of the name '{name}'.*rename") as caught:
        Pool(pool, **ALL).open()
    assert str(pool / name) in str(caught.value)


def test_a_pool_with_all_rows_travels_closed_and_packed(tiny_pool: Path, tmp_path: Path) -> None:
    pool = Pool(tiny_pool, ["dune", "amber"], **ALL).open()
    packed = ray.pack_experts(pool)
    for copy in (
        pickle.loads(pickle.dumps(pool)),
        ray.unpack_experts(packed, tmp_path / "copy", pickle.loads(pickle.dumps(pool))),
    ):
        assert copy.names == []
        copy.open()
        assert (copy.names, copy.groups) == (pool.names, pool.groups)
        assert copy.fingerprint() == pool.fingerprint()
        found, wanted = (updates(one, unit(one, "dare_ties")) for one in (copy, pool))
        assert all(torch.equal(found[m], wanted[m]) for m in wanted)


def test_the_fingerprint_follows_every_row(tiny_pool: Path) -> None:
    plain = Pool(tiny_pool).open().fingerprint()
    changes: list[dict[str, Any]] = [
        {"base_row": True},
        {"control": "random"},
        {"control": "random", "control_seed": 1},
        {"recipes": ["ties"]},
        {"recipes": ["ties", "slerp"]},
        {"recipes": ["ties"], "density": 0.2},
    ]
    prints = [Pool(tiny_pool, **change).open().fingerprint() for change in changes]
    assert len({plain, *prints}) == 1 + len(changes)
