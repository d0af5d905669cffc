"""Tables of FLASK's scores: by skill, by domain and by difficulty."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.files import write_json, write_atomic
from swarm.judge.averages import Average, average_scores
from swarm.judge.files import FieldTypes, JsonRow, read_json_rows
from swarm.judge.flask_reviews import REVIEW_FIELDS, REVIEWS_FILE
from swarm.judge.merging import rows_by_key
from swarm.judge.rubric import NOT_APPLICABLE
from swarm.printing import csv_cell
from swarm.report.text import format_table

REVIEW_ROW_FIELDS: FieldTypes = {"question_id": (int, str), "model": str, "judge": str, "score": dict,
    "domain": list, "difficulty": str}  # fmt: skip

TABLE_KINDS = ("all", "skill", "domain", "difficulty")

DIFFICULTY_ORDER = ("simple lifestyle knowledge", "advanced lifestyle knowledge",
    "formal education knowledge", "major level knowledge", "expert level knowledge")  # fmt: skip
"""From the easiest on; others stand behind them."""

TABLE_COLUMNS = ("judge", "model", "table", "name", "average", "low", "high", "n", "unparsed",
    "not_applicable")  # fmt: skip


def compute_tables(folder: Path) -> list[JsonRow]:
    """The lines of the tables, of `COLUMNS`, for each judge and model.

    An average is that of all scores there are; those that do not apply and those that cannot be
    read are counted beside it. The interval draws questions, whose scores hang together.

    Raises:
        UserError: There are no reviews, or the file holds something else.
    """
    rows = rows_by_key(REVIEW_FIELDS, read_json_rows(folder / REVIEWS_FILE, REVIEW_ROW_FIELDS)).values()
    whose: dict[tuple[str, str], list[JsonRow]] = {}
    for row in rows:
        whose.setdefault((row["judge"], row["model"]), []).append(row)
    lines = []
    for judge, model in sorted(whose):
        for kind in TABLE_KINDS:
            named = _group_scores(kind, whose[judge, model])
            for name in sorted(named, key=_name_sort_key):
                line = {"judge": judge, "model": model, "table": kind, "name": name}
                lines.append(line | _average_row(named[name]))
    return lines


def _group_scores(kind: str, rows: Sequence[JsonRow]) -> dict[str, list[list[Any]]]:
    """The scores of each question, by what they are listed under in a table."""
    found: dict[str, list[list[Any]]] = {}
    for row in rows:
        scores = row["score"]
        if kind == "skill":
            for skill, score in scores.items():
                found.setdefault(skill, []).append([score])
            continue
        names = {"all": ["all"], "domain": row["domain"], "difficulty": [row["difficulty"]]}[kind]
        for name in names:
            found.setdefault(str(name), []).append(list(scores.values()))
    return found


def _name_sort_key(name: str) -> tuple[int, str]:
    known = name in DIFFICULTY_ORDER
    return (DIFFICULTY_ORDER.index(name) if known else len(DIFFICULTY_ORDER), name)


def _average_row(questions: Sequence[Sequence[Any]]) -> JsonRow:
    bearing = [[score for score in scores if score != NOT_APPLICABLE] for scores in questions]
    apart = sum(map(len, questions)) - sum(map(len, bearing))
    return {**average_scores(bearing).to_row(), "not_applicable": apart}


def write_tables(folder: Path, lines: Sequence[JsonRow]) -> list[Path]:
    """Write the lines as scores.csv and scores.json; their paths.

    Raises:
        UserError: They cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, TABLE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(one) for key, one in line.items()} for line in lines)
    paths = [folder / "scores.csv", folder / "scores.json"]
    write_atomic(paths[0], text.getvalue().encode())
    write_json(paths[1], list(lines))
    return paths


def format_tables(lines: Sequence[JsonRow]) -> list[str]:
    """The tables for people."""
    text = []
    for judge, model in dict.fromkeys((line["judge"], line["model"]) for line in lines):
        mine = [line for line in lines if (line["judge"], line["model"]) == (judge, model)]
        text.append(f"{model}, judge {judge}: scores from 1 to 5, 95 % intervals over questions")
        for kind in TABLE_KINDS:
            rows = [_format_line(line) for line in mine if line["table"] == kind]
            text += ["", *format_table((kind, "average", "not applicable"), rows)]
    return text


def _format_line(line: JsonRow) -> tuple[str, str, str]:
    found = Average(*(line[name] for name in ("average", "low", "high", "n", "unparsed")))
    return line["name"], str(found), str(line["not_applicable"])
