"""What scores come to and how sure that is: utility and interval, a tested difference, a vote."""

from collections.abc import Callable, Sequence
from typing import Any

from swarm.report.statistics import (
    Interval,
    Paired,
    mean_interval,
    paired_test,
    utility_interval,
    utility_test,
    vote,
)
from swarm.tasks import Item, Score, Task, unparsed


def interval_of(task: Task, scores: Sequence[Score]) -> Interval:
    """A task's utility of these scores with its 95 % interval."""
    values = [score.value for score in scores]
    if is_mean(task, scores):
        return mean_interval(values, signed=getattr(task, "lowest", 0.0) < 0)
    return utility_interval(
        lambda places: task.utility([scores[i] for i in places]), [s.part for s in scores]
    )


def described(task: Task, scores: Sequence[Score]) -> dict[str, Any]:
    """A utility with its 95 % interval, the unparsed rate, and the utilities of a mixture's parts.

    Its keys: "utility", "interval" ([low, high]), "items", "unparsed_rate" and perhaps "parts".
    """
    interval = interval_of(task, scores)
    found: dict[str, Any] = {
        "utility": interval.mean,
        "interval": [interval.low, interval.high],
        "items": interval.n,
        "unparsed_rate": unparsed(scores),
    }
    if hasattr(task, "parts"):
        found["parts"] = task.parts(scores)
    return found


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


def poll(
    task: Task,
    items: Sequence[Item],
    voices: Sequence[Sequence[Score]],
    weights: Sequence[float],
    choose: Callable[[Sequence[str | None], Sequence[float]], str | None] = vote,
) -> list[Score]:
    """The scores of the answers that several voices give together; their texts list all answers.

    Args:
        voices: Each one's scores, in the order of the items.
        weights: One a voice.
        choose: The answer of one item, from all answers to it and the weights.
    """
    polled = []
    for i, item in enumerate(items):
        answers = [scores[i].answer for scores in voices]
        answer = choose(answers, weights)
        said = " | ".join("-" if one is None else one for one in answers)
        polled.append(Score(task.grade(item, answer), answer, said, voices[0][i].part))
    return polled
