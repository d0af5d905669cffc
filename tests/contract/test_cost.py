"""Costs against real models and known sizes, and the dry run against the real start."""

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import searches
import tiny
from task_items import write

from swarm.errors import UserError
from swarm.loop import cost_model
from swarm.loop import cost_model as speed
from swarm.loop.cost_model import H200, DeviceSpec, ModelShape, SearchWorkload, read_model_shape
from swarm.loop.prompt_stats import count_gold_tokens, count_prompt_tokens
from swarm.tasks.exact_match import ExactMatch

QWEN_7B = ModelShape(3584, 28, 28, 4, 128, 18944, 152064, tied=False)
LLAMA_8B = ModelShape(4096, 32, 32, 8, 128, 14336, 128256, tied=False)
GEMMA_7B = ModelShape(3072, 28, 16, 16, 256, 24576, 256000, tied=True)


def of(model: ModelShape, **more: Any) -> SearchWorkload:
    targets = tuple(model.layer_shapes)
    return SearchWorkload(
        10, model.adapter_weights(16, targets), model.adapted_weights(targets), **more
    )


def total(model: ModelShape, **more: Any) -> int:
    return sum(cost_model.estimate_memory(model, of(model, **more)).values())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_parameters_are_those_of_a_real_model(kind: str, request: pytest.FixtureRequest) -> None:
    import torch

    folder = request.getfixturevalue(f"tiny_{kind}")
    network, shape = tiny.load(folder), read_model_shape(folder)
    linears = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    }
    assert shape.linear_weights == sum(module.weight.numel() for module in linears.values())
    weights = sum(p.numel() for p in network.parameters() if p.dim() > 1)
    assert shape.parameter_count == weights
    out = network(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=True)
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in out.past_key_values.layers)
    assert cached == 5 * shape.kv_cache_width
    assert {name.rpartition(".")[2] for name in linears} == set(shape.layer_shapes)


def test_an_adapter_is_as_large_as_peft_makes_it(tiny_llama: Path, tiny_pool: Path) -> None:
    from swarm.pool.pool import Pool

    assert Pool(tiny_pool).open().size == read_model_shape(tiny_llama).adapter_weights(
        4, tiny.TARGETS
    )


@pytest.mark.parametrize(
    ("model", "linear", "adapter", "cache"),
    [
        (QWEN_7B, 6.53e9, 40.4e6, 56),
        (LLAMA_8B, 6.98e9, 41.9e6, 128),
        (GEMMA_7B, 7.75e9, 50e6, 448),
    ],
)
def test_known_models(model: ModelShape, linear: float, adapter: float, cache: float) -> None:
    assert model.linear_weights == pytest.approx(linear, rel=0.002)
    assert model.adapter_weights(16, tuple(model.layer_shapes)) == pytest.approx(adapter, rel=0.01)
    assert model.kv_cache_width * 2 / 1024 == cache


def test_a_7b_on_an_h200() -> None:
    assert QWEN_7B.parameter_count == pytest.approx(7.615e9, rel=0.001)
    assert cost_model.count_rows_that_fit(QWEN_7B, of(QWEN_7B, longest=340), H200) == pytest.approx(
        5900, rel=0.05
    )
    assert cost_model.count_devices_needed(QWEN_7B, of(QWEN_7B), H200) == 1
    # 600,000 tokens are 7.84e15 operations in the linear layers, 12.4 s at 80 %, and nine passes
    # over the activations of 28 layers: 5.2 s.
    merged = of(QWEN_7B, plan="merged", job_particles=1, job_items=200, new=0)
    one = cost_model.estimate_total_seconds(QWEN_7B, merged, H200, 1, 20, 200)
    assert one == pytest.approx(17.6, rel=0.01)


