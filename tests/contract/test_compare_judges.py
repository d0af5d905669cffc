"""Judges: names and templates, asked once of each prompt, kept, listed, forgotten."""

import math
import subprocess
import sys
import threading
from typing import Any

import compare_endpoint
import endpoints
import pandas as pd
import pytest

from swarm.compare import Config, FreeFormJudge, Question, RatingJudge
from swarm.compare.judge_cache import (
    JudgeRun,
    JudgeTemplate,
    load_judged_pairs,
    record_judged_pairs,
)
from swarm.errors import InvalidArgument
from swarm.models.base import Completion

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

TEXT = {"type": "free_form_judge", "model": "judge", "paraphrases": ["Is it so? {answer}"]}
BOTH = {**TEXT, "paraphrases": ["Asked {question}, said {answer}."]}
RATING = {"type": "rating_judge", "model": "rater", "paraphrases": ["Rate {answer}"]}


def asks(judges: Any, *paraphrases: Any, **more: Any) -> Any:
    """A question with judges."""
    said = list(paraphrases or ["one", "two"])
    return Question.create(type="free_form", paraphrases=said, judges=judges, **more)


def likely(chances: dict[str, float]) -> endpoints.Reply:
    """One token with its likeliest alternatives."""
    top = [{"token": text, "logprob": math.log(p)} for text, p in chances.items()]
    first = {**top[0], "top_logprobs": top}
    choice = {
        "message": {"content": top[0]["token"]},
        "finish_reason": "stop",
        "logprobs": {"content": [first]},
    }
    return endpoints.Reply({"choices": [choice]})


def answer(asked: endpoints.Asked) -> endpoints.Reply:
    """Models say the length of what they are asked, judges what they are asked."""
    said = asked.body["messages"][-1]["content"]
    if asked.body["model"] == "rater":
        return likely({"80": 0.6, "20": 0.2, "no": 0.2})
    if asked.body["model"] == "judge":
        return endpoints.chat(f"<{said}>")
    if "bad" in said:
        return endpoints.Reply({"error": {"message": "not that"}}, 400)
    return endpoints.chat(f"{len(said)} letters")


@pytest.mark.parametrize(
    ("judges", "told"),
    [
        ({"answer": TEXT}, "'answer' cannot be a judge's column"),
        ({"_own": TEXT}, "'_own' cannot be a judge's column"),
        ({"a_question": TEXT}, "'a_question' cannot be"),
        ({"a_raw_answer": TEXT}, "'a_raw_answer' cannot be"),
        ({"a_probs": TEXT}, "'a_probs' cannot be"),
        ({"a": {**TEXT, "model": ""}}, "judge a: free_form_judge: model='': must be the name"),
        ({"a": {**TEXT, "paraphrases": ["no"]}}, "judge a: a judge's template must have {answer}"),
        ({"a": {**TEXT, "paraphrases": ["{answer} {qestion}"]}}, "did you mean {question}?"),
        ({"a": {**TEXT, "paraphrases": ["{answer}", "{answer}?"]}}, "exactly one paraphrase"),
        ({"a": {**TEXT, "samples_per_paraphrase": 2}}, "samples_per_paraphrase=1"),
        ({"a": {**TEXT, "judges": {"b": TEXT}}}, "a judge has no judges"),
        ({"a": {"type": "rating", "paraphrases": ["x"]}}, "it is a rating"),
        ({"a": {**TEXT, "modle": "x"}}, "did you mean model?"),
        ({"a": 3}, "it is a int"),
        ([TEXT], "judges must be a mapping"),
    ],
)
def test_what_a_judge_cannot_be_is_told_before_anything_is_paid(judges: Any, told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        asks(judges)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "prompt", "uses_question"),
    [
        ("{question}: {answer}", "Q: A", True),
        ('Reply {{"score": 1}}: {answer}', 'Reply {"score": 1}: A', False),
        ('Reply {"score": 1}: {answer}', 'Reply {"score": 1}: A', False),
        ('{"q": {"text": "{question}"}} {answer} {}', '{"q": {"text": "Q"}} A {}', True),
        ("{answer} { }", "A { }", False),
        ("{{question}} {answer}", "{question} A", False),
        ("{answer} \\frac{a}{b}", "A \\frac{a}{b}", False),
    ],
)
def test_braces_of_json_stay(text: str, prompt: str, uses_question: bool) -> None:
    template = JudgeTemplate(text)
    assert template.fill("Q", "A") == prompt
    assert template.uses_question is uses_question
    assert (
        JudgeTemplate("{question} {answer}").fill("{answer}", "{question}") == "{answer} {question}"
    )


