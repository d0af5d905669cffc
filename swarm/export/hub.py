"""A folder put on the Hugging Face hub, by the client's own login or token."""

from pathlib import Path

from swarm.engine.sources import wrap_load_errors
from swarm.errors import UserError


def check_repository(repository: str) -> None:
    """See that something can be put there, without asking the hub.

    Raises:
        UserError: It is no repository's name, the hub is switched off, or nobody is logged in.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
        owner, _, name = repository.partition("/")
    except HFValidationError:
        owner = name = ""
    if not (owner and name):
        raise UserError(f"push_to_hub={repository}: must be user/name")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"push_to_hub={repository}: the hub is switched off (HF_HUB_OFFLINE)")
    if get_token() is None:
        raise UserError(f"push_to_hub={repository}: log in first, with `hf auth login` or HF_TOKEN")


def push_folder(folder: Path, repository: str, private: bool) -> str:
    """Make the repository if there is none and put the folder's files there; gives its address.

    Raises:
        UserError: The hub does not answer, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with wrap_load_errors(f"push_to_hub={repository}: {folder} is written, but not on the hub"):
        hub = HfApi()
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
        return str(address)
