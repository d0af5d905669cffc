"""The result of a run: in a sentence, in a table, and what supports it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from swarm.report.blocks import ReportSection, Sparkline, TableBlock, TextBlock
from swarm.report.compared import TestComparison, SplitResult, is_binary, test_name, answer_values
from swarm.report.numbers import format_count, pluralize, format_interval, format_number, format_p_value, format_percent, format_signed
from swarm.report.pictures import Chart, Series
from swarm.words import (
    list_caveats,
    test_conclusion,
    describe_constant_answers,
    domain_table,
    one_answer_warnings,
    compare_with_baselines,
    describe_position,
)

SPLIT_NAMES = {"dev": "dev", "confirm": "kept part of dev", "test": "test"}


def summarize_verdict(models: TestComparison) -> tuple[str, str, str]:
    """The result: its kind, two or three words, and one plain sentence."""
    run, found = models.run, models.metrics
    start, end = models.split_result("starting", "dev"), models.split_result("ending", "dev")
    if start is None or end is None:
        return "open", "Nothing measured yet", "No particle has been asked all dev items yet."
    if not found and (signal := run.identity.get("task.signal", "accuracy")) != "accuracy":
        return "open", "Not judged yet", (
            f"By its signal ({signal}) the search stands at {format_number(end.utility)}; the best are "
            "chosen by the task's own measure when it ends."
        )  # fmt: skip
    rise = (f"the best found reaches {format_number(end.utility)} and the best initial expert, "
            f"{models.expert}, {format_number(start.utility)}")  # fmt: skip
    if run.finished is None:
        after = f"after {pluralize(len(run.rounds) - 1, 'iteration')}"
        return "open", "Still running", f"On {end.items} dev items {after}, {rise}."
    if not models.is_tested:
        flatters = "which flatters the one that was chosen there as the highest of many"
        return "open", "Not tested", f"On the {end.items} dev items, {flatters}, {rise}."
    items = format_count(found["ending_best_single_test_items"])
    told = " ".join([test_conclusion(found), *compare_with_baselines(found), *one_answer_warnings(found)])
    if end.utility > start.utility and _is_zero_width(found["test_gain_interval"]):
        told = f"No item differs: each of the {items} test items is worth the same to both."
    better = found["test_gain"] > 0
    if found["test_gain_p_value"] >= 0.05 or end.utility <= start.utility:
        loss = found["test_gain"] < 0 and found["test_gain_p_value"] >= 0.05
        return "unclear", "No gain shown" + ": a loss that may be chance" * loss, told
    if better and (short := _constants_warning(found)):
        return "unclear", short, told
    return ("better", "Better on test", told) if better else ("worse", "Worse on test", told)


def _constants_warning(metrics: dict[str, Any]) -> str:
    """That a gain on the best initial expert is none on constant answers; empty where it is."""
    constant = metrics.get("constant_answers") or {}
    if "gain" not in constant or (constant["gain"] > 0 and constant["p_value"] < 0.05):
        return ""
    return "Better on test than the best initial expert, not than constant answers"


def headline_figures(models: TestComparison) -> list[tuple[str, str]]:
    """Short facts for the head of the page."""
    found = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            found.append((f"{split}, n = {format_count(end.items)}",
                          f"{format_number(start.utility)} → {format_number(end.utility)}"))  # fmt: skip
    if models.is_tested:
        metrics = models.metrics
        gain, ends_ = format_signed(metrics["test_gain"]), _format_gain_interval(metrics["test_gain_interval"])
        found.append(("gain on test, 95 %", f"{gain} {ends_}"))
        found.append(("paired p", format_p_value(metrics["test_gain_p_value"])))
    return found


def start_end_section(models: TestComparison) -> ReportSection:
    """Start and end side by side."""
    run = models.run
    position = run.positions[models.places["ending"]]
    blocks: list[Any] = [
        TextBlock([f"Best found: {describe_position(run.experts, position, run.groups)}."]),
        _result_table(models),
        _result_chart(models),
    ]
    if parts := _subtask_table(models):
        blocks.append(parts)
    blocks += _domain_tables(models)
    if by_size := models.metrics.get("ensemble_dev_by_size"):
        size = models.metrics["ensemble_size"]
        told = ", ".join(f"{n}: {format_number(value)}" for n, value in enumerate(by_size, 1))
        blocks.append(TextBlock([f"The vote on dev by number of voters: {told}; {size} was chosen."]))
    return ReportSection(
        "ends",
        "Start and end",
        "Brackets are 95 % intervals of a model's own number. The dev number of the best found is "
        "the highest of many and flatters it; the test items were never searched on.",
        blocks,
    )


def _result_lines(models: TestComparison) -> Iterator[tuple[str, dict[str, SplitResult | None]]]:
    """Each model with its numbers by split, and the best constant answers."""
    if constant := models.metrics.get("constant_answers"):
        each = " of each domain" * (len(constant["by_domain"]["answers"]) > 1)
        name = f"best constant answer{each} ({describe_constant_answers(constant)})"
        yield name, {split: models.constant_result(split) for split in SPLIT_NAMES}
    yield from models.baseline_results().items()
    for who, name in models.model_labels.items():
        yield name, {split: models.split_result(who, split) for split in SPLIT_NAMES}
    vote = {split: models.vote_result(split) for split in SPLIT_NAMES}
    if any(vote.values()):
        size = len(models.metrics.get("ensemble_members", ())) or models.metrics["ensemble_size"]
        yield f"vote of the top {size}", vote


def _result_table(models: TestComparison) -> TableBlock:
    lines = list(_result_lines(models))
    shown = [split for split in SPLIT_NAMES if any(one[split] for _, one in lines)]
    header = ["model"]
    for split in shown:
        items = next(one[split].items for _, one in lines if one[split])  # type: ignore[union-attr]
        header.append(f"{SPLIT_NAMES[split]}, n = {format_count(items)}")
    told = [split for split in shown if split != "confirm"]
    header += [f"unread on {split}" for split in told]
    rows: list[list[str | Sparkline]] = []
    for name, one in lines:
        row: list[str | Sparkline] = [name]
        row += [format_interval(m.utility, m.ends) if (m := one[split]) else "–" for split in shown]
        row += [format_percent(m.unparsed) if (m := one[split]) else "–" for split in told]
        rows.append(row)
    return TableBlock("Utilities with 95 % intervals, and the share of answers that could not be read",
                 header, rows)  # fmt: skip


def _result_chart(models: TestComparison) -> Chart:
    """One row a split; the models of a split stand a little apart."""
    lines = list(_result_lines(models))
    splits = [split for split in SPLIT_NAMES if any(one[split] for _, one in lines)]
    series = []
    for place, (name, one) in enumerate(lines):
        known = [(n, m) for n, split in enumerate(splits) if (m := one[split])]
        series.append(Series(
            name,
            [m.utility for _, m in known],
            [n + 0.2 * (place - (len(lines) - 1) / 2) for n, _ in known],
            "points",
            labels=[f"{SPLIT_NAMES[splits[n]]}, {format_interval(m.utility, m.ends)}" for n, m in known],
            spans=[m.ends or (m.utility, m.utility) for _, m in known],
        ))  # fmt: skip
    told = "; ".join(f"{one.name}: {', '.join(one.labels)}" for one in series)
    return Chart("ends", "Utilities and their 95 % intervals", "utility", "", series, told,
                 rows=[SPLIT_NAMES[split] for split in splits])  # fmt: skip


def _subtask_table(models: TestComparison) -> TableBlock | None:
    """What each part of a mixture came to."""
    rows: list[list[str]] = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            rows += [
                [part, split, format_number(start.parts[part]), format_number(value),
                 format_signed(value - start.parts[part])]
                for part, value in end.parts.items()
            ]  # fmt: skip
    header = ["part", "split", models.expert, "best found", "change"]
    return TableBlock("The parts of the mixture", header, rows) if rows else None


def _domain_tables(models: TestComparison) -> list[TableBlock]:
    """Utilities by domain on dev and test, where there are 2 to 12 domains."""
    found = []
    for split in ("dev", "test"):
        if one := domain_table(models.metrics, split):
            caption = f"Utilities by domain on {split}; (!): one answer throughout"
            found.append(TableBlock(caption, *one))
    return found


def statistics_section(models: TestComparison) -> ReportSection:
    """What may and may not be concluded."""
    rows = [_gain_row(name, one) for name, one in _measured_gains(models)]
    blocks: list[Any] = []
    if rows:
        header = ["on", "gain", "95 % interval", "p", "items"]
        blocks.append(TableBlock("Best found less best initial expert, item by item", header, rows))
    if (answers := models.paired_answers()) and is_binary(answers[1]) and is_binary(answers[2]):
        blocks.append(_fourfold_table(models, *answers))
    blocks.append(TextBlock([*list_caveats(models.metrics), *_describe_method(models)], listed=True))
    return ReportSection(
        "statistics",
        "How sure this is",
        "The paired test looks only at items on which the two differ; p is the chance of a "
        "difference this large if neither were better. Below 0.05 it is called a gain here.",
        blocks,
    )


def _measured_gains(models: TestComparison) -> Iterator[tuple[str, tuple[float, list[float], float, int]]]:
    found = models.metrics
    if one := found.get("confirm"):
        yield SPLIT_NAMES["confirm"], (one["gain"], one["gain_interval"], one["p_value"], one["items"])
    if models.is_tested:
        yield SPLIT_NAMES["test"], (found["test_gain"], found["test_gain_interval"],
                               found["test_gain_p_value"],
                               found["ending_best_single_test_items"])  # fmt: skip


def _gain_row(name: str, one: tuple[float, list[float], float, int]) -> list[str]:
    gain, (low, high), p, items = one
    return [name, format_signed(gain), _format_gain_interval((low, high)), format_p_value(p), format_count(items)]


def _is_zero_width(interval_: Sequence[float]) -> bool:
    """Whether a difference has an interval of no width: resampling items that do not differ."""
    return tuple(interval_) == (0.0, 0.0)


def _format_gain_interval(interval_: Sequence[float]) -> str:
    """The 95 % interval of a difference."""
    if _is_zero_width(interval_):
        return "(no item differs)"
    low, high = interval_
    return f"[{format_signed(low)}, {format_signed(high)}]"


def _fourfold_table(models: TestComparison, split: str, before: Any, after: Any) -> TableBlock:
    start, end = answer_values(before) == 1, answer_values(after) == 1
    cells = [(both.sum(), lone.sum()) for both, lone in ((start & end, start & ~end),
                                                        (~start & end, ~start & ~end))]  # fmt: skip
    rows = [[f"{models.expert} {word}", str(a), str(b)]
            for word, (a, b) in zip(("right", "wrong"), cells, strict=True)]  # fmt: skip
    return TableBlock(f"Items of {split}, counted", ["", "best found right", "best found wrong"], rows)


def _describe_method(models: TestComparison) -> list[str]:
    found, answers = models.metrics, models.paired_answers()
    told = []
    if answers and answers[0] == "test":
        told.append(f"The paired test on test is {test_name(*answers[1:])}.")
    told.append(
        "Intervals of right-or-wrong answers are Wilson's, those of other utilities are "
        "bootstrapped over items, and that of a difference inverts its test; they cover the draw "
        "of the items, not that of the seed: another seed is another search."
    )
    evaluated = int((~np.isnan(models.run.utilities)).sum())
    told.append(f"The best found is the highest of {format_count(evaluated)} evaluations on dev.")
    if "confirm" not in found:
        told.append("No part of dev was kept from the search (confirm=0.3 keeps some), so that "
                    "the dev number of the best found has no check but test.")  # fmt: skip
    if "signal" in found:
        told.append(f"The search climbed the signal {found['signal']}; the numbers above are by "
                    "the task's own measure, which also chose among the bests.")  # fmt: skip
    return told
