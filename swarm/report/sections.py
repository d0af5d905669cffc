"""The sections of a report: result, course of the search, uncertainty, cost, configuration.

Each function returns the blocks of a section, empty if it does not apply; `swarm.report.page` has
their titles, and page.html.j2 explains how to read them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from swarm._util.secrets import clean
from swarm._util.terminal import (
    format_count,
    format_interval,
    format_number,
    format_p_value,
    format_percent,
    format_signed,
    pluralize,
)
from swarm.errors import UserError
from swarm.merging.positions import describe_position, group_by_route, route_means
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.report.analyses import (
    best_positions,
    measure_economy,
    measure_emergence,
    measure_trajectory,
    objective_label,
    rank_of_origin,
    search_signal,
)
from swarm.report.document import COLOURS, Block, Chart, ListBlock, Series, TableBlock
from swarm.report.paired_comparison import PairedComparison, name_test
from swarm.runs.folder import RunFolder, verify_run_file
from swarm.runs.overview import LEGEND, Overview
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.verdict import (
    Statement,
    describe_selection,
    domain_table,
    format_gain,
    format_measured,
    list_caveats,
    list_controls,
    result_table,
    state_verdict,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.metrics import Measured

SPLITS = {"dev": "dev", "confirm": "held-out part of dev", "test": "test"}

MAX_PAIRS = 6
"""Maximum number of charts of two objectives."""

FINAL_STAGES = {
    "test": "on test, at the end",
    "judged": "on dev by the task's metric, at the end",
    "confirm": "on the held-out part of dev, at the end",
    "again": "on dev once more, for the noise floor",
}
"""Purpose of the prompts in answers/KIND_*.json.gz, by kind."""


def summarize_verdict(models: PairedComparison) -> Statement:
    """Return the verdict; of a search that has not ended, how far it is."""
    run, (start, end) = models.run, models.results("dev")
    if start is None or end is None:
        sentence = "no mixture has been evaluated on all dev items yet."
        return Statement("open", "Nothing measured yet", sentence)
    if models.verdict:
        return state_verdict(models.verdict, run.path)
    signal = search_signal(run)
    by = f" by the signal ({signal}); the task's metric chooses at the end" if signal else ""
    sentence = (
        f"on {end.n} dev items after {pluralize(len(run.rounds) - 1, 'round')}, the best "
        f"found has {format_number(end.utility)} and the best expert, {models.expert}, "
        f"{format_number(start.utility)}{by}."
    )
    return Statement("open", "Still running", sentence)


def overview_blocks(models: PairedComparison) -> list[Block]:
    """Show what each expert has on each kind of items."""
    if (found := Overview.from_state(models.run.state)) is None:
        return []
    caption = f"What the adapters have, on the dev items ({LEGEND})"
    return [TableBlock(caption, *found.table()), *found.sentences()]


def model_table(models: PairedComparison) -> TableBlock | None:
    """Tabulate all models on dev and test, and the gain of the best found; `None` while it runs."""
    if models.verdict is None:
        return None
    return TableBlock("Utilities and gains with 95 % intervals", *result_table(models.verdict))


def headline_figures(models: PairedComparison) -> list[tuple[str, str]]:
    """Return short facts for the head of the page, as (label, value)."""
    found = []
    for split in ("dev", "test"):
        start, end = models.results(split)
        if start and end:
            values = f"{format_number(start.utility)} → {format_number(end.utility)}"
            found.append((f"{split}, n = {format_count(end.n)}", values))
    if (verdict := models.verdict) and (strongest := verdict.strongest):
        found.append((f"gain over the {strongest.label}", format_gain(verdict, strongest)))
    return found


def start_end_blocks(models: PairedComparison) -> list[Block]:
    """Compare start and end, and all alternatives."""
    run, verdict = models.run, models.verdict
    position = run.positions[models.end]
    blocks: list[Block] = [table] if (table := model_table(models)) else []
    if verdict and (domains := domain_table(verdict)):
        blocks.append(TableBlock("Utilities by domain; (!): one answer throughout", *domains))
    parts: list[list[str]] = []
    for split in ("dev", "test"):
        start, end = models.results(split)
        if start and end:
            for part, after in end.parts.items():
                numbers = map(format_number, (start.parts[part], after))
                parts.append([part, split, *numbers, format_signed(after - start.parts[part])])
    if parts:
        header = ["part", "split", models.expert, "best found", "change"]
        blocks.append(TableBlock("The parts of the mixture", header, parts))
    label = f"{label}, " if (label := run.position_label(models.end)) else ""
    blocks.append(f"Best found: {label}{describe_position(run.experts, position, run.groups)}.")
    if verdict and (vote := verdict.vote):
        votes = [f"{n}: {format_number(value)}" for n, value in enumerate(vote.dev_by_size, 1)]
        blocks.append(
            f"Vote on dev by number of voters: {', '.join(votes)}; {len(vote.members)} was chosen."
        )
    return blocks


def front_blocks(models: PairedComparison) -> list[Block]:
    """Show the front of a task with several objectives."""
    run, found = models.run, models.run.front
    if found is None or len(found.names) < 2:
        return []
    pairs = list(combinations(found.names, 2))[:MAX_PAIRS]
    volumes = found.hypervolume_history
    volume = Chart(
        "Hypervolume of the front",
        "round",
        "hypervolume on dev",
        [Series("hypervolume", range(len(volumes)), volumes, "steps", "strong")],
        f"From {volumes[0]:.4g} to {volumes[-1]:.4g}",
    )
    charts = [objective_chart(run, found, x, y) for x, y in pairs]
    return [*charts, volume, front_table(run, found), ListBlock(_describe_front(found))]


def objective_chart(run: RunFolder, found: ParetoFront, x: str, y: str) -> Chart:
    """Plot two objectives of all measured positions, with the front highlighted."""
    measured = found.measured_indices
    across, up = (found.objective_values[:, found.names.index(name)] for name in (x, y))
    front = [measured.index(place) for place in found.front_indices]
    experts = {
        n: run.experts[i]
        for n, (t, i) in enumerate(measured)
        if not t and i < found.experts and n not in front
    }

    def draw(name: str, rows: Sequence[int], weight: str, labels: Sequence[str] = ()) -> Series:
        return Series(name, across[list(rows)], up[list(rows)], "points", weight, labels)

    points = [f"point {n}" for n in range(len(front))]
    series = [
        draw("front on dev", front, "strong", points),
        draw("other experts on dev", list(experts), "normal", list(experts.values())),
    ]
    if tested := [one for one in found.to_dict(run.state)["points"] if "test_parts" in one]:
        right, top = ([p["test_parts"][name]["utility"] for p in tested] for name in (x, y))
        labels = [f"point {point['point']} on test" for point in tested]
        series.append(Series("front on test", right, top, "points", "normal", labels))
    if found.base_index is not None:
        series.append(draw("base model on dev", [measured.index(found.base_index)], "normal"))
    series.append(draw("all others", range(len(across)), "faint"))
    described = "; ".join(
        f"point {n}: {format_number(across[place])}, {format_number(up[place])}"
        for n, place in enumerate(front)
    )
    marks = [(f"bound of {y}", found.constraint_bounds[y])] if y in found.constraint_bounds else []
    return Chart(f"{x} and {y}", x, y, series, f"On dev, {x} and {y}: {described}", marks)


def front_table(run: RunFolder, found: ParetoFront) -> TableBlock:
    """Build a table of the front's points: objectives on dev and, where evaluated, on test."""
    points = found.to_dict(run.state)["points"]
    tested: dict[str, Any] = next((p["test_parts"] for p in points if "test_parts" in p), {})
    dev = zip(found.names, found.items, strict=True)
    header = ["point", *(f"{name}, dev, n = {items}" for name, items in dev)]
    header += [f"{name}, test, n = {one['n']}" for name, one in tested.items()]
    rows = []
    for point in points:
        row = [str(point["point"]), *map(format_number, point["dev"].values())]
        mine = point.get("test_parts", {})
        row += [format_measured(Measured(**mine[name])) if mine else "–" for name in tested]
        rows.append([*row, point["words"]])
    caption = "Points of the front; brackets are 95 % intervals"
    return TableBlock(caption, [*header, "made of"], rows)


