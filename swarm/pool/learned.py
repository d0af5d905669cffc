"""A learned adapter: a LoRA of all linear layers, trained beside the coefficients of the experts.

What the experts cannot say in any mixture, it can learn from the same items; what they can, it
need not learn. It belongs to the position that it was learned with, and is zero at first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from swarm.errors import UserError

FactorPair = tuple[torch.Tensor, torch.Tensor]

SCALING = 2.0
"""Factor of the update, as of a LoRA whose alpha is twice its rank."""


class LearnedAdapter:
    """A low-rank update of every linear layer, float32 (Hu et al. 2021, arXiv 2106.09685).

    The update is `SCALING` B A.

    Args:
        factors: A [r, in] and B [out, r] by module.

    Attributes:
        factors: The same; leaves of autograd after `train`.
    """

    def __init__(self, factors: Mapping[str, FactorPair]) -> None:
        self.factors = dict(factors)
        self._adam: torch.optim.AdamW | None = None
        self._sums: list[torch.Tensor] = []
        self._summed = 0

    @classmethod
    def draw(
        cls, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, device: Any
    ) -> "LearnedAdapter":
        """Return an adapter with random A and zero B, so that its update is zero.

        A is uniform in +-1 / sqrt(in), as PEFT and torch.nn.Linear begin.

        Args:
            shapes: (in, out) of each module.
        """
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for module, (inputs, outputs) in sorted(shapes.items()):
            a = torch.rand(rank, inputs, generator=generator).mul_(2).sub_(1).div_(inputs**0.5)
            factors[module] = a.to(device), torch.zeros(outputs, rank, device=device)
        return cls(factors)

    @classmethod
    def load(cls, file: str | Path, device: Any = "cpu") -> "LearnedAdapter":
        """Read the adapter that `encode` wrote.

        Raises:
            UserError: The file is missing or damaged.
        """
        try:
            weights = load_file(file, device=str(device))
            modules = {name.rpartition(".")[0] for name in weights}
            factors = {m: (weights[f"{m}.A"], weights[f"{m}.B"]) for m in sorted(modules)}
        except Exception as error:
            raise UserError(f"{file}: the learned adapter cannot be read ({error})") from None
        return cls(factors)

    def encode(self) -> bytes:
        """Return the content of a safetensors file, which `load` reads."""
        weights: dict[str, torch.Tensor] = {}
        for module, (a, b) in self.factors.items():
            weights |= {f"{module}.A": a.detach().cpu(), f"{module}.B": b.detach().cpu()}
        return save({name: one.contiguous() for name, one in weights.items()})

    def update(self, module: str) -> FactorPair:
        """Return A and B of a module whose product is the update."""
        a, b = self.factors[module]
        return a, SCALING * b

    # Training

    def train(self, rate: float, decay: float) -> None:
        """Prepare for `step`: AdamW with fresh moments."""
        for one in self._weights():
            one.requires_grad_(True)
        self._adam = torch.optim.AdamW(list(self._weights()), lr=rate, weight_decay=decay)

    def step(self, factor: float = 1.0, keep: bool = True) -> None:
        """Take one step down the gradients that have been accumulated.

        Args:
            factor: Multiple of the rate in this step.
            keep: Whether the result counts in the mean of `settle`.
        """
        assert self._adam is not None
        for group in self._adam.param_groups:
            group.setdefault("full", group["lr"])
            group["lr"] = factor * group["full"]
        if all(one.grad is None or one.grad.isfinite().all() for one in self._weights()):
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if keep:
            self._sums = self._sums or [torch.zeros_like(one) for one in self._weights()]
            self._summed += 1
            for total, one in zip(self._sums, self._weights(), strict=True):
                total += one.detach()

    def settle(self) -> None:
        """End the training with the mean of the steps that were kept, if any."""
        for one in self._weights():
            one.requires_grad_(False)
        for total, one in zip(self._sums, self._weights(), strict=bool(self._sums)):
            one.copy_(total / self._summed)

    def _weights(self) -> Iterator[torch.Tensor]:
        return (one for pair in self.factors.values() for one in pair)
