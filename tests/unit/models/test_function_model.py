"""A Python function as a model: what it is given, what it may give, and how it fails."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Message,
    Request,
    stream_until_stop,
)
from swarm.models.function import FunctionModel


def raising(prompt: str) -> str:
    raise KeyError("no such\ncity")


def one(model: FunctionModel, prompt: str = "hi", **more: object) -> Completion:
    return model.generate([Request(prompt, **more)])[0]  # type: ignore[arg-type]


def test_it_is_called_with_the_prompt_and_gives_a_text_a_completion_or_pieces() -> None:
    heard: list[object] = []
    turns = (Message("system", "s"), Message("user", "u"))
    assert FunctionModel(lambda p: heard.append(p) or "x").generate([Request(turns), Request("u")])
    assert heard == [turns, "u"]
    whole = Completion("t", reasoning="because", new_tokens=7, cost=0.5)
    assert one(FunctionModel(lambda p: whole)) == whole
    assert list(FunctionModel(lambda p: iter(["a", "b", "c"])).stream(Request("hi"))) == [
        Delta("a"),
        Delta("b"),
        Delta("c"),
    ]
    assert one(FunctionModel(str.upper)).model == "function/str.upper"


def test_a_dotted_name_is_imported_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    named = FunctionModel("late_module:Voice.speak")
    with pytest.raises(UserError, match=r"late_module cannot be imported from .*No module named"):
        named.check()
    (tmp_path / "late_module.py").write_text(
        "class Voice:\n    @staticmethod\n    def speak(prompt):\n        return prompt[::-1]\n"
    )
    named.check()
    assert one(named, "abc").text == "cba"
    with pytest.raises(UserError, match=r"late_module has no function Voice.sing"):
        FunctionModel("late_module:Voice.sing").check()
    (tmp_path / "broken_module.py").write_text("\nimport nothing_of_the_kind\n")
    with pytest.raises(UserError, match=r"broken_module cannot be .*\(broken_module.py line 2\)"):
        FunctionModel("broken_module:f").check()
    for wrong in ("nothing", "module:", ":f", None):
        with pytest.raises(UserError, match=r"must be .*package.module:name"):
            FunctionModel(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="concurrency=0"):
        FunctionModel(str.upper, concurrency=0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raising, r"test_function_model:raising failed: KeyError: .*\(test_function_model.py line"),
        (lambda p: exec("raise SystemExit(3)"), "failed: SystemExit: 3"),
        (lambda p: 5, "returned 5: must be a string"),
        (lambda p: iter(["a", 5]), "it yielded 5, which is not a string"),
    ],
)
def test_what_goes_wrong_is_one_line_in_its_place(function: object, words: str) -> None:
    (error,) = FunctionModel(function).generate_each([Request("hi")])  # type: ignore[arg-type]
    assert isinstance(error, UserError) and "\n" not in str(error)
    with pytest.raises(UserError, match=words):
        raise error


@pytest.mark.parametrize("allowed", [1, 3])
def test_no_more_threads_than_allowed_and_all_of_those(allowed: int) -> None:
    full, live, peak = threading.Barrier(allowed), [0], [0]

    def slow(prompt: str) -> str:
        live[0] += 1
        peak[0] = max(peak[0], live[0])
        full.wait(60)
        live[0] -= 1
        return prompt

    model = FunctionModel(slow, allowed)
    requests = [Request(f"{n}") for n in range(6)]
    callers = [threading.Thread(target=model.generate, args=(requests,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert peak[0] == allowed


def test_a_timeout_gives_a_call_up_and_the_next_one_goes_on() -> None:
    release = threading.Event()

    def stuck(prompt: str) -> str:
        if prompt == "stuck":
            release.wait(120)
        return prompt

    model = FunctionModel(stuck)
    begun = time.monotonic()
    requests = [Request("a", timeout=60), Request("stuck", timeout=0.1), Request("b", timeout=60)]
    first, failed, last = model.generate_each(requests)
    assert time.monotonic() - begun < 60
    assert (first, last) == (Completion("a"), Completion("b"))
    assert str(failed) == f"{model.label}: no response within 0.1 s"
    release.set()


def test_a_stream_that_is_closed_ends_the_function() -> None:
    ended = threading.Event()

    def endless(prompt: str) -> Iterator[str]:
        try:
            while True:
                yield "more "
                time.sleep(0.001)
        finally:
            ended.set()

    talk = FunctionModel(endless).stream(Request("hi"))
    assert next(talk) == Delta("more ")
    talk.close()
    assert ended.wait(5)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_text_ends_at_the_first_stop_however_it_is_cut_into_pieces(size: int) -> None:
    text = "one\nThe end. two END three"
    model = FunctionModel(lambda p: iter([text[n : n + size] for n in range(0, len(text), size)]))
    for stops, left in (
        (("END", "\nThe end?"), "one\nThe end. two "),
        (("\nThe end.",), "one"),
        (("nothing", "threex"), text),
        (("one",), ""),
    ):
        request = Request("hi", stop=stops)
        assert one(model, stop=stops).text == left
        assert "".join(delta.text for delta in model.stream(request)) == left


def test_stops_leave_thoughts_and_costs_as_they_are() -> None:
    def talk() -> Iterator[Delta]:
        yield Delta("", "STOP to think")
        yield Delta("said STOP unsaid", "more")
        yield Delta("unsaid")
        return Completion("said STOP unsaidunsaid", new_tokens=9, cost=1.0, reasoning="r")

    cut, said = stream_until_stop(talk(), ("STOP",)), []
    while True:
        try:
            said.append(next(cut))
        except StopIteration as end:
            assert end.value == Completion(
                "said ", new_tokens=9, cost=1.0, reasoning="r", finish="stop"
            )
            break
    assert said == [Delta("", "STOP to think"), Delta("said ", "more")]
