"""Suites: studies over methods, tasks, budgets and seeds, described by a yaml file.

A cell is one method on one task with one budget and one seed. Its result is one small JSON file
with everything that the analysis (`swarm.studies.suite_analysis`) needs. The files can be
committed, and a fresh clone runs only the cells without one. `swarm.studies.suite_runner` runs
the cells.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from swarm._util.files import conf_folder, read_yaml
from swarm._util.terminal import format_duration
from swarm.errors import UserError

METHOD_KINDS = ("search", "finetune", "evaluate")
"""Commands that a method can run: swarm.search, swarm.finetune or swarm.evaluate."""

DEVICE_KEYS = ("gpus", "executor", "tracker")
"""Keys that select devices and trackers; they do not affect a result."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """A task of a suite: its command-line words and the number of dev items of a search."""

    name: str
    words: tuple[str, ...]
    dev: int


@dataclass(frozen=True, slots=True)
class SuiteMethod:
    """A method of a suite.

    Attributes:
        name: Unique name, part of file names.
        kind: One of `METHOD_KINDS`.
        words: Command-line words of that command.
        skip: Names of tasks that the method does not support.
        varies: Which of "budget" and "seed" the result depends on; the method runs once for all
            values of the others.
        limits: "lifted" leaves the budget as the only limit of a search, "own" leaves the others as
            configured.
    """

    name: str
    kind: str = "search"
    words: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    varies: tuple[str, ...] = ("budget", "seed")
    limits: str = "lifted"


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite: the compared methods and the folders of their results.

    Attributes:
        name: Stem of the yaml file.
        tasks, methods: In the order in which they run and are shown.
        budgets: Budgets in units of `unit`.
        unit: "positions" (budget x dev items prompt-equivalents) or "prompts".
        dev_items: Numbers of dev items to run every task with; empty uses each task's `dev`.
        seeds: Number of seeds, from 0; a seed also draws the dev items.
        words: Command-line words of all tasks and methods.
        references: Methods that all others are tested against.
        page, picture: Files that the analysis writes; `None` for none.
        results: Folder of the result files.
        runs: Folder of the run folders.
    """

    name: str
    tasks: tuple[SuiteTask, ...]
    methods: tuple[SuiteMethod, ...]
    budgets: tuple[int, ...]
    unit: str
    dev_items: tuple[int, ...]
    seeds: int
    words: tuple[str, ...]
    references: tuple[str, ...]
    page: Path | None
    picture: Path | None
    results: Path
    runs: Path


@dataclass(frozen=True, slots=True)
class SuiteCell:
    """One method on one task; `budget` or `seed` is `None` if the result does not depend on it."""

    task: SuiteTask
    dev: int
    method: SuiteMethod
    budget: int | None
    seed: int | None

    @property
    def name(self) -> str:
        """Name of the run folder and stem of the result file."""
        parts = [self.method.name, f"dev{self.dev}"]
        parts += [] if self.budget is None else [f"budget{self.budget}"]
        parts += [] if self.seed is None else [f"seed{self.seed}"]
        return "_".join(parts)


def read_suite(
    name: str,
    seeds: int | None = None,
    results: str | None = None,
    runs: str = "search",
    words: Sequence[str] = (),
) -> Suite:
    """Read the suite conf/suite/NAME.yaml, or a yaml file given by its path.

    Args:
        seeds: Number of seeds; overrides the suite's.
        results: Folder of the result files, in which case page and picture are not written; `None`
            uses the suite's folder, or benchmarks/results/NAME.
        runs: Parent of the folder of run folders.
        words: Further command-line words of all tasks and methods.

    Raises:
        UserError: The suite does not exist, or a value is not allowed.
    """
    path = Path(name) if name.endswith(".yaml") else conf_folder() / "suite" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (conf_folder() / "suite").glob("*.yaml")))
        raise UserError(f"suite={name}: no such suite; allowed: {known}, or a yaml file")
    given = read_yaml(path, "suite")
    keys = {
        "tasks",
        "methods",
        "budgets",
        "unit",
        "dev_items",
        "seeds",
        "words",
        "references",
        "page",
        "picture",
        "results",
    }
    if not isinstance(given, Mapping) or not {"tasks", "methods", "budgets"} <= set(given):
        raise UserError(f"suite {path}: needs the keys tasks, methods and budgets")
    if unknown := sorted(set(given) - keys):
        raise UserError(
            f"suite {path}: unknown key {unknown[0]}; allowed: {', '.join(sorted(keys))}"
        )
    count = given.get("seeds", 5) if seeds is None else seeds
    if type(count) is not int or count < 1:
        raise UserError(f"seeds={count}: must be an integer, 1 or more")
    tasks = tuple(_parse_entry(SuiteTask, path, "tasks", n, v) for n, v in given["tasks"].items())
    methods = tuple(
        _parse_entry(SuiteMethod, path, "methods", n, v or {}) for n, v in given["methods"].items()
    )
    _check_methods(path, methods, tasks, given.get("references") or [])
    unit = given.get("unit", "positions")
    if unit not in ("positions", "prompts"):
        raise UserError(f"suite {path}: unit={unit} must be positions or prompts")
    page, picture = (None if results else given.get(key) for key in ("page", "picture"))
    return Suite(
        name=path.stem,
        tasks=tasks,
        methods=methods,
        budgets=_parse_numbers(path, "budgets", given["budgets"]),
        unit=unit,
        dev_items=_parse_numbers(path, "dev_items", given.get("dev_items") or []),
        seeds=count,
        words=(*(given.get("words") or []), *words),
        references=tuple(given.get("references") or []),
        page=Path(page) if page else None,
        picture=Path(picture) if picture else None,
        results=Path(results or given.get("results") or f"benchmarks/results/{path.stem}"),
        runs=Path(runs) / f"suite_{path.stem}",
    )


