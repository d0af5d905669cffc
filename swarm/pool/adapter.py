"""Reading, checking and writing one expert: a PEFT LoRA folder with its config and weights.

Folders are written atomically: completely or not at all.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from swarm._util.files import (
    hash_file_cached,
    make_folder,
    parse_json,
    read_text,
    rename,
    sync_folder,
)
from swarm._util.settings import STRICT, Positive, parse_settings
from swarm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.merging.lora_math import FactorPair
    from swarm.pool.prompt_router import PromptRouter

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM accepts as --max-lora-rank (vllm/config/lora.py, MaxLoRARanks)."""

# Settings under which an adapter is more than x -> s B A x, so that mixing factors is undefined.
UNSUPPORTED_OPTIONS = {
    "use_dora": "DoRA rescales the base weight",
    "lora_bias": "a bias is trained in addition to B",
    "modules_to_save": "complete modules are replaced",
    "layer_replication": "layers of the base model are repeated",
    "fan_in_fan_out": "the base weight is stored transposed",
    "target_parameters": "bare parameters are adapted instead of linear layers",
    "trainable_token_indices": "rows of the embedding are replaced",
    "use_qalora": "QA-LoRA pools the input of A",
    "alora_invocation_tokens": "activated LoRA is off before its invocation tokens",
    "use_bdlora": "the factors are block-diagonal",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA truncates the base weight",
    "monteclora_config": "Monte Carlo LoRA samples its weights",
}
# These initializations modify the base weight; PEFT repeats that at each load.
UNSUPPORTED_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Settings that this package reads, and those that matter to training or loading only.
# fmt: off
USED_OPTIONS = {
    "peft_type", "base_model_name_or_path", "task_type", "revision", "r", "lora_alpha", "bias",
    "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern",
}
IGNORED_OPTIONS = {
    "auto_mapping", "inference_mode", "peft_version", "lora_dropout", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "merge_weights",
}
# fmt: on
# Keys that are rejected with a more specific reason than "unknown".
UNSUPPORTED_KEYS = {
    "lora_embedding_": "a LoRA of an embedding",
    "lora_magnitude_vector": "a DoRA magnitude",
    ".bias": "a bias",
    "lora_": "a LoRA part other than A and B",
}
WEIGHT_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"
)
DTYPES = ("F64", "F32", "F16", "BF16")

MAX_ALPHA = 1_000_000
"""Maximum lora_alpha; a file with a higher one is damaged or malicious."""

Alpha = Annotated[float, Field(ge=-MAX_ALPHA, le=MAX_ALPHA)]
FactorShape = tuple[int, int, int]
"""(in, out, rank)."""


class AdapterConfig(BaseModel):
    """The settings of adapter_config.json that are used here."""

    model_config = STRICT | ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: Positive
    lora_alpha: Alpha
    use_rslora: bool | None = None
    bias: Literal["none"] | None = None
    base_model_name_or_path: str | None = None
    target_modules: str | list[str] | None = None
    init_lora_weights: bool | str | None = None
    rank_pattern: dict[str, Positive] | None = None
    alpha_pattern: dict[str, Alpha] | None = None

    def at(self, key: str, module: str) -> Any:
        """Return the value of "rank" or "alpha" for a module: that of the first pattern."""
        patterns = getattr(self, f"{key}_pattern") or {}
        for expression, value in patterns.items():
            try:
                if re.match(rf"(?:.*\.)?(?:{expression})$", module):
                    return value
            except re.error as error:
                raise UserError(
                    f"{key}_pattern has {expression!r}, which is not a valid pattern ({error})"
                ) from None
        return {"rank": self.r, "alpha": self.lora_alpha}[key]


class PoolRow:
    """A row of a pool's basis, multiplied by one coefficient.

    Attributes:
        name: Unique in the pool.
        shapes: (in, out, rank) of every module that it changes.
    """

    name: str
    shapes: Mapping[str, FactorShape]

    def load_factors(self, module: str) -> "FactorPair":
        """Return A [rank, in] and B [out, rank] of `module`, float64; its update is B A."""
        raise NotImplementedError

    def identity_bytes(self) -> bytes:
        """Return bytes that change with the weights, for a fingerprint."""
        raise NotImplementedError


