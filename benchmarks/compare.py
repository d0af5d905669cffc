"""Compare swarm.compare with llmcomp and a plain aiohttp client on a loopback endpoint.

    python benchmarks/compare.py [--llmcomp PYTHON] [--count 1000,3000,10000] [--repeats 5]

The script is the same for both packages except for its import line; aiohttp sends the same requests
without retries, limits or cache (benchmarks/throughput.py). Each measurement is a process of its
own, those of all ways in turn; the endpoint is another process. Seconds are those of `Question.df`
alone, without imports; CPU seconds are those of the experiment's process. Ratios are those of
measurements that follow each other, median and range.

PYTHON is that of an environment with llmcomp (`pip install llmcomp` needs 6 GB; enough here:
`pip install --no-deps llmcomp` and `pip install backoff filelock matplotlib openai pandas pyyaml
tqdm`). Without it, only swarm.compare and aiohttp are measured.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from throughput import Chat, endpoint, serve
from timing import machine

ROOT = Path(__file__).resolve().parent.parent

HOW_MANY = b"how many?"

SCRIPT = """
import json, os, sys, time
from {package} import Config, Question
import pandas
given = json.loads(sys.argv[1])
Config.cache_dir, Config.max_workers = given["cache"], given["workers"]
Config.url_key_pairs = [(given["url"], "no-key", "OPENAI_API_KEY")]

def ask(samples, paraphrases, name):
    question = Question.create(type="free_form", name=name, samples_per_paraphrase=samples,
                               paraphrases=[f"What is {{n}} + 1?" for n in range(paraphrases)])
    cpu, wall = time.process_time(), time.perf_counter()
    frame = question.df({{"group": ["small"]}})
    taken = [time.perf_counter() - wall, time.process_time() - cpu]
    right = [f"so: What is {{n}} + 1?" for n in range(paraphrases) for _ in range(samples)]
    assert list(frame["answer"]) == right
    return taken

if given.get("first"):
    # Finds the endpoint, loads the code and makes a frame.
    ask(3, 1, "first")
print(json.dumps([ask(samples, given["paraphrases"], "asked") for samples in given["samples"]]))
"""

BARE = """
import asyncio, json, sys, time
sys.path.insert(0, {folder!r})
from throughput import bare
given = json.loads(sys.argv[1])
[samples] = given["samples"]

def ask(samples):
    cpu, wall = time.process_time(), time.perf_counter()
    texts = asyncio.run(bare(given["url"], ["What is 0 + 1?"] * samples, given["workers"]))
    taken = [time.perf_counter() - wall, time.process_time() - cpu]
    assert texts == ["so: What is 0 + 1?"] * samples
    return taken

ask(3)
print(json.dumps([ask(samples)]))
"""

IMPORT = """
import time
wall = time.perf_counter()
from {package} import Config, ModelAdapter, Question
print(time.perf_counter() - wall)
"""


class Counting(Chat):
    """Returns the number of requests so far where it is asked for that."""

    count = 0

    def said(self, prompt: bytes) -> bytes:
        """Return the answer to a prompt."""
        if prompt != HOW_MANY:
            Counting.count += 1
            return super().said(prompt)
        return super().said(b"%d" % Counting.count)


def count_requests(url: str) -> int:
    """Return the number of requests that an endpoint has received."""
    from swarm.models.base import Request
    from swarm.models.openai import OpenAI

    [answer] = OpenAI("small", url, None).generate([Request(HOW_MANY.decode())])
    return int(answer.text.removeprefix("so: "))


class Packages:
    """The packages that are compared, each with its Python."""

    def __init__(self, llmcomp: str | None) -> None:
        self.pythons = {"swarm.compare": sys.executable} | ({"llmcomp": llmcomp} if llmcomp else {})

    def run(self, package: str, script: str, **given: object) -> Any:
        """Return what a script prints in a process of its own."""
        code = script.format(package=package, folder=str(Path(__file__).parent))
        command = [self.pythons.get(package, sys.executable), "-W", "ignore", "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, json.dumps(given)],
            env=environment,
            text=True,
            capture_output=True,
            cwd=tempfile.gettempdir(),
        )
        if done.returncode:
            raise SystemExit(f"{package}: {done.stderr}")
        return json.loads(done.stdout.strip().splitlines()[-1])


Times = dict[str, list[list[float]]]
"""For each way, the wall and CPU seconds of each repetition."""


def spread(values: Sequence[float], format: str = ".3g") -> str:
    """Return the median and the range."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{format}} [{low:{format}}, {high:{format}}]"


