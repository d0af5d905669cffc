"""Decoding in slots that are refilled: the texts of batches, in steps that can be captured."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm._util import files
from swarm.engine import batched_lora, decode, slots
from swarm.engine.base_model import BaseModel
from swarm.engine.batched_lora import PRODUCTS, BatchedLoraModel, ProductChooser, Routing
from swarm.engine.hf import HFEngine
from swarm.engine.slots import SlotDecoder
from swarm.models.base import Completion, Example, Request
from swarm.pool.pool import Pool

WORDS = "please answer with one word yes or no the graph of 5 nodes has edges between".split()


@pytest.fixture(scope="module", params=tiny.KINDS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny.model(folder / "base", request.param)
    return base, tiny.mixed_pool(base, folder / "pool")


def opened(base: Path, folder: Path, slots: bool, plan: str, **more: Any) -> HFEngine:
    """An engine with slots or without."""
    space = more.pop("space", "delta")
    engine = HFEngine(plan, **more)
    engine.continuous = slots
    engine.open(BaseModel(str(base)), Pool(folder, space=space).open(), "cpu")
    return engine


def requests(count: int, particles: int, prefix: str = "") -> list[list[Request]]:
    """Requests of very different lengths, some drawn, some with a stop text or log probabilities;
    lengths differ between particles."""
    return [
        [
            Request(
                prefix + " ".join(WORDS[: 1 + (5 * i) % 13]),
                1 + (7 * i + 3 * particle) % 23,
                temperature=0.9 * (i % 3 == 1),
                seed=4,
                sample=particle,
                stop=("a",) if i % 4 == 2 else (),
                top_logprobs=(0, 0, -1, 3)[i % 4],
            )
            for i in range(count)
        ]
        for particle in range(particles)
    ]


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """Equal texts and counts, and log probabilities up to rounding."""
    flat = [[one for row in rows for one in row] for rows in (found, expected)]
    for mine, other in zip(*flat, strict=True):
        assert (mine.text, mine.new_tokens, mine.finish) == (
            other.text,
            other.new_tokens,
            other.finish,
        )
        assert [t.text for t in mine.tokens] == [t.text for t in other.tokens]
        for one, two in zip(mine.tokens, other.tokens, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert [text for text, _ in one.top] == [text for text, _ in two.top]


@pytest.mark.parametrize("plan", ["swap", "merged", "stacked"])
@pytest.mark.parametrize("space", ["factor", "delta"])
def test_refilled_slots_give_the_texts_of_batches(
    plan: str, space: str, family: tuple[Path, Path]
) -> None:
    """More requests than slots, of all lengths, and particles that end at different times."""
    asked = requests(11, 3)
    positions = np.array([[1.0, 0, 0, 0], [0, 0.4, 0.6, 0], [0.2, 0.2, 0, -0.5]])
    expected = opened(*family, False, plan, space=space).generate(positions, asked)
    engine = opened(*family, True, plan, space=space, max_tokens=400)
    assert_same(engine.generate(positions, asked), expected)
    decoder = engine._decoder
    assert decoder is not None and decoder.slots == 6
    # Slots are refilled while others go on, and steps become narrower at the end.
    assert sum(decoder.prefills.values()) > 33 / 6
    assert {width for width, _ in decoder.forwards} > {6}
    assert_same(engine.generate(positions[::-1].copy(), asked[::-1]), expected[::-1])
    assert engine._decoder is decoder


def test_one_slot_and_one_token(family: tuple[Path, Path]) -> None:
    """A single slot for all; and requests that need no step at all."""
    asked = requests(4, 2)
    positions = np.eye(4)[:2]
    expected = opened(*family, False, "stacked").generate(positions, asked)
    engine = opened(*family, True, "stacked", max_tokens=64)
    assert_same(engine.generate(positions, asked), expected)
    assert engine._decoder is not None and engine._decoder.slots == 1
    first = [[Request("no", 1), Request("please", 1)]] * 2
    assert [[c.new_tokens for c in row] for row in engine.generate(positions, first)] == [
        [1, 1]
    ] * 2


def test_steps_do_not_depend_on_earlier_requests(family: tuple[Path, Path]) -> None:
    """A worker that has answered other jobs decodes in the same shapes, so it rounds alike."""
    few = [row[:5] for row in requests(5, 2)]
    many = [[Request("please answer " * 9, 30), *row] for row in requests(12, 2)]
    positions = np.eye(4)[:2]
    shapes = []
    for earlier in ([], [many]):
        engine = opened(*family, True, "stacked", max_tokens=1500)
        for asked in earlier:
            engine.generate(positions, asked)
        decoder = engine._decoder
        before = (
            [Counter(), Counter()] if decoder is None else [+decoder.forwards, +decoder.prefills]
        )
        engine.generate(positions, few)
        assert engine._decoder is (decoder or engine._decoder)
        assert engine._decoder is not None
        shapes.append([engine._decoder.forwards - before[0], engine._decoder.prefills - before[1]])
    assert shapes[0] == shapes[1] and shapes[0][0]


def test_a_shared_prefix_is_read_once_for_all_refills(family: tuple[Path, Path]) -> None:
    prefix = "a graph has edges. please answer with one word. " * 2
    asked = requests(7, 2, prefix)
    positions = np.eye(4)[1:3]
    expected = opened(*family, False, "swap").generate(positions, asked)
    engine = opened(*family, True, "stacked", max_tokens=500)
    read: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert_same(engine.generate(positions, asked), expected)
    length = decode.shared_prefix_length([engine._prompt_ids(one.prompt) for one in asked[0]])
    assert length >= 32 and [tokens for tokens in read if tokens >= 32] == [length], "read again"
    assert engine._decoder is not None and len(engine._decoder.prefills) > 1


class Recording(TorchDispatchMode):
    """The operations of one call, which can be repeated on the same tensors, as a CUDA graph is.

    What a graph cannot contain is refused: a value that the host reads or writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        assert name not in ("item", "_local_scalar_dense", "nonzero", "lift_fresh"), name
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Repeat the operations; results are written to the addresses of the recorded ones."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(*(x if isinstance(x, tuple) else (x,) for x in (out, again))):  # noqa: B905
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(act: Callable[[], None]) -> Callable[[], None]:
    """Capture as a CUDA graph is captured: the call itself changes nothing that remains."""
    with Recording() as recording:
        act()
    return recording.replay


