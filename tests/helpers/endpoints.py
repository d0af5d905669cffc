"""A loopback server that answers JSON as a test wants it: well, late, wrongly, or not at all."""

import email.utils
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """One answer.

    Attributes:
        body: JSON, or the bytes themselves.
        status, headers: Of the answer.
        wait: Seconds before it is sent.
        drop: Close the connection instead; with pieces, after them.
        pieces: Instead of a body: what is sent one after the other; a number is seconds to wait.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    drop: bool = False
    pieces: Iterable[bytes | float] = ()


@dataclass
class Asked:
    """One request that came."""

    path: str
    headers: dict[str, str]
    body: Any
    time: float


class Endpoint:
    """The server: `url`, everything that was `asked`, and the `peak` of requests at once.

    `left` is set when a client goes before the last piece of its answer.
    """

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.live = self.peak = 0
        self.lock = threading.Lock()
        self.left = threading.Event()
        self.server = Server(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def reply(self, asked: Asked) -> Reply:
        """What a request is answered, counting it."""
        with self.lock:
            self.asked.append(asked)
            self.live += 1
            self.peak = max(self.peak, self.live)
        try:
            reply = self.answer(asked)
            time.sleep(reply.wait)
            return reply
        finally:
            with self.lock:
                self.live -= 1

    def texts(self) -> list[str]:
        """The last turn of every chat that was asked."""
        return [asked.body["messages"][-1]["content"] for asked in self.asked]


class Server(http.server.ThreadingHTTPServer):
    """Takes many connections at once, and is quiet about those that end early."""

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are part of the tests."""


def handler(endpoint: Endpoint) -> Any:
    """The request handler of an endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer one request."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = Asked(self.path, dict(self.headers.items()), body, time.monotonic())
            reply = endpoint.reply(asked)
            self.close_connection = reply.drop
            if reply.drop and not reply.pieces:
                return
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            told = {"Content-Length": str(len(data))}
            if reply.pieces:
                told = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
            self.send_response(reply.status)
            for name, value in {**told, **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not reply.pieces:
                self.wfile.write(data)
                return
            try:
                for piece in reply.pieces:
                    if isinstance(piece, bytes):
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    else:
                        time.sleep(piece)
                if not reply.drop:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                endpoint.left.set()
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    return Handler


@contextmanager
def endpoint(answer: Callable[[Asked], Reply]) -> Iterator[Endpoint]:
    """A running endpoint that answers each request by the function."""
    made = Endpoint(answer)
    threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    """The replies one after the other; the last one again and again."""
    waiting = list(replies)
    lock = threading.Lock()

    def answer(asked: Asked) -> Reply:
        with lock:
            return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return answer


def chat(text: Any, prompt: int = 10, new: int = 3, **message: Any) -> Reply:
    """A chat completion."""
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt, "completion_tokens": new}
    return Reply({"choices": [choice], "usage": usage})


class Rationed:
    """An endpoint that accepts so many requests a second, in bursts of up to as many.

    Args:
        rate: Requests a second.
        after: Value of the Retry-After header; "date" is that of the next second, `None` sends
            none.
        answer: Says what is answered to a request that is accepted.
        per: Who has a limit of its own: a field of the body, or everybody together.
    """

    def __init__(
        self, rate: float, after: str | None, answer: Callable[[Asked], Reply], per: str = ""
    ) -> None:
        self.rate, self.after, self.answer, self.per = rate, after, answer, per
        self.refused = 0
        self._lock = threading.Lock()
        self._left: dict[Any, tuple[float, float]] = {}

    def __call__(self, asked: Asked) -> Reply:
        with self._lock:
            who, now = asked.body.get(self.per), time.monotonic()
            left, last = self._left.get(who, (self.rate, now))
            left = min(self.rate, left + (now - last) * self.rate)
            self._left[who] = (left - (left >= 1), now)
            self.refused += left < 1
        if left >= 1:
            return self.answer(asked)
        after = self.after
        if after == "date":
            after = email.utils.formatdate(time.time() + 1.0, usegmt=True)
        headers = {"Retry-After": after} if after else {}
        return Reply({"error": {"message": "slow down"}}, 429, headers)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def piece(text: Any = None, finish: str | None = None, **delta: Any) -> bytes:
    """The event of one piece of an answer."""
    told = ({} if text is None else {"content": text}) | delta
    return event({"choices": [{"index": 0, "delta": told, "finish_reason": finish}]})


def streamed(*texts: str, prompt: int = 10, new: int = 3) -> Reply:
    """A chat completion in pieces, as an endpoint with all the usual parts sends it."""
    usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}
    begin, end = piece("", role="assistant"), piece(finish="stop")
    return Reply(pieces=[begin, *map(piece, texts), end, event(usage), DONE])
