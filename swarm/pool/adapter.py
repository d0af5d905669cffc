"""Reading, checking and writing one expert: a PEFT LoRA folder with its config and weights.

Folders are written atomically: completely or not at all.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
PICKLE_FILE = "adapter_model.bin"
NOTE_FILE = "swarm.json"

ROUTER_FILE = "routes.json"
"""Router of a folder with an adapter for each route."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM accepts as --max-lora-rank (vllm/config/lora.py, MaxLoRARanks)."""

# These initializations modify the base weight; PEFT repeats that at each load.
UNSUPPORTED_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Settings that this package reads, and those that matter to training or loading only. Any other one
# that is set, such as use_dora or modules_to_save, makes an adapter more than x -> s B A x, so that
# mixing factors is undefined.
# fmt: off
ALLOWED_OPTIONS = {
    "peft_type", "base_model_name_or_path", "task_type", "revision", "r", "lora_alpha", "bias",
    "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern",
    "auto_mapping", "inference_mode", "peft_version", "lora_dropout", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "merge_weights",
}
# fmt: on
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
        # aminmax needs one pass, and any NaN makes both results NaN.
        if not all(math.isfinite(end) for one in (first, second) for end in one.aminmax()):
            raise adapter_error(self.folder, f"{module} contains weights that are NaN or infinite")
        return first.double(), second.double() * self.scalings[module]


def adapter_error(folder: Path, reason: str) -> UserError:
    """Return an error that names the expert's `folder` and the reason why it is unusable."""
    return UserError(f"{folder}: {reason}")


def read_adapter(folder: Path) -> Adapter:
    """Read the expert in `folder`: its config and the header of its weights (kilobytes).

    Raises UserError, naming the folder, for everything but a plain LoRA of linear layers in
    safetensors whose file agrees with its config. A pickled adapter is never opened.
    """
    try:
        config = _read_config(folder)
        checked = parse_settings(AdapterConfig, config)
        refuse_variants(config)
        keys, shapes = _read_modules(folder / WEIGHTS_FILE)
        scalings = {}
        for module, (_, _, rank) in shapes.items():
            wanted = _match_pattern("rank_pattern", checked.rank_pattern, module, checked.r)
            if rank != wanted:
                raise UserError(
                    f"{module} has rank {rank} in {WEIGHTS_FILE} but {wanted} in {CONFIG_FILE}"
                )
            alpha = _match_pattern(
                "alpha_pattern", checked.alpha_pattern, module, checked.lora_alpha
            )
            scalings[module] = alpha / (rank**0.5 if checked.use_rslora else rank)
    except UserError as error:
        raise adapter_error(folder, str(error)) from None
    return Adapter(folder.name, folder, config, shapes, scalings, keys)


