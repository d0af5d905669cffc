"""A Python whose heavy imports are done once: every start of it is a fork, with the caller's files.

`python()` gives the path of a program to use in place of `sys.executable`. It has `-m swarm.X ...`,
the project's own `FILE.py ...` and what multiprocessing spawns run in a new process with the
caller's files, folder, environment and signals, as a cold one would, but without its seconds of
importing torch and transformers. Anything else goes to the real Python, `COLD`, and so does a call
with another setting that is read while importing. Two things differ in a warm process: strings
hash alike in all, and what an import prints is not seen. A test of either uses `COLD`.
"""

import atexit
import fcntl
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Others are imported where they are used: every start of the warm Python reads this file.

COLD = sys.executable
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_IMPORT = ("HF_", "TRANSFORMERS_", "OMP_", "MKL_", "TORCH_", "CUDA_", "PYTHON")
"""How the names of variables begin that are read while importing."""


def settings() -> dict[str, str]:
    """The variables that are read while importing, but for those that may come later.

    Libraries set the last two in the process that imports them (Ray and lm_eval): with them in the
    comparison, every later command of a test process would start cold, at four CPU seconds more.
    """
    late = ("PYTHON", "PYTHONPATH", "PYTHONBREAKPOINT", "HF_XET_HIGH_PERFORMANCE")
    return {k: v for k, v in os.environ.items() if k.startswith(AT_IMPORT) and k not in late}


def use(path: str) -> None:
    """Have this process start its Pythons with this program."""
    import multiprocessing

    sys.executable = path
    multiprocessing.set_executable(path)


def python() -> str:
    """The path of the warm Python; the process behind it starts with the first use of it."""
    import subprocess
    import tempfile
    import threading

    folder = tempfile.TemporaryDirectory(prefix="warm")
    path, address = Path(folder.name, "python"), str(Path(folder.name, "socket"))
    path.write_text(
        f"#!{COLD} -IS\nimport sys\nsys.path.insert(0, {str(HERE)!r})\n"
        f"import warm_python\nwarm_python.ask({COLD!r}, {address!r}, {settings()!r})\n"
    )
    path.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    command = [COLD, str(HERE / "warm_python.py"), str(listener.fileno()), str(path)]
    servers: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        select.select([listener], [], [])
        servers.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[listener.fileno()]
            )
        )

    def end() -> None:
        for server in servers:
            assert server.stdin
            server.stdin.close()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:  # a test that failed has left something running
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        folder.cleanup()

    threading.Thread(target=begin, daemon=True).start()
    atexit.register(end)
    return str(path)


def ask(cold: str, address: str, warm_with: dict[str, str]) -> None:
    """What the warm Python does when it is started: have its arguments run, and end as they do."""
    words = sys.argv[1:]
    first, second = [*words, "", ""][:2]
    ours = first.endswith(".py") and ROOT in Path(first).absolute().parents
    # With .venv below ROOT, Ray's workers would be too; Ray ends their process group, the server's.
    ours = ours and "site-packages" not in first
    module = first == "-m" and second.startswith("swarm")
    spawned = first == "-c" and second.startswith("from multiprocessing.spawn import spawn_main")
    if not (ours or module or spawned) or settings() != warm_with:
        os.execv(cold, [cold, *words])
    fds = [fd for fd in sorted(map(int, os.listdir("/dev/fd"))) if _inherited(fd)]
    ignored = [int(one) for one in SIGNALS if signal.getsignal(one) is signal.SIG_IGN]
    request = {
        "words": words,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "fds": fds,
        "ignored": ignored,
    }
    content = json.dumps(request).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        socket.send_fds(line, [len(content).to_bytes(4, "big")], fds)
        line.sendall(content)
        for number in set(SIGNALS) - set(ignored):
            signal.signal(number, lambda got, _: line.sendall(bytes([got])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        answer = line.recv(4, socket.MSG_WAITALL)
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if len(answer) == 4 else 70)


def _inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the one that listed them
        return False


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork for every request until stdin ends; comes back in a fork only, with its request."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [], 1)
        while _reaped(os.WNOHANG):
            pass
        if 0 in ready:
            while _reaped(0):
                pass
            os._exit(0)
        if listener in ready:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return keep(line)
            line.close()


def _reaped(how: int) -> bool:
    """Whether a child had ended and is put away."""
    try:
        return os.waitpid(-1, how)[0] != 0
    except ChildProcessError:
        return False


def keep(line: socket.socket) -> dict[str, Any]:
    """Watch over one run and tell its end; comes back in the run itself, with its request."""
    head, fds, _, _ = socket.recv_fds(line, 4, 64, socket.MSG_WAITALL)
    request: dict[str, Any] = json.loads(line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    if (run := os.fork()) == 0:
        line.close()
        install(request, fds)
        return request
    for fd in (*fds, 0, 1, 2):
        os.close(fd)
    while True:
        ready, _, _ = select.select([line], [], [], 0.01)
        done, status = os.waitpid(run, os.WNOHANG)
        if done:
            line.sendall(status.to_bytes(4, "big"))
            os._exit(0)
        if ready:
            # Nothing to read means that who asked was killed.
            for number in line.recv(16) or [signal.SIGKILL]:
                os.kill(run, number)


def install(request: dict[str, Any], fds: list[int]) -> None:
    """Make this process the one that was asked for: its files, folder, environment, signals."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, wanted in zip(high, request["fds"], strict=True):
        os.dup2(fd, wanted)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Anew, for what they were opened on was another kind of file.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def run(words: list[str]) -> int:
    """What a Python does with these arguments; gives the exit code."""
    import runpy

    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [place for place in more if place and place not in sys.path]
    places = [os.getcwd(), *sys.path] if words[0] == "-m" else sys.path
    ours = next((place for place in places if Path(place, "swarm").is_dir()), ROOT)
    if Path(ours) != ROOT:  # another checkout, whose modules are not those of here
        for name in [name for name in sys.modules if name.partition(".")[0] == "swarm"]:
            del sys.modules[name]
    try:
        if words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).absolute().parent))
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> None:
    """End this process without taking to pieces what the fork gave it, which takes a second."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    import gc
    from contextlib import suppress

    gc.disable()
    import hydra
    import rich.console  # noqa: F401
    import scipy.stats  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    with suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # a table of all models, made when first read
    # What every search imports, but for the entries themselves, and the grammar of its settings.
    sys.path.insert(0, str(ROOT))
    import swarm.engine.decode
    import swarm.engine.hf
    import swarm.engine.lora
    import swarm.executors.inline
    import swarm.loop.run
    import swarm.optimizers.pso
    import swarm.tasks.multiple_choice  # noqa: F401
    from swarm._util.files import conf_folder

    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        hydra.compose("search", overrides=["name=x"])
    sys.path.remove(str(ROOT))
    # A fork that looks through all these objects would copy them.
    gc.freeze()
    gc.enable()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    use(sys.argv[2])
    leave(run(asked["words"]))
