"""A model of any kind as a candidate: local, behind an endpoint, or a combination of models."""

from collections.abc import Sequence

from swarm.candidates import Meter, play
from swarm.models import Completion, Model, Request
from swarm.tasks import Item, Prepared, Score, Task


class Speaker:
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
        if isinstance(self.model, Prepared):
            self.model.check()

    def open(self, device: str) -> None:
        """See `Candidate.open`."""
        if not self._opened and isinstance(self.model, Prepared):
            self.model.open(device)
        self._opened = True

    def answers(self, task: Task, items: Sequence[Item], meter: Meter) -> list[list[Score]]:
        """See `Candidate.answers`."""

        def ask(requests: list[Request]) -> list[Completion]:
            completions = self.model.generate(requests)
            meter.count(completions)
            return completions

        return [play(task, items, ask)]

    def fingerprint(self) -> str:
        """Nothing: what is behind an endpoint is not known."""
        return ""