@pytest.mark.parametrize("key", ["items", "particles", "prompt", "new"])
@pytest.mark.parametrize("plan", ["swap", "merged", "stacked"])
def test_more_work_takes_longer(key: str, plan: str) -> None:
    small = of(QWEN_7B, plan=plan, max_tokens=1 << 20)
    large = replace(small, **{key: getattr(small, key) * 2})
    spent = [
        cost_model.estimate_total_seconds(QWEN_7B, search, H200, 1, search.particles, search.items)
        for search in (small, large)
    ]
    assert spent[0] < spent[1]


def test_workers_and_rows_save_time_and_take_memory() -> None:
    search = of(QWEN_7B)
    spent = [
        cost_model.estimate_total_seconds(QWEN_7B, search, H200, n, 20, 200) for n in (1, 2, 8)
    ]
    assert spent[0] > spent[1] > spent[2]
    assert spent[2] == pytest.approx(spent[0] / 8), "16 jobs are two for each of eight"
    assert total(QWEN_7B) > total(QWEN_7B, max_tokens=1024)
    assert total(QWEN_7B, item_bytes=4) > total(QWEN_7B)
    assert total(QWEN_7B, plan="stacked") > total(QWEN_7B, plan="swap")
    half = replace(H200, memory=H200.memory // 2)
    rows = [cost_model.count_rows_that_fit(QWEN_7B, search, device) for device in (H200, half)]
    assert rows[0] > 2 * rows[1] > 0
    none = replace(H200, memory=10 * cost_model.GIB)
    assert cost_model.count_rows_that_fit(QWEN_7B, search, none) == 0
    assert cost_model.count_devices_needed(QWEN_7B, search, none) > 1


def test_what_travels_is_small_and_counts_experts_once() -> None:
    down, up, once = cost_model.estimate_traffic(of(QWEN_7B, job_items=200)).values()
    assert down == 20 * 10 * 8 + 20 * 200 * 8
    assert up < 1e6 < once == 10 * 4 * QWEN_7B.adapter_weights(16, tuple(QWEN_7B.layer_shapes))


@pytest.mark.parametrize(
    ("change", "word"),
    [({"model_type": "mamba"}, "mamba"), ({"hidden_size": None}, "hidden_size")],
)
def test_other_models_are_refused_by_name(
    change: dict[str, Any], word: str, tmp_path: Path, tiny_llama: Path
) -> None:
    config = json.loads((tiny_llama / "config.json").read_text()) | change
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(UserError, match=word):
        read_model_shape(path)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", 65e12),
        ("NVIDIA L40S", 362e12),
    ],
)
def test_gpus_are_known_by_name(name: str, flops: float) -> None:
    found = speed.find_data_sheet(name)
    assert found and found[0] == flops


def test_a_gpu_is_asked_for_its_name_and_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    known, unknown = (
        type("Properties", (), {"name": name, "multi_processor_count": 100})
        for name in ("NVIDIA H200", "Abacus 9000")
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (7, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: known)
    device = speed.gpu_spec(0, 2)
    assert (device.flops, device.bandwidth, device.memory) == (H200.flops, H200.bandwidth, 7)
    assert speed.gpu_spec(0, 4).flops < device.flops / 10
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: unknown)
    assert 1e13 < speed.gpu_spec(0, 2).flops < 1e15 and 1e11 < speed.gpu_spec(0, 2).bandwidth < 1e13


def test_an_unknown_gpu_has_no_data_sheet() -> None:
    assert speed.find_data_sheet("Abacus 9000") is None