@pytest.mark.parametrize("plan", ["swap", "merged", "stacked"])
@pytest.mark.parametrize("space", ["factor", "delta"])
def test_captured_steps_are_replayed_for_other_prompts_and_positions(
    plan: str, space: str, family: tuple[Path, Path]
) -> None:
    """A step reads nothing but tensors at fixed addresses, so its operations can be repeated.

    Recorded operations stand for a CUDA graph, at several steps per read, as on a GPU.
    """
    positions = np.array([[1.0, 0, 0, 0], [0, 0.4, 0.6, 0], [0.2, 0.2, 0, -0.5]])
    engine = opened(*family, True, plan, space=space, max_tokens=400)
    plain = opened(*family, False, plan, space=space)
    captured: list[Any] = []
    for turn, wanted in enumerate([positions, positions[::-1].copy(), 0.5 * positions]):
        asked = requests(8 + turn, 3)
        if (decoder := engine._decoder) is not None:
            decoder.steps_per_read = 4
            decoder.capture = lambda act: captured.append(act) or undone(decoder, act)
        assert_same(engine.generate(wanted, asked), plain.generate(wanted, asked))
    assert captured
    # A graph is used many times, also by the positions that follow.
    assert engine._decoder is not None
    assert len(captured) < sum(engine._decoder.forwards.values()) / 3


def undone(decoder: SlotDecoder, act: Callable[[], None]) -> Callable[[], None]:
    """Record a step, and restore what it changed: capturing a CUDA graph runs nothing."""
    state = [decoder._tokens, decoder._positions]
    before = [tensor.clone() for tensor in state]
    replay = record(act)
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    return replay


