"""Products of linear layers in float32 on a CPU, by oneDNN.

PyTorch gives them to MKL, which on processors of other makers than Intel uses no instructions
beyond AVX2: with AVX-512 oneDNN takes less than half the time there, and with AVX2 a tenth less
(benchmarks/notes/benchmarks.md). Both are exact to the rounding of float32. Products in bfloat16
are oneDNN's in PyTorch itself.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def multiply(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `rows` [..., in] times `weight` [out, in] transposed, plus `bias` [out]."""
    if not _is_quick(rows, weight):
        return nn.functional.linear(rows, weight, bias)
    if not torch.is_grad_enabled():
        return _multiply(rows, weight, bias)
    product: torch.Tensor = _Product.apply(rows, weight)
    return product if bias is None else product + bias


def add_product(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Add `rows` [N, in] times `weight` [out, in] transposed to `out` [N, out]; no gradients."""
    if _is_quick(rows, weight):
        out.add_(_multiply(rows, weight))
    else:
        out.addmm_(rows, weight.t())


def _is_quick(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    if not AVAILABLE or not (rows.is_cpu and weight.is_cpu) or torch.is_autocast_enabled("cpu"):
        return False
    # oneDNN refuses sums of no terms.
    exact = rows.dtype == weight.dtype == torch.float32
    return exact and rows.dim() > 1 and 0 not in (*rows.shape, *weight.shape)


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


class _Product(torch.autograd.Function):
    """The product with its gradients, which oneDNN's operator has not."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wants_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if wants_weight else None, weight)
        return _multiply(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = _multiply(slope, weight.t()) if ctx.needs_input_grad[0] else None
        if rows is None:
            return of_rows, None
        return of_rows, _multiply(slope.flatten(0, -2).t(), rows.flatten(0, -2).t())


class QuickLinear(nn.Linear):
    """A linear layer that multiplies so."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return multiply(rows, self.weight, self.bias)


def use_in_layers(model: nn.Module) -> None:
    """Let all linear layers of a model multiply so; without effect on a GPU and in other types."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            # Not a new `forward`: it would hold the layer in a cycle, and the weights in memory.
            layer.__class__ = QuickLinear
