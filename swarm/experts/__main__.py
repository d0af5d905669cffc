"""Train small LoRA experts: python -m swarm.experts train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from swarm._util.cli import run_program
from swarm._util.files import in_checkout
from swarm._util.options import CONTEXT, run_click, settings_options
from swarm._util.settings import parse_settings
from swarm.errors import UserError
from swarm.experts.train import Recipe


@click.group(context_settings=CONTEXT)
def experts() -> None:
    """Train small LoRA experts."""


@experts.command()
@click.argument("name")
@click.option("--jsonl", type=Path, help='File with lines of {"prompt": ..., "response": ...}.')
@click.option("--gym", multiple=True, help="Category of reasoning-gym, may be repeated.")
@settings_options(Recipe)
@click.option("--base", help="Folder of the base model; default: as conf/model/smollm2.yaml.")
@click.option("--base-name", help="Name of the base in the expert's config; default: its hub id.")
@click.option(
    "--to",
    type=Path,
    default=in_checkout("initial_experts"),
    show_default=True,
    help="Parent folder of the expert.",
)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16.")
@click.option("--device", help="cpu, cuda or cuda:1; default: the first GPU, if any.")
def train(
    name: str,
    jsonl: Path | None,
    gym: Sequence[str],
    base: str | None,
    base_name: str | None,
    to: Path,
    dtype: str,
    device: str | None,
    **given: Any,
) -> None:
    """Train the expert NAME on prompts and responses.

    \b
    python -m swarm.experts train poems --jsonl poems.jsonl --steps 200
    python -m swarm.experts train puzzles --gym chain_sum --gym letter_counting
    """
    if bool(jsonl) == bool(gym):
        raise UserError("give the examples: either --jsonl FILE or --gym CATEGORY")
    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    chosen |= {"targets": list(chosen["targets"])} if "targets" in chosen else {}
    recipe = parse_settings(Recipe, chosen)
    from swarm.engine.base_model import choose_device
    from swarm.experts import train as training

    chosen_device = choose_device(device)
    if jsonl:
        pairs = training.read_jsonl(jsonl)
    else:
        pairs = training.read_gym(list(gym), recipe.examples, recipe.seed)
    model = training.load_base(base, dtype, base_name)
    expert = training.train(pairs, model, chosen_device, recipe, name)
    training.save(expert, model.name, to / name)
    click.echo(f"{name}: saved to {to / name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_click(experts, arguments, "python -m swarm.experts")


if __name__ == "__main__":
    run_program(main)