def test_a_device_without_graphs_decodes_step_by_step(
    family: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(*family, True, "stacked", max_tokens=400)
    positions, asked = np.eye(4)[:2], requests(9, 2)
    expected = engine.generate(positions, asked)
    decoder = engine._decoder
    assert decoder is not None

    def refuse(act: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder.capture = refuse
    assert_same(engine.generate(positions, asked), expected)
    assert decoder.capture is None and "decoding without CUDA graphs" in caplog.text


def test_a_pool_of_graphs_is_not_used_again_without_its_graphs(
    family: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses a pool whose graphs are all gone, and another number of positions drops all."""
    engine = opened(*family, True, "stacked", max_tokens=400)
    engine.generate(np.eye(4)[:2], requests(3, 2))
    decoder = engine._decoder
    assert decoder is not None
    decoder._on_gpu, decoder.capture = True, partial(slots.capture_graph, "first")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "second")
    decoder._begin([], 3)
    assert isinstance(decoder.capture, partial) and decoder.capture.args == ("second",)


def test_out_of_memory_continues_with_fewer_slots(family: tuple[Path, Path]) -> None:
    """What has been answered remains; the rest begins again in a smaller cache."""
    positions, asked = np.eye(4)[:2], requests(9, 2)
    expected = opened(*family, False, "stacked").generate(positions, asked)
    engine = opened(*family, True, "stacked", max_tokens=600)
    sizes: list[int] = []

    def small_device(_: Any, __: Any, given: dict[str, Any]) -> None:
        sizes.append(len(given["input_ids"]))
        if given["input_ids"].shape[1] == 1 and len(given["input_ids"]) > 3:
            raise torch.OutOfMemoryError

    engine._model.register_forward_pre_hook(small_device, with_kwargs=True)
    assert_same(engine.generate(positions, asked), expected)
    assert engine._decoder is not None and engine._decoder.slots <= 3 < max(sizes)
    assert engine._slot_tokens < 300 and engine._budget == 600


def test_a_decoder_that_is_dropped_frees_its_cache_at_once(family: tuple[Path, Path]) -> None:
    engine = opened(*family, True, "stacked", max_tokens=400)
    engine.generate(np.eye(4)[:2], requests(9, 2))
    assert engine._decoder is not None
    layer = weakref.ref(engine._decoder._cache.layers[0])
    gc.disable()
    try:
        engine._decoder = None
        assert layer() is None
    finally:
        gc.enable()


def test_models_without_full_attention_are_decoded_in_batches(tmp_path: Path) -> None:
    tiny.model(tmp_path, "mistral")
    engine = HFEngine()
    engine.continuous = True
    engine.load_base(BaseModel(str(tmp_path)), "cpu", {}, "")
    assert not slots.supports_slots(engine._model)
    assert engine.generate(np.zeros((1, 0)), [[Request("no", 3)]])[0][0].new_tokens
    assert engine._decoder is None


def test_gradients_do_not_use_static_factors(family: tuple[Path, Path]) -> None:
    engine, plain = (opened(*family, wanted, "swap", space="factor") for wanted in (True, False))
    examples = [Example("please answer", (" yes", " no"))]
    slopes = []
    for one in (engine, plain):
        one.generate(np.eye(4)[:1], [[Request("no", 3)]])
        slopes.append(one.compute_gradient(np.full(4, 0.3), examples))
        loss = one.compute_gradient(np.full(4, 0.3), examples, slope=False).loss
        assert loss == pytest.approx(slopes[-1].loss, rel=1e-6)
    assert np.array_equal(slopes[0].slope, slopes[1].slope) and slopes[0].loss == slopes[1].loss


# Products


def stacked_layer(
    dtype: torch.dtype, chooser: ProductChooser, ranks: int = 8
) -> tuple[BatchedLoraModel, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A layer with three particles, and the A and B of each as float64."""
    generator = torch.Generator().manual_seed(0)
    with tiny.seeded(0):
        linear = torch.nn.Linear(64, 48, bias=False).to(dtype).requires_grad_(False)
    network = torch.nn.Sequential(linear)
    down = torch.randn(3, ranks, 64, generator=generator)
    up = 0.1 * torch.randn(3, 48, ranks, generator=generator)
    stack = BatchedLoraModel(network, {"0": (down, up)}, "cpu", dtype)
    stack.use_static_factors(chooser)
    stack.set_positions(torch.eye(3))
    layer = stack._layers["0"]
    assert layer.down is not None and layer.up is not None
    return stack, network, layer.down.double(), layer.up.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", list(PRODUCTS))
@pytest.mark.parametrize("rows", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2], [2, 0, 1, 0], [1, 1]])
def test_products_are_exact_in_any_order_of_rows(
    way: str, rows: list[int], dtype: torch.dtype
) -> None:
    """Each row has its particle's update; sums are in float32, and rounded to bfloat16 at the end.

    Four roundings of 2^-9: of A's product, the update, the base's output and the sum.
    """
    stack, network, down, up = stacked_layer(dtype, ProductChooser(way))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(len(rows), 5, 64, generator=generator).to(dtype)
    equal = rows == [0, 0, 1, 1, 2, 2]
    stack.route_rows(None if equal and way != "masked" else Routing.of_rows(rows, 3, "cpu"))
    with torch.inference_mode():
        found = network(inputs).double()
    weight = stack._layers["0"].linear.weight.double()
    for row, particle in enumerate(rows):
        exact = inputs[row].double() @ (weight + up[particle] @ down[particle]).T
        error = (found[row] - exact).abs().max() / exact.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 4 * 2.0**-9)


