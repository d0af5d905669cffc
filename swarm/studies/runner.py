"""Runs the cells of a study: each needs one or more processes, several of which run in parallel.

A process ends with this one, its run folder is resumed by the next start, and a result is a
line of results.jsonl, written as soon as it is there.
"""

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from swarm._util.cli import handle_termination_signals, normalize_arguments
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
from swarm.loop.evaluator import records_to_scores
from swarm.loop.identity import digest_items
from swarm.merging.positions import describe_position
from swarm.optimizers.base import GRADIENT_COST
from swarm.runs.folder import RunFolder, is_run_folder, read_record
from swarm.runs.lock import STUDY_LOCK_FILE
from swarm.runs.verdict import Verdict, read_verdict
from swarm.studies.plan import Cell, Study, key_head
from swarm.tasks.metrics import best_constant_answers, is_mean_utility, measure

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

USAGE_FILE = "spent.json"
"""File in a cell's folder: wall and CPU seconds of its processes, summed over all starts."""

INTERRUPT_TIMEOUT_S = 60.0
"""Time in seconds that a process may take to exit after an interrupt."""

LOCK_TIMEOUT_S = 20.0
"""Time in seconds that an interrupted search may take to release its folder."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): signal to receive when the parent exits."""

LIBC = ctypes.CDLL(None)


class CellError(Exception):
    """A process of a cell failed; the message is the reason."""


