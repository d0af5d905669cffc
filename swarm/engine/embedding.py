"""Mean hidden states of prompts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

DEPTHS = (1 / 3, 1 / 2, 2 / 3)
"""Shares of a model's layers after which prompts are embedded, unless layers are given."""


def embed_tokens(
    model: Any, ids: Sequence[Sequence[int]], layers: Sequence[int] | None = None
) -> dict[int, np.ndarray]:
    """Return the mean hidden states of T prompts after some layers, float32 [T, D] by layer.

    Args:
        model: A causal language model of transformers.
        ids: Token ids of the prompts; an empty prompt has zeros.
        layers: Numbers of layers, from 1; `None` is those of `DEPTHS`.

    Raises:
        torch.OutOfMemoryError: The prompts do not fit on the device as one batch.
    """
    stacks = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    decoder: Any = max(stacks, key=len)  # type: ignore[arg-type]
    wanted = layers or sorted({max(1, round(share * len(decoder))) for share in DEPTHS})
    width = max(1, *map(len, ids))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    mask, tokens = mask.to(model.device), tokens.to(model.device)
    found: dict[int, np.ndarray] = {}

    def keep(layer: int, module: Any, given: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        sums = (states.float() * mask[..., None]).sum(dim=1)
        found[layer] = (sums / mask.sum(dim=1, keepdim=True).clamp(min=1)).cpu().numpy()

    hooks = [decoder[one - 1].register_forward_hook(partial(keep, one)) for one in wanted]
    try:
        # Not in inference mode, in which a CPU runs another forward without these modules.
        with torch.no_grad():
            model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
