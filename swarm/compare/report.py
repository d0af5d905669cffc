"""A run's report: paraphrases, tables with intervals, tests, figures, costs and answers."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from swarm._util.files import write_atomic
from swarm._util.jsonl import to_json_value
from swarm._util.terminal import csv_cell, format_number, format_p_value, format_table, pluralize
from swarm.errors import InvalidArgument
from swarm.stats.answer_values import infer_kind, to_hashable_column

if TYPE_CHECKING:
    import pandas as pd


MARKDOWN_SIGNS = re.compile(r"([\\`*_\[\]<>|#~$])")


def escape_markdown(text: str) -> str:
    """Return a text as one line in which no character is a sign of Markdown."""
    return MARKDOWN_SIGNS.sub(r"\\\1", " ".join(text.split()))


def column_file_stem(column: str) -> str:
    """Return the start of the names of a column's files."""
    return re.sub(r"[^\w.-]", "_", column)


def save_plot(place: Path, df: "pd.DataFrame", column: str, by: str) -> list[str]:
    """Save a column's plot; return Markdown lines for a report beside the folder.

    The file is plot.png for "answer" and COLUMN_plot.png for others.

    Args:
        place: Folder of the figure.
        df: Rows of one question.
        column: Column to plot.
        by: Column of the compared categories.

    Raises:
        UserError: It cannot be saved there.
    """
    from swarm.compare.plots import plot

    name = "plot.png" if column == "answer" else f"{column_file_stem(column)}_plot.png"
    try:
        plot(
            df,
            "probs" if column == "answer" and "probs" in df else column,
            by,
            filename=place / name,
        )
    except InvalidArgument as error:
        (place / name).unlink(missing_ok=True)
        return ["", f"No figure: {escape_markdown(str(error))}."]
    return ["", f"![{escape_markdown(column)}]({quote(place.name)}/{quote(name)})"]


MAX_ROWS_SHOWN = 20
"""Pairs and paraphrases shown in the report; the files contain all."""

MAX_ANSWERS_SHOWN = 10
"""Answers shown per category."""

CONCLUSION_STARTS = ("Different at", "No difference", "Nothing could")

JUDGE_COLUMN_SUFFIX = re.compile(r"_(question|raw_answer|probs)$")


def write_report(
    folder: str | Path,
    frames: Mapping[str, "pd.DataFrame"],
    groups: Mapping[str, Sequence[str]] | None = None,
    title: str = "Compared models",
) -> str:
    """Write report.md and each question's data, tables and figures.

    Args:
        folder: Output folder.
        frames: Data frame by question name.
        groups: Models by group.
        title: Title of the report.

    Returns:
        One or more lines per question: differences found, and comparisons without one.

    Raises:
        UserError: The folder cannot be written.
    """
    method = (
        "Intervals are 95 % ones by a bootstrap of models, paraphrases and samples; p values of "
        "pairs are corrected by Holm's method over all pairs of one table. Answers that were "
        "refused or failed are in no share and no mean; they are counted."
    )
    lines = [f"# {escape_markdown(title)}", "", method, ""]
    for group, models in (groups or {}).items():
        lines.append(
            f"- {escape_markdown(group)}: {', '.join(escape_markdown(model) for model in models)}"
        )
    found = []
    for name, df in frames.items():
        section = write_question_section(folder, name, df)
        lines += ["", section]
        found += [f"{name}: {line}" for line in _extract_conclusions(section)]
    _write_text(Path(folder) / "report.md", "\n".join(lines))
    return "\n".join(found)


def _extract_conclusions(section: str) -> list[str]:
    """Return the conclusions of each column: "COLUMN: Different at ..."."""
    column, found = "", []
    for line in section.splitlines():
        if line.startswith("### "):
            column = line.removeprefix("### ")
        elif line.startswith(CONCLUSION_STARTS):
            found.append(f"{column}: {line}")
    return found


def write_question_section(folder: str | Path, name: str, df: "pd.DataFrame") -> str:
    """Write one question's files and return its Markdown section of the report.

    `folder`/NAME contains data.jsonl and data.csv (dictionaries as JSON), and for each answered or
    judged column COLUMN_summary.csv, COLUMN_differences.csv and a plot (`save_plot`).

    Raises:
        UserError: The folder cannot be written.
    """
    section_folder = Path(folder) / name
    rows = (
        json.dumps(to_json_value(row), ensure_ascii=False, default=str)
        for row in df.to_dict("records")
    )
    _write_text(section_folder / "data.jsonl", "".join(f"{row}\n" for row in rows))
    flat = df.apply(lambda column: to_hashable_column(column.astype(object)))
    _write_text(section_folder / "data.csv", as_csv(flat))
    sections = [
        f"## {escape_markdown(name)}",
        "",
        *_format_paraphrases(df),
        "",
        *_format_counts(df),
    ]
    for column in find_answer_columns(df):
        sections += ["", *_write_column_section(section_folder, df, column)]
    files = " and ".join(_markdown_link(name, file) for file in ("data.jsonl", "data.csv"))
    sections += ["", f"All answers: {files}."]
    return "\n".join([*sections, ""])


