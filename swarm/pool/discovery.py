"""Discovery and consistency of a pool's experts: names, base model, modules, shapes, config."""

import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarm._util.files import cache_folder, find_path, make_folder, name_fault, short_digest
from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE, Adapter, adapter_error

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.merging.lora_math import FactorPair

log = logging.getLogger(__name__)

QUANTIZED_COPY = re.compile(r"(-unsloth)?-(bnb-4bit|bnb-8bit|gptq(-int[48])?|awq)$")
"""Suffix of the name of a quantized copy: adapters trained on it fit the original, too."""

TARGET_OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Options that select the adapted modules; a combination retains them if all experts agree."""


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


HUB = "hf://"
"""Prefix of an adapter's id on the Hugging Face hub."""


def find_pool(places: str | Path) -> Path:
    """Return the folder of a pool's adapters; of several places, a folder of links to them.

    Args:
        places: A folder of adapters; or, separated by commas, such folders, folders of one adapter
            and ids of the hub, "hf://user/name" or "hf://user/name@revision". An adapter of a name
            that occurs before gets that of its place too: "place-name".

    Raises:
        UserError: A place does not exist, or is not in the hub's cache and cannot be downloaded.
    """
    text = str(places)
    if "," not in text and not text.startswith(HUB):
        return find_path(places)
    links: dict[str, Path] = {}
    for place in filter(None, map(str.strip, text.split(","))):
        folder = find_path(place)
        if place.startswith(HUB):
            folder = _download_adapters(place.removeprefix(HUB))
        label = place.partition("@")[0].rstrip("/")
        alone = (folder / CONFIG_FILE).is_file()
        for name in [""] if alone else find_adapters(folder):
            *_, outer, inner = ("", *label.split("/"), *filter(None, [name]))
            target = (folder / name).absolute()
            links[f"{outer}-{inner}" if inner in links else inner] = target
    listed = {name: str(target) for name, target in links.items()}
    found = cache_folder() / "pools" / short_digest(listed)
    make_folder(found)
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (found / name).symlink_to(target)
    return found


def _download_adapters(name: str) -> Path:
    """Return the hub's snapshot of an adapter, or of several, downloaded if it is not cached."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    wanted = [f"{folder}{file}" for folder in ("", "*/") for file in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # httpx, hub, disk and validation errors have no common base
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"pool: {HUB}{name} cannot be downloaded, nor is it cached: {reason}"
        ) from None


def find_adapters(folder: Path) -> dict[str, str]:
    """Return the sub-folders that are, or should be, adapters, and what is wrong with each.

    Incomplete ones count: found by their configs alone, they would silently be left out of a
    search.

    Returns:
        Faults by name, sorted; a fault is empty for a usable folder, whose files are not read.

    Raises:
        UserError: The folder does not exist or cannot be listed.
    """
    try:
        subfolders = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"pool.folder: no such folder {folder}, or not readable ({error.strerror})"
        ) from None
    files = (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, f"{WEIGHTS_FILE}.index.json")
    found = {}
    for one in subfolders:
        if not os.access(one, os.X_OK) and one.is_dir():
            continue  # such as lost+found; named in `pool.experts`, it is missing
        held = [name for name in files if (one / name).exists()]
        links = [one, one / CONFIG_FILE, one / WEIGHTS_FILE]
        if any(path.is_symlink() and not path.exists() for path in links):
            found[one.name] = "is or contains a symbolic link that is broken or refers to itself"
        elif held and held[0] != CONFIG_FILE:
            found[one.name] = f"has {held[0]} and no {CONFIG_FILE}: the download is incomplete"
        elif held:
            fault = name_fault(one.name)
            found[one.name] = fault and f"has a name that {fault}"
    return found


def find_experts(folder: Path, experts: Sequence[str] | None, least: int = 2) -> list[str]:
    """Return the names of the experts' folders: the requested ones, else all with an adapter.

    Raises:
        UserError: The folder does not exist, an expert is missing or incomplete, or there are
            fewer than `least`.
    """
    found = find_adapters(folder)
    chosen = list(found if experts is None else experts)
    for name in chosen:
        if name not in found or chosen.count(name) > 1:
            matches = get_close_matches(name, found, 1)
            meant = f"did you mean {matches[0]!r}? " if matches and name not in found else ""
            raise UserError(
                f"pool.experts: {folder} has no {name!r}, or it is named more than once; {meant}"
                f"it contains: {', '.join(found) or 'none'}"
            )
        if found[name]:
            raise UserError(
                f"pool.folder: {str(folder / name)!r} {found[name]}; fix or remove it, or list the "
                "others in pool.experts"
            )
    if len(chosen) < least:
        raise UserError(
            f"pool.experts: a pool needs at least two experts; {folder} contains {len(found)} with "
            f"an {CONFIG_FILE}: {', '.join(found) or 'none'}"
        )
    return chosen


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
    # Two experts must not name one module by a longer and a shorter name.
    owners = {module: adapter for adapter in reversed(adapters) for module in adapter.shapes}
    for module, adapter in owners.items():
        parts = module.split(".")
        for short in (".".join(parts[cut:]) for cut in range(1, len(parts))):
            if short in owners and short not in adapter.shapes:
                reason = f"names {short} what {adapter.folder} names {module}"
                raise adapter_error(owners[short].folder, reason)
    return common_shapes(adapters)


def check_base_models(adapters: Sequence[Adapter], base: "str | NamedModel | None") -> None:
    """Raise UserError for an expert of another base model than `base`, or than the first's.

    Names are compared by their last part, as a local copy of a model shares at most that with the
    hub's name; the suffix of a quantized copy does not count. A path to the same model as `base`
    counts as equal, whatever its name. A folder that does not exist on this machine identifies no
    model: for an expert that names one a warning is logged, and only its shapes are checked.
    """
    known = {one.folder: one.base_model for one in adapters if one.base_model}
    here = [named for named in known.values() if not is_missing_folder(named)]
    name = name_of(base)
    expected = name or next(iter([*here, *known.values()]), "")
    accepted = {named for named in known.values() if _short_name(named) == _short_name(expected)}
    if base is not None and not isinstance(base, str):
        accepted |= {named for named in {*known.values()} - accepted if base.is_at(named)}
    for folder, named in known.items():
        if named in accepted:
            continue
        if is_missing_folder(named):
            _warn_missing_base(folder, named, expected)
            continue
        first = next((one for one, other in known.items() if other == expected), None)
        where = "the requested model is" if name else f"{first} belongs to"
        raise adapter_error(
            folder,
            f"belongs to the base model {named}, but {where} {expected}; set "
            "its base by model.path, the name by model.name, or pool.base=ignore to skip "
            "this check",
        )


@cache
def _warn_missing_base(folder: Path, named: str, expected: str) -> None:
    """Log, once per expert, that its base model could not be compared."""
    log.warning(
        "%s: names the base model %s, a folder that does not exist here; taken for %s",
        folder,
        named,
        expected,
    )


def _short_name(base: str) -> str:
    """Return the last part of a base model's name: of the hub, a path or the hub cache."""
    cached = re.search(r"models--([^/\\]+)[/\\]snapshots", base)
    parts = cached[1].split("--") if cached else re.split(r"[/\\]", base.rstrip("/\\"))
    return QUANTIZED_COPY.sub("", parts[-1].lower())


