"""A search as trackers are told of it: its series, and what it came to."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swarm.errors import UserError
from swarm.files import append, encode_json
from swarm.report.compared import TestComparison
from swarm.report.folder import RunFolder
from swarm.report.items import build_changed_item, load_questions
from swarm.track.base import NullTracker, TrackedRun, StackedAreaChart, TrackerTable, Tracker
from swarm.track.course import SearchSeries
from swarm.track.during import track_run

SPEEDS_FILE = "tracker.jsonl"
"""A line an iteration: what it took, which the state does not have: that is the same everywhere."""

WEIGHTS_FILE = "adapter_model.safetensors"

METRIC_NAMES = {
    "dev": "ending_best_validation_utility",
    "dev_interval": "ending_best_validation_interval",
    "test": "ending_best_single_test_accuracy",
    "test_interval": "ending_best_single_test_interval",
    "test_gain": "test_gain",
    "test_gain_interval": "test_gain_interval",
    "test_gain_p_value": "test_gain_p_value",
}
"""What an artifact's metadata say of its worth, and the metrics' names for it."""


class SearchTracker:
    """One search and who is told of it.

    All is told from the run's record. So a search that goes on tells what its tracker may have
    missed, wherever it was killed, and one that was searched without a tracker is told as a whole.

    Args:
        tracker: Who is told.
        folder: The run's.
    """

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker, self.folder = tracker, folder
        self.shown = not isinstance(tracker, NullTracker)
        self._speeds: dict[int, dict[str, float]] = {}

    @contextlib.contextmanager
    def track_search(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
        """Tell of the search as far as it is, and at the end that it is over, and how."""
        if not self.shown:
            yield
            return
        self._config, self._metrics = dict(config), dict[str, Any]()
        self._course = SearchSeries(state["experts"], len(state["groups"]))
        self._speeds = _speeds(self.folder / SPEEDS_FILE)
        pool = Path(str(self._config.get("pool", {}).get("folder") or self.folder))
        sources = [pool / name for name in state["experts"] if (pool / name).is_dir()]
        self._sources = {source.name: source for source in sources}
        with track_run(self.tracker, TrackedRun("search", self.folder, config, sources)) as summary:
            for number, entry in enumerate(state["rounds"]):
                self._log_entry(number, entry)
            yield
            summary |= self._metrics

    def log_iteration(self, number: int, entry: Mapping[str, Any], **measured: float) -> None:
        """An iteration is recorded; `measured` is what the record does not have of it."""
        if not self.shown:
            return
        self._speeds[number] = measured
        line = encode_json({"iteration": number, **measured}) + b"\n"
        with contextlib.suppress(UserError):  # a series with a gap; the search is what counts
            append(self.folder / SPEEDS_FILE, line)
        self._log_entry(number, entry)

    def _log_entry(self, number: int, entry: Mapping[str, Any]) -> None:
        self.tracker.log(number, self._course.add_iteration(entry) | self._speeds.get(number, {}))

    def log_final_metrics(self, metrics: Mapping[str, Any]) -> None:
        """The search is judged: its tables, its picture and its best, in a step after the last."""
        if not self.shown:
            return
        self._metrics = dict(metrics)
        run = RunFolder(self.folder)
        models = TestComparison(run)
        best = np.array(self._course.best)
        found: dict[str, Any] = {"coefficients": StackedAreaChart("Best so far", run.experts, best)}
        for split in ("dev", "test"):
            if (table := _flip_table(models, split)) is not None:
                found[f"flips_{split}"] = table
        self.tracker.log(len(run.rounds), found)
        self.tracker.log_model(self.folder / "global_best", self._describe_best(run))

    def _describe_best(self, run: RunFolder) -> dict[str, Any]:
        """What is known of the best."""
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
            **{name: run.metrics.get(metric) for name, metric in METRIC_NAMES.items()},
        }


def _speeds(file: Path) -> dict[int, dict[str, float]]:
    """What the iterations took, by their numbers; lines that a kill cut off are left out."""
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


def _flip_table(models: TestComparison, split: str) -> TrackerTable | None:
    """The items that best initial expert and best found answered differently well.

    `None` where the two did not both answer the split.
    """
    run, places = models.run, models.places.values()
    if split == "dev":
        if any(np.isnan(run.utilities[place]) for place in places):
            return None
        before, after = (run.load_answers(place) for place in places)
    else:
        tested = [run.load_test_answers(place) for place in places]
        if tested[0] is None or tested[1] is None:
            return None
        before, after = tested[0], tested[1]
    questions, _ = load_questions(models, split)
    rows = []
    for pair in zip(before, after, strict=True):
        if pair[0]["value"] == pair[1]["value"]:
            continue
        one = build_changed_item(*pair, questions)
        (old, old_text), (new, new_text) = one.before, one.after
        rows.append([one.item, one.question, one.gold, old, new, *one.values, old_text, new_text])
    expert = models.expert
    columns = ["item", "question", "gold", f"answer of {expert}", "answer of best found",
               f"value of {expert}", "value of best found", f"text of {expert}",
               "text of best found"]  # fmt: skip
    return TrackerTable(columns, rows)
