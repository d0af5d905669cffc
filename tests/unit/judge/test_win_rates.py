"""Win rates: raw, and with the judge's taste for length taken out."""

import numpy as np
import pytest

from swarm.judge.win_rates import (
    length_controlled_win_rate,
    mean_win_rate,
)


def logistic(value: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-value))


def drawn(n: int, theta: float, phi: float) -> tuple[np.ndarray, np.ndarray]:
    """Length differences, and the soft preferences of a judge whom length moves by phi."""
    differences = np.random.default_rng(5).normal(150, 400, n).round()
    standing = np.tanh(differences / differences.std(ddof=1))
    return differences, logistic(theta + phi * standing)


def test_the_raw_rate_is_the_mean_in_percent() -> None:
    found = mean_win_rate([1.0, 0.25, 0.5, 0.0])
    assert found.mean == 43.75 and found.n == 4
    assert 0 <= found.low < found.mean < found.high <= 100
    assert found == mean_win_rate([1.0, 0.25, 0.5, 0.0])


@pytest.mark.parametrize(("theta", "phi"), [(0.4, 1.5), (-1.0, 0.8), (0.2, -1.2)])
def test_a_known_length_effect_is_recovered(theta: float, phi: float) -> None:
    differences, soft = drawn(300, theta, phi)
    found = length_controlled_win_rate(soft.tolist(), differences.tolist())
    assert found.length_effect == pytest.approx(phi, abs=0.03)
    assert found.rate.mean == pytest.approx(100 * logistic(np.array(theta)), abs=0.2)
    # The raw rate has the effect in it: answers are 150 characters longer on average.
    assert abs(mean_win_rate(soft.tolist()).mean - found.rate.mean) > 2
    assert (mean_win_rate(soft.tolist()).mean > found.rate.mean) == (phi > 0)


def test_of_hard_verdicts_the_truth_is_in_the_interval() -> None:
    differences, soft = drawn(400, 0.4, 1.5)
    hard = (np.random.default_rng(3).random(400) < soft).astype(float)
    found = length_controlled_win_rate(hard.tolist(), differences.tolist())
    assert found.rate.low < 100 * logistic(np.array(0.4)) < found.rate.high
    assert found.rate.high - found.rate.low == pytest.approx(4 * found.standard_error, rel=0.2)
    assert 1 < found.standard_error < 5


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [7, 7, 7, 7]])
def test_where_lengths_say_nothing_it_is_the_raw_rate(lengths: list[int]) -> None:
    soft = [0.9, 0.2, 0.6, 1.0]
    found = length_controlled_win_rate(soft, lengths)
    assert found.rate == mean_win_rate(soft) and found.length_effect == 0.0
    assert found.standard_error == pytest.approx(100 * np.std(soft, ddof=1) / 2)


@pytest.mark.parametrize(
    ("soft", "lengths"),
    [
        ([1.0, 1.0, 0.0, 0.0], [10, 20, -10, -20]),  # length alone tells them apart
        ([0.0] * 5 + [1.0], [1, 2, 3, 4, 5, 600]),
        ([1.0, 0.0], [5, -5]),
        ([0.5, 1.0], [1, 2]),
    ],
)
def test_what_can_be_separated_stays_finite(soft: list[float], lengths: list[int]) -> None:
    found = length_controlled_win_rate(soft, lengths)
    numbers = [*found.rate, found.standard_error, found.length_effect]
    assert np.isfinite(numbers).all() and abs(found.length_effect) < 20
    assert 0 <= found.rate.low <= found.rate.mean <= found.rate.high <= 100


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_lost_and_all_won(value: float) -> None:
    found = length_controlled_win_rate([value] * 6, [5, -3, 8, 100, 2, 0])
    assert found.rate == mean_win_rate([value] * 6)
    assert found.rate.mean == 100 * value
    # One that never lost among six may still lose.
    assert found.rate.high - found.rate.low > 30


def test_a_single_instruction() -> None:
    assert length_controlled_win_rate([0.7], [12]).rate.mean == 70
    assert length_controlled_win_rate([0.7], [12]).standard_error == 0


def test_as_many_lengths_as_preferences() -> None:
    with pytest.raises(ValueError, match="as many length differences"):
        length_controlled_win_rate([0.5, 0.5], [1])
    with pytest.raises(ValueError, match="at least one"):
        length_controlled_win_rate([], [])
