"""The vLLM engine before vLLM: its settings, what it refuses, and the GPUs of its workers."""

import os
from pathlib import Path

import pytest
import searches
import tiny

from swarm.engine import vllm as launch
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine
from swarm.errors import UserError
from swarm.executors import ray
from swarm.executors.inline import InlineExecutor
from swarm.executors.ray import RayExecutor
from swarm.executors.worker import Worker, group_gpus, select_device
from swarm.pool.pool import Pool

MISSING = pytest.mark.skipif(launch.installed_version() is not None, reason="vLLM is installed")
PRESENT = pytest.mark.skipif(launch.installed_version() is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tensor_parallel_size": None}, "engine.tensor_parallel_size=null: must be an integer"),
        ({"gpu_memory_utilization": 90}, "engine.gpu_memory_utilization=90: must be a number"),
        ({"options": {"max_model_len": 4}}, "is not allowed; set engine.max_model_len"),
        ({"options": {"model": "x"}}, "model is not allowed; it is set by the engine"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        VLLMEngine(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({}, "engine=vllm needs vLLM: pip install ", marks=MISSING),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    change: dict[str, object], told: str, tiny_llama: Path, tmp_path: Path
) -> None:
    pool = tiny.pool(tiny_llama, tmp_path / "pool", ("amber", "birch"))
    tiny.change(pool / "birch", **change)
    done = searches.run(searches.arguments(tmp_path, tiny_llama, pool, engine="vllm"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert told in done.stderr and not (tmp_path / "search" / "run").exists()


def test_a_version_that_nobody_has_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fits in (
        ("0.31.9", False),
        ("0.32.0+cpu", True),
        ("0.33.1", True),
        ("0.34.0", False),
        ("1.0", False),
    ):
        monkeypatch.setattr(launch, "installed_version", lambda version=version: version)
        if fits:
            launch.check_installed()
            continue
        with pytest.raises(UserError, match=f"vLLM {version} is installed.*0.32.0.*engine=hf"):
            launch.check_installed()


def test_gpus_are_divided_among_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    hf, alone, pair = HFEngine(), VLLMEngine(), VLLMEngine(tensor_parallel_size=2)
    assert group_gpus([4, 5, 6, 7], hf) == group_gpus([4, 5, 6, 7], alone) == [[4], [5], [6], [7]]
    assert group_gpus([4, 5, 6, 7], pair) == [[4, 5], [6, 7]] and group_gpus([], pair) == []
    with pytest.raises(UserError, match=r"gpus=\[0, 1, 2\] with engine.tensor_parallel_size=2"):
        group_gpus([0, 1, 2], pair)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-abc")
    assert (
        select_device([2], hf) == "cuda:2" and os.environ["CUDA_VISIBLE_DEVICES"] == "3,5,GPU-abc"
    )
    assert select_device([], pair) == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == "3,5,GPU-abc"
    assert (
        select_device([0, 2], pair) == "cuda:0"
        and os.environ["CUDA_VISIBLE_DEVICES"] == "3,GPU-abc"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=r"gpus=\[1\]: this engine uses .*processes"):
        inline = InlineExecutor()
        inline._gpus = [1]  # as on a machine that has it
        inline.open(Worker(BaseModel("x"), Pool("y"), None, alone))  # type: ignore[arg-type]
    monkeypatch.setattr(ray, "list_nodes", lambda: [{"GPU": 4.0, "CPU": 8.0}])
    for engine, share, expected in ((hf, 0.5, (0.5, 8)), (hf, None, (1, 4)), (pair, None, (2, 2))):
        worker = Worker(BaseModel("x"), Pool("y"), None, engine)  # type: ignore[arg-type]
        assert RayExecutor(gpus_per_worker=share)._plan_workers(worker) == expected
    with pytest.raises(UserError, match=r"gpus_per_worker=1 with engine.tensor_parallel_size=2"):
        RayExecutor(gpus_per_worker=1)._plan_workers(worker)
    assert select_device([6, 7], pair) == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
