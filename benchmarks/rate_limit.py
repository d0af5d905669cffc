"""Requests to an endpoint with a rate limit: answers, seconds, and responses with status 429.

    python benchmarks/rate_limit.py [--count 400] [--rate 15] [--llmcomp PYTHON]

The endpoint, a process of its own on the loopback, accepts `--rate` requests a second (a token
bucket that holds a second's) and answers the others with 429: without Retry-After, with its
seconds, or with a date. The ideal is `--count` divided by `--rate`; what the full bucket holds at
first may come before it. "compare" is a question with so many samples and default workers;
"models" are as many requests to `OpenAI.generate_each`, the path of judges, mixtures and consortia.
PYTHON is that of an environment with llmcomp, which is asked the same question.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from timing import machine

ROOT = Path(__file__).resolve().parent.parent

FORMS = {"no Retry-After": "", "Retry-After: 1": "1", "Retry-After: DATE": "date"}

QUESTION = """
import json, sys, time
from {package} import Config, Question
url, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
Config.cache_dir = cache
Config.url_key_pairs = [(url, "no-key", "OPENAI_API_KEY")]
question = Question.create(type="free_form", name="limited", samples_per_paraphrase=count,
                           paraphrases=["Say something."])
began = time.perf_counter()
frame = question.df({{"group": ["small"]}})
came = sum(isinstance(one, str) and one.startswith("so: ") for one in frame["answer"])
print(json.dumps([came, time.perf_counter() - began]))
"""

MODELS = """
import json, sys, time
from swarm.models import Completion, Request
from swarm.models.openai import OpenAI
url, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = OpenAI("small", url, None, temperature=1.0)
began = time.perf_counter()
said = model.generate_each([Request("Say something.")] * count)
came = sum(isinstance(one, Completion) and one.text.startswith("so: ") for one in said)
print(json.dumps([came, time.perf_counter() - began]))
"""

SERVER = """
import sys, threading
sys.path.insert(0, {helpers!r})
import endpoints
limited = endpoints.Rationed({rate}, {after!r} or None, lambda asked: endpoints.chat("so: yes"))
with endpoints.endpoint(limited) as server:
    print(server.url, flush=True)
    sys.stdin.readline()
    print(limited.refused, flush=True)
"""


@contextmanager
def limited(rate: float, after: str) -> Iterator[tuple[str, list[int]]]:
    """The URL of an endpoint, and a list that gets the number of its refusals in the end."""
    code = SERVER.format(helpers=str(ROOT / "tests" / "helpers"), rate=rate, after=after)
    refused: list[int] = []
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        yield process.stdout.readline().strip(), refused
    finally:
        process.stdin.write("\n")
        process.stdin.flush()
        refused.append(int(process.stdout.readline()))
        process.wait()


def measure(
    python: str, script: str, count: int, rate: float, after: str
) -> tuple[int, float, int]:
    """How many samples were answered, in how many seconds, and how many requests were refused."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as cache:
        environment["MODEL_SWARMS_CACHE"] = cache
        with limited(rate, after) as (url, refused):
            command = [python, "-W", "ignore", "-c", script, url, cache, str(count)]
            began = time.perf_counter()
            done = subprocess.run(
                command, env=environment, text=True, capture_output=True, cwd=cache
            )
            if done.returncode:
                raise SystemExit(f"{time.perf_counter() - began:.0f} s: {done.stderr}")
    came, taken = json.loads(done.stdout.strip().splitlines()[-1])
    return came, taken, refused[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400, help="samples")
    parser.add_argument("--rate", type=float, default=15.0, help="accepted requests per second")
    parser.add_argument("--llmcomp", help="the python of an environment with llmcomp")
    options = parser.parse_args()
    rows = {
        "compare": (sys.executable, QUESTION.format(package="swarm.compare")),
        "models": (sys.executable, MODELS),
    }
    if options.llmcomp:
        rows["llmcomp"] = (options.llmcomp, QUESTION.format(package="llmcomp"))
    print(machine())
    print(
        f"{options.count} samples at {options.rate:g} requests/s; ideal "
        f"{options.count / options.rate:.1f} s"
    )
    print("| | endpoint | answered | seconds | 429s |\n| --- | --- | --- | --- | --- |")
    for form, after in FORMS.items():
        for name, (python, script) in rows.items():
            came, taken, refused = measure(python, script, options.count, options.rate, after)
            print(f"| {name} | {form} | {came} | {taken:.1f} | {refused} |", flush=True)


if __name__ == "__main__":
    main()
