"""Requests over HTTP: to a quick or slow endpoint, with a rate limit or faults, and to our server.

    python benchmarks/endpoints.py [--endpoints quick,served] [--ways bare,ours] [--count 3000]

An endpoint is a process of its own on the loopback:

quick       answers at once
slow        answers after 100 ms
limit ...   accepts `--rate` requests a second (a token bucket that holds a second's) and answers
            the others with 429: without Retry-After, with its seconds, or with a date
faults      after 20 ms, by a hash of the request's number: 15 % are answered with a 500, 10 % with
            429 and Retry-After: 1, and 10 % are cut in the middle of the body
served      `python -m swarm.serve` with a function that answers at once

bare        aiohttp with as many tasks and nothing else: no repetition, no limits, no cache
ours        `OpenAI.generate`, the path of judges, mixtures and consortia
storing     the same, which writes each answer to a new cache
stored      the same, which finds each answer in its cache
compare     a question of swarm.compare with so many samples

All answers are seen to be right. The ideal rate is that of the latency or of the limit. CPU seconds
are the client's; instructions are counted with one way: valgrind --tool=callgrind python ...
"""

import argparse
import asyncio
import email.utils
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import frame
from aiohttp import web

from swarm.compare import Config, Question
from swarm.models.base import Completion, Request
from swarm.models.cache import Cache
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits

WAITS = {"quick": 0.0, "slow": 0.1, "faults": 0.02}
RETRY_AFTER = {"limit": "", "limit-1": "1", "limit-date": "date"}
REFUSING = ("faults", *RETRY_AFTER)
ENDPOINTS = (*WAITS, *RETRY_AFTER, "served")
SERVED = "function/endpoints:answer_served"
WAYS = ("bare", "ours", "storing", "stored", "compare")

PROMPT = re.compile(rb'"content": ?"([^"]*)"')
SAID = (
    b'{"id": "c-1", "object": "chat.completion", "model": "small", "choices": [{"index": 0, '
    b'"message": {"role": "assistant", "content": "so: %b"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}}'
)


def answer_served(prompt: object) -> Completion:
    """Return what the endpoints say as well."""
    return Completion(f"so: {prompt if isinstance(prompt, str) else prompt[-1].content}")


