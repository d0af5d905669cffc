"""TIES: trim, elect a sign, average those that agree (Yadav et al. 2023, arXiv 2306.01708)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Generator, Tensor

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
