"""Responses in OpenAI's format, complete or as stream chunks, and the queue of requests."""

import asyncio
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from swarm._util.threads import Cancelled, forward_items, submit
from swarm.models.base import (
    Completion,
    Delta,
    Model,
    Request,
    Token,
    stream_until_stop,
    sum_usage,
)
from swarm.serve.api_errors import HttpError

MIN_LOGPROB = -9999.0
"""Log probability that OpenAI reports for impossible tokens; JSON has no infinity."""

LENGTH_ERROR_CODES = ("context_length_exceeded", "string_above_max_length")
FILTER_ERROR_CODES = ("content_filter", "content_policy_violation")
"""Endpoints' codes for the end of a text; see `Completion.finish`."""


class ChatResponseBuilder:
    """Builds the chat completion response to one request.

    Args:
        model: The served model's name.
        logprobs: Include log probabilities of tokens.
        usage: End a stream with its usage.
    """

    def __init__(self, model: str, logprobs: bool, usage: bool) -> None:
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.model, self.logprobs, self.usage = model, logprobs, usage

    def build_response(self, samples: Sequence[Completion]) -> dict[str, Any]:
        """Build the response with all samples.

        Raises:
            HttpError: A sample failed, or lacks requested log probabilities.
        """
        choices = [self._build_choice(number, one) for number, one in enumerate(samples)]
        return {
            **self._response_head("chat.completion"),
            "choices": choices,
            "usage": usage_to_json(samples),
        }

    def _build_choice(self, number: int, sample: Completion) -> dict[str, Any]:
        calls = [dict(call) for call in sample.tool_calls]
        text = sample.text or None if calls else sample.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if sample.reasoning:
            message["reasoning_content"] = sample.reasoning
        return {"index": number, "message": message, **self._finish_fields(sample)}

    def open_sample(self, number: int) -> bytes:
        """Encode the event that starts a sample."""
        return self._encode_chunk(number, {"role": "assistant", "content": ""})

    def encode_delta(self, number: int, delta: Delta) -> bytes:
        """Encode the event of a piece; empty if the piece has no text."""
        fields: dict[str, Any] = {"reasoning_content": delta.reasoning, "content": delta.text}
        fields = {key: text for key, text in fields.items() if text}
        if delta.tool_calls:
            fields["tool_calls"] = list(delta.tool_calls)
        return self._encode_chunk(number, fields) if fields else b""

    def close_sample(self, number: int, sample: Completion) -> bytes:
        """Encode the event that ends a sample, with its log probabilities.

        Raises:
            HttpError: See `build_response`.
        """
        return self._encode_chunk(number, {}, **self._finish_fields(sample))

    def close_stream(self, samples: Sequence[Completion]) -> bytes:
        """Encode the events that end the stream."""
        terminator = b"data: [DONE]\n\n"
        if not self.usage:
            return terminator
        head = self._response_head("chat.completion.chunk")
        return encode_event({**head, "choices": [], "usage": usage_to_json(samples)}) + terminator

    def _encode_chunk(self, number: int, delta: dict[str, Any], **end: Any) -> bytes:
        finish = end or {"finish_reason": None, "logprobs": None}
        choice = {"index": number, "delta": delta, **finish}
        later = {"usage": None} if self.usage else {}
        return encode_event(
            {**self._response_head("chat.completion.chunk"), "choices": [choice], **later}
        )

    def _response_head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _finish_fields(self, sample: Completion) -> dict[str, Any]:
        if sample.finish in LENGTH_ERROR_CODES:
            raise HttpError(
                f"{self.model}: the messages are too long", 400, "messages", sample.finish
            )
        if self.logprobs and sample.text and not sample.tokens:
            raise HttpError(f"logprobs: {self.model} does not return them", 400, "logprobs")
        logprobs = (
            {"content": [_token_to_json(one) for one in sample.tokens]} if self.logprobs else None
        )
        return {"finish_reason": finish_reason(sample.finish), "logprobs": logprobs}


def finish_reason(word: str) -> str:
    """Return OpenAI's finish reason; an unknown reason is "stop"."""
    if word in FILTER_ERROR_CODES:
        return "content_filter"
    return word if word in ("length", "tool_calls") else "stop"


def usage_to_json(samples: Sequence[Completion]) -> dict[str, Any]:
    """Return the tokens of all calls of the samples, and their cost if known."""
    usage = sum_usage(samples)
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.tokens,
    }
    return {**counts, "cost": usage.cost} if usage.priced else counts


def encode_event(content: Any) -> bytes:
    """Encode one event of a stream."""
    return b"data: " + encode_json(content) + b"\n\n"


