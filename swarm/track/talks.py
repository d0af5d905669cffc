"""Questions put to several models, as trackers are told of them: stages, rounds, cost, time."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm.track.base import TrackerTable, Tracker

TRACKING_FOLDER = "tracking"
"""The folder of the folders of what has none of its own."""

STAGE_COLUMNS = ("layer", "role", "model", "sample", "text", "error", "prompt_tokens", "new_tokens",
          "cost", "seconds", "cached")  # fmt: skip

RESPONSE_COLUMNS = ("model", "instance", "response", "error", "confidence", "prompt_tokens",
        "completion_tokens", "cost", "seconds")  # fmt: skip


def new_tracking_folder(kind: str) -> Path:
    """A new folder's path, named by kind and time."""
    return Path(TRACKING_FOLDER) / f"{kind}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


class MoATracker:
    """The questions of a mixture of agents, a step each.

    Args:
        tracker: Who is told.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._told: list[dict[str, Any]] = []

    def log_turn(self, turn: dict[str, Any]) -> None:
        """Tell one question, as `swarm.moa.turns.as_json` has it."""
        self._told.append(turn)
        values = {f"calls_{name}": count for name, count in turn["calls"].items()}
        values |= {f"tokens_{name}": count for name, count in turn["tokens"].items()}
        values |= {"cost": turn["cost"], "seconds": turn["seconds"]}
        for stage in turn["stages"]:
            values |= {f"layer_{stage[0]['layer']}/{k}": v for k, v in _combine_calls(stage).items()}
        self.tracker.log(len(self._told) - 1, _drop_missing(values))

    def log_tables(self) -> dict[str, Any]:
        """Tell all questions and all stages as tables; gives the summary."""
        heads = ("question", "answer", "error", "cost", "seconds")
        asked = [[turn[name] for name in heads] for turn in self._told]
        rows = [[number, *(call.get(name) for name in STAGE_COLUMNS)]
                for number, turn in enumerate(self._told)
                for stage in turn["stages"] for call in stage]  # fmt: skip
        self.tracker.log(len(self._told), {
            "questions": TrackerTable(heads, asked), "stages": TrackerTable(["question", *STAGE_COLUMNS], rows)
        })  # fmt: skip
        sums = {"calls": [t["calls"]["all"] for t in self._told],
                "tokens": [sum(t["tokens"].values()) for t in self._told],
                "cost": [t["cost"] for t in self._told],
                "seconds": [t["seconds"] for t in self._told]}  # fmt: skip
        totals = {name: sum(v for v in found if v is not None) for name, found in sums.items()
                  if any(v is not None for v in found)}  # fmt: skip
        failed = sum(turn["error"] is not None for turn in self._told)
        return {"questions": len(self._told), "failed": failed, **totals}


def log_deliberation(tracker: Tracker, result: Mapping[str, Any]) -> dict[str, Any]:
    """Tell what a consortium came to, an iteration a step; gives the summary.

    Args:
        result: As `swarm.collab.outcome.result` or `responses` make it.
    """
    rounds: Sequence[Mapping[str, Any]] = result.get("iterations") or [
        {"iteration": 1, "model_responses": result["model_responses"]}
    ]
    for number, one in enumerate(rounds):
        values = {"confidence": one.get("synthesis", {}).get("confidence")}
        tracker.log(number, _drop_missing(values | _combine_calls(one["model_responses"], "completion_tokens")))
    tables = {"responses": TrackerTable(["iteration", *RESPONSE_COLUMNS], list(_response_rows(rounds)))}
    if "iterations" in result:
        tables["verdicts"] = _verdict_table(rounds)
    tracker.log(len(rounds), tables)
    verdict, about = result.get("synthesis", {}), result.get("metadata", {})
    names = ("strategy", "arbiter", "iteration_count", "best_iteration", "calls", "prompt_tokens",
             "completion_tokens", "cost", "seconds", "stopped")  # fmt: skip
    found = {name: about.get(name) for name in names} | {"confidence": verdict.get("confidence")}
    return {
        "prompt": result["original_prompt"],
        "answer": verdict.get("synthesis"),
        **_drop_missing(found),
    }


def _response_rows(rounds: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    for one in rounds:
        for response in one["model_responses"]:
            yield [one["iteration"], *(response.get(name) for name in RESPONSE_COLUMNS)]


def _verdict_table(rounds: Sequence[Mapping[str, Any]]) -> TrackerTable:
    names = ("confidence", "how", "synthesis", "analysis", "dissent")
    rows = [[one["iteration"], *(one["synthesis"].get(name) for name in names)] for one in rounds]
    return TrackerTable(["iteration", *names], rows)


def _combine_calls(calls: Sequence[Mapping[str, Any]], new: str = "new_tokens") -> dict[str, Any]:
    """Calls that were made at once: the slowest one's seconds, all ones' tokens and cost."""
    came = [call for call in calls if not call.get("error")]
    priced = [call["cost"] for call in calls if call.get("cost") is not None]
    return _drop_missing({
        "answered": len(came), "failed": len(calls) - len(came),
        "seconds": max((call["seconds"] for call in calls if call.get("seconds")), default=None),
        "tokens": sum(call.get(name) or 0 for call in calls for name in ("prompt_tokens", new)),
        "cost": sum(priced) if priced else None,
    })  # fmt: skip


def _drop_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
