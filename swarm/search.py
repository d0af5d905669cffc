"""Search a pool of experts for the best model of a task: python -m swarm.search task=nlgraph."""

from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from swarm.cli import one_line_errors, run_entry
from swarm.places import conf_folder

if TYPE_CHECKING:
    from swarm.run import Run

SHORTHANDS = ("gpus", "wandb")
"""Keys of the command line that only stand for keys deeper in the tree."""


def build(cfg: DictConfig) -> tuple["Run", dict[str, Any]]:
    """The run that a composed configuration describes, and the configuration as plain values.

    Raises:
        UserError: A value is not allowed; Hydra wraps it.
    """
    from hydra.utils import instantiate

    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    tree = {key: value for key, value in config.items() if key not in SHORTHANDS}
    return instantiate(tree, _convert_="all"), config


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="search")
def main(cfg: DictConfig) -> float:
    """Build what the configuration describes and run it; the best utility goes to a sweeper."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    if "MULTIRUN" in str(job.mode):
        # Jobs of a sweep share one clock: their names need more than the time.
        cfg.name = f"{cfg.name}_{job.job.num}"
    with one_line_errors():
        run, config = build(cfg)
        return float(run.search(config)["ending_best_validation_utility"])


if __name__ == "__main__":
    run_entry(main)
