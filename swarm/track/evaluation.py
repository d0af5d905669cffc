"""An evaluation as trackers are told of it: each voice's numbers, and every answer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.track.base import TrackerTable, Tracker

COUNT_COLUMNS = ("unparsed_rate", "calls", "tokens", "cost", "seconds")
"""Of a voice, beside its utility; where there is one."""

ANSWER_COLUMNS = ("voice", "id", "part", "value", "answer", "text")


def log_evaluation(tracker: Tracker, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Tell a result and the answers that lie in its folder; gives the summary."""
    values: dict[str, Any] = {}
    for voice in result["voices"]:
        low, high = voice["interval"]
        named = {"utility": voice["utility"], "utility_low": low, "utility_high": high}
        named |= {name: voice[name] for name in COUNT_COLUMNS if voice.get(name) is not None}
        named |= {f"part/{part}": value for part, value in voice.get("parts", {}).items()}
        values |= {f"{name}/{voice['name']}": value for name, value in named.items()}
    values |= {name: result[name] for name in ("items", "prompts", "tokens", "seconds")}
    values["voices"] = _score_table(result["voices"])
    with (folder / "answers.jsonl").open(encoding="utf-8") as lines:
        values["answers"] = _answer_table([json.loads(line) for line in lines])
    tracker.log(0, values)
    return {name: value for name, value in result.items() if name != "identity"}


def _score_table(voices: Sequence[Mapping[str, Any]]) -> TrackerTable:
    columns = ["name", "utility", "low", "high", *COUNT_COLUMNS]
    rows = [[v["name"], v["utility"], *v["interval"], *(v.get(name) for name in COUNT_COLUMNS)]
            for v in voices]  # fmt: skip
    return TrackerTable(columns, rows)


def _answer_table(rows: Sequence[Mapping[str, Any]]) -> TrackerTable:
    columns = [name for name in ANSWER_COLUMNS if any(name in row for row in rows)]
    return TrackerTable(columns, [[_to_cell(row.get(name)) for name in columns] for row in rows])


def _to_cell(value: Any) -> Any:
    """A number as it is, anything else as text: a column has one type."""
    return value if value is None or isinstance(value, float) else str(value)