@dataclass
class Adapter(PoolRow):
    """One LoRA expert as described by its folder; weights are loaded on demand.

    Attributes:
        scalings: Factor s of the update s B A at each module: alpha / rank, alpha / sqrt(rank) for
            rsLoRA.
        keys: Names of A and B of each module in the file.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    shapes: dict[str, FactorShape]
    scalings: dict[str, float]
    keys: dict[str, dict[str, str]]
    _file: Any = field(default=None, repr=False)

    @property
    def base_model(self) -> str | None:
        """Base model named in the config, or None."""
        return self.config.get("base_model_name_or_path") or None

    def identity_bytes(self) -> bytes:
        """Return bytes that identify the expert: name, scaling, and the SHA-256 of its weights."""
        weights = hash_file_cached(self.folder / WEIGHTS_FILE)
        facts = [self.name, self.scalings]
        return json.dumps(facts, sort_keys=True).encode() + bytes.fromhex(weights)

    def content_digest(self) -> bytes:
        """Return a digest of the update; experts with equal digests are duplicates."""
        digest = hashlib.sha256()
        for module in sorted(self.shapes):
            digest.update(f"{module} {self.shapes[module]}\n".encode())
            for weight in self.load_factors(module):
                digest.update(weight.contiguous().numpy().data)
        return digest.digest()

    def load_factors(self, module: str) -> "FactorPair":
        """See `PoolRow.load_factors`; the LoRA scaling is in B.

        Raises:
            UserError: A weight is not finite.
        """
        if self._file is None:
            self._file = safe_open(str(self.folder / WEIGHTS_FILE), framework="pt")
        first, second = (self._file.get_tensor(self.keys[module][side]) for side in "AB")
        for weight in (first, second):
            # aminmax needs one pass, and any NaN makes both results NaN.
            if not all(math.isfinite(end) for end in weight.aminmax()):
                raise adapter_error(
                    self.folder, f"{module} contains weights that are NaN or infinite"
                )
        return first.double(), second.double() * self.scalings[module]


def adapter_error(folder: Path, reason: str) -> UserError:
    """Return an error that names the expert's `folder` and the reason why it is unusable."""
    return UserError(f"{folder}: {reason}")


def read_adapter(folder: Path) -> Adapter:
    """Read the expert in `folder`: its config and the header of its weights (kilobytes).

    Raises UserError, naming the folder, for everything but a plain LoRA of linear layers in
    safetensors whose file agrees with its config. A pickled adapter is never opened.
    """
    config = _read_config(folder)
    try:
        checked = parse_settings(AdapterConfig, config)
        _refuse_variants(config)
        header = _read_header(folder)
        keys = _group_keys(header)
        shapes = {module: _module_shape(module, pair, header) for module, pair in keys.items()}
        scalings = {}
        for module, (_, _, rank) in shapes.items():
            if rank != (expected := checked.at("rank", module)):
                raise UserError(
                    f"{module} has rank {rank} in {WEIGHTS_FILE} but {expected} in {CONFIG_FILE}"
                )
            root = rank**0.5 if checked.use_rslora else rank
            scalings[module] = checked.at("alpha", module) / root
    except UserError as error:
        raise adapter_error(folder, str(error)) from None
    return Adapter(folder.name, folder, config, shapes, scalings, keys)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = parse_json(read_text(path))
    except FileNotFoundError:
        missing = f"there is no {CONFIG_FILE}"
        if routed := read_routed_adapter(folder):
            names = ", ".join(routed[0].names)
            missing = f"it has an adapter for each kind of prompt; name the folder of one: {names}"
        raise adapter_error(folder, missing) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise adapter_error(folder, f"{CONFIG_FILE} cannot be read ({reason})") from None
    if not isinstance(config, dict):
        raise adapter_error(folder, f"{CONFIG_FILE} is not a JSON object")
    return config


