"""What a fine-tuning came to: its start against its end, on the same items, by one engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm import certainty
from swarm.certainty import paired_gain
from swarm.evaluation import Batching, Evaluator, scores_to_records, records_to_scores
from swarm.executors import Executor, JobResult
from swarm.files import write_gzip_json
from swarm.identity import digest_items
from swarm.report.folder import RunFolder
from swarm.report.text import format_table
from swarm.tasks import Item, Score, metric_task
from swarm.words import describe_constant_answers, domain_table, one_answer_warnings, compare_with_constants, describe_difference

UNTESTED_REASON = "that run has no test"
"""Why a search cannot be compared with, until it is tested."""


class FinetuneComparison:
    """Scores a fine-tuning's start and end.

    Args:
        task: The task.
        executor: Opened with a pool of the two.
        job: How the work is cut.
        label: What the start is called.
        held: Places of dev that were not trained on.
        test: Whether the test split is asked too.
    """

    def __init__(
        self, task: Any, executor: Executor, job: Batching, label: str, held: Sequence[int], test: bool
    ) -> None:
        self.task, self.label, self.held, self.test = task, label, held, test
        self._executor = executor
        self._evaluator = Evaluator(task, executor, job)
        self._prompts = 0

    def compute_metrics(self, folder: Path, run: RunFolder | None) -> dict[str, Any]:
        """Metrics under the names of a search's; the answers go into the folder.

        Args:
            run: A search of the same task to compare with.
        """
        task = metric_task(self.task)
        splits = {"dev": "judged"} | ({"test": "test"} if self.test else {})
        scores = {name: self._score_split(split) for name, split in splits.items()}
        rows = {name: [scores_to_records(self.task.items(name), one) for one in pair]
                for name, pair in scores.items()}  # fmt: skip
        write_gzip_json(folder / "answers.json.gz", rows)
        found: dict[str, Any] = {"starting_best_expert": self.label, "in_points": True}
        names = {"dev": ("validation", "utility"), "test": ("single_test", "accuracy")}
        for split, pair in scores.items():
            for side, mine in zip(("starting", "ending"), pair, strict=True):
                name, measure = names[split]
                items = self.task.items(split)
                found |= utility_metrics(task, f"{side}_best_{name}", measure, mine, items)
        dev = self.task.items("dev")
        tested = (self.task.items("test"), scores["test"][1]) if self.test else ()
        found["constant_answers"] = certainty.summarize_constant_answers(task, dev, *tested)
        if self.held:
            pair = [[one[i] for i in self.held] for one in scores["dev"]]
            found["held_out"] = compare_scores(task, pair[1], pair[0])
        if self.test:
            gain = paired_gain(task, *reversed(scores["test"]))
            found |= {"test_gain": gain.difference, "test_gain_interval": [gain.low, gain.high],
                      "test_gain_p_value": gain.p}  # fmt: skip
            if run:
                found |= self._compare_with_search(run, scores["test"][1])
        return {**found, "prompts_asked": self._prompts}

    def _score_split(self, split: str) -> list[list[Score]]:
        return self._evaluator.score_positions(np.eye(2).tolist(), split, self._count_prompts)

    def _count_prompts(self, result: JobResult) -> None:
        self._prompts += result.prompts

    def _compare_with_search(self, run: RunFolder, tuned: Sequence[Score]) -> dict[str, Any]:
        """What the search found, if it was tested on the same items; else why not."""
        rows = run.load_test_answers(run.find_best())
        if rows is None:
            return {"not_compared": UNTESTED_REASON}
        if run.metrics["asked"]["test_items"] != digest_items(self.task, "test"):
            return {"not_compared": "that run was tested on other items"}
        found = compare_scores(metric_task(self.task), tuned, records_to_scores(rows))
        # Gradients count too, where there were any.
        cost = run.metrics.get("prompt_equivalents", run.metrics["prompts_asked"])
        return {"searched": {**found, "run": run.path.name, "prompts": cost}}


def utility_metrics(
    task: Any, name: str, measure: str, scores: Sequence[Score], items: Sequence[Item]
) -> dict[str, Any]:
    """A utility with its interval, as a search's metrics call them."""
    found = certainty.utility_summary(task, scores, items)
    named = {f"{name}_{measure}": found.pop("utility")}
    return named | {f"{name}_{key}": value for key, value in found.items()}


