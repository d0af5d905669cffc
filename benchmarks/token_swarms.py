"""Token Swarms: all particles at once, with each text read once per model, or one at a time.

python benchmarks/token_swarms.py [--particles 10] [--items 20] [--new 4] [--repeats 3]
"""

import argparse
import json
from typing import Any

import numpy as np
from batching import default_base
from timing import interleaved, machine

from swarm._util import files
from swarm.engine.base_model import BaseModel
from swarm.engine.token_ensemble.engine import TokenEnsembleEngine
from swarm.engine.token_ensemble.members import ModelEnsemble
from swarm.models.base import Request


def mixtures(count: int, models: int) -> np.ndarray:
    """Random positions whose weights sum to 1, now and then below 0, as in a search."""
    drawn = np.random.default_rng(1).normal(1 / models, 0.3, (count, models))
    return drawn + (1 - drawn.sum(1, keepdims=True)) / models


def read(engine: TokenEnsembleEngine) -> list[int]:
    """A list whose one number grows by every token that a model reads, padding and all."""
    total = [0]

    def hook(_: Any, __: Any, given: Any) -> None:
        total[0] += given["input_ids"].numel()

    for model in engine._model._models:
        model.register_forward_pre_hook(hook, with_kwargs=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts", help="its first two experts are added")
    parser.add_argument("--particles", type=int, default=10)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--new", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    base = BaseModel(options.model) if options.model else default_base()
    pool = files.find_path(options.pool)
    experts = sorted(path.parent for path in pool.glob("*/adapter_config.json"))[:2]
    panel = ModelEnsemble([str(base.path), *map(str, experts)], base).open()
    engine = TokenEnsembleEngine()
    engine.open(base, panel, "cpu")
    data = json.loads(files.find_path("data/nlgraph_mini.json").read_text())
    asked = [Request(item["question"], options.new) for item in data["dev"][: options.items]]
    positions = mixtures(options.particles, len(panel.names))
    count = read(engine)

    def together() -> list[str]:
        rows = engine.generate(positions, [asked] * len(positions))
        return [completion.text for row in rows for completion in row]

    def apart() -> list[str]:
        rows = [engine.generate(one[None], [asked])[0] for one in positions]
        return [completion.text for row in rows for completion in row]

    tokens, texts = {}, {}
    for way in (together, apart):
        count[0] = 0
        texts[way.__name__] = way()
        tokens[way.__name__] = count[0]
    assert texts["together"] == texts["apart"]
    taken = interleaved({"together": together, "apart": apart}, options.repeats)
    print(machine())
    print(
        f"{len(panel.names)} models, {options.particles} particles, {len(asked)} prompts, "
        f"at most {options.new} new tokens"
    )
    print("| | tokens read | wall | CPU |\n|---|---|---|---|")
    for way, name in (("together", "all at once"), ("apart", "one after the other")):
        wall, cpu = taken[way]
        print(f"| {name} | {tokens[way]:,} | {wall:.3g} s | {cpu:.3g} s |")
    ratio = taken["apart"].wall / taken["together"].wall
    print(f"ratio: {tokens['apart'] / tokens['together']:.1f} of tokens, {ratio:.1f} of time")


if __name__ == "__main__":
    main()
