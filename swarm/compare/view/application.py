"""The application of a viewer: its page, its rows a page at a time, and what is exported."""

import csv
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm.compare.view.finding import RANDOM, Finder, Wanted, read
from swarm.compare.view.pairs import Pair, Sides, means, pairs
from swarm.compare.view.table import Table, words
from swarm.errors import UserError
from swarm.printing import csv_cell, harmless
from swarm.serve.guard import Guard, body_of

log = logging.getLogger(__name__)

FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript",
         "shown.js": "text/javascript"}  # fmt: skip

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
"""The page loads what is here, and a text of a model loads nothing."""

PAGE = 200
"""The most rows of a list that are sent at once."""

CUT = 240
"""Characters of a text in a list."""

EXPORTED = 500
"""Rows of an export that are written at once."""


class Viewer:
    """Answers the page.

    Args:
        table: The rows.
        start: How the page begins, as the parameters of `swarm.compare.view.finding.read`.
        guard: Who may look.
    """

    def __init__(self, table: Table, start: dict[str, str], guard: Guard) -> None:
        self.table, self.start, self.finder = table, start, Finder(table)
        handlers: Any = {UserError: refused, HTTPException: no_path, Exception: broken}
        self.app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None,
                           exception_handlers=handlers)  # fmt: skip
        router = APIRouter(dependencies=[Depends(guard)])
        for name, kind in FILES.items():
            router.add_api_route(f"/{name}", _file(name, kind), methods=["GET"])
        for path, what in (("about", self.about), ("rows", self.rows), ("row", self.row),
                           ("pairs", self.pairs), ("export.csv", self.as_csv),
                           ("export.jsonl", self.as_jsonl)):  # fmt: skip
            router.add_api_route(f"/{path}", what, methods=["GET"], response_model=None)
        router.add_api_route("/flag", self.flag, methods=["POST"], response_model=None)
        self.app.include_router(router)

    def about(self) -> Response:
        """What there is: the columns, what can be chosen, and how the page begins."""
        table = self.table
        return _json({
            "name": table.name, "count": table.count, "columns": list(table.columns),
            "kinds": table.kinds, "judges": table.judges, "listed": table.listed,
            "choices": table.choices, "ranges": table.ranges, "start": self.start,
            "random": RANDOM, "flags": sorted(self.finder.flags),
            "errors": int(sum(one is not None for one in table.columns.get("error", ()))),
        })  # fmt: skip

    def rows(self, request: Request) -> Response:
        """Some rows of the list, shortened."""
        found = self.finder.rows(self._wanted(request))
        first, count = _whole(request, "from"), _whole(request, "count") or 50
        some = found[first : first + min(count, PAGE)].tolist()
        return _json({"total": len(found), "rows": [self._short(row) for row in some]})

    def row(self, request: Request) -> Response:
        """A row whole: the one at a place of the list, or one by its number."""
        found = self.finder.rows(self._wanted(request))
        at = max(0, min(_whole(request, "at"), len(found) - 1))
        row = int(found[at]) if len(found) else None
        if "row" in request.query_params and (asked := _whole(request, "row")) < self.table.count:
            # One that does not fit is shown as well, as somebody has asked for it by its number.
            places = np.flatnonzero(found == asked)
            row, at = asked, int(places[0]) if len(places) else -1
        told = None if row is None else self.table.row(row)
        return _json({"total": len(found), "at": at, "row": row, "cells": told,
                      "flagged": row in self.finder.flags})  # fmt: skip

    def pairs(self, request: Request) -> Response:
        """Some pairs of rows, whole, and what all of them come to."""
        asked = request.query_params
        column = asked.get("by", "")
        if column not in self.table.columns:
            raise UserError(f"by: {column!r:.80} is no column")
        sides = Sides(column, asked.get("left", ""), asked.get("right", ""))
        wanted = self._wanted(request).without(column)
        found = pairs(self.finder, wanted, sides)
        first = _whole(request, "from")
        some = found[first : first + min(_whole(request, "count") or 10, PAGE)]
        key = ("means", wanted, sides, frozenset(self.finder.flags) if wanted.flagged else None)
        told = self.finder.remembered(key, lambda: means(self.table, found))
        return _json({"total": len(found), "means": told,
                      "pairs": [self._side_by_side(pair) for pair in some]})  # fmt: skip

    def _side_by_side(self, pair: Pair) -> dict[str, Any]:
        told: dict[str, Any] = {"sample": pair.sample}
        names = dict.fromkeys(["answer", *self.table.listed, "error"])
        for side, row in (("left", pair.left), ("right", pair.right)):
            columns = self.table.columns
            cells = {name: columns[name][row] for name in names if row is not None
                     and name in columns}  # fmt: skip
            told[side] = None if row is None else {"row": row, "cells": cells}
        either = pair.left if pair.left is not None else pair.right
        if either is not None:
            asked = self.table.columns.get("question")
            told["question"] = words(asked[either] if asked else self.table.conversation(either))
            told["paraphrase"] = self.table.columns.get("paraphrase_ix", [None] * (either + 1))[
                either
            ]
        return told

    def _short(self, row: int) -> dict[str, Any]:
        columns = self.table.columns
        names = dict.fromkeys([*self.table.listed, "question", "answer", "paraphrase_ix", "error"])
        cells = {name: _cut(columns[name][row]) for name in names if name in columns}
        if "question" not in columns:
            cells["question"] = _cut(words(self.table.conversation(row)))
        return {"row": row, "cells": cells, "flagged": row in self.finder.flags}

    async def flag(self, request: Request) -> Response:
        """Flag a row, or take its flag away."""
        asked = await body_of(request)
        row = asked.get("row") if isinstance(asked, dict) else None
        if type(row) is not int or not 0 <= row < self.table.count:
            raise UserError(f"row: has to be a whole number from 0 to {self.table.count - 1}")
        (self.finder.flags.add if asked.get("flagged") else self.finder.flags.discard)(row)
        return _json({"flags": sorted(self.finder.flags)})

    def as_csv(self, request: Request) -> Response:
        """All rows that are wanted, in order; structures are JSON in their cells."""
        return self._exported(request, "csv", self._csv)

    def as_jsonl(self, request: Request) -> Response:
        """All rows that are wanted, in order, one JSON object a line."""
        return self._exported(request, "jsonl", self._jsonl)

    def _exported(self, request: Request, kind: str, write: Any) -> Response:
        rows = self.finder.rows(self._wanted(request)).tolist()
        name = {"Content-Disposition": f'attachment; filename="answers.{kind}"'}
        types = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}
        return StreamingResponse(write(rows), headers=HEADERS | name, media_type=types[kind])

    def _jsonl(self, rows: list[int]) -> Iterator[bytes]:
        for first in range(0, len(rows), EXPORTED):
            some = rows[first : first + EXPORTED]
            yield "".join(json.dumps(self.table.row(row)) + "\n" for row in some).encode()

    def _csv(self, rows: list[int]) -> Iterator[bytes]:
        yield _csv_lines([list(self.table.columns)])
        for first in range(0, len(rows), EXPORTED):
            some = rows[first : first + EXPORTED]
            yield _csv_lines([[_cell(values[row]) for values in self.table.columns.values()]
                              for row in some])  # fmt: skip

    def _wanted(self, request: Request) -> Wanted:
        return read(self.table, request.query_params.multi_items())


