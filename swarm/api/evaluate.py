"""Evaluation of any model on any task, from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from swarm.api.overrides import (
    ITEMS_MISSING,
    OverrideKeys,
    compose_config,
    describe_object,
    instantiate_part,
    to_overrides,
)
from swarm.api.result import Best, Result
from swarm.errors import UserError
from swarm.evaluation import checkpoints, models
from swarm.evaluation import checkpoints as saved
from swarm.evaluation.base import Candidate
from swarm.evaluation.evaluation import Evaluation, format_result
from swarm.loop.evaluator import records_to_scores
from swarm.models.base import Model
from swarm.models.function import FunctionModel
from swarm.registry.registry import Roster
from swarm.runs.describe import describe_difference as compared
from swarm.tasks.base import Task, metric_task
from swarm.tasks.metrics import paired_gain

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_TASK = "nlgraph_mini"

Evaluable = str | Path | Result | Best | Model | Candidate | Callable[..., str]


@dataclass(frozen=True)
class Gain:
    """A difference on the same n items, with 95 % interval and two-sided p-value.

    str() is a sentence.
    """

    difference: float
    interval: tuple[float, float]
    p: float
    n: int

    def __str__(self) -> str:
        return compared(self.difference, self.interval, self.p, self.n, "items", False)


@dataclass(frozen=True)
class EvaluationResult:
    """Result of evaluating a model on a split of a task.

    Attributes:
        result: All numbers, as in result.json; several models are listed one after the other.
        rows: One dict per answer: "id", "value", "answer" (as parsed), "text".
        task: The evaluated task.
    """

    result: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    task: Task

    @property
    def utility(self) -> float:
        """The task's utility, of the first model."""
        return float(self.result["voices"][0]["utility"])

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the utility."""
        low, high = self.result["voices"][0]["interval"]
        return float(low), float(high)

    @property
    def n(self) -> int:
        """Number of items."""
        return int(self.result["items"])

    @property
    def cost(self) -> float:
        """Cost of generating the answers, in the currency of the model's prices."""
        return float(self.result.get("cost", 0.0))

    @cached_property
    def items(self) -> "pd.DataFrame":
        """The rows as a data frame; needs pandas."""
        from swarm.api.result import import_optional

        frame: pd.DataFrame = import_optional("pandas").DataFrame(self.rows)
        return frame

    def against(self, other: "EvaluationResult") -> "Gain":
        """Test the difference of this utility from another's on the same items.

        Raises:
            UserError: The items differ.
        """
        mine, others = self._first_model_rows(), other._first_model_rows()
        if [row["id"] for row in mine] != [row["id"] for row in others]:
            raise UserError(
                "against: the two were not evaluated on the same items, so no pairs exist"
            )
        found = paired_gain(
            metric_task(self.task), records_to_scores(mine), records_to_scores(others)
        )
        return Gain(found.difference, (found.low, found.high), found.p, found.n)

    def _first_model_rows(self) -> list[dict[str, Any]]:
        """Return the answers of the first model."""
        name = self.result["voices"][0]["name"]
        return [dict(row) for row in self.rows if row.get("voice", name) == name]

    def __str__(self) -> str:
        return format_result(self.result)


def evaluate(
    model: Evaluable | None = None,
    /,
    task: str | Task = DEFAULT_TASK,
    split: str = "test",
    *,
    device: str | None = None,
    out: str | Path | None = None,
    roster: Roster | None = None,
    overrides: OverrideKeys = (),
    **settings: Any,
) -> EvaluationResult:
    """Evaluate a model on a split of a task: its utility with a 95 % interval, and every answer.

    Args:
        model: A model name ("local/rooms", "ollama/qwen2:7b", "moa/lite"); the folder of an
            adapter, a model or a run; a result or one of its bests; a custom model or candidate; or
            a function f(prompt) -> text. It may be given by name, model=..., also after the task:
            evaluate("gsm8k", model="local/rooms").
        task: Name of an option of conf/task, or a task: `swarm.task(items, function)`.
        split: "test" or "dev".
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.
        out: A folder for result.json and answers.jsonl; `None` writes nothing.
        roster: Provider of models by name; pass your own to cache them between calls.
        overrides: Keys as on the command line, {"task.max_new_tokens": 8}.
        **settings: Keys of the named task: test_limit=50.

    Raises:
        UserError: An input is invalid, or a model is unavailable.
    """
    if "model" in settings:
        if model is not None:
            if task != DEFAULT_TASK or not (isinstance(model, str) or hasattr(model, "run")):
                raise UserError("model: given twice; call evaluate(MODEL, task=TASK)")
            task = cast("str | Task", model)
        model = settings.pop("model")
    keys = {f"task.{key}": value for key, value in settings.items()}
    chosen, config = _resolve_task(task, [*to_overrides(keys), *to_overrides(overrides)])
    candidate = _resolve_candidate(model, roster or Roster(device=device))
    told_of = {"task": config, "candidate": {"names": candidate.names}}
    evaluation = Evaluation(chosen, candidate, split, device, None if out is None else str(out))
    return EvaluationResult(evaluation.run(told_of), evaluation.answer_rows(), chosen)


def _resolve_task(task: str | Task, arguments: Sequence[str]) -> tuple[Task, Mapping[str, Any]]:
    """Return a task, and its description as a configuration."""
    if isinstance(task, str):
        with compose_config("evaluate", [f"task={task}", *arguments]) as config:
            return instantiate_part(config["task"]), config["task"]
    if arguments:
        raise UserError(
            f"{arguments[0]}: a task object has its own settings; set them in its constructor"
        )
    if not hasattr(task, "run"):
        raise UserError(ITEMS_MISSING)
    return task, describe_object(task)


def _resolve_candidate(model: Any, roster: Roster) -> Candidate:
    """Return anything that answers as a candidate."""
    if isinstance(model, Best):
        return saved.CheckpointCandidate(model.base, str(model.folder), [model.words])
    if isinstance(model, Result):
        return checkpoints.BestCandidate(str(model.folder))
    if isinstance(model, str | Path):
        name = f"local/{model}" if isinstance(model, Path) else model
        return models.NamedModelCandidate(name, roster)
    if hasattr(model, "score_items") and hasattr(model, "fingerprint"):
        return model  # type: ignore[no-any-return]
    if hasattr(model, "generate"):
        return models.ModelCandidate(model, getattr(model, "name", type(model).__name__))
    if callable(model):
        made = FunctionModel(model)
        return models.ModelCandidate(made, made.label)
    raise UserError(
        f"model={model!r:.80}: must be a model's name or folder, a result, a model, or a function "
        "of the prompt"
    )
