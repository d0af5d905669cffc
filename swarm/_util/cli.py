"""Shared code of the commands: errors in one line, signals, Hydra's start."""

import errno
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from swarm._util.config_help import (
    default_options,
    entry_config,
    list_options,
    option_file,
    print_help,
    read_keys,
)
from swarm._util.files import DATA_SUFFIXES, conf_folder
from swarm._util.terminal import escape_unencodable, suggest
from swarm._version import __version__
from swarm.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def normalize_arguments(arguments: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Convert what people write to what Hydra reads: paths, GPUs, keys that a yaml omits.

    Args:
        arguments: Those of a command.
        folders: With further options, besides those of `--config-dir`.
    """
    given = re.findall(r"(?m)^(?:--config-dir|-cd)[=\n](.*)$", "\n".join(arguments))
    groups = [conf_folder(), *map(Path, given), *folders]
    words = [one for word in arguments for one in _expand_paths(word, groups)]
    # Plain commas would be a sweep.
    words = [re.sub(r"^gpus=(\d+(?:,\d+)*)$", r"gpus=[\1]", word) for word in words]
    return allow_omitted_task_keys(words)


def _expand_paths(word: str, groups: Sequence[Path]) -> list[str]:
    """Replace the path of `task=FILE`, `pool=FOLDERS` or `model=FOLDER` by an option."""
    key, _, value = word.partition("=")
    value = value.strip("'\"")
    # os.path takes any text; a Path raises for one that is too long.
    if any(os.path.isfile(one / key / f"{value}.yaml") for one in groups):
        return [word]
    quoted, path = "'" + value.replace("'", "\\'") + "'", Path(value)
    if key == "task" and (path.suffix in DATA_SUFFIXES or os.path.exists(path)):
        name = re.sub(r"\W+", "_", path.stem, flags=re.ASCII)
        return ["task=file", f"task.file={quoted}", f"task.name={name}"]
    # A name without a slash may be a misspelt option.
    if key in ("pool", "model") and ("/" in value or any(map(os.path.isdir, value.split(",")))):
        option, place = {"pool": ("adapters", "folder"), "model": ("local", "path")}[key]
        return [f"{key}={option}", f"{key}.{place}={quoted}"]
    return [word]


def allow_omitted_task_keys(arguments: Sequence[str]) -> list[str]:
    """Let `task.KEY=VALUE` set a key that the yaml of a custom task leaves out.

    Hydra requires `++task.KEY=VALUE` for such a key. Only for keys that a task of conf/ has, so
    that misspelt ones are refused.
    """
    chosen = [word.removeprefix("task=") for word in arguments if word.startswith("task=")]
    folder = conf_folder() / "task"
    own = {path.stem for path in folder.glob("*.yaml")} - {"file"}
    if not chosen or own.issuperset(chosen[-1].split(",")):
        return list(arguments)
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")]
    known = {name for text in texts for name in re.findall(r"(?m)^([a-z]\w*):", text)}
    key = re.compile(r"task\.([a-z]\w*)=")
    return [
        f"++{word}" if (found := key.match(word)) and found[1] in known else word
        for word in arguments
    ]


def exit_with_error(error: Exception) -> NoReturn:
    """Print the error in one line and exit."""
    mistake = to_user_error(error)
    print(f"error: {mistake}", file=sys.stderr)
    sys.exit(mistake.code)


def to_user_error(error: Exception) -> UserError:
    """Return the UserError that caused an error, else Hydra's message as one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UserError):
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, UserError) else UserError(format_hydra_error(error), 2)


