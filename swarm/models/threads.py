"""A model that answers in plain Python: one thread a request, so that none keeps others waiting."""

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from swarm.errors import UserError
from swarm.models import Completion, Delta, Request, Stream
from swarm.models.failures import RequestTimeout
from swarm.models.stops import stream_until_stop


class ThreadedModel:
    """Generates, attempts and streams by what `_speak` says of one request.

    At most `concurrency` requests are under way at once, over all callers. A request that takes
    longer than its timeout is given up: its thread ends when it comes to its next piece, and with
    the process if it never does.

    Args:
        who: The model, as messages call it.
        concurrency: From 1 on; `None`: `_at_once` says it when something is asked.

    Raises:
        UserError: The concurrency is not allowed.
    """

    def __init__(self, who: str, concurrency: int | None) -> None:
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise UserError(f"{who}: concurrency={concurrency!r}: must be a whole number from 1 on")
        self.who, self.concurrency = who, concurrency
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
        """Answer one request, in a thread of its own; what it raises is a `UserError`."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`."""
        return self._run_requests(requests, through=False)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.attempt`."""
        return self._run_requests(requests, through=True)

    def stream(self, request: Request) -> Stream:
        """See `swarm.models.stream`."""
        return self._stream_in_thread(request, streamed=True)

    def _run_requests(self, requests: Sequence[Request], through: bool) -> list[Any]:
        """One for each request; unless it goes `through`, the first failure ends it."""
        found: list[Any] = [None] * len(requests)
        waiting = queue.SimpleQueue[int]()
        for number in range(len(requests)):
            waiting.put(number)
        failed: list[BaseException] = []

        def run_worker() -> None:
            while not failed and not waiting.empty():
                with suppress(queue.Empty):
                    number = waiting.get_nowait()
                    try:
                        found[number] = _exhaust_stream(self._stream_in_thread(requests[number], streamed=False))
                    except BaseException as error:
                        found[number] = error
                        if not (through and isinstance(error, UserError)):
                            failed.append(error)

        count = min(self._concurrency_limit(), len(requests))
        threads = [threading.Thread(target=run_worker, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            failed.append(error)
            raise
        if failed:
            raise failed[0]
        return found

    def _acquire_slot(self) -> "_ConcurrencySlot":
        with self._lock:
            self._gate = self._gate or threading.Semaphore(self._concurrency_limit())
        return _ConcurrencySlot(self._gate)

    def _stream_in_thread(self, request: Request, streamed: bool) -> Stream:
        """What `_speak` says in a thread of its own; given up at the request's timeout."""
        place = self._acquire_slot()
        start = time.monotonic()
        end = None if request.timeout is None else start + request.timeout
        said: queue.SimpleQueue[Delta | Completion | BaseException] = queue.SimpleQueue()

        def run_generation() -> None:
            stream = stream_until_stop(self._generate_one(request, streamed), request.stop)
            try:
                while not place.is_released():
                    said.put(next(stream))
            except StopIteration as whole:
                said.put(whole.value)
            except BaseException as error:
                said.put(error)
            finally:
                stream.close()
                place.release()

        threading.Thread(target=run_generation, daemon=True).start()
        try:
            while True:
                left = None if end is None else max(0.0, end - time.monotonic())
                one = said.get(timeout=left)
                if isinstance(one, BaseException):
                    raise one
                if isinstance(one, Completion):
                    return replace(one, seconds=time.monotonic() - start)
                yield one
        except queue.Empty:
            message = f"{self.who}: no answer within {request.timeout:g} s (timeout)"
            raise RequestTimeout(message) from None
        finally:
            place.release()


class _ConcurrencySlot:
    """One of the gate's places, taken when made; who leaves it first gives it back."""

    def __init__(self, gate: threading.Semaphore) -> None:
        gate.acquire()
        self._gate, self._once = gate, threading.Lock()

    def is_released(self) -> bool:
        """Whether it was given back."""
        return self._once.locked()

    def release(self) -> None:
        """Give it back, if that was not done."""
        if self._once.acquire(blocking=False):
            self._gate.release()


def _exhaust_stream(stream: Stream) -> Completion:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            return completion
