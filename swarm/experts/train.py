"""Train small LoRA experts on prompts and responses: a domain, a JSONL file, or gym tasks."""

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swarm._util.cli import run_command, run_program
from swarm._util.files import find_path, in_checkout, parse_json
from swarm.errors import UserError, install_command
from swarm.experts.domains import DOMAINS, Pair, examples

TEMPLATE = "{prompt}\nAnswer:"
"""Prompt template; the response follows after a space and ends with the end token."""
CHUNK = 256
"""Number of examples sorted by length together; more reduces padding, fewer mixes better."""

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


def read_jsonl(path: Path) -> list[Pair]:
    """Read the pairs of a file with one {"prompt": ..., "response": ...} per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--jsonl {path} cannot be read: {error}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            pairs.append((str(row["prompt"]), str(row["response"])))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number}: expected an object {{"prompt": ..., "response": ...}}'
            ) from None
    return pairs


def read_gym(categories: list[str], count: int, seed: int) -> list[Pair]:
    """Generate `count` pairs with reasoning-gym, in equal parts from each category."""
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            f"--gym needs the package reasoning-gym: {install_command('train')}"
        ) from None
    size = -(-count // len(categories))
    pairs = []
    for category in categories:
        try:
            tasks = reasoning_gym.create_dataset(category, size=size, seed=seed)
        except ValueError:
            raise UserError(f"--gym {category} is not a category of reasoning-gym") from None
        pairs += [(task["question"].strip(), str(task["answer"])) for task in tasks]
    return pairs


def encode(tokenizer: Any, pairs: list[Pair], longest: int) -> list[Encoded]:
    """Tokenize the pairs that fit into `longest` tokens; the response ends the text."""
    found = []
    for prompt, response in pairs:
        prompt_ids = tokenizer.encode(TEMPLATE.format(prompt=prompt))
        response_ids = tokenizer.encode(" " + response, add_special_tokens=False)
        if len(prompt_ids) + len(response_ids) < longest:
            found.append((prompt_ids, [*response_ids, tokenizer.eos_token_id]))
    if not found:
        raise UserError(f"none of the {len(pairs)} examples fits into --tokens {longest}")
    return found


def token_batches(lengths: Sequence[int], tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of examples of similar length, at most `tokens` with padding, endlessly.

    Args:
        lengths: Number of tokens of each example.

    Yields:
        The indices of the examples of a batch.
    """
    generator = random.Random(seed)
    order = list(range(len(lengths)))
    while True:
        generator.shuffle(order)
        for start in range(0, len(order), CHUNK):
            grouped: list[list[int]] = [[]]
            for index in sorted(order[start : start + CHUNK], key=lengths.__getitem__):
                if (len(grouped[-1]) + 1) * lengths[index] > tokens:
                    grouped.append([])
                grouped[-1].append(index)
            generator.shuffle(grouped)
            yield from (batch for batch in grouped if batch)


CONFIG = (
    "peft_type peft_version task_type base_model_name_or_path inference_mode r lora_alpha "
    "lora_dropout use_rslora use_dora bias fan_in_fan_out target_modules"
)
"""Entries of PEFT's configuration that are saved: those needed to apply the expert."""


