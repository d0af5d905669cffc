"""Values and files that no search can mean: refused, or named, before or when they do harm."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
from safetensors.numpy import load_file, save_file

from swarm._util.files import find_path
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import NotFinite, UserError
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.executors.worker import DESCENT, DescentJob, Worker
from swarm.loop.evaluator import Batching, Evaluator, name_positions
from swarm.loop.identity import check_run_path
from swarm.models.base import Request
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.gradient import Descent
from swarm.optimizers.swarm import MemeticSwarm
from swarm.pool.pool import Pool
from swarm.tasks.multiple_choice import MultipleChoice


@pytest.fixture
def folder(tmp_path: Path, tiny_pool: Path) -> Path:
    """A pool of one's own, to be spoiled."""
    return Path(shutil.copytree(tiny_pool, tmp_path / "pool"))


def looped(expert: Path) -> None:
    shutil.rmtree(expert)
    expert.symlink_to(expert.name)


def piped(expert: Path) -> None:
    (expert / "adapter_config.json").unlink()
    os.mkfifo(expert / "adapter_config.json")


def nested(expert: Path) -> None:
    (expert / "adapter_config.json").write_text("[" * 100_000)


@pytest.mark.parametrize("spoil", [looped, piped, nested])
def test_a_spoiled_expert_is_named(spoil: Callable[[Path], None], folder: Path) -> None:
    spoil(folder / "birch")
    with pytest.raises(UserError, match="birch"):
        Pool(folder).open()
    assert Pool(folder, ["amber", "cedar"]).open().names == ["amber", "cedar"]


@pytest.mark.parametrize("name", ["bi\x1b[31mrch", "bi\u202erch", " ", "birch\udce9"])
def test_an_expert_whose_name_cannot_be_shown_is_refused(name: str, folder: Path) -> None:
    (folder / "birch").rename(folder / name)
    with pytest.raises(UserError, match="a name that") as error:
        Pool(folder).open()
    assert str(error.value).isprintable()


@pytest.mark.parametrize("plan", ["merged", "stacked"])
@pytest.mark.parametrize(("space", "choices"), [("factor", ()), ("delta", (" A", " B"))])
def test_what_is_not_finite_names_its_position(
    plan: str, space: str, choices: tuple[str, ...], tiny_llama: Path, tiny_pool: Path
) -> None:
    engine, pool = HFEngine(plan), Pool(tiny_pool, space=space).open()
    engine.open(BaseModel(str(tiny_llama), dtype="float16"), pool, "cpu")
    asked = [Request("which one", 4, choices), Request("is it so", 4, choices)]
    positions = np.eye(4)[:3]
    engine.generate(positions, [asked] * 3)
    for scale, place in ((3e5, 1), (1e30, 2)):
        spoiled = positions.copy()
        spoiled[place] *= scale
        with pytest.raises(NotFinite) as error:
            engine.generate(spoiled, [asked] * 3)
        assert error.value.position == place, error.value.quantity


def test_a_search_ends_with_the_adapter_named(
    tmp_path: Path, tiny_llama: Path, folder: Path
) -> None:
    file = folder / "cedar" / "adapter_model.safetensors"
    save_file({key: w * np.float32(1e5) for key, w in load_file(file).items()}, file)
    command = searches.arguments(tmp_path, tiny_llama, folder, model__dtype="float16")
    (line,) = commands.run("swarm.search", *command).err.strip().splitlines()
    assert "cedar: the mixed model's" in line and "not finite" in line