def as_csv(df: "pd.DataFrame") -> str:
    """Return a table as CSV whose texts no spreadsheet evaluates as formulas."""
    safe = df.apply(lambda column: column.map(csv_cell)).rename(columns=csv_cell)
    return str(safe.to_csv(index=False))


def find_answer_columns(df: "pd.DataFrame") -> list[str]:
    """Return the columns of answers and verdicts: "answer", and those of judges."""
    judges = [
        JUDGE_COLUMN_SUFFIX.sub("", str(name))
        for name in df.columns
        if str(name).endswith("_question") and str(name).removesuffix("_question") in df.columns
    ]
    return [name for name in ("answer", *judges) if name in df.columns]


def _category_column(df: "pd.DataFrame") -> str:
    """Return the column to compare by: groups, or models if there is one group."""
    several = "group" in df and (df["group"].nunique() > 1 or "model" not in df)
    return "group" if several else "model"


def _format_paraphrases(df: "pd.DataFrame") -> list[str]:
    paraphrases = (
        list(to_hashable_column(df["question"]).dropna().unique()) if "question" in df else []
    )
    lines = [f"> {escape_markdown(str(one))}" for one in paraphrases[:MAX_ROWS_SHOWN]]
    if len(paraphrases) > MAX_ROWS_SHOWN:
        lines.append(f"> and {len(paraphrases) - MAX_ROWS_SHOWN} more")
    spaced = [line for one in lines for line in (one, ">")][:-1]
    return spaced


def _format_counts(df: "pd.DataFrame") -> list[str]:
    """Count rows, refusals and errors with their reasons; add cost and tokens if known."""
    failed = df["error"].notna() if "error" in df else df.index != df.index
    refused = int((df["answer"].isna() & ~failed).sum()) if "answer" in df else 0
    lines = [f"{len(df)} rows; {refused} refused or without an answer; {int(failed.sum())} failed."]
    if failed.any():
        for reason, times in df["error"][failed].value_counts().head(5).items():
            lines += ["", f"- {times} failed: {escape_markdown(str(reason))}"]
    # The rows of a model in several groups are repeated, but were requested once.
    keys = [key for key in ("model", "paraphrase_ix", "sample") if key in df]
    once = df.drop_duplicates(keys) if "sample" in df else df
    parts = [_format_cost(once)] if "cost" in df else []
    for column, label in (("prompt_tokens", "prompt tokens"), ("new_tokens", "new tokens")):
        if column in df:
            parts.append(f"{once[column].sum():,.0f} {label}")
    return [*lines, "", f"Unjudged answers: {', '.join(parts)}."] if parts else lines


def _write_column_section(folder: Path, df: "pd.DataFrame", column: str) -> list[str]:
    """Write one column's tables by group, or by model if there is one group."""
    from swarm.stats.group_tests import pairwise
    from swarm.stats.summary_table import summary

    category = _category_column(df)
    files = [
        f"{column_file_stem(column)}_{table_kind}.csv" for table_kind in ("summary", "differences")
    ]
    lines = [
        f"### {escape_markdown(column)}",
        *(save_plot(folder, df, column, category) if len(df) else ()),
    ]
    found = summary(df, column, category)
    _write_text(folder / files[0], as_csv(found))
    lines += ["", *_summary_table(found, category)]
    if df[category].nunique() < 2:
        (folder / files[1]).unlink(missing_ok=True)  # left by a former run with more groups
        return [*lines, "", f"Whole table: {_markdown_link(folder.name, files[0])}."]
    pairs = pairwise(df, column, category)
    _write_text(folder / files[1], as_csv(pairs))
    kind = infer_kind(df[column].dropna())
    links = " and ".join(_markdown_link(folder.name, file) for file in files)
    return [
        *lines,
        "",
        *_pairs_table(pairs, kind == "mean"),
        "",
        *describe_differences(pairs),
        "",
        f"Whole tables: {links}.",
    ]


