"""Runs the cells of a study: each needs one or more processes, several of which run in parallel.

A process ends with this one, its run folder is resumed by the next start, and a result is a
line of results.jsonl, written as soon as it is there.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from swarm._util.cli import handle_termination_signals, normalize_gpu_list
from swarm._util.files import (
    PACKAGE_FOLDER,
    acquire_lock,
    conf_folder,
    make_folder,
    read_gzip_json,
    write_json,
)
from swarm._util.secrets import lent, plain_config
from swarm._version import __version__
from swarm.errors import UserError
from swarm.loop.evaluator import records_to_scores, split_dev_holdout
from swarm.loop.identity import digest_items
from swarm.merging.positions import describe_position
from swarm.runs.folder import RunFolder, is_run_folder, read_record
from swarm.runs.lock import STUDY_LOCK_FILE
from swarm.runs.verdict import Verdict, read_verdict
from swarm.studies.plan import Cell, Study, key_head
from swarm.tasks.metrics import best_constant_answers, is_mean_utility

HYDRA_DEFAULTS = {
    "defaults": [
        "_self_",
        {"override hydra/job_logging": "none"},
        {"override hydra/hydra_logging": "none"},
    ],
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
}
"""Hydra settings that let a configuration run without Hydra's log files and output folders."""

SHARED_KEYS = {
    "search": None,
    "evaluate": ("task", "model", "pool"),
    "finetune": ("task", "model", "pool", "engine", "executor", "job", "gpus"),
}
"""Configuration keys that a command shares with a search; `None` for all."""

LIFTED_LIMITS = ("max_iterations", "patience")
"""Limits that could end a search before its budget does; lifted unless set by the study."""

GRADIENT_COST = 3
"""Cost of one training example, forward and backward, in prompt-equivalents."""

USAGE_FILE = "spent.json"
"""File in a cell's folder: wall and CPU seconds of its processes, summed over all starts."""

INTERRUPT_TIMEOUT_S = 60.0
"""Time in seconds that a process may take to exit after an interrupt."""

LOCK_TIMEOUT_S = 20.0
"""Time in seconds that an interrupted search may take to release its folder."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): signal to receive when the parent exits."""

