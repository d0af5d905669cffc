"""What differences chance alone would make: answers or signs dealt anew many times."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NUM_PERMUTATIONS = 5_000

MAX_EXACT_ROWS = 200
"""Above so many rows, sums of numbers dealt anew are drawn as normal, which they are by then."""


def stratified_differences(values: "np.ndarray", first: "np.ndarray", strata: "np.ndarray") -> "np.ndarray":
    """[K] means of the first rows minus those of the others, each stratum weighing the same."""
    import numpy as np

    return np.mean(
        [
            values[(strata == s) & first].mean(axis=0) - values[(strata == s) & ~first].mean(axis=0)
            for s in np.unique(strata)
        ],
        axis=0,
    )


def permute_differences(
    values: "np.ndarray", first: "np.ndarray", strata: "np.ndarray", shares: bool
) -> "np.ndarray":
    """[R, K] what `differences` would be if, within a stratum, it were chance who answered what.

    Args:
        shares: The K columns of each row are one 1 and zeros.
    """
    import numpy as np

    generator = np.random.Generator(np.random.Philox(key=1))
    deal = _permute_counts if shares else _permute_rows if len(values) <= MAX_EXACT_ROWS else _sample_normal
    places = [strata == s for s in np.unique(strata)]
    drawn = np.array([deal(values[p], int(first[p].sum()), generator) for p in places])
    return drawn.mean(axis=0)


def flip_gain_signs(gains: "np.ndarray") -> "np.ndarray":
    """[R, K] means of [P, K] differences whose signs are chance."""
    import numpy as np

    generator = np.random.Generator(np.random.Philox(key=2))
    signs = 2.0 * generator.integers(0, 2, size=(NUM_PERMUTATIONS, len(gains))) - 1.0
    drawn: np.ndarray = signs @ gains / len(gains)
    return drawn


def permutation_p_value(found: "np.ndarray", drawn: "np.ndarray", scale: "np.ndarray") -> float:
    """How often chance makes so large a difference: [K] found, [R, K] by chance.

    Its size is the sum of squares, each over the scale [K] (of shares: chi square's).
    """
    import numpy as np

    scale = np.where(scale > 0, scale, 1.0)
    extreme = (drawn**2 / scale).sum(axis=1) >= (found**2 / scale).sum() * (1 - 1e-9) - 1e-15
    return float((extreme.sum() + 1) / (len(drawn) + 1))


def _permute_counts(values: "np.ndarray", size: int, generator: "np.random.Generator") -> "np.ndarray":
    totals = values.sum(axis=0).astype(int)
    drawn = generator.multivariate_hypergeometric(totals, size, NUM_PERMUTATIONS, method="marginals")
    return drawn / size - (totals - drawn) / (len(values) - size)


def _permute_rows(values: "np.ndarray", size: int, generator: "np.random.Generator") -> "np.ndarray":
    import numpy as np

    n = len(values)
    order = np.argsort(generator.random((NUM_PERMUTATIONS, n)), axis=1)
    weights = np.full((NUM_PERMUTATIONS, n), -1 / (n - size))
    np.put_along_axis(weights, order[:, :size], 1 / size, axis=1)
    return weights @ values


def _sample_normal(values: "np.ndarray", size: int, generator: "np.random.Generator") -> "np.ndarray":
    import numpy as np

    n, k = values.shape
    # The covariance of a difference of means of n rows dealt without replacement.
    left = values - values.mean(axis=0)
    covariance = left.T @ left / max(n - 1, 1) * (1 / size + 1 / (n - size))
    return generator.multivariate_normal(np.zeros(k), covariance, NUM_PERMUTATIONS, method="eigh")
