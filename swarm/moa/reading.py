"""What a person types: a line, or several that belong together."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple, TextIO

from swarm.printing import on_terminal

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'


class Said(NamedTuple):
    """One thing that was said; `verbatim` where it stood in quotes and can be no command."""

    text: str
    verbatim: bool = False


def message(ask: Callable[[str], str]) -> Said:
    """Read until something is whole.

    A line that begins with three double quotes goes on to where three come again; a line that ends
    with a backslash goes on in the next.

    Args:
        ask: Shows a prompt and gives a line, as `input` does.

    Raises:
        EOFError: There is no more.
    """
    line = ask(PROMPT)
    if line.lstrip().startswith(FENCE):
        return Said(_fenced(line.lstrip()[len(FENCE) :], ask), True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(MORE))
    return Said("\n".join(lines).strip())


def _fenced(line: str, ask: Callable[[str], str]) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(ask(MORE))
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def keyboard(answers: TextIO | None, notes: TextIO) -> Callable[[str], str]:
    """Asks a person at a terminal.

    Args:
        answers: Where a line editor may write; `None`, and whatever is no terminal, is left alone.
        notes: Where else the prompt goes.
    """
    if not on_terminal(answers):

        def ask(prompt: str) -> str:
            print(prompt, end="", file=notes, flush=True)
            return input()

        return ask
    with contextlib.suppress(ImportError):  # what was typed is then not there to be taken again
        import readline  # noqa: F401
    return input
