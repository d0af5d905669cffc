"""A mixture of agents: its calls, its layers, what goes wrong in it, and how it ends."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Reply, chat, endpoint
from fake_agents import Speaker, Streamer, said, slot, speaker, stages, whole

from swarm._util.replies import has_number_pick, parse_number_pick
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Request, stream
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits
from swarm.multi_agent.moa import AnswersPrompt, MixtureOfAgents
from swarm.multi_agent.types import AgentAnswer, AgentSpec, AnswerDelta
from swarm.multi_agent.types import CallStarted as AskedEvent

DEAD = UserError("it is gone")


@pytest.mark.parametrize(
    ("counts", "layers"),
    [((1,), 1), ((1,), 2), ((1, 1), 2), ((1, 1, 1), 3), ((2, 1, 3), 3), ((1, 1), 4)],
)
@pytest.mark.parametrize("prompt", ["safe", "paper"])
def test_calls_are_n_times_layers_less_one_and_one(
    counts: tuple[int, ...], layers: int, prompt: str
) -> None:
    proposers = [slot(f"p{n}", count=count) for n, count in enumerate(counts)]
    last = slot("last")
    mixture = MixtureOfAgents(proposers, last, layers, prompt=prompt)
    found = stages(mixture)
    heard = sum(len(speaker(one).heard) for one in [*proposers, last])
    assert heard == mixture.calls == len(found.answers) == sum(counts) * (layers - 1) + 1
    assert [len(layer) for layer in found.layers] == [sum(counts)] * (layers - 1) + [1]
    assert [answer.name for answer in found.layers[0]] == [
        *(one.name for one in (proposers if layers > 1 else [last]) for _ in range(one.count))
    ]
    assert all(answer.prompt == "why?" for answer in found.layers[0])
    for before, layer in zip(found.layers, found.layers[1:], strict=False):
        for answer in layer:
            assert [whole(answer.prompt).count(text) for text in said(before)] == [1] * len(before)
            assert not any(
                text in whole(answer.prompt)
                for older in found.layers
                if older is not before
                for text in said(older)
            )
    assert found.final.text == speaker(last).own() and found.warnings == []


def test_a_batch_is_one_batch_a_model_and_layer_in_order() -> None:
    first = slot("a", lambda request: f"a of {whole(request.prompt)}")
    both = Speaker("b", lambda request: whole(request.prompt)[:3])
    mixture = MixtureOfAgents(
        [first, AgentSpec(both, "b", count=2)], AgentSpec(both, "b"), prompt="paper"
    )
    turns = [(Message("system", f"{n:03d}"), Message("user", f"q{n}")) for n in range(40)]
    answers = mixture.generate([Request(prompt) for prompt in turns])
    assert [answer.text for answer in answers] == [f"{n:03d}" for n in range(40)]
    assert speaker(first).batches == [40] and both.batches == [80, 40]
    assert mixture.generate([]) == []


def test_what_the_slots_and_the_request_say() -> None:
    own = slot("own", temperature=0.0, max_tokens=7, system="be brief", timeout=3.0)
    other, last = slot("other"), slot("last", max_tokens=99)
    settings: dict[str, Any] = {"temperature": 0.5, "seed": 4, "stop": ("END",)}
    settings |= {"stop_check": str.isdigit, "max_new_tokens": 20}
    stages(MixtureOfAgents([own, other], last), **settings)
    (one,), (two,), (end,) = (speaker(who).heard for who in (own, other, last))
    assert (one.temperature, one.max_new_tokens, one.timeout) == (0.0, 7, 3.0)
    assert one.prompt == (Message("system", "be brief"), Message("user", "why?"))
    assert two == Request("why?", **settings)
    assert (end.temperature, end.max_new_tokens, end.stop, end.seed) == (0.5, 99, ("END",), 4)
    assert end.stop_check is str.isdigit and end.timeout is None


def test_samples_are_numbered_across_the_slots_of_a_model() -> None:
    model = Speaker("m")
    alike = [AgentSpec(model, "m", count=2), AgentSpec(model, "again", count=2)]
    other = [
        AgentSpec(model, "warm", temperature=1.0),
        AgentSpec(model, "told", system="so", count=2),
    ]
    mixture = MixtureOfAgents([*alike, *other], slot("last"), layers=3)
    found = stages(mixture)
    assert [request.sample for request in model.heard] == [0, 1, 2, 3, 0, 0, 1] * 2
    assert [answer.sample for answer in found.layers[0]] == [0, 1, 0, 1, 0, 0, 1]
    model.heard.clear()
    stages(mixture, sample=2)
    assert [request.sample for request in model.heard[:7]] == [8, 9, 10, 11, 2, 4, 5]


def test_tokens_cost_and_time_are_those_of_all_calls() -> None:
    silent = slot("silent", Completion("", prompt_tokens=1, cost=0.25))
    last = slot("last", lambda _: Completion("so", reasoning="hm", finish="length", new_tokens=2))
    final = stages(MixtureOfAgents([slot("a"), slot("b"), silent], last)).final
    assert final == Completion("so", (), 21, 8, cost=1.25, reasoning="hm", finish="length")
    assert 0 < final.seconds < 5 and not final.cached
    kept = slot("k", lambda _: Completion("kept", cached=True))
    assert stages(MixtureOfAgents([kept], kept)).final.cached


# What goes wrong


def test_one_dead_proposer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    mixture = MixtureOfAgents([slot("a"), slot("b", DEAD), slot("c")], slot("last"))
    found = stages(mixture)
    assert found.warnings == ["layer 1: b: it is gone"] and "b: it is gone" in caplog.text
    assert [answer.error for answer in found.layers[0]] == ["", "it is gone", ""]
    assert "2 quoted answers" in whole(found.layers[1][0].prompt)


def test_what_all_requests_of_a_batch_meet_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    mixture = MixtureOfAgents([slot("a"), slot("b", DEAD)], slot("last"))
    for times in (1, 2):
        found = mixture.run([Request(text) for text in ("why?", "who?", "when?")])
        assert [one.warnings for one in found] == [["layer 1: b: it is gone"]] * 3  # type: ignore[union-attr]
        assert caplog.text.count("it is gone") == times


def test_all_dead_are_an_error_that_names_each() -> None:
    dead = [slot("a", DEAD), slot("b", " \n"), slot("c", UserError("out"), count=3)]
    mixture = MixtureOfAgents(dead, slot("last"))
    words = (
        r"layer 1: 0 of 5 proposers answered and quorum is 1: a: it is gone; b: an empty answer; "
        r"c: out \(3 times\)$"
    )
    with pytest.raises(UserError, match=words):
        mixture.generate([Request("why?")])
    with pytest.raises(UserError, match="layer 1"):
        next(mixture.stream(Request("why?")))
    assert speaker(mixture.aggregator).heard == []


def test_one_request_of_a_batch_may_fail() -> None:
    picky = slot("p", lambda request: DEAD if "bad" in request.prompt else "fine")
    mixture = MixtureOfAgents([picky], slot("last", "done"))
    good, bad, end = mixture.generate_each([Request("good"), Request("bad"), Request("good")])
    assert isinstance(bad, UserError) and good == end and isinstance(good, Completion)
    with pytest.raises(UserError, match="p: it is gone"):
        mixture.generate([Request("good"), Request("bad")])


@pytest.mark.parametrize(("quorum", "answered"), [(1, True), (2, True), (3, False)])
def test_quorum(quorum: int, answered: bool) -> None:
    mixture = MixtureOfAgents([slot("a", count=2), slot("b", DEAD)], slot("last"), quorum=quorum)
    (found,) = mixture.generate_each([Request("why?")])
    assert isinstance(found, Completion) == answered
    if not answered:
        assert "2 of 3 proposers answered and quorum is 3: b: it is gone" in str(found)


def test_without_a_quorum_the_aggregator_answers_alone() -> None:
    found = stages(MixtureOfAgents([slot("a", DEAD)], slot("last"), layers=3, quorum=0))
    assert found.final.text == "<last says 1>" and found.layers[2][0].prompt == "why?"
    assert found.warnings == ["layer 1: a: it is gone", "layer 2: a: it is gone"]


@pytest.mark.parametrize("fails", [DEAD, ""])
def test_a_fallback_answers_for_the_aggregator(fails: Any) -> None:
    why = str(fails) or "an empty answer"
    mixture = MixtureOfAgents([slot("a")], slot("last", fails), fallback=slot("spare", "well"))
    found = stages(mixture)
    assert found.final.text == "well"
    assert [answer.role for answer in found.layers[1]] == ["aggregator", "fallback"]
    assert found.layers[1][0].prompt == found.layers[1][1].prompt
    assert found.warnings == [f"layer 2: last: {why}; spare answered instead"]


def test_no_fallback_and_a_dead_one_are_errors() -> None:
    spare = slot("spare", UserError("out"))
    for fallback, words in ((None, "layer 2: last: it is gone$"), (spare, "gone; spare: out$")):
        mixture = MixtureOfAgents([slot("a")], slot("last", DEAD), fallback=fallback)
        with pytest.raises(UserError, match=words):
            stages(mixture)


def test_an_empty_last_answer_is_given_with_a_warning() -> None:
    mixture = MixtureOfAgents([slot("a")], slot("last", ""), fallback=slot("spare", DEAD))
    found = stages(mixture)
    assert found.final.text == ""
    assert found.warnings == ["layer 2: last: an empty answer", "layer 2: spare: it is gone"]


def test_choices_cannot_be_scored() -> None:
    mixture = MixtureOfAgents([slot("a")], slot("last"))
    with pytest.raises(UserError, match="cannot score choices"):
        mixture.generate([Request("why?", 0, ("yes", "no"))])


def test_what_is_no_user_error_is_not_swallowed() -> None:
    def broken(request: Request) -> str:
        raise ZeroDivisionError

    go = threading.Event()
    slow = slot("b", lambda _: (go.wait(60), "so")[1])
    for proposers in ([slot("a", broken)], [slot("a", broken), slow]):
        start = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            stages(MixtureOfAgents(proposers, slot("last")))
        assert time.monotonic() - start < 30, "nobody waits for the others"
    go.set()


# Endpoints


def served(url: str, name: str, **how: Any) -> AgentSpec:
    limits = Limits(retries=0, timeout=20)
    return AgentSpec(OpenAI(name, url, None, limits=limits), name, **how)


def by_name(asked: Asked) -> Reply:
    """Each model says its name; some are late, dead or silent."""
    name = asked.body["model"]
    reply = chat(f"{name} to {asked.body['messages'][-1]['content'][:4]}")
    return {
        "dead": Reply({"error": "no more"}, 500),
        "silent": Reply(chat("late").body, wait=60.0),
        "slow": Reply(reply.body, wait=0.3),
        "slower": Reply(reply.body, wait=0.4),
    }.get(name, reply)


def test_the_proposers_of_a_layer_run_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(asked: Asked) -> Reply:
        if asked.body["model"] != "last":
            together.wait()
        return by_name(asked)

    with endpoint(answer) as server:
        names = ("slow", "slower", "slow", "slow")
        proposers = [served(server.url, name) for name in names]
        mixture = MixtureOfAgents(proposers, served(server.url, "last"))
        mixture.aggregator.model.generate([Request("why?")])  # what is imported once is
        start = time.monotonic()
        (found,) = mixture.generate([Request("why?")])
        whole_time = time.monotonic() - start
        assert found.text == "last to why?" and server.peak == 4 and len(server.asked) == 6
    assert 0.4 <= found.seconds <= whole_time  # not the sum of all calls


def test_a_dead_and_a_hanging_endpoint_cost_a_warning_and_the_slots_time() -> None:
    with endpoint(by_name) as server:
        proposers = [
            served(server.url, "fine"),
            served(server.url, "dead"),
            served(server.url, "silent", timeout=0.2),
        ]
        mixture = MixtureOfAgents(proposers, served(server.url, "last"))
        start = time.monotonic()
        found = stages(mixture)
        assert time.monotonic() - start < 15
    assert found.final.text == "last to why?"
    assert len(found.warnings) == 2 and "500" in found.warnings[0]
    assert "silent" in found.warnings[1] and "0.2 s" in found.warnings[1]


def test_order_is_kept_over_endpoints() -> None:
    def answer(asked: Asked) -> Reply:
        text = asked.body["messages"][-1]["content"].split("\n")[0]
        return Reply(chat(text).body, wait=0.02 * (int(text) % 3))

    with endpoint(answer) as server:
        mixture = MixtureOfAgents([served(server.url, "a")], served(server.url, "b"))
        answers = mixture.generate([Request(str(n)) for n in range(20)])
    assert [answer.text for answer in answers] == [str(n) for n in range(20)]


def test_the_whole_has_the_requests_time() -> None:
    slow = slot("slow", lambda _: (time.sleep(0.05), "so")[1])
    last = slot("last", timeout=300.0)
    stages(MixtureOfAgents([slow], last), timeout=100.0)
    first, then = speaker(slow).heard[0].timeout, speaker(last).heard[0].timeout
    assert first and then and 50.0 < then <= first - 0.05 < 100.0
    stages(MixtureOfAgents([slow], last), timeout=0.01)
    assert speaker(last).heard[1].timeout == 0.001


# Strategies


def windows_of(mixture: MixtureOfAgents, texts: list[str]) -> list[list[str]]:
    """The texts in each of the aggregator's prompts, in their order."""
    asked = [whole(request.prompt) for request in speaker(mixture.aggregator).heard]
    found = []
    for prompt in asked:
        lines = prompt.split("\n")
        found.append([line.split(". ")[1] for line in lines if ". <" in line])
    return found


