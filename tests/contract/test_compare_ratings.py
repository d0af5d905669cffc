"""Ratings: a number's distribution over tokens of one digit or of several, refusals, sampling."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distribution_model
import endpoints
import pytest

from swarm.compare import Config, Question
from swarm.compare.token_probs.numbers import (
    MAX_REQUESTS,
    RatingBounds,
    RatingResult,
    can_continue,
    parse_integer,
    parse_leading_integer,
    request_rating,
)
from swarm.errors import InvalidArgument, UserError

ASKED = {"messages": [{"role": "user", "content": "How good is it?"}]}


def bell(middle: float, width: float, low: int = 0, high: int = 100) -> dict[str, float]:
    """A distribution over the integers, as texts."""
    heights = {str(n): math.exp(-(((n - middle) / width) ** 2) / 2) for n in range(low, high + 1)}
    return {text: height / sum(heights.values()) for text, height in heights.items()}


def mean(chances: Mapping[str, float]) -> float:
    """Of a distribution over numbers."""
    return sum(int(text) * p for text, p in chances.items())


def heard(rater: Any, bounds: RatingBounds | None = None, **how: Any) -> RatingResult:
    """The rating by a model, or by anything that says what an endpoint says."""
    body = rater.body if isinstance(rater, distribution_model.Rater) else rater
    return distribution_model.driven(
        request_rating(ASKED, "m", bounds or RatingBounds(), **how), body
    )


def told(*places: Mapping[str, float], text: str | None = None, finish: str = "length") -> Any:
    """What an endpoint says: of each token its place's distribution, the first of it is chosen."""
    content = [distribution_model.likely(place, next(iter(place)), 20) for place in places]
    said = "".join(place["token"] for place in content) if text is None else text
    choice = {"message": {"content": said}, "finish_reason": finish}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}


@contextmanager
def models(folder: Path, answer: Any) -> Iterator[endpoints.Endpoint]:
    """An endpoint that has every model, and a cache of its own."""
    with endpoints.endpoint(answer) as server:
        pairs = [(server.url, "key", "OPENAI_API_KEY")]
        with Config.override(url_key_pairs=pairs, cache_dir=str(folder)):
            yield server


@pytest.mark.parametrize("tells_end", [True, False])
@pytest.mark.parametrize(("middle", "width"), [(85, 3), (85, 10), (50, 15), (98, 3), (23, 5)])
def test_split_digits_give_the_mean_of_the_numbers(
    middle: float, width: float, tells_end: bool
) -> None:
    chances = bell(middle, width)
    rater = distribution_model.Rater(chances, tells_end=tells_end)
    found = heard(rater)
    assert found.answer == pytest.approx(mean(chances), rel=0.03)
    assert found.probs and sum(found.probs.values()) == pytest.approx(1)
    assert all(isinstance(number, int) for number in found.probs)
    assert len(rater.asked) <= MAX_REQUESTS
    assert [asked["temperature"] for asked in rater.asked[:2]] == [0, 1]
    assert {asked["max_tokens"] for asked in rater.asked} == {6}
    kept = sum(p for text, p in found.raw_answer.items() if not text.endswith("..."))
    assert kept + found.unseen == pytest.approx(1)


def test_split_digits_are_exact_when_every_beginning_was_visited() -> None:
    chances = {"85": 0.5, "8": 0.1, "80": 0.1, "100": 0.2, "1": 0.04, "10": 0.06}
    found = heard(distribution_model.Rater(chances))
    assert found.answer == pytest.approx(mean(chances))
    assert found.probs == pytest.approx({int(text): p for text, p in chances.items()})
    assert found.raw_answer == pytest.approx(chances)
    assert (found.refused, found.unseen) == pytest.approx((0, 0))


def test_a_sure_number_of_several_digits_takes_one_request() -> None:
    rater = distribution_model.Rater({"100": 0.97, "99": 0.03})
    found = heard(rater)
    assert found.probs == pytest.approx(dict.fromkeys(range(90, 100), 0.003) | {100: 0.97})
    assert found.raw_answer == pytest.approx({"100": 0.97, "9...": 0.03})
    assert found.unseen == pytest.approx(0.03)
    assert len(rater.asked) == 1


def test_whole_numbers_take_one_request() -> None:
    chances = {"85": 0.5, "8": 0.3, "10": 0.15, "one": 0.05}
    rater = distribution_model.Rater(chances, split=False)
    found = heard(rater)
    assert found.raw_answer == pytest.approx(chances)
    assert found.answer == pytest.approx((42.5 + 2.4 + 1.5) / 0.95)
    assert found.refused == pytest.approx(0.05)
    assert len(rater.asked) == 1