def test_judges_are_columns() -> None:
    question = asks({"so": BOTH, "score": RATING}, samples_per_paraphrase=2)
    with compare_endpoint.endpoint(answer) as server:
        df = question.df({"g": ["m1", "m2"]})
        asked = len(server.asked)
        again = question.df({"g": ["m1", "m2"]})
        assert len(server.asked) == asked
    assert list(df.columns) == [
        *("model", "group", "answer", "so", "score", "question", "api_kwargs", "paraphrase_ix"),
        *("so_question", "score_question", "score_raw_answer", "score_probs", "error"),
    ]
    assert asked == 8 + 2 + 1, "one for each question and answer, one for each answer"
    assert list(df.so[:3]) == ["<Asked one, said 3 letters.>"] * 2 + [
        "<Asked two, said 3 letters.>"
    ]
    assert list(df.so_question[:1]) == ["Asked one, said 3 letters."]
    assert df.score.tolist() == pytest.approx([65.0] * 8)
    assert df.score_raw_answer[0] == pytest.approx({"80": 0.6, "20": 0.2, "no": 0.2})
    assert df.score_probs[0] == pytest.approx({80: 0.75, 20: 0.25})
    pd.testing.assert_frame_equal(df, again)


def test_a_new_judge_or_range_asks_the_judge_alone() -> None:
    with compare_endpoint.endpoint(answer) as server:
        asks(None).df({"g": ["m"]})
        assert len(server.asked) == 2
        df = asks({"score": RATING}).df({"g": ["m"]})
        assert [one.body["model"] for one in server.asked[2:]] == ["rater"]
        narrow = {**RATING, "max_rating": 50 + 50, "min_rating": 50}
        assert asks({"score": narrow}).df({"g": ["m"]}).score[0] == pytest.approx(80)
        assert df.score[0] == pytest.approx(65)
        assert len(server.asked) == 3, "the range is no part of what is asked"


def test_prompts_that_coincide_keep_all_rows() -> None:
    """("ab", "c") and ("a", "bc") are the same text to this judge."""
    judge = {**TEXT, "paraphrases": ["{question}{answer}"]}
    said = {"ab": "c", "a": "bc"}

    def reply(asked: endpoints.Asked) -> endpoints.Reply:
        return endpoints.chat(said.get(asked.body["messages"][-1]["content"], "yes"))

    with compare_endpoint.endpoint(reply) as server:
        df = asks({"so": judge}, "ab", "a").df({"g": ["m"]})
        assert len(server.asked) == 3
    assert list(df.so) == ["yes", "yes"]
    assert list(df.so_question) == ["abc", "abc"]


def test_a_failed_answer_is_not_judged_and_a_failed_judgement_is_told() -> None:
    def reply(asked: endpoints.Asked) -> endpoints.Reply:
        if asked.body["model"] == "rater":
            return endpoints.Reply({"error": {"message": "too busy judging"}}, 400)
        return answer(asked)

    question = asks({"so": TEXT, "score": RATING}, "good", "bad")
    with compare_endpoint.endpoint(reply) as server:
        df = question.df({"g": ["m"]})
        assert [one.body["model"] for one in server.asked].count("judge") == 1
        assert df.answer[0] == "4 letters"
        assert df.so[0] == "<Is it so? 4 letters>"
        assert pd.isna(df.score[0])
        assert df.score_probs[0] is None
        assert "judge score: " in df.error[0]
        assert "too busy judging" in df.error[0]
        assert (df.answer[1], df.so[1], df.so_question[1]) == (None, None, None)
        assert "not that" in df.error[1]
        assert "judge" not in df.error[1]
        assert question.judges["score"].get_cache().empty, "a failure is not kept"
        server.answer = answer
        assert question.df({"g": ["m"]}).score[0] == pytest.approx(65), "it is asked again"


def test_an_interrupt_leaves_what_was_judged_listed() -> None:
    """The answers are kept as they come; which they are is written down at the end of any kind."""
    judge = FreeFormJudge(model="judge", paraphrases=["{answer}"])
    with pytest.raises(KeyboardInterrupt), JudgeRun("so", judge) as judging:
        script = judging.judge_answer("q", "said")
        next(script)
        with pytest.raises(StopIteration):
            script.send([Completion("fine")])
        raise KeyboardInterrupt
    assert load_judged_pairs(judge.cache_key) == [("", "said")]