@pytest.mark.parametrize("space", ["factor", "delta"])
def test_a_descent_into_what_is_not_finite_names_its_particle(
    space: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    pool, file = Pool(tiny_pool, space=space).open(), searches.choice_file(tmp_path / "tiny.json")
    task, executor = MultipleChoice("tiny", str(file), scoring="logits"), InlineExecutor()
    executor.open(Worker(BaseModel(str(tiny_llama), dtype="float16"), pool, task, HFEngine()))
    evaluator = Evaluator(task, executor, Batching(1, None))
    descent = Descent(steps=1, batch=2)
    descent.start(1, 1, 4, seed=0)
    for scale in (1.0, 3e5, 1e30):
        position, name = tuple((scale * np.eye(4)[1]).tolist()), "particle 3 in its descent"
        routes = (0,) * 4
        job = DescentJob(0, (position,), DESCENT, tuple(range(4)), (name,), descent=descent,
                         steps=1, routes=routes)  # fmt: skip
        if scale == 1.0:
            assert np.isfinite(evaluator.descend([job])[0].position).all()
            continue
        says = f"^{name}: .* (weights|activations) are not finite"
        with pytest.raises(UserError, match=says):
            evaluator.descend([job])


@pytest.mark.parametrize("value", [1e7, -1e117, float("inf"), float("nan")])
def test_a_position_beyond_all_bounds_is_named(value: float) -> None:
    positions = np.zeros((3, 2))
    assert set(name_positions(positions, 0).values()) == {"mixture 0 of round 0"}
    positions[1, 0] = value
    with pytest.raises(UserError, match="mixture 1 of round 4: a coefficient of"):
        name_positions(positions, 4)


@pytest.mark.parametrize(
    ("name", "folder", "says"),
    [
        ("\x1b[31mred", "search", "unprintable"),
        ("  ", "search", "is blank"),
        ("a/b", "search", "is a path"),
        ("x" * 300, "search", "longer than 200 bytes"),
        ("run", "", "is blank"),
        ("run", "a/\x07", "unprintable"),
        ("run", "x" * 5000, "longer than 3,000 bytes"),
    ],
)
def test_a_place_that_cannot_be_written_or_shown_is_refused(
    name: str, folder: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as error:
        check_run_path(name, folder)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()


def test_what_cannot_be_a_path_or_steers_the_terminal_is_one_clean_line() -> None:
    for path in ("x" * 5000, "~no such user/x"):
        with pytest.raises(UserError, match="cannot be a path"):
            find_path(path)
    assert str(UserError("bi\x1b[31mrch \u202e\x07x")).isprintable()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MemeticSwarm(particles=10_001), r"optimizer.particles=\d+: .* at most 10000"),
        (lambda: CMAES(particles=10_001), r"optimizer.particles=\d+: .* at most 10000"),
        (lambda: Descent(batch=10_001), r"optimizer.descent.batch=\d+: .* at most 10000"),
        (lambda: MemeticSwarm(descent=5), "optimizer.descent=5: must be the keys of the gradient"),  # type: ignore[arg-type]
        (lambda: HFEngine(max_tokens=True), "engine.max_tokens=true: must be an integer"),
        (lambda: BaseModel("x", trust_remote_code="no"), "trust_remote_code=no: must be true or"),  # type: ignore[arg-type]
        (lambda: BaseModel("x", name=5), "model.name=5"),  # type: ignore[arg-type]
        (lambda: Pool("p", control="noise"), r"pool.control=noise: must be random, or null"),  # type: ignore[arg-type]
        (lambda: ProcessExecutor(workers=True), "executor.workers="),
        (lambda: ProcessExecutor(workers=1_001), "executor.workers="),
    ],
)
def test_types_and_sizes_are_checked_by_constructors(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task=chess"], "nlgraph_mini"),
        (["tracker=sometimes"], "tracker=sometimes"),
        (["tracker=wandb", "tracker.mode=sometimes"], "tracker.mode=sometimes"),
        (["gpus=0,0"], "gpus"),
        (["gpus=99"], "no CUDA device 99"),
        (["task.file=missing.json"], "missing.json"),
        (["task.parser=clever"], "parser"),
        (["model.path=nowhere/at/all"], "nowhere/at/all"),
        (["executor=processes", "executor.threads=foo"], "executor.threads"),
        (["name=${nope}"], "nope"),
        (["name=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
        (["--resolve"], "--resolve flag can only be used"),
        (["--config-dir=/nope"], "/nope"),
        (["~tracker"], "tracker"),
        (["task.file={here}/pipe"], "not a file"),
        (["name='\x1b[31mred'"], "unprintable"),
        (["shared=''"], "shared="),
        (["pool.folder=" + "x" * 5000], "cannot be a path"),
        (["pool.control=random", "pool.control_seed=-1"], "pool.control_seed"),
        (["optimizer.step_length=1e30"], "step_length=1e+30: must be a number, above 0"),
        (["minutes=0"], "minutes=0: must be auto, or a number, above 0, or null"),
        (["budget=20"], "budget=20: the 4 experts alone need 4 x 12"),
        (["shared=/proc/1/x"], "shared=/proc/1/x: "),
        (["confirm=1.0"], "confirm=1.0: must be a number, at least 0, below 1"),
        (["choose=kept"], "confirm=0.3"),
        (["noise_floor=3"], "noise_floor=3: must be true or false"),
        (["optimizer=nsga2"], "optimizer=nsga2: task mmlu has one objective; use task=mixture"),
        (["front=-1"], "front=-1: must be an integer"),
        (["baselines=[soop]"], "each base, soup, recipe, experts or routes"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_leaves_nothing(
    words: list[str], says: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool)
    if "optimizer=nsga2" in words:
        command = searches.arguments(tmp_path, tiny_llama, tiny_pool, optimizer="nsga2")
    more = [word.replace("{here}", str(tmp_path)) for word in words]
    done = commands.run("swarm.search", *command, *more)
    assert done.code in (1, 2), done.err
    (line,) = done.err.strip().splitlines()
    assert line.startswith("error: ") and says in line
    assert not (tmp_path / "search").exists()
