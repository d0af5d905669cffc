"""The answers of every kind of pool remain those of answer_net.json.

`python tests/contract/test_answer_net.py` records the file again: after a change that is meant
to change answers, and on unchanged code where the first test fails.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # where this file is a script

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel

from swarm.engine import decode
from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.models.base import Message, Request
from swarm.pool.pool import Pool

FILE = Path(__file__).with_name("answer_net.json")
POSITIONS, NEW_TOKENS, CHOICES = 10, 8, (" (A)", " (B)", " no, not (C)")
MARGIN = 1e-3
"""Least margin of a recorded token's log probability above the next; more than any rounding."""

TOLERANCE, MOST_SEEDS = 2e-4, 50
PROMPTS = (
    "Sort these numbers: 8 9 3.",
    "Roads: a to b 2 km, b to c 3 km and c to d 5 km. How far is d from a? Answer:",
    (Message("system", "one word"), Message("user", "Roads: a to b 4 km. How far is b?")),
)
ROWS = {"base_row": True, "recipes": ["ties", "dare_linear"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "factor": ("llama/same", {"space": "factor"}),
    "factor, attention_mlp": ("llama/same", {"space": "factor", "groups": "attention_mlp"}),
    "factor, mixed experts": ("llama/mixed", {"space": "factor"}),
    "delta": ("llama/same", {"space": "delta"}),
    "delta, kind": ("llama/same", {"space": "delta", "groups": "kind"}),
    "delta, per_module": ("llama/same", {"space": "delta", "groups": "per_module"}),
    "delta, mixed experts": ("llama/mixed", {"space": "delta"}),
    "delta, made rows": ("llama/same", {"space": "delta", **ROWS}),
    "delta, gemma": ("gemma/mixed", {"space": "delta", "groups": "kind"}),
    "delta, qwen2": ("qwen2/same", {"space": "delta", "groups": "per_module"}),
}
IN_ALL_PLANS = ("factor, mixed experts", "delta, kind", "delta, made rows")
ANSWERED = [
    *((kind, "stacked") for kind in ADAPTERS),
    *((kind, plan) for kind in IN_ALL_PLANS for plan in ("merged", "own cache")),
    *(("full models", ""), ("token ensemble", "")),
]


@cache
def create(folder: Path, name: str) -> Path:
    """The model or the experts of a name like "llama" or "llama/mixed", made once."""
    kind, _, experts = name.partition("/")
    if not experts:
        return tiny.model(folder / kind / "base", kind)
    made = {"same": tiny.pool, "mixed": tiny.mixed_pool}[experts]
    return made(create(folder, kind), folder / name)


@cache
def open_kind(folder: Path, kind: str) -> tuple[Any, Any]:
    """The open engine and pool of a kind."""
    engine: Any
    pool: Any
    if kind in ADAPTERS:
        name, settings = ADAPTERS[kind]
        base = BaseModel(str(create(folder, name.partition("/")[0])))
        pool, engine = Pool(create(folder, name), **settings), HFEngine()
    else:
        second = "llama" if kind == "full models" else "gemma"
        models = [create(folder, "llama"), tiny.model(folder / kind / "second", second, seed=5)]
        models.append(tiny.model(folder / kind / "third", "llama", seed=6))
        base, paths = BaseModel(str(models[0])), list(map(str, models))
        if kind == "full models":
            pool, engine = FullModelPool(paths, base), FullWeightsEngine()
        else:
            pool, engine = ModelEnsemble(paths, base), TokenEnsembleEngine()
    pool.open(base.path)
    engine.check(base, pool)
    engine.open(base, pool, "cpu")
    return engine, pool


def draw_positions(kind: str, pool: Any, seed: int) -> np.ndarray:
    """An expert, the uniform soup and random positions, [10, G * K]."""
    draw, size, groups = np.random.default_rng(seed), len(pool.names), len(pool.groups)
    first = [np.tile(row, groups) for row in (np.eye(size)[seed % size], np.full(size, 1 / size))]
    shape = (POSITIONS - 2, groups * size)
    if kind in ADAPTERS:
        return np.array([*first, *draw.normal(0, 0.7, shape)])
    shares = draw.dirichlet(np.ones(size), shape[0])
    # Probabilities below zero are cut off, and an impossible token has no log probability.
    return np.array([*first, *(shares if kind == "token ensemble" else 1.6 * shares - 0.2)])


def answer(folder: Path, kind: str, plan: str, seed: int, top: int = 0) -> dict[str, Any]:
    """The text and the choices' log probabilities of each position and prompt."""
    engine, pool = open_kind(folder, kind)
    if plan:
        engine.plan = "merged" if plan == "merged" else "stacked"
        engine._decoder._refills = plan != "own cache"  # as of models with sliding windows
        engine._decoder.release()
    positions = draw_positions(kind, pool, seed)
    asked: Sequence[Request] = [Request(one, NEW_TOKENS, top_logprobs=top) for one in PROMPTS]
    texts = engine.generate(positions, [asked] * POSITIONS)
    asked = [Request(one, 0, CHOICES) for one in PROMPTS]
    scores = engine.generate(positions, [asked] * POSITIONS)
    return {
        f"position {p}, prompt {r}": {
            "text": texts[p][r].text,
            "logprobs": [round(one, 6) for one in scores[p][r].logprobs],
        }
        for p in range(POSITIONS)
        for r in range(len(PROMPTS))
    }


def answer_by_peft(folder: Path) -> list[float]:
    """Log probabilities of the tiny model and of an expert by transformers and PEFT alone."""
    network, expert = tiny.load(create(folder, "llama")), create(folder, "llama/same") / "amber"
    rows = [tiny.logits(network), tiny.logits(PeftModel.from_pretrained(network, expert))]
    return [round(one, 6) for row in rows for one in row.log_softmax(-1)[1, -1, :4].tolist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("net")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def test_libraries_draw_the_recorded_weights(folder: Path, recorded: dict[str, Any]) -> None:
    """If not, other versions of torch, transformers or PEFT draw other tiny models."""
    found = answer_by_peft(folder)
    assert found == pytest.approx(recorded["transformers and PEFT"], abs=TOLERANCE)


@pytest.mark.parametrize(("kind", "plan"), ANSWERED)
def test_answers_are_the_recorded_ones(
    folder: Path, recorded: dict[str, Any], kind: str, plan: str
) -> None:
    wanted = recorded[kind]["answers"]
    found = answer(folder, kind, plan, recorded[kind]["seed"])
    assert found.keys() == wanted.keys()
    texts, expected = ({key: one["text"] for key, one in part.items()} for part in (found, wanted))
    assert texts == expected
    for key, one in found.items():
        assert one["logprobs"] == pytest.approx(wanted[key]["logprobs"], abs=TOLERANCE), key


def record(folder: Path, kind: str, plan: str) -> dict[str, Any]:
    """The answers with the first seed at which each token is likelier than all others by far."""
    choose, margins = decode.choose_tokens, []

    def note_margins(logits: torch.Tensor, *others: Any) -> dict[str, torch.Tensor]:
        best = logits.topk(2).values
        margins.extend((best[:, 0] - best[:, 1]).tolist())
        return choose(logits, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "choose_tokens", note_margins)
        for seed in range(MOST_SEEDS):
            margins.clear()
            found = answer(folder, kind, plan, seed, top=1)
            if margins and min(margins) > MARGIN:
                print(f"{kind}: seed {seed}, least margin {min(margins):.4f}")
                return {"seed": seed, "answers": found}
    raise AssertionError(f"{kind}: {MOST_SEEDS} seeds, and none with margins above {MARGIN}")


def write(net: dict[str, Any]) -> None:
    """A line for each position and prompt."""
    parts = [f'"transformers and PEFT": {json.dumps(net.pop("transformers and PEFT"))}']
    for kind, one in net.items():
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in one["answers"].items()]
        rows = ",\n".join(lines)
        parts.append(f'"{kind}": {{"seed": {one["seed"]}, "answers": {{\n{rows}\n}}}}')
    FILE.write_text("{\n" + ",\n\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        probe = {"transformers and PEFT": answer_by_peft(here)}
        kinds = {kind: plan for kind, plan in ANSWERED if plan in ("stacked", "")}
        write({**probe, **{kind: record(here, kind, plan) for kind, plan in kinds.items()}})
