"""Makes the results of a suite: each cell is one or more processes, several of them at a time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from swarm._version import __version__
from swarm.certainty import constant_answers, is_mean
from swarm.errors import UserError
from swarm.evaluation import as_scores, divided
from swarm.files import read_packed, write_json, write_whole
from swarm.identity import items_digest
from swarm.places import PACKAGE, conf_folder
from swarm.report.folder import RunFolder
from swarm.studies import rerun
from swarm.studies.suite import Cell, Suite, cell_words, cells, head, result_path
from swarm.tasks import plain
from swarm.words import sentence

EVALUATED = ("task", "model", "pool")
"""Keys of a search that an evaluation has, too."""

TUNED = ("task", "model", "pool", "engine", "executor", "job", "gpus")
"""Keys of a search that a fine-tuning has, too."""

BACKWARD = 3
"""What an example with its derivative, forward and backward, is in prompt-equivalents."""

SPENT = "spent.json"
"""In a cell's folder: the seconds, and those of a core, that its processes took, in all starts."""

SECONDS_TO_LEAVE = 60.0
"""How long a process may take to end after it was interrupted."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        code: Its exit code.
        last: The last line of its errors.
        seconds: What it took.
        cpu: Seconds of a core that it used.
    """

    code: int
    last: str
    seconds: float
    cpu: float

    @property
    def wrong(self) -> str | None:
        """What went wrong, in a line; `None` for nothing."""
        if self.code and not self.last.startswith("error: "):
            return f"ended with exit code {self.code} ({self.last})"
        return self.last.removeprefix("error: ") if self.code else None


Steps = Generator[list[str], Ended, dict[str, Any]]
"""A cell being run: yields command lines, is sent how they ended, returns the result."""


class Failed(Exception):
    """A process of a cell failed; the message says why."""


