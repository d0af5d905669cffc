"""Web application of a viewer: the page, its data in JSON, exports, and the server thread."""

import csv
import errno
import io
import json
import logging
import socket
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm._util.terminal import csv_cell, escape_control_chars
from swarm._util.threads import start_thread
from swarm.compare.view.query import (
    RANDOM_ORDER,
    ComparedSides,
    Query,
    QueryEngine,
    RowPair,
    column_means,
    find_pairs,
    parse_query,
)
from swarm.compare.view.table import AnswerTable, extract_text
from swarm.errors import UserError
from swarm.serve.api_errors import ApiKeyGuard, read_json_body
from swarm.serve.cli import is_loopback

if TYPE_CHECKING:
    from uvicorn import Server

log = logging.getLogger(__name__)

PAGE_FILES = {
    "": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "shown.js": "text/javascript",
}

RESPONSE_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
"""The page loads only files of this server, so that a model's text cannot load anything."""

MAX_ROWS_PER_REQUEST = 200
"""Maximum rows of a list in one response."""

MAX_CELL_CHARS = 240
"""Maximum characters of a text in a list."""

EXPORT_CHUNK_ROWS = 500
"""Rows per chunk of an export."""


class ViewerApp:
    """HTTP handlers of the page.

    Args:
        table: Rows to show.
        start: Initial state of the page, as parameters of `swarm.compare.view.query.parse_query`.
        guard: Access check of each request.
    """

    def __init__(self, table: AnswerTable, start: dict[str, str], guard: ApiKeyGuard) -> None:
        self.table, self.start, self.finder = table, start, QueryEngine(table)
        handlers: Any = {
            UserError: handle_user_error,
            HTTPException: handle_http_error,
            Exception: handle_unexpected_error,
        }
        self.app = FastAPI(
            openapi_url=None, docs_url=None, redoc_url=None, exception_handlers=handlers
        )
        router = APIRouter(dependencies=[Depends(guard)])
        for name, kind in PAGE_FILES.items():
            router.add_api_route(f"/{name}", _file_handler(name, kind), methods=["GET"])
        for path, endpoint in (
            ("about", self.get_about),
            ("rows", self.get_rows),
            ("row", self.get_row),
            ("pairs", self.get_pairs),
            ("export.csv", self.export_csv),
            ("export.jsonl", self.export_jsonl),
        ):
            router.add_api_route(f"/{path}", endpoint, methods=["GET"], response_model=None)
        router.add_api_route("/flag", self.set_flag, methods=["POST"], response_model=None)
        self.app.include_router(router)

    def get_about(self) -> Response:
        """Return the columns, the filter choices, and the initial state of the page."""
        table = self.table
        return _json_response(
            {
                "name": table.name,
                "count": table.count,
                "columns": list(table.columns),
                "kinds": table.column_kinds,
                "judges": table.judge_columns,
                "listed": table.listed_columns,
                "choices": table.filter_choices,
                "ranges": table.number_ranges,
                "start": self.start,
                "random": RANDOM_ORDER,
                "flags": sorted(self.finder.flags),
                "errors": int(sum(one is not None for one in table.columns.get("error", ()))),
            }
        )

    def get_rows(self, request: Request) -> Response:
        """Return a slice of the list, with shortened texts."""
        found = self.finder.find_rows(self._parse_query(request))
        first, count = _read_int(request, "from"), _read_int(request, "count") or 50
        rows = found[first : first + min(count, MAX_ROWS_PER_REQUEST)].tolist()
        return _json_response({"total": len(found), "rows": [self._short_row(row) for row in rows]})

    def get_row(self, request: Request) -> Response:
        """Return a complete row, by its index in the list or by its row number."""
        found = self.finder.find_rows(self._parse_query(request))
        position = max(0, min(_read_int(request, "at"), len(found) - 1))
        row = int(found[position]) if len(found) else None
        if (
            "row" in request.query_params
            and (requested := _read_int(request, "row")) < self.table.count
        ):
            # A row requested by its number is shown even if it does not match the filters.
            positions = np.flatnonzero(found == requested)
            row, position = requested, int(positions[0]) if len(positions) else -1
        cells = None if row is None else self.table.get_row(row)
        return _json_response(
            {
                "total": len(found),
                "at": position,
                "row": row,
                "cells": cells,
                "flagged": row in self.finder.flags,
            }
        )

    def get_pairs(self, request: Request) -> Response:
        """Return a slice of complete row pairs, and the column means of all pairs."""
        params = request.query_params
        column = params.get("by", "")
        if column not in self.table.columns:
            raise UserError(f"by: {column!r:.80} is not a column")
        sides = ComparedSides(column, params.get("left", ""), params.get("right", ""))
        query = self._parse_query(request).without_column(column)
        found = find_pairs(self.finder, query, sides)
        first = _read_int(request, "from")
        shown = found[first : first + min(_read_int(request, "count") or 10, MAX_ROWS_PER_REQUEST)]
        key = ("means", query, sides, frozenset(self.finder.flags) if query.flagged else None)
        means = self.finder.get_or_compute(key, lambda: column_means(self.table, found))
        return _json_response(
            {
                "total": len(found),
                "means": means,
                "pairs": [self._pair_cells(pair) for pair in shown],
            }
        )

    def _pair_cells(self, pair: RowPair) -> dict[str, Any]:
        fields: dict[str, Any] = {"sample": pair.sample}
        names = dict.fromkeys(["answer", *self.table.listed_columns, "error"])
        for side, row in (("left", pair.left), ("right", pair.right)):
            columns = self.table.columns
            cells = {
                name: columns[name][row] for name in names if row is not None and name in columns
            }
            fields[side] = None if row is None else {"row": row, "cells": cells}
        either = pair.left if pair.left is not None else pair.right
        if either is not None:
            questions = self.table.columns.get("question")
            fields["question"] = extract_text(
                questions[either] if questions else self.table.get_messages(either)
            )
            fields["paraphrase"] = self.table.columns.get("paraphrase_ix", [None] * (either + 1))[
                either
            ]
        return fields

    def _short_row(self, row: int) -> dict[str, Any]:
        columns = self.table.columns
        names = dict.fromkeys(
            [*self.table.listed_columns, "question", "answer", "paraphrase_ix", "error"]
        )
        cells = {name: _shorten_cell(columns[name][row]) for name in names if name in columns}
        if "question" not in columns:
            cells["question"] = _shorten_cell(extract_text(self.table.get_messages(row)))
        return {"row": row, "cells": cells, "flagged": row in self.finder.flags}

    async def set_flag(self, request: Request) -> Response:
        """Set or remove the flag of a row."""
        body = await read_json_body(request)
        row = body.get("row") if isinstance(body, dict) else None
        if type(row) is not int or not 0 <= row < self.table.count:
            raise UserError(f"row: must be an integer from 0 to {self.table.count - 1}")
        (self.finder.flags.add if body.get("flagged") else self.finder.flags.discard)(row)
        return _json_response({"flags": sorted(self.finder.flags)})

    def export_csv(self, request: Request) -> Response:
        """Export all matching rows in order as CSV; structures are JSON in their cells."""
        return self._export_rows(request, "csv", self._iter_csv)

    def export_jsonl(self, request: Request) -> Response:
        """Export all matching rows in order, one JSON object per line."""
        return self._export_rows(request, "jsonl", self._iter_jsonl)

    def _export_rows(self, request: Request, kind: str, write: Any) -> Response:
        rows = self.finder.find_rows(self._parse_query(request)).tolist()
        name = {"Content-Disposition": f'attachment; filename="answers.{kind}"'}
        types = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}
        return StreamingResponse(
            write(rows), headers=RESPONSE_HEADERS | name, media_type=types[kind]
        )

    def _iter_jsonl(self, rows: list[int]) -> Iterator[bytes]:
        for first in range(0, len(rows), EXPORT_CHUNK_ROWS):
            chunk = rows[first : first + EXPORT_CHUNK_ROWS]
            yield "".join(json.dumps(self.table.get_row(row)) + "\n" for row in chunk).encode()

    def _iter_csv(self, rows: list[int]) -> Iterator[bytes]:
        yield _format_csv([list(self.table.columns)])
        for first in range(0, len(rows), EXPORT_CHUNK_ROWS):
            chunk = rows[first : first + EXPORT_CHUNK_ROWS]
            yield _format_csv(
                [
                    [_format_csv_cell(values[row]) for values in self.table.columns.values()]
                    for row in chunk
                ]
            )

    def _parse_query(self, request: Request) -> Query:
        return parse_query(self.table, request.query_params.multi_items())


