"""Linear layers with one low-rank update per particle, so that one batch serves many particles.

A batch of P particles has its rows in P equal blocks, particle by particle. The base matmul is
shared by all rows; the updates are two batched matmuls (arXiv 2106.09685, with one more axis), or,
if particles are exact sums of the experts' updates, two that all rows share. With a `Routing` the
rows may be in any order, which needs such shared factors or products as in `PRODUCTS`. These are
used on a GPU, on factors at fixed addresses (`BatchedLoraModel.use_static_factors`), as CUDA graphs
require.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm._util import files
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError

Factors = Sequence[torch.Tensor]
"""A and B of all experts, and the indices of their coefficients in a position."""


@dataclass(slots=True)
class Routing:
    """The particle of each row of a batch whose rows are not P equal blocks.

    Attributes:
        particles: Particle of each row, [R].
        others: True but at each row's particle, [R, 1, P, 1].
        ends: Number of rows of particles 0 to p, int32 [P], if rows are in the order of particles;
            `None` if they may be in any order.
        tokens: Particle of each token, where a forward pass does not compute padding.
    """

    particles: torch.Tensor
    others: torch.Tensor
    ends: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @classmethod
    def of_rows(cls, particles: Sequence[int], count: int, device: Any) -> "Routing":
        """Return the routing of rows with these particles, of `count`; grouped if in order."""
        index = torch.tensor(particles, device=device)
        ends = None
        if list(particles) == sorted(particles):
            ends = torch.bincount(index, minlength=count).cumsum(0).to(torch.int32)
        return cls(index, find_others(index, count), ends)


def find_others(particles: torch.Tensor, count: int) -> torch.Tensor:
    """Return where a row's particle is another one, [R, 1, P, 1]."""
    each = torch.arange(count, device=particles.device)
    return (particles[:, None] != each)[:, None, :, None]


