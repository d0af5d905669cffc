"""The paper's analyses of other searches: python -m swarm.study ablations search/first."""

import argparse
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from swarm._util.cli import CommandParser, one_line_errors, run_program
from swarm._util.files import conf_folder, find_path
from swarm.errors import UserError
from swarm.runs.folder import RunFolder
from swarm.studies import ablations, subprocess_runs
from swarm.studies.ablations import StudyRow

HELP_EPILOG = """Each search runs in a separate process and a folder below search/NAME_STUDY. The
same command resumes a stopped study; finished searches are read. Instead of a run folder,
the arguments of python -m swarm.search may be given."""


@dataclass(frozen=True, slots=True)
class Study:
    """A full search, and the location of its variants.

    Attributes:
        base: The configuration of the search, "full" in the tables.
        folder: Folder of the variants.
        seeds: Number of seeds per variant: the search's own and the following ones.
        locks: Descriptors of the study's locks, inherited by the searches.
    """

    base: dict[str, Any]
    folder: Path
    seeds: int
    locks: tuple[int, ...] = ()

    def run_full(self, number: int = 0) -> RunFolder:
        """Run the full search; with other seeds, in the study's folder."""
        return (
            self.run_variant("full", {}, number)
            if number
            else self._run_search(subprocess_runs.SearchProcess(self.base))
        )

    def run_variant(self, label: str, changes: Mapping[str, Any], number: int = 0) -> RunFolder:
        """Run the search with some keys changed, with one of the seeds."""
        seed = self.base["seed"] + number
        identity = {"folder": str(self.folder), "name": f"{label}_seed{seed}", "seed": seed}
        return self._run_search(
            subprocess_runs.SearchProcess(
                subprocess_runs.override_config(self.base, {**changes, **identity})
            )
        )

    def run_variant_seeds(self, label: str, changes: Mapping[str, Any]) -> list[RunFolder]:
        """Run the search with some keys changed, with every seed."""
        return [self.run_variant(label, changes, number) for number in range(self.seeds)]

    def run_full_seeds(self) -> list[RunFolder]:
        """Run the full search with every seed."""
        return [self.run_full(number) for number in range(self.seeds)]

    def _run_search(self, search: subprocess_runs.SearchProcess) -> RunFolder:
        known = search.load_verdict() is not None
        print(f"{search.path}: {'already finished' if known else 'searching'}", file=sys.stderr)
        if not known and (error := search.run(*self.locks, stdout=subprocess.DEVNULL)):
            raise UserError(f"{search.path}: {error}; rerun the same command to resume")
        return RunFolder(search.path)


def build_study(words: Sequence[str], kind: str, seeds: int) -> Study:
    """Return the study of a run folder, or of the arguments of a search.

    Raises:
        UserError: The words are neither, or this kind of study does not apply to the search.
    """
    first = Path(words[0])
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be an integer, 1 or more", 2)
    if "=" in words[0]:
        base = subprocess_runs.to_plain_config(subprocess_runs.compose_search(list(words), kind))
        folder = Path(base["folder"]) / base["name"]
        base |= {"folder": str(folder), "name": "full"}
    elif len(words) > 1:
        raise UserError(f"{words[1]}: give one run folder, or only arguments of a search", 2)
    else:
        base = subprocess_runs.load_run_config(first)
        folder = first.parent / f"{first.name}_{kind}"
    if kind == "ablations" and "particles" not in base["optimizer"]:
        raise UserError(f"{words[0]}: ablations need optimizer=pso")
    if kind != "ablations" and not {"folder", "experts"} <= set(base["pool"]):
        raise UserError(
            "pool: the experts must be sub-folders of pool.folder, to be left out or repeated"
        )
    return Study({**base, "test": True, "dry_run": False}, folder, seeds)


def run_ablations(one: Study, _: argparse.Namespace) -> list[StudyRow]:
    """The search without one of its parts at a time."""
    files = sorted((conf_folder() / "experiment").glob("ablation_*.yaml"))
    kinds = {path.stem.removeprefix("ablation_"): _load_overrides(path) for path in files}
    full = one.run_full_seeds()
    rows = [StudyRow("full", full)]
    rows += [
        StudyRow(kind, one.run_variant_seeds(kind, keys), full) for kind, keys in kinds.items()
    ]
    return rows