def _format_csv(rows: list[list[Any]]) -> bytes:
    file = io.StringIO()
    plain = csv.writer(file, lineterminator="\n")
    quoting = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        # The csv module quotes a carriage return only from Python 3.13 on.
        returns = any(isinstance(one, str) and "\r" in one for one in row)
        (quoting if returns else plain).writerow([csv_cell(one) for one in row])
    return file.getvalue().encode("utf-8", "backslashreplace")


def _format_csv_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _shorten_cell(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values()):
        first = sorted(value.items(), key=lambda one: -one[1])[:3]
        value = ", ".join(f"{token!r} {share:.3g}" for token, share in first)
    elif isinstance(value, dict | list):
        value = extract_text(value)
    if isinstance(value, str) and len(value) > MAX_CELL_CHARS:
        return value[:MAX_CELL_CHARS] + "…"
    return value


def _read_int(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{name}: {text!r:.40} is not an integer, 0 or more")
    return int(text)


def _file_handler(name: str, kind: str) -> Any:
    content = Path(__file__).with_name(name or "page.html").read_bytes()

    def send_file() -> Response:
        return Response(content, headers=RESPONSE_HEADERS, media_type=kind)

    return send_file


def _json_response(content: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        text = json.dumps(_replace_infinite(content))
    return Response(text, status, RESPONSE_HEADERS, "application/json")


def _replace_infinite(value: Any) -> Any:
    """Replace infinite floats by strings: JSON in browsers has no infinity."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: _replace_infinite(one) for key, one in value.items()}
    return [_replace_infinite(one) for one in value] if isinstance(value, list | tuple) else value


async def handle_user_error(request: Request, error: UserError) -> Response:
    """Return the error of an invalid request."""
    return _json_response({"error": str(error)}, getattr(error, "status", 400))


async def handle_http_error(request: Request, error: HTTPException) -> Response:
    """Return the error of an unknown path or method."""
    return _json_response({"error": f"{request.url.path}: {error.detail}"}, error.status_code)


async def handle_unexpected_error(request: Request, error: Exception) -> Response:
    """Log and return an unexpected error."""
    log.warning("%s: %s", escape_control_chars(request.url.path), escape_control_chars(repr(error)))
    return _json_response({"error": f"the viewer failed with {type(error).__name__}"}, 500)


MAX_PORTS_TRIED = 50
"""Maximum number of consecutive ports that are tried."""

SHUTDOWN_GRACE_S = 2
"""Seconds granted to a running export when the viewer is closed."""


class ViewerHandle:
    """A running viewer; as a context manager it is closed at the end.

    Attributes:
        url: URL of the page.
    """

    def __init__(self, table: AnswerTable, start: dict[str, str], host: str, port: int) -> None:
        self._bound = bind_socket(host, port)
        address, self.port = self._bound.getsockname()[:2]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.port}/"
        self._server = build_server(table, start, is_loopback(host))
        # A daemon thread does not prevent a notebook's kernel or a finished script from exiting.
        self._thread = start_thread(self._server.run, [self._bound], name="viewer")

    def __repr__(self) -> str:
        return f"viewer at {self.url}" if self._thread.is_alive() else "viewer, closed"

    def __enter__(self) -> "ViewerHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait for Ctrl-C, and close."""
        try:
            while self._thread.is_alive():
                self._thread.join(1)
        except KeyboardInterrupt:
            # The terminal has printed ^C on this line.
            print(flush=True)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the server; further calls have no effect."""
        self._server.should_exit = True
        self._thread.join()
        self._bound.close()

    def open_browser(self) -> None:
        """Open the page in the default browser, if there is one."""
        start_thread(webbrowser.open, self.url, name="swarm-browser")


def build_server(table: AnswerTable, start: dict[str, str], local: bool) -> "Server":
    """Build the server of the page; `local` is whether it is bound to the loopback address."""
    import uvicorn

    from swarm.serve.api_errors import ApiKeyGuard

    app = ViewerApp(table, start, ApiKeyGuard(None, local)).app
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            ws="none",
        )
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a listening socket to the port or, if it is taken, to the next free one.

    Raises:
        UserError: Binding failed.
    """
    last = min(port + MAX_PORTS_TRIED, 65536) if port else 1
    reason: object = None
    for one in range(port, last):
        try:
            kind, *_, address = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=kind)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                break
    raise UserError(f"{host}:{port} cannot be bound: {reason}; port 0 selects a free one")
