"""What a run's experts answered to dev at its start, for whom it is worth to know it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.utils import instantiate

from swarm.errors import UserError
from swarm.evaluation import records_to_scores
from swarm.report.folder import RunFolder
from swarm.tasks import Item, Score, Task, metric_task


@dataclass(frozen=True, slots=True)
class InitialAnswers:
    """Dev answers of several voices.

    Attributes:
        items: Of dev, all or those that the search saw.
        scores: One list a voice, in the order of the items.
    """

    items: list[Item]
    scores: list[list[Score]]


def load_initial_answers(folder: str, names: Sequence[str], task: Task) -> InitialAnswers:
    """What the experts of these names answered at the start of a run.

    Raises:
        UserError: The run has other experts or other items, or its answers are graded by another
            measure than the task's own.
    """
    run = RunFolder(folder)
    if missing := [name for name in names if name not in run.experts]:
        have = ", ".join(run.experts)
        raise UserError(f"candidate.run={folder}: it has no expert {missing[0]}; it has: {have}")
    known = {item["id"]: item for item in metric_task(task).items("dev")}
    rows = [run.load_answers((0, run.experts.index(name))) for name in names]
    if strange := [row["id"] for row in rows[0] if row["id"] not in known]:
        raise UserError(f"candidate.run={folder}: its dev item {strange[0]!r} is none of the task")
    scores = [records_to_scores(mine) for mine in rows]
    return InitialAnswers([known[row["id"]] for row in rows[0]], _rescore_by_task(run, scores))


def _rescore_by_task(run: RunFolder, scores: list[list[Score]]) -> list[list[Score]]:
    """The scores by the searched task's own measure, whatever signal they were valued by."""
    if run.metrics and "signal" not in run.metrics:
        return scores
    searched = instantiate(run.config["task"], _convert_="all")
    if metric_task(searched) is searched:
        return scores
    return [[_rescore_answer(run, searched, score) for score in mine] for mine in scores]


def _rescore_answer(run: RunFolder, task: Any, score: Score) -> Score:
    """One score by the own measure of its part, in a mixture."""
    for part in score.part.split("/") if score.part else ():
        task = task.tasks[part]
    if metric_task(task) is task:
        return score
    if "correct" not in score.measures:
        raise UserError(
            f"candidate.run={run.path}: it was searched by log-probability, and its dev answers "
            "are not graded; leave candidate.run=null, and dev is asked now"
        )
    return Score(score.measures["correct"], score.answer, score.text, score.part)
