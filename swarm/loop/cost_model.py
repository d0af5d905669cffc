"""What a search costs in memory, time and traffic: computed from shapes with a roofline.

Everything here is arithmetic on a configuration and on a device's two speeds; nothing is measured.
A part of the work takes as long as the slower of its arithmetic and its memory traffic (Williams
et al. 2009, doi 10.1145/1498765.1498785), with the shares of the ideal that are named below.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from swarm.engine.hf import available_memory_bytes
from swarm.errors import UserError

# The shape of a decoder, read from its configuration alone: how many weights, and where.

# A decoder of these kinds has four attention and three feed-forward matrices a layer.
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
    """The shape of a decoder of the Llama, Qwen or Gemma kind; sizes in numbers of weights."""

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
        """The linear layers of one decoder layer, (in, out) each."""
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
        """Weights of all linear layers but the head."""
        return self.adapted_weights(tuple(self.layer_shapes))

    @property
    def head_weights(self) -> int:
        """Weights of the output layer, as many as of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameter_count(self) -> int:
        """All weights but biases and norms, which are below 0.1 % of a real model."""
        return self.linear_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_cache_width(self) -> int:
        """Numbers in the key-value cache a token; sliding windows, which save some, left aside."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapted_weights(self, targets: Sequence[str]) -> int:
        """Weights of the linear layers of these names."""
        return self.layers * sum(i * o for i, o in self._target_shapes(targets))

    def adapter_weights(self, rank: int, targets: Sequence[str]) -> int:
        """D, the weights of a LoRA adapter: rank x (in + out) a layer (arXiv 2106.09685)."""
        return self.layers * sum(rank * (i + o) for i, o in self._target_shapes(targets))

    def _target_shapes(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        if unknown := sorted(set(targets) - set(self.layer_shapes)):
            raise UserError(
                f"{unknown[0]} is no linear layer; allowed: {', '.join(self.layer_shapes)}"
            )
        return [self.layer_shapes[name] for name in targets]


def read_model_shape(config: str | Path | Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config.json, its folder, or its content describes.

    Raises:
        UserError: No such file, another kind of model, or a size is missing.
    """
    where = "the configuration"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        try:
            config = dict(json.loads(path.read_text(encoding="utf-8")))
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
    # Gemma and SmolLM3 are tied without saying so.
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
PREFILL_SHARE = 0.7
"""Of a GPU's matmul speed that reading prompts reaches; an assumption, usual for large batches."""

GPU_LAUNCH_SECONDS = 1e-3
"""A layer, to start a GPU's kernels from Python, which no small batch is faster than; an estimate
from gpt-fast's eager start: 39 ms a token with the 32 layers of a 7B
(pytorch.org/blog/accelerating-generative-ai-2)."""

USABLE_MEMORY = 0.9
"""Of a device's memory; the rest goes to the context, the allocator's gaps and single layers."""

BYTES_PER_SCORE = 64
"""A score on its way up, without its text."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a worker runs on.

    Attributes:
        name: In words.
        flops: Operations a second of a large matmul in the model's type.
        bandwidth: Bytes a second that a copy reads and writes.
        memory: Bytes.
        share: Of `flops`, that a whole forward reaches.
        launch: Seconds a layer that a forward takes however few its rows.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    share: float = PREFILL_SHARE
    launch: float = GPU_LAUNCH_SECONDS

    def scale_by(self, count: int) -> "DeviceSpec":
        """So many as one, as if splitting a model among them cost nothing; at best, therefore."""
        name = f"{count} x {self.name}" if count > 1 else self.name
        return DeviceSpec(
            name,
            self.flops * count,
            self.bandwidth * count,
            self.memory * count,
            self.share,
            self.launch,
        )


H200 = DeviceSpec("H200", 790e12, 4.3e12, 139 * GIB)
"""Bfloat16: what large matmuls and copies reach of the data sheet's 989 TFLOP/s and 4.8 TB/s."""


