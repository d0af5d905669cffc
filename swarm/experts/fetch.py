"""Download LoRA experts from the Hugging Face hub: by default the paper's ten for Gemma-7B."""

import shutil
import tempfile
from pathlib import Path

from swarm._util.files import rename
from swarm.errors import UserError

OWNER = "bunsenfeng"
PAPER = tuple(
    f"{OWNER}/{name}"
    for name in (
        "code_alpaca",
        "cot",
        "flan_v2",
        "gemini_alpaca",
        "lima",
        "oasst1",
        "open_orca",
        "science",
        "sharegpt",
        "wizardlm",
    )
)
"""The ten experts of "Model Swarms" (Feng et al., 2024)."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
ANSWER_SECONDS = 10.0
"""Timeout of the hub's first response, in seconds."""


def fetch(adapter: str, folder: Path) -> bool:
    """Download the two files of `adapter` (owner/name) into folder/name; False if present.

    Raises:
        UserError: The hub does not respond, has no such adapter, or has pickled weights only.
    """
    target = folder / adapter.rpartition("/")[2]
    if all((target / name).is_file() for name in FILES):
        return False
    if target.exists():
        raise UserError(f"{target} exists but is not a complete expert; move it away first")
    check_files(adapter)
    folder.mkdir(parents=True, exist_ok=True)
    # Hidden name: readers of the folder must not take the incomplete download for an expert.
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}-"))
    try:
        for name in FILES:
            shutil.copyfile(download(adapter, name, scratch / "download"), scratch / name)
        shutil.rmtree(scratch / "download")
        scratch.chmod(0o755)
        rename(scratch, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def check_files(adapter: str) -> None:
    """Check by the hub's listing that the adapter exists and has safetensors."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        info = HfApi().model_info(adapter, timeout=ANSWER_SECONDS)
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set; unset it to download") from None
    except GatedRepoError:
        raise UserError(f"{adapter} is gated; accept its licence on its hub page first") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{adapter} does not exist on {constants.ENDPOINT} or is private; see `hf auth login`"
        ) from None
    except HFValidationError:
        raise UserError(f"{adapter} is not a hub id; give owner/name") from None
    except Exception as error:  # the hub client's and httpx's errors have no common base
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{constants.ENDPOINT} cannot be reached: {reason}") from None
    names = {file.rfilename for file in info.siblings or []}
    if missing := [name for name in FILES if name not in names]:
        hint = (
            ("; pickled weights can run code and are not loaded")
            if "adapter_model.bin" in names
            else ""
        )
        raise UserError(f"{adapter} has no {' and no '.join(missing)}{hint}")


def download(adapter: str, name: str, folder: Path) -> Path:
    """Download one file of the adapter into `folder`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(adapter, name, local_dir=folder))
    except GatedRepoError:
        raise UserError(f"{adapter} is gated; accept its licence on its hub page first") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{adapter}/{name} cannot be downloaded: {reason}") from None