def _parse_numbers(path: Path, key: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and v > 0 for v in values):
        raise UserError(f"suite {path}: {key}={values} must be a list of positive integers")
    return tuple(values)


def _parse_entry(kind: type[Any], path: Path, group: str, name: str, given: Any) -> Any:
    """Parse a task or a method from its entry."""
    fields: list[str] = [key for key in kind.__dataclass_fields__ if key != "name"]
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - set(fields))):
        invalid = unknown[0] if isinstance(given, Mapping) else given
        raise UserError(
            f"suite {path}: {group}.{name} has {invalid!r}; allowed: {', '.join(fields)}"
        )
    if not str(name).replace("_", "").isalnum():
        raise UserError(f"suite {path}: {group}.{name} must be letters, digits and underscores")
    try:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return kind(name=str(name), **values)
    except TypeError:
        raise UserError(f"suite {path}: {group}.{name} needs all of: {', '.join(fields)}") from None


def _check_methods(
    path: Path,
    methods: Sequence[SuiteMethod],
    tasks: Sequence[SuiteTask],
    references: Sequence[str],
) -> None:
    names = [one.name for one in methods] + [one.name for one in tasks]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"suite {path}: {duplicates[0]!r} names more than one task or method")
    for one in methods:
        if one.kind not in METHOD_KINDS or one.limits not in ("lifted", "own"):
            raise UserError(
                f"suite {path}: methods.{one.name}: kind must be one of {', '.join(METHOD_KINDS)}, "
                "limits lifted or own"
            )
        if invalid := [
            *(set(one.skip) - {task.name for task in tasks}),
            *(set(one.varies) - {"budget", "seed"}),
        ]:
            raise UserError(
                f"suite {path}: methods.{one.name}: {invalid[0]!r} is not allowed there"
            )
    if missing := [name for name in references if name not in {one.name for one in methods}]:
        raise UserError(
            f"suite {path}: references has {missing[0]!r}, which is not one of its methods"
        )


def list_cells(suite: Suite) -> list[SuiteCell]:
    """List all cells by seed, task, dev items, budget and method, so that a prefix is balanced."""
    found: dict[SuiteCell, None] = {}
    for seed in range(suite.seeds):
        for task in suite.tasks:
            for dev in suite.dev_items or (task.dev,):
                for budget in suite.budgets:
                    for one in suite.methods:
                        if task.name not in one.skip:
                            cell = SuiteCell(
                                task,
                                dev,
                                one,
                                budget if "budget" in one.varies else None,
                                seed if "seed" in one.varies else None,
                            )
                            found.setdefault(cell)
    return list(found)


