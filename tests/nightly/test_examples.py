"""Each example of examples/ runs, on the tiny model and few items, and says what it found."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import searches

from swarm.api import Result, Roster, task

EXAMPLES = searches.ROOT / "examples"
HERE = {path.stem for path in EXAMPLES.glob("*.py")}
NAMES = ("rooms", "roads", "arithmetic", "counting")
SMALL: dict[str, Any] = {"noise_floor": False, "show": False, "ensemble": 0}
FEW = {"particles": 4, "max_iterations": 1}


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def says_e(prompt: str, answer: str, item: dict[str, Any]) -> float:
    return float("e" in answer)


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for what an aggregator reads."""
    folder = tmp_path_factory.mktemp("base") / "tiny-llama"
    shutil.copytree(tiny_llama, folder)
    config = folder / "config.json"
    told = {**json.loads(config.read_text()), "max_position_embeddings": 4096}
    config.write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def named(tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pool under the names of the experts that ship."""
    home = tmp_path_factory.mktemp("named")
    for new, old in zip(
        NAMES, sorted(one for one in tiny_pool.iterdir() if one.is_dir()), strict=True
    ):
        shutil.copytree(old, home / new)
    return home


@pytest.fixture(scope="module")
def few() -> Any:
    """A task of six texts."""
    items = [{"prompt": f"number {n}", "split": s} for n in range(3) for s in ("dev", "test")]
    return task(
        [{**one, "prompt": f"{one['prompt']} {one['split']}"} for one in items],
        says_e,
        highest=1.0,
        max_new_tokens=3,
    )


@pytest.fixture(scope="module")
def pair(
    named: Path, base: Path, few: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What cma_es_against_pso.py has searched."""
    home = tmp_path_factory.mktemp("pair")
    found: dict[str, Result] = example("cma_es_against_pso").main(
        24, str(home), task=few, model=base, pool=named, overrides={}, **SMALL
    )
    return found


def test_all_are_tested_and_short() -> None:
    assert {
        "own_task_by_a_function",
        "own_experts",
        "own_folder",
        "cma_es_against_pso",
        "mixture_of_a_runs_best_particles",
        "consortium_of_local_experts",
        "compare_two_bests",
    } == HERE
    for name in HERE:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


def test_own_task(named: Path, base: Path, tmp_path: Path, capsys: Any) -> None:
    made = example("own_task_by_a_function")
    assert made.nearness("", " it is 41", {"sum": 40}) == pytest.approx(0.9)
    assert made.nearness("", "no", {"sum": 40}) == made.nearness("", "99", {"sum": 4}) == 0
    found = made.main(6, pool=named, model=base, folder=tmp_path, optimizer=FEW, **SMALL)
    assert (len(found.history), found.verdict.dev.n) == (8, 2)
    assert "What is 12 + 26?" in capsys.readouterr().out


def test_own_experts(named: Path, base: Path, few: Any, tmp_path: Path, capsys: Any) -> None:
    made = example("own_experts")
    home = made.filled(tmp_path / "mine", str(named), ("roads", "rooms"))
    assert made.filled(home, str(named)) == home and not (home / "arithmetic").exists()
    (tmp_path / "taken").mkdir()
    with pytest.raises(SystemExit, match="was not created by this example"):
        made.filled(tmp_path / "taken", str(named))
    assert list((tmp_path / "taken").iterdir()) == []
    found = made.main(home, base, task=few, folder=tmp_path, overrides={}, optimizer=FEW, **SMALL)
    assert set(found.best.coefficients) == {"half_and_half", "roads", "rooms"}
    said = capsys.readouterr().out
    assert "3 experts of rank 4: half_and_half, roads, rooms" in said
    assert f"again: {found.best.utility:.3f}" in said


def test_own_folder(tmp_path: Path) -> None:
    made = example("own_folder")
    made.create_folder(tmp_path / "mine")
    items = [*csv.DictReader((tmp_path / "mine" / "items.csv").open())]
    assert len(items) == 240 and {item["domain"] for item in items} == set(made.SKILLS)
    for skill in made.SKILLS:
        assert (tmp_path / "mine" / "adapters" / skill / "adapter_config.json").is_file()
    with pytest.raises(SystemExit, match="exists"):
        made.create_folder(tmp_path / "mine")


def test_the_optimizers_have_one_budget(pair: dict[str, Result]) -> None:
    for result in pair.values():
        assert 12 <= result.verdict.costs["prompts_scored"] <= 24
    names = {name: result.run.identity["optimizer._target_"] for name, result in pair.items()}
    assert names["pso"].endswith("MemeticSwarm") and names["cmaes"].endswith("CMAES")


def test_compare_two_bests(pair: dict[str, Result], few: Any, capsys: Any) -> None:
    found = example("compare_two_bests").main(*pair.values(), few)
    gains = found["differ"].value_second - found["differ"].value_first
    assert gains.sum() / 3 == pytest.approx(found["gain"].difference)
    said = capsys.readouterr().out
    assert said.count("rooms") >= 1 and "second after first: " in said


def test_mixture_of_particles(pair: dict[str, Result], few: Any, capsys: Any) -> None:
    mixture = example("mixture_of_a_runs_best_particles").main(pair["pso"], few, ())
    assert [slot.name for slot in mixture.proposers] == [b.words for b in pair["pso"].bests(3)]
    assert "together after alone: " in capsys.readouterr().out


def test_consortium(named: Path, base: Path, few: Any, capsys: Any) -> None:
    roster = Roster(base=str(base), pool=named, device="cpu")
    example("consortium_of_local_experts").main(roster, ("rooms", "roads"), few, ())
    said = capsys.readouterr().out
    assert "local/rooms says " in said and "local/roads alone: " in said
