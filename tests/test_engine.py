"""The engine against PEFT's own forward and transformers' own generate."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from swarm.engine import decode
from swarm.engine.base import Base
from swarm.engine.hf import HFEngine
from swarm.engine.stacked import Stack
from swarm.errors import UserError
from swarm.models import Message, Request
from swarm.pool import Pool

PROMPTS = [
    "please answer with one word",
    "a graph of 5 nodes has edges between 1 and 2: is there a path from 1 to 2? answer:",
    "no",
    "the answer is not (B) or (C) but",
]


@pytest.fixture(scope="module", params=tiny.KINDS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A base model of each type, and experts of it that differ in rank and targets."""
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny.model(folder / "base", request.param)
    return base, tiny.mixed_pool(base, folder / "pool")


def opened(family: tuple[Path, Path], **settings: object) -> tuple[HFEngine, Pool]:
    base, folder = family
    pool = Pool(folder).open()
    engine = HFEngine(**settings)  # type: ignore[arg-type]
    engine.open(Base(str(base)), pool, "cpu")
    return engine, pool


def position(pool: Pool, *shares: float) -> np.ndarray:
    return np.array([[*shares, *[0.0] * (len(pool.names) - len(shares))]])


def test_stacked_logits_are_pefts(family: tuple[Path, Path]) -> None:
    """All experts in one batch of equal blocks say what each says alone under PEFT."""
    base, folder = family
    pool = Pool(folder).open()
    model = tiny.load(base)
    before = tiny.logits(model)
    basis = {name: pool.basis(name) for name in pool.modules}
    stack = Stack(model, basis, "cpu", torch.float32)
    stack.set(torch.eye(len(pool.names), dtype=torch.float64))
    with tiny.seeded(0), torch.inference_mode():
        tokens = torch.randint(4, tiny.WORDS, (2, 12))
        rows = model(input_ids=tokens.repeat(len(pool.names), 1)).logits
    for number, name in enumerate(pool.names):
        alone = tiny.logits(PeftModel.from_pretrained(tiny.load(base), folder / name).eval())
        assert (rows[2 * number : 2 * number + 2] - alone).abs().max() < 1e-4
        assert (alone - before).abs().max() > 1e-2, "the expert changes nothing"
    stack.remove()
    assert torch.equal(tiny.logits(model), before)