class Workshop:
    """Makes results of cells; it runs nothing itself but yields the command lines.

    Args:
        suite: The suite.
        keep: Whether run folders stay once a result is written.
    """

    def __init__(self, suite: Suite, keep: bool) -> None:
        self.suite, self.keep = suite, keep

    def steps(self, cell: Cell) -> Steps:
        """Everything that a cell needs, and the result.

        Raises:
            UserError: An input is wrong.
            Failed: A process failed.
        """
        kind = {"search": self._search, "finetune": self._tune, "evaluate": self._evaluate}
        task = self._task(cell)
        found = yield from kind[cell.method.kind](cell, task)
        return {
            "suite": self.suite.name,
            "task": cell.task.name,
            "method": cell.method.name,
            "kind": cell.method.kind,
            "dev_items": cell.dev,
            "budget": cell.budget,
            "unit": self.suite.unit,
            "seed": cell.seed,
            "words": cell_words(self.suite, cell),
            **found,
            "constant": best_constant(task),
            "dev_digest": items_digest(task, "dev"),
            "test_digest": items_digest(task, "test"),
            "experts_digest": self._pool(cell).fingerprint(),
            **_provenance(),
        }

    def check(self, some: Sequence[Cell]) -> None:
        """Compose each task and each method once, and read the data of each task.

        Raises:
            UserError: An input is wrong; Hydra raises errors of its own.
        """
        seen: set[str] = set()
        for cell in some:
            if not {cell.task.name, cell.method.name} <= seen:
                seen |= {cell.task.name, cell.method.name}
                self._task(cell)
                if cell.method.kind != "search":
                    words = self._words(
                        cell, TUNED if cell.method.kind == "finetune" else EVALUATED
                    )
                    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                        compose(cell.method.kind, [*words, *cell.method.words])

    def folder(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.suite.runs / cell.task.name / cell.name

    def shared(self, cell: Cell) -> Path:
        """The answers that the searches of a task, its dev items and a seed share."""
        return self.suite.runs / "answers" / f"{cell.task.name}_dev{cell.dev}_seed{cell.seed}"

    def clean(self) -> None:
        """Remove run folders of cells with a result, and shared answers that none will read."""
        if self.keep:
            return
        every = cells(self.suite)
        done = [cell for cell in every if result_path(self.suite, cell).is_file()]
        read = {self.shared(cell) for cell in set(every) - set(done)}
        unread = {self.shared(cell) for cell in done} - read
        starts = {self._start_folder(cell) for cell in done}
        for folder in {self.folder(cell) for cell in done} | starts | unread:
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def _words(self, cell: Cell, allowed: Sequence[str] = ()) -> list[str]:
        """The words of a cell without its method's, devices too; only those with allowed keys."""
        drawn = [word for word in cell_words(self.suite, cell) if word.startswith("++task.dev_")]
        common = [*self.suite.words, *cell.task.words, *drawn]
        return [word for word in common if not allowed or head(word) in allowed]

    def _task(self, cell: Cell) -> Any:
        """The task of a cell; it must have enough dev items, and the mean as its utility."""
        words = self._words(cell)
        words += cell.method.words if cell.method.kind == "search" else ()
        task = plain(instantiate(self._composed(words)["task"], _convert_="all"))
        count = len(task.items("dev"))
        if count != cell.dev:
            raise UserError(
                f"suite {self.suite.name}: task {cell.task.name} has {count} dev items, of which "
                f"{cell.dev} are asked for; lower its dev"
            )
        return task

    def _composed(self, words: Sequence[str]) -> dict[str, Any]:
        return rerun.plain(rerun.composed(list(words), "suite"))

    def _pool(self, cell: Cell) -> Any:
        """The open pool without what a method adds to it."""
        config = self._composed(self._words(cell))
        return instantiate(config["pool"], _convert_="all").open(config["model"]["name"])

    def _budget(self, cell: Cell) -> int:
        """The budget in prompt-equivalents."""
        assert cell.budget is not None
        return cell.budget * (cell.dev if self.suite.unit == "positions" else 1)

    def _searches(
        self, cell: Cell, words: Sequence[str], folder: Path, budget: int
    ) -> rerun.Search:
        whole = rerun.composed([*words, f"seed={cell.seed or 0}"], "suite")
        if cell.method.limits == "lifted":
            rerun.lift(whole, words, max(1, budget // cell.dev))
        config = rerun.plain(whole) | {
            "folder": str(folder.parent),
            "name": folder.name,
            "budget": budget,
            "shared": str(self.shared(cell)),
        }
        return rerun.Search(config)

    def _run(self, search: rerun.Search) -> Generator[list[str], Ended, RunFolder]:
        """Run a search, or go on with it, unless it has ended."""
        if search.metrics() is None:
            with TemporaryDirectory() as folder:
                ended = yield search.command(Path(folder))
            _book(search.path, ended)
        return RunFolder(search.path)

    def _search(self, cell: Cell, task: Any) -> Steps:
        words = [*self._words(cell), *cell.method.words, "test=true"]
        run = yield from self._run(
            self._searches(cell, words, self.folder(cell), self._budget(cell))
        )
        best = run.best()
        position = run.positions[best]
        before = self._tested(run, run.best_expert(), task)
        forward = _total(run, "prompts_asked") + _total(run, "losses_asked")
        gradients = _total(run, "gradients_asked")
        label = run.label(best)
        told = sentence(run.experts, position.tolist(), run.groups)
        return {
            "start": {
                "expert": run.experts[run.best_expert()[1]],
                "dev": run.metrics["starting_best_validation_utility"],
                **before,
            },
            "dev": run.metrics["ending_best_validation_utility"],
            **self._tested(run, best, task),
            "found": f"{label}: {told}" if label else told,
            "experts": run.experts,
            "groups": run.groups,
            "coefficients": [round(float(c), 4) for c in position],
            "prompts": forward,
            "gradients": gradients,
            "prompt_equivalents": forward + BACKWARD * gradients,
            "prompts_shared": _total(run, "prompts_shared"),
            **_spent(run.path),
            "finished": run.finished,
            "base_digest": run.identity["base weights"],
        }

    def _tested(self, run: RunFolder, place: tuple[int, int], task: Any) -> dict[str, Any]:
        rows = run.test_answers(place)
        if rows is None:
            raise UserError(f"{run.path}: it was not tested; a suite needs test=true")
        return tested(task, rows)

    def _start_folder(self, cell: Cell) -> Path:
        folder = self.folder(cell)
        return folder.with_name(f"{folder.name}_start")

    def _tune(self, cell: Cell, task: Any) -> Steps:
        """Choose the best expert on the dev items, and train it with what is left of the budget."""
        base = self._words(cell, TUNED)
        count, budget = len(self._pool(cell).names), self._budget(cell)
        if budget <= count * cell.dev:
            raise UserError(
                f"budget={cell.budget}: {cell.method.name} needs more than the "
                f"{count} positions of the experts"
            )
        experts = [
            "optimizer=random",
            f"optimizer.particles={count}",
            "ensemble=0",
            "test=false",
            "noise_floor=false",
        ]
        start = self._start_folder(cell)
        run = yield from self._run(self._searches(cell, [*base, *experts], start, count * cell.dev))
        folder = self.folder(cell)
        words = [
            *base,
            *cell.method.words,
            f"name={folder.name}",
            f"folder={folder.parent}",
            f"run={start}",
            f"seed={cell.seed or 0}",
            "test=true",
        ]
        words.append(f"steps={_steps(words, budget - count * cell.dev, task)}")
        if not _finished(folder):
            ended = yield [sys.executable, "-m", "swarm.finetune", *words]
            _book(folder, ended)
        metrics = json.loads((folder / "tuning.json").read_text())["metrics"]
        rows = read_packed(folder / "answers.json.gz")
        seen, looked = metrics["examples_seen"], metrics["examples_looked_at"]
        return {
            "start": {
                "expert": metrics["starting_best_expert"],
                "dev": metrics["starting_best_validation_utility"],
                **tested(task, rows["test"][0]),
            },
            "dev": metrics["ending_best_validation_utility"],
            **tested(task, rows["test"][1]),
            "found": f"step {metrics['step']} of {metrics['steps']}",
            "prompts": count * cell.dev + looked,
            "gradients": seen,
            "prompt_equivalents": count * cell.dev + looked + BACKWARD * seen,
            "prompts_shared": _total(run, "prompts_shared"),
            **_spent(folder, start),
            "finished": f"{metrics['steps']} steps",
            "base_digest": run.identity["base weights"],
        }

    def _evaluate(self, cell: Cell, task: Any) -> Steps:
        folder = self.folder(cell)
        if not (folder / "result.json").is_file():
            words = [*self._words(cell, EVALUATED), *cell.method.words, "split=test"]
            words.append(f"out={folder}")
            ended = yield [sys.executable, "-m", "swarm.evaluate", *words]
            _book(folder, ended)
        result = json.loads((folder / "result.json").read_text())
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        return {
            "start": None,
            "dev": None,
            **tested(task, rows),
            "found": "",
            "prompts": 0,
            "gradients": 0,
            "prompt_equivalents": 0,
            "prompts_shared": 0,
            "prompts_an_answer": round(result["prompts"] / len(rows), 3),
            **_spent(folder),
            "finished": "asked once",
            "base_digest": None,
        }


def _total(run: RunFolder, name: str) -> int:
    """A count of a search's rounds, over all of them."""
    return int(sum(entry.get(name, 0) for entry in run.rounds))


def tested(task: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The test utility of some answers, and every item's value, compactly.

    Returns:
        "test", and "values": one character an item where all are 0 or 1, else rounded numbers.

    Raises:
        UserError: The utility is no mean of the items' values.
    """
    scores = as_scores([dict(row) for row in rows])
    if not is_mean(task, scores):
        raise UserError(f"task={task.name}: a suite needs a task whose utility is its items' mean")
    values = [score.value for score in scores]
    binary = set(values) <= {0.0, 1.0}
    return {
        "test": round(float(np.mean(values)), 6),
        "values": "".join(str(int(v)) for v in values) if binary else [round(v, 5) for v in values],
    }


def best_constant(task: Any) -> dict[str, Any] | None:
    """What is reached on test without reading a question, by the answers best on the dev items.

    Returns:
        "answer", "test" (that answer to all items) and "by_domain" (one answer to each domain);
        `None` where answers are not graded.
    """
    constants = constant_answers(task, task.items("dev"))
    if constants is None:
        return None
    items = task.items("test")
    return {"answer": constants.overall} | {
        name: round(task.utility(constants.scores(task, items, each)), 6)
        for name, each in (("test", False), ("by_domain", True))
    }


def _steps(words: Sequence[str], budget: int, task: Any) -> int:
    """The optimizer steps of a fine-tuning that fit a budget of prompt-equivalents.

    A step is `batch` examples of `BACKWARD` each; every look at the held-out
    examples, of which there is one at the start and one each `every` steps, is one each.
    """
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config: Any = OmegaConf.create(
            {
                k: v
                for k, v in compose("finetune", list(words)).items()
                if k in ("batch", "every", "holdout")
            }
        )
    held = len(divided(task.items("dev"), config.holdout, 0)[1])
    steps = 0
    while (
        BACKWARD * config.batch * (steps + 1) + held * (1 - (-(steps + 1) // config.every))
        <= budget
    ):
        steps += 1
    if not steps:
        raise UserError(f"a budget of {budget} prompt-equivalents has no room for a training step")
    return steps


def _finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tuning.json").read_text()).get("metrics"))
    except (OSError, ValueError):
        return False


def _spent(*folders: Path) -> dict[str, float]:
    """The seconds, and those of a core, that the processes of some folders took together."""
    found = {"seconds": 0.0, "cpu_seconds": 0.0}
    for path in (folder / SPENT for folder in folders):
        if path.is_file():
            for key, value in json.loads(path.read_text()).items():
                found[key] += value
    return {key: round(value, 1) for key, value in found.items()}


def _book(folder: Path, ended: Ended) -> None:
    """Add the seconds of a process to its folder.

    Raises:
        Failed: The process failed.
    """
    if folder.is_dir():
        before = _spent(folder)
        spent = {
            "seconds": before["seconds"] + ended.seconds,
            "cpu_seconds": before["cpu_seconds"] + ended.cpu,
        }
        write_json(folder / SPENT, spent)
    if ended.wrong:
        raise Failed(ended.wrong)


@cache
def _provenance() -> dict[str, Any]:
    """What the numbers were made with."""
    versions = {"model-swarms": __version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    git = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    return {"versions": versions, "commit": git.stdout.strip() or None}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result with one line a key, so that a diff of committed results can be read."""
    lines = ",\n".join(
        f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in result.items()
    )
    write_whole(path, f"{{\n{lines}\n}}\n".encode())


@dataclass(slots=True)
class Live:
    """A cell whose process runs."""

    cell: Cell
    steps: Steps
    process: "subprocess.Popen[bytes]"
    errors: Any
    began: float = field(default_factory=time.monotonic)

    def ended(self) -> Ended | None:
        """How the process ended; `None` while it runs."""
        process, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not process:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        self.errors.close()
        took = time.monotonic() - self.began
        cpu = usage.ru_utime + usage.ru_stime
        return Ended(self.process.returncode, (lines or [""])[-1], took, cpu)


class Runner:
    """Runs cells, several processes at a time, until all are done or time is up.

    Args:
        workshop: Says what a cell runs.
        parallel: Processes at a time.
        until: `time.monotonic` after which no cell begins and those running stop; `None`: never.
        environment: Of the processes.
        locks: File descriptors that they keep open.
        say: Is given a line for each cell that begins or ends.
    """

    def __init__(
        self,
        workshop: Workshop,
        parallel: int,
        until: float | None,
        environment: Mapping[str, str],
        locks: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self.workshop, self.parallel, self.until = workshop, parallel, until
        self.environment, self.locks, self.say = environment, locks, say
        self.failed: dict[str, str] = {}
        self._live: list[Live] = []
        self._stopped: list[str] = []

    def run(self, todo: Sequence[Cell]) -> bool:
        """Run cells in their order; gives whether time was enough.

        What fails is in `failed`, by cell, and does not stop the others.
        """
        left, count = list(todo), len(todo)
        self.workshop.clean()
        try:
            while (left and not self._late()) or self._live:
                while left and len(self._live) < self.parallel and not self._late():
                    cell = left.pop(0)
                    where = f"{cell.task.name}/{cell.name} ({count - len(left)} of {count})"
                    self.say(f"{where}: begins")
                    self._advance(cell, self.workshop.steps(cell), None)
                if self._late():
                    self._interrupt()
                for live in list(self._live):
                    if ended := live.ended():
                        self._live.remove(live)
                        self._advance(live.cell, live.steps, ended)
                time.sleep(0.05)
        finally:
            self._interrupt()
        return not left and not self._stopped

    def _late(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def _advance(self, cell: Cell, steps: Steps, ended: Ended | None) -> None:
        """Run a cell on to its next process or to its result."""
        suite, name = self.workshop.suite, f"{cell.task.name}/{cell.name}"
        try:
            command = next(steps) if ended is None else steps.send(ended)
        except StopIteration as done:
            write_result(result_path(suite, cell), done.value)
            self.workshop.clean()
            self.say(f"{name}: test {done.value['test']:.3f}, {done.value['seconds']:.0f} s")
        except (Failed, UserError) as error:
            if self._late() and ended and ended.code in (130, 143, -signal.SIGINT):
                self._stopped.append(name)
            else:
                self.failed[name] = str(error)
                self.say(f"{name}: failed: {error}")
        else:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - `Live.ended` closes it
            # Secrets of a search's configuration are put into this process's environment.
            environment = {**os.environ, **self.environment}
            process = rerun.spawn(command, self.locks, subprocess.DEVNULL, errors, environment)
            self._live.append(Live(cell, steps, process, errors))

    def _interrupt(self) -> None:
        """Stop what runs as Ctrl-C does; searches keep what is done."""
        for live in self._live:
            os.kill(live.process.pid, signal.SIGINT)
        for live in self._live:
            # Its end is looked at here and kept for `Live.ended`, which reaps it.
            deadline = time.monotonic() + SECONDS_TO_LEAVE
            while not _has_ended(live.process.pid):
                if time.monotonic() > deadline:
                    os.kill(live.process.pid, signal.SIGKILL)
                time.sleep(0.05)


def _has_ended(process: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run(
    suite: Suite, todo: Sequence[Cell], parallel: int, until: float | None, keep: bool
) -> tuple[dict[str, str], bool]:
    """Run cells and write their results.

    Args:
        parallel, until: See `Runner`.
        keep: Whether run folders stay.

    Returns:
        What failed, by cell, and whether time was enough.
    """
    if not todo:
        return {}, True
    environment = dict(os.environ)
    if parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    workshop = Workshop(suite, keep)
    workshop.check(todo)
    with rerun.alone(suite.runs) as lock:
        runner = Runner(
            workshop,
            parallel,
            until,
            environment,
            [lock],
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        enough = runner.run(todo)
    return runner.failed, enough
