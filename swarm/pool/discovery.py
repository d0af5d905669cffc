"""Discovery and consistency of a pool's experts: names, base model, modules, shapes, config."""

import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from swarm._util.files import find_path, name_fault
from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, adapter_error

log = logging.getLogger(__name__)

QUANTIZED_COPY = re.compile(r"(-unsloth)?-(bnb-4bit|bnb-8bit|gptq(-int[48])?|awq)$")
"""Suffix of the name of a quantized copy: adapters trained on it fit the original, too."""

# Options that select the adapted modules; a combination retains them if all experts agree.
TARGET_OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


class NamedModel(Protocol):
    """A base model that can identify its folder (`swarm.engine.base_model.BaseModel`)."""

    @property
    def name(self) -> str | None:
        """The model's name in adapter_config.json of its adapters; `None` accepts any."""
        ...

    def is_at(self, path: str) -> bool:
        """Return whether a folder contains the same model, by its fingerprint."""
        ...


def name_of(base: "str | NamedModel | None") -> str | None:
    """Return the name of a base model."""
    return base if base is None or isinstance(base, str) else base.name


def check_base_models(adapters: Sequence[Adapter], base: "str | NamedModel | None") -> None:
    """Raise UserError for an expert of another base model than `base`, or than the first's.

    Names are compared by their last part, as a local copy of a model shares at most that with the
    hub's name; the suffix of a quantized copy does not count. A path to the same model as `base`
    counts as equal, whatever its name. A folder that does not exist on this machine identifies no
    model: for an expert that names one a warning is logged, and only its shapes are checked.
    """
    name = name_of(base)
    known = [adapter for adapter in adapters if adapter.base_model]
    here = [one for one in known if not is_missing_folder(one.base_model or "")]
    expected = name or next((one.base_model for one in [*here, *known]), None)
    if base is not None and not isinstance(base, str):
        odd = [
            one
            for one in known
            if name is None or _short_name(one.base_model or "") != _short_name(name)
        ]
        same = {path for path in {one.base_model or "" for one in odd} if base.is_at(path)}
        known = [adapter for adapter in known if adapter.base_model not in same]
    for adapter in known:
        named = adapter.base_model or ""
        if _short_name(named) == _short_name(expected or ""):
            continue
        if is_missing_folder(named):
            _warn_missing_base(adapter.folder, named, expected)
            continue
        first = next((one.folder for one in known if one.base_model == expected), None)
        where = "the requested model is" if name else f"{first} belongs to"
        raise adapter_error(
            adapter.folder,
            f"belongs to the base model {named}, but {where} {expected}; set "
            "its base by model.path, the name by model.name, or pool.base=ignore to skip "
            "this check",
        )


@cache
def _warn_missing_base(folder: Path, named: str, expected: str | None) -> None:
    """Log, once per expert, that its base model could not be compared."""
    log.warning(
        "%s: names the base model %s, a folder that does not exist here; taken for %s",
        folder,
        named,
        expected or "the requested model",
    )


def check_module_names(adapters: Sequence[Adapter]) -> None:
    """Raise UserError if two experts name one module by a longer and a shorter name."""
    owners = {module: adapter for adapter in reversed(adapters) for module in adapter.shapes}
    for module, adapter in owners.items():
        parts = module.split(".")
        for cut in range(1, len(parts)):
            short = ".".join(parts[cut:])
            if short in owners and short not in adapter.shapes:
                reason = f"names {short} what {adapter.folder} names {module}"
                raise adapter_error(owners[short].folder, reason)


def common_shapes(adapters: Sequence[Adapter]) -> dict[str, tuple[int, int]]:
    """Return (in, out) of every adapted module; raises UserError if two experts differ."""
    seen: dict[str, tuple[tuple[int, int], Adapter]] = {}
    for adapter in adapters:
        for module, (inputs, outputs, _) in adapter.shapes.items():
            (shape, first) = seen.setdefault(module, ((inputs, outputs), adapter))
            if shape != (inputs, outputs):
                reason = f"{module} maps {inputs} to {outputs}, but {shape[0]} to {shape[1]} in"
                raise adapter_error(adapter.folder, f"{reason} {first.folder}")
    return {module: shape for module, (shape, _) in seen.items()}


def check_compatible(
    adapters: Sequence[Adapter], base: "str | NamedModel | None", base_check: str = "check"
) -> dict[str, tuple[int, int]]:
    """Return `common_shapes` of experts that can be combined.

    Args:
        adapters: The experts.
        base: See `check_base_models`.
        base_check: "ignore" skips the comparison of the base models.

    Raises:
        UserError: An expert does not fit the others or the base; the error names its folder.
    """
    if base_check == "check":
        check_base_models(adapters, base)
    check_module_names(adapters)
    return common_shapes(adapters)


def find_equal_experts(adapters: Sequence[Adapter]) -> list[list[str]]:
    """Return the groups of experts whose updates are equal in all weights, by name.

    Reads every weight once, one module at a time. Raises UserError if one is not finite.
    """
    equal: dict[bytes, list[str]] = {}
    for adapter in adapters:
        equal.setdefault(adapter.content_digest(), []).append(adapter.name)
    return [names for names in equal.values() if len(names) > 1]


