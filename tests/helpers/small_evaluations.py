"""Evaluations on the tiny model, as `python -m swarm.evaluate` composes them."""

from pathlib import Path
from typing import Any

import searches
from hydra import compose, initialize_config_dir

from swarm._util.files import conf_folder
from swarm.evaluate import build_evaluation
from swarm.search import build_run as build_search


def searched(folder: Path, base: Path, pool: Path, **more: Any) -> Path:
    """The folder of a small finished search in this process."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        found = compose("search", overrides=searches.arguments(folder, base, pool, **more))
    run, config = build_search(found)
    run.search(config)
    return run.record.folder


def keys(folder: Path, base: Path, pool: Path) -> list[str]:
    """The keys of an evaluation on the data and the pool of `searched`; nothing is written."""
    given = searches.arguments(folder, base, pool)
    wanted = ("model", "pool", "task")
    return [
        *[key for key in given if key.split("=")[0].split(".")[0] in wanted],
        "device=cpu",
        "out=null",
    ]


def evaluated(arguments: list[str]) -> dict[str, Any]:
    """The result of an evaluation in this process."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        evaluation, config = build_evaluation(compose("evaluate", overrides=arguments))
    return evaluation.run(config)
