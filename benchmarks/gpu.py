"""The engine on a GPU: correctness, speed, memory and plan, in one command.

    python benchmarks/gpu.py [--out benchmarks/results/gpu] [--models tiny,llama-1b] [--parts speed]

Needs torch, transformers, safetensors, numpy and this source tree; no network, no hub, no Hydra, no
PEFT. Each part of each model is one JSON file in `--out`; a part that has one is not run again, so
a killed command continues. README.md there has the tables. With `--device cpu --quick` and the tiny
model all parts but memory run in seconds.

correctness  all plans, spaces and groups against explicitly merged weights, greedy texts against
             transformers' `generate`, gradients against autograd on merged weights, two processes
speed        an iteration (20 particles, 10 experts, 200 items, prompts of 150 tokens; choices, and
             200 new tokens) in the jobs of a search, against plain inference of one model; the five
             kernels that take most of a job; a change of position
memory       peak memory of a job
plan         the automatic plan against the two it chooses from
"""

import argparse
import copy
import gc
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import frame

from swarm.engine.base_model import make_head_contiguous
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.loop.evaluator import Batching
from swarm.models.base import Example, Request

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
    },
}
"""Models of random weights, by the arguments of their configuration."""

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
)
"""The sizes of `--quick`."""

WORKLOADS = {
    "tiny": Workload(items=50, text_items=50, new=50, repeats=1, plan_items=(4, 25)),
    "llama-1b": Workload(repeats=2),
    "llama-8b": Workload(items=50, text_items=20, repeats=1, plan_items=(4, 25, 100)),
}
FEW = {"particles": 2, "experts": 3, "items": 3, "new": 12}
"""Sizes of comparisons, in which texts are answered one by one."""


