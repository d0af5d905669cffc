"""Searches with vLLM as a user starts them, and what goes wrong."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import searches
import tiny
import vllm_engines

pytest.importorskip("vllm", reason="vLLM has an environment of its own: scripts/test_vllm.sh")

from swarm.engine.base_model import BaseModel
from swarm.engine.vllm import VLLMEngine
from swarm.errors import UserError
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state

pytestmark = pytest.mark.timeout(1200)
GPUS = "[]" if vllm_engines.DEVICE == "cpu" else "[0]"
VLLM = {"engine": "vllm", "engine__gpu_memory_utilization": 0.3}
SMALL = {**VLLM, "engine__options": f"{{kv_cache_memory_bytes:{2**27}}}"}
"""Several processes, and other tests beside them, each with a cache."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and experts of one shape."""
    folder = tmp_path_factory.mktemp("vllm_search")
    base = tiny.model(folder / "base", head=vllm_engines.HEAD)
    return base, tiny.pool(base, folder / "pool")


def searched(folder: Path, family: tuple[Path, Path], **more: object) -> dict[str, object]:
    """The utilities of a small search."""
    command = searches.arguments(folder, *family, gpus=GPUS, model__dtype="float32", **more)
    done = searches.run_process(command, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    state = read_state(folder / "search" / "run")
    return {"rounds": state["rounds"], "finished": state["finished"]}


@pytest.fixture(scope="module")
def expected(
    family: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    return searched(tmp_path_factory.mktemp("hf"), family)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"executor": "processes", "engine__tensor_parallel_size": 2},
        {"executor": "ray", "executor__workers": 2},
    ],
    ids=["inline", "one model in two processes", "ray"],
)
def test_a_search_is_the_transformers_engines(
    more: dict[str, object], family: tuple[Path, Path], expected: dict[str, object], tmp_path: Path
) -> None:
    if more.get("executor") == "ray":
        pytest.importorskip("ray")
    assert searched(tmp_path, family, **SMALL, **more) == expected


def test_what_was_learned_is_not_left_out(family: tuple[Path, Path], tmp_path: Path) -> None:
    """A search with gradients cannot go on without them: its best may have a learned adapter."""
    for more, code, told in (({}, 0, ""), (SMALL, 1, "resume with engine=hf")):
        words = searches.arguments(tmp_path, *family, gpus=GPUS, model__dtype="float32", **more)
        words = [word for word in words if not word.startswith(("optimizer.", "pool.space"))]
        done = searches.run_process([*words, "optimizer.max_iterations=3"], timeout=400)
        assert done.returncode == code and told in done.stderr, done.stderr


def test_ctrl_c_leaves_no_process_of_a_shared_model(
    family: tuple[Path, Path], tmp_path: Path
) -> None:
    more = {
        "executor": "processes",
        "engine__tensor_parallel_size": 2,
        "gpus": GPUS,
        "optimizer__max_iterations": 500,
        "optimizer__patience": 500,
    }
    command = searches.arguments(tmp_path, *family, **SMALL, **more)
    process = searches.start(command, start_new_session=True)
    begun = tmp_path / "search" / "run" / "global_best"
    assert until(begun.is_dir, 400), process.communicate(timeout=10)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130 and "stopped; the same command" in err
    assert until(lambda: not session(process.pid), 60), session(process.pid)


def session(number: int) -> list[str]:
    """What runs in a session, in words."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(one.pid) == number and one.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{one.pid} {one.name()}")
    return found


def until(what: Callable[[], bool], seconds: float) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.2)
    return what()


WRONG = {
    "engine.max_model_len=100000": "engine=vllm could not start:",
    "engine.options={max_num_seq:4}": "engine=vllm could not start:",
    "engine.options={kv_cache_memory_bytes:1000}": "engine=vllm could not start:",
}


@pytest.mark.parametrize(("setting", "told"), WRONG.items())
def test_what_cannot_start_says_why(
    setting: str, told: str, family: tuple[Path, Path], tmp_path: Path
) -> None:
    command = [*searches.arguments(tmp_path, *family, gpus=GPUS, **VLLM), setting]
    done = searches.run_process(command, timeout=400)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and line.startswith(f"error: {told}"), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "engine=hf" in line


@pytest.mark.skipif(vllm_engines.DEVICE != "cpu", reason="there is a GPU")
def test_a_graphics_card_that_this_build_does_not_use(family: tuple[Path, Path]) -> None:
    pool = Pool(family[1]).open()
    for device, told in (("cuda:0", "runs on the CPU"), ("cuda:3", "CUDA_VISIBLE_DEVICES=3")):
        with pytest.raises(UserError, match=told):
            VLLMEngine().open(BaseModel(str(family[0])), pool, device)
