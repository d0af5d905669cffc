"""Linear layers that carry one low-rank update per particle, so one batch serves many particles.

A batch of P particles has its rows in P equal blocks, particle by particle. The base matmul is
shared by all rows; the updates are two batched matmuls (arXiv 2106.09685, with one more axis).
"""

from collections.abc import Mapping

import torch
from torch import nn

Factors = tuple[torch.Tensor, torch.Tensor]


class StackedLinear(nn.Module):
    """A linear layer plus `B[p] @ A[p]` on the rows of particle p.

    Attributes:
        down: A of all particles, [P, r, in]; `None` leaves the base layer alone.
        up: B of all particles, [P, out, r], with the scaling already in it.
        merged: The base weight plus `up[0] @ down[0]`, [out, in], for a single particle; a copy,
            made each time from the base weight, which is never written to.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down: torch.Tensor | None = None
        self.up: torch.Tensor | None = None
        self.merged: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [P * b, ..., in] to [P * b, ..., out]."""
        if self.merged is not None:
            return nn.functional.linear(rows, self.merged, self.linear.bias)
        out: torch.Tensor = self.linear(rows)
        if self.down is None or self.up is None:
            return out
        particles = self.down.shape[0]
        blocks = rows.reshape(particles, -1, rows.shape[-1])
        low = torch.bmm(blocks, self.down.transpose(1, 2))
        mixed = torch.baddbmm(
            out.reshape(particles, -1, out.shape[-1]), low, self.up.transpose(1, 2)
        )
        return mixed.view(out.shape)

    def merge(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Become one particle with A [r, in] and B [out, r], as fast as the base alone."""
        weight = self.linear.weight
        if self.merged is None:
            self.merged = torch.empty_like(weight)
        torch.addmm(weight, up.to(weight.dtype), down.to(weight.dtype), out=self.merged)


class Stack:
    """The stacked layers of one model, put in place of its linear layers.

    Args:
        model: The base model; changed in place until `remove`.
        basis: For each module name, A of all experts [K, r, in] and B [K, out, r].
        device, dtype: Where the basis is kept and what the layers compute in.

    Raises:
        KeyError: The model has no linear layer of that name.
        ValueError: A factor does not fit its layer.
    """

    def __init__(
        self, model: nn.Module, basis: Mapping[str, Factors], device: str, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._basis: dict[str, Factors] = {}
        self._layers: dict[str, StackedLinear] = {}
        modules = dict(model.named_modules())
        for name, (down, up) in basis.items():
            linear = modules.get(name)
            if not isinstance(linear, nn.Linear):
                raise KeyError(name)
            if (linear.in_features, linear.out_features) != (down.shape[2], up.shape[1]):
                raise ValueError(
                    f"{name} is {linear.in_features} x {linear.out_features}, "
                    f"the experts' is {down.shape[2]} x {up.shape[1]}"
                )
            self._basis[name] = (down.to(device), up.to(device))
        for name in self._basis:
            self._layers[name] = StackedLinear(modules[name])  # type: ignore[arg-type]
            self._put(name, self._layers[name])

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(parent), leaf, module)

    @torch.inference_mode()
    def set(self, coefficients: torch.Tensor, merge: bool = False) -> None:
        """Become P positions, [P, K]; A and B are mixed separately, in float32.

        Args:
            merge: Add the update to a copy of the weights; for a single position.
        """
        for name, (down, up) in self._basis.items():
            layer = self._layers[name]
            weights = coefficients.to(down.device, torch.float32)
            mixed_down = torch.einsum("pk,kri->pri", weights, down)
            mixed_up = torch.einsum("pk,kor->por", weights, up)
            if merge:
                layer.merge(mixed_down[0], mixed_up[0])
            else:
                layer.down, layer.up = mixed_down.to(self._dtype), mixed_up.to(self._dtype)
                layer.merged = None

    def clear(self) -> None:
        """Leave the base model alone until the next `set`."""
        for layer in self._layers.values():
            layer.down = layer.up = layer.merged = None

    def remove(self) -> None:
        """Give the model its own layers back; they were never written to."""
        for name, layer in self._layers.items():
            self._put(name, layer.linear)
        self._layers.clear()
