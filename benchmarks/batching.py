"""Swap, merged, stacked, auto and PEFT's mixed batches, by the requests of each particle.

    python benchmarks/batching.py [--device cpu] [--rows 4,10,25,100,200] [--repeats 3]

Interleaved repeats; prints median wall and CPU seconds, and how far auto is from the best.
PEFT's `adapter_names` answers with the same adapters in one batch; its tokens are compared first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import machine

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.models.base import Request
from swarm.pool.pool import Pool

NEW = 4
WORDS = "edges node path one two three four graph weight from to is there what".split()


def prompts(count: int, words: int = 30) -> list[str]:
    """Different prompts of about as many tokens as words."""
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, words)) + "? Answer:" for _ in range(count)]


def engine_of(plan: str, base: BaseModel, pool: Pool, device: str) -> HFEngine:
    engine = HFEngine(plan)
    engine.open(base, pool, device)
    return engine


class Mixed:
    """PEFT's own way: all adapters loaded, a batch whose rows name theirs."""

    def __init__(self, base: BaseModel, pool: Pool, positions: np.ndarray, device: str) -> None:
        from peft import PeftModel

        model, self.tokenizer = base.load(device)
        with tempfile.TemporaryDirectory() as folder:
            for i, position in enumerate(positions):
                pool.save(position, Path(folder) / f"p{i}")
            model = PeftModel.from_pretrained(model, Path(folder) / "p0", adapter_name="p0")
            for i in range(1, len(positions)):
                model.load_adapter(Path(folder) / f"p{i}", adapter_name=f"p{i}")
        self.model = model.eval()

    @torch.inference_mode()
    def generate(self, _: np.ndarray, requests: list[list[Request]]) -> list[list[str]]:
        texts: list[list[str]] = [[] for _ in requests]
        count = len(requests[0])
        size = max(1, 4096 // (40 * len(requests)))
        for start in range(0, count, size):
            part = [str(r.prompt) for asked in requests for r in asked[start : start + size]]
            each = len(part) // len(requests)
            names = [f"p{i}" for i in range(len(requests)) for _ in range(each)]
            ids = self.tokenizer(part, return_tensors="pt", padding=True).to(self.model.device)
            out = self.model.generate(
                **ids, adapter_names=names, max_new_tokens=NEW, do_sample=False
            )
            new = self.tokenizer.batch_decode(
                out[:, ids.input_ids.shape[1] :], skip_special_tokens=True
            )
            for i in range(len(requests)):
                texts[i] += new[i * each : (i + 1) * each]
        return texts


def as_texts(answers: object) -> list[list[str]]:
    return [[getattr(c, "text", c) for c in row] for row in answers]  # type: ignore[attr-defined]


def measure(
    ways: dict, positions: np.ndarray, asked: Sequence[Sequence[Request]], repeats: int
) -> dict:
    """Median wall and CPU seconds of each way, interleaved; the answers are compared first."""
    answers = {name: as_texts(way.generate(positions, asked)) for name, way in ways.items()}
    for name, found in answers.items():
        pairs = [
            (a, b)
            for x, y in zip(found, answers["merged"], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        same = sum(a == b for a, b in pairs) / len(pairs)
        assert same >= 0.99, f"{name} agrees with merged only on {same:.1%} of the answers"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way.generate(positions, asked)
            if positions is not None and torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: tuple(statistics.median(t[i] for t in taken) for i in (0, 1))
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder or hub id; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="4,10,25,100")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    base = BaseModel(options.model) if options.model else default_base()
    base = replace(base, dtype=options.dtype)
    pool = Pool(options.pool).open()
    random = np.random.default_rng(1)
    positions = random.dirichlet(np.ones(len(pool.names)), options.particles)
    ways = {
        plan: engine_of(plan, base, pool, options.device) for plan in ("merged", "stacked", "auto")
    }
    ways["PEFT mixed"] = Mixed(base, pool, positions, options.device)  # type: ignore[assignment]
    names = list(ways)
    print(f"{machine()}; {options.particles} particles")
    print("| requests per particle | " + " | ".join(names) + " | auto / best |")
    print("| --- " * (len(names) + 2) + "|")
    for rows in map(int, options.rows.split(",")):
        asked = [[Request(p, NEW) for p in prompts(rows)]] * len(positions)
        found = measure(ways, positions, asked, options.repeats)
        best = min(found[name][0] for name in ("merged", "stacked"))
        cells = [f"{found[name][0]:.2f} s ({found[name][1]:.2f})" for name in names]
        print(
            f"| {rows} | " + " | ".join(cells) + f" | {found['auto'][0] / best:.2f} |", flush=True
        )


def default_base() -> BaseModel:
    """SmolLM2-135M-Instruct, as the quickstart has it."""
    found: BaseModel = compose_part("model=smollm2")
    return found


def compose_part(word: str) -> Any:
    """Compose a search with a word, and build the group that it chooses."""
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    from swarm._util.files import conf_folder

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        group = word.partition("=")[0]
        config = compose("search", [word])
        return instantiate(config[group], _convert_="all")


if __name__ == "__main__":
    main()
