"""Evaluate any model on a task: python -m swarm.evaluate task=gsm8k candidate=expert."""

from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from swarm._util.cli import instantiate_config, one_line_errors, run_hydra_entry
from swarm._util.files import conf_folder

if TYPE_CHECKING:
    from swarm.evaluation.evaluation import Evaluation

ENTRY_KEYS = ("pool", "model", "engine", "reward")
"""Keys that are not part of the evaluation; candidates and tasks refer to them."""


def build_evaluation(cfg: DictConfig) -> tuple["Evaluation", dict[str, Any]]:
    """Build the evaluation of a composed configuration; return it with the plain configuration.

    Raises:
        UserError: A value is not allowed; Hydra wraps it.
    """
    return instantiate_config(cfg, ENTRY_KEYS)


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="evaluate")
def main(cfg: DictConfig) -> float:
    """Build and run the configured evaluation; returns the first utility, for a sweeper."""
    with one_line_errors(None):
        from swarm.evaluation.evaluation import format_result

        evaluation, config = build_evaluation(cfg)
        result = evaluation.run(config)
        print(format_result(result))
        if evaluation.out:
            print(f"answers: {evaluation.out / 'answers.jsonl'}")
        return float(result["voices"][0]["utility"])


if __name__ == "__main__":
    run_hydra_entry(main)
