"""A Python function as a model: f(prompt) -> text."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Stream
from swarm.models.http_errors import to_one_line
from swarm.models.threaded import ThreadedModel


class FunctionModel(ThreadedModel):
    """Answers with the return value of a function, or the pieces that it yields.

    The function is called with the request's prompt: a string, or the conversation as a tuple of
    (role, content) turns. It returns a string, a `Completion`, or an iterator of strings. An
    exception fails the request. Token limit, temperature and seed are not passed.

    Args:
        function: The function, or its location "package.module:name". The module must be importable
            from `sys.path` or the current folder; it is imported on first use.
        concurrency: Number of threads that may call it at once; more than one requires a
            thread-safe function.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(self, function: str | Callable[..., Any], concurrency: int = 1) -> None:
        if not callable(function):
            module, found, name = str(function).partition(":")
            if not (module and found and name):
                raise UserError(
                    f"function={function!r}: must be package.module:name, or a function"
                )
        function_text = function if isinstance(function, str) else function_name(function)
        super().__init__(f"function/{function_text}", concurrency)
        self.function = function

    def check(self) -> None:
        """Import the function; see `swarm.tasks.base.RequiresSetup.check`.

        Raises:
            UserError: The module does not exist or has no such function.
        """
        self._load_function()

    def open(self, device: str) -> None:
        """Do nothing; there is nothing to load."""

    def source(self) -> str:
        """Return the source text of the function's file; empty if there is none.

        Raises:
            UserError: See `check`.
        """
        try:
            return inspect.getsource(inspect.getmodule(self._load_function()))  # type: ignore[arg-type]
        except (OSError, TypeError):
            return ""

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        if request.choices:
            raise UserError(f"{self.who}: a function cannot score choices")
        function = self._load_function()
        try:
            result = function(request.prompt)
            if isinstance(result, Iterator):
                result = yield from _join_pieces(result)
            elif isinstance(result, str | Completion):
                result = result if isinstance(result, Completion) else Completion(result)
                yield Delta(result.text, result.reasoning)
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.who} failed: {describe_exception(error, function)}") from error
        if not isinstance(result, Completion):
            raise UserError(
                f"{self.who} returned {result!r:.80}: must be a string, a Completion or an "
                f"iterator "
                "of strings"
            )
        return replace(result, model=result.model or self.who)

    def _load_function(self) -> Callable[..., Any]:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        # sys.path lacks the current folder when the command is a script in another folder.
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.append(str(Path.cwd()))
        try:
            found: Any = import_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{self.who}: {module} cannot be imported from {Path.cwd()}: "
                f"{describe_exception(error, None)}"
            ) from error
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UserError(f"{self.who}: {module} has no function {name}")
        return found  # type: ignore[no-any-return]


def function_name(function: Callable[..., Any]) -> str:
    """Return the function's name for messages."""
    named = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}:{named}" if module else str(named)


def describe_exception(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Format an exception in one line, with the last line of the function's file if known."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(function, "__code__", None)
    if code is None:
        relevant = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    else:
        relevant = [frame for frame in frames if frame.filename == code.co_filename]
    location = (
        f" ({Path(relevant[-1].filename).name} line {relevant[-1].lineno})" if relevant else ""
    )
    return f"{type(error).__name__}: {to_one_line(str(error))}{location}"


def _join_pieces(pieces: Iterator[Any]) -> Stream:
    texts = []
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"it yielded {piece!r:.80}, which is not a string")
        texts.append(piece)
        yield Delta(piece)
    return Completion("".join(texts))
