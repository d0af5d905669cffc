"""Fault bench: bad configurations, adapters and data files, and damaged run folders.

python benchmarks/faults.py [--groups configuration,adapter] [--sample 40] [--jobs 2] [--list]

Every case is wrong by construction and runs the real entry point on a tiny model, in a fork of
this process (which imports torch once) with a time and a memory limit. Counted per group:

    tracebacks  anything but exit code 0, 1 or 2, or an error that is not one line "error: ..."
    hangs       no end within --limit seconds
    silent      exit code 0 without a warning; after a damage also a wrong or unrepaired result

The goal is 0 of each; the exit code is 1 otherwise. `--cold N` repeats N cases in fresh processes.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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
import warm_python  # noqa: E402

from swarm._util.terminal import escape_control_chars  # noqa: E402

MEMORY = 8 << 30
"""Bytes of data that a case may allocate; beyond it Python raises, which counts as a traceback."""

GROUPS = ("configuration", "adapter", "data file", "damage")


@dataclass
class Case:
    """One wrong input and the command that meets it.

    Attributes:
        group, name: What it is called.
        words: Arguments of `python`, `-m swarm.search ...`; "{here}" is the case's own folder.
        prepare: Writes the wrong input into the case's folder.
        judge: Says what is wrong with a run that ended with exit code 0, given the folder,
            standard output and standard error; empty: nothing.
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
    """How a case ended: "ok", "traceback", "hang" or "silent", and what was printed."""

    case: Case
    kind: str
    why: str
    seconds: float
    code: int | None = None
    err: str = ""


@dataclass
class Lab:
    """The sound inputs that cases spoil.

    Attributes:
        home: The folder of everything.
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
        """A search of two rounds; `more` are further words, which win."""
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
            "pool.groups": 1,
            "optimizer.max_iterations": 1,
            "ensemble": 0,
            "noise_floor": "false",
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
    """Why a sound end of a wrong input is a silent one; empty if it was warned of."""
    return "" if "WARNING" in err else "accepted without a warning"


# Configurations ------------------------------------------------------------------------------

HUGE = str(10**23)
SWITCH = ["maybe", "2", "[]", "{a:1}", "'no'", "null", "1.5"]
WHOLE = ["many", "1.5", "true", "[]", "{a:1}", "-1", "nan", "'3'", "''"]
NUMBER = ["much", "nan", "inf", "true", "[]", "{a:1}", "'0.5'", "1e300", "-1e300"]
WORD = ["no_such", "5", "[]", "{a:1}", "true", "' '"]
TEXT = ["5", "[]", "{a:1}", "true", "' '"]
PLACE = ["5", "[]", "{a:1}", "true", "' '", "/nope/nope", "x" * 5000, "/dev/null/x"]
LIST = ["5", "no_such", "{a:1}", "true", "[5]", "[{}]", "[no_such]"]

GPUS = ["5", "x", "[x]", "[-1]", "[1.5]", "[0,0]", "{a:1}", "true", "[99]", "[true]"]

OF_KEY: dict[str, list[str]] = {
    "name": [
        *["''", ".", "..", "a/b", "[]", "{a:1}", "true", "null", "' '", "x" * 5000, "1.5"],
        *['"a\nb"', '"a\tb"', "\x1b[31mred", "\x07bell", "\u202eabc", "\u2066x", '"\u00a0"'],
        *["\u200b", "\x7f", "\x9b31m", "/tmp", "~/x", "'a\rb'", "'\x1b[31mred'", "'\u202eabc'"],
    ],
    "folder": [
        "''",
        "",
        "5",
        "[]",
        "{a:1}",
        "true",
        "null",
        "' '",
        "x" * 5000,
        "{here}/file",
        "{here}/fifo",
        "/dev/null",
        "/proc/x",
        '"a\nb"',
        "\x1b[31mred",
        "\u202ex",
    ],
    "gpus": GPUS,
    "executor.gpus": GPUS,
    "seed": [*WHOLE, "null"],
    "ensemble": [*WHOLE, "null"],
    "front": [*WHOLE, "null"],
    "confirm": [*NUMBER, "1", "-0.1", "null"],
    "choose": [*WORD, "kept", "null"],
    "budget": [*WHOLE, "0", "1"],
    "shared": [
        "''",
        "",
        "5",
        "[]",
        "{a:1}",
        "true",
        "' '",
        "{here}/file",
        "/dev/null",
        "/proc/x",
        "x" * 5000,
        "{here}/fifo",
        '"a\nb"',
        "\x1b[31mred",
    ],
    "baselines": [*LIST, "null", "base", "[base,5]"],
    "job.particles": [*WHOLE, "0"],
    "job.items": [*WHOLE, "0"],
    "job.examples": [*WHOLE, "0"],
    "task.name": ["''", "5", "[]", "{a:1}", "null", "' '"],
    "task.file": [
        *PLACE,
        "{here}/fifo",
        "/dev/zero",
        "/dev/random",
        "/dev/tty",
        "{here}",
        "/proc",
        "{dev:5}",
        "{dev:x}",
        "{test:x}",
        "/proc/self/mem",
        "{here}/socket",
    ],
    "task.dev_limit": [*WHOLE, "0"],
    "task.test_limit": [*WHOLE, "0"],
    "task.dev_seed": WHOLE,
    "task.instruction": ["5", "[]", "{a:1}", "true"],
    "task.template": ["5", "[]", "{a:1}", "true", "'{nope}'", "'{'", "'{0}'", "null"],
    "task.max_new_tokens": [*WHOLE, "0", "null"],
    "task.parser": [*WORD, "null"],
    "task.scoring": [*WORD, "null"],
    "task.signal": [*WORD, "null"],
    "task.ids": [*WORD, "null"],
    "task.too_long": [*WORD, "null"],
    "model.path": [
        *PLACE,
        "null",
        "''",
        "{here}",
        "{here}/file",
        "{here}/fifo",
        "no_such/model",
        "/dev/zero",
    ],
    "model.name": ["5", "[]", "{a:1}", "true"],
    "model.dtype": [*WORD, "float64", "null"],
    "pool.folder": [*PLACE, "null", "''", "{here}", "{here}/file", "{here}/fifo", "/proc"],
    "pool.experts": [*LIST, "[]", "[amber]", "[amber,amber]", "[amber,nope]", "[amber,..]"],
    "pool.space": [*WORD, "null"],
    "pool.export_rank": [*WHOLE, "0", "4"],
    "pool.groups": [*WORD, "0", "-1", "1.5", "null"],
    "pool.noise_rows": [*WHOLE, "null", "99999999999", HUGE, "1000000"],
    "pool.noise_scale": [*NUMBER, "-1", "0", "null"],
    "pool.noise_seed": [*WHOLE, "null"],
    "pool.elites": [*PLACE, "''", "{here}", "{here}/file"],
    "pool.elite_count": [*WHOLE, "0", "null"],
    "pool.recipes": LIST,
    "pool.density": [*NUMBER, "0", "-1", "2", "null"],
    "pool.sparse_rows": [*NUMBER, "0", "-1", "2"],
    "engine.plan": [*WORD, "null"],
    "engine.max_tokens": [*WHOLE, "0"],
    "racing.rule": [*WORD, "null"],
    "racing.chunk": [*WHOLE, "0", "null"],
    "racing.level": [*NUMBER, "0", "1", "-1", "2", "null"],
    "optimizer.particles": [*WHOLE, "0", "1", "2", "1000000", "99999999999", HUGE],
    "optimizer.active": [*WHOLE, "0"],
    "optimizer.soups": [*WHOLE, "6", "null", HUGE],
    "optimizer.start_scales": [*LIST, "[0]", "[-1]", "[nan]", "[1e300]", "[true]"],
    "optimizer.lambdas": ["5", "no_such", "{a:1}", "true", "[{}]", "[no_such]", "[nan]", "[true]"],
    "optimizer.descent": ["5", "x", "[]", "true", "{}"],
    "optimizer.most_dimensions": [*WHOLE, "0", "null"],
    "optimizer.step": [*NUMBER, "0", "-1"],
    "optimizer.rate": [*NUMBER, "0", "-1"],
    "optimizer.restart_patience": [*NUMBER, "0", "-1", "null"],
    "optimizer.batch": [*WHOLE, "0", HUGE],
    "optimizer.samples": [*WHOLE, "0", HUGE],
    "executor.workers": ["many", "1.5", "true", "[]", "{a:1}", "-1", "0", HUGE],
    "executor.threads": ["many", "1.5", "true", "[]", "{a:1}", "-1", "0", HUGE],
}
"""Wrong values of keys; a key that is not here has those of its default's type."""

