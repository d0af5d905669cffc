"""A run's report: one HTML page of tables with intervals, tests and figures, and files of data."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import write_atomic
from swarm._util.jsonl import shorten_text, to_json_value
from swarm._util.terminal import (
    csv_cell,
    format_interval,
    format_number,
    format_p_value,
    pluralize,
)
from swarm.errors import InvalidArgument
from swarm.report.charts import figure_to_element
from swarm.report.document import TableBlock
from swarm.report.page import load_template

if TYPE_CHECKING:
    import pandas as pd

MAX_PAIRS_SHOWN = 20
"""Pairs shown on the page; the files contain all."""

MAX_ANSWERS_SHOWN = 10
"""Answers shown per category."""


@dataclass
class ColumnSection:
    """Answers, or the verdicts of one judge.

    Attributes:
        category: Column by which they are compared.
        figure: SVG element; empty without a figure.
        conclusion: Differences that were found; empty if nothing was compared.
        lines: Texts below the tables.
    """

    name: str
    category: str
    tables: list[TableBlock]
    figure: str = ""
    conclusion: str = ""
    lines: list[str] = field(default_factory=list)


def write_report(
    folder: str | Path,
    frames: Mapping[str, "pd.DataFrame"],
    groups: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Write report.html and each question's data and tables.

    `folder`/NAME contains data.jsonl and data.csv (dictionaries as JSON), and for each answered or
    judged column COLUMN_summary.csv and COLUMN_differences.csv.

    Args:
        folder: Output folder.
        frames: Data frame by question name.
        groups: Models by group.

    Returns:
        One or more lines per question: differences found, and comparisons without one.

    Raises:
        UserError: The folder cannot be written.
    """
    numbers = count()
    questions = [
        _write_question(Path(folder) / name, name, df, numbers) for name, df in frames.items()
    ]
    page = load_template("report.html.j2", Path(__file__).parent).render(
        groups=groups or {}, questions=questions
    )
    _write_text(Path(folder) / "report.html", page)
    return "\n".join(
        f"{question['name']}: {column.name}: {column.conclusion}"
        for question in questions
        for column in question["columns"]
        if column.conclusion
    )


def _write_question(
    folder: Path, name: str, df: "pd.DataFrame", numbers: "count[int]"
) -> dict[str, Any]:
    """Write one question's files and return what the template shows of it.

    Args:
        numbers: Numbers of the page's figures.
    """
    from swarm.compare.answer_values import to_hashable_column

    rows = [to_json_value(row) for row in df.to_dict("records")]
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    _write_text(folder / "data.jsonl", "".join(lines))
    tables = {"data.csv": df.apply(lambda column: to_hashable_column(column.astype(object)))}
    columns = []
    # The answers, and the verdicts of judges.
    judged = [str(one).removesuffix("_question") for one in df if str(one).endswith("_question")]
    for column in [one for one in ("answer", *judged) if one in df]:
        section, found = compare_column(df, column)
        columns.append(section)
        start = re.sub(r"[^\w.-]", "_", column)
        tables |= {f"{start}_{kind}.csv": table for kind, table in found.items()}
        section.figure = draw_column(df, section, next(numbers))
    for left in folder.glob("*.csv"):  # of a former run with more groups or judges
        if left.name not in tables:
            left.unlink()
    for file, table in tables.items():
        # No spreadsheet may evaluate a text as a formula.
        safe = table.apply(lambda cells: cells.map(csv_cell)).rename(columns=csv_cell)
        _write_text(folder / file, str(safe.to_csv(index=False)))
    asked = to_hashable_column(df["question"]).dropna() if "question" in df else df["answer"][:0]
    return {
        "name": name,
        "paraphrases": list(asked.unique()),
        "counts": count_rows(df),
        "columns": columns,
        "files": ["data.jsonl", *tables],
    }


def count_rows(df: "pd.DataFrame") -> list[str]:
    """Count rows, refusals and errors with their reasons; add cost and tokens if known."""
    failed = df["error"].notna() if "error" in df else df.index != df.index
    refused = int((df["answer"].isna() & ~failed).sum()) if "answer" in df else 0
    lines = [f"{len(df)} rows; {refused} refused or without an answer; {int(failed.sum())} failed."]
    if failed.any():
        reasons = df["error"][failed].value_counts().head(5)
        lines += [f"{times} failed: {reason}" for reason, times in reasons.items()]
    # The rows of a model in several groups are repeated, but were requested once.
    keys = [key for key in ("model", "paraphrase_ix", "sample") if key in df]
    once = df.drop_duplicates(keys) if "sample" in df else df
    parts = [_format_cost(once)] if "cost" in df else []
    for column, label in (("prompt_tokens", "prompt tokens"), ("new_tokens", "new tokens")):
        if column in df:
            parts.append(f"{once[column].sum():,.0f} {label}")
    return [*lines, f"Unjudged answers: {', '.join(parts)}."] if parts else lines


