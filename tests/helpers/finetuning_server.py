"""A loopback server that behaves like a fine-tuning API: files, jobs that advance, checkpoints."""

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from endpoints import Server

STATES = ("validating_files", "queued", "running", "succeeded")


@dataclass
class Fault:
    """What goes wrong with one request.

    Attributes:
        path: Of the POST; an expression for its end.
        status, body: Of the answer instead; no status drops the connection.
    """

    path: str
    status: int = 0
    body: Any = None


class Finetuner:
    """The server: its `url`, the `files` and `jobs` that it has, and what was `asked`.

    A job advances by a state each time that it is looked at; `plans` has other states for a suffix.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.keys = keys
        self.files: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.plans: dict[str, tuple[str, ...]] = {}
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.lock = threading.Lock()
        self.server = Server(("127.0.0.1", 0), partial(Handler, self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def fault(self, asked: str) -> Fault | None:
        """The fault that is due for a request, once."""
        for one in self.faults:
            if re.search(f"POST .*{one.path}$", asked):
                self.faults.remove(one)
                return one
        return None

    def answer(self, asked: str, project: str, raw: bytes) -> tuple[int, Any]:
        """The status and the body of an answer; what belongs to another project is not there."""
        if asked == "POST /files":
            name = f"file-{len(self.files) + 1}"
            self.files[name] = {"id": name, "project": project, "status": "processed"}
            return 200, self.files[name]
        if asked == "POST /fine_tuning/jobs":
            return self.create(project, json.loads(raw))
        found = re.fullmatch(r"GET (?:/files|/fine_tuning/jobs)/([^/]+)(/checkpoints)?", asked)
        one = {**self.files, **self.jobs}.get(found[1]) if found else None
        if not found or not one or one["project"] != project:
            return 404, {"error": {"message": f"there is no {asked}"}}
        if found[2]:
            last, name = self.hyper(one)["n_epochs"] * 10, one["fine_tuned_model"]
            names = {s: f"{name}:ckpt-step-{s}" for s in range(10, last, 10)} | {last: name}
            steps = ({"fine_tuned_model_checkpoint": n, "step_number": s} for s, n in names.items())
            return 200, {"data": list(steps)}
        if one["id"] in self.jobs:
            self.advance(one)
        return 200, one

    def create(self, project: str, body: Any) -> tuple[int, Any]:
        """A new job."""
        self.bodies.append(body)
        if self.files.get(body["training_file"], {}).get("project") != project:
            return 400, {"error": {"message": f"no file {body['training_file']}"}}
        name = f"ftjob-{len(self.jobs) + 1}"
        own = {"id": name, "project": project, "status": STATES[0], "created_at": int(time.time())}
        self.jobs[name] = {"seed": None, **json.loads(json.dumps(body)), **own}
        return 200, self.jobs[name]

    def hyper(self, job: dict[str, Any]) -> Any:
        """A job's hyperparameters."""
        return job["method"]["supervised"]["hyperparameters"]

    def advance(self, job: dict[str, Any]) -> None:
        """To the next state."""
        plan = self.plans.get(job["suffix"], STATES)
        if job["status"] not in plan[:-1]:
            return
        job["status"] = plan[plan.index(job["status"]) + 1]
        if job["status"] == "running":
            job["estimated_finish"] = int(time.time()) + 3700
        if job["status"] == "failed":
            job["error"] = {"code": "invalid", "message": "the file has 3 lines too few"}
        if job["status"] == "succeeded":
            chosen = {"batch_size": 4, "learning_rate_multiplier": 1.8, "n_epochs": 3}
            how = self.hyper(job)
            how.update({key: value for key, value in chosen.items() if how[key] == "auto"})
            job["fine_tuned_model"] = f"ft:{job['model']}:{job['suffix']}:{job['id']}"


class Handler(http.server.BaseHTTPRequestHandler):
    """The request handler of a server."""

    protocol_version = "HTTP/1.1"

    def __init__(self, finetuner: Finetuner, *given: Any) -> None:
        self.finetuner = finetuner
        super().__init__(*given)

    def do_GET(self) -> None:
        """Answer one request."""
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        parts, served = urlsplit(self.path), self.finetuner
        asked = f"{self.command} {parts.path.removeprefix('/v1')}"
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with served.lock:
            served.asked.append(asked)
            fault = served.fault(asked)
            status, body = 401, {"error": {"message": f"Incorrect API key provided: {key}"}}
            if not fault and key in served.keys:
                status, body = served.answer(asked, served.keys[key], raw)
        if fault:
            status, body = fault.status, fault.body
        self.close_connection = not status
        if status:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def serving(keys: Mapping[str, str]) -> Iterator[Finetuner]:
    """A running server that takes these keys, each of a project."""
    made = Finetuner(keys)
    threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()


def chats(path: Path, count: int = 12, word: str = "bird") -> Path:
    """A training file of short chats."""
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"name {word} {number}"},
                                     {"role": "assistant", "content": f"{word} {number}"}]}) + "\n"
            for number in range(count)
        )
    )  # fmt: skip
    return path
