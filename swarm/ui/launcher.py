"""Searches as processes of their own: started, gone on with and stopped; no shell is involved."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm._util.files import make_folder, private
from swarm._util.secrets import HIDDEN
from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.runs.lock import load_command, running_info

OUTPUT_FOLDER = ".page"
"""The folder beside the runs with what the searches that the page started have said."""

SEARCH_MODULE = "swarm.search"


def output_path(run: Path) -> Path:
    """Where a search that the page started writes what it says."""
    return run.parent / OUTPUT_FOLDER / f"{run.name}.txt"


def read_tail(path: Path, size: int = 20_000) -> str:
    """The last lines of a text file, harmless; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    # A line that was written over and over, such as a bar's, is its last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return escape_control_chars("\n".join(lines)).strip("\n")


def read_failure(path: Path, since: float = 0.0) -> str:
    """The error that a started search ended with; empty where it did not, or it went on since.

    Args:
        path: What it said.
        since: When something was done in the run last, in seconds since 1970.
    """
    try:
        if path.stat().st_mtime < since:
            return ""
    except OSError:
        return ""
    # Not always the last one: what is printed comes in blocks, and an error at once.
    lines = [line for line in read_tail(path).split("\n") if line.strip()]
    if errors := [line for line in lines if line.startswith("error: ")]:
        return errors[-1].removeprefix("error: ")
    return lines[-1] if any(line.startswith("Traceback (") for line in lines) else ""


class SearchLauncher:
    """Starts searches, each the leader of a group of its own, so that it outlives the page."""

    def __init__(self) -> None:
        self._begun: dict[Path, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def start_search(self, run: Path, arguments: Sequence[str], directory: Path) -> None:
        """Start or go on with a search.

        Args:
            run: Its folder, which need not be there yet.
            arguments: Of `python -m swarm.search`.
            directory: Where it is started.

        Raises:
            UserError: It is at work already, or cannot be started.
        """
        path = output_path(run)
        with self._lock:
            if self.is_starting(run) or running_info(run) is not None:
                raise UserError(f"the search {run.name} is at work already")
            try:
                make_folder(path.parent, private=True)
                with open(path, "wb", opener=private) as file:
                    self._begun[run] = subprocess.Popen(
                        [sys.executable, "-m", SEARCH_MODULE, *arguments],
                        cwd=directory,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                raise UserError(f"the search cannot be started: {error}") from None

    def is_starting(self, run: Path) -> bool:
        """Whether the process that was started for a run is there."""
        process = self._begun.get(run)
        return process is not None and process.poll() is None

    def resume_search(self, run: Path) -> None:
        """Start a search again with the arguments and in the directory that it began with.

        Raises:
            UserError: The folder does not keep them, or as `begin`.
        """
        found = load_command(run)
        if found is None:
            raise UserError(f"{run.name} keeps no command: go on by the command that began it")
        if f"name={run.name}" not in found["arguments"]:
            raise UserError(f"the command in {run.name} is that of another run; it may be a copy")
        if any(HIDDEN in str(word) for word in found["arguments"]):
            raise UserError(
                f"the command of {run.name} had a secret in it, which is not kept: go on by the "
                "command that began it; best give it as ${oc.env:NAME_OF_A_VARIABLE}"
            )
        directory = Path(str(found.get("directory", "")))
        if not directory.is_dir():
            raise UserError(f"the folder {directory} where {run.name} began is not there any more")
        self.start_search(run, [str(word) for word in found["arguments"]], directory)

    def stop_search(self, run: Path) -> None:
        """End a search as Ctrl-C does; what is done is kept.

        Raises:
            UserError: None is at work, or it is not this user's on this machine.
        """
        note = running_info(run)
        if note is None and self.is_starting(run):
            os.killpg(self._begun[run].pid, signal.SIGTERM)
            return
        if note is None:
            raise UserError(f"no search is at work in {run.name}")
        pid, host = note.get("pid"), note.get("host")
        if not isinstance(pid, int) or host != socket.gethostname() or not _holds_folder(pid, run):
            raise UserError(
                f"{run.name} is held by process {pid} of {host}, which is not this user's or not "
                "on this machine; end it there"
            )
        os.kill(pid, signal.SIGTERM)


def format_command(arguments: Sequence[str]) -> str:
    """The command as a person types it."""
    return shlex.join(["python", "-m", SEARCH_MODULE, *arguments])


def check_search(arguments: Sequence[str], directory: Path) -> tuple[bool, str]:
    """What the command line's own check says of a search; nothing is started or written.

    Returns:
        Whether it may begin, and the plan with its cost, or the error in one line.
    """
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-m", SEARCH_MODULE, *arguments, "dry_run=true"],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    said, told = (
        escape_control_chars(one.decode("utf-8", "replace")).strip()
        for one in (done.stdout, done.stderr)
    )
    if done.returncode == 0:
        return True, said
    last = (told or said or f"it ended with code {done.returncode}").split("\n")[-1]
    return False, last.removeprefix("error: ")


def _holds_folder(pid: int, folder: Path) -> bool:
    """Whether a process is this user's and has a folder open, where the system tells that."""
    about = Path(f"/proc/{pid}")
    if not about.parent.joinpath("self").exists():
        return True
    try:
        if about.stat().st_uid != os.getuid():
            return False
        return any(one.resolve() == folder.resolve() for one in (about / "fd").iterdir())
    except OSError:
        return False
