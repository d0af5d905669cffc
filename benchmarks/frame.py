"""The frame of all benchmarks: options, machine, repeats in turn, rows as JSON and as tables.

    python benchmarks/frame.py FOLDER

prints the page of a folder that benchmarks wrote to with `--out FOLDER`.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from swarm.engine.base import Engine
    from swarm.engine.base_model import BaseModel
    from swarm.models.base import Request
    from swarm.pool.pool import Pool

T = TypeVar("T")
Row = Mapping[str, Any]
Spent = dict[str, list[float]]
"""Seconds of all repeats, as two columns of a row."""

WALL, CPU = "wall s", "CPU s"
WORDS = "water stone river light cloud number animal city year metal planet law cell".split()


def parser(text: str, repeats: int = 3, model: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks, and those to load a model and experts."""
    made = argparse.ArgumentParser(description=text.splitlines()[0])
    made.add_argument("--repeats", type=int, default=repeats, help="default: %(default)s")
    made.add_argument("--out", type=Path, help="folder of a JSON file with the rows")
    if model:
        made.add_argument("--model", help="a folder or hub id; default: SmolLM2")
        made.add_argument("--pool", default="initial_experts")
        made.add_argument("--device", default="cpu")
        made.add_argument("--dtype", default="float32")
    return made


def base_and_pool(options: argparse.Namespace) -> "tuple[BaseModel, Pool]":
    """Return the model, of the first type of the options, and the open pool that they name."""
    from dataclasses import replace

    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    from swarm._util.files import conf_folder
    from swarm.engine.base_model import BaseModel
    from swarm.pool.pool import Pool

    if options.model:
        base = BaseModel(options.model)
    else:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            base = instantiate(compose("search", ["model=smollm2"]).model, _convert_="all")
    return replace(base, dtype=options.dtype.partition(",")[0]), Pool(options.pool).open()


def load_plain(base: "BaseModel", device: str) -> tuple[Any, Any]:
    """Return the model with PyTorch's own products, which `BaseModel.load` exchanges on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = base.resolve()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, base.dtype))
    tokenizer = base.load_tokenizer(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device).requires_grad_(False), tokenizer


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have been waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def clocked(act: Callable[[], T], device: str = "cpu") -> tuple[T, float, float]:
    """Return a result with its wall and CPU seconds, to the end of what it started on a GPU."""

    def synchronize() -> None:
        if device != "cpu":
            import torch

            torch.cuda.synchronize()

    synchronize()
    cpu, wall = cpu_seconds(), time.perf_counter()
    done = act()
    synchronize()
    return done, time.perf_counter() - wall, cpu_seconds() - cpu


def interleaved(
    ways: Mapping[str, Callable[[], T]],
    repeats: int,
    check: Callable[[dict[str, T]], object] | None = None,
    device: str = "cpu",
) -> dict[str, Spent]:
    """Run all ways in turn.

    Args:
        check: Compares the results of a first turn, which is not timed.
    """
    if check:
        check({name: way() for name, way in ways.items()})
    spent: dict[str, Spent] = {name: {WALL: [], CPU: []} for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            _, wall, cpu = clocked(way, device)
            spent[name][WALL].append(wall)
            spent[name][CPU].append(cpu)
    return spent


def ratios(slow: Spent, quick: Spent) -> dict[str, list[float]]:
    """Return how many times as long one way took as another, turn by turn."""
    return {
        f"ratio of {name}": [a / b for a, b in zip(slow[name], quick[name], strict=True)]
        for name in (WALL, CPU)
    }


def switch_seconds(
    engine: "Engine",
    positions: "np.ndarray",
    request: "Request",
    repeats: int,
    device: str = "cpu",
) -> list[float]:
    """Return the seconds of a change of position.

    That is what a request takes at another position than the last one, less what it takes when it
    is repeated there.

    Args:
        positions: Two or more, which take turns.
    """
    found = []
    for turn in range(repeats + 1):
        rows = positions[[turn % len(positions)]]
        new, again = (
            clocked(lambda: engine.generate(rows, [[request]]), device)[1]  # noqa: B023
            for _ in range(2)
        )
        found.append(new - again)
    return found[1:]  # the first turn warms up


def environment(device: str) -> dict[str, Any]:
    """Return what numbers depend on."""
    model = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), model)
    if device != "cpu":
        import torch

        model = torch.cuda.get_device_name()
    return {
        "device": model,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "load": os.getloadavg()[0],
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
    }


def record(act: Callable[[], object], device: str, **labels: Any) -> dict[str, Any]:
    """Return a result with its labels, its cost and what it depends on."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    data = {**labels, "command": shlex.join(words), "environment": environment(device)}
    result, data["seconds"], data["CPU seconds"] = clocked(act, device)
    return {**data, "result": result}


def write(file: Path, data: Mapping[str, Any]) -> None:
    """Write a record whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(data, indent=1), encoding="utf-8")
    draft.replace(file)


def show(value: object) -> str:
    """Return a value for a table; of repeats the median, least and most."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    if isinstance(value, list):
        middle, *ends = (
            f"{one:,.0f}" if abs(one) >= 1000 else f"{one:.3g}"
            for one in (statistics.median(value), min(value), max(value))
        )
        return f"{middle} [{', '.join(ends)}]" if len(value) > 1 else middle
    return str(value)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table; rows may lack columns of others."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[show(row.get(key, "")) for key in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def describe(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record: what it depends on, its table, and its other results."""
    result, where = data["result"], data["environment"]
    words = [where["device"], *(f"{name} {where[name]}" for name in ("torch", "transformers"))]
    words += [where["date"], f"{data['seconds']:.0f} s"]
    if "CPU seconds" in data:
        words += [f"{data['CPU seconds']:.0f} CPU s", f"{where['cores']} cores"]
        words += [f"threads: {where['threads']}", f"load {where['load']:.1f}"]
    if "repeats" in data:
        words += [f"median [range] of {data['repeats']} repeats"]
    lines = [", ".join(words), ""]
    if rows := result.get("rows"):
        lines += table(rows)
    lines += [f"- {key}: {show(value)}" for key, value in result.items() if key != "rows"]
    return lines + [""] * (len(result) > bool(rows))


def page(title: str, folder: Path) -> str:
    """Return the page of all records in a folder: what each took, and then its results."""
    costs, parts = [], []
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        named = ": ".join(data[key] for key in ("model", "part") if key in data)
        parts += [f"## {named}", "", *describe(data)]
        if "command" in data:
            costs.append({key: data[key] for key in ("part", "command", "seconds", "CPU seconds")})
    return "\n".join([f"# {title}", "", *(table(costs) if costs else []), *parts])


def run(
    options: argparse.Namespace, measure: Callable[[argparse.Namespace], Iterable[Row]]
) -> list[Row]:
    """Run a benchmark: each row is logged as it comes, the table printed, the record written."""
    rows: list[Row] = []

    def log_rows() -> dict[str, list[Row]]:
        for row in measure(options):
            print(show(row), file=sys.stderr, flush=True)
            rows.append(row)
        return {"rows": rows}

    name = Path(sys.argv[0]).stem
    data = record(log_rows, getattr(options, "device", "cpu"), part=name, repeats=options.repeats)
    print("\n".join(describe(data)))
    if options.out:
        write(options.out / f"{name}.json", data)
    return rows


if __name__ == "__main__":
    print(page("All benchmarks at small sizes", Path(sys.argv[1])))
