"""An evaluation as trackers are told of it: each voice's numbers, and every answer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.track.base import Table, Tracker

COUNTS = ("unparsed_rate", "calls", "tokens", "cost", "seconds")
"""Of a voice, beside its utility; where there is one."""

ANSWER = ("voice", "id", "part", "value", "answer", "text")


def evaluated(tracker: Tracker, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Tell a result and the answers that lie in its folder; gives the summary."""
    values: dict[str, Any] = {}
    for voice in result["voices"]:
        low, high = voice["interval"]
        named = {"utility": voice["utility"], "utility_low": low, "utility_high": high}
        named |= {name: voice[name] for name in COUNTS if voice.get(name) is not None}
        named |= {f"part/{part}": value for part, value in voice.get("parts", {}).items()}
        values |= {f"{name}/{voice['name']}": value for name, value in named.items()}
    values |= {name: result[name] for name in ("items", "prompts", "tokens", "seconds")}
    values["voices"] = _voices(result["voices"])
    with (folder / "answers.jsonl").open(encoding="utf-8") as lines:
        values["answers"] = _answers([json.loads(line) for line in lines])
    tracker.log(0, values)
    return {name: value for name, value in result.items() if name != "identity"}


def _voices(voices: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["name", "utility", "low", "high", *COUNTS]
    rows = [[v["name"], v["utility"], *v["interval"], *(v.get(name) for name in COUNTS)]
            for v in voices]  # fmt: skip
    return Table(columns, rows)


def _answers(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = [name for name in ANSWER if any(name in row for row in rows)]
    return Table(columns, [[_plain(row.get(name)) for name in columns] for row in rows])


def _plain(value: Any) -> Any:
    """A number as it is, anything else as text: a column has one type."""
    return value if value is None or isinstance(value, float) else str(value)
