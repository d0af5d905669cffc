"""The chat with a mixture: what is shown, remembered, counted and refused."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm._util.terminal import WarningCollector, escape_control_chars
from swarm.errors import UserError
from swarm.moa.chat import COMMANDS, ChatOptions, ChatSession, read_input, run_chat
from swarm.models.base import Completion, Delta, Model, Request, Stream
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec

STRANGE = "[/INST] a[i] = [bold]x[/bold] :smile: {y} %s \\n"
Capture = pytest.CaptureFixture[str]


class Says(Model):
    """A model that answers by a function or a text; its stream gives four characters at a time."""

    def __init__(self, answer: Any, cost: float = 0.0, priced: bool | None = None) -> None:
        self.answer = answer if callable(answer) else lambda request: answer
        self.cost, self.priced = cost, priced
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all of them."""
        self.asked += requests
        how: dict[str, Any] = {"prompt_tokens": 10, "new_tokens": 3, "priced": self.priced}
        return [Completion(self.answer(one), cost=self.cost, **how) for one in requests]

    def stream(self, request: Request) -> Stream:
        """Answer piece by piece."""
        whole = self.generate([request])[0]
        for start in range(0, len(whole.text), 4):
            yield Delta(whole.text[start : start + 4])
        return whole


class Torn(Says):
    """A model whose connection is lost in the middle."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Fail before the first text."""
        raise UserError("the connection was lost")

    def stream(self, request: Request) -> Stream:
        """Fail after the first text."""
        yield Delta("half an ")
        raise UserError("the connection was lost")


def broken(request: Request) -> str:
    raise UserError("the server is away")


def session(
    *proposers: Any, last: Any, options: ChatOptions | None = None, **settings: Any
) -> ChatSession:
    """A chat with models that say these texts; without proposers the last one is alone."""
    models = [one if isinstance(one, Model) else Says(one) for one in (*proposers, last)]
    slots = [AgentSpec(model, f"p{number}") for number, model in enumerate(models[:-1], 1)]
    layers = 2 if proposers else 1
    mixture = MixtureOfAgents(slots, AgentSpec(models[-1], "last"), layers=layers, **settings)
    warnings = WarningCollector()
    logging.getLogger("swarm").addHandler(warnings)
    return ChatSession(mixture, options or ChatOptions(0.7, 64), warnings)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A person who types these lines, then Ctrl-D."""

    def answer(made: ChatSession, *lines: str | type[BaseException]) -> int:
        waiting: Iterator[str | type[BaseException]] = iter(lines)

        def ask(prompt: str = "") -> str:
            line = next(waiting, EOFError)
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", ask)
        return run_chat(made)

    return answer


def test_the_answer_alone_goes_to_standard_output(capsys: Capture) -> None:
    def answer(request: Request) -> str:
        logging.getLogger("swarm.models.openai").warning("it is \x1b[1m another model")
        return "fine"

    session(answer, broken, last="both").answer_question("?")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "both\n" and sorted(lines[:2]) == [
        "layer 1, proposer p1: 0.0 s, 3 tokens",
        "layer 1, proposer p2: the server is away",
    ]
    assert lines[2:] == [
        "layer 2, aggregator last: 0.0 s, 3 tokens",
        "warning: layer 1: p2: the server is away",
        "warning: it is ␛[1m another model",
    ]
    options = ChatOptions(0.7, 9, streamed=False, quiet=True)
    session("a", last="one\ntwo\n", options=options).answer_question("?")
    assert capsys.readouterr() == ("one\ntwo\n", "")


def test_text_of_models_is_text(talk: Callable[..., int], capsys: Capture) -> None:
    hostile = f"{STRANGE}\x1b[31mred\x1b]0;title\x07\r\n\x9b2J\x7f\u202e\tend"
    talk(session(hostile, last=hostile), "?", "/stages", "/stages 1")
    for text in capsys.readouterr():
        shown = "␛[31mred␛]0;title␇\n\N{REPLACEMENT CHARACTER}2J␡\N{REPLACEMENT CHARACTER}\tend"
        assert STRANGE in text and shown in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    text = "a\x1b[0m\r\nb\x00\x85"
    assert "".join(map(escape_control_chars, text)) == escape_control_chars(text)


def test_a_conversation_is_carried_on_with_its_answers_alone(talk: Callable[..., int]) -> None:
    first = Says("proposal")
    options = ChatOptions(0.2, 9, seed=5, system="Be brief.")
    talk(session(first, last="answer", options=options), "one", "two", "/clear", "three")
    asked = first.asked[1]
    said = [("system", "Be brief."), ("user", "one"), ("assistant", "answer"), ("user", "two")]
    assert [tuple(turn) for turn in asked.prompt] == said
    assert (asked.temperature, asked.max_new_tokens, asked.seed) == (0.2, 9, 5)
    assert [len(one.prompt) for one in first.asked] == [2, 4, 2]
    talk(session(first, last="answer", options=ChatOptions(0.7, 9, multi_turn=False)), "one", "two")
    assert [len(one.prompt) for one in first.asked[3:]] == [1, 1]


def test_a_failed_stopped_or_empty_turn_is_told_and_not_remembered(
    talk: Callable[..., int], capsys: Capture
) -> None:
    def answer(request: Request) -> str:
        text = request.prompt[-1].content
        if "torn" in text:
            raise UserError("the connection was lost")
        if "stop" in text:
            raise KeyboardInterrupt
        return "" if "empty" in text else "fine"

    first = Says("proposal")
    made = session(first, last=answer)
    assert talk(made, "torn", "stop", "empty", "well", "/cost") == 0
    out, err = capsys.readouterr()
    assert out == "fine\n" and "error: layer 2: last: the connection was lost" in err
    assert "last: interrupted; its token counts are estimates" in err and "\nstopped\n" in err
    assert [len(asked.prompt) for asked in first.asked] == [1, 1, 1, 1]
    assert [turn.question for turn in made.history] == ["well"]
    total = [line.split() for line in err.splitlines() if line.startswith(" total")]
    assert [row[1] for row in total] in (["2", "8"], ["2", "7"])
    made = session("proposal", last=Torn(""))
    assert talk(made, "one") == 0
    out, err = capsys.readouterr()
    assert out == "half an \n" and "error: the connection was lost" in err
    assert [answer.name for answer in made.turns[0].answers] == ["p1", "last"]


def test_leaving_and_interrupts_at_the_prompt(talk: Callable[..., int], capsys: Capture) -> None:
    made = session(last="answer")
    assert talk(made, KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt) == 130
    assert capsys.readouterr().err.count("leaves the chat") == 2
    for word in ("exit", "quit", "/exit", " exit "):
        assert talk(made, word, "never asked") == 0
    assert len(made.turns) == 1


def test_stages_and_costs(talk: Callable[..., int], capsys: Capture) -> None:
    made = session(Says("first", cost=0.25), "second", last="both")
    talk(made, "why?", "/stages", "/stages 3", "/stages 4", "/stages x", "two", "/cost")
    err = capsys.readouterr().err
    assert "--- 1: layer 1, proposer p1: 0.0 s, 3 tokens\nfirst" in err
    whole = err[err.rindex("--- 3:") :]
    assert "[system]" in whole and "[user]\nwhy?" in whole and "[answer]\nboth" in whole
    assert whole.count("the last turn has answers 1 to 3") == 2
    rows = [line.split() for line in err.splitlines() if line.startswith((" p1", " last", " tot"))]
    assert [row[-1] for row in rows if row[0] == "p1"] == ["0.250000", "0.500000"]
    assert [row[1:6] for row in rows if row[0] == "total"][1] == ["6", "0", "0", "60", "18"]


def test_commands_are_checked_and_no_file_is_replaced(
    talk: Callable[..., int], tmp_path: Path, capsys: Capture
) -> None:
    made = session("first", last="both")
    talk(made, "/stage", "/cost", "/clear all", "/save", "/help", "")
    err = capsys.readouterr().err
    assert "/stage: no such command; did you mean /stages?" in err
    assert "/cost: there is no turn yet" in err and "'all' is too much" in err
    assert "/save : name a file" in err and all(name in err for name in COMMANDS)
    assert made.turns == []
    (tmp_path / "other.json").write_text("mine")
    talk(made, "one", f"/save {tmp_path / 'talk.json'}", f"/save {tmp_path / 'other.json'}")
    assert (tmp_path / "other.json").read_text() == "mine"
    assert "name a file that does not exist" in capsys.readouterr().err
    content = json.loads((tmp_path / "talk.json").read_text())
    assert content["turns"][0]["stages"][0][0]["text"] == "first"
    assert content["models"] == ["p1", "last"]


def test_slashes_and_quotes(talk: Callable[..., int]) -> None:
    first = Says("proposal")
    made = session(first, last="answer", options=ChatOptions(0.7, 9, multi_turn=False))
    talk(made, "//etc", '"""', "exit", "", '  /x"""', '"""one"""', '"""/help"""', "")
    asked = [one.prompt[0].content for one in first.asked]
    assert asked == ["/etc", "exit\n\n  /x", "one", "/help"]
    lines = iter(['"""', "a"])
    with pytest.raises(StopIteration):
        read_input(lambda prompt: next(lines))


