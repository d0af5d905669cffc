"""The two models that a report compares: the best initial expert and the best found."""

from typing import Any, NamedTuple

import numpy as np

from swarm.report.folder import PositionIndex, RunFolder
from swarm.report.statistics import mean_interval

Rows = list[dict[str, Any]]


class SplitResult(NamedTuple):
    """A model on a split.

    Attributes:
        ends: Of the 95 % interval; `None` where the folder does not tell it.
        unparsed: Share of answers that could not be read.
    """

    utility: float
    ends: tuple[float, float] | None
    items: int
    unparsed: float | None
    parts: dict[str, float]


class TestComparison:
    """Best initial expert ("starting") and best found ("ending") of a run.

    What the search measured at its end is taken from there; before, dev is measured here.

    Attributes:
        run: The run.
        places: Where they are: (iteration, particle).
        expert: The name of the best initial expert.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run, self.metrics = run, run.metrics
        self.places: dict[str, PositionIndex] = {"starting": run.best_expert(), "ending": run.find_best()}
        self.expert = run.experts[self.places["starting"][1]]
        self._measured: dict[tuple[str, str], SplitResult | None] = {}

    @property
    def model_labels(self) -> dict[str, str]:
        """What they are called."""
        return {"starting": f"best initial expert ({self.expert})", "ending": "best found"}

    @property
    def is_tested(self) -> bool:
        """Whether they were compared on the test split."""
        return "test_gain" in self.metrics

    def split_result(self, who: str, split: str) -> SplitResult | None:
        """A model on "dev", "confirm" or "test"; `None` where it was not asked."""
        if (who, split) not in self._measured:
            self._measured[who, split] = self._read_split_result(who, split)
        return self._measured[who, split]

    def _read_split_result(self, who: str, split: str) -> SplitResult | None:
        found = self.metrics
        if split == "confirm":
            one = found.get("confirm")
            return one and SplitResult(one[who], one[f"{who}_interval"], one["items"], None, {})
        name = f"{who}_best_{'validation' if split == 'dev' else 'single_test'}"
        utility = found.get(f"{name}_{'utility' if split == 'dev' else 'accuracy'}")
        if utility is not None:
            return SplitResult(
                utility,
                found[f"{name}_interval"],
                found[f"{name}_items"],
                found.get(f"{name}_unparsed_rate"),
                found.get(f"{name}_parts", {}),
            )
        return self._dev_result(who) if split == "dev" else None

    def _dev_result(self, who: str) -> SplitResult | None:
        utility = float(self.run.utilities[self.places[who]])
        if np.isnan(utility):
            return None
        rows = self.run.load_answers(self.places[who])
        unparsed = sum(row["answer"] is None for row in rows) / len(rows)
        found = mean_interval(answer_values(rows).tolist(), signed=bool((answer_values(rows) < 0).any()))
        # A utility that is no mean has another interval, which only its task can tell.
        plain = abs(found.mean - utility) < 1e-9 and not rows[0].get("part")
        return SplitResult(
            utility, (found.low, found.high) if plain else None, len(rows), unparsed, {}
        )

    def constant_result(self, split: str) -> SplitResult | None:
        """The best constant answers by domain; `None` where they were not measured."""
        found = (self.metrics.get("constant_answers") or {}).get("by_domain", {}).get(split)
        return found and SplitResult(found["utility"], found["interval"], found["items"], 0.0, {})

    def baseline_results(self) -> dict[str, dict[str, SplitResult | None]]:
        """What the best found was compared with, by label, on each split."""

        def parse_split_result(one: dict[str, Any] | None) -> SplitResult | None:
            if one is None:
                return None
            parts = one.get("parts", {})
            return SplitResult(
                one["utility"], one["interval"], one["items"], one["unparsed_rate"], parts
            )

        found = self.metrics.get("baselines", ())
        return {
            one["label"]: {split: parse_split_result(one.get(split)) for split in ("dev", "confirm", "test")}
            for one in found
        }

    def vote_result(self, split: str) -> SplitResult | None:
        """The vote of the best; `None` where there is none."""
        found = self.metrics
        by_size = found.get("ensemble_dev_by_size")
        if split == "dev" and by_size:
            items = found["ending_best_validation_items"]
            return SplitResult(by_size[found["ensemble_size"] - 1], None, items, None, {})
        name = "ending_top-k_ensemble_test"
        if split == "test" and f"{name}_accuracy" in found:
            ends, items = found[f"{name}_interval"], found[f"{name}_items"]
            unparsed, parts = found.get(f"{name}_unparsed_rate"), found.get(f"{name}_parts", {})
            return SplitResult(found[f"{name}_accuracy"], ends, items, unparsed, parts)
        return None

    def paired_answers(self) -> tuple[str, Rows, Rows] | None:
        """What both answered item by item: to test, else to dev; and which of them it is."""
        before, after = (self.run.load_test_answers(place) for place in self.places.values())
        if before and after:
            return "test", before, after
        if any(np.isnan(self.run.utilities[place]) for place in self.places.values()):
            return None
        before, after = (self.run.load_answers(place) for place in self.places.values())
        return "dev", before, after


def answer_values(rows: Rows) -> np.ndarray:
    """[items] what answers were worth."""
    return np.array([row["value"] for row in rows], dtype=float)


def is_binary(rows: Rows) -> bool:
    """Whether every answer is right or wrong."""
    return bool(np.isin(answer_values(rows), (0.0, 1.0)).all())


def test_name(before: Rows, after: Rows) -> str:
    """Which test the search makes of a difference between these answers."""
    if after[0].get("part"):
        return "bootstrap over items, within each part"
    return "McNemar's exact" if is_binary(before) and is_binary(after) else "random sign flips"
