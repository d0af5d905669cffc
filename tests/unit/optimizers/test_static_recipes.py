"""The optimizer that does not search: soups, task arithmetic, what each is called, its end."""

import json
from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest

from swarm.errors import UserError
from swarm.optimizers.static_merges import StaticMerges

NAMES = ["amber", "birch", "cedar", "dune", "elm"]
Utility = Callable[[np.ndarray], float]


def asked(optimizer: StaticMerges, utility: Utility, experts: int = 5) -> list[np.ndarray]:
    """A whole search; the positions whose utility it wanted, in order."""
    optimizer.start(experts, 0)
    found = []
    while optimizer.stop_reason() is None:
        rows = optimizer.ask()
        wanted = optimizer.evaluate
        found += list(rows[wanted])
        optimizer.tell(np.array([utility(row) for row in rows]))
    return found


def of(optimizer: StaticMerges, label: str) -> list[np.ndarray]:
    return [
        row for row, name in zip(optimizer.rows, optimizer.labels, strict=True) if name == label
    ]


def noise(seed: int) -> Utility:
    """A fixed random utility of every position."""
    return lambda row: float(np.random.default_rng([seed, crc32(row.tobytes())]).random())


def test_what_needs_no_score_is_asked_at_once() -> None:
    optimizer = StaticMerges(lambdas=[0.4, 1])
    optimizer.start(5, 0)
    uniform, some, whole = optimizer.ask()[5:]
    np.testing.assert_array_equal(uniform, np.full(5, 0.2))
    np.testing.assert_array_equal(some, np.full(5, 0.4))
    np.testing.assert_array_equal(whole, np.ones(5))
    assert optimizer.labels[5:] == ["uniform soup", "task arithmetic 0.4", "task arithmetic 1"]


def test_the_weighted_soup_goes_by_the_height_above_the_lowest() -> None:
    optimizer, heights = StaticMerges(), np.array([0.5, 0.2, 0.3, 0.2, np.nan])
    asked(optimizer, lambda row: heights[row.argmax()] if row.max() == 1 else 0.0)
    np.testing.assert_allclose(of(optimizer, "weighted soup"), [[0.75, 0, 0.25, 0, 0]])
    equal = StaticMerges()
    asked(equal, lambda row: 0.5)
    np.testing.assert_allclose(of(equal, "weighted soup"), [np.full(5, 0.2)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("particles", [None, 5, 20])
def test_the_greedy_soup_is_recipe_1_of_its_paper(seed: int, particles: int | None) -> None:
    utility = noise(seed)
    order = sorted(range(5), key=lambda j: -utility(np.eye(5)[j]))
    soup = order[:1]
    tried = []
    for j in order[1:]:
        tried.append(np.eye(5)[[*soup, j]].mean(axis=0))
        if utility(tried[-1]) >= utility(np.eye(5)[soup].mean(axis=0)):
            soup.append(j)
    optimizer = StaticMerges(particles=particles)
    asked(optimizer, utility)
    np.testing.assert_allclose(of(optimizer, "greedy soup"), tried)
    assert (
        optimizer.stop_reason() == f"every recipe is scored; the greedy soup took {len(soup)} of 5"
    )


def test_the_greedy_soup_takes_what_does_not_fall() -> None:
    optimizer = StaticMerges()
    asked(optimizer, lambda row: 0.5)
    assert optimizer.stop_reason() == "every recipe is scored; the greedy soup took 5 of 5"


def test_lost_experts_are_in_no_soup_that_goes_by_utility() -> None:
    optimizer = StaticMerges()
    asked(optimizer, lambda row: np.nan if row[2] == 1 else 0.5)
    for label in ("weighted soup", "greedy soup"):
        rows = of(optimizer, label)
        assert len(rows) == (1 if label == "weighted soup" else 3)
        assert all(row[2] == 0 for row in rows)
    nothing = StaticMerges()
    asked(nothing, lambda row: np.nan)
    assert set(nothing.labels) == {"expert", "uniform soup"} | {
        f"task arithmetic {factor}" for factor in nothing.lambdas
    }


def test_only_the_first_rows_are_merged() -> None:
    optimizer = StaticMerges(among=3)
    asked(optimizer, lambda row: row[4])
    merged = optimizer.rows[5:]
    assert len(optimizer.rows) == 5 + 1 + 3 + 1 + 2 and not merged[:, 3:].any()
    with pytest.raises(UserError, match=r"optimizer.among=3: the pool has 2 rows"):
        optimizer.start(2, 0)


def test_a_position_has_a_name() -> None:
    optimizer = StaticMerges(lambdas=[])
    optimizer.start(3, 0, groups=2)
    while optimizer.stop_reason() is None:
        optimizer.tell(np.where(optimizer.evaluate, optimizer.ask()[:, 1], np.nan))
    again = StaticMerges(lambdas=[])
    again.load_state_dict(json.loads(json.dumps(optimizer.state_dict())))
    assert len(again.labels) == len(again.rows)
    assert (
        again.labels
        == optimizer.labels
        == [
            "expert",
            "expert",
            "expert",
            "uniform soup",
            "greedy soup",
            "weighted soup",
            "greedy soup",
        ]
    )
