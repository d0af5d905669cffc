"""The vLLM engine before vLLM: its settings, what it refuses, and the GPUs of its workers."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import searches
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from swarm.engine.base import MultiGpuEngine, SupportsClose
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import launch
from swarm.engine.vllm.adapter_sync import HostBasis
from swarm.engine.vllm.engine import VLLMEngine
from swarm.errors import UserError
from swarm.executors import ray
from swarm.executors.inline import InlineExecutor
from swarm.executors.ray import RayExecutor
from swarm.executors.worker import Worker, group_gpus, select_device
from swarm.pool.adapter import WEIGHTS_FILE
from swarm.pool.pool import Pool

MISSING = pytest.mark.skipif(launch.installed_version() is not None, reason="vLLM is installed")
PRESENT = pytest.mark.skipif(launch.installed_version() is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"way": "slot"}, "engine.way=slot: must be one of folders, slots"),
        ({"max_loras": 0}, "engine.max_loras=0: must be null or a positive integer"),
        ({"tensor_parallel_size": None}, "engine.tensor_parallel_size=None: must be a positive"),
        ({"max_model_len": 1.5}, "engine.max_model_len=1.5: must be null or a positive"),
        ({"gpu_memory_utilization": 90}, "engine.gpu_memory_utilization=90: must be a number"),
        ({"options": {"max_loras": 4}}, "max_loras is not allowed; set engine.max_loras"),
        ({"options": "foo"}, "engine.options=foo: must be null or arguments by name"),
        ({"options": {"model": "x"}}, "model is not allowed; it is set by the engine"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        VLLMEngine(**settings)  # type: ignore[arg-type]


def test_it_travels_as_its_settings() -> None:
    engine = VLLMEngine("slots", 3, 2, 0.5, 700, {"max_num_seqs": 8})
    again = pickle.loads(pickle.dumps(engine))
    assert vars(again) == vars(engine) and again.devices == 2
    assert isinstance(engine, MultiGpuEngine) and isinstance(engine, SupportsClose)
    assert not isinstance(HFEngine(), MultiGpuEngine | SupportsClose)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({}, "engine=vllm needs vLLM: pip install ", marks=MISSING),
        ({"use_dora": True}, "use_dora is set"),
        ({"bias": "all"}, "bias is 'all'"),
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


def test_the_output_layer_is_not_for_vllm(tiny_llama: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("amber", "birch")):
        file = tiny.expert(tiny_llama, tmp_path / name, seed, targets=("lm_head",)) / WEIGHTS_FILE
        # PEFT saves the layer itself as well, which a pool does not take.
        save_file({k: v for k, v in load_file(file).items() if "base_layer" not in k}, file)
    with pytest.raises(UserError, match=r"adapt lm_head, which vLLM ignores.*engine=hf"):
        VLLMEngine().check(BaseModel(str(tiny_llama)), Pool(tmp_path).open())


def test_a_rank_that_vllm_does_not_take(
    tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tiny_pool, space="delta").open()
    assert (pool.rank, launch.serving_rank(pool)) == (16, 16)
    assert launch.serving_rank(Pool(tiny_pool).open()) == 8
    pool.rank = 513
    with pytest.raises(UserError, match=r"rank 513.*up to rank 512; pool.space=factor.*engine=hf"):
        VLLMEngine().check(BaseModel(str(tiny_llama)), pool)


def test_a_file_is_the_position(
    tiny_llama: Path, tiny_pool: Path, mixed_pool: Path, tmp_path: Path
) -> None:
    """What vLLM is given says under PEFT what the pool's own file says."""
    for number, (folder, space) in enumerate([(mixed_pool, "factor"), (tiny_pool, "delta")]):
        pool = Pool(folder, space=space).open()
        position = np.random.default_rng(0).normal(size=4)
        HostBasis(pool).write_adapter(position, tmp_path / f"given-{number}", "float32")
        pool.save(position, tmp_path / f"saved-{number}")
        given, saved = (
            tiny.logits(PeftModel.from_pretrained(tiny.load(tiny_llama), file).eval())
            for file in (tmp_path / f"given-{number}", tmp_path / f"saved-{number}")
        )
        assert torch.allclose(given, saved, atol=1e-4)


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
