"""Caches of llmcomp: what is in them is not asked again, but for the failures among it."""

import json
from pathlib import Path
from typing import Any

import compare_endpoint
import pytest

from swarm.compare import Config, Question
from swarm.compare.import_llmcomp import import_cache
from swarm.errors import UserError

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

FREE = {"temperature": 1, "max_tokens": 1024}
LOGS = {"top_logprobs": 20, "max_tokens": 1, "temperature": 0, "logprobs": True}
CHANCES = {"80": 0.6, "20": 0.2, "no": 0.2}

TEXT = {
    "type": "free_form_judge",
    "name": "jf",
    "model": "judge",
    "paraphrases": ["Q {question} A {answer} {{}}"],
}
RATING = {"type": "rating_judge", "name": "jr", "model": "o3", "paraphrases": ["Rate {answer}"]}
WARM = {**TEXT, "name": "jt", "paraphrases": ["T {answer}"], "temperature": 0.5}
HASHES = {
    "jf": "e75224ed913749496cbc883da32f22ccd4bb510bdbca50b2f7dadf5a54cab0f9",
    "jr": "5c7c41fb1a236e2f27c9ef5dcc25994db80dcba33c7a29f9f0bffd9ee575f7e5",
    "jt": "1ba7aed3df2e5141e73a2cbc3b5751afac5a43951324f9a0a9c9f55fe39f3b4a",
}
"""As llmcomp 1.6.0 has written them for these three judges."""


def row(answer: Any, said: str = "one", model: str = "m", **params: Any) -> dict[str, Any]:
    """A line of a question's file."""
    turns = [{"role": "user", "content": said}]
    sent = {"timeout": 60, "model": model, "messages": turns, **(params or FREE)}
    return {"api_kwargs": sent, "question": said, "answer": answer, "paraphrase_ix": 0}


FAILED = {"api_kwargs": {}, "question": "one", "answer": "", "paraphrase_ix": 0}


def answers(folder: Path, name: str, *rows: dict[str, Any], model: str = "m", day: int = 1) -> None:
    """Write a question's file."""
    place = folder / "question" / name
    place.mkdir(parents=True, exist_ok=True)
    date = f"2026-01-{day:02}T00:00:00"
    head = {"name": name, "model": model, "last_update": date, "hash": "0" * 64}
    (place / f"{9 - day}abc.jsonl").write_text("\n".join(map(json.dumps, [head, *rows])) + "\n")


def judgements(folder: Path, judge: dict[str, Any], data: dict[str, Any]) -> None:
    """Write a judge's file."""
    name, prompt = judge["name"], judge["paraphrases"][0]
    head = {"name": name, "model": judge["model"], "hash": HASHES[name], "prompt": prompt}
    (folder / "judge" / name).mkdir(parents=True)
    whole = {"metadata": {**head, "uses_question": "{question}" in prompt}, "data": data}
    (folder / "judge" / name / "abc.json").write_text(json.dumps(whole, indent=2))


def free_form(**more: Any) -> Any:
    """The question."""
    return Question.create(type="free_form", name="q", paraphrases=["one"], **more)


def test_answers_are_not_asked_again_and_failures_are(tmp_path: Path) -> None:
    old = tmp_path / "old"
    answers(old, "q", row("first"), FAILED, row(""), row("third"))
    with compare_endpoint.endpoint() as server:
        done = import_cache(old)
        assert (done.answers, done.failed) == (3, 1)
        assert str(done) == "3 answers and 0 judgements imported; 1 failures left out"
        df = free_form(samples_per_paraphrase=4).df({"g": ["m"]}, details=True)
        assert len(server.asked) == 1
        assert list(df.answer) == ["first", "", "third", "so: one"]
        assert list(df.cached) == [True, True, True, False]
        assert import_cache(old).answers == 0, "what is kept stays"


def test_samples_of_several_files_add_up(tmp_path: Path) -> None:
    answers(tmp_path, "q", row("b1"), row("b2"), day=2)
    answers(tmp_path, "q", row("a1"), day=1)
    with compare_endpoint.endpoint() as server:
        assert import_cache(tmp_path).answers == 3
        df = free_form(samples_per_paraphrase=3).df({"g": ["m"]})
        assert list(df.answer) == ["a1", "b1", "b2"], "the oldest first"
        assert not server.asked


