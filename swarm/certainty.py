"""How sure a task's utility is: its interval, and the test of a difference on the same items."""

from collections.abc import Sequence

from swarm.report.statistics import (
    Interval,
    Paired,
    mean_interval,
    paired_test,
    utility_interval,
    utility_test,
)
from swarm.tasks import Score, Task


def interval_of(task: Task, scores: Sequence[Score]) -> Interval:
    """A task's utility of these scores with its 95 % interval."""
    values = [score.value for score in scores]
    if is_mean(task, scores):
        return mean_interval(values, signed=getattr(task, "lowest", 0.0) < 0)
    return utility_interval(
        lambda places: task.utility([scores[i] for i in places]), [s.part for s in scores]
    )


def gain_of(task: Task, after: Sequence[Score], before: Sequence[Score]) -> Paired:
    """The difference of two models' utilities on the same items, tested."""
    if is_mean(task, after):
        return paired_test([s.value for s in after], [s.value for s in before])
    return utility_test(
        lambda places: (
            task.utility([after[i] for i in places]) - task.utility([before[i] for i in places])
        ),
        [s.part for s in after],
    )


def is_mean(task: Task, scores: Sequence[Score]) -> bool:
    """Whether the utility is the plain mean; that of a mixture is not, whatever it comes to."""
    mean = sum(s.value for s in scores) / len(scores)
    return not scores[0].part and abs(task.utility(scores) - mean) < 1e-9
