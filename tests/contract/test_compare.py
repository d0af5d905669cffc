"""Questions to models behind endpoints: rows, failures, judges, the cache, where models are."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import compare_endpoint
import distribution_model
import endpoints
import pandas as pd
import pytest
from compare_endpoint import KEY, asked, repeats, script, texts

from swarm.compare import Config, FreeForm, ModelAdapter, Question, Runner
from swarm.compare.sampling import (
    run_scripts,
)
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Completion, Model, Request

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

COLUMNS = ["model", "group", "answer", "question", "api_kwargs", "paraphrase_ix", "error"]
TEXT = {"type": "free_form_judge", "model": "judge", "paraphrases": ["Is it so? {answer}"]}
BOTH = {**TEXT, "paraphrases": ["Asked {question}, said {answer}."]}
RATING = {"type": "rating_judge", "model": "rater", "paraphrases": ["Rate {answer}"]}


def free_form(*paraphrases: Any, **more: Any) -> FreeForm:
    """A question in free form."""
    return Question.create(type="free_form", paraphrases=list(paraphrases), **more)


def test_a_model_gets_one_request_until_it_has_answered_and_then_many() -> None:
    slow = lambda request: endpoints.Reply(repeats(request).body, wait=0.2)  # noqa: E731
    with compare_endpoint.endpoint(slow) as server:
        began = time.monotonic()
        run_scripts([script(asked(f"q{n}")) for n in range(40)])
        assert server.peak > 10 and time.monotonic() - began < 4


def test_a_server_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are repeated so often and no more; then nothing new is asked of it."""
    monkeypatch.setattr("swarm.models.http.FIRST_WAIT", 0.001)
    with compare_endpoint.endpoint(lambda _: endpoints.Reply({}, 500)) as server:
        heard = run_scripts([script(asked(f"q{n}")) for n in range(300)])
        assert texts(heard) == [None] * 300
        assert len(server.asked) == 39, "three requests, 13 times each"
    [later] = run_scripts([script(asked("q0"))])
    assert isinstance(later, UserError), "the server is gone"


