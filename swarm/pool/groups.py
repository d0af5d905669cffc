"""The division of a pool's modules into groups, each with its own coefficients."""

import re
from collections import Counter
from collections.abc import Sequence
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
    ordered = sorted(modules, key=_natural_sort_key)
    if kind in ("global", AUTO):
        group_of = dict.fromkeys(ordered, ALL_MODULES)
    elif kind == "attention_mlp":
        # `self_attn.q_proj` of Llama, Gemma and Qwen2, `attention.query_key_value` of GPT-NeoX.
        group_of = {m: "attention" if re.search("attn|attention", m) else "mlp" for m in ordered}
        ordered.sort(key=group_of.__getitem__)
    elif kind == "kind":
        group_of = {module: module.rpartition(".")[2] for module in ordered}
    elif kind == "per_module":
        group_of = _unique_labels(ordered)
    else:
        layers = {m: number for m in ordered if (number := _layer_number(m)) is not None}
        if unnumbered := [module for module in ordered if module not in layers]:
            raise UserError(
                f"pool.groups={kind}: the name of the adapted module {unnumbered[0]} contains no "
                "layer number; choose one of global, attention_mlp, kind, per_module"
            )
        names = {number: f"layer_{number}" for number in sorted(set(layers.values()))}
        if kind == "thirds":
            # By the centre of a layer's interval, so that two layers are the first and last third.
            thirds = ("first", "middle", "last")
            names = {n: thirds[3 * (2 * i + 1) // (2 * len(names))] for i, n in enumerate(names)}
        ordered.sort(key=layers.__getitem__)
        group_of = {module: names[number] for module, number in layers.items()}
    indices = {name: i for i, name in enumerate(dict.fromkeys(group_of[m] for m in ordered))}
    names_in_order = list(indices) if len(indices) > 1 else [ALL_MODULES]
    return names_in_order, {module: indices[group_of[module]] for module in modules}


def route_group_names(routes: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the names of all groups of a routed position [R * G * K], route by route.

    Args:
        routes: Names of R routes, or none.
        groups: Names of the G groups of modules.
    """
    if not routes:
        return list(groups)
    return [f"{route}{ROUTE_SEPARATOR}{group}" for route in routes for group in groups]


def _unique_labels(modules: Sequence[str]) -> dict[str, str]:
    """Label each module with its layer, if any, and as few last parts as make it unique."""
    labels = dict.fromkeys(modules, "")
    for parts in range(1, 2 + max(module.count(".") for module in modules)):
        count = Counter(labels.values())
        for module, label in labels.items():
            if count[label] > 1 or not label:
                number, end = _layer_number(module), ".".join(module.split(".")[-parts:])
                labels[module] = end if number is None else f"layer {number} {end}"
    return labels


def _natural_sort_key(module: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    parts = module.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _layer_number(module: str) -> int | None:
    """Return the number of a module's layer: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])