def test_the_windows_of_sequential_self_moa() -> None:
    many, last = slot("m", count=12), slot("last")
    mixture = MixtureOfAgents([many], last, strategy="sequential", prompt="paper")
    found = stages(mixture)
    texts = said(found.layers[0])
    one, two, three = (answer.text for layer in found.layers[1:] for answer in layer)
    assert windows_of(mixture, texts) == [
        texts[:6],
        [one] * 3 + texts[6:9],
        [two] * 3 + texts[9:],
    ]
    assert found.final.text == three and mixture.calls == len(found.answers) == 15
    assert mixture.depth == 4
    assert [answer.layer for answer in found.answers] == [1] * 12 + [2, 3, 4]


@pytest.mark.parametrize(
    ("count", "window", "reserve", "calls"),
    [
        (1, 6, 3, 2),
        (6, 6, 3, 7),
        (7, 6, 3, 9),
        (9, 6, 3, 11),
        (10, 6, 3, 13),
        (30, 6, 3, 39),
        (5, 2, 1, 9),
        (9, 4, 1, 12),
    ],
)
def test_the_calls_of_sequential_self_moa(
    count: int, window: int, reserve: int, calls: int
) -> None:
    how: dict[str, Any] = {"strategy": "sequential", "window": window, "reserve": reserve}
    mixture = MixtureOfAgents([slot("m", count=count)], slot("last"), **how)
    assert len(stages(mixture).answers) == mixture.calls == calls


