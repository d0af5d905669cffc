"""Analysis of a study's results: tables, tests with Holm's correction, mean ranks.

Only the result files are read, so that committed results can be analysed
without models or data.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from swarm._util.files import write_atomic, write_json
from swarm._util.terminal import format_table
from swarm.errors import UserError
from swarm.stats.significance import exact_sign_flip_p, holm_correction, interval_over_seeds
from swarm.studies import plan
from swarm.studies.plan import Study, read_dtype

SIGNIFICANCE_LEVEL = 0.01
"""A difference counts as a win or a loss if Holm's p value is below this."""

NUM_RESAMPLES = 2_000
"""Number of bootstrap samples for the mean ranks."""

BOOTSTRAP_KEY = 4
"""Key of the bootstrap's generator; `swarm.stats.significance` uses lower ones."""

RecordsByMethod = dict[str, dict[int, dict[str, Any]]]
"""Results of each method, by method name and seed."""


class ResultBlock(NamedTuple):
    """Key of one table: a task with one number of dev items and one budget."""

    task: str
    dev: int
    budget: int


def load_results(study: Study) -> dict[ResultBlock, RecordsByMethod]:
    """Load the existing results; one that depends on no budget or seed is listed under each.

    Raises:
        UserError: Results of a task have different test items or weights.
    """
    found: dict[ResultBlock, RecordsByMethod] = {}
    for cell, record in plan.load_results(study):
        for budget in study.file.budgets if cell.budget is None else (cell.budget,):
            records = found.setdefault(ResultBlock(cell.task, cell.dev, budget), {})
            for seed in range(study.seeds) if cell.seed is None else (cell.seed,):
                records.setdefault(cell.method, {})[seed] = record
    for block, records in found.items():
        _check_digests(study, block, records)
    order = {name: index for index, name in enumerate(study.methods)}
    return {
        block: dict(sorted(records.items(), key=lambda pair: order[pair[0]]))
        for block, records in found.items()
    }


def _check_digests(study: Study, block: ResultBlock, records: RecordsByMethod) -> None:
    every = [record for seeds in records.values() for record in seeds.values()]
    kinds = {
        "test items": {record["test_digest"] for record in every},
        "experts": {record["experts_digest"] for record in every},
        "base weights": {record["base_digest"] for record in every} - {None},
    }
    for what, digests in kinds.items():
        if len(digests) > 1:
            raise UserError(
                f"{study.results}: the results of {block.task} are of different {what}; remove the "
                "older lines and run them again"
            )


