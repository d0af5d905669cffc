"""Free sums: static recipes as first positions, and optimizers that begin at the best of them."""

from typing import Any

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.optimizers.bayes import BayesianSearch
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.de import DifferentialEvolution
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.static_merges import static_start_positions, utility_start_positions

UTILITIES = np.array([0.2, 0.5, np.nan, 0.4, 0.3])
STARTING = [
    {"kind": CMAES, "sum_to_one": False},
    {"kind": CMAES, "sum_to_one": False, "separable": True},
    {"kind": NaturalEvolution},
    {"kind": BayesianSearch, "sum_to_one": False, "sampler": "tpe"},
]


def made(kind: Any, experts: int = 5, groups: int = 1, **options: Any) -> Any:
    optimizer = kind(**options)
    optimizer.start(experts, 0, groups)
    return optimizer


def step(optimizer: Any, utility: Any) -> np.ndarray:
    rows: np.ndarray = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, utility(rows), np.nan))
    return rows


def test_static_recipes_at_each_scale() -> None:
    labels, rows = static_start_positions(5, 2, scales=(1.0, 2.0))
    assert labels == [
        "uniform soup",
        "task arithmetic 0.3",
        "uniform soup x 2",
        "task arithmetic 0.3 x 2",
    ]
    np.testing.assert_allclose(rows, np.repeat([[0.2], [0.3], [0.4], [0.6]], 10, axis=1))
    labels, rows = static_start_positions(5, among=2)
    np.testing.assert_allclose(rows[0], [0.5, 0.5, 0, 0, 0])
    labels, rows = static_start_positions(5, scales=(1.0, 1.5))  # 1.5 / 5 is 0.3 again
    assert labels == ["uniform soup", "task arithmetic 0.3", "task arithmetic 0.3 x 1.5"]


def test_recipes_of_utilities_leave_out_who_has_none() -> None:
    labels, rows = utility_start_positions(UTILITIES, 5, scales=(1.0, 1.5), best=(2, 3, 4))
    assert labels[:3] == ["weighted soup", "soup of the best 2", "soup of the best 3"]
    assert labels[3] == "weighted soup x 1.5" and len(labels) == 6
    np.testing.assert_allclose(rows[0], [0, 0.5, 0, 1 / 3, 1 / 6])
    np.testing.assert_allclose(rows[1], [0, 0.5, 0, 0.5, 0])
    np.testing.assert_allclose(rows[3:], 1.5 * rows[:3])
    labels, rows = utility_start_positions(np.full(5, np.nan), 5, 3)
    assert (labels, rows.shape) == ([], (0, 15))


@pytest.mark.parametrize("options", STARTING, ids=str)
def test_it_begins_with_the_recipes_and_goes_on_from_the_best(options: dict[str, Any]) -> None:
    """The utility is highest at a scaled soup: all that follows lies around it."""
    optimizer = made(**options)
    wanted = utility_start_positions(np.arange(5.0), 5, scales=(1.5,))[1][0]
    scores = [*np.arange(5.0), *np.full(100, np.nan)]

    def utility(rows: np.ndarray) -> np.ndarray:
        experts = np.array(scores[: len(rows)]) if optimizer.iteration == 0 else np.nan
        found = -np.abs(rows - wanted).max(axis=1)
        return np.where(np.isfinite(experts), experts - 9, found)

    seen = np.empty((0, 5))
    while optimizer.iteration == 0 or optimizer.is_starting:
        seen = np.vstack([seen, step(optimizer, utility)])
        optimizer.ask()
    static, learnt = (
        static_start_positions(5, scales=(1.0, 1.5))[1],
        utility_start_positions(np.arange(5.0), 5, scales=(1.0, 1.5))[1],
    )
    for row in [*static, *learnt]:
        assert (np.abs(seen - row).max(axis=1) < 1e-12).any()
    np.testing.assert_array_equal(optimizer.best_start, wanted)
    assert len(seen) <= 3 * len(optimizer.evaluate)


def test_scales_need_free_sums() -> None:
    with pytest.raises(UserError, match=r"optimizer.start_scales=\[1.5\]: .*sum_to_one=false"):
        CMAES(start_scales=[1.5])
    with pytest.raises(UserError, match=r"optimizer.start_scales\[0\]=-1: must be"):
        NaturalEvolution(start_scales=[-1])
    assert not made(NaturalEvolution, start_scales=[]).active_scales


def test_the_two_of_a_pair_lie_opposite_each_other() -> None:
    optimizer = made(NaturalEvolution, particles=9, start_scales=[])
    step(optimizer, lambda rows: rows[:, 0])
    *rows, middle = optimizer.ask()
    rows = np.array(rows)
    np.testing.assert_array_equal(middle, optimizer.mean)
    np.testing.assert_allclose(rows[::2] + rows[1::2], 2 * optimizer.mean * np.ones((4, 1)))
    assert np.abs(rows[::2] - rows[1::2]).max() > 0.01


def test_a_pair_teaches_only_if_both_were_measured() -> None:
    one, other = (made(NaturalEvolution, particles=9, start_scales=[]) for _ in range(2))
    for optimizer in (one, other):
        step(optimizer, lambda rows: rows[:, 0])
        optimizer.ask()
    one.tell(np.array([1, 2, 3, 4, 5, np.nan, np.nan, 8.0, 9.0]))
    other.tell(np.array([1, 2, 3, 4, np.nan, 6, 7, np.nan, 0.0]))
    np.testing.assert_array_equal(one.mean, other.mean)
    before = one.mean
    one.ask()
    one.tell(np.array([1, np.nan] * 4 + [1]))
    np.testing.assert_array_equal(one.mean, before)


def test_the_strategy_goes_uphill_and_narrows() -> None:
    optimizer = made(NaturalEvolution, particles=13, max_iterations=60)
    target = np.array([0.9, 0.5, -0.2, 0.2, 0.1])
    while optimizer.stop_reason() is None:
        step(optimizer, lambda rows: -((rows - target) ** 2).sum(axis=1))
    np.testing.assert_allclose(optimizer.mean, target, atol=0.02)
    assert optimizer.sigma.max() < 0.05


def test_a_gaussian_process_refuses_many_dimensions() -> None:
    with pytest.raises(UserError, match=r"gp: 3 groups of 9 experts .*27 dimensions, above .*=20"):
        made(BayesianSearch, 9, 3, sum_to_one=False)
    with pytest.raises(UserError, match="24 dimensions"):
        made(BayesianSearch, 9, 3)
    assert made(BayesianSearch, 9, 3, sampler="tpe").groups == 3
    assert made(BayesianSearch, 9, 3, max_dimensions=24).groups == 3


def test_differential_evolution_begins_with_scaled_recipes_where_sums_are_free() -> None:
    search = made(DifferentialEvolution, particles=30, sum_to_one=False)
    rows = search.ask()
    np.testing.assert_array_equal(rows[5 : 5 + 7], static_start_positions(5)[1])
    assert np.ptp(rows[12:].sum(axis=1)) > 0.5
    step(search, lambda rows: -np.abs(rows.sum(axis=1) - 1.7))
    for _ in range(20):
        step(search, lambda rows: -np.abs(rows.sum(axis=1) - 1.7))
    np.testing.assert_allclose(search.members.sum(axis=1), 1.7, atol=0.2)
