"""Python functions as models, f(prompt) -> text; the base class with one thread per request."""

import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from swarm._util.threads import (
    StreamTimeout,
    forward_items,
    run_concurrently,
    stream_from_thread,
)
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Stream, stream_until_stop
from swarm.models.http_errors import RequestTimeout, to_one_line


class ThreadedModel:
    """Base of models that implement `_generate_one` for a single request.

    At most `concurrency` requests run at once, over all callers. A request that exceeds its timeout
    is abandoned: its thread ends at the next piece, or with the process if there is none.

    Args:
        label: The model's name in messages.
        concurrency: At least 1; `None` uses `_concurrency_limit` at the first request.

    Raises:
        UserError: The concurrency is invalid.
    """

    def __init__(self, label: str, concurrency: int | None) -> None:
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise UserError(f"{label}: concurrency={concurrency!r}: must be an integer, 1 or more")
        self.label, self.concurrency = label, concurrency
        self._init_locks()

    def _init_locks(self) -> None:
        self._gate: threading.Semaphore | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_gate", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_locks()

    def _concurrency_limit(self) -> int:
        return self.concurrency or 1

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        """Answer one request, called in its thread; raise `UserError` on failure."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`."""
        return self._run_requests(requests, through=False)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        return self._run_requests(requests, through=True)

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.base.stream`."""
        return self._stream_in_thread(request, streamed=True)

    def _run_requests(self, requests: Sequence[Request], through: bool) -> list[Any]:
        """Return one result per request; unless `through`, the first failure stops the rest."""
        failed: list[BaseException] = []

        def answer(request: Request) -> Completion | BaseException | None:
            if failed:
                return None
            try:
                return _exhaust_stream(self._stream_in_thread(request, streamed=False))
            except BaseException as error:
                if not (through and isinstance(error, UserError)):
                    failed.append(error)
                return error

        calls = [partial(answer, request) for request in requests]
        answers = dict(run_concurrently(calls, self._concurrency_limit()))
        if failed:
            raise failed[0]
        return [answers[number] for number in range(len(requests))]

    def _acquire_slot(self) -> "_ConcurrencySlot":
        with self._lock:
            self._gate = self._gate or threading.Semaphore(self._concurrency_limit())
        return _ConcurrencySlot(self._gate)

    def _stream_in_thread(self, request: Request, streamed: bool) -> Stream:
        """Run `_generate_one` in a new thread; abandon it at the request's timeout."""
        slot = self._acquire_slot()
        start = time.monotonic()

        def run_generation(emit: Callable[[Delta], None]) -> Completion:
            try:
                with closing(
                    stream_until_stop(self._generate_one(request, streamed), request.stop)
                ) as stream:
                    return forward_items(stream, emit)
            finally:
                slot.release()

        try:
            done = yield from stream_from_thread(run_generation, "swarm-model", request.timeout)
            return replace(done, seconds=time.monotonic() - start)
        except StreamTimeout:
            message = f"{self.label}: no response within {request.timeout:g} s (timeout)"
            raise RequestTimeout(message) from None
        finally:
            # An abandoned thread must not keep others waiting.
            slot.release()


class _ConcurrencySlot:
    """One unit of a semaphore, acquired on construction and released at most once."""

    def __init__(self, gate: threading.Semaphore) -> None:
        gate.acquire()
        self._gate, self._once = gate, threading.Lock()

    def release(self) -> None:
        """Release it unless already released."""
        if self._once.acquire(blocking=False):
            self._gate.release()


def _exhaust_stream(stream: Stream) -> Completion:
    return forward_items(stream, lambda _: None)


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
            raise UserError(f"{self.label}: a function cannot score choices")
        function = self._load_function()
        try:
            result = function(request.prompt)
            if isinstance(result, Iterator):
                result = yield from _join_pieces(result)
            elif isinstance(result, str | Completion):
                result = result if isinstance(result, Completion) else Completion(result)
                yield Delta(result.text, result.reasoning)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{self.label} failed: {describe_exception(error, function)}"
            ) from error
        if not isinstance(result, Completion):
            raise UserError(
                f"{self.label} returned {result!r:.80}: must be a string, a Completion or an "
                f"iterator "
                "of strings"
            )
        return replace(result, model=result.model or self.label)

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
                f"{self.label}: {module} cannot be imported from {Path.cwd()}: "
                f"{describe_exception(error, None)}"
            ) from error
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UserError(f"{self.label}: {module} has no function {name}")
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
