"""The chat with a mixture: what is shown, remembered, counted and refused, without a terminal."""

import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from swarm._util.terminal import WarningCollector, escape_control_chars
from swarm.errors import UserError
from swarm.moa.chat import (
    COMMANDS,
    ChatOptions,
    ChatSession,
    TerminalChat,
    UserInput,
    read_input,
)
from swarm.models.base import Completion, Delta, Request, Stream
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec

STRANGE = "[/INST] a[i] = [bold]x[/bold] :smile: {y} %s \\n"


class Says:
    """A model that answers by a function; its stream gives four characters at a time."""

    def __init__(self, answer: Callable[[Request], str], cost: float = 0.0) -> None:
        self.answer, self.cost = answer, cost
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all of them."""
        self.asked += requests
        return [
            Completion(self.answer(one), prompt_tokens=10, new_tokens=3, cost=self.cost)
            for one in requests
        ]

    def stream(self, request: Request) -> Stream:
        """Answer piece by piece."""
        whole = self.generate([request])[0]
        for start in range(0, len(whole.text), 4):
            yield Delta(whole.text[start : start + 4])
        return whole


def always(text: str, cost: float = 0.0) -> Says:
    return Says(lambda request: text, cost)


def broken(request: Request) -> str:
    raise UserError("the server is away")


def stopped(request: Request) -> str:
    raise KeyboardInterrupt


def session(
    *proposers: Says, last: Says, options: ChatOptions | None = None, **settings: int
) -> ChatSession:
    slots = [AgentSpec(model, f"p{number}") for number, model in enumerate(proposers, 1)]
    mixture = MixtureOfAgents(slots, AgentSpec(last, "last"), **settings)
    made = ChatSession(
        mixture, options or ChatOptions(0.7, 64), io.StringIO(), io.StringIO(), WarningCollector()
    )
    logging.getLogger("swarm").addHandler(made.remarks)
    return made


def said(made: ChatSession) -> tuple[str, str]:
    """What went to standard output and to standard error."""
    assert isinstance(made.answers, io.StringIO) and isinstance(made.notes, io.StringIO)
    return made.answers.getvalue(), made.notes.getvalue()


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """A person who types these lines, then Ctrl-D."""
    waiting: Iterator[str | type[BaseException]] = iter(lines)

    def ask(prompt: str) -> str:
        line = next(waiting, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return ask


def talk(made: ChatSession, *lines: str | type[BaseException]) -> int:
    return TerminalChat(made, typed(*lines), ["layer 1: p1", "layer 2: last"]).run_loop()


def test_the_answer_alone_goes_to_standard_output() -> None:
    made = session(always("one"), Says(broken), last=always("both"))
    made.answer_question("?")
    out, err = said(made)
    assert out == "both\n"
    first, second, warning = err.splitlines()
    assert re.fullmatch(
        r"layer 1 of 2: 1 of 2 answered \(p\d \S+( s, 3 tokens)?; p\d \S+.*\)", first
    )
    assert "p2 failed" in first and "p1 0.0 s, 3 tokens" in first
    assert second.startswith("layer 2 of 2: 1 of 1 answered (last")
    assert warning == "warning: layer 1: p2: the server is away"


def test_text_of_models_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = f"{STRANGE}\x1b[31mred\x1b]0;title\x07\r\n\x9b2J\x7f\tend"
    made = session(always(hostile), last=always(hostile))
    talk(made, "?", "/stages", "/stages 1")
    out, err = said(made)
    for text in (out, err):
        assert STRANGE in text and "␛[31mred␛]0;title␇\n\N{REPLACEMENT CHARACTER}2J␡\tend" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert capsys.readouterr() == ("", "")


def test_pieces_are_made_harmless_as_the_whole_is() -> None:
    text = "a\x1b[0m\r\nb\x00\x85"
    assert "".join(map(escape_control_chars, text)) == escape_control_chars(text)


def test_a_conversation_is_carried_on_with_its_answers_alone() -> None:
    first, last = always("proposal"), always("answer")
    made = session(first, last=last, options=ChatOptions(0.2, 9, seed=5, system="Be brief."))
    made.answer_question("one")
    made.answer_question("two")
    asked = first.asked[1]
    assert isinstance(asked.prompt, tuple)
    assert [tuple(turn) for turn in asked.prompt] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "answer"),
        ("user", "two"),
    ]
    assert (asked.temperature, asked.max_new_tokens, asked.seed) == (0.2, 9, 5)
    assert (last.asked[1].temperature, last.asked[1].max_new_tokens) == (0.2, 9)


def test_without_turns_every_question_stands_alone() -> None:
    first = always("proposal")
    made = session(first, last=always("answer"), options=ChatOptions(0.7, 9, multi_turn=False))
    made.answer_question("one")
    made.answer_question("two")
    assert [len(asked.prompt) for asked in first.asked] == [1, 1]


def test_a_long_conversation_loses_its_oldest_turns_and_says_so() -> None:
    first = always("proposal")
    made = session(first, last=always("a" * 400), context=500)
    for number in range(8):
        made.answer_question(f"question {number} " + "b" * 200)
    prompt = first.asked[-1].prompt
    assert len(prompt) < 15 and prompt[-1].content.startswith("question 7")
    assert "question 6" in prompt[-3].content
    words = "context=500: up to 6 of the oldest exchanges are left out"
    assert made.turns[-1].warnings == [words], "once a turn, whoever was asked"
    assert f"warning: {words}\n" in said(made)[1]


def test_a_failed_turn_is_told_and_not_remembered() -> None:
    made = session(Says(broken), Says(broken), last=always("answer"))
    assert talk(made, "one", "/stages", "/history") == 0
    out, err = said(made)
    assert out == ""
    assert "error: layer 1: 0 of 2 proposers answered" in err
    assert "--- 2: layer 1, proposer p2: failed" in err and "the server is away" in err
    assert err.rstrip().endswith("nothing yet")


def test_what_breaks_off_is_an_error_after_the_text_that_came() -> None:
    class Torn(Says):
        def stream(self, request: Request) -> Stream:
            """Begin, and fail."""
            yield Delta("half an ")
            raise UserError("the connection was lost")

    made = session(always("proposal"), last=Torn(str))
    assert talk(made, "one", "/history") == 0
    out, err = said(made)
    assert out == "half an \n" and "error: the connection was lost" in err
    assert "layer 2 of 2: 0 of 1 answered (last failed)" in err
    assert [answer.name for answer in made.turns[0].answers] == ["p1", "last"]
    assert err.rstrip().endswith("nothing yet")


def test_an_empty_answer_is_not_remembered() -> None:
    first = always("proposal")
    made = session(first, last=Says(lambda asked: "" if len(made.turns) == 1 else "so"))
    assert talk(made, "one", "two", "/history") == 0
    assert [turn.content for turn in first.asked[1].prompt] == ["two"]
    assert said(made)[1].endswith(">>> two\nso\n\n")


def test_what_is_logged_is_told_once_with_the_answer() -> None:
    def answer(request: Request) -> str:
        logging.getLogger("swarm.models.openai").warning("it is \x1b[1m another model")
        return "fine"

    made = session(Says(answer), Says(answer), last=always("all"))
    made.answer_question("?")
    assert said(made)[1].count("warning: it is ␛[1m another model") == 1
    assert made.turns[0].warnings == ["it is \x1b[1m another model"]


def test_an_interrupt_stops_the_answer_and_not_the_chat() -> None:
    def answer(request: Request) -> str:
        return "fine" if "two" in request.prompt[-1].content else stopped(request)

    first = always("proposal")
    made = session(first, last=Says(answer))
    assert talk(made, "one", "two", "/cost") == 0
    out, err = said(made)
    assert out == "fine\n" and "stopped" in err
    assert [turn.content for turn in first.asked[1].prompt] == ["two"]
    session_rows = err[err.index("session, 2 questions") :].splitlines()
    assert session_rows[2].split()[:2] == ["p1", "2"], "the stopped turn's call counts"


def test_interrupts_at_the_prompt() -> None:
    made = session(last=always("answer"), layers=1)
    assert talk(made, KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt) == 130
    assert said(made)[1].count("leaves the chat") == 2


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", " exit "])
def test_leaving(word: str) -> None:
    made = session(last=always("answer"), layers=1)
    assert talk(made, word, "never asked") == 0
    assert made.turns == []


def test_stages_show_every_answer_and_one_with_its_prompt() -> None:
    made = session(always("first"), always("second"), last=always("both"))
    talk(made, "why?", "/stages", "/stages 3", "/stages 4", "/stages x")
    err = said(made)[1]
    assert "--- 1: layer 1, proposer p1: 0.0 s, 3 tokens, no price known\nfirst" in err
    assert "--- 3: layer 2, aggregator last" in err
    whole = err[err.rindex("--- 3:") :]
    assert "[system]" in whole and "[user]\nwhy?" in whole and "first" in whole
    assert "[answer]\nboth" in whole
    assert whole.count("the last turn has answers 1 to 3") == 2


def test_costs_are_told_of_each_model_and_unknown_ones_are_not_zero() -> None:
    made = session(always("first", cost=0.25), last=always("both"))
    talk(made, "one", "two", "/cost")
    rows = [
        line.split("  ")
        for line in said(made)[1].splitlines()
        if line.startswith(("p1", "la", "to"))
    ]
    assert [row[-1] for row in rows if row[0] == "p1"] == ["0.250000", "0.500000"]
    assert "no price known" in [row[-1] for row in rows if row[0] == "last"]
    assert [row[-1] for row in rows if row[0] == "total"][
        -1
    ] == "0.500000 and 2 calls, no price known"


def test_undo_and_clear() -> None:
    first = always("proposal")
    made = session(first, last=always("answer"))
    talk(made, "one", "two", "/undo", "three", "/clear", "/undo", "four")
    lengths = [len(asked.prompt) for asked in first.asked]
    assert lengths == [1, 3, 3, 1]
    assert "taken out: two" in said(made)[1] and "no turn to remove" in said(made)[1]


def test_commands_are_checked() -> None:
    made = session(last=always("answer"), layers=1)
    talk(made, "/stage", "/cost", "/clear all", "/save", "/help", "/models", "")
    err = said(made)[1]
    assert "/stage: no such command; did you mean /stages?" in err
    assert "/cost: there is no turn yet" in err and "'all' is too much" in err
    assert "/save: name a file" in err and "layer 2: last" in err
    assert all(name in err for name in COMMANDS)
    assert made.turns == []


def test_a_session_is_saved_and_no_file_of_others_is_touched(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("mine")
    made = session(always("first"), last=always("both"))
    mine = tmp_path / "talk.json"
    talk(made, "one", f"/save {mine}", "two", f"/save {mine}", f"/save {other}")
    assert other.read_text() == "mine" and "already exists" in said(made)[1]
    content = json.loads(mine.read_text())
    assert [turn["question"] for turn in content["turns"]] == ["one", "two"]
    assert content["turns"][1]["stages"][0][0]["text"] == "first"


def test_slashes_quotes_and_backslashes() -> None:
    first = always("proposal")
    made = session(first, last=always("answer"), options=ChatOptions(0.7, 9, multi_turn=False))
    talk(made, "//etc", '"""', "exit", "", '  /x"""', '"""one"""', "a \\", "b", "")
    assert [one.prompt[0].content for one in first.asked] == [
        "/etc",
        "exit\n\n  /x",
        "one",
        "a \nb",
    ]


def test_the_end_in_the_middle_of_lines_leaves() -> None:
    with pytest.raises(EOFError):
        read_input(typed('"""', "a"))
    assert read_input(typed(" a ")) == UserInput("a")


