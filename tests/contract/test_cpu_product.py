"""Products on a CPU: PyTorch's own values and gradients, in all shapes."""

import pytest
import torch

from swarm.engine import cpu_product
from swarm.engine.cpu_product import add_product, multiply, use_in_layers

SHAPES = [((3, 5), 4), ((2, 7, 16), 9), ((1, 1, 8), 1), ((0, 6), 3), ((4, 6), 0), ((4, 0), 3)]


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
            rows = mine[0].flatten(0, -2)
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


def test_layers_of_a_model_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Bilinear(2, 2, 2))
    rows = torch.randn(2, 4)
    expected = model[0](rows)
    use_in_layers(model)
    calls = []
    monkeypatch.setattr(
        cpu_product, "multiply", lambda *given: calls.append(given) or multiply(*given)
    )
    assert torch.allclose(model[0](rows), expected, atol=1e-6) and len(calls) == 1