def _describe_front(found: ParetoFront) -> list[str]:
    worst = zip(found.objectives, found.reference_point, strict=True)
    reference = ", ".join(f"{name} {format_number(value)}" for name, value in worst)
    points = pluralize(len(found.front_indices), "point")
    lines = [
        f"{points} of {len(found.measured_indices)} measured mixtures. The worst of the experts "
        f"in each objective: {reference}."
    ]
    for name, bound in found.constraints.items():
        least = "not known yet"
        if name in found.constraint_bounds:
            whose = " (the base model's)" * (bound == BASE_BOUND)
            least = format_number(found.constraint_bounds[name]) + whose
        lines.append(f"Constraint: {name} at least {least} on dev.")
    if found.constraint_violations.min() > 0:
        lines.append(
            "No mixture meets the constraints: the front has those with the smallest violation, "
            "and its hypervolume is 0."
        )
    return lines


def main_charts(models: PairedComparison) -> list[Chart]:
    """Return the three charts of every search: the best so far, every mixture, and the shares."""
    run, label = models.run, objective_label(models.run)
    best, start = run.best_so_far(), float(run.utilities[models.start])
    rounds = pluralize(len(best) - 1, "round")
    described = f"From {format_number(best[0])} to {format_number(best[-1])} in {rounds}"
    series = [Series("best so far", range(len(best)), best, "steps", "strong")]
    marks = [("best expert", start)] if np.isfinite(start) else []
    chart = Chart("Best so far", "round", label, series, described, marks)
    return [chart, _particle_chart(models), _coefficient_chart(run)]


