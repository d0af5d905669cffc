"""A learned adapter: a LoRA of all linear layers, trained beside the coefficients of the experts.

What the experts cannot say in any mixture, it can learn from the same items; what they can, it
need not learn. It belongs to the position that it was learned with, and is zero at first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from swarm.errors import UserError
from swarm.pool.adapter import FactorShape, PoolRow

FactorPair = tuple[torch.Tensor, torch.Tensor]

MOMENTS = "adam"
"""Begins the names of Adam's state in a file."""

SCALING = 2.0
"""Factor of the update, as of a LoRA whose alpha is twice its rank."""


class LearnedAdapter(PoolRow):
    """A low-rank update of every linear layer, float32 (Hu et al. 2021, arXiv 2106.09685).

    The update is `SCALING` B A. Adam's moments are kept with the factors, so that a later descent
    continues: with fresh ones in each of 20 steps it learnt half as much.

    Args:
        factors: A [r, in] and B [out, r] by module.
        moments: Adam's first and second moments of all factors, and the number of steps.

    Attributes:
        factors: The same; leaves of autograd after `train`.
    """

    name = "new"

    def __init__(
        self,
        factors: Mapping[str, FactorPair],
        moments: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.factors, self._moments = dict(factors), dict(moments)
        self._adam: torch.optim.AdamW | None = None

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
    def load(cls, file: str | Path, device: Any = "cpu", moments: bool = False) -> "LearnedAdapter":
        """Read the adapter that `encode` wrote.

        Args:
            moments: Whether to read Adam's state too, to train on.

        Raises:
            UserError: The file is missing or damaged.
        """
        try:
            with safe_open(file, "pt", device=str(device)) as opened:
                names = [n for n in opened.keys() if moments or not n.startswith(MOMENTS)]  # noqa: SIM118
                stored = {name: opened.get_tensor(name) for name in names}
            modules = sorted({name.removesuffix(".A") for name in names if name.endswith(".A")})
            factors = {m: (stored[f"{m}.A"], stored[f"{m}.B"]) for m in modules}
        except Exception as error:
            raise UserError(f"{file}: the learned adapter cannot be read ({error})") from None
        return cls(factors, {n: one for n, one in stored.items() if n.startswith(MOMENTS)})

    def encode(self) -> bytes:
        """Return the content of a safetensors file, which `load` reads."""
        stored = dict(self._moments)
        for module, pair in self.factors.items():
            stored |= {f"{module}.{side}": one for side, one in zip("AB", pair, strict=True)}
        if self._adam is not None:
            for number, weight in enumerate(self._weights()):
                state = self._adam.state.get(weight, {})
                stored |= {f"{MOMENTS}.{number}.{name}": one for name, one in state.items()}
        return save({name: one.detach().cpu().contiguous() for name, one in stored.items()})

    def update(self, module: str) -> FactorPair:
        """Return A and B of a module whose product is the update."""
        a, b = self.factors[module]
        return a, SCALING * b

    @property
    def shapes(self) -> dict[str, FactorShape]:  # type: ignore[override]
        """See `PoolRow`."""
        return {m: (a.shape[1], len(b), len(a)) for m, (a, b) in self.factors.items()}

    def load_factors(self, module: str) -> FactorPair:
        """See `PoolRow.load_factors`."""
        a, b = self.update(module)
        return a.double(), b.double()

    # Training

    def train(self, rate: float, decay: float) -> None:
        """Prepare for `step`: AdamW with the moments of before, if there are any."""
        weights = list(self._weights())
        for one in weights:
            one.requires_grad_(True)
        self._adam, self._rate = torch.optim.AdamW(weights, lr=rate, weight_decay=decay), rate
        for name, one in self._moments.items():
            _, number, key = name.split(".")
            state = self._adam.state[weights[int(number)]]
            state[key] = one.cpu() if key == "step" else one

    def step(self, factor: float = 1.0) -> None:
        """Take a step at a multiple of the rate; gradients are clipped to a norm of 1."""
        assert self._adam is not None
        weights = list(self._weights())
        for group in self._adam.param_groups:
            group["lr"] = factor * self._rate
        if torch.nn.utils.clip_grad_norm_(weights, 1.0).isfinite():
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def _weights(self) -> Iterator[torch.Tensor]:
        return (one for pair in self.factors.values() for one in pair)
