"""A whole iteration: the reference procedure against this project, on the same particles and items.

    python benchmarks/iteration.py [--particles 8] [--items 32] [--repeats 2] [--cases short,...]
                                   [--dtypes float32,...]

Three cases: short questions, questions of 80 tokens, and these behind an in-context example, as
Knowledge Crosswords has one. A CPU is busy reading prompts: what counts is what need not be read.

The reference procedure is re-created from its description (benchmarks/notes/decisions.md): a fresh
spawned process a phase, the base loaded anew for every particle, batches of 10, ten new tokens
without early stop, and five disk merges a particle. Unlike the original its padding is masked here,
so that its answers can be compared. Both read answers by the same parser; in float32 they have to
agree. Each of the two runs in every data type, in the same rounds: by default float32, and bfloat16
where the processor has its instructions.
"""

import argparse
import multiprocessing
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from batching import default_base
from safetensors.torch import load_file, save_file
from timing import interleaved, machine

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.pool.pool import Pool
from swarm.tasks.base import Item
from swarm.tasks.multiple_choice import MultipleChoice

LETTERS = "ABCD"


CASES = {"short": (6, 1, 0), "plain": (24, 5, 0), "example": (24, 5, 150)}
"""Words in a question, in each of its choices, and in the in-context example."""


def items(count: int, case: str = "plain") -> list[Item]:
    """Multiple-choice questions of about 40 tokens (short) or 80."""
    asked, offered, shown = CASES[case]
    random = np.random.default_rng(0)
    words = "water stone river light cloud number animal city year metal planet law cell".split()

    def phrase(length: int) -> str:
        return " ".join(random.choice(words, length))

    example = {"icl_prompt": f"{phrase(shown)}\nThe answer is D.\n"} if shown else {}
    return [
        {
            "id": i,
            "question": f"Which of these best describes the {phrase(asked)}?",
            "choices": {letter: phrase(offered) for letter in LETTERS},
            "answer": LETTERS[i % 4],
            **example,
        }
        for i in range(count)
    ]


FILE = "adapter_model.safetensors"
WEIGHTS = (0.2, 0.3, 0.4, 0.05)
"""Inertia, cognitive, social and repel coefficients of the reference procedure's step."""


def merge(parts: list[tuple[float, Path]], target: Path) -> None:
    """Write a weighted sum of adapters, as files."""
    total: dict[str, torch.Tensor] = {}
    for weight, folder in parts:
        for key, value in load_file(folder / FILE).items():
            total[key] = total.get(key, 0) + weight * value.float()
    target.mkdir(parents=True, exist_ok=True)
    save_file(total, target / FILE)


def disk_step(home: Path, particles: int, step: float) -> None:
    """Move every particle by five merges on disk."""
    inertia, cognitive, social, repel = WEIGHTS
    for i in range(particles):
        own = home / f"particle_{i}"
        merge([(1.0, own / "best"), (-1.0, own / "now")], own / "p_x")
        merge([(1.0, home / "g"), (-1.0, own / "now")], own / "g_x")
        merge([(1.0, own / "now"), (-1.0, home / "w")], own / "x_w")
        merge(
            [
                (inertia, own / "velocity"),
                (cognitive, own / "p_x"),
                (social, own / "g_x"),
                (repel, own / "x_w"),
            ],
            own / "velocity",
        )
        merge([(1.0, own / "now"), (step, own / "velocity")], own / "now")


def lay_out(pool: Pool, home: Path, particles: int) -> None:
    """Write the folders of the reference procedure at the start of an iteration."""
    experts = [pool.folder / pool.names[i % len(pool.names)] for i in range(particles)]
    for i, expert in enumerate(experts):
        own = home / f"particle_{i}"
        for name in ("now", "best"):
            merge([(1.0, expert)], own / name)
        merge([(1.0, experts[i - 1]), (-1.0, expert)], own / "velocity")
    merge([(1.0, experts[1])], home / "g")
    merge([(1.0, experts[0])], home / "w")


