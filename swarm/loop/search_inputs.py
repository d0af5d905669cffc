"""Inputs of a search: their checks, before anything is written, and its identity.

The identity is what must be equal on resume: settings, data and weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from swarm._util.files import name_fault, path_fault, short_digest
from swarm._util.secrets import identity_values
from swarm._version import __version__
from swarm.engine.base import Engine, ExpertPool
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.loop.evaluator import Budget
from swarm.optimizers.base import Optimizer, SearchResources
from swarm.optimizers.gradient import MIN_ROUTE_ITEMS
from swarm.optimizers.swarm import NORM_LIMIT, MemeticSwarm
from swarm.pool.pool import Pool
from swarm.tasks.base import (
    Task,
    first_prompts,
)
from swarm.tasks.metrics import group_items_by_domain

BASELINE_LABELS = {
    "base": "base model",
    "soup": "uniform soup",
    "recipe": "best recipe",
    "experts": "best expert of each domain",
    "routes": "best expert of each kind of prompt",
}
"""Baselines for the best position on test: option name -> label in tables.

"recipe" is the best on dev of the static recipes (`swarm.optimizers.static_merges`); "experts"
scores each domain's items with the expert that is best in it on dev, as a router that knows the
domain would. "routes" does so with the kinds of prompts that the pool's router knows, for which
nothing is searched.
"""


def check_run_path(name: object, folder: object) -> None:
    """Check the location of a run: `folder`/`name`.

    Raises:
        UserError: Either is not allowed; the message names the allowed values.
    """
    if not isinstance(folder, str):
        raise UserError(f"folder={folder!r}: must be the folder of the runs")
    if fault := path_fault(folder):
        raise UserError(f"folder={folder[:80]!r} {fault}; must be the folder of the runs")
    if not isinstance(name, str) or name in (".", "..") or "/" in name:
        raise UserError(f"name={name!r}: must be the name of a folder below {folder}/")
    if fault := name_fault(name):
        raise UserError(f"name={name[:80]!r} {fault}; must be the name of a folder in {folder}/")


def check_run_settings(
    name: str,
    folder: str,
    seed: int,
    counts: dict[str, int],
    confirm: float,
    switches: dict[str, bool],
) -> None:
    """Check the plain settings of a run, those that are not objects.

    Args:
        counts: Settings that must be non-negative integers, by key.
        switches: Settings that must be booleans, by key.

    Raises:
        UserError: A value is not allowed; the message names the allowed ones.
    """
    check_run_path(name, folder)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"seed={seed!r}: must be an integer, 0 or more")
    for word, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{word}={value!r}: must be true or false")
    if type(confirm) not in (int, float) or not 0 <= confirm < 1:
        raise UserError(f"confirm={confirm!r}: must be a fraction of dev, 0 or more and below 1")
    for word, count in counts.items():
        if type(count) is not int or count < 0:
            raise UserError(f"{word}={count!r}: must be an integer, 0 or more")


def start_optimizer(
    optimizer: Optimizer,
    task: Task,
    pool: ExpertPool,
    model: BaseModel,
    engine: Engine,
    budget: Budget,
    searched: Sequence[int],
    seed: int,
) -> tuple[Optimizer, str | None, list[str], np.ndarray | None]:
    """Divide and open the pool, and start the optimizer with what the task offers.

    Args:
        searched: Indices of the dev items that the search sees.

    Returns:
        The started optimizer, which a choosing one has chosen; why it cannot have gradients, if it
            cannot; lines to print about it; and the route of each searched item, `None` without
            routes.

    Raises:
        UserError: An input is invalid, or the inputs do not go together.
    """
    missing = gradients_unavailable_reason(task, engine, pool)
    black_box, items = task.black_box, len(searched)
    resources = SearchResources(
        gradients=missing is None,
        positions=budget.prompts // items if budget.prompts else None,
        black_box=black_box,
        norms=pool.update_norms if isinstance(pool, Pool) else None,
    )
    optimizer.set_resources(resources)
    item_routes = None
    if isinstance(pool, Pool):
        item_routes = route_pool(pool, optimizer, task, engine, searched)
        resources = replace(resources, routes=len(pool.router.names) if pool.router else 1)
        optimizer.set_resources(resources)
        # A black box has few coefficients: its utilities have to rank the positions.
        fine = missing is None and not black_box and optimizer.needs_gradients is not None
        few = resources.routes > 1 and items < MIN_ROUTE_ITEMS * resources.routes
        pool.divide(fine and not few)
    pool.open(model)
    experts = len(pool.names)
    budget.check_experts_fit(experts, items)
    optimizer = optimizer.choose(experts * len(pool.groups))
    optimizer.start(experts, seed, len(pool.groups))
    if missing is not None and optimizer.needs_gradients:
        raise UserError(f"optimizer: {missing}; use optimizer=pso, cmaes or nes")
    notes = optimizer_notes(optimizer, missing, black_box)
    if damped := optimizer.damped_experts:
        notes.append(
            f"the updates of {', '.join(pool.names[k] for k in damped)} are more than "
            f"{NORM_LIMIT:.0f} times as large as the pool's median: they count less in soups and "
            "move less (python -m swarm.pool check; pool.experts leaves experts out)"
        )
    if resources.routes > 1 and isinstance(optimizer, MemeticSwarm) and optimizer.composed is None:
        notes.append(
            "no particle is composed of the best for each kind of prompt: optimizer.particles is "
            "below one for each expert, soup and start and one more; null is enough"
        )
    if isinstance(pool, Pool) and pool.router:
        kinds = ", ".join(pool.router.names)
        notes.append(
            f"separate coefficients for at most {len(pool.router.names)} kinds of prompts, by "
            f"their words: {kinds} (pool.routes=1 searches one adapter for all)"
        )
    return optimizer, missing, notes, item_routes


def route_pool(
    pool: Pool, optimizer: Optimizer, task: Task, engine: Engine, searched: Sequence[int]
) -> np.ndarray | None:
    """Fit the pool's router to the prompts of the searched dev items, if it is to have one.

    Returns:
        The route of each searched item; `None` for a single route.

    Raises:
        UserError: pool.routes asks for several, and the task or the engine cannot have them.
    """
    composes = optimizer.composes_routes and pool.space == "delta"
    if not composes and not pool.routed:
        pool.route([], False)
        return None
    dev = task.items("dev")
    prompts = first_prompts(task, [dev[index] for index in searched])
    reason = None
    if task.rounds > 1 or any(len(mine) > 1 for mine in prompts):
        reason = f"task {task.name} sends several prompts about an item"
    elif not engine.routes:
        reason = "the engine does not route prompts; use engine=hf or vllm"
    if reason and pool.routed:
        raise UserError(f"pool.routes: {reason}, or pool.routes=1")
    texts = ["\n".join(mine) for mine in prompts]
    pool.route(texts, reason is None)
    return pool.router.assign(texts) if pool.router else None


RESOLVED_KEYS = ("groups", "routes")
"""Keys of pool that a search resolves from "auto"."""


def resolve_groups(config: Mapping[str, Any], pool: ExpertPool) -> Mapping[str, Any]:
    """Return the configuration with `auto` of pool.groups and pool.routes resolved."""
    if isinstance(pool, Pool) and "pool" in config:
        values = pool.division, pool.resolved_routes
        resolved = dict(zip(RESOLVED_KEYS, values, strict=True))
        return {**config, "pool": {**config["pool"], **resolved}}
    return config


def gradients_unavailable_reason(task: Task, engine: Engine, pool: ExpertPool) -> str | None:
    """Return the reason why gradients of the gold answers' loss are unavailable, or `None`."""
    if (wrong := task.gold_error) is not None:
        return wrong
    if not engine.differentiable:
        return "gradients need engine=hf and a pool of adapters"
    return None


