"""TIES: trim, elect a sign, average those that agree (Yadav et al. 2023, arXiv 2306.01708)."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Slerp: spherical linear interpolation (Shoemake, SIGGRAPH 1985), from one expert to the next.

MIN_SINE = 1e-3
"""The sine of an angle below which the arc is taken for a line: one cannot tell, or which arc."""


def slerp_coefficients(gram: np.ndarray) -> np.ndarray:
    """What each task vector is multiplied by, [K], from their inner products [K, K].

    Two meet halfway. With more, the j-th (from 0) pulls the merge of those before it by 1 / (j + 1)
    of the angle, as in a running mean: the result depends on their order. The lengths of the
    vectors are kept and are interpolated too, in proportion to the arcs. A task vector that is zero
    has no direction and is left out.
    """
    merge = np.zeros(len(gram))
    for count, j in enumerate(np.flatnonzero(gram.diagonal() > 0)):
        length = float(merge @ gram @ merge) ** 0.5 * float(gram[j, j]) ** 0.5
        cosine = float(merge @ gram[j]) / length if length > 0 else 1.0
        stay, go = slerp_factors(np.clip(cosine, -1, 1), 1 / (count + 1))
        merge = stay * merge
        merge[j] += go
    return merge


def slerp_factors(cosine: float, t: float) -> tuple[float, float]:
    """The two factors of slerp at t in [0, 1], of vectors that enclose an angle of this cosine.

    Where they are parallel, 1 - t and t: the straight line.
    """
    angle = np.arccos(cosine)
    if (sine := np.sin(angle)) < MIN_SINE:
        return 1 - t, t
    return float(np.sin((1 - t) * angle) / sine), float(np.sin(t * angle) / sine)


# Model stock: between the base and the mean, by the angle (Jang et al. 2024, arXiv 2403.19522).


def model_stock_coefficients(gram: np.ndarray) -> np.ndarray:
    """What each task vector is multiplied by, [K], from their inner products [K, K].

    All by t / k: the merge lies at t = k cos / (1 + (k - 1) cos) between the base, whose task
    vector is 0, and the mean. For k > 2 the cosine is the mean over all pairs. From 90 degrees on
    t is 0, the base itself. The paper has one t a layer, here it is one a module; k counts the task
    vectors that are not zero, and one alone is kept as it is.
    """
    there = gram.diagonal() > 0
    k = int(there.sum())
    if k == 0:
        return np.zeros(len(gram))
    lengths = np.sqrt(gram.diagonal()[there])
    cosines = gram[np.ix_(there, there)] / np.outer(lengths, lengths)
    pairs = cosines[np.triu_indices(k, 1)]
    cosine = max(0.0, float(pairs.mean())) if k > 1 else 1.0
    return there / k * interpolation_ratio(cosine, k)


def interpolation_ratio(cosine: float, k: int) -> float:
    """t of the paper, for k models whose task vectors enclose an angle of this cosine, 0 to 1."""
    return k * cosine / (1 + (k - 1) * cosine)


MatrixShape = tuple[int, int]


def ties_merge(
    vectors: "Iterable[Tensor]", shape: MatrixShape, density: float, draw: "Generator"
) -> "Tensor":
    """The mean, entry by entry, of the trimmed task vectors that have the elected sign.

    Each task vector keeps the share `density` of its entries, the largest by magnitude (the paper:
    20 %). The paper's lambda is 1: a coefficient of the merge takes its place. `draw` is not used.
    """
    return elect_and_average((trim_entries(one, density) for one in vectors), shape)


def trim_entries(vector: "Tensor", density: float) -> "Tensor":
    """The int(density * size) entries of largest magnitude, and those equal to the least of them.

    Zeros elsewhere. PEFT keeps some of the equal ones only.
    """
    magnitudes = vector.abs()
    cut = vector.numel() - int(density * vector.numel())
    if cut == vector.numel():
        return vector * 0
    least = np.partition(magnitudes.flatten().numpy(), cut)[cut]
    return vector * (magnitudes >= float(least))


def elect_and_average(vectors: "Iterable[Tensor]", shape: MatrixShape) -> "Tensor":
    """Elect the sign of each entry and average those that have it.

    It is the sign of the sum over all vectors, + where that is 0. Zeros do not count. One vector
    is held at a time, beside four sums of this shape; smaller ones are filled up with zeros.
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
    """A matrix with zeros below and to the right of it."""
    from torch.nn.functional import pad

    rows, columns = one.shape
    return one if one.shape == shape else pad(one, (0, shape[1] - columns, 0, shape[0] - rows))


# DARE: drop entries at random and rescale the rest (Yu et al. 2023, arXiv 2311.03099).


def dare_linear(
    vectors: "Iterable[Tensor]", shape: MatrixShape, density: float, draw: "Generator"
) -> "Tensor":
    """The mean of the task vectors after dropping: on average over seeds, their mean.

    The paper adds them up, times a lambda; K times this is that sum.
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
    """The election and the mean of TIES, where dropping takes the place of trimming."""
    return elect_and_average(drop_entries(vectors, density, draw), shape)


def drop_entries(
    vectors: "Iterable[Tensor]", density: float, draw: "Generator"
) -> "Iterator[Tensor]":
    """Each entry with the probability `density`, divided by it, else 0; one vector at a time.

    The masks are PEFT's, from the same state of a generator.
    """
    import torch

    for one in vectors:
        mask = torch.bernoulli(torch.full_like(one, density), generator=draw)
        yield one * mask / density
