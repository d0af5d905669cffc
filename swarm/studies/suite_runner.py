"""Runs the cells of a suite: each needs one or more processes, several of which run in parallel."""

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

from swarm._util.files import (
    PACKAGE_FOLDER,
    conf_folder,
    read_gzip_json,
    write_atomic,
    write_json,
)
from swarm._version import __version__
from swarm.errors import UserError
from swarm.loop.context import check_context
from swarm.loop.evaluator import records_to_scores, split_dev_holdout
from swarm.loop.search_inputs import digest_items
from swarm.merging.positions import describe_position
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Verdict
from swarm.studies import subprocess_runs
from swarm.studies.suite import Suite, SuiteCell, cell_words, key_head, list_cells, result_path
from swarm.tasks.base import metric_task
from swarm.tasks.metrics import best_constant_answers, is_mean_utility

EVALUATE_KEYS = ("task", "model", "pool")
"""Configuration keys that `swarm.evaluate` shares with a search."""

FINETUNE_KEYS = ("task", "model", "pool", "engine", "executor", "job", "gpus")
"""Configuration keys that `swarm.finetune` shares with a search."""

GRADIENT_COST = 3
"""Cost of one training example, forward and backward, in prompt-equivalents."""

USAGE_FILE = "spent.json"
"""File in a cell's folder: wall and CPU seconds of its processes, summed over all starts."""

INTERRUPT_TIMEOUT_S = 60.0
"""Time in seconds that a process may take to exit after an interrupt."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Outcome of a process.

    Attributes:
        code: Exit code.
        last: Last line of stderr.
        seconds: Wall time.
        cpu: CPU time in seconds.
    """

    code: int
    last: str
    seconds: float
    cpu: float

    @property
    def failure(self) -> str | None:
        """One-line error message; `None` if the process succeeded."""
        if self.code and not self.last.startswith("error: "):
            return f"ended with exit code {self.code} ({self.last})"
        return self.last.removeprefix("error: ") if self.code else None


CellSteps = Generator[list[str], ProcessResult, dict[str, Any]]
"""A cell in progress: yields command lines, receives their results, returns the cell's result."""


class CellError(Exception):
    """A process of a cell failed; the message is the reason."""


