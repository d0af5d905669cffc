"""Search from Python: with the command line's keys, or with objects instead."""

import itertools
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm.api.overrides import (
    ITEMS_MISSING,
    OverrideKeys,
    compose_config,
    describe_object,
    instantiate_part,
    list_options,
    to_overrides,
)
from swarm.api.result import Result
from swarm.engine.base import Engine, ExpertPool
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.executors import Executor
from swarm.executors.inline import InlineExecutor
from swarm.loop.run import Run
from swarm.optimizers.base import Optimizer
from swarm.pool.pool import Pool
from swarm.tasks.base import Task

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
        task: Name of an option of conf/task, or a task: `swarm.task(items, function)`.
        pool: A folder of adapters; a list of adapters' folders, all in one folder; or a pool.
        model: An option of conf/model, a folder or hub id of a model, or a base model.
        optimizer: An option of the group, a dict of its keys, or an object.
        engine: As `optimizer`.
        executor: As `optimizer`.
        name: The run's folder below `folder`; `None` is the task's name and the time.
        folder: Parent folder of the runs.
        seed: Seed of all randomness.
        show: Whether to print a line per iteration and the final table.
        overrides: Further keys, {"optimizer.particles": 8} or ["optimizer.particles=8"].
        **settings: Further keys of conf/search.yaml: budget=500, racing="z", job={"items": 20}.

    Raises:
        UserError: An input is invalid, with the message of the command line. Nothing has been
            written in that case.
    """
    given = {
        "task": task,
        "pool": pool,
        "model": model,
        "optimizer": optimizer,
        "engine": engine,
        "executor": executor,
    }
    keys, objects = split_keys_and_objects(given)
    name = name or find_free_name(folder, f"{_task_name(task)}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    plain = {"folder": folder, "seed": seed, **settings}
    arguments = [
        *to_overrides(keys),
        *to_overrides(plain),
        *to_overrides(overrides),
        *to_overrides({"name": name}),
    ]
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
        if value is None:
            continue
        if group == "pool":
            value = _pool_keys(value)
        if group == "model" and isinstance(value, str | Path):
            # A name without a slash may be a misspelt option, for which Hydra has the best message.
            is_path = "/" in str(value) or Path(value).is_dir()
            option = not is_path or str(value) in list_options("model")
            keys |= {"model": str(value)} if option else {"model": "local", "model.path": value}
        elif isinstance(value, str | Mapping):
            keys[group] = value
        else:
            objects[group] = _check_object(group, value)
    return keys, objects


REQUIRED_METHODS = {
    "task": "run",
    "pool": "open",
    "model": "resolve",
    "optimizer": "ask",
    "engine": "check",
    "executor": "map",
}
"""Method that identifies an object of each group."""


def _check_object(group: str, value: Any) -> Any:
    if group == "task" and callable(value) and not hasattr(value, "run"):
        raise UserError(ITEMS_MISSING)
    if not hasattr(value, REQUIRED_METHODS[group]) or isinstance(value, type):
        allowed = f"the name of an option of conf/{group}, or an object of that kind"
        if group == "pool":
            allowed = "a folder of adapters, a list of adapters' folders, or a pool"
        raise UserError(f"{group}={value!r:.80}: must be {allowed}")
    return value


def _pool_keys(value: Any) -> Any:
    """Return a pool of adapters as keys, for the command line; other pools unchanged."""
    if type(value) is Pool:
        return value.settings
    if isinstance(value, str | Path):
        return {"folder": str(value)}
    if not value or not isinstance(value, Sequence):
        return value
    folders = [Path(one) for one in value]
    homes = {one.parent for one in folders}
    if len(homes) != 1:
        raise UserError(
            f"pool: {', '.join(map(str, folders))}: adapters of a pool must be in one folder; "
            "copy or link (ln -s) them into one"
        )
    return {"folder": str(homes.pop()), "experts": [one.name for one in folders]}


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
    if not isinstance(run.executor, InlineExecutor):
        _check_picklable(objects)
    return run


def _check_picklable(objects: Mapping[str, Any]) -> None:
    for group in ("task", "pool", "engine"):
        try:
            pickle.dumps(objects.get(group))
        except Exception as error:
            raise UserError(
                f"{group}: it cannot be sent to worker processes ({error}); define its parts "
                "in an importable module, or use one device"
            ) from None


def find_free_name(folder: str | Path, name: str) -> str:
    """Return the name, with a number appended if a search of the same second has it."""
    later = (f"{name}-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], later) if not (Path(folder) / one).exists())


def _task_name(task: Any) -> str:
    return task if isinstance(task, str) else str(getattr(task, "name", "search"))


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
