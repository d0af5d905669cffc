"""The paper's analyses of a run: origin of the best, trajectories, emergence and cost.

The rank of origin is the rank at the start of the particle that ends best. In Model Swarms (arXiv
2410.11163, figure 3, "diamonds in the rough") 10.4 % of the best started best and 56.9 % were in
the bottom half; a particle picked at random from 20 would give 5 % and 50 %. Correctness emergence
(figure 2) is compared with chance, which the paper is not: particles that guess also get other
items right than before, and with many guessers nearly every item "emerges".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from swarm.runs.folder import RunFolder
from swarm.stats.significance import mean_interval

HULL_TOLERANCE = 1e-6
"""Deviation of a coefficient from 0, or of a sum from 1, that counts as rounding."""

CONTROL_DRAWS = 1_000
"""Number of shuffles of the control."""


def analyse_run(folder: str | Path) -> dict[str, Any]:
    """Return the verdict and all analyses of a run as JSON data, NaN as `None`.

    Raises:
        UserError: The folder contains no search, or one without an iteration.
    """
    run = RunFolder(folder)
    found = {
        "run": run.name,
        "verdict": run.verdict,
        "origin": rank_of_origin(run),
        "trajectory": measure_trajectory(run),
        "emergence": measure_emergence(run),
        "economy": measure_economy(run),
    }
    plain: dict[str, Any] = to_jsonable_python(
        found, inf_nan_mode="null", fallback=lambda array: to_jsonable_python(array.tolist())
    )
    return plain


def search_signal(run: RunFolder) -> str:
    """Return the signal that the search optimized; empty if it is the task's own measure."""
    found = (run.verdict and run.verdict.signal) or run.identity.get("task.signal") or "accuracy"
    return "" if found == "accuracy" else str(found)


def objective_label(run: RunFolder) -> str:
    """Return the axis label of the optimized objective."""
    signal = search_signal(run)
    return f"signal ({signal}) on dev" if signal else "utility on dev"


def best_positions(run: RunFolder) -> np.ndarray:
    """Return the position of the best so far, [T, G * K]; the first start until one is measured."""
    known = np.where(np.isnan(run.utilities), -np.inf, run.utilities)
    best = known.max(axis=1)
    rises = best > np.concatenate([[-np.inf], np.maximum.accumulate(best)[:-1]])
    last = np.maximum.accumulate(np.where(rises, np.arange(len(best)), 0))
    found: np.ndarray = run.positions[last, known.argmax(axis=1)[last]]
    return found


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
        return "mean of all" if abs(total - 1) <= HULL_TOLERANCE else f"{total:.2g} x mean"
    return "drawn" if is_outside_hull(position).any() else "crossover child"


def is_outside_hull(positions: np.ndarray) -> np.ndarray:
    """Return for positions [..., K] whether a coefficient is negative or their sum is not 1."""
    negative = (positions < -HULL_TOLERANCE).any(axis=-1)
    found: np.ndarray = negative | (abs(positions.sum(axis=-1) - 1) > HULL_TOLERANCE)
    return found


def measure_trajectory(run: RunFolder) -> dict[str, Any]:
    """Compute the best utility so far and the spread of the swarm by iteration.

    If groups of modules have separate coefficients, their mean is used.

    Returns:
        `diversity` [T]: mean Euclidean distance of the particles from their mean. `outside` [T]:
        share of particles outside the experts' hull, with a negative coefficient or a sum other
        than 1 in any group.
    """
    by_group = run.positions.reshape(*run.utilities.shape, len(run.groups), len(run.experts))
    return {
        "experts": run.experts,
        "utility": run.best_so_far(),
        "diversity": swarm_diversity(run.means),
        "outside": is_outside_hull(by_group).any(axis=2).mean(axis=1),
    }


def swarm_diversity(positions: np.ndarray) -> np.ndarray:
    """Return the mean Euclidean distance of particles [T, N, K] from their mean, [T]."""
    distances = np.linalg.norm(positions - positions.mean(axis=1, keepdims=True), axis=2)
    found: np.ndarray = distances.mean(axis=1)
    return found


def measure_emergence(run: RunFolder) -> dict[str, Any]:
    """Compute C-surge and C-emerge on dev, with their controls.

    Ending particles are the personal bests. Starting particles are those evaluated in iteration 0,
    including crossover children, as both counts must be equal.

    Returns:
        `applies` and, if it is false, `reason`; else the numbers of `compare_with_controls`.
    """
    evaluated = np.flatnonzero(~np.isnan(run.utilities[0])).tolist()
    start = np.stack([run.load_answer_values((0, i)) for i in evaluated])
    end = np.stack([run.load_answer_values(run.find_best(i)) for i in evaluated])
    if not np.isin([start, end], (0.0, 1.0)).all():
        reason = "the answers' values are not all 0 or 1, so items are not right or wrong"
        return {"applies": False, "reason": reason}
    particle = run.find_best()[1]
    best = evaluated.index(particle) if particle in evaluated else 0  # it may have begun later
    return {"applies": True, **compare_with_controls(start.astype(bool), end.astype(bool), best)}


