"""What a search has found, as candidates: its best, and the vote of its best particles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from swarm.candidates.saved import CheckpointCandidate
from swarm.candidates.vote import VotingCandidate
from swarm.engine.base import BaseModel
from swarm.errors import UserError
from swarm.files import read_text
from swarm.manifest import verify_run_file
from swarm.places import as_path
from swarm.report.folder import RunFolder
from swarm.roster.runs import base_of_run, best_folder, load_finished_run


class BestCandidate(CheckpointCandidate):
    """The best that a finished search has found, as it lies in its global_best.

    Args:
        folder: The run's.
        base: `None` is the one of the run's config.json.

    Attributes:
        scale: The run's, of a task that is valued on a scale of its experts.

    Raises:
        UserError: The folder holds no finished search.
    """

    def __init__(self, folder: str | None, base: BaseModel | None = None) -> None:
        if not isinstance(folder, str) or not folder.strip():
            raise UserError(
                "candidate.folder is missing: give a run's, e.g. candidate.folder=search/first"
            )
        run = load_finished_run(folder, "take its global_best as it is with candidate=adapter")
        self.scale = run.scale
        super().__init__(base or base_of_run(run), str(best_folder(run)), [run.path.name])


class SavedEnsembleCandidate(VotingCandidate):
    """The vote that a search has written into its folder: ensemble.yaml.

    Its keys: "rule" and "members", a list of {"folder", "utility"}, where folders are adapters,
    mixtures or whole models, named from the file's own folder; "run", if the file lies elsewhere
    than in the run's folder.

    Args:
        file: The yaml.
        base: `None` is the one of the run's config.json.
        rule: "majority" or "weighted"; `None` is the file's.

    Raises:
        UserError: The file is none of these, or the run is gone.
    """

    def __init__(self, file: str | None, base: BaseModel | None = None, rule: str | None = None) -> None:
        if not isinstance(file, str) or not file.strip():
            raise UserError(
                "candidate.file is missing: give what a search has written, e.g. "
                "candidate.file=search/first/ensemble.yaml"
            )
        path = as_path(file)
        content, members = read_ensemble(path)
        home = path.parent
        run = RunFolder(home / content.get("run", "."))
        self.scale = run.scale
        folders = [str(home / one["folder"]) for one in members]
        weights = [float(one["utility"]) for one in members]
        names = [str(one["folder"]) for one in members]
        saved = CheckpointCandidate(base or base_of_run(run), folders, names)
        super().__init__(saved, rule or content.get("rule", "majority"), weights)
        self.names = [f"vote of {len(members)} of {run.path.resolve().name}"]


def read_ensemble(file: Path) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """What an ensemble.yaml says, and its members.

    Raises:
        UserError: It is missing or is something else.
    """
    verify_run_file(file)
    try:
        content = yaml.safe_load(read_text(file))
        members = content["members"]
        for one in members:
            str(one["folder"]), float(one["utility"])
    except OSError as error:
        raise UserError(f"candidate.file={file}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, TypeError, KeyError, ValueError, AttributeError):
        raise UserError(
            f"candidate.file={file}: no ensemble; it has to have members, each with a folder and "
            "a utility, as a search writes it"
        ) from None
    return content, members
