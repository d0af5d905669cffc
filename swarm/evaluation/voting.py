"""A vote on answers: each member answers alone, and the vote's winner counts."""

from collections.abc import Sequence
from typing import Any, Literal

from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.stats.significance import plurality_vote
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import majority_vote

Rule = Literal["majority", "weighted"]


@checked("candidate")
class VotingCandidate(Candidate):
    """The vote of all voters of its members on the answers parsed from their texts.

    - "majority": the most frequent answer; ties go to the largest summed weight, then to the first
      voter's answer.
    - "weighted": the answer of the largest summed weight; a weight below 0 counts as 0.

    A voter without an answer does not vote. A score's text is the list of all answers.

    Args:
        members: A candidate or several. Voters of one candidate share its base; several candidates
            are all in memory.
        rule: "majority" or "weighted".
        weights: Utilities of the voters; `None` is those on dev for "weighted", and equal ones for
            "majority".
    """

    def __init__(
        self,
        members: Candidate | Sequence[Candidate],
        rule: Rule = "majority",
        weights: Sequence[float] | None = None,
    ) -> None:
        self.members = list(members) if isinstance(members, Sequence) else [members]
        self.rule = rule
        self.weights = None if weights is None else list(weights)
        self.names = ["vote"]

    def check(self, task: Task) -> None:
        if not task.votes:
            raise UserError(f"""task={task.name}: its answers are free texts, which cannot be voted
                on""")
        for member in self.members:
            member.check(task)
        voices = self.voter_names()
        if self.weights is not None and len(self.weights) != len(voices):
            raise UserError(
                f"candidate.weights: {len(self.weights)} weights for {len(voices)} voices: "
                + ", ".join(voices)
            )

    @property
    def reads_dev(self) -> bool:  # type: ignore[override]
        """Whether weights, or a member, are based on answers to dev."""
        unknown = self.weights is None and self.rule == "weighted"
        return unknown or any(member.reads_dev for member in self.members)

    def model_contexts(self) -> list[tuple[Any, float]]:
        return [one for member in self.members for one in member.model_contexts()]

    def voter_names(self) -> list[str]:
        """Return the names of all voters."""
        return [name for member in self.members for name in member.names]

    def open(self, device: str) -> None:
        for member in self.members:
            member.open(device)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        def score_members(some: Sequence[Item]) -> list[list[Score]]:
            return [s for member in self.members for s in member.score_items(task, some, meter)]

        if self.weights is None and self.rule == "weighted":
            self.weights = [task.utility(scores) for scores in score_members(task.items("dev"))]
        voices = score_members(items)
        weights = self.weights or [1.0] * len(voices)
        choose = weighted_vote if self.rule == "weighted" else plurality_vote
        return [majority_vote(task, items, voices, weights, choose)]

    def fingerprint(self) -> str:
        """Return the fingerprints of all members."""
        return " ".join(member.fingerprint() for member in self.members)


def weighted_vote(answers: Sequence[str | None], weights: Sequence[float]) -> str | None:
    """Return the answer of the largest summed weight; ties go to more voters, then to the first.

    Args:
        answers: `None` is no answer and no vote.
        weights: Below 0 they count as 0.
    """
    sums: dict[str, tuple[float, int]] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            total, count = sums.get(answer, (0.0, 0))
            sums[answer] = (total + max(0.0, weight), count + 1)
    return max(sums, key=lambda answer: sums[answer], default=None)
