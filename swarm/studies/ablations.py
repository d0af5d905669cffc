"""Comparison of searches: dev and test results of each, and paired differences on test."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

from hydra.utils import instantiate

from swarm._util.files import short_digest
from swarm._util.terminal import format_table
from swarm.errors import UserError
from swarm.loop.evaluator import records_to_scores
from swarm.loop.search_inputs import digest_items
from swarm.runs.folder import RunFolder
from swarm.runs.verdict import Compared
from swarm.stats.significance import PairedTest, utility_test
from swarm.tasks.base import Score, Task, metric_task
from swarm.tasks.metrics import is_mean_utility, paired_gain

ONE_ANSWER_NOTE = (
    "(!n): on test, more than 90 % of the answers to a domain are one value, in n seeds."
)
"""Explanation of the mark (!n) behind a name."""


class StudyRow(NamedTuple):
    """One row of the table: one kind of search, with one run per seed.

    Attributes:
        name: Label of the row.
        runs: Finished and tested runs.
        others: Runs to compare with; `None` for none.
        start: Use the best initial expert of `runs` instead of their best found.
        against_start: The same for `others`.
    """

    name: str
    runs: Sequence[RunFolder]
    others: Sequence[RunFolder] | None = None
    start: bool = False
    against_start: bool = False


def compare_rows(rows: Sequence[StudyRow]) -> list[dict[str, Any]]:
    """Return each row's dev and test utilities by seed, and its paired difference.

    The difference is that of the mean test utilities over seeds. Its 95 % interval is over test
    items and does not include the variation between seeds.

    Raises:
        UserError: The runs were tested on different items.
    """
    every = [run for row in rows for run in (*row.runs, *(row.others or ()))]
    if len({run.test_items for run in every}) > 1:
        raise UserError(
            f"{every[0].path}: the runs were tested on different items; test them again"
        )
    task = metric_task(instantiate(every[0].config["task"], _convert_="all"))
    return [_summarize_row(row, task) for row in rows]


def _summarize_row(row: StudyRow, task: Task) -> dict[str, Any]:
    own_scores = [_test_scores(run, row.start) for run in row.runs]
    side = "starting" if row.start else "ending"
    models = [_model(run, side) for run in row.runs]
    found: dict[str, Any] = {
        "name": row.name,
        "folders": [str(run.path) for run in row.runs],
        "dev": [one.dev.utility for one in models if one.dev],
        "test": [task.utility(scores) for scores in own_scores],
        "items": len(own_scores[0]),
        "one_answer": sum(bool(one.test and one.test.one_answer) for one in models),
        "difference": None,
    }
    if row.others:
        other = [_test_scores(run, row.against_start) for run in row.others]
        found["difference"] = asdict(mean_gain_over_seeds(task, own_scores, other))
    return found


def _model(run: RunFolder, side: str) -> Compared:
    assert run.verdict is not None
    return run.verdict.found if side == "ending" else run.verdict.start_model


def _test_scores(run: RunFolder, start: bool) -> list[Score]:
    """Return the test scores of a run's best found, or of its best initial expert."""
    rows = run.load_test_answers(run.best_expert() if start else run.find_best())
    if rows is None:
        raise UserError(f"{run.path}: it was not tested; resume the search with test=true")
    return records_to_scores(rows)


def compare_runs(first: RunFolder, other: RunFolder) -> tuple[PairedTest, int]:
    """Compare the best found of two runs on the test items that both answered.

    Items match if their contents are equal, regardless of their indices in the two splits.

    Returns:
        The difference (other minus first), and the number of items that only one run answered;
        `PairedTest.n` is the number of shared items.

    Raises:
        UserError: No item is shared, or a run's data file no longer contains the items it answered.
    """
    task = metric_task(instantiate(first.config["task"], _convert_="all"))
    item_ids = [run.test_items for run in (first, other)]
    if item_ids[0] == item_ids[1]:
        mine, theirs = (
            {str(n): s for n, s in enumerate(_test_scores(run, False))} for run in (first, other)
        )
    else:
        mine, theirs = _scores_by_item(first), _scores_by_item(other)
    both = [item for item in mine if item in theirs]
    if not both:
        raise UserError("no test items in common")
    found = paired_gain(task, [theirs[item] for item in both], [mine[item] for item in both])
    return found, len(mine) + len(theirs) - 2 * len(both)


def _scores_by_item(run: RunFolder) -> dict[str, Score]:
    """Return the test scores of a run's best found by the digest of the item."""
    scores = _test_scores(run, start=False)
    task = metric_task(instantiate(run.config["task"], _convert_="all"))
    if digest_items(task, "test") != run.test_items:
        raise UserError(
            f"{run.path}: the test items of its data file differ from those it was tested on; "
            "the file has changed, or task.max_prompt_tokens has left some out"
        )
    digests = (short_digest(dict(item)) for item in task.items("test"))
    return dict(zip(digests, scores, strict=True))


def mean_gain_over_seeds(
    task: Task, first: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]
) -> PairedTest:
    """Test the difference of two searches' mean utilities over seeds, paired on the same items.

    Args:
        first, other: Scores of the same items by seed. Items are resampled jointly for all seeds.
    """
    if all(is_mean_utility(task, scores) for scores in (*first, *other)):
        return paired_gain(task, average_scores(first), average_scores(other))

    def mean_utility(runs: Sequence[Sequence[Score]], indices: Sequence[int]) -> float:
        return fmean(task.utility([scores[index] for index in indices]) for scores in runs)

    parts = [score.part for score in first[0]]
    return utility_test(
        lambda indices: mean_utility(first, indices) - mean_utility(other, indices), parts
    )


def average_scores(runs: Sequence[Sequence[Score]]) -> list[Score]:
    """Average the values of several runs' scores of the same items."""
    return [
        Score(fmean(score.value for score in scores), None, "", scores[0].part)
        for scores in zip(*runs, strict=True)
    ]


def rows_to_json(found: Sequence[dict[str, Any]]) -> str:
    """Format the rows as JSON."""
    return json.dumps(found, indent=1, ensure_ascii=False)


def rows_to_markdown(found: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    rows = [
        [
            mark_one_answer(one["name"], one),
            _format_seeds(one["dev"]),
            _format_seeds(one["test"]),
            *_format_difference(one["difference"]),
        ]
        for one in found
    ]
    seeds = max(len(one["test"]) for one in found)
    lines = format_table(("", "dev", "test", "difference on test", "p"), rows)
    lines += [
        "",
        f"{found[0]['items']} test items; seeds: {seeds}. Differences are paired; in brackets",
        "their 95 % interval over items.",
    ]
    if seeds > 1:
        lines.append("After dev and test: the lowest and the highest seed.")
    if any(one.get("one_answer") for one in found):
        lines.append(ONE_ANSWER_NOTE)
    return "\n".join(lines)


def mark_one_answer(name: str, row: Mapping[str, Any]) -> str:
    """Append the number of seeds with a one-answer warning to a name: "pso (!2)"."""
    warned = row.get("one_answer", 0)
    return f"{name}{f' (!{warned})' * bool(warned)}"


def _format_seeds(values: Sequence[float]) -> str:
    """Format the mean over seeds, with the range if there are several."""
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def _format_difference(paired: dict[str, float] | None) -> tuple[str, str]:
    if paired is None:
        return "", ""
    size = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**paired)
    return size, f"{paired['p']:.2g}"
