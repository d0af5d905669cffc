"""Exports as GGUF, read again by transformers and by the gguf package."""

import json
import re
from pathlib import Path
from typing import Any

import commands
import gguf
import pytest
import searches
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.errors import UserError
from swarm.export.export import Export
from swarm.export.gguf_writer import (
    interleave_rope_rows,
)
from swarm.pool.adapter import read_adapter
from swarm.runs.folder import read_state
from swarm.runs.verdict import read_verdict

PROMPTS = (
    "the question is which of 12 answers",
    "Choose the best option and",
    "a graph of 5 nodes",
)
LAST = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
PROJECTIONS = tuple(LAST)


def greedy(model: Any, tokenizer: Any, count: int = 12) -> list[list[int]]:
    """The ids that a model writes after each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=count, do_sample=False)
        found.append(out[0].tolist())
    return found


def load(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def value(file: Path, key: str) -> Any:
    return gguf.GGUFReader(file).get_field(key).contents()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_answers_as_the_merged_model(tied: bool, tmp_path: Path) -> None:
    base = tiny.model(tmp_path / "base", head=8)
    if tied:
        model = load(base)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(base)
    tiny.expert(base, tmp_path / "mine", 3, targets=PROJECTIONS)
    Export(str(tmp_path / "mine"), str(tmp_path / "whole"), "merged", dtype="float16").write()
    said = Export(str(tmp_path / "mine"), str(tmp_path / "small"), "gguf").write()
    assert said[-1] == f"ollama create small -f {tmp_path}/small/Modelfile"
    names = ["Modelfile", "README.md", "small-F16.gguf", "swarm.json"]
    assert sorted(one.name for one in (tmp_path / "small").iterdir()) == names
    merged, again = (
        load(tmp_path / "whole"),
        load(tmp_path / "small", gguf_file="small-F16.gguf"),
    )
    for key, weight in merged.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key]), key
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    stored = AutoTokenizer.from_pretrained(tmp_path / "small", gguf_file="small-F16.gguf")
    assert greedy(again, tokenizer) == greedy(merged, tokenizer)
    for prompt in (*PROMPTS, *tiny.TEXT):
        ids = [one(prompt, add_special_tokens=False).input_ids for one in (tokenizer, stored)]
        assert ids[0] == ids[1]
    assert stored.chat_template == tokenizer.chat_template == tiny.CHAT
    file = tmp_path / "small" / "small-F16.gguf"
    assert value(file, "tokenizer.ggml.pre") == "gpt-2"
    assert value(file, "tokenizer.ggml.add_bos_token") is True
    assert (value(file, "tokenizer.ggml.bos_token_id"), stored.eos_token_id) == (1, 2)
    assert len(value(file, "tokenizer.ggml.tokens")) == value(file, "llama.vocab_size") == 308
    assert ("output.weight" in {one.name for one in gguf.GGUFReader(file).tensors}) is not tied
    text = (tmp_path / "small" / "README.md").read_text()
    assert "library_name: gguf" in text and "llama-cli -m small-F16.gguf" in text


def test_the_card_has_baselines_domains_and_commands(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    task = searches.choice_file(tmp_path / "tiny.json")
    content = json.loads(task.read_text())
    for split in ("dev", "test"):
        for number, item in enumerate(content[split]):
            item["domain"] = ("hills", "rivers")[number % 2]
    task.write_text(json.dumps(content))
    words = searches.arguments(
        tmp_path,
        tiny_llama,
        tiny_pool,
        "first",
        optimizer__max_iterations=1,
        baselines="[base,soup]",
    )
    done = commands.run("swarm.search", *words)
    assert done.code == 0, done.err
    run = tmp_path / "search" / "first"
    Export(str(run), str(tmp_path / "small"), "gguf", quantize="q8_0").write()
    card = (tmp_path / "small" / "README.md").read_text()
    state = read_state(run)
    for one in read_verdict(state).alternatives:
        if one.name not in ("expert", "constant"):
            assert f"Gain over the {one.label}, {one.test.utility:.3f} on test: " in card
    assert re.search(r"^\| hills", card, re.M) and re.search(r"^\| rivers", card, re.M)
    part = card.partition("## Reproduce")[2].partition("##")[0]
    assert "python -m swarm.search " in part and "task=mmlu" in part
    assert "python -m swarm.export search/first to=small format=gguf quantize=q8_0" in part
    packages = state["versions"][-1]["packages"]
    assert all(f"{name} {number}" in part for name, number in packages.items())


def test_a_lora_gguf_adds_up_to_the_merged_model(tiny_llama: Path, tmp_path: Path) -> None:
    """As llama.cpp applies it where alpha is 0: W + B A."""
    patterns = {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 5}}
    kinds: dict[str, dict[str, Any]] = {"same": {}, "varied": patterns, "rs": {"use_rslora": True}}
    for name, options in kinds.items():
        source, to = tmp_path / name, tmp_path / f"{name}_out"
        tiny.expert(tiny_llama, source, 3, targets=PROJECTIONS, **options)
        said = Export(str(source), str(to), "gguf_lora").write()
        assert said[-1].startswith("llama-cli -m BASE.gguf --lora")
        Export(str(source), str(tmp_path / f"{name}_full"), "gguf").write()
        lora = gguf.GGUFReader(to / f"{name}_out-lora-F32.gguf")
        assert lora.get_field("adapter.lora.alpha").contents() == 0.0
        assert lora.get_field("general.type").contents() == "adapter"
        weights = {one.name: torch.tensor(one.data) for one in lora.tensors}
        full = gguf.GGUFReader(tmp_path / f"{name}_full" / f"{name}_full-F16.gguf")
        base = tiny.load(tiny_llama).state_dict()
        for one in full.tensors:
            if f"{one.name}.lora_a" not in weights:
                continue
            a, b = weights[f"{one.name}.lora_a"], weights[f"{one.name}.lora_b"]
            part = {"attn_q": 4, "attn_k": 2}.get(one.name.split(".")[2])
            layer, last = one.name.split(".")[1:3]
            ends = f"layers.{layer}.", {value: key for key, value in LAST.items()}[last]
            module = next(
                m for m in read_adapter(source).shapes if ends[0] in m and m.endswith(ends[1])
            )
            plain = base[f"{module}.weight"]
            plain = interleave_rope_rows(plain, part) if part else plain
            total = plain + b @ a
            assert torch.allclose(total, torch.tensor(one.data).float(), atol=1e-3, rtol=1e-3)
        assert "ADAPTER ./" in (to / "Modelfile").read_text()


def test_other_models_are_refused_before_anything_is_written(
    tiny_gemma: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    tiny.expert(tiny_gemma, tmp_path / "mine", 3)
    for kind in ("gguf", "gguf_lora"):
        with pytest.raises(UserError, match=r"architecture is gemma; supported: llama models"):
            Export(str(tmp_path / "mine"), str(tmp_path / "out"), kind).write()
    tiny.expert(tiny_llama, tmp_path / "other", 3)
    for options, says in (
        ({"format": "gguf", "quantize": "q5"}, "quantize=q5: must be q8_0 or q4_0"),
        ({"format": "merged", "quantize": "q8_0"}, "quantize=q8_0: only with format=gguf"),
        ({"format": "gguf", "dtype": "float16"}, "dtype=float16"),
    ):
        with pytest.raises(UserError, match=says):
            Export(str(tmp_path / "other"), str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()
