"""Real small things for the tests: a random language model, its tokenizer and LoRA experts."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = ("llama", "gemma", "qwen2")
NAMES = ("amber", "birch", "cedar", "dune")
WORDS = 300
TARGETS = ("q_proj", "v_proj", "down_proj")

TEXT = (
    "the question is which of the answers is right",
    "the answer is (A) and not (B) or (C)",
    "a graph of 5 nodes has edges between 1 and 2",
    "please answer with one word: yes or no, true or false, none of the above",
    "Question: what is the shortest path? Answer: the final answer is 12, because 3 + 4 + 5 is 12.",
    "Many small experts share their knowledge when a swarm looks for a good mix of weights.",
    "Once upon a time, seven friendly birds flew over mountains, rivers and quiet villages.",
    "Choose the best option and explain your reasoning step by step before you give the result.",
)

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed`, leaving the caller's own torch state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tokenizer(folder: Path) -> Any:
    """Save a BPE tokenizer of 300 tokens in `folder`; ASCII survives it, the rest is <unk>.

    Every token is whole characters, so that what a random model writes reads the same in parts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=special,
        # Byte-level BPE writes a space and a newline as these two letters.
        initial_alphabet=["Ġ", "Ċ", *map(chr, range(33, 127))],
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    names = {f"{one[1:-1]}_token": one for one in special}
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=CHAT, padding_side="left", **names
    )
    made.save_pretrained(folder)
    return made


def model(
    folder: Path, kind: str = "llama", seed: int = 0, head: int = 8, context: int = 512
) -> Path:
    """Save a random float32 model (4 heads of that size, 2 layers) and its tokenizer; gives
    `folder`. Its prompts have at most `context` tokens; kind "mistral" attends to the last eight.
    """
    import transformers

    words = tokenizer(folder)
    name = {"llama": "Llama", "gemma": "Gemma", "mistral": "Mistral", "qwen2": "Qwen2"}[kind]
    shape: dict[str, Any] = {
        # A little more than the tokenizer knows, as real models have.
        "vocab_size": WORDS + 8,
        "hidden_size": 4 * head,
        "intermediate_size": 8 * head,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        # A wide start: with the usual 0.02 every next token would be equally likely.
        "initializer_range": 0.2,
        **{f"{one}_token_id": getattr(words, f"{one}_token_id") for one in ("pad", "bos", "eos")},
        **({"head_dim": head} if kind in ("gemma", "mistral") else {}),
        **({"sliding_window": 8} if kind == "mistral" else {}),
    }
    config = getattr(transformers, f"{name}Config")(**shape)
    with seeded(seed):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def plain(base: Path, folder: Path) -> Path:
    """Save the model in `base` again without its chat template; gives `folder`."""
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def load(base: Path) -> Any:
    """The float32 model saved in `base`, in evaluation mode on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def expert(
    base: Path,
    folder: Path,
    seed: int = 0,
    targets: Sequence[str] | str = TARGETS,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Save a PEFT LoRA of `base` with random A and nonzero random B in `folder`; gives `folder`.

    `config` goes to peft.LoraConfig over the defaults r=4 and lora_alpha=8; `dtype` is the type
    in the file.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    wanted = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
    aim = targets if isinstance(targets, str) else list(targets)
    with seeded(seed), torch.no_grad():
        wrapped = get_peft_model(load(base), LoraConfig(target_modules=aim, **wanted))
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
            if "lora_" in name:
                weight.data = weight.data.to(getattr(torch, dtype))
        wrapped.save_pretrained(folder)
    return folder


def pool(base: Path, folder: Path, names: Sequence[str] = NAMES) -> Path:
    """Save one expert of the same shape for each name, seeds 1, 2, 3 and so on; gives `folder`."""
    for seed, name in enumerate(names, start=1):
        expert(base, folder / name, seed)
    return folder


def mixed_pool(base: Path, folder: Path) -> Path:
    """Save four experts that differ in rank, alpha, scaling, patterns, targets and file type."""
    expert(base, folder / "amber", 1)
    expert(base, folder / "birch", 2, targets=("q_proj", "up_proj"), r=2, lora_alpha=3)
    expert(base, folder / "cedar", 3, r=8, lora_alpha=4, use_rslora=True, dtype="bfloat16")
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 6}, "alpha_pattern": {"v_proj": 5}}
    expert(base, folder / "dune", 4, targets=("q_proj", "v_proj"), **patterns)
    return folder


def change(folder: Path, **settings: Any) -> None:
    """Set keys of a saved adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def logits(network: Any, seed: int = 0) -> Any:
    """What `network` says to two fixed random sequences: float32 [2, 12, vocabulary]."""
    import torch

    with seeded(seed), torch.inference_mode():
        tokens = torch.randint(4, WORDS, (2, 12))
        return network(input_ids=tokens).logits.float()
