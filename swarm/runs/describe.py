"""Text descriptions of search results: positions, comparisons, warnings and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarm._util.terminal import format_p, pluralize
from swarm.tasks.metrics import KIND_PREFIX
from swarm.tasks.parsing import PARSER_MEANINGS

MAX_DOMAINS = 12
"""Maximum number of domains in a table; with more, only the metrics contain the numbers."""

MAX_LISTED = 5
"""Maximum number of domains named in a sentence."""

MAX_SHARES = 2
"""Number of experts named for each route of prompts."""

MIN_UNREAD = 0.1
"""From this share on, unread answers are mentioned below the tables."""

MODEL_LABELS = ("best initial expert", "best found")


ROUTE_SEPARATOR = " / "
"""Between the names of a route of prompts and of a group of modules."""


def group_by_route(groups: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of the groups of each route; one without a name if there are no routes."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        route, separator, _ = name.partition(ROUTE_SEPARATOR)
        found.setdefault(route if separator else "", []).append(index)
    return found


def route_means(groups: Sequence[str], position: Sequence[float]) -> tuple[list[str], np.ndarray]:
    """Return the routes' names, and the mean coefficients [R, K] over each route's groups.

    Routes with equal coefficients are one, such as "dates and 2 more".

    Args:
        groups: The names of the R * G groups.
        position: [R * G * K].
    """
    rows = np.reshape(np.asarray(position, dtype=np.float64), (len(groups), -1))
    alike: dict[bytes, list[str]] = {}
    means = {}
    for name, indices in group_by_route(groups).items():
        key = rows[indices].tobytes()
        alike.setdefault(key, []).append(name)
        means[key] = rows[indices].mean(axis=0)
    names = [one[0] + f" and {len(one) - 1} more" * (len(one) > 1) for one in alike.values()]
    return names, np.array(list(means.values()))


def describe_position(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str] = ("all",)
) -> str:
    """Describe a position, the largest share first: "0.41 cot + 0.33 lima - 0.08 sharegpt".

    Args:
        experts: The K names.
        position: [G * K], group by group.
        groups: The G names; up to three are described individually, more by their mean. Routes of
            prompts are described individually, by the largest shares of each.
    """
    rows = np.reshape(np.asarray(position, dtype=np.float64), (len(groups), len(experts)))
    if len(rows) == 1 or len({tuple(row) for row in rows}) == 1:
        return _describe_coefficients(experts, rows[0])
    routes = describe_by_route(experts, position, groups)
    if len(routes) > 1:
        described = "; ".join(f"{name}: {words}" for name, words in routes.items())
        each = len(groups) // len(group_by_route(groups))
        return described + (f" (means of {each} groups)" if each > 1 else "")
    if len(rows) <= 3:
        return "; ".join(
            f"{name}: {_describe_coefficients(experts, row)}"
            for name, row in zip(groups, rows, strict=True)
        )
    return f"{_describe_coefficients(experts, rows.mean(axis=0))} (mean of {len(rows)} groups)"


def describe_by_route(
    experts: Sequence[str], position: Sequence[float], groups: Sequence[str]
) -> dict[str, str]:
    """Describe a position by the largest shares of each route of prompts.

    Returns:
        Name of the route -> "1.00 rooms - 0.08 logic"; means where it has several groups.
    """
    routes, means = route_means(groups, position)
    return {
        name: _describe_coefficients(experts, row, MAX_SHARES)
        for name, row in zip(routes, means, strict=True)
    }


def _describe_coefficients(
    experts: Sequence[str], row: np.ndarray, limit: int | None = None
) -> str:
    shares = sorted(zip(row.tolist(), experts, strict=True), key=lambda pair: -abs(pair[0]))
    shares = shares[:limit]
    words = ""
    for share, name in shares:
        if abs(share) >= 0.005:
            sign = ("- " if share < 0 else "") if not words else (" - " if share < 0 else " + ")
            words += f"{sign}{abs(share):.2f} {name}"
    return words or "no expert"


def describe_difference(
    gain: float, interval: Sequence[float], p: float, items: int, of: str, points: bool
) -> str:
    """Describe in one sentence whether a difference is distinguishable from chance.

    Args:
        gain, interval, p, items: See `swarm.stats.significance.PairedTest`.
        of: Description of the items.
        points: Utilities are shares, reported in points (hundredths).
    """
    scale, unit = (100.0, " points") if points else (1.0, "")
    low, high = (f"{scale * end:+.3g}" for end in interval)
    if not gain and not any(interval):
        return f"No difference: none of {items} {of} differs."
    kind = "gain" if gain >= 0 else "loss"
    chance = "is" if p < 0.05 else "is not"
    return (
        f"The {kind} of {scale * abs(gain):.3g}{unit} on {items} {of} {chance} distinguishable "
        f"from chance ({format_p(p)}; 95 % interval {low} to {high})."
    )


def describe_constant_answers(found: Mapping[str, Any]) -> str:
    """Describe the best constant answers by domain: "connectivity: No, shortest_path: 1".

    Args:
        found: Result of `swarm.tasks.metrics.ConstantAnswers.summarize_splits`.
    """
    answers = found["by_domain"]["answers"]
    different = set(answers.values())
    if len(different) == 1:
        return quote_answer(different.pop())
    parts = [f"{shorten_text(domain)}: {quote_answer(one)}" for domain, one in answers.items()]
    more = len(parts) - MAX_LISTED
    return ", ".join(parts[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def one_answer_warnings(
    metrics: Mapping[str, Any],
    names: tuple[str, str] = (f"the {MODEL_LABELS[0]}", f"the {MODEL_LABELS[1]}"),
) -> list[str]:
    """Warn if a model gives the same answer throughout, on test or, without a test, on dev.

    Args:
        metrics: Result of `swarm.loop.final_metrics.final_metrics`; older ones lack the key.
        names: Names of the initial model and of the best found.
    """
    split, key = ("test", "single_test") if "test_gain" in metrics else ("dev", "validation")
    return [
        words
        for side, name in zip(("starting", "ending"), names, strict=True)
        for words in format_one_answer_warnings(
            metrics.get(f"{side}_best_{key}_one_answer", ()), name, split
        )
    ]


def describe_domain(domain: str) -> str:
    """Describe a domain: "the domain logic", "the domain (gold answer: number)"."""
    kind = domain.startswith(KIND_PREFIX)
    return f"the domain ({domain})" if kind else f"the domain {shorten_text(domain)}"


def format_one_answer_warnings(
    found: Sequence[Mapping[str, Any]], name: str, split: str
) -> list[str]:
    """Return the warnings for one model on one split.

    Args:
        found: Result of `swarm.tasks.metrics.find_one_answer_domains`.
    """
    warnings = []
    for one in found[:MAX_LISTED]:
        where = "all domains" if one["domain"] is None else describe_domain(one["domain"])
        warnings.append(
            f"Warning: in {where} of {split}, {name} gives one answer: "
            f"{quote_answer(one['answer'])} is "
            f"{100 * one['share']:.3g} % of the {one['answers']} parsed answers, and correct "
            f"for {100 * one['right']:.3g} % of the items."
        )
    if more := len(found) - MAX_LISTED:
        warnings += [f"Warning: the same holds for {more} more domains of {split}."] * (more > 0)
    return warnings


def format_form_warnings(
    found: Sequence[Mapping[str, Any]], split: str, brief: bool = False
) -> list[str]:
    """Return a warning of cut answers, and for each domain in which they have another form.

    Args:
        found: Result of `swarm.tasks.metrics.find_form_mismatches`.
        split: The split of the answers.
        brief: Without an example and long remedies, which the report has.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    warnings = [_format_cut_warning(one, split, brief) for one in found if "cut" in one]
    for one in (one for one in found if "cut" not in one):
        key = one["domain"], one["parser"], one["choices"], one["contained"] > 0
        groups.setdefault(key, []).append(one)
    for (domain, _, _, contained), models in groups.items():
        first = models[0]
        where = f" in {describe_domain(domain)}" if domain else ""
        what = "are empty or cannot be read"
        if contained:
            what = "contain the gold answer but do not match it"
        shares = [100 * one["contained" if contained else "unread"] for one in models]
        if brief:
            others = f", and some of {pluralize(len(models) - 1, 'more model')}"
            warnings.append(
                f"Warning: {split} answers{where} {what} ({shares[0]:.0f} % of those of "
                f"{first['model']}{others if len(models) > 1 else ''}); see the report."
            )
            continue
        listed = ", ".join(
            f"{one['model']} {share:.0f} %"
            for one, share in zip(models[:MAX_LISTED], shares, strict=False)
        )
        more = len(models) - MAX_LISTED
        listed += f" and {more} more" if more > 0 else ""
        given = quote_answer(first["text"]) if first["text"] else "nothing"
        warnings.append(
            f"Warning: on the {first['items']} {split} items{where}, answers {what} ({listed}): "
            f"where {quote_answer(first['gold'])} is right, {first['model']} gives {given}. "
            f"{_form_remedy(first)}"
        )
    return warnings


