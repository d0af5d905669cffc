"""Models as candidates: local, behind an endpoint, or a Mixture of Agents with its proposers."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swarm._util.settings import Text, checked
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage, run_task
from swarm.models.base import Completion, Model, Request, Usage
from swarm.multi_agent.moa import MixtureOfAgents, build_mixture, read_preset
from swarm.multi_agent.types import AgentSpec, Transcript
from swarm.registry.registry import Roster, model_identity
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import majority_vote

log = logging.getLogger(__name__)

VOTE_NAME = "vote of the proposers"


class MoACandidate(Candidate):
    """A Mixture of Agents (arXiv 2406.04692), each of its proposers, and the proposers' vote.

    Weak proposers can make a mixture worse than its best member, so the members are always measured
    too. That costs little: in a task's first round a proposer alone gets the same request as in the
    first layer, so that its first sample there is its answer. A proposer that fails alone has an
    empty answer.

    The last voter is the majority vote of all samples of the first layer, ties going to the first
    answer. It makes no requests beyond the first layer's, except further rounds of a task for the
    samples beyond a slot's first. It is left out if the task's answers do not support votes
    (`task.votes`), or if the first layer has a single sample.

    Args:
        preset: The name of one in conf/moa, or the path of a yaml of that form.
        roster: Returns its models by name.
        model: The name for slots that a preset leaves open.

    Attributes:
        rivals: Description of the voters that the first one is compared with.

    Raises:
        UserError: The preset is missing or invalid, or a model's name is.
    """

    rivals = "single proposer or vote"

    def __init__(self, preset: str, roster: Roster, model: str | None = None) -> None:
        self.mixture = build_mixture(read_preset(preset), roster.model, model)
        alone = [f"{slot.name} alone" for slot in self.mixture.proposers]
        if len(set(alone)) < len(alone):
            alone = [f"{number}. {name}" for number, name in enumerate(alone, 1)]
        self.names = [f"mixture {preset}", *alone]
        self._voters = sum(slot.count for slot in self.mixture.proposers)
        self._spent: list[Usage] = []

    def check(self, task: Task) -> None:
        self.mixture.check()
        if self._can_vote(task) and VOTE_NAME not in self.names:
            self.names.append(VOTE_NAME)

    def _can_vote(self, task: Task) -> bool:
        return self.mixture.options.layers > 1 and self._voters > 1 and task.votes

    def open(self, device: str) -> None:
        self.mixture.open(device)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        self._spent = [Usage() for _ in self.names]
        transcripts: list[tuple[Request, Transcript]] = []
        scores = [
            run_task(task, items, lambda requests: self._run_mixture(requests, transcripts, meter))
        ]
        voters: list[list[Score]] = []
        votes = self._can_vote(task)
        index = 0  # index of a slot's first sample in the first layer
        for slot, spent in zip(self.mixture.proposers, self._spent[1:], strict=False):
            samples = []
            for sample in range(slot.count if votes else 1):
                took = Usage()
                known = self._first_layer(transcripts, index + sample)
                samples.append(run_task(task, items, _SingleProposer(slot, known, took, meter)))
                for mine in [spent] * (not sample) + [self._spent[-1]] * votes:
                    mine.merge(took)
            scores.append(samples[0])
            voters += samples
            index += slot.count
        if votes:
            scores.append(majority_vote(task, items, voters, [1.0] * len(voters)))
        return scores

    def _first_layer(
        self, transcripts: Sequence[tuple[Request, Transcript]], index: int
    ) -> dict[object, Completion]:
        """Return the answers of the first layer's proposer at an index, by question."""
        if self.mixture.options.layers == 1:
            return {}
        return {
            question_key(request): stages.layers[0][index].completion or Completion("")
            for request, stages in transcripts
        }

    def _run_mixture(
        self,
        requests: Sequence[Request],
        transcripts: list[tuple[Request, Transcript]],
        meter: JobUsage,
    ) -> list[Completion]:
        """Return the mixture's answers; the transcripts are appended to `transcripts`."""
        came = []
        for request, one in zip(requests, self.mixture.run(requests), strict=True):
            if isinstance(one, UserError):
                raise one
            transcripts.append((request, one))
            meter.add(*(answer.completion or Completion("") for answer in one.answers))
            self._spent[0].add(one.final)
            self._spent[0].calls += len(one.answers) - 1
            came.append(one.final)
        return came

    def usage_per_voter(self) -> list[dict[str, Any]]:
        return [
            {"calls": s.calls, "tokens": s.tokens, "cost": s.cost, "unpriced": s.unpriced}
            for s in self._spent
        ]

    def fingerprint(self) -> str:
        """Return all known determinants of the answers; see `swarm.registry.registry`."""
        return json.dumps(model_identity(self.mixture), sort_keys=True)


class _SingleProposer:
    """Requests completions from one proposer, unless the question's answer is already known."""

    def __init__(
        self, slot: AgentSpec, known: Mapping[object, Completion], spent: Usage, meter: JobUsage
    ) -> None:
        self.model = MixtureOfAgents((), slot.model_copy(update={"count": 1}), layers=1)
        self.known, self.spent, self.meter = known, spent, meter
        self.logged: set[str] = set()

    def __call__(self, requests: list[Request]) -> list[Completion]:
        new = [request for request in requests if question_key(request) not in self.known]
        came = iter(self.model.generate_each(new))
        answers = []
        for request in requests:
            answer = self.known.get(question_key(request))
            if answer is None:
                found = next(came)
                answer = Completion("") if isinstance(found, UserError) else found
                if isinstance(found, UserError) and str(found) not in self.logged:
                    self.logged.add(str(found))
                    log.warning("%s", found)
                self.meter.add(answer)
            self.spent.add(answer)
            answers.append(answer)
        return answers


def question_key(request: Request) -> object:
    """Return the key by which two requests of a task are the same question."""
    return request.prompt, request.max_new_tokens


class ModelCandidate(Candidate):
    """A model as one voter.

    Args:
        model: Any model.
        name: The name in results.
    """

    def __init__(self, model: Model, name: str = "model") -> None:
        self.model = model
        self.names = [name]
        self._opened = False

    def check(self, task: Task) -> None:
        self.model.check()

    def open(self, device: str) -> None:
        if not self._opened:
            self.model.open(device)
        self._opened = True

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:

        def generate_counted(requests: list[Request]) -> list[Completion]:
            completions = self.model.generate(requests)
            meter.add(*completions)
            return completions

        return [run_task(task, items, generate_counted)]


@checked("candidate")
class NamedModelCandidate(ModelCandidate):
    """A model known by name as one voter.

    Args:
        name: See `swarm.registry.registry.Roster`.
        roster: Returns the model.

    Raises:
        UserError: There is no such model.
    """

    def __init__(self, name: Text, roster: Roster) -> None:
        super().__init__(roster.model(name), name)

    def fingerprint(self) -> str:
        """Return all known determinants of the answers; see `swarm.registry.registry`."""
        return json.dumps(model_identity(self.model), sort_keys=True)
