"""Report sections on result, statistics, cost and configuration, with the parser of log.txt."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from swarm._util.secrets import clean
from swarm._util.terminal import (
    format_count,
    format_duration,
    format_interval,
    format_number,
    format_p_value,
    format_percent,
    format_signed,
    pluralize,
)
from swarm.errors import UserError
from swarm.merging.positions import ROUTE_SEPARATOR, describe_position, group_by_route
from swarm.report.analyses.convergence import objective_label, signal_suffix
from swarm.report.analyses.prompt_efficiency import measure_economy
from swarm.report.document import (
    Chart,
    ReportBlock,
    ReportSection,
    Series,
    Sparkline,
    TableBlock,
    TextBlock,
)
from swarm.report.paired_comparison import (
    PairedComparison,
    answer_values,
    is_binary,
    name_test,
)
from swarm.runs.folder import RunFolder, verify_run_file
from swarm.runs.verdict import (
    CONSTANT,
    EXPERT,
    Statement,
    domain_table,
    format_gain,
    list_caveats,
    state_verdict,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.metrics import Measured

SPLIT_NAMES = {"dev": "dev", "confirm": "held-out part of dev", "test": "test"}


def summarize_verdict(models: PairedComparison) -> Statement:
    """Return the verdict; of a search that has not ended, how far it is."""
    run = models.run
    start, end = models.split_result("starting", "dev"), models.split_result("ending", "dev")
    if start is None or end is None:
        sentence = "no particle has been evaluated on all dev items yet."
        return Statement("open", "Nothing measured yet", sentence)
    if models.verdict:
        return state_verdict(models.verdict, run.path)
    if (signal := run.identity.get("task.signal", "accuracy")) != "accuracy":
        sentence = (
            f"by its signal ({signal}) the search has reached {format_number(end.utility)}; the "
            "best are chosen by the task's metric at the end."
        )
        return Statement("open", "Not judged yet", sentence)
    sentence = (
        f"on {end.n} dev items after {pluralize(len(run.rounds) - 1, 'iteration')}, the best "
        f"found has {format_number(end.utility)} and the best initial expert, {models.expert}, "
        f"{format_number(start.utility)}."
    )
    return Statement("open", "Still running", sentence)


def comparison_table(models: PairedComparison) -> TableBlock | None:
    """Tabulate the best found minus each model that needs no search on test, with the tests.

    Returns:
        One row per model, the highest utility first; `None` without a test.
    """
    rows = []
    verdict = models.verdict
    for one in verdict.alternatives if verdict else ():
        if one.test and one.gain:
            cells = _gain_row(one.label, one.gain)
            rows.append([one.label, format_number(one.test.utility), *cells[1:4]])
    if not rows or verdict is None or not (test := verdict.found.test):
        return None
    items = format_count(test.n)
    header = ["needs no search", f"test, n = {items}", "best found minus it", "95 % interval", "p"]
    return TableBlock("Against each alternative on test", header, rows)


def headline_figures(models: PairedComparison) -> list[tuple[str, str]]:
    """Return short facts for the head of the page, as (label, value)."""
    found = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            found.append(
                (
                    f"{split}, n = {format_count(end.n)}",
                    f"{format_number(start.utility)} → {format_number(end.utility)}",
                )
            )
    if (verdict := models.verdict) and (strongest := verdict.strongest):
        found.append((f"gain over the {strongest.label}", format_gain(verdict, strongest)))
    return found


def start_end_section(models: PairedComparison) -> ReportSection:
    """Build the section that compares start and end."""
    run = models.run
    position = run.positions[models.places["ending"]]
    blocks: list[Any] = [_result_table(models), *_domain_tables(models)]
    if parts := _subtask_table(models):
        blocks.append(parts)
    blocks.append(_result_chart(models))
    blocks.append(
        TextBlock([f"Best found: {describe_position(run.experts, position, run.groups)}."])
    )
    if models.verdict and (vote := models.verdict.vote):
        size, by_size = len(vote.members), vote.dev_by_size
        votes = ", ".join(f"{n}: {format_number(value)}" for n, value in enumerate(by_size, 1))
        blocks.append(TextBlock([f"Vote on dev by number of voters: {votes}; {size} was chosen."]))
    return ReportSection(
        "ends",
        "Start and end",
        "Brackets are 95 % intervals of a single model's score. The dev score of the best "
        "found is the maximum of many and so biased upwards; test was not used by the search.",
        blocks,
    )


def _result_lines(models: PairedComparison) -> Iterator[tuple[str, dict[str, Measured | None]]]:
    """Yield each model's label with its results by split, the best constant answers included."""
    others = models.verdict.alternatives if models.verdict else []
    for one in sorted(others, key=lambda one: one.name != CONSTANT):
        if one.name != EXPERT:
            yield one.label, {"dev": one.dev, "confirm": None, "test": one.test}
    for label, name in models.model_labels.items():
        yield name, {split: models.split_result(label, split) for split in SPLIT_NAMES}
    vote = {split: models.vote_result(split) for split in SPLIT_NAMES}
    if any(vote.values()):
        size = len(models.verdict.vote.members) if models.verdict and models.verdict.vote else 0
        if size > 1:  # a vote of one is the best found
            yield f"vote of the top {size}", vote