def test_sequential_in_a_batch_with_some_dead() -> None:
    """Requests of which fewer samples came need fewer windows."""

    def says(request: Request) -> Any:
        return DEAD if request.prompt == "few" and request.sample > 2 else f"s{request.sample}"

    last = slot("last", lambda request: "" if "s0" in whole(request.prompt) else "so")
    mixture = MixtureOfAgents([slot("m", says, count=9)], last, strategy="sequential")
    few, many = mixture.run([Request("few"), Request("many")])
    assert not isinstance(few, UserError) and not isinstance(many, UserError)
    assert [len(few.layers), len(many.layers)] == [2, 3]
    # An empty answer is not what the next window begins with.
    assert "3 quoted answers" in whole(many.layers[2][0].prompt) and many.final.text == "so"


@pytest.mark.parametrize("silent", [2, 3])
def test_sequential_keeps_its_best_over_an_empty_answer(silent: int) -> None:
    last = slot("z", lambda _: "" if len(speaker(last).heard) == silent else speaker(last).own())
    mixture = MixtureOfAgents([slot("m", count=12)], last, strategy="sequential", prompt="paper")
    found = stages(mixture)
    assert found.final.text == {2: "<z says 3>", 3: "<z says 2>"}[silent]
    assert windows_of(mixture, [])[2][:3] == [f"<z says {1 if silent == 2 else 2}>"] * 3
    assert found.warnings == [f"layer {silent + 1}: z: an empty answer"]


