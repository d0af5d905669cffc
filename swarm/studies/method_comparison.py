"""Comparison of methods with the same budget: statistics over seeds, table and plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from hydra.utils import instantiate

from swarm._util.files import write_atomic, write_json
from swarm._util.terminal import format_table
from swarm.errors import UserError
from swarm.loop.evaluator import records_to_scores
from swarm.merging.positions import describe_position
from swarm.report.charts import render_image
from swarm.report.document import Chart, Series
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.runs.verdict import MAX_DOMAINS, Compared, shorten_text
from swarm.stats.significance import interval_over_seeds
from swarm.studies.ablations import ONE_ANSWER_NOTE, _model, mark_one_answer, mean_gain_over_seeds
from swarm.tasks.base import Score, Task, metric_task
from swarm.tasks.metrics import is_mean_utility


def format_comparison(found: dict[str, Any]) -> str:
    """Format the comparison as a Markdown table with explanations."""
    start, constant = found["start"], _constant_rows(found)
    head = ("method", "dev", "test", "gain on test", "p", "prompts", "of them shared", "seconds")
    expert = mark_one_answer(f"best initial expert ({start['expert']})", start)
    first = (expert, f"{start['dev']:.3f}", f"{start['test']:.3f}", *[""] * 5)
    rows: list[Sequence[str]] = [first, *constant, *map(_method_cells, found["methods"])]
    seeds, failed = len(found["seeds"]), found.get("failed", {})
    lines = [
        "",
        f"Budget: {found['budget']} positions; seeds: {seeds}; {found['items']} test items. Means "
        "over seeds; in parentheses the lowest and highest seed, in brackets 95 % intervals.",
        "Dev is the maximum over all evaluations of a search, and so biased upwards. A prompt "
        "that another search has evaluated is charged but not evaluated again, so seconds do "
        "not compare methods.",
        "p-values are paired, of one method each, and not corrected for "
        f"{len(found['methods'])} methods.",
        *_describe_leaders(found),
        *_describe_starts(found),
        *_describe_signals(found),
        *(f"Not in the table: {name} ({error})." for name, error in failed.items()),
        "",
        "Best found, by the first seed:",
        *(f"- {row['method']}: {row['found'][0]}" for row in found["methods"]),
    ]
    return "\n".join([*format_table(head, rows), *format_domain_table(found), *lines])


def _constant_rows(found: dict[str, Any]) -> list[Sequence[str]]:
    """Return the row of the best constant answers."""
    if not (known := found.get("constant_answers")):
        return []
    cells = [f"{known[split]['utility']:.3f}" for split in ("dev", "test")]
    return [(known["label"], *cells, *[""] * 5)]


def format_domain_table(found: dict[str, Any]) -> list[str]:
    """Tabulate test utilities by domain, if there are 2 to 12, and explain (!n)."""
    domains = list(found["start"].get("domains", {}))
    lines = []
    if 2 <= len(domains) <= MAX_DOMAINS:
        rows: list[Sequence[str]] = []
        if known := found.get("constant_answers"):
            mine = known["test"]["domains"]
            rows.append(("best constant answer", *(f"{mine[d]['utility']:.3f}" for d in domains)))
        start = {**found["start"], "method": "best initial expert"}
        for one in (start, *found["methods"]):
            cells = [
                _format_range(one["domains"][d]) if one.get("domains") else "" for d in domains
            ]
            rows.append((mark_one_answer(one["method"], one), *cells))
        lines += ["", *format_table(("test, by domain", *map(shorten_text, domains)), rows)]
    if any(one.get("one_answer") for one in (found["start"], *found["methods"])):
        lines += [
            "",
            ONE_ANSWER_NOTE,
        ]
    return lines


def _method_cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["test_interval"]
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    size = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["gain"])
    counts = (f"{fmean(row[name]):.0f}" for name in ("prompts", "prompts_shared", "seconds"))
    dev = _format_range(row["dev"]) if row["dev"] else ""
    return (
        mark_one_answer(row["method"], row),
        dev,
        _format_range(row["test"]) + interval,
        size,
        f"{row['gain']['p']:.2g}",
        *counts,
    )


def _format_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(set(values)) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def _describe_leaders(found: dict[str, Any]) -> list[str]:
    """Name the best method, and those whose mean test utility is inside its interval."""
    ranked = sorted(found["methods"], key=lambda row: -fmean(row["test"]))
    best = ranked[0]
    low = best["test_interval"][0]
    near = [r["method"] for r in ranked[1:] if low is not None and fmean(r["test"]) >= low]
    words = f"Highest on test: {best['method']}, {fmean(best['test']):.3f}"
    return [words + (f"; within its interval: {', '.join(near)}." if near else ".")]


def _describe_starts(found: dict[str, Any]) -> list[str]:
    """Name the methods whose start is another expert, or other answers, than the first row."""
    head = {"expert": found["start"]["expert"], "test": found["start"]["test"]}
    others = []
    for row in found["methods"]:
        if any(start != head for start in row["starts"]):
            names = dict.fromkeys(f"{s['expert']} ({s['test']:.3f})" for s in row["starts"])
            others.append(f"{row['method']}: {', '.join(names)}")
    if not others:
        return []
    return [
        "Each gain is relative to the best initial expert of the same search, whose test score "
        f"is not that of the first line with {'; '.join(others)}."
    ]


def _describe_signals(found: dict[str, Any]) -> list[str]:
    """Explain the extra cost of searches on another signal, and why the plot lacks them."""
    named = {row["method"]: row["signal"] for row in found["methods"] if row["signal"]}
    if not named:
        return []
    climbed = "; ".join(f"{name} (signal: {signal})" for name, signal in named.items())
    lines = [f"Not in the plot, as their signal has another unit: {climbed}."]
    if any("both" in signal for signal in named.values()):
        lines.append("With signal=both a dev item is charged as one prompt and takes two requests.")
    if any("logprob" in signal for signal in named.values()):
        lines.append(
            "With signal=logprob the best are scored by the task's metric at the end; this is "
            "not charged."
        )
    return lines


SECONDS_FILE = "seconds.json"
"""File in a search's folder: seconds that it has taken, summed over all starts."""

