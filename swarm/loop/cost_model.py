"""Cost model of a search: memory, time and traffic, computed from shapes with a roofline.

The estimates are arithmetic on a configuration and on two device speeds. Each part of the work
takes as long as the slower of its arithmetic and its memory traffic (Williams et al. 2009, doi
10.1145/1498765.1498785), scaled by the efficiency constants below. Device speeds come from a table
of data sheets for GPUs; a CPU is benchmarked for half a second.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from swarm._util.files import parse_json
from swarm.engine.base import (
    LENGTH_BUCKET,
    PREFILL_DIVISOR,
    available_memory_bytes,
    limit_cache_tokens,
)
from swarm.errors import UserError

# Supported decoders: four attention and three feed-forward matrices per layer.
MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a Llama-like, Qwen-like or Gemma-like decoder; sizes in numbers of weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes (in, out) of the linear layers of one decoder layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_weights(self) -> int:
        """Number of weights of all linear layers except the head."""
        return self.adapted_weights(tuple(self.layer_shapes))

    @property
    def head_weights(self) -> int:
        """Number of weights of the output layer; the embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameter_count(self) -> int:
        """Number of weights, without biases and norms (below 0.1 % of a real model)."""
        return self.linear_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_cache_width(self) -> int:
        """Elements of the key-value cache per token; savings by sliding windows are ignored."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapted_weights(self, targets: Sequence[str]) -> int:
        """Return the number of weights of the named linear layers."""
        return self.layers * sum(i * o for i, o in self._target_shapes(targets))

    def adapter_weights(self, rank: int, targets: Sequence[str]) -> int:
        """Return D, the weights of a LoRA adapter: rank x (in + out) a layer (arXiv 2106.09685)."""
        return self.layers * sum(rank * (i + o) for i, o in self._target_shapes(targets))

    def _target_shapes(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        if unknown := sorted(set(targets) - set(self.layer_shapes)):
            raise UserError(
                f"{unknown[0]} is not a linear layer; allowed: {', '.join(self.layer_shapes)}"
            )
        return [self.layer_shapes[name] for name in targets]


def read_model_shape(config: str | Path | Mapping[str, Any]) -> ModelShape:
    """Read the model shape from a transformers config.json, its folder, or its content.

    Raises:
        UserError: The file does not exist, the model type is unsupported, or a size is missing.
    """
    where = "the configuration"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        try:
            config = dict(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read as JSON: {error}") from None
    sizes: Mapping[str, Any] = config.get("text_config", config)
    if (kind := sizes.get("model_type")) not in MODEL_TYPES:
        raise UserError(
            f"{where}: the cost of a model of the type {kind} is unknown; it is known of "
            f"{', '.join(MODEL_TYPES)}"
        )
    try:
        return _shape_from_config(sizes)
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}") from None


def _shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    # Gemma and SmolLM3 configurations may omit `tie_word_embeddings`, which defaults to true.
    silent = config["model_type"].startswith(("gemma", "smollm3"))
    return ModelShape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", silent)),
    )


GIB = 1 << 30
PREFILL_SHARE = 0.8
"""Share of a GPU's speed of a large matmul that those of a prefill reach."""

ACTIVATION_PASSES = 9
"""Times that a prefill of transformers moves all activations of a layer, outside of matmuls.

This and the two times below are measured on one H100 (benchmarks/results/gpu, docs/scaling.md).
"""

GPU_LAUNCH_SECONDS = 2e-3
"""Minimum seconds per layer of a GPU forward, due to kernel launches from Python.

Rounded: 1.6 ms (8B) and 2.4 ms (1B) of a step with ten rows.
"""

GRAPH_SECONDS = 3.6e-4
"""Seconds per layer of a step that is replayed as a CUDA graph, beside its memory traffic."""

GRADIENT_PASSES = 2.1
"""Seconds of a gradient per second of its loss (SmolLM2 on a CPU, docs/benchmarks.md).

The base is frozen, so the backward pass computes derivatives by activations alone, in as many
products as the forward. A budget counts three, as with derivatives by weights.
"""

GRADIENT_LAUNCHES = 3
"""Kernel launches in a pass of a gradient per launch of a forward (one measurement on an H100)."""

USABLE_MEMORY = 0.9
"""Usable share of device memory; the rest is for the context, fragmentation and single layers."""

