"""Methods that searched with the same budget, side by side: a table over seeds, and a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from hydra.utils import instantiate

from swarm.certainty import is_mean
from swarm.errors import UserError
from swarm.evaluation import as_scores
from swarm.files import write_json, write_whole
from swarm.report.folder import Place, RunFolder
from swarm.report.pictures import Chart, Series
from swarm.report.statistics import over_seeds
from swarm.report.svg import alone
from swarm.report.text import table
from swarm.studies.comparison import gain
from swarm.tasks import Score, Task, plain
from swarm.words import sentence

SECONDS = "seconds.json"
"""In a search's folder: the seconds it has taken, in all its starts."""

Rows = Sequence[tuple[str, Sequence[RunFolder]]]
"""A method's name and its finished runs, one a seed."""


def seconds(folder: Path) -> float:
    """What a search has taken so far."""
    path = folder / SECONDS
    return float(json.loads(path.read_text())) if path.is_file() else 0.0


def compared(rows: Rows, together: Mapping[str, Path], budget: int) -> dict[str, Any]:
    """What each method found, and how sure that is.

    A method's test utility is the mean over its seeds; its 95 % interval is the bootstrap's over
    seeds and items. The gain on the best initial expert is paired on the items; its interval and
    p-value are over items and take the seeds as they are.

    Args:
        rows: The searches.
        together: Evaluations on test of all experts answering together, by method.
        budget: Positions that each search might evaluate.

    Raises:
        UserError: Runs were tested on different items, or not.
    """
    runs = [run for _, mine in rows for run in mine]
    if len({run.metrics["asked"]["test_items"] for run in runs}) > 1:
        raise UserError(f"{runs[0].path}: the runs were tested on different items; test them anew")
    task = plain(instantiate(runs[0].config["task"], _convert_="all"))
    first = runs[0]
    start = _scores(first, first.best_expert())
    found = [_row(name, mine, task) for name, mine in rows]
    found += [_together(name, path, task, start, first) for name, path in together.items()]
    return {
        "budget": budget,
        "seeds": [int(run.config["seed"]) for run in rows[0][1]],
        "items": len(start),
        "start": {
            "expert": first.experts[first.best_expert()[1]],
            "dev": first.metrics["starting_best_validation_utility"],
            "test": task.utility(start),
        },
        "methods": found,
    }


def _row(name: str, runs: Sequence[RunFolder], task: Task) -> dict[str, Any]:
    own = [_scores(run, run.best()) for run in runs]
    other = [_scores(run, run.best_expert()) for run in runs]
    prompts = [sum(entry["prompts_asked"] for entry in run.rounds) for run in runs]
    shared = [sum(entry.get("prompts_shared", 0) for entry in run.rounds) for run in runs]
    return {
        "method": name,
        "folders": [str(run.path) for run in runs],
        "found": [_in_words(run) for run in runs],
        "dev": [run.metrics["ending_best_validation_utility"] for run in runs],
        **_tested(task, own, other),
        "prompts": prompts,
        "prompts_shared": shared,
        "seconds": [seconds(run.path) for run in runs],
        "finished": [run.finished for run in runs],
    }


def _tested(
    task: Task, own: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]
) -> dict[str, Any]:
    """A method's test utilities, their interval and the gain on the best initial expert."""
    interval: Sequence[float | None] = (None, None)
    if all(is_mean(task, scores) for scores in own):
        interval = over_seeds(np.array([[s.value for s in scores] for scores in own]))
    return {
        "test": [task.utility(scores) for scores in own],
        "test_interval": list(interval),
        "gain": gain(task, own, other)._asdict(),
    }


def _together(
    name: str, folder: Path, task: Task, start: Sequence[Score], run: RunFolder
) -> dict[str, Any]:
    """The row of experts that answer together; dev tells which are good, and is charged."""
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    dev = len(run.answers((0, 0)))
    each = result["prompts"] / len(rows)
    return {
        "method": name,
        "folders": [str(folder)],
        "found": [f"all experts together, {each:.3g} prompts an answer"],
        "dev": [],
        **_tested(task, [as_scores(rows)], [start]),
        "prompts": [0 if name == "pack" else run.own * dev],
        "prompts_shared": [0],
        "seconds": [result["seconds"]],
        "finished": ["asked once"],
    }


