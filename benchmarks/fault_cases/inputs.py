"""Cases of wrong configurations, adapters and data files."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny

from fault_cases import ROOT, Case, Lab

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
    "task.max_prompt_tokens": [*WHOLE, "0"],
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
    "pool.groups": [*WORD, "0", "-1", "1.5", "null"],
    "pool.control": WORD,
    "pool.most": [*WHOLE, "0", "1", "null"],
    "pool.control_seed": [*WHOLE, "null"],
    "pool.recipes": LIST,
    "pool.density": [*NUMBER, "0", "-1", "2", "null"],
    "engine.plan": [*WORD, "null"],
    "engine.max_tokens": [*WHOLE, "0"],
    "racing.rule": [*WORD, "null"],
    "racing.chunk": [*WHOLE, "0", "null"],
    "optimizer.particles": [*WHOLE, "0", "1", "2", "1000000", "99999999999", HUGE],
    "optimizer.active": [*WHOLE, "0"],
    "optimizer.soups": [*WHOLE, "6", "null", HUGE],
    "optimizer.start_scales": [*LIST, "[0]", "[-1]", "[nan]", "[1e300]", "[true]"],
    "optimizer.lambdas": ["5", "no_such", "{a:1}", "true", "[{}]", "[no_such]", "[nan]", "[true]"],
    "optimizer.descent": ["5", "x", "[]", "true", "{}"],
    "optimizer.max_dimensions": [*WHOLE, "0", "null"],
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
        "racing": ["exact"],
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
        *("optimizer=nsga2", "pool.base_row=maybe", "pool.control=3.0", "folder=\udce9/x"),
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
        ["swarm.report", run],
        ["swarm.report", "{here}/file"],
        ["swarm.report", "{here}/fifo"],
        ["swarm.report", "x" * 5000],
        ["swarm.report", run, "--json"],
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
        ["swarm.study", "no_such"],
        ["swarm.study", "{here}/fifo"],
        ["swarm.study", "compare", "seeds=0"],
        ["swarm.study", "compare", "parallel=x"],
        ["swarm.study", "compare", "only=[nothing]"],
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