def test_bfloat16_sums_of_a_large_rank_do_not_drift() -> None:
    """The error does not grow with the number of terms, as it would if sums were in bfloat16."""
    errors = {}
    for rank in (8, 512):
        stack, network, down, up = stacked_layer(torch.bfloat16, ProductChooser("masked"), rank)
        inputs = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        with torch.inference_mode():
            found = network(inputs).double()
        weight = stack._layers["0"].linear.weight.double()
        exact = torch.stack([x.double() @ (weight + b @ a).T for x, a, b in zip(inputs, down, up)])  # noqa: B905
        errors[rank] = float((found - exact).norm() / exact.norm())
    assert errors[512] < 1.5 * errors[8] < 1.5 * 2.0**-7


def test_an_overflowing_particle_spoils_its_own_rows_only() -> None:
    stack, network, *_ = stacked_layer(torch.float16, ProductChooser("masked"))
    stack.set_positions(torch.diag(torch.tensor([1.0, 2e4, 1.0])))
    stack.route_rows(Routing.of_rows([2, 1, 0], 3, "cpu"))
    with torch.inference_mode():
        found = network(torch.full((3, 1, 64), 100.0, dtype=torch.float16))
    assert [bool(row.isfinite().all()) for row in found] == [True, False, True]


def test_the_product_is_measured_once_for_a_shape_and_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path)
    chooser = ProductChooser(measured=True)
    _, network, *_ = stacked_layer(torch.float32, chooser)
    timed: list[str] = []
    seconds = {"batched": 1.0, "masked": 0.95, "grouped": 0.5}

    def timing(way: str, *_: Any) -> float:
        timed.append(way)
        assert batched_lora_time(way, *_) > 0
        return seconds[way]

    batched_lora_time = batched_lora.time_product
    monkeypatch.setattr(batched_lora, "time_product", timing)
    with torch.inference_mode():
        network(torch.randn(6, 5, 64))
        network(torch.randn(6, 4, 64))
        assert timed == ["batched", "masked", "grouped"]
        network(torch.randn(60, 4, 64))
    assert len(timed) == 6 and set(chooser.chosen.values()) == {"grouped"}
    # Another process finds the choice, whatever it would measure.
    seconds["grouped"] = 2.0
    other = ProductChooser(measured=True)
    _, again, *_ = stacked_layer(torch.float32, other)
    with torch.inference_mode():
        again(torch.randn(6, 5, 64))
        # A gain of less than a tenth does not change the default.
        again(torch.randn(600, 5, 64))
    assert list(other.chosen.values()) == ["grouped", "batched"] and len(timed) == 9
