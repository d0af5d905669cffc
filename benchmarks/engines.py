"""Engines and their plans on the same requests, by the number of requests of each position.

    python benchmarks/engines.py [--ways merged,stacked,auto,peft,vllm] [--rows 4,10,25,100,200]
                                 [--kinds text,choices,loss,gradient] [--device cpu]

"peft" are batches whose rows name one of PEFT's adapters; these are fixed, so it only has texts.
A loss and its gradient are those of the right choice of all prompts, at one position. Results are
compared with those of the first way; in float32 texts are the same but for one in a hundred, and
numbers but for rounding. "Switch" is a short request at a new position less the same again. Each
engine has an equal share of a GPU's memory.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import frame
import numpy as np
import torch
from gpu import Workload, random_basis

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine
from swarm.models.base import Completion, Example, Request
from swarm.pool.pool import Pool

CHOICES = (" A", " B", " C", " D")
KINDS = {"peft": ("text",), "vllm": ("text", "choices")}
Answers = list[list[Completion]]


class Mixed:
    """PEFT's own way: all adapters loaded, a batch whose rows name theirs."""

    def __init__(self, base: BaseModel, pool: Pool, positions: np.ndarray, device: str) -> None:
        from peft import PeftModel

        model, self.tokenizer = frame.load_plain(base, device)
        with tempfile.TemporaryDirectory() as folder:
            for i, position in enumerate(positions):
                pool.save(position, Path(folder) / f"p{i}")
            model = PeftModel.from_pretrained(model, Path(folder) / "p0", adapter_name="p0")
            for i in range(1, len(positions)):
                model.load_adapter(Path(folder) / f"p{i}", adapter_name=f"p{i}")
        self.model = model.eval()

    @torch.inference_mode()
    def generate(self, _: np.ndarray, requests: Sequence[Sequence[Request]]) -> Answers:
        """Answer the same number of texts at every position."""
        answers: Answers = [[] for _ in requests]
        size = max(1, 4096 // (40 * len(requests)))
        for start in range(0, len(requests[0]), size):
            parts = [asked[start : start + size] for asked in requests]
            texts = [str(one.prompt) for part in parts for one in part]
            names = [f"p{i}" for i, part in enumerate(parts) for _ in part]
            ids = self.tokenizer(texts, return_tensors="pt", padding=True).to(self.model.device)
            out = self.model.generate(
                **ids,
                adapter_names=names,
                max_new_tokens=requests[0][0].max_new_tokens,
                do_sample=False,
            )
            new = self.tokenizer.batch_decode(
                out[:, ids.input_ids.shape[1] :], skip_special_tokens=True
            )
            for name, text in zip(names, new, strict=True):
                answers[int(name[1:])].append(Completion(text))
        return answers


def opened(
    way: str, base: BaseModel, pool: Pool, positions: np.ndarray, options: argparse.Namespace
) -> Any:
    """Return what answers in a way."""
    if way == "peft":
        return Mixed(base, pool, positions, options.device)
    share = 0.85 / len(options.ways.split(","))
    engine = VLLMEngine(gpu_memory_utilization=share) if way == "vllm" else HFEngine(way)
    if options.rank:
        engine.load_base(base, options.device)
        work = Workload(experts=len(pool.names), rank=options.rank)
        basis = random_basis(engine._model, work, options.device, "delta", "global")
        engine.set_adapters(basis, "random")
    else:
        engine.open(base, pool, options.device)
    return engine


def act(engine: Any, kind: str, positions: np.ndarray, prompts: list[str], new: int) -> Any:
    """Return texts, or numbers: [P, R, 4] log probabilities, a loss, or a derivative."""
    if kind in ("loss", "gradient"):
        examples = [Example(prompt, CHOICES[:1]) for prompt in prompts]
        found = engine.compute_gradient(positions[0], examples, slope=kind == "gradient")
        return found.slope if kind == "gradient" else found.loss
    limits = (0, CHOICES) if kind == "choices" else (new,)
    asked = [Request(prompt, *limits) for prompt in prompts]
    answers = engine.generate(positions, [asked] * len(positions))
    return [[one.logprobs or one.text for one in row] for row in answers]


def compare(found: dict[str, Any], kind: str, exact: bool) -> dict[str, str]:
    """Return how far each way's results are from the first one's, and make sure it is not far."""
    first, *_ = (np.array(result) for result in found.values())
    said = {}
    for way, result in found.items():
        if kind == "text":
            same = (np.array(result) == first).mean()
            assert same >= (0.99 if exact else 0.8), f"{way}: {same:.1%} of the texts agree"
            said[way] = f"{same:.1%} equal"
        else:
            apart = np.abs(np.array(result) - first).max()
            most = (1e-3 if exact else 0.25) * max(1.0, np.abs(first).max())
            assert apart <= most, f"{way}: {kind} {apart:.2g} off"
            said[way] = f"at most {apart:.1g} apart"
    return said


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each kind and number of requests, and each way."""
    base, pool = frame.base_and_pool(options)
    random = np.random.default_rng(1)
    size = (options.particles, len(pool.groups))
    positions = random.dirichlet(np.ones(len(pool.names)), size).reshape(options.particles, -1)
    engines, switches = {}, {}
    for way in options.ways.split(","):
        engines[way] = opened(way, base, pool, positions, options)
        if way != "peft":
            switches[way] = frame.switch_seconds(
                engines[way], positions, Request("What", 1), 5, options.device
            )
    for rows, kind in product(map(int, options.rows.split(",")), options.kinds.split(",")):
        prompts = [" ".join(random.choice(frame.WORDS, 30)) for _ in range(rows)]
        ways = {
            way: partial(act, engine, kind, positions, prompts, options.new)
            for way, engine in engines.items()
            if kind in KINDS.get(way, (kind,))
        }
        said: dict[str, str] = {}

        def check(found: dict[str, Any]) -> None:
            said.update(compare(found, kind, options.dtype == "float32"))  # noqa: B023

        spent = frame.interleaved(ways, options.repeats, check, options.device)
        best = min(median(one[frame.WALL]) for one in spent.values())
        count = rows if kind in ("loss", "gradient") else rows * len(positions)
        for way, one in spent.items():
            yield {
                "kind": kind,
                "requests": count,
                "way": way,
                **one,
                "of the best": median(one[frame.WALL]) / best,
                "requests/s": [count / wall for wall in one[frame.WALL]],
                "results": said[way],
                "switch, ms": [1e3 * one for one in switches.get(way, [])] or "",
            }
    for way in switches:
        engines[way].close()


if __name__ == "__main__":
    parser = frame.parser(__doc__, model=True)
    parser.add_argument("--ways", default="merged,stacked,auto,peft")
    parser.add_argument("--rows", default="4,10,25,100", help="requests, of each position")
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="random adapters of this rank on all linear layers, in place of the pool's",
    )
    parser.add_argument("--kinds", default="text", help="text, choices, loss, gradient")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--new", type=int, default=4, help="maximum number of new tokens")
    options = parser.parse_args()
    if options.rank and "vllm" in options.ways:
        parser.error("--rank: not with vllm, which reads adapters from files")
    frame.run(options, measure)
