"""DARE: drop entries at random and rescale the rest (Yu et al. 2023, arXiv 2311.03099)."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from swarm.recipes.ties import MatrixShape, elect_and_average, pad_to_shape

if TYPE_CHECKING:
    from torch import Generator, Tensor


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


def drop_entries(vectors: "Iterable[Tensor]", density: float, draw: "Generator") -> "Iterator[Tensor]":
    """Each entry with the probability `density`, divided by it, else 0; one vector at a time.

    The masks are PEFT's, from the same state of a generator.
    """
    import torch

    for one in vectors:
        mask = torch.bernoulli(torch.full_like(one, density), generator=draw)
        yield one * mask / density
