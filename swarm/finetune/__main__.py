"""Train a new LoRA, or an expert further: python -m swarm.finetune task=nlgraph_mini."""

import hydra
from omegaconf import DictConfig

from swarm._util.cli import instantiate_config, one_line_errors, run_hydra_entry
from swarm._util.files import conf_folder


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="finetune")
def main(cfg: DictConfig) -> float:
    """Build the configured fine-tuning and run it; return the dev utility."""
    with one_line_errors():
        name = str(cfg.name)  # may contain a reference that does not exist
    with one_line_errors(name):
        tuning, config = instantiate_config(cfg)
        return tuning.tune(config).dev.utility


if __name__ == "__main__":
    run_hydra_entry(main)