FREE = {"dry_run", "reward.device", "optimizer.merged", "optimizer.objectives"}
"""Keys whose null default says too little of what is wrong, or that change what a run is."""


def configurations(lab: Lab, draw: random.Random) -> Iterator[Case]:
    """Every key of a search and of each optimizer with wrong values, and wrong command lines."""
    for key, value, words in _values(lab, draw):
        yield Case("configuration", f"{key}={value[:40]!r}", words, _oddities)
    for words in _structures():
        shown = " ".join(words)
        yield Case("configuration", shown[:80], lab.search(*words), _oddities)
    for words in _commands(lab):
        shown = [word[:60] for word in words if word not in SOUND]
        yield Case("configuration", " ".join(shown[1:]), words, _oddities)


def _values(lab: Lab, draw: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    seen: set[str] = set()
    options = {
        "optimizer": sorted(one.stem for one in (ROOT / "conf" / "optimizer").glob("*.yaml")),
        "racing": ["exact", "z"],
        "executor": ["processes"],
        "engine": ["hf"],
    }
    options["optimizer"].sort(key="pso".__ne__)
    for key, default in _leaves(lab, []):
        seen.add(key)
        for value in _wrong(key, default):
            yield key, value, lab.search(f"{key}={value}")
    for group, names in options.items():
        for name in names:
            choice = [f"{group}={name}"]
            for key, default in _leaves(lab, choice):
                if not key.startswith(f"{group}.") or (key in seen and name == "pso"):
                    continue
                wrong = _wrong(key, default)
                # Keys that options share are checked by shared code; two values show it.
                some = wrong if key not in seen else draw.sample(wrong, min(2, len(wrong)))
                seen.add(key)
                for value in some:
                    words = lab.search(*choice, f"{key}={value}")
                    yield f"{group}={name} {key}", value, words


def _leaves(lab: Lab, more: list[str]) -> list[tuple[str, Any]]:
    """Every dotted key of a composed search, with its default."""
    import hydra
    from omegaconf import OmegaConf

    from swarm._util.files import conf_folder

    words = [w.replace("{here}", "/tmp") for w in lab.search(*more)[2:] if "descent=" not in w]
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        tree = OmegaConf.to_container(hydra.compose("search", overrides=["task=mmlu", *words]))
    found: list[tuple[str, Any]] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                if name != "_target_":
                    walk(inner, f"{path}.{name}" if path else str(name))
        elif path not in FREE:
            found.append((path, value))

    walk(tree, "")
    return found


def _wrong(key: str, default: Any) -> list[str]:
    if key in OF_KEY:
        return OF_KEY[key]
    for kind, values in ((bool, SWITCH), (int, WHOLE), (float, NUMBER), (list, LIST), (str, WORD)):
        if isinstance(default, kind):
            return values
    return []


SOUND = ("task=mmlu", "task.scoring=logits", "model=local", "name=tuned", "steps=2")
"""Words of the other entries that are not the point of a case."""

GROUP_NAMES = ("task", "pool", "model", "optimizer", "engine", "executor", "racing", "tracker")


def _structures() -> Iterator[list[str]]:
    """Command lines whose shape is wrong, of an otherwise sound search."""
    for group in GROUP_NAMES:
        if group != "racing":  # without one, no particle is stopped
            yield [f"~{group}"]
        # Last of all, so that Hydra replaces the whole group by it.
        for value in ("no_such", "5", "[]", "'{a: 1}'", "true", "''"):
            if (group, value) != ("racing", "[]"):
                yield [f"{group}={value}"]
        yield [f"{group}._target_=no.such.Class"]
        yield [f"{group}._target_=swarm._util.files.write_atomic"]
        yield [f"{group}._target_=5"]
        yield [f"{group}.no_such_key=1"]
        yield [f"+{group}.no_such_key=1"]
    for word in (
        *("~job", "job=5", "job=[]", "job=null", "~name", "~job._target_", "no_such=1"),
        *("no_such.key=1", "+no_such=1", "=", "=1", "seed=", "seed", "[", "{", "seed=[", "a b"),
        *("seed={", "seed=1,2", "task=mmlu,gsm8k", "name=${nope}", "name=${oc.env:NO_SUCH_NAME}"),
        *("name=???", "name=${name}", "seed=${", "folder=${now:", "model.path=???"),
        *("task/sub=x", "task@x=mmlu", "+task=mmlu", "++seed=x", "~seed=5"),
        *("hydra=5", "experiment=no_such", "experiment=5", "scorer=reward"),
        *("--no-such-flag", "--config-dir=/nope", "--config-path=/nope", "--config-name=nope"),
        *("--cfg=nope", "--info=nope", "--resolve", "--package=nope", "-x", "--multirunn"),
        *("--config-dir={here}/file", "--config-dir={here}/fifo"),
        *("choose=kept", "test=1", "test=yes", "noise_floor=0", "dry_run=1", "dry_run=yes"),
        *("optimizer.particles=3", "optimizer.minimum_step_length=0.9", "engine=vllm", "\udce9=1"),
        *("engine=token", "engine=full", "pool=full_models", "pool=models", "name=\udce9"),
        *("optimizer=nsga2", "pool.base_row=maybe", "pool.noise_rows=3.0", "folder=\udce9/x"),
        *("executor.gpus=[7]", "racing=exact racing.chunk=0", "shared=\udcff"),
        "pool.folder=\udce9",
    ):
        yield word.split(" ") if "racing=" in word else [word]
    yield ["--cfg", "job", "--resolve", "--package", "x"]
    yield ["--cfg", "job", "--resolve", "name=${nope}"]
    yield ["-m", "seed=x,y"]
    yield ["-m", "seed=range(3"]
    yield ["--config-dir", "/nope", "experiment=paper"]
    yield ["dry_run=true", "optimizer.particles=1000000"]
    yield ["dry_run=true", "pool.noise_rows=99999999999"]
    yield ["dry_run=true", "optimizer.particles=" + HUGE]
    yield ["dry_run=true", "pool.folder={here}/fifo"]
    yield ["dry_run=true", "task.file={here}/fifo"]
    yield ["confirm=0.5", "choose=kept", "task.dev_limit=1"]
    yield [*(f"optimizer.{one}=0" for one in ("inertia", "cognitive", "social", "repel"))]


def _commands(lab: Lab) -> Iterator[list[str]]:
    """Wrong command lines of the other entries."""
    run = "{here}/nope"
    for words in (
        ["swarm", "no_such"],
        ["swarm", "--completion", "nope"],
        ["swarm.report"],
        ["swarm.report", run],
        ["swarm.report", "{here}/file"],
        ["swarm.report", "{here}/fifo"],
        ["swarm.report", "x" * 5000],
        ["swarm.report", "analyse", run, "--json"],
        ["swarm.report", "page"],
        ["swarm.export", run],
        ["swarm.export", run, "to={here}/out"],
        ["swarm.export", str(lab.pool / "amber"), "to={here}/out", "format=no_such"],
        ["swarm.export", str(lab.pool / "amber"), "to={here}/out", "particle=x"],
        ["swarm.export", str(lab.pool / "amber"), "to={here}/file"],
        ["swarm.export", str(lab.pool / "amber"), "to=" + "x" * 5000],
        ["swarm.export", str(lab.pool / "amber"), "to={here}/out", "private=maybe"],
        ["swarm.export", "x" * 5000, "to={here}/out"],
        ["swarm.export"],
        ["swarm.sweep", "trials=x"],
        ["swarm.sweep", "trials=0"],
        ["swarm.sweep", "space=5"],
        ["swarm.sweep", "no_such=1"],
        ["swarm.compare_methods", "methods=5"],
        ["swarm.compare_methods", "methods=[no_such]"],
        ["swarm.compare_methods", "seeds=0"],
        ["swarm.compare_methods", "budget=x"],
        ["swarm.compare_methods", "suite=no_such"],
        ["swarm.compare_methods", "suite={here}/fifo"],
        ["swarm.serve", "no_such"],
        ["swarm.moa", "--config", "{here}/fifo", "x"],
        ["swarm.moa", "--config", "{here}/file", "x"],
        ["swarm.moa", "--no-such", "x"],
    ):
        yield ["-m", *words]
    sound = [*SOUND, f"task.file={lab.data}", f"model.path={lab.base}", f"pool.folder={lab.pool}"]
    for more in (
        *(["split=no_such"], ["split=5"], ["split=null"], ["device=nope"], ["device=5"]),
        *(["out=5"], ["out=" + "x" * 5000], ["out={here}/file"], ["out=''"], ["no_such=1"]),
        *(["candidate=no_such"], ["candidate=run"], ["candidate=run", f"candidate.folder={run}"]),
        *(["candidate=run", "candidate.folder={here}/fifo"], ["candidate=expert", "split=[]"]),
        *(["candidate=adapter"], ["candidate=adapter", f"candidate.folder={run}"]),
        *(["candidate=ensemble"], ["candidate=ensemble", f"candidate.file={run}"]),
        *(["candidate=ensemble", "candidate.file={here}/fifo"], ["~candidate"]),
        *(["candidate=ensemble", "candidate.file={here}/file"], ["candidate=openai"]),
        *(["candidate=position"], ["candidate=position", "candidate.coefficients=x"], ["~task"]),
        *(["candidate=named"], ["candidate=named", "candidate.name=no/such"], ["tracker=5"]),
        ["candidate=expert", "candidate.name=nope"],
    ):
        yield ["-m", "swarm.evaluate", *sound[:3], *sound[5:], "out={here}/out", *more]
    for more in (
        *(["expert=nope"], ["expert=5"], ["run=nope"], ["steps=0"], ["steps=x"], ["batch=0"]),
        *(["rate=x"], ["rate=nan"], ["holdout=2"], ["every=0"], ["patience=-1"], ["rank=0"]),
        *(["alpha=x"], ["targets=[]"], ["targets=5"], ["targets=[nope]"], ["rank=1.5"]),
        *(["name=''"], ["folder="], ["seed=-1"], ["name=a/b"], ["steps=true"], ["rate=1e300"]),
    ):
        yield ["-m", "swarm.finetune", *sound, "folder={here}/search", *more]


def _oddities(here: Path) -> None:
    """Files that are no data."""
    import socket

    (here / "file").write_text("a file\n")
    os.mkfifo(here / "fifo")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.bind(str(here / "socket"))


# Adapters ------------------------------------------------------------------------------------


def adapters(lab: Lab) -> Iterator[Case]:
    """One of four experts is spoiled."""
    for name, spoil in {**dict(_settings()), **dict(_weights()), **dict(_folders())}.items():

        def prepare(here: Path, spoil: Callable[[Path], None] = spoil) -> None:
            shutil.copytree(lab.pool, here / "pool")
            spoil(here / "pool" / "birch")

        words = lab.search(pool="{here}/pool")
        # It fits no module and takes long for some texts; that it ends is all that is asked.
        judge: Any = (lambda here, out, err: "") if "(a+)+" in name else Case.judge
        yield Case("adapter", name, words, prepare, judge)


Spoil = Callable[[Path], None]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _settings() -> Iterator[tuple[str, Spoil]]:
    """Wrong values in adapter_config.json, and wrong JSON."""
    wrong: dict[str, list[Any]] = {
        "use_rslora": ["no", "false", 2, [], {}, 0.5],
        "use_dora": [True, "yes", 1],
        "r": [0, -4, "4", 4.5, None, [], True, 10**23, 8],
        "lora_alpha": [None, "8", True, 1e308, -(10**30), [], float("nan")],
        "peft_type": ["IA3", None, 5, []],
        "bias": ["all", 5, ["none"]],
        "base_model_name_or_path": [5, ["x"], {"a": 1}, True],
        "target_modules": [5, {"a": 1}],
        "rank_pattern": [5, "x", {"(": 4}, {"q_proj": "x"}, {"q_proj": 2}, ["q_proj"]],
        "alpha_pattern": [{"[": 1}, {"v_proj": 1e308}, {"v_proj": None}, {"(a+)+$": 1}],
        "modules_to_save": [["lm_head"]],
        "init_lora_weights": ["pissa", 5, []],
        "fan_in_fan_out": [True],
        "layer_replication": [[[0, 1]]],
        "no_such_setting": [1],
    }
    for key, values in wrong.items():
        for value in values:
            yield f"{key}: {value!r}", lambda at, k=key, v=value: tiny.change(at, **{k: v})
    texts = {
        "empty": b"",
        "no object": b"[]",
        "null": b"null",
        "half": b'{"r": 4, "lora_al',
        "100,000 brackets": b"[" * 100_000,
        "100,000 objects": b'{"a":' * 100_000,
        "bytes": b"\xff\xfe\x00\x80",
        "NUL": b"\0" * 100,
        "twice": b"{}{}",
        "digits": b'{"r": ' + b"9" * 5000 + b"}",
        "surrogate": b'{"peft_type": "\\ud800"}',
    }
    for name, text in texts.items():
        yield f"config: {name}", lambda at, t=text: (at / CONFIG).write_bytes(t) and None


def _weights() -> Iterator[tuple[str, Spoil]]:
    """Wrong tensors, and files that hold none."""
    import numpy as np

    def tensors(change: Callable[[dict[str, Any]], Any]) -> Spoil:
        from safetensors.numpy import load_file, save_file

        def spoil(at: Path) -> None:
            weights = load_file(at / WEIGHTS)
            first = sorted(weights)[0]
            found = change({"first": first, **weights}) or {}
            found = {**weights, **found}
            save_file({k: v for k, v in found.items() if v is not None}, at / WEIGHTS)

        return spoil

    def value(number: float) -> Callable[[dict[str, Any]], Any]:
        return lambda w: {w["first"]: np.full_like(w[w["first"]], number)}

    yield "weights: NaN", tensors(value(float("nan")))
    yield "weights: infinite", tensors(value(float("-inf")))
    yield "weights: 1e38", tensors(value(1e38))
    yield "weights: A alone", tensors(lambda w: {w["first"].replace("lora_A", "lora_B"): None})
    yield "weights: none", tensors(lambda w: {k: None for k in w if k != "first"})
    yield "weights: three dimensions", tensors(lambda w: {w["first"]: w[w["first"]][None]})
    yield "weights: no rows", tensors(lambda w: {w["first"]: w[w["first"]][:0]})
    yield "weights: other rank", tensors(lambda w: {w["first"]: w[w["first"]][:2].copy()})
    yield "weights: other width", tensors(lambda w: {w["first"]: w[w["first"]][:, :5].copy()})
    yield "weights: integers", tensors(lambda w: {w["first"]: w[w["first"]].astype(np.int8)})
    yield "weights: a bias", tensors(lambda w: {"x.lora_A.bias": np.ones(3, np.float32)})
    yield "weights: a stranger", tensors(lambda w: {"lm_head.weight": np.ones((3, 3), np.float32)})

    def bytes_of(change: Callable[[bytes], bytes]) -> Spoil:
        return lambda at: (at / WEIGHTS).write_bytes(change((at / WEIGHTS).read_bytes())) and None

    yield "weights: empty", bytes_of(lambda b: b"")
    yield "weights: half", bytes_of(lambda b: b[: len(b) // 2])
    yield "weights: a byte short", bytes_of(lambda b: b[:-1])
    yield "weights: a header of 2^63 bytes", bytes_of(lambda b: b"\xff" * 7 + b"\x7f" + b[8:])
    yield (
        "weights: brackets",
        bytes_of(lambda b: (100_000).to_bytes(8, "little") + b"[" * 100_000 + b[8:]),
    )
    yield "weights: text", bytes_of(lambda b: b"version https://git-lfs.github.com/spec/v1\n")


def _folders() -> Iterator[tuple[str, Spoil]]:
    """Expert folders of which a part is missing or is something else."""

    def instead(name: str, make: Callable[[Path], Any]) -> Spoil:
        def spoil(at: Path) -> None:
            (at / name).unlink()
            make(at / name)

        return spoil

    for name in (CONFIG, WEIGHTS):
        yield f"{name}: missing", instead(name, lambda path: None)
        yield f"{name}: a folder", instead(name, Path.mkdir)
        yield f"{name}: a pipe", instead(name, os.mkfifo)
        yield f"{name}: a link to itself", instead(name, lambda path: path.symlink_to(path.name))
        yield f"{name}: /dev/zero", instead(name, lambda path: path.symlink_to("/dev/zero"))

    def named(name: bytes) -> Spoil:
        return lambda at: os.rename(os.fsencode(at), os.fsencode(at.parent) + b"/" + name)

    yield "name: no UTF-8", named(b"birch\xe9")
    yield "name: newline", named(b"bi\nrch")
    yield "name: escape", named(b"bi\x1b[31mrch")
    yield "name: right to left", named("bi\u202erch".encode())
    yield "name: blank", named(b" ")


# Data files ----------------------------------------------------------------------------------


def data_files(lab: Lab) -> Iterator[Case]:
    """A sound file of multiple choice, spoiled; lines and items."""
    sound = json.loads(lab.data.read_text())
    for name, suffix, content in _contents(sound):

        def prepare(here: Path, content: bytes = content, suffix: str = suffix) -> None:
            (here / f"data.{suffix}").write_bytes(content)

        yield Case("data file", name, lab.search(data=f"{{here}}/data.{suffix}"), prepare)


ITEM: list[tuple[str, Any]] = [
    *(("question", value) for value in (None, 5, "", "  ", [], {}, True, "\ud800", ...)),
    *(("choices", value) for value in (None, 5, "x", [], {}, {"A": "x"}, {"A": 5, "B": 6}, ...)),
    *(("choices", value) for value in ({"AB": "x", "C": "y"}, {"A": "", "B": ""}, {"1": "x"})),
    *(("answer", value) for value in (None, 5, "", "Z", [], {}, True, "a b", ...)),
    *(("id", value) for value in (None, 1.5, [], {}, True, "again")),
    ("domain", []),
]


def _contents(sound: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    def text(value: Any) -> bytes:
        return json.dumps(value).encode()

    for field_name, value in ITEM:
        for number in (1, 3) if field_name in ("question", "answer") else (2,):
            items = json.loads(json.dumps(sound))
            for item in items["dev"][:number]:
                if value is ...:
                    del item[field_name]
                else:
                    item[field_name] = value
            yield f"{number} x {field_name}: {value!r}", "json", text(items)
    for what in (None, 5, "x", [], {}, [5], ["x"], [None], [[]], [{}]):
        yield f"dev: {what!r}", "json", text({**sound, "dev": what})
        if what in (None, 5, [5]):
            yield f"test: {what!r}", "json", text({**sound, "test": what})
    raw = text(sound)
    lines = [text(item) for item in sound["dev"] * 3]
    wholes = {
        "empty": b"",
        "blank": b" \n\n",
        "null": b"null",
        "number": b"5",
        "text": b'"x"',
        "no items": b"[]",
        "no object": b"{}",
        "half": raw[: len(raw) // 2],
        "twice": raw + raw,
        "100,000 brackets": b"[" * 100_000,
        "100,000 objects": b'{"a":' * 100_000,
        "NUL": b"\0" * 1000,
        "UTF-16": raw.decode().encode("utf-16"),
        "Latin-1": b'{"dev": ["\xe9"]}',
        "gzip": b"\x1f\x8b\x08\0garbage",
        "digits": b"9" * 5000,
        "HTML": b"<html></html>",
        "dev twice the same": text({"dev": sound["dev"][:1] * 4, "test": sound["dev"][:1]}),
        "CSV": b"question,answer\nx,A\n",
    }
    for name, content in wholes.items():
        yield f"whole file: {name}", "json", content
    for name, spoiled in {
        "no JSON": [*lines[:3], b"x", b"{", *lines[3:]],
        "no object": [*lines[:3], b"5", b"[]", *lines[3:]],
        "half a line": [*lines[:5], lines[5][:20]],
        "bytes": [*lines[:3], b"\xff\xfe"],
        "a split that is none": [*lines[:3], b'{"split": "train"}'],
        "empty": [],
    }.items():
        yield f"lines: {name}", "jsonl", b"\n".join(spoiled)


# Damages -------------------------------------------------------------------------------------


def damages(lab: Lab, draw: random.Random, count: int = 133) -> Iterator[Case]:
    """A finished and a half-finished run whose files are damaged, and each command that reads."""
    runs = {"finished": _run(lab, "finished", None), "half": _run(lab, "half", 2)}
    every = [
        (state, name, how)
        for state, (_, tree) in runs.items()
        for name in tree
        if name not in UNREAD
        for how in DAMAGES
        if how not in JSON_ALONE or name.endswith((".json", ".jsonl"))
    ]
    # Every kind of file with every damage, as far as `count` reaches.
    draw.shuffle(every)
    met: Counter[Any] = Counter()
    kinds = [re.sub(r"\d+|_[0-9a-f]{16}", "", name) for _, name, _ in every]
    ranks = []
    for (state, _, how), kind in zip(every, kinds, strict=True):
        met[state, kind, how] += 1
        ranks.append((met[state, kind, how], draw.random()))
    order = [one for _, one in sorted(zip(ranks, every, strict=True), key=lambda pair: pair[0])]
    for number, (state, name, how) in enumerate(order[:count]):
        folder, tree = runs[state]
        readers = READERS if state == "finished" else READERS[:3]
        yield _damaged(lab, folder, tree, state, name, how, "resume")
        if number % 3 == 0:
            reader = readers[1 + number // 3 % (len(readers) - 1)]
            yield _damaged(lab, folder, tree, state, name, how, reader)
    yield from _vanishing(lab)
    yield from _shared(lab)


UNREAD = ("log.txt", "running.json")
"""Files of a run folder that nothing reads back."""


def _emptied(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def _halved(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size))


def _flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _zeroed(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _brackets(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"[" * 100_000)


def _retyped(path: Path, draw: random.Random) -> None:
    """Sound JSON with a value of another type, without its checksum."""
    text = path.read_text()
    try:
        value = json.loads(text)
    except ValueError:  # JSON lines
        lines = text.splitlines()
        lines[draw.randrange(len(lines))] = draw.choice(["{}", "[]", "null", "5"])
        path.write_text("\n".join(lines) + "\n")
        return
    if not isinstance(value, dict) or not value:
        path.write_text(draw.choice(["{}", "[]", "null", "5"]))
        return
    for name in ("checksum", "versions"):
        value.pop(name, None)
    key = draw.choice(sorted(value))
    value[key] = draw.choice([5, "x", [{}], {"a": []}, [[[]]], True])
    path.write_text(json.dumps(value))


def _lacking(path: Path, draw: random.Random) -> None:
    """Sound JSON without one of its keys, and without its checksum."""
    value = json.loads(
        path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text()
    )
    if not isinstance(value, dict) or not value:
        path.write_text("{}")
        return
    for name in ("checksum", "versions"):
        value.pop(name, None)
    value.pop(draw.choice(sorted(value)), None)
    # With an end of line: a last line without one is what a kill leaves, and is no damage.
    path.write_text(json.dumps(value) + "\n")


def _deleted(path: Path, draw: random.Random) -> None:
    path.unlink()


Damage = Callable[[Path, random.Random], None]
DAMAGES: tuple[Damage, ...] = (
    *(_deleted, _emptied, _halved, _garbage, _flipped, _zeroed, _folder, _pipe, _loop),
    *(_brackets, _retyped, _lacking),
)
JSON_ALONE = (_brackets, _retyped, _lacking)
READERS = ("resume", "report", "analyse", "export", "evaluate")


def _run(lab: Lab, name: str, rounds: int | None) -> tuple[Path, dict[str, bytes]]:
    """A run that ended, or was interrupted before a round; its folder and its files."""
    here = lab.home / name
    here.mkdir()
    case = Case("damage", name, _resumed(lab), hook=_interrupted(rounds))
    code, _, err, _ = _in_process(case, here, 120)
    assert code == (130 if rounds else 0), err
    return here, _tree(here / "search" / "run")


def _resumed(lab: Lab) -> list[str]:
    return lab.search(
        "optimizer.max_iterations=3", "optimizer.patience=9", "ensemble=2", "noise_floor=true"
    )


def _interrupted(rounds: int | None) -> Callable[[], None]:
    """Ctrl-C as the search is about to begin that round."""

    def hook() -> None:
        from swarm.loop.run import Run

        iterate = Run._run_iteration

        def stopped(run: Any, number: int) -> None:
            if number == rounds:
                raise KeyboardInterrupt
            iterate(run, number)

        if rounds is not None:
            Run._run_iteration = stopped  # type: ignore[method-assign]

    return hook


def _tree(run: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


_expected: dict[tuple[str, str], Any] = {}
"""What a reader makes of the undamaged folder, by state and reader."""


def _damaged(
    lab: Lab, folder: Path, tree: dict[str, bytes], state: str, name: str, how: Damage, reader: str
) -> Case:
    def whole(here: Path) -> None:
        shutil.copytree(folder, here, dirs_exist_ok=True, symlinks=True)

    def prepare(here: Path) -> None:
        whole(here)
        how(here / "search" / "run" / name, random.Random(f"{state} {name} {how.__name__}"))

    words = {
        "resume": _resumed(lab),
        "report": ["-m", "swarm.report", "{here}/search/run"],
        "analyse": ["-m", "swarm.report", "analyse", "{here}/search/run", "--json"],
        "export": ["-m", "swarm.export", "{here}/search/run", "to={here}/out"],
        "evaluate": [
            *("-m", "swarm.evaluate", "task=mmlu", f"task.file={lab.data}", "task.scoring=logits"),
            *("model=local", f"model.path={lab.base}", f"pool.folder={lab.pool}", "out=null"),
            *("candidate=run", "candidate.folder={here}/search/run"),
        ],
    }[reader]

    def made(here: Path, out: str) -> Any:
        run = here / "search" / "run"
        if reader == "resume":
            left = {k: v for k, v in _tree(run).items() if k not in ("log.txt", "config.json")}
            # The command and the configuration hold the folder's own path, as do their checksums.
            return {k: v for k, v in left.items() if k not in ("command.json", "checksums.txt")}
        if reader == "report":
            # Without the run's path; config.json of another place is another text.
            return (run / "report.md").read_text().replace(str(here), "")
        if reader == "export":
            return {k: v for k, v in _tree(here / "out").items() if k != "README.md"}
        return re.sub(r"[\d.]+ (s|seconds)\b.*", "", out.replace(str(here), ""))

    def judge(here: Path, out: str, err: str) -> str:
        if (state, reader) not in _expected:
            with tempfile.TemporaryDirectory(dir=lab.home) as other:
                sound = Case("damage", "sound", words, whole)
                whole(Path(other))
                code, said, complaint, _ = _in_process(sound, Path(other), 120)
                assert code == 0, complaint
                _expected[state, reader] = made(Path(other), said)
        wanted = _expected[state, reader]
        if (found := made(here, out)) != wanted:
            if isinstance(found, dict):
                found = sorted(k for k in {**found, **wanted} if found.get(k) != wanted.get(k))
            return f"exit code 0 with another result: {str(found)[:300]}"
        if reader == "resume" and Path(name).name not in err and Path(name).parts[0] not in err:
            return "repaired without a warning"
        return ""

    label = f"{state} run, {how.__name__[1:]} {name}: {reader}"
    return Case("damage", label, words, prepare, judge)


def _vanishing(lab: Lab) -> Iterator[Case]:
    """The run's folder, or its answers, deleted while the search is at work."""
    for number in (0, 1, 2):
        for what in ("run", "run/answers", ""):

            def hook(number: int = number, what: str = what) -> None:
                from swarm.loop.run import Run

                iterate = Run._run_iteration

                def gone(run: Any, now: int) -> None:
                    if now == number:
                        shutil.rmtree(run.record.folder.parent / what, ignore_errors=True)
                    iterate(run, now)

                Run._run_iteration = gone  # type: ignore[method-assign]

            name = f"{what or 'folder'} deleted before round {number}"
            yield Case("damage", name, _resumed(lab), hook=hook, judge=_complete)


def _complete(here: Path, out: str, err: str) -> str:
    """A search that ended well has everything that another command needs."""
    run = here / "search" / "run"
    state = (run / "state.json").is_file()
    answers = [(run / "answers" / f"iteration_{n:04d}.json.gz").is_file() for n in range(4)]
    return "" if state and all(answers) else "exit code 0, and rounds are lost"


def _shared(lab: Lab) -> Iterator[Case]:
    """Damaged answers that searches share."""
    for how in DAMAGES[:9]:

        def prepare(here: Path, how: Damage = how) -> None:
            shutil.copytree(_store(lab), here / "shared")
            for number, path in enumerate(sorted((here / "shared").rglob("*.gz"))):
                how(path, random.Random(f"{how.__name__} {number}"))

        name = f"shared answers {how.__name__[1:]}"
        judge: Any = (lambda here, out, err: "") if how is _deleted else Case.judge
        yield Case("damage", name, lab.search("shared={here}/shared"), prepare, judge)


def _store(lab: Lab) -> Path:
    here = lab.home / "store"
    if not here.exists():
        here.mkdir()
        case = Case("damage", "store", lab.search("shared={here}/shared"))
        code, _, err, _ = _in_process(case, here, 120)
        assert code == 0, err
    return here / "shared"


# Running -------------------------------------------------------------------------------------


def _child(case: Case, here: Path) -> None:
    """What the fork of a case does; does not return."""
    os.setsid()
    os.chdir(here)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(here.with_suffix(f".{name}"), flags, 0o600), number)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    os.environ["MODEL_SWARMS_CACHE"] = str(here / "cache")
    words = [word.replace("{here}", str(here)) for word in case.words]
    try:
        case.hook()
        code = warm_python.run(words)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 70
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _begin(case: Case, here: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        _child(case, here)
    finally:
        os._exit(71)


def _end(here: Path, status: int | None) -> tuple[int | None, str, str]:
    out, err = (
        here.with_suffix(f".{name}").read_text(errors="backslashreplace") for name in ("out", "err")
    )
    return None if status is None else os.waitstatus_to_exitcode(status), out, err


def _in_process(case: Case, here: Path, limit: float) -> tuple[int | None, str, str, float]:
    """Run one case and wait; exit code (`None` past the limit), output, errors, seconds."""
    began = time.monotonic()
    pid = _begin(case, here)
    while time.monotonic() - began < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return *_end(here, status), time.monotonic() - began
        time.sleep(0.01)
    _kill(pid)
    return *_end(here, None), time.monotonic() - began


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def outcome(case: Case, here: Path, code: int | None, out: str, err: str, took: float) -> Outcome:
    """What an ended case counts as."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    rest = [
        line
        for line in err.splitlines()
        if line.strip() and not line.startswith(("error: ", "WARNING: "))
    ]
    if code is None:
        kind, why = "hang", f"not ended after {took:.0f} s"
    elif "Traceback (most recent call last)" in out + err:
        last = [line for line in (err or out).splitlines() if line.strip()][-1]
        kind, why = "traceback", last
    elif code == 0:
        why = case.judge(here, out, err)
        kind = "silent" if why else "ok"
    elif code not in (1, 2):
        kind, why = "traceback", f"exit code {code}: {err[-300:]}"
    elif "usage: " in err or err.startswith("package '"):  # argparse's words, and Hydra's
        kind, why = "ok", "usage"
    elif len(errors) != 1 or (rest and case.group != "damage"):
        kind, why = "traceback", f"not one line of error: {err[-300:]}"
    elif escape_control_chars(errors[0]) != errors[0]:
        kind, why = "traceback", f"control characters reach the terminal: {errors[0][:200]!r}"
    else:
        kind, why = "ok", errors[0]
    return Outcome(case, kind, why, took, code, err)


def run_cases(
    cases: Sequence[Case], home: Path, jobs: int = 2, limit: float = 60.0, keep: bool = False
) -> Iterator[Outcome]:
    """Run the cases, `jobs` at a time; yields in order of their ends."""
    waiting = list(enumerate(cases))[::-1]
    under: dict[int, tuple[Case, Path, float]] = {}
    while waiting or under:
        while waiting and len(under) < jobs:
            number, case = waiting.pop()
            here = home / f"case_{number:04d}"
            here.mkdir()
            case.prepare(here)
            under[_begin(case, here)] = case, here, time.monotonic()
        time.sleep(0.005)
        for pid, (case, here, began) in list(under.items()):
            took = time.monotonic() - began
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and took < limit:
                continue
            if not done:
                _kill(pid)
            del under[pid]
            yield outcome(case, here, *_end(here, status if done else None), took)
            if not keep:
                shutil.rmtree(here, ignore_errors=True)


def cold(case: Case, home: Path, limit: float = 120.0) -> Outcome:
    """The same case in a process of its own, as a user starts it."""
    here = Path(tempfile.mkdtemp(dir=home))
    case.prepare(here)
    words = [word.replace("{here}", str(here)) for word in case.words]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=limit,
            errors="backslashreplace",
            stdin=subprocess.DEVNULL,
            env={**searches.environment(), "MODEL_SWARMS_CACHE": str(here / "cache")},
        )
    except subprocess.TimeoutExpired:
        return outcome(case, here, None, "", "", limit)
    took = time.monotonic() - began
    return outcome(case, here, done.returncode, done.stdout, done.stderr, took)


def every_case(lab: Lab, seed: int, groups: Sequence[str] = GROUPS) -> list[Case]:
    """All cases, in a fixed order for a seed."""
    made: dict[str, Callable[[], Iterator[Case]]] = {
        "configuration": lambda: configurations(lab, random.Random(f"{seed} configuration")),
        "adapter": lambda: adapters(lab),
        "data file": lambda: data_files(lab),
        "damage": lambda: damages(lab, random.Random(f"{seed} damage")),
    }
    return [case for group in groups for case in made[group]()]


def prepare() -> None:
    """Import what every case needs, so that forks have it."""
    import hydra
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import swarm.engine.batched_lora
    import swarm.engine.decode
    import swarm.evaluation.evaluation
    import swarm.executors.inline
    import swarm.finetune.run
    import swarm.loop.run
    import swarm.optimizers.pso
    import swarm.tasks.multiple_choice  # noqa: F401
    from swarm._util.files import conf_folder

    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        hydra.compose("search", overrides=["name=x"])


def main() -> int:
    """Run the bench and print its counts; 1 if one of them is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS), help="of " + ", ".join(GROUPS))
    parser.add_argument("--match", default="", help="only cases whose name matches this expression")
    parser.add_argument("--sample", type=int, default=0, help="so many cases, drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a case")
    parser.add_argument(
        "--cold", type=int, default=0, help="so many cases once more, in processes of their own"
    )
    parser.add_argument("--list", action="store_true", help="only print the cases")
    parser.add_argument("--verbose", action="store_true", help="print how every case ended")
    options = parser.parse_args()
    prepare()
    counts: dict[str, Counter[str]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        home = Path(folder)
        cases = every_case(Lab(home), options.seed, options.groups.split(","))
        cases = [case for case in cases if re.search(options.match, case.name)]
        draw = random.Random(f"{options.seed} sample")
        if options.sample:
            cases = draw.sample(cases, min(options.sample, len(cases)))
        if options.list:
            print("\n".join(f"{case.group}: {case.name}" for case in cases))
            return 0
        chosen = draw.sample(cases, min(options.cold, len(cases)))
        ends = run_cases(cases, home, options.jobs, options.limit)
        for one in itertools.chain(ends, (cold(case, home) for case in chosen)):
            counts.setdefault(one.case.group, Counter()).update([one.kind])
            if one.kind != "ok" or options.verbose:
                print(
                    f"{one.kind}: {one.case.group}: {one.case.name}\n    {one.why}"
                    f"  [{one.seconds:.1f} s]",
                    flush=True,
                )
    print("| group | cases | tracebacks | hangs | silent |\n| --- | --- | --- | --- | --- |")
    total: Counter[str] = Counter()
    for group, count in [*counts.items(), ("all", sum(counts.values(), total))]:
        kinds = (count[kind] for kind in ("traceback", "hang", "silent"))
        print(f"| {group} | {sum(count.values())} | {' | '.join(map(str, kinds))} |")
    print(f"{time.monotonic() - began:.0f} s; {options.cold} of them in processes of their own")
    return int(any(count.total() != count["ok"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
