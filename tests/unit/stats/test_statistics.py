"""Intervals, paired tests and votes against numbers worked out by other means."""

import numpy as np
import pytest

from swarm.stats.significance import (
    mean_interval,
    paired_test,
    plurality_vote,
    utility_interval,
    utility_test,
)


def test_wilsons_interval() -> None:
    """81 of 263 gives .2553 to .3662: Newcombe (1998, Statistics in Medicine 17:857)."""
    found = mean_interval([1.0] * 81 + [0.0] * 182)
    assert (round(found.low, 4), round(found.high, 4), found.n) == (0.2553, 0.3662, 263)
    none = mean_interval([0.0] * 20)
    assert (none.low, none.high) == (0.0, pytest.approx(0.1611, abs=1e-4))


def test_intervals_cover_as_often_as_they_say() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        found = mean_interval(random.normal(0.3, 0.1, size=60).tolist())
        covered += found.low <= 0.3 <= found.high
    assert 178 <= covered <= 199, "the bootstrap"
    random, covered = np.random.default_rng(5), 0
    for _ in range(300):
        draw = random.random(100)
        before = np.where(random.random(100) < 0.3, random.random(100) < 0.3, draw < 0.4)
        test = paired_test((draw < 0.5).astype(float).tolist(), before.astype(float).tolist())
        covered += test.low <= 0.5 - (0.3 * 0.3 + 0.7 * 0.4) <= test.high
    assert covered >= 278, "the paired one: 95 %, less three standard errors"


def test_mcnemars_exact_p_value() -> None:
    """10 won, 2 lost: 2 * (1 + 12 + 66) / 4096."""
    before = [0.0] * 10 + [1.0] * 2 + [1.0] * 30
    after = [1.0] * 10 + [0.0] * 2 + [1.0] * 30
    found = paired_test(after, before)
    assert found.p == pytest.approx(2 * 79 / 4096)
    assert found.difference == pytest.approx(8 / 42)
    assert found.low < found.difference < found.high
    assert paired_test(before, after).p == found.p
    assert paired_test(before, before).p == 1.0


def test_interval_and_test_agree() -> None:
    """An interval that excludes 0 beside a p of .25 reads as a gain; both are one method."""
    found = paired_test([1.0] * 4 + [0.0] * 8, [0.0] * 12)  # 4 of 12 won, none lost
    assert found.p == 0.125 and found.low <= 0 < found.high
    random = np.random.default_rng(7)
    for graded in (False, True):
        for _ in range(60):
            before, after = random.random((2, int(random.integers(2, 40))))
            if not graded:
                before, after = (before < 0.3).astype(float), (after < 0.6).astype(float)
            found = paired_test(after.tolist(), before.tolist())
            assert found.low <= found.difference <= found.high
            assert (found.low > 0 or found.high < 0) == (found.p < 0.05), found


def test_the_interval_of_sign_flips_inverts_their_test() -> None:
    random = np.random.default_rng(2)
    gains = random.normal(0.2, 1, size=40)
    found = paired_test(gains.tolist(), [0.0] * 40)
    for end, inside in ((found.low, 1e-6), (found.high, -1e-6)):
        assert paired_test((gains - end - inside).tolist(), [0.0] * 40).p >= 0.05
        assert paired_test((gains - end + inside).tolist(), [0.0] * 40).p < 0.05
    assert paired_test((gains + 0.8).tolist(), [0.0] * 40).p < 0.001


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_test([], [])


@pytest.mark.parametrize(
    ("answers", "weights", "winner"),
    [
        (["a", "b", "b"], [0.9, 0.1, 0.1], "b"),
        (["a", "b"], [0.1, 0.9], "b"),
        (["a", "a", "b", "b"], [0.1, 0.1, 0.9, 0.9], "b"),
        ([None, None, "c"], [0.9, 0.9, 0.1], "c"),
        ([None, None], [0.5, 0.5], None),
        (["a", "b"], [0.5, 0.5], "a"),
        # A minority never wins, also where utilities are negative.
        (["a", "a", "b"], [-0.5, -0.5, -0.1], "a"),
    ],
)
def test_votes(answers: list[str | None], weights: list[float], winner: str | None) -> None:
    assert plurality_vote(answers, weights) == winner


def test_a_utility_that_is_no_mean_is_resampled_by_part() -> None:
    """Of the mean, the bootstrap's interval and test agree with those made for means."""
    random = np.random.default_rng(1)
    before = (random.random(200) < 0.4).astype(float)
    after = np.maximum(before, (random.random(200) < 0.2).astype(float))
    groups = ["one"] * 120 + ["two"] * 80
    found = utility_interval(lambda places: float(after[list(places)].mean()), groups)
    plain = mean_interval(after.tolist())
    assert found.mean == plain.mean
    assert abs(found.low - plain.low) < 0.02 and abs(found.high - plain.high) < 0.02
    gain = utility_test(lambda at: float((after - before)[list(at)].mean()), groups)
    assert gain.p < 0.01 and gain.low > 0
    none = utility_test(lambda at: 0.0, groups)
    assert none.p == 1.0 and none.difference == 0.0