def optimizer_notes(optimizer: Optimizer, missing: str | None, black_box: bool) -> list[str]:
    """Return the lines to print about the optimizer before a search."""
    uses = optimizer.needs_gradients is not None
    if optimizer.reason:
        unused = black_box and missing is None and not uses
        texts = "; only optimizer=pso and gradient use the reference texts" * unused
        return [f"optimizer=auto chooses {optimizer.reason}{texts}"]
    if missing and optimizer.needs_gradients is False:
        return [f"the swarm moves without its gradient term: {missing}"]
    if black_box and missing is None and uses:
        return ["the gradient is of the reference texts' loss; the utility decides what is kept"]
    return []


IDENTITY_KEYS = (
    "task",
    "model",
    "pool",
    "optimizer",
    "racing",
    "job",
    "budget",
    "confirm",
    "choose",
)
"""Configuration sections that identify a search; engine and devices may change on resume."""

IGNORED_SCORER_KEYS = re.compile(
    r"\.scorer\.(.*\.)?(limits|cache|prices|api_key_env|device|max_tokens)(\.|$)"
)
"""Keys of a scorer's access, cost or execution; they do not change its scores and may change."""


def search_identity(
    config: Mapping[str, Any],
    seed: int,
    task: Task,
    model: BaseModel,
    pool: ExpertPool,
) -> dict[str, Any]:
    """Return the settings with dotted keys, and digests of the data and weights they refer to.

    Args:
        config: The configuration; may be empty for runs created in Python.
        pool: An open pool.
    """
    return {
        **identity_settings(config),
        "seed": seed,
        "task items": digest_items(task, "dev"),
        "experts": ", ".join(pool.names),
        "pool weights": pool.fingerprint(),
        "base weights": model.fingerprint(),
        **task_source_digests(task),
    }


