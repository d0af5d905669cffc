"""Search a pool of experts for the best model of a task: python -m swarm.search task=nlgraph."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from swarm._util.cli import instantiate_config, one_line_errors, run_hydra_entry
from swarm._util.files import conf_folder
from swarm._util.secrets import clean_file
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.loop.run import Run

ENTRY_KEYS = ("gpus", "dry_run", "reward")
"""Keys that are not part of the run: shortcuts for nested keys, or used here."""


def build_run(cfg: DictConfig) -> tuple["Run", dict[str, Any]]:
    """Build the run of a composed configuration; return it with the plain configuration.

    Raises:
        UserError: A value is not allowed; Hydra wraps it.
    """
    return instantiate_config(cfg, ENTRY_KEYS)


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="search")
def main(cfg: DictConfig) -> float:
    """Build and run the configured search; returns the best utility, for a sweeper."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    with one_line_errors():
        name = str(cfg.name)  # may raise: the name may interpolate a missing key
        if "MULTIRUN" in str(job.mode):
            # Jobs of a sweep start at the same time: make their names unique.
            if "group" in cfg.get("tracker", {}) and cfg.tracker.group is None:
                cfg.tracker.group = name
            cfg.name = name = f"{name}_{job.job.num}"
    with one_line_errors(name):
        clean_hydra_files(job)
        if cfg.dry_run is not True:
            print(f"search {Path(cfg.folder) / name}: loading", flush=True)
        run, config = build_run(cfg)
        if not isinstance(config["dry_run"], bool):
            raise UserError(f"dry_run={config['dry_run']}: must be true or false", 2)
        if config["dry_run"]:
            from swarm.loop.forecast import describe_plan

            with contextlib.suppress(BrokenPipeError):  # seen again when the output is flushed
                print(describe_plan(run, config))
            return 0.0
        verdict = run.search(config, resume_arguments(job, name))
        if verdict is None:
            return 0.0
        from swarm.report.page import write_report

        print(f"report: {write_report(run.record.folder)}")
        return verdict.dev.utility


def clean_hydra_files(job: Any) -> None:
    """Clean what Hydra wrote before this job: multirun.yaml of a sweep, and output_subdir's."""
    if "MULTIRUN" in str(job.mode):
        clean_file(Path(str(job.sweep.dir)) / "multirun.yaml")
    if job.output_subdir is not None:
        for name in ("config", "hydra", "overrides"):
            clean_file(Path(str(job.runtime.output_dir)) / job.output_subdir / f"{name}.yaml")


def resume_arguments(job: Any, name: str) -> list[str] | None:
    """Return the arguments that start this search again, from Hydra's settings.

    Returns:
        `None` if the configuration is not that of this entry: a sweep's or a study's trial.
    """
    if job.job.config_name != "search":
        return None
    # Unresolved, so that environment interpolations are not replaced by their values.
    given: Any = OmegaConf.to_container(job.overrides.task)
    words = [word for word in given if not word.lstrip("+").startswith("name=")]
    folders = [
        f"--config-dir={source.path}"
        for source in job.runtime.config_sources
        if source.provider == "command-line"
    ]
    return [*folders, *words, f"name={name}"]


if __name__ == "__main__":
    run_hydra_entry(main)
