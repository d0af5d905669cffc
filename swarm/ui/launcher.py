"""Starts, resumes and stops searches as separate processes, without a shell."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from swarm._util.files import make_folder, private
from swarm._util.secrets import HIDDEN
from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.runs.folder import load_command
from swarm.runs.lock import running_info

OUTPUT_FOLDER = ".page"
"""Folder, beside the runs, of the output of searches started from the application."""

SEARCH = ("-m", "swarm.search")

_CHECKING = threading.Lock()  # of the package's log, which a check replaces for its duration


def output_path(run: Path) -> Path:
    """Return the file that receives the output of a search started from the application."""
    return run.parent / OUTPUT_FOLDER / f"{run.name}.txt"


def read_tail(path: Path, size: int = 20_000) -> str:
    """Return the last lines of a text file, control characters escaped; empty without a file."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - size)
            file.seek(start)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    if start and "\n" in text:
        text = text.partition("\n")[2]  # the end of a line
    # Of a line that was overwritten with \r, such as a progress bar, only the last state counts.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return escape_control_chars("\n".join(lines)).strip("\n")


def read_failure(path: Path, since: float = 0.0) -> str:
    """Return the error with which a search ended; empty if it did not, or was resumed since.

    Args:
        path: Output file of the search.
        since: Last change of the run, in seconds since 1970.
    """
    try:
        if path.stat().st_mtime < since:
            return ""
    except OSError:
        return ""
    # The error may not be last: stdout is written in blocks, stderr immediately.
    lines = [line for line in read_tail(path).split("\n") if line.strip()]
    if errors := [line for line in lines if line.startswith("error: ")]:
        return errors[-1].removeprefix("error: ")
    return lines[-1] if any(line.startswith("Traceback (") for line in lines) else ""


class SearchLauncher:
    """Starts searches in sessions separate from the application's, so that they outlive it."""

    def __init__(self) -> None:
        self._begun: dict[Path, subprocess.Popen[bytes]] = {}
        self._stopped: dict[Path, int] = {}
        self._lock = threading.Lock()

    def start_search(self, run: Path, arguments: Sequence[str], directory: Path) -> None:
        """Start or resume a search.

        Args:
            run: Run folder, which may not exist yet.
            arguments: Arguments of `python -m swarm.search`.
            directory: Working directory.

        Raises:
            UserError: The search is already running, or cannot be started.
        """
        path = output_path(run)
        with self._lock:
            if self.is_starting(run) or running_info(run) is not None:
                raise UserError(f"the search {run.name} is already running")
            self._stopped.pop(run, None)
            try:
                make_folder(path.parent, private=True)
                with open(path, "wb", opener=private) as file:
                    self._begun[run] = subprocess.Popen(
                        [sys.executable, *SEARCH, *arguments],
                        cwd=directory,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                raise UserError(f"the search cannot be started: {error}") from None

    def is_starting(self, run: Path) -> bool:
        """Return whether the process that was started for a run is alive."""
        process = self._begun.get(run)
        return process is not None and process.poll() is None

    def is_stopping(self, run: Path) -> bool:
        """Return whether the process that `stop_search` has signalled is alive."""
        if (pid := self._stopped.get(run)) is None:
            return False
        return self.is_starting(run) or (running_info(run) or {}).get("pid") == pid

    def resume_search(self, run: Path) -> None:
        """Restart a search with its original arguments and working directory.

        Raises:
            UserError: The run folder does not contain them, or as in `start_search`.
        """
        found = load_command(run) or {}
        arguments = [str(one) for one in found.get("arguments", ())]
        directory = Path(str(found.get("directory", "")))
        for wrong, reason in (
            (not found, "has no stored command"),
            (f"name={run.name}" not in arguments, "has a command that belongs to another run"),
            (
                any(HIDDEN in one for one in arguments),
                "had a secret in its command, which is not stored (pass secrets as "
                "${oc.env:NAME_OF_A_VARIABLE})",
            ),
            (not directory.is_dir(), f"was started in {directory}, which no longer exists"),
        ):
            if wrong:
                raise UserError(f"{run.name} {reason}: resume it with the original command")
        self.start_search(run, arguments, directory)

    def stop_search(self, run: Path) -> None:
        """Stop a search as Ctrl-C does; it can be resumed.

        Raises:
            UserError: No search is running, or it belongs to another user or machine.
        """
        note = running_info(run)
        if note is None and self.is_starting(run):
            self._stopped[run] = self._begun[run].pid
            os.killpg(self._begun[run].pid, signal.SIGTERM)
            return
        if note is None:
            raise UserError(f"no search is running in {run.name}")
        pid, host = note.get("pid"), note.get("host")
        if not isinstance(pid, int) or host != socket.gethostname() or not _holds_folder(pid, run):
            raise UserError(
                f"{run.name} is running as process {pid} on {host}, of another user or "
                "machine; stop it there"
            )
        self._stopped[run] = pid
        os.kill(pid, signal.SIGTERM)


def format_command(arguments: Sequence[str]) -> str:
    """Format the command for a shell."""
    return shlex.join(["python", *SEARCH, *arguments])


def check_search(arguments: Sequence[str]) -> tuple[bool, str]:
    """Check a search by a dry run in this process; nothing is started or written.

    Returns:
        Whether the search can start; and the cost, what was understood of the task's file, and the
            plan, each on lines of its own, or a one-line error.
    """
    from swarm.api.functions import build_run, preserve_logging
    from swarm.api.overrides import compose_config
    from swarm.loop.forecast import describe_plan

    flag = "--config-dir="
    words = [one for one in arguments if not one.startswith(flag)]
    config_dir = next((Path(one[len(flag) :]) for one in arguments if one.startswith(flag)), None)
    try:
        with _CHECKING, preserve_logging(), compose_config("search", words, config_dir) as config:
            run = build_run(config, {})
            cost, _, plan = describe_plan(run, config).partition("\n")
    except UserError as error:
        return False, str(error)
    cost = cost.removeprefix("dry run: ").removesuffix(" Nothing is started or written.")
    lines = [f"{cost[:1].upper()}{cost[1:]}", run.task.about, plan]
    return True, escape_control_chars("\n".join(filter(None, lines)))


def _holds_folder(pid: int, folder: Path) -> bool:
    """Return whether a process is this user's and has a folder open; true without /proc."""
    process = Path(f"/proc/{pid}")
    if not Path("/proc/self").exists():
        return True
    try:
        mine = process.stat().st_uid == os.getuid()
        opened = (one.resolve() for one in (process / "fd").iterdir())
        return mine and folder.resolve() in opened
    except OSError:
        return False
