"""Questions: what they refuse, their data frames, many at once, and what they forget."""

import gc
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pandas as pd
import pytest
from compare_endpoint import KEY

from swarm.compare import Config, FreeForm, NextToken, Question, Rating, read_jsonl, write_jsonl
from swarm.compare.sampling.scheduler import reduce_gc_frequency
from swarm.errors import InvalidArgument, UserError, install_command
from swarm.models.base import Completion, Model, Request

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

TURN = [{"role": "user", "content": "hello"}]
COLUMNS = ["model", "group", "answer", "question", "api_kwargs", "paraphrase_ix", "error"]


class Repeats(Model):
    """A model that says what it was told."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The last turns."""
        return [Completion(request.prompt[-1].content) for request in requests]


def free_form(*paraphrases: Any, **more: Any) -> FreeForm:
    """A question in free form."""
    return Question.create(type="free_form", paraphrases=list(paraphrases), **more)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "type=None: must be one of free_form, next_token, rating, free_form_judge"),
        ({"type": "freeform"}, "type='freeform': must be one of"),
        ({"tempreature": 1}, "free_form has no argument 'tempreature'; did you mean temperature?"),
        ({"messages": [TURN]}, "either paraphrases=[...] or messages=[[...]]"),
        ({"paraphrases": None}, "either paraphrases=[...] or messages=[[...]]"),
        ({"paraphrases": "hello"}, "must be a list of at least one string"),
        ({"paraphrases": []}, "must be a list of at least one string"),
        ({"paraphrases": [3]}, "paraphrases: 3: must be a string, or a list of parts"),
        ({"paraphrases": None, "messages": [TURN], "system": "s"}, "system requires paraphrases"),
        ({"paraphrases": None, "messages": TURN}, "messages is a list of conversations"),
        ({"paraphrases": None, "messages": [[{"role": "user"}]]}, "the last turn"),
        ({"name": "a/b"}, "a name may contain only letters, digits and"),
        ({"name": ".."}, "not only dots"),
        ({"name": "ok\n"}, "a name may contain only letters, digits and"),
        ({"samples_per_paraphrase": 0}, "samples_per_paraphrase=0: must be an integer, 1 or more"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"temperature": float("inf")}, "temperature=inf: must be a number"),
        ({"type": ["free_form"]}, "type=['free_form']: must be one of"),
        ({"max_tokens": 0}, "max_tokens=0: must be an integer, 1 or more"),
        ({"logit_bias": {"yes": 3}}, "logit_bias: 'yes' is not a token id"),
        ({"metadata": [{"id": 1}, {"id": 2}]}, "one mapping for each of the 1 paraphrases"),
        ({"metadata": [{"answer": 1}]}, "'answer' cannot be the name of a column; taken are"),
    ],
)
def test_what_a_question_cannot_be_is_one_line(given: dict[str, Any], told: str) -> None:
    free = {"type": "free_form", "paraphrases": ["hello"]}
    with pytest.raises(InvalidArgument) as raised:
        Question.create(**({**free, **given} if given else {}))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_names_as_llmcomp_takes_them() -> None:
    assert free_form("x", name="a-b_[1].(2)").name == "a-b_[1].(2)"
    assert free_form("x").name == free_form("x", name=None).name == "__unnamed"
    assert [kind.type() for kind in (FreeForm, NextToken, Rating)] == [
        *("free_form", "next_token", "rating")
    ]


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ("m", "not as str: 'm'"),
        (["m"], "not as list: ['m']"),
        ({"g": "m"}, "group 'g': 'm' is not a list of models"),
        ({"g": pd.DataFrame({"model": ["m"]})}, "is not a list of models"),
        ({"g": [1]}, "group 'g': 1 is not a model's name"),
        ({"g": []}, "group 'g' has no models"),
        ({}, "no models;"),
    ],
)
def test_models_are_groups_of_lists(groups: Any, told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        free_form("x").df(groups)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


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


def test_more_samples_models_and_paraphrases_ask_what_is_new() -> None:
    with compare_endpoint.endpoint() as server:

        def asks(groups: Mapping[str, Sequence[str]], *said: str, samples: int) -> int:
            before = len(server.asked)
            free_form(*said, samples_per_paraphrase=samples).df(groups)
            return len(server.asked) - before

        assert asks({"g": ["m1"]}, "one", "two", samples=3) == 6
        assert asks({"g": ["m1"]}, "one", "two", samples=4) == 2
        assert asks({"g": ["m1"]}, "zero", "one", "two", samples=4) == 4
        assert asks({"g": ["m1", "m2"]}, "one", samples=4) == 4
        assert asks({"g": ["m1", "m2"]}, "one", samples=2) == 0


def test_a_paraphrase_that_is_there_twice_has_samples_of_its_own() -> None:
    numbers = iter(range(100))
    with compare_endpoint.endpoint(lambda asked: endpoints.chat(str(next(numbers)))):
        df = free_form("x", "x", samples_per_paraphrase=2).df({"g": ["m"]})
    assert sorted(df.answer) == ["0", "1", "2", "3"]


def test_failures_are_rows_and_are_told_and_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = free_form("good", "bad", samples_per_paraphrase=2)
    with compare_endpoint.endpoint() as server:
        df = question.df({"g": ["m1", "m2"]})
        question.df({"g": ["m1", "m2"]})
        assert server.texts().count("bad") == 8
        assert server.texts().count("good") == 4
    assert list(df.answer[df.question == "good"]) == ["so: good"] * 4
    assert list(df.error[df.question == "good"]) == [None] * 4
    assert df.answer[df.question == "bad"].isna().all()
    assert all("I do not answer that" in one for one in df.error[df.question == "bad"])
    told = capsys.readouterr().err.splitlines()
    assert [line[: line.index(" have")] for line in told[:2]] == [
        *("question __unnamed, model m1: 2 of 4 rows", "question __unnamed, model m2: 2 of 4 rows")
    ]
    assert "I do not answer that" in told[0]


def test_a_model_that_nobody_has_leaves_the_others_answers() -> None:
    answer = compare_endpoint.repeats
    gone = endpoints.Reply({"error": {"message": "The model `gone` does not exist"}}, 404)
    with compare_endpoint.endpoint(lambda a: gone if a.body["model"] == "gone" else answer(a)):
        df = free_form("x", samples_per_paraphrase=20).df({"g": ["m", "gone"]})
    assert list(df.answer[df.model == "m"]) == ["so: x"] * 20
    assert df.error[df.model == "gone"].notna().all()


def test_details_tell_a_refusal_from_an_empty_answer() -> None:
    def answer(asked: endpoints.Asked) -> endpoints.Reply:
        if asked.body["model"] == "refuses":
            return endpoints.chat(None, refusal="I cannot help with that.")
        return endpoints.chat("", prompt=7, new=1, reasoning="Nothing to say.")

    with compare_endpoint.endpoint(answer):
        df = free_form("x").df({"g": ["empty", "refuses"]}, details=True)
        again = free_form("x").df({"g": ["empty", "refuses"]}, details=True)
    assert list(df.answer) == ["", ""]
    assert list(df.finish) == ["stop", "refusal"]
    assert list(df.columns) == [
        *COLUMNS,
        *("sample", "finish", "reasoning", "prompt_tokens", "new_tokens"),
        *("seconds", "cost", "cached"),
    ]
    first = df.loc[0]
    assert (first.reasoning, first.prompt_tokens, first.new_tokens) == ("Nothing to say.", 7, 1)
    assert (list(df.cached), list(again.cached)) == ([False, False], [True, True])
    assert df.cached.dtype == bool


def test_metadata_are_columns() -> None:
    facts = [{"id": "a", "year": 1900}, {"id": "b"}]
    with compare_endpoint.endpoint():
        df = free_form("one", "two", metadata=facts).df({"g": ["m"]})
        with pytest.raises(InvalidArgument, match="details=True adds a column sample; rename"):
            free_form("one", metadata=[{"sample": 1}]).df({"g": ["m"]}, details=True)
    assert list(df.columns) == [*COLUMNS[:-1], "id", "year", "error"]
    assert list(df.id) == ["a", "b"]
    assert df.year[0] == 1900
    assert pd.isna(df.year[1])


def test_messages_and_parts_are_asked_as_they_are() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    turns = [{"role": "system", "content": "See."}, {"role": "user", "content": parts}]
    question = Question.create(type="free_form", messages=[turns], temperature=None)
    with compare_endpoint.endpoint(lambda asked: endpoints.chat("a bird")) as server:
        df = question.df({"g": ["m"]})
        assert server.asked[0].body["messages"] == turns
        assert "temperature" not in server.asked[0].body
    assert df.question[0] == parts
    question.as_messages()[0].append("x")
    assert question.as_messages() == [turns], "they are copies"


def test_several_questions_share_the_workers() -> None:
    one = free_form("q1", samples_per_paraphrase=2, name="first")
    two = free_form("q2", name="second")
    with compare_endpoint.endpoint() as server:
        frames = Question.many([one, two], {"g": ["m1", "m2"]})
        assert [list(df.answer) for df in frames] == [["so: q1"] * 4, ["so: q2"] * 2]
        own = one.many([two, one], [{"g": ["m1"]}, {"h": ["m2"], "i": ["m3"]}])
        assert [list(df.group) for df in own] == [["g"], ["h", "h", "i", "i"]]
        assert len(server.asked) == 8
    for wrong, told in (
        ((one, {"g": ["m"]}), "many takes a list of questions"),
        (([one, "x"], {"g": ["m"]}), "'x' is none"),
        (([one], [{"g": ["m"]}, {}]), "1 questions and 2 mappings"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            Question.many(*wrong)
    assert Question.many([], {"g": ["m"]}) == []


def test_what_can_be_seen_is_told_before_something_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = free_form("x", samples_per_paraphrase=20)
    with compare_endpoint.endpoint():
        question.df({"g": ["m1"]})
        assert capsys.readouterr().err == "", "one group"
        question.df({"g": ["m1"], "h": ["m2"]})
        told = capsys.readouterr().err
        assert told.startswith("2 groups, 1 paraphrase x 20 samples: differences of shares")
        question.df({"g": ["m1"], "h": ["m2"]})
        assert capsys.readouterr().err == "", "all is kept"


def test_what_a_model_answered_is_forgotten() -> None:
    question = free_form("x", "y", samples_per_paraphrase=3)
    with compare_endpoint.endpoint() as server:
        question.df({"g": ["m1", "m2"]})
        fewer = free_form("x", "y")
        assert fewer.clear_cache("m1"), "earlier runs had more samples"
        assert not question.clear_cache("m1")
        question.df({"g": ["m1", "m2"]})
        assert len(server.asked) == 18


def test_input_for_a_runner_is_one_mapping_a_row() -> None:
    question = free_form("x", "y", samples_per_paraphrase=2, logit_bias={5: -100})
    given = question.get_runner_input()
    assert [one["_paraphrase_ix"] for one in given] == [0, 0, 1, 1]
    assert given[2]["_question"] == "y"
    assert given[0]["params"]["logit_bias"] == {5: -100}
    given[0]["params"]["messages"][0]["content"] = "z"
    assert given[1]["params"]["messages"][0]["content"] == "x"


def test_a_frame_is_shown_by_the_class_and_models_by_a_question() -> None:
    for wrong in (Question.plot, Question.view):
        with pytest.raises(
            InvalidArgument, match=r"takes a data frame, not dict; models are shown by"
        ):
            wrong({"g": ["m"]})
    with pytest.raises(
        InvalidArgument, match="plot takes a mapping of models or a data frame, not int"
    ):
        free_form("x").plot(3)


def test_models_are_plotted_and_viewed_in_their_order() -> None:
    question = free_form("x", samples_per_paraphrase=2)
    groups = {"late": ["m1"], "early": ["m2"]}
    with compare_endpoint.endpoint():
        figure = question.plot(groups, min_fraction=0.03, title="Said")
        df = question.df(groups)
        running = question.view(groups, open_browser=False, port=0, block=False)
        running.close()
    labels = [tick.get_text().split("\n")[0] for tick in figure.axes[0].get_xticklabels()]
    assert [one for one in labels if one] == ["late", "early"]
    only = Question.plot(df, selected_categories=["early"])
    labels = [tick.get_text().split("\n")[0] for tick in only.axes[0].get_xticklabels()]
    assert [one for one in labels if one] == ["early"]


def test_what_is_changed_later_holds() -> None:
    judge = {"type": "free_form_judge", "model": "judge", "paraphrases": ["{answer}?"]}
    with compare_endpoint.endpoint() as server:
        question = free_form("a")
        question.paraphrases.append("b")
        question.judges = {"so": judge}
        assert list(question.df({"g": ["m"]}).so) == ["so: so: a?", "so: so: b?"]
        with pytest.raises(InvalidArgument, match="cannot be a judge's column"):
            question.judges = {"answer": judge}
        question.metadata = [{}]
        asked = len(server.asked)
        question.paraphrases.append("c")
        with pytest.raises(InvalidArgument, match="one mapping for each of the 3 paraphrases"):
            question.df({"g": ["m"]})
        assert len(server.asked) == asked
    rating = Rating(paraphrases=["a"])
    rating.max_rating = 7
    assert (rating.bounds.max_rating, rating.refusal_threshold) == (7, 0.75)
    tokens = NextToken(paraphrases=["a"])
    tokens.num_samples = 3
    assert tokens.requests_per_row == 3


def test_a_row_has_its_conversation_for_itself() -> None:
    with compare_endpoint.endpoint():
        df = free_form("a", samples_per_paraphrase=2).df({"g": ["m"]})
    df.api_kwargs[0]["messages"].append({"role": "assistant", "content": df.answer[0]})
    df.api_kwargs[0]["messages"][0]["content"] = "another"
    assert df.api_kwargs[1]["messages"] == [{"role": "user", "content": "a"}]


def test_any_collection_of_models_and_questions_is_taken() -> None:
    with compare_endpoint.endpoint():
        many = Question.many((free_form(text) for text in "ab"), {"g": pd.Series(["m", "n"])})
        assert [list(df.model) for df in many] == [["m", "n"]] * 2
        names = {f"m{n}" for n in range(9)}
        assert list(free_form("a").df({"g": names}).model) == sorted(names)


def test_collections_are_rare_until_the_last_has_left() -> None:
    before = gc.get_threshold()
    with reduce_gc_frequency():
        with reduce_gc_frequency():
            assert gc.get_threshold() > before
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rows.jsonl"
    rows = [{"text": "caf\u00e9\n\ud83d", "n": 1}, {"n": [1.5, None]}]
    write_jsonl(file, rows)
    assert read_jsonl(file) == rows
    file.write_text(file.read_text() + "\n\n{}\n")
    assert read_jsonl(str(file)) == [*rows, {}]
    write_jsonl(file, pd.DataFrame({"a": [1, 2], "b": [0.5, float("nan")]}))
    assert read_jsonl(file) == [{"a": 1, "b": 0.5}, {"a": 2, "b": None}]
    with pytest.raises(UserError, match="value 1 is not JSON"):
        write_jsonl(file, [1, object()])
    assert len(read_jsonl(file)) == 2, "the file stays as it was"
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_jsonl(file)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_jsonl(tmp_path / "none")


def test_no_key_is_written_anywhere(settings: Path, tmp_path: Path) -> None:
    with compare_endpoint.endpoint():
        write_jsonl(tmp_path / "rows.jsonl", free_form("x", "bad").df({"g": ["m"]}))
    written = b"".join(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    assert json.dumps("so: x").encode() in written
    assert KEY.encode() not in written
    assert Config.cache_dir == str(settings)


@pytest.mark.parametrize(("missing", "call"), [("pandas", "df"), ("matplotlib", "plot")])
def test_a_library_that_is_missing_is_named(
    missing: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("swarm.compare.plots")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    Config.models["own"] = Repeats()
    with pytest.raises(
        UserError, match=rf"{missing}.* is not installed: {re.escape(install_command('compare'))}"
    ):
        getattr(free_form("hi"), call)({"g": ["own"]})


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
        assert list(question.df({"g": ["m1", "m2"]})["error"]) == [None] * 8
        assert len(server.asked) == 12 and question.get_results([]) == []
        for wrong in (["m1", "m1"], "m1", [3]):
            with pytest.raises(InvalidArgument):
                question.get_results(wrong)
    [failed] = question.many_models_execute(["m1"])
    assert [row["answer"] for row in failed.data] == [None] * 4 and failed.data[0]["error"]
