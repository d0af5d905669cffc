"""Static merges: one adapter made of several, by a fixed recipe and without a score.

A recipe merges task vectors, the differences of the experts from the base. In the factor space
every A is one and every B another, merged apart from each other as in PEFT's
`add_weighted_adapter`; in the delta space the update B A is one, as in the recipes' papers.

Every recipe has the scale of one expert: it is a mean of some kind, never a sum.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm import mixing
from swarm.recipes import dare, low_rank, spherical, stock, ties

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    Pair = tuple[Tensor, Tensor]

LINEAR = {"slerp": spherical.coefficients, "model_stock": stock.coefficients}
"""Sums of the task vectors with coefficients that depend on their angles at each module."""

SPARSE = {"ties": ties.merged, "dare_linear": dare.linear, "dare_ties": dare.with_ties}
"""Merges entry by entry."""

NAMES = (*LINEAR, *SPARSE)


def merge(
    recipe: str,
    factors: "Sequence[Pair]",
    density: float,
    seed: int,
    space: str,
    rank: int,
) -> "Pair":
    """The factors of one module, merged.

    The order of the experts matters to slerp alone, and to what DARE drops. An expert that leaves
    the module as it is comes as a pair of zeros.

    Args:
        recipe: One of NAMES.
        factors: A [r_j, in] and B [out, r_j] of every expert, float32 on the CPU, with the LoRA
            scaling in B.
        density: The share of entries that TIES and DARE keep, above 0 and at most 1.
        seed: Of what DARE drops, and of the sketch that recompresses; the same seed and factors
            give the same merge.
        space: "factor" or "delta".
        rank: Of the result; in the factor space at least the highest r_j.

    Returns:
        A [rank, in] and B [out, rank] in float32, padded with zeros.

    Raises:
        ValueError: There is no such recipe or space, or the density is out of its range.
    """
    import torch

    if recipe not in NAMES or space not in ("factor", "delta") or not 0 < density <= 1:
        raise ValueError(f"recipe {recipe!r}, space {space!r}, density {density}: see merge")
    draw = torch.Generator().manual_seed(seed)
    inputs, outputs = factors[0][0].shape[1], factors[0][1].shape[0]
    if space == "factor":
        most = max(len(a) for a, _ in factors)
        down = _merged(recipe, [a for a, _ in factors], (most, inputs), density, draw)
        up = _merged(recipe, [b for _, b in factors], (outputs, most), density, draw)
        pair = down, up
    elif recipe in LINEAR:
        pair = _exact_sum(LINEAR[recipe](low_rank.gram(factors)), factors, rank)
    else:
        updates = (b @ a for a, b in factors)
        matrix = SPARSE[recipe](updates, (outputs, inputs), density, draw)
        pair = low_rank.compressed(matrix, rank, draw)
    a, b = mixing.padded(pair, rank)
    return a.float(), b.float()


def _merged(
    recipe: str, vectors: "Sequence[Tensor]", shape: ties.Shape, density: float, draw: "Generator"
) -> "Tensor":
    """Matrices of ranks that may differ, merged as they are."""
    import torch

    if recipe in SPARSE:
        return SPARSE[recipe](vectors, shape, density, draw)
    stacked = torch.stack([ties.widened(one, shape) for one in vectors]).double()
    flat = stacked.flatten(1)
    weights = LINEAR[recipe]((flat @ flat.T).numpy())
    return torch.tensordot(torch.from_numpy(weights), stacked, 1)


def _exact_sum(weights: "np.ndarray", factors: "Sequence[Pair]", rank: int) -> "Pair":
    """The sum of the weighted updates; the nearest one of `rank` where it has a higher rank."""
    pair = low_rank.side_by_side(factors, weights)
    return pair if len(pair[0]) <= rank else mixing.truncated(*pair, rank)[0]