class Says(Model):
    """A model of one's own, that says the last turn in capitals after a word."""

    def __init__(self, word: str = "") -> None:
        self.word = word
        self._asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Model.generate`."""
        self._asked += requests
        return [Completion(self.word + request.prompt[-1].content.upper()) for request in requests]


def test_a_model_of_ones_own_is_a_class_with_generate() -> None:
    own = Config.models["own"] = Says()
    ask = [script(asked(f"q{n}", "own"), sample) for n in range(5) for sample in range(2)]
    assert texts(run_scripts(ask))[:3] == ["Q0", "Q0", "Q1"]
    [again] = run_scripts([script(asked("q3", "own"), 1)])
    assert again.cached and len(own._asked) == 10 and own._asked[0].max_new_tokens == 5
    Config.models = {"own": Says("oh "), "wrong": object()}
    heard = run_scripts(
        [
            script(asked("q0", "own")),
            script(asked("q", "own", logit_bias={1: 2})),
            script(asked([{"type": "text", "text": "hi"}], "own")),
            script(asked("q", "wrong")),
        ]
    )
    assert heard[0].text == "oh Q0", "one that is made otherwise is another"
    assert "own: logit_bias is not supported" in str(heard[1])
    assert "accepts text only" in str(heard[2])
    assert isinstance(heard[3], InvalidArgument) and "swarm.models.base.Model" in str(heard[3])


def test_samples_that_are_counted_are_asked_for_together() -> None:
    """The prompt is paid once, and what is kept is not asked for again."""

    def together(request: endpoints.Asked) -> endpoints.Reply:
        reply = repeats(request)
        choices = reply.body["choices"] * request.body.get("n", 1)
        return endpoints.Reply({**reply.body, "choices": choices})

    def probabilities(count: int) -> None:
        calls = [
            {"params": {"messages": [{"role": "user", "content": f"q{n}"}]}, "num_samples": count}
            for n in range(8)
        ]
        runner = Runner("small")
        found = {tuple(said[0]) for _, said in runner.get_many(runner.sample_probs, calls)}
        assert found == {(f"so: q{n}",) for n in range(8)}

    with compare_endpoint.endpoint(together) as server:
        probabilities(7)
        assert [one.body["n"] for one in server.asked] == [7] * 8
        probabilities(9)
        assert [one.body["n"] for one in server.asked[8:]] == [2] * 8


def test_any_function_is_called_with_many_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    def half(n: int) -> tuple[float, dict[str, Any]]:
        return 1 / n, {}

    calls = [{"n": n, "_id": f"call {n}"} for n in (2, 0, 4)]
    found = sorted(Runner("m").get_many(half, calls), key=lambda one: calls.index(one[0]))
    assert [(given["_id"], out) for given, (out, _) in found] == [
        *[("call 2", 0.5), ("call 0", None), ("call 4", 0.25)]
    ]
    assert capsys.readouterr().err == "call 1 failed: division by zero\n"


def test_a_handler_of_an_adapter_cannot_ask_and_its_error_comes_before_any_request() -> None:
    def wrong(params: dict[str, Any], model: str) -> Any:
        return {**params, "max_tokens": "many"}

    with compare_endpoint.endpoint() as server:
        ModelAdapter.register(lambda model: model == "m2", wrong)
        with pytest.raises(InvalidArgument, match="m2: max_tokens='many': must be an integer"):
            free_form("x").df({"g": ["m1", "m2"]})
        assert not server.asked


def test_a_row_for_each_group_model_paraphrase_and_sample_in_order() -> None:
    question = free_form("one", "two", samples_per_paraphrase=3, system="Be brief.")
    with compare_endpoint.endpoint() as server:
        df = question.df({"b": ["m2", "m1"], "a": ["m1"]})
        assert len(server.asked) == 12, "a model in two groups is asked once"
        body = next(one.body for one in server.asked if one.body["model"] == "m2")
    assert list(df.columns) == COLUMNS
    assert list(df.group) == ["b"] * 12 + ["a"] * 6
    assert list(df.model) == ["m2"] * 6 + ["m1"] * 12
    assert list(df.paraphrase_ix) == [0, 0, 0, 1, 1, 1] * 3
    assert list(df.question) == ["one"] * 3 + ["two"] * 3 + list(df.question[:6]) * 2
    assert list(df.answer) == ["so: " + one for one in df.question]
    assert df.error.isna().all()
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert body == {"model": "m2", "messages": turns, "temperature": 1, "max_tokens": 1024}
    assert df.api_kwargs[0] == {"timeout": 60, **body}
    assert KEY not in df.to_json()


def test_more_samples_models_and_paraphrases_ask_what_is_new_until_forgotten() -> None:
    with compare_endpoint.endpoint() as server:

        def asks(groups: Mapping[str, Sequence[str]], *said: str, samples: int) -> int:
            before = len(server.asked)
            free_form(*said, samples_per_paraphrase=samples).df(groups)
            return len(server.asked) - before

        assert asks({"g": ["m1"]}, "one", "two", samples=3) == 6
        assert asks({"g": ["m1"]}, "one", "two", samples=4) == 2
        assert asks({"g": ["m1"]}, "zero", "one", "two", samples=4) == 4
        assert asks({"g": ["m1", "m2"]}, "one", samples=4) == 4
        assert asks({"g": ["m1", "m2"]}, "one", "one", samples=2) == 0, "the second has others"
        assert free_form("one").clear_cache("m1"), "earlier runs had more samples"
        assert not free_form("one").clear_cache("m1")
        assert asks({"g": ["m1", "m2"]}, "one", samples=4) == 4


def test_failures_are_rows_and_are_told_and_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = free_form("good", "bad", samples_per_paraphrase=2)
    with compare_endpoint.endpoint() as server:
        df = question.df({"g": ["m1", "m2"]})
        question.df({"g": ["m1", "m2"]})
        assert (server.texts().count("bad"), server.texts().count("good")) == (8, 4)
    good, bad = df[df.question == "good"], df[df.question == "bad"]
    assert list(good.answer) == ["so: good"] * 4 and list(good.error) == [None] * 4
    assert bad.answer.isna().all() and bad.error.str.contains("I do not answer that").all()
    told = capsys.readouterr().err.splitlines()
    for model, line in zip(("m1", "m2"), told, strict=False):
        assert line.startswith(f"question __unnamed, model {model}: 2 of 4 rows have an error: ")
        assert "I do not answer that" in line


def test_details_tell_a_refusal_from_an_empty_answer() -> None:
    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        if asked.body["model"] == "refuses":
            return endpoints.chat(None, refusal="I cannot help with that.")
        return endpoints.chat("", prompt=7, new=1, reasoning="Nothing to say.")

    with compare_endpoint.endpoint(answer):
        df, again = (free_form("x").df({"g": ["empty", "refuses"]}, details=True) for _ in range(2))
    assert list(df.answer) == ["", ""] and list(df.finish) == ["stop", "refusal"]
    details = "sample finish reasoning prompt_tokens new_tokens seconds cost cached".split()
    assert list(df.columns) == [*COLUMNS, *details]
    first = df.loc[0]
    assert (first.reasoning, first.prompt_tokens, first.new_tokens) == ("Nothing to say.", 7, 1)
    assert (list(df.cached), list(again.cached)) == ([False, False], [True, True])


def test_results_are_the_rows_of_a_model() -> None:
    with compare_endpoint.endpoint() as server:
        question = free_form("a", "b", samples_per_paraphrase=2)
        first, second = question.get_results(["m2", "m1"])
        assert (first.model, second.model, len(server.asked)) == ("m2", "m1", 8)
        assert [(row["paraphrase_ix"], row["answer"]) for row in first.data] == [
            *[(0, "so: a")] * 2,
            *[(1, "so: b")] * 2,
        ]
        assert first.question is question and first.data[3]["question"] == "b"
        assert first.data[0]["error"] is None and first.data[0]["api_kwargs"]["model"] == "m2"
        assert question.get_results(["m1"]) == [second] and len(server.asked) == 8
        assert question.many_models_execute(["m1"]) == [second] and len(server.asked) == 12
        assert question.get_results([]) == []
        for wrong in (["m1", "m1"], "m1", [3]):
            with pytest.raises(InvalidArgument):
                question.get_results(wrong)


def asks(judges: Any, *paraphrases: Any, **more: Any) -> Any:
    """A question with judges."""
    return free_form(*(paraphrases or ("one", "two")), judges=judges, **more)


def answer(asked: endpoints.Asked) -> endpoints.Reply:
    """Models say the length of what they are asked, judges what they are asked."""
    said = asked.body["messages"][-1]["content"]
    if asked.body["model"] == "rater":
        top = [
            {"token": text, "logprob": math.log(p)}
            for text, p in (("80", 0.6), ("20", 0.2), ("no", 0.2))
        ]
        reply = endpoints.chat("80")
        reply.body["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        return reply
    if asked.body["model"] == "judge":
        return endpoints.chat(f"<{said}>")
    if "bad" in said:
        return endpoints.Reply({"error": {"message": "not that"}}, 400)
    return endpoints.chat(f"{len(said)} letters")


def test_judges_are_columns_and_what_is_kept_of_them_is_listed() -> None:
    question = asks({"so": BOTH, "score": RATING}, samples_per_paraphrase=2)
    with compare_endpoint.endpoint(answer) as server:
        df = question.df({"g": ["m1", "m2"]})
        count = len(server.asked)
        pd.testing.assert_frame_equal(df, question.df({"g": ["m1", "m2"]}))
        so, score = (judge.get_cache() for judge in question.judges.values())
        assert len(server.asked) == count
    assert list(df.columns) == [
        *("model", "group", "answer", "so", "score", "question", "api_kwargs", "paraphrase_ix"),
        *("so_question", "score_question", "score_raw_answer", "score_probs", "error"),
    ]
    assert count == 8 + 2 + 1, "one for each question and answer, one for each answer"
    prompts = [f"Asked {one}, said 3 letters." for one in ("one", "two")]
    assert list(df.so[:3]) == [f"<{prompts[0]}>"] * 2 + [f"<{prompts[1]}>"]
    assert df.so_question[0] == prompts[0] and df.score_question[0] == "Rate 3 letters"
    assert df.score.tolist() == pytest.approx([65.0] * 8)
    assert df.score_raw_answer[0] == pytest.approx({"80": 0.6, "20": 0.2, "no": 0.2})
    assert df.score_probs[0] == pytest.approx({80: 0.75, 20: 0.25})
    assert list(so.columns) == ["question", "answer", "judge_question", "judge_answer"]
    assert so.values.tolist() == [
        [one, "3 letters", prompt, f"<{prompt}>"]
        for one, prompt in zip(("one", "two"), prompts, strict=True)
    ]
    assert list(score.columns) == [*so.columns, "judge_raw_answer"] and len(score) == 1
    assert score.question.isna().all() and score.judge_answer[0] == pytest.approx(65)
    assert score.judge_raw_answer[0] == pytest.approx({"80": 0.6, "20": 0.2, "no": 0.2})
    assert Question.create(**{**TEXT, "model": "other"}).get_cache().empty


def test_a_new_judge_or_range_asks_the_judge_alone_until_it_is_forgotten() -> None:
    with compare_endpoint.endpoint(answer) as server:
        asks(None).df({"g": ["m"]})
        question = asks({"score": RATING})
        assert question.df({"g": ["m"]}).score[0] == pytest.approx(65)
        assert [one.body["model"] for one in server.asked[2:]] == ["rater"]
        narrow = {**RATING, "min_rating": 50}
        assert asks({"score": narrow}).df({"g": ["m"]}).score[0] == pytest.approx(80)
        assert len(server.asked) == 3, "the range is no part of what is asked"
        assert question.clear_cache("m")
        question.df({"g": ["m"]})
        assert len(server.asked) == 5, "the judges' answers stayed"
        assert question.clear_cache("m", judges=True)
        assert question.judges["score"].get_cache().empty
        question.df({"g": ["m"]})
        assert len(server.asked) == 8


def test_a_failed_answer_is_not_judged_and_a_failed_judgement_is_told() -> None:
    def reply(asked: endpoints.Asked) -> endpoints.Reply:
        if asked.body["model"] == "rater":
            return endpoints.Reply({"error": {"message": "too busy judging"}}, 400)
        return answer(asked)

    question = asks({"so": TEXT, "score": RATING}, "good", "bad")
    with compare_endpoint.endpoint(reply) as server:
        df = question.df({"g": ["m"]})
        assert [one.body["model"] for one in server.asked].count("judge") == 1
        good, bad = df.loc[0], df.loc[1]
        assert (good.answer, good.so) == ("4 letters", "<Is it so? 4 letters>")
        assert pd.isna(good.score) and good.score_probs is None
        assert "judge score: " in good.error and "too busy judging" in good.error
        assert (bad.answer, bad.so, bad.so_question) == (None, None, None)
        assert "not that" in bad.error and "judge" not in bad.error
        assert question.judges["score"].get_cache().empty, "a failure is not kept"
        server.answer = answer
        assert question.df({"g": ["m"]}).score[0] == pytest.approx(65), "it is asked again"


def test_answers_stream_into_their_judges() -> None:
    """The first answer is judged while the last is not there yet."""
    judged_first = threading.Event()

    def reply(asked: endpoints.Asked) -> endpoints.Reply:
        if asked.body["model"] == "judge":
            judged_first.set()
        elif asked.body["messages"][-1]["content"] == "slow":
            assert judged_first.wait(10)
        return answer(asked)

    with compare_endpoint.endpoint(reply):
        df = asks({"so": TEXT}, "fast one", "slow").df({"g": ["m"]})
    assert df.error.isna().all()


def has(*models: str) -> Any:
    """An endpoint's answers, that has these models alone."""

    def answer(request: endpoints.Asked) -> endpoints.Reply:
        if request.body["model"] in models:
            return repeats(request)
        return endpoints.Reply({"error": {"message": "no such model"}}, 404)

    return answer


@contextmanager
def several(**models: tuple[str, ...]) -> Iterator[dict[str, endpoints.Endpoint]]:
    """An endpoint by the name of each variable, with its models; all are known."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(endpoints.endpoint(has(*there)))
            for name, there in models.items()
        }
        Config.url_key_pairs = [(one.url, f"{KEY}-{name}", name) for name, one in running.items()]
        yield running


def test_the_lowest_variable_that_works_is_taken_and_remembered_by_later_processes() -> None:
    with several(B_KEY=("m", "n"), A_KEY_1=("m",), A_KEY=("other",)) as there:
        assert Config.client_for_model("m").base_url == there["A_KEY_1"].url
        assert Config.client_for_model("n").variable == "B_KEY"
        assert [len(one.asked) for one in there.values()] == [2, 2, 2]
        heard = run_scripts([script(asked(f"q{n}", "m")) for n in range(5)])
        assert heard[4].text == "so: q4"
        assert [len(one.asked) for one in there.values()] == [2, 7, 2]
        pairs, folder = Config.url_key_pairs, Config.cache_dir
        Config.reset()
        Config.url_key_pairs, Config.cache_dir = pairs, folder
        assert Config.client_for_model("n").variable == "B_KEY"
        assert [len(one.asked) for one in there.values()] == [2, 7, 2]


def test_a_model_that_has_moved_is_looked_for_again() -> None:
    with several(A_KEY=("m",), B_KEY=()) as there:
        run_scripts([script(asked("q0", "m"))])
        there["A_KEY"].answer, there["B_KEY"].answer = has(), has("m")
        [first] = run_scripts([script(asked("q1", "m"))])
        [second] = run_scripts([script(asked("q1", "m"))])
        assert isinstance(first, UserError) and second.text == "so: q1"


def test_the_only_place_is_not_asked_before_and_the_same_name_elsewhere_is_another_model() -> None:
    with several(A_KEY=("m",)) as there:
        run_scripts([script(asked("q", "m"))])
        with several(A_KEY=("m",)) as other:
            run_scripts([script(asked("q", "m"))])
            assert there["A_KEY"].texts() == other["A_KEY"].texts() == ["q"]


def test_a_client_tells_its_place_and_not_its_key() -> None:
    with several(A_KEY=("m",)) as there:
        client = Config.client_for_model("m")
        assert client.api_key == f"{KEY}-A_KEY" and KEY not in repr(client)
        turns: Any = [{"role": "user", "content": "hi"}]
        said = client.chat.completions.create(model="m", messages=turns)
        assert said.choices[0].message.content == "so: hi"
        headers = {k.lower(): value for k, value in there["A_KEY"].asked[-1].headers.items()}
        assert headers["authorization"] == f"Bearer {KEY}-A_KEY"


def test_a_provider_without_log_probabilities() -> None:
    rater = distribution_model.Rater({"heads": 0.7, "tails": 0.3})

    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        if "logprobs" in asked.body and asked.body["model"] == "refuses":
            return endpoints.Reply({"error": {"message": "logprobs are not supported"}}, 400)
        return endpoints.Reply(rater.body({**asked.body, "logprobs": False}))

    how = {"type": "next_token", "paraphrases": ["Heads or tails?"]}
    with compare_endpoint.endpoint(answer) as server:
        df = Question.create(**how).df({"a": ["refuses", "ignores"]})
        counted = Question.create(**how, estimate_by_sampling=20).df({"a": ["refuses"]})
        assert len(server.asked) == 24, "of those that lack them two are repeated"
    assert df.answer.isna().all() and "logprobs are not supported" in df.error[0]
    for model, error in zip(df.model, df.error, strict=True):
        assert model in error and server.url in error and "estimate_by_sampling=True" in error
        assert KEY not in error
    row = counted.iloc[0]
    assert set(row.answer) == set(row.low) == set(row.high) == {"heads", "tails"}
    assert (row.api_kwargs["temperature"], row.api_kwargs["max_tokens"]) == (1, 1)
