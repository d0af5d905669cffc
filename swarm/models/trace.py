"""Traces of model calls, one JSON line per call.

The first line of a run is a header, {"run", "time", "about"}; every other line is a call, {"run",
"time", "call", "request"} with an "answer" or an "error". `call` identifies the model, at least by
"name". API keys are not part of requests or answers, and therefore of no trace.
"""

import errno
import json
import os
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from swarm._util.files import private
from swarm._util.secrets import clean
from swarm.errors import UserError
from swarm.models.base import Completion, Request, Stream, completion_to_json, request_to_json


class Trace:
    """A file to which calls are appended atomically, by any number of threads and processes.

    Args:
        path: The file; an existing one is appended to.
        about: Header of the run, for example its configuration and the package version. JSON values
            without secrets.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path).expanduser()
        self.run = uuid.uuid4().hex[:12]
        self._append_record({"about": dict(about or {})}, first=True)

    def add_call(
        self, call: Mapping[str, Any], request: Request, outcome: Completion | UserError
    ) -> None:
        """Append one call.

        Args:
            call: The model's "name" and further information, such as role and layer.
            request: The request.
            outcome: The answer or the error.

        Raises:
            UserError: The file cannot be written.
        """
        record = {"call": dict(call), "request": request_to_json(request)}
        if isinstance(outcome, UserError):
            self._append_record({**record, "error": str(outcome)})
        else:
            self._append_record({**record, "answer": completion_to_json(outcome)})

    def record_stream(self, call: Mapping[str, Any], request: Request, stream: Stream) -> Stream:
        """Pass on a stream and append its call; closing early appends an error."""
        outcome: Completion | UserError = UserError("closed before its end")
        try:
            outcome = completion = yield from stream
        except UserError as error:
            outcome = error
            raise
        finally:
            self.add_call(call, request, outcome)
        return completion

    def _append_record(self, record: Mapping[str, Any], first: bool = False) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = (json.dumps(clean({"run": self.run, "time": now, **record})) + "\n").encode()
        try:
            if first:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                data = b"\n" * _has_partial_line(self.path) + data
            # A single write to a file opened with O_APPEND is atomic: no lock, and no interleaved
            # lines.
            file = private(str(self.path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.write(file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(f"cannot write the trace {self.path}: {error.strerror}") from None


def _has_partial_line(path: Path) -> bool:
    """Return whether the last line is incomplete, as after a kill."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
