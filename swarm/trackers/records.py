"""Conversion of searches, evaluations, comparisons and multi-agent answers into tracker records."""

import contextlib
import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm._util.files import append, encode_json
from swarm.errors import UserError
from swarm.report.analyses.trajectories import swarm_diversity
from swarm.report.paired_comparison import (
    PairedComparison,
    Rows,
    answer_domain,
    answer_values,
    build_changed_item,
    load_questions,
)
from swarm.runs.run_reader import RunFolder
from swarm.runs.verdict import judge_search
from swarm.trackers.base import (
    NullTracker,
    SeriesChart,
    StackedAreaChart,
    TrackedRun,
    Tracker,
    TrackerTable,
    track_run,
)

if TYPE_CHECKING:
    import pandas as pd

SUMMED_COLUMNS = ("cost", "prompt_tokens", "new_tokens")


def log_comparison(
    tracker: Tracker, folder: Path, frames: "Mapping[str, pd.DataFrame]"
) -> dict[str, Any]:
    """Log each question's counts and the tables in its folder; return the summary.

    Args:
        folder: Folder of the report, which has one folder per question.
        frames: Answers by question name.
    """
    totals: dict[str, Any] = {"questions": len(frames)}
    for number, (name, frame) in enumerate(frames.items()):
        # The rows of a model in several groups are repeated, but it was prompted only once.
        keys = [key for key in ("model", "paraphrase_ix", "sample") if key in frame]
        once = frame.drop_duplicates(keys) if "sample" in frame else frame
        values: dict[str, Any] = {"rows": len(frame), "errors": int(frame["error"].notna().sum())}
        values |= {key: float(once[key].sum()) for key in SUMMED_COLUMNS if key in once}
        totals |= {key: totals.get(key, 0) + value for key, value in values.items()}
        for file in sorted((folder / name).glob("*.csv")):
            table = _read_table(file)
            values[f"{name}/{file.stem}"] = table
            if file.stem.endswith("_summary"):
                values |= _summary_numbers(f"{name}/{file.stem.removesuffix('_summary')}", table)
        tracker.log(number, values)
    return totals


def _read_table(file: Path) -> TrackerTable:
    """Read a CSV file; columns that contain only numbers are converted."""
    with file.open(newline="", encoding="utf-8") as lines:
        columns, *rows = csv.reader(lines)
    numeric = [all(_is_number(row[n]) for row in rows) for n in range(len(columns))]
    return TrackerTable(
        columns,
        [
            [(float(cell) if cell else None) if numeric[n] else cell for n, cell in enumerate(row)]
            for row in rows
        ],
    )


def _is_number(cell: str) -> bool:
    try:
        return not cell or float(cell) is not None
    except ValueError:
        return False


def _summary_numbers(name: str, table: TrackerTable) -> dict[str, float]:
    """Return each row's value and the ends of its interval from a summary table."""
    place = {column: n for n, column in enumerate(table.columns)}
    found: dict[str, float] = {}
    for row in table.rows:
        words = [str(cell) for cell in row if isinstance(cell, str) and cell]
        for column in ("value", "mean", "share", "low", "high"):
            if column in place and isinstance(cell := row[place[column]], float):
                found["/".join([name, *words[:2], column])] = cell
    return found


SEARCH_CHARTS = (
    SeriesChart("result", "best and worst", ("swarm/best", "swarm/worst")),
    SeriesChart("result", "coefficients of the best", ("coefficient/",)),
    SeriesChart("swarm", "particles now", (r"particle/\d+_now",)),
    SeriesChart("swarm", "particles' bests", (r"particle/\d+_best",)),
    SeriesChart("swarm", "diversity", ("swarm/diversity",)),
    SeriesChart("cost", "prompts", ("prompts/",)),
    SeriesChart("cost", "speed", ("speed/prompts_per_second",)),
)
"""Layout of a search; docs/wandb.md describes the same panels for a W&B report."""


