"""Training of small LoRA experts on prompts and responses: a JSONL file, or reasoning-gym."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from swarm._util.files import conf_folder
from swarm._util.jsonl import read_json_rows
from swarm._util.settings import Count, Positive, PositiveNumber, Settings, Text
from swarm.errors import UserError, install_command

TEMPLATE = "{prompt}\nAnswer:"
"""Prompt template; the response follows after a space and ends with the end token."""
CHUNK = 256
"""Number of examples sorted by length together; more reduces padding, fewer mixes better."""

Pair = tuple[str, str]
"""A prompt and its response."""

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class Recipe(Settings):
    """Training settings of an expert; the included experts differ only in data and steps."""

    steps: Positive = Field(40, description="optimizer steps; default: 40")
    tokens: Positive = Field(256, description="tokens of a batch, including padding; default: 256")
    rate: PositiveNumber = Field(3e-3, description="learning rate of AdamW; default: 0.003")
    seed: Count = Field(
        0, description="random seed, the same for all experts of a pool; default: 0"
    )
    rank: Positive = Field(4, description="rank of the adapter; default: 4")
    alpha: PositiveNumber = Field(16, description="its alpha; default: 16")
    targets: list[Text] = Field(
        ["q_proj", "v_proj"],
        min_length=1,
        description="linear layer to adapt, may be repeated; default: q_proj and v_proj",
    )

    @property
    def examples(self) -> int:
        """Number of examples to generate: an upper bound of what the steps can use."""
        return self.steps * self.tokens // 8


def read_jsonl(path: Path) -> list[Pair]:
    """Read the pairs of a file with one {"prompt": ..., "response": ...} per line."""
    rows = read_json_rows(path, {"prompt": (str, int, float), "response": (str, int, float)})
    return [(str(row["prompt"]), str(row["response"])) for row in rows]


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


def train(pairs: list[Pair], base: Any, device: str, recipe: Recipe, label: str) -> Any:
    """Train a PEFT model on the pairs; deterministic on the same machine."""
    import torch
    from peft import LoraConfig, get_peft_model

    from swarm.engine.base_model import quiet_transformers
    from swarm.finetune.trainer import AdapterTrainer

    model, tokenizer = base.load(device)
    modules = model.base_model.named_modules()
    layers = {name.rpartition(".")[2] for name, one in modules if isinstance(one, torch.nn.Linear)}
    # PEFT ignores unknown names beside a known one.
    if unknown := [name for name in recipe.targets if name not in layers]:
        raise UserError(
            f"--targets {unknown[0]}: not a linear layer of the base; allowed: "
            + ", ".join(sorted(layers))
        )
    data = encode(tokenizer, pairs, recipe.tokens)
    # All experts share the same random initial A. Mixing sums A and B separately, which is only
    # meaningful for experts whose A matrices read nearly the same features.
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=recipe.targets,
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

    from swarm.engine.base_model import BaseModel

    config = dict(OmegaConf.load(conf_folder() / "model" / "smollm2.yaml")) | {"dtype": dtype}
    config.pop("_target_")
    config |= {key: value for key, value in (("path", given), ("name", name)) if value}
    return BaseModel(**config)