def _format_cut_warning(one: Mapping[str, Any], split: str, brief: bool) -> str:
    """Return the warning of answers that end at the maximum number of tokens."""
    whose = "of each domain's best model" if one["several"] else f"of {one['model']}"
    ends = f"ends with {quote_answer(one['text'])}" if one["text"] else "writes nothing visible"
    gold = quote_answer(one["gold"])
    example = "" if brief else f": where {gold} is right, {one['model']} {ends}"
    return (
        f"Warning: {100 * one['cut']:.0f} % of the answers {whose} to the {one['items']} {split} "
        f"items are cut at {one['limit']} tokens and wrong{example}. Allow longer answers: "
        f"{one['key']}={4 * one['limit']}."
    )


def form_warnings(metrics: Mapping[str, Any], brief: bool = False) -> list[str]:
    """Return the warnings on the form of the experts' dev answers, and of the base's on test."""
    found = metrics.get("answer_forms", ())
    return [
        words
        for split in ("dev", "test")
        for words in format_form_warnings([f for f in found if f["split"] == split], split, brief)
    ]


def _form_remedy(one: Mapping[str, Any]) -> str:
    """Return what to do about answers of another form than the gold answers."""
    if one["choices"]:
        return "task.scoring=logits compares the probabilities of the letters instead."
    known = PARSER_MEANINGS.items()
    others = [f"{name} ({meaning})" for name, meaning in known if name != one["parser"]]
    return (
        "Write gold answers in the words of the adapters, or compare otherwise: task.parser is "
        f"{one['parser']} and may be {' or '.join(others)}."
    )