def _summary_table(found: "pd.DataFrame", category: str) -> list[str]:
    """Format the rows of each category; the first of them has the counts."""
    rows: list[list[str]] = []
    for name, part in found.groupby(category, sort=False):
        shown = part[(part["value"] != 0) | (part["answer"] == "mean")]
        cells = [
            [escape_markdown(_shorten_answer(row["answer"])), _format_interval(row)]
            for row in shown.head(MAX_ANSWERS_SHOWN).to_dict("records")
        ]
        first = part.iloc[0]
        if not first["n"]:
            cells = [["–", "–"]]
        elif len(shown) > MAX_ANSWERS_SHOWN:
            cells.append(
                [
                    f"{len(shown) - MAX_ANSWERS_SHOWN} more",
                    format_number(shown["value"][MAX_ANSWERS_SHOWN:].sum()),
                ]
            )
        counts = [str(first[key]) for key in ("n", "refused", "errors")]
        rows.append(
            [escape_markdown(str(name)), *cells[0], *counts, escape_markdown(first["note"])]
        )
        rows += [["", *one, "", "", "", ""] for one in cells[1:]]
    return format_table(
        [escape_markdown(category), "answer", "value", "n", "refused", "failed", "note"], rows
    )


def _pairs_table(pairs: "pd.DataFrame", mean: bool) -> list[str]:
    rows = [
        [
            f"{escape_markdown(str(row['a']))} – {escape_markdown(str(row['b']))}",
            _format_interval(row, "difference"),
            _format_p(row["p"]),
            _format_p(row["p_holm"]),
            f"{row['n_a']}, {row['n_b']}",
            escape_markdown(row["test"]),
            escape_markdown(row["note"]),
        ]
        for row in pairs.sort_values("p_holm").head(MAX_ROWS_SHOWN).to_dict(orient="records")
    ]
    first = "difference of means" if mean else "distance of all shares"
    return format_table(["pair", first, "p", "p (Holm)", "n", "test", "note"], rows)


def describe_differences(pairs: "pd.DataFrame") -> list[str]:
    """Summarize the tests of pairs without overclaiming; lines begin with `CONCLUSION_STARTS`."""
    tested = pairs[pairs["p_holm"].notna()]
    if not len(tested):
        return ["Nothing could be tested: too few answers."]
    detected = tested[tested["p_holm"] <= 0.05]
    rest = len(tested) - len(detected)
    least = tested["note"].str.extract(r"no p value below (\S+) is")[0].astype(float)
    # Even the smallest possible p value would not be significant after Holm's correction.
    if bool((least * len(tested) > 0.05).all()):
        return ["No difference could have been detected: too few answers."]
    if not len(detected):
        return ["No difference was detected. This does not show that there is none."]
    names = [
        f"{escape_markdown(str(r['a']))} and {escape_markdown(str(r['b']))}"
        for r in detected.to_dict("records")
    ]
    more = f" and {len(names) - 5} more pairs" if len(names) > 5 else ""
    others = f" For {pluralize(rest, 'other pair')} no difference was detected." if rest else ""
    return [f"Different at 5 %, corrected: {'; '.join(names[:5])}{more}.{others}"]


def _format_interval(row: Mapping[str, Any], column: str = "value") -> str:
    value, low, high = row[column], row["low"], row["high"]
    if math.isnan(low):
        return format_number(value)
    return f"{format_number(value)} [{format_number(low)}, {format_number(high)}]"


def _format_p(value: float) -> str:
    return "–" if math.isnan(value) else format_p_value(value)


def _format_cost(rows: "pd.DataFrame") -> str:
    """Format the cost of these answers; models without prices are listed."""
    models = rows["model"] if "model" in rows else rows["cost"] * 0
    costs = rows["cost"].astype(float).groupby(models).sum(min_count=1)
    free = [escape_markdown(str(name)) for name in costs.index[costs.isna()]]
    if len(free) == len(costs):
        return "no price known"
    least = f"at least, as no price is known for {', '.join(free[:5])}" if free else ""
    return f"cost ${costs.sum():.{2 if costs.sum() >= 1 else 6}f} {least}".strip()


def _markdown_link(folder: str, file: str) -> str:
    return f"[{file}]({quote(folder)}/{quote(file)})"


def _shorten_answer(answer: Any) -> str:
    text = " ".join(str(answer).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def _write_text(path: Path, text: str) -> None:
    # A lone surrogate, which an answer can contain, is written as \\udXXX.
    write_atomic(path, text.encode("utf-8", "backslashreplace"))
