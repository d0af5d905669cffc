"""Kill a search before chosen writes, then let it end: kill_search.py [--few] FOLDER ARGUMENTS...

What is on disk changes with the writes alone, so a kill between two of them is a kill before the
second. Imports and the composing of the configuration are done once here; every attempt is a fork,
so that a kill costs no start-up. Prints how many rounds the state held at each kill.
"""

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from swarm._util.files import conf_folder
from swarm.runs.folder import read_state
from swarm.search import build_run

POINTS = (
    (0, "replace config.json"),
    (0, "replace answers/"),
    (1, "replace utility_scratchpad.json"),
    (1, "append rounds.jsonl"),
    (1, "replace particle_1/personal_best"),
    (3, "append rounds.jsonl"),  # the answers are there, the record lacks the round
    (3, "replace run.json"),  # the search is over
    (3, "replace answers/test_"),
    (3, "replace ensemble.yaml"),
)
"""Where to kill, one after the other: the rounds in the state at least, and the next such write."""

FEW = (POINTS[2], POINTS[3], POINTS[5])
"""For what is kept in the state alone, such as an optimizer's."""


def rounds(folder: Path) -> int:
    """Rounds in the state, which is whole whenever it is there."""
    return len((read_state(folder) or {"rounds": []})["rounds"])


def die_before(folder: Path, least: int, wanted: str) -> None:
    """Have this process killed before the first write `wanted` with `least` rounds in the state."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            kind, path = "replace", str(arguments[1])
        elif event == "open" and arguments[1] == "a":
            kind, path = "append", str(arguments[0])
        else:
            return
        write = f"{kind} {path.removeprefix(str(folder) + os.sep)}"
        if write.startswith(wanted) and rounds(folder) >= least:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def attempt(search: DictConfig, *point: Any) -> int:
    """The exit status of a search in a child that dies at `point`, if there is one."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        run, config = build_run(search)
        if point:
            die_before(*point)
        run.search(config)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def lab(folder: Path, search: DictConfig, points: tuple[tuple[int, str], ...]) -> list[int]:
    """Kill the search at each point that it comes to, then let it end."""
    seen = []
    for point in points:
        status = attempt(search, folder, *point)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the search ended with status {status} before {point}")
        seen.append(rounds(folder))
    if status := attempt(search):
        raise SystemExit(f"the search failed with status {status}")
    return seen


if __name__ == "__main__":
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import swarm.engine.decode
    import swarm.engine.lora
    import swarm.loop.run  # noqa: F401

    torch.set_num_threads(1)
    words = sys.argv[1:]
    points = FEW if words[0] == "--few" else POINTS
    folder, *arguments = words[words[0] == "--few" :]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        asked = compose("search", overrides=arguments)
    gc.freeze()
    print(json.dumps(lab(Path(folder), asked, points)))