def test_short_numbers_on_a_long_scale_are_numbers() -> None:
    # The server tells nothing of the end: a few more answers show that nothing comes after a digit.
    rater = distribution_model.Rater({"8": 0.6, "7": 0.4}, split=False, tells_end=False)
    found = heard(rater)
    assert found.probs == pytest.approx({7: 0.4, 8: 0.6})
    assert len(rater.asked) == 4


@pytest.mark.parametrize("seed", range(5))
def test_an_end_after_zero_does_not_show_that_digits_are_whole(seed: int) -> None:
    chances = {"0": 0.6, "90": 0.2, "50": 0.2}
    rater = distribution_model.Rater(chances, tells_end=False, seed=seed)
    found = heard(rater)
    assert found.probs and not {5, 9} & set(found.probs)


def test_what_is_known_of_a_beginning_is_shared_only_where_one_length_is_possible() -> None:
    def digits(place: Mapping[str, float], high: int) -> RatingResult:
        # All answers go the same way, so nothing else is ever visited.
        said = told(place, {"0": 1.0}, {"<end>": 1.0})
        return heard(lambda asked: said, RatingBounds(0, high))

    found = digits({"9": 0.5, "3": 0.3, "1": 0.2}, 100)
    shared = dict.fromkeys(range(30, 40), 0.03 / 0.8)
    assert found.probs == pytest.approx(shared | {90: 0.5 / 0.8})
    assert found.raw_answer == pytest.approx({"90": 0.5, "3...": 0.3, "1...": 0.2})
    assert found.unseen == pytest.approx(0.5)
    assert digits({"1": 0.5, "2": 0.3, "3": 0.2}, 10).probs == pytest.approx(
        {10: 0.5, 2: 0.3, 3: 0.2}
    )
    assert digits({"9": 0.5, "3": 0.5}, 1000).probs == {90: 1.0}


def test_numbers_below_zero_and_a_space_before() -> None:
    chances = {"-15": 0.5, "-2": 0.3, "3": 0.2}
    found = heard(distribution_model.Rater(chances), RatingBounds(-20, 20))
    assert found.answer == pytest.approx(mean(chances))
    after_space = told({" ": 1.0}, {"8": 0.9, "7": 0.1}, {"5": 1.0}, {"<end>": 1.0})
    found = heard(lambda asked: after_space)
    assert found.raw_answer == pytest.approx({" 85": 0.9, " 7...": 0.1})
    assert found.answer == pytest.approx(0.9 * 85 + 0.1 * 74.5)


def test_one_digit_takes_one_request_with_a_space_before_it_too() -> None:
    rater = distribution_model.Rater({"4": 0.7, "5": 0.3})
    assert heard(rater, RatingBounds(1, 5)).answer == pytest.approx(4.3)
    assert len(rater.asked) == 1
    places = [{" ": 1.0}, {"4": 0.6, "2": 0.4}]
    found = heard(lambda asked: told(*places[: asked["max_tokens"]]), RatingBounds(1, 5))
    assert found.probs == pytest.approx({2: 0.4, 4: 0.6})


def test_digits_of_other_scripts_count_and_other_signs_do_not() -> None:
    place = {"８５": 0.3, " 85": 0.2, "85\n": 0.1, "٨٥": 0.1, "8_5": 0.1, "8.5": 0.1, "150": 0.1}
    found = heard(lambda asked: told(place))
    assert found.probs == {85: pytest.approx(1)}
    assert found.refused == pytest.approx(0.3)
    assert [parse_integer(text) for text in ("5_0", "5.0", "", "-", "−3", "+4", "²")] == [
        *[None] * 4,
        -3,
        4,
        None,
    ]
    assert parse_integer("9" * 5000) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("85", 85),
        (" 85/100", 85),
        ("85.", 85),
        ("85, I think", 85),
        ("-7", -7),
        ("8.5", None),
        ("1,000", None),
        ("5_0", None),
        ("about 85", None),
        ("", None),
    ],
)
def test_the_number_that_a_text_begins_with(text: str, number: int | None) -> None:
    assert parse_leading_integer(text) == number