@dataclass(frozen=True)
class Recipe:
    """Training settings of an expert; the included experts differ only in data and steps."""

    steps: int = 40
    tokens: int = 256
    """Tokens per batch, including padding."""
    rate: float = 3e-3
    """Adam's learning rate, with a short warm-up and a linear decay to zero."""
    seed: int = 0
    """Seed of the adapter's initial A matrices, of the examples and of their order."""
    rank: int = 4
    alpha: int = 16
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the linear layers that are adapted."""


STEPS = {
    "calendar": 60,
    "counting": 50,
    "opposites": 80,
    "roads": 100,
    "rooms": 100,
    "spelling": 60,
}
"""Included experts that need more steps than the default."""


def example_count(steps: int, tokens: int = Recipe.tokens) -> int:
    """Return the number of examples to generate: an upper bound of what the steps can use."""
    return steps * tokens // 8


def trained_on(name: str) -> list[Pair]:
    """Return the training pairs of the included expert of a domain."""
    steps = STEPS.get(name, Recipe.steps)
    return examples(name, example_count(steps), Recipe.seed)


def check_targets(model: Any, targets: Sequence[str]) -> None:
    """Check that every target is a linear layer; PEFT ignores unknown names beside a known one."""
    import torch

    layers = {
        name.rpartition(".")[2]: None
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if unknown := [name for name in targets if name not in layers]:
        raise UserError(
            f"--targets {unknown[0]}: not a linear layer of the base; allowed: {', '.join(layers)}"
        )


def train(pairs: list[Pair], base: Any, device: str, recipe: Recipe, label: str) -> Any:
    """Train a PEFT model on the pairs; deterministic on the same machine."""
    import torch
    from peft import LoraConfig, get_peft_model

    from swarm.engine.base_model import quiet_transformers
    from swarm.finetune.trainer import AdapterTrainer

    model, tokenizer = base.load(device)
    check_targets(model, recipe.targets)
    data = encode(tokenizer, pairs, recipe.tokens)
    # All experts share the same random initial A. Mixing sums A and B separately, which is only
    # meaningful for experts whose A matrices read nearly the same features.
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        task_type="CAUSAL_LM",
    )
    with quiet_transformers():
        expert = get_peft_model(model, config)
    lengths = [len(prompt) + len(response) for prompt, response in data]
    stream = token_batches(lengths, recipe.tokens, recipe.seed)
    batches = list(itertools.islice(stream, recipe.steps))
    say = partial(print, f"{label}:", flush=True)
    AdapterTrainer(expert, data, batches, recipe.rate, say, seed=recipe.seed).run()
    return expert


def save(expert: Any, name: str, folder: Path) -> None:
    """Write adapter_config.json and bfloat16 safetensors, nothing else."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(expert)
    halves = {key: value.to("cpu", torch.bfloat16).contiguous() for key, value in state.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    config = expert.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": name, "inference_mode": True}
    config["target_modules"] = sorted(config["target_modules"])
    text = json.dumps({key: config[key] for key in CONFIG.split() if key in config}, indent=2)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def load_base(given: str | None, dtype: str, name: str | None = None) -> Any:
    """Load the base model of conf/model/smollm2.yaml, or another one.

    Args:
        given: Its folder or hub id.
        name: Its name in the expert's adapter_config.json.
    """
    from omegaconf import OmegaConf

    from swarm._util import files
    from swarm.engine.base_model import BaseModel

    config = dict(OmegaConf.load(files.conf_folder() / "model" / "smollm2.yaml"))
    config.pop("_target_")
    return BaseModel(
        **(
            config
            | {"dtype": dtype}
            | ({"path": given} if given else {})
            | ({"name": name} if name else {})
        )
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    default = Recipe()
    parser = argparse.ArgumentParser(
        prog="python -m swarm.experts train",
        description=__doc__,
        epilog=f"Included domains: {', '.join(DOMAINS)}.",
    )
    parser.add_argument(
        "name", nargs="?", help="name of the expert; without --jsonl and --gym a domain"
    )
    parser.add_argument("--all", action="store_true", help="train all included experts")
    parser.add_argument(
        "--jsonl", type=Path, help='file with lines of {"prompt": ..., "response": ...}'
    )
    parser.add_argument("--gym", nargs="+", metavar="CATEGORY", help="categories of reasoning-gym")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps (default {default.steps}; "
        + ", ".join(f"{name} {steps}" for name, steps in STEPS.items())
        + ")",
    )
    for key, meaning in (
        ("tokens", "tokens per step"),
        ("rate", "learning rate"),
        ("seed", "random seed, the same for all experts of a pool"),
        ("rank", "rank of the adapter"),
        ("alpha", "its alpha"),
    ):
        usual = getattr(default, key)
        parser.add_argument(
            f"--{key}", type=type(usual), default=usual, help=f"{meaning} (default %(default)s)"
        )
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="LAYER",
        default=list(default.targets),
        help=f"linear layers to adapt (default {' '.join(default.targets)})",
    )
    parser.add_argument(
        "--base", help="folder of the base model (default: as conf/model/smollm2.yaml)"
    )
    parser.add_argument(
        "--base_name", help="name of the base in the expert's config (default: its hub id)"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=in_checkout("initial_experts"),
        help="parent folder of the expert (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="data type of the base: auto, float32, bfloat16 (fast on recent CPUs)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--merged",
        metavar="EXPERT",
        nargs="+",
        help="train one adapter on the data of these experts: FOLDER/train.jsonl of an expert's "
        "folder, or a domain's; with the sum of their steps (data merge)",
    )
    return parser.parse_args(words)


def gather(options: argparse.Namespace, name: str, steps: int) -> list[Pair]:
    """Return the pairs that the command line requests, as many as the steps can use."""
    if options.merged:
        return merged_data(options.merged)
    if options.jsonl:
        return read_jsonl(options.jsonl)
    count = example_count(steps, options.tokens)
    if options.gym:
        return read_gym(options.gym, count, options.seed)
    if name not in DOMAINS:
        raise UserError(
            f"{name} is not an included domain ({', '.join(DOMAINS)}); "
            "for other data give --jsonl FILE or --gym CATEGORY"
        )
    return examples(name, count, options.seed)


def merged_data(experts: Sequence[str]) -> list[Pair]:
    """Return the training data of all these experts in one list.

    Args:
        experts: Folders of experts, or names of included domains.

    Raises:
        UserError: The data of an expert is not available.
    """
    found: list[Pair] = []
    for expert in experts:
        data, name = find_path(expert) / "train.jsonl", Path(expert).name
        if data.is_file():
            found += read_jsonl(data)
        elif (
            name in DOMAINS
            and find_path(expert).resolve().parent == find_path("initial_experts").resolve()
        ):
            found += trained_on(name)
        elif expert in DOMAINS:
            found += trained_on(expert)
        else:
            raise UserError(
                f"--merged {expert}: its training data are missing; put them into {data}, one "
                '{"prompt": ..., "response": ...} per line'
            )
    return found


def merged_steps(experts: Sequence[str]) -> int:
    """Return the optimizer steps of a data merge: the sum over its experts."""
    return sum(STEPS.get(Path(expert).name, Recipe.steps) for expert in experts)


def checked(options: argparse.Namespace) -> list[str]:
    """Check the options, and return the names of the experts to train."""
    if options.all == bool(options.name):
        raise UserError("give the name of one expert, or --all")
    if options.all and (options.jsonl or options.gym):
        raise UserError("--all trains the included experts; --jsonl and --gym need a name")
    if options.merged and (options.all or options.jsonl or options.gym):
        raise UserError("--merged needs a name and excludes --all, --jsonl and --gym")
    if options.jsonl and options.gym:
        raise UserError("give --jsonl or --gym, not both")
    for key in ("steps", "tokens", "rate", "rank", "alpha"):
        if getattr(options, key) is not None and getattr(options, key) <= 0:
            raise UserError(f"--{key} must be above 0")
    return sorted(DOMAINS) if options.all else [options.name]


def run(options: argparse.Namespace) -> None:
    """Train and save every requested expert."""
    names = checked(options)
    chosen_device = device(options.device)
    base = load_base(options.base, options.dtype, options.base_name)
    for name in names:
        default_steps = (
            merged_steps(options.merged) if options.merged else STEPS.get(name, Recipe().steps)
        )
        steps = options.steps or default_steps
        recipe = Recipe(
            steps,
            tokens=options.tokens,
            rate=options.rate,
            seed=options.seed,
            rank=options.rank,
            alpha=options.alpha,
            targets=tuple(options.targets),
        )
        pairs = gather(options, name, steps)
        expert = train(pairs, base, chosen_device, recipe, name)
        save(expert, base.name, options.to / name)
        print(f"{name}: saved to {options.to / name}")


def device(given: str) -> str:
    """Return `given`, or for "auto" the GPU if there is one."""
    import torch

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=given)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {given} cannot be used: {reason}") from None
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake is reported in one line."""
    return run_command(lambda: run(arguments(words)))


if __name__ == "__main__":
    run_program(main)
