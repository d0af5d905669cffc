"""The parts of a mixture and their weights, checked."""

from collections.abc import Mapping, Sequence
from math import isfinite

from swarm.errors import UserError
from swarm.tasks import Task


def check_tasks(tasks: object) -> dict[str, Task]:
    """The parts by name, checked."""
    if isinstance(tasks, Mapping):
        pairs = [(str(part), task) for part, task in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        pairs = [(str(getattr(task, "name", task)), task) for task in tasks]
    else:
        raise UserError(f"task.tasks: {tasks!r} is neither tasks by name nor a list of tasks.")
    if not pairs:
        raise UserError(
            "task.tasks: a mixture needs at least one task, as +task@task.tasks.one=nlgraph_mini"
        )
    found: dict[str, Task] = {}
    for part, task in pairs:
        if not part or "/" in part:
            raise UserError(f'task.tasks: the name "{part}" is empty or has a "/".')
        if not all(hasattr(task, needed) for needed in ("items", "run", "grade", "utility")):
            raise UserError(f"task.tasks.{part}: {task!r} is not a task.")
        if part in found:
            raise UserError(f'task.tasks: the name "{part}" occurs more than once.')
        found[part] = task
    return found


def check_weights(weights: object, tasks: Mapping[str, Task]) -> dict[str, float]:
    """The weights by part, checked."""
    if not isinstance(weights, Mapping) or {str(part) for part in weights} != set(tasks):
        raise UserError(
            f"task.weights: {weights!r} is not one number for each of {', '.join(tasks)}."
        )
    found = {str(part): weight for part, weight in weights.items()}
    for part, weight in found.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not isfinite(weight) or weight < 0:
            raise UserError(f"task.weights.{part}: {weight!r} is not a number from 0 on.")
    if not any(found.values()):
        raise UserError("task.weights: one of them has to be above 0.")
    return {part: float(weight) for part, weight in found.items()}
