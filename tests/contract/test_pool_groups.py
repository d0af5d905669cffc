"""Groups of modules have coefficients of their own: by name, in the engine and on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel

from swarm.errors import UserError
from swarm.pool.adapter import NOTE_FILE
from swarm.pool.groups import divide_modules
from swarm.pool.pool import Pool

LLAMA = [
    f"model.layers.{layer}.{part}"
    for layer in range(30)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]
NEOX = [
    f"gpt_neox.layers.{layer}.{part}"
    for layer in range(6)
    for part in ("attention.query_key_value", "attention.dense", "mlp.dense_4h_to_h")
]
ATTENTION, MLP = [0.7, -0.4, 0.5, 0.2], [0.0, 0.9, -0.3, 0.4]


def sizes(modules: list[str], kind: Any) -> dict[str, int]:
    names, places = divide_modules(modules, kind)
    return {name: list(places.values()).count(number) for number, name in enumerate(names)}


def test_names_of_several_families_are_divided() -> None:
    assert sizes(LLAMA, "global") == {"all": 120}
    assert sizes(LLAMA, "attention_mlp") == {"attention": 60, "mlp": 60}
    assert sizes(NEOX, "attention_mlp") == {"attention": 12, "mlp": 6}
    assert sizes(LLAMA, "thirds") == {"first": 40, "middle": 40, "last": 40}
    assert sizes(LLAMA, "per_layer") == {f"layer_{n}": 4 for n in range(30)}
    parts = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert sizes(LLAMA, "kind") == dict.fromkeys(parts, 30)
    assert sizes(NEOX, "kind") == dict.fromkeys(["query_key_value", "dense", "dense_4h_to_h"], 6)
    names, places = divide_modules(NEOX, "thirds")
    assert [names[places[f"gpt_neox.layers.{n}.attention.dense"]] for n in range(6)] == [
        "first",
        "first",
        "middle",
        "middle",
        "last",
        "last",
    ]


def test_each_module_is_a_group_with_a_readable_name() -> None:
    names, places = divide_modules(sorted(LLAMA), "per_module")
    assert len(names) == 120 and sorted(places.values()) == list(range(120))
    assert names[places["model.layers.3.self_attn.q_proj"]] == "layer 3 q_proj"
    assert [name.split()[1] for name in names[::4]] == [str(n) for n in range(30)]
    alike = ["h.0.attn.dense", "h.0.mlp.dense", "h.0.mlp.up", "lm_head"]
    names = ["layer 0 attn.dense", "layer 0 mlp.dense", "layer 0 up", "lm_head"]
    assert sizes(alike, "per_module") == dict.fromkeys(names, 1)
    experts = [f"layers.1.mlp.experts.{n}.gate" for n in range(3)]
    names = [f"layer 1 {n}.gate" for n in range(3)]
    assert sizes(experts, "per_module") == dict.fromkeys(names, 1)
    assert sizes(LLAMA[:1], "per_module") == {"all": 1}


@pytest.mark.parametrize("kind", ["thirds", "per_layer"])
def test_a_module_without_a_layer_is_one_line(kind: str) -> None:
    with pytest.raises(UserError, match=rf"pool\.groups={kind}.*lm_head.*attention_mlp"):
        divide_modules([*LLAMA, "lm_head"], kind)


@pytest.mark.parametrize("kind", ["halves", 2, True, None, ["thirds"]])
def test_unknown_groups_are_one_line(kind: object, tiny_pool: Path) -> None:
    with pytest.raises(UserError, match=r"pool\.groups=.*global, attention_mlp, kind,"):
        Pool(tiny_pool, groups=kind)  # type: ignore[arg-type]


@pytest.fixture(params=["factor", "delta"])
def pool(request: pytest.FixtureRequest, mixed_pool: Path) -> Pool:
    """Four unlike experts with coefficients for attention and for the rest."""
    return Pool(mixed_pool, space=request.param, groups="attention_mlp").open()


def expected(pool: Pool) -> dict[str, torch.Tensor]:
    """B A of each module with its own group's coefficients, by a pool without groups."""
    plain = Pool(pool.folder, space=pool.space).open()
    halves = {"attn": plain.combine(ATTENTION), "mlp": plain.combine(MLP)}
    pairs = {m: halves["attn" if "attn" in m else "mlp"][m] for m in plain.modules}
    return {m: b.double() @ a.double() for m, (a, b) in pairs.items()}


def explicit(base: Path, pool: Pool) -> torch.nn.Module:
    network = tiny.load(base)
    with torch.no_grad():
        for module, delta in expected(pool).items():
            network.get_submodule(module).weight.add_(delta.float())
    return network


def test_combine_uses_each_modules_own_coefficients(pool: Pool) -> None:
    assert pool.groups == ["attention", "mlp"] and len(pool.names) == 4
    for module, (a, b) in pool.combine(ATTENTION + MLP).items():
        assert torch.allclose(b.double() @ a.double(), expected(pool)[module], rtol=0, atol=1e-6)


def test_a_saved_position_says_its_groups_and_is_what_peft_loads(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    pool.save(ATTENTION + MLP, tmp_path / "best")
    note = json.loads((tmp_path / "best" / NOTE_FILE).read_text())
    assert (note["groups"], note["coefficients"]) == (["attention", "mlp"], ATTENTION + MLP)
    loaded = tiny.logits(PeftModel.from_pretrained(tiny.load(tiny_llama), tmp_path / "best"))
    assert torch.allclose(loaded, tiny.logits(explicit(tiny_llama, pool)), rtol=0, atol=1e-4)


def test_a_position_has_coefficients_for_every_group(tiny_pool: Path) -> None:
    pool = Pool(tiny_pool, groups="per_layer").open()
    with pytest.raises(UserError, match="8 finite coefficients, one an expert in each of 2 groups"):
        pool.combine(ATTENTION)


def test_the_fingerprint_tells_groups_apart(tiny_pool: Path) -> None:
    prints = [
        Pool(tiny_pool, groups=kind).open().fingerprint()
        for kind in ("global", "attention_mlp", "kind", "thirds", "per_layer", "per_module")
    ]
    assert len(set(prints)) == 6
