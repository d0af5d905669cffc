"""What several experts have in common: base model, module names, shapes, scaling and config."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from swarm.adapters import Adapter, adapter_error

# What picks the adapted modules; where all experts agree on these, a combination keeps them.
TARGET_OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


class NamedModel(Protocol):
    """A base model that can say whether a folder holds it (`swarm.engine.base.Base`)."""

    @property
    def name(self) -> str | None:
        """What adapter_config.json of its adapters calls it; `None`: anything."""
        ...

    def is_at(self, path: str) -> bool:
        """Whether a folder holds the same model, by its fingerprint."""
        ...


def name_of(base: "str | NamedModel | None") -> str | None:
    """The name of a base model."""
    return base if base is None or isinstance(base, str) else base.name


def check_base_models(adapters: Sequence[Adapter], base: "str | NamedModel | None") -> None:
    """Raise UserError for an expert of another base model than `base`, or than the first's.

    Names are compared by their last part: a local copy of a model has the hub's name at most there.
    A path that leads to the same model as `base` is the same, whatever it is called.
    """
    name = name_of(base)
    known = [adapter for adapter in adapters if adapter.base_model]
    if base is not None and not isinstance(base, str):
        odd = [one for one in known if name is None or _short_name(one.base_model or "") != _short_name(name)]
        same = {path for path in {one.base_model or "" for one in odd} if base.is_at(path)}
        known = [adapter for adapter in known if adapter.base_model not in same]
    expected = name or next((adapter.base_model for adapter in known), None)
    for adapter in known:
        if _short_name(adapter.base_model or "") != _short_name(expected or ""):
            where = "the model asked for is" if name else f"{known[0].folder} belongs to"
            raise adapter_error(
                adapter.folder,
                f"belongs to the base model {adapter.base_model}, but {where} {expected}; choose "
                "its base by model.path, give its name by model.name, or leave names aside by "
                "pool.base=ignore",
            )


def check_module_names(adapters: Sequence[Adapter]) -> None:
    """Raise UserError where two experts call one module by a longer and a shorter name."""
    owners = {module: adapter for adapter in reversed(adapters) for module in adapter.shapes}
    for module, adapter in owners.items():
        parts = module.split(".")
        for cut in range(1, len(parts)):
            short = ".".join(parts[cut:])
            if short in owners and short not in adapter.shapes:
                reason = f"calls {short} what {adapter.folder} calls {module}"
                raise adapter_error(owners[short].folder, reason)


def common_shapes(adapters: Sequence[Adapter]) -> dict[str, tuple[int, int]]:
    """(in, out) of every module that any expert adapts; raises UserError where two differ."""
    seen: dict[str, tuple[tuple[int, int], Adapter]] = {}
    for adapter in adapters:
        for module, (inputs, outputs, _) in adapter.shapes.items():
            (shape, first) = seen.setdefault(module, ((inputs, outputs), adapter))
            if shape != (inputs, outputs):
                reason = f"{module} maps {inputs} to {outputs}, but {shape[0]} to {shape[1]} in"
                raise adapter_error(adapter.folder, f"{reason} {first.folder}")
    return {module: shape for module, (shape, _) in seen.items()}


def shared_scaling(adapters: Sequence[Adapter]) -> tuple[int, float, bool] | None:
    """(rank, alpha, rsLoRA or not) if all modules of all experts have the same, else None."""
    kinds = {
        (shape[2], adapter.alphas[module], adapter.is_rslora)
        for adapter in adapters
        for module, shape in adapter.shapes.items()
    }
    return kinds.pop() if len(kinds) == 1 else None


def combined_config(
    adapters: Sequence[Adapter],
    modules: Sequence[str],
    scaling: tuple[int, float, bool],
    base_name: str | None,
) -> dict[str, Any]:
    """The PEFT config of any combination of `adapters` that adapts `modules`.

    `scaling` is (rank, alpha, rsLoRA or not) of the weights that go with it; `base_name` is the
    base model where no expert names one.
    """
    rank, alpha, rslora = scaling
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _common_value(adapters, "task_type"),
        "base_model_name_or_path": next((one.base_model for one in adapters if one.base_model), base_name),
        "revision": _common_value(adapters, "revision"),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        # The whole names, unless the experts agree on something shorter.
        "target_modules": list(modules),
    }
    targeting = [_target_options(adapter) for adapter in adapters]
    if all(one == targeting[0] for one in targeting) and targeting[0]["target_modules"]:
        config.update(targeting[0])
    return config


def _common_value(adapters: Sequence[Adapter], key: str) -> Any:
    """What all experts say of `key`, or None where they differ."""
    values = [adapter.config.get(key) for adapter in adapters]
    return values[0] if all(value == values[0] for value in values) else None


def _target_options(adapter: Adapter) -> dict[str, Any]:
    """What picks the modules in an expert's config; PEFT saves the lists in any order."""
    chosen = {key: adapter.config.get(key) for key in TARGET_OPTIONS}
    for key, value in chosen.items():
        if isinstance(value, list):
            chosen[key] = sorted(value, key=str)
    return chosen


def _short_name(base: str) -> str:
    """The last part of a base model's name: of the hub, of a path or of a path in the hub cache."""
    cached = re.search(r"models--([^/\\]+)[/\\]snapshots", base)
    parts = cached[1].split("--") if cached else re.split(r"[/\\]", base.rstrip("/\\"))
    return parts[-1].lower()
