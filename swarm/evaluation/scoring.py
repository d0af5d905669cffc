"""Score a candidate on a split of a task, and summarize scores and usage."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from swarm.engine.base_model import choose_device as choose_device  # re-exported
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, HasModelContexts, JobUsage
from swarm.loop.prompt_stats import fit_to_context
from swarm.models.base import Usage
from swarm.tasks.base import HasScoreScale, Item, RequiresSetup, Score, Task, metric_task
from swarm.tasks.metrics import paired_gain, summarize_constant_answers, utility_summary
from swarm.tasks.reward_model import RewardModelTask


@dataclass(frozen=True, slots=True)
class SplitScores:
    """Scores of a candidate on a split.

    Attributes:
        names: Names of its voters.
        items: Items of the split.
        scores: One list per voter, in the order of the items.
        usage: Requests to models and their tokens, counted for each of several members; includes
            requests about dev to compute weights, and the cost of cached answers when they were
            generated.
        seconds: Time of answering, without loading.
        account: Usage of each voter's answers, from `HasBaselines`; empty if unknown.
    """

    names: list[str]
    items: Sequence[Item]
    scores: list[list[Score]]
    usage: Usage
    seconds: float
    account: Sequence[Mapping[str, Any]] = ()


@runtime_checkable
class HasBaselines(Protocol):
    """A candidate whose first voter is compared with the others.

    Attributes:
        rivals: Description of the others.
    """

    rivals: str

    def usage_per_candidate(self) -> Sequence[Mapping[str, Any]]:
        """Return "calls", "tokens" and "cost" of each voter's answers."""
        ...


def prepare_candidate(candidate: Candidate, task: Task, device: str = "cpu") -> None:
    """Check and load a candidate, once; then `score_candidate` works on any split.

    Raises:
        UserError: As `check_candidate` and `load_candidate`.
    """
    check_candidate(candidate, task)
    load_candidate(candidate, task, device)


def check_candidate(
    candidate: Candidate, task: Task, splits: Sequence[str] = ("dev", "test")
) -> list[str]:
    """Check that a candidate and a task are compatible, before anything is loaded.

    A task with a scale measured on experts takes that of the candidate's run, if there is one.

    Args:
        splits: The splits to be scored; only their items have to fit into the models' contexts, and
            those of dev if the candidate answers them too.

    Returns:
        Lines on dropped or truncated items (`swarm.loop.prompt_stats.fit_to_context`).

    Raises:
        UserError: As `Candidate.check`, or the task lacks something.
    """
    if isinstance(task, RequiresSetup):
        task.check()
    candidate.check(metric_task(task))
    changed: list[str] = []
    if isinstance(candidate, HasModelContexts):
        reads_dev = getattr(candidate, "reads_dev", False) and "dev" not in splits
        used = ("dev", *splits) if reads_dev else splits
        for tokenizer, context in candidate.model_contexts():
            changed += fit_to_context(metric_task(task), tokenizer, context, used)
    scale = getattr(candidate, "scale", None)
    if scale is not None and isinstance(task, HasScoreScale):
        task.restore_scale(scale)
    _check_scale(metric_task(task))
    return changed


def _check_scale(task: Task, alone: bool = True) -> None:
    """Refuse values without a scale, also in the parts of a mixture."""
    if isinstance(task, RewardModelTask):
        task.check_scale(alone)
    for part in getattr(task, "tasks", {}).values():
        _check_scale(part, alone=False)


def load_candidate(candidate: Candidate, task: Task, device: str) -> None:
    """Load what both need.

    Raises:
        UserError: As `Candidate.open`, or a resource of the task cannot be opened.
    """
    if isinstance(task, RequiresSetup):
        task.open(device)
    candidate.open(device)


def score_candidate(candidate: Candidate, task: Task, split: str) -> SplitScores:
    """Score a prepared candidate on "dev" or "test", by the task's metric."""
    task, meter = metric_task(task), JobUsage()
    items = task.items(split)
    began = time.monotonic()
    scores = candidate.score_items(task, items, meter)
    seconds = time.monotonic() - began
    account = candidate.usage_per_candidate() if isinstance(candidate, HasBaselines) else ()
    return SplitScores(candidate.names, items, scores, meter, seconds, account)


def summarize_scores(task: Task, found: SplitScores) -> list[dict[str, Any]]:
    """Return each voter's name, `utility_summary` by the task's metric, and usage if known."""
    task = metric_task(task)
    account = found.account or [{} for _ in found.names]
    return [
        {"name": name, **utility_summary(task, scores, found.items), **took}
        for name, scores, took in zip(found.names, found.scores, account, strict=True)
    ]


def summarize_constants(task: Task, split: str) -> dict[str, Any] | None:
    """Return the results of the best constant answers, chosen on dev, on dev and on this split.

    Returns:
        As `swarm.tasks.metrics.summarize_constant_answers`; `None` also if there is no dev split.
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
    """Compare the first voter with the best of the others, on the same items.

    Its keys: "best", "gain", "interval", "p_value" and "items" (see `PairedTest`). The best of
    several is chosen on these very items, so its utility is biased upward slightly.
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
