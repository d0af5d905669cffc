"""The commands: `python -m swarm` lists them, `python -m swarm NAME ...` runs one."""

import ast
import re
import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

import swarm
from swarm._util import cli
from swarm._util.files import PACKAGE_FOLDER
from swarm._util.terminal import align_columns, suggest
from swarm.errors import UserError


class CommandInfo(NamedTuple):
    """A command's name, description and example, from its module's docstring."""

    name: str
    about: str
    example: str


def list_commands() -> list[CommandInfo]:
    """Return every runnable module, by name, without importing them."""
    files = {path.stem: path for path in PACKAGE_FOLDER.glob("*.py") if path.stem != "__main__"}
    files |= {path.parent.name: path for path in PACKAGE_FOLDER.glob("*/__main__.py")}
    found = []
    for name, path in sorted(files.items()):
        text = path.read_text(encoding="utf-8")
        if re.search(r'^if __name__ == "__main__":', text, re.MULTILINE):
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            about, _, example = first.removesuffix(".").partition(": python ")
            found.append(CommandInfo(name, about, f"python {example}"))
    return found


def run_command(words: Sequence[str]) -> None:
    """Run a command line.

    Raises:
        UserError: Unknown command.
    """
    first, commands = words[0] if words else "--help", list_commands()
    names = [one.name for one in commands]
    if first in ("-h", "--help"):
        rows = [
            row for name, *about in commands for row in zip((f"  {name}", ""), about, strict=True)
        ]
        print(f"model-swarms {swarm.__version__}: search, combine and compare language models\n")
        print("\n".join(align_columns(rows)))
        print("\npython -m swarm NAME is the same as python -m swarm.NAME; --help has examples.")
    elif first in ("-V", "--version"):
        print(f"model-swarms {swarm.__version__}")
    elif first in names:
        sys.argv = [f"swarm.{first}", *words[1:]]
        runpy.run_module(f"swarm.{first}", run_name="__main__", alter_sys=True)
    else:
        meant = suggest(first, names)
        raise UserError(f"{first}: no such command; {meant}allowed: {', '.join(names)}", 2)


def main() -> None:
    """Run the command line; a user's mistake is reported in one line."""
    cli.run_program(lambda: run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
