"""Cases of the fault bench: one wrong input and its command, and the valid inputs they change."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import searches  # noqa: E402
import tiny  # noqa: E402


@dataclass
class Case:
    """One wrong input and the command that meets it.

    Attributes:
        group, name: Its group and name.
        words: Arguments of `python`, `-m swarm.search ...`; "{here}" is the folder of the case.
        prepare: Writes the wrong input into the case's folder.
        judge: Returns the error of a run that ended with exit code 0, given the folder, standard
            output and standard error; empty if there is none.
        hook: Runs in the case's process before the command.
    """

    group: str
    name: str
    words: list[str]
    prepare: Callable[[Path], None] = lambda here: None
    judge: Callable[[Path, str, str], str] = lambda here, out, err: unwarned(err)
    hook: Callable[[], None] = lambda: None


@dataclass
class Outcome:
    """Outcome of a case: "ok", "traceback", "hang" or "silent", and its output."""

    case: Case
    kind: str
    why: str
    seconds: float
    code: int | None = None
    err: str = ""


@dataclass
class Lab:
    """The valid inputs that cases change.

    Attributes:
        home: Folder of all files.
        base, pool, data: A tiny model, four experts of it, and a data file.
    """

    home: Path
    base: Path = field(init=False)
    pool: Path = field(init=False)
    data: Path = field(init=False)

    def __post_init__(self) -> None:
        self.base = tiny.model(self.home / "tiny-llama")
        self.pool = tiny.pool(self.base, self.home / "pool")
        self.data = searches.choice_file(self.home / "tiny.json", dev=4, test=4)

    def search(self, *more: str, **paths: Any) -> list[str]:
        """Return the command of a search of two rounds; `more` overrides its arguments."""
        keys = {
            "name": "run",
            "folder": "{here}/search",
            "model": "local",
            "model.path": paths.get("base", self.base),
            "pool.folder": paths.get("pool", self.pool),
            "task": "mmlu",
            "task.file": paths.get("data", self.data),
            "task.scoring": "logits",
            "pool.space": "factor",
            "pool.groups": "global",
            "optimizer.max_iterations": 1,
            "ensemble": 0,
            "noise_floor": "false",
            "minutes": "null",  # the record of a search with a limit has durations
            "baselines": "[]",
        }
        given = {word.lstrip("~+").partition("=")[0] for word in more}
        chosen = [w.partition("=")[2] for w in more if w.startswith("optimizer=")]
        if not chosen or chosen[0] == "pso":
            keys |= {"optimizer.soups": 0, "optimizer.active": "null", "optimizer.descent": "null"}
        gone = [word[1:].partition("=")[0] for word in more if word.startswith("~")]
        words = [
            f"{key}={value}"
            for key, value in keys.items()
            if key not in given
            and not any(key == one or key.startswith(f"{one}.") for one in gone)
            and not any(one.startswith(f"{key}.") for one in given if key == "optimizer.descent")
        ]
        return ["-m", "swarm.search", *words, *more]


def unwarned(err: str) -> str:
    """Return an error if a wrong input was accepted without a warning; else an empty string."""
    return "" if "WARNING" in err else "accepted without a warning"
