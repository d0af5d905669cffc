"""Exports as GGUF, read again by transformers and by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.errors import UserError
from swarm.export.export import Export
from swarm.export.gguf_writer import interleave_rope_rows
from swarm.pool.adapter import read_adapter

PROMPTS = (
    "the question is which of 12 answers",
    "Choose the best option and",
    "a graph of 5 nodes",
)
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TARGETS = tuple(name.partition(".")[2] for name in PROJECTIONS.values())


def load(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def greedy(model: Any, tokenizer: Any) -> list[list[int]]:
    """The ids that a model writes after each prompt."""
    asked = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    return [model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() for ids in asked]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_answers_as_the_merged_model(tied: bool, tmp_path: Path) -> None:
    base = tiny.model(tmp_path / "base", head=8)
    if tied:
        model = load(base)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(base)
    mine, whole, small = (tmp_path / name for name in ("mine", "whole", "small"))
    tiny.expert(base, mine, 3, targets=TARGETS)
    Export(str(mine), str(whole), "merged", dtype="float16").write()
    said = Export(str(mine), str(small), "gguf").write()
    assert said[-1] == f"ollama create small -f {small}/Modelfile"
    names = ["Modelfile", "README.md", "small-F16.gguf", "swarm.json"]
    assert sorted(one.name for one in small.iterdir()) == names
    merged, again = load(whole), load(small, gguf_file="small-F16.gguf")
    for key, weight in merged.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key]), key
    tokenizer = AutoTokenizer.from_pretrained(whole)
    stored = AutoTokenizer.from_pretrained(small, gguf_file="small-F16.gguf")
    assert greedy(again, tokenizer) == greedy(merged, tokenizer)
    for prompt in (*PROMPTS, *tiny.TEXT):
        ids = [one(prompt, add_special_tokens=False).input_ids for one in (tokenizer, stored)]
        assert ids[0] == ids[1]
    assert stored.chat_template == tokenizer.chat_template == tiny.CHAT
    reader = gguf.GGUFReader(small / "small-F16.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["tokenizer.ggml.pre"] == "gpt-2" and values["tokenizer.ggml.add_bos_token"]
    assert (values["tokenizer.ggml.bos_token_id"], stored.eos_token_id) == (1, 2)
    assert len(values["tokenizer.ggml.tokens"]) == values["llama.vocab_size"] == 308
    assert ("output.weight" in {one.name for one in reader.tensors}) is not tied
    card = (small / "README.md").read_text()
    assert "library_name: gguf" in card and "llama-cli -m small-F16.gguf" in card


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 5}},
        {"use_rslora": True},
    ],
)
def test_a_lora_gguf_adds_up_to_the_merged_model(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    """As llama.cpp applies it where alpha is 0: W + B A."""
    mine, to, full = (tmp_path / name for name in ("mine", "lora", "full"))
    tiny.expert(tiny_llama, mine, 3, targets=TARGETS, **options)
    said = Export(str(mine), str(to), "gguf_lora").write()
    assert said[-1].startswith("llama-cli -m BASE.gguf --lora")
    assert "ADAPTER ./" in (to / "Modelfile").read_text()
    Export(str(mine), str(full), "gguf").write()
    lora = gguf.GGUFReader(to / "lora-lora-F32.gguf")
    assert lora.get_field("adapter.lora.alpha").contents() == 0.0
    assert lora.get_field("general.type").contents() == "adapter"
    factors = {one.name: torch.tensor(one.data) for one in lora.tensors}
    summed = {one.name: one.data for one in gguf.GGUFReader(full / "full-F16.gguf").tensors}
    weights, heads = tiny.load(tiny_llama).state_dict(), {"attn_q": 4, "attn_k": 2}
    assert len(factors) == 2 * len(read_adapter(mine).shapes)
    for name in (one.removesuffix(".lora_a") for one in factors if one.endswith(".lora_a")):
        _, layer, last, _ = name.split(".")
        plain = weights[f"model.layers.{layer}.{PROJECTIONS[last]}.weight"]
        plain = interleave_rope_rows(plain, heads[last]) if last in heads else plain
        total = plain + factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"]
        wanted = torch.tensor(summed[name]).float()
        assert torch.allclose(total, wanted, atol=1e-3, rtol=1e-3), name


def test_other_models_are_refused_before_anything_is_written(
    tiny_gemma: Path, tmp_path: Path
) -> None:
    tiny.expert(tiny_gemma, tmp_path / "mine", 3)
    for kind in ("gguf", "gguf_lora"):
        with pytest.raises(UserError, match=r"architecture is gemma; supported: llama models"):
            Export(str(tmp_path / "mine"), str(tmp_path / "out"), kind).write()
    for more, says in (
        ({"quantize": "q5"}, "quantize=q5: must be q8_0 or q4_0"),
        ({"dtype": "float16"}, "dtype=float16"),
    ):
        with pytest.raises(UserError, match=says):
            Export(str(tmp_path / "mine"), str(tmp_path / "out"), "gguf", **more)
    assert not (tmp_path / "out").exists()
