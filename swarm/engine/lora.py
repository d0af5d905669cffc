"""Linear layers with the experts' low-rank updates, weighted by the position of each row.

A of all experts stand one above the other and B side by side, and the coefficients c of a row are
applied between the two: `y = W x + B (c * (A x))` (arXiv 2106.09685, summed over the experts). In
the factor space, which mixes A and B separately, it is `y = W x + B (c * sum_k c_k A_k x)`.

There is no second product, such as one with the mixed factors of each position, which has K times
fewer multiplications: this one reads base and factors once for any number of positions, takes rows
in any order, mixes nothing when positions change, and a CUDA graph of it depends on the address of
the coefficients alone. Where a position has many requests, its update is added to a copy of the
weights instead (`swarm.engine.base.choose_plan`), which then run as fast as the base.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from swarm.engine.base import Mixer, UpdateCost
from swarm.engine.cpu_product import add_product, multiply
from swarm.errors import UserError
from swarm.pool.learned import LearnedAdapter

Factors = Sequence[torch.Tensor]
"""A and B of all experts and the indices of their coefficients in a position.

A [R, in] and B [out, R] with R indices are summed exactly, R the sum of the experts' ranks; A
[K, r, in] and B [K, out, r] with K indices are mixed separately. See `Pool.expert_factors`.
"""


class Routing:
    """The positions of the rows of the next forward passes, shared by all layers.

    Attributes:
        particles: Index of the position of each row, [R]; `None` is the first for all.
    """

    particles: torch.Tensor | None = None


class LoraLinear(nn.Module):
    """A linear layer plus the update of each row's position.

    Args:
        linear: The frozen layer.
        factors: See `Factors`.
        dtype: Type in which the updates are computed.
        routing: The positions of the rows.

    Attributes:
        down, up: A [R, in] and B [out, R] of all experts.
        shares: Coefficients of all positions, float32 [P, R], or [P, K] where A and B are mixed
            separately; `None` applies the base layer alone.
        merged: The weight plus the update of a single position; a copy, always computed from the
            base weight, which is never modified.

    Learned adapters stand below the experts' A and beside their B, with a share of 1 for the
    positions that have them and 0 for all others.
    """

    def __init__(
        self, linear: nn.Linear, factors: Factors, dtype: torch.dtype, routing: Routing
    ) -> None:
        super().__init__()
        down, up, places = factors
        self.rank = down.shape[1] if down.dim() == 3 else None
        if self.rank is not None:
            down, up = down.flatten(0, 1), up.transpose(0, 1).flatten(1)
        device = linear.weight.device
        self.linear, self.routing = linear, routing
        self.down, self.up = down.to(device, dtype), up.to(device, dtype).contiguous()
        self.places = places.to(device)
        # An expert that exceeds float16 must not spoil the positions that do not use it: 0 times
        # infinity is NaN. The other types have the range of float32.
        self.overflows = dtype == torch.float16
        if self.overflows:
            lost = ~self.up.isfinite().all(dim=0)
            self.down[lost], self.up[:, lost] = math.nan, 0.0
        self.experts = self.down, self.up
        self.shares: torch.Tensor | None = None
        self.merged: torch.Tensor | None = None

    def attach_learned(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set A [r, in] and B [out, r] of learned adapters beside the experts'."""
        self.down, self.up = self.experts
        if factors:
            sides = zip(*factors, strict=True)
            down, up = ([one.to(self.down) for one in side] for side in sides)
            self.down, self.up = torch.cat([self.down, *down]), torch.cat([self.up, *up], dim=1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [R, ..., in] to [R, ..., out]."""
        if self.merged is not None:
            return multiply(rows, self.merged, self.linear.bias)
        out: torch.Tensor = self.linear(rows)
        if self.shares is not None:
            low = self.project_down(rows, self.routing.particles)
            if torch.is_grad_enabled():
                return out + multiply(low, self.up).view(out.shape)
            add_product(out.view(-1, out.shape[-1]), low, self.up)
        return out

    def project_down(self, rows: torch.Tensor, particles: torch.Tensor | None) -> torch.Tensor:
        """Return A x of all tokens of `rows` [R, ..., in] times their coefficients, [N, R]."""
        assert self.shares is not None
        shares = self.shares[:1] if particles is None else self.shares[particles]
        low = multiply(rows, self.down).view(len(shares), -1, len(self.down))
        # In float32: a coefficient rounded to bfloat16 would have the same relative error
        # everywhere.
        each = shares[:, None]
        if self.rank is not None:
            low, each = low.unflatten(2, (-1, self.rank)), each[..., None]
        if self.overflows and not torch.is_grad_enabled():
            low = low.masked_fill(each == 0, 0.0)
        low = low * each
        if self.rank is not None:
            low = (low.sum(2, keepdim=True) * each).flatten(2)
        return low.flatten(0, 1).to(rows.dtype)

    def merge(self, shares: torch.Tensor) -> torch.Tensor:
        """Add the update with these shares [R], or [K], to a copy of the weight, and return it."""
        down, up = self.down, self.up
        if self.overflows:
            unused = (shares == 0).repeat_interleave(self.rank or 1)
            down, up = down.masked_fill(unused[:, None], 0.0), up.masked_fill(unused, 0.0)
        if self.rank is None:
            up = up * shares
        else:
            down = torch.einsum("k,kri->ri", shares, down.unflatten(0, (-1, self.rank)).float())
            up = torch.einsum("k,okr->or", shares, up.unflatten(1, (-1, self.rank)).float())
        weight = self.linear.weight
        if self.merged is None:
            self.merged = torch.empty_like(weight, device=down.device)
        # From pinned memory, where vLLM's workers have it, without waiting for the device.
        self.merged.copy_(weight, non_blocking=True)
        add_product(self.merged, up.to(weight.dtype), down.to(weight.dtype).t())
        return self.merged


class LoraLayers(Mixer):
    """The LoRA layers of one model, installed in place of its linear layers.

    Args:
        model: The base model; its layers are replaced until `remove`.
        basis: The experts' factors by module name.
        where: Names of the experts and of the base, for the error.
        learns: Whether positions may have learned adapters, which adapt all linear layers.

    Attributes:
        linear_shapes: (in, out) of the layers that learned adapters adapt.

    Raises:
        UserError: The model has no linear layer of a name, or a factor does not fit it.
    """

    def __init__(
        self,
        model: Any,
        basis: Mapping[str, Factors],
        where: str = "pool",
        learns: bool = False,
    ) -> None:
        self._model, self._routing = model, Routing()
        self._layers: dict[str, LoraLinear] = {}
        self._buffers: list[torch.Tensor] = []  # shares, at addresses that graphs contain
        self._held: tuple[torch.Tensor, bool, Sequence[LearnedAdapter | None]] | None = None
        self._learned: Sequence[LearnedAdapter | None] = ()
        self._attached: list[LearnedAdapter] = []
        self._count = 1
        modules = dict(model.named_modules())
        self.linear_shapes = linear_shapes(model) if learns else {}
        none = torch.zeros(0, dtype=torch.long)
        basis = dict(basis) | {
            name: (torch.zeros(0, inputs), torch.zeros(outputs, 0), none)
            for name, (inputs, outputs) in self.linear_shapes.items()
            if name not in basis
        }
        for name, factors in basis.items():
            linear, there = modules.get(name), "none"
            wanted = f"{factors[0].shape[-1]} x {factors[1].shape[-2]}"
            if isinstance(linear, nn.Linear):
                there = f"{linear.in_features} x {linear.out_features}"
            if there != wanted:
                raise UserError(
                    f"{where}: the experts do not fit the base: they adapt a linear layer {name} "
                    f"of {wanted}, and the base has {there}; use the base they were trained on"
                )
            layer = LoraLinear(linear, factors, model.dtype, self._routing)  # type: ignore[arg-type]
            self._layers[name] = layer
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)

    def set_learned(self, adapters: Sequence[LearnedAdapter | None]) -> None:
        """See `swarm.engine.base.Mixer.set_learned`."""
        self._learned = adapters

    @torch.inference_mode()
    def set_positions(self, coefficients: torch.Tensor, merge: bool = False) -> None:
        """See `swarm.engine.base.Mixer.set_positions`."""
        held, layers, learned = self._held, self._layers.values(), self._learned
        if held and held[1:] == (merge, learned) and torch.equal(held[0], coefficients):
            return
        self._count, self._held = len(coefficients), None
        moved = coefficients.to(torch.float32)
        if self._model.device.type == "cuda":
            # Pinned memory is copied without waiting for the device.
            moved = moved.pin_memory().to(self._model.device, non_blocking=True)
        adapters = list(dict.fromkeys(one for one in learned if one is not None))
        self._attach(adapters)
        if merge:
            self.version += any(layer.merged is None for layer in layers)
            for layer in layers:
                layer.merge(self._shares(layer, moved, adapters)[0])
        else:
            # To where the last ones were, if there is room.
            fits = bool(self._buffers) and len(moved) <= len(self._buffers[0]) and not adapters
            if not fits:
                self._buffers = [self._shares(layer, moved, adapters) for layer in layers]
                self.version += 1
            for layer, buffer in zip(layers, self._buffers, strict=True):
                if fits:
                    torch.index_select(moved, 1, layer.places, out=buffer[: len(moved)])
                layer.shares, layer.merged = buffer if len(layer.down) else None, None
            if adapters:
                self._buffers = []
        self._held = coefficients.clone(), merge, learned

    def attach_positions(
        self, coefficients: torch.Tensor, learned: LearnedAdapter | None = None
    ) -> None:
        """Set positions [P, G * K] through which gradients flow back into `coefficients`.

        Args:
            learned: An adapter of all of them, whose factors get gradients too.
        """
        self._count, self._held = len(coefficients), None
        adapters = [learned] if learned else []
        self._learned = [learned] * self._count
        self._attach(adapters)
        for layer in self._layers.values():
            shares = self._shares(layer, coefficients, adapters)
            layer.shares, layer.merged = shares if len(layer.down) else None, None

    def _attach(self, adapters: list[LearnedAdapter]) -> None:
        if adapters or self._attached:
            self._attached = adapters
            for name, layer in self._layers.items():
                layer.attach_learned([one.update(name) for one in adapters if name in one.factors])

    def _shares(
        self, layer: LoraLinear, coefficients: torch.Tensor, adapters: Iterable[LearnedAdapter]
    ) -> torch.Tensor:
        """Return the shares of all rows of a layer's A, [P, R]."""
        shares = coefficients.index_select(1, layer.places)
        for one in adapters:
            rank = (len(layer.down) - len(layer.experts[0])) // len(self._attached)
            has = [float(mine is one) for mine in self._learned]
            shares = torch.cat([shares, shares.new_tensor(has)[:, None].expand(-1, rank)], dim=1)
        return shares

    def route_rows(self, particles: torch.Tensor) -> None:
        """See `swarm.engine.base.Mixer.route_rows`."""
        self._routing.particles = particles if self._count > 1 else None

    @property
    def graph_key(self) -> object:
        """See `swarm.engine.base.Mixer.graph_key`."""
        merged = [layer.merged is not None for layer in self._layers.values()][:1]
        return self.version, self._count > 1, merged

    def clear_positions(self) -> None:
        """Apply the base model alone until the next `set_positions`."""
        self._held = self._routing.particles = None
        self._learned = ()
        self._attach([])
        for layer in self._layers.values():
            layer.shares = layer.merged = None

    @property
    def adapted_weights(self) -> int:
        """Number of weights of the layers."""
        return sum(layer.linear.weight.numel() for layer in self._layers.values())

    @property
    def update_cost(self) -> UpdateCost:
        """Cost of the experts' update."""
        merged = stacked = 0
        for layer in self._layers.values():
            # Factors that are mixed separately are mixed before they are merged, to one's rank.
            merged += layer.linear.weight.numel() * (layer.rank or len(layer.down))
            stacked += sum(layer.linear.weight.shape) * len(layer.down)
        whole = sum(inputs * outputs for inputs, outputs in linear_shapes(self._model).values())
        return UpdateCost(stacked / max(1, whole), merged / max(1, stacked))

    def remove(self) -> None:
        """Restore the model's original layers, which were never modified."""
        for name, layer in self._layers.items():
            self._model.set_submodule(name, layer.linear)
        self._layers.clear()


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Return (in, out) of all linear layers of a causal language model but its output head."""
    head = model.get_output_embeddings()
    return {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
