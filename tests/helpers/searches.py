"""Real searches on the tiny model, as a user would start them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands

from swarm._util.files import encode_json
from swarm.runs.folder import RECORD_FILE, read_record

ROOT = commands.ROOT
HELPERS = Path(__file__).parent
LETTERS = "ABCDE"
PLAIN = {"optimizer.soups": 0, "optimizer.active": "null", "optimizer.descent": "null"}
"""The swarm of the paper."""


def choice_file(path: Path, dev: int = 12, test: int = 16) -> Path:
    """A multiple-choice file whose right letters go round; a random model is right now and then."""

    def item(number: int) -> dict[str, Any]:
        return {
            "question": f"which of the answers is right, number {number * 7 % 31}",
            "choices": {letter: f"{letter.lower()} {number}" for letter in LETTERS},
            "answer": LETTERS[number * 3 % 5],
            "id": number,
        }

    splits = {
        "dev": [item(i) for i in range(dev)],
        "test": [item(i) for i in range(100, 100 + test)],
    }
    path.write_text(json.dumps({"dataset": "tiny", **splits}))
    return path


def arguments(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    """The command line of a small search in `folder`; `more` are dotted keys with __ for dots.

    In the paper's space and, with the swarm, without its gradient term: quick, and nine numbers
    for a position of nine experts.
    """
    task = folder / "tiny.json"
    if not task.exists():
        choice_file(task)
    keys = {
        "name": name,
        "folder": folder / "search",
        "model": "local",
        "model.path": base,
        "pool.folder": pool,
        "task": "mmlu",
        "task.file": task,
        "task.scoring": "logits",
        "pool.space": "factor",
        "pool.groups": "global",
        "pool.routes": 1,
        **(PLAIN if more.get("optimizer", "pso") == "pso" and "experiment" not in more else {}),
        "optimizer.particles": 6,
        "optimizer.max_iterations": 4,
        "ensemble": 3,
        "minutes": "null",
        "baselines": "[]",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in keys.items()]


def several(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    """As `arguments`, of two objectives: how well two different texts are foreseen."""
    keys: dict[str, Any] = {"task": "mixture", "ensemble": 0}
    for part, text, items in (("A", "LICENSE", 4), ("B", "data/contrary.json", 5)):
        keys |= {
            f"+task@task.tasks.{part}": "perplexity",
            f"task.tasks.{part}.file": ROOT / text,
            f"task.tasks.{part}.window": 120,
            f"task.tasks.{part}.context": 60,
            f"task.tasks.{part}.dev_limit": items,
            f"task.tasks.{part}.test_limit": items + 2,
        }
    plain = arguments(folder, base, pool, name, **more)
    mine = [word for word in plain if not word.startswith(("task", "ensemble"))]
    return [*mine, *(f"{key}={value}" for key, value in keys.items())]


def mutating(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    """As `arguments`, of the default swarm on a black box with reference texts."""
    items = [
        {"id": n, "prompt": f"number {n}?", "words": ["a", "e"], "reference": f"the answer is {n}"}
        for n in range(7)
    ]
    file = folder / "texts.json"
    file.write_text(json.dumps({"dev": items[:6], "test": items[6:]}))
    keys = {
        "optimizer": "pso",
        "optimizer__soups": 1,
        "optimizer__active": "auto",
        "optimizer__descent": "{_target_: swarm.optimizers.gradient.Descent, steps: 3, batch: 2}",
        "optimizer__max_iterations": 3,
        "pool__space": "delta",
        "pool__groups": "auto",
        "ensemble": 0,
        "test": "false",
        **more,
    }
    words = [word for word in arguments(folder, base, pool, name, **keys) if word[:4] != "task"]
    task = ["task=function", "task.function=examples.own_tasks.stories.score", f"task.file={file}"]
    return [*words, *task, "task.max_new_tokens=4"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell, without a network for models."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(command: list[str], **more: Any) -> "subprocess.Popen[str]":
    """Begin `python -m swarm.search` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "swarm.search", *command],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a search to its end in this process."""
    done = commands.run("swarm.search", *command)
    return subprocess.CompletedProcess(command, done.code, done.out, done.err)


def run_process(command: list[str], timeout: float = 120) -> "subprocess.CompletedProcess[str]":
    """Run `python -m swarm.search` to its end, as a user does."""
    process = start(command)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_killed(command: list[str], folder: Path, few: bool = False) -> list[int]:
    """Run the search of `folder` to its end, killed before chosen writes (kill_search.py).

    Returns: The rounds in the state at each kill.
    """
    lab = [sys.executable, str(HELPERS / "kill_search.py"), *["--few"] * few, str(folder)]
    done = subprocess.run(
        [*lab, *command], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    kills: list[int] = json.loads(done.stdout.splitlines()[-1])
    return kills


def differences(first: Path, second: Path) -> list[str]:
    """The files of two run folders of the same search that differ or that one of them lacks."""
    one, other = tree(first), tree(second)
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def tree(folder: Path, *leave_out: str) -> dict[str, bytes]:
    """Every file of a run folder that has to be the same for the same search.

    Of the record the state: a repair adds lines, and checksums of files with the run's name differ.
    """
    named = ("log.txt", "config.json", "command.json", "run.json", "report.html")
    own = (*named, RECORD_FILE, *leave_out)
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in own
    }
    if (folder / RECORD_FILE).is_file() and RECORD_FILE not in leave_out:
        found[RECORD_FILE] = encode_json(read_record(folder).state)
    return found


def answers(folder: Path, number: int) -> dict[str, Any]:
    """What the particles of a run folder answered in an iteration."""
    path = folder / "answers" / f"iteration_{number:04d}.json.gz"
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found