def progress_blocks(models: PairedComparison) -> list[Block]:
    """Show where the best particle began, and how far apart the particles are."""
    run, blocks = models.run, list[Block]()
    if signal := search_signal(run):
        blocks.append(
            f"The charts have the signal ({signal}) that the search maximized; the verdict and the "
            "tables are by the task's metric."
        )
    if np.isfinite(run.utilities[run.find_best()]):
        began = rank_of_origin(run)
        blocks.append(
            f"The best at the end, number {began['particle']}, started as "
            f"{began['start_kind']} at rank {began['rank']:g} of {began['of']}."
        )
    found = measure_trajectory(run)
    apart, outside = found["diversity"], found["outside"]
    spread = Series("mean distance", np.arange(len(apart)), apart, weight="strong")
    ends = f"From {format_number(apart[0])} to {format_number(apart[-1])}"
    blocks.append(
        Chart("Distance from the swarm's middle", "round", "mean distance", [spread], ends)
    )
    blocks.append(
        "Outside the experts' hull (a coefficient below 0, or a sum other than 1) were "
        f"{format_percent(outside[0])} of the mixtures at the start and "
        f"{format_percent(outside[-1])} at the end."
    )
    return blocks


def _particle_chart(models: PairedComparison) -> Chart:
    run, x = models.run, np.arange(len(models.run.utilities))
    expert, best = (index[1] for index in (models.start, models.end))
    named = {expert: (f"number {expert}, began as {models.expert}", "normal")}
    named[best] = f"number {best}, best", "strong"
    series = []
    for i in (best, *(i for i in range(run.particles) if i != best)):
        name, weight = named.get(i, (f"number {i}", "faint"))
        series.append(Series(name, x, run.utilities[:, i], weight=weight))
    known = run.utilities[~np.isnan(run.utilities)]
    described = "None was evaluated"
    if len(known):
        low, high = map(format_number, (known.min(), known.max()))
        described = f"They are between {low} and {high}"
    title = f"All {run.particles} mixtures of each round"
    return Chart(title, "round", objective_label(run), series, described)


def coefficient_blocks(models: PairedComparison) -> list[Block]:
    """Show the experts' coefficients in the best, where groups or kinds have their own."""
    run = models.run
    position = run.positions[models.end]
    values, kinds, caption = position.reshape(len(run.groups), -1), run.groups, "group of modules"
    if len(group_by_route(kinds)) > 1:
        kinds, values = route_means(kinds, position.tolist())
        caption = "kind of prompt (means over the groups of modules)"
    if (values == values[:1]).all():
        return []
    caption = f"Coefficients of the best found, by {caption}"
    return [coefficient_table(caption, run.experts, kinds, values)]