def test_a_ranker_gives_one_of_the_answers_verbatim() -> None:
    proposers = [slot(name, f"{name} [/INST] a[i]\n 1. x") for name in "abc"]
    last = slot("last", lambda request: f"{number_of('b [/', request)}.")
    mixture = MixtureOfAgents(proposers, last, strategy="rank")
    found = stages(mixture, max_new_tokens=3, stop=("x",))
    assert found.final.text == "b [/INST] a[i]\n 1. x" and found.final.model == "b"
    assert (found.final.new_tokens, found.final.cost) == (12, 2.0)
    assert found.layers[1][0].role == "ranker" and found.warnings == []
    asked = speaker(last).heard[0]
    assert (asked.max_new_tokens, asked.stop) == (16, ())
    assert asked.stop_check and asked.stop_check("2 ") and not asked.stop_check("2")


def number_of(text: str, request: Request) -> int:
    """Under which number a text stands in a safe prompt."""
    before = whole(request.prompt).split(text)[0]
    return int(before.rpartition('number="')[2].split('"')[0])


@pytest.mark.parametrize("reply", ["none of them", "7", "", "not sure, 1 or 2"])
def test_an_unreadable_choice_takes_the_first(reply: str) -> None:
    proposers = [slot("a", "first"), slot("b", "second")]
    found = stages(MixtureOfAgents(proposers, slot("last", reply), strategy="rank"))
    assert found.final.text == "first"
    assert f"last chose none of the answers; reply: {reply!r}" in found.warnings[-1]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("2", 2),
        (" **2**", 2),
        ("Answer 2 is best", 2),
        ("2. Answer 1 is wrong", 2),
        ("10", 10),
        ("The best is answer 3, by far", 3),
        ("3 is not as good as 2", 3),
        ("it is 2, not 1", None),
        ("The best is answer 2.", 2),
        ("Number 3 is best", 3),
        ("I choose 4", 4),
        ("the best is 5", 5),
        ('{"answer": 6}', 6),
        ("__7__", 7),
        ('{"synthesis":"x","analysis":"A1","confidence":0.9}', None),
        ("A1 D1", None),
        ("none of the 2", None),
        ("2nd", None),
        ("answer 2nd", None),
        ("1.5", None),
        ("Answer A1", None),
        ("it is 2.5", None),
        ("The best is answer 2 (sure: 0.9)", 2),
        ("0", None),
        ("11", None),
        ("11 of them", None),
        ("two", None),
        ("", None),
    ],
)
def test_which_answer_a_reply_names(reply: str, number: int | None) -> None:
    assert parse_number_pick(reply, 10) == number


