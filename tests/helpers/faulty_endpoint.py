"""An endpoint that goes wrong on purpose, and a table of what comes of it.

    python tests/helpers/faulty_endpoint.py [--count 64]

Each request meets the row's fault once, then the endpoint answers as it should. All are under way
at once: by one call of `attempt`, or each by a `stream` in a thread of its own. "mixed" gives each
request up to two faults of any kind, drawn by its number. "short" are texts that are neither right
nor told to be wrong; there must be none.
"""

import argparse
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from endpoints import DONE, Asked, Reply, chat, endpoint, event, piece, streamed

from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.models.http_errors import RequestError
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits

TIMEOUT, STALL = 3, 12
"""Seconds that the model waits, and that the endpoint stalls."""

PASSING = (
    "429",
    "429, Retry-After",
    "500",
    "stalled",
    "dropped",
    "dropped amid the answer",
    "malformed JSON",
    "error in a 200",
    "no choices",
)
"""After these the same request is answered; a stream meets them before its first piece."""

ANSWERS = ("empty content", "null content", "another model")
"""These are answers: the first two empty ones."""

BROKEN = ("stream cut short", "stream dropped", "stream stalled", "error in the stream")
"""A stream meets these after its first piece; they are told, and not repeated."""

FOREVER = ("404, no such model",)


def fault(name: str, streams: bool, text: str) -> Reply:
    """What the endpoint does instead of answering with the text; or how it does so."""
    first = piece(text[:6])
    empty, null = (
        (streamed(), sent(piece(None), piece(finish="stop"), DONE))
        if streams
        else (chat(""), chat(None))
    )
    other = {"model": "someone-else"}
    return {
        "429": Reply({"error": {"message": "too many requests"}}, 429),
        "429, Retry-After": Reply({"error": "later"}, 429, {"Retry-After": "1"}),
        "500": Reply({"error": {"message": "broken"}}, 500),
        "stalled": Reply(chat(text).body, wait=STALL),
        "dropped": Reply(drop=True),
        "dropped amid the answer": sent(b'data: {"cho' if streams else b'{"cho', drop=True),
        "malformed JSON": sent(b'data: {"choices": [{"del\n\n') if streams else Reply(b'{"choic'),
        "error in a 200": sent(event({"error": {"message": "upstream is gone"}}))
        if streams
        else Reply({"error": {"message": "upstream is gone"}}),
        "no choices": sent(DONE) if streams else Reply({"choices": []}),
        "empty content": empty,
        "null content": null,
        "another model": sent(event({"choices": [], **other}), piece(text), DONE)
        if streams
        else Reply(chat(text).body | other),
        "stream cut short": sent(first),
        "stream dropped": sent(first, drop=True),
        "stream stalled": sent(first, STALL, DONE),
        "error in the stream": sent(first, event({"error": {"message": "upstream is gone"}}), DONE),
        "404, no such model": Reply({"error": {"message": "no such model"}}, 404),
    }[name]


def sent(*pieces: bytes | float, drop: bool = False) -> Reply:
    """A reply bit by bit."""
    return Reply(pieces=pieces, drop=drop)


def right(number: int) -> str:
    """The text that the endpoint says to a request."""
    return f"{number} and {number} is {2 * number}"


class Faulty:
    """Answers the n-th prompt by its plan, fault by fault, and then as it should.

    Attributes:
        met: How often each fault was met.
    """

    def __init__(self, plans: Sequence[Sequence[str]]) -> None:
        self.plans = plans
        self.met: Counter[str] = Counter()
        self._came: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Reply:
        """One reply."""
        number = int(re.findall(r"\d+", asked.body["messages"][-1]["content"])[0])
        streams = asked.body.get("stream", False)
        with self._lock:
            came = self._came[number]
            self._came[number] += 1
            plan = self.plans[number]
            name = plan[came] if came < len(plan) else plan[-1] if plan[-1:] == FOREVER else ""
            self.met[name] += bool(name)
        if name:
            return fault(name, streams, right(number))
        text = right(number)
        return streamed(text[:5], text[5:]) if streams else chat(text)


def mixed(count: int, streams: bool) -> list[list[str]]:
    """Up to two faults for each of so many requests; what ends a request comes last."""
    plans = []
    for number in range(count):
        draw = random.Random(number)
        passing = draw.choices(PASSING, k=draw.randrange(3))
        last = draw.choice(ANSWERS + BROKEN * streams) if draw.random() < 0.3 else None
        plans.append(passing + [last] * bool(last))
    return plans


class Outcome(NamedTuple):
    """What came of requests; `found` has an answer or an error for each, in their order."""

    found: list[Completion | UserError]
    met: Counter[str]
    repeats: int
    seconds: float


def outcome(plans: Sequence[Sequence[str]], streams: bool) -> Outcome:
    """Ask as many requests as there are plans, all at once."""
    faulty = Faulty(plans)
    requests = [Request(f"What is {n} and {n}?") for n in range(len(plans))]
    with endpoint(faulty) as server:
        limits = Limits(concurrency=len(plans), timeout=TIMEOUT)
        model = OpenAI("small", server.url, None, limits=limits)
        began = time.monotonic()
        if streams:
            with ThreadPoolExecutor(len(plans)) as pool:
                found = list(pool.map(lambda request: one(model, request), requests))
        else:
            found = model.generate_each(requests)
        taken = time.monotonic() - began
    return Outcome(found, faulty.met, model.client.repeated, taken)


def one(model: OpenAI, request: Request) -> Completion | UserError:
    """The answer to one request whose pieces agree with it, or its error."""
    text, pieces = "", model.stream(request)
    try:
        while True:
            text += next(pieces).text
    except StopIteration as end:
        assert end.value.text == text
        return end.value
    except RequestError as error:
        return error


def expected(number: int, plan: Sequence[str]) -> str | None:
    """The right text, or `None` where there has to be an error."""
    last = plan[-1] if plan else ""
    if last in BROKEN + FOREVER:
        return None
    return "" if last in ("empty content", "null content") else right(number)


def row(name: str, plans: Sequence[Sequence[str]], streams: bool) -> str:
    """A line of the table."""
    got = outcome(plans, streams)
    texts = [answer.text if isinstance(answer, Completion) else None for answer in got.found]
    wanted = [expected(number, plan) for number, plan in enumerate(plans)]
    good = sum(t is not None and t == w for t, w in zip(texts, wanted, strict=True))
    errors = sum(text is None for text in texts)
    short = len(plans) - good - errors
    cells = (
        name,
        "stream" if streams else "at once",
        len(plans),
        got.met.total(),
        got.repeats,
        good,
        errors,
        short,
        f"{got.seconds:.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=64, help="requests under way at once")
    count = parser.parse_args().count
    logging.disable()
    print("| fault | way | requests | faults met | repeats | right | errors told | short | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for streams in (False, True):
        for name in (*PASSING, *ANSWERS, *BROKEN * streams, *FOREVER):
            print(row(name, [[name]] * count, streams), flush=True)
        print(row("mixed", mixed(count, streams), streams), flush=True)


if __name__ == "__main__":
    main()
