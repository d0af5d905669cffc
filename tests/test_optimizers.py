"""What every optimizer of conf/optimizer has to keep; what one promises itself is in CLAIMS."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

FILES = sorted((Path(__file__).parents[1] / "conf" / "optimizer").glob("*.yaml"))
EXPERTS, BUDGET, SEEDS = 10, 1020, 20


@dataclass(frozen=True)
class Claims:
    """What an optimizer promises beyond the protocol."""

    starts_with_experts: bool = True
    near: float = 0.2
    """Of the best expert's squared distance to the optimum, what is left at most (median)."""
    beats_random: bool = True
    """Nearer on most seeds than as many uniform draws from the simplex."""


CLAIMS: dict[str, Claims] = {"pso": Claims(near=0.1)}
Objective = Callable[[np.ndarray], np.ndarray]

each = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


def claims(file: Path) -> Claims:
    return CLAIMS.get(file.stem, Claims())


def made(file: Path) -> Any:
    return instantiate(OmegaConf.load(file))


def begun(file: Path, experts: int = EXPERTS, seed: int = 0) -> Any:
    optimizer = made(file)
    optimizer.start(experts, seed)
    return optimizer


def target(seed: int) -> np.ndarray:
    """An optimum in which a few of the experts matter, [K]; sums to 1."""
    return np.random.default_rng(1000 + seed).dirichlet(np.full(EXPERTS, 0.3))


def bowl(seed: int) -> Objective:
    return lambda rows: -((rows - target(seed)) ** 2).sum(axis=1)


def step(optimizer: Any, objective: Objective) -> np.ndarray:
    """One ask and tell; the utilities it was told, [N]."""
    positions = optimizer.ask()
    wanted = np.asarray(optimizer.evaluate)
    utilities = np.where(wanted, objective(positions), np.nan)
    optimizer.tell(utilities)
    return utilities


def search(optimizer: Any, objective: Objective) -> tuple[float, int]:
    """The best utility within the budget, and after how many evaluations the search ended."""
    best, spent = -np.inf, 0
    while optimizer.done() is None and spent < BUDGET:
        utilities = step(optimizer, objective)
        best, spent = max(best, np.nanmax(utilities)), spent + np.isfinite(utilities).sum()
    return best, int(spent)


def saved(optimizer: Any) -> Any:
    return json.loads(json.dumps(optimizer.state(), allow_nan=False))


@each
def test_ask(file: Path) -> None:
    optimizer = begun(file)
    for iteration in range(4):
        positions = optimizer.ask()
        copy = positions.copy()
        assert positions.dtype == np.float64 and positions.ndim == 2
        assert positions.shape[1] == EXPERTS and np.isfinite(positions).all()
        assert np.asarray(optimizer.evaluate).shape == (len(positions),)
        assert np.asarray(optimizer.evaluate).dtype == bool
        if iteration == 0:
            assert optimizer.evaluate.all()
            if claims(file).starts_with_experts:
                np.testing.assert_array_equal(positions[:EXPERTS], np.eye(EXPERTS))
        assert optimizer.done() is None
        np.testing.assert_array_equal(optimizer.ask(), copy)
        step(optimizer, bowl(0))


@each
def test_the_seed_decides(file: Path) -> None:
    def positions(seed: int) -> np.ndarray:
        optimizer = begun(file, seed=seed)
        for _ in range(4):
            step(optimizer, bowl(0))
        return optimizer.ask()

    np.random.seed(0)
    first = positions(3)
    np.random.seed(1)  # the global generator plays no part
    np.testing.assert_array_equal(positions(3), first)
    assert not np.array_equal(positions(4), first)


@each
def test_comes_near_the_optimum_of_a_bowl(file: Path) -> None:
    left = []
    for seed in range(SEEDS):
        best, _ = search(begun(file, seed=seed), bowl(seed))
        left.append(best / bowl(seed)(np.eye(EXPERTS)).max())
    assert np.median(left) <= claims(file).near


@each
def test_beats_random_search_of_the_same_budget(file: Path) -> None:
    if not claims(file).beats_random:
        pytest.skip("does not claim to")
    won = 0
    for seed in range(SEEDS):
        best, spent = search(begun(file, seed=seed), bowl(seed))
        rows = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), size=spent)
        won += best > bowl(seed)(rows).max()
    assert won > SEEDS / 2


@each
def test_bears_noise_and_missing_utilities(file: Path) -> None:
    random = np.random.default_rng(0)

    def objective(rows: np.ndarray) -> np.ndarray:
        noisy = bowl(0)(rows) + 0.05 * random.normal(size=len(rows))
        missing = random.random(len(rows)) < (1.0 if random.random() < 0.2 else 0.2)
        return np.where(missing, np.nan, noisy)

    optimizer = begun(file)
    for _ in range(20):
        step(optimizer, objective)
        saved(optimizer)
        assert np.isfinite(optimizer.ask()).all()


@each
@pytest.mark.parametrize("utility", [np.nan, 0.0, 1.0], ids=["missing", "zero", "one"])
def test_ends_where_nothing_differs(file: Path, utility: float) -> None:
    optimizer = begun(file, experts=3)
    for _ in range(10_000):
        if (reason := optimizer.done()) is not None:
            assert isinstance(reason, str) and reason
            return
        assert np.isfinite(optimizer.ask()).all()
        step(optimizer, lambda rows: np.full(len(rows), utility))
    pytest.fail("has no end")


@each
def test_says_how_many_iterations_it_takes_at_most(file: Path) -> None:
    optimizer = begun(file)
    assert isinstance(optimizer.max_iterations, int)
    told = 0
    while optimizer.done() is None:
        # Always something new, so that nothing but their number ends it.
        step(optimizer, lambda rows, told=told: bowl(0)(rows) + told)
        told += 1
    assert told <= optimizer.max_iterations + 1  # the start is none


@each
def test_goes_on_from_its_state(file: Path) -> None:
    straight, resumed = begun(file), begun(file)
    for _ in range(8):
        np.testing.assert_array_equal(resumed.ask(), straight.ask())
        np.testing.assert_array_equal(resumed.evaluate, straight.evaluate)
        state = saved(resumed)
        resumed = made(file)
        resumed.load(state)  # between ask and tell
        step(straight, bowl(0))
        step(resumed, bowl(0))
        assert resumed.done() == straight.done()
        state = saved(resumed)
        assert state == saved(straight)
        resumed = made(file)
        resumed.load(state)  # between tell and ask


@each
def test_works_with_two_experts(file: Path) -> None:
    optimizer = begun(file, experts=2)
    for _ in range(5):
        step(optimizer, lambda rows: rows[:, 0])
    assert optimizer.ask().shape[1] == 2
