"""One model of several adapters: each prompt is answered by that of its kind.

This file is copied beside `routes.json` into an export, and needs torch, transformers and peft
alone: `from routed import load`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parent


def load(base: Any) -> PeftModel:
    """Return the adapters on a base model, whose `generate` chooses one for each row of a batch.

    Args:
        base: A model of transformers, or its name.
    """
    router = json.loads((FOLDER / "routes.json").read_text(encoding="utf-8"))
    mean, centroids = torch.tensor(router["mean"]), torch.tensor(router["centroids"])
    if isinstance(base, str):
        base = AutoModelForCausalLM.from_pretrained(base)
    first, *others = router["names"]
    model = PeftModel.from_pretrained(base, FOLDER / first, adapter_name=first)
    for name in others:
        model.load_adapter(FOLDER / name, adapter_name=name)

    def choose_adapters(input_ids: Any, attention_mask: Any = None) -> list[str]:
        """Return the adapter of each row: the nearest of the centroids decides."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        read = model.get_base_model().get_decoder()
        with torch.no_grad(), model.disable_adapter():
            out = read(input_ids=input_ids, attention_mask=mask, output_hidden_states=True)
        states = out.hidden_states[router["layer"]].float().cpu()
        shares = (mask / mask.sum(1, keepdim=True)).float().cpu()
        near = ((shares[:, None] @ states)[:, 0] - mean) @ centroids.T
        return [router["names"][router["routes"][i]] for i in near.argmax(1)]

    plain = model.generate

    def generate(input_ids: Any, attention_mask: Any = None, **settings: Any) -> Any:
        """Generate as the base does."""
        names = choose_adapters(input_ids, attention_mask)
        if len({*names}) > 1:
            settings["adapter_names"] = names
        else:
            model.set_adapter(names[0])
        return plain(input_ids=input_ids, attention_mask=attention_mask, **settings)

    model.choose_adapters, model.generate = choose_adapters, generate
    return model
