"""The engine on a GPU: correctness, speed, memory and plan, in one command.

    python benchmarks/gpu.py [--out benchmarks/results/gpu] [--models tiny,llama-1b] [--parts speed]

Needs torch, transformers, safetensors, numpy and this source tree; no network, no hub, no Hydra, no
PEFT. Each part of each model is one JSON file in `--out`; a part that has one is not run again, so
a killed command continues. README.md there has the tables. With `--device cpu --quick` and the tiny
model all parts but memory run in seconds.

correctness  all plans, spaces and groups against explicitly merged weights, greedy texts against
             transformers' `generate`, gradients against autograd on merged weights, two processes
speed        an iteration (20 particles, 10 experts, 200 items, prompts of 150 tokens; choices, and
             200 new tokens) in the jobs of a search, against the reference procedure and against
             plain inference of one model; prefill as a share of the device's matmul rate and decode
             (in batches) of its copy rate; a step; a change of positions
memory       peak memory of a job
plan         the automatic plan against the two it chooses from
"""

import argparse
import copy
import gc
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from swarm.engine.base_model import BaseModel, make_head_contiguous
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.loop.evaluator import Batching
from swarm.models.base import Example, Request
from swarm.optimizers.swarm import MemeticSwarm

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Models of random weights, by the arguments of their configuration."""

SMOLLM = Path(__file__).parent / "SmolLM2-135M-Instruct"
"""Folder of the one model with trained weights, which is used if it exists."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LETTERS = ("A", "B", "C", "D")
"""Choices of one token, as usual."""

LONG_LETTERS = tuple(f" {letter}" for letter in LETTERS)
"""Choices of two tokens, where results are compared."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one iteration; tokens are those of a byte-level tokenizer, about a byte each.

    Attributes:
        job_particles, job_items: Positions and items of a job, as in conf/search.yaml.
        plan_items: Items per particle at which the plans are compared.
        matrix: Side of the square matrices whose product is the device's matmul rate.
        copied: Number of float32 values whose copy is the device's copy rate.
    """

    particles: int = 20
    experts: int = 10
    rank: int = 16
    items: int = 200
    text_items: int = 200
    prompt: int = 150
    new: int = 200
    repeats: int = 3
    job_particles: int = 5
    job_items: int = 50
    plan_items: tuple[int, ...] = (4, 25, 100, 200)
    matrix: int = 8192
    copied: int = 1 << 28


QUICK = Workload(
    particles=3,
    experts=3,
    rank=2,
    items=4,
    text_items=4,
    prompt=24,
    new=8,
    repeats=1,
    job_particles=2,
    job_items=3,
    plan_items=(2, 3),
    matrix=256,
    copied=1 << 20,
)
"""The sizes of `--quick`."""


