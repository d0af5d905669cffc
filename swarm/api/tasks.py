"""A task of one's own in Python: items, and a function that says what an answer is worth."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.files import short_digest
from swarm.scorers.function import FunctionTask
from swarm.tasks.formats import InMemoryItems

TaskItems = str | Path | Sequence[Mapping[str, Any]] | Mapping[str, Any]

ITEMS_MISSING = "task: a function needs items to be asked about: task=swarm.task(items, function)"


class CustomTask(FunctionTask):
    """A task of a Python function, and what it was made with.

    Attributes:
        settings: Its arguments as a configuration tells of them; of the function the name and a
            digest of its source, for one that was changed values answers in another way.
    """

    def __init__(self, name: str, function: Callable[..., Any], **more: Any) -> None:
        super().__init__(name, function, **more)
        file = more.get("file")
        told = {**more, "file": None if isinstance(file, InMemoryItems) else file}
        self.settings = {"name": name, "function": self.scorer.path, "source": function_digest(function)}  # type: ignore[attr-defined]
        self.settings |= told


def task(
    items: TaskItems,
    score: Callable[[str, str, dict[str, Any]], float],
    *,
    name: str | None = None,
    template: str = "{prompt}",
    highest: float | None = None,
    chat: bool = False,
    max_new_tokens: int = 200,
    dev_limit: int | None = None,
    test_limit: int | None = None,
) -> CustomTask:
    """A task of items and a function, for `search` and `evaluate`.

    Args:
        items: A list of dicts, each with a "prompt" or what `template` names, and with whatever the
            function wants to know. Where each says its "split", "dev" or "test", so they are
            divided; else a third of them, by content, is dev. Or {"dev": [...], "test": [...]}; or
            the path of a data file (docs/tasks.md).
        score: Called as score(prompt, answer, item); gives a number, higher is better.
        name: As records and reports call it; `None` is the function's.
        template: The prompt, with an item's fields in braces.
        highest: The most that `score` gives; 1.0 where an answer is right or wrong.
        chat: Put the prompt as one user turn through the model's chat template.
        max_new_tokens: The most tokens of an answer.
        dev_limit: The most items of a split; `None` is all.
        test_limit: See `dev_limit`.

    Raises:
        UserError: A value is not allowed. What is wrong with items is said at their first use.
    """
    if not callable(score):
        raise UserError(f"score={score!r:.60}: must be a function of (prompt, answer, item)")
    if not isinstance(items, str | Path | Mapping | Sequence):
        raise UserError(
            f"items={items!r:.60}: must be a list of dicts, a dict of a list for each of dev and "
            "test, or the path of a data file"
        )
    return CustomTask(
        name or getattr(score, "__name__", "function").strip("<>"),
        score,
        highest=highest,
        template=template,
        file=str(items) if isinstance(items, str | Path) else InMemoryItems(items),
        dev_limit=dev_limit,
        test_limit=test_limit,
        chat=chat,
        max_new_tokens=max_new_tokens,
    )


def function_digest(function: Callable[..., Any]) -> str | None:
    """16 hexadecimal digits that change with a function's text; `None` where there is no text."""
    try:
        return short_digest(inspect.getsource(function))
    except (OSError, TypeError):
        return None
