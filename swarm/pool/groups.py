"""The division of a pool's modules into groups, each with its own coefficients."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from swarm.errors import UserError
from swarm.merging.positions import ROUTE_SEPARATOR

ALL_MODULES = "all"
AUTO = "auto"
"""One group, or one per module in searches with gradients (`Pool.divide`)."""

GroupKind = Literal["auto", "global", "attention_mlp", "kind", "thirds", "per_layer", "per_module"]
"""Values of pool.groups."""


def divide_modules(modules: Sequence[str], kind: GroupKind) -> tuple[list[str], dict[str, int]]:
    """Divide modules into G groups.

    - `global`: one group.
    - `attention_mlp`: the projections of attention, and all others.
    - `kind`: the last part of a module's name, such as q_proj and v_proj.
    - `thirds`: the first, middle and last third of the adapted layers.
    - `per_layer`: each adapted layer.
    - `per_module`: each adapted module, by layer; named "layer 3 q_proj", with as much more of the
      module's name as makes it unique.

    Empty groups are left out, and a single one is named "all".

    Args:
        modules: Module names.
        kind: Value of pool.groups.

    Returns:
        The names of the groups in order, and for each module the index of its group.

    Raises:
        UserError: Layers are divided, and a module's name has no layer number.
    """
    if kind in ("global", AUTO):
        return [ALL_MODULES], dict.fromkeys(modules, 0)
    ordered, group = _DIVIDERS[str(kind)](modules)
    group_names = {module: group(module) for module in modules}
    names = [name for name in ordered if name in group_names.values()]
    numbers = {name: number for number, name in enumerate(names)}
    group_indices = {module: numbers[name] for module, name in group_names.items()}
    return (names if len(names) > 1 else [ALL_MODULES]), group_indices


def route_group_names(routes: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the names of all groups of a routed position [R * G * K], route by route.

    Args:
        routes: Names of R routes, or none.
        groups: Names of the G groups of modules.
    """
    if not routes:
        return list(groups)
    return [f"{route}{ROUTE_SEPARATOR}{group}" for route in routes for group in groups]


GroupDivision = tuple[list[str], Callable[[str], str]]
"""Names of groups in order, possibly including empty ones, and a module's group."""


def _divide_attention_mlp(modules: Sequence[str]) -> GroupDivision:
    """`self_attn.q_proj` of Llama, Gemma and Qwen2, `attention.query_key_value` of GPT-NeoX."""

    def group_of(module: str) -> str:
        return "attention" if re.search("attn|attention", module) else "mlp"

    return ["attention", "mlp"], group_of


def _divide_by_kind(modules: Sequence[str]) -> GroupDivision:
    def group_of(module: str) -> str:
        return module.rpartition(".")[2]

    return list(dict.fromkeys(map(group_of, sorted(modules, key=_natural_sort_key)))), group_of


def _divide_per_layer(modules: Sequence[str]) -> GroupDivision:
    layer = {module: _require_layer_number(module, "per_layer") for module in modules}
    names = [f"layer_{number}" for number in sorted(set(layer.values()))]
    return names, lambda module: f"layer_{layer[module]}"


def _divide_thirds(modules: Sequence[str]) -> GroupDivision:
    layer = {module: _require_layer_number(module, "thirds") for module in modules}
    numbers = sorted(set(layer.values()))
    names = ["first", "middle", "last"]
    # By the centre of a layer's interval, so that two layers are the first and the last third.
    third = {n: names[3 * (2 * i + 1) // (2 * len(numbers))] for i, n in enumerate(numbers)}
    return names, lambda module: third[layer[module]]


def _divide_per_module(modules: Sequence[str]) -> GroupDivision:
    ordered = sorted(modules, key=_natural_sort_key)
    labels = {module: _module_label(module, 1) for module in ordered}
    for parts in range(2, 2 + max(module.count(".") for module in ordered)):
        count = Counter(labels.values())
        labels = {
            m: _module_label(m, parts) if count[name] > 1 else name for m, name in labels.items()
        }
    return list(labels.values()), labels.__getitem__


_DIVIDERS: dict[str, Callable[[Sequence[str]], GroupDivision]] = {
    "attention_mlp": _divide_attention_mlp,
    "kind": _divide_by_kind,
    "thirds": _divide_thirds,
    "per_layer": _divide_per_layer,
    "per_module": _divide_per_module,
}


def _module_label(module: str, parts: int) -> str:
    """Return the layer, if any, and the last parts of a module's name."""
    end = ".".join(module.split(".")[-parts:])
    number = _layer_number(module)
    return end if number is None else f"layer {number} {end}"


def _natural_sort_key(module: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    parts = module.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _layer_number(module: str) -> int | None:
    """Return the number of a module's layer: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])


def _require_layer_number(module: str, kind: str) -> int:
    number = _layer_number(module)
    if number is None:
        raise UserError(
            f"pool.groups={kind}: the name of the adapted module {module} contains no layer "
            "number; choose one of global, attention_mlp, kind, per_module"
        )
    return number