@pytest.mark.parametrize("plan", ["swap", "merged", "stacked"])
def test_generates_what_peft_generates(family: tuple[Path, Path], plan: str) -> None:
    """Batched, padded, compacted: the same greedy tokens as one prompt at a time under PEFT."""
    base, folder = family
    engine, pool = opened(family, plan=plan)
    positions = np.eye(len(pool.names))
    asked = [[Request(prompt, max_new_tokens=12) for prompt in PROMPTS]] * len(pool.names)
    answers = engine.answer(positions, asked)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for row, name in zip(answers, pool.names, strict=True):
        alone = PeftModel.from_pretrained(tiny.load(base), folder / name).eval()
        for prompt, completion in zip(PROMPTS, row, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                out = alone.generate(**ids, max_new_tokens=12, do_sample=False)
            text = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
            assert completion.text == text
            assert completion.prompt_tokens == ids.input_ids.shape[1]


def test_saved_mixture_is_the_one_evaluated(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = family
    engine, pool = opened(family)
    mixture = position(pool, 0.7, 0.6, -0.3)
    answers = engine.answer(mixture, [[Request(p, max_new_tokens=8) for p in PROMPTS]])[0]
    pool.save(mixture[0], tmp_path / "best")
    network = PeftModel.from_pretrained(tiny.load(base), tmp_path / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for prompt, completion in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = network.generate(**ids, max_new_tokens=8, do_sample=False)
        text = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
        assert completion.text == text


def test_shared_prefix_is_read_once_and_changes_nothing(family: tuple[Path, Path]) -> None:
    engine, pool = opened(family, plan="stacked")
    prefix = "a graph has edges. please answer with one word. " * 2
    prompts = [prefix + tail for tail in ("yes or no", "1 2 3 4 5 6 7", "no")]
    ids = [engine._ids(prompt) for prompt in prompts]
    assert decode.shared_prefix(ids) >= decode.MINIMUM_PREFIX
    asked = [[Request(prompt, max_new_tokens=10) for prompt in prompts]] * 2
    positions = np.eye(len(pool.names))[:2]
    together = engine.answer(positions, asked)
    alone = [
        [engine.answer(positions[p : p + 1], [[request]])[0][0] for request in asked[p]]
        for p in range(2)
    ]
    assert together == alone


def test_choices_are_scored_by_their_log_probability(family: tuple[Path, Path]) -> None:
    """One token or several, the score is the sum of the teacher-forced log probabilities."""
    engine, pool = opened(family, plan="stacked")
    choices = (" (A)", " yes or no", " B")
    asked = [[Request(prompt, 0, choices) for prompt in PROMPTS]] * 2
    answers = engine.answer(np.eye(len(pool.names))[:2], asked)
    for particle in range(2):
        engine._stack.set(torch.eye(len(pool.names), dtype=torch.float64)[particle : particle + 1])
        for prompt, completion in zip(PROMPTS, answers[particle], strict=True):
            for choice, logprob in zip(choices, completion.logprobs, strict=True):
                start, rest = engine._ids(prompt), engine._choice_ids(choice)
                with torch.inference_mode():
                    logits = engine._model(torch.tensor([start + rest])).logits[0].float()
                scores = torch.log_softmax(logits, -1)
                expected = sum(scores[len(start) - 1 + i, t].item() for i, t in enumerate(rest))
                assert logprob == pytest.approx(expected, abs=1e-4)


def test_chat_turns_go_through_the_template(family: tuple[Path, Path]) -> None:
    base, _ = family
    engine, _ = opened(family)
    tokenizer = AutoTokenizer.from_pretrained(base)
    turns = (Message("user", "yes or no"),)
    text = tokenizer.decode(engine._ids(turns))
    assert "<|user|>\nyes or no" in text and text.endswith("<|assistant|>\n")


def test_generation_stops_once_decided(family: tuple[Path, Path]) -> None:
    engine, pool = opened(family)
    free = [[Request(prompt, 12) for prompt in PROMPTS]]
    settled = [[Request(prompt, 12, decided=has_three) for prompt in PROMPTS]]
    long, short = (engine.answer(position(pool, 1.0), asked)[0] for asked in (free, settled))
    assert sum(c.new_tokens for c in short) < sum(c.new_tokens for c in long)
    for whole, part in zip(long, short, strict=True):
        # A character may still lack some of its bytes.
        assert whole.text.startswith(part.text.rstrip("\ufffd"))


def has_three(text: str) -> bool:
    return len(text) >= 3


def test_a_small_budget_gives_the_same_answers(family: tuple[Path, Path]) -> None:
    large, pool = opened(family)
    small, _ = opened(family, max_tokens=60)
    asked = [[Request(prompt, 8) for prompt in PROMPTS]]
    mixture = position(pool, 0.5, 0.5)
    texts = [[c.text for c in engine.answer(mixture, asked)[0]] for engine in (large, small)]
    assert texts[0] == texts[1]


def test_finished_rows_are_dropped_in_equal_blocks() -> None:
    assert decode.keep([True] * 8, 2) is None
    assert decode.keep([False, True, False, False, True, True, False, False], 2) == [0, 1, 4, 5]
    assert decode.keep([True, False, False, False], 1) == [0]


def test_a_pool_of_another_base_is_refused(tiny_qwen2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    wide = tmp_path / "wide"
    tiny.tokenizer(wide)
    config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=64,
                         num_hidden_layers=2, num_attention_heads=4)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    pool = Pool(tiny.pool(tiny_qwen2, tmp_path / "pool", ("amber", "birch"))).open()
    with pytest.raises(UserError, match="do not fit the base"):
        HFEngine().open(Base(str(wide)), pool, "cpu")


@pytest.mark.parametrize("wrong", [{"plan": "magic"}, {"max_tokens": 0}])
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        HFEngine(**wrong)  # type: ignore[arg-type]
