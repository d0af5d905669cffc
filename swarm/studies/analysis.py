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

Table = dict[str, Any]
Records = dict[str, dict[int, dict[str, Any]]]
"""Results of each method, by method name and seed."""


class Block(NamedTuple):
    """Key of one table: a task with one number of dev items and one budget."""

    task: str
    dev: int
    budget: int


def load_results(study: Study) -> dict[Block, Records]:
    """Load the existing results; one that depends on no budget or seed is listed under each.

    Raises:
        UserError: Results of a task have different test items or weights.
    """
    found: dict[Block, Records] = {}
    for cell, record in plan.load_results(study):
        for budget in study.file.budgets if cell.budget is None else (cell.budget,):
            records = found.setdefault(Block(cell.task, cell.dev, budget), {})
            for seed in range(study.seeds) if cell.seed is None else (cell.seed,):
                records.setdefault(cell.method, {})[seed] = record
    kinds = (("test_digest", "test items"), ("experts_digest", "experts"))
    for block, records in found.items():
        for key, what in (*kinds, ("base_digest", "base weights")):
            if len({one[key] for one in _list_records(records)} - {None}) > 1:
                raise UserError(
                    f"{study.results}: the results of {block.task} are of different {what}; remove "
                    "the older lines and run them again"
                )
    order = [*study.methods]
    return {
        block: dict(sorted(records.items(), key=lambda pair: order.index(pair[0])))
        for block, records in found.items()
    }


def _list_records(records: Records) -> list[dict[str, Any]]:
    return [record for seeds in records.values() for record in seeds.values()]


def item_values(records: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> np.ndarray:
    """Return the values of the test items [S, n], one row per seed."""
    return np.array([[float(v) for v in records[seed]["values"]] for seed in seeds])


def analyse_study(study: Study) -> dict[str, Any]:
    """Compute all numbers of the analysis, ready for JSON.

    Returns:
        "blocks" (one per table: every method's dev, test and paired difference from each
        reference), "summaries" (one per number of dev items and budget: every method's mean rank,
        wins and losses, dev minus test) and "expected"/"there", the number of planned and of
        existing results; "dtypes", their number by model.dtype.
    """
    found = load_results(study)
    tables = {block: _summarize_block(study, block, records) for block, records in found.items()}
    summaries = []
    # Without dev_items each task has its own number, and all of them are in one summary.
    for dev in study.file.dev_items or (None,):
        for budget in study.file.budgets:
            some = [b for b in found if b.budget == budget and dev in (None, b.dev)]
            if some:
                of = {block: found[block] for block in some}
                summary = _summarize_methods(study, of, [tables[block] for block in some])
                summaries.append({"dev_items": dev, "budget": budget, **summary})
    dtypes = Counter(read_dtype(record["words"]) for _, record in plan.load_results(study))
    return {
        "study": study.name,
        "seeds": study.seeds,
        "unit": study.file.unit,
        "references": list(study.file.references),
        "expected": len(study.cells()),
        "there": dtypes.total(),
        "dtypes": dict(dtypes),
        "blocks": list(tables.values()),
        "summaries": summaries,
    }


def _summarize_block(study: Study, block: Block, records: Records) -> Table:
    rows = []
    for name, mine in records.items():
        against = {
            other: _paired_difference(mine, records[other])
            for other in study.file.references
            if other in records and other != name
        }
        planned = study.seeds if "seed" in study.methods[name].varies else 1
        rows.append({**_method_row(name, mine), "planned_seeds": planned, "against": against})
    started = [one for one in _list_records(records) if one["start"]]
    # One start and one constant answer per seed: all methods have the same.
    starts = [*{one["seed"]: one["start"] for one in reversed(started)}.values()]
    constants = [*{one["seed"]: one["constant"] for one in started if one["constant"]}.values()]
    constant = {"answers": sorted({one["answer"] for one in constants})}
    best_expert = {"names": sorted({one["expert"] for one in starts})}
    return {
        "task": block.task,
        "dev_items": block.dev,
        "budget": block.budget,
        "test_items": len(_list_records(records)[0]["values"]),
        "constant": {**constant, **_means(constants, "test", "by_domain")} if constants else None,
        "best_expert": {**best_expert, **_means(starts, "dev", "test")} if starts else None,
        "methods": rows,
    }


def _means(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows) for key in keys}


def _method_row(name: str, records: Mapping[int, Mapping[str, Any]]) -> Table:
    seeds = sorted(records)
    mine = [records[seed] for seed in seeds]
    means = _means(mine, "test", "prompt_equivalents", "seconds", "cpu_seconds")

    def mean_dev(key: str) -> float | None:
        """Mean of a dev utility, if all seeds have it."""
        known = [one[key] for one in mine if one.get(key) is not None]
        return fmean(known) if len(known) == len(mine) else None

    dev, no_gradient = mean_dev("dev"), mean_dev("dev_no_gradient")
    return {
        "method": name,
        "seeds": len({id(one) for one in mine}),
        "dev": dev,
        **means,
        "tests": [one["test"] for one in mine],
        "interval": list(interval_over_seeds(item_values(records, seeds))),
        "gap": None if dev is None else dev - means["test"],
        "texts": _means(mine, "entropy", "length") if mine[0].get("entropy") is not None else None,
        "no_gradient_gap": None if no_gradient is None else no_gradient - means["test"],
        "found": mine[0]["found"],
    }


