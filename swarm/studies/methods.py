"""Methods that searched with the same budget, side by side: a table over seeds, and a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate

from swarm.certainty import is_mean_utility
from swarm.errors import UserError
from swarm.evaluation import records_to_scores
from swarm.files import write_json, write_atomic
from swarm.report.folder import PositionIndex, RunFolder
from swarm.report.pictures import Chart, Series
from swarm.report.statistics import interval_over_seeds
from swarm.report.svg import render_standalone
from swarm.studies.comparison import mean_gain_over_seeds
from swarm.studies.methods_text import format_comparison
from swarm.tasks import Score, Task, metric_task
from swarm.words import describe_position

SECONDS_FILE = "seconds.json"
"""In a search's folder: the seconds it has taken, in all its starts."""

MethodRuns = Sequence[tuple[str, Sequence[RunFolder]]]
"""A method's name and its finished runs, one a seed."""


def read_seconds(folder: Path) -> float:
    """What a search has taken so far."""
    path = folder / SECONDS_FILE
    return float(json.loads(path.read_text())) if path.is_file() else 0.0


def check_votes(name: str, task: Task) -> None:
    """See that a vote is possible on a task's answers, by its own measure.

    Raises:
        UserError: It is not.
    """
    if not getattr(metric_task(task), "votes", True):
        raise UserError(
            f"methods: {name}: the answers of task={task.name} are free texts, on which nobody "
            "votes; leave it out"
        )


def find_start_run(runs: Sequence[RunFolder], experts: Sequence[str]) -> RunFolder | None:
    """The first run that has these experts' dev answers graded by the task's own measure."""
    return next((r for r in runs if r.experts[: r.own] == list(experts) and _has_graded_answers(r)), None)


def _has_graded_answers(run: RunFolder) -> bool:
    rows = run.load_answers((0, 0))
    return "signal" not in run.metrics or all("correct" in row.get("measures", {}) for row in rows)


def summarize_methods(
    rows: MethodRuns, together: Mapping[str, Path], known: RunFolder | None, budget: int
) -> dict[str, Any]:
    """What each method found, and how sure that is.

    A method's test utility is the mean over its seeds; its 95 % interval is the bootstrap's over
    seeds and items. The gain on the best initial expert is paired on the items; its interval and
    p-value are over items and take the seeds as they are.

    Args:
        rows: The searches.
        together: Evaluations on test of all experts answering together, by method.
        known: The run that these read the experts' dev answers from; `None` if dev was asked.
        budget: Positions that each search might evaluate.

    Raises:
        UserError: Runs were tested on different items, or not.
    """
    runs = [run for _, mine in rows for run in mine]
    if len({run.metrics["asked"]["test_items"] for run in runs}) > 1:
        raise UserError(f"{runs[0].path}: the runs were tested on different items; test them anew")
    task = metric_task(instantiate(runs[0].config["task"], _convert_="all"))
    first = runs[0]
    before = _test_scores(first, first.best_expert())
    found = [_method_row(name, mine, task) for name, mine in rows]
    for name, path in together.items():
        read = len(known.load_answers((0, 0))) if known else None
        found.append(_ensemble_row(name, path, task, before, (first.own, read)))
    return {
        "budget": budget,
        "seeds": [int(run.config["seed"]) for run in rows[0][1]],
        "items": len(before),
        "start": {
            "expert": first.experts[first.best_expert()[1]],
            "dev": first.metrics["starting_best_validation_utility"],
            "test": task.utility(before),
            **_summarize_domains([_domain_metrics(first, "starting")]),
        },
        "constant_answers": first.metrics.get("constant_answers"),
        "methods": found,
    }


def _method_row(name: str, runs: Sequence[RunFolder], task: Task) -> dict[str, Any]:
    own = [_test_scores(run, run.find_best()) for run in runs]
    other = [_test_scores(run, run.best_expert()) for run in runs]
    prompts = [sum(entry["prompts_asked"] for entry in run.rounds) for run in runs]
    shared = [sum(entry.get("prompts_shared", 0) for entry in run.rounds) for run in runs]
    return {
        "method": name,
        "folders": [str(run.path) for run in runs],
        "signal": runs[0].metrics.get("signal"),
        "starts": [
            {"expert": run.experts[run.best_expert()[1]], "test": task.utility(scores)}
            for run, scores in zip(runs, other, strict=True)
        ],
        "found": [_describe_best(run) for run in runs],
        "dev": [run.metrics["ending_best_validation_utility"] for run in runs],
        **_test_statistics(task, own, other),
        **_summarize_domains([_domain_metrics(run, "ending") for run in runs]),
        "prompts": prompts,
        "prompts_shared": shared,
        "seconds": [read_seconds(run.path) for run in runs],
        "finished": [run.finished for run in runs],
    }


