"""Tables of FLASK's scores: by skill, by domain and by difficulty."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.files import write_json, write_whole
from swarm.judge.averages import Average, average
from swarm.judge.files import Kinds, Row, read_rows
from swarm.judge.flask_reviews import REVIEW_FIELDS, REVIEWS
from swarm.judge.merging import by_key
from swarm.judge.rubric import NOT_APPLICABLE
from swarm.printing import csv_cell
from swarm.report.text import table

REVIEW: Kinds = {"question_id": (int, str), "model": str, "judge": str, "score": dict,
    "domain": list, "difficulty": str}  # fmt: skip

TABLES = ("all", "skill", "domain", "difficulty")

DIFFICULTIES = ("simple lifestyle knowledge", "advanced lifestyle knowledge",
    "formal education knowledge", "major level knowledge", "expert level knowledge")  # fmt: skip
"""From the easiest on; others stand behind them."""

COLUMNS = ("judge", "model", "table", "name", "average", "low", "high", "n", "unparsed",
    "not_applicable")  # fmt: skip


def tables(folder: Path) -> list[Row]:
    """The lines of the tables, of `COLUMNS`, for each judge and model.

    An average is that of all scores there are; those that do not apply and those that cannot be
    read are counted beside it. The interval draws questions, whose scores hang together.

    Raises:
        UserError: There are no reviews, or the file holds something else.
    """
    rows = by_key(REVIEW_FIELDS, read_rows(folder / REVIEWS, REVIEW)).values()
    whose: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        whose.setdefault((row["judge"], row["model"]), []).append(row)
    lines = []
    for judge, model in sorted(whose):
        for kind in TABLES:
            named = _named(kind, whose[judge, model])
            for name in sorted(named, key=_order):
                line = {"judge": judge, "model": model, "table": kind, "name": name}
                lines.append(line | _scored(named[name]))
    return lines


def _named(kind: str, rows: Sequence[Row]) -> dict[str, list[list[Any]]]:
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


def _order(name: str) -> tuple[int, str]:
    known = name in DIFFICULTIES
    return (DIFFICULTIES.index(name) if known else len(DIFFICULTIES), name)


def _scored(questions: Sequence[Sequence[Any]]) -> Row:
    bearing = [[score for score in scores if score != NOT_APPLICABLE] for scores in questions]
    apart = sum(map(len, questions)) - sum(map(len, bearing))
    return {**average(bearing).row(), "not_applicable": apart}


def write(folder: Path, lines: Sequence[Row]) -> list[Path]:
    """Write the lines as scores.csv and scores.json; their paths.

    Raises:
        UserError: They cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(one) for key, one in line.items()} for line in lines)
    paths = [folder / "scores.csv", folder / "scores.json"]
    write_whole(paths[0], text.getvalue().encode())
    write_json(paths[1], list(lines))
    return paths


def told(lines: Sequence[Row]) -> list[str]:
    """The tables for people."""
    text = []
    for judge, model in dict.fromkeys((line["judge"], line["model"]) for line in lines):
        mine = [line for line in lines if (line["judge"], line["model"]) == (judge, model)]
        text.append(f"{model}, judge {judge}: scores from 1 to 5, 95 % intervals over questions")
        for kind in TABLES:
            rows = [_shown(line) for line in mine if line["table"] == kind]
            text += ["", *table((kind, "average", "not applicable"), rows)]
    return text


def _shown(line: Row) -> tuple[str, str, str]:
    found = Average(*(line[name] for name in ("average", "low", "high", "n", "unparsed")))
    return line["name"], str(found), str(line["not_applicable"])