def unread_answers(metrics: Mapping[str, Any], names: tuple[str, str] = MODEL_LABELS) -> list[str]:
    """Return a sentence on the models of the final tables with many unread answers, or none.

    Args:
        metrics: Result of `swarm.loop.final_metrics.final_metrics`.
        names: Names of the initial model and of the best found.
    """
    split, key = ("test", "single_test") if "test_gain" in metrics else ("dev", "validation")
    shares = {
        one["label"]: one[split]["unparsed_rate"]
        for one in metrics.get("baselines", ())
        if split in one
    }
    for side, name in zip(("starting", "ending"), names, strict=True):
        shares[name] = metrics.get(f"{side}_best_{key}_unparsed_rate", 0.0)
    parts = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= MIN_UNREAD]
    if not parts:
        return []
    return [
        f"Unread answers on {split} (empty, or without an answer that the task's parser finds): "
        f"{', '.join(parts)}."
    ]


def domain_table(
    metrics: Mapping[str, Any], split: str, names: tuple[str, str] = MODEL_LABELS
) -> tuple[list[str], list[list[str]]] | None:
    """Return utilities by domain as table header and rows; `None` unless there are 2 to 12 domains.

    Intervals and constant answers are omitted beside baselines, to limit the width.

    Args:
        split: "dev" or "test".
        names: Names of the initial model and of the best found.
    """
    key = "single_test" if split == "test" else "validation"
    start, end = (metrics.get(f"{side}_best_{key}_domains") for side in ("starting", "ending"))
    if not start or not end or not 2 <= len(end) <= MAX_DOMAINS:
        return None
    constant = ((metrics.get("constant_answers") or {}).get("by_domain") or {}).get(split)
    warned = {one["domain"] for one in metrics.get(f"ending_best_{key}_one_answer", ())}
    others = [one for one in metrics.get("baselines", ()) if "domains" in one.get(split, {})]
    # Only the kind of a baseline, without its parenthesized choice, to limit the table's width.
    header = [f"domain of {split}", "n", *(one["label"].split(" (")[0] for one in others), *names]
    header += ["best constant answer"] * bool(constant) + [f"answers: {names[1]}"]
    rows = []
    for domain, mine in end.items():
        row = [shorten_text(domain), f"{mine['items']}"]
        row += [f"{one[split]['domains'][domain]['utility']:.3f}" for one in others]
        row += [
            f"{one['utility']:.3f}" if others else _format_utility(one)
            for one in (start[domain], mine)
        ]
        if constant:
            by_domain = constant["domains"][domain]
            answer = "" if others else f" ({quote_answer(by_domain['commonest'])})"
            row.append(f"{by_domain['utility']:.3f}{answer}")
        rows.append([*row, format_most_common_answer(mine, bool(warned & {domain, None}))])
    return header, rows


def format_most_common_answer(found: Mapping[str, Any], warned: bool) -> str:
    """Describe the most common answer in a domain, "No: 94 % (!)", and the share of unparsed ones.

    Args:
        found: An entry of `swarm.tasks.metrics.summarize_domains`.
    """
    parts = []
    if found.get("commonest") is not None:
        parts.append(
            f"{quote_answer(found['commonest'])}: {100 * found['share']:.0f} %" + " (!)" * warned
        )
    if found.get("unparsed_rate"):
        parts.append(f"{100 * found['unparsed_rate']:.0f} % not read")
    return ", ".join(parts) or "–"