def format_hydra_error(error: Exception) -> str:
    """Format Hydra's own error message in one line."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    if found := re.search(r"Could not find '([^']+)' Available options in '[^']+':(.*)", text):
        group, _, option = found[1].rpartition("/")
        options = found[2].split("Config search path")[0].split()
        meant = suggest(option, options, f"{group}=")
        return f"{group}={option}: no such option; {meant}allowed: {', '.join(options)}"
    if found := re.search(r"Error parsing override '([^']*)' missing EQUAL", text):
        groups = {o: g for g in (*default_options(), "scorer") for o in list_options(g)}
        near = [
            f"{groups[one]}={one} (KEY=VALUE)" for one in get_close_matches(found[1], groups, 1)
        ]
        return f"{found[1]}: write {near[0] if near else 'KEY=VALUE'}; `--help` lists the keys"
    if found := re.search(r"In '([^']+)': Could not override '([^']+)'", text):
        option = "=".join(found[1].rsplit("/", 1))
        return f"{option} cannot be used here: it sets {found[2]}, which this command does not have"
    found = re.search(r"Could not override '([^']+)'", text)
    if found and (suggestion := _suggest_key(found[1])):
        return f"Could not override '{found[1]}'; {suggestion} `--help` lists the keys"
    if "'task." not in text:  # only custom tasks may have keys that their yaml omits
        text = re.sub(r" To append to your config use \S+$", "", text)
    return re.sub(r" full_key: .*$", "", text).rstrip(".") + "; `--help` lists the keys"


def _suggest_key(key: str) -> str:
    """Suggest an existing key for an unknown one; empty if none is similar."""
    known: dict[str, list[str]] = {}
    for group in (*default_options(), "scorer"):
        known.setdefault(group, [])
        prefix = "task.scorer" if group == "scorer" else group
        for option in list_options(group) if group != "experiment" else ():  # of other groups' keys
            for one, _ in read_keys(option_file(group, option)):
                known.setdefault(f"{prefix}.{one}", []).append(f"{group}={option}")
    known |= {one: [] for one, _ in read_keys(entry_config())}
    if key in known:
        # A custom task may accept it although its yaml omits it, as Hydra's message explains.
        return "" if key.startswith("task.") else f"it is a key of {' or '.join(known[key])};"
    parent, _, leaf = key.rpartition(".")
    near = get_close_matches(parent, {one.rpartition(".")[0] for one in known}, 1)
    for keys in (
        [one for one in known if one.rpartition(".")[0] in near],
        [one for one in known if one.count(".") < 2],
    ):
        if matches := get_close_matches(leaf, [one.rpartition(".")[2] for one in keys], 1, 0.7):
            same = [one for one in keys if one.rpartition(".")[2] == matches[0]]
            return f"did you mean {' or '.join(same[:3])}?"
    return ""


class TerminationSignal(KeyboardInterrupt):
    """SIGTERM was received; handled with the same cleanup as Ctrl-C."""


_stop_signals: list[KeyboardInterrupt] = []
"""Stop signals that this process received."""


def handle_termination_signals() -> None:
    """Handle SIGTERM (sent by a scheduler or `kill`) like Ctrl-C; exit code 143."""

    def raise_stop(number: int, _: object) -> NoReturn:
        stop = TerminationSignal() if number == signal.SIGTERM else KeyboardInterrupt()
        _stop_signals.append(stop)
        raise stop

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, raise_stop)


@contextmanager
def one_line_errors(name: str | None = "...") -> Iterator[None]:
    """Replace the traceback of a user's mistake by one line, and exit.

    Args:
        name: The run's name for the resume hint after Ctrl-C; empty if the command itself prints
            it; `None` if nothing can be resumed.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # Compiled code may swallow an interrupt and raise its own error: torch, for instance, a
        # ValueError from the shape of a tensor that safetensors reads.
        swallowed = _stop_signals[-1] if _stop_signals else None
        stop = error if isinstance(error, KeyboardInterrupt) else swallowed
        if stop is None:
            if isinstance(error, UserError | HydraException | OmegaConfBaseException):
                exit_with_error(error)
            if isinstance(error, BrokenPipeError) and _discard_stdout(only_closed=True):
                sys.exit(1)
            raise
        if error is not stop:
            logging.getLogger(__name__).info("error raised by the interrupt", exc_info=error)
        name_text = f" with name={name}" if name else ""
        effect = "starts again" if name is None else "resumes"
        print(f"stopped; the same command{name_text} {effect}", file=sys.stderr)
        sys.exit(143 if isinstance(stop, TerminationSignal) else 130)


