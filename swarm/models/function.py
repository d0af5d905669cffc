"""Python functions as models, f(prompt) -> text; the base class of models that run in threads."""

import inspect
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from swarm._util.settings import Positive, checked
from swarm._util.threads import (
    Cancelled,
    forward_items,
    run_in_thread,
    shared_event_loop,
)
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Request,
    Stream,
    completion_to_json,
    request_to_json,
    stream_until_stop,
)
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http import Call, RetryingClient
from swarm.models.http_errors import to_one_line
from swarm.models.rate_limit import Limits, RateLimiter
from swarm.models.sampling import CompletionFields, PreparedRequest, Sample, SampledModel, Send


class ThreadedModel(SampledModel):
    """Base of models that implement `_generate_one` for a single request, which runs in a thread.

    At most `concurrency` requests run at once, over all callers. A request that exceeds its timeout
    is abandoned: its thread ends at the next piece, or with the process if there is none. A
    `RequestError` is retried as those of an endpoint.

    Args:
        label: The model's name in messages.
        concurrency: Number of concurrent requests, at least 1.
        cache: Cache of the answers; `None` stores none.
        identity: JSON value that distinguishes the model from all others sharing the cache.

    Attributes:
        turns: Rate limiter.
        throttle: Adaptive rate accepted by the model's server, if it has one.
    """

    def __init__(
        self,
        label: str,
        concurrency: int,
        cache: Cache | None = None,
        identity: Sequence[Any] = (),
    ) -> None:
        self.label = self.cache_label = label
        self.cache, self._identity = cache, list(identity)
        self._limit_concurrency(concurrency)

    def _limit_concurrency(self, concurrency: int) -> None:
        self.batches = concurrency
        self.turns = RateLimiter(Limits(concurrency=concurrency))
        self.throttle = self.turns.get_throttle(self.label)

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        """Answer one request, called in its thread; raise `UserError` on failure."""
        raise NotImplementedError

    def prepare(self, request: Request) -> PreparedRequest:
        """See `SampledModel.prepare`."""
        plain = replace(request, stop_check=None, sample=0)
        key = make_cache_key("model", self._identity, request_to_json(plain))
        # Without a cache each of equal requests is answered: a function may be random.
        equal = self.cache is not None and request.temperature == 0
        return PreparedRequest(self, request, key, equal)

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Send]:
        """See `SampledModel.open_session`."""

        async def send(batch: Sequence[Sample]) -> list[CompletionFields]:
            (call, sample) = batch[0]
            request = replace(call.request, sample=sample)
            return [await self._run_request(_ThreadExchange(self, request, None), request)]

        yield send

    def stream_uncached(self, call: PreparedRequest) -> Generator[Delta, None, CompletionFields]:
        """See `SampledModel.stream_uncached`."""

        def run(emit: Callable[[Delta], None]) -> Coroutine[Any, Any, CompletionFields]:
            return self._run_request(_ThreadExchange(self, call.request, emit), call.request)

        return (yield from shared_event_loop().stream_items(run))

    async def _run_request(self, exchange: "_ThreadExchange", request: Request) -> CompletionFields:
        retrying = RetryingClient(self.label, self.turns, self.throttle)
        return await retrying(
            exchange,
            Call(request, timeout=request.timeout),
            lambda done, seconds: completion_to_json(replace(done, seconds=seconds)),
        )


class _ThreadExchange:
    """Answers one request in a thread; see `swarm.models.http.Transport`."""

    def __init__(
        self, model: ThreadedModel, request: Request, emit: Callable[[Delta], None] | None
    ) -> None:
        self.model, self.request, self.emit = model, request, emit
        self.started = False

    async def __call__(self, body: object) -> Completion:
        closed = threading.Event()

        def forward(delta: Delta) -> None:
            if closed.is_set():
                raise Cancelled
            self.started = True
            if self.emit:
                self.emit(delta)

        def generate() -> Completion:
            stream = self.model._generate_one(self.request, self.emit is not None)
            with closing(stream_until_stop(stream, self.request.stop)) as pieces:
                return forward_items(pieces, forward)

        try:
            return await run_in_thread(generate)
        finally:
            closed.set()


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
                result = result if isinstance(result, Completion) else Completion(result)
                yield Delta(result.text, result.reasoning)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{self.label} failed: {describe_exception(error, function)}"
            ) from error
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