class CellPlanner:
    """Plans cells as generators of command lines and collects their results, without running them.

    Args:
        suite: The suite.
        keep: Whether to keep run folders once the result is written.
    """

    def __init__(self, suite: Suite, keep: bool) -> None:
        self.suite, self.keep = suite, keep

    def run_cell(self, cell: SuiteCell) -> CellSteps:
        """Yield the command lines that a cell needs, and return its result.

        Raises:
            UserError: An input is invalid.
            CellError: A process failed.
        """
        kind = {
            "search": self._search_cell,
            "finetune": self._finetune_cell,
            "evaluate": self._evaluate_cell,
        }
        task = self._load_task(cell)
        self._fit_task(cell, task)
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
            "constant": score_best_constant(task),
            "dev_digest": digest_items(task, "dev"),
            "test_digest": digest_items(task, "test"),
            "experts_digest": self._open_pool(cell).fingerprint(),
            **_collect_versions(),
        }

    def check_cells(self, some: Sequence[SuiteCell]) -> None:
        """Compose each task and each method once, and read the data of each task.

        Raises:
            UserError: An input is invalid; Hydra raises its own exceptions.
        """
        seen: set[str] = set()
        for cell in some:
            if not {cell.task.name, cell.method.name} <= seen:
                seen |= {cell.task.name, cell.method.name}
                self._load_task(cell)
                if cell.method.kind != "search":
                    words = self._base_words(
                        cell, FINETUNE_KEYS if cell.method.kind == "finetune" else EVALUATE_KEYS
                    )
                    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                        compose(cell.method.kind, [*words, *cell.method.words])

    def run_folder(self, cell: SuiteCell) -> Path:
        """Return the run folder of a cell."""
        return self.suite.runs / cell.task.name / cell.name

    def shared_answers_folder(self, cell: SuiteCell) -> Path:
        """Return the folder of answers that searches with equal task, dev items and seed share."""
        return self.suite.runs / "answers" / f"{cell.task.name}_dev{cell.dev}_seed{cell.seed}"

    def remove_finished(self) -> None:
        """Remove run folders of finished cells, and shared answers that no open cell needs."""
        if self.keep:
            return
        every = list_cells(self.suite)
        finished = [cell for cell in every if result_path(self.suite, cell).is_file()]
        read = {self.shared_answers_folder(cell) for cell in set(every) - set(finished)}
        unread = {self.shared_answers_folder(cell) for cell in finished} - read
        starts = {self._start_folder(cell) for cell in finished}
        for folder in {self.run_folder(cell) for cell in finished} | starts | unread:
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def _base_words(self, cell: SuiteCell, allowed: Sequence[str] = ()) -> list[str]:
        """Return a cell's words without its method's, with devices, filtered by allowed keys."""
        drawn = [word for word in cell_words(self.suite, cell) if word.startswith("++task.dev_")]
        common = [*self.suite.words, *cell.task.words, *drawn]
        return [word for word in common if not allowed or key_head(word) in allowed]

    def _load_task(self, cell: SuiteCell) -> Any:
        """Instantiate a cell's task and check that it has enough dev items."""
        words = self._base_words(cell)
        words += cell.method.words if cell.method.kind == "search" else ()
        task = metric_task(instantiate(self._compose_config(words)["task"], _convert_="all"))
        count = len(task.items("dev"))
        if count != cell.dev:
            raise UserError(
                f"suite {self.suite.name}: task {cell.task.name} has {count} dev items, fewer "
                f"than its dev={cell.dev}; lower dev"
            )
        return task

    def _fit_task(self, cell: SuiteCell, task: Any) -> None:
        """Leave out the items that the cell's processes leave out, before they are digested."""
        config = self._compose_config(self._base_words(cell))
        base, engine = (instantiate(config[k], _convert_="all") for k in ("model", "engine"))
        check_context(task, engine.check(base, self._open_pool(cell)), engine.context)

    def _compose_config(self, words: Sequence[str]) -> dict[str, Any]:
        return subprocess_runs.to_plain_config(subprocess_runs.compose_search(list(words), "suite"))

    def _open_pool(self, cell: SuiteCell) -> Any:
        """Open the pool of experts as configured without the method."""
        config = self._compose_config(self._base_words(cell))
        return instantiate(config["pool"], _convert_="all").open(config["model"]["name"])

    def _prompt_budget(self, cell: SuiteCell) -> int:
        """Return the budget in prompt-equivalents."""
        assert cell.budget is not None
        return cell.budget * (cell.dev if self.suite.unit == "positions" else 1)

    def _build_search(
        self, cell: SuiteCell, words: Sequence[str], folder: Path, budget: int
    ) -> subprocess_runs.SearchProcess:
        search = subprocess_runs.compose_search([*words, f"seed={cell.seed or 0}"], "suite")
        if cell.method.limits == "lifted":
            subprocess_runs.lift_limits(search, words, max(1, budget // cell.dev))
        config = subprocess_runs.to_plain_config(search) | {
            "folder": str(folder.parent),
            "name": folder.name,
            "budget": budget,
            "shared": str(self.shared_answers_folder(cell)),
        }
        return subprocess_runs.SearchProcess(config)

    def _run_search(
        self, search: subprocess_runs.SearchProcess
    ) -> Generator[list[str], ProcessResult, RunFolder]:
        """Run or resume a search unless it has ended."""
        if search.load_verdict() is None:
            with TemporaryDirectory() as folder:
                ended = yield search.build_command(Path(folder))
            _record_usage(search.path, ended)
        return RunFolder(search.path)

    def _search_cell(self, cell: SuiteCell, task: Any) -> CellSteps:
        words = [*self._base_words(cell), *cell.method.words, "test=true"]
        run = yield from self._run_search(
            self._build_search(cell, words, self.run_folder(cell), self._prompt_budget(cell))
        )
        best = run.find_best()
        position = run.positions[best]
        before = self._record_test(run, run.best_expert(), task)
        forward = _sum_rounds(run, "prompts_scored") + _sum_rounds(run, "losses_computed")
        gradients = _sum_rounds(run, "gradients_computed")
        verdict = run.verdict
        assert verdict is not None and verdict.start_model.dev is not None
        dev = {"starting": verdict.start_model.dev.utility, "ending": verdict.dev.utility}
        if (kept := verdict.held_out) and kept.selected:  # the items that chose the result
            dev = {"starting": kept.expert.utility, "ending": kept.found.utility}
        label = run.position_label(best)
        description = describe_position(run.experts, position.tolist(), run.groups)
        return {
            "start": dict(expert=run.experts[run.best_expert()[1]], dev=dev["starting"], **before),
            "dev": dev["ending"],
            "dev_no_gradient": verdict.no_gradient.utility if verdict.no_gradient else None,
            **self._record_test(run, best, task),
            "found": f"{label}: {description}" if label else description,
            "experts": run.experts,
            "groups": run.groups,
            "coefficients": [round(float(c), 4) for c in position],
            "prompts": forward,
            "gradients": gradients,
            "prompt_equivalents": forward + GRADIENT_COST * gradients,
            "prompts_shared": _sum_rounds(run, "prompts_shared"),
            **_read_usage(run.path),
            "finished": run.finished,
            "base_digest": run.identity["base weights"],
        }

    def _record_test(self, run: RunFolder, index: tuple[int, int], task: Any) -> dict[str, Any]:
        rows = run.load_test_answers(index)
        if rows is None:
            raise UserError(f"{run.path}: it was not tested; a suite needs test=true")
        return build_test_record(task, rows)

    def _start_folder(self, cell: SuiteCell) -> Path:
        folder = self.run_folder(cell)
        return folder.with_name(f"{folder.name}_start")

    def _finetune_cell(self, cell: SuiteCell, task: Any) -> CellSteps:
        """Select the best expert on the dev items, and train it with the remaining budget."""
        base = self._base_words(cell, FINETUNE_KEYS)
        count, budget = len(self._open_pool(cell).names), self._prompt_budget(cell)
        if budget <= count * cell.dev:
            raise UserError(
                f"budget={cell.budget}: {cell.method.name} needs more than {count}, the "
                "positions of the experts"
            )
        experts = [
            "optimizer=random",
            f"optimizer.particles={count}",
            "ensemble=0",
            "test=false",
            "noise_floor=false",
        ]
        start = self._start_folder(cell)
        run = yield from self._run_search(
            self._build_search(cell, [*base, *experts], start, count * cell.dev)
        )
        folder = self.run_folder(cell)
        words = [
            *base,
            *cell.method.words,
            f"name={folder.name}",
            f"folder={folder.parent}",
            f"run={start}",
            f"seed={cell.seed or 0}",
            "test=true",
        ]
        words.append(f"steps={_affordable_steps(words, budget - count * cell.dev, task)}")
        if not _is_finetuned(folder):
            ended = yield [sys.executable, "-m", "swarm.finetune", *words]
            _record_usage(folder, ended)
        state = json.loads((folder / "tuning.json").read_text())
        metrics, verdict = state["tuning"], Verdict.from_dict(state["verdict"])
        assert verdict.start_model.dev is not None
        rows = read_gzip_json(folder / "answers.json.gz")
        seen, looked = metrics["examples_seen"], metrics["examples_evaluated"]
        return {
            "start": {
                "expert": verdict.expert,
                "dev": verdict.start_model.dev.utility,
                **build_test_record(task, rows["test"][0]),
            },
            "dev": verdict.dev.utility,
            **build_test_record(task, rows["test"][1]),
            "found": f"step {metrics['step']} of {metrics['steps']}",
            "prompts": count * cell.dev + looked,
            "gradients": seen,
            "prompt_equivalents": count * cell.dev + looked + GRADIENT_COST * seen,
            "prompts_shared": _sum_rounds(run, "prompts_shared"),
            **_read_usage(folder, start),
            "finished": f"{metrics['steps']} steps",
            "base_digest": run.identity["base weights"],
        }

    def _evaluate_cell(self, cell: SuiteCell, task: Any) -> CellSteps:
        folder = self.run_folder(cell)
        if not (folder / "result.json").is_file():
            words = [*self._base_words(cell, EVALUATE_KEYS), *cell.method.words, "split=test"]
            words.append(f"out={folder}")
            ended = yield [sys.executable, "-m", "swarm.evaluate", *words]
            _record_usage(folder, ended)
        result = json.loads((folder / "result.json").read_text())
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        return {
            "start": None,
            "dev": None,
            **build_test_record(task, rows),
            "found": "",
            "prompts": 0,
            "gradients": 0,
            "prompt_equivalents": 0,
            "prompts_shared": 0,
            "prompts_an_answer": round(result["prompts"] / len(rows), 3),
            **_read_usage(folder),
            "finished": "asked once",
            "base_digest": None,
        }


def _sum_rounds(run: RunFolder, name: str) -> int:
    """Sum a count over all rounds of a search."""
    return int(sum(entry.get(name, 0) for entry in run.rounds))


def build_test_record(task: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the test utility of some answers, and every item's value in compact form.

    Returns:
        "test", and "values": a string of one character per item if all are 0 or 1, else rounded
        numbers.

    Raises:
        UserError: The utility is not the mean of the items' values.
    """
    scores = records_to_scores([dict(row) for row in rows])
    if not is_mean_utility(task, scores):
        raise UserError(f"task={task.name}: a suite needs a task whose utility is its items' mean")
    values = [score.value for score in scores]
    binary = set(values) <= {0.0, 1.0}
    return {
        "test": round(float(np.mean(values)), 6),
        "values": "".join(str(int(v)) for v in values) if binary else [round(v, 5) for v in values],
    }


def score_best_constant(task: Any) -> dict[str, Any] | None:
    """Score, on test, the constant answers that are best on the dev items.

    Returns:
        "answer", "test" (that answer to all items) and "by_domain" (one answer per domain); `None`
        if answers are not graded.
    """
    constants = best_constant_answers(task, task.items("dev"))
    if constants is None:
        return None
    items = task.items("test")
    return {"answer": constants.overall} | {
        name: round(task.utility(constants.score_items(task, items, each)), 6)
        for name, each in (("test", False), ("by_domain", True))
    }


def _affordable_steps(words: Sequence[str], budget: int, task: Any) -> int:
    """Return the number of fine-tuning steps that fit a budget of prompt-equivalents.

    A step costs `GRADIENT_COST` for each of its `batch` examples. The held-out examples are
    evaluated at the start and after every `every` steps, at a cost of 1 each.
    """
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config: Any = OmegaConf.create(
            {
                k: v
                for k, v in compose("finetune", list(words)).items()
                if k in ("batch", "every", "holdout")
            }
        )
    held = len(split_dev_holdout(task.items("dev"), config.holdout, 0)[1])
    steps = 0
    while (
        GRADIENT_COST * config.batch * (steps + 1) + held * (1 - (-(steps + 1) // config.every))
        <= budget
    ):
        steps += 1
    if not steps:
        raise UserError(f"a budget of {budget} prompt-equivalents is too small for a training step")
    return steps


def _is_finetuned(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tuning.json").read_text()).get("verdict"))
    except (OSError, ValueError):
        return False


def _read_usage(*folders: Path) -> dict[str, float]:
    """Sum the recorded wall and CPU seconds over folders."""
    found = {"seconds": 0.0, "cpu_seconds": 0.0}
    for path in (folder / USAGE_FILE for folder in folders):
        if path.is_file():
            for key, value in json.loads(path.read_text()).items():
                found[key] += value
    return {key: round(value, 1) for key, value in found.items()}


def _record_usage(folder: Path, ended: ProcessResult) -> None:
    """Add the seconds of a process to its folder.

    Raises:
        CellError: The process failed.
    """
    if folder.is_dir():
        before = _read_usage(folder)
        spent = {
            "seconds": before["seconds"] + ended.seconds,
            "cpu_seconds": before["cpu_seconds"] + ended.cpu,
        }
        write_json(folder / USAGE_FILE, spent)
    if ended.failure:
        raise CellError(ended.failure)


@cache
def _collect_versions() -> dict[str, Any]:
    """Return package versions and the git commit, which are recorded with each result."""
    versions = {"model-swarms": __version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    git = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=PACKAGE_FOLDER.parent,
        capture_output=True,
        text=True,
    )
    return {"versions": versions, "commit": git.stdout.strip() or None}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result with one line per key, so that diffs of committed results are readable."""
    lines = ",\n".join(
        f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in result.items()
    )
    write_atomic(path, f"{{\n{lines}\n}}\n".encode())


@dataclass(slots=True)
class RunningCell:
    """A cell and its running process."""

    cell: SuiteCell
    steps: CellSteps
    process: "subprocess.Popen[bytes]"
    errors: Any
    began: float = field(default_factory=time.monotonic)

    def poll(self) -> ProcessResult | None:
        """Reap the process and return its result; `None` while it runs."""
        # Unlike Popen.poll, wait4 also returns the CPU time of this child.
        process, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not process:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        self.errors.close()
        took = time.monotonic() - self.began
        cpu = usage.ru_utime + usage.ru_stime
        return ProcessResult(self.process.returncode, (lines or [""])[-1], took, cpu)


class SuiteRunner:
    """Runs cells with several processes in parallel, until all are done or time is up.

    Args:
        workshop: Planner of the cells.
        parallel: Maximum number of concurrent processes.
        until: `time.monotonic` at which running cells are stopped and no more start; `None` for
            never.
        environment: Additional environment variables of the processes.
        locks: File descriptors that the processes inherit and hold open.
        say: Callback that receives a progress line when a cell begins or ends.
    """

    def __init__(
        self,
        workshop: CellPlanner,
        parallel: int,
        until: float | None,
        environment: Mapping[str, str],
        locks: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self.workshop, self.parallel, self.until = workshop, parallel, until
        self.environment, self.locks, self.say = environment, locks, say
        self.failed: dict[str, str] = {}
        self._live: list[RunningCell] = []
        self._stopped: list[str] = []

    def run(self, todo: Sequence[SuiteCell]) -> bool:
        """Run cells in order and return whether all finished in time.

        Failed cells are recorded in `failed`, by name, and do not stop the others.
        """
        remaining, count = list(todo), len(todo)
        self.workshop.remove_finished()
        try:
            while (remaining and not self._is_time_up()) or self._live:
                while remaining and len(self._live) < self.parallel and not self._is_time_up():
                    cell = remaining.pop(0)
                    where = f"{cell.task.name}/{cell.name} ({count - len(remaining)} of {count})"
                    self.say(f"{where}: begins")
                    self._advance_cell(cell, self.workshop.run_cell(cell), None)
                if self._is_time_up():
                    self._interrupt_all()
                for live in list(self._live):
                    if ended := live.poll():
                        self._live.remove(live)
                        self._advance_cell(live.cell, live.steps, ended)
                time.sleep(0.05)
        finally:
            self._interrupt_all()
        return not remaining and not self._stopped

    def _is_time_up(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def _advance_cell(self, cell: SuiteCell, steps: CellSteps, ended: ProcessResult | None) -> None:
        """Advance a cell to its next process or to its result."""
        suite, name = self.workshop.suite, f"{cell.task.name}/{cell.name}"
        try:
            command = next(steps) if ended is None else steps.send(ended)
        except StopIteration as done:
            write_result(result_path(suite, cell), done.value)
            self.workshop.remove_finished()
            self.say(f"{name}: test {done.value['test']:.3f}, {done.value['seconds']:.0f} s")
        except (CellError, UserError) as error:
            if self._is_time_up() and ended and ended.code in (130, 143, -signal.SIGINT):
                self._stopped.append(name)
            else:
                self.failed[name] = str(error)
                self.say(f"{name}: failed: {error}")
        else:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - `RunningCell.poll` closes it
            # Secrets of a search's configuration are passed by the environment of this process.
            environment = {**os.environ, **self.environment}
            process = subprocess_runs.spawn_process(
                command, self.locks, subprocess.DEVNULL, errors, environment
            )
            self._live.append(RunningCell(cell, steps, process, errors))

    def _interrupt_all(self) -> None:
        """Interrupt the running processes as Ctrl-C does; searches can be resumed."""
        for live in self._live:
            os.kill(live.process.pid, signal.SIGINT)
        for live in self._live:
            # WNOWAIT leaves the exit status for `RunningCell.poll`, which reaps the process.
            deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
            while not _has_ended(live.process.pid):
                if time.monotonic() > deadline:
                    os.kill(live.process.pid, signal.SIGKILL)
                time.sleep(0.05)


def _has_ended(process: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run_cells(
    suite: Suite, todo: Sequence[SuiteCell], parallel: int, until: float | None, keep: bool
) -> tuple[dict[str, str], bool]:
    """Run cells and write their results.

    Args:
        parallel, until: See `SuiteRunner`.
        keep: Whether to keep run folders.

    Returns:
        Error messages of failed cells by name, and whether all finished in time.
    """
    if not todo:
        return {}, True
    environment = dict(os.environ)
    if parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    workshop = CellPlanner(suite, keep)
    workshop.check_cells(todo)
    with subprocess_runs.lock_study_folder(suite.runs) as lock:
        runner = SuiteRunner(
            workshop,
            parallel,
            until,
            environment,
            [lock],
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        enough = runner.run(todo)
    return runner.failed, enough