def test_json_is_one_object_with_everything() -> None:
    options = ChatOptions(0.7, 9, json=True)
    made = session(
        always("first", cost=0.5), Says(broken), last=always("a\x1b[i]"), options=options
    )
    made.answer_question("why?")
    out, _ = said(made)
    assert out.count("\n") == 1 and "\x1b" not in out
    told = json.loads(out)
    assert told["answer"] == "a\x1b[i]" and told["question"] == "why?" and told["error"] is None
    assert told["models"] == ["p1", "p2", "last"]
    assert [[stage["role"] for stage in layer] for layer in told["stages"]] == [
        ["proposer", "proposer"],
        ["aggregator"],
    ]
    assert told["stages"][0][1]["error"] == "the server is away"
    assert told["stages"][0][0]["cost"] == 0.5 and told["stages"][1][0]["cost"] is None
    assert "first" in json.dumps(told["stages"][1][0]["prompt"])
    assert told["warnings"] == ["layer 1: p2: the server is away"]
    assert told["calls"] == {"all": 3, "cached": 0, "failed": 1}
    assert told["tokens"] == {"prompt": 20, "new": 6} and told["cost"] == 0.5
    assert told["seconds"] >= 0


def test_without_streaming_the_text_is_the_same_and_quiet_says_nothing() -> None:
    options = ChatOptions(0.7, 9, streamed=False, quiet=True)
    made = session(always("first"), last=always("one\ntwo\n"), options=options)
    made.answer_question("why?")
    assert said(made) == ("one\ntwo\n", "")


