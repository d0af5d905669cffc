"""Puts a split of a task to a candidate, and says what that came to and what it took."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from swarm.engine.base_model import choose_device as choose_device  # an entry asks here
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.tasks.base import HasScoreScale, Item, RequiresSetup, Score, Task, metric_task
from swarm.tasks.metrics import paired_gain, summarize_constant_answers, utility_summary
from swarm.tasks.reward_model import RewardModelTask


@dataclass(frozen=True, slots=True)
class SplitScores:
    """What a candidate came to on a split.

    Attributes:
        names: Of its voices.
        items: Of the split.
        scores: One list a voice, in the order of the items.
        prompts: Requests put to a model, each of several members counted; what was asked about dev
            to find weights is among them.
        tokens: Read and generated, of all members.
        seconds: That answering took; nothing of loading.
        cost: Of the answers when they were made, in the currency of the models' prices.
        unpriced: Answers of endpoints whose prices are not known, and which `cost` lacks.
        account: What each voice's answers took, as `Accounted` has it; empty if it is not known.
    """

    names: list[str]
    items: Sequence[Item]
    scores: list[list[Score]]
    prompts: int
    tokens: int
    seconds: float
    cost: float = 0.0
    unpriced: int = 0
    account: Sequence[Mapping[str, Any]] = ()


@runtime_checkable
class HasBaselines(Protocol):
    """A candidate whose first voice has rivals in the others.

    Attributes:
        rivals: What each of the others is.
    """

    rivals: str

    def usage_per_candidate(self) -> Sequence[Mapping[str, Any]]:
        """ "calls", "tokens" and "cost" of each voice's answers."""
        ...


def prepare_candidate(candidate: Candidate, task: Task, device: str = "cpu") -> None:
    """`check` and `load`; once, then `score` on any split.

    Raises:
        UserError: As `check` and `load`.
    """
    check_candidate(candidate, task)
    load_candidate(candidate, task, device)


def check_candidate(candidate: Candidate, task: Task) -> None:
    """See that a candidate and a task go together, before anything is loaded.

    A task that is valued on a scale of experts takes that of the candidate's run, if there is one.

    Raises:
        UserError: As `Candidate.check`, or the task lacks something.
    """
    if isinstance(task, RequiresSetup):
        task.check()
    candidate.check(metric_task(task))
    scale = getattr(candidate, "scale", None)
    if scale is not None and isinstance(task, HasScoreScale):
        task.restore_scale(scale)
    _check_scale(metric_task(task))


def _check_scale(task: Task, alone: bool = True) -> None:
    """Refuse values without a scale, in the parts of a mixture, too."""
    if isinstance(task, RewardModelTask):
        task.check_scale(alone)
    for part in getattr(task, "tasks", {}).values():
        _check_scale(part, alone=False)


def load_candidate(candidate: Candidate, task: Task, device: str) -> None:
    """Load what both need.

    Raises:
        UserError: As `Candidate.open`, or what the task needs cannot be opened.
    """
    if isinstance(task, RequiresSetup):
        task.open(device)
    candidate.open(device)


def score_candidate(candidate: Candidate, task: Task, split: str) -> SplitScores:
    """What a prepared candidate comes to on "dev" or "test", by the task's own measure."""
    task, meter = metric_task(task), JobUsage()
    items = task.items(split)
    began = time.monotonic()
    scores = candidate.score_items(task, items, meter)
    seconds = time.monotonic() - began
    account = candidate.usage_per_candidate() if isinstance(candidate, HasBaselines) else ()
    return SplitScores(
        candidate.names,
        items,
        scores,
        meter.prompts,
        meter.tokens,
        seconds,
        meter.cost,
        meter.unpriced,
        account,
    )


def summarize_scores(task: Task, found: SplitScores) -> list[dict[str, Any]]:
    """Each voice's name, what it came to by the task's own measure (see `described`), and what its
    answers took, where the candidate tells."""
    task = metric_task(task)
    account = found.account or [{} for _ in found.names]
    return [
        {"name": name, **utility_summary(task, scores, found.items), **took}
        for name, scores, took in zip(found.names, found.scores, account, strict=True)
    ]


def summarize_constants(task: Task, split: str) -> dict[str, Any] | None:
    """What the best constant answers, chosen on dev, come to on dev and on this split.

    Returns:
        As `swarm.tasks.metrics.summarize_constant_answers`; `None` also where there is no dev
        split.
    """
    task = metric_task(task)
    if not getattr(task, "votes", True):
        return None
    try:
        dev = task.items("dev")
    except UserError:
        return None
    return summarize_constant_answers(task, dev, task.items("test") if split == "test" else ())


def compare_with_best(task: Task, found: SplitScores) -> dict[str, Any]:
    """The first voice against the best of the others, on the same items.

    Its keys: "best", "gain", "interval", "p_value" and "items" (see `Paired`). The best of several
    on these very items is a little flattered.
    """
    task = metric_task(task)
    best = max(range(1, len(found.names)), key=lambda voice: task.utility(found.scores[voice]))
    gain = paired_gain(task, found.scores[0], found.scores[best])
    interval = [gain.low, gain.high]
    return {
        "best": found.names[best],
        "gain": gain.difference,
        "interval": interval,
        "p_value": gain.p,
        "items": gain.n,
    }