def test_answers_stream_into_their_judges() -> None:
    """The first answer is judged while the last is not there yet."""
    judged_first = threading.Event()

    def reply(asked: endpoints.Asked) -> endpoints.Reply:
        said = asked.body["messages"][-1]["content"]
        if asked.body["model"] == "judge":
            judged_first.set()
        elif said == "slow":
            assert judged_first.wait(10)
        return answer(asked)

    with compare_endpoint.endpoint(reply):
        df = asks({"so": TEXT}, "fast one", "slow").df({"g": ["m"]})
    assert df.error.isna().all()


def test_judges_have_workers_while_answers_are_waited_for() -> None:
    Config.max_workers = 2
    with compare_endpoint.endpoint(answer) as server:
        asks({"so": TEXT}, *(f"word {'x' * n}" for n in range(20))).df({"g": ["m", "n"]})
        models = [one.body["model"] for one in server.asked]
    assert set(models[:15]) == {"m", "n", "judge"}


def test_a_judge_of_parts_reads_their_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "What is it?"}, image]
    question = Question.create(
        type="free_form", messages=[[{"role": "user", "content": parts}]], judges={"so": BOTH}
    )
    with compare_endpoint.endpoint(answer):
        df = question.df({"g": ["m"]})
    assert df.so_question[0] == "Asked What is it?\n[image_url], said 2 letters."


def test_what_is_kept_of_judges_is_listed() -> None:
    question = asks({"so": BOTH, "score": RATING, "short": TEXT}, "one", "three")
    with compare_endpoint.endpoint(answer) as server:
        question.df({"g": ["m"]})
        asked = len(server.asked)
        so, score, short = (judge.get_cache() for judge in question.judges.values())
        assert len(server.asked) == asked
    assert list(so.columns) == ["question", "answer", "judge_question", "judge_answer"]
    assert so.values.tolist() == [
        ["one", "3 letters", "Asked one, said 3 letters.", "<Asked one, said 3 letters.>"],
        ["three", "5 letters", "Asked three, said 5 letters.", "<Asked three, said 5 letters.>"],
    ]
    assert list(score.columns) == [*so.columns, "judge_raw_answer"]
    assert score.question.isna().all()
    assert score.judge_answer.tolist() == pytest.approx([65.0, 65.0])
    assert score.judge_raw_answer[0] == pytest.approx({"80": 0.6, "20": 0.2, "no": 0.2})
    assert list(short.judge_answer) == ["<Is it so? 3 letters>", "<Is it so? 5 letters>"]
    assert FreeFormJudge(model="other", paraphrases=["{answer}"]).get_cache().empty


def test_half_a_character_is_listed_like_any_text() -> None:
    half = "\ud83d"
    question = asks({"so": TEXT}, "one")
    with compare_endpoint.endpoint(lambda request: endpoints.chat(half)):
        assert list(question.df({"g": ["m"]}).so) == [half]
        assert list(question.judges["so"].get_cache().judge_answer) == [half]


def test_the_range_of_a_listed_judge_may_be_another() -> None:
    with compare_endpoint.endpoint(answer):
        asks({"score": RATING}).df({"g": ["m"]})
        narrow = RatingJudge(model="rater", paraphrases=["Rate {answer}"], min_rating=50)
        assert narrow.get_cache().judge_answer.tolist() == pytest.approx([80.0])


def test_judgements_are_forgotten_where_that_is_wanted() -> None:
    question = asks({"so": BOTH, "score": RATING})
    with compare_endpoint.endpoint(answer) as server:
        question.df({"g": ["m"]})
        assert len(server.asked) == 5
        assert question.clear_cache("m")
        question.df({"g": ["m"]})
        assert len(server.asked) == 7, "the judges' answers stayed"
        assert question.clear_cache("m", judges=True)
        assert question.judges["so"].get_cache().empty
        question.df({"g": ["m"]})
        assert len(server.asked) == 12


def test_two_processes_lose_nothing_of_what_they_record_judged_pairs(settings: Any) -> None:
    code = (
        "import sys\nfrom swarm.compare import Config\n"
        "from swarm.compare.judge_cache import record_judged_pairs\n"
        "Config.cache_dir = sys.argv[1]\n"
        "for n in range(100): record_judged_pairs('j', [('q', f'{sys.argv[2]}{n}')])"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(settings), name]) for name in "ab"]
    assert [one.wait(60) for one in running] == [0, 0]
    record_judged_pairs("j", [("q", "half \ud83d of a character\0")])
    found = load_judged_pairs("j")
    assert len(found) == 201
    assert found[-1] == ("q", "half \ud83d of a character\0")