def _csv_lines(rows: list[list[Any]]) -> bytes:
    file = io.StringIO()
    plain = csv.writer(file, lineterminator="\n")
    whole = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        # A carriage return is quoted by itself only from Python 3.13 on.
        returns = any(isinstance(one, str) and "\r" in one for one in row)
        (whole if returns else plain).writerow([csv_cell(one) for one in row])
    return file.getvalue().encode("utf-8", "backslashreplace")


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _cut(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values()):
        first = sorted(value.items(), key=lambda one: -one[1])[:3]
        value = ", ".join(f"{token!r} {share:.3g}" for token, share in first)
    elif isinstance(value, dict | list):
        value = words(value)
    if isinstance(value, str) and len(value) > CUT:
        return value[:CUT] + "…"
    return value


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{name}: {text!r:.40} is no whole number from 0")
    return int(text)


def _file(name: str, kind: str) -> Any:
    content = Path(__file__).with_name(name or "page.html").read_bytes()

    def sent() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return sent


def _json(content: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content))
    return Response(text, status, HEADERS, "application/json")


def _finite(value: Any) -> Any:
    """The same for a browser, whose JSON has no infinity."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


async def refused(request: Request, error: UserError) -> Response:
    """What cannot be answered, and why."""
    return _json({"error": str(error)}, getattr(error, "status", 400))


async def no_path(request: Request, error: HTTPException) -> Response:
    """A path or a method that is not here."""
    return _json({"error": f"{request.url.path}: {error.detail}"}, error.status_code)


async def broken(request: Request, error: Exception) -> Response:
    """Whatever nobody has foreseen."""
    log.warning("%s: %s", harmless(request.url.path), harmless(repr(error)))
    return _json({"error": f"the viewer failed with {type(error).__name__}"}, 500)