def combined_config(
    adapters: Sequence[Adapter], modules: Sequence[str], rank: int, base_name: str | None
) -> dict[str, Any]:
    """Return the PEFT config of any combination of `adapters` that adapts `modules`.

    Alpha equals the rank: the scaling is in the weights. `base_name` is the base model if no expert
    names one.
    """
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _common_value(adapters, "task_type"),
        "base_model_name_or_path": next(
            (one.base_model for one in adapters if one.base_model), base_name
        ),
        "revision": _common_value(adapters, "revision"),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        # Full module names, unless the experts agree on something shorter.
        "target_modules": list(modules),
    }
    targeting = [_target_options(adapter) for adapter in adapters]
    if all(one == targeting[0] for one in targeting) and targeting[0]["target_modules"]:
        config.update(targeting[0])
    return config


def _common_value(adapters: Sequence[Adapter], key: str) -> Any:
    """Return the value of `key` that all experts share, or None if they differ."""
    values = [adapter.config.get(key) for adapter in adapters]
    return values[0] if all(value == values[0] for value in values) else None


def _target_options(adapter: Adapter) -> dict[str, Any]:
    """Return the options that select an expert's modules, with sorted lists.

    PEFT saves these lists in any order.
    """
    chosen = {key: adapter.config.get(key) for key in TARGET_OPTIONS}
    for key, value in chosen.items():
        if isinstance(value, list):
            chosen[key] = sorted(value, key=str)
    return chosen


def _short_name(base: str) -> str:
    """Return the last part of a base model's name: of the hub, a path or the hub cache."""
    cached = re.search(r"models--([^/\\]+)[/\\]snapshots", base)
    parts = cached[1].split("--") if cached else re.split(r"[/\\]", base.rstrip("/\\"))
    return QUANTIZED_COPY.sub("", parts[-1].lower())


def is_missing_folder(base: str) -> bool:
    """Return whether a base model's name can only be a folder, and that does not exist here."""
    is_path = re.match(r"[/\\.~]|[A-Za-z]:[/\\]", base) or len(re.split(r"[/\\]", base)) > 2
    return bool(is_path) and not find_path(base).exists()


def find_experts(folder: Path, experts: Sequence[str] | None) -> list[str]:
    """Return the names of the experts' folders: the requested ones, else all with an adapter.

    Raises:
        UserError: The folder does not exist, lacks an expert or has fewer than two.
    """
    if not folder.is_dir():
        raise UserError(f"pool.folder: no such folder {folder}")
    found = _list_adapters(folder)
    if experts is None:
        _check_incomplete_experts(folder)
        if len(found) < 2:
            have = f"{folder} contains {len(found)} with an {CONFIG_FILE}"
            raise UserError(f"pool.folder: a pool needs at least two experts, and {have}")
        return found
    has = f"it contains: {', '.join(found) or 'none'}"
    for name in experts:
        if name in ("", ".", "..") or "/" in name or "\\" in name or not (folder / name).is_dir():
            matches = get_close_matches(name, found, 1)
            meant = f"did you mean {matches[0]!r}? " if matches else ""
            raise UserError(f"pool.experts: {folder} has no {name!r}; {meant}{has}")
        if list(experts).count(name) > 1:
            raise UserError(f"pool.experts names {name!r} of {folder} more than once")
    if len(experts) < 2:
        raise UserError(f"pool.experts: must name at least two experts of {folder}; {has}")
    return list(experts)


def _list_adapters(folder: Path) -> list[str]:
    """Return the sub-folders that contain an adapter.

    Raises UserError if a name cannot be written or displayed.
    """
    found = sorted(
        path.parent.name
        for path in folder.glob(f"*/{CONFIG_FILE}")
        if not path.parent.name.startswith(".")
    )
    for name in found:
        if fault := name_fault(name):
            raise UserError(
                f"pool.folder: {folder} contains {name[:80]!r}, whose name {fault}; rename it"
            )
    return found


def _check_incomplete_experts(folder: Path) -> None:
    """Raise UserError if a sub-folder is an incomplete expert.

    These are folders with weights and no config, and broken or circular links: as experts are found
    by their config, they would silently be left out of the search.
    """
    try:
        subfolders = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise UserError(f"pool.folder: {folder} cannot be read: {error.strerror}") from None
    for subfolder in subfolders:
        if wrong := find_incomplete_part(subfolder):
            raise UserError(
                f"pool.folder: {subfolder} {wrong}; fix or remove it, or list the others in "
                "pool.experts"
            )


def find_incomplete_part(subfolder: Path) -> str:
    """Return why a sub-folder of a pool is an incomplete expert; empty if it is not."""
    config = subfolder / CONFIG_FILE
    if any(
        one.is_symlink() and not one.exists()
        for one in (subfolder, config, subfolder / WEIGHTS_FILE)
    ):
        return "is or contains a symbolic link that is broken or refers to itself"
    if subfolder.is_dir() and not config.is_file():
        halves = [WEIGHTS_FILE, "adapter_model.bin", f"{WEIGHTS_FILE}.index.json"]
        if held := [name for name in halves if (subfolder / name).exists()]:
            return f"contains {held[0]} and no {CONFIG_FILE}: the download is incomplete"
    return ""


def check_row_names(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if an expert's folder has the name of a row that the pool adds."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{folder / name}: the pool's settings add an expert of the name {name!r}; "
                "rename the folder, or omit it from pool.experts"
            )
