"""What a person types: a line, or several that belong together."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple, TextIO

from swarm.printing import is_tty

PROMPT, CONTINUATION_PROMPT = ">>> ", "... "
FENCE = '"""'


class UserInput(NamedTuple):
    """One thing that was said; `verbatim` where it stood in quotes and can be no command."""

    text: str
    verbatim: bool = False


def read_input(ask: Callable[[str], str]) -> UserInput:
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
        return UserInput(_read_fenced(line.lstrip()[len(FENCE) :], ask), True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(CONTINUATION_PROMPT))
    return UserInput("\n".join(lines).strip())


def _read_fenced(line: str, ask: Callable[[str], str]) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(ask(CONTINUATION_PROMPT))
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def make_line_reader(answers: TextIO | None, notes: TextIO) -> Callable[[str], str]:
    """Asks a person at a terminal.

    Args:
        answers: Where a line editor may write; `None`, and whatever is no terminal, is left alone.
        notes: Where else the prompt goes.
    """
    if not is_tty(answers):

        def read_line(prompt: str) -> str:
            print(prompt, end="", file=notes, flush=True)
            return input()

        return read_line
    with contextlib.suppress(ImportError):  # what was typed is then not there to be taken again
        import readline  # noqa: F401
    return input
