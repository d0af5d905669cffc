"""Intervals, tests and what a run can show: checked by hand and by simulation."""

import math
import time
from itertools import pairwise as neighbours
from typing import Any

import numpy as np
import pandas as pd
import pytest

from swarm.compare.group_tests import pairwise, welch_test
from swarm.compare.power import detectable, smallest_difference
from swarm.compare.summary_table import get_error_bars, summary
from swarm.errors import InvalidArgument
from swarm.stats.intervals import bootstrap_intervals, student_widening, t_quantile
from swarm.stats.significance import holm_correction


def answers(group: str, model: str, said: list[Any], paraphrase: int = 0) -> pd.DataFrame:
    """Rows of one model and paraphrase."""
    return pd.DataFrame(
        {
            "model": model,
            "group": group,
            "answer": pd.Series(said, dtype=object),
            "question": f"question {paraphrase}",
            "paraphrase_ix": paraphrase,
            "error": None,
        }
    )


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
    df = pd.concat([answers("a", "m", ["x", "x", "y", None]), failed], ignore_index=True)
    found = summary(df).set_index(["group", "answer"])
    assert found.loc[("a", "x"), "value"] == pytest.approx(2 / 3)
    assert found.loc[("a", "x"), "n"] == 3
    assert found["refused"].to_dict()["a", "y"] == 1 and found["errors"].to_dict()["a", "y"] == 0
    assert found.loc[("b", "x"), ["n", "refused", "errors"]].tolist() == [1, 0, 1]
    assert math.isnan(found.loc[("b", "x"), "low"])
    assert found.loc[("b", "x"), "note"] == "one answer: no interval can be given"
    low, high = found.loc[("a", "x"), ["low", "high"]]
    assert (low, high) == pytest.approx((0.2077, 0.9385), abs=1e-3)  # Wilson's of 2 of 3


def test_nothing_is_no_mistake() -> None:
    nothing = answers("a", "m", [])
    assert len(summary(nothing)) == 0 and "low" in summary(nothing).columns
    assert len(pairwise(nothing)) == 0
    alone = pd.concat([answers("a", "m", ["x"] * 3), answers("b", "n", [None])])
    untested = pairwise(alone).iloc[0]
    assert untested["note"] == "one side has no answers to the same"
    assert summary(alone).iloc[-1][["n", "note"]].tolist() == [0, "no answers"]


def test_never_seen_is_not_surely_never() -> None:
    df = pd.concat([answers("a", "m", ["x"] * 10, p) for p in range(3)])
    only = summary(pd.concat([df, answers("b", "n", ["y"] * 10)]))
    none = only[(only["group"] == "a") & (only["answer"] == "y")].iloc[0]
    assert none["value"] == none["low"] == 0 and 0.1 < none["high"] < 0.15


def test_numbers_tokens_and_unhashable_answers() -> None:
    numbers = answers("a", "m", [0.5, 1.5, 4.0]).infer_objects()
    assert summary(numbers)["answer"].tolist() == ["mean"]
    assert summary(numbers)["value"].tolist() == [2.0]
    tokens = answers("a", "m", [{"yes": 0.6, "no": 0.3}, {"yes": 0.5, "maybe": 0.4}])
    shares = summary(tokens).set_index("answer")["value"].to_dict()
    assert shares == pytest.approx({"yes": 0.55, "maybe": 0.2, "no": 0.15, "[UNSEEN]": 0.1})
    logs = answers("a", "m", [{"yes": math.log(0.75), "no": math.log(0.25)}])
    assert summary(logs).set_index("answer")["value"]["yes"] == pytest.approx(0.75)
    parts = answers("a", "m", [[{"type": "text"}], [{"type": "text"}], ["other"]])
    assert summary(parts)["value"].tolist() == pytest.approx([2 / 3, 1 / 3])
    threshold = answers("a", "m", [True, False, True])
    assert set(summary(threshold)["answer"]) == {True, False}


def test_what_is_rare_is_told_together() -> None:
    df = answers("a", "m", [f"x{i % 300}" for i in range(900)] + ["often"] * 100)
    found = summary(df)
    assert len(found) == 51 and found["answer"].iloc[-1] == "[OTHER]"
    assert found["value"].sum() == pytest.approx(1)
    chosen = summary(df, min_fraction=0.05)
    assert chosen["answer"].tolist() == ["often", "[OTHER]"]
    assert summary(df, selected_answers=["x299", "often"])["answer"].tolist() == [
        "x299",
        "often",
        "[OTHER]",
    ]