def compare_scores(task: Any, after: Sequence[Score], before: Sequence[Score]) -> dict[str, Any]:
    """Two models on the same items."""
    gain = paired_gain(task, after, before)
    return {
        "items": gain.n,
        "starting": task.utility(before),
        "ending": task.utility(after),
        "gain": gain.difference,
        "gain_interval": [gain.low, gain.high],
        "p_value": gain.p,
    }


def scores_table(metrics: dict[str, Any], before: str, after: str) -> list[str]:
    """Dev and test of the start and the end, under these labels, as a table."""
    tested = "test_gain" in metrics
    heads = [f"dev, n = {metrics['ending_best_validation_items']}"]
    heads += [f"test, n = {metrics['ending_best_single_test_items']}"] if tested else []
    rows = []
    if constant := metrics.get("constant_answers"):
        by_domain = constant["by_domain"]
        cells = [_format_interval(by_domain[split]) for split in ("dev", "test") if split in by_domain]
        each = " of each domain" * (len(by_domain["answers"]) > 1)
        rows.append([f"best constant answer{each} ({describe_constant_answers(constant)})", *cells])
    for side, label in (("starting", before), ("ending", after)):
        cells = [_format_metric(metrics, f"{side}_best_validation", "utility")]
        cells += [_format_metric(metrics, f"{side}_best_single_test", "accuracy")] if tested else []
        rows.append([label, *cells])
    return format_table(("model", *heads), rows)


def domain_lines(metrics: dict[str, Any], before: str, after: str) -> list[str]:
    """Utilities by domain on test or, without it, on dev, as a table behind an empty line."""
    found = domain_table(metrics, "test" if "test_gain" in metrics else "dev", (before, after))
    return ["", *format_table(*found)] if found else []


def format_metrics(metrics: dict[str, Any]) -> list[str]:
    """The metrics as a table and sentences."""
    names = (metrics["starting_best_expert"], "tuned")
    found = [*scores_table(metrics, *names), *domain_lines(metrics, *names)]
    found += one_answer_warnings(metrics, names)
    found.append(f"Brackets: 95 % intervals. {metrics['examples']} of the dev items were trained "
                 "on, which flatters the tuned one there.")  # fmt: skip
    found.append(
        f"Chosen: step {metrics['step']} of {metrics['steps']}. Examples learnt from (forward and "
        f"backward): {metrics['examples_seen']}; held out and looked at (forward): "
        f"{metrics['examples_looked_at']}; prompts answered for this table: "
        f"{metrics['prompts_asked']}."
    )
    if held := metrics.get("held_out"):
        found.append(f"On dev items held out: {held['starting']:.3f} before, {held['ending']:.3f} "
                     f"after. {_describe_gain(held, 'held-out dev items')}")  # fmt: skip
    if "test_gain" in metrics:
        test = {"gain": metrics["test_gain"], "gain_interval": metrics["test_gain_interval"],
                "p_value": metrics["test_gain_p_value"],
                "items": metrics["ending_best_single_test_items"]}  # fmt: skip
        found.append(" ".join([_describe_gain(test, "test items"), *compare_with_constants(metrics, "tuned one")]))
    if searched := metrics.get("searched"):
        found.append(
            f"Beside the best that {searched['run']} found at the cost of {searched['prompts']} "
            f"dev prompts, {searched['starting']:.3f} on test: {_describe_gain(searched, 'test items')}"
        )
    if why := metrics.get("not_compared"):
        found.append(f"Not compared with the best found: {why}.")
    return found


def _format_interval(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['utility']:.3f} [{low:.3f}, {high:.3f}]"


def _format_metric(metrics: dict[str, Any], name: str, measure: str) -> str:
    low, high = metrics[f"{name}_interval"]
    return f"{metrics[f'{name}_{measure}']:.3f} [{low:.3f}, {high:.3f}]"


def _describe_gain(found: dict[str, Any], of: str) -> str:
    return describe_difference(found["gain"], found["gain_interval"], found["p_value"], found["items"], of, True)
