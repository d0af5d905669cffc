"""Overhead of the server: a function called through it, and called directly.

    python benchmarks/serving.py [--count 400] [--at-once 16] [--repeats 3]

The server has a process of its own, as in use. The function answers at once, so all that is
measured is the way there and back. The answers are compared first. Interleaved repeats; prints
median requests a second, the client's CPU time, and the milliseconds to a stream's first piece.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
from timing import interleaved

from swarm.models.base import Completion, Request
from swarm.models.function import FunctionModel
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits


def echo(prompt: object) -> Completion:
    """An answer of about 100 characters that follows from the prompt alone."""
    asked = prompt if isinstance(prompt, str) else prompt[-1].content  # type: ignore[index]
    return Completion(f"{asked} {'word ' * 20}", (), 10, 20)


@contextmanager
def server():
    """The URL of a server of `echo`."""
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.serve", "--port", "0", "--model", "function/serving:echo"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split()[4].rstrip(",")
    finally:
        process.terminate()
        process.wait()


def first_piece(client: httpx2.Client, url: str) -> float:
    """Seconds from the question to the first event of a stream."""
    turns = [{"role": "user", "content": "hi"}]
    body = {"model": "function/serving:echo", "messages": turns, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", f"{url}/chat/completions", json=body) as came:
        next(came.iter_lines())
        return time.perf_counter() - began


def texts(model: FunctionModel | OpenAI, requests: Sequence[Request]) -> list[str]:
    """What is answered."""
    return [one.text for one in model.generate(requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    requests = [Request(f"number {n}", 50) for n in range(options.count)]
    direct = FunctionModel(echo)
    with server() as url, httpx2.Client() as client:
        limits = Limits(concurrency=options.at_once)
        name = "function/serving:echo"
        behind = OpenAI(name, base_url=url, api_key_env=None, limits=limits)
        assert texts(direct, requests) == texts(behind, requests)
        ways = {"directly": direct, "served": behind}
        taken = interleaved(
            {way: (lambda m=m: m.generate(requests)) for way, m in ways.items()}, options.repeats
        )
        pieces = [first_piece(client, url) for _ in range(50)]
    each = {way: options.count / one.wall for way, one in taken.items()}
    print(
        "| asked | requests a second | CPU µs of the client's process each |\n| --- | --- | --- |"
    )
    for way, one in taken.items():
        print(f"| {way} | {each[way]:,.0f} | {1e6 * one.cpu / options.count:.0f} |")
    print(
        json.dumps(
            {"ratio": round(each["served"] / each["directly"], 3), "at once": options.at_once}
        )
    )
    print(f"first piece of a stream: {1e3 * statistics.median(pieces):.1f} ms")


if __name__ == "__main__":
    main()
