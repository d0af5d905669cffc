"""Confine a process: namespaces, limits, and a supervisor that ends all with it.

`swarm.scorers.sandbox` starts this and `swarm.scorers.calls` as `python -I -c SOURCE`, so this
module imports the standard library only.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from swarm.scorers.calls import Link, judge, play

LIBC = ctypes.CDLL(None, use_errno=True)
NEW = {
    "NS": 0x20000,
    "CGROUP": 0x2000000,
    "UTS": 0x4000000,
    "IPC": 0x8000000,
    "USER": 0x10000000,
    "PID": 0x20000000,
    "NET": 0x40000000,
}
NOSUID, NODEV, NOEXEC, RDONLY, REMOUNT, BIND, REC, PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs -> flags of mount that a user namespace may not clear."""
DEATH_SIGNAL, DUMPABLE, DROP_BOUND, NO_NEW_PRIVILEGES = 1, 4, 24, 38
USER = 65534


def checked(result: int, what: str) -> None:
    """Raise the C library's error, if there was one."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """See mount(2)."""
    texts = [None if one is None else os.fsencode(one) for one in (source, target, kind, data)]
    checked(LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def enter(task: dict[str, Any]) -> None:
    """Move into new namespaces with only the paths of the task; returns in a child process.

    The parent waits for the child, which is process 1 of its namespace, and exits with its status.
    """
    uid, gid = os.getuid(), os.getgid()
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    checked(LIBC.unshare(sum(NEW.values())), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{USER} {uid} 1"),
        ("gid_map", f"{USER} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        os.close(task["socket"])
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 127)
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    build_root(task)
    for capability in range(64):
        LIBC.prctl(DROP_BOUND, capability, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked(LIBC.capset(header, none), "capset")
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def build_root(task: dict[str, Any]) -> None:
    """Build a root of read-only paths and small memory file systems, and change into it."""
    root = task["folder"]
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for target, size in task["sizes"].items():
        os.makedirs(root + target, exist_ok=True)
        mount("tmpfs", root + target, "tmpfs", NOSUID | NODEV, f"size={size},mode=1777")
    for path in task["links"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
    for path in (*task["paths"], *task["devices"]):
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        mount(path, target, None, BIND | REC)
    for target in mounted_below(root):
        if target[len(root) :] not in ("", *task["devices"], *task["sizes"]):
            read_only(target)
    os.makedirs(root + "/proc")
    with suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    # Mounting proc is not permitted in a container whose own /proc is masked.
    with suppress(OSError):
        # Read-only: for a program of root's, /proc/sys is the machine's own.
        mount("proc", root + "/proc", "proc", NOSUID | NODEV | NOEXEC | RDONLY)
    os.chdir(root)
    checked(LIBC.pivot_root(b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", 2), "umount")
    os.chdir("/")
    mount(None, "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(task["home"])
    LIBC.sethostname(b"sandbox", 7)


def mounted_below(root: str) -> list[str]:
    """Return the mount points at and below a path."""
    with open("/proc/self/mountinfo") as file:
        mount_points = [line.split()[4] for line in file]
    # mountinfo escapes blanks and the like in octal.
    mount_points = [
        re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), one) for one in mount_points
    ]
    return [
        mount_point
        for mount_point in mount_points
        if mount_point == root or mount_point.startswith(root + "/")
    ]


def read_only(place: str) -> None:
    """Make a bind mount read-only, with the flags that cannot be cleared."""
    have = os.statvfs(place).f_flag
    kept_flags = sum(flag for known, flag in KEPT_FLAGS.items() if have & known)
    mount(None, place, None, REMOUNT | BIND | RDONLY | NOSUID | kept_flags)


def supervise(worker: int, task: dict[str, Any]) -> NoReturn:
    """Wait for the worker, kill it when it exceeds its limits, and end this process.

    As process 1 of its namespace it takes all others with it, whatever session they are in.
    """
    end = time.monotonic() + task["clock"]
    while True:
        ended_pid = 0
        with suppress(ChildProcessError):
            # A few at a time: a fork bomb leaves orphans faster than they are reaped.
            for _ in range(16):
                ended_pid = os.waitpid(-1, os.WNOHANG)[0]
                if ended_pid in (0, worker):
                    break
        if ended_pid == worker or time.monotonic() > end or (os.getpid() == 1 and excess(task)):
            break
        signal.sigtimedwait([signal.SIGCHLD], 0.02)
    if ended_pid != worker:
        os.kill(worker, signal.SIGKILL)
    os._exit(0)


def excess(task: dict[str, Any]) -> bool:
    """Return whether this namespace's processes are too many, or hold too much memory together."""
    try:
        found = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    except OSError:
        return False
    if len(found) > task["processes"]:
        return True
    pages = 0
    for name in found:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") > task["memory"]


def main() -> NoReturn:
    """Read the task from standard input, confine this process, and run it."""
    task = json.load(sys.stdin)
    if task["enter"]:
        enter(task)
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # the program may not trace its supervisor
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    worker = os.fork()
    if worker:
        os.close(task["socket"])
        supervise(worker, task)
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, task["nice"])
    signal.alarm(task["clock"])
    connection = socket.socket(fileno=task["socket"])
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    for limit, maximum in task["limits"].items():
        resource.setrlimit(getattr(resource, limit), (maximum, maximum))
    link = Link(connection, task["role"] == "judge")
    if task["role"] == "judge":
        judge(link, task, verdict)
    os.close(verdict)
    try:
        play(link, task)
    finally:
        os._exit(0)  # does not wait for the program's threads
