"""The result of a run: in a sentence, in a table, and what supports it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from swarm.report.blocks import Section, Spark, Table, Words
from swarm.report.compared import Compared, Measured, is_binary, kind_of_test, values
from swarm.report.numbers import count, counted, interval, number, p_value, percent, signed
from swarm.report.pictures import Chart, Series
from swarm.words import (
    caveats,
    conclusion,
    constant_label,
    domain_table,
    one_answer_warnings,
    over_baselines,
    sentence,
)

SPLITS = {"dev": "dev", "confirm": "kept part of dev", "test": "test"}


def verdict(models: Compared) -> tuple[str, str, str]:
    """The result: its kind, two or three words, and one plain sentence."""
    run, found = models.run, models.metrics
    start, end = models.measured("starting", "dev"), models.measured("ending", "dev")
    if start is None or end is None:
        return "open", "Nothing measured yet", "No particle has been asked all dev items yet."
    if not found and (signal := run.identity.get("task.signal", "accuracy")) != "accuracy":
        return "open", "Not judged yet", (
            f"By its signal ({signal}) the search stands at {number(end.utility)}; the best are "
            "chosen by the task's own measure when it ends."
        )  # fmt: skip
    rise = (f"the best found reaches {number(end.utility)} and the best initial expert, "
            f"{models.expert}, {number(start.utility)}")  # fmt: skip
    if run.finished is None:
        after = f"after {counted(len(run.rounds) - 1, 'iteration')}"
        return "open", "Still running", f"On {end.items} dev items {after}, {rise}."
    if not models.tested:
        flatters = "which flatters the one that was chosen there as the highest of many"
        return "open", "Not tested", f"On the {end.items} dev items, {flatters}, {rise}."
    items = count(found["ending_best_single_test_items"])
    told = " ".join([conclusion(found), *over_baselines(found), *one_answer_warnings(found)])
    if end.utility > start.utility and _same(found["test_gain_interval"]):
        told = f"No item differs: each of the {items} test items is worth the same to both."
    better = found["test_gain"] > 0
    if found["test_gain_p_value"] >= 0.05 or end.utility <= start.utility:
        loss = found["test_gain"] < 0 and found["test_gain_p_value"] >= 0.05
        return "unclear", "No gain shown" + ": a loss that may be chance" * loss, told
    if better and (short := _not_over_constants(found)):
        return "unclear", short, told
    return ("better", "Better on test", told) if better else ("worse", "Worse on test", told)


def _not_over_constants(metrics: dict[str, Any]) -> str:
    """That a gain on the best initial expert is none on constant answers; empty where it is."""
    constant = metrics.get("constant_answers") or {}
    if "gain" not in constant or (constant["gain"] > 0 and constant["p_value"] < 0.05):
        return ""
    return "Better on test than the best initial expert, not than constant answers"


def figures(models: Compared) -> list[tuple[str, str]]:
    """Short facts for the head of the page."""
    found = []
    for split in ("dev", "test"):
        start, end = models.measured("starting", split), models.measured("ending", split)
        if start and end:
            found.append((f"{split}, n = {count(end.items)}",
                          f"{number(start.utility)} → {number(end.utility)}"))  # fmt: skip
    if models.tested:
        metrics = models.metrics
        gain, ends_ = signed(metrics["test_gain"]), _ends(metrics["test_gain_interval"])
        found.append(("gain on test, 95 %", f"{gain} {ends_}"))
        found.append(("paired p", p_value(metrics["test_gain_p_value"])))
    return found


def ends(models: Compared) -> Section:
    """Start and end side by side."""
    run = models.run
    position = run.positions[models.places["ending"]]
    blocks: list[Any] = [
        Words([f"Best found: {sentence(run.experts, position, run.groups)}."]),
        _table(models),
        _chart(models),
    ]
    if parts := _parts(models):
        blocks.append(parts)
    blocks += _domains(models)
    if by_size := models.metrics.get("ensemble_dev_by_size"):
        size = models.metrics["ensemble_size"]
        told = ", ".join(f"{n}: {number(value)}" for n, value in enumerate(by_size, 1))
        blocks.append(Words([f"The vote on dev by number of voters: {told}; {size} was chosen."]))
    return Section(
        "ends",
        "Start and end",
        "Brackets are 95 % intervals of a model's own number. The dev number of the best found is "
        "the highest of many and flatters it; the test items were never searched on.",
        blocks,
    )


def _lines(models: Compared) -> Iterator[tuple[str, dict[str, Measured | None]]]:
    """Each model with its numbers by split, and the best constant answers."""
    if constant := models.metrics.get("constant_answers"):
        each = " of each domain" * (len(constant["by_domain"]["answers"]) > 1)
        name = f"best constant answer{each} ({constant_label(constant)})"
        yield name, {split: models.constant(split) for split in SPLITS}
    yield from models.baselines().items()
    for who, name in models.names.items():
        yield name, {split: models.measured(who, split) for split in SPLITS}
    vote = {split: models.vote(split) for split in SPLITS}
    if any(vote.values()):
        size = len(models.metrics.get("ensemble_members", ())) or models.metrics["ensemble_size"]
        yield f"vote of the top {size}", vote


def _table(models: Compared) -> Table:
    lines = list(_lines(models))
    shown = [split for split in SPLITS if any(one[split] for _, one in lines)]
    header = ["model"]
    for split in shown:
        items = next(one[split].items for _, one in lines if one[split])  # type: ignore[union-attr]
        header.append(f"{SPLITS[split]}, n = {count(items)}")
    told = [split for split in shown if split != "confirm"]
    header += [f"unread on {split}" for split in told]
    rows: list[list[str | Spark]] = []
    for name, one in lines:
        row: list[str | Spark] = [name]
        row += [interval(m.utility, m.ends) if (m := one[split]) else "–" for split in shown]
        row += [percent(m.unparsed) if (m := one[split]) else "–" for split in told]
        rows.append(row)
    return Table("Utilities with 95 % intervals, and the share of answers that could not be read",
                 header, rows)  # fmt: skip


def _chart(models: Compared) -> Chart:
    """One row a split; the models of a split stand a little apart."""
    lines = list(_lines(models))
    splits = [split for split in SPLITS if any(one[split] for _, one in lines)]
    series = []
    for place, (name, one) in enumerate(lines):
        known = [(n, m) for n, split in enumerate(splits) if (m := one[split])]
        series.append(Series(
            name,
            [m.utility for _, m in known],
            [n + 0.2 * (place - (len(lines) - 1) / 2) for n, _ in known],
            "points",
            labels=[f"{SPLITS[splits[n]]}, {interval(m.utility, m.ends)}" for n, m in known],
            spans=[m.ends or (m.utility, m.utility) for _, m in known],
        ))  # fmt: skip
    told = "; ".join(f"{one.name}: {', '.join(one.labels)}" for one in series)
    return Chart("ends", "Utilities and their 95 % intervals", "utility", "", series, told,
                 rows=[SPLITS[split] for split in splits])  # fmt: skip


def _parts(models: Compared) -> Table | None:
    """What each part of a mixture came to."""
    rows: list[list[str]] = []
    for split in ("dev", "test"):
        start, end = models.measured("starting", split), models.measured("ending", split)
        if start and end:
            rows += [
                [part, split, number(start.parts[part]), number(value),
                 signed(value - start.parts[part])]
                for part, value in end.parts.items()
            ]  # fmt: skip
    header = ["part", "split", models.expert, "best found", "change"]
    return Table("The parts of the mixture", header, rows) if rows else None


def _domains(models: Compared) -> list[Table]:
    """Utilities by domain on dev and test, where there are 2 to 12 domains."""
    found = []
    for split in ("dev", "test"):
        if one := domain_table(models.metrics, split):
            caption = f"Utilities by domain on {split}; (!): one answer throughout"
            found.append(Table(caption, *one))
    return found


def statistics(models: Compared) -> Section:
    """What may and may not be concluded."""
    rows = [_tested_row(name, one) for name, one in _gains(models)]
    blocks: list[Any] = []
    if rows:
        header = ["on", "gain", "95 % interval", "p", "items"]
        blocks.append(Table("Best found less best initial expert, item by item", header, rows))
    if (answers := models.answers()) and is_binary(answers[1]) and is_binary(answers[2]):
        blocks.append(_fourfold(models, *answers))
    blocks.append(Words([*caveats(models.metrics), *_method(models)], listed=True))
    return Section(
        "statistics",
        "How sure this is",
        "The paired test looks only at items on which the two differ; p is the chance of a "
        "difference this large if neither were better. Below 0.05 it is called a gain here.",
        blocks,
    )


def _gains(models: Compared) -> Iterator[tuple[str, tuple[float, list[float], float, int]]]:
    found = models.metrics
    if one := found.get("confirm"):
        yield SPLITS["confirm"], (one["gain"], one["gain_interval"], one["p_value"], one["items"])
    if models.tested:
        yield SPLITS["test"], (found["test_gain"], found["test_gain_interval"],
                               found["test_gain_p_value"],
                               found["ending_best_single_test_items"])  # fmt: skip


def _tested_row(name: str, one: tuple[float, list[float], float, int]) -> list[str]:
    gain, (low, high), p, items = one
    return [name, signed(gain), _ends((low, high)), p_value(p), count(items)]


def _same(interval_: Sequence[float]) -> bool:
    """Whether a difference has an interval of no width: resampling items that do not differ."""
    return tuple(interval_) == (0.0, 0.0)


def _ends(interval_: Sequence[float]) -> str:
    """The 95 % interval of a difference."""
    if _same(interval_):
        return "(no item differs)"
    low, high = interval_
    return f"[{signed(low)}, {signed(high)}]"


def _fourfold(models: Compared, split: str, before: Any, after: Any) -> Table:
    start, end = values(before) == 1, values(after) == 1
    cells = [(both.sum(), lone.sum()) for both, lone in ((start & end, start & ~end),
                                                        (~start & end, ~start & ~end))]  # fmt: skip
    rows = [[f"{models.expert} {word}", str(a), str(b)]
            for word, (a, b) in zip(("right", "wrong"), cells, strict=True)]  # fmt: skip
    return Table(f"Items of {split}, counted", ["", "best found right", "best found wrong"], rows)


def _method(models: Compared) -> list[str]:
    found, answers = models.metrics, models.answers()
    told = []
    if answers and answers[0] == "test":
        told.append(f"The paired test on test is {kind_of_test(*answers[1:])}.")
    told.append(
        "Intervals of right-or-wrong answers are Wilson's, those of other utilities are "
        "bootstrapped over items, and that of a difference inverts its test; they cover the draw "
        "of the items, not that of the seed: another seed is another search."
    )
    evaluated = int((~np.isnan(models.run.utilities)).sum())
    told.append(f"The best found is the highest of {count(evaluated)} evaluations on dev.")
    if "confirm" not in found:
        told.append("No part of dev was kept from the search (confirm=0.3 keeps some), so that "
                    "the dev number of the best found has no check but test.")  # fmt: skip
    if "signal" in found:
        told.append(f"The search climbed the signal {found['signal']}; the numbers above are by "
                    "the task's own measure, which also chose among the bests.")  # fmt: skip
    return told
