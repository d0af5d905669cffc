"""Counter-based random numbers, and the initial population of a search drawn with them."""

from functools import lru_cache

import numpy as np

WEIGHTS, CROSSOVER, PARTNER, DROP_ITERATION, DROP_PARTICLE = range(5)
"""Purpose ids in `pso`; other optimizers may reuse them, as they never share a search."""


def counter_rng(seed: int, iteration: int, particle: int, purpose: int) -> np.random.Generator:
    """Return a generator that depends only on these four numbers, not on earlier draws.

    A resumed run, or one that draws in another order, therefore sees the same numbers. The lowest
    word of Philox's counter stays 0, since it is the one that advances as numbers are drawn.
    """
    counter = np.array([0, iteration, particle, purpose], dtype=np.uint64)
    key = np.array([seed % 2**64, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@lru_cache(maxsize=1024)
def permutation(seed: int, epoch: int, particle: int, purpose: int, items: int) -> np.ndarray:
    """Return a random order of the items, read-only; see `counter_rng`."""
    found = counter_rng(seed, epoch, particle, purpose).permutation(items)
    found.setflags(write=False)
    return found


def minibatch(
    seed: int, particle: int, purpose: int, step: int, batch: int, items: int
) -> list[int]:
    """Return the items of a step: the next `batch` of a permutation that each epoch redraws."""
    places = (divmod(index, items) for index in range(step * batch, (step + 1) * batch))
    return [
        int(permutation(seed, epoch, particle, purpose, items)[offset]) for epoch, offset in places
    ]


def initial_population(
    experts: int,
    particles: int,
    seed: int,
    maximum: float = 1.0,
    children_are_parents: bool = False,
    groups: int = 1,
) -> np.ndarray:
    """Return starting positions [particles, groups x experts]: experts, then crossover children.

    A child is t * a + (1 - t) * b with t ~ U(0, maximum) and two different parents: experts, as in
    Model Swarms (its "populate"), or also earlier children, as in its code. Above a maximum of 1 a
    child can be beyond parent a instead of between the two. Every group draws its own t.
    """
    rows = np.zeros((particles, groups * experts))
    rows[:experts] = expert_positions(experts, groups)
    for child in range(experts, particles):
        draw = counter_rng(seed, 0, child, CROSSOVER)
        first, second = sample_pair(child if children_are_parents else experts, draw)
        t = np.repeat(maximum * draw.random(groups), experts)
        rows[child] = t * rows[first] + (1.0 - t) * rows[second]
    return rows


def expert_positions(experts: int, groups: int) -> np.ndarray:
    """Return the experts as positions, [K, G x K]."""
    return np.tile(np.eye(experts), groups)


def sample_mixtures(draw: np.random.Generator, count: int, experts: int, groups: int) -> np.ndarray:
    """Return positions [count, G x K], each group uniform in the simplex of the experts."""
    rows = draw.dirichlet(np.ones(experts), size=(count, groups))
    return rows.reshape(count, groups * experts)


def sample_pair(count: int, draw: np.random.Generator) -> tuple[int, int]:
    """Return two different numbers below `count`, each pair equally likely."""
    first = int(draw.integers(count))
    return first, sample_other(first, count, draw)


def sample_other(index: int, count: int, draw: np.random.Generator) -> int:
    """Return a number below `count` other than `index`, each equally likely."""
    other = int(draw.integers(count - 1))
    return other + (other >= index)
