"""Trajectories of the swarm and its best in the space of mixing coefficients, and rank of origin.

The rank of origin is the rank at the start of the particle that ends best. In Model Swarms (arXiv
2410.11163, figure 3, "diamonds in the rough") 10.4 % of the best started best and 56.9 % were in
the bottom half; a particle picked at random from 20 would give 5 % and 50 %.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from swarm._util.terminal import format_share, format_sparkline, format_table
from swarm.runs.folder import RunFolder
from swarm.stats.significance import mean_interval


def rank_of_origin(run: RunFolder) -> dict[str, Any]:
    """Compute the starting rank of the particle that ends best.

    Returns:
        `rank`: 1 is the best, among all starting particles, by dev utility; ties share the mean.
        `started_best`: no particle was strictly better. `bottom_half`: the rank is worse than the
        middle one. Keys with `_blindly`: the share of all particles for which this holds.
    """
    index = run.find_best()
    particle = index[1]
    start = np.where(np.isnan(run.utilities[0]), -np.inf, run.utilities[0])
    better = (start > start[:, None]).sum(axis=1)
    equal = (start == start[:, None]).sum(axis=1)
    ranks = better + (equal + 1) / 2
    started_best, bottom_half = better == 0, ranks > (run.particles + 1) / 2
    return {
        "run": run.name,
        "particle": particle,
        "start_kind": describe_start(run, particle),
        "start": float(run.utilities[0, particle]),
        "best": float(run.utilities[index]),
        "rank": float(ranks[particle]),
        "of": run.particles,
        "equals": int(equal[particle]) - 1,
        "started_best": bool(started_best[particle]),
        "started_best_blindly": float(started_best.mean()),
        "bottom_half": bool(bottom_half[particle]),
        "bottom_half_blindly": float(bottom_half.mean()),
    }


def describe_start(run: RunFolder, particle: int) -> str:
    """Return what a particle began as: an expert, a uniform soup, or a mixture or point drawn."""
    if particle < len(run.experts):
        return run.experts[particle]
    if label := run.position_label((0, particle)):
        return label
    position = run.positions[0, particle].reshape(len(run.groups), -1)
    if np.ptp(position) <= HULL_TOLERANCE:
        total = float(position[0].sum())
        return "uniform soup" if abs(total - 1) <= HULL_TOLERANCE else f"{total:.2g} x soup"
    return "drawn" if is_outside_hull(position).any() else "crossover child"


def is_outside_hull(positions: np.ndarray) -> np.ndarray:
    """Return for positions [..., K] whether a coefficient is negative or their sum is not 1."""
    negative = (positions < -HULL_TOLERANCE).any(axis=-1)
    found: np.ndarray = negative | (abs(positions.sum(axis=-1) - 1) > HULL_TOLERANCE)
    return found


def summarize_origins(origins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the shares over several runs, beside those of a randomly picked particle."""
    found: dict[str, Any] = {"runs": len(origins)}
    for name in ("started_best", "bottom_half"):
        found[name] = mean_interval([one[name] for one in origins])
        found[f"{name}_blindly"] = fmean(one[f"{name}_blindly"] for one in origins)
    return found


def format_origins(origins: Sequence[dict[str, Any]]) -> list[str]:
    """Format one row per run and, for several runs, their shares."""
    rows = [
        [
            one["run"][:24],
            one["start_kind"][:16],
            f"{one['start']:.3f}",
            f"{one['best']:.3f}",
            f"{one['rank']:g} of {one['of']}" + (f", {one['equals']} equal" * bool(one["equals"])),
        ]
        for one in origins
    ]
    found = format_table(("ends best in", "began as", "start", "best", "rank of origin"), rows)
    if len(origins) < 2:
        return [*found, "", "One run gives no distribution: name several folders."]
    shares = summarize_origins(origins)
    return [
        *found,
        "",
        f"Started best: {format_share(*shares['started_best'])}; "
        f"picked blindly {shares['started_best_blindly']:.2f}; the paper .10",
        f"From the bottom half: {format_share(*shares['bottom_half'])}; "
        f"picked blindly {shares['bottom_half_blindly']:.2f}; the paper .57",
    ]


HULL_TOLERANCE = 1e-6
"""Deviation of a coefficient from 0, or of a sum from 1, that counts as rounding."""

MAX_COLUMNS = 6
"""Maximum number of bests that have a column in 80 characters."""

NAME_WIDTH = 24
"""Maximum width of an expert's name in that table."""