@dataclass(frozen=True, slots=True)
class SearchWorkload:
    """How much is to be done, and how it is cut.

    Attributes:
        experts, adapter, adapted: K, D, and the weights of the adapted layers.
        particles, rounds: Positions a round, and rounds at most.
        items: Of the dev split.
        prompt, longest, new: Tokens: a prompt's mean, the longest one's, the most to be written.
        job_particles, job_items: What makes a job.
        plan: "swap", "merged" or "stacked".
        max_tokens: The most padded tokens in a batch.
        item_bytes: A weight's size in the model: 2 in bfloat16, 4 in float32.
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
    item_bytes: int = 2

    def batch_shape(self, positions: int, items: int) -> tuple[int, int]:
        """Positions in a batch, and rows of each."""
        together = positions if self.plan == "stacked" else 1
        return together, min(items, max(1, self.max_tokens // (self.tokens_per_row * together)))

    @property
    def tokens_per_row(self) -> int:
        """Padded tokens of a row."""
        return self.longest + self.new


def estimate_memory(model: ModelShape, search: SearchWorkload) -> dict[str, int]:
    """Bytes on one worker's device, by part.

    "basis" is all experts in float32, "particles" the mixtures of a job or the copy of the
    adapted weights that one is added to, "cache" and "activations" those of a full batch.
    """
    size = search.item_bytes
    together, each = search.batch_shape(search.job_particles, search.job_items)
    tokens = together * each * search.tokens_per_row
    mixed = search.adapted if search.plan == "merged" else together * search.adapter
    # At the widest point of a layer: three feed-forward and about four hidden vectors a token.
    wide = 3 * model.intermediate + 4 * model.hidden
    logits = together * each * model.vocabulary * (size + 4)
    return {
        "weights": model.parameter_count * size,
        "basis": search.experts * search.adapter * 4,
        "particles": mixed * size,
        "cache": tokens * model.kv_cache_width * size,
        "activations": tokens * wide * size + logits,
    }


def count_rows_that_fit(model: ModelShape, search: SearchWorkload, device: DeviceSpec) -> int:
    """Rows whose cache fits beside the weights, experts and particles; 0 if these do not fit."""
    parts = estimate_memory(model, search)
    left = USABLE_MEMORY * device.memory - parts["weights"] - parts["basis"] - parts["particles"]
    return max(0, int(left / (search.tokens_per_row * model.kv_cache_width * search.item_bytes)))


def count_devices_needed(model: ModelShape, search: SearchWorkload, device: DeviceSpec) -> int:
    """Devices that hold the whole of `memory` at least, however it is split among them."""
    return ceil(sum(estimate_memory(model, search).values()) / (USABLE_MEMORY * device.memory))


def estimate_batch_seconds(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, together: int, each: int
) -> tuple[float, float]:
    """Reading the prompts of one batch, and writing its new tokens: all that are allowed."""
    rows, size = together * each, search.item_bytes
    update = 0 if search.plan == "merged" else search.adapter
    weights = (model.linear_weights + model.head_weights + together * update) * size
    wide = 4 * model.layers * model.heads * model.head_dim
    token = 2 * (model.linear_weights + update)
    reading = rows * (search.prompt * (token + wide * search.prompt / 2) + 2 * model.head_weights)
    floor = device.launch * model.layers
    prefill = max(reading / (device.flops * device.share), weights / device.bandwidth, floor)
    context = search.prompt + search.new / 2
    work = rows * (token + 2 * model.head_weights + wide * context) / device.flops
    traffic = (weights + rows * model.kv_cache_width * context * size) / device.bandwidth
    # Arithmetic and traffic overlap in part: midway between the ideal and none at all.
    step = max(max(work, traffic) + min(work, traffic) / 2, floor)
    return prefill, max(0, search.new - 1) * step


def estimate_job_seconds(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, positions: int, items: int
) -> tuple[float, float]:
    """Reading, with mixing the experts, and writing of a job of so many positions and items."""
    together, each = search.batch_shape(positions, items)
    turns, full = ceil(positions / together), items // each
    batches = [each] * full + ([items % each] if items % each else [])
    done = [estimate_batch_seconds(model, search, device, together, rows) for rows in batches]
    mixing = search.experts * search.adapter * 4
    mixing += 2 * search.adapted * search.item_bytes if search.plan == "merged" else 0
    reading = sum(prefill for prefill, _ in done) + mixing / device.bandwidth
    return turns * reading, turns * sum(decode for _, decode in done)


def list_job_sizes(search: SearchWorkload, positions: int, items: int) -> list[tuple[int, int]]:
    """(positions, items) of every job that scores so many positions on so many items."""
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
    """Until all jobs are done; a worker takes the next one when it is free."""
    busy = [0.0] * workers
    known: dict[tuple[int, int], float] = {}
    for job in list_job_sizes(search, positions, items):
        if job not in known:
            known[job] = sum(estimate_job_seconds(model, search, device, *job))
        busy[busy.index(min(busy))] += known[job]
    return max(busy)


def estimate_traffic(search: SearchWorkload) -> dict[str, int]:
    """Bytes between driver and workers: "down" and "up" a round, and "once" the experts a worker.

    Down are K numbers of 8 bytes a particle for each of its jobs, and the items' places; a text
    on its way up takes 4 bytes a token.
    """
    times = ceil(search.items / search.job_items)
    return {
        "down": search.particles * times * search.experts * 8 + search.particles * search.items * 8,
        "up": search.particles * search.items * (BYTES_PER_SCORE + 4 * search.new),
        "once": search.experts * search.adapter * 4,
    }


# How fast the device at hand is: a GPU by its name, a CPU by trying it for half a second.

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
"""Part of a name -> 16-bit operations (without sparsity) and bytes a second, of the makers' data
sheets; the first that fits counts."""

MEASURED_SHARE = (H200.flops / 989e12, H200.bandwidth / 4.8e12)
"""What an H200 reaches of its sheet, and here every GPU."""

FLOPS_PER_CYCLE = 2048
"""16-bit operations a multiprocessor and cycle, Ampere's, for a GPU that is not in the table."""