def _paired_difference(
    scores: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]
) -> Table | None:
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


def _summarize_methods(
    study: Study, found: Mapping[Block, Records], tables: Sequence[Table]
) -> dict[str, Any]:
    """Compute each method's mean rank, wins, losses and dev minus test over the tasks.

    Also adds Holm's p values to the tables: for each reference, over all methods and tasks.
    """
    for other in study.file.references:
        rows = [row for table in tables for row in table["methods"]]
        tested = [pair for row in rows if (pair := row["against"].get(other))]
        for pair, p in zip(tested, holm_correction([one["p"] for one in tested]), strict=True):
            pair["p_holm"] = p
    # Ranked are the methods that lack results on the fewest of the tasks that they support.
    lacking = {
        name: sum(name not in records and block.task not in one.skip
                  for block, records in found.items())
        for name, one in study.methods.items()
    }  # fmt: skip
    ranked = {name for name, count in lacking.items() if count == min(lacking.values())}
    ranks = mean_ranks(
        [{name: of for name, of in records.items() if name in ranked} for records in found.values()]
    )
    methods = []
    for name in study.methods:
        mine = [row for table in tables for row in table["methods"] if row["method"] == name]
        if not mine:
            continue
        against = {}
        for other in study.file.references:
            pairs = [pair for row in mine if (pair := row["against"].get(other))]
            sure = [one["difference"] for one in pairs if one["p_holm"] < SIGNIFICANCE_LEVEL]
            better, worse = sum(one > 0 for one in sure), sum(one < 0 for one in sure)
            against[other] = {"tasks": len(pairs), "better": better, "worse": worse}
        # Shares of right answers have comparable gaps; other utilities have other units.
        shares = [row for row in mine if all(0 <= test <= 1 for test in row["tests"])]
        gaps, untouched = (
            [row[key] for row in shares if row[key] is not None]
            for key in ("gap", "no_gradient_gap")
        )
        methods.append(
            {
                "method": name,
                "tasks": len(mine),
                "rank": ranks.get(name),
                "against": against,
                "gap": fmean(gaps) if gaps else None,
                "largest_gap": max(gaps, default=None),
                "no_gradient_gap": fmean(untouched) if untouched else None,
                "mean_test": fmean(row["test"] for row in mine),
            }
        )
    return {"tasks": [block.task for block in found], "methods": methods}


