"""Searches in processes of their own: composed, alone in a folder, run once and read ever after."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from swarm._util.cli import handle_termination_signals, normalize_gpu_list
from swarm._util.files import conf_folder, make_folder, write_json
from swarm._util.secrets import lent, plain_config
from swarm.errors import UserError
from swarm.loop.fingerprint import identity_settings
from swarm.runs.manifest import replay
from swarm.runs.run_reader import RunFolder

HYDRA_DEFAULTS = {
    "defaults": [
        "_self_",
        {"override hydra/job_logging": "none"},
        {"override hydra/hydra_logging": "none"},
    ],
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
}
"""What Hydra needs beside a configuration to run it without files of its own."""

LIFTED_LIMITS = ("max_iterations", "patience")
"""What else would end a search before its budget does; lifted where the command line is silent."""

LOCK_TIMEOUT_S = 20.0
"""How long a search that was told to stop may take to leave its folder."""

PR_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG, of Linux's prctl."""

LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class SearchProcess:
    """One search, done or still to do.

    Attributes:
        config: Its whole configuration, as config.json of a run folder keeps it.
    """

    config: dict[str, Any]

    @property
    def path(self) -> Path:
        """Its run folder."""
        return Path(self.config["folder"]) / self.config["name"]

    def load_state(self) -> dict[str, Any]:
        """What is done in its folder; empty if nothing is, or if the state cannot be read."""
        found = replay(self.path)[0] or {}  # a damaged journal is mended by the search
        return found if "identity" in found else {}

    def expected_identity(self) -> dict[str, Any]:
        """Settings and seed as the identity in its state has to have them."""
        found = {**identity_settings(self.config), "seed": self.config["seed"]}
        return dict(json.loads(json.dumps(found)))

    def load_metrics(self) -> dict[str, Any] | None:
        """What it came to; `None` before it has, by the test and the vote now asked for."""
        state = self.load_state()
        found: dict[str, Any] | None = state.get("metrics")
        wanted = self.expected_identity().items()
        if not found or any(state["identity"].get(key) != value for key, value in wanted):
            return None
        asked = found["asked"]["ensemble"], found["asked"]["test_items"] is not None
        return found if asked == (self.config["ensemble"], self.config["test"]) else None

    def run(self, *locks: int, stdout: int | None = None) -> str | None:
        """Search, or go on, in a process that ends with this one; what went wrong, or `None`.

        Args:
            locks: File descriptors that the process keeps open, of `alone`.
            stdout: Where it prints, as `subprocess.Popen` takes it.
        """
        with TemporaryDirectory() as folder:
            command = self.build_command(Path(folder))
            code, last = _wait_for_process(spawn_process(command, locks, stdout, subprocess.PIPE))
        if code in (130, 143):
            raise KeyboardInterrupt
        if code and not last.startswith("error: "):
            return f"ended with exit code {code} ({last})"
        return last.removeprefix("error: ") if code else None

    def build_command(self, folder: Path) -> list[str]:
        """The command line of the search; its configuration is written into `folder`."""
        write_json(
            folder / "plan.yaml", {**HYDRA_DEFAULTS, **lent(with_tracker_group(self.config))}
        )
        return [
            sys.executable,
            "-m",
            "swarm.search",
            f"--config-path={folder}",
            "--config-name=plan",
        ]


def spawn_process(
    command: Sequence[str],
    locks: Sequence[int] = (),
    stdout: int | None = None,
    stderr: "int | IO[bytes] | None" = None,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one.

    Args:
        locks: File descriptors that it keeps open, of `alone`.
        stdout, stderr, environment: As `subprocess.Popen` takes them.
    """
    return subprocess.Popen(
        command,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(locks),
        env=environment,
        # Ctrl-C goes to this process, which hands it on once.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def lift_limits(whole: DictConfig, words: Sequence[str], budget: int) -> None:
    """Leave the budget as the only end of a search: raise its other limits in place.

    Args:
        words: Command-line words; a limit that they set stays.
        budget: In positions, which no search exceeds in iterations.
    """
    said = {word.partition("=")[0].strip(" +") for word in words}
    for key in LIFTED_LIMITS:
        if key in whole.optimizer and f"optimizer.{key}" not in said:
            whole.optimizer[key] = budget


def _wait_for_process(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """A process's exit code and the last line of its errors, all of which are passed on."""
    assert process.stderr is not None
    tail = b""
    try:
        while part := os.read(process.stderr.fileno(), 4096):
            os.write(2, part)
            tail = (tail + part)[-4096:]
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    return code, (tail.decode(errors="replace").splitlines() or [""])[-1]


def _end_with_parent() -> None:
    """In a new process: take an interrupt, and get one when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def stop_as_with_ctrl_c() -> None:
    """Take what a scheduler sends before it kills as Ctrl-C is taken; nohup stays nohup."""
    handle_termination_signals()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


@contextmanager
def lock_study_folder(folder: Path) -> Iterator[int]:
    """Keep other sweeps and studies out of a folder; gives the descriptor that keeps the lock.

    A search inherits it, so that one which outlives its parent is not joined by another.

    Raises:
        UserError: Another is in it, it is a search's own, or it cannot be written.
    """
    if (folder / "state.json").exists():
        raise UserError(f"{folder} holds a single search; choose another name=")
    try:
        make_folder(folder, private=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another folder") from None
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: another process is at work there; wait, or end it")
            time.sleep(0.2)
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems have no locks; one has to do without there.
        return True
    return True


def with_tracker_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """A search's configuration, whose tracker knows with which other searches it belongs."""
    tracker, folder = config.get("tracker") or {}, Path(config["folder"])
    if tracker.get("group", "") is None and (folder / ".lock").exists():
        return {**config, "tracker": {**tracker, "group": folder.name}}
    return dict(config)


def override_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some of its keys, at any depth, set anew.

    Raises:
        UserError: A key is not there to be set.
    """
    found = dict(config)
    for key, value in changes.items():
        if key not in found:
            raise UserError(
                f"{key}={value}: this search has no such key; this study does not fit it"
            )
        deep = isinstance(value, Mapping) and isinstance(found[key], Mapping)
        found[key] = override_config(found[key], value) if deep else value
    return found


def load_run_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run folder, wherever that lies now, with the vote it last had."""
    run = RunFolder(folder)
    found = {**run.config, "folder": str(folder.parent), "name": folder.name}
    if found.pop("wandb", None):  # a run from before there were trackers to choose from
        found["tracker"] = {"_target_": "swarm.trackers.NullTracker"}
    return found | ({"ensemble": run.metrics["asked"]["ensemble"]} if run.metrics else {})


def compose_search(words: list[str], kind: str) -> DictConfig:
    """The configuration that `python -m swarm.search` makes of some words, references unresolved.

    Args:
        kind: What follows the task in the name, where no name= is given.

    Raises:
        UserError: The name is no folder's; Hydra raises errors of its own.
    """
    words = ["name=''", *map(normalize_gpu_list, words)]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        whole = compose("search", overrides=words, return_hydra_config=True)
    name = str(whole.name) or f"{whole.hydra.runtime.choices.task}_{kind}"
    if name in (".", "..") or "/" in name:
        raise UserError(f"name={name!r}: must be the name of a folder below {whole.folder}/")
    whole = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    OmegaConf.set_struct(whole, True)
    whole.name = name
    return whole


def to_plain_config(whole: DictConfig) -> dict[str, Any]:
    """A configuration as plain values, references resolved."""
    return plain_config(whole)
