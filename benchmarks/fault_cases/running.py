"""Run cases of the fault bench in forks, or in fresh processes, and judge how they end."""

import contextlib
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import searches

from fault_cases import Case, Outcome
from swarm._util.terminal import escape_control_chars

MEMORY = 8 << 30
"""Bytes of data that a case may allocate; beyond it Python raises, which counts as a traceback."""


def _child(case: Case, here: Path) -> None:
    """Run a case in its fork; does not return."""
    os.setsid()
    os.chdir(here)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(here.with_suffix(f".{name}"), flags, 0o600), number)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    os.environ["MODEL_SWARMS_CACHE"] = str(here / "cache")
    words = [word.replace("{here}", str(here)) for word in case.words]
    try:
        case.hook()
        code = _run_module(words[1], words[2:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 70
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _run_module(name: str, words: Sequence[str]) -> int:
    """Run `python -m NAME WORDS` in this process and return its exit code."""
    sys.argv[:] = [name, *words]
    sys.path.insert(0, os.getcwd())
    # What is imported already runs once more, as __main__.
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _begin(case: Case, here: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        _child(case, here)
    finally:
        os._exit(71)


def _end(here: Path, status: int | None) -> tuple[int | None, str, str]:
    out, err = (
        here.with_suffix(f".{name}").read_text(errors="backslashreplace") for name in ("out", "err")
    )
    return None if status is None else os.waitstatus_to_exitcode(status), out, err


def run_in_fork(case: Case, here: Path, limit: float) -> tuple[int | None, str, str, float]:
    """Run one case and wait; exit code (`None` past the limit), output, errors, seconds."""
    began = time.monotonic()
    pid = _begin(case, here)
    while time.monotonic() - began < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return *_end(here, status), time.monotonic() - began
        time.sleep(0.01)
    _kill(pid)
    return *_end(here, None), time.monotonic() - began


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def outcome(case: Case, here: Path, code: int | None, out: str, err: str, took: float) -> Outcome:
    """Return the outcome of an ended case."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    rest = [
        line
        for line in err.splitlines()
        if line.strip() and not line.startswith(("error: ", "WARNING: "))
    ]
    if code is None:
        kind, why = "hang", f"not ended after {took:.0f} s"
    elif "Traceback (most recent call last)" in out + err:
        last = [line for line in (err or out).splitlines() if line.strip()][-1]
        kind, why = "traceback", last
    elif code == 0:
        why = case.judge(here, out, err)
        kind = "silent" if why else "ok"
    elif code not in (1, 2):
        kind, why = "traceback", f"exit code {code}: {err[-300:]}"
    elif "usage: " in err or err.startswith("package '"):  # argparse's words, and Hydra's
        kind, why = "ok", "usage"
    elif len(errors) != 1 or (rest and case.group != "damage"):
        kind, why = "traceback", f"not one line of error: {err[-300:]}"
    elif escape_control_chars(errors[0]) != errors[0]:
        kind, why = "traceback", f"control characters reach the terminal: {errors[0][:200]!r}"
    else:
        kind, why = "ok", errors[0]
    return Outcome(case, kind, why, took, code, err)


def run_cases(
    cases: Sequence[Case], home: Path, jobs: int = 2, limit: float = 60.0, keep: bool = False
) -> Iterator[Outcome]:
    """Run the cases, `jobs` in parallel; yield outcomes as cases end."""
    waiting = list(enumerate(cases))[::-1]
    under: dict[int, tuple[Case, Path, float]] = {}
    while waiting or under:
        while waiting and len(under) < jobs:
            number, case = waiting.pop()
            here = home / f"case_{number:04d}"
            here.mkdir()
            case.prepare(here)
            under[_begin(case, here)] = case, here, time.monotonic()
        time.sleep(0.005)
        for pid, (case, here, began) in list(under.items()):
            took = time.monotonic() - began
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and took < limit:
                continue
            if not done:
                _kill(pid)
            del under[pid]
            yield outcome(case, here, *_end(here, status if done else None), took)
            if not keep:
                shutil.rmtree(here, ignore_errors=True)


def cold(case: Case, home: Path, limit: float = 120.0) -> Outcome:
    """Run a case in a fresh process, as a user starts it."""
    here = Path(tempfile.mkdtemp(dir=home))
    case.prepare(here)
    words = [word.replace("{here}", str(here)) for word in case.words]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=limit,
            errors="backslashreplace",
            stdin=subprocess.DEVNULL,
            env={**searches.environment(), "MODEL_SWARMS_CACHE": str(here / "cache")},
        )
    except subprocess.TimeoutExpired:
        return outcome(case, here, None, "", "", limit)
    took = time.monotonic() - began
    return outcome(case, here, done.returncode, done.stdout, done.stderr, took)