BYTES_PER_SCORE = 64
"""Bytes of a score sent to the driver, without its text."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Speeds and memory of a worker's device.

    Attributes:
        name: Name for display.
        flops: Operations per second of a large matmul in the model's type.
        bandwidth: Bytes per second that a copy reads and writes.
        memory: Bytes.
        share: Share of `flops` that the matmuls of a full forward reach.
        launch: Minimum seconds per layer of a forward, regardless of the number of rows.
        passes: See `ACTIVATION_PASSES`.
        graph: Seconds per layer of a captured step, beside its traffic; `None` if steps are not.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    share: float = PREFILL_SHARE
    launch: float = GPU_LAUNCH_SECONDS
    passes: float = ACTIVATION_PASSES
    graph: float | None = GRAPH_SECONDS

    def scale_by(self, count: int) -> "DeviceSpec":
        """Return `count` devices as one, assuming that splitting a model is free (a best case)."""
        name = f"{count} x {self.name}" if count > 1 else self.name
        return replace(
            self,
            name=name,
            flops=self.flops * count,
            bandwidth=self.bandwidth * count,
            memory=self.memory * count,
        )


H200 = DeviceSpec("H200", 790e12, 4.3e12, 139 * GIB)
"""Bfloat16: what large matmuls and copies reach of the data sheet's 989 TFLOP/s and 4.8 TB/s."""