def test_wrong_arguments_are_one_line() -> None:
    df = answers("a", "m", ["x", "y"])
    for keys, told in (
        ({"answer_column": "anwser"}, r"no column 'anwser'; it has for instance answer"),
        ({"category_column": "groups"}, "group"),
        ({"selected_answers": ["x"], "min_fraction": 0.1}, "one of the two"),
        ({"min_fraction": 3}, "from 0 to 1"),
        ({"selected_categories": ["c"]}, "never 'c'; it is one of a"),
    ):
        with pytest.raises(ValueError, match=told) as caught:
            summary(df, **keys)
        assert "\n" not in str(caught.value)


def test_a_large_frame_takes_little_time() -> None:
    n, generator = 100_000, np.random.default_rng(0)
    df = pd.DataFrame(
        {
            "model": np.repeat([f"m{i}" for i in range(10)], n // 10),
            "group": np.repeat(["a", "b"], n // 2),
            "paraphrase_ix": np.tile(np.arange(10), n // 10),
            "answer": generator.choice([f"x{i}" for i in range(60)], n),
        }
    )
    start = time.process_time()
    found = summary(df)
    assert time.process_time() - start < 6  # 0.2 to 1.1 s where nothing else runs
    assert found["models"].tolist()[0] == 5


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


def test_holm_by_hand() -> None:
    # 0.01 x 4; 0.02 x 3; max(0.03 x 2, 0.06); max(0.04 x 1, 0.06)
    assert holm_correction([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    corrected = holm_correction([0.9, math.nan, 0.6])
    assert corrected[0] == corrected[2] == 1.0 and math.isnan(corrected[1])


def null(generator: np.random.Generator, kind: str, gain: float = 0.0) -> pd.DataFrame:
    """Two groups alike but for `gain`, with paraphrases that differ."""
    parts = []
    count, each = (2, 30) if kind == "shares" else (9, 4)
    away = generator.normal(0, 0.2, count)
    for g, group in enumerate("ab"):
        for p in range(count):
            middle = 0.5 + away[p] + g * gain
            if kind == "shares":
                said = np.where(generator.random(each) < middle, "yes", "no")
            else:
                said = middle + generator.normal(0, 1, each)
            parts.append(pd.DataFrame({"group": group, "paraphrase_ix": p, "answer": said}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(("kind", "answer", "gain"), [("shares", None, 0.35), ("mean", None, 1.0)])
def test_tests_err_as_often_as_they_say_and_see_what_is_there(
    kind: str, answer: str | None, gain: float
) -> None:
    """60 runs without a difference, 15 with one."""
    generator = np.random.default_rng(3)
    false = sum(pairwise(null(generator, kind), answer=answer)["p"][0] <= 0.05 for _ in range(60))
    assert false / 60 <= 0.134  # 0.05 and three standard errors
    found = [pairwise(null(generator, kind, gain), answer=answer) for _ in range(15)]
    assert sum(one["p"][0] <= 0.05 for one in found) >= 12
    test = (
        "permutation of answers within 2 paraphrases"
        if kind == "shares"
        else ("signs of 9 paraphrases' differences")
    )
    assert found[0]["test"][0] == test


def test_what_is_compared_follows_from_what_the_two_have_in_common() -> None:
    def told(df: pd.DataFrame, **keys: Any) -> pd.Series:
        return pairwise(df, **keys).iloc[0]

    generator = np.random.default_rng(0)
    groups = [
        answers(g, f"{g}{m}", list(generator.normal(i + m / 10, 1, 20)), p)
        for i, g in enumerate("ab")
        for m in range(3)
        for p in range(2)
    ]
    models = told(pd.concat(groups).infer_objects())
    assert models["test"] == "Welch's t of 3 and 3 models" and models["p"] < 0.05
    assert models["low"] < models["difference"] < models["high"] < 0
    left = told(pd.concat([groups[0], groups[6], groups[7]]).infer_objects())
    assert left["note"] == (
        "20 answers to what only one was asked left out; "
        "only 1 paraphrase: too narrow an interval for other wordings"
    )
    assert (left["n_a"], left["n_b"], left["test"]) == (20, 20, "permutation of answers")
    several = told(pd.concat([groups[0], groups[2], groups[6]]).infer_objects())
    assert "holds for these models" in several["note"]
    topics = [
        answers("a", "m", [i + p / 9], 4 * i + p).assign(topic=i)
        for i in range(2)
        for p in range(4)
    ]
    by_topic = told(pd.concat(topics).infer_objects(), category_column="topic")
    assert by_topic["test"] == "Welch's t of 4 and 4 paraphrases" and by_topic["p"] < 0.01
    one = told(pd.concat([answers("a", "m", ["x"]), answers("b", "n", ["y"])]))
    assert math.isnan(one["p"]) and math.isnan(one["p_holm"]) and one["difference"] == 1
    assert one["note"] == "one answer each: nothing to test"
    few = told(pd.concat([answers(g, f"{g}{m}", [g] * 5) for g in "ab" for m in range(2)]))
    assert few["p"] > 0.3 and "no p value below 0.33" in few["note"]


def test_chosen_answers_and_newcombes_interval() -> None:
    df = pd.concat(
        [answers("a", "m", ["x"] * 56 + ["y"] * 14), answers("b", "n", ["x"] * 48 + ["y"] * 32)]
    )
    found = pairwise(df, answer="x").iloc[0]
    # Newcombe 1998, table II, example (a), method 10: 56/70 - 48/80.
    assert [found["difference"], found["low"], found["high"]] == pytest.approx(
        [0.2, 0.0524, 0.3339], abs=1e-4
    )
    assert 0.002 < found["p"] < 0.02  # Fisher's exact test: 0.0084
    everything = pairwise(df).iloc[0]
    assert everything["answer"] == "all answers" and everything["difference"] == pytest.approx(0.2)
    assert everything["note"].startswith("chance alone makes it about 0.0")
    with pytest.raises(InvalidArgument, match="no row has the answer 'z'"):
        pairwise(df, answer="z")


def test_students_t() -> None:
    assert t_quantile(9) == pytest.approx(2.262157, abs=1e-6)
    assert t_quantile(2.5) == pytest.approx(3.5747, abs=1e-4)
    # With equal sizes and variances it is Student's test.
    a, b = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    value, low, high, p = welch_test(a, b)
    assert (value, p) == (-3.0, pytest.approx(0.021312, abs=1e-6))
    assert (low, high) == pytest.approx(
        (-3 - 2.776445 * (2 / 3) ** 0.5, -3 + 2.776445 * (2 / 3) ** 0.5)
    )


def test_what_a_run_can_show_is_told_before_it() -> None:
    groups = {"a": ["m"], "b": ["n"], "c": ["o"]}
    assert detectable(groups, 2, 100) == (
        "3 groups, 2 paraphrases x 100 samples each: differences of shares from 0.17 up will be "
        "seen in 4 of 5 runs (5 %, 3 comparisons; paraphrases alike)"
    )
    assert "known to within 0.10" in detectable({"a": ["m"]}, 1, 100)
    assert "too few answers" in detectable({"a": ["m"], "b": ["n"]}, 1, 1)
    assert "several groups" in detectable({"a": ["m"], "b": ["n", "m"]}, 1, 50)
    assert "nothing is asked" in detectable({"a": []}, 1, 50)
    sizes = [smallest_difference(n, n) for n in (10, 50, 200, 1000)]
    assert all(a > b for a, b in neighbours(sizes))


def test_the_difference_that_is_told_is_seen_in_four_of_five_runs() -> None:
    """20,000 pairs of groups of 200, by the z-test with a third of 5 %."""
    n, gap = 200, smallest_difference(200, 200, 3)
    generator = np.random.default_rng(0)
    first, second = (generator.binomial(n, p, 20_000) / n for p in (0.5 - gap / 2, 0.5 + gap / 2))
    pooled = (first + second) / 2
    z = np.abs(first - second) / np.sqrt(2 * pooled * (1 - pooled) / n)
    assert np.mean(z > 2.39398) == pytest.approx(0.8, abs=0.02)
