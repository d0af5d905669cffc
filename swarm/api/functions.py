"""Search, evaluation and custom tasks from Python: keys of the command line, or objects instead."""

import inspect
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from swarm._util.files import short_digest
from swarm.api.overrides import (
    OverrideKeys,
    compose_config,
    describe_object,
    instantiate_part,
    to_overrides,
)
from swarm.api.result import Best, EvaluationResult, Result
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.evaluation import checkpoints, models
from swarm.evaluation.base import Candidate
from swarm.evaluation.evaluation import Evaluation
from swarm.executors import Executor
from swarm.executors.inline import InlineExecutor
from swarm.loop.run import Run
from swarm.models.base import Model
from swarm.models.function import FunctionModel, function_name
from swarm.optimizers.base import Optimizer
from swarm.pool.pool import ExpertPool, Pool
from swarm.registry.registry import Roster
from swarm.scorers.function import FunctionTask
from swarm.tasks.base import Task
from swarm.tasks.dataset import InMemoryItems

PoolLike = str | Path | Sequence[str | Path] | ExpertPool


def search(
    task: str | Task = "nlgraph_mini",
    pool: PoolLike | None = None,
    model: str | Path | BaseModel | None = None,
    optimizer: str | Mapping[str, Any] | Optimizer | None = None,
    *,
    engine: str | Mapping[str, Any] | Engine | None = None,
    executor: str | Mapping[str, Any] | Executor | None = None,
    name: str | None = None,
    folder: str | Path = "search",
    seed: int = 42,
    show: bool = True,
    overrides: OverrideKeys = (),
    **settings: Any,
) -> Result:
    """Search a pool of experts for the best model of a task, as `python -m swarm.search` does.

    The same arguments with the same `name` resume a stopped search, or show the result of a
    finished one. If all arguments are names and values, the command line and this function can
    resume each other's runs.

    Args:
        task: An option of conf/task, the path of a data file, or `swarm.api.task(items, function)`.
        pool: A folder of adapters, or a list of such folders, adapters' folders and ids of the
            hub ("hf://user/name"); or a pool.
        model: An option of conf/model, a folder or hub id of a model, or a base model.
        optimizer: An option of the group, a dict of its keys, or an object.
        engine: As `optimizer`.
        executor: As `optimizer`.
        name: The run's folder below `folder`; `None` is the task's name and the time.
        folder: Parent folder of the runs.
        seed: Seed of all randomness.
        show: Whether to print a line per round and the result.
        overrides: Further keys, {"optimizer.particles": 8} or ["optimizer.particles=8"].
        **settings: Further keys of conf/search.yaml: budget=500, racing="exact", job={"items": 20}.

    Raises:
        UserError: An input is invalid, with the message of the command line. Nothing has been
            written in that case.
    """
    given = {"task": task, "pool": pool, "model": model, "optimizer": optimizer}
    keys, objects = split_keys_and_objects({**given, "engine": engine, "executor": executor})
    if name is None:
        label = task if isinstance(task, str) else getattr(task, "name", "search")
        name = find_free_name(folder, f"{label}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    plain = {"folder": folder, "seed": seed, **settings}
    parts = (keys, plain, overrides, {"name": name})
    arguments = [word for part in parts for word in to_overrides(part)]
    with preserve_logging(), compose_config("search", arguments) as config:
        if config["dry_run"]:
            raise UserError(
                "dry_run is only available on the command line: python -m swarm.search dry_run=true"
            )
        run = build_run(config, objects)
        run.search(config, None if objects else arguments, show)
    return Result(run.record.folder)


def split_keys_and_objects(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into command-line keys and objects.

    Raises:
        UserError: A value is neither.
    """
    keys: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for group, value in given.items():
        if group == "pool":
            value = _pool_keys(value)
        if value is None:
            continue
        if isinstance(value, str | Path | Mapping):
            keys[group] = value if isinstance(value, Mapping) else str(value)
        elif isinstance(value, KINDS[group]):
            objects[group] = value
        else:
            allowed = f"the name of an option of conf/{group}, or an object of that kind"
            if group == "task" and callable(value):
                raise UserError(ITEMS_MISSING)
            if group == "pool":
                allowed = "a folder of adapters, a list of folders, or a pool"
            raise UserError(f"{group}={value!r:.80}: must be {allowed}")
    return keys, objects


KINDS = {
    "task": Task,
    "pool": ExpertPool,
    "model": BaseModel,
    "optimizer": Optimizer,
    "engine": Engine,
    "executor": Executor,
}
"""Base class of the objects of each group."""


def _pool_keys(value: Any) -> Any:
    """Return a pool of adapters as keys, for the command line; other pools unchanged."""
    if type(value) is Pool:
        return value.settings
    if isinstance(value, str | Path):
        return {"folder": str(value)}
    if not value or not isinstance(value, Sequence):
        return value
    return {"folder": ",".join(map(str, value))}


def build_run(config: dict[str, Any], objects: Mapping[str, Any]) -> Run:
    """Build the run of a configuration, with objects instead of some parts.

    Args:
        config: Modified in place: descriptions of the objects are added.

    Raises:
        UserError: A value is not allowed.
    """
    from swarm.search import ENTRY_KEYS

    config |= {group: describe_object(thing) for group, thing in objects.items()}
    parts = {
        key: objects[key] if key in objects else instantiate_part(value)
        for key, value in config.items()
        if key not in (*ENTRY_KEYS, "_target_")
    }
    run = Run(**parts)
    for group in ("task", "pool", "engine"):
        if group in objects and not isinstance(run.executor, InlineExecutor):
            try:
                pickle.dumps(objects[group])
            except Exception as error:
                raise UserError(
                    f"{group}: it cannot be sent to worker processes ({error}); define its parts "
                    "in an importable module, or use one device"
                ) from None
    return run


def find_free_name(folder: str | Path, name: str) -> str:
    """Return the name, with a number appended if a search of the same second has it."""
    later = (f"{name}-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], later) if not (Path(folder) / one).exists())


@contextmanager
def preserve_logging() -> Iterator[None]:
    """Restore the package's logging handlers afterwards: later messages are not part of log.txt."""
    log = logging.getLogger("swarm")
    before = list(log.handlers), log.level, log.propagate
    try:
        yield
    finally:
        for handler in log.handlers:
            if handler not in before[0]:
                handler.close()
        log.handlers[:] = before[0]
        log.setLevel(before[1])
        log.propagate = before[2]


DEFAULT_TASK = "nlgraph_mini"

Evaluable = str | Path | Result | Best | Model | Candidate | Callable[..., str]


def evaluate(
    model: Evaluable,
    task: str | Task = DEFAULT_TASK,
    split: Literal["dev", "test"] = "test",
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
            a function f(prompt) -> text.
        task: An option of conf/task, the path of a data file, or `swarm.api.task(items, function)`.
        split: "test" or "dev".
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.
        out: A folder for result.json and answers.jsonl; `None` writes nothing.
        roster: Provider of models by name; pass your own to cache them between calls.
        overrides: Keys as on the command line, {"task.max_new_tokens": 8}.
        **settings: Keys of the named task: test_limit=50.

    Raises:
        UserError: An input is invalid, or a model is unavailable.
    """
    keys = {f"task.{key}": value for key, value in settings.items()}
    arguments = [*to_overrides(keys), *to_overrides(overrides)]
    if isinstance(task, str):
        with compose_config("evaluate", [f"task={task}", *arguments]) as composed:
            config = composed["task"]
            task = cast("Task", instantiate_part(config))
    elif not isinstance(task, Task):
        raise UserError(ITEMS_MISSING)
    elif arguments:
        raise UserError(
            f"{arguments[0]}: a task object has its own settings; set them in its constructor"
        )
    else:
        config = describe_object(task)
    candidate = _resolve_candidate(model, roster or Roster(device=device))
    evaluation = Evaluation(task, candidate, split, device, out)
    result = evaluation.run({"task": config, "candidate": {"names": candidate.names}})
    return EvaluationResult(result, evaluation.answer_rows(), task)


def _resolve_candidate(model: Any, roster: Roster) -> Candidate:
    """Return anything that answers as a candidate."""
    if isinstance(model, Best):
        return checkpoints.CheckpointCandidate(model.base, str(model.folder), [model.words])
    if isinstance(model, Result):
        return checkpoints.BestCandidate(str(model.folder))
    if isinstance(model, str | Path):
        name = f"local/{model}" if isinstance(model, Path) else model
        return models.NamedModelCandidate(name, roster)
    if isinstance(model, Candidate):
        return model
    if isinstance(model, Model):
        return models.ModelCandidate(model, getattr(model, "name", type(model).__name__))
    if callable(model):
        made = FunctionModel(model)
        return models.ModelCandidate(made, made.label)
    raise UserError(
        f"model={model!r:.80}: must be a model's name or folder, a result, a model, or a function "
        "of the prompt"
    )


TaskItems = str | Path | Sequence[Mapping[str, Any]] | Mapping[str, Any]

ITEMS_MISSING = "task: a function needs items: task=swarm.api.task(items, function)"


class CustomTask(FunctionTask):
    """A task that scores with a Python function.

    Attributes:
        settings: Its arguments as in a configuration; of the function the name and a digest of its
            source, since a changed function scores differently.
    """

    def __init__(self, name: str, function: Callable[..., Any], **more: Any) -> None:
        super().__init__(name, function=function, **more)
        try:
            source = short_digest(inspect.getsource(function))
        except (OSError, TypeError):
            source = None
        file = more.get("file")
        self.settings = {
            "name": name,
            "function": function_name(function),
            "source": source,
            **more,
            "file": None if isinstance(file, InMemoryItems) else file,
        }


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
    """Create a task from items and a function, for `search` and `evaluate`.

    Args:
        items: A list of dicts, each with a "prompt" or the fields of `template`, and anything the
            function needs. If each has a "split", "dev" or "test", it decides; else a third of
            them, by content, is dev. Or {"dev": [...], "test": [...]}; or the path of a data file
            (docs/tasks.md).
        score: Called as score(prompt, answer, item); returns a number, higher is better.
        name: Name in records and reports; `None` is the function's.
        template: The prompt, with an item's fields in braces.
        highest: Maximum of `score`; 1.0 if an answer is right or wrong.
        chat: Send the prompt as one user turn through the model's chat template.
        max_new_tokens: Maximum number of tokens of an answer.
        dev_limit: Maximum number of dev items; `None` is all.
        test_limit: Maximum number of test items; `None` is all.

    Raises:
        UserError: A value is not allowed. Invalid items are reported at their first use.
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
