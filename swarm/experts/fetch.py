"""Download LoRA experts from the Hugging Face hub: by default the paper's ten for Gemma-7B."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm._util.files import rename
from swarm.errors import UserError

NAMES = "code_alpaca cot flan_v2 gemini_alpaca lima oasst1 open_orca science sharegpt wizardlm"
PAPER = tuple(f"bunsenfeng/{name}" for name in NAMES.split())
"""The ten experts of "Model Swarms" (Feng et al., 2024)."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
ANSWER_SECONDS = 10.0
"""Timeout of the hub's first response, in seconds."""


def fetch(adapter: str, folder: Path) -> bool:
    """Download the two files of `adapter` (owner/name) into folder/name; False if present.

    Raises:
        UserError: The hub does not respond, has no such adapter, or has pickled weights only.
    """
    from huggingface_hub import HfApi, hf_hub_download

    target = folder / adapter.rpartition("/")[2]
    if all((target / name).is_file() for name in FILES):
        return False
    if target.exists():
        raise UserError(f"{target} exists but is not a complete expert; move it away first")
    with _one_line_errors(adapter):
        info = HfApi().model_info(adapter, timeout=ANSWER_SECONDS)
    names = {file.rfilename for file in info.siblings or []}
    if missing := [name for name in FILES if name not in names]:
        pickled = "adapter_model.bin" in names
        hint = "; pickled weights can run code and are not loaded" if pickled else ""
        raise UserError(f"{adapter} has no {' and no '.join(missing)}{hint}")
    folder.mkdir(parents=True, exist_ok=True)
    # Hidden name: readers of the folder must not take the incomplete download for an expert.
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}-"))
    try:
        for name in FILES:
            with _one_line_errors(f"{adapter}/{name}"):
                downloaded = hf_hub_download(adapter, name, local_dir=scratch / "download")
            shutil.copyfile(downloaded, scratch / name)
        shutil.rmtree(scratch / "download")
        scratch.chmod(0o755)
        rename(scratch, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Raise what the hub's client raises as a UserError about an adapter or a file of it."""
    from huggingface_hub import constants, errors

    reasons = {
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set; unset it to download",
        errors.GatedRepoError: "is gated; accept its licence on its hub page first",
        errors.RepositoryNotFoundError: f"does not exist on {constants.ENDPOINT} or is private; "
        "see `hf auth login`",
        errors.HFValidationError: "is not a hub id; give owner/name",
    }
    try:
        yield
    except Exception as error:  # the hub client's and httpx's errors have no common base
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        for kind, reason in reasons.items():
            if isinstance(error, kind):
                raise UserError(f"{what}: {reason}") from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what}: {constants.ENDPOINT} cannot be reached: {reason}") from None