MethodRuns = Sequence[tuple[str, Sequence[RunFolder]]]
"""Name of each method and its finished runs, one per seed."""


def read_seconds(folder: Path) -> float:
    """Return the seconds that a search has taken so far."""
    path = folder / SECONDS_FILE
    return float(json.loads(path.read_text())) if path.is_file() else 0.0


def check_votes(name: str, task: Task) -> None:
    """Check that the task's own measure supports votes on its answers.

    Raises:
        UserError: It does not.
    """
    if not getattr(metric_task(task), "votes", True):
        raise UserError(
            f"methods: {name}: the answers of task={task.name} are free texts, which cannot be "
            "voted on; leave it out"
        )


def find_start_run(runs: Sequence[RunFolder], experts: Sequence[str]) -> RunFolder | None:
    """Return the first run with these experts' dev answers graded by the task's own measure."""
    return next(
        (
            r
            for r in runs
            if r.experts[: r.expert_count] == list(experts) and _has_graded_answers(r)
        ),
        None,
    )


def _has_graded_answers(run: RunFolder) -> bool:
    rows = run.load_answers((0, 0))
    return (
        run.verdict is None
        or run.verdict.signal is None
        or all("correct" in row.get("measures", {}) for row in rows)
    )


def summarize_methods(
    rows: MethodRuns, together: Mapping[str, Path], known: RunFolder | None, budget: int
) -> dict[str, Any]:
    """Summarize the result of each method, with its uncertainty.

    A method's test utility is the mean over its seeds; its 95 % interval is a bootstrap over seeds
    and items. The gain on the best initial expert is paired on the items; its interval and p-value
    are over items and treat the seeds as fixed.

    Args:
        rows: The searches.
        together: Folders of evaluations on test of all experts answering together, by method.
        known: Run from which these read the experts' dev answers; `None` if they evaluated dev.
        budget: Number of positions that each search could evaluate.

    Raises:
        UserError: Runs were tested on different items, or not tested.
    """
    runs = [run for _, mine in rows for run in mine]
    if len({run.test_items for run in runs}) > 1:
        raise UserError(f"{runs[0].path}: the runs were tested on different items; test them again")
    task = metric_task(instantiate(runs[0].config["task"], _convert_="all"))
    first = runs[0]
    before = _test_scores(first, first.best_expert())
    found = [_method_row(name, mine, task) for name, mine in rows]
    for name, path in together.items():
        read = len(known.load_answers((0, 0))) if known else None
        found.append(_ensemble_row(name, path, task, before, (first.expert_count, read)))
    return {
        "budget": budget,
        "seeds": [int(run.config["seed"]) for run in rows[0][1]],
        "items": len(before),
        "start": {
            "expert": first.experts[first.best_expert()[1]],
            "dev": _model(first, "starting").dev.utility,  # type: ignore[union-attr]
            "test": task.utility(before),
            **_summarize_domains([_domain_metrics(first, "starting")]),
        },
        "constant_answers": asdict(constant) if (constant := _constant(first)) else None,
        "methods": found,
    }


def _method_row(name: str, runs: Sequence[RunFolder], task: Task) -> dict[str, Any]:
    own_scores = [_test_scores(run, run.find_best()) for run in runs]
    other = [_test_scores(run, run.best_expert()) for run in runs]
    prompts = [sum(entry["prompts_scored"] for entry in run.rounds) for run in runs]
    shared = [sum(entry.get("prompts_shared", 0) for entry in run.rounds) for run in runs]
    return {
        "method": name,
        "folders": [str(run.path) for run in runs],
        "signal": runs[0].verdict and runs[0].verdict.signal,
        "starts": [
            {"expert": run.experts[run.best_expert()[1]], "test": task.utility(scores)}
            for run, scores in zip(runs, other, strict=True)
        ],
        "found": [_describe_best(run) for run in runs],
        "dev": [run.verdict.dev.utility for run in runs if run.verdict],
        **_test_statistics(task, own_scores, other),
        **_summarize_domains([_domain_metrics(run, "ending") for run in runs]),
        "prompts": prompts,
        "prompts_shared": shared,
        "seconds": [read_seconds(run.path) for run in runs],
        "finished": [run.finished for run in runs],
    }