@pytest.mark.parametrize(
    "options", [ChatOptions(0.7, 64, streamed=False), ChatOptions(0.7, 64, json=True)]
)
def test_what_is_not_shown_piece_by_piece_is_asked_as_a_whole(options: ChatOptions) -> None:
    """A last answer that breaks off is then answered by the fallback."""

    class Breaks(Says):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise UserError("the connection closed before")

        def stream(self, request: Request) -> Stream:
            yield Delta("half an")
            raise UserError("the connection closed before")

    last, instead = Breaks(lambda request: ""), always("whole")
    mixture = MixtureOfAgents(
        [], AgentSpec(last, "last"), fallback=AgentSpec(instead, "instead"), layers=1
    )
    made = ChatSession(mixture, options, io.StringIO(), io.StringIO(), WarningCollector())
    made.answer_question("why?")
    assert "whole" in said(made)[0] and "half an" not in said(made)[0]


def test_the_tokens_of_a_stopped_answer_are_counted() -> None:
    class Stopped(Says):
        def stream(self, request: Request) -> Stream:
            yield Delta("two words of " * 4)
            raise KeyboardInterrupt

    made = session(always("first"), last=Stopped(lambda request: ""))
    assert talk(made, "why?", "/cost") == 0
    err = said(made)[1]
    [row] = [line for line in err.splitlines() if line.startswith("last")][-1:]
    assert row.split()[1:4] == ["1", "0", "1"] and row.split()[5] == "13", row
    assert "last: interrupted; its token counts are estimates" in err
    assert made.turns[0].answers[-1].text == "two words of " * 4