@pytest.fixture
def command(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    return searches.arguments(tmp_path, tiny_llama, tiny_pool)


def test_a_dry_run_tells_all_and_writes_nothing(command: list[str], tmp_path: Path) -> None:
    before = searches.tree(tmp_path)
    result = searches.run([*command, "dry_run=true"])
    assert result.returncode == 0, result.stderr
    assert searches.tree(tmp_path) == before and not (tmp_path / "search").exists()
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "not measured" in lines["dry"] and ": new" in lines["folder"]
    cost = r"dry run: at most about .* s on 1 x CPU.*, .*B of memory each, for at most 360 "
    assert re.match(cost + r"prompts on dev\.", result.stdout), "the cost is the first sentence"
    assert "4 experts" in lines["pool"] and "rank 4" in lines["adapter"]
    assert "12 dev items, 16 test items" in lines["task"]
    assert "base's tokenizer" in lines["prompts"] and "at most 360 prompts" in lines["search"]
    assert "stacked" in lines["plan"], "12 requests a particle are few"
    assert "2 a round of 5 positions x 12 prompts" in lines["jobs"]
    for name in ("model", "device", "memory", "time", "travels", "test"):
        assert name in lines
    limited = searches.run([*command, "minutes=1e-5", "dry_run=true"]).stdout
    assert limited.startswith("dry run: about 0.0006 s (minutes=1e-05; longer if the first ")


@pytest.mark.skipif((os.cpu_count() or 1) == 1, reason="one core needs no second worker")
def test_a_dry_run_suggests_workers_for_idle_cores(command: list[str]) -> None:
    suggested = "executor=processes executor.workers="
    assert suggested in searches.run([*command, "dry_run=true"]).stdout
    two = [*command, "executor=processes", "executor.workers=2", "dry_run=true"]
    assert suggested not in searches.run(two).stdout


def test_a_gradient_takes_a_little_over_two_forward_passes() -> None:
    """On a GPU, one of few tokens takes as long as its launches (H100: 0.21 s for 32 x 150)."""
    model, search = (
        ModelShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
        of(QWEN_7B, prompt=150),
    )
    processor = DeviceSpec("CPU", 1e11, 1e10, 1 << 35, 0.7, 0, 0, None)
    forward, _ = cost_model.estimate_batch_seconds(model, search, processor, 1, 8)
    found = cost_model.estimate_gradient_seconds(model, search, processor, 8, 150)
    assert 2 * forward < found < 2.4 * forward
    few = cost_model.estimate_gradient_seconds(model, search, H200, 4, 150)
    assert few == cost_model.estimate_gradient_seconds(model, search, H200, 8, 150)
    assert 0.15 < few < 0.25


def test_tokens_of_a_gradient_are_those_of_prompts_and_gold_answers(
    tiny_llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    items = [{"id": 0, "question": "the answer is", "answer": "true or no"}]
    task = ExactMatch("tiny", str(write(tmp_path / "tiny.json", {"dev": items, "test": items})))
    read = count_prompt_tokens(task, tokenizer).tokens[0]
    (example,) = task.gold_examples(task.items("dev"))
    answer = len(tokenizer(example.choices[0], add_special_tokens=False).input_ids)
    assert count_gold_tokens(task, tokenizer) == read + answer + example.final - 1
    assert count_gold_tokens(task, None) > 0


def test_a_dry_run_counts_all_rounds_of_a_play(command: list[str], tmp_path: Path) -> None:
    changes = ["task=abstain_mmlu", f"task.file={tmp_path / 'tiny.json'}", "dry_run=true"]
    one = searches.run([*command, "dry_run=true"])
    two = searches.run([*(word for word in command if word != "task=mmlu"), *changes])
    assert two.returncode == 0, two.stderr
    assert "at most 360 prompts" in one.stdout and "at most 720 prompts" in two.stdout
    assert "counted with empty answers" in two.stdout and "counted with" not in one.stdout
    assert "5 positions x 24 prompts" in two.stdout and "judging" not in two.stdout


def test_a_dry_run_says_how_much_a_judge_would_read(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Nobody listens at the judge's address: it is counted, not asked."""
    items = [{"prompt": f"say {n}", "id": n} for n in range(10)]
    file = write(tmp_path / "topic.json", {"dataset": "t", "dev": items[:6], "test": items[6:]})
    judge = ["base_url=http://127.0.0.1:9/v1", "model=small", "api_key_env=null"]
    command = [
        *searches.arguments(tmp_path, tiny_llama, tiny_pool, task="human_policy", task__file=file),
        *(f"task.scorer.model.{key}" for key in judge),
        "task.max_new_tokens=64",
        "dry_run=true",
    ]
    result = searches.run([word for word in command if not word.startswith("task.scoring")])
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("judging")]
    assert line.endswith("Judge: at most 180 texts on dev and 8 on test"), "5 x 6 x 6 and 2 x 4"


def test_a_base_that_is_not_there_is_neither_fetched_nor_guessed(command: list[str]) -> None:
    result = searches.run([*command, "model.path=some/base", "dry_run=true"])
    assert result.returncode == 0, result.stderr
    assert "4 characters per token" in result.stdout
    assert "some/base is not on this disk" in result.stdout


def test_a_dry_run_of_a_begun_search_says_how_far_it_is(command: list[str], tmp_path: Path) -> None:
    assert searches.run([*command, "optimizer.max_iterations=1"]).returncode == 0
    before = searches.tree(tmp_path)
    same = searches.run([*command, "optimizer.max_iterations=1", "dry_run=true"])
    assert "ended after 2 evaluated rounds" in same.stdout, same.stderr
    changes = [*command, "seed=7"]
    real, dry = searches.run(changes), searches.run([*changes, "dry_run=true"])
    assert real.returncode == dry.returncode == 1
    assert real.stderr == dry.stderr and "contains another search" in dry.stderr
    assert searches.tree(tmp_path) == before


def other_base(folder: Path, tiny_llama: Path) -> Path:
    """A random Llama with the tiny one's tokenizer and wider feed-forward layers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = json.loads((tiny_llama / "config.json").read_text()) | {"intermediate_size": 96}
    tiny.tokenizer(folder)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("task.file=missing.json", 1),
        ("optimizer.particles=3", 1),
        ("pool.folder=nowhere", 1),
        ("model.path=nowhere/at/all", 1),
        ("gpus=99", 1),
        ("tracker=sometimes", 2),
        ("model.path={other}", 1),
        ("model.path={plain} task.chat=true", 1),
    ],
)
def test_the_errors_of_a_dry_run_are_the_real_ones(
    change: str, code: int, command: list[str], tmp_path: Path, tiny_llama: Path
) -> None:
    if "{" in change:
        made = other_base(tmp_path / "other", tiny_llama), tiny.plain(tiny_llama, tmp_path / "base")
        change = change.format(other=made[0], plain=made[1])
    changes = change.split()
    dry = searches.run([*command, *changes, "dry_run=true"])
    assert not (tmp_path / "search").exists()
    real = searches.run([*command, *changes])
    assert not (tmp_path / "search").exists(), "a run folder for what cannot run"
    assert real.returncode == dry.returncode == code, dry.stderr
    assert real.stderr == dry.stderr and len(dry.stderr.strip().splitlines()) == 1


def test_dry_run_is_true_or_false(command: list[str]) -> None:
    result = searches.run([*command, "dry_run=perhaps"])
    assert result.returncode == 2 and "dry_run=perhaps" in result.stderr


def plan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    script = [sys.executable, str(searches.ROOT / "benchmarks" / "plan.py"), *arguments]
    return subprocess.run(
        script, capture_output=True, text=True, env=searches.environment(), check=False
    )


def test_the_table_of_the_documentation_is_what_the_script_prints() -> None:
    result = plan()
    assert result.returncode == 0, result.stderr
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3 * 2
    text = (searches.ROOT / "docs" / "scaling.md").read_text()
    assert "\n".join(table) in text, "run benchmarks/plan.py and put its table there"


def test_the_script_takes_any_configuration(tiny_llama: Path, tmp_path: Path) -> None:
    result = plan(str(tiny_llama), "--rank", "4", "--particles", "6", "--gpus", "1", "2", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(tiny_llama.name) == 3
    wrong = plan(str(tmp_path))
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ")


def load_benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, searches.ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_simulated_workers_take_the_next_job_when_they_are_free() -> None:
    from swarm.loop.evaluator import Batching

    plan = load_benchmark("plan")
    jobs = Batching(5, 50).split_jobs([[0.0]] * 20, "dev", 200)
    for workers, seconds in ((1, 16), (5, 4), (16, 1)):
        executor = plan.SimulatedExecutor(workers, lambda job: 1.0)
        numbers = [result.number for result in executor.map(jobs)]
        assert sorted(numbers) == list(range(16))
        assert executor.clock == pytest.approx(seconds, abs=0.02)
    # One long job first: the other worker takes all short ones.
    executor = plan.SimulatedExecutor(2, lambda job: 15.0 if job.number == 0 else 1.0)
    assert [result.number for result in executor.map(jobs)][-1] in (0, 15)
    assert executor.clock == pytest.approx(15, abs=0.02)


def test_simulated_searches_race_and_scale() -> None:
    plan = load_benchmark("plan")
    calls = {rule: plan.record_calls(rule, 10, 6, 4, 50, 8) for rule in ("off", "exact", "z")}
    assert all(len(iteration) == 1 for iteration in calls["off"])
    prompts = {
        rule: sum(rows * items for iteration in found for rows, items in iteration)
        for rule, found in calls.items()
    }
    assert prompts["off"] == 8 * 6 * 50 > prompts["exact"]
    work = of(QWEN_7B, rounds=11)
    one = plan.Simulation(QWEN_7B, work, H200)
    cut = plan.Layout(1, 5, 50)
    seconds = {workers: one.run("off", cut, workers) for workers in (1, 4, 8, 100)}
    assert seconds[1] == pytest.approx(one.bound("off", cut, 1), rel=0.1)
    assert seconds[1] / 4 < seconds[4] < seconds[1] / 3
    assert seconds[4] > seconds[8] > seconds[100] > seconds[1] / 16, "there are 16 jobs"
    # Two GPUs save less than half: they exchange hidden states.
    alone, pair = (one.job_seconds(plan.Layout(group, 5, 50), 5, 50) for group in (1, 2))
    assert alone / 2 < pair < alone
    with pytest.raises(UserError, match="needs"):
        plan.Simulation(QWEN_7B, work, replace(H200, memory=cost_model.GIB))


@pytest.mark.parametrize(
    ("plan", "slots", "budget"),
    [
        ("stacked", True, 65536),
        ("stacked", True, 4096),
        ("stacked", False, 65536),
        ("stacked", False, 2048),
        ("swap", True, 2048),
        ("merged", True, 65536),
    ],
)
def test_the_memory_of_a_job_is_that_of_its_tensors(
    plan: str, slots: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.profiler import ProfilerActivity, profile

    gpu = load_benchmark("gpu")
    # GPUs use the forward pass of transformers.
    monkeypatch.setattr("swarm.engine.cpu_forward.install_cpu_forward", lambda *_: None)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "vocab_size": 320,
    }
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(gpu.SHAPES, "small", shape)
    work = gpu.Workload(particles=3, experts=4, rank=8, items=24, prompt=100, new=12)
    engine, positions, basis = gpu.open_engine(
        "small", "bfloat16", "cpu", work, plan, "factor", "global"
    )
    engine.continuous, engine._budget = slots, budget
    asked = [gpu.Request(prompt, work.new) for prompt in gpu.prompts_of(work, work.items)]
    # A collection while it counts would free tensors of the case before, which lowers the peak.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            for _ in range(2):
                gpu.answer(engine, positions, asked)
    finally:
        gc.enable()
    changes = [event for event in found.profiler.kineto_results.events() if event.nbytes()]
    used = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    parts = gpu.estimate_job_memory(engine, basis, work, plan, slots)
    del parts["weights"], parts["basis"]
    assert sum(parts.values()) == pytest.approx(peak, rel=0.1)
