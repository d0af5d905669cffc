"""40 requests at once to an endpoint that goes wrong in every way: right answers or told errors."""

import logging
from collections import Counter

import faulty_endpoint
import pytest
from endpoints import endpoint

from swarm.models.base import Completion, Request
from swarm.models.http_errors import (
    ConnectionFailed,
    NotFound,
    RequestError,
    RequestTimeout,
    ServerFault,
)
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits

COUNT = 40
TOLD = {
    "stream cut short": ServerFault,
    "stream dropped": ConnectionFailed,
    "stream stalled": RequestTimeout,
    "error in the stream": ServerFault,
}


@pytest.mark.parametrize("streams", [False, True])
def test_nothing_is_lost_or_short_whatever_goes_wrong(
    streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plans = faulty_endpoint.mixed(COUNT, streams)
    met = Counter(name for plan in plans for name in plan)
    assert set(met) == {
        *faulty_endpoint.PASSING,
        *faulty_endpoint.ANSWERS,
        *faulty_endpoint.BROKEN * streams,
    }
    got = faulty_endpoint.outcome(plans, streams)
    assert got.met == met and got.seconds < 120
    assert got.repeats >= sum(met[name] for name in faulty_endpoint.PASSING)
    for number, (plan, answer) in enumerate(zip(plans, got.found, strict=True)):
        wanted = faulty_endpoint.expected(number, plan)
        if wanted is None:
            assert type(answer) is TOLD[plan[-1]] and str(answer).startswith("small (http")
        else:
            assert isinstance(answer, Completion) and answer.text == wanted
    assert caplog.text.count("from another model, someone-else") == 1


def test_generate_gives_all_answers_in_order_too() -> None:
    plans = faulty_endpoint.mixed(COUNT, False)
    with endpoint(faulty_endpoint.Faulty(plans)) as server:
        limits = Limits(concurrency=16, timeout=faulty_endpoint.TIMEOUT)
        model = OpenAI("small", server.url, None, limits=limits)
        done = model.generate([Request(f"What is {n} and {n}?") for n in range(COUNT)])
        assert server.peak <= 16
    assert [c.text for c in done] == [
        faulty_endpoint.expected(n, plan) for n, plan in enumerate(plans)
    ]
    assert model.totals.calls == COUNT


@pytest.mark.parametrize("streams", [False, True])
def test_a_model_that_is_not_there_is_said_at_once(streams: bool) -> None:
    got = faulty_endpoint.outcome([faulty_endpoint.FOREVER] * 8, streams)
    assert [type(answer) for answer in got.found] == [NotFound] * 8
    assert got.repeats == 0


def test_a_fault_that_stays_ends_after_the_repetitions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with endpoint(faulty_endpoint.Faulty([["500"] * 9])) as server:
        model = OpenAI("small", server.url, None, limits=Limits(retries=2))
        (error,) = model.generate_each([Request("What is 0?")])
    assert isinstance(error, RequestError) and str(error).endswith("broken; 3 attempts")
    assert len(server.asked) == 3


def test_the_table_counts() -> None:
    line = faulty_endpoint.row("500", [["500"]] * 3, streams=False)
    assert line.startswith("| 500 | at once | 3 | 3 | 3 | 3 | 0 | 0 | ")
    line = faulty_endpoint.row("stream cut short", [["stream cut short"]] * 2, streams=True)
    assert line.startswith("| stream cut short | stream | 2 | 2 | 0 | 0 | 2 | 0 | ")
