"""What several experts have in common: base model, module names, shapes, scaling and config."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from swarm._util.files import name_fault
from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, adapter_error

# What picks the adapted modules; where all experts agree on these, a combination keeps them.
TARGET_OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


class NamedModel(Protocol):
    """A base model that can say whether a folder holds it (`swarm.engine.base_model.BaseModel`)."""

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
    expected = name or next((adapter.base_model for adapter in known), None)
    if base is not None and not isinstance(base, str):
        odd = [
            one
            for one in known
            if name is None or _short_name(one.base_model or "") != _short_name(name)
        ]
        same = {path for path in {one.base_model or "" for one in odd} if base.is_at(path)}
        known = [adapter for adapter in known if adapter.base_model not in same]
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
        "base_model_name_or_path": next(
            (one.base_model for one in adapters if one.base_model), base_name
        ),
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


# Which sub-folders of a pool's folder are its experts, and what they may be called.


def parse_expert_names(folder: Path, experts: Any) -> list[str]:
    """The value of pool.experts as a list; raises UserError for one that can never work."""
    if isinstance(experts, str) or not isinstance(experts, Sequence):
        raise UserError(f"pool.experts must be a list of sub-folders of {folder}, not {experts!r}")
    names = list(experts)
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise UserError(f"pool.experts: {name!r} is not the name of a sub-folder of {folder}")
        if names.count(name) > 1:
            raise UserError(f"pool.experts names {name!r} of {folder} more than once")
    if len(names) < 2:
        find_experts(folder, names)  # a name that is wrong comes first
        raise UserError(
            f"pool.experts must name at least two experts of {folder}, not {names}; "
            f"it has: {_format_names(_list_adapters(folder))}"
        )
    return names


def find_experts(folder: Path, experts: list[str] | None) -> list[str]:
    """The names of the experts' folders: those asked for, else all that hold an adapter.

    Raises UserError where the folder is none, lacks one or holds fewer than two.
    """
    if not folder.is_dir():
        raise UserError(f"pool.folder: there is no folder {folder}")
    found = _list_adapters(folder)
    if experts is None:
        _check_incomplete_experts(folder)
        if len(found) < 2:
            have = f"{folder} holds {len(found)} with an {CONFIG_FILE}"
            raise UserError(f"pool.folder: a pool needs at least two experts, and {have}")
        return found
    for name in experts:
        if not (folder / name).is_dir():
            near = get_close_matches(name, found, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"pool.experts: {folder} has no {name!r}; {meant}it has: {_format_names(found)}"
            )
    return experts


def _list_adapters(folder: Path) -> list[str]:
    """The sub-folders that hold an adapter.

    Raises UserError where one has a name that cannot be written or shown.
    """
    found = sorted(
        path.parent.name
        for path in folder.glob(f"*/{CONFIG_FILE}")
        if not path.parent.name.startswith(".")
    )
    for name in found:
        if fault := name_fault(name):
            raise UserError(
                f"pool.folder: {folder} holds {name[:80]!r}, whose name {fault}; rename it"
            )
    return found


def _check_incomplete_experts(folder: Path) -> None:
    """Raise UserError where a sub-folder is an expert of which a part is missing.

    One with weights and no configuration, and a link that leads nowhere or to itself: looked for
    by configurations alone, they would be left out of the search without a word.
    """
    try:
        places = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise UserError(f"pool.folder: {folder} cannot be read: {error.strerror}") from None
    for place in places:
        config = place / CONFIG_FILE
        wrong = ""
        if any(
            one.is_symlink() and not one.exists() for one in (place, config, place / WEIGHTS_FILE)
        ):
            wrong = "is, or holds, a symbolic link that leads nowhere or to itself"
        elif place.is_dir() and not config.is_file():
            halves = [WEIGHTS_FILE, "adapter_model.bin", f"{WEIGHTS_FILE}.index.json"]
            if held := [name for name in halves if (place / name).exists()]:
                wrong = f"holds {held[0]} and no {CONFIG_FILE}: it was fetched by half"
        if wrong:
            raise UserError(
                f"pool.folder: {place} {wrong}; mend or remove it, or name the others in "
                "pool.experts"
            )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def check_row_names(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError where an expert's folder has the name of a row that the pool adds."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{folder / name}: the settings of the pool add an expert named {name!r} to those "
                "of the folder; rename the folder, or leave it out of pool.experts"
            )