def _load_overrides(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
    return found


def run_diversity(one: Study, given: argparse.Namespace) -> list[StudyRow]:
    """The search over some of the experts, each repeated to make a pool of the same size."""
    full = one.run_full_seeds()
    experts = full[0].experts
    count = len(experts)
    counts = given.distinct or sorted({1, max(1, count // 5), count // 2})
    check_expert_counts("--distinct", counts, count, 1)
    rows = [StudyRow(f"all {count}", full)]
    for distinct in counts:
        runs = []
        for number in range(one.seeds):
            draw = random.Random(f"{one.base['seed'] + number}/{distinct}")
            chosen = sorted(draw.sample(experts, distinct))
            pool = _link_copies(one, chosen, count, one.folder / "pools" / f"{distinct}_{number}")
            changes: dict[str, Any] = {"pool": {"folder": str(pool), "experts": None}}
            if distinct == 1:
                # With copies of one expert all differences of positions are 0 in weights: nothing
                # can move.
                changes["optimizer"] = {"max_iterations": 1}
            changes |= _scale_overrides(one, full[0])
            runs.append(one.run_variant(f"distinct_{distinct}", changes, number))
        rows.append(StudyRow(f"{distinct} distinct", runs, full))
    return rows


def _link_copies(one: Study, chosen: Sequence[str], count: int, pool: Path) -> Path:
    """Create a folder of `count` links to some experts, as equally often as possible."""
    source = find_path(one.base["pool"]["folder"]).resolve()
    pool.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        link = pool / f"{chosen[number % len(chosen)]}.{number // len(chosen) + 1}"
        if not link.is_symlink():
            link.symlink_to(source / chosen[number % len(chosen)])
    return pool


def run_weak_to_strong(one: Study, given: argparse.Namespace) -> list[StudyRow]:
    """The search without the best experts, against the best of those left out."""
    full = one.run_full_seeds()
    start = full[0].utilities[0, : len(full[0].experts)]
    ranked = [full[0].experts[i] for i in (-start).argsort(kind="stable")]
    counts = given.without or sorted({1, len(ranked) // 2})
    check_expert_counts("--without", counts, len(ranked), 2)
    rows = [StudyRow(f"best expert, {ranked[0]}", full, start=True)]
    for count in counts:
        changes = {"pool": {"experts": sorted(ranked[count:])}} | _scale_overrides(one, full[0])
        runs = one.run_variant_seeds(f"without_{count}", changes)
        rows.append(StudyRow(f"without the best {count}", runs, full, against_start=True))
    return [*rows, StudyRow("full", full, full, against_start=True)]


def _scale_overrides(one: Study, full: RunFolder) -> dict[str, Any]:
    """Return overrides that fix a task's calibrated scale for runs with other experts.

    Raises:
        UserError: The task has no keys for its scale.
    """
    scale = full.scale
    if scale is None:
        return {}
    if not set(scale) <= set(one.base["task"]):
        raise UserError(
            f"task {one.base['task'].get('name')}: its scale is measured on the pool's experts and "
            "would differ with them; use a task of right and wrong answers, or one with keys "
            "for its scale"
        )
    return {"task": scale}


def check_expert_counts(option: str, values: Sequence[int], experts: int, rest: int) -> None:
    """Check that every number of experts leaves at least `rest` of the pool's.

    Raises:
        UserError: One does not, or none can.
    """
    high = experts - rest
    if high < 1:
        raise UserError(
            f"pool: {option} needs {rest + 1} experts or more, and this pool has {experts}", 2
        )
    for value in values:
        if not 1 <= value <= high:
            raise UserError(f"{option} {value}: must be from 1 to {high} for this pool", 2)


STUDY_KINDS = {
    "ablations": run_ablations,
    "diversity": run_diversity,
    "weak_to_strong": run_weak_to_strong,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser, with one sub-command per study."""
    made = CommandParser(prog="python -m swarm.study", description=__doc__, epilog=HELP_EPILOG)
    commands = made.add_subparsers(dest="command", required=True)
    numbers = {"diversity": "distinct", "weak_to_strong": "without"}
    for name, run in STUDY_KINDS.items():
        one = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, epilog=HELP_EPILOG
        )
        one.add_argument("base", nargs="+", metavar="search/NAME | KEY=VALUE ...")
        one.add_argument("--seeds", type=int, default=1, help="seeds per search (default: 1)")
        one.add_argument("--json", action="store_true", help="print JSON")
        if option := numbers.get(name):
            one.add_argument(
                f"--{option}", type=_parse_numbers, metavar="1,2", help="numbers of experts"
            )
    return made


def _parse_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study and print its table."""
    given = build_parser().parse_args(arguments)
    subprocess_runs.stop_as_with_ctrl_c()
    with one_line_errors(""):
        one = build_study(given.base, given.command, given.seeds)
        with subprocess_runs.lock_study_folder(one.folder) as lock:
            rows = STUDY_KINDS[given.command](replace(one, locks=(lock,)), given)
        found = ablations.compare_rows(rows)
        print(ablations.rows_to_json(found) if given.json else ablations.rows_to_markdown(found))


if __name__ == "__main__":
    run_program(main)