def test_a_choice_is_settled_once_its_number_is_whole() -> None:
    assert [has_number_pick(text) for text in ("", "1", "10", "10.", "Answer 1\n", "the 1 ")] == [
        *(False, False, False, True, True, False)
    ]


def test_a_mixture_may_be_a_proposer() -> None:
    inner = MixtureOfAgents([slot("x", "in x"), slot("y", DEAD)], slot("z", "inner last"))
    mixture = MixtureOfAgents([AgentSpec(inner, "inner", count=2), slot("a")], slot("last"))
    found = stages(mixture)
    assert whole(found.layers[1][0].prompt).count("inner last") == 2
    assert found.final.cost == 2 * 1.0 + 2 * 0.5
    assert mixture.calls == 4 and len(speaker(inner.proposers[0]).heard) == 2
    assert [request.sample for request in speaker(inner.proposers[0]).heard] == [0, 1]


# Streaming and watching


def test_the_last_answer_is_streamed() -> None:
    streamer = Streamer("last", "one ", "two ", "three")
    mixture = MixtureOfAgents([slot("a"), slot("b")], AgentSpec(streamer, "last"))
    pieces = mixture.stream(Request("why?"))
    assert next(pieces) == Delta("one ") and streamer.given == 1
    assert next(pieces) == Delta("two ")
    pieces.close()
    assert streamer.closed and streamer.given == 2


