"""Searches as subprocesses: compose their configuration, lock their folder, run and read them."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from swarm._util.cli import handle_termination_signals, normalize_gpu_list
from swarm._util.files import acquire_lock, conf_folder, make_folder, write_json
from swarm._util.secrets import lent, plain_config
from swarm.errors import UserError
from swarm.loop.search_inputs import RESOLVED_KEYS, identity_settings
from swarm.runs.folder import RunFolder, is_run_folder, read_record
from swarm.runs.lock import STUDY_LOCK_FILE
from swarm.runs.verdict import Verdict, read_verdict

HYDRA_DEFAULTS = {
    "defaults": [
        "_self_",
        {"override hydra/job_logging": "none"},
        {"override hydra/hydra_logging": "none"},
    ],
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
}
"""Hydra settings that let a configuration run without Hydra's log files and output folders."""

LIFTED_LIMITS = ("max_iterations", "patience")
"""Limits that could end a search before its budget does; lifted unless set on the command line."""

LOCK_TIMEOUT_S = 20.0
"""Time in seconds that an interrupted search may take to release its folder."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): signal to receive when the parent exits."""

LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class SearchProcess:
    """One search, finished or not.

    Attributes:
        config: Complete configuration, as in config.json of a run folder.
    """

    config: dict[str, Any]

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.config["folder"]) / self.config["name"]

    def load_state(self) -> dict[str, Any]:
        """Return the saved state of the search; empty if there is none or it cannot be read."""
        found = read_record(self.path, strict=False).state  # the search repairs damage
        return found if "identity" in found else {}

    def expected_identity(self) -> dict[str, Any]:
        """Return the settings and seed that the identity in the saved state must have."""
        found = {**identity_settings(self.config), "seed": self.config["seed"]}
        return dict(json.loads(json.dumps(found)))

    def load_verdict(self) -> Verdict | None:
        """Return the verdict; `None` if the search is not finished with these settings.

        The settings include the ensemble size and whether to test.
        """
        state = self.load_state()
        found = read_verdict(state)
        wanted = self.expected_identity().items()
        if not found or any(state["identity"].get(key) != value for key, value in wanted):
            return None
        settings = found.settings["ensemble"], found.settings["test_items"] is not None
        return found if settings == (self.config["ensemble"], self.config["test"]) else None

    def run(self, *locks: int, stdout: int | None = None) -> str | None:
        """Run or resume the search in a process that ends with this one.

        Args:
            locks: File descriptors from `lock_study_folder` that the process holds open.
            stdout: As in `subprocess.Popen`.

        Returns:
            The error message; `None` on success.
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
        """Return the command line of the search, and write its configuration into `folder`."""
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
        locks: File descriptors from `lock_study_folder` that the process holds open.
        stdout, stderr, environment: As in `subprocess.Popen`.
    """
    return subprocess.Popen(
        command,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(locks),
        env=environment,
        # In a separate session the child gets no Ctrl-C from the terminal; this process forwards it
        # once.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def lift_limits(config: DictConfig, words: Sequence[str], budget: int) -> None:
    """Raise all limits of a search except its budget, in place.

    Args:
        words: Command-line words; limits that they set are not changed.
        budget: In positions; no search has more iterations than that.
    """
    given = {word.partition("=")[0].strip(" +") for word in words}
    for key in LIFTED_LIMITS:
        if key in config.optimizer and f"optimizer.{key}" not in given:
            config.optimizer[key] = budget


def _wait_for_process(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Return a process's exit code and the last line of its stderr, which is forwarded."""
    assert process.stderr is not None
    tail = b""
    try:
        # Unbuffered, so that progress is forwarded as it is written.
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
    """Lock a folder against other sweeps and studies; yields the descriptor of the lock.

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


def with_tracker_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search's configuration; in a study, with its name as the tracker's group."""
    tracker, folder = config.get("tracker") or {}, Path(config["folder"])
    if tracker.get("group", "") is None and (folder / STUDY_LOCK_FILE).exists():
        return {**config, "tracker": {**tracker, "group": folder.name}}
    return dict(config)


def override_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with some of its keys, at any depth, replaced.

    Raises:
        UserError: A key does not exist.
    """
    found = dict(config)
    for key, value in changes.items():
        if key not in found:
            raise UserError(
                f"{key}={value}: this search has no such key, so the study does not apply to it"
            )
        deep = isinstance(value, Mapping) and isinstance(found[key], Mapping)
        found[key] = override_config(found[key], value) if deep else value
    return found


def load_run_config(folder: Path) -> dict[str, Any]:
    """Load the configuration of a run folder, with its present path and its last ensemble size.

    The pool's groups and routes are as requested, thus perhaps "auto"; config.json has the result.
    """
    run = RunFolder(folder)
    found = {**run.config, "folder": str(folder.parent), "name": folder.name}
    asked = {key: run.identity.get(f"pool.{key}") for key in RESOLVED_KEYS}
    requested = {key: value for key, value in asked.items() if value is not None}
    found["pool"] = {**found["pool"], **requested}
    if found.pop("wandb", None):  # written before trackers became selectable
        found["tracker"] = {"_target_": "swarm.trackers.Tracker"}
    return found | ({"ensemble": run.verdict.settings["ensemble"]} if run.verdict else {})


def compose_search(words: list[str], kind: str) -> DictConfig:
    """Compose the configuration that `python -m swarm.search` builds from words, unresolved.

    Without a time limit, unless the words set one: results do not depend on the machine's speed.

    Args:
        kind: Suffix of the default name, which begins with the task's.

    Raises:
        UserError: The name is not valid for a folder; Hydra raises its own exceptions.
    """
    words = ["name=''", "minutes=null", *map(normalize_gpu_list, words)]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("search", overrides=words, return_hydra_config=True)
    name = str(config.name) or f"{config.hydra.runtime.choices.task}_{kind}"
    if name in (".", "..") or "/" in name:
        raise UserError(f"name={name!r}: must be the name of a folder below {config.folder}/")
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.set_struct(config, True)
    config.name = name
    return config


def to_plain_config(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain values, references resolved."""
    return plain_config(config)