def test_answers_are_of_the_endpoint_that_gave_them(tmp_path: Path) -> None:
    answers(tmp_path, "q", row("there"))
    with compare_endpoint.endpoint() as server:
        import_cache(tmp_path, base_url="http://127.0.0.1:9/v1")
        assert list(free_form().df({"g": ["m"]}).answer) == ["so: one"]
        assert len(server.asked) == 1
        Config.url_key_pairs = [("http://127.0.0.1:9/v1", "k", "K")]
        assert list(free_form().df({"g": ["m"]}).answer) == ["there"]


def test_token_probabilities_are_ratings_and_next_tokens(tmp_path: Path) -> None:
    logs = {"yes": -0.5, "no": -1.5}
    answers(tmp_path, "r", row(CHANCES, **LOGS), row({}, **LOGS))
    answers(tmp_path, "n", row(logs, "next", **LOGS))
    with compare_endpoint.endpoint() as server:
        assert import_cache(tmp_path).failed == 1
        rating = Question.create(type="rating", paraphrases=["one"])
        df = rating.df({"g": ["m"]})
        assert df.answer[0] == pytest.approx(65)
        assert df.raw_answer[0] == pytest.approx(CHANCES)
        token = {"type": "next_token", "paraphrases": ["next"], "convert_to_probs": False}
        assert Question.create(**token).df({"g": ["m"]}).answer[0] == pytest.approx(logs)
        assert not server.asked


def test_judges_are_known_by_their_hash(tmp_path: Path) -> None:
    answers(tmp_path, "q", row("so one"))
    judgements(tmp_path, TEXT, {"one": {"so one": "fine", "so two": ""}})
    judgements(tmp_path, RATING, {"null": {"so one": CHANCES}})
    judgements(tmp_path, WARM, {"null": {"so one": "warm"}})
    question = free_form(judges={"so": TEXT, "score": RATING, "t": WARM})
    with compare_endpoint.endpoint() as server:
        done = import_cache(tmp_path)
        assert (done.judgements, done.failed) == (2, 1)
        assert "1 left out: the judge's settings are not the defaults" in str(done)
        assert import_cache(tmp_path, questions=[question]).judgements == 1
        df = question.df({"g": ["m"]})
        assert not server.asked
        assert list(question.judges["so"].get_cache().judge_question) == ["Q one A so one {}"]
    assert (df.so[0], df.score[0], df.t[0]) == ("fine", pytest.approx(65), "warm")


def test_earlier_files_need_their_question(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "one"}]
    answers(tmp_path, "q", {"messages": turns, "question": "one", "answer": "old"})
    question = free_form(temperature=0.5)
    with compare_endpoint.endpoint() as server:
        done = import_cache(tmp_path)
        assert done.answers == 0
        assert "1 left out: the file does not contain the settings; give the question" in str(done)
        assert import_cache(tmp_path, questions=[question]).answers == 1
        assert list(question.df({"g": ["m"]}).answer) == ["old"]
        assert not server.asked


def test_what_is_no_cache_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no folder question or judge"):
        import_cache(tmp_path)
    answers(tmp_path, "q")
    file = next((tmp_path / "question" / "q").iterdir())
    file.write_text('{"x": 1}\n')
    with pytest.raises(UserError, match="is not a cache file of llmcomp; its first line names no"):
        import_cache(tmp_path)
    file.unlink()
    (tmp_path / "judge" / "j").mkdir(parents=True)
    (tmp_path / "judge" / "j" / "a.json").write_text("{}")
    with pytest.raises(UserError, match=r"a\.json: is not a cache file of llmcomp"):
        import_cache(tmp_path)


def test_a_model_that_nobody_has_is_left_out(tmp_path: Path) -> None:
    answers(tmp_path, "q", row("first"))
    Config.url_key_pairs = []
    done = import_cache(tmp_path)
    assert done.answers == 0
    assert "1 left out: m: the model's location is unknown" in str(done)
