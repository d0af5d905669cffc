"""Viewer: one self-contained HTML page that shows, searches, filters and sorts answers."""

import csv
import json
import sys
import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm._util.files import parse_json, write_atomic
from swarm._util.jsonl import read_jsonl, to_json_value
from swarm._util.terminal import escape_control_chars
from swarm.errors import InvalidArgument, UserError

RANDOM_ORDER = "__random__"

MAX_CHOICES = 200
"""Maximum number of different values of a column that has a filter."""


def view(
    data: Any,
    *,
    sort_by: str | None = RANDOM_ORDER,
    sort_ascending: bool = True,
    open_browser: bool = True,
    filename: str | Path | None = None,
) -> Path:
    """Write a page that shows answers, and open it in the browser.

    The page needs no server and loads nothing; texts of models are shown as texts.

    Args:
        data: A data frame of `Question.df`, a list of dictionaries, or the path of a .jsonl or .csv
            file. The column "answer" is required; "question", "api_kwargs", "model", "group",
            "paraphrase_ix", "error" and judges are used if present.
        sort_by: Initial sort column, "__random__" for a random order, `None` for that of the data.
        sort_ascending: Whether to sort in ascending order.
        open_browser: Whether to open the page.
        filename: Page to write; `None` is one in a temporary folder.

    Returns:
        Path of the page.

    Raises:
        UserError: The data cannot be shown, or the page cannot be written.
    """
    name = Path(data).name if isinstance(data, str | Path) else "answers"
    page = render_page(load_rows(data), name, sort_by, sort_ascending)
    path = Path(filename or Path(tempfile.mkdtemp(prefix="answers-")) / "answers.html").expanduser()
    write_atomic(path, page.encode())
    print(escape_control_chars(f"{name}: {path}"), file=sys.stderr)
    if open_browser:
        webbrowser.open(path.resolve().as_uri())
    return path


def load_rows(data: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame, a list of dictionaries or a file.

    Raises:
        UserError: There are none, the file cannot be read, or there is no column "answer".
    """
    rows: Any = data
    if isinstance(data, str | Path):
        readers = {".jsonl": read_jsonl, ".csv": _read_csv}
        if Path(data).suffix not in readers:
            raise UserError(f"{data}: its name must end in .jsonl or .csv")
        rows = readers[Path(data).suffix](data)
    elif not isinstance(data, Sequence):
        rows = require_frame("view", data).to_dict("records")
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidArgument("view: takes a data frame or a list of dictionaries, not empty")
    if not any("answer" in row for row in rows):
        raise InvalidArgument(
            f'view: has no column "answer"; it has {", ".join(map(str, rows[0]))}'
        )
    return [{str(key): value for key, value in row.items()} for row in rows]


def require_frame(method: str, value: Any, also: str = "") -> Any:
    """Return the value if it is a data frame.

    Raises:
        InvalidArgument: It is not.
    """
    import pandas as pd

    if not isinstance(value, pd.DataFrame):
        raise InvalidArgument(
            f"{method} takes {also}a data frame, not {type(value).__name__}; "
            f"models are shown by a question: question.{method}(models)"
        )
    return value


def _read_csv(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file; JSON objects in cells become dictionaries."""
    csv.field_size_limit(2**31 - 1)
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            return [
                {name: _parse_cell(name, text) for name, text in row.items() if name}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _parse_cell(name: str, text: str | None) -> Any:
    if not text:
        return None
    try:
        found = parse_json(text)
    except ValueError:
        return text
    # An answer such as 007 or [1] is a text; a dictionary is one of probabilities.
    is_text = name in ("answer", "question") and not isinstance(found, dict)
    return text if is_text or isinstance(found, str) else found


def render_page(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    sort_by: str | None = None,
    ascending: bool = True,
) -> str:
    """Return the page as HTML.

    Args:
        rows: Rows of the table.
        name: Title.
        sort_by, ascending: Initial order; see `view`.

    Raises:
        InvalidArgument: There is no column `sort_by`.
    """
    from jinja2 import Environment, PackageLoader

    columns = list(dict.fromkeys(column for row in rows for column in row))
    if sort_by not in (None, RANDOM_ORDER, *columns):
        raise InvalidArgument(
            f'sort_by="{sort_by}": no such column; there are {", ".join(columns)}, and '
            f'"{RANDOM_ORDER}"'
        )
    cells = [[to_json_value(row.get(column)) for column in columns] for row in rows]
    # Columns of few short values have a filter.
    choices = {}
    for number, column in enumerate(columns):
        found = {row[number] for row in cells if isinstance(row[number], str | int)}
        short = max((len(str(value)) for value in found), default=0) <= 80
        other = column in ("api_kwargs", "question", "error") or column.endswith("_question")
        if 1 < len(found) <= MAX_CHOICES and short and not other:
            choices[column] = sorted(map(str, found))
    # Samples of one request share its parameters, which are stored once.
    requests: dict[str, int] = {}
    if "api_kwargs" in columns:
        place = columns.index("api_kwargs")
        for row, values in zip(rows, cells, strict=True):
            if "api_kwargs" in row:
                request = json.dumps(values[place], default=str)
                values[place] = requests.setdefault(request, len(requests))
    data = {
        "columns": columns,
        "rows": cells,
        "requests": [json.loads(request) for request in requests],
        "judges": [column for column in columns if f"{column}_question" in columns],
        "choices": choices,
        "sort": sort_by,
        "ascending": ascending,
    }
    # Nothing in the data may end the script element that contains it.
    embedded = json.dumps(data, default=str).replace("<", "\\u003c")
    environment = Environment(loader=PackageLoader("swarm.compare", "."), autoescape=True)
    return environment.get_template("view.html").render(name=name, data=embedded)