def test_json_is_one_object_with_everything(capsys: Capture) -> None:
    options = ChatOptions(0.7, 9, json=True)
    made = session(Says("first", cost=0.5), broken, last="a\x1b[i]", options=options)
    made.answer_question("why?")
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1 and "\x1b" not in out
    told = json.loads(out)
    assert told["answer"] == "a\x1b[i]" and told["question"] == "why?" and told["error"] is None
    assert told["models"] == ["p1", "p2", "last"]
    roles = [[stage["role"] for stage in layer] for layer in told["stages"]]
    assert roles == [["proposer", "proposer"], ["aggregator"]]
    assert told["stages"][0][1]["error"] == "the server is away"
    assert told["stages"][0][0]["cost"] == 0.5 and told["stages"][1][0]["cost"] is None
    assert told["warnings"] == ["layer 1: p2: the server is away"]
    assert told["calls"] == {"all": 3, "cached": 0, "failed": 1}
    assert told["tokens"] == {"prompt": 20, "new": 6} and told["cost"] == 0.5
    # A price of nothing is a price, and what has none is said.
    for calls, cost, unpriced in (
        (((0.0, True), (0.0, True)), 0.0, 0),
        (((0.5, True), (0.0, False)), 0.5, 1),
        (((0.0, False), (0.0, False)), None, 2),
    ):
        first, last = (Says("so", *one) for one in calls)
        session(first, last=last, options=options).answer_question("why?")
        told = json.loads(capsys.readouterr().out)
        assert (told["cost"], told["unpriced"]) == (cost, unpriced)


@pytest.mark.parametrize("how", [{"streamed": False}, {"json": True}])
def test_what_is_not_shown_piece_by_piece_is_asked_as_a_whole(
    how: dict[str, Any], capsys: Capture
) -> None:
    """A last answer that breaks off is then answered by the fallback."""
    fallback = AgentSpec(Says("whole"), "instead")
    made = session(last=Torn(""), options=ChatOptions(0.7, 64, **how), fallback=fallback)
    made.answer_question("why?")
    out = capsys.readouterr().out
    assert "whole" in out and "half an" not in out