def _domain_metrics(run: RunFolder, side: str) -> dict[str, Any]:
    """What a run's metrics hold by domain of its start or its end; empty for older runs."""
    name = f"{side}_best_single_test_"
    return {key: run.metrics.get(name + key) for key in ("domains", "one_answer")}


def _summarize_domains(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Test utilities by domain, and in how many of the seeds one answer was warned of.

    Args:
        found: By seed, as `swarm.certainty.described` with items.
    """
    known = [one["domains"] for one in found if one.get("domains")]
    domains = {name: [one[name]["utility"] for one in known] for name in (known or [{}])[0]}
    return {"domains": domains, "one_answer": sum(bool(one.get("one_answer")) for one in found)}


def _test_statistics(
    task: Task, own: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]
) -> dict[str, Any]:
    """A method's test utilities, their interval and the gain on the best initial expert."""
    interval: Sequence[float | None] = (None, None)
    if all(is_mean_utility(task, scores) for scores in own):
        interval = interval_over_seeds(np.array([[s.value for s in scores] for scores in own]))
    return {
        "test": [task.utility(scores) for scores in own],
        "test_interval": list(interval),
        "gain": mean_gain_over_seeds(task, own, other)._asdict(),
    }


def _ensemble_row(
    name: str,
    folder: Path,
    task: Task,
    before: Sequence[Score],
    experts: tuple[int, int | None],
) -> dict[str, Any]:
    """The row of experts that answer together; where dev tells which are good, it is charged.

    Args:
        before: The test scores of the best initial expert.
        experts: How many there are, and to how many dev items each one's answers were read;
            `None`: dev was asked in the evaluation, by those that need it.
    """
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    count, read = experts
    asked = 0
    if read is None and name in ("weighted_vote", "route"):
        asked = count * len(task.items("dev"))
    each = (result["prompts"] - asked) / len(rows)
    return {
        "method": name,
        "folders": [str(folder)],
        "signal": None,
        "starts": [],
        "found": [
            "one adapter trained on the data of all experts"
            if name == "data_merge"
            else f"all experts together, {each:.3g} prompts an answer"
        ],
        "dev": [],
        **_test_statistics(task, [records_to_scores(rows)], [before]),
        **_summarize_domains([result["voices"][0]]),
        "prompts": [0 if name in ("pack", "data_merge") else asked or count * (read or 0)],
        "prompts_shared": [0],
        "seconds": [result["seconds"]],
        "finished": ["asked once"],
    }


def _describe_best(run: RunFolder) -> str:
    """What the best found is made of, and what its method calls it."""
    words = describe_position(run.experts, run.positions[run.find_best()].tolist(), run.groups)
    label = run.position_label(run.find_best())
    return f"{label}: {words}" if label else words


def _test_scores(run: RunFolder, place: PositionIndex) -> list[Score]:
    rows = run.load_test_answers(place)
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; go on with the search, with test=true")
    return records_to_scores(rows)


def write_comparison(folder: Path, found: dict[str, Any], rows: MethodRuns) -> None:
    """Put methods.json, methods.md and, where there is something to plot, methods.svg there."""
    write_json(folder / "methods.json", found)
    write_atomic(folder / "methods.md", (format_comparison(found) + "\n").encode())
    if plottable_methods(rows):
        write_atomic(folder / "methods.svg", plot_methods(rows).encode())
    else:
        (folder / "methods.svg").unlink(missing_ok=True)


def plottable_methods(rows: MethodRuns) -> MethodRuns:
    """The methods that climbed the task's own measure: another signal has another unit."""
    return [(name, runs) for name, runs in rows if "signal" not in runs[0].metrics]


def plot_methods(rows: MethodRuns) -> str:
    """The best dev utility so far against the prompts charged, the mean over seeds (SVG)."""
    series = []
    for name, runs in plottable_methods(rows):
        lines = [_best_so_far_curve(run) for run in runs]
        x = np.unique(np.concatenate([prompts for prompts, _ in lines]))
        at = [best[np.searchsorted(prompts, x, side="right") - 1] for prompts, best in lines]
        begun = max(prompts[0] for prompts, _ in lines)
        series.append(
            Series(name, x[x >= begun].tolist(), np.mean(at, 0)[x >= begun].tolist(), "steps")
        )
    told = "The best dev utility so far of each method, the mean over its seeds."
    return render_standalone(Chart("methods", "Best so far on the same budget", "dev prompts charged",
                       "best dev utility", series, told))  # fmt: skip


def _best_so_far_curve(run: RunFolder) -> tuple[np.ndarray, np.ndarray]:
    """Prompts charged and best utility after each round of a search."""
    prompts = np.cumsum([entry["prompts_asked"] for entry in run.rounds])
    return prompts, run.best_so_far()
