"""Updates B A at their rank: sums and angles without the matrix, and a way back from a matrix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swarm import mixing

if TYPE_CHECKING:
    from swarm.mixing import FactorPair
    from torch import Generator, Tensor


OVERSAMPLING, POWER_ITERATIONS = 8, 4
"""More directions than the rank, and passes to and fro, that find those of a full matrix."""


def concatenate_weighted(factors: "Sequence[FactorPair]", weights: np.ndarray) -> "FactorPair":
    """The sum of the updates, each times its weight, exactly: A [R, in] and B [out, R], float64.

    R is the sum of the ranks.
    """
    (a, b), *_ = factors
    terms = [
        (float(weight), down.double(), up.double())
        for weight, (down, up) in zip(weights, factors, strict=True)
    ]
    return mixing.concatenate_factors(terms, a.shape[1], b.shape[0])


def gram_matrix(factors: "Sequence[FactorPair]") -> np.ndarray:
    """The inner products <B_i A_i, B_j A_j> of all updates, [K, K] float64."""
    import torch

    a, b = concatenate_weighted(factors, np.ones(len(factors)))
    ranks = torch.tensor([len(down) for down, _ in factors])
    owner = torch.eye(len(factors), dtype=torch.float64).repeat_interleave(ranks, 1)
    products: np.ndarray = (owner @ ((a @ a.T) * (b.T @ b)) @ owner.T).numpy()
    return products


def factorize_matrix(matrix: "Tensor", rank: int, draw: "Generator") -> "FactorPair":
    """Factors of at most `rank` whose product is near to a matrix [out, in].

    The nearest (an SVD) where `rank` is close to a side of it; else by a randomized range finder
    with subspace iteration (Halko, Martinsson and Tropp 2011, algorithm 4.4), as an SVD of a large
    matrix takes minutes.
    """
    import torch

    columns = min(rank + OVERSAMPLING, *matrix.shape)
    basis = matrix @ torch.randn(matrix.shape[1], columns, generator=draw)
    basis = torch.linalg.qr(basis).Q
    for _ in range(POWER_ITERATIONS):
        back = torch.linalg.qr(matrix.T @ basis).Q
        basis = torch.linalg.qr(matrix @ back).Q
    pair = (basis.T @ matrix).double(), basis.double()
    return mixing.truncate_rank(*pair, rank)[0]
