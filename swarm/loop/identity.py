"""The identity of a search: what has to be equal on resume, settings, data and weights."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from swarm._util.files import path_fault, short_digest
from swarm._util.secrets import identity_values
from swarm._version import __version__
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.pool.pool import ExpertPool, Pool
from swarm.tasks.base import Task


def check_run_path(name: object, folder: object) -> None:
    """Check the location of a run: `folder`/`name`.

    Raises:
        UserError: Either is not allowed; the message names the allowed values.
    """
    for key, value, what in (("folder", folder, "the folder of the runs"),
                             ("name", name, f"the name of a folder below {folder}/")):  # fmt: skip
        fault = path_fault(value) if isinstance(value, str) else "is no text"
        if key == "name" and not fault and ("/" in str(value) or value in (".", "..")):
            fault = "is a path"
        if fault:
            raise UserError(f"{key}={value!r:.80}: must be {what}; it {fault}")


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
        **_common_identity(config, seed, task, model),
        "experts": ", ".join(pool.names),
        "pool weights": pool.fingerprint(),
    }


def selection_identity(
    config: Mapping[str, Any], seed: int, task: Task, model: BaseModel, pool: Pool
) -> dict[str, Any]:
    """Return what a selection among the experts of an open pool depends on; reads no weights."""
    found = _common_identity(config, seed, task, model)
    return identity_values({**found, "experts to choose from": pool.describe_files()})


def _common_identity(
    config: Mapping[str, Any], seed: int, task: Task, model: BaseModel
) -> dict[str, Any]:
    return {
        **identity_settings(config),
        "seed": seed,
        "task items": digest_items(task, "dev"),
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
    return identity_values(found)


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