def test_a_stream_returns_the_whole_with_its_cost() -> None:
    mixture = MixtureOfAgents([slot("a")], AgentSpec(Streamer("last", "x", "y"), "last"))
    pieces = stream(mixture, Request("why?"))
    assert [next(pieces).text, next(pieces).text] == ["x", "y"]
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert (end.value.value.text, end.value.value.cost) == ("xy", 0.5)


def test_a_stream_that_never_began_has_a_fallback() -> None:
    mixture = MixtureOfAgents(
        [slot("a")],
        AgentSpec(Streamer("last", DEAD), "last"),
        fallback=AgentSpec(Streamer("spare", "in ", "time"), "spare"),
    )
    assert [delta.text for delta in mixture.stream(Request("why?"))] == ["in ", "time"]


def test_a_stream_that_broke_off_is_an_error() -> None:
    mixture = MixtureOfAgents(
        [slot("a")], AgentSpec(Streamer("last", "so ", DEAD), "last"), fallback=slot("spare")
    )
    pieces = mixture.stream(Request("why?"))
    assert next(pieces).text == "so "
    with pytest.raises(UserError, match="it is gone"):
        next(pieces)
    assert speaker(mixture.fallback).heard == []  # type: ignore[arg-type]
    events: list[Any] = []
    mixture.run([Request("why?")], lambda number, event: events.append(event))
    assert isinstance(events[-1], AgentAnswer) and events[-1].error == "it is gone"


@pytest.mark.parametrize("strategy", ["rank", "sequential"])
def test_only_the_last_answer_is_streamed(strategy: str) -> None:
    last = Streamer("last", "1", " it is")
    last.says = lambda request: "not the end"
    many = slot("m", lambda request: f"s{request.sample}", count=7)
    mixture = MixtureOfAgents([many], AgentSpec(last, "last"), strategy=strategy)
    pieces = [delta.text for delta in mixture.stream(Request("why?"))]
    if strategy == "rank":
        assert len(pieces) == 1 and pieces[0].startswith("s")
    else:
        assert pieces == ["1", " it is"] and len(last.heard) == 2


def test_events_of_one_request_come_in_order() -> None:
    events: list[Any] = []
    mixture = MixtureOfAgents([slot("a"), slot("b", DEAD)], AgentSpec(Streamer("z", "x", "y"), "z"))
    (found,) = mixture.run([Request("why?")], lambda number, event: events.append(event))
    asked = [event for event in events if isinstance(event, AskedEvent)]
    assert asked == [
        AskedEvent(1, 2, "proposer", "a", 0),
        AskedEvent(1, 2, "proposer", "b", 0),
        AskedEvent(2, 2, "aggregator", "z", 0),
    ]
    assert events[:2] == asked[:2] and events[4:] == [
        *(asked[2], AnswerDelta(Delta("x")), AnswerDelta(Delta("y")), found.layers[1][0])
    ]
    came = [event for event in events if isinstance(event, AgentAnswer)]
    assert sorted(came, key=lambda one: (one.layer, one.name)) == found.answers
    (failed,) = MixtureOfAgents([slot("a", DEAD)], slot("z")).run([Request("?")], lambda n, e: None)
    assert isinstance(failed, UserError)


def test_events_of_a_batch_say_which_request() -> None:
    events: list[tuple[int, Any]] = []
    mixture = MixtureOfAgents([slot("a", count=2)], slot("z"))
    mixture.run([Request("p"), Request("q")], lambda number, event: events.append((number, event)))
    assert not any(isinstance(event, AnswerDelta) for _, event in events)
    for number, prompt in enumerate("pq"):
        mine = [event for one, event in events if one == number and isinstance(event, AgentAnswer)]
        assert [event.prompt for event in mine[:2]] == [prompt] * 2 and len(mine) == 3


