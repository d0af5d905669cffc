"""Experiments on a loopback endpoint beside those of llmcomp: the same script, another import line.

    python benchmarks/compare.py --llmcomp PYTHON [--count 3000] [--repeats 3]

PYTHON is that of an environment with llmcomp (pip install llmcomp; it brings 6 GB, and for what is
measured here this does: pip install --no-deps llmcomp && pip install backoff filelock matplotlib
openai pandas pyyaml tqdm). Each measurement is a process of its own, those of both packages in
turn; the endpoint is another process. Seconds are those of `Question.df` alone, imports left out;
CPU seconds are the experiment's process's.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
    # The endpoint is known, the code is loaded, a frame was made.
    ask(3, 1, "first")
print(json.dumps([ask(samples, given["paraphrases"], "asked") for samples in given["samples"]]))
"""

IMPORT = """
import time
wall = time.perf_counter()
from {package} import Config, ModelAdapter, Question
print(time.perf_counter() - wall)
"""


class Counting(Chat):
    """Says how many requests came, where it is asked for that."""

    came = 0

    def said(self, prompt: bytes) -> bytes:
        """The answer to a prompt."""
        if prompt != HOW_MANY:
            Counting.came += 1
            return super().said(prompt)
        return super().said(b"%d" % Counting.came)


def came(url: str) -> int:
    """The requests that an endpoint has had."""
    from swarm.models.base import Request
    from swarm.models.openai import OpenAI

    [answer] = OpenAI("small", url, None).generate([Request(HOW_MANY.decode())])
    return int(answer.text.removeprefix("so: "))


class Packages:
    """Ours and llmcomp, each with its Python."""

    def __init__(self, llmcomp: str) -> None:
        self.pythons = {"swarm.compare": sys.executable, "llmcomp": llmcomp}

    def run(self, package: str, script: str, **given: object) -> object:
        """What a script prints in a process of its own."""
        command = [self.pythons[package], "-W", "ignore", "-c", script.format(package=package)]
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


def show(what: str, found: dict[str, list[list[float]]], count: int) -> None:
    """A row: the median of each package, its range, and how many times it is ours."""
    cells, middle = [], {}
    for package, taken in found.items():
        walls = sorted(wall for wall, _ in taken)
        middle[package] = statistics.median(walls)
        least, most = (f"{count / wall:,.0f}" for wall in (walls[-1], walls[0]))
        rates = f"{count / middle[package]:,.0f}/s ({least} to {most})"
        cpu = statistics.median(cpu for _, cpu in taken)
        cells.append(f"{middle[package]:.3g} s, {cpu:.3g} CPU s, {rates}")
    ratio = middle["llmcomp"] / middle["swarm.compare"]
    print(f"| {what} | {' | '.join(cells)} | {ratio:.1f} |", flush=True)


def asked(packages: Packages, url: str, workers: int, count: int, repeats: int) -> dict[str, list]:
    """Seconds of so many new answers, in turn."""
    found: dict[str, list] = {package: [] for package in packages.pythons}
    for _ in range(repeats):
        for package, taken in found.items():
            with tempfile.TemporaryDirectory() as cache:
                taken += packages.run(
                    package,
                    SCRIPT,
                    url=url,
                    cache=cache,
                    workers=workers,
                    paraphrases=1,
                    samples=[count],
                    first=True,
                )
    return found


def kept(packages: Packages, count: int, repeats: int) -> dict[str, list]:
    """Seconds of so many answers that are kept, in turn; each after a first look in its process."""
    found: dict[str, list] = {package: [] for package in packages.pythons}
    with endpoint(0.0, __file__) as url, tempfile.TemporaryDirectory() as cache:
        given = {"url": url, "workers": 100, "paraphrases": 10, "samples": [count // 10] * 2}
        for package in found:
            packages.run(package, SCRIPT, cache=f"{cache}/{package}", **given)
        for _ in range(repeats):
            for package, taken in found.items():
                again = packages.run(package, SCRIPT, cache=f"{cache}/{package}", **given)
                taken.append(again[-1])
    return found


def raised(packages: Packages) -> dict[str, int]:
    """Requests that 4 samples of 2 paraphrases cost where 3 are kept."""
    found = {}
    for package in packages.pythons:
        with endpoint(0.0, __file__) as url, tempfile.TemporaryDirectory() as cache:
            given = {"url": url, "cache": cache, "workers": 100, "paraphrases": 2}
            packages.run(package, SCRIPT, samples=[3], **given)
            before = came(url)
            packages.run(package, SCRIPT, samples=[3], **given)
            # What a process asks before it asks anything is not counted.
            start, before = came(url) - before, came(url)
            packages.run(package, SCRIPT, samples=[4], **given)
            found[package] = came(url) - before - start
    return found


def imported(packages: Packages, repeats: int) -> dict[str, list]:
    """Seconds of the import, in turn, each after one that compiled."""
    found: dict[str, list] = {package: [] for package in packages.pythons}
    for number in range(repeats + 1):
        for package, taken in found.items():
            wall = float(str(packages.run(package, IMPORT)))
            taken += [[wall, wall]] if number else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llmcomp", help="the python of an environment with llmcomp")
    parser.add_argument("--count", type=int, default=3000, help="new answers per repetition")
    parser.add_argument("--kept", type=int, default=10_000, help="number of cached answers read")
    parser.add_argument("--workers", default="100,400", help="concurrency")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return asyncio.run(serve(options.serve, Counting))
    if not options.llmcomp:
        parser.error("--llmcomp PYTHON is missing: the python of an environment with llmcomp")
    packages, repeats = Packages(options.llmcomp), options.repeats
    print(machine())
    print("| | swarm.compare | llmcomp | times |\n| --- | --- | --- | --- |")
    show("import", imported(packages, repeats), 1)
    print(
        "| 3 to 4 samples of 2 paraphrases | {} requests | {} requests | |".format(
            *raised(packages).values()
        )
    )
    show(f"{options.kept} kept answers", kept(packages, options.kept, repeats), options.kept)
    for wait in (0.0, 0.1):
        with endpoint(wait, __file__) as url:
            for workers in map(int, options.workers.split(",")):
                found = asked(packages, url, workers, options.count, repeats)
                show(f"{1000 * wait:.0f} ms, {workers} at once", found, options.count)


if __name__ == "__main__":
    main()
