"""Commands of the package in this process, without the seconds of a new Python."""

import io
import logging
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """A command that has ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def run(
    module: str,
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> Done:
    """Run `python -m MODULE WORDS` in this process, with its output captured and signals restored.

    Not for what ends a process or is read while importing; `tests/journey` starts real ones.
    """
    from hydra.core.global_hydra import GlobalHydra

    signals = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    log = logging.getLogger("swarm")
    before = log.handlers[:], log.level, log.propagate
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    changed = {"HYDRA_FULL_ERROR": "1", **(env or {})}
    try:
        with (
            chdir(cwd),
            mock.patch.object(sys, "argv", [module, *map(str, words)]),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
            mock.patch.object(sys, "path", [str(cwd), *sys.path]),
            mock.patch.dict(os.environ, changed),
            warnings.catch_warnings(),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            # The module may be loaded already; what runs is a fresh copy.
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        code = end.code
    finally:
        GlobalHydra.instance().clear()
        for one, handler in signals.items():
            signal.signal(one, handler)
        log.handlers[:], log.level, log.propagate = before[0], before[1], before[2]
    number = code if isinstance(code, int) else 1 if code else 0
    said = f"{code}\n" if isinstance(code, str) else ""
    return Done(number, out.getvalue(), err.getvalue() + said)
