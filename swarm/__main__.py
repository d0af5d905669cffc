"""The commands: `python -m swarm` lists them, `python -m swarm NAME ...` runs one."""

import ast
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import swarm
from swarm._util import cli
from swarm._util.files import PACKAGE_FOLDER
from swarm._util.terminal import align_columns, suggest
from swarm.errors import UserError


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """An entry of the package, parsed from the first line of its module's docstring.

    Attributes:
        name: Name as in `python -m swarm.NAME`.
        about: Its description.
        example: An example command line.
    """

    name: str
    about: str
    example: str


def list_commands() -> list[CommandInfo]:
    """Return every runnable module, by name, without importing them."""
    files = {path.stem: path for path in PACKAGE_FOLDER.glob("*.py") if path.stem != "__main__"}
    files |= {path.parent.name: path for path in PACKAGE_FOLDER.glob("*/__main__.py")}
    found = []
    for name in sorted(files):
        text = files[name].read_text(encoding="utf-8")
        if re.search(r'^if __name__ == "__main__":', text, re.MULTILINE):
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            about, _, example = first.removesuffix(".").partition(": python ")
            found.append(CommandInfo(name, about, f"python {example}"))
    return found


def format_command_list() -> str:
    """Return the output of `python -m swarm`."""
    every = list_commands()
    lines = align_columns(
        [row for one in every for row in ((f"  {one.name}", one.about), ("", one.example))]
    )
    return "\n".join(
        [
            f"model-swarms {swarm.__version__}: search, combine and compare language models",
            "",
            *lines,
            "",
            "python -m swarm NAME is the same as python -m swarm.NAME; --help has examples.",
        ]
    )


def run_command(words: Sequence[str]) -> None:
    """Run a command line.

    Raises:
        UserError: Unknown command.
    """
    first = words[0] if words else "--help"
    if first in ("-h", "--help"):
        print(format_command_list())
    elif first in ("-V", "--version"):
        print(f"model-swarms {swarm.__version__}")
    else:
        names = [one.name for one in list_commands()]
        if first not in names:
            meant = suggest(first, names)
            raise UserError(f"{first}: no such command; {meant}allowed: {', '.join(names)}", 2)
        sys.argv = [f"swarm.{first}", *words[1:]]
        runpy.run_module(f"swarm.{first}", run_name="__main__", alter_sys=True)


def main() -> None:
    """Run the command line; a user's mistake is reported in one line."""
    cli.run_program(lambda: run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