class RandomBase:
    """A model of random weights made on the device, with a byte-level tokenizer.

    It stands for `swarm.engine.base_model.BaseModel` in `HFEngine.load_base`.
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.path, self.name, self.dtype = f"random {name}", name, dtype

    def load(self, device: str) -> tuple[Any, Any]:
        """Return the model, the same one at each call, and its tokenizer."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **SHAPES[self.name],
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with torch.device(device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        model.eval().requires_grad_(False)
        # Drawn in float32 and then rounded: a type of 16 bits may have random numbers of its own.
        generator = torch.Generator(device).manual_seed(0)
        for weight in model.parameters():
            if weight.dim() > 1:
                drawn = torch.randn(
                    weight.shape, generator=generator, device=device, dtype=torch.float32
                )
                weight.copy_(drawn * config.initializer_range)
        make_head_contiguous(model)
        return model, byte_tokenizer()


def byte_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def find_base(name: str, dtype: str) -> Any:
    """Return the base model of this name."""
    return BaseModel(str(SMOLLM), dtype=dtype) if name == "smollm2" else RandomBase(name, dtype)


def random_basis(model: Any, work: Workload, device: str, space: str, groups: str) -> dict:
    """Return a random basis for `HFEngine.load_base`, the same in every process.

    Its updates have about a tenth of the weights' norm, so that positions differ visibly.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in TARGETS and isinstance(module, torch.nn.Linear)
    }
    basis = {}
    count, rank = work.experts, work.rank
    generator = torch.Generator("cpu").manual_seed(1)
    for number, (name, linear) in enumerate(modules.items()):
        down = torch.randn(count, rank, linear.in_features, generator=generator)
        up = torch.randn(count, linear.out_features, rank, generator=generator)
        # A product of random factors has the norm sqrt(rank * in * out) times those of its values.
        scale = 0.1 * linear.weight.float().norm() / math.sqrt(rank * down.shape[2] * up.shape[1])
        up *= scale.item()
        places = torch.arange(count) + (number * count if groups == "per_module" else 0)
        if space == "delta":
            down, up = down.flatten(0, 1), up.transpose(0, 1).flatten(1)
            places = places.repeat_interleave(rank)
        basis[name] = (down.to(device), up.to(device), places)
    return basis


def mix(factors: Sequence[torch.Tensor], position: torch.Tensor) -> torch.Tensor:
    """Return the update [out, in] of one module at a position, as its definition has it."""
    down, up, places = factors
    share = position.to(down.device)[places.to(down.device)]
    if down.dim() == 2:
        return (up * share) @ down
    return torch.einsum("k,kor->or", share, up) @ torch.einsum("k,kri->ri", share, down)


def prompts_of(work: Workload, count: int) -> list[str]:
    """Return different prompts of about `work.prompt` bytes."""
    random = np.random.default_rng(0)
    words = "water stone river light cloud number animal city year metal planet law cell".split()
    texts = []
    for _ in range(count):
        text = f"{random.integers(10**6)} "
        while len(text) < work.prompt - 6:
            text += random.choice(words) + " "
        texts.append(text[: work.prompt - 1] + ":")
    return texts


def positions_of(work: Workload, groups: int = 1) -> np.ndarray:
    """Return positions [particles, groups * experts] of sum 1 in each group."""
    random = np.random.default_rng(2)
    rows = random.dirichlet(np.ones(work.experts), (work.particles, groups))
    return rows.reshape(work.particles, -1)


def open_engine(
    name: str, dtype: str, device: str, work: Workload, plan: str, space: str, groups: str
) -> tuple[HFEngine, np.ndarray, dict]:
    """Return an engine with a random basis, positions for it, and the basis."""
    base = find_base(name, dtype)
    engine = HFEngine(plan)
    engine.load_base(base, device)
    basis = random_basis(engine._model, work, device, space, groups)
    engine.set_adapters(basis, "random")
    return engine, positions_of(work, len(basis) if groups == "per_module" else 1), basis


# Correctness


def merged_model(model: Any, basis: Mapping, position: np.ndarray, dtype: torch.dtype) -> Any:
    """Return a copy of the plain model with the position added to its weights in float32."""
    made = copy.deepcopy(model)
    for name, factors in basis.items():
        weight = made.get_submodule(name).weight
        weight.data = weight.data.float() + mix(factors, torch.tensor(position).float())
    return made.to(dtype)


@torch.inference_mode()
def answer_alone(model: Any, tokenizer: Any, prompts: Sequence[str], new: int) -> list:
    """Answer one prompt at a time: log probabilities [4] of the letters, and greedy token ids."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([encode_prompt(tokenizer, prompt)], device=model.device)
        letters = [encode_choice(tokenizer, prompt, letter) for letter in LONG_LETTERS]
        scores = []
        for letter in letters:
            row = torch.cat([ids, torch.tensor([letter], device=model.device)], dim=1)
            logprobs = model(row).logits.float().log_softmax(-1)[0, ids.shape[1] - 1 : -1]
            scores.append(sum(logprobs[i, token].item() for i, token in enumerate(letter)))
        out = model.generate(ids, max_new_tokens=new, do_sample=False)
        found.append((scores, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return found


def few_of(name: str, work: Workload) -> Workload:
    """Return the sizes of comparisons, in which texts are answered one by one."""
    positions, items, new = (3, 4, 24) if name == "tiny" else (2, 2, 8)
    return replace(
        work,
        particles=min(positions, work.particles),
        experts=min(4, work.experts),
        items=min(items, work.items),
        new=min(new, work.new),
    )


def check_answers(name: str, device: str, work: Workload) -> Iterator[dict]:
    """Compare every plan, space and kind of group with explicitly merged weights."""
    few = few_of(name, work)
    prompts = prompts_of(few, few.items)
    plain, tokenizer = find_base(name, "float32").load(device)
    for space in ("factor", "delta"):
        for groups in ("global", "per_module"):
            basis = random_basis(plain, few, device, space, groups)
            positions = positions_of(few, len(basis) if groups == "per_module" else 1)
            merged: dict[str, list] = {"float32": [], "bfloat16": []}
            for position in positions:
                for dtype, into in merged.items():
                    made = merged_model(plain, basis, position, getattr(torch, dtype))
                    into.append(answer_alone(made, tokenizer, prompts, few.new))
                    del made
            for dtype, plan in product(merged, ("merged", "stacked")):
                engine = open_engine(name, dtype, device, few, plan, space, groups)[0]
                counts = [max(1, few.items - i) for i in range(len(positions))]
                # As positions with routes are: different numbers of prompts, in the same batches.
                for decoded in ("even", "ragged"):
                    yield {"type": dtype} | compare_answers(
                        engine,
                        positions,
                        [prompts[:n] if "ragged" in decoded else prompts for n in counts],
                        few.new,
                        merged["float32"],
                        merged[dtype],
                        f"{plan}, {space}, {groups}, {decoded}",
                    )
                del engine


def compare_answers(
    engine: HFEngine,
    positions: np.ndarray,
    prompts: Sequence[Sequence[str]],
    new: int,
    exact: Sequence,
    rounded: Sequence,
    case: str,
) -> dict:
    """Return the largest error in log probability, that of merged weights, and equal texts.

    Each position answers its first prompts in `exact`, which is float32. In the mean the engine
    may differ from it by three times as much as weights merged in its own type do, or by 1e-4.
    """
    scored = engine.generate(
        positions, [[Request(p, 0, LONG_LETTERS) for p in row] for row in prompts]
    )
    texts = engine.generate(positions, [[Request(p, new) for p in row] for row in prompts])
    asked = [(i, j) for i, row in enumerate(prompts) for j in range(len(row))]
    true = np.array([exact[i][j][0] for i, j in asked])
    merged = np.abs(np.array([rounded[i][j][0] for i, j in asked]) - true)
    errors = np.abs(np.array([scored[i][j].logprobs for i, j in asked]) - true)
    pairs = [(texts[i][j].text, rounded[i][j][1]) for i, j in asked]
    same = sum(a == b for a, b in pairs)
    same_type = merged.max() == 0
    return {
        "case": case,
        "error": float(errors.max()),
        "mean error": float(errors.mean()),
        "mean error of merged weights": float(merged.mean()),
        "equal texts": f"{same} of {len(pairs)}",
        # Rounding in 16 bits changes some greedy texts; float32 must agree up to rare ties.
        "passed": bool(errors.mean() <= max(1e-4, 3 * merged.mean()))
        and (not same_type or (errors.max() <= 1e-4 and same >= 0.9 * len(pairs))),
    }


def check_gradient(name: str, device: str, work: Workload) -> Iterator[dict]:
    """Compare gradients with autograd through the weights themselves, in float32."""
    few = replace(few_of(name, work), particles=1)
    prompts = prompts_of(few, few.items)
    examples = [Example(prompt, (" B C",)) for prompt in prompts]
    for space in ("factor", "delta"):
        for groups in ("global", "per_module"):
            engine, positions, basis = open_engine(
                name, "float32", device, few, "auto", space, groups
            )
            found = engine.compute_gradient(positions[0], examples)
            value = engine.compute_gradient(positions[0], examples, slope=False).loss
            plain, tokenizer = find_base(name, "float32").load(device)
            leaf = torch.tensor(positions[0], dtype=torch.float32, requires_grad=True)
            weights = {
                f"{module}.weight": plain.get_submodule(module).weight + mix(factors, leaf)
                for module, factors in basis.items()
            }
            loss = torch.zeros((), device=device)
            for prompt in prompts:
                ids = encode_prompt(tokenizer, prompt)
                gold = encode_choice(tokenizer, prompt, " B C")
                row = torch.tensor([[*ids, *gold]], device=device)
                logits = torch.func.functional_call(plain, weights, (row,)).logits[0]
                loss = loss + torch.nn.functional.cross_entropy(
                    logits[len(ids) - 1 : -1].float(), torch.tensor(gold, device=device)
                )
            slope = torch.autograd.grad(loss, leaf)[0].numpy()
            error = np.abs(found.slope - slope).max() / np.abs(slope).max()
            off = max(abs(found.loss - loss.item()), abs(value - loss.item()))
            yield {
                "case": f"gradient, {space}, {groups}",
                "error": float(error),
                "error of the loss": off,
                "passed": bool(error <= 1e-3 and off <= 1e-3),
            }


def answer_in_process(name: str, device: str, work: Workload) -> list:
    """Return the scores of all positions; runs in a process of its own."""
    engine, positions, _ = open_engine(name, "float32", device, work, "auto", "delta", "global")
    asked = [Request(p, 0, LONG_LETTERS) for p in prompts_of(work, 4)]
    return [
        [one.logprobs for one in row]
        for row in engine.generate(positions, [asked] * len(positions))
    ]


def check_processes(name: str, device: str, work: Workload) -> dict:
    """Compare two workers on one device, at the same time, with this process."""
    few = few_of(name, work)
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        answers = workers.starmap(answer_in_process, [(name, device, few)] * 2, chunksize=1)
    mine = np.array(answer_in_process(name, device, few))
    error = max(float(np.abs(np.array(one) - mine).max()) for one in answers)
    return {"case": "two processes on one device", "error": error, "passed": error <= 1e-5}


def correctness(name: str, device: str, work: Workload) -> dict:
    """Run all comparisons of a model that is small enough to be held several times."""
    rows = list(check_answers(name, device, work))
    rows += [{"type": "float32", **row} for row in check_gradient(name, device, work)]
    rows.append({"type": "float32", **check_processes(name, device, work)})
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def step_bytes(engine: HFEngine) -> tuple[int, int]:
    """Return the bytes of weights and factors that a step reads, and of one cached token."""
    model, counts = engine._model, count_weights(engine._model)
    layers = engine._mixer._layers.values()
    factors = sum(t.nbytes for one in layers for t in (one.down, one.up) if t is not None)
    size = model.dtype.itemsize
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return sum(counts) * size + factors, 2 * config.num_hidden_layers * heads * width * size


def count_weights(model: Any) -> tuple[int, int]:
    """Return the weights of all linear layers but the head, and those of the head."""
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings().weight.numel()
    return sum(one.weight.numel() for one in linears) - head, head


# Speed


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def answer(engine: HFEngine, positions: np.ndarray, asked: Sequence[Request]) -> None:
    """Answer the same requests at all positions, together."""
    engine.generate(positions, [asked] * len(positions))


def answer_jobs(
    engine: HFEngine, positions: np.ndarray, asked: Sequence[Request], work: Workload
) -> None:
    """Answer the same requests at all positions, in the jobs of a search."""
    cut = Batching(work.job_particles, work.job_items)
    for job in cut.split_jobs(positions.tolist(), "dev", len(asked)):
        answer(engine, np.array(job.positions), [asked[item] for item in job.items])


def time_call(act: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Return the median of wall seconds."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        act()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def device_rates(device: str, dtype: str, work: Workload) -> tuple[float, float]:
    """Return FLOP/s of a large matmul, and bytes per second that a copy reads and writes."""
    side = work.matrix
    kind = getattr(torch, dtype)
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    source = torch.zeros(work.copied, device=device)
    sink = torch.empty_like(source)
    for _ in range(3):
        left @ right
        sink.copy_(source)
    matmul = time_call(lambda: left @ right, device, 10)
    moved = time_call(lambda: sink.copy_(source), device, 10)
    return 2 * side**3 / matmul, 8 * len(source) / moved


def reference_seconds(
    name: str, dtype: str, device: str, work: Workload, items: int, new: int, scratch: Path
) -> dict:
    """Time one particle of the reference procedure (benchmarks/iteration.py describes it).

    One load of the base, the five disk merges, and two batches of ten are timed; an iteration has
    that load and those merges for every particle, and a batch for every ten items.
    """
    from swarm.engine.base_model import quiet_transformers

    folder = scratch / f"base-{name}-{dtype}"
    if not folder.exists():
        model, tokenizer = find_base(name, dtype).load(device)
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        del model
    base = BaseModel(str(folder), dtype=dtype)
    with quiet_transformers():
        load = time_call(lambda: base.load(device), device)
        model, tokenizer = base.load(device)
    basis = random_basis(model, work, "cpu", "factor", "global")
    tensors = {
        f"{module}.{side}": factor[0].contiguous()
        for module, factors in basis.items()
        for side, factor in zip("AB", factors[:2], strict=True)
    }
    merges = time_call(lambda: merge_on_disk(tensors, scratch / "merge"), device)
    prompts = prompts_of(work, 10)

    def batch() -> None:
        ids = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
        with torch.inference_mode():
            model.generate(
                ids.input_ids,
                attention_mask=ids.attention_mask,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
            )

    one = time_call(batch, device, 2)
    total = work.particles * (load + merges + math.ceil(items / 10) * one)
    return {"load": load, "five merges": merges, "batch of ten": one, "iteration": total}


def merge_on_disk(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read and write adapters as five merges of a particle do: 12 files read, 5 written."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.safetensors"
    if not source.exists():
        save_file(dict(tensors), source)
    for number, parts in enumerate((2, 2, 2, 4, 2)):
        read = [load_file(source) for _ in range(parts)]
        total = {key: torch.stack([one[key] for one in read]).sum(0) for key in read[0]}
        save_file(total, folder / f"{number}")


def speed(name: str, device: str, work: Workload) -> dict:
    """Time a whole iteration, the reference procedure, plain inference, a step and a change."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    flops, bandwidth = device_rates(device, dtype, work)
    engine, positions, _ = open_engine(name, dtype, device, work, "auto", "delta", "global")
    plain = HFEngine("stacked")
    plain.load_base(find_base(name, dtype), device)
    plain.set_adapters({})
    found: dict[str, Any] = {"matmul FLOP/s": flops, "copy bytes/s": bandwidth, "dtype": dtype}
    scratch = Path(tempfile.mkdtemp(prefix="model-swarms-gpu-"))
    try:
        for kind, items, new in (("choices", work.items, 0), ("text", work.text_items, work.new)):
            asked = [Request(p, new, () if new else LETTERS) for p in prompts_of(work, items)]
            theirs = reference_seconds(name, dtype, device, work, items, new or 10, scratch)
            found[kind] = time_iteration(engine, plain, positions, asked, device, work)
            found[kind] |= phase_shares(engine, positions, asked, device, work, flops, bandwidth)
            found[kind]["items"], found[kind]["reference"] = items, theirs
            found[kind]["times the reference"] = theirs["iteration"] / found[kind]["seconds"]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found |= change_seconds(engine, torch.tensor(positions), device)
    found["optimizer step, s"] = step_seconds(work)
    shares = [found[kind]["share of plain"] for kind in ("choices", "text")]
    found["goals"] = {
        "choices: 20 times the reference": found["choices"]["times the reference"] >= 20,
        "text: 80 times the reference": found["text"]["times the reference"] >= 80,
        "share of plain inference at least .85": min(shares) >= 0.85,
    }
    return found


def time_iteration(
    engine: HFEngine,
    plain: HFEngine,
    positions: np.ndarray,
    asked: Sequence[Request],
    device: str,
    work: Workload,
) -> dict:
    """Time all positions on all requests, and one model on as many requests, interleaved.

    The positions are answered in the jobs of a search, and in jobs with all items; the plain
    model's requests in one call. For texts, that call has a quarter of them and counts four times.
    """
    text = bool(asked[0].max_new_tokens)
    turns = max(1, len(positions) // 4) if text else len(positions)
    wide = replace(work, job_items=len(asked))
    acts = {
        "seconds": partial(answer_jobs, engine, positions, asked, work),
        "seconds, jobs of all items": partial(answer_jobs, engine, positions, asked, wide),
        "plain seconds": partial(answer, plain, np.zeros((1, 0)), [*asked] * turns),
    }
    if wide.job_items <= work.job_items:
        del acts["seconds, jobs of all items"]
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(work.repeats + 1 if not text else 1):
        for name, act in acts.items():
            if text:  # capture the steps, which the first two uses of a shape do
                part = positions[: work.job_particles]
                for _ in range(2):
                    if name == "seconds":
                        answer(engine, part, asked[: work.job_items])
                    elif name == "plain seconds":
                        act()
                    else:
                        answer(engine, part, asked)
            spent = time_call(act, device)
            if turn or text:
                times[name].append(spent)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    found["plain seconds"] *= len(positions) / turns
    for name in [one for one in found if one != "plain seconds"]:
        found[name.replace("seconds", "share of plain")] = found["plain seconds"] / found[name]
    return found


def change_seconds(engine: HFEngine, chosen: torch.Tensor, device: str) -> dict[str, float]:
    """Time a change of positions in the layers: each call has others than the one before."""
    stack, half = engine._mixer, chosen / 2

    def change(count: int, merge: bool = False) -> None:
        for rows in (chosen, half):
            stack.set_positions(rows[:count], merge=merge)

    ways = {
        "change of one position, s": partial(change, 1),
        "change of all positions, s": partial(change, len(chosen)),
        "change of one merged position, s": partial(change, 1, merge=True),
    }
    return {name: time_call(act, device, 5) / 2 for name, act in ways.items()}


@dataclass
class Forward:
    """One call of the model: its start, rows, tokens read per row, and tokens attended to."""

    began: float
    rows: int
    width: int
    length: int
    seconds: float = 0.0


def record_forwards(model: Any, act: Callable[[], object], device: str) -> list[Forward]:
    """Return the model's calls during `act`; each lasts until the next one begins.

    So the seconds include what is done between calls, such as choosing tokens.
    """
    calls: list[Forward] = []

    def note(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        rows, width = given["input_ids"].shape
        mask = given.get("attention_mask")
        synchronize(device)
        length = width if mask is None else mask.shape[1]
        calls.append(Forward(time.perf_counter(), rows, width, length))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        act()
        synchronize(device)
        ends = [*(one.began for one in calls[1:]), time.perf_counter()]
    finally:
        hook.remove()
    for one, end in zip(calls, ends, strict=True):
        one.seconds = end - one.began
    return calls


def phase_shares(
    engine: HFEngine,
    positions: np.ndarray,
    asked: Sequence[Request],
    device: str,
    work: Workload,
    flops: float,
    bandwidth: float,
) -> dict:
    """Return the plan and batches of a job, and the shares of the measured rates it reaches.

    Prefill is compared with the matmul rate by the arithmetic of the model's own weights; decode
    with the copy rate by the bytes that its steps read: weights, factors and cache.
    """
    few, asked = positions[: work.job_particles], asked[: work.job_items]
    model, (linear, head) = engine._model, count_weights(engine._model)
    capture, engine._decoder.capture = engine._decoder.capture, None  # a replay calls no hook
    calls = record_forwards(model, partial(answer, engine, few, asked), device)
    engine._decoder.capture = capture
    fixed, each = step_bytes(engine)
    reads, steps = [one for one in calls if one.width > 1], [one for one in calls if one.width == 1]
    arithmetic = sum(2 * one.rows * (linear * one.width + head) for one in reads)
    found = {
        "plan": engine._choose_plan([asked] * len(few)),
        "tokens per batch": engine._budget,
        "in batches: rows": max(one.rows for one in calls),
        "prefill share of matmul rate": arithmetic / sum(one.seconds for one in reads) / flops,
    }
    if asked[0].max_new_tokens and steps:
        traffic = sum(fixed + one.rows * one.length * each for one in steps)
        seconds = sum(one.seconds for one in steps)
        found |= {
            "in batches: decode steps": len(steps),
            "in batches: bytes per step": traffic / len(steps),
            "in batches: decoded tokens/s": sum(one.rows for one in steps) / seconds,
            "in batches: decode share of copy rate": traffic / seconds / bandwidth,
        }
    return found


def step_seconds(work: Workload) -> float:
    """Return the seconds of a step of the particle swarm, with the state as text."""
    swarm = MemeticSwarm(particles=work.particles, max_iterations=10**9, patience=10**9)
    swarm.start(work.experts, 0)
    swarm.ask()

    def step() -> None:
        swarm.tell(np.zeros(len(swarm.positions)))
        swarm.ask()
        json.dumps(swarm.state_dict())

    return time_call(step, "cpu", 20)


# Memory and plan


def memory(name: str, device: str, work: Workload) -> dict:
    """Measure the peak of one job."""
    if device == "cpu":
        return {"skipped": "a CPU does not count the memory of a process's tensors"}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine, positions, _ = open_engine(
        name, "bfloat16", device, work, "stacked", "factor", "global"
    )
    positions = positions[: work.job_particles]
    asked = [Request(p, work.new) for p in prompts_of(work, min(work.job_items, work.items))]
    for _ in range(2):  # what remains from one job is part of the next one's peak
        answer(engine, positions, asked)
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak": peak}


def plan(name: str, device: str, work: Workload) -> dict:
    """Compare the automatic plan with the two it chooses from."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    engine, positions, _ = open_engine(name, dtype, device, work, "auto", "delta", "global")
    rows = []
    few = positions[: work.job_particles]
    for count in work.plan_items:
        asked = [Request(p, min(8, work.new)) for p in prompts_of(work, count)]
        seconds: dict[str, list[float]] = {one: [] for one in ("merged", "stacked", "auto")}
        for turn in range(work.repeats + 2):
            for one, taken in seconds.items():
                engine.plan = one
                spent = time_call(partial(answer, engine, few, asked), device)
                if turn > 1:  # the first two turns warm up and capture
                    taken.append(spent)
        medians = {one: statistics.median(taken) for one, taken in seconds.items()}
        best = min(medians[one] for one in ("merged", "stacked"))
        engine.plan = "auto"
        chosen = engine._choose_plan([asked] * len(few))
        rows.append(
            {"items": count, **medians, "chosen": chosen, "auto / best": medians["auto"] / best}
        )
    return {"rows": rows, "passed": all(row["auto / best"] <= 1.10 for row in rows)}


PARTS: dict[str, Callable[[str, str, Workload], dict]] = {
    "correctness": correctness,
    "speed": speed,
    "memory": memory,
    "plan": plan,
}

LARGE = ("llama-8b",)
"""Models without the part correctness, which holds several copies in float32."""


def workload_of(name: str, quick: bool) -> Workload:
    """Return the sizes for a model; the largest answers fewer items."""
    if quick:
        return QUICK
    if name in LARGE:
        return Workload(items=50, text_items=20, repeats=1, plan_items=(4, 25, 100))
    if name == "tiny":  # its results matter, not its speed
        return Workload(items=50, text_items=50, new=50, repeats=1, plan_items=(4, 25))
    return Workload(repeats=2)


def environment(device: str) -> dict:
    """Return what the numbers depend on."""
    import transformers

    gpu = torch.cuda.get_device_name() if device != "cpu" else platform.processor()
    return {
        "device": gpu or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def write_tables(out: Path) -> str:
    """Write README.md from all parts that exist, and return it."""
    lines = ["# Results of benchmarks/gpu.py", ""]
    for file in sorted(out.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        result, where = data["result"], data["environment"]
        lines += [f"## {data['model']}: {data['part']}", ""]
        lines += [
            f"{where['device']}, torch {where['torch']}, transformers {where['transformers']}, "
            f"{where['date']}, {data['seconds']:.0f} s",
            "",
        ]
        if rows := result.get("rows"):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
            lines += [
                "| " + " | ".join(show(row.get(key, "")) for key in columns) + " |" for row in rows
            ]
            lines.append("")
        lines += [f"- {key}: {show(value)}" for key, value in result.items() if key != "rows"]
        lines.append("")
    text = "\n".join(lines)
    (out / "README.md").write_text(text, encoding="utf-8")
    return text


def show(value: object) -> str:
    """Return a value for a table."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    return str(value)


def main() -> None:
    """Run the parts that have no result yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    parser.add_argument("--device", default="cuda:0")
    models = ["tiny", *(["smollm2"] if SMOLLM.is_dir() else []), "llama-1b", "llama-8b"]
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10, help="no part begins after these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test this file")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --quick --models tiny tests this file")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for name in options.models.split(","):
        for part in options.parts.split(","):
            file = options.out / f"{name}_{part}.json"
            if file.exists() or (part == "correctness" and name in LARGE):
                continue
            if time.monotonic() > end:
                print(f"{name}, {part}: not begun, as {options.minutes:g} minutes have passed")
                continue
            run_part(name, part, options.device, workload_of(name, options.quick), file)
    print(write_tables(options.out))


def run_part(name: str, part: str, device: str, work: Workload, file: Path) -> None:
    """Run one part and write its result; an error is printed and leaves no file."""
    print(f"{name}, {part} ...", flush=True)
    began = time.monotonic()
    try:
        result = PARTS[part](name, device, work)
    except Exception as error:  # one part must not end the others
        traceback.print_exc()
        print(f"{name}, {part}: {type(error).__name__}: {error}", file=sys.stderr)
        return
    finally:
        gc.collect()  # a decoder and its cache refer to each other
        if device != "cpu":
            torch.cuda.empty_cache()
    data = {
        "model": name,
        "part": part,
        "seconds": time.monotonic() - began,
        "workload": asdict(work),
        "environment": environment(device),
        "result": result,
    }
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    main()