def task_source_digests(task: Task) -> dict[str, str]:
    """Return digests of further inputs of a task's scores, besides settings and items, by key."""
    return {f"task.{name}": value for name, value in task.source_digests().items()}


def engine_versions() -> dict[str, str]:
    """Return the versions of the packages that compute the answers, as they affect rounding."""
    found = {"model-swarms": __version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def shared_score_context(
    identity: Mapping[str, Any], config: Mapping[str, Any], task: Task, tested: bool
) -> dict[str, Any]:
    """Return everything the score of a position on an item depends on, independent of the search.

    Args:
        identity: Result of `search_identity`.
        config: The configuration.
        tested: Whether the test split is used.

    Raises:
        UserError: There is no configuration.
    """
    if not config:
        raise UserError("shared: needs the run's configuration, to find the answers that apply")
    ours = ("optimizer.", "racing.")
    found = {
        name: value
        for name, value in identity.items()
        if not name.startswith(ours) and name not in ("seed", "budget", "confirm", "choose")
    }
    engine = identity_values(_flatten_config({"engine": config.get("engine", {})}))
    return {**found, **engine, "test items": digest_items(task, "test") if tested else None}


def identity_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identifying settings with dotted keys; without secrets, see `identity_values`."""
    flat = _flatten_config({key: config[key] for key in IDENTITY_KEYS if key in config})
    found = {key: value for key, value in flat.items() if not IGNORED_SCORER_KEYS.search(key)}
    cleaned: dict[str, Any] = identity_values(found)
    return cleaned


def digest_items(task: Task, split: str) -> str:
    """Return 16 hexadecimal digits that change with any item of a split."""
    return short_digest([dict(item) for item in task.items(split)])


def _flatten_config(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten a configuration to dotted keys; lists are not flattened."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            found |= _flatten_config(value, here)
        else:
            found[here] = value
    return found


AUTO_BASELINES = "auto"
"""Value of `baselines` that chooses them: those that can be deployed as the result can."""


def validate_baselines(names: str | Sequence[str]) -> str | list[str]:
    """Return "auto", or the names, checked and without duplicates.

    Raises:
        UserError: `names` is neither "auto" nor a list, or contains a name that is not in
            `BASELINE_LABELS`.
    """
    if names == AUTO_BASELINES:
        return AUTO_BASELINES
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) and name in BASELINE_LABELS for name in names):
        allowed = ", ".join(BASELINE_LABELS)
        raise UserError(f"baselines={names}: must be auto or a list of {allowed}; [] for none")
    return list(dict.fromkeys(names))


def resolve_baselines(names: str | Sequence[str], task: Task, pool: ExpertPool) -> list[str]:
    """Return those of the baselines `names` that are applicable to this pool and task.

    A pool of full models has no base among its mixtures, and a single-domain task has no expert per
    domain. "auto" is base, recipe and routes: what can be deployed as the result of a search is.
    """
    items = task.items("test")
    missing = {"base"} if getattr(pool, "saves", "") != "adapter" else set()
    missing |= {"experts"} if len(group_items_by_domain(items)) < 2 else set()
    missing |= {"routes"} if getattr(pool, "router", None) is None else set()
    if names == AUTO_BASELINES:
        names = ["base", "recipe", "routes"]
    return [name for name in names if name not in missing]
