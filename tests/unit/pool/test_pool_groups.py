"""The division of modules into groups, by their names."""

from typing import Any

import pytest

from swarm.errors import UserError
from swarm.pool.groups import divide_modules

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