def measure_trajectory(run: RunFolder) -> dict[str, Any]:
    """Compute the best's coefficients, the spread of the swarm and its principal components.

    If groups of modules have separate coefficients, their mean is used.

    Returns:
        `best`: each new best of the swarm. `diversity` [T]: mean Euclidean distance of the
        particles from their mean. `outside` [T]: share of particles outside the experts' hull,
        with a negative coefficient or a sum other than 1 in any group.
        `explained` [2], `axes` [2, K], `points` [T, N, 2]: the first two principal components
        of all positions, by the SVD of the centred [T * N, K].
    """
    x = run.means
    explained, axes, points = principal_components(x)
    return {
        "experts": run.experts,
        "utility": run.best_so_far(),
        "best": _list_bests(run),
        "diversity": swarm_diversity(x),
        "outside": is_outside_hull(
            run.positions.reshape(*x.shape[:2], len(run.groups), len(run.experts))
        )
        .any(axis=2)
        .mean(axis=1),
        "explained": explained,
        "axes": axes,
        "points": points,
    }


def swarm_diversity(positions: np.ndarray) -> np.ndarray:
    """Return the mean Euclidean distance of particles [T, N, K] from their mean, [T]."""
    distances = np.linalg.norm(positions - positions.mean(axis=1, keepdims=True), axis=2)
    found: np.ndarray = distances.mean(axis=1)
    return found


def principal_components(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the first two principal components of positions [T, N, K].

    Returns:
        The share of the variance that each explains [2], axes [2, K] of length 1 whose largest
        entry is positive, and the coordinates [T, N, 2].
    """
    rows = positions.reshape(-1, positions.shape[2])
    rows = rows - rows.mean(axis=0)
    _, values, axes = np.linalg.svd(rows, full_matrices=False)
    # The sign of a singular vector is arbitrary; fixing it makes charts reproducible.
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    axes = (axes * signs[:, None])[:2]
    total = float((values**2).sum()) or 1.0
    return values[:2] ** 2 / total, axes, (rows @ axes.T).reshape(*positions.shape[:2], 2)


def _list_bests(run: RunFolder) -> list[dict[str, Any]]:
    """List each new best: iteration, utility, coefficients and distance from the experts' hull.

    `negative` is the sum of the negative coefficients, 0 inside the hull; `absolute` is the sum of
    absolute coefficients, 1 inside it.
    """
    found: list[dict[str, Any]] = []
    for number, utilities in enumerate(run.utilities):
        known = np.where(np.isnan(utilities), -np.inf, utilities)
        particle = int(known.argmax())
        if np.isfinite(known[particle]) and (not found or known[particle] > found[-1]["utility"]):
            position = run.means[number, particle]
            found.append(
                {
                    "iteration": number,
                    "particle": particle,
                    "utility": float(known[particle]),
                    "position": position,
                    "negative": float(np.minimum(position, 0).sum()),
                    "absolute": float(np.abs(position).sum()),
                }
            )
    return found


def format_trajectory(found: dict[str, Any]) -> list[str]:
    """Format the result of `measure_trajectory` as text."""
    diversity, outside = found["diversity"], found["outside"]
    names = [name[:NAME_WIDTH] for name in found["experts"]]
    return [
        "Coefficients of each new best of the swarm, by iteration; inside the experts'",
        "hull none is negative and their sum is 1",
        "",
        *_best_table(found["best"], names),
        "",
        f"best so far     {format_sparkline(found['utility'])}  "
        f"{found['utility'][0]:.3f} to {found['utility'][-1]:.3f}",
        f"swarm diversity {format_sparkline(diversity)}  {diversity[0]:.3f} to {diversity[-1]:.3f}",
        f"outside hull    {format_sparkline(outside)}  {outside[0]:.0%} to {outside[-1]:.0%} of "
        "particles",
        "",
        "Principal components of all positions, and each expert's entry in them",
        "",
        *format_table(
            ("axis", *(f"{share:.0%} of variance" for share in found["explained"])),
            [
                [name, *(f"{axis[k]:+.2f}" for axis in found["axes"])]
                for k, name in enumerate(names)
            ],
        ),
    ]


def _best_table(bests: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Tabulate the first and the last few bests, one column each."""
    shown = bests if len(bests) <= MAX_COLUMNS else [bests[0], *bests[1 - MAX_COLUMNS :]]
    rows = [["dev", *(f"{one['utility']:.3f}" for one in shown)]]
    rows += [
        [name, *(f"{one['position'][k]:+.2f}" for one in shown)] for k, name in enumerate(names)
    ]
    rows.append(["absolute", *(f"{one['absolute']:.2f}" for one in shown)])
    left_out = f" ({len(bests) - len(shown)} left out)" * (len(shown) < len(bests))
    return format_table((f"iteration{left_out}", *(str(one["iteration"]) for one in shown)), rows)
