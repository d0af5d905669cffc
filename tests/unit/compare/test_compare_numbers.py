"""Ratings and next tokens: distributions over tokens of one digit or of several, and sampling."""

import math
from collections.abc import Mapping
from typing import Any

import distribution_model
import pytest

from swarm.compare.ratings import (
    MAX_REQUESTS,
    RatingBounds,
    build_rating_params,
    can_continue,
    parse_integer,
    parse_leading_integer,
    read_rating,
)
from swarm.compare.sampling import ModelCall
from swarm.compare.token_probs import (
    Reading,
    count_answers,
    read_next_token,
    with_logprobs,
)
from swarm.errors import UserError
from swarm.models.openai import MIN_LOGPROB
from swarm.stats.significance import mean_interval

ASKED = {"messages": [{"role": "user", "content": "How good is it?"}]}


def bell(middle: float, width: float, low: int = 0, high: int = 100) -> dict[str, float]:
    """A distribution over the integers, as texts."""
    heights = {str(n): math.exp(-(((n - middle) / width) ** 2) / 2) for n in range(low, high + 1)}
    return {text: height / sum(heights.values()) for text, height in heights.items()}


def mean(chances: Mapping[str, float]) -> float:
    """Of a distribution over numbers."""
    return sum(int(text) * p for text, p in chances.items())


def heard(rater: Any, bounds: RatingBounds | None = None) -> Reading:
    """The rating by a model, or by anything that says what an endpoint says."""
    body = rater.body if isinstance(rater, distribution_model.Rater) else rater
    bounds = bounds or RatingBounds()
    call = ModelCall("m", build_rating_params(ASKED, bounds))
    return distribution_model.driven(read_rating(call, bounds), body)


def told(*places: Mapping[str, float], text: str | None = None, finish: str = "length") -> Any:
    """What an endpoint says: of each token its place's distribution, the first of it is chosen."""
    content = [distribution_model.likely(place, next(iter(place)), 20) for place in places]
    said = "".join(place["token"] for place in content) if text is None else text
    choice = {"message": {"content": said}, "finish_reason": finish}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}


@pytest.mark.parametrize("tells_end", [True, False])
@pytest.mark.parametrize(("middle", "width"), [(85, 3), (50, 15), (98, 3)])
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


def test_how_many_requests_a_rating_takes() -> None:
    sure = distribution_model.Rater({"100": 0.97, "99": 0.03})
    found = heard(sure)
    assert found.probs == pytest.approx(dict.fromkeys(range(90, 100), 0.003) | {100: 0.97})
    assert found.raw_answer == pytest.approx({"100": 0.97, "9...": 0.03})
    assert (found.unseen, len(sure.asked)) == (pytest.approx(0.03), 1)
    chances = {"85": 0.5, "8": 0.3, "10": 0.15, "one": 0.05}
    whole = distribution_model.Rater(chances, split=False)
    found = heard(whole)
    assert found.raw_answer == pytest.approx(chances)
    assert found.answer == pytest.approx((42.5 + 2.4 + 1.5) / 0.95)
    assert (found.refused, len(whole.asked)) == (pytest.approx(0.05), 1)
    # The server tells nothing of the end: a few more answers show that nothing comes after a digit.
    short = distribution_model.Rater({"8": 0.6, "7": 0.4}, split=False, tells_end=False)
    assert heard(short).probs == pytest.approx({7: 0.4, 8: 0.6}) and len(short.asked) == 4


def test_what_is_known_of_a_beginning_is_shared_only_where_one_length_is_possible() -> None:
    def digits(place: Mapping[str, float], high: int) -> Reading:
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


def test_digits_of_other_scripts_count_and_other_signs_do_not() -> None:
    place = {"８５": 0.3, " 85": 0.2, "85\n": 0.1, "٨٥": 0.1, "8_5": 0.1, "8.5": 0.1, "150": 0.1}
    found = heard(lambda asked: told(place))
    assert found.probs == {85: pytest.approx(1)}
    assert found.refused == pytest.approx(0.3)
    numbers = {"5_0": None, "5.0": None, "": None, "-": None, "−3": -3, "+4": 4, "²": None}
    assert {text: parse_integer(text) for text in numbers} == numbers
    assert parse_integer("9" * 5000) is None
    first = {"85": 85, " 85/100": 85, "85.": 85, "85, I think": 85, "-7": -7, "8.5": None}
    first |= {"1,000": None, "5_0": None, "about 85": None, "": None}
    assert {text: parse_leading_integer(text) for text in first} == first


def test_what_a_longer_number_may_begin_with() -> None:
    goes_on = [("8", 0, 100), ("10", 0, 100), ("1", 1, 10), ("-1", -20, 20), ("-", -5, 5)]
    goes_on += [("", 0, 9), (" ", 0, 9), ("5", 500, 999), ("+", -9, 9)]
    ends = [("85", 0, 100), ("11", 0, 100), ("0", 0, 100), ("2", 1, 10), ("-3", -20, 20)]
    ends += [("-", 0, 100), ("8 ", 0, 100), ("I", 0, 100), ("1", 500, 999)]
    assert [can_continue(*one) for one in goes_on + ends] == [True] * 9 + [False] * 9


