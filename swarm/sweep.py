"""Repeated search with random hyper-parameters: python -m swarm.sweep trials=10 task=nlgraph.

Every trial runs in a separate process, so that its GPU memory is released before the next starts.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swarm._util.cli import one_line_errors, run_hydra_entry
from swarm._util.files import conf_folder
from swarm._util.secrets import unresolved
from swarm.errors import UserError
from swarm.search import build_run
from swarm.studies import subprocess_runs
from swarm.studies import sweep as trials
from swarm.studies.sweep import Trial

SWEEP_KEYS = ("trials", "space")

HELP_TEXT = """\
Repeat a search with hyper-parameters drawn at random, and report the results.

  python -m swarm.sweep trials=10 task=nlgraph gpus=0,1,2 name=first

The default name is TASK_sweep. The same command resumes a stopped sweep. Trial 7 is the search in
search/NAME/trial_07; the table is in search/NAME/summary.md and summary.json. A key that is set is
not drawn. `python -m swarm.search --help` lists all other keys. Additional keys:
"""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep described by a command line.

    Attributes:
        folder: Folder of the trials.
        trials: All trials, in order.
        dry_run: Only print what would be done.
    """

    folder: Path
    trials: list[Trial]
    dry_run: bool


def parse_sweep(arguments: list[str]) -> Sweep:
    """Parse the sweep described by a command line, without loading models.

    Raises:
        UserError: A value is not allowed; Hydra raises its own errors.
    """
    own_words = [word for word in arguments if _override_key(word).split(".")[0] in SWEEP_KEYS]
    passed = [word for word in arguments if word not in own_words]
    search = subprocess_runs.compose_search(passed, "sweep")
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        mine: Any = OmegaConf.to_container(compose("sweep", overrides=own_words), resolve=True)
    for key, value, least in (("trials", mine["trials"], 1), ("seed", search.seed, 0)):
        if type(value) is not int or value < least:
            raise UserError(f"{key}={value}: must be an integer, {least} or more")
    fixed = {_override_key(word) for word in passed}
    space = {
        key: v for key, v in _flatten_space(mine.get("space") or {}).items() if key not in fixed
    }
    folder = Path(search.folder) / search.name
    made = [_build_trial(search, folder, space, number) for number in range(mine["trials"])]
    return Sweep(folder, made, bool(search.dry_run))


def _override_key(word: str) -> str:
    """Return the key that an argument sets: "optimizer.inertia" of "++optimizer.inertia=0.3"."""
    return word.lstrip("+~").partition("=")[0]


def _flatten_space(tree: Mapping[str, Any], path: str = "") -> dict[str, list[Any]]:
    """Return the values to draw from, by dotted key."""
    if not isinstance(tree, Mapping):
        raise UserError(f"space={tree}: must map keys of a search to lists of values")
    found: dict[str, list[Any]] = {}
    for name, values in tree.items():
        key = f"{path}{name}"
        if isinstance(values, Mapping):
            found |= _flatten_space(values, f"{key}.")
        elif isinstance(values, list) and values:
            found[key] = values
        else:
            raise UserError(f"space.{key}={values}: must be a list of at least one value")
    return found


def _build_trial(
    search: DictConfig, folder: Path, space: Mapping[str, list[Any]], number: int
) -> Trial:
    """Build a trial, which depends only on the sweep's seed and its own number."""

    def key_random(key: str) -> random.Random:
        # One generator per key, so that adding or removing a key does not change the others'
        # values.
        return random.Random(f"{search.seed}/{number}/{key}")

    drawn = {key: key_random(key).choice(values) for key, values in space.items()}
    seed = key_random("seed").randrange(2**31)
    mine = search.copy()
    changes = {**drawn, "folder": str(folder), "name": f"trial_{number:02d}", "seed": seed}
    for key, value in changes.items():
        try:
            OmegaConf.update(mine, key, value)
        except OmegaConfBaseException:
            raise UserError(
                f"space.{key}: not a key of this search; remove it with ~space.{key}"
            ) from None
    return Trial(subprocess_runs.to_plain_config(mine), drawn)


def run_sweep(sweep: Sweep) -> int:
    """Run all unfinished trials; return 1 if one failed.

    Raises:
        UserError: An input is invalid, or the folder contains another sweep; nothing has been
            written.
    """
    first = OmegaConf.create(unresolved(sweep.trials[0].config))
    build_run(first)[0].check_inputs()
    trials.check_trials(sweep.trials)
    if sweep.dry_run:
        for trial in sweep.trials:
            print(_trial_title(sweep, trial))
        print("each of them:", flush=True)
        return int(sweep.trials[0].run() is not None)
    errors: dict[Path, str] = {}
    with subprocess_runs.lock_study_folder(sweep.folder) as lock:
        for trial in sweep.trials:
            finished = trial.load_verdict() is not None
            print(
                _trial_title(sweep, trial) + (": already finished" if finished else ""), flush=True
            )
            if not finished and (error := trial.run(lock)):
                errors[trial.path] = error
            trials.check_trials(sweep.trials)
            trials.write_summary(sweep.folder, trials.summarize_trials(sweep.trials, errors))
    summary = trials.summarize_trials(sweep.trials, errors)
    print("\n".join(trials.format_summary(summary)))
    if summary["best"]:
        print(f"best adapter: {sweep.folder / summary['best'] / 'global_best'}")
    return int(bool(errors))


def _trial_title(sweep: Sweep, trial: Trial) -> str:
    values = ", ".join(f"{key}={value}" for key, value in trial.drawn.items())
    return f"{trial.path.name} (of {len(sweep.trials)}): seed={trial.config['seed']}, {values}"


def main() -> None:
    """Parse the command line, run the sweep and exit: 0, or 1 if a trial failed."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(HELP_TEXT + (conf_folder() / "sweep.yaml").read_text(), end="")
        return
    subprocess_runs.stop_as_with_ctrl_c()
    sweep = parse_sweep(arguments)
    with one_line_errors(sweep.folder.name):
        sys.exit(run_sweep(sweep))


if __name__ == "__main__":
    run_hydra_entry(main)
