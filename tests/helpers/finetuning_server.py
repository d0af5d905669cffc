"""A loopback server that behaves like a fine-tuning API: files, jobs that advance, checkpoints."""

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from endpoints import Server

STATES = ("validating_files", "queued", "running", "succeeded")


@dataclass
class Fault:
    """What goes wrong with one request.

    Attributes:
        method, path: Of the request; the path is an expression for its end.
        status, body, headers: Of the answer instead; no status drops the connection.
        after: Whether the request is done before that.
        act: Called at that moment.
        times: How often it happens.
    """

    method: str
    path: str
    status: int = 0
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: bool = False
    act: Callable[[], None] | None = None
    times: int = 1


class Finetuner:
    """The server: its `url`, the `files` and `jobs` that it has, and what was `asked`.

    A job advances by a state each time that it is looked at; `plans` has other states for a suffix.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.keys = keys
        self.files: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.models: set[str] = set()
        self.plans: dict[str, tuple[str, ...]] = {}
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.lock = threading.Lock()
        self.server = Server(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def fault(self, method: str, path: str, after: bool) -> Fault | None:
        """The fault that is due for a request."""
        for one in self.faults:
            if one.method == method and one.after == after and re.search(one.path + "$", path):
                one.times -= 1
                if not one.times:
                    self.faults.remove(one)
                return one
        return None

    def count(self, asked: str) -> int:
        """How many requests there were, as "POST /files"."""
        return self.asked.count(asked)

    def answer(self, method: str, path: str, project: str, raw: bytes, query: Any) -> Any:
        """The status and the body of an answer."""
        if (method, path) == ("POST", "/files"):
            data = raw.split(b"\r\n\r\n")
            part = next(p for p in data if p.lstrip().startswith(b"{"))
            content = part.rpartition(b"\r\n--")[0]
            made = {
                "id": f"file-{len(self.files) + 1}",
                "project": project,
                "status": "processed",
                "md5": hashlib.md5(content).hexdigest(),
            }
            self.files[made["id"]] = made
            return 200, made
        if found := re.fullmatch(r"/files/(.+)", path):
            file = self.files.get(found[1])
            return (200, file) if file and file["project"] == project else missing(path)
        if path == "/fine_tuning/jobs":
            return (
                self.create(project, json.loads(raw))
                if method == "POST"
                else self.list(project, query)
            )
        if found := re.fullmatch(r"/models/(.+)", path):
            if found[1] not in self.models:
                return missing(path)
            self.models.remove(found[1])
            return 200, {"id": found[1], "deleted": True}
        found = re.fullmatch(r"/fine_tuning/jobs/([^/]+)(?:/(\w+))?", path)
        job = self.jobs.get(found[1]) if found else None
        if found is None or job is None or job["project"] != project:
            return missing(path)
        return self.about(job, found[2])

    def create(self, project: str, body: Any) -> Any:
        """A new job."""
        self.bodies.append(body)
        file = self.files.get(body["training_file"])
        if file is None or file["project"] != project:
            return 400, {"error": {"message": f"no file {body['training_file']}"}}
        name = f"ftjob-{len(self.jobs) + 1}"
        self.jobs[name] = {
            "id": name,
            "project": project,
            "organization_id": f"org-{project}",
            "status": STATES[0],
            "created_at": int(time.time()),
            "seed": body.get("seed"),
            "training_file": body["training_file"],
            "model": body["model"],
            "error": None,
            "user_provided_suffix": body["suffix"],
            "method": body["method"],
            "metadata": body.get("metadata"),
            "fine_tuned_model": None,
            "estimated_finish": None,
        }
        return 200, self.jobs[name]

    def list(self, project: str, query: Any) -> Any:
        """A page of jobs, the latest first; two a page, so that there are some."""
        mine = [job for job in reversed(self.jobs.values()) if job["project"] == project]
        if after := query.get("after"):
            place = [job["id"] for job in mine].index(after[0])
            mine = mine[place + 1 :]
        return 200, {"data": mine[:2], "has_more": len(mine) > 2}

    def about(self, job: dict[str, Any], what: str | None) -> Any:
        """A job, or a part of it."""
        if what == "cancel":
            job["status"] = "cancelled"
        elif what == "checkpoints":
            last = self.hyper(job)["n_epochs"] * 10
            return 200, {
                "data": [
                    {
                        "fine_tuned_model_checkpoint": job["fine_tuned_model"]
                        + ("" if step == last else f":ckpt-step-{step}"),
                        "step_number": step,
                    }
                    for step in range(10, last + 1, 10)
                ]
            }
        elif what == "events":
            return 200, {"data": [{"message": "Step 7/30: training loss=1.5"}]}
        else:
            self.advance(job)
        return 200, job

    def hyper(self, job: dict[str, Any]) -> Any:
        """A job's hyperparameters."""
        return job["method"]["supervised"]["hyperparameters"]

    def advance(self, job: dict[str, Any]) -> None:
        """To the next state."""
        plan = self.plans.get(job["user_provided_suffix"], STATES)
        if job["status"] not in plan[:-1]:
            return
        place = plan.index(job["status"])
        job["status"] = plan[place + 1]
        if job["status"] == "running":
            job["estimated_finish"] = int(time.time()) + 3700
        if job["status"] == "failed":
            job["error"] = {"code": "invalid", "message": "the file has 3 lines too few"}
        if job["status"] == "succeeded":
            how, given = (
                self.hyper(job),
                {"batch_size": 4, "learning_rate_multiplier": 1.8, "n_epochs": 3},
            )
            how.update({key: value for key, value in given.items() if how[key] == "auto"})
            job["seed"] = job["seed"] or 12345
            job["fine_tuned_model"] = f"ft:{job['model']}:{job['user_provided_suffix']}:{job['id']}"
            last = how["n_epochs"] * 10
            self.models |= {job["fine_tuned_model"]} | {
                f"{job['fine_tuned_model']}:ckpt-step-{step}" for step in range(10, last, 10)
            }


def missing(path: str) -> tuple[int, Any]:
    """What is said of what is not there."""
    return 404, {"error": {"message": f"there is no {path}"}}


def handler(finetuner: Finetuner) -> Any:
    """The request handler of a server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """Answer one request."""
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                raw = self.chunks()
            parts = urlsplit(self.path)
            path = parts.path.removeprefix("/v1")
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            with finetuner.lock:
                finetuner.asked.append(f"{self.command} {path}")
                fault = finetuner.fault(self.command, path, after=False)
                status, body = 401, {"error": {"message": f"Incorrect API key provided: {key}"}}
                if not fault and key in finetuner.keys:
                    status, body = finetuner.answer(
                        self.command, path, finetuner.keys[key], raw, parse_qs(parts.query)
                    )
                    fault = finetuner.fault(self.command, path, after=True)
            headers: Mapping[str, str] = {}
            if fault:
                if fault.act:
                    fault.act()
                status, body, headers = fault.status, fault.body, fault.headers
            self.close_connection = not status
            if status:
                self.send(status, json.dumps(body).encode(), headers)

        do_POST = do_DELETE = do_GET

        def chunks(self) -> bytes:
            """A body that comes in pieces."""
            whole = b""
            while size := int(self.rfile.readline(), 16):
                whole += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return whole

        def send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
            """One answer."""
            self.send_response(status)
            kind = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            for name, value in {**kind, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    return Handler


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
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"name {word} {number}"},
                {"role": "assistant", "content": f"{word} number {number}"},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