def encode_json(content: Any) -> bytes:
    """Encode JSON; lone surrogates, which models and clients may produce, become "?"."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def _token_to_json(token: Token) -> dict[str, Any]:
    return {
        **_logprob_entry(token.text, token.logprob),
        "top_logprobs": [_logprob_entry(*t) for t in token.top],
    }


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    utf8_bytes = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": utf8_bytes}


Mailbox = asyncio.Queue[Any]
"""Messages for one client: `TURN_SIGNAL` once, indexed pieces and completions, or an exception."""

TURN_SIGNAL = object()

RETRY_AFTER_S = 1.0
"""Seconds to wait before a retry if the queue is full."""


class ClientDisconnected(Exception):
    """The client no longer waits for the answer."""


class RequestQueue:
    """Limits concurrent requests; further ones wait in order, up to a maximum.

    Must be used on a single event loop.
    """

    def __init__(self, concurrency: int, queue: int) -> None:
        self.free, self.queue = concurrency, queue
        self.waiting: deque[Mailbox] = deque()
        self.here: set[Mailbox] = set()
        self.stopped = False

    def enter_queue(self, mail: Mailbox) -> None:
        """Enter the queue; `TURN_SIGNAL` is sent when the request may start.

        Raises:
            HttpError: The queue is full, or the server is shutting down.
        """
        if self.stopped:
            raise shutdown_error()
        if self.free:
            self.free -= 1
            mail.put_nowait(TURN_SIGNAL)
        elif len(self.waiting) < self.queue:
            self.waiting.append(mail)
        else:
            raise HttpError(
                f"{self.queue} requests are waiting already (--queue); try again later",
                429,
                again=True,
                after=RETRY_AFTER_S,
            )
        self.here.add(mail)

    def leave_queue(self, mail: Mailbox) -> bool:
        """Leave the queue; return whether a turn was granted, which `release_turn` must pass on."""
        self.here.discard(mail)
        if mail not in self.waiting:
            return True
        self.waiting.remove(mail)
        return False

    def release_turn(self) -> None:
        """Pass on a turn, after its last thread has ended."""
        if self.waiting:
            self.waiting.popleft().put_nowait(TURN_SIGNAL)
        else:
            self.free += 1

    def stop_all(self) -> None:
        """Send an error to all clients."""
        self.stopped = True
        for mail in self.here:
            mail.put_nowait(shutdown_error())


def shutdown_error() -> HttpError:
    """Return the error for a server shutdown."""
    return HttpError("the server is shutting down; try again later", 503, again=True)


async def stream_samples(
    line: RequestQueue,
    model: Model,
    request: Request,
    count: int,
    left: Callable[[], Awaitable[None]],
) -> AsyncGenerator[tuple[int, Delta | Completion], None]:
    """Yield indexed pieces of all samples as they arrive, and finally each completion.

    Closing the generator stops generation at the next piece of each sample; local models inside a
    mixture stop at the next token.

    Args:
        line: Queue of requests.
        left: Returns when the client has disconnected.

    Raises:
        HttpError: The queue is full, or the server is shutting down.
        ClientDisconnected: The client has disconnected.
        Exception: Error of a sample.
    """
    mail: Mailbox = asyncio.Queue()
    line.enter_queue(mail)
    disconnect_watch = asyncio.ensure_future(left())
    disconnect_watch.add_done_callback(lambda _: mail.put_nowait(ClientDisconnected()))
    disconnected = threading.Event()
    started = False
    missing = count
    try:
        while missing:
            event = await mail.get()
            if isinstance(event, BaseException):
                raise event
            if event is TURN_SIGNAL:
                started = True
                stoppable = replace(request, stop_check=lambda _: disconnected.is_set())
                start_sample_threads(
                    line,
                    model,
                    [replace(stoppable, sample=n) for n in range(count)],
                    mail,
                    disconnected,
                )
                continue
            missing -= isinstance(event[1], Completion)
            yield event
    finally:
        disconnected.set()
        disconnect_watch.cancel()
        if line.leave_queue(mail) and not started:
            line.release_turn()


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> None:
    """Call a function on a loop, from a thread."""
    with suppress(RuntimeError):  # the loop is closed: the server has ended
        loop.call_soon_threadsafe(function, *args)


def start_sample_threads(
    line: RequestQueue,
    model: Model,
    requests: Sequence[Request],
    mail: Mailbox,
    gone: threading.Event,
) -> None:
    """Answer each request in a thread, and release the turn when all threads have ended."""
    loop = asyncio.get_running_loop()
    running = len(requests)

    def on_thread_end() -> None:
        nonlocal running
        running -= 1
        if not running:
            line.release_turn()

    def run_sample(request: Request, number: int) -> Completion:
        def emit(delta: Delta) -> None:
            if gone.is_set():
                raise Cancelled
            _call_on_loop(loop, mail.put_nowait, (number, delta))

        with (
            closing(model.stream(request)) as pieces,
            closing(stream_until_stop(pieces, request.stop)) as deltas,
        ):
            return forward_items(deltas, emit)

    def deliver_outcome(number: int, future: "Future[Completion]") -> None:
        error = future.exception()
        if not isinstance(error, Cancelled):
            _call_on_loop(loop, mail.put_nowait, error if error else (number, future.result()))
        _call_on_loop(loop, on_thread_end)

    for number, request in enumerate(requests):
        try:
            future = submit(run_sample, request, number, name="swarm-serve")
        except RuntimeError as error:  # too many threads
            mail.put_nowait(error)
            on_thread_end()
        else:
            future.add_done_callback(partial(deliver_outcome, number))