FLOAT32_SLOWDOWN = 15
"""How much slower than bfloat16 a GPU multiplies float32: an H200 does 67 and 989 TFLOP/s."""

CPU_SHARE = 0.7
"""Of a CPU's matmul speed that a whole forward reaches; tried on SmolLM2, see docs/scaling.md."""

CPU_LAUNCH_SECONDS = 5e-4
"""A layer, for what runs in Python and on one core."""

MAX_MATMUL_SIDE = 4096
"""Side of the matrix that is tried; larger ones are no faster."""

BENCHMARK_SECONDS = 0.4
"""For each of the two."""


def gpu_spec(number: int, size: int) -> DeviceSpec:
    """What is known of a CUDA device, for weights of `size` bytes; its memory is what is free.

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
    """The data sheet's operations and bytes a second of a GPU, if it is in the table."""
    words = name.upper().replace("-", " ").split()
    for known, speeds in DATA_SHEETS.items():
        if set(known.split()) <= set(words):
            return speeds
    return None


def _estimate_speeds(properties: Any) -> tuple[float, float]:
    """Of a GPU that is not in the table; torch gives clocks in kHz, and not in every version."""
    clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
    memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
    width = getattr(properties, "memory_bus_width", 256) / 8
    return properties.multi_processor_count * clock * FLOPS_PER_CYCLE, 2 * memory_clock * width


def measure_cpu(inputs: int, outputs: int, size: int, workers: int = 1) -> DeviceSpec:
    """This machine's processor, measured on a matmul of the model's own shape and on a copy.

    Imports torch. What else runs meanwhile is in the result, as it would be in a search.

    Args:
        inputs, outputs: The shape of the model's largest linear layer.
        size: Bytes of a weight.
        workers: Among how many the cores are shared.
    """
    import torch

    dtype = torch.float32 if size == 4 else torch.bfloat16
    inputs, outputs = min(inputs, MAX_MATMUL_SIDE), min(outputs, MAX_MATMUL_SIDE)
    # Few processors are quick in 16 bits; those that are not would be tried for minutes.
    count = 1024 if size == 4 else 32
    rows, weight = torch.randn(count, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    many = torch.zeros(1 << 24)
    copy = torch.empty_like(many)
    with torch.inference_mode():
        matmuls = _calls_per_second(lambda: torch.nn.functional.linear(rows, weight))
        copies = _calls_per_second(lambda: copy.copy_(many))
    flops = 2 * count * inputs * outputs * matmuls
    name = f"CPU, {torch.get_num_threads()} threads"
    return DeviceSpec(
        name,
        flops / workers,
        8 * len(many) * copies / workers,
        available_memory_bytes() // workers,
        CPU_SHARE,
        CPU_LAUNCH_SECONDS,
    )


def _calls_per_second(act: Callable[[], Any]) -> float:
    """How often it is done a second, the first time not counted."""
    act()
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < BENCHMARK_SECONDS:
        act()
        count += 1
    return count / spent