class StudyRunner:
    """Runs cells with several processes in parallel, until all are done or time is up.

    Args:
        study: The study.
        parallel: Maximum number of concurrent processes.
        until: `time.monotonic` at which running cells are stopped and no more start; `None` for
            never.
        keep: Whether to keep run folders once the result is written.

    Attributes:
        lock: File descriptor that the processes inherit and hold open; set before `run`.
        failed: Error messages of failed cells by name; they do not stop the others.
    """

    lock: int

    def __init__(self, study: Study, parallel: int, until: float | None, keep: bool) -> None:
        self.study, self.parallel, self.until, self.keep = study, parallel, until, keep
        self.failed: dict[str, str] = {}

    async def run(self, todo: Sequence[Cell]) -> bool:
        """Run cells in order and return whether all finished in time."""
        self._remove_finished()
        slots = asyncio.Semaphore(self.parallel)

        async def run_cell(number: int, cell: Cell) -> None:
            async with slots:
                _say(f"{cell.path} ({number} of {len(todo)}): begins")
                try:
                    result = await self._run_cell(cell)
                except (CellError, UserError, TimeoutError) as error:
                    self.failed[cell.path] = str(error)
                    _say(f"{cell.path}: failed: {error}")
                    return
            self.study.add_result(cell, result)
            self._remove_finished()
            _say(f"{cell.path}: test {result['test']:.3f}, {result['seconds']:.0f} s")

        with ThreadPoolExecutor(self.parallel) as self._waiters, suppress(TimeoutError):
            async with asyncio.timeout_at(self.until):
                tasks = [asyncio.ensure_future(run_cell(*one)) for one in enumerate(todo, 1)]
                try:
                    await asyncio.gather(*tasks)
                    return True
                finally:  # after an error, too, all processes are interrupted
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        return False

    async def _run_cell(self, cell: Cell) -> dict[str, Any]:
        """Run the processes of a cell and return its result.

        Raises:
            UserError: An input is invalid.
            CellError: A process failed.
        """
        task, kind = self._load_task(cell), self.study.methods[cell.method].kind
        steps = {
            "search": self._search_cell,
            "finetune": self._finetune_cell,
            "evaluate": self._evaluate_cell,
        }
        found = await steps[kind](cell, task)
        return {
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

    async def _run_process(self, folder: Path, *command: str) -> None:
        """Run a module to its end, and add the seconds to the cell's folder.

        If it is cancelled, the process is interrupted as by Ctrl-C; the next start resumes it.

        Raises:
            CellError: The process failed.
        """
        began, environment = time.monotonic(), dict(os.environ)
        if self.parallel > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(self.lock,),
                env=environment,
                # In a session of its own it gets no Ctrl-C from the terminal: this process
                # forwards it once.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            # Unlike Popen.wait, wait4 also returns the CPU time of this child.
            loop = asyncio.get_running_loop()
            waiting = loop.run_in_executor(self._waiters, os.wait4, process.pid, 0)
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                with suppress(ProcessLookupError):  # it may end in this moment
                    if not waiting.done():
                        os.kill(process.pid, signal.SIGINT)
                    if not (await asyncio.wait([waiting], timeout=INTERRUPT_TIMEOUT_S))[0]:
                        os.kill(process.pid, signal.SIGKILL)
                raise
            finally:
                _, status, usage = await waiting
                process.returncode = code = os.waitstatus_to_exitcode(status)
                _add_usage(folder, time.monotonic() - began, usage.ru_utime + usage.ru_stime)
            errors.seek(0)
            last = ["", *errors.read().decode(errors="replace").splitlines()][-1]
        if code and last.startswith("error: "):
            raise CellError(last.removeprefix("error: "))
        if code:
            raise CellError(f"ended with exit code {code} ({last})")

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
                    _compose(method.kind, [*self._base_words(cell), *method.words])

    def _run_folder(self, cell: Cell) -> Path:
        return self.study.runs / cell.task / cell.name

    def _shared_answers_folder(self, cell: Cell) -> Path:
        """Return the folder of answers that searches with equal task, dev items and seed share."""
        return self.study.runs / "answers" / f"{cell.task}_dev{cell.dev}_seed{cell.seed}"

    def _remove_finished(self) -> None:
        """Remove run folders of finished cells, and shared answers that no open cell needs."""
        if self.keep:
            return
        every = self.study.cells()
        finished = [cell for cell in every if self.study.result(cell) is not None]
        read = {self._shared_answers_folder(cell) for cell in set(every) - set(finished)}
        folders = {self._shared_answers_folder(cell) for cell in finished} - read
        for cell in finished:
            folders.add(self._run_folder(cell))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _base_words(self, cell: Cell) -> list[str]:
        """Return a cell's words without its method's, those that its command knows."""
        allowed = SHARED_KEYS[self.study.methods[cell.method].kind]
        words = self.study.common_words(cell)
        return [word for word in words if allowed is None or key_head(word) in allowed]

    def _load_task(self, cell: Cell) -> Any:
        """Instantiate a cell's task and check that it has enough dev items."""
        method = self.study.methods[cell.method]
        words = method.words if method.kind == "search" else []
        config = plain_config(compose_search([*self.study.common_words(cell), *words]))
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

    async def _run_search(
        self, cell: Cell, words: Sequence[str], folder: Path, budget: int
    ) -> RunFolder:
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
            "shared": str(self._shared_answers_folder(cell)),
        }
        tracker = config.get("tracker") or {}
        if tracker.get("group", "") is None:
            config["tracker"] = {**tracker, "group": self.study.runs.name}
        state = read_record(folder, strict=False).state  # the search repairs damage
        if not (verdict := read_verdict(state)) or verdict.tested != config["test"]:
            with tempfile.TemporaryDirectory() as plan:
                write_json(Path(plan) / "plan.yaml", {**HYDRA_DEFAULTS, **lent(config)})
                given_plan = (f"--config-path={plan}", "--config-name=plan")
                await self._run_process(folder, "swarm.search", *given_plan)
        return RunFolder(folder)

    async def _search_cell(self, cell: Cell, task: Any) -> dict[str, Any]:
        words = [*self._base_words(cell), *self.study.methods[cell.method].words, "test=true"]
        folder = self._run_folder(cell)
        run = await self._run_search(cell, words, folder, self.study.prompt_budget(cell))
        verdict, best = run.verdict, run.find_best()
        assert verdict is not None and verdict.start_model.dev is not None
        starting, ending = verdict.start_model.dev.utility, verdict.dev.utility
        if (kept := verdict.held_out) and kept.selected:  # the items that chose the result
            starting, ending = kept.expert.utility, kept.found.utility
        passes = ("prompts_scored", "losses_computed", "prompts_embedded")
        forward = sum(_sum_rounds(run, name) for name in passes)
        gradients = _sum_rounds(run, "gradients_computed")
        label, position = run.position_label(best), run.position_at(best)
        description = describe_position(run.experts, position, run.groups)
        start = build_test_record(task, run.load_test_answers(run.best_expert()))
        return {
            "start": {"expert": verdict.expert, "dev": starting, **start},
            "dev": ending,
            "dev_no_gradient": verdict.no_gradient.utility if verdict.no_gradient else None,
            **build_test_record(task, run.load_test_answers(best)),
            "found": f"{label}: {description}" if label else description,
            "experts": run.experts,
            "groups": run.groups,
            "coefficients": [round(float(c), 4) for c in position],
            **_costs(forward, gradients),
            **_read_usage(run.path),
            "base_digest": run.identity["base weights"],
        }

    async def _finetune_cell(self, cell: Cell, task: Any) -> dict[str, Any]:
        folder, method = self._run_folder(cell), self.study.methods[cell.method]
        words = [*self._base_words(cell), f"budget={self.study.prompt_budget(cell)}"]
        words += [*method.words, f"name={folder.name}", f"folder={folder.parent}"]
        words += [f"seed={cell.seed or 0}", "test=true"]
        file = folder / "tuning.json"
        try:
            state = json.loads(file.read_text())
            finished = bool(state["verdict"])
        except (OSError, ValueError, TypeError, KeyError):
            finished = False
        if not finished:  # it says what is damaged
            await self._run_process(folder, "swarm.finetune", *words)
            state = json.loads(file.read_text())
        facts, verdict = state["tuning"], Verdict.from_dict(state["verdict"])
        _, after = read_gzip_json(folder / "answers.json.gz")["test"]
        return {
            "start": None,
            "dev": verdict.dev.utility,
            "dev_no_gradient": verdict.held_out.found.utility if verdict.held_out else None,
            **build_test_record(task, after),
            "found": f"rate {facts['rate']:g}, step {facts['step']} of {facts['steps']}",
            **_costs(facts["examples_evaluated"], facts["examples_seen"]),
            **_read_usage(folder),
            "base_digest": state["identity"]["base weights"],
        }

    async def _evaluate_cell(self, cell: Cell, task: Any) -> dict[str, Any]:
        folder = self._run_folder(cell)
        words = [*self._base_words(cell), *self.study.methods[cell.method].words]
        if not (folder / "result.json").is_file():
            out = ("split=test", f"out={folder}")
            await self._run_process(folder, "swarm.evaluate", *words, *out)
        result = json.loads((folder / "result.json").read_text())
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        return {
            "start": None,
            "dev": None,
            **build_test_record(task, rows),
            "found": "",
            **_costs(0, 0),
            "prompts_an_answer": round(result["prompts"] / len(rows), 3),
            **_read_usage(folder),
            "base_digest": None,
        }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _compose(command: str, words: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return compose(command, list(words))


def compose_search(words: Sequence[str]) -> DictConfig:
    """Compose the configuration that `python -m swarm.search` builds from words, unresolved.

    Without a time limit, unless the words set one: results do not depend on the machine's speed.
    """
    config = _compose("search", normalize_arguments(["minutes=null", "name=study", *words]))
    OmegaConf.set_struct(config, True)
    return config


def _sum_rounds(run: RunFolder, name: str) -> int:
    return int(sum(entry.get(name, 0) for entry in run.rounds))


def _costs(forward: int, gradients: int) -> dict[str, int]:
    total = forward + GRADIENT_COST * gradients
    return {"prompts": forward, "gradients": gradients, "prompt_equivalents": total}


def build_test_record(task: Any, rows: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the test utility of some answers, and every item's value in compact form.

    Returns:
        "test", "values" (a string of one character per item if all are 0 or 1, else rounded
        numbers) and, of a scorer's texts, "entropy" and "length" (`swarm.tasks.metrics.Measured`).

    Raises:
        UserError: There are no answers, or the utility is not the mean of the items' values.
    """
    scores = records_to_scores([dict(row) for row in rows or ()])
    if not rows or not is_mean_utility(task, scores):
        raise UserError(
            f"task={task.name}: a study needs test=true, and a task whose utility is its items' "
            "mean"
        )
    found, values = measure(task, scores), [score.value for score in scores]
    binary = set(values) <= {0.0, 1.0}
    return {
        "test": round(float(np.mean(values)), 6),
        "values": "".join(str(int(v)) for v in values) if binary else [round(v, 5) for v in values],
        "entropy": found.entropy,
        "length": found.length,
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


def _read_usage(*folders: Path) -> dict[str, float]:
    """Sum the recorded wall and CPU seconds over folders."""
    files = [file for folder in folders if (file := folder / USAGE_FILE).is_file()]
    every = [json.loads(file.read_text()) for file in files]
    return {key: round(sum(one[key] for one in every), 1) for key in ("seconds", "cpu_seconds")}


def _add_usage(folder: Path, seconds: float, cpu: float) -> None:
    if folder.is_dir():
        before = _read_usage(folder)
        spent = {"seconds": before["seconds"] + seconds, "cpu_seconds": before["cpu_seconds"] + cpu}
        write_json(folder / USAGE_FILE, spent)


@cache
def _collect_versions() -> dict[str, Any]:
    """Return package versions and the git commit, which are recorded with each result."""
    versions = {"model-swarms": __version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    git = subprocess.run(command, cwd=PACKAGE_FOLDER.parent, capture_output=True, text=True)
    return {"versions": versions, "commit": git.stdout.strip() or None}


def _end_with_parent() -> None:
    """In the child: restore SIGINT, and request one when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


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
        parallel, until, keep: See `StudyRunner`.

    Returns:
        Error messages of failed cells by name, and whether all finished in time.
    """
    runner = StudyRunner(study, parallel, until, keep)
    runner.check_cells(todo)
    # A signal that arrives inside of a cell ends its task; asyncio would log that as an error.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with lock_study_folder(study.runs) as runner.lock:
        is_done = not todo or asyncio.run(runner.run(todo))
        while is_done and not runner.failed and study.sample_methods():
            is_done = asyncio.run(runner.run(study.missing(study.cells())))
    return runner.failed, is_done
