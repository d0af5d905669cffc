"""Search runs as models: what a finished run has found, and on which base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.engine.base import BaseModel
from swarm.errors import UserError
from swarm.report.folder import RunFolder


def load_finished_run(folder: str | Path, otherwise: str) -> RunFolder:
    """A run whose best is chosen for good.

    Args:
        otherwise: What to do with a run that is not over, besides going on with it.

    Raises:
        UserError: The folder holds no search, or one that is not over.
    """
    run = RunFolder(folder)
    # Between the last iteration and the verdict another model may still be chosen as the best.
    if run.finished is None or not run.metrics:
        raise UserError(
            f"{run.path}: the search is not over; go on with the search by the command that began "
            f"it, or {otherwise}"
        )
    return run


def best_folder(run: RunFolder) -> Path:
    """The folder of the best that a run has found."""
    return run.path / "global_best"


def base_of_run(run: RunFolder) -> BaseModel:
    """The base that a run's configuration names.

    Raises:
        UserError: It names none.
    """
    try:
        return base_from_settings(run.config["model"])
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f"{run.path / 'config.json'} names no base; say which it is, of a candidate by "
            "model@candidate.base=local candidate.base.path=FOLDER_OR_HUB_ID"
        ) from None


def base_from_settings(settings: Mapping[str, Any]) -> BaseModel:
    """The base of an option of the configuration group `model`."""
    return BaseModel(**{key: value for key, value in settings.items() if key != "_target_"})
