"""Several models on one base, called by one thread each at the same time, or one after another.

    python benchmarks/voices.py [--names base,arithmetic,counting,sorting] [--new 40] [--repeats 3]

Each model has one prompt; the answers are compared first, greedy and sampled. Interleaved repeats;
prints median wall and CPU seconds.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from timing import interleaved, machine

from swarm.models.base import Completion, Message, Request
from swarm.registry.local_models import LocalModels, SharedLocalModel

QUESTION = "Tell me a long story about a small town that wants to spend less on its street lights."


def one_by_one(voices: Sequence[SharedLocalModel], request: Request) -> list[Completion]:
    return [voice.generate([request])[0] for voice in voices]


def together(voices: Sequence[SharedLocalModel], request: Request) -> list[Completion]:
    with ThreadPoolExecutor(len(voices)) as pool:
        return list(pool.map(lambda voice: voice.generate([request])[0], voices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder or hub id; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--names", default="base,arithmetic,counting,sorting")
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    home = LocalModels(options.model, options.pool, options.device)
    voices = [home.get_model(name) for name in options.names.split(",")]
    began = time.perf_counter()
    for voice in voices:
        voice.check()
    checked = time.perf_counter()
    voices[0].open()
    print(
        f"{machine()}; {len(voices)} voices, {options.new} new tokens; checked in "
        f"{checked - began:.2f} s, loaded in {time.perf_counter() - checked:.2f} s"
    )
    greedy = Request((Message("user", QUESTION),), options.new)
    drawn = Request(greedy.prompt, options.new, temperature=0.7, seed=1)
    print("| | new tokens | one after another | together | ratio wall, CPU |")
    print("| --- | --- | --- | --- | --- |")
    for name, request in (("greedy", greedy), ("drawn", drawn)):
        alone, joint = one_by_one(voices, request), together(voices, request)
        same = sum(a.text == b.text for a, b in zip(alone, joint, strict=True))
        assert same == len(voices), f"{name}: {same} of {len(voices)} answers are the same"
        taken = interleaved(
            {
                "alone": lambda r=request: one_by_one(voices, r),
                "together": lambda r=request: together(voices, r),
            },
            options.repeats,
        )
        first, second = taken["alone"], taken["together"]
        tokens = sum(one.new_tokens for one in alone)
        print(
            f"| {name} | {tokens} | {first} | {second} | {first.wall / second.wall:.2f}, "
            f"{first.cpu / second.cpu:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