def _result_table(models: PairedComparison) -> TableBlock:
    lines = list(_result_lines(models))
    shown = [split for split in SPLIT_NAMES if any(one[split] for _, one in lines)]
    header = ["model"]
    for split in shown:
        items = next(one[split].n for _, one in lines if one[split])  # type: ignore[union-attr]
        header.append(f"{SPLIT_NAMES[split]}, n = {format_count(items)}")
    splits = [split for split in shown if split != "confirm"]
    header += [f"unread on {split}" for split in splits]
    rows: list[list[str | Sparkline]] = []
    for name, one in lines:
        row: list[str | Sparkline] = [name]
        row += [
            format_interval(m.utility, m.interval) if (m := one[split]) else "–" for split in shown
        ]
        row += [format_percent(m.unparsed) if (m := one[split]) else "–" for split in splits]
        rows.append(row)
    return TableBlock(
        "Utilities with 95 % intervals, and the rate of unparsed answers",
        header,
        rows,
    )


def _result_chart(models: PairedComparison) -> Chart:
    """Build a chart with one row per split; the models of a split are slightly offset."""
    lines = list(_result_lines(models))
    splits = [split for split in SPLIT_NAMES if any(one[split] for _, one in lines)]
    series = []
    for index, (name, one) in enumerate(lines):
        known = [(n, m) for n, split in enumerate(splits) if (m := one[split])]
        series.append(
            Series(
                name,
                [m.utility for _, m in known],
                [n + 0.2 * (index - (len(lines) - 1) / 2) for n, _ in known],
                "points",
                labels=[
                    f"{SPLIT_NAMES[splits[n]]}, {format_interval(m.utility, m.interval)}"
                    for n, m in known
                ],
                spans=[m.interval or (m.utility, m.utility) for _, m in known],
            )
        )
    description = "; ".join(f"{one.name}: {', '.join(one.labels)}" for one in series)
    return Chart(
        "ends",
        "Utilities and their 95 % intervals",
        "utility",
        "",
        series,
        description,
        rows=[SPLIT_NAMES[split] for split in splits],
    )


def _subtask_table(models: PairedComparison) -> TableBlock | None:
    """Tabulate the utility of each part of a mixture before and after; `None` without parts."""
    rows: list[list[str]] = []
    for split in ("dev", "test"):
        start, end = models.split_result("starting", split), models.split_result("ending", split)
        if start and end:
            rows += [
                [
                    part,
                    split,
                    format_number(start.parts[part]),
                    format_number(value),
                    format_signed(value - start.parts[part]),
                ]
                for part, value in end.parts.items()
            ]
    header = ["part", "split", models.expert, "best found", "change"]
    return TableBlock("The parts of the mixture", header, rows) if rows else None


def _domain_tables(models: PairedComparison) -> list[TableBlock]:
    """Tabulate utilities by domain on test and dev, for tasks with 2 to 12 domains."""
    found = domain_table(models.verdict) if models.verdict else None
    caption = "Utilities by domain; (!): one answer throughout"
    return [TableBlock(caption, found[0], [list(row) for row in found[1]])] if found else []


