"""Searches side by side: what each found on dev and test, and paired differences on test."""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from hydra.utils import instantiate

from swarm.certainty import gain_of, is_mean
from swarm.errors import UserError
from swarm.evaluation import as_scores
from swarm.files import digest
from swarm.identity import items_digest
from swarm.report.folder import RunFolder
from swarm.report.statistics import Paired, utility_test
from swarm.report.text import table
from swarm.tasks import Score, Task, plain

MARK = "(!n): on test, more than 90 % of the answers to a domain are one value, in n seeds."
"""What a mark behind a name means."""


class Row(NamedTuple):
    """A line of the table: one kind of search, once a seed.

    Attributes:
        name: What it is called.
        runs: Finished and tested.
        others: What it is compared with; `None` for nothing.
        start: The row is of the runs' best initial expert, not of their best found.
        against_start: So is the other side.
    """

    name: str
    runs: Sequence[RunFolder]
    others: Sequence[RunFolder] | None = None
    start: bool = False
    against_start: bool = False


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row's dev and test utilities by seed, and its paired difference.

    The difference is that of the mean test utilities over seeds, with its 95 %
    interval over test items: what other seeds would give is not in it.

    Raises:
        UserError: The runs were tested on different items.
    """
    every = [run for row in rows for run in (*row.runs, *(row.others or ()))]
    if len({run.metrics["asked"]["test_items"] for run in every}) > 1:
        raise UserError(f"{every[0].path}: the runs were tested on different items; test them anew")
    task = plain(instantiate(every[0].config["task"], _convert_="all"))
    return [_row(row, task) for row in rows]


def _row(row: Row, task: Task) -> dict[str, Any]:
    own = [_scores(run, row.start) for run in row.runs]
    side = "starting" if row.start else "ending"
    dev, warned = f"{side}_best_validation_utility", f"{side}_best_single_test_one_answer"
    found: dict[str, Any] = {
        "name": row.name,
        "folders": [str(run.path) for run in row.runs],
        "dev": [run.metrics[dev] for run in row.runs],
        "test": [task.utility(scores) for scores in own],
        "items": len(own[0]),
        "one_answer": sum(bool(run.metrics.get(warned)) for run in row.runs),
        "difference": None,
    }
    if row.others:
        other = [_scores(run, row.against_start) for run in row.others]
        found["difference"] = gain(task, own, other)._asdict()
    return found


def _scores(run: RunFolder, start: bool) -> list[Score]:
    """What a run's best found, or its best initial expert, answered on test."""
    rows = run.test_answers(run.best_expert() if start else run.best())
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; go on with the search, with test=true")
    return as_scores(rows)


def against(first: RunFolder, other: RunFolder) -> tuple[Paired, int]:
    """The best found of one run beside another's, on the test items that both were asked.

    Items are the same if all that they hold is, whatever their places in the two splits.

    Returns:
        The difference (the other's minus the first's), and how many items the two runs have that
        the other one lacks; `Paired.n` is the number of items that they share.

    Raises:
        UserError: They share none, or the items of a run are not what it was asked any more.
    """
    task = plain(instantiate(first.config["task"], _convert_="all"))
    asked = [run.metrics.get("asked", {}).get("test_items") for run in (first, other)]
    if asked[0] == asked[1]:
        mine, theirs = (
            {str(n): s for n, s in enumerate(_scores(run, False))} for run in (first, other)
        )
    else:
        mine, theirs = _by_item(first), _by_item(other)
    both = [item for item in mine if item in theirs]
    if not both:
        raise UserError("no test items that both were asked")
    found = gain_of(task, [theirs[item] for item in both], [mine[item] for item in both])
    return found, len(mine) + len(theirs) - 2 * len(both)


def _by_item(run: RunFolder) -> dict[str, Score]:
    """What a run's best found answered on test, by the digest of the item."""
    scores = _scores(run, start=False)
    task = plain(instantiate(run.config["task"], _convert_="all"))
    if items_digest(task, "test") != run.metrics["asked"]["test_items"]:
        raise UserError(
            f"{run.path}: the test items of its data file are not those that it was asked; the "
            "file has changed, or task.too_long has dropped or truncated some"
        )
    digests = (digest(dict(item)) for item in task.items("test"))
    return dict(zip(digests, scores, strict=True))


def gain(task: Task, own: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]) -> Paired:
    """The difference of two searches' mean utilities over seeds, tested on the same items.

    Args:
        own, other: Each seed's scores of the same items; all seeds are resampled together.
    """
    if all(is_mean(task, scores) for scores in (*own, *other)):
        return gain_of(task, averaged(own), averaged(other))

    def at(runs: Sequence[Sequence[Score]], places: Sequence[int]) -> float:
        return fmean(task.utility([scores[place] for place in places]) for scores in runs)

    parts = [score.part for score in own[0]]
    return utility_test(lambda places: at(own, places) - at(other, places), parts)


def averaged(runs: Sequence[Sequence[Score]]) -> list[Score]:
    """Scores of the same items with the mean of their values."""
    return [
        Score(fmean(score.value for score in scores), None, "", scores[0].part)
        for scores in zip(*runs, strict=True)
    ]


def as_json(found: Sequence[dict[str, Any]]) -> str:
    """The rows for programs."""
    return json.dumps(found, indent=1, ensure_ascii=False)


def as_text(found: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    rows = [
        [
            marked(one["name"], one),
            _over(one["dev"]),
            _over(one["test"]),
            *_difference(one["difference"]),
        ]
        for one in found
    ]
    seeds = max(len(one["test"]) for one in found)
    told = table(("", "dev", "test", "difference on test", "p"), rows)
    told += [
        "",
        f"{found[0]['items']} test items; seeds: {seeds}. Differences are paired; in brackets",
        "their 95 % interval over items.",
    ]
    if seeds > 1:
        told.append("Behind dev and test: the lowest and the highest seed.")
    if any(one.get("one_answer") for one in found):
        told.append(MARK)
    return "\n".join(told)


def marked(name: str, row: Mapping[str, Any]) -> str:
    """A name, with the number of the seeds that are warned of one answer: "pso (!2)"."""
    warned = row.get("one_answer", 0)
    return f"{name}{f' (!{warned})' * bool(warned)}"


def _over(values: Sequence[float]) -> str:
    """The mean over seeds, with their range where there are several."""
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def _difference(paired: dict[str, float] | None) -> tuple[str, str]:
    if paired is None:
        return "", ""
    size = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**paired)
    return size, f"{paired['p']:.2g}"