class SearchSeries:
    """Converts the iterations of a search, one after the other, into time series.

    Args:
        experts: Names of the K experts.
        groups: Number of groups of modules with separate coefficients; their mean is logged.

    Attributes:
        best: Coefficients of the best so far, [T, K].
    """

    def __init__(self, experts: Sequence[str], groups: int) -> None:
        self.experts, self.groups = experts, groups
        self.best: list[np.ndarray] = []
        self._highest, self._lowest = -np.inf, np.inf
        self._personal: dict[int, float] = {}

    def add_iteration(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """Add an iteration and return the values of the series, without those not measured."""
        shape = (len(entry["positions"]), self.groups, len(self.experts))
        positions = np.array(entry["positions"], dtype=float).reshape(shape).mean(axis=1)
        known = {i: u for i, u in enumerate(entry["utilities"]) if u is not None}
        held = self.best[-1] if self.best else positions[0]
        for i, utility in known.items():
            if utility > self._highest:
                self._highest, held = utility, positions[i]
            self._lowest = min(self._lowest, utility)
            self._personal[i] = max(self._personal.get(i, -np.inf), utility)
        self.best.append(held)
        best = {"swarm/best": self._highest, "swarm/worst": self._lowest}
        found = best if self._personal else {}
        found |= {f"particle/{i}_now": utility for i, utility in known.items()}
        found |= {f"particle/{i}_best": utility for i, utility in self._personal.items()}
        found["swarm/diversity"] = float(swarm_diversity(positions[None])[0])
        for name in ("scored", "saved", "shared"):
            key = f"prompts_{name}"
            found |= {f"prompts/{name}": entry[key]} if key in entry else {}
        names = zip(self.experts, held.tolist(), strict=True)
        return found | {f"coefficient/{name}": share for name, share in names}


COUNT_COLUMNS = ("unparsed_rate", "calls", "tokens", "cost", "seconds")
"""Columns of an evaluated model besides its utility; logged if present."""

ANSWER_COLUMNS = ("voice", "id", "part", "value", "answer", "text")


def log_evaluation(tracker: Tracker, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Log a result and the answers in its folder; return the summary."""
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
    rows = [
        [v["name"], v["utility"], *v["interval"], *(v.get(name) for name in COUNT_COLUMNS)]
        for v in voices
    ]
    return TrackerTable(columns, rows)


def _answer_table(rows: Sequence[Mapping[str, Any]]) -> TrackerTable:
    columns = [name for name in ANSWER_COLUMNS if any(name in row for row in rows)]
    return TrackerTable(columns, [[_to_cell(row.get(name)) for name in columns] for row in rows])


def _to_cell(value: Any) -> Any:
    """Convert values other than floats to strings, as a column must have a single type."""
    return value if value is None or isinstance(value, float) else str(value)


SPEEDS_FILE = "tracker.jsonl"
"""File of timings, one JSON line per iteration; they are not part of the reproducible state."""

WEIGHTS_FILE = "adapter_model.safetensors"

METRIC_NAMES = {
    "dev": "ending_best_validation_utility",
    "dev_interval": "ending_best_validation_interval",
    "test": "ending_best_single_test_accuracy",
    "test_interval": "ending_best_single_test_interval",
    "verdict": "verdict",
}
"""Metadata keys of an artifact that describe its results, and the corresponding metrics."""


class SearchTracker:
    """Logs one search to a tracker.

    Everything is read from the run's record. A resumed search therefore also logs what its tracker
    missed, and a search that ran without a tracker can be logged completely afterwards.

    Args:
        tracker: Tracker to log to.
        folder: Run folder.
    """

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker, self.folder = tracker, folder
        self.shown = not isinstance(tracker, NullTracker)
        self._speeds: dict[int, dict[str, float]] = {}

    @contextlib.contextmanager
    def track_search(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
        """Log the search's recorded iterations, and finish the run when the block ends."""
        if not self.shown:
            yield
            return
        self._config, self._metrics = dict(config), dict[str, Any]()
        self._course = SearchSeries(state["experts"], len(state["groups"]))
        self._speeds = _speeds(self.folder / SPEEDS_FILE)
        pool = Path(str(self._config.get("pool", {}).get("folder") or self.folder))
        sources = [pool / name for name in state["experts"] if (pool / name).is_dir()]
        self._sources = {source.name: source for source in sources}
        shown = TrackedRun("search", self.folder, config, sources, SEARCH_CHARTS)
        with track_run(self.tracker, shown) as summary:
            for number, entry in enumerate(state["rounds"]):
                self._log_entry(number, entry)
            yield
            summary |= self._metrics

    def log_iteration(self, number: int, entry: Mapping[str, Any], **measured: float) -> None:
        """Log a recorded iteration; `measured` contains values that are not part of the record."""
        if not self.shown:
            return
        self._speeds[number] = measured
        line = encode_json({"iteration": number, **measured}) + b"\n"
        with contextlib.suppress(UserError):  # a gap in the series must not stop the search
            append(self.folder / SPEEDS_FILE, line)
        self._log_entry(number, entry)

    def _log_entry(self, number: int, entry: Mapping[str, Any]) -> None:
        speeds = {f"speed/{name}": value for name, value in self._speeds.get(number, {}).items()}
        self.tracker.log(number, self._course.add_iteration(entry) | speeds)

    def log_final_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Log the tables, the chart and the best of a finished search, in a step after the last."""
        if not self.shown:
            return
        self._metrics = {"verdict": str(judge_search(metrics, self.folder)), **metrics}
        run = RunFolder(self.folder)
        models = PairedComparison(run)
        best = np.array(self._course.best)
        found: dict[str, Any] = {"coefficients": StackedAreaChart("Best so far", run.experts, best)}
        answered = {split: pair for split in SPLITS if (pair := _paired_answers(models, split))}
        for split, pair in answered.items():
            found[f"flips/{split}"] = _flip_table(models, split, *pair)
        if answered:
            found["flips/by_domain"] = _domain_flips(models, answered)
        self.tracker.log(len(run.rounds), found)
        self.tracker.log_model(self.folder / "global_best", self._describe_best(run))

    def _describe_best(self, run: RunFolder) -> dict[str, Any]:
        """Return the metadata of the best."""
        position = run.positions[run.find_best()]
        rows = position.reshape(len(run.groups), len(run.experts))
        experts = {}
        for name, share in zip(run.experts, rows.mean(axis=0).tolist(), strict=True):
            source = self._sources.get(name)
            weights = source / WEIGHTS_FILE if source else None
            experts[name] = {
                "coefficient": share,
                "folder": str(source) if source else None,
                "sha256": _file_sha256(weights) if weights and weights.is_file() else None,
            }
        several = {"groups": dict(zip(run.groups, rows.tolist(), strict=True))}
        model = self._config.get("model", {})
        return {
            "task": self._config.get("task", {}).get("name"),
            "base": model.get("path") or model.get("name"),
            "seed": run.identity.get("seed"),
            "experts": experts,
            **(several if len(run.groups) > 1 else {}),
            "pool weights": run.identity.get("pool weights"),
            **{name: self._metrics.get(metric) for name, metric in METRIC_NAMES.items()},
        }


def _speeds(file: Path) -> dict[int, dict[str, float]]:
    """Read the timings by iteration; lines truncated by a kill are skipped."""
    found = {}
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            found[int(entry.pop("iteration"))] = entry
    return found


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


SPLITS = ("dev", "test")


def _paired_answers(models: PairedComparison, split: str) -> tuple[Rows, Rows] | None:
    """Return the answers of best initial expert and best found; `None` unless both were asked."""
    run, places = models.run, models.places.values()
    if split == "test":
        before, after = (run.load_test_answers(place) for place in places)
        return (before, after) if before and after else None
    if any(np.isnan(run.utilities[place]) for place in places):
        return None
    before, after = (run.load_answers(place) for place in places)
    return before, after


def _flip_table(models: PairedComparison, split: str, before: Rows, after: Rows) -> TrackerTable:
    """Tabulate the items whose value differs between best initial expert and best found."""
    questions, _ = load_questions(models, split)
    rows = []
    for pair in zip(before, after, strict=True):
        if pair[0]["value"] == pair[1]["value"]:
            continue
        one = build_changed_item(*pair, questions)
        (old, old_text), (new, new_text) = one.before, one.after
        domain = answer_domain(pair[0], questions)
        told = [one.item, domain, one.question, one.gold, old, new]
        rows.append([*told, *one.values, old_text, new_text])
    expert = models.expert
    columns = [
        "item",
        "domain",
        "question",
        "gold",
        f"answer of {expert}",
        "answer of best found",
        f"value of {expert}",
        "value of best found",
        f"text of {expert}",
        "text of best found",
    ]
    return TrackerTable(columns, rows)


def _domain_flips(
    models: PairedComparison, answered: Mapping[str, tuple[Rows, Rows]]
) -> TrackerTable:
    """Count the items won and lost in each domain, in the order of the items, and in all."""
    columns = ["split", "domain", "items", "won", "lost", models.expert, "best found"]
    rows = []
    for split, pair in answered.items():
        questions, _ = load_questions(models, split)
        domains = np.array([answer_domain(row, questions) for row in pair[0]])
        values = np.array([answer_values(one) for one in pair])
        chosen = {name: domains == name for name in dict.fromkeys(domains.tolist())}
        named = list(chosen.items()) if len(chosen) > 1 else []
        for name, mask in [*named, ("all", np.full(len(domains), True))]:
            old, new = values[:, mask]
            counts = [float(len(old)), float((new > old).sum()), float((new < old).sum())]
            rows.append([split, name, *counts, float(old.mean()), float(new.mean())])
    return TrackerTable(columns, rows)


TRACKING_FOLDER = "tracking"
"""Parent of the folders of runs without a run folder."""

STAGE_COLUMNS = (
    "layer",
    "role",
    "model",
    "sample",
    "text",
    "error",
    "prompt_tokens",
    "new_tokens",
    "cost",
    "seconds",
    "cached",
)

RESPONSE_COLUMNS = (
    "model",
    "instance",
    "response",
    "error",
    "confidence",
    "prompt_tokens",
    "completion_tokens",
    "cost",
    "seconds",
)


def new_tracking_folder(kind: str) -> Path:
    """Return the path of a new folder, named by kind and time."""
    return Path(TRACKING_FOLDER) / f"{kind}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


class MoATracker:
    """Logs the questions to a mixture of agents, one per step.

    Args:
        tracker: Tracker to log to.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._told: list[dict[str, Any]] = []

    def log_turn(self, turn: dict[str, Any]) -> None:
        """Log one question in the form of `swarm.moa.transcript_format.turn_to_json`."""
        self._told.append(turn)
        values = {f"calls/{name}": count for name, count in turn["calls"].items()}
        values |= {f"tokens/{name}": count for name, count in turn["tokens"].items()}
        values |= {"cost": turn["cost"], "seconds": turn["seconds"]}
        for stage in turn["stages"]:
            values |= {
                f"layer_{stage[0]['layer']}/{k}": v for k, v in _combine_calls(stage).items()
            }
        self.tracker.log(len(self._told) - 1, _drop_missing(values))

    def log_tables(self) -> dict[str, Any]:
        """Log all questions and all stages as tables; return the summary."""
        heads = ("question", "answer", "error", "cost", "seconds")
        asked = [[turn[name] for name in heads] for turn in self._told]
        rows = [
            [number, *(call.get(name) for name in STAGE_COLUMNS)]
            for number, turn in enumerate(self._told)
            for stage in turn["stages"]
            for call in stage
        ]
        self.tracker.log(
            len(self._told),
            {
                "questions": TrackerTable(heads, asked),
                "stages": TrackerTable(["question", *STAGE_COLUMNS], rows),
            },
        )
        sums = {
            "calls": [t["calls"]["all"] for t in self._told],
            "tokens": [sum(t["tokens"].values()) for t in self._told],
            "cost": [t["cost"] for t in self._told],
            "seconds": [t["seconds"] for t in self._told],
        }
        totals = {
            name: sum(v for v in found if v is not None)
            for name, found in sums.items()
            if any(v is not None for v in found)
        }
        failed = sum(turn["error"] is not None for turn in self._told)
        return {"questions": len(self._told), "failed": failed, **totals}


def log_deliberation(tracker: Tracker, result: Mapping[str, Any]) -> dict[str, Any]:
    """Log the answer of a consortium, one iteration per step; return the summary.

    Args:
        result: As made by `swarm.multi_agent.consortium.result_json.result_to_json`.
    """
    rounds: Sequence[Mapping[str, Any]] = result["iterations"]
    for number, one in enumerate(rounds):
        values = {"confidence": one["synthesis"]["confidence"]}
        tracker.log(
            number,
            _drop_missing(values | _combine_calls(one["model_responses"], "completion_tokens")),
        )
    tables = {
        "responses": TrackerTable(["iteration", *RESPONSE_COLUMNS], list(_response_rows(rounds))),
        "verdicts": _verdict_table(rounds),
    }
    tracker.log(len(rounds), tables)
    verdict, about = result["synthesis"], result["metadata"]
    names = (
        "strategy",
        "arbiter",
        "iteration_count",
        "best_iteration",
        "calls",
        "prompt_tokens",
        "completion_tokens",
        "cost",
        "seconds",
        "stopped",
    )
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
    names = ("confidence", "source", "synthesis", "analysis", "dissent")
    rows = [[one["iteration"], *(one["synthesis"].get(name) for name in names)] for one in rounds]
    return TrackerTable(["iteration", *names], rows)


def _combine_calls(calls: Sequence[Mapping[str, Any]], new: str = "new_tokens") -> dict[str, Any]:
    """Combine concurrent calls: seconds of the slowest one, total tokens and cost."""
    came = [call for call in calls if not call.get("error")]
    priced = [call["cost"] for call in calls if call.get("cost") is not None]
    return _drop_missing(
        {
            "answered": len(came),
            "failed": len(calls) - len(came),
            "seconds": max(
                (call["seconds"] for call in calls if call.get("seconds")), default=None
            ),
            "tokens": sum(call.get(name) or 0 for call in calls for name in ("prompt_tokens", new)),
            "cost": sum(priced) if priced else None,
        }
    )


def _drop_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