def statistics_section(models: PairedComparison) -> ReportSection:
    """Build the section on which conclusions the data supports."""
    rows = [_gain_row(name, one) for name, one in _measured_gains(models)]
    blocks: list[Any] = []
    if rows:
        header = ["on", "gain", "95 % interval", "p", "items"]
        blocks.append(TableBlock("Best found less best initial expert, item by item", header, rows))
    if (answers := models.paired_answers()) and is_binary(answers[1]) and is_binary(answers[2]):
        blocks.append(_fourfold_table(models, *answers))
    caveats = list_caveats(models.verdict) if models.verdict else []
    blocks.append(TextBlock([*caveats, *_describe_method(models)], listed=True))
    return ReportSection(
        "statistics",
        "Uncertainty",
        "The paired test uses only items on which the two differ; p is the probability of a "
        "difference this large if neither were better. Below 0.05 it counts as a gain.",
        blocks,
    )


def _measured_gains(models: PairedComparison) -> Iterator[tuple[str, PairedTest]]:
    if verdict := models.verdict:
        if verdict.held_out:
            yield SPLIT_NAMES["confirm"], verdict.held_out.gain
        if gain := verdict.start_model.gain:
            yield SPLIT_NAMES["test"], gain


def _gain_row(name: str, gain: PairedTest) -> list[str]:
    return [
        name,
        format_signed(gain.difference),
        _format_gain_interval((gain.low, gain.high)),
        format_p_value(gain.p),
        format_count(gain.n),
    ]


def _is_zero_width(interval_: Sequence[float]) -> bool:
    """Return whether an interval is (0, 0), as when no resampled item differs."""
    return tuple(interval_) == (0.0, 0.0)


def _format_gain_interval(interval_: Sequence[float]) -> str:
    """Format the 95 % interval of a difference."""
    if _is_zero_width(interval_):
        return "(no item differs)"
    low, high = interval_
    return f"[{format_signed(low)}, {format_signed(high)}]"


def _fourfold_table(models: PairedComparison, split: str, before: Any, after: Any) -> TableBlock:
    start, end = answer_values(before) == 1, answer_values(after) == 1
    cells = [
        (both.sum(), lone.sum())
        for both, lone in ((start & end, start & ~end), (~start & end, ~start & ~end))
    ]
    rows = [
        [f"{models.expert} {word}", str(a), str(b)]
        for word, (a, b) in zip(("right", "wrong"), cells, strict=True)
    ]
    return TableBlock(
        f"Items of {split}, counted", ["", "best found right", "best found wrong"], rows
    )


def _describe_method(models: PairedComparison) -> list[str]:
    verdict, answers = models.verdict, models.paired_answers()
    sentences = []
    if answers and answers[0] == "test":
        sentences.append(f"The paired test on test is {name_test(*answers[1:])}.")
    sentences.append(
        "Intervals of right-or-wrong answers are Wilson's, those of other utilities are "
        "bootstrapped over items, and that of a difference inverts its test; they cover the "
        "sampling of items, not the seed: another seed is another search."
    )
    evaluated = int((~np.isnan(models.run.utilities)).sum())
    sentences.append(
        f"The best found is the highest of {format_count(evaluated)} evaluations on dev."
    )
    if verdict is None or verdict.held_out is None:
        sentences.append(
            "No part of dev was held out from the search (e.g. confirm=0.3), so only test "
            "checks the dev score of the best found."
        )
    if verdict and verdict.signal:
        sentences.append(
            f"The search maximized the signal {verdict.signal}; the numbers above are by the "
            "task's metric, which also chose among the bests."
        )
    return sentences


LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \w+ (.*)")
VERSIONS_LINE = re.compile(r"versions: (.*)")
SEARCH_START_LINE = re.compile(r"search (begins|resumes)")
TOKENS_LINE = re.compile(r"iteration (\d+): .*, tokens (\d+)")
METRICS_LINE = re.compile(r"ending_best_validation_utility: ")


@dataclass(slots=True)
class RunStart:
    """One start of the search, from its first log line to the last before the next start.

    Attributes:
        versions: Versions of Python and the packages; empty if not logged.
        searching: Whether the log reports that the search began or resumed.
        measured: Whether the final metrics were logged.
        tokens: Tokens read and written on dev, by iteration.
    """

    began: datetime
    ended: datetime
    versions: str = ""
    searching: bool = False
    measured: bool = False
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.ended - self.began).total_seconds()


