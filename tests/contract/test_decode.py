"""Decoding in slots that are refilled, in steps that can be captured, and with own caches."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.engine import decode
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.models.base import Completion, Request
from swarm.pool.pool import Pool

WORDS = "please answer with one word yes or no the graph of 5 nodes has edges between".split()
POSITIONS = np.array([[1.0, 0, 0, 0], [0, 0.4, 0.6, 0], [0.2, 0.2, 0, -0.5]])
PLANS = pytest.mark.parametrize("plan", ["merged", "stacked"])
SPACES = pytest.mark.parametrize("space", ["factor", "delta"])


@pytest.fixture(scope="module", params=["llama", "gemma"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny.model(folder / "base", request.param)
    return base, tiny.mixed_pool(base, folder / "pool")


def opened(base: Path, folder: Path, slots: bool, plan: Any = "stacked", **more: Any) -> HFEngine:
    """An engine with slots, or with the model's own cache."""
    space = more.pop("space", "delta")
    engine = HFEngine(plan, **more)
    engine.open(BaseModel(str(base)), Pool(folder, space=space).open(), "cpu")
    engine._decoder._refills = slots
    engine._decoder.release()
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
    flat = [list(chain.from_iterable(rows)) for rows in (found, expected)]
    for mine, other in zip(*flat, strict=True):
        assert (mine.text, mine.new_tokens) == (other.text, other.new_tokens)
        assert mine.finish == other.finish
        for token, two in zip(mine.tokens, other.tokens, strict=True):
            assert token.text == two.text
            assert token.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert [text for text, _ in token.top] == [text for text, _ in two.top]


@PLANS
@SPACES
def test_refilled_slots_give_the_texts_of_batches(
    plan: str, space: str, family: tuple[Path, Path]
) -> None:
    """More requests than slots, of all lengths, and particles that end at different times."""
    asked = requests(11, 3)
    expected = opened(*family, False, plan, space=space).generate(POSITIONS, asked)
    engine = opened(*family, True, plan, space=space, max_tokens=200)
    assert_same(engine.generate(POSITIONS, asked), expected)
    decoder = engine._decoder
    # Slots are refilled while others go on, and steps become narrower at the end.
    assert decoder.slots < 11 and len({width for width, _ in decoder.forwards}) > 1
    assert_same(engine.generate(POSITIONS[::-1].copy(), asked[::-1]), expected[::-1])
    one = opened(*family, True, plan, space=space, max_tokens=64)
    assert_same(one.generate(POSITIONS, asked), expected)
    assert one._decoder.slots == 1


def test_steps_do_not_depend_on_earlier_requests(family: tuple[Path, Path]) -> None:
    """A worker that has answered other jobs decodes in the same shapes, so it rounds alike."""
    many = [[Request("please answer " * 9, 30), *row] for row in requests(12, 2)]
    shapes = []
    for earlier in ([], [many]):
        engine = opened(*family, True, max_tokens=1500)
        for asked in earlier:
            engine.generate(POSITIONS[:2], asked)
        before = +engine._decoder.forwards
        engine.generate(POSITIONS[:2], requests(5, 2))
        shapes.append(engine._decoder.forwards - before)
    assert shapes[0] == shapes[1] and shapes[0]


def test_slots_that_stay_empty_know_no_earlier_position(family: tuple[Path, Path]) -> None:
    """Texts of one token end before they have a slot, which a job of more positions had used."""
    engine = opened(*family, True)
    engine.generate(POSITIONS, requests(20, 3))
    engine._mixer._buffers = []  # as where adapters are learned: no room for a third position
    short = [[Request(words, n) for words in WORDS[:5] for n in (1, 1, 6)] for _ in POSITIONS[:2]]
    expected = opened(*family, True).generate(POSITIONS[:2], short)
    assert_same(engine.generate(POSITIONS[:2], short), expected)


def test_a_shared_prefix_is_read_once_for_all_refills(family: tuple[Path, Path]) -> None:
    prefix = "a graph has edges. please answer with one word. " * 2
    asked = requests(7, 2, prefix)
    expected = opened(*family, False, "merged").generate(POSITIONS[1:], asked)
    engine = opened(*family, True, max_tokens=500)
    read: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert_same(engine.generate(POSITIONS[1:], asked), expected)
    length = decode.shared_prefix_length([engine._prompt_ids(one.prompt) for one in asked[0]])
    assert length >= 32 and [tokens for tokens in read if tokens >= 32] == [length], "read again"


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


@PLANS
@SPACES
def test_captured_steps_are_replayed_for_other_prompts_and_positions(
    plan: str, space: str, family: tuple[Path, Path]
) -> None:
    """A step reads nothing but tensors at fixed addresses, so its operations can be repeated.

    Recorded operations stand for a CUDA graph, at several steps per read, as on a GPU.
    """
    engine = opened(*family, True, plan, space=space, max_tokens=400)
    plain = opened(*family, False, plan, space=space)
    captured: list[Any] = []

    def capture(act: Callable[[], None]) -> Callable[[], None]:
        """Record a step, and restore what it changed: capturing a CUDA graph runs nothing."""
        captured.append(act)
        state = [engine._decoder._tokens, engine._decoder._positions]
        before = [tensor.clone() for tensor in state]
        with Recording() as recording:
            act()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return recording.replay

    for turn, wanted in enumerate([POSITIONS, POSITIONS[::-1].copy(), 0.5 * POSITIONS]):
        asked = requests(8 + turn, 3)
        assert_same(engine.generate(wanted, asked), plain.generate(wanted, asked))
        engine._decoder.capture = capture
    # A graph is used many times, also by the positions that follow.
    assert captured and len(captured) < sum(engine._decoder.forwards.values()) / 3


def test_a_device_without_graphs_decodes_step_by_step(
    family: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(*family, True, max_tokens=400)
    asked = requests(9, 2)
    expected = engine.generate(POSITIONS[:2], asked)

    def refuse(act: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine._decoder.capture = refuse
    assert_same(engine.generate(POSITIONS[:2], asked), expected)
    assert engine._decoder.capture is None and "decoding without CUDA graphs" in caplog.text


def test_out_of_memory_continues_with_fewer_slots(family: tuple[Path, Path]) -> None:
    """What has been answered remains; the rest begins again in a smaller cache."""
    asked = requests(9, 2)
    expected = opened(*family, False).generate(POSITIONS[:2], asked)
    engine = opened(*family, True, max_tokens=600)
    sizes: list[int] = []

    def small_device(_: Any, __: Any, given: dict[str, Any]) -> None:
        sizes.append(len(given["input_ids"]))
        if given["input_ids"].shape[1] == 1 and len(given["input_ids"]) > 3:
            raise torch.OutOfMemoryError

    engine._model.register_forward_pre_hook(small_device, with_kwargs=True)
    assert_same(engine.generate(POSITIONS[:2], asked), expected)
    assert engine._decoder.slots <= 3 < max(sizes)
    assert engine._slot_tokens < 300 and engine._budget == 600


@pytest.mark.parametrize(
    ("free", "tokens"), [(80 << 30, 4 * 65536), (6 << 30, 65536), (9 << 30, 2 * 65536)]
)
def test_slots_take_at_most_half_of_the_memory_left(free: int, tokens: int) -> None:
    shape = {"num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 16}
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**shape))
    device = SimpleNamespace(type="cuda")
    model = SimpleNamespace(config=config, device=device, dtype=torch.bfloat16)
    assert decode.cache_tokens(model, 65536, free) == tokens
