"""What a run's experts answered to dev at its start, for whom it is worth to know it again."""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import UserError
from swarm.evaluation import as_scores
from swarm.report.folder import RunFolder
from swarm.tasks import Item, Score, Task, plain


@dataclass(frozen=True, slots=True)
class Start:
    """Dev answers of several voices.

    Attributes:
        items: Of dev, all or those that the search saw.
        scores: One list a voice, in the order of the items.
    """

    items: list[Item]
    scores: list[list[Score]]


def start_of(folder: str, names: Sequence[str], task: Task) -> Start:
    """What the experts of these names answered at the start of a run.

    Raises:
        UserError: The run has other experts or other items, or its answers are graded by another
            measure than the task's own.
    """
    run = RunFolder(folder)
    if missing := [name for name in names if name not in run.experts]:
        have = ", ".join(run.experts)
        raise UserError(f"candidate.run={folder}: it has no expert {missing[0]}; it has: {have}")
    known = {item["id"]: item for item in plain(task).items("dev")}
    rows = [run.answers((0, run.experts.index(name))) for name in names]
    if strange := [row["id"] for row in rows[0] if row["id"] not in known]:
        raise UserError(f"candidate.run={folder}: its dev item {strange[0]!r} is none of the task")
    scores = [as_scores(mine) for mine in rows]
    if "signal" in run.metrics or run.config["task"].get("signal", "accuracy") != "accuracy":
        scores = [[_correct(folder, score) for score in mine] for mine in scores]
    return Start([known[row["id"]] for row in rows[0]], scores)


def _correct(folder: str, score: Score) -> Score:
    """A score of a search that had a signal of its own, by the task's measure."""
    if "correct" not in score.measures:
        raise UserError(
            f"candidate.run={folder}: it was searched by log-probability, and its dev answers are "
            "not graded; leave candidate.run=null, and dev is asked now"
        )
    return Score(score.measures["correct"], score.answer, score.text, score.part)
