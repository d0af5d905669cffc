"""Python functions as models, f(prompt) -> text; the base class of models that run in threads."""

import inspect
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from swarm._util.settings import Positive, checked
from swarm._util.threads import Cancelled, forward_items, run_in_thread, shared_event_loop
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    CompletionFields,
    Delta,
    Request,
    Stream,
    completion_to_json,
    stream_until_stop,
)
from swarm.models.cache import Cache
from swarm.models.http import Call, RetryingClient
from swarm.models.http_errors import to_one_line
from swarm.models.rate_limit import Limits, RateLimiter
from swarm.models.sampling import PreparedRequest, Sample, SampledModel, Send


class ThreadedModel(SampledModel):
    """Base of models that implement `_generate_one` for a single request, which runs in a thread.

    At most `concurrency` requests run at once, over all callers. A request that exceeds its timeout
    is abandoned: its thread ends at the next piece, or with the process if there is none. A
    `RequestError` is retried as those of an endpoint.

    Args:
        label: The model's name in messages.
        concurrency: Number of concurrent requests, at least 1.
        cache, identity: See `SampledModel`.

    Attributes:
        client: Retries requests and limits their number.
    """

    def __init__(
        self,
        label: str,
        concurrency: int,
        cache: Cache | None = None,
        identity: Sequence[Any] = (),
    ) -> None:
        super().__init__(label, label, cache, identity)
        self._limit_concurrency(concurrency)

    def _limit_concurrency(self, concurrency: int) -> None:
        self.batches = concurrency
        self.client = RetryingClient(self.label, RateLimiter(Limits(concurrency=concurrency)))

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        """Answer one request, called in its thread; raise `UserError` on failure."""
        raise NotImplementedError

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Send]:

        async def send(batch: Sequence[Sample]) -> list[CompletionFields]:
            (call, sample) = batch[0]
            return [await self._run_request(replace(call.request, sample=sample))]

        yield send

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        run = partial(self._run_request, call.request)
        return (yield from shared_event_loop().stream_items(run))

    def _run_request(
        self, request: Request, emit: Callable[[Delta], None] | None = None
    ) -> Coroutine[Any, Any, CompletionFields]:
        async def send(call: Call, note: Callable[[Delta], None]) -> Completion:
            closed = threading.Event()

            def forward(delta: Delta) -> None:
                if closed.is_set():
                    raise Cancelled
                note(delta)

            def generate() -> Completion:
                stream = self._generate_one(request, emit is not None)
                with closing(stream_until_stop(stream, request.stop)) as pieces:
                    return forward_items(pieces, forward)

            try:
                return await run_in_thread(generate)
            finally:
                closed.set()

        def read(done: Completion, seconds: float) -> CompletionFields:
            return completion_to_json(replace(done, seconds=seconds))

        return self.client.call(send, Call(request, timeout=request.timeout), read, emit)


FunctionOrName = Annotated[str | Callable[..., Any], "package.module:name, or a function"]


@checked()
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

    def __init__(self, function: FunctionOrName, concurrency: Positive = 1) -> None:
        if isinstance(function, str):
            module, _, name = function.partition(":")
            if not (module and name):
                raise UserError(f"function={function}: must be package.module:name, or a function")
        named = function if isinstance(function, str) else function_name(function)
        super().__init__(f"function/{named}", concurrency)
        self.function = function

    def check(self) -> None:
        """Import the function.

        Raises:
            UserError: The module does not exist or has no such function.
        """
        self._load_function()

    def fingerprint(self) -> str:
        """Return the digest of the function's file; empty if there is none.

        Raises:
            UserError: See `check`.
        """
        try:
            text = inspect.getsource(inspect.getmodule(self._load_function()))  # type: ignore[arg-type]
            return sha256(text.encode()).hexdigest()[:16]
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
                result = Completion(result) if isinstance(result, str) else result
                yield Delta(result.text, result.reasoning)
        except (Exception, SystemExit) as error:
            words = describe_exception(error, function)
            raise UserError(f"{self.label} failed: {words}") from error
        if not isinstance(result, Completion):
            raise UserError(
                f"{self.label} returned {result!r:.80}: must be a string, a Completion or an "
                "iterator of strings"
            )
        return replace(result, model=result.model or self.label)

    def _load_function(self) -> Callable[..., Any]:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        return import_function(module, name, self.label)


def import_function(module: str, name: str, label: str) -> Callable[..., Any]:
    """Import a function, also from the current folder.

    Args:
        module, name: Its module, and its name there, which may have dots.
        label: What messages begin with.

    Raises:
        UserError: The module cannot be imported, or has no such function.
    """
    # sys.path lacks the current folder when the command is a script in another folder.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{label}: {module} cannot be imported from {Path.cwd()}: "
            f"{describe_exception(error, None)}"
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UserError(f"{label}: {module} has no function {name}")
    return found  # type: ignore[no-any-return]


def _join_pieces(pieces: Iterator[Any]) -> Stream:
    texts = []
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"it yielded {piece!r:.80}, which is not a string")
        texts.append(piece)
        yield Delta(piece)
    return Completion("".join(texts))


def function_name(function: Callable[..., Any]) -> str:
    """Return the function's name for messages."""
    named = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}:{named}" if module else str(named)


def describe_exception(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Format an exception in one line, with the last line of the function's file if known."""
    code = getattr(function, "__code__", None)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if (frame.filename == code.co_filename if code else frame.filename != __file__)
        and "importlib" not in frame.filename
    ]
    place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {to_one_line(str(error))}{place}"
