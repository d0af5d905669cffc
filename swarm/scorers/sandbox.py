"""Sandboxes for untrusted code: bubblewrap, or unprivileged user namespaces."""

import ast
import builtins
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from swarm._util.threads import parse_python
from swarm.errors import UserError
from swarm.scorers import calls, confined

KINDS = ("bubblewrap", "namespaces")
"""Kinds of sandbox; the first that works is used."""

DISABLE_USERNS = "--disable-userns"
"""The flag of bubblewrap 0.8 and later that forbids namespaces inside."""

CLOCK = 10
"""Wall-clock seconds per second of CPU time, as the CPU may be shared with other processes."""

FILE_SIZE, FILES = 2**26, 256
"""Maximum bytes of a file that a program writes, and maximum number of open files."""

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/nix/store",
    "/gnu/store",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
HOME = "/sandbox"
SIZES = {HOME: "64m", "/tmp": "64m", "/dev/shm": "16m"}
"""Memory file systems, the only writable paths."""

RLIMIT_OF_A_NAMESPACE = (5, 14)
"""Linux version from which on the number of processes is counted per user namespace."""


class NoSandbox(UserError):
    """There is no sandbox, or it cannot be entered."""


class Sandbox:
    """Runs a program and its test, each in a separate sandbox.

    A sandbox has: read-only /usr, /lib and Python's own folders; 64 MiB of memory file system as
    its home and as /tmp; an environment of a few fixed variables; processes that see no others and
    all end with the first; no network. The same limits apply to both.

    Args:
        kind: One of `KINDS`, or "none": processes of this user, with limits and an empty folder.
        seconds: CPU time of each process; the wall-clock limit is ten times as much.
        memory: Maximum memory, in MiB, that one process may map, and all together may hold.
        processes: Maximum number of processes at a time, not counted if `kind` is "none".
    """

    def __init__(self, kind: str, seconds: int, memory: int, processes: int) -> None:
        self.kind, self.clock = kind, CLOCK * seconds
        self.memory, self.processes = memory * 2**20, processes
        self.limits = {
            "RLIMIT_CPU": seconds,
            "RLIMIT_AS": self.memory,
            "RLIMIT_FSIZE": FILE_SIZE,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": FILES,
        }
        release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
        if kind != "none" and release >= RLIMIT_OF_A_NAMESPACE:
            self.limits["RLIMIT_NPROC"] = processes

    def run(self, programs: Sequence[str], prompt: str, test: str) -> bool | None:
        """Return whether the first program that is Python passes; `None` if none is Python.

        Raises:
            NoSandbox: It cannot be entered here.
        """
        ends = socket.socketpair()
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as errors,
        ):
            tasks = [{"role": "play", "programs": list(programs)}, _judging(prompt, test)]
            started: list[subprocess.Popen[bytes]] = []
            try:
                for task, end in zip(tasks, ends, strict=True):
                    home_folder = Path(folder) / str(task["role"])
                    home_folder.mkdir()
                    started.append(self._begin(home_folder, task, end, errors))
                for end in ends:
                    end.close()
                outcome = self._verdict(started[1])
            finally:
                for end in ends:
                    end.close()
                for process in started:
                    _end(process)
            errors.seek(0)
            if outcome not in ("passed", "failed", "unreadable", "late"):
                stderr_lines = errors.read(2000).decode("utf-8", "replace").strip().splitlines()
                raise NoSandbox(
                    stderr_lines[-1]
                    if stderr_lines
                    else outcome or "its processes ended immediately"
                )
            return None if outcome == "unreadable" else outcome == "passed"

    def _begin(
        self, home_folder: Path, task: Mapping[str, Any], end: socket.socket, errors: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start one of the two processes, with its task on its standard input."""
        inside = str(home_folder) if self.kind == "none" else HOME
        message = {
            **task,
            "enter": self.kind == "namespaces",
            "socket": end.fileno(),
            "folder": str(home_folder),
            "home": HOME,
            "links": links(),
            "paths": paths(),
            "devices": devices(),
            "sizes": SIZES,
            "limits": self.limits,
            "clock": self.clock,
            "memory": self.memory,
            "processes": self.processes,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        }
        stdout = subprocess.PIPE if task["role"] == "judge" else subprocess.DEVNULL
        try:
            with _before_all_others():
                process = subprocess.Popen(
                    self._command(),
                    cwd=home_folder,
                    env=_environment(inside),
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=errors,
                    start_new_session=True,
                    pass_fds=[end.fileno()],
                )
        except OSError as error:
            raise NoSandbox(f"{error.filename}: {error.strerror}") from None
        assert process.stdin is not None
        with suppress(OSError):  # a process that has already ended is detected by its verdict
            process.stdin.write(json.dumps(message).encode())
            process.stdin.close()
        return process

    def _command(self) -> list[str]:
        python = [sys.executable, "-I", "-c", _source()]
        if self.kind != "bubblewrap":
            return python
        command = [
            "bwrap",
            "--unshare-user",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            DISABLE_USERNS,
            "--die-with-parent",
            "--as-pid-1",
            "--new-session",
            "--hostname",
            "sandbox",
            "--uid",
            str(confined.USER),
            "--gid",
            str(confined.USER),
        ]
        for target, size in SIZES.items():
            number = int(size.removesuffix("m")) * 2**20
            command += ["--size", str(number), "--perms", "1777", "--tmpfs", target]
        for path in links():
            command += ["--symlink", os.readlink(path), path]
        for path in paths():
            command += ["--ro-bind", path, path]
        for path in devices():
            command += ["--dev-bind", path, path]
        # /proc is read-only too: for a program of root's, /proc/sys is the machine's own.
        command += ["--proc", "/proc", "--remount-ro", "/proc", "--remount-ro", "/"]
        return [*command, "--chdir", HOME, "--", *python]

    def _verdict(self, process: "subprocess.Popen[bytes]") -> str:
        """Return the verdict of the test's process."""
        assert process.stdout is not None
        process.stdin = None  # closed: communicate() must not write to it
        try:
            output, _ = process.communicate(timeout=self.clock + CLOCK)
        except subprocess.TimeoutExpired:
            return "late"
        # No output: killed by its supervisor, or by a limit.
        return output.decode("utf-8", "replace") or ("late" if process.returncode == 0 else "")


def choose(kind: str, memory: int, processes: int) -> str:
    """Return the kind of sandbox to use.

    Args:
        kind: One of `KINDS`, "none", or "auto": the first of `KINDS` that works.

    Raises:
        UserError: It does not work here, or none does.
    """
    if kind == "none":
        return kind
    failed = {}
    for one in KINDS if kind == "auto" else (kind,):
        if (reason := why_not(one)) is None:
            return one
        failed[one] = reason
    reasons = "; ".join(f"{one}: {reason}" for one, reason in failed.items())
    raise UserError(
        f"task.scorer.sandbox={kind}: no sandbox works here, and code written by a model is not "
        f"run without one ({reasons}). Install bubblewrap or allow user namespaces; "
        "scorer.sandbox=none runs it with your permissions"
    )


@functools.cache
def why_not(kind: str) -> str | None:
    """Return why a kind of sandbox fails here, `None` if it works; tried once per process."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if kind == "bubblewrap" and not _forbids_namespaces():
        return "bwrap is older than 0.8"
    if sys.platform != "linux":
        return "needs Linux"
    try:
        Sandbox(kind, 10, 1024, 16).run(["x = 1"], "", "assert x == 1")
    except NoSandbox as error:
        return str(error)
    return None


def _judging(prompt: str, test: str) -> dict[str, Any]:
    """Return the task of a test's process."""
    requested = re.findall(r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)", prompt, re.MULTILINE)
    imports = re.findall(r"^(?:import|from)[ \t].*$", prompt, re.MULTILINE)
    return {
        "role": "judge",
        "test": test,
        "requested": requested,
        "imports": [*filter(_compiles, imports)],
        "modules": {name: one for name, one in _modules(test).items() if name not in requested},
    }


def _compiles(line: str) -> bool:
    try:
        compile(line, "prompt", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _modules(test: str) -> dict[str, str]:
    """Return the modules that a test uses without an import: `math` of `math.isclose`."""
    try:
        nodes = list(ast.walk(parse_python(test)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    owners = [one.value for one in nodes if isinstance(one, ast.Attribute)]
    names = {one.id for one in owners if isinstance(one, ast.Name)}
    known = {name: name for name in sys.stdlib_module_names} | calls.ALIASES
    return {name: known[name] for name in names & known.keys() if not hasattr(builtins, name)}


BOOT = """
import sys, types
for name, text in {modules!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(module))
module.main()
"""


@functools.cache
def _source() -> str:
    """Return the source of a sandbox's program: its modules, under their names."""
    files = {one.__name__: Path(str(one.__file__)) for one in (calls, confined)}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return BOOT.format(modules={"swarm": "", "swarm.scorers": "", **texts})


def _forbids_namespaces() -> bool:
    """Return whether this bubblewrap can forbid namespaces, in which memory would be unlimited."""
    completed = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return DISABLE_USERNS in completed.stdout + completed.stderr


@functools.cache
def paths() -> list[str]:
    """Return the paths visible inside, read-only: the system's programs and Python's own."""
    python = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        str(Path(sys.executable).parent),
        str(Path(sys.executable).resolve().parent),
    }
    candidates = [*SYSTEM, *python, *_libraries()]
    existing = [path for path in candidates if os.path.exists(path) and not os.path.islink(path)]
    shallow = sorted({path for path in existing if path != "/"}, key=len)
    return [one for i, one in enumerate(shallow) if not _below(one, shallow[:i])]


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


@functools.cache
def links() -> list[str]:
    """Return symbolic links to create inside, as /lib often is one to /usr/lib."""
    return [path for path in SYSTEM if os.path.islink(path)]


@functools.cache
def devices() -> list[str]:
    """Return the devices available inside."""
    return [path for path in DEVICES if os.path.exists(path)]


def _libraries() -> list[str]:
    """Return the shared libraries that Python itself is linked with."""
    named = re.compile(r"/(ld-|lib(c|m|dl|pthread|util|rt|python[\d.]*)[-.])[^/]*$")
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[-1] for line in lines if line.count(" /")}
        return sorted(path for path in mapped if named.search(path))
    return []


def _environment(home: str) -> dict[str, str]:
    """Return all environment variables set inside."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **one}


@contextmanager
def _before_all_others() -> Iterator[None]:
    """Raise the CPU priority of processes started inside the block, if the user is root.

    RLIMIT_NPROC does not apply to root's processes, so that a fork bomb would starve the
    supervisor, which counts them.
    """
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, priority)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with its group; a sandbox ends with its first process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