def coefficient_table(
    caption: str, experts: Sequence[str], groups: Sequence[str], values: np.ndarray
) -> TableBlock:
    """Tabulate coefficients [G, K], the longer side downwards."""
    names, header = experts, ["expert", *(groups if len(groups) > 1 else ["coefficient"])]
    values = values.T
    if len(groups) > len(experts):
        names, header, values = groups, ["group", *experts], values.T
    rows = [[name, *(f"{c:.4f}" for c in row)] for name, row in zip(names, values, strict=True)]
    return TableBlock(caption, header, rows)


def _coefficient_chart(run: RunFolder) -> Chart:
    """Plot the coefficients of the best so far; the largest ones are coloured."""
    trail = best_positions(run).reshape(len(run.rounds), len(run.groups), len(run.experts))
    values = trail.mean(axis=1)
    order = np.argsort(-np.abs(trail).max(axis=(0, 1)), kind="stable")
    # Repeated values are reduced to their ends, so that long searches give short lines.
    held = (np.diff(values, axis=0) == 0).all(axis=1)
    kept = np.flatnonzero(np.concatenate([[True], ~held[:-1], [True]])) if len(held) else [0]
    weights = ["normal"] * len(COLOURS) + ["faint"] * len(order)
    series = [
        Series(run.experts[k], kept, values[kept, k], "steps", weight)
        for k, weight in zip(order, weights, strict=False)
    ]
    largest = (f"{run.experts[k]} {format_signed(values[-1, k], 2)}" for k in order[:5])
    described = f"At the end {', '.join(largest)}"
    title = "What the best so far is made of"
    if len(run.groups) > 1:
        title += ", means over the groups of modules"
    return Chart(title, "round", "coefficient", series, described, [("", 0.0)])


def emergence_blocks(models: PairedComparison) -> list[Block]:
    """Show the items that are right only at the end, if items are right or wrong."""
    try:
        found = measure_emergence(models.run)
    except UserError:  # no answers of the start yet
        return []
    if not found["applies"]:
        return []
    rows = []
    for name, one in found["shares"].items():
        cells = ["–", "–", "–"]
        if one:
            (observed, low, high, _), (chance, *ends) = one["observed"], one["chance"]
            cells = [format_interval(observed, (low, high)), format_interval(chance, ends)]
            cells.append(format_p_value(one["p_above_chance"]))
        rows.append([name, *cells])
    mirror = found["mirror"]
    words = (
        f"Of {found['items']} dev items, {mirror['more_right']} are right more often at the end, "
        f"{mirror['fewer_right']} less often; {mirror['emerged']} emerged, and "
        f"{mirror['vanished']} that some particle got right now none does."
    )
    header = ["share of items", "observed, 95 %", "by chance, 95 %", "p"]
    return [TableBlock("Correctness emergence (Model Swarms, figure 2)", header, rows), words]


def statistics_blocks(models: PairedComparison) -> list[Block]:
    """Show which conclusions the data supports."""
    verdict, rows = models.verdict, []
    if verdict and (kept := verdict.held_out):
        rows.append([SPLITS["confirm"], *_format_test(kept.gain), format_count(kept.gain.n)])
    if verdict and (gain := verdict.start_model.gain):
        rows.append([SPLITS["test"], *_format_test(gain), format_count(gain.n)])
    blocks: list[Block] = []
    if rows:
        header = ["on", "gain", "95 % interval", "p", "items"]
        blocks.append(TableBlock("Best found less best expert, item by item", header, rows))
    lines = [*list_caveats(verdict), *list_controls(verdict, models.run.path)] if verdict else []
    answers = models.paired_answers()
    if answers and answers[0] == "test":
        lines.append(f"The paired test on test is {name_test(*answers[1:])}.")
    evaluated = format_count((~np.isnan(models.run.utilities)).sum())
    lines.append(f"The best found is the highest of {evaluated} evaluations on dev.")
    if verdict is None or verdict.held_out is None:
        lines.append(
            "No part of dev was held out from the search (e.g. confirm=0.3), so only test "
            "checks the dev score of the best found."
        )
    if verdict and verdict.signal:
        lines.append(
            f"The search maximized the signal {verdict.signal}; the numbers above are by the "
            "task's metric, which also chose among the bests."
        )
    return [*blocks, ListBlock(lines)]