def _match_pattern(
    key: str, patterns: Mapping[str, float] | None, module: str, default: float
) -> float:
    """Return the value of the first pattern that matches the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
                return value
        except re.error as error:
            raise UserError(
                f"{key} has {pattern!r}, which is not a valid pattern ({error})"
            ) from None
    return default


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = parse_json(read_text(folder / CONFIG_FILE))
    except FileNotFoundError:
        missing = f"there is no {CONFIG_FILE}"
        if routed := read_routed_adapter(folder):
            names = ", ".join(routed[0].names)
            missing = f"it has an adapter for each kind of prompt; name the folder of one: {names}"
        raise UserError(missing) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{CONFIG_FILE} cannot be read ({reason})") from None
    if not isinstance(config, dict):
        raise UserError(f"{CONFIG_FILE} is not a JSON object")
    return config


def refuse_variants(config: dict[str, Any]) -> None:
    """Reject every setting that changes, or might change, the forward pass."""
    wrong = {
        key: value
        for key, value in config.items()
        # 0 is a valid token or layer, so only these values count as unset.
        if key not in ALLOWED_OPTIONS
        and not (value is None or value is False or value in ([], {}, ""))
    }
    if wrong:
        from peft import LoraConfig

        # An option of a newer PEFT may be written at its default.
        defaults = vars(LoraConfig())
        wrong = {k: v for k, v in wrong.items() if k not in defaults or defaults[k] != v}
    start = str(config.get("init_lora_weights"))
    if start.lower().startswith(UNSUPPORTED_INITS):
        wrong["init_lora_weights"] = start
    for key, value in wrong.items():
        raise UserError(
            f"{key} is set to {value!r}: only plain LoRA can be combined, which adds s B A to a "
            "linear layer and changes nothing else; merge it into its base for pool=full_models"
        )


def _read_modules(path: Path) -> tuple[dict[str, dict[str, str]], dict[str, FactorShape]]:
    """Read the header of a weights file, not its data.

    Returns:
        The keys of A and B of each module, and its shape, both sorted by module.
    """
    if not path.is_file():
        pickled = path.with_name(PICKLE_FILE).exists()
        reason = f"; {PICKLE_FILE} is a pickle, which is never loaded" if pickled else ""
        raise UserError(f"there is no {WEIGHTS_FILE}{reason}")
    try:
        with safe_open(str(path), framework="np") as file:
            parts = {key: file.get_slice(key) for key in sorted(file.keys())}
            header = {key: (one.get_dtype(), one.get_shape()) for key, one in parts.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{WEIGHTS_FILE} is damaged ({error})") from None
    keys: dict[str, dict[str, str]] = {}
    for key, (dtype, shape) in header.items():
        match = WEIGHT_KEY.fullmatch(key)
        wrong = ""
        if match is None:
            wrong = "is neither A nor B of a linear layer; only plain LoRA can be combined"
        elif key != keys.setdefault(match["module"], {}).setdefault(match["side"], key):
            wrong = "is of more than one adapter"
        elif dtype not in DTYPES:
            wrong = f"is of type {dtype}; allowed: {', '.join(DTYPES)}"
        elif len(shape) != 2 or 0 in shape:
            wrong = f"has shape {list(shape)}; only linear layers can be combined"
        if wrong:
            raise UserError(f"{WEIGHTS_FILE}: {key} {wrong}")
    shapes, wrong = {}, "" if keys else f"{WEIGHTS_FILE} contains no LoRA weights"
    for module, sides in sorted(keys.items()):
        if len(sides) < 2:
            wrong = f"{module} has no lora_{'B' if 'A' in sides else 'A'}"
            break
        (rank, inputs), (outputs, other) = (header[sides[side]][1] for side in "AB")
        shapes[module] = (inputs, outputs, rank)
        if rank != other:
            wrong = f"{module} has rank {rank} in lora_A but {other} in lora_B"
    if wrong:
        raise UserError(wrong)
    return {module: keys[module] for module in shapes}, shapes


def write_adapters(
    folder: Path,
    adapters: Sequence[tuple[dict[str, Any], dict[str, "Tensor"]]],
    note: dict[str, Any],
    router: "PromptRouter | None" = None,
) -> None:
    """Write a PEFT folder, or one for each route beside the router; see `write_folder_atomic`.

    Args:
        adapters: Configuration and weights of the adapter, or of that of each route.
        note: The content of swarm.json.
        router: See `read_routed_adapter`.
    """
    from safetensors.torch import save_file

    def write_files(fresh: Path) -> None:
        if router:
            _write_json(fresh / ROUTER_FILE, router.to_dict())
        names = router.names if router else (".",)
        for name, (config, weights) in zip(names, adapters, strict=True):
            make_folder(fresh / name)
            save_file(weights, str(fresh / name / WEIGHTS_FILE), metadata={"format": "pt"})
            _write_json(fresh / name / CONFIG_FILE, config)

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
        # A killed write leaves either.
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        if not is_replaceable(folder, ours):
            raise UserError(f"{folder}: contains something other than a saved {kind}; not replaced")
        make_folder(fresh)
        fill(fresh)
        _write_json(fresh / NOTE_FILE, note)
        _sync_files(fresh)
        if folder.exists():
            folder.rename(old)
        try:
            rename(fresh, folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the {kind} could not be saved ({error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def is_replaceable(folder: Path, ours: Callable[[dict[str, Any]], bool] = bool) -> bool:
    """Return whether a folder can be replaced without losing anything."""
    if not folder.is_dir():
        return not folder.exists()
    # Folders of routes may remain where damaged files were removed.
    return all(path.is_dir() for path in folder.rglob("*")) or ours(read_note(folder))


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