def multiply_batched(
    rows: torch.Tensor,
    out: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Add `rows A^T B^T` to `out` by batched products over equal blocks; ignores `routing`.

    In place, as all of `PRODUCTS`: otherwise `out` would be copied first.

    Args:
        rows: [N, in], the tokens of all rows.
        out: [N, out].
        down, up: A of all particles, [P, r, in], and B^T, [P, r, out].
    """
    particles = len(down)
    low = torch.bmm(rows.view(particles, -1, rows.shape[1]), down.transpose(1, 2))
    out.view(particles, -1, out.shape[1]).baddbmm_(low, up)
    return out


def multiply_grouped(
    rows: torch.Tensor,
    out: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Do the same by grouped products, for rows in the order of particles, of any number."""
    if routing is None:
        ends = torch.arange(1, len(down) + 1, dtype=torch.int32, device=rows.device)
        ends = ends * (len(rows) // len(down))
    else:
        assert routing.ends is not None
        ends = routing.ends * (len(rows) // len(routing.particles))
    low = torch._grouped_mm(rows, down.transpose(1, 2), offs=ends)
    return out.add_(torch._grouped_mm(low, up, offs=ends))


def multiply_masked(
    rows: torch.Tensor,
    out: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    routing: Routing | None = None,
) -> torch.Tensor:
    """Do the same by products with all particles' factors, masked in between.

    Rows may be in any order. The arithmetic of the updates is P times as much, but the factors are
    read once and not gathered for every row.
    """
    particles, rank, _ = down.shape
    low = nn.functional.linear(rows, down.flatten(0, 1))
    if particles > 1:
        if routing is None:
            others = find_others(torch.arange(particles, device=low.device), particles)
        else:
            others = routing.others
        # Not multiplied by 0: a particle that overflows would spoil the rows of all.
        low.view(len(others), -1, particles, rank).masked_fill_(others, 0)
    return out.addmm_(low, up.flatten(0, 1))


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "batched": multiply_batched,
    "grouped": multiply_grouped,
    "masked": multiply_masked,
}
"""Ways to add particles' updates; equal up to rounding."""

MIN_GAIN = 0.9
"""Share of the default product's time below which another one replaces it."""


@dataclass(slots=True)
class ProductChooser:
    """The choice among `PRODUCTS`.

    The default is batched for equal blocks and masked otherwise.

    Attributes:
        fixed: The only one to use where the rows allow it; `None` leaves the choice open.
        measured: Whether to time the products at the first use of a shape. The choice is stored in
            the cache folder, so that all later processes on this kind of device agree.
        chosen: Choices by shape.
    """

    fixed: str | None = None
    measured: bool = False
    chosen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def choose(self, *tensors: torch.Tensor, routing: Routing | None) -> str:
        """Return the product to use for `rows`, `out`, `down` and `up`."""
        ways = [
            way
            for way, possible in (
                ("batched", routing is None),
                ("masked", True),
                ("grouped", routing is None or routing.ends is not None),
            )
            if possible
        ]
        if self.fixed in ways:
            return self.fixed
        rows, out, down, _ = tensors
        if not self.measured or len(ways) == 1 or len(down) == 1:
            return ways[0]
        # Times vary little within a power of two.
        size = 1 << (len(rows) - 1).bit_length()
        key = (size, rows.shape[1], out.shape[1], *down.shape[:2], ways[0], str(rows.dtype))
        if key not in self.chosen:
            self.chosen[key] = self._load_or_measure(key, ways, tensors, routing)
        return self.chosen[key]

    def _load_or_measure(
        self,
        key: tuple[Any, ...],
        ways: list[str],
        tensors: Sequence[torch.Tensor],
        routing: Routing | None,
    ) -> str:
        device = tensors[0].device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        path = (
            files.cache_folder() / "products" / files.short_digest([name, torch.__version__, *key])
        )
        with contextlib.suppress(OSError):
            if (found := path.read_text()) in ways:
                return found
        seconds = {way: time_product(way, tensors, routing) for way in ways}
        best = min(ways, key=lambda way: seconds[way])
        found = best if seconds[best] < MIN_GAIN * seconds[ways[0]] else ways[0]
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:  # the first process to measure decides for all
                file.write(found)
        return found


def time_product(
    way: str, tensors: Sequence[torch.Tensor], routing: Routing | None, repeats: int = 3
) -> float:
    """Return the median of a product's wall seconds; infinity if the device does not have it."""
    device = tensors[0].device
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    rows, out, down, up = tensors
    out = out.clone()
    seconds = []
    try:
        for _ in range(repeats + 1):
            wait()
            began = time.perf_counter()
            PRODUCTS[way](rows, out, down, up, routing)
            wait()
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # for example a rank that is not a multiple of 8
        return float("inf")
    return statistics.median(seconds[1:])


class BatchedLoraLinear(nn.Module):
    """A linear layer plus `B[p] @ A[p]` on the rows of particle p.

    Attributes:
        down: A of all particles, [P, r, in]; `None` applies the base layer only.
        up: B of all particles, [P, out, r], including the scaling.
        shares: The coefficients of all particles, [P, 1, R], if A [R, in] and B [out, R] are the
            concatenated factors of all experts; `None` if each particle has separate factors.
        merged: The base weight plus `up[0] @ down[0]`, [out, in], for a single particle; a copy,
            computed each time from the base weight, which is never modified.
        static: `down`, `up` (as [P, r, out] if factors are separate) and `shares` at addresses that
            remain the same while their shapes do; `None` if they are not used.
        routing: The particles of the rows; `None` for equal blocks. Needs `static` or `shares`.
        chooser: The choice of the product with `static`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down: torch.Tensor | None = None
        self.up: torch.Tensor | None = None
        self.shares: torch.Tensor | None = None
        self.merged: torch.Tensor | None = None
        self.static: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self.routing: Routing | None = None
        self.chooser = ProductChooser()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [P * b, ..., in], or with a routing the tokens of any rows, to [..., out]."""
        if self.merged is not None:
            return nn.functional.linear(rows, self.merged, self.linear.bias)
        out: torch.Tensor = self.linear(rows)
        if self.down is None or self.up is None:
            return out
        if self.static is not None and not torch.is_grad_enabled():
            return self._add_static_update(rows, out)
        low = self._project_down(rows, self.down)
        if self.shares is not None:
            return out + nn.functional.linear(low, self.up).view(out.shape)
        mixed = torch.baddbmm(
            out.reshape(len(low), -1, out.shape[-1]), low, self.up.transpose(1, 2)
        )
        return mixed.view(out.shape)

    def _project_down(self, rows: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Return A x of all rows, times the coefficients if factors are shared.

        Blocks are [P, b, r]; with a routing [R, b, r] for R rows, or [N, 1, r] for N tokens.
        """
        if self.shares is None:
            blocks = rows.reshape(down.shape[0], -1, rows.shape[-1])
            return torch.bmm(blocks, down.transpose(1, 2))
        shares, routing = self.shares, self.routing
        if routing is not None:
            shares = shares[routing.particles if routing.tokens is None else routing.tokens]
        low = nn.functional.linear(rows, down).reshape(len(shares), -1, len(down))
        # In float32: a coefficient rounded to bfloat16 would have the same relative error
        # everywhere.
        return (low * shares).to(rows.dtype)

    def _add_static_update(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert self.static is not None
        down, up, shares = self.static
        tokens, sums = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, out.shape[-1])
        if shares is not None:
            own = shares if self.routing is None else shares[self.routing.particles]
            low = nn.functional.linear(tokens, down)
            low = (low.view(len(own), -1, len(down)) * own).to(rows.dtype)
            return sums.addmm_(low.view(-1, len(down)), up.T).view(out.shape)
        way = self.chooser.choose(tokens, sums, down, up, routing=self.routing)
        return PRODUCTS[way](tokens, sums, down, up, self.routing).view(out.shape)

    def store_static(self) -> None:
        """Copy the factors to fixed addresses."""
        if self.down is None or self.up is None:
            return
        before = self._stored or (None, None, None)
        if self.shares is not None:
            # Concatenated factors are the same for all positions and are not copied.
            self._stored = self.down, self.up, copy_in_place(before[2], self.shares)
        else:
            down = copy_in_place(before[0], self.down)
            self._stored = down, copy_in_place(before[1], self.up.transpose(1, 2)), None
            # One copy is enough.
            self.down, self.up = down, self._stored[1].transpose(1, 2)
        self.static = self._stored

    def add_update(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the updates of `rows` [P * b, in] to `out` [P * b, out] in place; see `forward`."""
        if self.down is None or self.up is None:
            return
        low = self._project_down(rows, self.down)
        if self.shares is not None:
            out.add_(nn.functional.linear(low, self.up).view(out.shape))
        else:
            out.view(len(low), -1, out.shape[-1]).baddbmm_(low, self.up.transpose(1, 2))

    def merge_update(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Merge one particle with A [r, in] and B [out, r], as fast as the base alone."""
        weight = self.linear.weight
        if self.merged is None:
            self.merged = torch.empty_like(weight)
        torch.addmm(weight, up.to(weight.dtype), down.to(weight.dtype), out=self.merged)


def copy_in_place(target: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
    """Return `target` with the values of `source`, or a contiguous copy if it does not fit."""
    if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
        return source.clone(memory_format=torch.contiguous_format)
    return target.copy_(source)


class BatchedLoraModel:
    """The batched LoRA layers of one model, installed in place of its linear layers.

    Args:
        model: The base model; modified in place until `remove_layers`.
        basis: For each module name, A of all experts [K, r, in] and B [K, out, r], to be mixed
            separately, or A [R, in] and B [out, R], concatenated over the experts, to be summed
            exactly. An optional third element contains, for each entry of A's first axis, the index
            of its coefficient in a position; by default they are in order.
        device, dtype: Device of the basis, and type in which the layers compute.
        summed: With A [K, r, in] and B [K, out, r], sum the products B A of the experts in use,
            exactly, instead of mixing A and B separately. A position then costs as much as the
            experts whose coefficient is not 0, unlike with concatenated factors.

    Raises:
        KeyError: The model has no linear layer of that name.
        ValueError: A factor does not fit its layer.
    """

    def __init__(
        self,
        model: nn.Module,
        basis: Mapping[str, Factors],
        device: str,
        dtype: torch.dtype,
        summed: bool = False,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._summed = summed
        self.device = torch.device(device)
        self._static = False
        self._basis: dict[str, tuple[torch.Tensor, ...]] = {}
        self._layers: dict[str, BatchedLoraLinear] = {}
        modules = dict(model.named_modules())
        for name, (down, up, *where) in basis.items():
            linear = modules.get(name)
            if not isinstance(linear, nn.Linear):
                raise KeyError(name)
            if (linear.in_features, linear.out_features) != (down.shape[-1], up.shape[-2]):
                raise ValueError(
                    f"{name} is {linear.in_features} x {linear.out_features}, "
                    f"the experts' is {down.shape[-1]} x {up.shape[-2]}"
                )
            # Factors that are summed stay in float32 until after the sum.
            kind = torch.float32 if down.dim() == 3 else dtype
            row_indices = where[0] if where else torch.arange(len(down))
            self._basis[name] = (down.to(device, kind), up.to(device, kind), row_indices.to(device))
        for name in self._basis:
            self._layers[name] = BatchedLoraLinear(modules[name])  # type: ignore[arg-type]
            self._replace_module(name, self._layers[name])

    def _replace_module(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(parent), leaf, module)

    @torch.inference_mode()
    def set_positions(self, coefficients: torch.Tensor, merge: bool = False) -> None:
        """Set P positions, [P, G * K]; factors are mixed in float32.

        Args:
            merge: Add the update to a copy of the weights; for a single position.
        """
        if not merge:
            self.attach_positions(coefficients, self._static)
            return
        coefficients = self._move_coefficients(coefficients)
        for name, (down, up, row_indices) in self._basis.items():
            weights = coefficients.index_select(1, row_indices)
            if down.dim() == 3:
                down, up = self._mix_factors(weights, down, up)
            else:
                down, up = down[None], up * weights[:, None]
            self._layers[name].merge_update(down[0], up[0])

    def attach_positions(self, coefficients: torch.Tensor, static: bool = False) -> None:
        """Set positions without merging; gradients flow back into `coefficients` if required.

        Args:
            static: Store the factors at fixed addresses, through which no gradients flow.
        """
        coefficients = self._move_coefficients(coefficients)
        for name, (down, up, row_indices) in self._basis.items():
            layer = self._layers[name]
            weights = coefficients.index_select(1, row_indices)
            if down.dim() == 3:
                down, up = self._mix_factors(weights, down, up)
            layer.down, layer.up = down.to(self._dtype), up.to(self._dtype)
            layer.shares = None if down.dim() == 3 else weights[:, None]
            layer.merged = layer.static = None
            if static:
                layer.store_static()

    def _move_coefficients(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Return coefficients in float32 on the device, in one transfer for all layers."""
        coefficients = coefficients.to(torch.float32)
        if self.device.type == "cuda" and coefficients.device.type == "cpu":
            # Pinned memory is copied without waiting for the device.
            return coefficients.pin_memory().to(self.device, non_blocking=True)
        return coefficients.to(self.device)

    def use_static_factors(self, chooser: ProductChooser | None) -> None:
        """Store factors at fixed addresses from the next `set_positions` on; see `PRODUCTS`.

        Args:
            chooser: The choice of the product; `None` uses no fixed addresses.
        """
        self._static = chooser is not None
        for layer in self._layers.values():
            layer.chooser = chooser or ProductChooser()

    @property
    def shares_factors(self) -> bool:
        """Whether all positions use the same factors and differ in `shares` alone."""
        return all(down.dim() == 2 for down, *_ in self._basis.values())

    def route_rows(self, routing: Routing | None) -> None:
        """Set the particles of the rows of the next forward passes; `None` for equal blocks."""
        for layer in self._layers.values():
            layer.routing = routing

    def static_addresses(self) -> tuple[tuple[int, ...], ...]:
        """Return addresses and shapes of all factors, on which CUDA graphs depend."""
        return tuple(
            (tensor.data_ptr(), *tensor.shape)
            for layer in self._layers.values()
            for tensor in ((layer.merged,) if layer.merged is not None else layer.static or ())
            if tensor is not None
        )

    def _mix_factors(
        self, weights: torch.Tensor, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [P, r', in] and B [P, out, r'] of positions [P, K], from all experts' factors.

        Summed, the factors of the experts in use stand side by side, r' = r times the most experts
        that a position uses; the product is then the sum of their products.
        """
        if not self._summed:
            mixed = torch.einsum("pk,kri->pri", weights, down)
            return mixed, torch.einsum("pk,kor->por", weights, up)
        in_use = weights != 0
        width = max(1, int(in_use.sum(1).max()))
        order = in_use.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
        shares = weights.gather(1, order)[:, :, None, None]
        return down[order].flatten(1, 2), (up[order] * shares).transpose(1, 2).flatten(2)

    def first_nonfinite(self) -> int | None:
        """Return the first of the set positions whose mixed factors are NaN or infinite, if any."""
        good: torch.Tensor | None = None
        for layer in self._layers.values():
            tensors = (layer.shares,) if layer.shares is not None else (layer.down, layer.up)
            for factor in tensors:
                if factor is not None:
                    fine = factor.isfinite().flatten(1).all(1)
                    good = fine if good is None else good & fine
        # One device-to-host transfer for all layers.
        bad = [] if good is None else (~good).nonzero().flatten().tolist()
        return bad[0] if bad else None

    def clear_positions(self) -> None:
        """Apply the base model alone until the next `set_positions`."""
        for layer in self._layers.values():
            layer.down = layer.up = layer.shares = layer.merged = layer.static = None

    def remove_layers(self) -> None:
        """Restore the model's original layers, which were never modified."""
        for name, layer in self._layers.items():
            self._replace_module(name, layer.linear)
        self._layers.clear()


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows of any particles in any order; needs static factors or `shares_factors`.

    Attributes:
        stack: The layers, where P positions are set.
        particles: Particle of each row.
        count: P.
    """

    stack: BatchedLoraModel
    particles: Sequence[int]
    count: int

    def activate(self, rows: Iterable[int]) -> None:
        """Make these rows, by their numbers, those of the next forward passes."""
        self.stack.route_rows(
            Routing.of_rows([self.particles[row] for row in rows], self.count, self.stack.device)
        )


def install_lora_layers(
    model: Any, basis: Any, device: str, base: BaseModel, folder: str | Path, summed: bool = False
) -> BatchedLoraModel:
    """Install the experts' layers in the model.

    Raises:
        UserError: The pool does not fit the base.
    """
    try:
        return BatchedLoraModel(model, basis, device, model.dtype, summed)
    except KeyError as error:
        raise UserError(
            f"pool.folder={folder}: the experts adapt {error.args[0]}, which the base "
            f"{base.path} does not have as a linear layer; use the base they were trained on"
        ) from None
    except ValueError as error:
        raise UserError(
            f"pool.folder={folder}: the experts do not fit the base {base.path}: {error}"
        ) from None