def run_program(main: Callable[[], Any]) -> NoReturn:
    """Run a module's `main` as a program, and exit with the code that it returns.

    Ends with one line if the output cannot be written; without a line if its reader has closed it,
    as in `| head -3`. Characters that the output's encoding lacks are escaped.
    """
    escape_unencodable()
    try:
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()  # else an error of it is raised at the interpreter's end
    except UserError as error:
        exit_with_error(error)
    except BrokenPipeError:
        if not _discard_stdout(only_closed=True):
            raise
        code = 1
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_stdout()
        exit_with_error(UserError(f"cannot write the output: {error.strerror}"))
    sys.exit(code)


def _discard_stdout(only_closed: bool = False) -> bool:
    """Discard what is written to the standard output from now on; return whether it is.

    Args:
        only_closed: Whether to do so only if its reader has closed it; other broken pipes, such as
            that of a worker, are errors.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, UnsupportedOperation):  # no output, or one without a descriptor
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if only_closed and not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


def run_hydra_entry(main: Callable[[], Any]) -> NoReturn:
    """Run a Hydra entry as a program, with our error messages instead of Hydra's."""
    run_program(lambda: _run_hydra(main))


def _run_hydra(main: Callable[[], Any]) -> None:
    sys.argv[1:] = normalize_arguments(sys.argv[1:])
    if "--version" in sys.argv[1:]:
        print(f"model-swarms {__version__}")  # Hydra's flag of this name prints its own version
        return
    if print_help(sys.argv[1:]):
        return
    if "dry_run=true" in sys.argv[1:]:
        # Hydra would create the folder before our code runs.
        sys.argv[1:] = [w for w in sys.argv[1:] if not w.lstrip("+").startswith("hydra.run.dir=")]
    # Spinning OpenMP threads take CPU time from other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _check_flags(sys.argv[1:])
    # Makes Hydra raise instead of printing, so that the message is ours.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    handle_termination_signals()
    try:
        with one_line_errors():
            main()
    except ValueError as error:  # of Hydra, about flags
        complaint = str(error)
        if "Config group override must be" in complaint:
            complaint = "give a group the name of an option, as in optimizer=pso; `--help` lists "
            complaint += f"them ({error})"
        elif "flag can only be used" not in complaint and not complaint.endswith("does not exist!"):
            raise
        exit_with_error(UserError(complaint, 2))


def instantiate_config(cfg: "DictConfig", omit: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Instantiate a composed configuration; return the object and the plain configuration.

    Args:
        cfg: The configuration.
        omit: Keys that are not part of the object.

    Raises:
        UserError: A value is not allowed; Hydra wraps it.
    """
    from hydra.utils import instantiate

    from swarm._util.secrets import check_secrets, plain_config

    config = plain_config(cfg)
    check_secrets(config)
    tree = {key: value for key, value in config.items() if key not in omit}
    task = tree.get("task")
    if isinstance(task, dict) and "_target_" not in task:
        raise UserError(
            "task: its yaml has no _target_, the class of the task, such as "
            "swarm.tasks.exact_match.ExactMatch or swarm.tasks.multiple_choice.MultipleChoice "
            "(docs/tasks.md)",
            2,
        )
    made = instantiate(tree, _convert_="all")
    if about := made.task.about:
        print(about, file=sys.stderr)
    return made, config


def _check_flags(arguments: Sequence[str]) -> None:
    """Exit with one line for an unknown flag, for which Hydra would print its usage."""
    from hydra._internal.utils import get_args_parser

    flags = get_args_parser()._option_string_actions
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and not any(known.startswith(flag) for known in flags):
            message = f"{flag}: no such flag; {suggest(flag, flags)}keys are set as "
            exit_with_error(UserError(f"{message}{flag.lstrip('-')}=VALUE", 2))
        if flag == "--package" and not any(one.startswith(("--cfg", "-c")) for one in arguments):
            exit_with_error(UserError("--package has no effect without --cfg", 2))
