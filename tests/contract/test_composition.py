"""Coefficients of a plain PEFT model's adapters, judged by PEFT and transformers alone."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from swarm.api import UserError, learn_composition

NAMES = ["amber", "birch", "cedar", "dune"]
TRUE = [4.0, -3.0, 3.0, 0.0]


def peft_model(base: Path, pool: Path) -> Any:
    first, *others = NAMES
    model = PeftModel.from_pretrained(tiny.load(base), pool / first, adapter_name=first)
    for name in others:
        model.load_adapter(pool / name, adapter_name=name)
    return model


def mixed(model: Any, weights: list[float], name: str) -> Any:
    model.add_weighted_adapter(NAMES, weights, name, combination_type="cat")
    model.set_adapter(name)
    return model


def loss(model: Any, tokenizer: Any, items: list[dict[str, str]]) -> float:
    """Mean over items of the nats per token of the answer."""
    losses = []
    for item in items:
        start, end = (tokenizer(t).input_ids for t in (item["prompt"], " " + item["completion"]))
        end = end[1:]  # without <bos>
        ids = torch.tensor([[*start, *end]])
        with torch.no_grad():
            shares = model(ids).logits[0].log_softmax(-1)
        at = range(len(start) - 1, ids.shape[1] - 1)
        losses.append(-sum(float(shares[i, ids[0, i + 1]]) for i in at) / len(end))
    return sum(losses) / len(losses)


def test_what_is_learned_is_better_in_peft_and_nothing_else_changes(
    tiny_llama: Path, mixed_pool: Path
) -> None:
    """Items are what a known mixture answers, of adapters of all ranks, scales and targets."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    teacher = mixed(peft_model(tiny_llama, mixed_pool), TRUE, "true")
    items = []
    for number in range(72):
        prompt = f"Question: what is {number * 7 % 31} and {number}? Answer:"
        ids = tokenizer(prompt, return_tensors="pt")
        out = teacher.generate(**ids, max_new_tokens=4, do_sample=False)[0, -4:]
        text = tokenizer.decode(out, skip_special_tokens=True).strip()
        items += [{"prompt": prompt, "completion": text}] if text else []
    model = peft_model(tiny_llama, mixed_pool).train()
    before = tiny.logits(model.eval()), [*model.state_dict()]
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    weights = learn_composition(model.train(), NAMES, items[:48], tokenizer=tokenizer, steps=80)
    assert list(weights) == NAMES and model.training
    assert trained == {name: one.requires_grad for name, one in model.named_parameters()}
    assert torch.equal(tiny.logits(model.eval()), before[0]) and [*model.state_dict()] == before[1]
    unseen, losses = items[48:], {}
    for number, each in enumerate([*torch.eye(4).tolist(), [0.25] * 4, list(weights.values())]):
        losses[number] = loss(mixed(model, each, f"mix{number}"), tokenizer, unseen)
    assert losses.pop(5) < min(loss(teacher, tokenizer, unseen) + 0.1, *losses.values())
    assert list(weights.values()) == pytest.approx(TRUE, abs=0.5)
    with model.disable_adapter():
        assert torch.equal(tiny.logits(model), tiny.logits(tiny.load(tiny_llama)))


@pytest.mark.parametrize(
    ("names", "items", "said"),
    [
        (["amber", "elm"], [], "'elm' is not loaded; the model has: amber, birch, cedar, dune"),
        (["amber", "amber"], [], "give at least two"),
        (["amber", "birch"], [{"a": 1}], "no column of the questions among a"),
    ],
)
def test_a_mistake_is_one_line(
    names: list[str], items: list[Any], said: str, tiny_llama: Path, mixed_pool: Path
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        learn_composition(peft_model(tiny_llama, mixed_pool), names, items)
    assert "\n" not in str(caught.value)


def test_other_kinds_of_adapters_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    plain = tiny.expert(tiny_llama, tmp_path / "plain")
    dora = tiny.expert(tiny_llama, tmp_path / "dora", use_dora=True)
    model = PeftModel.from_pretrained(tiny.load(tiny_llama), plain, adapter_name="plain")
    model.load_adapter(dora, adapter_name="dora")
    with pytest.raises(UserError, match="adapters: dora: use_dora is set to True"):
        learn_composition(model, ["plain", "dora"], [])