def _in_words(run: RunFolder) -> str:
    """What the best found is made of, and what its method calls it."""
    words = sentence(run.experts, run.positions[run.best()].tolist(), run.groups)
    label = run.label(run.best())
    return f"{label}: {words}" if label else words


def _scores(run: RunFolder, place: Place) -> list[Score]:
    rows = run.test_answers(place)
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; go on with the search, with test=true")
    return as_scores(rows)


def as_text(found: dict[str, Any]) -> str:
    """The comparison as a Markdown table, with what has to be known to read it."""
    start = found["start"]
    head = ("method", "dev", "test", "gain on test", "p", "prompts", "of them shared", "seconds")
    rows: list[Sequence[str]] = [(f"best initial expert ({start['expert']})", f"{start['dev']:.3f}",
             f"{start['test']:.3f}", "", "", "", "", "")]  # fmt: skip
    rows = [*rows, *map(_cells, found["methods"])]
    seeds = len(found["seeds"])
    told = [
        "",
        f"Budget: {found['budget']} positions; seeds: {seeds}; {found['items']} test items. Means "
        "over seeds; in parentheses the lowest and highest seed, in brackets 95 % intervals.",
        "Dev is the highest of all that a search looked at, and flatters it. A prompt that another "
        "search had asked is charged and not asked again: seconds are no measure of a method.",
        f"p-values are paired, of one method each, and not corrected for {len(rows) - 1} methods.",
        *_leaders(found),
        "",
        "Best found, by the first seed:",
        *(f"- {row['method']}: {row['found'][0]}" for row in found["methods"]),
    ]
    return "\n".join([*table(head, rows), *told])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["test_interval"]
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    size = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["gain"])
    counts = (f"{fmean(row[name]):.0f}" for name in ("prompts", "prompts_shared", "seconds"))
    dev = _spread(row["dev"]) if row["dev"] else ""
    return (row["method"], dev, _spread(row["test"]) + interval, size,
            f"{row['gain']['p']:.2g}", *counts)  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(set(values)) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def _leaders(found: dict[str, Any]) -> list[str]:
    """Which method is first, and which of the others its interval cannot tell from it."""
    ranked = sorted(found["methods"], key=lambda row: -fmean(row["test"]))
    best = ranked[0]
    low = best["test_interval"][0]
    near = [r["method"] for r in ranked[1:] if low is not None and fmean(r["test"]) >= low]
    words = f"Highest on test: {best['method']}, {fmean(best['test']):.3f}"
    return [words + (f"; within its interval: {', '.join(near)}." if near else ".")]


def write(folder: Path, found: dict[str, Any], rows: Rows) -> None:
    """Put methods.json, methods.md and methods.svg into a folder."""
    write_json(folder / "methods.json", found)
    write_whole(folder / "methods.md", (as_text(found) + "\n").encode())
    write_whole(folder / "methods.svg", picture(rows).encode())


def picture(rows: Rows) -> str:
    """The best dev utility so far against the prompts charged, the mean over seeds (SVG)."""
    series = []
    for name, runs in rows:
        lines = [_course(run) for run in runs]
        x = np.unique(np.concatenate([prompts for prompts, _ in lines]))
        at = [best[np.searchsorted(prompts, x, side="right") - 1] for prompts, best in lines]
        begun = max(prompts[0] for prompts, _ in lines)
        series.append(
            Series(name, x[x >= begun].tolist(), np.mean(at, 0)[x >= begun].tolist(), "steps")
        )
    told = "The best dev utility so far of each method, the mean over its seeds."
    return alone(Chart("methods", "Best so far on the same budget", "dev prompts charged",
                       "best dev utility", series, told))  # fmt: skip


def _course(run: RunFolder) -> tuple[np.ndarray, np.ndarray]:
    """Prompts charged and best utility after each round of a search."""
    prompts = np.cumsum([entry["prompts_asked"] for entry in run.rounds])
    return prompts, run.best_so_far()
