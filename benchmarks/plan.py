"""Cost of a search on H200-like GPUs, computed from shapes, not measured (docs/scaling.md).

python benchmarks/plan.py                                  # the table of three bases
python benchmarks/plan.py path/or/folder --rank 16 --particles 20 --gpus 1 4
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from swarm._util.cli import one_line_errors
from swarm.engine.hf import BATCH_GPU
from swarm.loop import cost_model
from swarm.loop.cost_model import (
    GIB,
    H200,
    DeviceSpec,
    ModelShape,
    SearchWorkload,
    read_model_shape,
)
from swarm.loop.dry_run import choose_auto_plan, format_amount, format_duration


def config(kind: str, *sizes: int, tied: bool = False) -> dict[str, object]:
    """A config.json's public facts, in the order of NAMES."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {"model_type": kind, "tie_word_embeddings": tied, **dict(zip(names, sizes, strict=True))}


# https://huggingface.co/NAME/blob/main/config.json
BASES = {
    "Qwen/Qwen2.5-0.5B": config("qwen2", 896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-7B": config("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "meta-llama/Llama-3.1-70B": config("llama", 8192, 80, 64, 8, 28672, 128256),
}
COLUMNS = (
    "base",
    "weights",
    "a LoRA",
    "experts, particles",
    "cache a token",
    "rows that fit",
    "GPUs",
    "workers",
    "a round, of it writing",
    "the search",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="a config.json or a folder with one")
    for name, value, words in (
        ("rank", 16, "of the LoRA experts"),
        ("experts", 10, "K"),
        ("particles", 20, "N"),
        ("iterations", 50, "maximum, without the evaluation of the initial particles"),
        ("items", 200, "of the dev split"),
        ("prompt", 150, "tokens"),
        ("new", 10, "tokens at most"),
        ("job-particles", 5, "positions in a job"),
        ("job-items", 50, "items in a job"),
        ("max-tokens", BATCH_GPU, "padded tokens in a batch"),
        ("memory", H200.memory // GIB, "GiB of a GPU"),
        ("flops", H200.flops, "FLOP/s of a large matmul"),
        ("bandwidth", H200.bandwidth, "bytes per second that a copy reads and writes"),
    ):
        parser.add_argument(
            f"--{name}", type=type(value), default=value, help=f"{words} (%(default)s)"
        )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8], help="(%(default)s)")
    parser.add_argument("--targets", nargs="+", help="linear layers with a LoRA; default: all")
    return parser.parse_args()


def search(model: ModelShape, asked: argparse.Namespace, device: DeviceSpec) -> SearchWorkload:
    targets = asked.targets or tuple(model.layer_shapes)
    made = SearchWorkload(
        experts=asked.experts,
        adapter=model.adapter_weights(asked.rank, targets),
        adapted=model.adapted_weights(targets),
        particles=asked.particles,
        rounds=asked.iterations + 1,
        items=asked.items,
        prompt=asked.prompt,
        longest=asked.prompt,
        new=asked.new,
        job_particles=min(asked.job_particles, asked.particles),
        job_items=min(asked.job_items, asked.items),
        max_tokens=asked.max_tokens,
    )
    return replace(made, plan=choose_auto_plan(made, model, device, True)[0])


def rows(name: str, model: ModelShape, asked: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A row for each number of GPUs; a model that one cannot hold is split, as if for nothing."""
    device = DeviceSpec("GPU", asked.flops, asked.bandwidth, asked.memory * GIB)
    wanted = search(model, asked, device)
    parts = cost_model.estimate_memory(model, wanted)
    needed = 1
    while needed < cost_model.count_devices_needed(model, wanted, device):
        needed *= 2  # attention heads are split in equal parts
    worker = device.scale_by(needed)
    for gpus in asked.gpus:
        workers, times = gpus // needed, ("does not fit", "")
        if workers:
            spent = cost_model.estimate_total_seconds(
                model, wanted, worker, workers, wanted.particles, wanted.items
            )
            reading, writing = cost_model.estimate_job_seconds(
                model, wanted, worker, wanted.job_particles, wanted.job_items
            )
            share = writing / (reading + writing)
            times = (
                f"{format_duration(spent)}, {share:.0%}",
                format_duration(spent * wanted.rounds),
            )
        yield (
            name.rpartition("/")[2],
            format_amount(parts["weights"], "B"),
            format_amount(wanted.adapter),
            f"{format_amount(parts['basis'], 'B')}, {format_amount(parts['particles'], 'B')}",
            f"{model.kv_cache_width * 2 / 1024:.0f} KiB",
            f"{cost_model.count_rows_that_fit(model, wanted, worker):,}",
            str(gpus),
            f"{workers} of {needed}" if workers else f"needs {needed}",
            *times,
        )


def main() -> None:
    asked = arguments()
    with one_line_errors():
        models = (
            {asked.config: read_model_shape(asked.config)}
            if asked.config
            else {name: read_model_shape(config) for name, config in BASES.items()}
        )
        table = [row for name, model in models.items() for row in rows(name, model, asked)]
    print("Computed, not measured.\n")
    for row in (COLUMNS, ("---",) * len(COLUMNS), *table):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
