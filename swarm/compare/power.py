"""What an experiment can show, before it is paid for."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist

from swarm._util.terminal import pluralize

POWER, SIGNIFICANCE_LEVEL = 0.8, 0.05


def detectable(groups: Mapping[str, Sequence[str]], paraphrases: int, samples: int) -> str:
    """Describe the smallest difference of shares that a run can detect, before it is paid for.

    For shares near a half, the worst case, by a two-sided z-test of the two smallest groups at 5 %
    over all comparisons (Bonferroni's, which Holm's is never worse than), with 80 % power.
    Paraphrases and models are assumed to be equal; if they differ, the power is lower.

    Args:
        groups: Name to models.
        paraphrases: Number of paraphrases of the question.
        samples: Number per paraphrase and model.
    """
    count, sizes = len(groups), sorted(len(m) * paraphrases * samples for m in groups.values())
    each = " each" if paraphrases > 1 else ""
    asked = f"{pluralize(paraphrases, 'paraphrase')} x {pluralize(samples, 'sample')}{each}"
    head = f"{pluralize(count, 'group')}, {asked}"
    if count == 0 or sizes[0] == 0:
        return f"{head}: nothing is asked"
    several = any(len(models) > 1 for models in groups.values())
    assumed = "models and paraphrases alike" if several else "paraphrases alike"
    if any(set(a) & set(b) for a, b in combinations(groups.values(), 2)):
        assumed += "; some models are in several groups"
    if count == 1:
        half = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2) / math.sqrt(4 * sizes[0])
        return f"{head}: shares will be known to within {_round_up(half)} (95 %, {assumed})"
    comparisons = math.comb(count, 2)
    least = smallest_difference(sizes[0], sizes[1], comparisons)
    assumed = f"(5 %, {pluralize(comparisons, 'comparison')}; {assumed})"
    if least >= 1:
        return f"{head}: too few answers to show a difference of shares {assumed}"
    seen = f"differences of shares from {_round_up(least)} up will be seen in 4 of 5 runs"
    return f"{head}: {seen} {assumed}"


def smallest_difference(first: int, second: int, comparisons: int = 1) -> float:
    """Return the smallest difference of two shares around a half detected with 80 % power.

    Args:
        first: Answers of one.
        second: Answers of the other.
        comparisons: Divisor of the level of 5 %.
    """
    normal = NormalDist()
    level, power = normal.inv_cdf(1 - SIGNIFICANCE_LEVEL / 2 / comparisons), normal.inv_cdf(POWER)
    each = (1 / first + 1 / second) / 2
    least = 0.0
    for _ in range(50):
        # Under the alternative the shares are (1 ± least) / 2, whose variance is below that of two
        # halves.
        apart = max(0.0, 0.5 - least**2 / 2)
        least = min(1.0, (level * math.sqrt(0.5) + power * math.sqrt(apart)) * math.sqrt(each))
    return least


def _round_up(value: float) -> str:
    """Format with two decimals, rounded up."""
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"