LIBC = ctypes.CDLL(None)


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
        study: The study.
        keep: Whether to keep run folders once the result is written.
    """

    def __init__(self, study: Study, keep: bool) -> None:
        self.study, self.keep = study, keep

    def run_cell(self, cell: Cell) -> CellSteps:
        """Yield the command lines that a cell needs, and return its result.

        Raises:
            UserError: An input is invalid.
            CellError: A process failed.
        """
        steps = {
            "search": self._search_cell,
            "finetune": self._finetune_cell,
            "evaluate": self._evaluate_cell,
        }
        task, kind = self._load_task(cell), self.study.methods[cell.method].kind
        found = yield from steps[kind](cell, task)
        return {
            "suite": self.study.name,
            "task": cell.task,
            "method": cell.method,
            "kind": kind,
            "dev_items": cell.dev,
            "budget": cell.budget,
            "unit": self.study.file.unit,
            "seed": cell.seed,
            "words": self.study.defining_words(cell),
            **found,
            "constant": score_best_constant(task),
            "dev_digest": digest_items(task, "dev"),
            "test_digest": digest_items(task, "test"),
            "experts_digest": self._open_pool(cell).fingerprint(),
            **_collect_versions(),
        }

    def check_cells(self, some: Sequence[Cell]) -> None:
        """Compose each task and each method once, and read the data of each task.

        Raises:
            UserError: An input is invalid; Hydra raises its own exceptions.
        """
        seen: set[str] = set()
        for cell in some:
            if not {cell.task, cell.method} <= seen:
                seen |= {cell.task, cell.method}
                self._load_task(cell)
                method = self.study.methods[cell.method]
                if method.kind != "search":
                    words = [*self._base_words(cell), *method.words]
                    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                        compose(method.kind, words)

    def run_folder(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.study.runs / cell.task / cell.name

    def shared_answers_folder(self, cell: Cell) -> Path:
        """Return the folder of answers that searches with equal task, dev items and seed share."""
        return self.study.runs / "answers" / f"{cell.task}_dev{cell.dev}_seed{cell.seed}"

    def remove_finished(self) -> None:
        """Remove run folders of finished cells, and shared answers that no open cell needs."""
        if self.keep:
            return
        every = self.study.cells()
        finished = [cell for cell in every if self.study.result(cell) is not None]
        read = {self.shared_answers_folder(cell) for cell in set(every) - set(finished)}
        unread = {self.shared_answers_folder(cell) for cell in finished} - read
        starts = {self._start_folder(cell) for cell in finished}
        for folder in {self.run_folder(cell) for cell in finished} | starts | unread:
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def _base_words(self, cell: Cell) -> list[str]:
        """Return a cell's words without its method's, those that its command knows."""
        allowed = SHARED_KEYS[self.study.methods[cell.method].kind]
        words = self.study.common_words(cell)
        return [word for word in words if allowed is None or key_head(word) in allowed]

    def _load_task(self, cell: Cell) -> Any:
        """Instantiate a cell's task and check that it has enough dev items."""
        words, method = self.study.common_words(cell), self.study.methods[cell.method]
        words += method.words if method.kind == "search" else ()
        config = plain_config(compose_search(words))
        task = instantiate(config["task"], _convert_="all").metric_task
        count = len(task.items("dev"))
        if count != cell.dev:
            raise UserError(
                f"study {self.study.name}: task {cell.task} has {count} dev items, fewer than its "
                f"dev={cell.dev}; lower dev"
            )
        return task

    def _open_pool(self, cell: Cell) -> Any:
        """Open the pool of experts as configured without the method."""
        config = plain_config(compose_search(self.study.common_words(cell)))
        return instantiate(config["pool"], _convert_="all").open(config["model"]["name"])

    def _prompt_budget(self, cell: Cell) -> int:
        """Return the budget in prompt-equivalents."""
        assert cell.budget is not None
        return cell.budget * (cell.dev if self.study.file.unit == "positions" else 1)

    def _run_search(
        self, cell: Cell, words: Sequence[str], folder: Path, budget: int
    ) -> Generator[list[str], ProcessResult, RunFolder]:
        """Run or resume a search unless it has ended."""
        search = compose_search([*words, f"seed={cell.seed or 0}"])
        if self.study.methods[cell.method].limits == "lifted":
            given = {word.partition("=")[0].strip(" +") for word in words}
            for key in LIFTED_LIMITS:
                if key in search.optimizer and f"optimizer.{key}" not in given:
                    search.optimizer[key] = max(1, budget // cell.dev)
        config = plain_config(search) | {
            "folder": str(folder.parent),
            "name": folder.name,
            "budget": budget,
            "shared": str(self.shared_answers_folder(cell)),
        }
        tracker = config.get("tracker") or {}
        if tracker.get("group", "") is None:
            config["tracker"] = {**tracker, "group": self.study.runs.name}
        state = read_record(folder, strict=False).state  # the search repairs damage
        if not (verdict := read_verdict(state)) or verdict.tested != config["test"]:
            with tempfile.TemporaryDirectory() as plan:
                write_json(Path(plan) / "plan.yaml", {**HYDRA_DEFAULTS, **lent(config)})
                words = [f"--config-path={plan}", "--config-name=plan"]
                ended = yield [sys.executable, "-m", "swarm.search", *words]
            _record_usage(folder, ended)
        return RunFolder(folder)

    def _search_cell(self, cell: Cell, task: Any) -> CellSteps:
        words = [*self._base_words(cell), *self.study.methods[cell.method].words, "test=true"]
        run = yield from self._run_search(
            cell, words, self.run_folder(cell), self._prompt_budget(cell)
        )
        verdict, best = run.verdict, run.find_best()
        assert verdict is not None and verdict.start_model.dev is not None
        dev = {"starting": verdict.start_model.dev.utility, "ending": verdict.dev.utility}
        if (kept := verdict.held_out) and kept.selected:  # the items that chose the result
            dev = {"starting": kept.expert.utility, "ending": kept.found.utility}
        forward = _sum_rounds(run, "prompts_scored") + _sum_rounds(run, "losses_computed")
        gradients = _sum_rounds(run, "gradients_computed")
        label, position = run.position_label(best), run.position_at(best)
        description = describe_position(run.experts, position, run.groups)
        start = _test_record(run, run.best_expert(), task)
        return {
            "start": {"expert": verdict.expert, "dev": dev["starting"], **start},
            "dev": dev["ending"],
            "dev_no_gradient": verdict.no_gradient.utility if verdict.no_gradient else None,
            **_test_record(run, best, task),
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

    def _start_folder(self, cell: Cell) -> Path:
        folder = self.run_folder(cell)
        return folder.with_name(f"{folder.name}_start")

    def _finetune_cell(self, cell: Cell, task: Any) -> CellSteps:
        """Select the best expert on the dev items, and train it with the remaining budget."""
        base, start = self._base_words(cell), self._start_folder(cell)
        count, budget = len(self._open_pool(cell).names), self._prompt_budget(cell)
        if budget <= count * cell.dev:
            raise UserError(
                f"budget={cell.budget}: {cell.method} needs more than {count}, the positions of "
                "the experts"
            )
        experts = ["optimizer=random", f"optimizer.particles={count}", "ensemble=0", "test=false"]
        run = yield from self._run_search(
            cell, [*base, *experts, "noise_floor=false"], start, count * cell.dev
        )
        folder = self.run_folder(cell)
        words = [*base, *self.study.methods[cell.method].words, f"name={folder.name}"]
        words += [f"folder={folder.parent}", f"run={start}", f"seed={cell.seed or 0}", "test=true"]
        words.append(f"steps={_affordable_steps(words, budget - count * cell.dev, task)}")
        if not _is_finetuned(folder):
            ended = yield [sys.executable, "-m", "swarm.finetune", *words]
            _record_usage(folder, ended)
        state = json.loads((folder / "tuning.json").read_text())
        facts, verdict = state["tuning"], Verdict.from_dict(state["verdict"])
        assert verdict.start_model.dev is not None
        rows = read_gzip_json(folder / "answers.json.gz")
        seen, looked = facts["examples_seen"], facts["examples_evaluated"]
        return {
            "start": {
                "expert": verdict.expert,
                "dev": verdict.start_model.dev.utility,
                **build_test_record(task, rows["test"][0]),
            },
            "dev": verdict.dev.utility,
            **build_test_record(task, rows["test"][1]),
            "found": f"step {facts['step']} of {facts['steps']}",
            "prompts": count * cell.dev + looked,
            "gradients": seen,
            "prompt_equivalents": count * cell.dev + looked + GRADIENT_COST * seen,
            "prompts_shared": _sum_rounds(run, "prompts_shared"),
            **_read_usage(folder, start),
            "finished": f"{facts['steps']} steps",
            "base_digest": run.identity["base weights"],
        }

    def _evaluate_cell(self, cell: Cell, task: Any) -> CellSteps:
        folder = self.run_folder(cell)
        if not (folder / "result.json").is_file():
            words = [*self._base_words(cell), *self.study.methods[cell.method].words]
            words += ["split=test", f"out={folder}"]
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


def compose_search(words: Sequence[str]) -> DictConfig:
    """Compose the configuration that `python -m swarm.search` builds from words, unresolved.

    Without a time limit, unless the words set one: results do not depend on the machine's speed.
    """
    words = ["minutes=null", "name=study", *map(normalize_gpu_list, words)]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("search", overrides=words)
    OmegaConf.set_struct(config, True)
    return config


def _sum_rounds(run: RunFolder, name: str) -> int:
    """Sum a count over all rounds of a search."""
    return int(sum(entry.get(name, 0) for entry in run.rounds))


def _test_record(run: RunFolder, index: tuple[int, int], task: Any) -> dict[str, Any]:
    rows = run.load_test_answers(index)
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; a study needs test=true")
    return build_test_record(task, rows)


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
        raise UserError(f"task={task.name}: a study needs a task whose utility is its items' mean")
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
        config: Any = compose("finetune", list(words))
    held = len(split_dev_holdout(task.items("dev"), config.holdout, 0)[1])

    def cost(steps: int) -> int:
        return GRADIENT_COST * config.batch * steps + held * (1 + -(-steps // config.every))

    steps = 0
    while cost(steps + 1) <= budget:
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


@dataclass(slots=True)
class RunningCell:
    """A cell and its running process."""

    cell: Cell
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


class StudyRunner:
    """Runs cells with several processes in parallel, until all are done or time is up.

    Args:
        planner: Planner of the cells.
        parallel: Maximum number of concurrent processes.
        until: `time.monotonic` at which running cells are stopped and no more start; `None` for
            never.
        lock: File descriptor that the processes inherit and hold open.
        say: Callback that receives a progress line when a cell begins or ends.
    """

    def __init__(
        self,
        planner: CellPlanner,
        parallel: int,
        until: float | None,
        lock: int,
        say: Callable[[str], None],
    ) -> None:
        self.planner, self.parallel, self.until = planner, parallel, until
        self.lock, self.say = lock, say
        self.failed: dict[str, str] = {}
        self._live: list[RunningCell] = []
        self._stopped: list[str] = []

    def run(self, todo: Sequence[Cell]) -> bool:
        """Run cells in order and return whether all finished in time.

        Failed cells are recorded in `failed`, by name, and do not stop the others.
        """
        remaining, count = list(todo), len(todo)
        self.planner.remove_finished()
        try:
            while (remaining and not self._is_time_up()) or self._live:
                while remaining and len(self._live) < self.parallel and not self._is_time_up():
                    cell = remaining.pop(0)
                    self.say(f"{cell.path} ({count - len(remaining)} of {count}): begins")
                    self._advance_cell(cell, self.planner.run_cell(cell), None)
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

    def _advance_cell(self, cell: Cell, steps: CellSteps, ended: ProcessResult | None) -> None:
        """Advance a cell to its next process or to its result."""
        try:
            command = next(steps) if ended is None else steps.send(ended)
        except StopIteration as done:
            self.planner.study.add_result(cell, done.value)
            self.planner.remove_finished()
            self.say(f"{cell.path}: test {done.value['test']:.3f}, {done.value['seconds']:.0f} s")
        except (CellError, UserError) as error:
            if self._is_time_up() and ended and ended.code in (130, 143, -signal.SIGINT):
                self._stopped.append(cell.path)
            else:
                self.failed[cell.path] = str(error)
                self.say(f"{cell.path}: failed: {error}")
        else:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - `RunningCell.poll` closes it
            environment = dict(os.environ)
            if self.parallel > 1:
                environment.setdefault("OMP_NUM_THREADS", "1")
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(self.lock,),
                env=environment,
                # In a session of its own it gets no Ctrl-C from the terminal: this process
                # forwards it once.
                start_new_session=True,
                preexec_fn=_end_with_parent,
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


def _end_with_parent() -> None:
    """In the child: restore SIGINT, and request one when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _has_ended(process: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def stop_as_with_ctrl_c() -> None:
    """Handle termination signals of schedulers like Ctrl-C, except SIGHUP under nohup."""
    handle_termination_signals()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


@contextmanager
def lock_study_folder(folder: Path) -> Iterator[int]:
    """Lock a folder against other studies; yields the descriptor of the lock.

    A search inherits the descriptor, so that the folder stays locked while a search outlives its
    parent.

    Raises:
        UserError: The folder is locked, contains a single search, or cannot be written.
    """
    if is_run_folder(folder):
        raise UserError(f"{folder} contains a single search; choose another name=")
    try:
        make_folder(folder, private=True)
        lock = os.open(folder / STUDY_LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another folder") from None
    try:
        if not acquire_lock(lock, LOCK_TIMEOUT_S):
            raise UserError(f"{folder}: in use by another process; wait for it, or stop it")
        yield lock
    finally:
        os.close(lock)


def run_cells(
    study: Study, todo: Sequence[Cell], parallel: int, until: float | None, keep: bool
) -> tuple[dict[str, str], bool]:
    """Run cells and write their results; continue with the sampler's until it has no more.

    Args:
        parallel, until: See `StudyRunner`.
        keep: Whether to keep run folders.

    Returns:
        Error messages of failed cells by name, and whether all finished in time.
    """
    planner = CellPlanner(study, keep)
    planner.check_cells(todo)
    with lock_study_folder(study.runs) as lock:
        runner = StudyRunner(
            planner, parallel, until, lock, lambda line: print(line, file=sys.stderr, flush=True)
        )
        is_done = runner.run(todo) if todo else True
        while is_done and not runner.failed and study.sample_methods():
            is_done = runner.run(study.missing(study.cells()))
    return runner.failed, is_done
