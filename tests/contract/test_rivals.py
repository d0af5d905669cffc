"""What EvoGM and AdaMerging do beyond the contract of optimizers, and searches of rivals."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import test_gradient
import tiny
import torch

from swarm.models.base import Example
from swarm.optimizers.adamerging import AdaMerging
from swarm.optimizers.base import EntropyRequest
from swarm.optimizers.evogm import EvolutionaryGenerator, GeneratorPair
from swarm.runs.folder import read_state

TARGET = np.array([0.7, -0.4, 0.6])


def bowl(rows: np.ndarray) -> np.ndarray:
    return -((rows - TARGET) ** 2).sum(axis=1)


def begun(optimizer, experts: int = 3, seed: int = 0, groups: int = 1):
    optimizer.start(experts, seed, groups)
    return optimizer


def step(optimizer, objective=bowl) -> np.ndarray:
    rows = optimizer.ask()
    optimizer.tell(np.where(optimizer.evaluate, objective(rows), np.nan))
    return rows


def test_training_leads_losers_to_winners_and_back() -> None:
    draw = np.random.default_rng(0)
    pair = GeneratorPair(3, draw, 1.0, 1.0, 1e-3)
    winners, losers = draw.uniform(0.4, 0.8, (6, 3)), draw.uniform(-0.8, -0.4, (14, 3))
    before = pair.train_generators(winners, losers, 1, draw)
    assert pair.train_generators(winners, losers, 100, draw) < before / 4
    assert np.abs(pair.improve_vectors(losers) - winners.mean(axis=0)).mean() < 0.3


def test_the_population_of_evogm_keeps_the_best() -> None:
    search = begun(EvolutionaryGenerator(particles=6, epochs=2))
    first = step(search)
    np.testing.assert_array_equal(first[3], np.full(3, 1 / 3))
    assert (np.abs(first[4:]) <= 1).all()
    second = step(search)
    assert (np.abs(second) <= 1).all() and search.evaluate.all()
    both = np.vstack([first, second])
    best = np.argsort(-bowl(both), kind="stable")[:6]
    np.testing.assert_allclose(search.members, both[best])


@pytest.mark.parametrize("groups", [1, 2])
def test_elites_are_the_basis_of_the_next_round(groups: int) -> None:
    search = begun(EvolutionaryGenerator(particles=7, epochs=2), groups=groups)

    def objective(rows: np.ndarray) -> np.ndarray:
        return -((rows - np.tile(TARGET, groups)) ** 2).sum(axis=1)

    asked = np.vstack([step(search, objective) for _ in range(4)])
    elites = asked[np.argsort(-objective(asked), kind="stable")[:3]]
    rows = search.ask()
    assert list(search.evaluate) == [False] * 3 + [True] * 4  # elites are known
    np.testing.assert_allclose(search.basis, elites)
    np.testing.assert_allclose(rows[3], elites.mean(axis=0))
    draws = search.proposals[4:].reshape(3, groups, 3)
    parts = elites.reshape(3, groups, 3)
    wanted = [[draws[i, g] @ parts[:, g] for g in range(groups)] for i in range(3)]
    np.testing.assert_allclose(rows[4:], np.reshape(wanted, (3, -1)))
    step(search, objective)
    assert len(search.rows) == 7  # the elites are part of the round's history


def test_evogm_bears_a_round_without_results() -> None:
    search = begun(EvolutionaryGenerator(particles=5, epochs=2))
    for _ in range(9):
        assert np.isfinite(step(search, lambda rows: np.full(len(rows), np.nan))).all()
    np.testing.assert_array_equal(search.basis, np.eye(3))


def descended(optimizer: AdaMerging, slope: Callable[[np.ndarray], Any]) -> list[tuple[int, ...]]:
    """Answer all that it wants; gives the items."""
    course, answer, found = optimizer.descend(20), None, []
    while True:
        try:
            (wanted,) = course.send(answer)
        except StopIteration:
            return found
        assert isinstance(wanted, EntropyRequest)
        found.append(wanted.items)
        answer = [type("Slope", (), {"loss": 0.0, "slope": slope(wanted.position)})()]


def test_adamerging_takes_the_steps_of_torchs_adam_through_a_clamp() -> None:
    wanted = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
    adam, slope = torch.optim.Adam([wanted], lr=0.2), np.array([1.0, -2.0, 0.1])
    for _ in range(5):
        adam.zero_grad()
        (wanted.clamp(0.0, 1.0) * torch.from_numpy(slope)).sum().backward()
        adam.step()
    search = begun(AdaMerging(rate=0.2, steps=5, batch=4))
    np.testing.assert_array_equal(search.ask(), np.vstack([np.eye(3), np.full(3, 0.3)]))
    search.tell(np.zeros(4))
    items = descended(search, lambda x: slope)
    assert sorted(sum(items, ())) == list(range(20))  # each item once before any twice
    found = wanted.detach().numpy()
    assert found[0] < 0 and found[1] > 1
    np.testing.assert_allclose(search.weights, found)
    np.testing.assert_allclose(search.ask()[3], found.clip(0.0, 1.0))
    assert list(search.evaluate) == [False, False, False, True]
    search.tell(np.zeros(4))
    assert descended(search, lambda x: slope) != items


UNLABELLED = [replace(example, unlabelled=True) for example in test_gradient.EXAMPLES]


def entropy(base: Path, pool: Any, position: np.ndarray, example: Example) -> float:
    """By transformers on merged weights: of the choices, or of the token after the prompt."""
    if len(example.choices) == 1:
        from transformers import AutoTokenizer

        model, tokenizer = tiny.load(base), AutoTokenizer.from_pretrained(base)
        with torch.no_grad():
            for name, (a, b) in pool.combine(position.tolist()).items():
                model.get_submodule(name).weight += (b.double() @ a.double()).float()
            said = model(torch.tensor([tokenizer(example.prompt).input_ids])).logits[0, -1]
            shares = said.double().softmax(-1).numpy()
    else:
        known = np.array(test_gradient.logprobs(base, pool, position, example))
        known /= example.units or 1
        shares = np.exp(known) / np.exp(known).sum()
    return -example.weight * float((shares * np.log(shares)).sum())


def test_the_entropy_is_that_of_merged_weights(tiny_llama: Path, mixed_pool: Path) -> None:
    engine, pool = test_gradient.opened(tiny_llama, mixed_pool, space="delta", groups="kind")
    position = test_gradient.drawn(pool)
    wanted = [entropy(tiny_llama, pool, position, example) for example in UNLABELLED]
    alone = [engine.compute_gradient(position, [one], slope=False).loss for one in UNLABELLED]
    np.testing.assert_allclose(alone, wanted, atol=2e-3)
    assert min(alone) > 0.01 and max(alone) > math.log(5)

    # Gold answers are not looked at, and labelled examples may stand beside unlabelled ones.
    def loss(*examples: Example) -> float:
        return float(engine.compute_gradient(position, examples).loss)

    assert loss(*(replace(one, gold=0) for one in UNLABELLED)) == loss(*UNLABELLED)
    both = loss(*test_gradient.EXAMPLES, *UNLABELLED)
    assert both == pytest.approx(loss(*test_gradient.EXAMPLES) + loss(*UNLABELLED), rel=1e-4)


def test_the_slope_of_the_entropy_is_its_difference(tiny_llama: Path, tiny_pool: Path) -> None:
    engine, pool = test_gradient.opened(tiny_llama, tiny_pool, space="delta")
    position = test_gradient.drawn(pool)
    slope, rough = engine.compute_gradient(position, UNLABELLED).slope, []
    for step in 3e-3 * np.eye(len(position)):
        up, down = (
            engine.compute_gradient(x, UNLABELLED, False).loss
            for x in (position + step, position - step)
        )
        rough.append((up - down) / 6e-3)
    assert np.abs(slope).max() > 0.01
    np.testing.assert_allclose(slope, rough, atol=0.05 * np.abs(slope).max())


def test_a_search_that_never_reads_gold_answers_to_descend(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """With other gold answers on dev the same positions are scored."""
    positions = []
    for name in ("right", "wrong"):
        folder = tmp_path / name
        folder.mkdir()
        file = searches.choice_file(folder / "tiny.json")
        if name == "wrong":
            content = json.loads(file.read_text())
            for item in content["dev"]:
                item["answer"] = "A"
            file.write_text(json.dumps(content))
        more: dict[str, Any] = {"optimizer": "adamerging", "optimizer__particles": "null"}
        more |= {"optimizer__steps": 2, "optimizer__rate": 0.1, "pool__groups": "per_module"}
        words = searches.arguments(folder, tiny_llama, tiny_pool, **more)
        done = commands.run("swarm.search", *words)
        assert done.code == 0, done.err
        rounds = read_state(folder / "search" / "run")["rounds"]
        assert [len(entry["positions"]) for entry in rounds] == [5] * 5
        positions.append([entry["positions"][4] for entry in rounds])
    assert positions[0] == positions[1]
    assert all(one != two for one, two in zip(positions[0], positions[0][1:], strict=False))


def test_a_search_from_sparsified_experts(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """The paper's first swarm: experts, sparsified experts and base."""
    more = {"optimizer": "pso_merging", "experiment": "pso_merging", "pool__space": "delta"}
    more |= {"optimizer__particles": "null"}
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, "merged", **more)
    done = commands.run("swarm.search", *command)
    assert done.code == 0, done.err
    state = read_state(tmp_path / "search" / "merged")
    assert state["experts"] == [*tiny.NAMES, *(f"sparse_{name}" for name in tiny.NAMES)]
    first = np.array(state["rounds"][0]["positions"])
    np.testing.assert_array_equal(first, np.vstack([np.eye(8), np.zeros(8)]))