def _format_test(gain: PairedTest) -> list[str]:
    """Return difference, interval and p of a paired test."""
    ends = f"[{format_signed(gain.low)}, {format_signed(gain.high)}]"
    if not (gain.low or gain.high):  # (0, 0) if no resampled item differs
        ends = "(no item differs)"
    return [format_signed(gain.difference), ends, format_p_value(gain.p)]


def cost_blocks(models: PairedComparison) -> list[Block]:
    """Show the prompts, those that racing and caching saved, and the cost of scoring."""
    run = models.run
    spent = measure_economy(run)
    evaluated = int(spent["prompts"][-1])
    scored = sum(n or 0 for entry in run.rounds for n in entry.get("items_scored", ()))
    shared = sum(entry.get("prompts_shared", 0) for entry in run.rounds)
    selection = run.state.get("selection")
    counts = {"on dev, to choose the experts": selection["prompts"] if selection else 0}
    counts["on dev, by the search"] = evaluated
    # Verify first: the glob below cannot notice a missing file.
    verify_run_file(run.path / "answers")
    for kind, purpose in FINAL_STAGES.items():
        paths = (run.path / "answers").glob(f"{kind}_*.json.gz")
        counts[purpose] = sum(len(run.load_packed(path)) for path in paths)
    saved = {
        "racing: stopped, as it could no longer win": spent["raced"],
        "cache: position evaluated before": max(0, scored - evaluated),
        "dropping: moved without an evaluation": spent["dropped"],
        "budget: exhausted": spent["beyond_budget"],
        "shared: evaluated by another search (counted as evaluated above)": shared,
    }
    blocks: list[Block] = [
        TableBlock(f"Prompts {kind}", ["prompts", "how many"], rows)
        for kind, found in (("evaluated", counts), ("saved", saved))
        if (rows := [[name, format_count(count)] for name, count in found.items() if count])
    ]
    if taken := run.verdict.scoring_costs if run.verdict else {}:
        rows = [
            [name, *(format_number(n[k]) for k in ("first", "again"))] for name, n in taken.items()
        ]
        header = ["measure", "new texts", "repeated texts"]
        blocks.append(TableBlock("Cost of scoring", header, rows))
    if (each := spent["prompts_per_improvement"]) is not None:
        times = pluralize(spent["improvements"], "time")
        blocks.append(
            f"The best rose {times} after the start, once every {format_count(each)} prompts."
        )
    return blocks


def configuration_blocks(models: PairedComparison) -> list[Block]:
    """Show the settings, and the digests that identify the search."""
    run, routes = models.run, group_by_route(models.run.groups)
    own, groups = run.expert_count, next(iter(routes.values()))
    lists = {
        "experts": run.experts[:own],
        "rows added by the pool": run.experts[own:],
        "kinds of prompts": [name for name in routes if name],
        "groups of modules": [run.groups[i].rpartition(" / ")[2] for i in groups],
    }
    selection = run.state.get("selection")
    rows = [["choice of the experts", describe_selection(selection)]] if selection else []
    for name, found in lists.items():
        shown = found if len(found) <= 12 else [*found[:10], "...", found[-1]]
        if found:
            rows.append([name, f"{len(found)}: {', '.join(shown)}"])
    names = ("seed", "base weights", "pool weights", "task items")
    rows += [[name, str(run.identity[name])] for name in names if name in run.identity]
    for one in run.state.get("versions", ()):
        packages = ", ".join(f"{name} {number}" for name, number in one["packages"].items())
        rows.append([f"versions from iteration {one['from_iteration']} on", packages])
    header = ["what", "configuration (weights and items as digests)"]
    try:
        config = clean(run.config)
    except UserError:
        config = run.identity
    keys = [
        [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        for key, value in flatten_keys(config)
    ]
    return [
        TableBlock("What it ran on", header, rows),
        TableBlock("Configuration", ["key", "value"], keys),
    ]


def flatten_keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration as (dotted key, value); a router is "auto"."""
    for name, value in tree.items():
        if f"{path}{name}" == "pool.routes" and isinstance(value, Mapping):
            yield "pool.routes", "auto"
        elif isinstance(value, Mapping) and value:
            yield from flatten_keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
