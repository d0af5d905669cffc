"""The genetic search: what leaves the population, what is scored anew, and that ranks decide."""

import numpy as np
import pytest

from swarm.optimizers.genome import Genome

TARGET = np.array([0.5, 0.3, 0.2, 0.0])


def bowl(rows: np.ndarray) -> np.ndarray:
    return -((rows - TARGET) ** 2).sum(axis=1)


def begun(**options: object) -> Genome:
    genome = Genome(particles=12, **options)  # type: ignore[arg-type]
    genome.start(4, 0)
    return genome


def step(genome: Genome, objective=bowl) -> np.ndarray:
    rows = genome.ask()
    genome.tell(np.where(genome.evaluate, objective(rows), np.nan))
    return rows


def test_the_elite_stays_and_the_best_is_never_lost() -> None:
    genome, best = begun(), -np.inf
    for _ in range(40):
        rows = genome.ask()
        best = max(best, bowl(rows[genome.evaluate]).max())
        step(genome)
        assert genome.utilities.max() == best
        np.testing.assert_array_equal(genome.extremes[0], genome.members[genome.utilities.argmax()])


def test_every_member_has_the_score_of_where_it_is() -> None:
    """Also of those that moved: no score is handed on."""
    genome = begun()
    for _ in range(20):
        step(genome)
        np.testing.assert_allclose(genome.utilities, bowl(genome.members), atol=1e-15)
        np.testing.assert_allclose(genome.own_utilities, bowl(genome.own_positions), atol=1e-15)
        assert (genome.own_utilities >= genome.utilities).all()


def test_asks_are_succession_and_offspring_by_turns() -> None:
    genome = begun(crossover=1.0, mutation=0.0, elite=0.25)
    step(genome)
    before = genome.members
    rows = genome.ask()
    moved = (rows != before).any(axis=1)
    assert (genome.evaluate == moved).all() and moved.sum() == 9  # all but 3 of 12
    step(genome)
    rows = genome.ask()
    assert genome.evaluate.sum() == 6  # a child of each pair
    for child in rows[genome.evaluate]:
        assert any(
            np.allclose(child, t * a + (1 - t) * b)
            for a in genome.members
            for b in genome.members
            for t in [((child - b) @ (a - b)) / max(((a - b) ** 2).sum(), 1e-30)]
            if -1e-9 <= t <= 1 + 1e-9
        )


def test_mutants_differ_and_stay_among_the_sums_to_one() -> None:
    genome = begun(crossover=0.0, mutation=1.0, gene=0.0, succession=False)
    step(genome)
    rows = genome.ask()
    assert genome.evaluate.all()
    changes = rows - genome.members
    assert (np.abs(changes).max(axis=1) > 0).all()
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
    # One gene changes, and what keeps the sum is shared by all.
    assert all(len(np.unique(np.round(change, 12))) == 2 for change in changes)


@pytest.mark.parametrize("scale", [lambda u: u + 5, lambda u: np.exp(8 * u), lambda u: u - 100])
def test_only_ranks_count(scale) -> None:
    """Negative utilities too: they are no chances of a roulette."""
    one, other = begun(), begun()
    for _ in range(15):
        step(one)
        step(other, lambda rows: scale(bowl(rows)))
        np.testing.assert_array_equal(one.ask(), other.ask())