def test_refusals_and_what_was_not_seen_which_is_none() -> None:
    flat = {str(n): 1 / 101 for n in range(101)}
    found = heard(distribution_model.Rater(flat, split=False))
    assert (found.unseen, found.refused) == (pytest.approx(1 - 20 / 101), 0)
    assert found.answer is not None
    place = {"I": 0.7, "Sorry": 0.1, "90": 0.2}
    found = heard(lambda asked: told(place))
    assert (found.answer, found.probs, found.error) == (None, None, None)
    assert found.refused == pytest.approx(0.8)
    assert found.raw_answer == pytest.approx(place)
    assert heard(lambda asked: told(place), RatingBounds(refusal_threshold=0.81)).answer == 90
    nothing = heard(lambda asked: told({"No": 0.3}), RatingBounds(refusal_threshold=0.9))
    assert (nothing.answer, nothing.unseen) == (None, pytest.approx(0.7))


def test_a_failure_is_an_error_whichever_request_it_is() -> None:
    rater, asked = distribution_model.Rater(bell(85, 10)), []

    def breaks(body: Any) -> Any:
        asked.append(body)
        return UserError("the server is gone") if len(asked) == 3 else rater.body(body)

    found = heard(breaks)
    assert (found.answer, found.raw_answer, found.probs) == (None, None, None)
    assert str(found.error) == "the server is gone"
    assert len(found.answers) == 3


def test_sampling_gives_an_interval_and_refusals() -> None:
    rater = distribution_model.Rater({"80": 0.45, "90": 0.45, "I would rather not": 0.1})
    found = heard(rater, bounds=RatingBounds(samples=100))
    assert len(rater.asked) == 100
    assert not any("logprobs" in key for asked in rater.asked for key in asked)
    assert {(asked["temperature"], asked["max_tokens"]) for asked in rater.asked} == {(1, 6)}
    assert found.probs and set(found.probs) == {80, 90}
    assert sum(found.probs.values()) == pytest.approx(1)
    assert found.low is not None and found.high is not None and found.answer is not None
    assert 80 < found.low < found.answer < found.high < 90
    assert found.low < 85 < found.high
    assert 0.02 <= found.refused <= 0.25 and found.unseen == 0
    refused = heard(distribution_model.Rater({"No": 1.0}), bounds=RatingBounds(samples=5))
    assert (refused.answer, refused.low, refused.high, refused.refused) == (None, None, None, 1)


def tokens(*said: Any) -> Reading:
    """What is made of these, one for each sample."""
    asked, answers = ModelCall("vendor/m", with_logprobs(ASKED, 20)), iter(said)
    script = read_next_token(asked, range(len(said)))
    return distribution_model.driven(script, lambda body: next(answers))


def test_tokens_are_averaged_the_likeliest_first_and_the_rest_is_unseen() -> None:
    found = tokens(told({"heads": 0.2, "tails": 0.6, " tails": 0.1}))
    assert list(found.answer) == ["tails", "heads", " tails"]
    assert found.answer == pytest.approx({"tails": 0.6, "heads": 0.2, " tails": 0.1})
    assert found.unseen == pytest.approx(0.1)
    assert (found.low, found.high, found.error) == (None, None, None)
    # A token that a sample lacks is improbable there.
    lacks, mean = (told({"A": 0.9, "B": 0.1}), told({"A": 0.8})), {"A": 0.85, "B": 0.05}
    assert tokens(*lacks).answer == pytest.approx(mean)
    logarithms = {token: math.log(p) for token, p in mean.items()}
    assert tokens(*lacks).to_logprobs().answer == pytest.approx(logarithms)
    # Tokens that are written alike are added up.
    said = told({"A": 0.5, "B": 0.25})
    top = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    top += [{"token": "A", "logprob": math.log(0.125)}, {"token": "C", "logprob": MIN_LOGPROB}]
    assert tokens(said).answer == pytest.approx({"A": 0.625, "B": 0.25})
    # The chosen token counts though it is not among the likeliest.
    said["choices"][0]["logprobs"]["content"][0] |= {"token": "Z", "logprob": math.log(0.1)}
    assert tokens(said).answer == pytest.approx({"A": 0.625, "B": 0.25, "Z": 0.1})


def test_samples_are_counted_with_wilsons_interval() -> None:
    rater = distribution_model.Rater({"heads": 0.7, "tails": 0.3})
    params = {"messages": ASKED["messages"], "max_tokens": 5, "temperature": 1}
    found = distribution_model.driven(count_answers(ModelCall("m", params), range(200)), rater.body)
    assert len(rater.asked) == 200 and sum(found.answer.values()) == pytest.approx(1)
    assert list(found.answer) == ["heads", "tails"]
    assert found.low is not None and found.high is not None
    assert found.low["heads"] < 0.7 < found.high["heads"]
    count = round(found.answer["tails"] * 200)
    wilson = mean_interval([1] * count + [0] * (200 - count))
    assert (found.low["tails"], found.high["tails"]) == pytest.approx((wilson.low, wilson.high))
    broken = iter([rater.body(params), UserError("gone")])
    failed = distribution_model.driven(
        count_answers(ModelCall("m", params), range(2)), lambda body: next(broken)
    )
    assert (failed.answer, str(failed.error), len(failed.answers)) == (None, "gone", 1)
