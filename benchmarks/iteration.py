"""A whole iteration: the reference procedure against this project, on the same particles and items.

    python benchmarks/iteration.py [--particles 8] [--items 32] [--repeats 2] [--cases short,...]
                                   [--dtype float32,bfloat16]

Three cases: short questions, questions of 80 tokens, and these behind an in-context example, as
Knowledge Crosswords has one. A CPU is busy reading prompts: what counts is what need not be read.

The reference procedure is re-created from its description (benchmarks/notes/decisions.md): a fresh
spawned process a phase, the base loaded anew for every particle, batches of 10, ten new tokens
without early stop, and five disk merges a particle. Unlike the original its padding is masked here,
so that its answers can be compared. Both read answers by the same parser; in float32 they have to
agree. Each of the two runs in every data type of `--dtype`, in the same rounds; ratios are those of
the reference procedure in the same type.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import frame
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.models.base import Completion
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

    def phrase(length: int) -> str:
        return " ".join(random.choice(frame.WORDS, length))

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

    model, tokenizer = frame.load_plain(base, device)
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


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each case, procedure and data type."""
    base, pool = frame.base_and_pool(options)
    bases = {name: replace(base, dtype=name) for name in options.dtype.split(",")}
    engines = {name: HFEngine() for name in bases}
    for name, engine in engines.items():
        engine.open(bases[name], pool, options.device)
    positions = np.eye(len(pool.names))[[i % len(pool.names) for i in range(options.particles)]]
    task = MultipleChoice("benchmark", parser="anchored")
    with tempfile.TemporaryDirectory() as folder:
        lay_out(pool, Path(folder), options.particles)
        given = Path(folder), options.particles, options.device
        for case in options.cases.split(","):
            asked = items(options.items, case)
            prompts = [str(task.build_request(item).prompt) for item in asked]
            ways: dict[str, Callable[[], list]] = {}
            for name, engine in engines.items():
                ours = partial(run_tasks_lockstep, task, engine, positions, asked, JobUsage())
                ways |= {
                    f"reference, {name}": partial(reference, pool, bases[name], prompts, *given),
                    f"ours, {name}": ours,
                }
            spent = frame.interleaved(ways, options.repeats, partial(check, task, asked, bases))
            for way, one in spent.items():
                theirs = spent[f"reference, {way.partition(', ')[2]}"]
                yield {"items": case, "way": way, **one, **frame.ratios(theirs, one)}


def check(
    task: MultipleChoice, asked: list[Item], dtypes: Iterable[str], found: dict[str, list]
) -> None:
    """Compare the answers of the two: in float32 they agree but for a rounding now and then."""
    for dtype in dtypes:
        pairs = [
            (task.read_answer(item, Completion(text)), score.answer)
            for row, mine in zip(found[f"reference, {dtype}"], found[f"ours, {dtype}"], strict=True)
            for item, text, score in zip(asked, row, mine, strict=True)
        ]
        same = sum(a == b for a, b in pairs) / len(pairs)
        assert same >= (0.99 if dtype == "float32" else 0.9), f"only {same:.1%} of answers agree"


if __name__ == "__main__":
    parser = frame.parser(__doc__, repeats=2, model=True)
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--items", type=int, default=32)
    parser.add_argument("--cases", default="short,plain,example")
    frame.run(parser.parse_args(), measure)