def mean_ranks(tasks: Sequence[Records]) -> dict[str, dict[str, Any]]:
    """Compute each method's mean rank over tasks, 1 being the best, with a bootstrap interval.

    On a task the methods are ranked by their mean test utility over the seeds that all of them
    have; ties share their mean rank. A method's mean leaves out tasks that it lacks. The 95 %
    interval is over seeds and test items, resampled jointly for all methods; the tasks are fixed.

    Returns:
        "rank", "low", "high" and "tasks", by method.
    """
    from scipy.stats import rankdata

    generator = np.random.Generator(np.random.Philox(key=BOOTSTRAP_KEY))
    ranks: dict[str, list[np.ndarray]] = {}
    for records in tasks:
        seeds = sorted(set.intersection(*(set(one) for one in records.values())))
        if not seeds or len(records) < 2:
            continue
        grid = np.stack([item_values(one, seeds) for one in records.values()])  # [M, S, n]
        count, n = len(seeds), grid.shape[2]
        # Bootstrap samples as multinomial weights: one matrix product yields all resampled means.
        items = generator.multinomial(n, np.full(n, 1 / n), NUM_RESAMPLES).T / n
        weights = generator.multinomial(count, np.full(count, 1 / count), NUM_RESAMPLES).T / count
        drawn = ((grid.reshape(-1, n) @ items).reshape(len(records), count, -1) * weights).sum(1)
        means = np.column_stack([grid.mean(axis=(1, 2)), drawn])  # the measured ones first
        # Rounding makes ties of means that differ only by the order of summation.
        for name, mine in zip(records, rankdata(-np.round(means, 9), axis=0), strict=True):
            ranks.setdefault(name, []).append(mine)
    found = {}
    for name, each in ranks.items():
        rank, *drawn_ranks = np.mean(each, axis=0).tolist()
        low, high = np.quantile(drawn_ranks, (0.025, 0.975)).tolist()
        found[name] = {"rank": rank, "low": low, "high": high, "tasks": len(each)}
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
    unit = found["unit"] if found["unit"] == "positions" else "prompt-equivalents"
    for one in found["summaries"]:
        tables = [
            table
            for table in found["blocks"]
            if table["budget"] == one["budget"] and one["dev_items"] in (None, table["dev_items"])
        ]
        dev = f", {one['dev_items']} dev items" if one["dev_items"] else ""
        lines += ["", f"**Budget: {one['budget']} {unit}{dev}.**", ""]
        lines += [*_format_ranks(one["methods"]), "", *_format_by_task(one["methods"], tables)]
    against = ", ".join(found["references"])
    return [
        *lines,
        "",
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


def _show(value: float | None, spec: str = ".3f") -> str:
    return "" if value is None else format(value, spec)


def _format_ranks(methods: Sequence[Table]) -> list[str]:
    names = list(methods[0]["against"])
    head = ["method", "mean rank", "tasks", *(f"vs {name}" for name in names)]
    rows = []
    for row in sorted(methods, key=lambda row: row["rank"]["rank"] if row["rank"] else 99):
        rank = "{rank:.2f} [{low:.2f}, {high:.2f}]".format(**row["rank"]) if row["rank"] else ""
        pairs = (row["against"][name] for name in names)
        counts = [
            "+{better} -{worse} of {tasks}".format(**pair) if pair["tasks"] else ""
            for pair in pairs
        ]
        gaps = (_show(row[key], "+.3f") for key in ("gap", "largest_gap", "no_gradient_gap"))
        rows.append([row["method"], rank, str(row["tasks"]), *counts, *gaps])
    return format_table([*head, "dev - test", "largest", "no gradient"], rows)


def _format_by_task(methods: Sequence[Table], tables: Sequence[Table]) -> list[str]:
    """Tabulate test utilities: one row per method, one column per task; the best is bold."""
    tasks = list(dict.fromkeys(table["task"] for table in tables))
    baselines = {
        "best constant answer": ("constant", "test"),
        "the same by domain": ("constant", "by_domain"),
        "best expert": ("best_expert", "test"),
    }
    rows = [
        [label, *(_show((table[key] or {}).get(part)) for table in tables)]
        for label, (key, part) in baselines.items()
    ]
    rows += [[one["method"], *(_format_test(table, one["method"]) for table in tables)]
             for one in methods]  # fmt: skip
    return format_table(["test", *tasks], rows)


def _format_test(table: Table, method: str) -> str:
    for row in table["methods"]:
        if row["method"] == method:
            best = max(one["test"] for one in table["methods"])
            bold = "**" if abs(row["test"] - best) < 5e-4 else ""
            done = f" ({row['seeds']})" if row["seeds"] < row["planned_seeds"] else ""
            return f"{bold}{_show(row['test'])}{bold}{done}"
    return ""


def format_report(found: Mapping[str, Any]) -> list[str]:
    """Format the complete report: the summary, then a table for every task and budget."""
    lines = [f"# Results of the study {found['study']}", "", *format_summary(found)]
    for table in found["blocks"]:
        title = f"## {table['task']}, {table['dev_items']} dev items, budget {table['budget']}"
        lines += ["", title, "", *_format_block(found["references"], table)]
    return lines


def _format_block(references: Sequence[str], table: Table) -> list[str]:
    columns = ["seeds", "dev", "test", "dev - test", *(f"vs {name}, p" for name in references)]
    columns += ["entropy, words"] * any(row["texts"] for row in table["methods"])
    columns += ["prompt-equivalents", "CPU seconds"]
    rows: dict[str, dict[str, str]] = {}
    if constant := table["constant"]:
        label = f"best constant answer ({', '.join(constant['answers'])})"
        rows[label] = {"test": _show(constant["test"])}
        rows["the same by domain"] = {"test": _show(constant["by_domain"])}
    if start := table["best_expert"]:
        rows[f"best expert ({', '.join(start['names'])})"] = {
            "dev": _show(start["dev"]),
            "test": _show(start["test"]),
            "dev - test": _show(start["dev"] - start["test"], "+.3f"),
        }
    pair_format = "{difference:+.3f} [{low:+.3f}, {high:+.3f}], {p_holm:.2g}"
    for row in table["methods"]:
        (low, high), texts = row["interval"], row["texts"]
        pairs = {f"vs {name}, p": pair for name, pair in row["against"].items() if pair}
        rows[row["method"]] = {
            "seeds": f"{row['seeds']} of {row['planned_seeds']}",
            "dev": _show(row["dev"]),
            "test": f"{row['test']:.3f} [{low:.3f}, {high:.3f}]",
            "dev - test": _show(row["gap"], "+.3f"),
            **{column: pair_format.format(**pair) for column, pair in pairs.items()},
            "entropy, words": "{entropy:.2f}, {length:.1f}".format(**texts) if texts else "",
            "prompt-equivalents": f"{row['prompt_equivalents']:.0f}",
            "CPU seconds": f"{row['cpu_seconds']:.0f}",
        }
    cells = [[label, *(row.get(column, "") for column in columns)] for label, row in rows.items()]
    return [
        *format_table(["method", *columns], cells),
        "",
        f"{table['test_items']} test items. Best found, by the first seed:",
        "",
        *(f"- {row['method']}: {row['found']}" for row in table["methods"] if row["found"]),
    ]


def write_analysis(study: Study, found: Mapping[str, Any]) -> list[Path]:
    """Write analysis.json and README.md beside the results; return their paths."""
    written = [study.results / "analysis.json", study.results / "README.md"]
    write_json(written[0], found)
    write_atomic(written[1], ("\n".join(format_report(found)) + "\n").encode())
    return written
