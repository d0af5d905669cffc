"""Requests per second to a loopback endpoint, and cached answers per second, beside a bare client.

    python benchmarks/throughput.py [--count 3000] [--at-once 16,100,400] [--repeats 3]

The endpoint runs in a process of its own and answers at once, or after 100 ms. "bare" is aiohttp
with as many tasks and nothing else: no repetition, no limits, no cache; "keeping" writes each
answer to a new file. All answers are seen to be right before anything is timed. CPU seconds are
this process's: the endpoint's are left out.
"""

import argparse
import asyncio
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from timing import Taken, interleaved, machine

from swarm.models.base import Request
from swarm.models.cache import Cache
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
PROMPT = re.compile(rb'"content": ?"([^"]*)"')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
SAID = (
    b'{"id": "c-1", "object": "chat.completion", "model": "small", "choices": [{"index": 0, '
    b'"message": {"role": "assistant", "content": "so: %b"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}}'
)


class Chat(asyncio.Protocol):
    """One connection to the endpoint: repeats each prompt, `wait` seconds after it came.

    It is as quick as can be, so that the machine is the clients'.
    """

    def __init__(self, wait: float) -> None:
        self.wait, self.waiting = wait, b""

    def said(self, prompt: bytes) -> bytes:
        """The answer to a prompt."""
        return SAID % prompt

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        while (head := self.waiting.find(b"\r\n\r\n") + 4) > 3:
            end = head + int(LENGTH.search(self.waiting, 0, head)[1])
            if len(self.waiting) < end:
                return
            said = self.said(PROMPT.search(self.waiting, head, end)[1])
            self.waiting = self.waiting[end:]
            answer = HEAD % len(said) + said
            if self.wait:
                asyncio.get_running_loop().call_later(self.wait, self.transport.write, answer)
            else:
                self.transport.write(answer)


async def serve(wait: float, chat: type[Chat] = Chat) -> None:
    """Answer until this process is ended; the port is printed first."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: chat(wait), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def endpoint(wait: float, script: str = __file__) -> Iterator[str]:
    """The base URL of a running endpoint, which a script serves."""
    command = [sys.executable, script, "--serve", str(wait)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()


async def bare(url: str, prompts: list[str], concurrency: int) -> list[str]:
    """The texts, by aiohttp alone."""
    import aiohttp

    texts = [""] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def work(session: aiohttp.ClientSession) -> None:
        for number, prompt in waiting:
            turns = [{"role": "user", "content": prompt}]
            body = {"model": "small", "messages": turns, "max_tokens": 16, "temperature": 0.0}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                said = await response.json()
            texts[number] = said["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return texts


def ours(url: str, prompts: list[str], concurrency: int, cache: Cache | None) -> list[str]:
    """The texts, by the model."""
    limits = Limits(concurrency=concurrency)
    model = OpenAI("small", url, None, limits=limits, cache=cache)
    return [done.text for done in model.generate([Request(prompt) for prompt in prompts])]


def compared(url: str, level: int, count: int, home: Path, repeats: int) -> dict[str, Taken]:
    """What each way takes for so many requests; all are first seen to give the right texts."""
    prompts = [f"What is {n} + {n}?" for n in range(count)]
    expected = [f"so: {prompt}" for prompt in prompts]
    files = (Cache(str(home / f"{level}-{n}.sqlite")) for n in itertools.count())
    ways: dict[str, Callable[[], list[str]]] = {
        "bare": lambda: asyncio.run(bare(url, prompts, level)),
        "ours": lambda: ours(url, prompts, level, None),
        "ours, keeping": lambda: ours(url, prompts, level, next(files)),
    }
    for name, way in ways.items():
        assert way() == expected, name
    return interleaved(ways, repeats)


def show(wait: float, level: int, count: int, found: dict[str, Taken]) -> None:
    """The rows of one latency and concurrency; the ideal rate is concurrency/latency."""
    for name, taken in found.items():
        rate = count / taken.wall
        ideal = f"{rate * wait / level:.0%}" if wait else ""
        beside = f"{found['bare'].wall / taken.wall:.0%}"
        cells = (
            f"{wait * 1000:.0f} ms",
            level,
            name,
            f"{rate:,.0f}",
            ideal,
            beside,
            taken,
            f"{1e6 * taken.cpu / count:.0f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def reading(count: int, home: Path, repeats: int) -> Taken:
    """What it takes to read so many kept answers, each by its request."""
    cache = Cache(str(home / "kept.sqlite"))
    prompts = [f"What is {n} + {n}?" for n in range(count)]
    with endpoint(0.0) as url:
        asked = ours(url, prompts, 100, cache)
    # Nobody is there any more who could be asked.
    assert ours(url, prompts, 100, cache) == asked
    return interleaved({"kept": lambda: ours(url, prompts, 100, cache)}, repeats)["kept"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=3000, help="maximum number of requests per measurement"
    )
    parser.add_argument("--at-once", default="16,100,400", help="concurrency without latency")
    parser.add_argument("--slow", default="10,50,100,200,400", help="concurrency at 100 ms")
    parser.add_argument("--kept", type=int, default=10000, help="number of cached answers read")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return asyncio.run(serve(options.serve))
    print(machine())
    print("| latency | concurrency | way | requests/s | of ideal | of bare | wall | CPU µs each |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for wait, levels in ((0.0, options.at_once), (0.1, options.slow)):
            with endpoint(wait) as url:
                for level in map(int, levels.split(",")):
                    count = min(options.count, 30 * level) if wait else options.count
                    show(wait, level, count, compared(url, level, count, home, options.repeats))
        taken = reading(options.kept, home, options.repeats)
    print(f"{options.kept} cached answers: {taken}")


if __name__ == "__main__":
    main()
