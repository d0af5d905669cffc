"""Coefficients of the adapters of a PEFT model, learned by gradient descent."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm._util.settings import parse_settings
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors.worker import DESCENT, LOSS, DescentJob, ItemLearner
from swarm.optimizers.gradient import Descent
from swarm.pool.adapter import AdapterConfig, refuse_variants
from swarm.scorers.own_file import read_task
from swarm.tasks.dataset import InMemoryItems

if TYPE_CHECKING:
    from swarm.engine.lora import Factors


def learn_composition(
    model: Any,
    adapters: Sequence[str],
    items: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    chat: bool = False,
    steps: int = 60,
    seed: int = 42,
) -> dict[str, float]:
    """Return the coefficients of a PEFT model's adapters that make right answers most likely.

        weights = learn_composition(model, ["rooms", "roads"], items)
        model.add_weighted_adapter(
            list(weights), list(weights.values()), "mixed", combination_type="cat"
        )

    A coefficient may be negative, and they need not sum to 1. The descent is that of a search
    (`swarm.optimizers.gradient.Descent`), from the adapter, or their mean, of the lowest loss. If
    it does not lower the loss of a fifth of the items, which are held out, the start is returned.
    Nothing of the model is changed.

    Args:
        model: A `peft.PeftModel` with these LoRA adapters loaded, on any device.
        adapters: At least two of their names.
        items: Questions with right answers, in columns as of a data file: question and answer,
            prompt and completion, messages, choices, ... (docs/tasks.md).
        tokenizer: `None` loads the base model's.
        chat: Send a question as one user turn through the chat template.
        steps: Number of Adam steps, of 8 items each.
        seed: Of the order of the items.

    Raises:
        UserError: An adapter is not loaded or no plain LoRA, or an item has no known columns.
    """
    names, known = list(adapters), getattr(model, "peft_config", {})
    if missing := [name for name in names if name not in known]:
        raise UserError(
            f"adapters: {missing[0]!r} is not loaded; the model has: {', '.join(known) or 'none'}"
        )
    if len({*names}) < max(2, len(names)):
        raise UserError(f"adapters={names}: give at least two, each once")
    for name in names:
        check_lora(name, known[name])
    descent = Descent(steps=steps)
    task = read_task(InMemoryItems({"dev": list(items)}), "items", chat)
    dev = task.items("dev")
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.get_base_model().name_or_path)
    if tokenizer.pad_token is None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    engine, training = HFEngine(), model.training
    engine.use_model(model.get_base_model(), tokenizer, "the model")
    trained = [one for one in model.parameters() if one.requires_grad]
    model.eval().requires_grad_(False)
    try:
        with model.disable_adapter():
            engine.set_adapters(adapter_factors(model, names))
            descent.start(1, 1, len(names), seed)

            def learner(split: str, start: np.ndarray) -> ItemLearner:
                job = DescentJob(
                    0,
                    (tuple(start.tolist()),),
                    split,
                    tuple(range(len(dev))),
                    descent=descent,
                    steps=steps,
                    routes=(0,) * len(dev),
                    spent=(0.0, 1.0),
                )
                return ItemLearner(engine, task, dev, job)

            starts = [*np.eye(len(names)), np.full(len(names), 1 / len(names))]
            some = descent.draw_loss_items(len(dev))
            losses = [learner(LOSS, x).measure(x, some, slope=False).loss for x in starts]
            start = starts[int(np.argmin(losses))]
            reached = learner(DESCENT, start).descend().position
            found = start if descent.rate_factor[0] < 1 else reached
    finally:
        engine.set_adapters({})
        model.train(training).requires_grad_(False)
        for one in trained:
            one.requires_grad_(True)
    return dict(zip(names, found.tolist(), strict=True))


def check_lora(name: str, config: Any) -> None:
    """Check that an adapter adds s B A to linear layers, and does nothing else.

    Raises:
        UserError: It does not.
    """
    values = json.loads(json.dumps(config.to_dict(), default=list))
    try:
        parse_settings(AdapterConfig, values)
        refuse_variants(values)
    except UserError as error:
        raise UserError(f"adapters: {name}: {error}") from None


def adapter_factors(model: Any, names: Sequence[str]) -> "dict[str, Factors]":
    """Return the factors of some adapters, for each linear layer below PEFT's."""
    import torch

    found: dict[str, Factors] = {}
    for module, layer in model.get_base_model().named_modules():
        parts = getattr(layer, "lora_A", {})
        mine = [(i, name) for i, name in enumerate(names) if name in parts]
        if not mine:
            continue
        downs = [layer.lora_A[name].weight.detach() for _, name in mine]
        ups = [layer.scaling[name] * layer.lora_B[name].weight.detach() for _, name in mine]
        places = [i for (i, _), down in zip(mine, downs, strict=True) for _ in down]
        factors = torch.cat(downs), torch.cat(ups, dim=1), torch.tensor(places)
        found[f"{module}.base_layer"] = factors
    return found