def item_values(records: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> np.ndarray:
    """Return the values of the test items [S, n], one row per seed."""
    return np.array([[float(v) for v in records[seed]["values"]] for seed in seeds])


def analyse_study(study: Study) -> dict[str, Any]:
    """Compute all numbers of the analysis, ready for JSON.

    Returns:
        "blocks" (one per table; see `_summarize_block`), "summaries" (one per number of dev items
        and
        budget: every method's mean rank, wins and losses, dev minus test) and "expected"/"there",
        the number of planned and of existing results; "dtypes", their number by model.dtype.
    """
    found = load_results(study)
    blocks = [_summarize_block(study, block, records) for block, records in found.items()]
    for dev, budget in _list_sheets(study):
        _add_holm(study, [one for one in blocks if _table_sheet(study, one) == (dev, budget)])
    summaries = [
        _summarize_methods(
            study,
            dev,
            budget,
            {b: r for b, r in found.items() if _block_sheet(study, b) == (dev, budget)},
            [one for one in blocks if _table_sheet(study, one) == (dev, budget)],
        )
        for dev, budget in _list_sheets(study)
    ]
    dtypes = Counter(read_dtype(record["words"]) for _, record in plan.load_results(study))
    return {
        "study": study.name,
        "seeds": study.seeds,
        "unit": study.file.unit,
        "references": list(study.file.references),
        "expected": len(study.cells()),
        "there": dtypes.total(),
        "dtypes": dict(dtypes),
        "blocks": blocks,
        "summaries": [one for one in summaries if one["methods"]],
    }


def _list_sheets(study: Study) -> list[tuple[int | None, int]]:
    """List the (dev items, budget) analysed together; `None`: each task has its default number."""
    return [
        (dev, budget) for dev in study.file.dev_items or (None,) for budget in study.file.budgets
    ]


def _block_sheet(study: Study, block: ResultBlock) -> tuple[int | None, int]:
    return (block.dev if study.file.dev_items else None), block.budget


def _table_sheet(study: Study, one: Mapping[str, Any]) -> tuple[int | None, int]:
    return _block_sheet(study, ResultBlock(one["task"], one["dev_items"], one["budget"]))


def _summarize_block(study: Study, block: ResultBlock, records: RecordsByMethod) -> dict[str, Any]:
    """Summarize a table: each method's dev, test and paired difference from each reference."""
    rows = [_method_row(name, seeds) for name, seeds in records.items()]
    varies = {name: "seed" in one.varies for name, one in study.methods.items()}
    for row in rows:
        row["planned_seeds"] = study.seeds if varies[row["method"]] else 1
        row["against"] = {
            name: _paired_difference(records[row["method"]], records[name])
            for name in study.file.references
            if name in records and name != row["method"]
        }
    started = [r for r in _list_records(records) if r["start"]]
    starts = {r["seed"]: r["start"] for r in reversed(started)}
    chosen = {r["seed"]: r["constant"] for r in started if r["constant"]}
    constants = list(chosen.values())
    return {
        "task": block.task,
        "dev_items": block.dev,
        "budget": block.budget,
        "test_items": len(next(iter(next(iter(records.values())).values()))["values"]),
        "constant": {
            "answers": sorted({one["answer"] for one in constants}),
            "test": fmean(one["test"] for one in constants),
            "by_domain": fmean(one["by_domain"] for one in constants),
        }
        if constants
        else None,
        "best_expert": {
            "names": sorted({start["expert"] for start in starts.values()}),
            "dev": fmean(start["dev"] for start in starts.values()),
            "test": fmean(start["test"] for start in starts.values()),
        }
        if starts
        else None,
        "methods": rows,
    }


def _list_records(records: RecordsByMethod) -> list[Mapping[str, Any]]:
    """Return all records of a table."""
    return [record for seeds in records.values() for record in seeds.values()]


def _method_row(name: str, records: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    seeds = sorted(records)
    tests = [records[seed]["test"] for seed in seeds]
    devs = [records[seed]["dev"] for seed in seeds]
    known = None not in devs
    untouched = [one for s in seeds if (one := records[s].get("dev_no_gradient")) is not None]

    def mean_of(key: str) -> float:
        return fmean(records[seed][key] for seed in seeds)

    return {
        "method": name,
        "seeds": len({id(records[seed]) for seed in seeds}),
        "dev": fmean(devs) if known else None,
        "test": fmean(tests),
        "tests": tests,
        "interval": list(interval_over_seeds(item_values(records, seeds))),
        "gap": fmean(devs) - fmean(tests) if known else None,
        "no_gradient_gap": fmean(untouched) - fmean(tests)
        if len(untouched) == len(seeds)
        else None,
        "prompt_equivalents": mean_of("prompt_equivalents"),
        "seconds": mean_of("seconds"),
        "cpu_seconds": mean_of("cpu_seconds"),
        "found": records[seeds[0]]["found"],
    }


def _paired_difference(
    scores: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Compute the paired difference on the shared seeds; `None` without any.

    The p value is that of the exact sign-flip test over items, each item's difference being the
    mean over seeds. The interval is a bootstrap over seeds and items.
    """
    seeds = sorted(scores.keys() & other.keys())
    if not seeds:
        return None
    gains = item_values(scores, seeds) - item_values(other, seeds)
    low, high = interval_over_seeds(gains)
    return {
        "difference": float(gains.mean()),
        "low": low,
        "high": high,
        "seeds": len(seeds),
        "p": exact_sign_flip_p(gains.mean(axis=0)),
    }


def _add_holm(study: Study, blocks: Sequence[dict[str, Any]]) -> None:
    """Add Holm's p values: for each reference, over all methods and tasks of these tables."""
    for name in study.file.references:
        tested = [
            found
            for block in blocks
            for row in block["methods"]
            if (found := row["against"].get(name))
        ]
        for found, p in zip(tested, holm_correction([one["p"] for one in tested]), strict=True):
            found["p_holm"] = p


def _summarize_methods(
    study: Study,
    dev: int | None,
    budget: int,
    found: Mapping[ResultBlock, RecordsByMethod],
    blocks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Compute each method's mean rank, wins, losses and dev minus test over the tasks."""
    ranked = _most_complete_methods(study, found)
    ranks = mean_ranks(
        [
            {name: seeds for name, seeds in records.items() if name in ranked}
            for records in found.values()
        ]
    )
    rows = []
    for name in study.methods:
        mine = [row for block in blocks for row in block["methods"] if row["method"] == name]
        if not mine:
            continue
        against = {}
        for other in study.file.references:
            pairs = [row["against"][other] for row in mine if row["against"].get(other)]
            sure = [pair for pair in pairs if pair["p_holm"] < SIGNIFICANCE_LEVEL]
            against[other] = {
                "tasks": len(pairs),
                "better": sum(pair["difference"] > 0 for pair in sure),
                "worse": sum(pair["difference"] < 0 for pair in sure),
            }
        shares = [row["gap"] for row in mine if row["gap"] is not None and _is_share(row)]
        untouched = [
            row["no_gradient_gap"]
            for row in mine
            if row["no_gradient_gap"] is not None and _is_share(row)
        ]
        rows.append(
            {
                "method": name,
                "tasks": len(mine),
                "rank": ranks.get(name),
                "against": against,
                "gap": fmean(shares) if shares else None,
                "largest_gap": max(shares) if shares else None,
                "no_gradient_gap": fmean(untouched) if untouched else None,
                "mean_test": fmean(row["test"] for row in mine),
            }
        )
    return {
        "dev_items": dev,
        "budget": budget,
        "tasks": [block.task for block in found],
        "methods": rows,
    }


def _most_complete_methods(study: Study, found: Mapping[ResultBlock, RecordsByMethod]) -> set[str]:
    """Return the methods that lack results on the fewest of the tasks that they support."""
    lacking = {
        name: sum(
            name not in records and block.task not in one.skip for block, records in found.items()
        )
        for name, one in study.methods.items()
    }
    return {name for name, count in lacking.items() if count == min(lacking.values())}


def _is_share(row: Mapping[str, Any]) -> bool:
    """Return whether a utility is a share of right answers, the unit of "dev minus test"."""
    return all(0 <= test <= 1 for test in row["tests"])


def mean_ranks(tasks: Sequence[RecordsByMethod]) -> dict[str, dict[str, Any]]:
    """Compute each method's mean rank over tasks, 1 being the best, with a bootstrap interval.

    On a task the methods are ranked by their mean test utility over the seeds that all of them
    have; ties share their mean rank. A method's mean leaves out tasks that it lacks. The 95 %
    interval is over seeds and test items, resampled jointly for all methods; the tasks are fixed.

    Returns:
        "rank", "low", "high" and "tasks", by method.
    """
    generator = np.random.Generator(np.random.Philox(key=BOOTSTRAP_KEY))
    ranks: dict[str, list[float]] = {}
    draws: dict[str, list[np.ndarray]] = {}
    for records in tasks:
        seeds = sorted(set.intersection(*(set(one) for one in records.values())))
        if not seeds or len(records) < 2:
            continue
        grid = np.stack([item_values(one, seeds) for one in records.values()])  # [M, S, n]
        count, n = len(seeds), grid.shape[2]
        # Bootstrap samples as multinomial weights: one matrix product yields all resampled means.
        items = generator.multinomial(n, np.full(n, 1 / n), NUM_RESAMPLES).T / n
        weights = generator.multinomial(count, np.full(count, 1 / count), NUM_RESAMPLES).T / count
        means = ((grid.reshape(-1, n) @ items).reshape(len(records), count, -1) * weights).sum(1)
        placed, drawn = _rank_columns(grid.mean(axis=(1, 2))[:, None]), _rank_columns(means)
        for index, name in enumerate(records):
            ranks.setdefault(name, []).append(float(placed[index, 0]))
            draws.setdefault(name, []).append(drawn[index])
    found = {}
    for name, mine in ranks.items():
        low, high = np.quantile(np.mean(draws[name], axis=0), (0.025, 0.975))
        found[name] = {
            "rank": fmean(mine),
            "low": float(low),
            "high": float(high),
            "tasks": len(mine),
        }
    return found


def _rank_columns(means: np.ndarray) -> np.ndarray:
    """Rank within each column, [M, B]: the highest has rank 1, and ties share their mean rank."""
    from scipy import stats

    # Rounding makes ties of means that differ only by the order of summation.
    rounded = np.round(means, 9)
    found: np.ndarray = stats.rankdata(-rounded, axis=0)
    return found


def format_summary(found: Mapping[str, Any]) -> list[str]:
    """Format the summary: state, mean ranks, wins and losses, and test utilities by task."""
    lines = [
        f"{found['there']} of {found['expected']} results; {found['seeds']} seeds planned. In "
        "parentheses: the seeds done, where there are fewer."
    ]
    if len(found["dtypes"]) > 1:
        kinds = (f"{count} in {dtype}" for dtype, count in sorted(found["dtypes"].items()))
        lines[0] += f" {', '.join(kinds)}."
    for one in found["summaries"]:
        of = [block for block in found["blocks"] if _is_in_summary(one, block)]
        dev = f", {one['dev_items']} dev items" if one["dev_items"] else ""
        unit = found["unit"] if found["unit"] == "positions" else "prompt-equivalents"
        lines += [
            "",
            f"**Budget: {one['budget']} {unit}{dev}.**",
            "",
            *_format_ranks(one),
            "",
            *_format_by_task(one, of),
        ]
    return [*lines, "", *_explain_columns(found)]


def _is_in_summary(one: Mapping[str, Any], block: Mapping[str, Any]) -> bool:
    """Return whether a table belongs to a summary's budget and number of dev items."""
    return block["budget"] == one["budget"] and one["dev_items"] in (None, block["dev_items"])


def _format_ranks(one: Mapping[str, Any]) -> list[str]:
    names = list(one["methods"][0]["against"])
    head = (
        "method",
        "mean rank",
        "tasks",
        *(f"vs {name}" for name in names),
        "dev - test",
        "largest",
        "no gradient",
    )
    ranked = sorted(one["methods"], key=lambda row: row["rank"]["rank"] if row["rank"] else 99)
    rows = []
    for row in ranked:
        rank = row["rank"]
        cells_ = [f"{rank['rank']:.2f} [{rank['low']:.2f}, {rank['high']:.2f}]" if rank else ""]
        cells_.append(str(row["tasks"]))
        for name in names:
            pair = row["against"][name]
            cells_.append(
                f"+{pair['better']} -{pair['worse']} of {pair['tasks']}" if pair["tasks"] else ""
            )
        gaps = (row["gap"], row["largest_gap"], row["no_gradient_gap"])
        rows.append((row["method"], *cells_, *map(_format_signed, gaps)))
    return format_table(head, rows)


def _format_by_task(one: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate test utilities: one row per method, one column per task; the best is bold."""
    tasks = list(dict.fromkeys(block["task"] for block in blocks))
    rows: list[tuple[str, ...]] = [
        ("best constant answer", *_block_cells(blocks, "constant", "test")),
        ("the same by domain", *_block_cells(blocks, "constant", "by_domain")),
        ("best initial expert", *_block_cells(blocks, "best_expert", "test")),
    ]
    best = [max(row["test"] for row in block["methods"]) for block in blocks]
    for method in (row["method"] for row in one["methods"]):
        cells_ = []
        for block, highest in zip(blocks, best, strict=True):
            row = next((row for row in block["methods"] if row["method"] == method), None)
            if row is None:
                cells_.append("")
                continue
            bold = "**" if abs(row["test"] - highest) < 5e-4 else ""
            part = row["seeds"] < row["planned_seeds"]
            done = f" ({row['seeds']})" if part else ""
            cells_.append(f"{bold}{_format_number(row['test'])}{bold}{done}")
        rows.append((method, *cells_))
    return format_table(("test", *tasks), rows)


def _block_cells(blocks: Sequence[Mapping[str, Any]], key: str, part: str) -> list[str]:
    """Format one number of each table; empty if the task lacks it."""
    return [_format_number((block[key] or {}).get(part)) for block in blocks]


def _format_signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _explain_columns(found: Mapping[str, Any]) -> list[str]:
    against = ", ".join(found["references"])
    return [
        "Mean rank: over tasks, 1 is the best; in brackets 95 % intervals by the bootstrap over "
        "seeds and test items. Only methods with results on the most tasks are ranked, among "
        "themselves and by the seeds that all of them have on a task; a task that a method does "
        'not support is left out of its mean. "vs": on how many tasks a method is better (+) or '
        f"worse (-) with p < {SIGNIFICANCE_LEVEL} than {against}: exact sign-flip tests paired on "
        "the test items, seeds averaged, with Holm's correction over all methods and tasks of a "
        'budget. "dev - test": the mean over tasks scored by right answers, and the largest; '
        '"no gradient": dev minus test with the dev items that no gradient used, on the tasks '
        "whose results record it.",
    ]


def format_report(found: Mapping[str, Any]) -> list[str]:
    """Format the complete report: the summary, then a table for every task and budget."""
    lines = [f"# Results of the study {found['study']}", "", *format_summary(found)]
    for block in found["blocks"]:
        lines += [
            "",
            f"## {block['task']}, {block['dev_items']} dev items, budget {block['budget']}",
            "",
            *_format_block(found, block),
        ]
    return lines


def _format_block(found: Mapping[str, Any], block: Mapping[str, Any]) -> list[str]:
    names = found["references"]
    numbers = ["seeds", "dev", "test", "dev - test", *(f"vs {name}, p" for name in names)]
    numbers += ["prompt-equivalents", "CPU seconds"]
    rows: list[list[str]] = []

    def add_row(label: str, **cells_: str) -> None:
        rows.append([label, *(cells_.get(name, "") for name in numbers)])

    if constant := block["constant"]:
        answers = ", ".join(constant["answers"])
        add_row(f"best constant answer ({answers})", test=_format_number(constant["test"]))
        add_row("the same by domain", test=_format_number(constant["by_domain"]))
    if start := block["best_expert"]:
        gap = start["dev"] - start["test"]
        of = {"dev": _format_number(start["dev"]), "test": _format_number(start["test"])}
        add_row(
            f"best initial expert ({', '.join(start['names'])})",
            **of,
            **{"dev - test": _format_signed(gap)},
        )
    for row in block["methods"]:
        low, high = row["interval"]
        pairs = {f"vs {name}, p": pair for name, pair in row["against"].items() if pair}
        labels = {
            name: f"{_format_signed(p['difference'])} [{_format_signed(p['low'])}, "
            f"{_format_signed(p['high'])}], "
            f"{p['p_holm']:.2g}"
            for name, p in pairs.items()
        } | {
            "seeds": f"{row['seeds']} of {row['planned_seeds']}",
            "dev": _format_number(row["dev"]),
            "test": f"{row['test']:.3f} [{low:.3f}, {high:.3f}]",
            "dev - test": _format_signed(row["gap"]),
            "prompt-equivalents": f"{row['prompt_equivalents']:.0f}",
            "CPU seconds": f"{row['cpu_seconds']:.0f}",
        }
        add_row(row["method"], **labels)
    first = [f"- {row['method']}: {row['found']}" for row in block["methods"] if row["found"]]
    told_of = f"{block['test_items']} test items. Best found, by the first seed:"
    table = format_table(("method", *numbers), rows)
    return [*table, "", told_of, "", *first]


def write_analysis(study: Study, found: Mapping[str, Any]) -> list[Path]:
    """Write analysis.json and README.md beside the results; return their paths."""
    written = [study.results / "analysis.json", study.results / "README.md"]
    write_json(written[0], found)
    write_atomic(written[1], ("\n".join(format_report(found)) + "\n").encode())
    return written
