"""Static merges: one adapter from several, by a fixed recipe and without a score.

A recipe merges task vectors, the differences of the experts from the base. In the factor space A
and B are merged separately, each as a task vector, as in PEFT's `add_weighted_adapter`; in the
delta space the update B A is one, as in the recipes' papers.

Every recipe has the scale of one expert: it is some kind of mean, never a sum.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.merging import lora_math, methods

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from swarm.merging.lora_math import FactorPair

LINEAR_MERGES = {
    "slerp": methods.slerp_coefficients,
    "model_stock": methods.model_stock_coefficients,
}
"""Sums of the task vectors with coefficients that depend on their angles at each module."""

SPARSE_MERGES = {
    "ties": methods.ties_merge,
    "dare_linear": methods.dare_linear,
    "dare_ties": methods.dare_ties,
}
"""Merges entry by entry."""

MERGE_NAMES = (*LINEAR_MERGES, *SPARSE_MERGES)


def merge_factors(
    recipe: str,
    factors: "Sequence[FactorPair]",
    density: float,
    seed: int,
    space: str,
    rank: int,
) -> "FactorPair":
    """Merge the factors of one module.

    The order of the experts matters only to slerp, and to DARE's random drops. An expert that does
    not change the module is given as a pair of zeros.

    Args:
        recipe: One of `MERGE_NAMES`.
        factors: A [r_j, in] and B [out, r_j] of every expert, float32 on the CPU, with the LoRA
            scaling in B.
        density: The share of entries that TIES and DARE retain, above 0 and at most 1.
        seed: Seed of DARE's drops, and of the sketch for recompression; the same seed and factors
            give the same merge.
        space: "factor" or "delta".
        rank: Rank of the result; in the factor space at least the highest r_j.

    Returns:
        A [rank, in] and B [out, rank] in float32, padded with zeros.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    inputs, outputs = factors[0][0].shape[1], factors[0][1].shape[0]
    if space == "factor":
        max_rank = max(len(a) for a, _ in factors)
        down = _merge_matrices(recipe, [a for a, _ in factors], (max_rank, inputs), density, draw)
        up = _merge_matrices(recipe, [b for _, b in factors], (outputs, max_rank), density, draw)
        pair = down, up
    elif recipe in LINEAR_MERGES:
        pair = _exact_sum(LINEAR_MERGES[recipe](lora_math.gram_matrix(factors)), factors, rank)
    else:
        updates = (b @ a for a, b in factors)
        matrix = SPARSE_MERGES[recipe](updates, (outputs, inputs), density, draw)
        pair = lora_math.factorize_matrix(matrix, rank, draw)
    a, b = lora_math.pad_rank(pair, rank)
    return a.float(), b.float()


def _merge_matrices(
    recipe: str,
    vectors: "Sequence[Tensor]",
    shape: methods.MatrixShape,
    density: float,
    draw: "Generator",
) -> "Tensor":
    """Merge matrices whose ranks may differ."""
    import torch

    if recipe in SPARSE_MERGES:
        return SPARSE_MERGES[recipe](vectors, shape, density, draw)
    stacked = torch.stack([methods.pad_to_shape(one, shape) for one in vectors]).double()
    flat = stacked.flatten(1)
    weights = LINEAR_MERGES[recipe]((flat @ flat.T).numpy())
    return torch.tensordot(torch.from_numpy(weights), stacked, 1)


def _exact_sum(weights: "np.ndarray", factors: "Sequence[FactorPair]", rank: int) -> "FactorPair":
    """Return the sum of the weighted updates, truncated to `rank` if its rank is higher."""
    pair = lora_math.concatenate_weighted(factors, weights)
    return pair if len(pair[0]) <= rank else lora_math.truncate_rank(*pair, rank)[0]
