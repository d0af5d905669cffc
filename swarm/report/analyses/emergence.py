"""Correctness emergence: items that are answered correctly only at the end, compared with chance.

The two shares are those of Model Swarms (arXiv 2410.11163, figure 2); docs/analyses.md defines
them. The paper has no control: particles that guess also get other items right than before, and
with many guessers nearly every item "emerges".
"""

from typing import Any

import numpy as np

from swarm._util.terminal import format_p, format_share, format_span, format_table
from swarm.runs.folder import RunFolder
from swarm.stats.significance import PairedTest, mean_interval, paired_test

CONTROL_DRAWS = 1_000
"""Number of shuffles of the control."""


def measure_emergence(run: RunFolder) -> dict[str, Any]:
    """Compute C-surge, C-emerge and the gain of the best found alone, on dev.

    Ending particles are the personal bests. Starting particles are those evaluated in iteration 0,
    including crossover children, as both counts must be equal.

    Returns:
        `applies` and, if it is false, `reason`; else the numbers that `format_emergence` prints.
    """
    evaluated = np.flatnonzero(~np.isnan(run.utilities[0])).tolist()
    start = np.stack([run.load_answer_values((0, i)) for i in evaluated])
    end = np.stack([run.load_answer_values(run.find_best(i)) for i in evaluated])
    if not np.isin([start, end], (0.0, 1.0)).all():
        reason = "the answers' values are not all 0 or 1, so items are not right or wrong"
        return {"applies": False, "reason": reason}
    found = compare_with_controls(
        start.astype(bool), end.astype(bool), _start_row(evaluated, run.find_best()[1])
    )
    return {"applies": True, **found, "best_alone": compare_best_alone(run)}


def _start_row(evaluated: list[int], particle: int) -> int:
    """Return the row of a particle among those evaluated at the start; 0 if it began later."""
    return evaluated.index(particle) if particle in evaluated else 0


def compare_with_controls(start: np.ndarray, end: np.ndarray, best: int) -> dict[str, Any]:
    """Compute the shares and their controls.

    Args:
        start, end: Whether each particle is right on each item, [N, items].
        best: Row of the particle that ends best.
    """
    hard = np.logical_not(start.any(axis=0))
    drawn = {name: np.empty(CONTROL_DRAWS) for name in _mark_items(start, end, best)}
    for draw, guess in enumerate(_draw_guessers(start, end)):
        for name, marks in _mark_items(start, guess, best).items():
            drawn[name][draw] = marks.mean() if len(marks) else np.nan
    rise: np.ndarray = end.sum(axis=0) - start.sum(axis=0, dtype=int)
    solved = end.any(axis=0)
    return {
        "items": start.shape[1],
        "particles": len(start),
        "hard_items": int(hard.sum()),
        "guessers_drawn": CONTROL_DRAWS,
        "shares": {
            name: _share_with_control(marks, drawn[name])
            for name, marks in _mark_items(start, end, best).items()
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


def _share_with_control(marks: np.ndarray, drawn: np.ndarray) -> dict[str, Any] | None:
    """Return a share with Wilson's interval, and its control's mean, central 95 % and p.

    p is the probability of reaching the share by chance. `None` if no item qualifies.
    """
    if not len(marks):
        return None
    low, high = np.quantile(drawn, (0.025, 0.975))
    # Equal shares may differ by rounding, as they are sums in different orders.
    reached = int((drawn >= marks.mean() - 1e-12).sum())
    return {
        "observed": mean_interval(marks.astype(float).tolist()),
        "chance": (float(drawn.mean()), float(low), float(high)),
        # Add-one estimate, as a Monte Carlo p value must not be 0.
        "p_above_chance": (reached + 1) / (len(drawn) + 1),
    }


def _draw_guessers(start: np.ndarray, end: np.ndarray) -> Any:
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


def compare_best_alone(run: RunFolder) -> dict[str, Any]:
    """Compare the best found with the best initial expert, item by item, on dev and on test.

    A split that was not evaluated is left out.
    """
    before, after = run.best_expert(), run.find_best()
    found: dict[str, Any] = {"expert": run.experts[before[1]]}
    pairs = {
        "dev": (run.load_answers(before), run.load_answers(after)),
        "test": (run.load_test_answers(before), run.load_test_answers(after)),
    }
    for split, (old, new) in pairs.items():
        if old and new:
            a, b = ([row["value"] for row in rows] for rows in (old, new))
            gains = np.subtract(b, a)
            found[split] = {
                "gained": int((gains > 0).sum()),
                "lost": int((gains < 0).sum()),
                "paired": paired_test(b, a),
            }
    return found


DEFINITIONS = """C-surge: items that more particles get right at the end than at the start.
C-emerge: of the items that every starting particle got wrong, those that any
ending one gets right; "best alone": that the best found gets right by itself.
By chance: ending particles with as many right answers, on random items.
p: of chance reaching as much."""


def format_emergence(found: dict[str, Any]) -> list[str]:
    """Format the result of `measure_emergence` as text."""
    if not found["applies"]:
        return [f"Does not apply: {found['reason']}."]
    rows = []
    for name, one in found["shares"].items():
        cells = ["no such item", "", ""]
        if one:
            p = one["p_above_chance"]
            cells = [format_share(*one["observed"]), format_span(*one["chance"]), f"{p:.3f}"]
        rows.append([name, *cells])
    mirror = found["mirror"]
    return [
        f"{found['items']} dev items, {found['particles']} particles, "
        f"{found['guessers_drawn']} swarms of guessers",
        "",
        *format_table(("", "observed, 95 %", "by chance, 95 %", "p"), rows),
        "",
        *DEFINITIONS.splitlines(),
        "",
        f"The reverse: {mirror['more_right']} items more often right, "
        f"{mirror['fewer_right']} less often;",
        f"{mirror['emerged']} emerged, {mirror['vanished']} that some got right and now none does.",
        *_format_best_alone(found["best_alone"]),
    ]


def _format_best_alone(found: dict[str, Any]) -> list[str]:
    lines = []
    for split in ("dev", "test"):
        if split in found:
            one = found[split]
            paired: PairedTest = one["paired"]
            chosen = ", on which it was chosen" if split == "dev" else ""
            lines.append(
                f"- {split}{chosen}: {one['gained']} items won, {one['lost']} lost of "
                f"{paired.n}, {format_p(paired.p)}"
            )
    if "test" not in found:
        lines.append("- test: not evaluated")
    return ["", f"What one model gains, against the best expert, {found['expert'][:24]}", *lines]
