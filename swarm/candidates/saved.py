"""Models that lie in folders, a voice each: adapters, whole models, mixtures; or a base alone."""

from collections.abc import Sequence

from swarm.candidates import JobUsage
from swarm.engine import Engine
from swarm.engine.base import BaseModel
from swarm.engine.stands import ModelGroup, group_models
from swarm.errors import UserError
from swarm.executors.worker import run_tasks_lockstep
from swarm.places import find_path
from swarm.rehearsal import fit_to_context
from swarm.tasks import Item, Score, Task


class CheckpointCandidate:
    """Folders with PEFT LoRA adapters, whole models, or mixtures that a search has saved.

    Adapters answer together on one resident base, mixtures of the same models too; several whole
    models are loaded one after the other, so that only one is in memory.

    Args:
        base: Of the adapters; whole models are opened with its dtype and trust_remote_code.
        folder: One, or a list of several; an empty list is the base alone.
        names: Of the voices; `None` is the folders' own.

    Raises:
        UserError: A folder is no text, or there is twice the same.
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
        if twice := sorted({one for one in given if given.count(one) > 1}):
            raise UserError(f"candidate: {twice[0]} is named more than once")
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
        for stand in self._stands:
            fit_to_context(task, stand.load_tokenizer(), stand.context_length())

    def open(self, device: str) -> None:
        """See `Candidate.open`; several models are loaded when it is their turn."""
        self._device = device
        if len(self._stands) == 1 and self._loaded is None:
            self._loaded = self._stands[0].load(device)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.answers`."""
        found: dict[int, list[Score]] = {}
        for stand in self._stands:
            engine = self._loaded or stand.load(self._device)
            scores = run_tasks_lockstep(task, engine, stand.positions, items, meter)
            found |= dict(zip(stand.places, scores, strict=True))
            del engine
        return [found[place] for place in range(len(self.names))]

    def fingerprint(self) -> str:
        """Of all weights."""
        return " ".join(stand.fingerprint() for stand in self._stands)
