"""task.chat=auto: whether prompts pass through the chat template, decided on a few dev items."""

import contextlib
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import parse_json
from swarm.executors import Executor, Job
from swarm.executors.worker import LOSS
from swarm.loop.selection import spaced_items
from swarm.runs.folder import CONFIG_FILE
from swarm.tasks.base import Task
from swarm.tasks.mixture import Mixture

FORM_ITEMS = 8
"""Dev items that decide, evenly spaced."""
FORM_EXPERTS = 8
"""Maximum number of experts that answer them, evenly spaced in the pool."""

FORMS = {"plain": False, "chat": True}


def both_forms(task: Task) -> Mixture:
    """Return a task's items in both forms, as one task: those without the template come first."""
    parts = {name: copy(task) for name in FORMS}
    for name, chat in FORMS.items():
        parts[name].chat = chat
    return Mixture("forms", parts, "mean")


def measure_forms(
    task: Task, executor: Executor, experts: int, groups: int, by_loss: bool
) -> list[float]:
    """Return how well the experts answer without the template, and with it.

    It is the mean over items of the best expert's score, or of the lowest loss of the gold answer:
    most experts know only some kinds of items.

    Args:
        task: Any task; that of the executor's workers is `both_forms` of it.
        executor: Open, with the pool of a search.
        experts, groups: Number of experts and of groups of their coefficients.
        by_loss: Whether the loss is measured.
    """
    count = len(task.items("dev"))
    chosen = spaced_items(range(count), FORM_ITEMS)
    items = [*chosen, *(item + count for item in chosen)]
    rows = [np.tile(np.eye(experts)[k], groups) for k in spaced_items(range(experts), FORM_EXPERTS)]
    # A job of losses returns their sum.
    parts = [(item,) for item in items] if by_loss else [tuple(items)]
    pairs = [(tuple(row.tolist()), part) for row in rows for part in parts]
    split = LOSS if by_loss else "dev"
    jobs = [Job(number, (row,), split, part) for number, (row, part) in enumerate(pairs)]
    values = np.zeros((len(jobs), len(parts[0])))
    for result in executor.map(jobs):
        loss = result.gradient
        values[result.number] = (
            [score.value for score in result.scores[0]] if loss is None else loss.loss
        )
    found = values.reshape(len(rows), 2, len(chosen))
    best = found.min(axis=0) if by_loss else found.max(axis=0)
    return best.mean(axis=1).tolist()


def describe_form(task: Task, found: Sequence[float], measure: str) -> str:
    """Describe the decision by what was measured without the template and with it."""
    plain, templated = found
    count = min(FORM_ITEMS, len(task.items("dev")))
    return (
        f"prompts {'use the' if task.chat else 'do not use the'} chat template (task.chat=auto): "
        f"{measure} {templated:.3f} with it and {plain:.3f} without, on {count} dev items"
    )


def stored_form(folder: Path) -> bool | None:
    """Return the decision in a run's folder; `None` if it has none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        chat = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))["task"]["chat"]
        return chat if isinstance(chat, bool) else None
    return None


def with_form(config: Mapping[str, Any], chat: bool | str) -> dict[str, Any]:
    """Return a configuration with the decision instead of "auto"."""
    task = config.get("task")
    if not isinstance(task, Mapping) or task.get("chat") != "auto":
        return dict(config)
    return {**config, "task": {**task, "chat": chat}}
