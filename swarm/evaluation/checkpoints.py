"""Models in folders as candidates, a search's best position, and the vote of its best particles."""

from collections.abc import Sequence
from typing import Any

from swarm._util.files import as_path, find_path, read_yaml
from swarm._util.settings import FiniteNumber, Settings, Text, checked, parse_settings
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.evaluation.voting import Rule, VotingCandidate
from swarm.executors.worker import run_tasks_lockstep
from swarm.registry.model_groups import (
    ModelGroup,
    base_of_run,
    group_models,
    load_finished_run,
)
from swarm.runs.folder import RunFolder, verify_run_file
from swarm.tasks.base import Item, Score, Task


@checked("candidate")
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
        self, base: BaseModel, folder: Text | Sequence[Text], names: Sequence[str] | None = None
    ) -> None:
        given = [folder] if isinstance(folder, str) else folder
        if duplicates := sorted({one for one in given if given.count(one) > 1}):
            raise UserError(f"candidate: {duplicates[0]} is named more than once")
        self.base = base
        self.folders = [find_path(one) for one in given]
        last = [one.name for one in self.folders]
        self.names = list(names or (last if len(set(last)) == len(last) else given) or ["base"])
        self._stands: list[ModelGroup] = []
        self._loaded: Engine | None = None

    def check(self, task: Task) -> None:
        if not self._stands:
            self._stands = group_models(self.folders, self.base)

    def model_contexts(self) -> list[tuple[Any, float]]:
        return [stand.load_context() for stand in self._stands]

    def open(self, device: str) -> None:
        """See `Candidate.open`; several models are loaded one at a time by `score_items`."""
        self._device = device
        if len(self._stands) == 1 and self._loaded is None:
            self._loaded = self._stands[0].load(device)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        found: dict[int, list[Score]] = {}
        for stand in self._stands:
            engine = self._loaded or stand.load(self._device)
            scores = run_tasks_lockstep(task, engine, stand.positions, items, meter)
            found |= dict(zip(stand.places, scores, strict=True))
            del engine  # before the next one is loaded
        return [found[index] for index in range(len(self.names))]

    def fingerprint(self) -> str:
        """Return the fingerprint of all weights."""
        return " ".join(stand.fingerprint() for stand in self._stands)


@checked("candidate")
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

    def __init__(self, folder: Text, base: BaseModel | None = None) -> None:
        run = load_finished_run(folder, "evaluate its global_best with candidate=adapter")
        self.scale = run.scale
        super().__init__(base or base_of_run(run), str(run.path / "global_best"), [run.path.name])


class EnsembleMember(Settings):
    """A voter of an ensemble.yaml: an adapter, a mixture or a full model, and its utility."""

    folder: Text
    utility: FiniteNumber


class EnsembleFile(Settings):
    """Content of an ensemble.yaml; folders are relative to the file's own.

    `run` is the run's folder, if the file is not in it.
    """

    members: list[EnsembleMember]
    rule: Rule = "majority"
    run: Text = "."


@checked("candidate")
class SavedEnsembleCandidate(VotingCandidate):
    """The vote that a search has written into its folder: ensemble.yaml (`EnsembleFile`).

    Args:
        file: The yaml.
        base: `None` is the one of the run's config.json.
        rule: "majority" or "weighted"; `None` is the file's.

    Raises:
        UserError: The file is none of these, or the run is missing.
    """

    def __init__(self, file: Text, base: BaseModel | None = None, rule: Rule | None = None) -> None:
        path = as_path(file)
        verify_run_file(path)
        content = parse_settings(EnsembleFile, read_yaml(path, "candidate.file"), str(path))
        run = RunFolder(path.parent / content.run)
        self.scale = run.scale
        names = [one.folder for one in content.members]
        folders = [str(path.parent / name) for name in names]
        saved = CheckpointCandidate(base or base_of_run(run), folders, names)
        weights = [one.utility for one in content.members]
        super().__init__(saved, rule or content.rule, weights)
        self.names = [f"vote of {len(names)} of {run.path.resolve().name}"]