# Values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0: must be an integer, 1 or more"),
        ({"layers": True}, "layers=True"),
        ({"quorum": 3}, "quorum=3: there are only 2 answers a layer"),
        ({"quorum": -1}, "quorum=-1: must be an integer, 0 or more"),
        ({"strategy": "vote"}, "strategy='vote' is not one of aggregate, rank, sequential"),
        ({"prompt": "rude"}, "prompt.form: 'rude' is not one of safe, paper"),
        ({"context": 0}, "context=0: must be null or a number of tokens"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"window": 1}, "window=1: must be an integer, 2 or more"),
        ({"strategy": "sequential", "reserve": 6}, "reserve=6: must be below window=6"),
        ({"strategy": "sequential", "layers": 3}, "layers=3: must be 2 with strategy=sequential"),
        ({"strategy": "rank", "layers": 1}, "layers=1: strategy=rank needs proposers"),
        ({"proposers": []}, "proposers: layers=2 needs at least one"),
        ({"aggregator": slot("z", count=2)}, "z: count=2: must be 1 for the aggregator"),
        ({"fallback": slot("y", count=2)}, "y: count=2"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {"proposers": [slot("a"), slot("b")], "aggregator": slot("z")}
    with pytest.raises(UserError) as error:
        MixtureOfAgents(**{**fine, **change})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1}, "a: temperature=-1: must be null or a number, 0 or more"),
        ({"temperature": float("nan")}, "a: temperature=nan"),
        ({"max_tokens": 0}, "a: max_tokens=0: must be null or an integer, 1 or more"),
        ({"max_tokens": True}, "a: max_tokens=True"),
        ({"system": " "}, "a: system=' ': must be null or a string"),
        ({"count": None}, "a: count=None: must be an integer, 1 or more"),
        ({"timeout": 0}, "a: timeout=0: must be null or a number of seconds above 0"),
        ({"name": ""}, "a slot's name: '' is not a string"),
        ({"model": 5}, "a: 5 is not a model"),
    ],
)
def test_a_wrong_slot_is_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        AgentSpec(**{"model": Speaker("a"), "name": "a", **how})
    assert str(error.value).startswith(message)


def test_each_member_is_checked_and_opened_once() -> None:
    shared, spare, unasked = Speaker("s"), Speaker("t"), Speaker("u")
    inner = MixtureOfAgents([AgentSpec(shared, "s")], AgentSpec(shared, "s"))
    slots = [AgentSpec(shared, "s"), AgentSpec(shared, "other"), AgentSpec(inner, "inner")]
    mixture = MixtureOfAgents(slots, AgentSpec(shared, "s"), fallback=AgentSpec(spare, "t"))
    assert mixture.members == [shared, inner, spare]
    mixture.check()
    mixture.open("cpu")
    # Once by itself and once by the inner mixture, which is a model of its own.
    assert shared.ready == ["checked"] * 2 + ["cpu"] * 2 and spare.ready == ["checked", "cpu"]
    alone = MixtureOfAgents([AgentSpec(unasked, "u")], AgentSpec(shared, "s"), layers=1)
    assert alone.members == [shared]


def test_models_of_this_machine_answer_in_batches(tiny_llama: Path) -> None:
    from swarm.engine.base_model import BaseModel
    from swarm.engine.hf import HFModel

    local = HFModel(BaseModel(path=str(tiny_llama), dtype="float32"))
    slots = [AgentSpec(local, "tiny", system="be kind"), AgentSpec(local, "plain")]
    # It reads no more than 512 tokens.
    mixture = MixtureOfAgents(
        slots, AgentSpec(local, "tiny"), prompt=AnswersPrompt("paper", "Go."), quorum=0
    )
    mixture.check()
    mixture.open("cpu")
    requests = [Request((Message("user", text),), 5) for text in ("one", "two", "three")]
    alone = local.generate(requests)
    for request, own, found in zip(requests, alone, mixture.run(requests), strict=True):
        assert not isinstance(found, UserError) and found.layers[0][1].text == own.text
        assert (
            found.final.text
            == local.generate(
                [
                    found.layers[1][0].prompt
                    and Request(found.layers[1][0].prompt, request.max_new_tokens)
                ]
            )[0].text
        )