def _refuse_variants(config: dict[str, Any]) -> None:
    """Reject every setting that changes, or might change, the forward pass."""
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(UNSUPPORTED_INITS):
        reason = f"init_lora_weights is {start!r}, which changes the base weight"
        raise UserError(f"{reason}; convert it to a plain LoRA with PEFT first")
    for key, value in config.items():
        # 0 is a valid token or layer, so only these values count as unset.
        if value is None or value is False or value in ([], {}, ""):
            continue
        if key in UNSUPPORTED_OPTIONS:
            raise UserError(f"{key} is set and cannot be combined: {UNSUPPORTED_OPTIONS[key]}")
        if key not in USED_OPTIONS | IGNORED_OPTIONS and not _is_default(key, value):
            reason = (
                f"{key} is set to {value!r}, an unknown option that may change the forward pass"
            )
            raise UserError(reason)


def _is_default(key: str, value: Any) -> bool:
    """Return whether `value` is the default of the installed PEFT, which may be a newer version."""
    from peft import LoraConfig

    missing = object()
    return bool(getattr(LoraConfig(), key, missing) == value)


def _read_header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor in the weights file, without reading its data."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        if (folder / "adapter_model.bin").exists():
            reason = f"adapter_model.bin is a pickle and not loaded; save it as {WEIGHTS_FILE}"
            raise UserError(reason)
        raise UserError(f"there is no {WEIGHTS_FILE}")
    try:
        with safe_open(str(path), framework="np") as file:
            parts = {key: file.get_slice(key) for key in sorted(file.keys())}
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{WEIGHTS_FILE} is damaged ({error})") from None


