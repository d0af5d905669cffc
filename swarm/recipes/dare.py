"""DARE: drop entries at random and rescale the rest (Yu et al. 2023, arXiv 2311.03099)."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from swarm.recipes.ties import Shape, elected, widened

if TYPE_CHECKING:
    from torch import Generator, Tensor


def linear(
    vectors: "Iterable[Tensor]", shape: Shape, density: float, draw: "Generator"
) -> "Tensor":
    """The mean of the task vectors after dropping: on average over seeds, their mean.

    The paper adds them up, times a lambda; K times this is that sum.
    """
    import torch

    total, count = torch.zeros(shape), 0
    for one in dropped(vectors, density, draw):
        total += widened(one, shape)
        count += 1
    return total / count


def with_ties(
    vectors: "Iterable[Tensor]", shape: Shape, density: float, draw: "Generator"
) -> "Tensor":
    """The election and the mean of TIES, where dropping takes the place of trimming."""
    return elected(dropped(vectors, density, draw), shape)


def dropped(vectors: "Iterable[Tensor]", density: float, draw: "Generator") -> "Iterator[Tensor]":
    """Each entry with the probability `density`, divided by it, else 0; one vector at a time.

    The masks are PEFT's, from the same state of a generator.
    """
    import torch

    for one in vectors:
        mask = torch.bernoulli(torch.full_like(one, density), generator=draw)
        yield one * mask / density
