"""The positions that a search may visit: a box of coefficients, or its part where they sum to 1."""

import numpy as np

from swarm.optimizers.checks import MAX_VALUE, Rule

LOW: Rule = (float, lambda value: -MAX_VALUE <= value <= 0, f"a number from -{MAX_VALUE:g} to 0")
HIGH: Rule = (float, lambda value: 1 <= value <= MAX_VALUE, f"a number from 1 to {MAX_VALUE:g}")

BOUND_RULES: dict[str, tuple[Rule, str]] = {
    "low": (LOW, "experts have 0s"),
    "high": (HIGH, "experts have a 1"),
}
"""What the two bounds of a coefficient may be."""


class CoefficientBounds:
    """All c with low <= c_j <= high and, with `sum_to_one`, sum c = 1; the experts are in it.

    Where they sum to 1 there are K - 1 free coordinates y, with c = 1/K + B y and the columns of
    B orthonormal and orthogonal to (1, ..., 1): distances are those of the coefficients, and no
    expert is special. Of several groups it is the product: each has its own K coefficients c and
    its own coordinates, D in all, G (K - 1) or G K.

    Args:
        experts: K.
        low: At most 0.
        high: At least 1.
        sum_to_one: Off, the sum is free.
        groups: G.
    """

    def __init__(
        self, experts: int, low: float, high: float, sum_to_one: bool = True, groups: int = 1
    ) -> None:
        self.low, self.high, self.sum_to_one, self.experts = low, high, sum_to_one, experts
        self._centre = np.full(groups * experts, 1 / experts if sum_to_one else 0.0)
        basis = helmert_basis(experts) if sum_to_one else np.eye(experts)
        self._basis = np.kron(np.eye(groups), basis)

    def to_coordinates(self, rows: np.ndarray) -> np.ndarray:
        """[M, G x K] to [M, D]."""
        return (rows - self._centre) @ self._basis

    def to_positions(self, coordinates: np.ndarray) -> np.ndarray:
        """The inverse of `coordinates`."""
        return self._centre + coordinates @ self._basis.T

    def contains(self, row: np.ndarray) -> bool:
        """Whether a row [G x K] is inside of the box."""
        return bool(((row >= self.low) & (row <= self.high)).all())

    def project(self, rows: np.ndarray) -> np.ndarray:
        """The nearest position of the region to each of [M, G x K] rows."""
        if not self.sum_to_one:
            return np.clip(rows, self.low, self.high)
        shape, rows = rows.shape, rows.reshape(-1, self.experts)
        # It is clip(c - t) with one t a row (Lagrange); the sum falls as t rises, so bisect.
        below = (rows - self.high).min(axis=1, keepdims=True)
        above = (rows - self.low).max(axis=1, keepdims=True)
        for _ in range(60):
            middle = (below + above) / 2
            heavy = np.clip(rows - middle, self.low, self.high).sum(axis=1, keepdims=True) > 1
            below, above = np.where(heavy, middle, below), np.where(heavy, above, middle)
        return np.clip(rows - (below + above) / 2, self.low, self.high).reshape(shape)


def helmert_basis(experts: int) -> np.ndarray:
    """B [K, K - 1]: orthonormal columns, each orthogonal to (1, ..., 1)."""
    basis = np.zeros((experts, experts - 1))
    for column in range(1, experts):
        basis[:column, column - 1] = 1.0
        basis[column, column - 1] = -column
    return basis / np.sqrt((basis**2).sum(axis=0))