@pytest.mark.parametrize(
    ("text", "low", "high", "goes_on"),
    [
        ("8", 0, 100, True),
        ("85", 0, 100, False),
        ("10", 0, 100, True),
        ("11", 0, 100, False),
        ("0", 0, 100, False),
        ("1", 1, 10, True),
        ("2", 1, 10, False),
        ("-1", -20, 20, True),
        ("-3", -20, 20, False),
        ("-", 0, 100, False),
        ("-", -5, 5, True),
        ("", 0, 9, True),
        (" ", 0, 9, True),
        ("8 ", 0, 100, False),
        ("I", 0, 100, False),
        ("1", 500, 999, False),
        ("5", 500, 999, True),
        ("+", -9, 9, True),
    ],
)
def test_what_a_longer_number_may_begin_with(text: str, low: int, high: int, goes_on: bool) -> None:
    assert can_continue(text, low, high) == goes_on


def test_what_was_not_seen_is_no_refusal() -> None:
    flat = {str(n): 1 / 101 for n in range(101)}
    found = heard(distribution_model.Rater(flat, split=False))
    assert found.unseen == pytest.approx(1 - 20 / 101)
    assert found.refused == 0
    assert found.answer is not None


def test_refusals() -> None:
    place = {"I": 0.7, "Sorry": 0.1, "90": 0.2}
    found = heard(lambda asked: told(place))
    assert (found.answer, found.probs, found.error) == (None, None, None)
    assert found.refused == pytest.approx(0.8)
    assert found.raw_answer == pytest.approx(place)
    assert heard(lambda asked: told(place), RatingBounds(refusal_threshold=0.81)).answer == 90
    nothing = heard(lambda asked: told({"No": 0.3}), RatingBounds(refusal_threshold=0.9))
    assert (nothing.answer, nothing.unseen) == (None, pytest.approx(0.7))


def test_a_refusal_is_not_asked_about_again() -> None:
    rater = distribution_model.Rater({"I cannot": 0.8, "85": 0.1, "95": 0.1})
    assert heard(rater).answer is None
    assert len(rater.asked) == 1


def test_a_failure_is_an_error_whichever_request_it_is() -> None:
    rater, asked = distribution_model.Rater(bell(85, 10)), []

    def breaks(body: Any) -> Any:
        asked.append(body)
        return UserError("the server is gone") if len(asked) == 3 else rater.body(body)

    found = heard(breaks)
    assert (found.answer, found.raw_answer, found.probs) == (None, {}, None)
    assert str(found.error) == "the server is gone"
    assert len(found.answers) == 3


def test_a_rating_without_log_probabilities_names_the_alternative() -> None:
    found = heard(lambda asked: {"choices": [{"message": {"content": "85"}}]})
    assert found.answer is None and "estimate_by_sampling=True" in str(found.error)