class RandomBase:
    """A model of random weights made on the device, with a byte-level tokenizer.

    It stands for `swarm.engine.base_model.BaseModel` in `HFEngine.load_base`.
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.path, self.name, self.dtype = f"random {name}", name, dtype

    def load(self, device: str) -> tuple[Any, Any]:
        """Return the model, the same one at each call, and its tokenizer."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            **SHAPES[self.name],
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        with torch.device(device):
            dtype = getattr(torch, self.dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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


def random_basis(model: Any, work: Workload, device: str, space: str, groups: str) -> dict:
    """Return a random basis for `HFEngine.load_base`, the same in every process.

    Its updates have about a tenth of the weights' norm, so that positions differ visibly.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
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
    texts = []
    for _ in range(count):
        text = f"{random.integers(10**6)} "
        while len(text) < work.prompt - 6:
            text += random.choice(frame.WORDS) + " "
        texts.append(text[: work.prompt - 1] + ":")
    return texts


def positions_of(work: Workload, groups: int = 1) -> np.ndarray:
    """Return positions [particles, groups * experts] of sum 1 in each group."""
    random = np.random.default_rng(2)
    rows = random.dirichlet(np.ones(work.experts), (work.particles, groups))
    return rows.reshape(work.particles, -1)


def open_engine(
    name: str,
    dtype: str,
    device: str,
    work: Workload,
    plan: str = "auto",
    space: str = "delta",
    groups: str = "global",
) -> tuple[HFEngine, np.ndarray, dict]:
    """Return an engine with a random basis, positions for it, and the basis."""
    engine = HFEngine(plan)
    engine.load_base(RandomBase(name, dtype), device)
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


def check_answers(name: str, device: str, work: Workload) -> Iterator[dict]:
    """Compare every plan, space and kind of group with explicitly merged weights."""
    few = replace(work, **FEW)
    prompts = prompts_of(few, few.items)
    plain, tokenizer = RandomBase(name, "float32").load(device)
    for space, groups in product(("factor", "delta"), ("global", "per_module")):
        basis = random_basis(plain, few, device, space, groups)
        merged: dict[str, list] = {"float32": [], "bfloat16": []}
        for position in positions_of(few, len(basis) if groups == "per_module" else 1):
            for dtype, into in merged.items():
                made = merged_model(plain, basis, position, getattr(torch, dtype))
                into.append(answer_alone(made, tokenizer, prompts, few.new))
                del made
        for dtype, plan in product(merged, ("merged", "stacked")):
            engine, positions, _ = open_engine(name, dtype, device, few, plan, space, groups)
            # As positions with routes are: different numbers of prompts, in the same batches.
            ragged = [prompts[: max(1, few.items - i)] for i in range(len(positions))]
            for kind, asked in (("even", [prompts] * len(positions)), ("ragged", ragged)):
                case = {"type": dtype, "case": f"{plan}, {space}, {groups}, {kind}"}
                yield case | compare_answers(
                    engine, positions, asked, few.new, merged["float32"], merged[dtype]
                )
            del engine


def compare_answers(
    engine: HFEngine,
    positions: np.ndarray,
    prompts: Sequence[Sequence[str]],
    new: int,
    exact: Sequence,
    rounded: Sequence,
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
    same = sum(texts[i][j].text == rounded[i][j][1] for i, j in asked)
    same_type = merged.max() == 0
    return {
        "error": float(errors.max()),
        "mean error": float(errors.mean()),
        "mean error of merged weights": float(merged.mean()),
        "equal texts": f"{same} of {len(asked)}",
        # Rounding in 16 bits changes some greedy texts; float32 must agree up to rare ties.
        "passed": bool(errors.mean() <= max(1e-4, 3 * merged.mean()))
        and (not same_type or (errors.max() <= 1e-4 and same >= 0.9 * len(asked))),
    }


def check_gradient(name: str, device: str, work: Workload) -> Iterator[dict]:
    """Compare gradients with autograd through the weights themselves, in float32."""
    few = replace(work, **FEW)
    prompts = prompts_of(few, few.items)
    examples = [Example(prompt, (" B C",)) for prompt in prompts]
    for space, groups in product(("factor", "delta"), ("global", "per_module")):
        engine, positions, basis = open_engine(name, "float32", device, few, "auto", space, groups)
        found = engine.compute_gradient(positions[0], examples)
        value = engine.compute_gradient(positions[0], examples, slope=False).loss
        plain, tokenizer = RandomBase(name, "float32").load(device)
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


def answer_in_process(name: str, device: str, work: Workload) -> np.ndarray:
    """Return the scores of all positions; runs in a process of its own."""
    engine, positions, _ = open_engine(name, "float32", device, work)
    asked = [Request(p, 0, LONG_LETTERS) for p in prompts_of(work, 4)]
    found = engine.generate(positions, [asked] * len(positions))
    return np.array([[one.logprobs for one in row] for row in found])


def check_processes(name: str, device: str, work: Workload) -> dict:
    """Compare two workers on one device, at the same time, with this process."""
    given = name, device, replace(work, **FEW)
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        answers = workers.starmap(answer_in_process, [given] * 2, chunksize=1)
    mine = answer_in_process(*given)
    error = max(float(np.abs(one - mine).max()) for one in answers)
    return {"case": "two processes on one device", "error": error, "passed": error <= 1e-5}


def correctness(name: str, device: str, work: Workload) -> dict:
    """Run all comparisons of a model that is small enough to be held several times."""
    rows = list(check_answers(name, device, work))
    rows += [{"type": "float32", **row} for row in check_gradient(name, device, work)]
    rows.append({"type": "float32", **check_processes(name, device, work)})
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


# Speed


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


def speed(name: str, device: str, work: Workload) -> dict:
    """Time a whole iteration, plain inference, and a change of position."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    engine, positions, _ = open_engine(name, dtype, device, work)
    plain = HFEngine("stacked")
    plain.load_base(RandomBase(name, dtype), device)
    plain.set_adapters({})
    few = positions[: work.job_particles]
    found: dict[str, Any] = {"dtype": dtype}
    for kind, items, new in (("choices", work.items, 0), ("text", work.text_items, work.new)):
        asked = [Request(p, new, () if new else LETTERS) for p in prompts_of(work, items)]
        job = partial(answer, engine, few, asked[: work.job_items])
        # The plain model gets all requests in one call; a quarter of texts, counted four times.
        turns = max(1, len(positions) // 4) if new else len(positions)
        alone = partial(answer, plain, np.zeros((1, 0)), asked * turns)
        whole = partial(answer_jobs, engine, positions, asked, work)
        times: dict[str, list[float]] = {"seconds": [], "plain seconds": []}
        for _ in range(1 if new else work.repeats):
            for way, (first, act) in zip(times, ((job, whole), (alone, alone)), strict=True):
                for _ in range(2):  # a shape is captured in its second use
                    first()
                times[way].append(frame.clocked(act, device)[1])
        times["plain seconds"] = [one * len(positions) / turns for one in times["plain seconds"]]
        share = [a / b for a, b in zip(times["plain seconds"], times["seconds"], strict=True)]
        found[kind] = {"items": items, **times, "share of plain": share}
        found[kind]["plan"] = engine._choose_plan([asked[: work.job_items]] * len(few))
        found[kind]["profile"] = profile(job, device)
    short = Request(prompts_of(work, 1)[0], 1)
    found["change of one position, s"] = frame.switch_seconds(engine, positions, short, 5, device)
    shares = [median(found[kind]["share of plain"]) for kind in ("choices", "text")]
    found["share of plain inference at least .85"] = min(shares) >= 0.85
    return found


def profile(act: Callable[[], None], device: str) -> dict[str, float]:
    """Return the five operations (on a GPU: kernels) with most time, as shares of wall time."""
    act()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # without a GPU it says so, as an error
    with torch.profiler.profile() as seen:
        _, wall, _ = frame.clocked(act, device)
    side = "cpu" if device == "cpu" else "device"
    spent = {
        event.key[:60]: getattr(event, f"self_{side}_time_total") / 1e6 / wall
        for event in seen.key_averages()
        if device == "cpu" or event.device_type != torch.autograd.DeviceType.CPU
    }
    most = sorted(spent, key=spent.__getitem__, reverse=True)[:5]
    return {"all": sum(spent.values())} | {name: spent[name] for name in most}


# Memory and plan


def memory(name: str, device: str, work: Workload) -> dict:
    """Measure the peak of one job."""
    if device == "cpu":
        return {"skipped": "a CPU does not count the memory of a process's tensors"}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine, positions, _ = open_engine(name, "bfloat16", device, work, "stacked", "factor")
    positions = positions[: work.job_particles]
    asked = [Request(p, work.new) for p in prompts_of(work, min(work.job_items, work.items))]
    for _ in range(2):  # what remains from one job is part of the next one's peak
        answer(engine, positions, asked)
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak": peak}


def plan(name: str, device: str, work: Workload) -> dict:
    """Compare the automatic plan with the two it chooses from."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    engine, positions, _ = open_engine(name, dtype, device, work)
    few, rows = positions[: work.job_particles], []
    for count in work.plan_items:
        asked = [Request(p, min(8, work.new)) for p in prompts_of(work, count)]

        def answer_by(one: str) -> None:
            engine.plan = one
            answer(engine, few, asked)  # noqa: B023

        ways = {one: partial(answer_by, one) for one in ("merged", "stacked", "auto")}
        frame.interleaved(ways, 2, device=device)  # warms up and captures
        spent = frame.interleaved(ways, work.repeats, device=device)
        medians = {one: median(taken[frame.WALL]) for one, taken in spent.items()}
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


def main() -> None:
    """Run the parts that have no result yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10, help="no part begins after these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test this file")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --quick --models tiny tests this file")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for name, part in product(options.models.split(","), options.parts.split(",")):
        file = options.out / f"{name}_{part}.json"
        # Comparisons hold several copies of a model in float32.
        if file.exists() or (part, name) == ("correctness", "llama-8b"):
            continue
        if time.monotonic() > end:
            print(f"{name}, {part}: not begun, as {options.minutes:g} minutes have passed")
            continue
        work = QUICK if options.quick else WORKLOADS[name]
        run_part(name, part, options.device, work, file)
    text = frame.page("Results of benchmarks/gpu.py", options.out)
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


def run_part(name: str, part: str, device: str, work: Workload, file: Path) -> None:
    """Run one part and write its result; an error is printed and leaves no file."""
    print(f"{name}, {part} ...", flush=True)
    act = partial(PARTS[part], name, device, work)
    try:
        data = frame.record(act, device, model=name, part=part, workload=asdict(work))
    except Exception:  # one part must not end the others
        traceback.print_exc()
    else:
        frame.write(file, data)
    finally:
        gc.collect()  # a decoder and its cache refer to each other
        if device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
