"""Tables of MT-Bench's judgements: by model, category and turn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.judge.averages import Average, average_scores
from swarm.judge.files import FieldTypes, JsonRow, read_json_rows
from swarm.judge.merging import row_sort_key
from swarm.judge.mt_bench_verdicts import ERROR_WINNER, PAIR_FIELDS, SINGLE_FIELDS, UNPARSED_SCORE
from swarm.report.text import format_table

GRADE_ROW_FIELDS: FieldTypes = {"question_id": (int, str), "model": str, "judge": (list, str), "turn": int,
    "score": (int, float)}  # fmt: skip
PAIR_ROW_FIELDS: FieldTypes = {"question_id": (int, str), "model_1": str, "model_2": str, "judge": (list, str),
    "turn": int, "g1_winner": str, "g2_winner": str}  # fmt: skip

ALL_LABEL = "all"


class TurnVerdict(NamedTuple):
    """What a judge said of a model's turn.

    Attributes:
        other: The model it was compared with, if it was.
        value: A grade, or a win in percent; `None` is unparsed.
        turned: Whether the two orders of a pair ended differently, so that it counts as a tie.
    """

    other: str
    value: float | None
    turned: bool = False


VerdictsByTurn = dict[tuple[Any, ...], TurnVerdict]
"""By (question_id, category, turn, opponent)."""


def compute_tables(folder: Path, kind: str, baseline: str | None = None) -> list[JsonRow]:
    """The lines of the tables: of each judge and model, by category and turn, each with "all".

    A line is {judge, model, category, turn, average, low, high, n, unparsed}; of pairs the average
    is the adjusted win rate in percent, a tie being half a win and a disagreement between the two
    orders a tie, and {wins, ties, losses, turned} stand beside it: how many, and how many of the
    ties are disagreements. What could not be read is in no average.

    Args:
        folder: Where the judgements are.
        kind: "single" or "pair".
        baseline: Of pairs, only those against this model, and not from its side.

    Raises:
        UserError: There are none, or a file holds something else.
    """
    files = sorted(folder.glob(f"*_{kind}.jsonl"))
    fields = SINGLE_FIELDS if kind == "single" else PAIR_FIELDS
    latest: dict[tuple[Any, ...], JsonRow] = {}
    for path in files:
        for row in read_json_rows(path, GRADE_ROW_FIELDS if kind == "single" else PAIR_ROW_FIELDS):
            latest[(_judge_name(row), *(row[field] for field in fields))] = row
    found: dict[tuple[str, str], VerdictsByTurn] = {}
    for (judge, *_), row in latest.items():
        for model, said in _grade_verdict(row) if kind == "single" else _pair_verdicts(row, baseline):
            place = (row["question_id"], row.get("category", "-"), row["turn"], said.other)
            found.setdefault((judge, model), {})[place] = said
    if not found:
        raise UserError(f"{folder}: there are no judgements of this kind; run judge first")
    return [line for who in sorted(found) for line in _table_lines(*who, found[who], kind)]


def _judge_name(row: JsonRow) -> str:
    return str(row["judge"][0] if isinstance(row["judge"], list) else row["judge"])


def _grade_verdict(row: JsonRow) -> list[tuple[str, TurnVerdict]]:
    value = None if row["score"] == UNPARSED_SCORE else float(row["score"])
    return [(row["model"], TurnVerdict("", value))]


def _pair_verdicts(row: JsonRow, baseline: str | None) -> list[tuple[str, TurnVerdict]]:
    """What a pair is worth to either of its models."""
    games = (row["g1_winner"], row["g2_winner"])
    winner = games[0] if games[0] == games[1] else "tie"
    values = {"model_1": 100.0, "model_2": 0.0, "tie": 50.0}
    first = None if ERROR_WINNER in games or winner not in values else values[winner]
    second = None if first is None else 100.0 - first
    turned = first is not None and games[0] != games[1]
    sides = [
        (row["model_1"], TurnVerdict(row["model_2"], first, turned)),
        (row["model_2"], TurnVerdict(row["model_1"], second, turned)),
    ]
    return [side for side in sides if baseline is None or side[1].other == baseline]


def _table_lines(judge: str, model: str, values: VerdictsByTurn, kind: str) -> list[JsonRow]:
    categories = sorted({category for _, category, _, _ in values})
    turns = sorted({turn for _, _, turn, _ in values})
    lines = []
    for category in [ALL_LABEL, *categories]:
        for turn in [*turns, ALL_LABEL]:
            some = {place: value for place, value in values.items()
                    if category in (ALL_LABEL, place[1]) and turn in (ALL_LABEL, place[2])}  # fmt: skip
            if some:
                won = {} if kind == "single" else _count_outcomes(some)
                lines.append({"judge": judge, "model": model, "category": category, "turn": turn,
                              **average_scores(_group_by_question(some)).to_row(), **won})  # fmt: skip
    return lines


def _group_by_question(values: VerdictsByTurn) -> list[list[float | None]]:
    found: dict[Any, list[float | None]] = {}
    for place in sorted(values, key=row_sort_key):
        found.setdefault(place[0], []).append(values[place].value)
    return list(found.values())


def _count_outcomes(values: VerdictsByTurn) -> JsonRow:
    said = [one.value for one in values.values()]
    counts = {"wins": said.count(100.0), "ties": said.count(50.0), "losses": said.count(0.0)}
    return {**counts, "turned": sum(one.turned for one in values.values())}


def format_tables(lines: Sequence[JsonRow], kind: str) -> list[str]:
    """The tables for people, one a judge."""
    text = []
    what = (
        "grades from 1 to 10"
        if kind == "single"
        else ("adjusted win rates in percent with won-tied-lost")
    )
    for judge in dict.fromkeys(line["judge"] for line in lines):
        mine = [line for line in lines if line["judge"] == judge]
        turns = list(dict.fromkeys(line["turn"] for line in mine))
        head = ["model", "category", *(f"turn {turn}" if turn != ALL_LABEL else "all turns"
                                       for turn in turns)]  # fmt: skip
        rows: dict[tuple[str, str], dict[Any, str]] = {}
        for line in mine:
            rows.setdefault((line["model"], line["category"]), {})[line["turn"]] = _format_cell(line)
        text.append(f"judge {judge}: {what}, 95 % intervals over questions")
        text += format_table(head, [[*who, *_row_cells(cells, turns)] for who, cells in rows.items()])
    return text


def _row_cells(cells: Mapping[Any, str], turns: Sequence[Any]) -> list[str]:
    return [cells.get(turn, "") for turn in turns]


def _format_cell(line: JsonRow) -> str:
    shown = str(Average(*(line[name] for name in ("average", "low", "high", "n", "unparsed"))))
    if "wins" not in line:
        return shown
    turned = f" ({line['turned']} tied by order)" if line["turned"] else ""
    return f"{shown} {line['wins']}-{line['ties']}-{line['losses']}{turned}"
