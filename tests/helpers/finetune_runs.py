"""Real fine-tunings of the tiny model, in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import searches
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from swarm._util.files import conf_folder
from swarm.finetune.run import FinetuneRun


def words(folder: Path, base: Path, pool: Path, name: str, **more: Any) -> list[str]:
    """The command line of a small fine-tuning in `folder`; `more` are further keys."""
    task = folder / "tiny.json"
    if not task.exists():
        searches.choice_file(task)
    keys = {
        "name": name,
        "folder": folder / "search",
        "model": "local",
        "model.path": base,
        "pool.folder": pool,
        "task": "mmlu",
        "task.file": task,
        "task.scoring": "logits",
        "steps": 20,
        "every": 5,
        "rate": 0.01,
        "holdout": 0.25,
        **more,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def tune(arguments: Sequence[str]) -> dict[str, Any]:
    """What `python -m swarm.finetune` does with these arguments; gives the metrics."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("finetune", list(arguments)), resolve=True)
    assert isinstance(config, dict)
    tuning = instantiate(config, _convert_="all")
    assert isinstance(tuning, FinetuneRun)
    return tuning.tune(config)
