"""The comparison of methods in words: a Markdown table, and what has to be known to read it."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from swarm.report.text import format_table
from swarm.studies.comparison import ONE_ANSWER_NOTE, mark_one_answer
from swarm.words import MAX_DOMAINS, describe_constant_answers, shorten_text


def format_comparison(found: dict[str, Any]) -> str:
    """The comparison as a Markdown table, with what has to be known to read it."""
    start, constant = found["start"], _constant_rows(found)
    head = ("method", "dev", "test", "gain on test", "p", "prompts", "of them shared", "seconds")
    expert = mark_one_answer(f"best initial expert ({start['expert']})", start)
    first = (expert, f"{start['dev']:.3f}", f"{start['test']:.3f}", *[""] * 5)
    rows: list[Sequence[str]] = [first, *constant, *map(_method_cells, found["methods"])]
    seeds, failed = len(found["seeds"]), found.get("failed", {})
    told = [
        "",
        f"Budget: {found['budget']} positions; seeds: {seeds}; {found['items']} test items. Means "
        "over seeds; in parentheses the lowest and highest seed, in brackets 95 % intervals.",
        "Dev is the highest of all that a search looked at, and flatters it. A prompt that another "
        "search had asked is charged and not asked again: seconds are no measure of a method.",
        "p-values are paired, of one method each, and not corrected for "
        f"{len(found['methods'])} methods.",
        *_describe_leaders(found),
        *_describe_starts(found),
        *_describe_signals(found),
        *(f"Not in the table: {name} ({wrong})." for name, wrong in failed.items()),
        "",
        "Best found, by the first seed:",
        *(f"- {row['method']}: {row['found'][0]}" for row in found["methods"]),
    ]
    return "\n".join([*format_table(head, rows), *format_domain_table(found), *told])


def _constant_rows(found: dict[str, Any]) -> list[Sequence[str]]:
    """The line of the best constant answers."""
    if not (known := found.get("constant_answers")):
        return []
    by_domain_ = known["by_domain"]
    each = " of each domain" * (len(by_domain_["answers"]) > 1)
    cells = [f"{by_domain_[split]['utility']:.3f}" for split in ("dev", "test")]
    name = f"best constant answer{each} ({describe_constant_answers(known)})"
    return [(name, *cells, *[""] * 5)]


def format_domain_table(found: dict[str, Any]) -> list[str]:
    """Test utilities by domain as a second table, where there are 2 to 12, and what (!n) means."""
    domains = list(found["start"].get("domains", {}))
    lines = []
    if 2 <= len(domains) <= MAX_DOMAINS:
        rows: list[Sequence[str]] = []
        if known := found.get("constant_answers"):
            mine = known["by_domain"]["test"]["domains"]
            rows.append(("best constant answer", *(f"{mine[d]['utility']:.3f}" for d in domains)))
        start = {**found["start"], "method": "best initial expert"}
        for one in (start, *found["methods"]):
            cells = [_format_range(one["domains"][d]) if one.get("domains") else "" for d in domains]
            rows.append((mark_one_answer(one["method"], one), *cells))
        lines += ["", *format_table(("test, by domain", *map(shorten_text, domains)), rows)]
    if any(one.get("one_answer") for one in (found["start"], *found["methods"])):
        lines += [
            "",
            ONE_ANSWER_NOTE,
        ]
    return lines


def _method_cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["test_interval"]
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    size = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["gain"])
    counts = (f"{fmean(row[name]):.0f}" for name in ("prompts", "prompts_shared", "seconds"))
    dev = _format_range(row["dev"]) if row["dev"] else ""
    return (mark_one_answer(row["method"], row), dev, _format_range(row["test"]) + interval, size,
            f"{row['gain']['p']:.2g}", *counts)  # fmt: skip


def _format_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.3f}-{max(values):.3f})" if len(set(values)) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def _describe_leaders(found: dict[str, Any]) -> list[str]:
    """Which method is first, and which of the others its interval cannot tell from it."""
    ranked = sorted(found["methods"], key=lambda row: -fmean(row["test"]))
    best = ranked[0]
    low = best["test_interval"][0]
    near = [r["method"] for r in ranked[1:] if low is not None and fmean(r["test"]) >= low]
    words = f"Highest on test: {best['method']}, {fmean(best['test']):.3f}"
    return [words + (f"; within its interval: {', '.join(near)}." if near else ".")]


def _describe_starts(found: dict[str, Any]) -> list[str]:
    """Whose gain is on another expert than the table's head, or on other answers of the same."""
    head = {"expert": found["start"]["expert"], "test": found["start"]["test"]}
    others = []
    for row in found["methods"]:
        if any(start != head for start in row["starts"]):
            names = dict.fromkeys(f"{s['expert']} ({s['test']:.3f})" for s in row["starts"])
            others.append(f"{row['method']}: {', '.join(names)}")
    if not others:
        return []
    return [
        "Each gain is on the best initial expert of the search itself, whose test is not that of "
        f"the first line with {'; '.join(others)}."
    ]


def _describe_signals(found: dict[str, Any]) -> list[str]:
    """What searches on a signal cost beyond what is charged, and why the plot lacks them."""
    named = {row["method"]: row["signal"] for row in found["methods"] if row["signal"]}
    if not named:
        return []
    climbed = "; ".join(f"{name} (signal: {signal})" for name, signal in named.items())
    told = [f"Searches on another signal, which has another unit: not in the plot: {climbed}."]
    if any("both" in signal for signal in named.values()):
        told.append("With signal=both a dev item is charged as one prompt and asks two requests.")
    if any("logprob" in signal for signal in named.values()):
        told.append("With signal=logprob the best are judged at the end; this is not charged.")
    return told