def reference_particle(folder: str, base: BaseModel, prompts: list[str], device: str) -> list[str]:
    """Load the base and one adapter from disk, and answer in batches of ten."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Not as this project loads it, which exchanges the products on a CPU.
    model = AutoModelForCausalLM.from_pretrained(base.resolve(), dtype=getattr(torch, base.dtype))
    tokenizer, model = base.load_tokenizer(base.resolve()), model.to(device)
    model = PeftModel.from_pretrained(model, folder).eval()
    texts: list[str] = []
    for start in range(0, len(prompts), 10):
        ids = tokenizer(prompts[start : start + 10], return_tensors="pt", padding=True).to(device)
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=10, do_sample=False)
        new = out[:, ids.input_ids.shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    return texts


def reference(
    pool: Pool, base: BaseModel, prompts: list[str], home: Path, count: int, device: str
) -> list:
    """One iteration of the reference procedure; gives all texts."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as workers:  # the phase that moves the particles
        workers.apply(disk_step, (home, count, 0.5))
    folders = [str(pool.folder / pool.names[i % len(pool.names)]) for i in range(count)]
    jobs = [(folder, base, prompts, device) for folder in folders]
    with context.Pool(1) as workers:  # the phase that evaluates them
        return workers.starmap(reference_particle, jobs, chunksize=len(jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--items", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cases", default="short,plain,example")
    parser.add_argument("--dtypes", default="float32")
    options = parser.parse_args()
    base = BaseModel(options.model) if options.model else default_base()
    pool = Pool(options.pool).open()
    home = Path(tempfile.mkdtemp())
    lay_out(pool, home, options.particles)
    bases = {name: BaseModel(base.resolve(), dtype=name) for name in options.dtypes.split(",")}
    engines = {name: HFEngine() for name in bases}
    for name, engine in engines.items():
        engine.open(bases[name], pool, options.device)
    print(f"{machine()}; {options.particles} particles, {options.items} items")
    print(f"Ratios of wall time and of CPU time; repeats: {options.repeats}\n")
    print("| items | reference | ours | ratios |\n| --- | --- | --- | --- |")
    for case in options.cases.split(","):
        compare(case, options, bases, pool, engines, home)


def compare(
    case: str,
    options: argparse.Namespace,
    bases: dict[str, BaseModel],
    pool: Pool,
    engines: dict[str, HFEngine],
    home: Path,
) -> None:
    """Print one row for every pair of data types of the reference and of this project."""
    asked = items(options.items, case)
    task = MultipleChoice("benchmark", parser="anchored")
    prompts = [str(task.build_request(item).prompt) for item in asked]
    positions = np.eye(len(pool.names))[[i % len(pool.names) for i in range(options.particles)]]

    def theirs(dtype: str) -> list:
        return reference(pool, bases[dtype], prompts, home, options.particles, options.device)

    def ours(dtype: str) -> list:
        return run_tasks_lockstep(task, engines[dtype], positions, asked, JobUsage())

    for dtype in bases:
        check(task, asked, theirs(dtype), ours(dtype), dtype)
    ways = {f"reference {dtype}": partial(theirs, dtype) for dtype in bases}
    ways |= {f"ours {dtype}": partial(ours, dtype) for dtype in bases}
    taken = interleaved(ways, options.repeats)
    for quick in bases:
        for slow in bases:
            a, b = taken[f"reference {slow}"], taken[f"ours {quick}"]
            print(
                f"| {case} | {a}, {slow} | {b}, {quick} "
                f"| {a.wall / b.wall:.1f}, {a.cpu / b.cpu:.1f} |",
                flush=True,
            )


def check(
    task: MultipleChoice, asked: list[Item], texts: list[list[str]], scores: list, dtype: str
) -> None:
    """Compare the answers of the two: in float32 they agree but for a rounding now and then."""
    from swarm.models.base import Completion

    pairs = [
        (task.read_answer(item, Completion(text)), score.answer)
        for row, mine in zip(texts, scores, strict=True)
        for item, text, score in zip(asked, row, mine, strict=True)
    ]
    same = sum(a == b for a, b in pairs) / len(pairs)
    assert same >= (0.99 if dtype == "float32" else 0.9), f"only {same:.1%} of the answers agree"


if __name__ == "__main__":
    main()