class Behaviour:
    """What an endpoint answers; requests to different paths know nothing of each other."""

    def __init__(self, kind: str, rate: float) -> None:
        self.kind, self.rate = kind, rate
        self.received: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.tokens: dict[str, tuple[float, float]] = {}

    async def reply(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; a GET is answered with the number of refusals."""
        path = request.path.removesuffix("/v1/chat/completions")
        if request.method == "GET":
            return web.Response(text=str(self.refused[path]))
        body = SAID % PROMPT.search(await request.read())[1]
        if wait := WAITS.get(self.kind):
            await asyncio.sleep(wait)
        self.received[path] += 1
        drawn = 1.0
        if self.kind == "faults":
            drawn = random.Random(f"{path} {self.received[path]}").random()
        refused = self.kind in RETRY_AFTER and not self.accept(path)
        self.refused[path] += refused or drawn < 0.35
        if drawn < 0.15:
            return web.Response(status=500)
        if refused or drawn < 0.25:
            after = RETRY_AFTER.get(self.kind, "1")
            if after == "date":
                after = email.utils.formatdate(time.time() + 1.0, usegmt=True)
            return web.Response(status=429, headers={"Retry-After": after} if after else {})
        if drawn < 0.35:
            cut = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await cut.prepare(request)
            await cut.write(body[: len(body) // 2])
            request.transport.close()
            return cut
        return web.Response(body=body, content_type="application/json")

    def accept(self, path: str) -> bool:
        """Take a token from the path's bucket if it has one."""
        now = time.monotonic()
        left, last = self.tokens.get(path, (self.rate, now))
        left = min(self.rate, left + (now - last) * self.rate)
        self.tokens[path] = left - (left >= 1), now
        return left >= 1


async def serve(kind: str, rate: float) -> None:
    """Answer until this process is ended; the address is printed first."""
    runner = web.ServerRunner(web.Server(Behaviour(kind, rate).reply, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def endpoint(kind: str, rate: float) -> Iterator[str]:
    """The address of a running endpoint."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    command = ["-c", f"import asyncio, endpoints as e; asyncio.run(e.serve({kind!r}, {rate}))"]
    if kind == "served":
        command = ["-m", "swarm.serve", "--port", "0", "--model", SERVED]
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield re.search(r"http://[\d.:]+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait()


async def ask_bare(url: str, model: str, prompts: list[str], at_once: int) -> list[str]:
    """Return the texts, by aiohttp alone."""
    texts = [""] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def work(session: aiohttp.ClientSession) -> None:
        for number, prompt in waiting:
            turns = [{"role": "user", "content": prompt}]
            body = {"model": model, "messages": turns, "max_tokens": 16, "temperature": 0.0}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                said = await response.json()
            texts[number] = said["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(at_once)))
    return texts


def ask(way: str, url: str, model: str, prompts: list[str], at_once: int, home: Path) -> None:
    """Ask in a way, and make sure that each answer is right."""
    new = home / f"{time.monotonic_ns()}"
    if way == "compare":
        prompts = prompts[:1] * len(prompts)
        Config.cache_dir, Config.max_workers = str(new), at_once
        Config.url_key_pairs = [(url, "no-key", "OPENAI_API_KEY")]
        question = Question.create(
            type="free_form",
            name="asked",
            samples_per_paraphrase=len(prompts),
            paraphrases=prompts[:1],
        )
        texts = list(question.df({"group": [model]})["answer"])
    elif way == "bare":
        texts = asyncio.run(ask_bare(url, model, prompts, at_once))
    else:
        files = {"storing": new, "stored": home / f"{at_once}"}
        cache = Cache(f"{files[way]}.sqlite") if way in files else None
        asked = OpenAI(model, url, None, limits=Limits(concurrency=at_once), cache=cache)
        texts = [one.text for one in asked.generate([Request(prompt) for prompt in prompts])]
    assert texts == [f"so: {prompt}" for prompt in prompts], way


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each endpoint, concurrency and way."""
    for kind, level in itertools.product(options.endpoints.split(","), options.at_once.split(",")):
        with endpoint(kind, options.rate) as url, tempfile.TemporaryDirectory() as home:
            yield from measure_endpoint(kind, int(level), url, Path(home), options)


def measure_endpoint(
    kind: str, at_once: int, url: str, home: Path, options: argparse.Namespace
) -> Iterator[frame.Row]:
    """Yield a row for each way; where requests are refused, a path of its own for each turn."""
    refuses = kind in REFUSING
    most = {"slow": 30 * at_once, "faults": 300}
    count = min(options.count, most.get(kind, int(20 * options.rate) if refuses else options.count))
    ideal = {"slow": at_once / 0.1}.get(kind, options.rate if kind in RETRY_AFTER else 0)
    prompts = [f"What is {n} + {n}?" for n in range(count)]
    model = SERVED if kind == "served" else "small"
    paths: dict[str, list[str]] = {way: [] for way in options.ways.split(",")}

    def turn(way: str) -> None:
        path = f"{url}/{way}{len(paths[way])}" if refuses else url
        # Before the first turn a request finds the code; where none is refused, all of them do.
        asked = prompts[:1] if refuses and not paths[way] else prompts
        paths[way].append(path)
        ask(way, f"{path}/v1", model, asked, at_once, home)

    ways: dict[str, Callable[[], None]] = {
        way: partial(turn, way) for way in paths if not refuses or way in ("ours", "compare")
    }
    spent = frame.interleaved(ways, options.repeats, check=lambda _: None)
    for way, one in spent.items():
        rates = [count / wall for wall in one[frame.WALL]]
        bare = spent.get("bare", {})
        yield {
            "endpoint": kind,
            "at once": at_once,
            "requests": count,
            "way": way,
            **one,
            "requests/s": rates,
            "of the ideal": [rate / ideal for rate in rates] if ideal and way != "stored" else "",
            "CPU µs each": [1e6 * cpu / count for cpu in one[frame.CPU]],
            **(frame.ratios(one, bare) if bare else {}),
            "refused": [int(urlopen(path).read()) for path in paths[way][1:]] if refuses else "",
        }


if __name__ == "__main__":
    parser = frame.parser(__doc__)
    parser.add_argument("--count", type=int, default=3000, help="most requests of a measurement")
    parser.add_argument("--at-once", default="16,100", help="concurrent requests")
    parser.add_argument("--rate", type=float, default=20.0, help="accepted requests a second")
    parser.add_argument("--endpoints", default=",".join(ENDPOINTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    frame.run(parser.parse_args(), measure)
