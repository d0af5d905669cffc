"""A model of any kind as a candidate: local, behind an endpoint, or a combination of models."""

import json
from collections.abc import Sequence

from swarm.candidates import JobUsage, run_task
from swarm.errors import UserError
from swarm.models import Completion, Model, Request
from swarm.roster import Roster
from swarm.roster.identity import model_identity
from swarm.tasks import Item, RequiresSetup, Score, Task


class ModelCandidate:
    """One voice, that of a model.

    Args:
        model: Whatever answers requests; with `check` and `open` as `swarm.tasks.Prepared` has
            them, if it needs something of its own.
        name: As results call it.
    """

    def __init__(self, model: Model, name: str = "model") -> None:
        self.model = model
        self.names = [name]
        self._opened = False

    def check(self, task: Task) -> None:
        """See `Candidate.check`."""
        if isinstance(self.model, RequiresSetup):
            self.model.check()

    def open(self, device: str) -> None:
        """See `Candidate.open`."""
        if not self._opened and isinstance(self.model, RequiresSetup):
            self.model.open(device)
        self._opened = True

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.answers`."""

        def generate_counted(requests: list[Request]) -> list[Completion]:
            completions = self.model.generate(requests)
            meter.add_completions(completions)
            return completions

        return [run_task(task, items, generate_counted)]

    def fingerprint(self) -> str:
        """Nothing: what is behind an endpoint is not known."""
        return ""


class NamedModelCandidate(ModelCandidate):
    """One voice, that of a model that is known by its name.

    Args:
        name: See `swarm.roster.Roster`.
        roster: Gives the model.

    Raises:
        UserError: No name is given, or there is no such model.
    """

    def __init__(self, name: str | None, roster: Roster) -> None:
        if name is None:
            raise UserError("candidate.name is missing: give a model's, e.g. ollama/qwen2:7b")
        super().__init__(roster.model(name), name)

    def fingerprint(self) -> str:
        """All that the answers depend on and can be told; see `swarm.roster.identity`."""
        return json.dumps(model_identity(self.model), sort_keys=True)
