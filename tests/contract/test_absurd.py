"""Values and files that no search can mean: refused, or named, before or when they do harm."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import commands
import numpy as np
import pytest
import searches
import tiny
from safetensors.numpy import load_file, save_file

from swarm._util.files import find_path
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import NotFinite, UserError
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.executors.worker import Worker
from swarm.loop.evaluator import Batching, Evaluator, name_positions
from swarm.loop.identity import check_run_path
from swarm.models.base import Request
from swarm.optimizers.base import LossRequest
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.genome import Genome
from swarm.optimizers.gradient import Descent
from swarm.optimizers.nes import NaturalEvolution
from swarm.optimizers.swarm import MemeticSwarm
from swarm.pool.pool import Pool
from swarm.tasks.multiple_choice import MultipleChoice


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"pool__noise_rows": 1, "pool__noise_scale": 1e300}, "pool.noise_scale"),
        ({"optimizer__step_length": 1e30}, "step_length=1e+30: must be a number, above 0"),
    ],
)
def test_an_absurd_value_is_one_line_and_leaves_nothing(
    more: dict[str, float], says: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    words = searches.arguments(tmp_path, tiny_llama, tiny_pool, **more)
    done = commands.run("swarm.search", *words)
    assert done.code in (1, 2) and says in done.err
    assert len(done.err.strip().splitlines()) == 1 and not (tmp_path / "search").exists()


@pytest.mark.parametrize("change", [{"lora_alpha": 10**7}, {"alpha_pattern": {"v_proj": 1e308}}])
def test_an_absurd_alpha_is_refused(
    change: dict[str, object], tmp_path: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    tiny.change(folder / "birch", **change)
    with pytest.raises(UserError, match=r"birch: .*alpha.*: must be a "):
        Pool(folder).open()


def weights_alone(folder: Path) -> None:
    (folder / "birch" / "adapter_config.json").unlink()


def configuration_alone(folder: Path) -> None:
    (folder / "birch" / "adapter_model.safetensors").unlink()


def loop(folder: Path) -> None:
    shutil.rmtree(folder / "birch")
    (folder / "birch").symlink_to("birch")


def nowhere(folder: Path) -> None:
    file = folder / "birch" / "adapter_config.json"
    file.unlink()
    file.symlink_to("../../blobs/0123")


@pytest.mark.parametrize("halve", [weights_alone, configuration_alone, loop, nowhere])
def test_half_an_expert_is_named(
    halve: Callable[[Path], None], tmp_path: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    halve(folder)
    with pytest.raises(UserError, match="birch"):
        Pool(folder).open()
    assert Pool(folder, ["amber", "cedar"]).open().names == ["amber", "cedar"]
    (folder / "notes").mkdir()
    (folder / "README.md").write_text("Experts.")
    assert len(Pool(tiny_pool).open().names) == 4


def test_equal_experts_are_named(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    shutil.copytree(folder / "birch", folder / "elm")
    # Other bytes of the same numbers.
    file = folder / "elm" / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "of": "birch"})
    Pool(folder).open().check()
    assert [r.message for r in caplog.records if "birch, elm have equal weights" in r.message]
    caplog.clear()
    Pool(tiny_pool).open().check()
    assert caplog.records == []


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


def test_a_search_ends_with_the_particle_named(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    file = folder / "cedar" / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({key: w * np.float32(1e5) for key, w in weights.items()}, file)
    command = searches.arguments(tmp_path, tiny_llama, folder, model__dtype="float16")
    done = commands.run("swarm.search", *command)
    assert done.code == 1, done.err
    (line,) = done.err.strip().splitlines()
    assert "particle 2 of iteration 0: the mixed model's" in line and "not finite" in line


def test_a_position_beyond_all_bounds_is_named() -> None:
    assert set(name_positions(np.zeros((2, 3)), 0).values()) == {"particle 0 of iteration 0"}
    for value in (1e7, -1e117, float("inf"), float("nan")):
        positions = np.zeros((3, 2))
        positions[1, 0] = value
        with pytest.raises(UserError, match="particle 1 of iteration 4: a coefficient of"):
            name_positions(positions, 4)


@pytest.mark.parametrize("space", ["factor", "delta"])
def test_a_descent_into_what_is_not_finite_names_its_particle(
    space: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    pool = Pool(tiny_pool, space=space).open()
    task = MultipleChoice(
        "tiny", str(searches.choice_file(tmp_path / "tiny.json")), scoring="logits"
    )
    executor = InlineExecutor()
    executor.open(Worker(BaseModel(str(tiny_llama), dtype="float16"), pool, task, HFEngine()))
    evaluator = Evaluator(task, executor, Batching(1, None))
    sound, spoiled = np.eye(4)[0], np.eye(4)[1]
    wanted = [
        LossRequest(sound, (0, 1), particle=2),
        LossRequest(spoiled, (0,), slope=False, particle=3),
    ]
    assert all(np.isfinite(one.loss) for one in evaluator.compute_gradients(wanted, range(4)))
    what = "(weights|activations)"
    for scale in (3e5, 1e30):
        wanted[1] = LossRequest(scale * spoiled, (0,), slope=False, particle=3)
        says = f"^particle 3 in the descent of iteration 7: the mixed model's {what} are not finite"
        with pytest.raises(UserError, match=says):
            evaluator.compute_gradients(wanted, range(4), iteration=7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_rslora": "no"}, "use_rslora=no: must be true or false"),
        ({"use_rslora": 1}, "use_rslora=1: must be true or false"),
        ({"base_model_name_or_path": ["x"]}, "base_model_name_or_path=.*: must be text, or null"),
        ({"target_modules": 5}, "target_modules=5: must be text, or a list"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(
    change: dict[str, object], says: str, tmp_path: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    tiny.change(folder / "birch", **change)
    with pytest.raises(UserError, match=f"birch: {says}"):
        Pool(folder).open()


@pytest.mark.parametrize("name", ["bi\nrch", "bi\x1b[31mrch", "bi\u202erch", " ", "birch\udce9"])
def test_an_expert_whose_name_cannot_be_shown_is_refused(
    name: str, tmp_path: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    (folder / "birch").rename(folder / name)
    with pytest.raises(UserError, match="has a name that") as error:
        Pool(folder).open()
    assert str(error.value).isprintable()


def test_a_configuration_that_is_a_pipe_or_nested_without_end_is_refused(
    tmp_path: Path, tiny_pool: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    file = folder / "birch" / "adapter_config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        Pool(folder).open()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"adapter_config.json"):
        Pool(folder, ["amber", "birch"]).open()


@pytest.mark.parametrize(
    ("name", "folder", "says"),
    [
        ("a\nb", "search", "unprintable"),
        ("\x1b[31mred", "search", "unprintable"),
        ("\u202eabc", "search", "unprintable"),
        ("  ", "search", "is blank"),
        ("", "search", "is blank"),
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


def test_find_refuses_what_cannot_be_a_path() -> None:
    for path in ("x" * 5000, "~no such user/x"):
        with pytest.raises(UserError, match="cannot be a path"):
            find_path(path)


def test_an_error_cannot_steer_the_terminal() -> None:
    assert str(UserError("bi\x1b[31mrch \u202e\x07x")).isprintable()


def test_more_particles_than_an_ask_can_hold_are_refused() -> None:
    for made in (MemeticSwarm, CMAES, Genome, NaturalEvolution):
        with pytest.raises(UserError, match=r"optimizer.particles=\d+: .* at most 10000"):
            made(particles=10_001)
    with pytest.raises(UserError, match=r"optimizer.descent.batch=\d+: .* at most 10000"):
        Descent(batch=10_001)


def test_types_that_were_taken_by_their_truth_are_refused(tiny_pool: Path) -> None:
    with pytest.raises(UserError, match=r"engine.max_tokens=true: must be an integer"):
        HFEngine(max_tokens=True)
    with pytest.raises(UserError, match=r"model.trust_remote_code=no: must be true or false"):
        BaseModel("x", trust_remote_code="no")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"model.name=5"):
        BaseModel("x", name=5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pool.noise_rows=99999999999: must be .* at most 1000"):
        Pool(tiny_pool, noise_rows=99_999_999_999)
    with pytest.raises(
        UserError, match=r"optimizer.descent=5: must be the keys of the gradient term"
    ):
        MemeticSwarm(descent=5)  # type: ignore[arg-type]
    for workers in (True, 0, 1_001, 10**23):
        with pytest.raises(UserError, match=r"executor.workers="):
            ProcessExecutor(workers=workers)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["name=${nope}"], "nope"),
        (["name=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
        (["--resolve"], "--resolve flag can only be used"),
        (["--package=nope"], "no effect without --cfg"),
        (["--config-dir=/nope"], "/nope"),
        (["~tracker"], "tracker"),
        (["task.file={here}/pipe"], "not a file"),
        (["name='\x1b[31mred'"], "unprintable"),
        (["folder="], "folder="),
        (["shared=''"], "shared="),
        (["pool.folder=" + "x" * 5000], "cannot be a path"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], says: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool)
    if words == ["~tracker"]:
        command = [word for word in command if not word.startswith("tracker")]
    more = [word.replace("{here}", str(tmp_path)) for word in words]
    done = commands.run("swarm.search", *command, *more)
    assert done.code in (1, 2), done.err
    (line,) = done.err.strip().splitlines()
    assert line.startswith("error: ") and says in line
    assert not (tmp_path / "search").exists()