def read_starts(run: RunFolder) -> list[RunStart]:
    """Read the starts from log.txt, without those that only displayed a finished search again."""
    try:
        text = (run.path / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found: list[RunStart] = []
    for line in text.split("\n"):
        if parsed := LOG_LINE.match(line):
            _add_log_line(found, datetime.fromisoformat(parsed[1]), parsed[2])
    # After the metrics, a start without new metrics only displayed the finished search.
    over = next((n for n, one in enumerate(found) if one.measured), len(found))
    return [one for n, one in enumerate(found) if n <= over or one.measured]


def _add_log_line(found: list[RunStart], time: datetime, words: str) -> None:
    """Add a log line to the start it belongs to."""
    versions, begins = VERSIONS_LINE.match(words), SEARCH_START_LINE.match(words)
    # Older logs have no line of versions; there `search begins` is the first line of a start.
    if versions or (begins and (not found or found[-1].searching)):
        found.append(RunStart(time, time, versions[1] if versions else ""))
    if not found:
        return
    last = found[-1]
    last.ended = time
    last.searching |= bool(begins)
    last.measured |= bool(METRICS_LINE.match(words))
    if tokens := TOKENS_LINE.match(words):
        last.tokens[tokens[1]] = int(tokens[2])


FINAL_STAGES = {
    "test": "on test, at the end",
    "judged": "on dev by the task's metric, at the end",
    "confirm": "on the held-out part of dev, at the end",
    "again": "on dev once more, for the noise floor",
}
"""Purpose of the prompts in answers/KIND_*.json.gz, by kind."""


def cost_section(models: PairedComparison) -> ReportSection:
    """Build the section on prompts, time and tokens, and on the savings by racing and caching."""
    run = models.run
    spent = measure_economy(run)
    evaluated = int(spent["prompts"][-1])
    rows = [["on dev, by the search", format_count(evaluated)], *_final_rows(run)]
    blocks: list[Any] = [
        _economy_chart(run, spent),
        TableBlock("Prompts evaluated", ["prompts", "how many"], rows),
        TableBlock("Prompts saved", ["prompts", "how many"], _saved_rows(run, spent, evaluated)),
    ]
    if timed := _time_rows(run, evaluated):
        blocks.append(TableBlock("Time and tokens", ["what", "how much"], timed))
    if taken := run.verdict.scoring_costs if run.verdict else {}:
        blocks.append(
            TableBlock(
                "Cost of scoring",
                ["measure", "new texts", "repeated texts"],
                [
                    [name, format_number(n["first"]), format_number(n["again"])]
                    for name, n in taken.items()
                ],
            )
        )
    better = spent["improvements"]
    each = spent["prompts_per_improvement"]
    if each is not None:
        blocks.append(
            TextBlock(
                [
                    f"The best rose {pluralize(better, 'time')} after the start, "
                    f"once every {format_count(each)} prompts."
                ]
            )
        )
    return ReportSection(
        "cost",
        "Cost",
        "A prompt is one item evaluated at one position. The curve starts at the cost of "
        "evaluating all initial particles; where it is flat, further prompts brought no gain.",
        blocks,
    )


def _economy_chart(run: RunFolder, spent: dict[str, Any]) -> Chart:
    """Plot the best utility so far against prompts."""
    prompts, best = spent["prompts"], spent["best"]
    labels = [f"iteration {n}" for n in range(len(best))]
    return Chart(
        "budget",
        "Gain by prompts",
        "prompts on dev",
        objective_label(run),
        [Series("best so far", prompts, best, "steps", "strong", labels)],
        f"{format_count(prompts[-1])} prompts raised the best from {format_number(best[0])} to "
        f"{format_number(best[-1])}"
        f"{signal_suffix(run)}",
    )


def _final_rows(run: RunFolder) -> list[list[str]]:
    rows: list[list[str]] = []
    # Verify first: the glob below cannot notice a missing file.
    verify_run_file(run.path / "answers")
    for kind, name in FINAL_STAGES.items():
        paths = list((run.path / "answers").glob(f"{kind}_*.json.gz"))
        if evaluated := sum(len(run.load_packed(path)) for path in paths):
            rows.append([name, format_count(evaluated)])
    return rows


def _saved_rows(run: RunFolder, spent: dict[str, Any], evaluated: int) -> list[list[str]]:
    """Return rows of prompts saved on dev, by cause."""
    scored = sum(n or 0 for entry in run.rounds for n in entry.get("items_scored", ()))
    shared = sum(entry.get("prompts_shared", 0) for entry in run.rounds)
    rows = [
        ["racing: stopped, as it could no longer win", spent["raced"]],
        ["cache: position evaluated before", max(0, scored - evaluated)],
        ["dropping: moved without an evaluation", spent["dropped"]],
    ]
    if spent["beyond_budget"]:
        rows.append(["budget: exhausted", spent["beyond_budget"]])
    if shared:
        rows.append(["shared: evaluated by another search (counted as evaluated above)", shared])
    return [[name, format_count(saved)] for name, saved in rows]


def _time_rows(run: RunFolder, evaluated: int) -> list[list[str]]:
    """Return rows on time and tokens from the log; empty without a log."""
    seconds, times, tokens = read_log(run)
    if not times:
        return []
    time = format_duration(round(seconds))
    rows = [["time from start to end, without pauses between starts", time]]
    if times > 1:
        rows.append(["number of starts", str(times)])
    if seconds > 0:
        rows.append(
            [
                "prompts on dev per second, everything included",
                format_number(evaluated / seconds, 1),
            ]
        )
    if tokens:
        rows.append(["tokens read and generated on dev", format_count(tokens)])
    return rows


def read_log(run: RunFolder) -> tuple[float, int, int]:
    """Return seconds at work, number of starts and tokens on dev; 0 where unknown."""
    found = read_starts(run)
    tokens = {number: n for one in found for number, n in one.tokens.items()}
    return sum(one.seconds for one in found), len(found), sum(tokens.values())


MAX_EXPERTS_NAMED = 12
"""Maximum number of module groups listed by name; of more, the first ones and the last."""


def configuration_section(models: PairedComparison) -> ReportSection:
    """Build the section of settings, and of the digests that identify the search."""
    run = models.run
    own_experts, made = run.experts[: run.expert_count], run.experts[run.expert_count :]
    words = [f"{len(own_experts)} experts: {', '.join(own_experts)}."]
    if made:
        words.append(f"{pluralize(len(made), 'more row')}, added by the pool: {', '.join(made)}.")
    routes = group_by_route(run.groups)
    if len(routes) > 1:
        kinds = ", ".join(routes)
        words.append(f"At most {len(routes)} kinds of prompts with separate coefficients: {kinds}.")
    named = [run.groups[i].rpartition(ROUTE_SEPARATOR)[2] for i in next(iter(routes.values()))]
    if (count := len(named)) > 1:
        if count > MAX_EXPERTS_NAMED:
            named = [*named[: MAX_EXPERTS_NAMED - 2], "...", named[-1]]
        words.append(f"{count} groups of modules with separate coefficients: {', '.join(named)}.")
    blocks: list[ReportBlock] = [TextBlock([sentence]) for sentence in words]
    names = ("seed", "base weights", "pool weights", "task items")
    rows = [[name, str(run.identity[name])] for name in names if name in run.identity]
    rows += [["versions", version] for version in _list_versions(run)]
    blocks.append(
        TableBlock("What it ran on", ["what", "configuration (weights and items as digests)"], rows)
    )
    try:
        config = clean(run.config)
    except UserError:
        config = run.identity
    keys = [[key, format_setting(value)] for key, value in flatten_keys(config)]
    table = TableBlock("Configuration", ["key", "value"], keys)
    return ReportSection(
        "setup",
        "Configuration",
        "The same keys, seed, weights and items give the same search; python -m swarm.search "
        "accepts these keys.",
        blocks,
        {f"All {len(keys)} keys": [table]},
    )


def flatten_keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration as (dotted key, value); a router is "auto"."""
    for name, value in tree.items():
        here = f"{path}.{name}" if path else str(name)
        router = here == "pool.routes" and isinstance(value, Mapping)
        if isinstance(value, Mapping) and value and not router:
            yield from flatten_keys(value, here)
        else:
            yield here, "auto" if router else value


def format_setting(value: object) -> str:
    """Format a value in command-line syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(format_setting, value))}]"
    return str(value)


def _list_versions(run: RunFolder) -> list[str]:
    """Return the distinct package versions found in the log."""
    return list(dict.fromkeys(one.versions for one in read_starts(run) if one.versions))