@dataclass(frozen=True, slots=True)
class SearchWorkload:
    """Amount of work of a search, and its division into jobs.

    Attributes:
        experts, adapter, adapted: K, D, and the number of weights of the adapted layers.
        particles, rounds: Positions per iteration, and the maximum number of iterations.
        items: Number of dev items.
        prompt, longest, new: Tokens: mean prompt, longest prompt, maximum of new tokens.
        job_particles, job_items: Positions and items per job.
        plan: "swap", "merged" or "stacked".
        max_tokens: Maximum number of padded tokens in a batch.
        cache_tokens: That of all slots; `None` is that of a batch.
        item_bytes: Bytes per weight in the model: 2 in bfloat16, 4 in float32.
        slots: Whether texts are decoded in slots (`swarm.engine.slots`), as on a GPU.
    """

    experts: int
    adapter: int
    adapted: int
    particles: int = 20
    rounds: int = 51
    items: int = 200
    prompt: float = 150
    longest: int = 150
    new: int = 10
    job_particles: int = 5
    job_items: int = 50
    plan: str = "stacked"
    max_tokens: int = 65536
    cache_tokens: int | None = None
    item_bytes: int = 2
    slots: bool = False

    def batch_shape(self, positions: int, items: int) -> tuple[int, int]:
        """Return the number of positions in a batch, and of rows of each."""
        together = positions if self.plan == "stacked" else 1
        tokens = (self.slots and self.new and self.cache_tokens) or self.max_tokens
        return together, min(items, max(1, tokens // (self.tokens_per_row * together)))

    @property
    def tokens_per_row(self) -> int:
        """Padded tokens per row."""
        return self.longest + self.new


def estimate_memory(model: ModelShape, search: SearchWorkload) -> dict[str, int]:
    """Estimate the bytes on one worker's device, by part.

    "basis" is all experts in float32, "particles" the mixtures of a job or the copy of the adapted
    weights that one is added to, "cache" and "activations" those of a full batch, while prompts
    are read or texts are written, whichever needs more.
    """
    size = search.item_bytes
    together, each = search.batch_shape(search.job_particles, search.job_items)
    mixed = search.adapted if search.plan == "merged" else together * search.adapter
    token = model.kv_cache_width * size

    def activate(rows: int, tokens: int) -> int:
        # In a layer: three feed-forward and about four hidden vectors per token. After the layers:
        # logits, and a copy in float32.
        wide = 3 * model.intermediate + 4 * model.hidden
        return max(tokens * wide * size, rows * model.vocabulary * (size + 4))

    rows = together * each
    prompts, written = rows * search.longest, rows * search.tokens_per_row
    phases = [(prompts * token, activate(rows, prompts)), (written * token, activate(rows, rows))]
    if search.slots:
        # The slots' cache remains, and is filled from that of a prefill.
        length = ceil(search.tokens_per_row / LENGTH_BUCKET) * LENGTH_BUCKET
        tokens = search.cache_tokens or search.max_tokens
        rows = max(1, min(together * search.job_items, tokens // length))
        read = min(rows, max(1, tokens // PREFILL_DIVISOR // search.longest))
        prompts = read * search.longest
        phases = [((rows * length + prompts) * token, activate(read, prompts))]
    cache, activations = max(phases, key=sum)
    return {
        "weights": model.parameter_count * size,
        "basis": search.experts * search.adapter * 4,
        "particles": mixed * size,
        "cache": cache,
        "activations": activations,
    }


def fit_cache(search: SearchWorkload, model: ModelShape, device: DeviceSpec) -> SearchWorkload:
    """Return the workload with the number of tokens that the engine's slots would have."""
    if not search.slots:
        return search
    size = search.item_bytes
    used = model.parameter_count * size + search.experts * search.adapter * 4
    free = max(0, device.memory - used)
    tokens = limit_cache_tokens(search.max_tokens, model.kv_cache_width * size, free)
    return replace(search, cache_tokens=tokens)


def count_rows_that_fit(model: ModelShape, search: SearchWorkload, device: DeviceSpec) -> int:
    """Return the rows whose cache fits beside weights, experts and particles; 0 if those do not."""
    parts = estimate_memory(model, search)
    free = USABLE_MEMORY * device.memory - parts["weights"] - parts["basis"] - parts["particles"]
    return max(0, int(free / (search.tokens_per_row * model.kv_cache_width * search.item_bytes)))


def count_devices_needed(model: ModelShape, search: SearchWorkload, device: DeviceSpec) -> int:
    """Return the minimum number of devices that hold `estimate_memory`, however it is split."""
    return ceil(sum(estimate_memory(model, search).values()) / (USABLE_MEMORY * device.memory))


def estimate_batch_seconds(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, together: int, each: int
) -> tuple[float, float]:
    """Estimate prefill and decode seconds of one batch; decoding writes all allowed new tokens."""
    rows, size = together * each, search.item_bytes
    update = 0 if search.plan == "merged" else search.adapter
    weights = (model.linear_weights + model.head_weights + together * update) * size
    wide = 4 * model.layers * model.heads * model.head_dim
    token = 2 * (model.linear_weights + update)
    reading = rows * (search.prompt * (token + wide * search.prompt / 2) + 2 * model.head_weights)
    floor = device.launch * model.layers
    activations = model.layers * (3 * model.intermediate + 4 * model.hidden) * size
    moved = rows * search.prompt * activations * device.passes / device.bandwidth
    reading = reading / (device.flops * device.share) + moved
    prefill = max(reading, weights / device.bandwidth, floor)
    context = search.prompt + search.new / 2
    work = rows * (token + 2 * model.head_weights + wide * context) / device.flops
    traffic = (weights + rows * model.kv_cache_width * context * size) / device.bandwidth
    # Arithmetic and traffic overlap partly: take the midpoint of full overlap and none.
    step = max(work, traffic) + min(work, traffic) / 2
    if search.slots and device.graph is not None:
        step += device.graph * model.layers
    else:
        step = max(step, floor)
    return prefill, max(0, search.new - 1) * step


def estimate_job_seconds(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, positions: int, items: int
) -> tuple[float, float]:
    """Estimate the seconds of a job: prefill (including mixing the experts), and decode."""
    together, each = search.batch_shape(positions, items)
    turns, full = ceil(positions / together), items // each
    batches = [each] * full + ([items % each] if items % each else [])
    seconds = [estimate_batch_seconds(model, search, device, together, rows) for rows in batches]
    mixing = search.experts * search.adapter * 4
    mixing += 2 * search.adapted * search.item_bytes if search.plan == "merged" else 0
    reading = sum(prefill for prefill, _ in seconds) + mixing / device.bandwidth
    return turns * reading, turns * sum(decode for _, decode in seconds)


def estimate_gradient_seconds(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, examples: int, tokens: float
) -> float:
    """Estimate the seconds of the gradient of a position on a batch of examples.

    Args:
        examples: Number of examples, of which one batch consists.
        tokens: Mean number of tokens that an example reads.
    """
    slower = replace(device, launch=GRADIENT_LAUNCHES * device.launch)
    batch = replace(search, plan="stacked", prompt=tokens)
    forward, _ = estimate_batch_seconds(model, batch, slower, 1, examples)
    mixing = search.experts * search.adapter * 4 / device.bandwidth
    return GRADIENT_PASSES * forward + mixing


def list_job_sizes(search: SearchWorkload, positions: int, items: int) -> list[tuple[int, int]]:
    """Return (positions, items) of every job that scores these positions on these items."""
    return [
        (min(search.job_particles, positions - first), min(search.job_items, items - start))
        for first in range(0, positions, search.job_particles)
        for start in range(0, items, search.job_items)
    ]


def estimate_total_seconds(
    model: ModelShape,
    search: SearchWorkload,
    device: DeviceSpec,
    workers: int,
    positions: int,
    items: int,
) -> float:
    """Estimate the seconds until all jobs are done; each goes to the first free worker."""
    busy = [0.0] * workers
    known: dict[tuple[int, int], float] = {}
    for job in list_job_sizes(search, positions, items):
        if job not in known:
            known[job] = sum(estimate_job_seconds(model, search, device, *job))
        busy[busy.index(min(busy))] += known[job]
    return max(busy)


def estimate_traffic(search: SearchWorkload) -> dict[str, int]:
    """Estimate bytes between driver and workers: "down" and "up" per iteration, "once" per worker.

    "down" is K numbers of 8 bytes per particle and job, and the item indices; "up" is the scores
    and their texts at 4 bytes per token; "once" is the experts.
    """
    times = ceil(search.items / search.job_items)
    return {
        "down": search.particles * times * search.experts * 8 + search.particles * search.items * 8,
        "up": search.particles * search.items * (BYTES_PER_SCORE + 4 * search.new),
        "once": search.experts * search.adapter * 4,
    }


DATA_SHEETS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100 PCIE": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 1.94e12),
    "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "RTX 4090": (165e12, 1.008e12),
    "RTX 3090": (71e12, 0.936e12),
    "V100": (125e12, 0.9e12),
    "T4": (65e12, 0.32e12),
}
"""Data sheets: part of a device name -> 16-bit operations and bytes per second.

Operations are without sparsity; the first matching name counts.
"""

MEASURED_SHARE = (H200.flops / 989e12, H200.bandwidth / 4.8e12)
"""Share of the data sheet that an H200 reaches, assumed for every GPU: (flops, bandwidth)."""

FLOPS_PER_CYCLE = 2048
"""16-bit operations per multiprocessor and cycle (Ampere), for GPUs that are not in the table."""

FLOAT32_SLOWDOWN = 15
"""Slowdown of float32 matmuls against bfloat16 on a GPU: an H200 reaches 67 and 989 TFLOP/s."""

CPU_SHARE = 0.7
"""Share of a CPU's matmul speed that a whole forward reaches (SmolLM2, see docs/scaling.md)."""

CPU_LAUNCH_SECONDS = 5e-4
"""Seconds per layer spent in Python and on one core."""

MAX_MATMUL_SIDE = 4096
"""Maximum side of the benchmark matrix; larger ones are no faster."""

BENCHMARK_SECONDS = 0.4
"""Duration of each of the two benchmarks."""


def gpu_spec(number: int, size: int) -> DeviceSpec:
    """Return the spec of a CUDA device for weights of `size` bytes; its memory is what is free.

    Imports torch and opens the device.
    """
    import torch

    properties = torch.cuda.get_device_properties(number)
    flops, bandwidth = find_data_sheet(properties.name) or _estimate_speeds(properties)
    slower = FLOAT32_SLOWDOWN if size == 4 else 1
    free = torch.cuda.mem_get_info(number)[0]
    return DeviceSpec(
        properties.name, flops * MEASURED_SHARE[0] / slower, bandwidth * MEASURED_SHARE[1], free
    )


def find_data_sheet(name: str) -> tuple[float, float] | None:
    """Return a GPU's data-sheet operations and bytes per second, if it is in the table."""
    words = name.upper().replace("-", " ").split()
    for known, speeds in DATA_SHEETS.items():
        if set(known.split()) <= set(words):
            return speeds
    return None


def _estimate_speeds(properties: Any) -> tuple[float, float]:
    """Estimate a GPU that is not in the table; some torch versions lack the clocks (kHz)."""
    clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
    memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
    width = getattr(properties, "memory_bus_width", 256) / 8
    return properties.multi_processor_count * clock * FLOPS_PER_CYCLE, 2 * memory_clock * width


def measure_cpu(inputs: int, outputs: int, size: int, workers: int = 1) -> DeviceSpec:
    """Measure this machine's CPU on a matmul of the model's own shape and on a copy.

    Imports torch. Other load on the machine is part of the result, as it would be in a search.

    Args:
        inputs, outputs: Shape of the model's largest linear layer.
        size: Bytes per weight.
        workers: Number of workers that share the cores.
    """
    import torch

    dtype = torch.float32 if size == 4 else torch.bfloat16
    inputs, outputs = min(inputs, MAX_MATMUL_SIDE), min(outputs, MAX_MATMUL_SIDE)
    # Many CPUs are slow in 16 bits; the full row count would take minutes on those.
    count = 1024 if size == 4 else 32
    rows, weight = torch.randn(count, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    buffer = torch.zeros(1 << 24)
    copy = torch.empty_like(buffer)
    with torch.inference_mode():
        matmuls = _calls_per_second(lambda: torch.nn.functional.linear(rows, weight))
        copies = _calls_per_second(lambda: copy.copy_(buffer))
    flops = 2 * count * inputs * outputs * matmuls
    name = f"CPU, {torch.get_num_threads()} threads"
    return DeviceSpec(
        name,
        flops / workers,
        # A copy reads and writes 4 bytes per element.
        8 * len(buffer) * copies / workers,
        available_memory_bytes() // workers,
        CPU_SHARE,
        CPU_LAUNCH_SECONDS,
        passes=0,
        graph=None,
    )


def _calls_per_second(act: Callable[[], Any]) -> float:
    """Return the number of calls per second; the first call is not counted."""
    act()
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < BENCHMARK_SECONDS:
        act()
        count += 1
    return count / spent
