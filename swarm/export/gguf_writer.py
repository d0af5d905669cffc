"""GGUF files of llama models and of their LoRA adapters, for llama.cpp, Ollama and LM Studio.

Layout and keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md) and of llama.cpp:

- Matrices keep transformers' [out, in] layout. The rows of q_proj and k_proj are reordered: within
  a head of d rows, transformers rotates row i with row i + d/2, llama.cpp row 2 i with row 2 i + 1
  (`interleave_rope_rows`). The rows of a LoRA's B are reordered in the same way.
- An output layer that shares the embedding's weight is left out.
- Norms are float32; matrices are float16 (null), q8_0 or q4_0. With q4_0 the embedding and the
  output layer are q8_0, as they lose most. A matrix whose rows are not a multiple of 32 long stays
  float16.
- `tokenizer.ggml.pre` selects one of the pre-tokenizers that are compiled into llama.cpp. It is
  derived from the rules in tokenizer.json.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.pool.adapter import PoolRow

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

QUANTIZATIONS = ("q8_0", "q4_0")

BLOCK_LENGTH = 32
"""Weights that share a scale in q8_0 and q4_0; a row is a multiple of it."""

SUPPORTED = "llama models (model_type llama, without biases) with a byte-level BPE tokenizer"

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the tokenizer.json of Llama 3."""

CHATML_TEMPLATE = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)
"""Ollama's (Go) template of ChatML."""


def check_architecture(config: Mapping[str, Any], given: str) -> None:
    """Check that a model's configuration can be written as GGUF.

    Args:
        config: Content of its config.json.
        given: The model, for the error.

    Raises:
        UserError: It cannot.
    """
    facts: dict[str, tuple[Any, list[Any]]] = {
        "architecture": (config.get("model_type"), ["llama"]),
        "attention_bias": (config.get("attention_bias"), [None, False]),
        "mlp_bias": (config.get("mlp_bias"), [None, False]),
        "hidden_act": (config.get("hidden_act", "silu"), ["silu"]),
        "rope_type": (_rope_settings(config)["rope_type"], ["default", "linear", "llama3"]),
    }
    for name, (value, allowed) in facts.items():
        if value not in allowed:
            raise UserError(f"format=gguf: {given}: its {name} is {value}; supported: {SUPPORTED}")


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_type, rope_theta and the scaling, from either form of config.json."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {"rope_theta": config.get("rope_theta", 10000.0)} | given
    return {"rope_type": given.get("type", "default")} | found


def find_pre_tokenizer(tokenizer: Mapping[str, Any], given: str) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a tokenizer.json.

    Raises:
        UserError: It is not a byte-level BPE, or llama.cpp has no such pre-tokenizer.
    """
    model, rules = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = rules.get("pretokenizers", [rules])
    kinds, first, last = [step.get("type") for step in steps], steps[0], steps[-1]
    plain = model.get("type") == "BPE" and not model.get("byte_fallback")
    if plain and not tokenizer.get("normalizer") and not last.get("add_prefix_space"):
        match kinds, last.get("use_regex", True):
            case ["ByteLevel"], True:
                return "gpt-2"
            case ["Digits", "ByteLevel"], True if first.get("individual_digits"):
                return "smollm"
            case ["Split", "ByteLevel"], False if first["pattern"].get("Regex") == LLAMA3_PATTERN:
                return "llama-bpe"
    raise UserError(
        f"format=gguf: {given}: its tokenizer ({model.get('type')}, split by "
        f"{' and '.join(map(str, kinds))}) is not one of gpt-2, smollm and llama-bpe; "
        f"supported: {SUPPORTED}"
    )


def interleave_rope_rows(weight: "Tensor", heads: int) -> "Tensor":
    """Reorder the rows [heads * d, ...] of q_proj or k_proj: (0, d/2, 1, d/2 + 1, ...) per head."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _count_heads(module: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of heads whose rows are reordered; `None` if the module has none."""
    heads = int(config["num_attention_heads"])
    if module.endswith(".q_proj"):
        return heads
    if module.endswith(".k_proj"):
        return int(config.get("num_key_value_heads") or heads)
    return None


def write_gguf(
    model: Any, tokenizer: Any, path: Path, name: str, quantize: str | None = None
) -> None:
    """Write a llama model with its tokenizer and chat template.

    Args:
        model: A transformers model that `check_architecture` accepts, float32 on the CPU.
        tokenizer: Its fast tokenizer.
        name: Name of the model in the file.
        quantize: One of `QUANTIZATIONS`; `None`: float16.

    Raises:
        UserError: See `find_pre_tokenizer`; or a weight exceeds float16.
    """
    import gguf

    config = model.config.to_dict()
    # Tensors are spooled to a temporary file, so that memory holds the model once.
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{(quantize or 'f16').upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, tokenizer, config["vocab_size"], model.generation_config, name)
    for key, values, kind in _list_tensors(model, config, quantize):
        writer.add_tensor(key, gguf.quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    heads, rope = int(config["num_attention_heads"]), _rope_settings(config)
    head_size = _head_size(config)
    for add, value in (
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, config["hidden_size"]),
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, config.get("num_key_value_heads") or heads),
        (writer.add_key_length, head_size),
        (writer.add_value_length, head_size),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_rope_freq_base, rope["rope_theta"]),
        (writer.add_rope_dimension_count, head_size),
        (writer.add_vocab_size, config["vocab_size"]),
    ):
        add(value)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _head_size(config: Mapping[str, Any]) -> int:
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found


