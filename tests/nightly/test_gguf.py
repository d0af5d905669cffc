"""GGUF files: quantized weights, tokenizers and frequencies as in llama.cpp."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarm.errors import UserError
from swarm.export.export import Export
from swarm.export.gguf_writer import (
    LLAMA3_PATTERN,
    QUANTIZATIONS,
    _llama3_factors,
    build_modelfile,
    find_pre_tokenizer,
)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_quantized_weights_are_near(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    tiny.expert(tiny_llama, tmp_path / "mine", 3)
    Export(str(tmp_path / "mine"), str(tmp_path / "plain"), "gguf").write()
    Export(str(tmp_path / "mine"), str(tmp_path / "packed"), "gguf", quantize=kind).write()
    file = tmp_path / "packed" / f"packed-{kind.upper()}.gguf"
    exact, packed = gguf.GGUFReader(tmp_path / "plain" / "plain-F16.gguf"), gguf.GGUFReader(file)
    kinds = gguf.GGMLQuantizationType
    types = {one.name: one.tensor_type for one in packed.tensors}
    assert types["blk.0.attn_q.weight"] == kinds[kind.upper()]
    assert types["blk.0.attn_norm.weight"] == 0 and types["token_embd.weight"] == kinds.Q8_0
    for one, other in zip(exact.tensors, packed.tensors, strict=True):
        full, rough = (gguf.dequantize(x.data, x.tensor_type).ravel() for x in (one, other))
        limit = 0.15 if other.tensor_type == kinds.Q4_0 else 0.01
        assert np.linalg.norm(full - rough) <= limit * np.linalg.norm(full), one.name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", gguf_file=file.name)
    assert torch.isfinite(tiny.logits(model.eval())).all()


def test_the_pre_tokenizer_is_named_as_in_llama_cpp(tiny_llama: Path) -> None:
    rules = json.loads(AutoTokenizer.from_pretrained(tiny_llama).backend_tokenizer.to_str())
    level, bare = (ByteLevel(False, use_regex=one) for one in (True, False))
    split = Split(Regex(LLAMA3_PATTERN), "isolated")
    for name, rule in (
        ("gpt-2", level),
        ("smollm", Sequence([Digits(True), level])),
        ("llama-bpe", Sequence([split, bare])),
        ("", Sequence([Digits(False), level])),
        ("", ByteLevel(True)),
        ("", Metaspace()),
    ):
        rules["pre_tokenizer"] = json.loads(rule.__getstate__())
        if name:
            assert find_pre_tokenizer(rules, "x") == name
        else:
            with pytest.raises(UserError, match="not one of gpt-2, smollm and llama-bpe"):
                find_pre_tokenizer(rules, "x")


def test_the_frequencies_of_llama3_equal_those_of_transformers() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    factors = torch.tensor(_llama3_factors(config.to_dict()), dtype=torch.float64)
    assert torch.allclose(plain / factors, scaled.double(), rtol=1e-5)
    assert factors[0] == 1 and factors[-1] == 8


def test_the_modelfile_translates_chatml_with_its_system_prompt(tiny_llama: Path) -> None:
    made = AutoTokenizer.from_pretrained(tiny_llama)
    assert "TEMPLATE" not in build_modelfile("a.gguf", made, False)
    made.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
        "{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = build_modelfile("a.gguf", made, False)
    assert text.startswith("FROM ./a.gguf\nTEMPLATE") and 'SYSTEM """Be kind."""' in text
    assert 'PARAMETER stop "<eos>"' in text