def compare_column(
    df: "pd.DataFrame", column: str
) -> "tuple[ColumnSection, dict[str, pd.DataFrame]]":
    """Compare groups, or models if there is one group.

    Returns:
        The section, and the tables "summary" and, of several groups, "differences".
    """
    from swarm.compare.answer_values import infer_kind
    from swarm.compare.statistics import pairwise, summary

    several = "group" in df and (df["group"].nunique() > 1 or "model" not in df)
    category = "group" if several else "model"
    tables = {"summary": summary(df, column, category)}
    section = ColumnSection(column, category, [_summary_table(tables["summary"], category)])
    if df[category].nunique() > 1:
        pairs = tables["differences"] = pairwise(df, column, category)
        section.tables.append(_pairs_table(pairs, infer_kind(df[column].dropna()) == "mean"))
        section.conclusion = describe_differences(pairs)
        section.lines.append(section.conclusion)
    return section, tables


def draw_column(df: "pd.DataFrame", section: ColumnSection, number: int = 0) -> str:
    """Return the column's figure; where there can be none, add the reason to the section."""
    from markupsafe import Markup

    from swarm.compare.plots import plot

    column = "probs" if section.name == "answer" and "probs" in df else section.name
    try:
        return Markup(figure_to_element(plot(df, column, section.category), number))
    except InvalidArgument as error:
        section.lines.append(f"No figure: {error}.")
        return ""


def _summary_table(found: "pd.DataFrame", category: str) -> TableBlock:
    """Format the rows of each category; the first of them has the counts."""
    rows: list[list[str]] = []
    for name, part in found.groupby(category, sort=False):
        shown = part[(part["value"] != 0) | (part["answer"] == "mean")]
        cells = [
            [shorten_text(row["answer"], 80), _format_ends(row)]
            for row in shown.head(MAX_ANSWERS_SHOWN).to_dict("records")
        ]
        first = part.iloc[0]
        if not first["n"]:
            cells = [["–", "–"]]
        elif len(shown) > MAX_ANSWERS_SHOWN:
            rest = format_number(shown["value"][MAX_ANSWERS_SHOWN:].sum())
            cells.append([f"{len(shown) - MAX_ANSWERS_SHOWN} more", rest])
        counts = [str(first[key]) for key in ("n", "refused", "errors")]
        rows.append([str(name), *cells[0], *counts, first["note"]])
        rows += [["", *one, "", "", "", ""] for one in cells[1:]]
    header = [category, "answer", "value", "n", "refused", "failed", "note"]
    return TableBlock("Shares of the answers, or means.", header, rows)


def _pairs_table(pairs: "pd.DataFrame", mean: bool) -> TableBlock:
    rows = []
    for row in pairs.sort_values("p_holm").head(MAX_PAIRS_SHOWN).to_dict(orient="records"):
        p, holm = ("–" if math.isnan(x) else format_p_value(x) for x in (row["p"], row["p_holm"]))
        names, sizes = f"{row['a']} – {row['b']}", f"{row['n_a']}, {row['n_b']}"
        rows.append([names, _format_ends(row, "difference"), p, holm, sizes])
        rows[-1] += [row["test"], row["note"]]
    first = "difference of means" if mean else "distance of all shares"
    return TableBlock("Pairs.", ["pair", first, "p", "p (Holm)", "n", "test", "note"], rows)


def describe_differences(pairs: "pd.DataFrame") -> str:
    """Summarize the tests of pairs without overclaiming."""
    tested = pairs[pairs["p_holm"].notna()]
    if not len(tested):
        return "Nothing could be tested: too few answers."
    detected = tested[tested["p_holm"] <= 0.05]
    rest = len(tested) - len(detected)
    least = tested["note"].str.extract(r"no p value below (\S+) is")[0].astype(float)
    # Even the smallest possible p value would not be significant after Holm's correction.
    if bool((least * len(tested) > 0.05).all()):
        return "No difference could have been detected: too few answers."
    if not len(detected):
        return "No difference was detected. This does not show that there is none."
    names = [f"{a} and {b}" for a, b in zip(detected["a"], detected["b"], strict=True)]
    more = f" and {len(names) - 5} more pairs" if len(names) > 5 else ""
    others = f" For {pluralize(rest, 'other pair')} no difference was detected." if rest else ""
    return f"Different at 5 %, corrected: {'; '.join(names[:5])}{more}.{others}"


def _format_ends(row: Mapping[str, Any], column: str = "value") -> str:
    known = not math.isnan(row["low"])
    return format_interval(row[column], (row["low"], row["high"]) if known else None)


def _format_cost(rows: "pd.DataFrame") -> str:
    """Format the cost of these answers; models without prices are listed."""
    models = rows["model"] if "model" in rows else rows["cost"] * 0
    costs = rows["cost"].astype(float).groupby(models).sum(min_count=1)
    free = [str(name) for name in costs.index[costs.isna()]]
    if len(free) == len(costs):
        return "no price known"
    least = f"at least, as no price is known for {', '.join(free[:5])}" if free else ""
    return f"cost ${costs.sum():.{2 if costs.sum() >= 1 else 6}f} {least}".strip()


def _write_text(path: Path, text: str) -> None:
    # A lone surrogate, which an answer can contain, is written as \\udXXX.
    write_atomic(path, text.encode("utf-8", "backslashreplace"))
