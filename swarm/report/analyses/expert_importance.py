"""Importance of each expert: functional ANOVA of a surrogate of the utility.

The surrogate f is a Gaussian process mean (kernel ridge regression with an RBF kernel), fitted on
the positions that the search evaluated. The importance of expert k is its total Sobol' index,

    S_k = E[ Var(f | all coefficients but those of k) ] / Var(f)
        = E[ (f(x) - f(x with the coefficients of k redrawn))^2 ] / (2 Var(f)),

the share of the variance of f that involves expert k, alone or in interaction (Homma and Saltelli,
1996). The second form is the estimator of Jansen (1999). The expectations are over the product of
the experts' marginal distributions in the run: each expert's coefficients are permuted
independently among the evaluated positions. The indices sum to 1 if f is additive, and to more with
interactions. Hutter et al. (ICML 2014) use the same decomposition for hyperparameters, with a
random forest as the surrogate and uniform marginals.

An importance describes the region that the search visited, and the surrogate: where its explained
variance is low (`r2`), the utilities are mostly noise and the importances mean little.
"""

from dataclasses import dataclass

import numpy as np

from swarm.runs.folder import RunFolder

MIN_POSITIONS = 12
"""Minimum number of evaluated positions; fewer do not determine a surrogate."""

MAX_POSITIONS = 300
"""Maximum number of positions that the surrogate is fitted on, evenly spaced over the search."""

RELIABLE_R2, RELIABLE_POSITIONS = 0.2, 30
"""Explained variance and number of positions below which importances should not be interpreted.

On utilities that are noise (9 experts, 60 runs each), 12 % of the surrogates of 13 positions
explain as much, 27 % of 20, 5 % of 30 and 2 % of 40.
"""

DRAWS = 8
"""Number of permutations of the positions that the expectations are estimated with."""

LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Candidate length scales of the kernel, in units of the median distance of two positions."""

RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)
"""Candidate ridges: variance of the noise relative to the kernel's scale."""


@dataclass(frozen=True, slots=True)
class ExpertImportance:
    """Importance of each expert for the utility on dev.

    Attributes:
        experts: Names, most important first.
        shares: Total Sobol' index of each expert, in that order; 0 to about 1.
        r2: Variance of the utilities that the surrogate explains, leave-one-out; at most 1.
        positions: Number of positions that the surrogate was fitted on.
    """

    experts: list[str]
    shares: list[float]
    r2: float
    positions: int

    @property
    def reliable(self) -> bool:
        """Whether the surrogate explains enough of the utilities of enough positions."""
        return self.r2 >= RELIABLE_R2 and self.positions >= RELIABLE_POSITIONS


def measure_importance(run: RunFolder) -> ExpertImportance | None:
    """Measure the importance of each expert in a run.

    The coefficients of an expert in all groups of modules are one input, redrawn together.

    Returns:
        The importances; `None` with fewer than 12 distinct evaluated positions, or if all
        utilities are equal.
    """
    known = np.isfinite(run.utilities)
    positions, first = np.unique(run.positions[known], axis=0, return_index=True)
    if len(positions) < MIN_POSITIONS:
        return None
    # In the order of the search, so that the selection covers all of its phases.
    order = np.sort(first)
    chosen = order[np.linspace(0, len(order) - 1, min(len(order), MAX_POSITIONS)).astype(int)]
    x, y = run.positions[known][chosen], run.utilities[known][chosen]
    if np.ptp(y) == 0:
        return None
    blocks = np.arange(x.shape[1]).reshape(len(run.groups), len(run.experts)).T
    surrogate = fit_surrogate(x, y)
    shares = total_sobol_indices(surrogate, x, list(blocks))
    ranked = np.argsort(-shares, kind="stable")
    return ExpertImportance(
        [run.experts[k] for k in ranked],
        [float(shares[k]) for k in ranked],
        surrogate.r2,
        len(x),
    )


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Kernel ridge regression with an RBF kernel.

    Attributes:
        x: Positions it was fitted on, [n, d].
        weights: Dual weights, [n].
        mean: Mean of the utilities.
        length: Length scale of the kernel.
        r2: Explained variance, leave-one-out.
    """

    x: np.ndarray
    weights: np.ndarray
    mean: float
    length: float
    r2: float

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict the utilities of positions [m, d], as [m]."""
        found: np.ndarray = _rbf_kernel(x, self.x, self.length) @ self.weights + self.mean
        return found


def fit_surrogate(x: np.ndarray, y: np.ndarray) -> Surrogate:
    """Fit a surrogate; length scale and ridge are those with the least leave-one-out error.

    The leave-one-out residual of a linear smoother H is (y - H y)_i / (1 - H_ii), so that no
    candidate has to be refitted (Craven and Wahba, 1979).

    Args:
        x: Distinct positions, [n, d].
        y: Utilities, [n], not all equal.
    """
    centred = y - y.mean()
    squared = _squared_distances(x, x)
    median = float(np.sqrt(np.median(squared[squared > 0])))
    best: tuple[float, float, np.ndarray] | None = None
    for factor in LENGTHS:
        length = factor * median
        values, vectors = np.linalg.eigh(np.exp(-squared / (2 * length**2)))
        rotated = vectors.T @ centred
        for ridge in RIDGES:
            shrunk = values.clip(0) / (values.clip(0) + ridge)
            leverage = (vectors**2) @ shrunk
            errors = (centred - vectors @ (shrunk * rotated)) / (1 - leverage).clip(1e-9)
            error = float(errors @ errors)
            if best is None or error < best[0]:
                best = error, length, vectors @ (rotated / (values.clip(0) + ridge))
    assert best is not None
    error, length, weights = best
    # A constant prediction, the mean of all others, has the residuals n / (n - 1) * centred.
    constant = float(centred @ centred) * (len(y) / (len(y) - 1)) ** 2
    return Surrogate(x, weights, float(y.mean()), length, 1 - error / constant)


def total_sobol_indices(
    surrogate: Surrogate, x: np.ndarray, blocks: list[np.ndarray]
) -> np.ndarray:
    """Estimate the total Sobol' index of each block of columns (Jansen, 1999).

    Args:
        x: Positions whose columns, permuted independently by block, are the marginals, [n, d].
        blocks: Columns of each input; every column is in one block.

    Returns:
        One index per block; all 0 if the surrogate is constant.
    """
    generator = np.random.Generator(np.random.Philox(key=13))
    effects, variances = np.zeros(len(blocks)), []
    for _ in range(DRAWS):
        sample = _permuted(x, blocks, generator)
        other = _permuted(x, blocks, generator)
        predicted = surrogate.predict(sample)
        variances.append(predicted.var())
        for k, columns in enumerate(blocks):
            redrawn = sample.copy()
            redrawn[:, columns] = other[:, columns]
            effects[k] += ((predicted - surrogate.predict(redrawn)) ** 2).mean() / 2
    total = float(np.sum(variances))
    found: np.ndarray = effects / total if total > 0 else effects
    return found


def _permuted(
    x: np.ndarray, blocks: list[np.ndarray], generator: np.random.Generator
) -> np.ndarray:
    found = np.empty_like(x)
    for columns in blocks:
        found[:, columns] = x[generator.permutation(len(x))][:, columns]
    return found


def _rbf_kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    found: np.ndarray = np.exp(-_squared_distances(a, b) / (2 * length**2))
    return found


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    found: np.ndarray = squares.clip(0)
    return found