def select_cells(suite: Suite, only: Sequence[object]) -> list[SuiteCell]:
    """Return the cells selected by names of tasks and methods, budgets, and seeds as "seed0".

    Words of one kind are alternatives; the kinds are combined by "and". No words select all cells.

    Raises:
        UserError: A word matches nothing of the suite.
    """
    kinds: dict[str, set[str]] = {
        "task": {task.name for task in suite.tasks},
        "method": {one.name for one in suite.methods},
        "budget": {str(budget) for budget in suite.budgets},
        "seed": {f"seed{seed}" for seed in range(suite.seeds)},
    }
    words = {str(word) for word in only}
    if unknown := sorted(words - set().union(*kinds.values())):
        allowed = "; ".join(f"{kind}s {', '.join(sorted(names))}" for kind, names in kinds.items())
        raise UserError(f"only={unknown[0]}: not a task or method of the suite; allowed: {allowed}")

    def is_selected(cell: SuiteCell) -> bool:
        mine = {
            "task": cell.task.name,
            "method": cell.method.name,
            "budget": None if cell.budget is None else str(cell.budget),
            "seed": None if cell.seed is None else f"seed{cell.seed}",
        }
        return all(
            mine[kind] is None or mine[kind] in words & names
            for kind, names in kinds.items()
            if words & names
        )

    return [cell for cell in list_cells(suite) if is_selected(cell)]


def result_path(suite: Suite, cell: SuiteCell) -> Path:
    """Return the path of a cell's result file."""
    return suite.results / cell.task.name / f"{cell.name}.json"


def cell_words(suite: Suite, cell: SuiteCell) -> list[str]:
    """Return the command-line words that define a cell's result, without folders and devices."""
    drawn = [f"++task.dev_limit={cell.dev}"]
    drawn += [] if cell.seed is None else [f"++task.dev_seed={cell.seed}"]
    words = [*suite.words, *cell.task.words, *drawn, *cell.method.words]
    return [word for word in words if key_head(word) not in DEVICE_KEYS]


def key_head(word: str) -> str:
    """Return the first component of the key that a word sets."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


def find_missing(suite: Suite, some: Sequence[SuiteCell]) -> list[SuiteCell]:
    """Return the cells without a result.

    Raises:
        UserError: A result was made with other settings than the suite's present ones.
    """
    found, other = [], []
    for cell in some:
        path = result_path(suite, cell)
        if not path.is_file():
            found.append(cell)
        elif not _same_settings(json.loads(path.read_text())["words"], cell_words(suite, cell)):
            other.append(path)
    if other:
        raise UserError(
            f"{other[0]} and {len(other) - 1} more have other settings than the suite; remove "
            "them to run them again, or set another folder by results="
        )
    return found


DTYPE_WORD = "model.dtype="
"""Beginning of the word that results of one suite may differ in: not every CPU has bfloat16."""


def _same_settings(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two results have equal settings but for the type of the weights."""
    one, other = (
        [word for word in words if not word.startswith(DTYPE_WORD)] for words in (first, second)
    )
    return one == other


def read_dtype(words: Sequence[str]) -> str:
    """Return the type of the weights that the last of the words sets."""
    named = [word.removeprefix(DTYPE_WORD) for word in words if word.startswith(DTYPE_WORD)]
    return named[-1] if named else "auto"


def describe_missing_time(suite: Suite, missing: Sequence[SuiteCell]) -> list[str]:
    """Describe the CPU time of missing cells, by the stored results that are most like them.

    A cell counts as the median of the results with other seeds; if there are none, of the other
    methods on the same task with the same dev items and budget. Cells without any have no time.
    """
    seeds: dict[tuple[object, ...], list[float]] = {}
    methods: dict[tuple[object, ...], list[float]] = {}
    for cell in list_cells(suite):
        path = result_path(suite, cell)
        if path.is_file() and "cpu_seconds" in (result := json.loads(path.read_text())):
            alike = (cell.task.name, cell.dev, cell.budget)
            seeds.setdefault((*alike, cell.method.name), []).append(result["cpu_seconds"])
            methods.setdefault(alike, []).append(result["cpu_seconds"])
    times: dict[str, list[float]] = {"other seeds": [], "other methods": []}
    unknown: Counter[str] = Counter()
    for cell in missing:
        alike = (cell.task.name, cell.dev, cell.budget)
        if found := seeds.get((*alike, cell.method.name)):
            times["other seeds"].append(median(found))
        elif found := methods.get(alike):
            times["other methods"].append(median(found))
        else:
            unknown[f"{cell.task.name} budget {cell.budget}" if cell.budget else "no budget"] += 1
    lines = [
        f"about {format_duration(sum(known))} of CPU time for {len(known)} of the {len(missing)} "
        f"missing results, by the stored results of {basis}, on the machines where they were made"
        for basis, known in times.items()
        if known
    ]
    if unknown:
        listed = ", ".join(f"{name}: {number}" for name, number in unknown.items())
        lines.append(
            f"no time for {unknown.total()} of the {len(missing)} missing results ({listed}): no "
            "stored result is like them; dry_run=true of `python -m swarm.search` computes the "
            "upper bound of a search"
        )
    return lines
