"""What a study runs: methods on tasks with budgets and seeds, read from a yaml file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from swarm._util.files import conf_folder, read_yaml
from swarm._util.jsonl import JsonlJournal
from swarm._util.settings import Positive, Settings, parse_settings
from swarm.errors import UserError, install_command

DEVICE_KEYS = ("gpus", "executor", "tracker")
"""Keys that select devices and trackers; they do not affect a result."""

DTYPE_WORD = "model.dtype="
"""Beginning of the word that results of one study may differ in: not every CPU has bfloat16."""


class StudyTask(Settings):
    """A task: its command-line words, and the number of dev items of a search."""

    words: list[str]
    dev: Positive


class StudyMethod(Settings):
    """A method.

    Attributes:
        kind: The command: swarm.search, swarm.finetune or swarm.evaluate.
        words: Command-line words of that command.
        skip: Names of tasks that the method does not support.
        varies: What the result depends on; the method runs once for all values of the others.
        budget: Of this method, instead of the study's.
        limits: "lifted" leaves the budget as the only limit of a search, "own" leaves the others as
            configured.
    """

    kind: Literal["search", "finetune", "evaluate"] = "search"
    words: list[str] = Field(default_factory=list)
    skip: list[str] = Field(default_factory=list)
    varies: list[Literal["budget", "seed"]] = Field(default=["budget", "seed"])
    budget: Positive | None = None
    limits: Literal["lifted", "own"] = "lifted"


class Sampler(Settings):
    """Further methods whose settings are drawn, the next by the dev utilities of those before.

    Attributes:
        trials: Their number.
        words: Command-line words of all of them.
        space: Values to draw from, by dotted key; drawn by Optuna's TPE sampler (arXiv 1907.10902).
    """

    trials: Positive
    space: dict[str, list[str | int | float | bool]]
    words: list[str] = Field(default_factory=list)


class StudyFile(Settings):
    """The content of a study's yaml file.

    Attributes:
        budgets: Of each method, in units of `unit`.
        unit: "positions" (budget x dev items prompt-equivalents) or "prompts".
        dev_items: Numbers of dev items to run every task with; empty uses each task's `dev`.
        seeds: Number of seeds, from 0; a seed also draws the dev items.
        words: Command-line words of all tasks and methods.
        references: Methods that all others are tested against.
        results: Folder of results.jsonl.
    """

    tasks: dict[str, StudyTask]
    methods: dict[str, StudyMethod | None] = Field(default_factory=dict)
    budgets: list[Positive]
    unit: Literal["positions", "prompts"] = "positions"
    dev_items: list[Positive] = Field(default_factory=list)
    seeds: Positive = 5
    words: list[str] = Field(default_factory=list)
    references: list[str] = Field(default_factory=list)
    sampler: Sampler | None = None
    results: str | None = None


@dataclass(frozen=True)
class Cell:
    """One method on one task; `budget` or `seed` is `None` if the result does not depend on it."""

    task: str
    dev: int
    method: str
    budget: int | None
    seed: int | None

    @property
    def name(self) -> str:
        """Name of the run folder."""
        numbers = {"dev": self.dev, "budget": self.budget, "seed": self.seed}
        parts = [f"{key}{value}" for key, value in numbers.items() if value is not None]
        return "_".join([self.method, *parts])

    @property
    def path(self) -> str:
        """Task and name."""
        return f"{self.task}/{self.name}"


@dataclass
class Study:
    """A study: what is compared, and the folders of its results.

    Attributes:
        name: Stem of the yaml file.
        results: Folder of results.jsonl, a line per cell; of two lines of a cell the last counts.
        runs: Folder of the run folders.
        methods: In the order in which they run and are shown; those of the sampler come later.
    """

    name: str
    file: StudyFile
    results: Path
    runs: Path
    words: list[str]
    seeds: int

    def __post_init__(self) -> None:
        self.methods = {name: one or StudyMethod() for name, one in self.file.methods.items()}
        self._journal = JsonlJournal(self.results / "results.jsonl", "cell")
        names, wrong = [*self.methods, *self.file.tasks], ""
        for name in names:
            if names.count(name) > 1 or not name.replace("_", "").isalnum():
                wrong = f"{name}: names of tasks and methods must differ, and be letters, digits "
                wrong += "and underscores"
        for name, one in self.methods.items():
            if unknown := set(one.skip) - set(self.file.tasks):
                wrong = f"methods.{name}.skip: no task {unknown.pop()}"
        if unknown := set(self.file.references) - set(self.methods):
            wrong = f"references: no method {unknown.pop()}"
        if not self.methods and not self.file.sampler:
            wrong = "needs methods, or a sampler"
        if wrong:
            raise UserError(f"study {self.name}: {wrong}")
        self.sample_methods()

    def sample_methods(self) -> bool:
        """Add the next method of the sampler once those before have results; `False` at its end.

        Optuna is asked and told the same again at every start, so that nothing else is stored.
        """
        sampler = self.file.sampler
        if sampler is None:
            return False
        try:
            import optuna
        except ModuleNotFoundError:
            raise UserError(f"sampler: needs optuna: {install_command('bayes')}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space: dict[str, optuna.distributions.BaseDistribution] = {
            key: optuna.distributions.CategoricalDistribution(values)
            for key, values in sampler.space.items()
        }
        tpe = optuna.samplers.TPESampler(seed=0)
        drawing = optuna.create_study(direction="maximize", sampler=tpe)
        for number in range(sampler.trials):
            trial = drawing.ask(space)
            drawn = [f"{key}={value}" for key, value in trial.params.items()]
            name = f"trial_{number:02d}"
            is_new = name not in self.methods
            self.methods[name] = StudyMethod(words=[*sampler.words, *drawn])
            found = [self.result(cell) for cell in self.cells() if cell.method == name]
            if not all(found):
                return is_new
            drawing.tell(trial, fmean(one["dev"] for one in found if one))
        return False

    def cells(self) -> list[Cell]:
        """List all cells by seed, task, dev items, budget and method: a prefix is balanced."""
        found = [
            Cell(
                task,
                dev,
                name,
                budget if "budget" in one.varies else None,
                seed if "seed" in one.varies else None,
            )
            for seed in range(self.seeds)
            for task, about in self.file.tasks.items()
            for dev in self.file.dev_items or (about.dev,)
            for budget in self.file.budgets
            for name, one in self.methods.items()
            if task not in one.skip
        ]
        return list(dict.fromkeys(found))

    def select(self, only: Sequence[object]) -> list[Cell]:
        """Return the cells selected by names of tasks and methods, budgets, and seeds as "seed0".

        Words of one kind are alternatives; the kinds are combined by "and". No words select all.

        Raises:
            UserError: A word matches nothing of the study.
        """
        words = {str(word) for word in only}
        tasks, methods = {*self.file.tasks}, {*self.methods}
        budgets = {str(budget) for budget in self.file.budgets}
        seeds = {f"seed{seed}" for seed in range(self.seeds)}
        if unknown := sorted(words - tasks - methods - budgets - seeds):
            names = ", ".join([*self.file.tasks, *self.methods])
            raise UserError(f"only={unknown[0]}: not in the study; allowed: {names}, seed0, ...")

        def is_selected(cell: Cell) -> bool:
            # A cell that depends on no budget or seed is that of any.
            mine = (
                (cell.task, tasks),
                (cell.method, methods),
                (cell.budget and str(cell.budget), budgets),
                (None if cell.seed is None else f"seed{cell.seed}", seeds),
            )
            return all(value is None or value in words for value, kind in mine if words & kind)

        return [cell for cell in self.cells() if is_selected(cell)]

    def prompt_budget(self, cell: Cell) -> int:
        """Return a cell's budget in prompt-equivalents; 0 if the result does not depend on one."""
        budget = (self.methods[cell.method].budget or cell.budget) if cell.budget else 0
        return budget * (cell.dev if self.file.unit == "positions" else 1)

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Return a cell's result; `None` if there is none."""
        return self._journal.rows.get(cell.path)

    def add_result(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Append a cell's result to results.jsonl.

        Raises:
            UserError: The file cannot be written.
        """
        self._journal.append_rows([{"cell": cell.path, **result}])

    def common_words(self, cell: Cell) -> list[str]:
        """Return a cell's command-line words without those of its method."""
        drawn = [f"++task.dev_limit={cell.dev}"]
        drawn += [] if cell.seed is None else [f"++task.dev_seed={cell.seed}"]
        return [*self.words, *self.file.tasks[cell.task].words, *drawn]

    def defining_words(self, cell: Cell) -> list[str]:
        """Return the words that define a cell's result, without devices."""
        words = [*self.common_words(cell), *self.methods[cell.method].words]
        return [word for word in words if key_head(word) not in DEVICE_KEYS]

    def missing(self, some: Sequence[Cell]) -> list[Cell]:
        """Return the cells without a result.

        Raises:
            UserError: A result was made with other settings than the study's present ones.
        """

        def settings(words: Sequence[str]) -> list[str]:
            return [word for word in words if not word.startswith(DTYPE_WORD)]

        other = [
            cell.path
            for cell in some
            if (result := self.result(cell))
            and settings(result["words"]) != settings(self.defining_words(cell))
        ]
        if other:
            raise UserError(
                f"{self._journal.path}: {other[0]} and {len(other) - 1} more have other settings "
                "than the study; remove their lines to run them again, or set another folder by "
                "results="
            )
        return [cell for cell in some if self.result(cell) is None]


def read_study(
    name: str,
    seeds: int | None = None,
    results: str | None = None,
    folder: str = "search",
    words: Sequence[str] = (),
) -> Study:
    """Read the study conf/study/NAME.yaml, or a yaml file given by its path.

    Args:
        seeds: Number of seeds; overrides the file's.
        results: Folder of results.jsonl; overrides the file's, else FOLDER/study_NAME/results.
        folder: Parent of the folder of run folders.
        words: Further command-line words of all tasks and methods.

    Raises:
        UserError: The study does not exist, or a value is not allowed.
    """
    path = Path(name) if name.endswith(".yaml") else conf_folder() / "study" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (conf_folder() / "study").glob("*.yaml")))
        raise UserError(f"{name}: no such study; allowed: {known}, or a yaml file")
    file = parse_settings(StudyFile, read_yaml(path, "study"), f"study {path.stem}")
    runs = Path(folder) / f"study_{path.stem}"
    place = Path(results or file.results or runs / "results")
    return Study(path.stem, file, place, runs, [*file.words, *words], seeds or file.seeds)


def key_head(word: str) -> str:
    """Return the first component of the key that a word sets."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


def read_dtype(words: Sequence[str]) -> str:
    """Return the type of the weights that the last of the words sets."""
    named = [word.removeprefix(DTYPE_WORD) for word in words if word.startswith(DTYPE_WORD)]
    return named[-1] if named else "auto"


def load_results(study: Study) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield the cells that have a result, with it."""
    for cell in study.cells():
        if result := study.result(cell):
            yield cell, result