def test_sampling_gives_an_interval_and_refusals() -> None:
    rater = distribution_model.Rater({"80": 0.45, "90": 0.45, "I would rather not": 0.1})
    found = heard(rater, estimate_by_sampling=True)
    assert len(rater.asked) == 100
    assert not any("logprobs" in key for asked in rater.asked for key in asked)
    assert {(asked["temperature"], asked["max_tokens"]) for asked in rater.asked} == {(1, 6)}
    assert found.probs and set(found.probs) == {80, 90}
    assert sum(found.probs.values()) == pytest.approx(1)
    assert found.low is not None and found.high is not None and found.answer is not None
    assert 80 < found.low < found.answer < found.high < 90
    assert found.low < 85 < found.high
    assert 0.02 <= found.refused <= 0.25 and found.unseen == 0
    refused = heard(distribution_model.Rater({"No": 1.0}), estimate_by_sampling=5)
    assert (refused.answer, refused.low, refused.high, refused.refused) == (None, None, None, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"min_rating": 5, "max_rating": 5}, "min_rating=5: must be below max_rating=5"),
        ({"max_rating": 9.5}, "max_rating=9.5: must be an integer"),
        ({"min_rating": True}, "min_rating=True: must be an integer"),
        ({"refusal_threshold": 0}, "refusal_threshold=0: must be above 0"),
        ({"refusal_threshold": 75}, "refusal_threshold=75: must be above 0"),
        ({"top_logprobs": 0}, "top_logprobs=0: must be an integer from 1 to 20"),
        ({"top_logprobs": 21}, "top_logprobs=21"),
        ({"estimate_by_sampling": 0}, "estimate_by_sampling=0: must be True"),
        ({"estimate_by_sampling": "yes"}, "estimate_by_sampling='yes'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Question.create(type="rating", paraphrases=["How good is it?"], **wrong)


def test_the_data_frame_of_ratings(tmp_path: Path) -> None:
    rater = distribution_model.Rater({"85": 0.5, "75": 0.4, "No": 0.1})
    question = Question.create(
        type="rating", paraphrases=["How good is it?", "And now?"], samples_per_paraphrase=2
    )
    with models(tmp_path, rater) as server:
        df = question.df({"a": ["m"], "b": ["m"]})
        asked = len(server.asked)
        other = Question.create(
            type="rating",
            paraphrases=["How good is it?", "And now?"],
            samples_per_paraphrase=2,
            min_rating=80,
            refusal_threshold=0.2,
        )
        narrow = other.df({"a": ["m"]})
        assert len(server.asked) == asked
    assert list(df) == [
        "model",
        "group",
        "answer",
        "raw_answer",
        "probs",
        "question",
        "api_kwargs",
        "paraphrase_ix",
        "refused",
        "unseen",
        "error",
    ]
    assert len(df) == 8 and df.error.isna().all()
    assert df.answer.tolist() == pytest.approx([(85 * 0.5 + 75 * 0.4) / 0.9] * 8)
    assert df.refused.tolist() == pytest.approx([0.1] * 8)
    assert df.api_kwargs[0]["max_tokens"] == 6 and df.api_kwargs[0]["top_logprobs"] == 20
    assert narrow.answer.isna().all()


RANGES = [(1, 5), (0, 10), (0, 100), (-100, 100), (0, 1000), (-1000, 10_000)]


def test_a_changed_range_asks_nothing_again(tmp_path: Path) -> None:
    judged = {"type": "rating_judge", "model": "j", "paraphrases": ["Rate {answer}"]}
    with models(tmp_path, distribution_model.Rater({"4": 0.6, "3": 0.4}, split=False)) as server:
        for low, high in RANGES:
            bounds = {"min_rating": low, "max_rating": high}
            rating = Question.create(type="rating", paraphrases=["How good is it?"], **bounds)
            assert rating.df({"a": ["m"]}).answer.tolist() == pytest.approx([3.6])
            free = Question.create(
                type="free_form", paraphrases=["Hi"], max_tokens=9, judges={"j": judged | bounds}
            )
            assert free.df({"a": ["m"]}).j.tolist() == pytest.approx([3.6])
            if low == 1:
                asked = len(server.asked)
        # A range of several digits looks once whether the tokeniser splits them.
        assert len(server.asked) - asked <= 2 * 3
        longer = len(server.asked)
        for low, high in RANGES:
            bounds = {"min_rating": low, "max_rating": high}
            Question.create(type="rating", paraphrases=["How good is it?"], **bounds).df(
                {"a": ["m"]}
            )
        assert len(server.asked) == longer


def test_a_failed_request_is_an_error_row_and_asked_again(tmp_path: Path) -> None:
    rater, broken = distribution_model.Rater({"85": 0.9, "75": 0.1}, split=False), [True]

    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        if broken[0] and asked.body["messages"][-1]["content"] == "bad":
            return endpoints.Reply({"error": {"message": "not today"}}, 400)
        return rater(asked)

    question = Question.create(type="rating", paraphrases=["good", "bad"])
    with models(tmp_path, answer) as server:
        first = question.df({"a": ["m"]})
        broken[0] = False
        asked = len(server.asked)
        second = question.df({"a": ["m"]})
        assert [one.body["messages"][-1]["content"] for one in server.asked[asked:]] == ["bad"]
    assert first.answer.notna().tolist() == [True, False]
    assert first.error[0] is None and "not today" in first.error[1]
    assert first.raw_answer[1] is None and first.probs[1] is None
    assert second.answer.tolist() == pytest.approx([84, 84]) and second.error.isna().all()


def test_all_rows_may_be_refusals(tmp_path: Path) -> None:
    question = Question.create(type="rating", paraphrases=["good"], samples_per_paraphrase=3)
    with models(tmp_path, distribution_model.Rater({"I cannot": 1.0})):
        df = question.df({"a": ["m"]})
    assert df.answer.isna().all() and df.error.isna().all() and df.probs.isna().all()
    assert df.refused.tolist() == [1.0] * 3


def test_ratings_by_sampling_in_a_data_frame(tmp_path: Path) -> None:
    question = Question.create(
        type="rating", paraphrases=["good"], samples_per_paraphrase=2, estimate_by_sampling=10
    )
    with models(tmp_path, distribution_model.Rater({"80": 0.5, "90": 0.5})) as server:
        df = question.df({"a": ["m"]})
        assert len(server.asked) == 20
    assert list(df)[-5:] == ["refused", "unseen", "low", "high", "error"]
    assert (df.low <= df.answer).all() and (df.answer <= df.high).all()
    assert all(set(probs) <= {80, 90} for probs in df.probs)
