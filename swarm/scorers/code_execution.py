"""A scorer that runs the code a model wrote against the item's test, in sandboxes."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

from swarm._util import validation
from swarm.errors import UserError
from swarm.scorers import sandbox
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import text_field_error

ALLOWED = ("auto", *sandbox.KINDS, "none")

log = logging.getLogger(__name__)

CODE_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[^\n`]*)\n(?P<code>.*?)(?P<close>^[ \t]*```[ \t]*(?:\n|\Z)|\Z)",
    re.MULTILINE | re.DOTALL,
)
PYTHON_LANGUAGES = ("", "python", "python3", "py")
UNINDENTED_LINE = re.compile(r"\n(?=[^\s)\]}])")
"""End of a continued function's body: the next line that is not indented."""

CODE_START = re.compile(r"[ \t]*(?:(?:def|class|import|from|async)[ \t]|@|\w+[ \t]*=(?!=))")
"""Possible first line of code within a text."""

MAX_LINES, MAX_STARTS, MAX_RUNS = 1000, 30, 300
"""Maximum number of lines, start lines and runs of lines tried if a text is not only code."""


class CodeScorer:
    """1 if the model's code passes the item's Python "test", else 0.

    The code is the first fenced block of Python (or of no language) in the text. Without one it is
    the first of these that is Python: the item's "prompt" and the text after it; the same up to the
    first line that is not indented, where a continued function ends; the text alone; the longest
    run of its lines that begins as code does. The test is run after the code, in its namespace, and
    passes if nothing is raised: a series of `assert`s. A text that contains no Python is unparsed.

    The test runs in one process and the code in another, each in a separate sandbox
    (`swarm.scorers.sandbox`): bubblewrap, or else namespaces created here, without network, with an
    environment of a few fixed variables, read-only system folders, and processes that all end with
    the first. The test calls what the code defines, and gets values of built-in types as data and
    any other object as a proxy. The verdict is computed in the test's process, which the code
    cannot reach. Consequences: Python's builtins and the modules that the test names are the test's
    own; an object of the code's own class equals none of the test's values, and no operator accepts
    both; the test cannot derive classes from the code's, or await its coroutines.

    Args:
        seconds: CPU time for the code and for the test; the wall-clock limit is ten times as much.
        memory: Maximum memory, in MiB, that one process may map and all may hold together.
        processes: Maximum number of processes of the code at a time.
        sandbox: "auto" takes the first that works of "bubblewrap" and "namespaces"; "none" runs the
            code with the rights of the user, within the limits of a process.

    Raises:
        UserError: A value is not allowed.
    """

    highest: float | None = 1.0
    votes = False

    def __init__(
        self, seconds: int = 5, memory: int = 1024, processes: int = 32, sandbox: str = "auto"
    ) -> None:
        self.seconds = validation.check_positive_int("scorer.seconds", seconds)
        self.memory = validation.check_positive_int("scorer.memory", memory)
        self.processes = validation.check_positive_int("scorer.processes", processes)
        if sandbox not in ALLOWED:
            raise UserError(f"task.scorer.sandbox={sandbox}: must be one of {', '.join(ALLOWED)}")
        self.sandbox = sandbox

    def check(self) -> None:
        """See `RequiresSetup.check`.

        Raises:
            UserError: There is no sandbox, or not even an empty program can be run within the
                limits.
        """
        kind = sandbox.choose(self.sandbox, self.memory, self.processes)
        if kind == "none":
            log.warning(
                "task.scorer.sandbox=none: code written by a model runs with your permissions"
            )
        try:
            # Four MB: less may fit into memory that the interpreter has already reserved.
            passed = self._run_programs(["data = bytearray(1 << 22)"], "", "assert True")
        except sandbox.NoSandbox:
            passed = False
        if not passed:
            raise UserError(
                f"task.scorer.memory={self.memory}, task.scorer.seconds={self.seconds}: not even an"
                " empty program can run within these limits; raise them (the limits require"
                " Linux)."
            )

    def open(self, device: str) -> None:
        """See `RequiresSetup.open`; there is nothing to load."""

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; it needs a "prompt" and a "test" that is Python."""
        for field in ("prompt", "test"):
            if (wrong := text_field_error(item, field)) is not None:
                return wrong
        try:
            compile(item["test"], "test", "exec")
        except (SyntaxError, ValueError) as error:
            return f'its "test" is not Python: {error}'
        return None

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """See `swarm.tasks.free_text.Scorer`."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self._score_text, items, texts))

    def build_stop_check(self, item: Item) -> Callable[[str], bool]:
        """See `swarm.tasks.free_text.SupportsEarlyStop`: the first block of Python is closed."""
        return is_block_closed

    def _score_text(self, item: Item, text: str) -> Score:
        if not text.strip():
            return Score(0.0, None, text)
        passed = self._run_programs(
            candidate_programs(item["prompt"], text), item["prompt"], item["test"]
        )
        return Score(float(passed or False), None if passed is None else text, text)

    def _run_programs(self, programs: Sequence[str], prompt: str, test: str) -> bool | None:
        """Return whether the first program that is Python passes; `None` if none is Python."""
        kind = sandbox.choose(self.sandbox, self.memory, self.processes)
        return sandbox.Sandbox(kind, self.seconds, self.memory, self.processes).run(
            programs, prompt, test
        )


def candidate_programs(prompt: str, text: str) -> list[str]:
    """Return the possible programs of a text, the likeliest first."""
    block = _find_code_block(text)
    if block is not None:
        return [dedent(block["code"]), prompt + block["code"]]
    body = UNINDENTED_LINE.split(text, maxsplit=1)[0]
    return [prompt + text, *([prompt + body] if body.strip() else []), text, *find_code_runs(text)]


def find_code_runs(text: str) -> list[str]:
    """Return runs of lines that may be code within a text, the longest first.

    One begins with a line as code does, and ends at the end of the text or before a line that is
    not indented.
    """
    lines = text.split("\n")[:MAX_LINES]
    begins = [i for i, line in enumerate(lines) if CODE_START.match(line)][:MAX_STARTS]
    ends = [*(i for i, line in enumerate(lines) if line[:1].strip()), len(lines)][-MAX_RUNS:]
    found = [(begin, end) for begin in begins for end in ends if begin < end]
    found.sort(key=lambda run: run[0] - run[1])
    return [dedent("\n".join(lines[begin:end])) for begin, end in found[:MAX_RUNS]]


def is_block_closed(text: str) -> bool:
    """Return whether the first fenced block of Python is closed; later text does not count."""
    block = _find_code_block(text)
    return block is not None and block["close"].endswith("\n")


def _find_code_block(text: str) -> re.Match[str] | None:
    blocks = CODE_FENCE.finditer(text)
    return next((b for b in blocks if b["language"].strip().lower() in PYTHON_LANGUAGES), None)