def test_a_price_of_nothing_is_a_price_and_what_is_unpriced_is_said() -> None:
    def at(priced: bool | None, cost: float) -> AgentSpec:
        class Priced(Says):
            def generate(self, requests: Sequence[Request]) -> list[Completion]:
                return [Completion("so", cost=cost, priced=priced) for _ in requests]

            stream = None  # type: ignore[assignment]

        return AgentSpec(Priced(lambda request: ""), f"{priced} {cost}")

    def told(*slots: AgentSpec) -> dict[str, object]:
        mixture = MixtureOfAgents(list(slots[:-1]), slots[-1])
        options = ChatOptions(0.7, 64, json=True)
        made = ChatSession(mixture, options, io.StringIO(), io.StringIO(), WarningCollector())
        made.answer_question("why?")
        return json.loads(said(made)[0])

    free = told(at(True, 0.0), at(True, 0.0))
    assert (free["cost"], free["unpriced"]) == (0.0, 0)
    some = told(at(True, 0.5), at(False, 0.0))
    assert (some["cost"], some["unpriced"]) == (0.5, 1)
    none = told(at(False, 0.0), at(False, 0.0))
    assert (none["cost"], none["unpriced"]) == (None, 2)


def test_bidirectional_controls_reach_no_terminal() -> None:
    """They would show a text in another order than it has."""
    controls = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    made = session(last=always(f"a{controls}b"), layers=1)
    made.answer_question("why?")
    assert said(made)[0] == f"a{len(controls) * chr(0xFFFD)}b\n"