def compare_with_controls(start: np.ndarray, end: np.ndarray, best: int) -> dict[str, Any]:
    """Compute the shares and their controls.

    Args:
        start, end: Whether each particle is right on each item, [N, items].
        best: Row of the particle that ends best.

    Returns:
        `shares` by name, `None` if no item qualifies, else the share with Wilson's interval
        (`observed`), its control's mean and central 95 % (`chance`), and the probability of
        reaching it by chance (`p_above_chance`). `mirror`: items right more or less often, and
        items that any particle got right only at the end, or only at the start.
    """
    marked = _mark_items(start, end, best)
    drawn = {name: np.full(CONTROL_DRAWS, np.nan) for name in marked}
    for draw, guess in enumerate(_draw_guessers(start, end)):
        for name, marks in _mark_items(start, guess, best).items():
            if len(marks):
                drawn[name][draw] = marks.mean()
    hard, solved = ~start.any(axis=0), end.any(axis=0)
    rise: np.ndarray = end.sum(axis=0) - start.sum(axis=0, dtype=int)
    return {
        "items": start.shape[1],
        "particles": len(start),
        "hard_items": int(hard.sum()),
        "guessers_drawn": CONTROL_DRAWS,
        "shares": {
            name: _share_with_control(marks, drawn[name]) if len(marks) else None
            for name, marks in marked.items()
        },
        "mirror": {
            "more_right": int((rise > 0).sum()),
            "fewer_right": int((rise < 0).sum()),
            "emerged": int((hard & solved).sum()),
            "vanished": int((~hard & ~solved).sum()),
        },
    }


def _mark_items(start: np.ndarray, end: np.ndarray, best: int) -> dict[str, np.ndarray]:
    """Return the marks that each share averages, over all or over initially unsolved items."""
    unsolved = end[:, ~start.any(axis=0)]
    return {
        "C-surge": end.sum(axis=0) > start.sum(axis=0),
        "C-emerge": unsolved.any(axis=0),
        "best alone": unsolved[best],
    }


def _share_with_control(marks: np.ndarray, drawn: np.ndarray) -> dict[str, Any]:
    low, high = np.quantile(drawn, (0.025, 0.975))
    # Equal shares may differ by rounding, as they are sums in different orders.
    reached = int((drawn >= marks.mean() - 1e-12).sum())
    return {
        "observed": mean_interval(marks.astype(float).tolist()),
        "chance": (float(drawn.mean()), float(low), float(high)),
        # Add-one estimate, as a Monte Carlo p value must not be 0.
        "p_above_chance": (reached + 1) / (len(drawn) + 1),
    }


def _draw_guessers(start: np.ndarray, end: np.ndarray) -> Iterator[np.ndarray]:
    """Yield ending particles that are as accurate as the real ones but independent of the items.

    Each has the same number of right answers, assigned to items at random. Particles with identical
    answers stay identical, and one with the answers of a starting particle (which never improved,
    for example) is left unchanged.
    """
    generator = np.random.Generator(np.random.Philox(key=3))
    rows, which = np.unique(end, axis=0, return_inverse=True)
    moved = np.array([not (start == row).all(axis=1).any() for row in rows])
    for _ in range(CONTROL_DRAWS):
        guess = rows.copy()
        guess[moved] = generator.permuted(rows[moved], axis=1)
        yield guess[which.ravel()]


def measure_economy(run: RunFolder) -> dict[str, Any]:
    """Compute the prompts on dev by iteration, and the best utility so far that they bought.

    Returns:
        `prompts` [T], cumulative; `best` [T]; `dropped`: prompts of particles that moved without
        being evaluated (drop-K, drop-N); `beyond_budget`: prompts of particles for which no budget
        was left; `raced`: prompts that racing saved.
    """
    items = len(run.load_answers((0, 0)))
    scored = [one for entry in run.rounds for one in entry["items_scored"]]
    evaluated = [entry["prompts_scored"] for entry in run.rounds]
    beyond = sum(entry.get("beyond_budget", 0) for entry in run.rounds)
    best = run.best_so_far()
    improvements = int((np.diff(best[~np.isnan(best)]) > 0).sum())
    return {
        "task_items": run.identity.get("task items"),
        "items": items,
        "prompts": np.cumsum(evaluated),
        "best": best,
        "iterations": len(run.rounds) - 1,
        "evaluations": sum(one is not None for one in scored),
        "dropped": (scored.count(None) - beyond) * items,
        "beyond_budget": beyond * items,
        "raced": sum(entry.get("prompts_saved", 0) for entry in run.rounds),
        "improvements": improvements,
        "prompts_per_improvement": sum(evaluated[1:]) / improvements if improvements else None,
    }