def ratios(found: Times, column: int, other: str) -> str:
    """Return the ratios of another way to swarm.compare, repetition by repetition."""
    if other not in found:
        return ""
    mine = found["swarm.compare"]
    pairs = zip(found[other], mine, strict=True)
    return spread([theirs[column] / one[column] for theirs, one in pairs])


def show(what: str, found: Times, count: int) -> None:
    """Print a row for each way: seconds, CPU ms per request, and ratios to swarm.compare."""
    for way, taken in found.items():
        wall, cpu = zip(*taken, strict=True)
        cells = [what, way, spread(wall), spread([1000 * one / count for one in cpu])]
        if way == "swarm.compare":
            cells += ["", ""]
        else:
            cells += [ratios(found, 1, way), ratios(found, 0, way)]
        print(f"| {' | '.join(cells)} |", flush=True)


def measure_new(packages: Packages, url: str, workers: int, count: int, repeats: int) -> Times:
    """Return the seconds of `count` new answers, in turn."""
    found: Times = {way: [] for way in (*packages.pythons, "aiohttp")}
    given = {"url": url, "workers": workers, "paraphrases": 1, "samples": [count]}
    for _ in range(repeats):
        for way, taken in found.items():
            script = BARE if way == "aiohttp" else SCRIPT
            with tempfile.TemporaryDirectory() as cache:
                taken += packages.run(way, script, cache=cache, first=True, **given)
    return found


def measure_cached(packages: Packages, count: int, repeats: int) -> Times:
    """Return the seconds of `count` cached answers, in turn; each after one read in its process."""
    found: Times = {package: [] for package in packages.pythons}
    with endpoint(0.0, __file__) as url, tempfile.TemporaryDirectory() as cache:
        given = {"url": url, "workers": 100, "paraphrases": 10, "samples": [count // 10] * 2}
        for package in found:
            packages.run(package, SCRIPT, cache=f"{cache}/{package}", **given)
        for _ in range(repeats):
            for package, taken in found.items():
                again = packages.run(package, SCRIPT, cache=f"{cache}/{package}", **given)
                taken.append(again[-1])
    return found


def requests_of_more_samples(packages: Packages) -> dict[str, int]:
    """Return the requests for 4 samples of 2 paraphrases when 3 are cached."""
    found = {}
    for package in packages.pythons:
        with endpoint(0.0, __file__) as url, tempfile.TemporaryDirectory() as cache:
            given = {"url": url, "cache": cache, "workers": 100, "paraphrases": 2}
            packages.run(package, SCRIPT, samples=[3], **given)
            before = count_requests(url)
            packages.run(package, SCRIPT, samples=[3], **given)
            # Requests that a process sends before its first question are not counted.
            start, before = count_requests(url) - before, count_requests(url)
            packages.run(package, SCRIPT, samples=[4], **given)
            found[package] = count_requests(url) - before - start
    return found


def measure_imports(packages: Packages, repeats: int) -> Times:
    """Return the seconds of the import, in turn, each after one that compiled."""
    found: Times = {package: [] for package in packages.pythons}
    for number in range(repeats + 1):
        for package, taken in found.items():
            wall = float(packages.run(package, IMPORT))
            taken += [[wall, wall]] if number else []
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llmcomp", help="the python of an environment with llmcomp")
    parser.add_argument("--count", default="1000,3000,10000", help="new answers (%(default)s)")
    parser.add_argument("--cached", type=int, default=10_000, help="cached answers (%(default)s)")
    parser.add_argument("--workers", default="100", help="concurrency (%(default)s)")
    parser.add_argument("--latency", default="0,100", help="of the endpoint, ms (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return asyncio.run(serve(options.serve, Counting))
    packages, repeats = Packages(options.llmcomp), options.repeats
    print(f"{machine()}; median [range] of {repeats}")
    print("| | way | seconds | CPU ms each | CPU: ratio to swarm.compare | wall: ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    show("import", measure_imports(packages, repeats), 1)
    show(
        f"{options.cached} cached",
        measure_cached(packages, options.cached, repeats),
        options.cached,
    )
    for wait in map(float, options.latency.split(",")):
        with endpoint(wait / 1000, __file__) as url:
            for workers in map(int, options.workers.split(",")):
                for count in map(int, options.count.split(",")):
                    found = measure_new(packages, url, workers, count, repeats)
                    show(f"{wait:.0f} ms, {workers} at once, {count}", found, count)
    for package, number in requests_of_more_samples(packages).items():
        print(f"{package}: {number} requests for 4 samples of 2 paraphrases when 3 are cached")


if __name__ == "__main__":
    main()
