"""The arithmetic of low-rank updates B A: sums of factors, exact sums, norms and recompression.

A term is a coefficient with one expert's A [rank, in] and B [out, rank], in float64 and with the
scaling in B. All results are float64 too, so that they are rounded only once, when stored.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Generator, Tensor

FactorPair = tuple["Tensor", "Tensor"]
WeightedFactors = tuple[float, "Tensor", "Tensor"]


def sum_factors(
    terms: Iterable[WeightedFactors], inputs: int, outputs: int, rank: int
) -> FactorPair:
    """Return A = sum_j c_j A_j and B = sum_j c_j B_j, padded to `rank`: the factor space.

    B A is quadratic in the coefficients, with cross terms c_i c_j B_i A_j.
    """
    import torch

    a = torch.zeros(rank, inputs, dtype=torch.float64)
    b = torch.zeros(outputs, rank, dtype=torch.float64)
    for coefficient, down, up in terms:
        a[: len(down)].add_(down, alpha=coefficient)
        b[:, : len(down)].add_(up, alpha=coefficient)
    return a, b


def concatenate_factors(terms: Iterable[WeightedFactors], inputs: int, outputs: int) -> FactorPair:
    """Return A [R, in] and B [out, R] with B A = sum_j c_j B_j A_j exactly: the delta space.

    R is the sum of the terms' ranks, 0 without terms.
    """
    import torch

    downs = [torch.zeros(0, inputs, dtype=torch.float64)]
    ups = [torch.zeros(outputs, 0, dtype=torch.float64)]
    for coefficient, down, up in terms:
        downs.append(down)
        ups.append(coefficient * up)
    return torch.cat(downs), torch.cat(ups, dim=1)


def pad_rank(pair: FactorPair, rank: int) -> FactorPair:
    """Pad an update to a higher rank with zero rows of A and columns of B."""
    from torch.nn.functional import pad

    a, b = pair
    return pad(a, (0, 0, 0, rank - len(a))), pad(b, (0, rank - len(a)))


def update_norm(a: "Tensor", b: "Tensor") -> float:
    """Return the Frobenius norm of B A, from two products of [rank, rank]."""
    return max(0.0, float(((a @ a.T) * (b.T @ b)).sum())) ** 0.5


def truncate_rank(a: "Tensor", b: "Tensor", rank: int) -> tuple[FactorPair, float]:
    """Return the nearest update of `rank` to B A in the Frobenius norm, and its distance.

    Uses the singular values of R_B R_A^T, where B = Q_B R_B and A^T = Q_A R_A (Eckart and Young),
    so that no matrix is larger than a factor. Half of each singular value goes to either side.
    """
    import torch

    q, up = torch.linalg.qr(b)
    right, down = torch.linalg.qr(a.T)
    u, values, v = torch.linalg.svd(up @ down.T)
    share = values[:rank].sqrt()
    pair = share[:, None] * (v[:rank] @ right.T), q @ u[:, :rank] * share
    return pair, float(values[rank:].norm())


def compress_update(exact: FactorPair, rank: int | None) -> tuple[FactorPair, float, float]:
    """Compress an update to at most `rank` (None: any), in float32.

    Returns:
        The stored pair, and the Frobenius norms of the exact update and of the difference.
    """
    import torch

    near, cut = exact, 0.0
    if rank is not None and len(exact[0]) > rank:
        near, cut = truncate_rank(*exact, rank)
    kept = near[0].float(), near[1].float()
    (a, b), (down, up) = near, (kept[0].double(), kept[1].double())
    # B A - B' A' = [B - B', B'] [A; A - A'] avoids the cancellation of the direct difference.
    parts = [(a, b - up)] if torch.equal(a, down) else [(a, b - up), (a - down, up)]
    rounding = update_norm(
        torch.cat([one for one, _ in parts]), torch.cat([two for _, two in parts], 1)
    )
    return kept, update_norm(*exact), (cut**2 + rounding**2) ** 0.5


def compress_modules(
    exact: Iterable[tuple[str, FactorPair]], rank: int | None
) -> tuple[dict[str, FactorPair], dict[str, Any]]:
    """Compress the updates of all modules to float32 factors.

    Args:
        exact: Module and update.
        rank: Maximum rank of a pair; None for any.

    Returns:
        The pairs, and the relative errors: "overall", of all modules as one matrix, and "worst", of
            the "worst_module".
    """
    found = {name: compress_update(pair, rank) for name, pair in exact}
    relative = {name: error / norm for name, (_, norm, error) in found.items() if norm}
    total = sum(norm**2 for _, norm, _ in found.values())
    missed = sum(error**2 for _, _, error in found.values())
    worst = max(relative, key=lambda name: relative[name]) if any(relative.values()) else None
    errors = {
        "overall": (missed / total) ** 0.5 if total else 0.0,
        "worst": relative[worst] if worst else 0.0,
        "worst_module": worst,
    }
    return {name: pair for name, (pair, _, _) in found.items()}, errors


OVERSAMPLING, POWER_ITERATIONS = 8, 4
"""Extra directions and subspace iterations of the randomized range finder."""


def concatenate_weighted(factors: "Sequence[FactorPair]", weights: np.ndarray) -> "FactorPair":
    """Return the exact weighted sum of the updates: A [R, in] and B [out, R], float64.

    R is the sum of the ranks.
    """
    (a, b), *_ = factors
    terms = [
        (float(weight), down.double(), up.double())
        for weight, (down, up) in zip(weights, factors, strict=True)
    ]
    return concatenate_factors(terms, a.shape[1], b.shape[0])


def gram_matrix(factors: "Sequence[FactorPair]") -> np.ndarray:
    """Return the inner products <B_i A_i, B_j A_j> of all updates, [K, K] float64."""
    import torch

    a, b = concatenate_weighted(factors, np.ones(len(factors)))
    ranks = torch.tensor([len(down) for down, _ in factors])
    owner = torch.eye(len(factors), dtype=torch.float64).repeat_interleave(ranks, 1)
    products: np.ndarray = (owner @ ((a @ a.T) * (b.T @ b)) @ owner.T).numpy()
    return products


def factorize_matrix(matrix: "Tensor", rank: int, draw: "Generator") -> "FactorPair":
    """Return factors of at most `rank` whose product approximates a matrix [out, in].

    The nearest (an SVD) if `rank` is close to a side of it; else by a randomized range finder with
    subspace iteration (Halko, Martinsson and Tropp 2011, algorithm 4.4), as an SVD of a large
    matrix takes minutes.
    """
    import torch

    columns = min(rank + OVERSAMPLING, *matrix.shape)
    basis = matrix @ torch.randn(matrix.shape[1], columns, generator=draw)
    basis = torch.linalg.qr(basis).Q
    # Orthogonalize in both directions: powers of the matrix lose small singular directions to
    # rounding.
    for _ in range(POWER_ITERATIONS):
        rows = torch.linalg.qr(matrix.T @ basis).Q
        basis = torch.linalg.qr(matrix @ rows).Q
    pair = (basis.T @ matrix).double(), basis.double()
    return truncate_rank(*pair, rank)[0]