def is_missing_folder(base: str) -> bool:
    """Return whether a base model's name can only be a folder, and that does not exist here."""
    is_path = re.match(r"[/\\.~]|[A-Za-z]:[/\\]", base) or len(re.split(r"[/\\]", base)) > 2
    return bool(is_path) and not find_path(base).exists()


def common_shapes(adapters: Sequence[Adapter]) -> dict[str, tuple[int, int]]:
    """Return (in, out) of every adapted module; raises UserError if two experts differ."""
    found: dict[str, tuple[tuple[int, int], Path]] = {}
    for adapter in adapters:
        for module, (inputs, outputs, _) in adapter.shapes.items():
            (ins, outs), first = found.setdefault(module, ((inputs, outputs), adapter.folder))
            if (ins, outs) != (inputs, outputs):
                reason = f"{module} maps {inputs} to {outputs}, but {ins} to {outs} in {first}"
                raise adapter_error(adapter.folder, reason)
    return {module: shape for module, (shape, _) in found.items()}


def find_equal_experts(adapters: Sequence[Adapter]) -> list[list[str]]:
    """Return the groups of experts whose updates are equal in all weights, by name.

    Reads every weight once, one module at a time. Raises UserError if one is not finite.
    """
    equal: dict[bytes, list[str]] = {}
    for adapter in adapters:
        equal.setdefault(adapter.content_digest(), []).append(adapter.name)
    return [names for names in equal.values() if len(names) > 1]


def combined_adapter(
    adapters: Sequence[Adapter],
    pairs: Mapping[str, "FactorPair"],
    base_name: str | None,
    shares_targets: bool = True,
) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """Return the PEFT config and the weights of a combination of `adapters`.

    Alpha equals the rank: the scaling is in the weights.

    Args:
        pairs: A [r, in] and B [out, r] by module; r may differ.
        base_name: The base model if no adapter names one.
        shares_targets: Whether no other modules are changed than by the adapters.
    """

    def shared(*keys: str) -> dict[str, Any]:
        """Return the options that are equal in all experts; PEFT saves lists in any order."""
        found = {}
        for key in keys:
            values = [one.config.get(key) for one in adapters]
            values = [sorted(one, key=str) if isinstance(one, list) else one for one in values]
            if values and all(one == values[0] for one in values):
                found[key] = values[0]
        return found

    ranks = {name: len(down) for name, (down, _) in pairs.items()}
    rank = max(ranks.values())
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        # Full module names, unless the experts agree on something shorter.
        "target_modules": list(pairs),
    }
    named = [one.base_model for one in adapters if one.base_model]
    config |= {"base_model_name_or_path": named[0]} if named else {}
    config |= shared("task_type", "revision")
    targets = shared(*TARGET_OPTIONS)
    if shares_targets and len(targets) == len(TARGET_OPTIONS) and targets["target_modules"]:
        config |= targets
    if lower := {name: one for name, one in ranks.items() if one < rank}:
        config |= {"rank_pattern": lower, "alpha_pattern": lower}
    weights = {
        f"base_model.model.{module}.lora_{side}.weight": weight
        for module, pair in pairs.items()
        for side, weight in zip("AB", pair, strict=True)
    }
    return config, weights
