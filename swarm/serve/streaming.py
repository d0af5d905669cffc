"""Responses in OpenAI's format, complete or as stream chunks, and the queue of requests."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from swarm._util.threads import Cancelled, forward_items, run_in_thread
from swarm.models.base import Completion, Delta, Request, Stream, stream_until_stop, sum_usage
from swarm.models.openai import MIN_LOGPROB
from swarm.serve.api_errors import HttpError

LENGTH_ERROR_CODES = ("context_length_exceeded", "string_above_max_length")
"""Endpoints' codes for a text that is too long; see `Completion.finish`."""

FINISH_REASONS = {
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "content_policy_violation": "content_filter",
}
"""OpenAI's finish reasons by that of a model; others are "stop"."""


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
        self._samples: dict[int, Completion] = {}
        self._opened: set[int] = set()

    def build_response(self, samples: Sequence[Completion]) -> dict[str, Any]:
        """Build the response with all samples.

        Raises:
            HttpError: A sample failed, or lacks requested log probabilities.
        """
        choices = [self._build_choice(number, one) for number, one in enumerate(samples)]
        head = self._response_head("chat.completion")
        return {**head, "choices": choices, "usage": usage_to_json(samples)}

    def _build_choice(self, number: int, sample: Completion) -> dict[str, Any]:
        calls = [dict(call) for call in sample.tool_calls]
        text = sample.text or None if calls else sample.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if sample.reasoning:
            message["reasoning_content"] = sample.reasoning
        return {"index": number, "message": message, **self._finish_fields(sample)}

    def encode_event(self, number: int, event: Delta | Completion) -> bytes:
        """Encode a piece or the end of a sample, after the beginning of a new one.

        Raises:
            HttpError: See `build_response`.
        """
        head = b""
        if number not in self._opened:
            self._opened.add(number)
            head = self._encode_chunk(number, {"role": "assistant", "content": ""})
        if isinstance(event, Completion):
            self._samples[number] = event
            return head + self._encode_chunk(number, {}, **self._finish_fields(event))
        fields: dict[str, Any] = {"reasoning_content": event.reasoning, "content": event.text}
        fields["tool_calls"] = list(event.tool_calls)
        fields = {key: value for key, value in fields.items() if value}
        return head + self._encode_chunk(number, fields) if fields else head

    def encode_end(self) -> bytes:
        """Encode the events that end the stream."""
        terminator = b"data: [DONE]\n\n"
        if not self.usage:
            return terminator
        usage = usage_to_json(list(self._samples.values()))
        head = self._response_head("chat.completion.chunk")
        return encode_event({**head, "choices": [], "usage": usage}) + terminator

    def _encode_chunk(self, number: int, delta: dict[str, Any], **end: Any) -> bytes:
        finish = end or {"finish_reason": None, "logprobs": None}
        choice = {"index": number, "delta": delta, **finish}
        later = {"usage": None} if self.usage else {}
        head = self._response_head("chat.completion.chunk")
        return encode_event({**head, "choices": [choice], **later})

    def _response_head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _finish_fields(self, sample: Completion) -> dict[str, Any]:
        if sample.finish in LENGTH_ERROR_CODES:
            message = f"{self.model}: the messages are too long"
            raise HttpError(message, 400, "messages", sample.finish)
        if self.logprobs and sample.text and not sample.tokens:
            raise HttpError(f"logprobs: {self.model} does not return them", 400, "logprobs")
        content = [
            {
                **_logprob_entry(token.text, token.logprob),
                "top_logprobs": [_logprob_entry(*one) for one in token.top],
            }
            for token in sample.tokens
        ]
        logprobs = {"content": content} if self.logprobs else None
        return {"finish_reason": FINISH_REASONS.get(sample.finish, "stop"), "logprobs": logprobs}


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


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    utf8_bytes = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": utf8_bytes}


Mailbox = asyncio.Queue[Any]
"""Messages for one client: indexed pieces and completions, or an exception."""


class ClientDisconnected(Exception):
    """The client no longer waits for the answer."""


class RequestQueue:
    """Limits concurrent requests; further ones wait in order, up to a maximum.

    Must be used on a single event loop.

    Attributes:
        turns: Acquired by a request until its last thread has ended.
        runs: Requests that have a turn or wait for one.
        clients: Those that wait for an answer.
    """

    def __init__(self, concurrency: int, queue: int) -> None:
        self.turns, self.concurrency, self.queue = (
            asyncio.Semaphore(concurrency),
            concurrency,
            queue,
        )
        self.runs: set[asyncio.Future[None]] = set()
        self.clients: set[Mailbox] = set()
        self.stopped = False

    def check(self) -> None:
        """Check that a request may enter.

        Raises:
            HttpError: The queue is full, or the server is shutting down.
        """
        if self.stopped:
            raise shutdown_error()
        if len(self.runs) >= self.concurrency + self.queue:
            message = f"{self.queue} requests are waiting already; try again later"
            raise HttpError(message, 429, again=True, after=1.0)

    def stop_all(self) -> None:
        """Send an error to all clients."""
        self.stopped = True
        for mail in self.clients:
            mail.put_nowait(shutdown_error())


def shutdown_error() -> HttpError:
    """Return the error for a server shutdown."""
    return HttpError("the server is shutting down; try again later", 503, again=True)


async def stream_samples(
    line: RequestQueue,
    answer: Callable[[Request], Stream],
    request: Request,
    count: int,
    left: Callable[[], Awaitable[None]],
) -> AsyncGenerator[tuple[int, Delta | Completion], None]:
    """Yield indexed pieces of all samples as they arrive, and finally each completion.

    Closing the generator stops generation at the next piece of each sample; local models inside a
    mixture stop at the next token.

    Args:
        line: Queue of requests.
        answer: Streams the answer to one request, in a thread.
        request: Request of all samples.
        count: Number of samples.
        left: Returns when the client has disconnected.

    Raises:
        HttpError: The queue is full, or the server is shutting down.
        ClientDisconnected: The client has disconnected.
        Exception: Error of a sample.
    """
    line.check()
    loop = asyncio.get_running_loop()
    mail: Mailbox = asyncio.Queue()
    gone, started = threading.Event(), False

    def emit(event: tuple[int, Delta]) -> None:
        if gone.is_set():
            raise Cancelled
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(mail.put_nowait, event)

    def generate(number: int) -> Completion:
        sample = replace(request, sample=number, stop_check=lambda _: gone.is_set())
        with (
            closing(answer(sample)) as pieces,
            closing(stream_until_stop(pieces, request.stop)) as deltas,
        ):
            return forward_items(deltas, lambda delta: emit((number, delta)))

    async def run_sample(number: int) -> None:
        try:
            mail.put_nowait((number, await run_in_thread(generate, number)))
        except BaseException as error:
            mail.put_nowait(error)

    async def run_all() -> None:
        nonlocal started
        async with line.turns:
            started = True
            # Not cancelled when the client leaves: the turn ends with the last thread.
            await asyncio.gather(*map(run_sample, range(count)))

    run, watch = asyncio.ensure_future(run_all()), asyncio.ensure_future(left())
    watch.add_done_callback(lambda _: mail.put_nowait(ClientDisconnected()))
    line.runs.add(run)
    run.add_done_callback(line.runs.discard)
    line.clients.add(mail)
    missing = count
    try:
        while missing:
            event = await mail.get()
            if isinstance(event, BaseException):
                raise event
            missing -= isinstance(event[1], Completion)
            yield event
    finally:
        gone.set()
        watch.cancel()
        line.clients.discard(mail)
        if not started:
            run.cancel()
