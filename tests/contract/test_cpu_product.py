"""Products on a CPU: PyTorch's own values and gradients, in all shapes."""

import copy
import pickle
import weakref
from pathlib import Path

import pytest
import tiny
import torch

from swarm.engine.base_model import BaseModel
from swarm.engine.cpu_product import QuickLinear, add_product, multiply

SHAPES = [
    ((3, 5), 4),
    ((6,), 4),
    ((2, 7, 16), 9),
    ((1, 1, 8), 1),
    ((0, 6), 3),
    ((4, 6), 0),
    ((4, 0), 3),
]


@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    leaves = torch.randn(shape), torch.randn(outputs, shape[-1]), torch.randn(outputs)
    found, expected = [], []
    for product, kept in ((multiply, found), (torch.nn.functional.linear, expected)):
        mine = [one.to(dtype).requires_grad_() for one in leaves]
        out = product(*mine)
        kept += [out, *torch.autograd.grad((out * out.detach().cos()).sum(), mine)]
        with torch.no_grad():
            kept.append(product(*mine[:2]))
            rows = mine[0].flatten(0, -2) if len(shape) > 1 else mine[0][None]
            base = torch.ones(len(rows), outputs, dtype=dtype)
            if product is multiply:
                add_product(base, rows, mine[1])
            else:
                base += product(rows, mine[1])
            kept.append(base)
    tolerance = {torch.bfloat16: 0.05}.get(dtype, 1e-5)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, tolerance, tolerance)


def test_transposed_weights_and_frozen_ones() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, 5).t()
    out = multiply(rows, weight)
    assert torch.allclose(out, rows @ weight.t(), atol=1e-5)
    out.sum().backward()
    assert rows.grad is not None and torch.allclose(rows.grad[0, 0], weight.sum(0), atol=1e-5)


def test_layers_of_a_loaded_model_use_it(tiny_llama: Path) -> None:
    """They are copied, written and adapted as others are, and freed with the model."""
    model, _ = BaseModel(str(tiny_llama)).load("cpu")
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    assert layers and {type(one) for one in layers} == {QuickLinear}
    ids = torch.arange(6)[None]
    expected = tiny.load(tiny_llama)(ids).logits
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(same(ids).logits, expected, atol=1e-5)
    weight = weakref.ref(layers[0].weight)
    del model, same, layers
    assert weight() is None
