"""The division of a pool's modules into groups with coefficients of their own."""

import re
from collections.abc import Callable, Sequence

from swarm.errors import UserError

ALL = "all"
KINDS = ("1", "attention_mlp", "thirds", "per_layer")


def check_kind(kind: object) -> int | str:
    """The value of pool.groups, checked; raises UserError for one that is none of KINDS."""
    if isinstance(kind, bool) or str(kind) not in KINDS:
        raise UserError(f"pool.groups is {kind!r}; allowed: {', '.join(KINDS)}")
    return 1 if str(kind) == "1" else str(kind)


def divide(modules: Sequence[str], kind: int | str) -> tuple[list[str], dict[str, int]]:
    """The groups' names, in order, and for each module the number of its group.

    `attention_mlp` is the projections of attention and all else; `thirds` the first, middle and
    last third of the layers that are adapted, `per_layer` each of them. A group that no module
    belongs to is left out, and a single one is called "all".
    Raises UserError for a module whose name has no layer where layers are asked for.
    """
    if kind == 1:
        return [ALL], dict.fromkeys(modules, 0)
    ordered, group = _attention() if kind == "attention_mlp" else _layers(modules, str(kind))
    own = {module: group(module) for module in modules}
    names = [name for name in ordered if name in own.values()]
    places = {module: names.index(name) for module, name in own.items()}
    return (names if len(names) > 1 else [ALL]), places


def _attention() -> tuple[list[str], Callable[[str], str]]:
    """`self_attn.q_proj` of Llama, Gemma and Qwen2, `attention.query_key_value` of GPT-NeoX."""

    def group(module: str) -> str:
        return "attention" if re.search("attn|attention", module) else "mlp"

    return ["attention", "mlp"], group


def _layers(modules: Sequence[str], kind: str) -> tuple[list[str], Callable[[str], str]]:
    layer = {module: _layer(module, kind) for module in modules}
    numbers = sorted(set(layer.values()))
    if kind == "per_layer":
        return [f"layer_{n}" for n in numbers], lambda module: f"layer_{layer[module]}"
    thirds = ["first", "middle", "last"]
    # By the middle of a layer, so that two layers are the first and the last.
    third = {n: thirds[3 * (2 * i + 1) // (2 * len(numbers))] for i, n in enumerate(numbers)}
    return thirds, lambda module: third[layer[module]]


def _layer(module: str, kind: str) -> int:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    if found is None:
        raise UserError(
            f"pool.groups={kind}: the name of the adapted module {module} has no number of a "
            "layer; choose pool.groups=1 or attention_mlp"
        )
    return int(found[1])
