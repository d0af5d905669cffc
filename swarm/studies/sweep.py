"""Results of a sweep: a table of its trials, the best of them by dev, and caveats."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from swarm._util.files import write_atomic, write_json
from swarm._util.terminal import format_p, format_table
from swarm.errors import UserError
from swarm.runs.verdict import MAX_DOMAINS, shorten_text
from swarm.studies.subprocess_runs import SearchProcess

SHARED_IDENTITY_KEYS = ("task items", "experts", "pool weights", "base weights")
"""Identity keys that all trials of a sweep share, besides their settings."""


@dataclass(frozen=True, slots=True)
class Trial(SearchProcess):
    """One search of a sweep.

    Attributes:
        drawn: Sampled values by dotted key.
    """

    drawn: dict[str, Any]


def check_trials(trials: Sequence[Trial]) -> None:
    """Check that the searches in the trials' folders belong to this sweep.

    Raises:
        UserError: A folder contains a search with other settings, or one on other items or weights
            than another trial's.
    """
    begun = [(trial, state["identity"]) for trial in trials if (state := trial.load_state())]
    for trial, identity in begun:
        wanted = trial.expected_identity() | {
            name: begun[0][1].get(name) for name in SHARED_IDENTITY_KEYS
        }
        differ = sorted(key for key in wanted if identity.get(key) != wanted[key])
        if differ:
            key, name = differ[0], trial.path.parent.name
            raise UserError(
                f"name={name}: {trial.path} contains another search ({key}: "
                f"{identity.get(key)!r} then, {wanted[key]!r} now); use the same values to "
                "resume, or another name="
            )


def summarize_trials(trials: Sequence[Trial], errors: Mapping[Path, str]) -> dict[str, Any]:
    """Summarize the trials, without those that neither ended nor failed.

    Args:
        errors: Error messages by the folder of the trial.
    """
    rows = [
        _trial_row(trial, errors.get(trial.path))
        for trial in trials
        if trial.load_verdict() or trial.path in errors
    ]
    ended = [row for row in rows if row["error"] is None]
    gains = [row["gain"] for row in ended if row["gain"] is not None]
    summary: dict[str, Any] = {
        "trials": rows,
        "ended": len(ended),
        "failed": len(rows) - len(ended),
        # Selected by dev alone; the first one wins ties.
        "best": max(ended, key=lambda row: row["dev"])["trial"] if ended else None,
        "gained_on_test": sum(gain > 0 for gain in gains),
        "gained_with_p_below_0.05": sum(r["gain"] > 0 and r["p"] < 0.05 for r in ended if gains),
        "gain_on_test_median": median(gains) if gains else None,
        "gain_on_test_range": [min(gains), max(gains)] if gains else None,
    }
    first = next((m for trial in trials if (m := trial.load_verdict())), None)
    start = first.start_model if first else None
    before = {
        "expert": first.expert if first else None,
        "dev": start.dev.utility if start and start.dev else None,
        "test": start.test.utility if start and start.test else None,
    }
    return summary | {"best_initial": before}


def _trial_row(trial: Trial, error: str | None) -> dict[str, Any]:
    verdict = trial.load_verdict() if error is None else None
    found: dict[str, Any] = dict.fromkeys(
        ("dev", "test", "test_interval", "one_answer", "domains", "gain", "gain_interval", "p")
    )
    if verdict:
        found["dev"] = verdict.dev.utility
        if test := verdict.found.test:
            found |= asdict(test) | {"dev": verdict.dev.utility, "test": test.utility}
            found["test_interval"] = [test.low, test.high]
        if (strongest := verdict.strongest) and (gain := strongest.gain):
            found["gain"], found["p"] = gain.difference, gain.p
            found["gain_interval"] = [gain.low, gain.high]
    head = {"trial": trial.path.name, "seed": trial.config["seed"], "drawn": trial.drawn}
    return {**head, **found, "error": error}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json and summary.md into the sweep's folder."""
    write_json(folder / "summary.json", summary)
    text = "\n".join([f"# {folder.name}", "", *format_summary(summary)])
    write_atomic(folder / "summary.md", (text + "\n").encode())


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """Format the table and its conclusions as lines of Markdown."""
    rows = summary["trials"]
    drawn = list(rows[0]["drawn"]) if rows else []
    heads = ["trial", *(key.removeprefix("optimizer.") for key in drawn)]
    heads += ["dev", "test", "gain over the strongest alternative", "p"]
    lines = format_table(
        heads,
        [[row["trial"], *map(str, row["drawn"].values()), *_trial_cells(row)] for row in rows],
    )
    failed = [f"- {row['trial']} failed: {row['error']}" for row in rows if row["error"]]
    return [*lines, "", *failed, *_describe_conclusions(summary)]


def _trial_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells for dev, test, gain and p of a trial."""
    if row["error"] is not None:
        return ["failed", "", "", ""]
    if row["test"] is None:
        return [f"{row['dev']:.3f}", "", "", ""]
    mark = " (!)" * bool(row.get("one_answer"))
    return [f"{row['dev']:.3f}", _format_test(row) + mark, _format_gain(row), f"{row['p']:.3g}"]


def _format_test(row: Mapping[str, Any]) -> str:
    low, high = row["test_interval"]
    return f"{row['test']:.3f} [{low:.3f}, {high:.3f}]"


def _format_gain(row: Mapping[str, Any]) -> str:
    low, high = row["gain_interval"]
    return f"{row['gain']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _describe_conclusions(summary: Mapping[str, Any]) -> list[str]:
    """Return the conclusions from the table, one line each."""
    count = summary["ended"]
    if not count:
        return ["- No trial has ended."]
    best = next(row for row in summary["trials"] if row["trial"] == summary["best"])
    values = ", ".join(f"{key}={value}" for key, value in best["drawn"].items())
    before = summary["best_initial"]
    lines = [
        f"- The best by dev, of {count}: {best['trial']} ({values}), dev {best['dev']:.3f}; the"
        f" best initial expert, {before['expert']}, has {before['dev']:.3f}.",
        f"- That dev value is the maximum of {count} trials, each the maximum of many "
        "evaluations, and so biased upwards.",
    ]
    if best["test"] is None:
        return [*lines, "- Nothing was tested (test=false)."]
    low, high = summary["gain_on_test_range"]
    warnings = []
    if any(row.get("one_answer") for row in summary["trials"]):
        warnings.append("(!): more than 90 % of the answers to a domain are one value.")
    domains = best.get("domains") or {}
    if 2 <= len(domains) <= MAX_DOMAINS:
        by_domain = ", ".join(
            f"{shorten_text(name)} {one['utility']:.3f}" for name, one in domains.items()
        )
        warnings.insert(0, f"Its test value by domain: {by_domain}.")
    return [
        *lines,
        f"- Its test value, not used for selection: {_format_test(best)}, "
        f"{_format_gain(best)} against"
        f" the best initial expert's {before['test']:.3f}, paired {format_p(best['p'])}.",
        *(f"- {words}" for words in warnings),
        f"- Over the trials: {summary['gained_on_test']} of {count} gained on test,"
        f" {summary['gained_with_p_below_0.05']} of them with p < 0.05 (not corrected for {count}"
        f" tests); gains {low:+.3f} to {high:+.3f}, median {summary['gain_on_test_median']:+.3f}.",
        "- For comparison: of the paper's runs 73 % beat its best baseline (figure 7), which is a"
        " higher bar than the best initial expert.",
    ]
