"""Kills a search at random moments until it ends by itself: kill_search.py FOLDER ARGUMENTS...

Imports and the composing of the configuration are done once here; every attempt is a fork, so that
a kill costs no start-up.
Prints how many rounds the state held at each kill.
"""

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from swarm._util.files import conf_folder
from swarm.runs.manifest import read_state
from swarm.search import build_run

KILLS = 12


def rounds(folder: Path) -> int:
    """Rounds in the state, which is whole whenever it is there."""
    return len((read_state(folder) or {"rounds": []})["rounds"])


def attempt(search: DictConfig) -> int:
    """Start the search in a child; gives its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        run, config = build_run(search)
        run.search(config)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int, seconds: float) -> int | None:
    """The exit status of a child, or `None` if it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    return None


def lab(folder: Path, search: DictConfig) -> list[int]:
    """Kill the search KILLS times at random moments, then let it end."""
    moments, seen = random.Random(5), []
    for _ in range(KILLS):
        child, wanted = attempt(search), rounds(folder) + moments.choice((0, 1, 1))
        deadline = time.monotonic() + 60
        while rounds(folder) < wanted and time.monotonic() < deadline:
            if (status := wait(child, 0.005)) is not None:
                return finish(status, seen)
        # Somewhere in the writing of this round, or in the work on the next.
        if (status := wait(child, moments.uniform(0, 0.06))) is not None:
            return finish(status, seen)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append(rounds(folder))
    _, status = os.waitpid(attempt(search), 0)
    return finish(status, seen)


def finish(status: int, seen: list[int]) -> list[int]:
    """The search ended by itself: that has to be well."""
    if status:
        raise SystemExit(f"the search failed with status {status}")
    return seen


if __name__ == "__main__":
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import swarm.engine.batched_lora
    import swarm.engine.decode
    import swarm.loop.run  # noqa: F401

    torch.set_num_threads(1)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        asked = compose("search", overrides=sys.argv[2:])
    gc.freeze()
    print(json.dumps(lab(Path(sys.argv[1]), asked)))
