"""Static merges: one adapter from several, by a fixed recipe and without a score.

- Slerp: spherical linear interpolation (Shoemake, SIGGRAPH 1985), from one expert to the next.
- Model stock: between the base and the mean, by the angle (Jang et al. 2024, arXiv 2403.19522).
- TIES: trim, elect a sign, average the entries that agree (Yadav et al. 2023, arXiv 2306.01708).
- DARE: drop entries at random and rescale the rest (Yu et al. 2023, arXiv 2311.03099).

A recipe merges task vectors, the differences of the experts from the base. In the factor space A
and B are merged separately, each as a task vector, as in PEFT's `add_weighted_adapter`; in the
delta space the update B A is one, as in the recipes' papers.

Every recipe has the scale of one expert: it is some kind of mean, never a sum.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from swarm.merging import lora_math

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from swarm.merging.lora_math import FactorPair

MIN_SINE = 1e-3
"""Sine below which slerp is linear: the arc is ill-conditioned, and at 180 degrees ambiguous."""


def slerp_coefficients(gram: np.ndarray) -> np.ndarray:
    """Return the slerp coefficients of the task vectors, [K], from their inner products [K, K].

    Two meet halfway. With more, the j-th (from 0) pulls the merge of those before it by 1 / (j + 1)
    of the angle, as in a running mean: the result depends on their order. The norms of the vectors
    are interpolated too, in proportion to the arcs. A zero task vector has no direction and is left
    out.
    """
    merge = np.zeros(len(gram))
    for count, j in enumerate(np.flatnonzero(gram.diagonal() > 0)):
        length = float(merge @ gram @ merge) ** 0.5 * float(gram[j, j]) ** 0.5
        cosine = float(merge @ gram[j]) / length if length > 0 else 1.0
        t, angle = 1 / (count + 1), np.arccos(np.clip(cosine, -1, 1))
        stay, go = 1 - t, t
        if (sine := np.sin(angle)) >= MIN_SINE:
            stay, go = np.sin((1 - t) * angle) / sine, np.sin(t * angle) / sine
        merge *= stay
        merge[j] += go
    return merge


def model_stock_coefficients(gram: np.ndarray) -> np.ndarray:
    """Return the model-stock coefficients, [K], from the task vectors' inner products [K, K].

    All are t / k: the merge is at t = k cos / (1 + (k - 1) cos) between the base, whose task vector
    is 0, and the mean. For k > 2 the cosine is the mean over all pairs. From 90 degrees on t is 0,
    the base itself. The paper has one t per layer, here it is one per module; k counts the nonzero
    task vectors, and a single one is returned unchanged.
    """
    there = gram.diagonal() > 0
    k = int(there.sum())
    if k == 0:
        return np.zeros(len(gram))
    lengths = np.sqrt(gram.diagonal()[there])
    cosines = gram[np.ix_(there, there)] / np.outer(lengths, lengths)
    pairs = cosines[np.triu_indices(k, 1)]
    cosine = max(0.0, float(pairs.mean())) if k > 1 else 1.0
    return there / k * (k * cosine / (1 + (k - 1) * cosine))


MatrixShape = tuple[int, int]


def ties_merge(
    vectors: "Iterable[Tensor]", shape: MatrixShape, density: float, draw: "Generator"
) -> "Tensor":
    """Return the entrywise mean of the trimmed task vectors that have the elected sign.

    Each task vector retains the share `density` of its entries, the largest by magnitude (the
    paper: 20 %). The paper's lambda is 1, as the merge's coefficient replaces it. `draw` is not
    used.
    """
    return elect_and_average((trim_entries(one, density) for one in vectors), shape)


def trim_entries(vector: "Tensor", density: float) -> "Tensor":
    """Retain the int(density * size) entries of largest magnitude, including ties with the least.

    The others are zero. PEFT retains only some of the ties.
    """
    magnitudes = vector.abs()
    cut = vector.numel() - int(density * vector.numel())
    if cut == vector.numel():
        return vector * 0
    least = np.partition(magnitudes.flatten().numpy(), cut)[cut]
    return vector * (magnitudes >= float(least))


def elect_and_average(vectors: "Iterable[Tensor]", shape: MatrixShape) -> "Tensor":
    """Elect the sign of each entry and average the entries that have it.

    The elected sign is that of the sum over all vectors, + for 0. Zeros do not count. Only one
    vector is in memory at a time, beside four sums of this shape; smaller ones are padded with
    zeros.
    """
    import torch

    above, below, ups, downs = torch.zeros(4, *shape)
    for one in vectors:
        wide = pad_to_shape(one, shape)
        above += wide.clamp(min=0)
        below += wide.clamp(max=0)
        ups += wide > 0
        downs += wide < 0
    up = above + below >= 0
    return torch.where(up, above, below) / torch.where(up, ups, downs).clamp(min=1)


def pad_to_shape(one: "Tensor", shape: MatrixShape) -> "Tensor":
    """Pad a matrix with zeros below and to the right."""
    from torch.nn.functional import pad

    rows, columns = one.shape
    return pad(one, (0, shape[1] - columns, 0, shape[0] - rows))


def dare_linear(
    vectors: "Iterable[Tensor]", shape: MatrixShape, density: float, draw: "Generator"
) -> "Tensor":
    """Return the mean of the task vectors after random drops; its expectation is their mean.

    The paper uses the sum times a lambda, which is K times this.
    """
    import torch

    total, count = torch.zeros(shape), 0
    for one in drop_entries(vectors, density, draw):
        total += pad_to_shape(one, shape)
        count += 1
    return total / count


def dare_ties(
    vectors: "Iterable[Tensor]", shape: MatrixShape, density: float, draw: "Generator"
) -> "Tensor":
    """Merge by TIES with random drops instead of trimming."""
    return elect_and_average(drop_entries(vectors, density, draw), shape)


def drop_entries(
    vectors: "Iterable[Tensor]", density: float, draw: "Generator"
) -> "Iterator[Tensor]":
    """Retain each entry with the probability `density`, divided by it; one vector at a time.

    The masks equal PEFT's for the same state of the generator.
    """
    import torch

    for one in vectors:
        mask = torch.bernoulli(torch.full_like(one, density), generator=draw)
        yield one * mask / density


LINEAR_MERGES = {"slerp": slerp_coefficients, "model_stock": model_stock_coefficients}
"""Sums of the task vectors with coefficients that depend on their angles at each module."""

SPARSE_MERGES = {"ties": ties_merge, "dare_linear": dare_linear, "dare_ties": dare_ties}
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

    def merge(vectors: "Sequence[Tensor]", shape: MatrixShape) -> "Tensor":
        """Merge matrices whose ranks may differ."""
        if recipe in SPARSE_MERGES:
            return SPARSE_MERGES[recipe](vectors, shape, density, draw)
        stacked = torch.stack([pad_to_shape(one, shape) for one in vectors]).double()
        flat = stacked.flatten(1)
        weights = LINEAR_MERGES[recipe]((flat @ flat.T).numpy())
        return torch.tensordot(torch.from_numpy(weights), stacked, 1)

    if space == "factor":
        highest = max(len(a) for a, _ in factors)
        down = merge([a for a, _ in factors], (highest, inputs))
        pair = down, merge([b for _, b in factors], (outputs, highest))
    elif recipe in LINEAR_MERGES:
        weights = LINEAR_MERGES[recipe](lora_math.gram_matrix(factors))
        pair = lora_math.concatenate_weighted(factors, weights)
        if len(pair[0]) > rank:
            pair = lora_math.truncate_rank(*pair, rank)[0]
    else:
        updates = (b @ a for a, b in factors)
        matrix = SPARSE_MERGES[recipe](updates, (outputs, inputs), density, draw)
        pair = lora_math.factorize_matrix(matrix, rank, draw)
    a, b = lora_math.pad_rank(pair, rank)
    return a.float(), b.float()
