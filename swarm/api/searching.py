"""A search from Python: the command line's keys, or objects in their place."""

import itertools
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm.api.result import Result
from swarm.api.settings import Keys, composed, described, made, options, words
from swarm.api.tasks import NO_ITEMS
from swarm.engine import Engine, Experts
from swarm.engine.base import Base
from swarm.errors import UserError
from swarm.executors import Executor
from swarm.executors.inline import Inline
from swarm.optimizers import Optimizer
from swarm.pool import Pool
from swarm.run import Run
from swarm.tasks import Task

Pools = str | Path | Sequence[str | Path] | Experts


def search(
    task: str | Task = "nlgraph_mini",
    pool: Pools | None = None,
    model: str | Path | Base | None = None,
    optimizer: str | Mapping[str, Any] | Optimizer | None = None,
    *,
    engine: str | Mapping[str, Any] | Engine | None = None,
    executor: str | Mapping[str, Any] | Executor | None = None,
    name: str | None = None,
    folder: str | Path = "search",
    seed: int = 42,
    show: bool = True,
    overrides: Keys = (),
    **settings: Any,
) -> Result:
    """Search a pool of experts for the best model of a task, as `python -m swarm.search` does.

    The same arguments with the same `name` go on where the search stopped, or show what a finished
    one came to. Where all is given by names and values, the command line goes on with it too, and
    this with what the command line began.

    Args:
        task: An option of conf/task by its name, or a task: `swarm.task(items, function)`.
        pool: A folder of adapters; a list of adapters' folders, all in one folder; or a pool.
        model: An option of conf/model, a folder or hub id of a model, or a base.
        optimizer: An option of their group, a dict of its keys, or an object.
        engine: See `optimizer`.
        executor: See `optimizer`.
        name: The run's folder below `folder`; `None` is the task's name and the time.
        folder: Where the runs lie.
        seed: Of all randomness.
        show: Whether a line an iteration and the final table are printed.
        overrides: Further keys, {"optimizer.particles": 8} or ["optimizer.particles=8"].
        **settings: Further keys of conf/search.yaml: budget=500, racing="z", job={"items": 20}.

    Raises:
        UserError: Something is wrong with an input; the line that the command line would print.
            Nothing has been written then.
    """
    given = {"task": task, "pool": pool, "model": model, "optimizer": optimizer,
             "engine": engine, "executor": executor}  # fmt: skip
    keys, objects = divided(given)
    name = name or free_name(folder, f"{_called(task)}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    plain = {"folder": folder, "seed": seed, **settings}
    arguments = [*words(keys), *words(plain), *words(overrides), *words({"name": name})]
    with own_log(), composed("search", arguments) as config:
        if config["dry_run"]:
            raise UserError("dry_run is for the command line: python -m swarm.search dry_run=true")
        run = built(config, objects)
        run.search(config, None if objects else arguments, show)
    return Result(run.record.folder)


def divided(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stands for keys of the command line, and the objects.

    Raises:
        UserError: Something is neither.
    """
    keys: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for group, value in given.items():
        if value is None:
            continue
        if group == "pool":
            value = _pool(value)
        if group == "model" and isinstance(value, str | Path):
            # A name without a slash may be a misspelt option, of which Hydra tells best.
            place = "/" in str(value) or Path(value).is_dir()
            option = not place or str(value) in options("model")
            keys |= {"model": str(value)} if option else {"model": "local", "model.path": value}
        elif isinstance(value, str | Mapping):
            keys[group] = value
        else:
            objects[group] = _fitting(group, value)
    return keys, objects


METHODS = {"task": "play", "pool": "open", "model": "resolve", "optimizer": "ask",
           "engine": "check", "executor": "map"}  # fmt: skip
"""What an object of each group can do, at least."""


def _fitting(group: str, value: Any) -> Any:
    if group == "task" and callable(value) and not hasattr(value, "play"):
        raise UserError(NO_ITEMS)
    if not hasattr(value, METHODS[group]) or isinstance(value, type):
        allowed = f"the name of an option of conf/{group}, or an object of that kind"
        if group == "pool":
            allowed = "a folder of adapters, a list of adapters' folders, or a pool"
        raise UserError(f"{group}={value!r:.80}: must be {allowed}")
    return value


def _pool(value: Any) -> Any:
    """A pool of adapters as keys, so that a command line has them too; another one as it is."""
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
            f"pool: {', '.join(map(str, folders))}: adapters of a pool lie in one folder; copy or "
            "link (ln -s) them into one"
        )
    return {"folder": str(homes.pop()), "experts": [one.name for one in folders]}


def built(config: dict[str, Any], objects: Mapping[str, Any]) -> Run:
    """The run of a configuration, with objects in the place of some parts.

    Args:
        config: Changed in place: it tells of the objects.

    Raises:
        UserError: A value is not allowed.
    """
    from swarm.search import ENTRY_KEYS

    config |= {group: described(thing) for group, thing in objects.items()}
    parts = {
        key: objects[key] if key in objects else made(value)
        for key, value in config.items()
        if key not in (*ENTRY_KEYS, "_target_")
    }
    run = Run(**parts)
    if not isinstance(run.executor, Inline):
        _travels(objects)
    return run


def _travels(objects: Mapping[str, Any]) -> None:
    for group in ("task", "pool", "engine"):
        try:
            pickle.dumps(objects.get(group))
        except Exception as error:
            raise UserError(
                f"{group}: it cannot be sent to worker processes ({error}); define what it is made "
                "of in a module of its own, or search with one device"
            ) from None


def free_name(folder: str | Path, name: str) -> str:
    """The name, with a number where a search of the same second has it already."""
    later = (f"{name}-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], later) if not (Path(folder) / one).exists())


def _called(task: Any) -> str:
    return task if isinstance(task, str) else str(getattr(task, "name", "search"))


@contextmanager
def own_log() -> Iterator[None]:
    """Leave the package's log as it was: what comes later is no part of a search's log.txt."""
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
