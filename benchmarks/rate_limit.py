"""Requests to an endpoint with a rate limit or faults: answers, seconds, and refused responses.

    python benchmarks/rate_limit.py [--count 400] [--rate 15] [--repeats 1] [--llmcomp PYTHON]

The endpoint, a process of its own on the loopback, accepts `--rate` requests a second (a token
bucket that holds a second's) and answers the others with 429: without Retry-After, with its
seconds, or with a date. The ideal is `--count` divided by `--rate`; what the full bucket holds at
first may come before it. The endpoint "faults" has no limit: by a hash of a seed and the request's
number it answers 15 % with 500, 10 % with 429 and Retry-After: 1, cuts 10 % in the middle of the
body, and answers the others after 20 ms.

"compare" is a question with so many samples and default workers; "models" are as many requests to
`OpenAI.generate_each`, the path of judges, mixtures and consortia. PYTHON is that of an environment
with llmcomp, which is asked the same question, in turn with the others;
"ratio" is its seconds divided by theirs.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timing import machine

ROOT = Path(__file__).resolve().parent.parent

FORMS = {"no Retry-After": "", "Retry-After: 1": "1", "Retry-After: DATE": "date", "faults": None}

QUESTION = """
import json, sys, time
from {package} import Config, Question
url, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
Config.cache_dir = cache
Config.url_key_pairs = [(url, "no-key", "OPENAI_API_KEY")]

def ask(name, count):
    question = Question.create(type="free_form", name=name, samples_per_paraphrase=count,
                               paraphrases=["Say something."])
    return question.df({{"group": ["small"]}})

ask("first", 1)  # finds the endpoint, loads the code and makes a frame
began = time.perf_counter()
frame = ask("asked", count)
came = sum(isinstance(one, str) and one.startswith("so: ") for one in frame["answer"])
print(json.dumps([came, time.perf_counter() - began]))
"""

MODELS = """
import json, sys, time
from swarm.models import Completion, Request
from swarm.models.openai import OpenAI
url, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = OpenAI("small", url, None, temperature=1.0)
model.generate_each([Request("First.")])
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


async def serve_faults(seed: int) -> None:
    """Serve until a line is read; print the URL first and the number of faults last."""
    from aiohttp import web

    received, faults = 0, 0
    choice = {"message": {"role": "assistant", "content": "so: yes"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "small"}
    answer |= {"choices": [{"index": 0, **choice}], "usage": usage}

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal received, faults
        await request.read()
        drawn = random.Random(f"{seed} {received}").random()
        received, faults = received + 1, faults + (drawn < 0.35)
        if drawn < 0.15:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if drawn < 0.25:
            error = {"error": {"message": "slow down"}}
            return web.json_response(error, status=429, headers={"Retry-After": "1"})
        if drawn < 0.35:
            body = json.dumps(answer).encode()
            cut = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await cut.prepare(request)
            await cut.write(body[: len(body) // 2])
            assert request.transport
            request.transport.close()
            return cut
        await asyncio.sleep(0.02)
        return web.json_response(answer)

    application = web.Application()
    application.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(faults, flush=True)
    await runner.cleanup()


@contextmanager
def serving(*command: str) -> Iterator[tuple[str, list[int]]]:
    """The URL of an endpoint, and a list that gets the number of its refusals in the end."""
    refused: list[int] = []
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        yield process.stdout.readline().strip(), refused
    finally:
        process.stdin.write("\n")
        process.stdin.flush()
        refused.append(int(process.stdout.readline()))
        process.wait()


def measure(python: str, script: str, count: int, *server: str) -> tuple[int, float, int]:
    """How many samples were answered, in how many seconds, and how many requests were refused."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as cache:
        environment["MODEL_SWARMS_CACHE"] = cache
        with serving(*server) as (url, refused):
            command = [python, "-W", "ignore", "-c", script, url, cache, str(count)]
            began = time.perf_counter()
            done = subprocess.run(
                command, env=environment, text=True, capture_output=True, cwd=cache
            )
            if done.returncode:
                raise SystemExit(f"{time.perf_counter() - began:.0f} s: {done.stderr}")
    came, taken = json.loads(done.stdout.strip().splitlines()[-1])
    return came, taken, refused[0]


def spread(values: list[Any], format: str) -> str:
    """Return the median, and the range if there are several values."""
    middle, low, high = statistics.median(values), min(values), max(values)
    wide = f" [{low:{format}}, {high:{format}}]" if len(values) > 1 else ""
    return f"{middle:{format}}{wide}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400, help="samples")
    parser.add_argument("--rate", type=float, default=15.0, help="accepted requests per second")
    parser.add_argument("--repeats", type=int, default=1, help="measurements, each with its seed")
    parser.add_argument("--forms", default=",".join(FORMS), help="endpoints (%(default)s)")
    parser.add_argument("--llmcomp", help="the python of an environment with llmcomp")
    parser.add_argument("--serve-faults", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_faults is not None:
        return asyncio.run(serve_faults(options.serve_faults))
    rows = {
        "compare": (sys.executable, QUESTION.format(package="swarm.compare")),
        "models": (sys.executable, MODELS),
    }
    if options.llmcomp:
        rows["llmcomp"] = (options.llmcomp, QUESTION.format(package="llmcomp"))
    print(machine())
    print(
        f"{options.count} samples, {options.rate:g} requests/s accepted; ideal "
        f"{options.count / options.rate:.1f} s; median [range] of {options.repeats}"
    )
    print("| | endpoint | answered | seconds | refused | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    helpers = str(ROOT / "tests" / "helpers")
    for form in options.forms.split(","):
        after = FORMS[form]
        found: dict[str, list[tuple[int, float, int]]] = {name: [] for name in rows}
        for seed in range(options.repeats):
            server = (
                [__file__, "--serve-faults", str(seed)]
                if after is None
                else ["-c", SERVER.format(helpers=helpers, rate=options.rate, after=after)]
            )
            for name, (python, script) in rows.items():
                found[name].append(measure(python, script, options.count, *server))
        for name, taken in found.items():
            came, seconds, refused = map(list, zip(*taken, strict=True))
            pairs = zip(found.get("llmcomp", []), seconds, strict=False)
            ratios = [theirs[1] / mine for theirs, mine in pairs]
            cells = [spread(came, "g"), spread(seconds, ".1f"), spread(refused, "g")]
            cells.append(spread(ratios, ".2f") if ratios else "")
            print(f"| {name} | {form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
