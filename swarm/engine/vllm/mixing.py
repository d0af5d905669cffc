"""Adapters at a position, made of what the pool holds, and written as vLLM reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swarm.adapters import CONFIG_FILE, WEIGHTS_FILE
from swarm.pool import Pool

if TYPE_CHECKING:
    import torch


class HostBasis:
    """The experts of an open pool in memory, float32 on the CPU.

    Attributes:
        count: K x G, the coefficients of a position.
        rows: K.
        shared: Whether A is the same at every position and the coefficients are in B alone, as in
            the delta space.
        starts: Of each module, where the coefficients of its group begin in a position.
    """

    def __init__(self, pool: Pool) -> None:
        self._held = {name: pool.expert_factors(name) for name in pool.modules}
        self.rows = len(pool.names)
        self.count = self.rows * len(pool.groups)
        self.shared = pool.space == "delta"
        self.starts = {
            name: int(places[0]) // self.rows * self.rows
            for name, (_, _, places) in self._held.items()
        }
        self._rank = pool.rank

    def write_adapter(self, position: Sequence[float] | np.ndarray, folder: Path, dtype: str) -> None:
        """Write the adapter at a position [G * K], summed in float32, in a new folder.

        Args:
            dtype: Of the file's weights, such as "bfloat16".
        """
        import torch
        from safetensors.torch import save_file

        coefficients = torch.as_tensor(np.asarray(position), dtype=torch.float32)
        tensors = {}
        for module, factors in self._held.items():
            for side, weight in zip("AB", mix_factors(factors, coefficients), strict=True):
                key = f"base_model.model.{module}.lora_{side}.weight"
                tensors[key] = weight.to(getattr(torch, dtype)).contiguous()
        # The scaling is in B: alpha is the rank.
        config = {
            "peft_type": "LORA", "r": self._rank, "lora_alpha": self._rank, "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in self._held}),
        }  # fmt: skip
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / WEIGHTS_FILE)


def mix_factors(
    factors: "tuple[torch.Tensor, torch.Tensor, torch.Tensor]", coefficients: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A [r, in] and B [out, r] of one module, from what `swarm.pool.Pool.held` gives."""
    import torch

    down, up, places = factors
    weights = coefficients.index_select(0, places)
    if down.dim() == 2:
        return down, up * weights
    return torch.einsum("k,kri->ri", weights, down), torch.einsum("k,kor->or", weights, up)
