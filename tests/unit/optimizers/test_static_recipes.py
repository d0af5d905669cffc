"""Static recipes: on their own, and as first positions of optimizers with free sums."""

import json
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.optimizers.bayes import BayesianSearch
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.static_merges import (
    StaticMerges,
    static_start_positions,
    utility_start_positions,
)

Utility = Callable[[np.ndarray], float]


def asked(utility: Utility, **options: Any) -> StaticMerges:
    """A whole search of five experts."""
    optimizer = StaticMerges(**options)
    optimizer.start(5, 0)
    while optimizer.stop_reason() is None:
        optimizer.tell(np.array([utility(row) for row in optimizer.ask()]))
    return optimizer


def of(optimizer: StaticMerges, label: str) -> list[np.ndarray]:
    return [
        row for row, name in zip(optimizer.rows, optimizer.labels, strict=True) if name == label
    ]


def test_what_needs_no_score_is_asked_at_once() -> None:
    optimizer = StaticMerges(lambdas=[0.4, 1])
    optimizer.start(5, 0)
    np.testing.assert_array_equal(optimizer.ask()[5:], np.repeat([[0.2], [0.4], [1]], 5, axis=1))
    assert optimizer.labels[5:] == ["mean of all", "task arithmetic 0.4", "task arithmetic 1"]


def test_the_weighted_soup_goes_by_the_height_above_the_lowest() -> None:
    heights = np.array([0.5, 0.2, 0.3, 0.2, np.nan])
    found = asked(lambda row: heights[row.argmax()] if row.max() == 1 else 0.0)
    np.testing.assert_allclose(of(found, "weighted mean"), [[0.75, 0, 0.25, 0, 0]])
    equal = asked(lambda row: 0.5)
    np.testing.assert_allclose(of(equal, "weighted mean"), [np.full(5, 0.2)])
    # The greedy mean takes what does not fall.
    assert equal.stop_reason() == "every recipe is scored; the greedy mean took 5 of 5"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("particles", [None, 5, 20])
def test_the_greedy_soup_is_recipe_1_of_its_paper(seed: int, particles: int | None) -> None:
    def utility(row: np.ndarray) -> float:
        return float(np.random.default_rng([seed, crc32(row.tobytes())]).random())

    order = sorted(range(5), key=lambda j: -utility(np.eye(5)[j]))
    soup, tried = order[:1], []
    for j in order[1:]:
        tried.append(np.eye(5)[[*soup, j]].mean(axis=0))
        if utility(tried[-1]) >= utility(np.eye(5)[soup].mean(axis=0)):
            soup.append(j)
    found = asked(utility, particles=particles)
    np.testing.assert_allclose(of(found, "greedy mean"), tried)
    assert found.stop_reason() == f"every recipe is scored; the greedy mean took {len(soup)} of 5"


def test_lost_experts_are_in_no_soup_that_goes_by_utility() -> None:
    found = asked(lambda row: np.nan if row[2] == 1 else 0.5)
    for label, count in (("weighted mean", 1), ("greedy mean", 3)):
        rows = of(found, label)
        assert len(rows) == count and all(row[2] == 0 for row in rows)
    nothing = asked(lambda row: np.nan)
    arithmetic = {f"task arithmetic {factor}" for factor in nothing.lambdas}
    assert set(nothing.labels) == {"expert", "mean of all"} | arithmetic


def test_only_the_first_rows_are_merged() -> None:
    found = asked(lambda row: row[4], among=3)
    assert len(found.rows) == 5 + 1 + 3 + 1 + 2 and not found.rows[5:, 3:].any()
    with pytest.raises(UserError, match=r"optimizer.among=3: the pool has 2 rows"):
        found.start(2, 0)


def test_a_position_has_a_name() -> None:
    optimizer, again = StaticMerges(lambdas=[]), StaticMerges(lambdas=[])
    optimizer.start(3, 0, groups=2)
    while optimizer.stop_reason() is None:
        optimizer.tell(np.where(optimizer.evaluate, optimizer.ask()[:, 1], np.nan))
    again.load_state_dict(json.loads(json.dumps(optimizer.state_dict())))
    soups = ["mean of all", "greedy mean", "weighted mean", "greedy mean"]
    assert again.labels == optimizer.labels == ["expert"] * 3 + soups
    assert len(again.labels) == len(again.rows)


# As a start


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
        "mean of all",
        "task arithmetic 0.3",
        "mean of all x 2",
        "task arithmetic 0.3 x 2",
    ]
    np.testing.assert_allclose(rows, np.repeat([[0.2], [0.3], [0.4], [0.6]], 10, axis=1))
    labels, rows = static_start_positions(5, among=2)
    np.testing.assert_allclose(rows[0], [0.5, 0.5, 0, 0, 0])
    labels, rows = static_start_positions(5, scales=(1.0, 1.5))  # 1.5 / 5 is 0.3 again
    assert labels == ["mean of all", "task arithmetic 0.3", "task arithmetic 0.3 x 1.5"]


def test_recipes_of_utilities_leave_out_who_has_none() -> None:
    labels, rows = utility_start_positions(UTILITIES, 5, scales=(1.0, 1.5), best=(2, 3, 4))
    assert labels[:3] == ["weighted mean", "mean of the best 2", "mean of the best 3"]
    assert labels[3] == "weighted mean x 1.5" and len(labels) == 6
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


def test_a_pair_lies_opposite_each_other_and_teaches_only_if_both_were_measured() -> None:
    one, other = (made(NaturalEvolution, particles=9, start_scales=[]) for _ in range(2))
    for optimizer in (one, other):
        step(optimizer, lambda rows: rows[:, 0])
        *rows, middle = optimizer.ask()
    np.testing.assert_array_equal(middle, one.mean)
    np.testing.assert_allclose(np.add(rows[::2], rows[1::2]), np.tile(2 * one.mean, (4, 1)))
    assert np.abs(np.subtract(rows[::2], rows[1::2])).max() > 0.01
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