def _list_tensors(
    model: Any, config: Mapping[str, Any], quantize: str | None
) -> Iterator[tuple[str, "np.ndarray", Any]]:
    """Yield name, float32 values and type of each tensor, in the model's order."""
    import gguf
    import numpy as np

    kinds = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    if factors := _llama3_factors(config):
        yield "rope_freqs.weight", np.array(factors, dtype=np.float32), kinds.F32
    for key, weight in model.state_dict().items():
        module = key.removesuffix(".weight")
        name = names.get_name(module)
        if name is None:
            raise UserError(f"format=gguf: the model has {key}; supported: {SUPPORTED}")
        if module == "lm_head" and model.config.tie_word_embeddings:
            continue
        if heads := _count_heads(module, config):
            weight = interleave_rope_rows(weight, heads)
        values = weight.detach().float().numpy()
        kind = kinds.F16 if values.ndim > 1 else kinds.F32
        if quantize and values.ndim > 1 and values.shape[-1] % BLOCK_LENGTH == 0:
            rough = quantize == "q4_0" and name.startswith("blk.")
            kind = kinds.Q4_0 if rough else kinds.Q8_0
        elif kind == kinds.F16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise UserError(f"format=gguf: a weight of {key} exceeds the range of float16")
        yield f"{name}.weight", values, kind


def _llama3_factors(config: Mapping[str, Any]) -> list[float]:
    """Return the d/2 divisors of the rotary frequencies of Llama 3.1 and later; empty if none.

    Frequencies with a wavelength below the high-frequency limit stay, those above the low-frequency
    limit are divided by the factor, and those between are interpolated (rope_type=llama3).
    """
    rope = _rope_settings(config)
    if rope["rope_type"] != "llama3":
        return []
    import numpy as np

    size = _head_size(config)
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    found: list[float] = (1 / ((1 - kept) / rope["factor"] + kept)).tolist()
    return found


def _add_tokenizer(
    writer: Any, tokenizer: Any, vocabulary: int, generation: Any, given: str
) -> None:
    import gguf

    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = find_pre_tokenizer(rules, given)
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    kinds = [gguf.TokenType.UNUSED] * vocabulary
    added = {one["content"]: one for one in rules["added_tokens"]}
    for token, number in tokenizer.get_vocab().items():
        if number >= vocabulary:
            raise UserError(
                f"format=gguf: {given}: token {number} has no row in the embedding of {vocabulary}"
            )
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
        if token in added:
            name = "CONTROL" if added[token]["special"] else "USER_DEFINED"
            kinds[number] = gguf.TokenType[name]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = rules["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    ends = generation.eos_token_id if generation else None
    for end in ends if isinstance(ends, list) else [ends]:
        if end not in (None, tokenizer.eos_token_id):  # the first other token that ends a text
            writer.add_eot_token_id(end)
            break
    first = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(first == [tokenizer.bos_token_id])
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def write_lora_gguf(adapter: PoolRow, config: Mapping[str, Any], path: Path, name: str) -> None:
    """Write an adapter as a LoRA for `llama-cli --lora` or Ollama's ADAPTER, in float32.

    The scaling is multiplied into B: llama.cpp has one alpha for all modules, and an alpha of 0
    adds no scaling, so that modules may differ in rank and alpha.

    Args:
        config: Content of its base's config.json.
        name: Name of the adapter in the file.

    Raises:
        UserError: The adapter adapts a weight that a GGUF of the base does not have.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for module in adapter.shapes:
        key = names.get_name(module)
        if key is None or (module == "lm_head" and config.get("tie_word_embeddings")):
            raise UserError(
                f"{adapter.name}: a GGUF of the base has no {module} of its own; use format=gguf"
            )
        a, b = (factor.float() for factor in adapter.load_factors(module))
        if heads := _count_heads(module, config):
            b = interleave_rope_rows(b, heads)
        writer.add_tensor(f"{key}.weight.lora_a", a.contiguous().numpy())
        writer.add_tensor(f"{key}.weight.lora_b", b.contiguous().numpy())
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build_modelfile(file: str, tokenizer: Any, lora: bool) -> str:
    """Return an Ollama Modelfile for `ollama create NAME -f Modelfile`.

    A ChatML template is translated to Ollama's language, with the system prompt that it adds if a
    conversation has none. Any other is left to Ollama, which recognizes known ones in the GGUF.

    Args:
        file: Name of the GGUF file beside it.
        tokenizer: The tokenizer.
        lora: Whether the file is an adapter.
    """
    lines = [f"FROM ./{file}"]
    if lora:
        lines = [
            "# The base model as GGUF, or its name in Ollama's library: replace it.",
            "FROM ./base.gguf",
            f"ADAPTER ./{file}",
        ]
    if "<|im_start|>" in (tokenizer.chat_template or ""):
        lines.append(f'TEMPLATE """{CHATML_TEMPLATE}"""')
        text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        head = "<|im_start|>system\n"
        if text.startswith(head):
            system = text.removeprefix(head).partition("<|im_end|>")[0]
            lines.append(f'SYSTEM """{system}"""')
    if tokenizer.eos_token:
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.eos_token, ensure_ascii=False)}")
    lines.append("PARAMETER temperature 0")  # greedy, as the model was measured
    return "\n".join(lines) + "\n"
