"""vLLM beside the engine on transformers: setting positions, and answering.

    python benchmarks/vllm.py [--ways vllm,hf] [--particles 5] [--requests 10]

One process holds an engine of each way, which are asked in turn. The answers are compared first.
Every repeat has positions of its own, the same for all ways, since equal ones are kept. "Set" is
what it takes to bring them in without asking anything (hf: all at once, as its plan "stacked" has
them); the answers that follow are to other new positions and include bringing them in. Choices are
scored by their log probabilities, texts are greedy.

The engines share the memory: vLLM gets its cache from what is free when it starts on a CPU, and an
equal share for each way on a GPU. They start in the order of `--ways`, and an engine's start counts
the imports that no engine before it has made.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# This folder goes behind the installed packages, one of which is called as this file is.
sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)

import numpy as np
import torch
from batching import default_base, prompts
from timing import cpu_seconds, machine

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine, installed_version
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.pool.pool import Pool

CHOICES = (" A", " B", " C", " D")
TOLERANCE = {"cpu": 1e-3, "cuda": 0.25}
"""How far log probabilities may be apart, in float32 and in bfloat16."""

Engine = VLLMEngine | HFEngine
Answers = list[list[Completion]]
Asked = list[list[Request]]


class Run(NamedTuple):
    """What one repeat took in seconds, and what came of it."""

    wall: float
    cpu: float
    prompts: int = 0
    tokens: int = 0


def clocked(act: Callable[[], Any]) -> tuple[Run, Any]:
    """Do something, to the end of what it started on a GPU."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    done = act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Run(time.perf_counter() - wall, cpu_seconds() - cpu), done


def opened(way: str, base: BaseModel, pool: Pool, options: argparse.Namespace) -> Engine:
    """A started engine."""
    if way == "hf":
        engine: Engine = HFEngine("auto")
    else:
        share = 0.85 / len(options.ways)
        engine = VLLMEngine(gpu_memory_utilization=share)
    engine.open(base, pool, options.device)
    return engine


def put(engine: Engine, positions: np.ndarray) -> None:
    """Bring positions into an engine."""
    if isinstance(engine, HFEngine):
        engine._mixer.set_positions(torch.from_numpy(positions))
    else:
        for number, position in enumerate(positions):
            engine._set_position(position, number)


def compare(found: Mapping[str, Answers], device: str) -> str:
    """Make sure that the choices' log probabilities are the same, and say how many texts are.

    Args:
        found: Of each way, both kinds of answers.
    """
    *others, last = found
    pairs = [
        (way, one, two)
        for way in others
        for mine, theirs in zip(found[way], found[last], strict=True)
        for one, two in zip(mine, theirs, strict=True)
    ]
    said = []
    for way in others:
        scored = [(a.logprobs, b.logprobs) for name, a, b in pairs if name == way and a.logprobs]
        worst = float(max(np.abs(np.subtract(one, two)).max() for one, two in scored))
        assert worst < TOLERANCE[device], f"{way}: log probabilities {worst:.3g} from {last}'s"
        texts = [a.text == b.text for name, a, b in pairs if name == way and not a.logprobs]
        said.append(
            f"{way} and {last}: log probabilities at most {worst:.2g} apart, "
            f"{sum(texts)} of {len(texts)} texts equal"
        )
    return "\n".join(said)


def measure(
    engines: Mapping[str, Engine],
    draw: Callable[[], np.ndarray],
    kinds: Sequence[Asked],
    repeats: int,
) -> dict[str, list[list[Run]]]:
    """Of each way the repeats of setting, and of answering each kind; all ways in turn."""
    runs: dict[str, list[list[Run]]] = {way: [[] for _ in range(1 + len(kinds))] for way in engines}
    for _ in range(repeats):
        positions = draw()
        for way, engine in engines.items():
            runs[way][0].append(clocked(lambda: put(engine, positions))[0])  # noqa: B023
        for number, asked in enumerate(kinds, 1):
            positions = draw()
            for way, engine in engines.items():
                run, done = clocked(lambda: engine.generate(positions, asked))  # noqa: B023
                said = [one for row in done for one in row]
                tokens = sum(one.new_tokens for one in said)
                runs[way][number].append(run._replace(prompts=len(said), tokens=tokens))
    return runs


def spread(values: Sequence[float], digits: int = 3) -> str:
    """A median and the range."""
    cells = (statistics.median(values), min(values), max(values))
    middle, low, high = (f"{value:.{digits}g}" for value in cells)
    return f"{middle} [{low}, {high}]"


def row(way: str, runs: Sequence[Sequence[Run]]) -> str:
    """A way's row of the table."""
    cells = [way]
    for number, taken in enumerate(runs):
        cells.append(
            f"{spread([run.wall for run in taken])}; "
            f"{statistics.median(run.cpu for run in taken):.3g}"
        )
        if number:
            cells.append(spread([run.prompts / run.wall for run in taken]))
    cells.append(spread([run.tokens / run.wall for run in runs[-1]]))
    return "| " + " | ".join(cells) + " |"


def started(base: BaseModel, pool: Pool, options: argparse.Namespace) -> dict[str, Engine]:
    """The engines, with what each took to start."""
    engines = {}
    for way in options.ways:
        run, engines[way] = clocked(lambda: opened(way, base, pool, options))  # noqa: B023
        print(f"{way} started in {run.wall:.3g} s ({run.cpu:.3g} CPU s)", flush=True)
    return engines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder or hub id; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--particles", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10, help="requests per particle")
    parser.add_argument("--new", type=int, default=16, help="maximum number of new tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--ways", default="vllm,hf", help="subset of vllm, hf")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.ways = options.ways.split(",")
    if strange := set(options.ways) - {"vllm", "hf"}:
        parser.error(f"--ways: {', '.join(sorted(strange))}: must be one of vllm, hf")
    return options


def main() -> None:
    options = parsed()
    base = BaseModel(options.model) if options.model else default_base()
    pool = Pool(options.pool).open()
    print(
        f"{machine()}, vLLM {installed_version()}, transformers {version('transformers')}, "
        f"{options.device}; {options.particles} particles with {options.requests} requests each, "
        f"up to {options.new} new tokens, {options.repeats} repeats, "
        f"{torch.get_num_threads()} threads"
    )
    engines = started(base, pool, options)
    random = np.random.default_rng(1)
    shape = (options.particles, len(pool.groups))

    def draw() -> np.ndarray:
        return random.dirichlet(np.ones(len(pool.names)), shape).reshape(options.particles, -1)

    questions = prompts(options.requests)
    # What is no question is gone on with; the experts that ship answer one with a word.
    texts = [question.partition("?")[0] for question in questions]
    kinds: list[Asked] = [
        [[Request(question, 0, CHOICES) for question in questions]] * options.particles,
        [[Request(text, options.new) for text in texts]] * options.particles,
    ]
    positions = draw()
    found = {
        way: [row for asked in kinds for row in engine.generate(positions, asked)]
        for way, engine in engines.items()
    }
    if len(found) > 1:
        print(compare(found, options.device))
    words = [count for one in found[options.ways[0]][0] for count in one.choice_tokens]
    print(f"tokens of a choice: {min(words)} to {max(words)}")
    runs = measure(engines, draw, kinds, options.repeats)
    print("Seconds are median [least, most]; median CPU seconds.")
    print("| way | set | choices | prompts/s | texts | prompts/s | new tokens/s |")
    print("| --- " * 7 + "|")
    for way in engines:
        print(row(way, runs[way]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
