"""Models in folders as candidates, a search's best position, and the vote of its best particles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from swarm._util.files import as_path, find_path, read_text
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.evaluation.voting import VotingCandidate
from swarm.executors.worker import run_tasks_lockstep
from swarm.registry.model_groups import (
    ModelGroup,
    base_of_run,
    best_folder,
    group_models,
    load_finished_run,
)
from swarm.runs.folder import RunFolder, verify_run_file
from swarm.tasks.base import Item, Score, Task


class CheckpointCandidate(Candidate):
    """Folders with PEFT LoRA adapters, full models, or mixtures that a search has saved.

    Each is one voter. Adapters answer together on one resident base, mixtures of the same models
    too; several full models are loaded one after the other, so that only one is in memory.

    Args:
        base: Base of the adapters; full models are opened with its dtype and trust_remote_code.
        folder: One, or a list of several; an empty list is the base alone.
        names: Names of the voters; `None` is the folders' own.

    Raises:
        UserError: A folder is not a text, or is repeated.
    """

    def __init__(
        self,
        base: BaseModel,
        folder: str | Sequence[str] | None,
        names: Sequence[str] | None = None,
    ) -> None:
        given = [folder] if isinstance(folder, str) else folder
        if given is None or not all(isinstance(one, str) and one.strip() for one in given):
            raise UserError(
                f"candidate.folder={folder}: give the folder of an adapter or a model, e.g. "
                "candidate.folder=search/first/global_best"
            )
        if duplicates := sorted({one for one in given if given.count(one) > 1}):
            raise UserError(f"candidate: {duplicates[0]} is named more than once")
        self.base = base
        self.folders = [find_path(one) for one in given]
        last = [one.name for one in self.folders]
        self.names = list(names or (last if len(set(last)) == len(last) else given) or ["base"])
        self._stands: list[ModelGroup] = []
        self._loaded: Engine | None = None
        self._device = "cpu"

    def check(self, task: Task) -> None:
        """See `Candidate.check`."""
        if not self._stands:
            self._stands = group_models(self.folders, self.base)

    def model_contexts(self) -> list[tuple[Any, float]]:
        """See `Candidate.model_contexts`."""
        return [(stand.load_tokenizer(), stand.context_length()) for stand in self._stands]

    def open(self, device: str) -> None:
        """See `Candidate.open`; several models are loaded one at a time by `score_items`."""
        self._device = device
        if len(self._stands) == 1 and self._loaded is None:
            self._loaded = self._stands[0].load(device)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.score_items`."""
        found: dict[int, list[Score]] = {}
        for stand in self._stands:
            engine = self._loaded or stand.load(self._device)
            scores = run_tasks_lockstep(task, engine, stand.positions, items, meter)
            found |= dict(zip(stand.places, scores, strict=True))
            del engine
        return [found[index] for index in range(len(self.names))]

    def fingerprint(self) -> str:
        """Return the fingerprint of all weights."""
        return " ".join(stand.fingerprint() for stand in self._stands)


class BestCandidate(CheckpointCandidate):
    """The best position of a finished search, from its global_best.

    Args:
        folder: The run's folder.
        base: `None` is the one of the run's config.json.

    Attributes:
        scale: The run's scale, for a task with a scale measured on its experts.

    Raises:
        UserError: The folder contains no finished search.
    """

    def __init__(self, folder: str | None, base: BaseModel | None = None) -> None:
        if not isinstance(folder, str) or not folder.strip():
            raise UserError(
                "candidate.folder is missing: give a run's, e.g. candidate.folder=search/first"
            )
        run = load_finished_run(folder, "evaluate its global_best with candidate=adapter")
        self.scale = run.scale
        super().__init__(base or base_of_run(run), str(best_folder(run)), [run.path.name])


class SavedEnsembleCandidate(VotingCandidate):
    """The vote that a search has written into its folder: ensemble.yaml.

    Its keys: "rule" and "members", a list of {"folder", "utility"}, where folders are adapters,
    mixtures or full models, relative to the file's own folder; "run", if the file is not in the
    run's folder.

    Args:
        file: The yaml.
        base: `None` is the one of the run's config.json.
        rule: "majority" or "weighted"; `None` is the file's.

    Raises:
        UserError: The file is none of these, or the run is missing.
    """

    def __init__(
        self,
        file: str | None,
        base: BaseModel | None = None,
        rule: Literal["majority", "weighted"] | None = None,
    ) -> None:
        if not isinstance(file, str) or not file.strip():
            raise UserError(
                "candidate.file is missing: give what a search has written, e.g. "
                "candidate.file=search/first/ensemble.yaml"
            )
        path = as_path(file)
        content, members = read_ensemble(path)
        folder = path.parent
        run = RunFolder(folder / content.get("run", "."))
        self.scale = run.scale
        folders = [str(folder / one["folder"]) for one in members]
        weights = [float(one["utility"]) for one in members]
        names = [str(one["folder"]) for one in members]
        saved = CheckpointCandidate(base or base_of_run(run), folders, names)
        super().__init__(saved, rule or content.get("rule", "majority"), weights)
        self.names = [f"vote of {len(members)} of {run.path.resolve().name}"]


def read_ensemble(file: Path) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """Return the content of an ensemble.yaml, and its members.

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
            f"candidate.file={file}: not an ensemble; it must have members, each with a folder "
            "and a utility, as written by a search"
        ) from None
    return content, members