def _group_keys(header: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the keys of A and B for each module, in the order of the module names."""
    keys: dict[str, dict[str, str]] = {}
    for key in header:
        match = WEIGHT_KEY.fullmatch(key)
        if match is None:
            kinds = (kind for part, kind in UNSUPPORTED_KEYS.items() if part in key)
            raise UserError(f"{WEIGHTS_FILE} holds {key}, {next(kinds, 'an unknown weight')}")
        sides = keys.setdefault(match["module"], {})
        if match["side"] in sides:
            raise UserError(f"{WEIGHTS_FILE} contains more than one adapter for {match['module']}")
        sides[match["side"]] = key
    if not keys:
        raise UserError(f"{WEIGHTS_FILE} contains no LoRA weights")
    for module, sides in keys.items():
        for side in "AB":
            if side not in sides:
                raise UserError(f"{module} has no lora_{side}")
    return dict(sorted(keys.items()))


def _module_shape(
    module: str, pair: dict[str, str], header: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[int, int, int]:
    """Return (in, out, rank) of one module; A [rank, in] and B [out, rank] must be consistent."""
    for key in pair.values():
        dtype, shape = header[key]
        if dtype not in DTYPES:
            raise UserError(f"{key} is of type {dtype}; allowed: {', '.join(DTYPES)}")
        if len(shape) != 2 or 0 in shape:
            raise UserError(f"{key} has shape {list(shape)}; only linear layers can be combined")
    (rank, inputs), (outputs, other) = header[pair["A"]][1], header[pair["B"]][1]
    if rank != other:
        raise UserError(f"{module} has rank {rank} in lora_A but {other} in lora_B")
    return inputs, outputs, rank


NOTE_FILE = "swarm.json"

ROUTER_FILE = "routes.json"
"""Router of a folder with an adapter for each route."""


def write_adapter(
    folder: Path, config: dict[str, Any], weights: dict[str, "Tensor"], note: dict[str, Any]
) -> None:
    """Write a PEFT folder and its swarm.json atomically; see `write_folder_atomic`."""
    write_folder_atomic(folder, partial(_write_files, config, weights), note, "adapter")


def write_routed_adapter(
    folder: Path,
    router: "PromptRouter",
    adapters: Iterable[tuple[dict[str, Any], dict[str, "Tensor"]]],
    note: dict[str, Any],
) -> None:
    """Write a PEFT folder for each route, and the router, atomically; see `read_routed_adapter`.

    Args:
        adapters: Configuration and weights of the adapter of each route.
    """

    def write_files(fresh: Path) -> None:
        _write_json(fresh / ROUTER_FILE, router.to_dict())
        for name, (config, weights) in zip(router.names, adapters, strict=True):
            make_folder(fresh / name)
            _write_files(config, weights, fresh / name)

    write_folder_atomic(folder, write_files, note, "adapter")


def read_routed_adapter(folder: Path) -> "tuple[PromptRouter, list[Path]] | None":
    """Return the router in a folder and the folder of each route's adapter.

    Returns:
        `None` if the folder has no router.

    Raises:
        UserError: The router is damaged, or an adapter is missing.
    """
    file = folder / ROUTER_FILE
    if not file.is_file():
        return None
    from swarm.pool.prompt_router import read_router  # needs numpy, which commands' help does not

    try:
        router = read_router(parse_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, UserError):
        raise UserError(f"{file}: not a router as a search writes it") from None
    folders = [folder / name for name in router.names]
    if missing := [one for one in folders if not (one / CONFIG_FILE).is_file()]:
        raise UserError(f"{file}: there is no adapter in {missing[0]}")
    return router, folders


def _write_files(config: dict[str, Any], weights: dict[str, "Tensor"], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    _write_json(folder / CONFIG_FILE, config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_folder_atomic(
    folder: Path,
    fill: Callable[[Path], None],
    note: dict[str, Any],
    kind: str,
    ours: Callable[[dict[str, Any]], bool] = bool,
) -> None:
    """Let `fill` write files into a temporary sibling folder, add swarm.json, then rename it.

    At any moment `folder` is the old one or the new one, except for the instant between two renames
    (POSIX cannot swap folders); a process killed there leaves the old one beside it under
    `.<name>.old`, and the next write restores it first.

    Args:
        note: The content of swarm.json.
        kind: Kind of the content, for errors.
        ours: Returns whether a folder with this swarm.json may be replaced.

    Raises:
        UserError: The disk is full or not writable, or `folder` is something else than was written
            here; nothing incomplete remains.
    """
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{end}") for end in ("new", "old"))
    try:
        _remove_leftovers(folder, fresh, old)
        if not is_replaceable(folder, ours):
            raise UserError(f"{folder}: contains something other than a saved {kind}; not replaced")
        make_folder(fresh)
        fill(fresh)
        _write_json(fresh / NOTE_FILE, note)
        _sync_files(fresh)
        _replace_folder(folder, fresh, old)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the {kind} could not be saved ({error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_leftovers(folder: Path, fresh: Path, old: Path) -> None:
    """Clean up after a killed write."""
    shutil.rmtree(fresh, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def is_replaceable(folder: Path, ours: Callable[[dict[str, Any]], bool] = bool) -> bool:
    """Return whether a folder can be replaced without losing anything."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    # Folders of routes may remain where damaged files were removed.
    return not any(not path.is_dir() for path in folder.rglob("*")) or ours(read_note(folder))


def read_note(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's swarm.json; empty if there is none."""
    try:
        note = parse_json((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _sync_files(folder: Path) -> None:
    # Same permissions as a new file there; see `swarm._util.files.private`.
    mode = (folder / NOTE_FILE).stat().st_mode & (folder.stat().st_mode | ~0o077)
    # Sync before the rename: a power failure could otherwise leave the name with empty files.
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync_folder(path)
            continue
        # safetensors creates weights readable by the owner only, whatever the user's umask.
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _replace_folder(folder: Path, fresh: Path, old: Path) -> None:
    if not folder.exists():
        rename(fresh, folder)
        return
    # POSIX cannot swap folders; after a kill between the renames `_remove_leftovers` restores
    # `old`.
    folder.rename(old)
    try:
        rename(fresh, folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
