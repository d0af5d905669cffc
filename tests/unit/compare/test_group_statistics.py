"""Intervals, tests and what a run can show: checked by hand and by simulation."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from swarm.compare.statistics import (
    detectable,
    get_error_bars,
    pairwise,
    smallest_difference,
    summary,
    welch_test,
)
from swarm.errors import InvalidArgument
from swarm.stats.intervals import bootstrap_intervals, student_widening, t_quantile
from swarm.stats.significance import holm_correction


def answers(group: str, model: str, said: list[Any], paraphrase: int = 0) -> pd.DataFrame:
    """Rows of one model and paraphrase."""
    fixed = {"group": group, "question": f"question {paraphrase}", "paraphrase_ix": paraphrase}
    rows = pd.DataFrame({"model": model, "answer": pd.Series(said, dtype=object)})
    return rows.assign(**fixed, error=None)


def test_error_bars_are_a_bootstrap_of_seed_0() -> None:
    assert get_error_bars([]) == (0.0, 0.0, 0.0)
    assert get_error_bars([0.3]) == (0.3, 0.0, 0.0)
    # llmcomp 1.6.0 gives these for the same numbers.
    assert get_error_bars([0.1, 0.4, 0.35, 0.9, 0.0]) == pytest.approx((0.35, 0.25, 0.28))
    narrow = get_error_bars([0.1, 0.4, 0.35, 0.9, 0.0], alpha=0.5)
    assert narrow[1] < 0.25 and narrow[2] < 0.28
    other = get_error_bars([0.1, 0.4, 0.35], np.random.default_rng(1), n_resamples=10)
    assert other == get_error_bars([0.1, 0.4, 0.35], np.random.default_rng(1), n_resamples=10)
    with pytest.raises(InvalidArgument, match="alpha"):
        get_error_bars([1, 2], alpha=95)


def test_a_summary_counts_what_is_in_no_share() -> None:
    failed = answers("b", "n", [None, "x"]).assign(error=["refused to serve", None])
    parts = [answers("a", "m", ["x", "x", "y", None]), failed, answers("c", "o", [None])]
    found = summary(pd.concat(parts, ignore_index=True)).set_index(["group", "answer"])
    first, one, none = found.loc[("a", "x")], found.loc[("b", "x")], found.loc[("c", "x")]
    assert (first["value"], first["n"], first["refused"], first["errors"]) == (2 / 3, 3, 1, 0)
    # Wilson's of 2 of 3
    assert (first["low"], first["high"]) == pytest.approx((0.2077, 0.9385), abs=1e-3)
    assert (one["n"], one["refused"], one["errors"]) == (1, 0, 1) and math.isnan(one["low"])
    assert one["note"] == "one answer: no interval can be given"
    assert (none["n"], none["note"]) == (0, "no answers")
    untested = pairwise(pd.concat([parts[0], parts[2]])).iloc[0]
    assert untested["note"] == "one side has no answers to the same"
    nothing = answers("a", "m", [])
    assert len(summary(nothing)) == len(pairwise(nothing)) == 0
    assert "low" in summary(nothing).columns


def test_never_seen_is_not_surely_never() -> None:
    df = pd.concat([answers("a", "m", ["x"] * 10, p) for p in range(3)])
    only = summary(pd.concat([df, answers("b", "n", ["y"] * 10)]))
    none = only[(only["group"] == "a") & (only["answer"] == "y")].iloc[0]
    assert none["value"] == none["low"] == 0 and 0.1 < none["high"] < 0.15


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([0.5, 1.5, 4.0], {"mean": 2.0}),
        (
            [{"yes": 0.6, "no": 0.3}, {"yes": 0.5, "maybe": 0.4}],
            {"yes": 0.55, "maybe": 0.2, "no": 0.15, "[UNSEEN]": 0.1},
        ),
        ([{"yes": math.log(0.75), "no": math.log(0.25)}], {"yes": 0.75, "no": 0.25}),
        ([["a"], ["a"], ["b"]], {'["a"]': 2 / 3, '["b"]': 1 / 3}),
        ([True, False, True], {True: 2 / 3, False: 1 / 3}),
        ([1, 2, 2], {2: 2 / 3, 1: 1 / 3}),
    ],
)
def test_numbers_tokens_and_unhashable_answers(said: list[Any], found: dict[Any, float]) -> None:
    table = summary(answers("a", "m", said).infer_objects()).set_index("answer")
    assert table["value"].to_dict() == pytest.approx(found)


def test_what_is_rare_is_told_together() -> None:
    df = answers("a", "m", [f"x{i % 300}" for i in range(900)] + ["often"] * 100)
    found = summary(df)
    assert len(found) == 51 and found["answer"].iloc[-1] == "[OTHER]"
    assert found["value"].sum() == pytest.approx(1)
    assert summary(df, min_fraction=0.05)["answer"].tolist() == ["often", "[OTHER]"]
    chosen = summary(df, selected_answers=["x299", "often"])["answer"]
    assert chosen.tolist() == ["x299", "often", "[OTHER]"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"answer_column": "anwser"}, r"no column 'anwser'; it has for instance answer"),
        ({"category_column": "groups"}, "group"),
        ({"selected_answers": ["x"], "min_fraction": 0.1}, "one of the two"),
        ({"min_fraction": 3}, "from 0 to 1"),
        ({"selected_categories": ["c"]}, "never 'c'; it is one of a"),
    ],
)
def test_wrong_arguments_are_one_line(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        summary(answers("a", "m", ["x", "y"]), **keys)
    assert "\n" not in str(caught.value)


def test_intervals_cover_what_they_should_where_paraphrases_differ() -> None:
    """120 runs of 10 paraphrases x 10 samples; the mean over all paraphrases is 0."""
    generator = np.random.default_rng(5)
    paraphrases, hits, naive = np.repeat(np.arange(10), 10), 0, 0
    for _ in range(120):
        values = generator.normal(0, 0.7, 10)[paraphrases] + generator.normal(0, 1, 100)
        ours = bootstrap_intervals(values[:, None], [paraphrases])
        hits += bool(ours.low[0] <= 0 <= ours.high[0])
        naive += bool(abs(values.mean()) < 1.96 * values.std(ddof=1) / 10)
    assert 0.89 <= hits / 120 <= 0.99  # 0.95 and three standard errors
    assert naive / 120 < 0.75


def test_crossed_clusters_count_once_and_few_are_widened() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(0, 1, (90, 1))
    models, paraphrases = np.repeat(np.arange(3), 30), np.tile(np.arange(3), 30)
    one = bootstrap_intervals(values + 3.0 * models[:, None], [models, paraphrases])
    alone = bootstrap_intervals(values + 3.0 * models[:, None], [paraphrases])
    assert one.high[0] - one.low[0] > 3 * (alone.high[0] - alone.low[0])
    same = bootstrap_intervals(values, [models, models[::-1].max() - models])
    assert np.allclose(same.low, bootstrap_intervals(values, [models]).low)
    assert student_widening(10) == pytest.approx(2.2622 / 1.95996, abs=0.002)
    assert student_widening(2) == student_widening(5) == pytest.approx(2.7764 / 1.95996, abs=0.004)


def test_holm_and_students_t_by_hand() -> None:
    # 0.01 x 4; 0.02 x 3; max(0.03 x 2, 0.06); max(0.04 x 1, 0.06)
    assert holm_correction([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    corrected = holm_correction([0.9, math.nan, 0.6])
    assert corrected[0] == corrected[2] == 1.0 and math.isnan(corrected[1])
    assert t_quantile(9) == pytest.approx(2.262157, abs=1e-6)
    assert t_quantile(2.5) == pytest.approx(3.5747, abs=1e-4)
    # With equal sizes and variances it is Student's test.
    value, low, high, p = welch_test(np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]))
    half = 2.776445 * (2 / 3) ** 0.5
    assert (value, p) == (-3.0, pytest.approx(0.021312, abs=1e-6))
    assert (low, high) == pytest.approx((-3 - half, -3 + half))


@pytest.mark.parametrize(
    ("count", "each", "gain", "test"),
    [
        (2, 30, 0.35, "permutation of answers within 2 paraphrases"),
        (9, 4, 1.0, "signs of 9 paraphrases' differences"),
    ],
)
def test_tests_err_as_often_as_they_say_and_see_what_is_there(
    count: int, each: int, gain: float, test: str
) -> None:
    """60 runs without a difference, 15 with one; of shares, and of means."""
    generator = np.random.default_rng(3)

    def tested(gain: float) -> pd.Series:
        parts, away = [], generator.normal(0, 0.2, count)
        for g, group in enumerate("ab"):
            for p in range(count):
                middle = 0.5 + away[p] + g * gain
                said: Any = middle + generator.normal(0, 1, each)
                if count == 2:
                    said = np.where(generator.random(each) < middle, "yes", "no")
                parts.append(pd.DataFrame({"group": group, "paraphrase_ix": p, "answer": said}))
        return pairwise(pd.concat(parts, ignore_index=True)).iloc[0]

    assert sum(tested(0.0)["p"] <= 0.05 for _ in range(60)) / 60 <= 0.134  # + 3 standard errors
    found = [tested(gain) for _ in range(15)]
    assert sum(one["p"] <= 0.05 for one in found) >= 12 and found[0]["test"] == test


def test_what_is_compared_follows_from_what_the_two_have_in_common() -> None:
    def told(*parts: pd.DataFrame, **keys: Any) -> pd.Series:
        return pairwise(pd.concat(parts).infer_objects(), **keys).iloc[0]

    generator = np.random.default_rng(0)
    groups = [
        answers(g, f"{g}{m}", list(generator.normal(i + m / 10, 1, 20)), p)
        for i, g in enumerate("ab")
        for m in range(3)
        for p in range(2)
    ]
    models = told(*groups)
    assert models["test"] == "Welch's t of 3 and 3 models" and models["p"] < 0.05
    assert models["low"] < models["difference"] < models["high"] < 0
    left = told(groups[0], groups[6], groups[7])
    assert left["note"] == (
        "20 answers to what only one was asked left out; "
        "only 1 paraphrase: too narrow an interval for other wordings"
    )
    assert (left["n_a"], left["n_b"], left["test"]) == (20, 20, "permutation of answers")
    assert "holds for these models" in told(groups[0], groups[2], groups[6])["note"]
    topics = [answers("a", "m", [k // 4 + k % 4 / 9], k).assign(topic=k // 4) for k in range(8)]
    by_topic = told(*topics, category_column="topic")
    assert by_topic["test"] == "Welch's t of 4 and 4 paraphrases" and by_topic["p"] < 0.01
    one = told(answers("a", "m", ["x"]), answers("b", "n", ["y"]))
    assert math.isnan(one["p"]) and math.isnan(one["p_holm"]) and one["difference"] == 1
    assert one["note"] == "one answer each: nothing to test"
    few = told(*(answers(g, f"{g}{m}", [g] * 5) for g in "ab" for m in range(2)))
    assert few["p"] > 0.3 and "no p value below 0.33" in few["note"]


def test_chosen_answers_and_newcombes_interval() -> None:
    said = {"a": ["x"] * 56 + ["y"] * 14, "b": ["x"] * 48 + ["y"] * 32}
    df = pd.concat([answers(group, f"m-{group}", one) for group, one in said.items()])
    found = pairwise(df, answer="x").iloc[0]
    # Newcombe 1998, table II, example (a), method 10: 56/70 - 48/80.
    ends = [found["difference"], found["low"], found["high"]]
    assert ends == pytest.approx([0.2, 0.0524, 0.3339], abs=1e-4)
    assert 0.002 < found["p"] < 0.02  # Fisher's exact test: 0.0084
    everything = pairwise(df).iloc[0]
    assert everything["answer"] == "all answers" and everything["difference"] == pytest.approx(0.2)
    assert everything["note"].startswith("chance alone makes it about 0.0")
    with pytest.raises(InvalidArgument, match="no row has the answer 'z'"):
        pairwise(df, answer="z")


def test_what_a_run_can_show_is_told_before_it() -> None:
    groups = {"a": ["m"], "b": ["n"], "c": ["o"]}
    assert detectable(groups, 2, 100) == (
        "3 groups, 2 paraphrases x 100 samples each: differences of shares from 0.17 up will be "
        "seen in 4 of 5 runs (5 %, 3 comparisons; paraphrases alike)"
    )
    assert "known to within 0.10" in detectable({"a": ["m"]}, 1, 100)
    assert "too few answers" in detectable({"a": ["m"], "b": ["n"]}, 1, 1)
    assert "several groups" in detectable({"a": ["m"], "b": ["n", "m"]}, 1, 50)


def test_the_difference_that_is_told_is_seen_in_four_of_five_runs() -> None:
    """20,000 pairs of groups of 200, by the z-test with a third of 5 %."""
    n, gap = 200, smallest_difference(200, 200, 3)
    assert smallest_difference(10, 10, 3) > gap > smallest_difference(1000, 1000, 3)
    generator = np.random.default_rng(0)
    first, second = (generator.binomial(n, p, 20_000) / n for p in (0.5 - gap / 2, 0.5 + gap / 2))
    pooled = (first + second) / 2
    z = np.abs(first - second) / np.sqrt(2 * pooled * (1 - pooled) / n)
    assert np.mean(z > 2.39398) == pytest.approx(0.8, abs=0.02)
