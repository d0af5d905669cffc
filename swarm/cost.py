"""What a search costs in memory, time and traffic: computed from shapes with a roofline.

Everything here is arithmetic on a configuration and on a device's two speeds; nothing is measured.
A part of the work takes as long as the slower of its arithmetic and its memory traffic (Williams
et al. 2009, doi 10.1145/1498765.1498785), with the shares of the ideal that are named below.
"""

from dataclasses import dataclass
from math import ceil

from swarm.shape import ModelShape

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
        return DeviceSpec(name, self.flops * count, self.bandwidth * count, self.memory * count,
                      self.share, self.launch)  # fmt: skip


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
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int, positions: int, items: int
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
