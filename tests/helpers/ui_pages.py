"""The page of `python -m swarm.ui`, as a user would open it, for the tests of its parts."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import endpoints
import fake_models
import run_folders
import tiny
from headless_browser import SIZES, shown
from run_folders import write_state
from searches import choice_file, environment

from swarm.pool.pool import Pool
from swarm.runs.verdict import Compared, Verdict
from swarm.tasks.metrics import Measured

BEST = [0.61, -0.2345678, 0.4, 0.2245678]
"""A position as a search finds them: with digits that no slider has."""

HOSTILE = "<img src=x onerror=alert(1)> **bold** <script>alert(2)</script>"

HOSTILE_NAME = "a<script>alert(1)<"


class Page(str):
    """The address of the page; what opens it as a user does takes its `token`."""

    token: str | None = None


@contextmanager
def served(folder: Path, *options: str, **more: str) -> Iterator[Page]:
    """The address of the page, started in a folder; it has to end well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.ui", "--port", "0", "--no-browser", *options],
        cwd=folder,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    line = process.stdout.readline()
    try:
        assert line.startswith("serving the page at http://127.0.0.1:"), (line, said)
        found, _, token = line.split()[4].partition("?token=")
        page = Page(found)
        page.token = token or None
        yield page
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(120)
        reader.join(60)
    assert (code, "".join(said).strip()) == (130, "stopped"), (code, said)


@contextmanager
def window(browser: Any, url: str, size: str = "desk", scheme: str = "light") -> Iterator[Any]:
    """As `headless_browser.shown`, with the patience that a process that starts wants."""
    with shown(browser, url, size, scheme) as page:
        page.set_default_timeout(60_000)
        yield page


def fits(page: Any, size: str) -> None:
    """Nothing sticks out of a page to the right."""
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= SIZES[size]["width"], page.url


def answer(asked: endpoints.Asked) -> endpoints.Reply:
    """The rule of the fake models, streamed where that is asked for; "slow" never ends."""
    turns = [(m["role"], m["content"]) for m in asked.body["messages"]]
    if not asked.body.get("stream"):
        if turns[-1][1] == "slow":
            return endpoints.Reply(endpoints.chat("late").body, wait=10.0)
        return fake_models.answer(asked)
    if turns[-1][1] == "slow":
        pieces: list[bytes | float] = [endpoints.piece("begun ")]
        for _ in range(99):
            pieces.extend((0.2, endpoints.piece(".")))
        return endpoints.Reply(pieces=pieces)
    return endpoints.streamed(*re.findall(r"(?s).{1,9}", fake_models.rule(turns)))


def runs(home: Path, base: Path, pool: Path) -> None:
    """Runs: two of one task that differ in a setting, another, one full of HTML, one by hand."""
    choice_file(home / "tiny.json")
    for seed, name in ((42, "real_1"), (43, "real_2")):
        run = run_folders.folder(home / "search" / name)
        task = {
            "_target_": "swarm.tasks.multiple_choice.MultipleChoice",
            "name": "made",
            "file": "tiny.json",
        }
        (run / "config.json").write_text(json.dumps({"seed": seed, "task": task}))
    run_folders.folder(home / "search" / "made", particles=20, iterations=9, experts=10, test=50)
    hostile = home / "search" / HOSTILE_NAME
    run_folders.folder(hostile, finished=False, text=run_folders.HOSTILE)
    (hostile / "log.txt").write_text("<img src=x onerror=alert(1)>\n")
    run_folders.folder(home / "search" / "sweep" / "trial_00")
    shutil.rmtree(run_folders.folder(home / "search" / "broken", finished=False) / "answers")
    run_folder(home / "search" / "first", base, pool)


def run_folder(folder: Path, base: Path, pool: Path) -> None:
    """What a finished search without chat template leaves whose best is `BEST`."""
    note = {"prompt_form": "plain"}
    Pool(pool, space="delta").open().save(BEST, folder / "global_best", note)
    rounds = [{"positions": [BEST], "utilities": [0.5]}]
    dev = Measured(0.5, 0.25, 0.75, 12)
    best = Compared("found", "best found", dev, position=BEST)
    start = Compared("expert", f"best expert ({tiny.NAMES[0]})", dev)
    verdict = Verdict(best, tiny.NAMES[0], [start])
    state = {
        "experts": list(tiny.NAMES),
        "own": len(tiny.NAMES),
        "groups": ["all"],
        "optimizer": {},
        "rounds": rounds,
        "finished": "done",
        "verdict": verdict.to_dict(),
        "identity": {},
    }
    write_state(folder, state)
    settings = {"model": {"path": str(base)}, "pool": {"folder": str(pool)}}
    (folder / "config.json").write_text(json.dumps(settings))


def fill(home: Path, base: Path, pool: Path, endpoint: endpoints.Endpoint) -> None:
    """Fill the folder where the page is started."""
    runs(home, base, pool)
    (home / "two.yaml").write_text(
        "proposers: [fake/one, local/amber]\naggregator: fake/two\nquorum: 0\n"
    )
    (home / "jury.yaml").write_text("members: [fake/one, {model: fake/one}]\nstrategy: vote\n")
    own = {
        "fake": {"base_url": endpoint.url, "api_key_env": "FAKE_KEY"},
        "keyless": {"base_url": endpoint.url, "api_key_env": "NO_SUCH_KEY"},
        "down": {"base_url": "http://127.0.0.1:9/v1", "limits": {"retries": 0}},
    }
    (home / "providers.yaml").write_text(json.dumps(own))


def settings(home: Path) -> dict[str, str]:
    """The environment of the page in such a folder."""
    return {
        "MODEL_SWARMS_PROVIDERS": str(home / "providers.yaml"),
        "FAKE_KEY": fake_models.KEY,
        "MODEL_SWARMS_CACHE": str(home / "cache"),
        "LLM_USER_PATH": str(home / "llm"),
        "OPENAI_API_KEY": "",
        "OPENAI_BASE_URL": "",
        "TOGETHER_API_KEY": "",
    }