def _constant(run: RunFolder) -> Compared | None:
    return run.verdict.constant if run.verdict else None


def _domain_metrics(run: RunFolder, side: str) -> dict[str, Any]:
    """Return a run's result by domain at its start or end."""
    test = _model(run, side).test
    return asdict(test) if test else {}


def _summarize_domains(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return test utilities by domain, and the number of seeds with a one-answer warning.

    Args:
        found: By seed, as `swarm.tasks.metrics.utility_summary` with items.
    """
    known = [one["domains"] for one in found if one.get("domains")]
    domains = {name: [one[name]["utility"] for one in known] for name in (known or [{}])[0]}
    return {"domains": domains, "one_answer": sum(bool(one.get("one_answer")) for one in found)}


def _test_statistics(
    task: Task, first: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]
) -> dict[str, Any]:
    """Return a method's test utilities, their interval and the gain on the best initial expert."""
    interval: Sequence[float | None] = (None, None)
    if all(is_mean_utility(task, scores) for scores in first):
        interval = interval_over_seeds(np.array([[s.value for s in scores] for scores in first]))
    return {
        "test": [task.utility(scores) for scores in first],
        "test_interval": list(interval),
        "gain": asdict(mean_gain_over_seeds(task, first, other)),
    }


def _ensemble_row(
    name: str,
    folder: Path,
    task: Task,
    before: Sequence[Score],
    experts: tuple[int, int | None],
) -> dict[str, Any]:
    """Return the row of experts that answer together, with the dev prompts that are charged.

    Args:
        before: Test scores of the best initial expert.
        experts: Number of experts, and number of dev items whose answers were read for each; `None`
            if the evaluation itself prompted dev, for the methods that need it.
    """
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    count, read = experts
    requests = 0
    if read is None and name in ("weighted_vote", "route"):
        requests = count * len(task.items("dev"))
    each = (result["prompts"] - requests) / len(rows)
    return {
        "method": name,
        "folders": [str(folder)],
        "signal": None,
        "starts": [],
        "found": [
            "one adapter trained on the data of all experts"
            if name == "data_merge"
            else f"all experts together, {each:.3g} prompts per answer"
        ],
        "dev": [],
        **_test_statistics(task, [records_to_scores(rows)], [before]),
        **_summarize_domains([result["voices"][0]]),
        "prompts": [0 if name in ("pack", "data_merge") else requests or count * (read or 0)],
        "prompts_shared": [0],
        "seconds": [result["seconds"]],
        "finished": ["asked once"],
    }


def _describe_best(run: RunFolder) -> str:
    """Describe the composition of the best found, with its method's label."""
    words = describe_position(run.experts, run.positions[run.find_best()].tolist(), run.groups)
    label = run.position_label(run.find_best())
    return f"{label}: {words}" if label else words


def _test_scores(run: RunFolder, index: ParticleIndex) -> list[Score]:
    rows = run.load_test_answers(index)
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; resume the search with test=true")
    return records_to_scores(rows)


def write_comparison(folder: Path, found: dict[str, Any], rows: MethodRuns) -> None:
    """Write methods.json, methods.md and, if there is something to plot, methods.svg."""
    write_json(folder / "methods.json", found)
    write_atomic(folder / "methods.md", (format_comparison(found) + "\n").encode())
    if plottable_methods(rows):
        write_atomic(folder / "methods.svg", plot_methods(rows))
    else:
        (folder / "methods.svg").unlink(missing_ok=True)


def plottable_methods(rows: MethodRuns) -> MethodRuns:
    """Return the methods that optimized the task's own measure; other signals have other units."""
    return [(name, runs) for name, runs in rows if not (runs[0].verdict and runs[0].verdict.signal)]


def plot_methods(rows: MethodRuns) -> bytes:
    """Plot the best dev utility so far against the prompts charged, averaged over seeds (SVG)."""
    series = []
    for name, runs in plottable_methods(rows):
        lines = [_best_so_far_curve(run) for run in runs]
        x = np.unique(np.concatenate([prompts for prompts, _ in lines]))
        at = [best[np.searchsorted(prompts, x, side="right") - 1] for prompts, best in lines]
        begun = max(prompts[0] for prompts, _ in lines)
        series.append(
            Series(name, x[x >= begun].tolist(), np.mean(at, 0)[x >= begun].tolist(), "steps")
        )
    caption = "The best dev utility so far of each method, the mean over its seeds."
    return render_image(
        Chart(
            "methods",
            "Best so far on the same budget",
            "dev prompts charged",
            "best dev utility",
            series,
            caption,
        ),
        "svg",
    )


def _best_so_far_curve(run: RunFolder) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts charged and the best utility after each round of a search."""
    prompts = np.cumsum([entry["prompts_scored"] for entry in run.rounds])
    return prompts, run.best_so_far()
