"""NextToken: the first token's distribution, its mean over samples, what was not seen, sampling."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distribution_model
import endpoints
import pytest

from swarm.compare import Config, ModelAdapter, Question
from swarm.compare.sampling.types import ModelCall
from swarm.compare.token_probs import (
    NextTokenDistribution,
    read_next_token,
    sample_answers,
    with_logprobs,
)
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Token
from swarm.models.http_errors import BadRequest, ServerFault
from swarm.models.openai_protocol import MIN_LOGPROB
from swarm.stats.significance import mean_interval

TURNS = [{"role": "user", "content": "Heads or tails?"}]
KEY = "sk-secret-0123456789"


def told(place: Mapping[str, float], text: str | None = None) -> dict[str, Any]:
    """What an endpoint says of one token."""
    first = next(iter(place))
    content = [distribution_model.likely(place, first, 20)]
    choice = {"message": {"content": first if text is None else text}, "finish_reason": "length"}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}


def heard(*said: Any, convert_to_probs: bool = True) -> NextTokenDistribution:
    """What is made of these, one for each sample."""
    asked, answers = ModelCall("vendor/m", with_logprobs({"messages": TURNS}, 20)), iter(said)
    script = read_next_token(asked, range(len(said)), convert_to_probs)
    return distribution_model.driven(script, lambda body: next(answers))


@contextmanager
def models(folder: Path, answer: Any) -> Iterator[endpoints.Endpoint]:
    """An endpoint that has every model, and a cache of its own."""
    with endpoints.endpoint(answer) as server:
        pairs = [(server.url, KEY, "OPENAI_API_KEY")]
        with Config.override(url_key_pairs=pairs, cache_dir=str(folder)):
            yield server


def test_the_likeliest_tokens_come_first_and_the_rest_is_unseen() -> None:
    found = heard(told({"heads": 0.2, "tails": 0.6, " tails": 0.1}))
    assert list(found.answer.items()) == [
        ("tails", pytest.approx(0.6)),
        ("heads", pytest.approx(0.2)),
        (" tails", pytest.approx(0.1)),
    ]
    assert found.unseen == pytest.approx(0.1)
    assert (found.low, found.high, found.error) == (None, None, None)
    sent = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    assert sent.items() <= found.api_kwargs.items()


@pytest.mark.parametrize("convert_to_probs", [True, False])
def test_a_token_that_a_sample_lacks_is_improbable_there(convert_to_probs: bool) -> None:
    found = heard(told({"A": 0.9, "B": 0.1}), told({"A": 0.8}), convert_to_probs=convert_to_probs)
    expected = {"A": 0.85, "B": 0.05}
    if not convert_to_probs:
        expected = {token: math.log(p) for token, p in expected.items()}
    assert found.answer == pytest.approx(expected)
    assert list(found.answer) == ["A", "B"]
    assert found.unseen == pytest.approx(0.1)


def test_tokens_that_are_written_alike_are_added_up() -> None:
    said = told({"A": 0.5, "B": 0.25})
    top = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    top += [{"token": "A", "logprob": math.log(0.125)}, {"token": "C", "logprob": MIN_LOGPROB}]
    found = heard(said)
    assert found.answer == pytest.approx({"A": 0.625, "B": 0.25})
    assert found.unseen == pytest.approx(0.125)


def test_more_than_all_is_seen_by_rounding_alone() -> None:
    assert heard(told({"A": 0.7, "B": 0.31})).unseen == 0


def test_a_probability_is_at_most_one_whatever_is_told() -> None:
    said = told({"A": 0.5})
    said["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] = 1e9
    assert heard(said).answer == {"A": 1.0}


def test_the_chosen_token_is_told_of_though_it_is_not_among_the_likeliest() -> None:
    said = distribution_model.completion(told({"A": 0.6, "B": 0.3}))
    token = said.tokens[0]
    assert isinstance(token, Token)
    other = {"token": "Z", "logprob": math.log(0.1)}
    place = {**other, "top_logprobs": [{"token": t, "logprob": p} for t, p in token.top]}
    body = {"choices": [{"message": {"content": "Z"}, "logprobs": {"content": [place]}}]}
    assert heard(body).answer == pytest.approx({"A": 0.6, "B": 0.3, "Z": 0.1})


@pytest.mark.parametrize("content", [None, {"content": None}, {"content": []}])
def test_no_log_probabilities_is_an_error_with_the_alternative(content: Any) -> None:
    body = {"choices": [{"message": {"content": "heads"}, "logprobs": content}]}
    blip = heard(told({"heads": 1.0}), body)
    assert blip.answer == {} and "requested again next time" in str(blip.error)
    found = heard(body, body)
    assert found.answer == {}
    assert "vendor/m: vendor returns no log probabilities" in str(found.error)
    assert "estimate_by_sampling=True" in str(found.error)


def test_an_answer_without_text_says_why_it_cannot_be_read() -> None:
    choice = {"message": {"content": None}, "finish_reason": "length"}
    found = heard({"choices": [choice]})
    assert "no token to read (finish: length)" in str(found.error)
    assert "ModelAdapter" in str(found.error)


def test_another_failure_stays_what_it_is() -> None:
    for error in (UserError("the server is gone"), ServerFault("500: logprobs worker crashed")):
        assert heard(told({"A": 1.0}), error).error is error


def test_a_limit_of_the_provider_is_repeated() -> None:
    found = heard(BadRequest("400: top_logprobs must be at most 5"))
    assert "set top_logprobs" in str(found.error) and "at most 5" in str(found.error)


def test_samples_are_counted_with_wilsons_interval() -> None:
    rater = distribution_model.Rater({"heads": 0.7, "tails": 0.3})
    params = {"messages": TURNS, "max_tokens": 5, "temperature": 1}
    found = distribution_model.driven(sample_answers(params, "m", 200), rater.body)
    assert len(rater.asked) == 200 and sum(found.answer.values()) == pytest.approx(1)
    assert list(found.answer) == ["heads", "tails"]
    assert found.low is not None and found.high is not None
    assert found.low["heads"] < 0.7 < found.high["heads"]
    count = round(found.answer["tails"] * 200)
    wilson = mean_interval([1] * count + [0] * (200 - count))
    assert (found.low["tails"], found.high["tails"]) == pytest.approx((wilson.low, wilson.high))
    broken = iter([rater.body(params), UserError("gone")])
    failed = distribution_model.driven(sample_answers(params, "m", 2), lambda body: next(broken))
    assert (failed.answer, str(failed.error), len(failed.answers)) == ({}, "gone", 1)


def test_the_data_frame_of_next_tokens(tmp_path: Path) -> None:
    question = Question.create(
        type="next_token",
        paraphrases=["Heads or tails?"],
        num_samples=3,
        samples_per_paraphrase=2,
        top_logprobs=5,
    )
    with models(tmp_path, distribution_model.Rater({"heads": 0.7, "tails": 0.3})) as server:
        df = question.df({"a": ["m"], "b": ["m"]})
        assert len(server.asked) == 6
        assert question.get_runner_input()[0] == {
            "params": with_logprobs(
                {"messages": [{"role": "user", "content": "Heads or tails?"}]}, 5
            ),
            "convert_to_probs": True,
            "num_samples": 3,
            "_question": "Heads or tails?",
            "_paraphrase_ix": 0,
        }
        logs = Question.create(
            type="next_token",
            paraphrases=["Heads or tails?"],
            num_samples=3,
            top_logprobs=5,
            convert_to_probs=False,
        ).df({"a": ["m"]})
        assert len(server.asked) == 6
    assert list(df) == [
        "model",
        "group",
        "answer",
        "question",
        "api_kwargs",
        "paraphrase_ix",
        "unseen",
        "error",
    ]
    assert len(df) == 4
    assert all(answer == pytest.approx({"heads": 0.7, "tails": 0.3}) for answer in df.answer)
    assert logs.answer[0]["heads"] == pytest.approx(math.log(0.7))


def test_a_provider_without_log_probabilities(tmp_path: Path) -> None:
    rater = distribution_model.Rater({"heads": 0.7, "tails": 0.3})

    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        if "logprobs" not in asked.body:
            return rater(asked)
        if asked.body["model"] == "refuses":
            return endpoints.Reply({"error": {"message": "logprobs are not supported"}}, 400)
        return endpoints.Reply(rater.body({**asked.body, "logprobs": False}))

    how = {"type": "next_token", "paraphrases": ["Heads or tails?"]}
    with models(tmp_path, answer) as server:
        df = Question.create(**how).df({"a": ["refuses", "ignores"]})
        counted = Question.create(**how, estimate_by_sampling=20).df({"a": ["refuses"]})
        assert len(server.asked) == 24, "of those that lack them two are repeated"
    assert df.answer.isna().all()
    for model, error in zip(df.model, df.error, strict=True):
        assert model in error and server.url in error and "estimate_by_sampling=True" in error
        assert KEY not in error
    assert "logprobs are not supported" in df.error[0]
    assert list(counted)[-4:] == ["unseen", "low", "high", "error"]
    row = counted.iloc[0]
    assert set(row.answer) == {"heads", "tails"} and row.unseen == 0
    assert all(row.low[token] < p < row.high[token] for token, p in row.answer.items())
    assert row.api_kwargs["temperature"] == 1 and row.api_kwargs["max_tokens"] == 1


def test_an_adapter_has_the_last_word(tmp_path: Path) -> None:
    rater = distribution_model.Rater({"heads": 0.7, "tails": 0.3})
    ModelAdapter.register(
        lambda model: model == "m", lambda params, model: params | {"max_tokens": 3}
    )
    try:
        with models(tmp_path, rater) as server:
            df = Question.create(type="next_token", paraphrases=["?"]).df({"a": ["m"]})
    finally:
        ModelAdapter.reset()
    assert server.asked[0].body["max_tokens"] == df.api_kwargs[0]["max_tokens"] == 3
    assert df.answer[0] == pytest.approx({"heads": 0.7, "tails": 0.3})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_logprobs": 0}, "top_logprobs=0: must be an integer from 1 to 20"),
        ({"top_logprobs": True}, "top_logprobs=True"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"convert_to_probs": "no"}, "convert_to_probs='no': must be True or False"),
        ({"estimate_by_sampling": -1}, "estimate_by_sampling=-1: must be True"),
    ],
)
def test_what_cannot_be_is_refused_at_once(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Question.create(type="next_token", paraphrases=["?"], **wrong)
