"""Rank of origin: how good the particle that ends best was at the start.

Model Swarms (arXiv 2410.11163, figure 3, "diamonds in the rough"): 10.4 % of the best started best,
56.9 % came from the bottom half. Of 20 particles picked blindly it were 5 % and 50 %.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from swarm.report.folder import RunFolder
from swarm.report.statistics import mean_interval
from swarm.report.text import format_share, format_table


def rank_of_origin(run: RunFolder) -> dict[str, Any]:
    """Where the particle that ends best began.

    Returns:
        `rank`: 1 and up, among all starting particles, by dev utility; the middle rank of equals.
        `started_best`: nobody was strictly better. `bottom_half`: the rank is beyond the middle.
        With `_blindly`, the share of all particles of which this holds.
    """
    place = run.find_best()
    own = place[1]
    start = np.where(np.isnan(run.utilities[0]), -np.inf, run.utilities[0])
    better = (start > start[:, None]).sum(axis=1)
    equal = (start == start[:, None]).sum(axis=1)
    ranks = better + (equal + 1) / 2
    started_best, bottom_half = better == 0, ranks > (run.particles + 1) / 2
    kind = run.experts[own] if own < len(run.experts) else "crossover child"
    return {
        "run": run.path.name,
        "particle": own,
        "began_as": kind,
        "start": float(run.utilities[0, own]),
        "best": float(run.utilities[place]),
        "rank": float(ranks[own]),
        "of": run.particles,
        "equals": int(equal[own]) - 1,
        "started_best": bool(started_best[own]),
        "started_best_blindly": float(started_best.mean()),
        "bottom_half": bool(bottom_half[own]),
        "bottom_half_blindly": float(bottom_half.mean()),
    }


def summarize_origins(origins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shares over several runs, and what a particle picked blindly would give."""
    found: dict[str, Any] = {"runs": len(origins)}
    for name in ("started_best", "bottom_half"):
        found[name] = mean_interval([one[name] for one in origins])
        found[f"{name}_blindly"] = fmean(one[f"{name}_blindly"] for one in origins)
    return found


def format_origins(origins: Sequence[dict[str, Any]]) -> list[str]:
    """One row a run and, of several, their shares."""
    rows = [
        [one["run"][:24], one["began_as"][:16], f"{one['start']:.3f}", f"{one['best']:.3f}",
         f"{one['rank']:g} of {one['of']}" + (f", {one['equals']} equal" * bool(one["equals"]))]
        for one in origins
    ]  # fmt: skip
    found = format_table(("ends best in", "began as", "start", "best", "rank of origin"), rows)
    if len(origins) < 2:
        return [*found, "", "One run says little: name several folders for a distribution."]
    shares = summarize_origins(origins)
    return [
        *found,
        "",
        f"Started best: {format_share(shares['started_best'])}; "
        f"picked blindly {shares['started_best_blindly']:.2f}; the paper .10",
        f"From the bottom half: {format_share(shares['bottom_half'])}; "
        f"picked blindly {shares['bottom_half_blindly']:.2f}; the paper .57",
    ]