def _format_utility(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['utility']:.3f} [{low:.3f}, {high:.3f}]"


def shorten_text(text: str, limit: int = 40) -> str:
    """Return a name or an answer as one short line of printable characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def quote_answer(answer: str) -> str:
    """Return an answer, shortened, in quotation marks."""
    return f'"{shorten_text(answer)}"'


def position_label(optimizer: Mapping[str, Any], position: Sequence[float]) -> str | None:
    """Return an optimizer's name for a position, such as "uniform soup", or `None`.

    Args:
        optimizer: Its state.
    """
    named = zip(optimizer.get("rows", []), optimizer.get("labels", []), strict=False)
    return next((words for row, words in named if row == list(position)), None)


def describe_constraint(part: str, one: Mapping[str, Any]) -> str:
    """Describe in one sentence whether the best position meets a constraint.

    Args:
        one: A part's entry in the constraints of `swarm.loop.final_metrics.final_metrics`.
    """
    whose = "the base model's" if one["base"] else "given"
    met = "met" if one["met"] else "NOT met by any position; this one has the smallest violation"
    line = f"Constraint: {part} at least {one['at_least']:.3f} ({whose}) on dev: "
    line += f"{one['dev']:.3f}, {met}"
    if "test" not in one:
        return f"{line}."
    line += f"; on test {one['test']['utility']:.3f} (n = {one['test']['items']})"
    if "test_base" in one:
        low, high = one["test_gain_interval"]
        line += (
            f" against the base model's {one['test_base']:.3f}, difference "
            f"{one['test_gain']:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
        )
    return f"{line}."


def _describe_held_out(metrics: Mapping[str, Any]) -> list[str]:
    """Describe the best found on dev items that the search did not see, if there are any."""
    found = metrics.get("confirm")
    if not found:
        return []
    bias = found["ending_searched"] - found["ending"]
    chosen = found.get("selected_on_held_out", False)
    points = metrics.get("in_points", False)
    return [
        f"The search measured {found['ending_searched']:.3f}; the {found['items']} held-out dev "
        f"items give {found['ending']:.3f} (difference {bias:+.3f}; the maximum of many is biased "
        f"upwards).{' It was chosen among the finalists by these items.' * chosen}",
        describe_difference(
            found["gain"],
            found["gain_interval"],
            found["p_value"],
            found["items"],
            "kept dev items",
            points,
        ),
    ]


def list_caveats(
    metrics: dict[str, Any], too_long: Sequence[str] = (), brief: bool = False
) -> list[str]:
    """Return caveats on the numbers: changed items, constant answers, held-out items, and noise.

    Args:
        metrics: Result of `swarm.loop.final_metrics.final_metrics`; empty while a search runs.
        too_long: Lines on dropped or truncated items (`swarm.loop.prompt_stats.fit_to_context`).
        brief: Shorter warnings, which refer to the report.
    """
    lines = [
        *(f"{line}." for line in too_long),
        *form_warnings(metrics, brief),
        *one_answer_warnings(metrics),
        *unread_answers(metrics),
    ]
    if (found := metrics.get("start", {})).get("routes") and not found["whole"]:
        lines.append(
            f"On {pluralize(len(found['routes']), 'kind')} of prompts the best of the first "
            "iteration is kept: it was better on the dev items that no gradient used."
        )
    if found := metrics.get("no_gradient"):
        low, high = found["ending_interval"]
        lines.append(
            f"No gradient used {found['items']} of the "
            f"{metrics['ending_best_validation_items']} dev items that the search saw. On these "
            f"the best found has {found['ending']:.3f} (95 % interval {low:.3f} to {high:.3f}), on "
            f"all {metrics['ending_best_validation_utility']:.3f}."
        )
    lines += _describe_held_out(metrics)
    for part, one in (metrics.get("constraints") or {}).items():
        lines.append(describe_constraint(part, one))
    if error := metrics.get("reconstruction_error"):
        lines.append(
            f"The saved adapter is truncated to pool.export_rank, with an error of {error:.2g} "
            "of the update's norm: all numbers are of the position before that; python -m "
            "swarm.evaluate "
            "measures the adapter."
        )
    if found := metrics.get("noise_floor"):
        lines.append(
            f"Noise floor: evaluated again in other batches, {found['changed_answers']} of "
            f"{found['items']} dev answers of the best found change, and its utility by "
            f"{found['difference']:+.4f}."
        )
    return lines
