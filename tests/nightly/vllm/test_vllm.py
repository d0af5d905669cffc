"""The vLLM engine against the transformers engine; run where vLLM is (scripts/test_vllm.sh)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import vllm_engines
from peft import PeftModel

pytest.importorskip("vllm", reason="vLLM has an environment of its own: scripts/test_vllm.sh")

from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool
from swarm.engine.hf import HFEngine
from swarm.engine.vllm import VLLMEngine
from swarm.errors import NotFinite, UserError
from swarm.models.base import Message, Request
from swarm.pool.pool import Pool

pytestmark = pytest.mark.timeout(1200)
PROMPTS = [
    "please answer with one word",
    vllm_engines.PREFIX + "is there a path from 1 to 2? answer:",
    "",
    "the answer is not (B) or (C) but",
]
TEXT = "Choose the best option and explain your reasoning step by step before you give the result."


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return vllm_engines.family(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def pool(family: tuple[Path, Path]) -> Pool:
    return Pool(family[1]).open()


@pytest.fixture(scope="module")
def hf(family: tuple[Path, Path], pool: Pool) -> HFEngine:
    return vllm_engines.reference(family[0], pool)


@pytest.fixture(scope="module")
def engine(family: tuple[Path, Path], pool: Pool) -> Iterator[VLLMEngine]:
    with vllm_engines.opened(family[0], pool) as engine:
        yield engine


def test_says_what_transformers_says(engine: VLLMEngine, hf: HFEngine, pool: Pool) -> None:
    asked = [
        *(Request(prompt, 12) for prompt in PROMPTS),
        *(Request(prompt, 12, stop=("e", "12")) for prompt in PROMPTS),
        *(Request(prompt, 12, stop_check=lambda text: len(text) >= 3) for prompt in PROMPTS),
        Request((Message("system", "be brief"), Message("user", "yes or no?")), 8),
    ]
    rows = vllm_engines.positions(6, pool)
    found, expected = (one.generate(rows, [asked] * 6) for one in (engine, hf))
    assert found == expected
    assert {said.finish for row in found for said in row} == {"stop", "length"}


def test_scores_choices_as_transformers_does(engine: VLLMEngine, hf: HFEngine, pool: Pool) -> None:
    choices = (" yes", " no", TEXT, "", " the answer is (A)")
    asked = [Request(prompt, 0, choices) for prompt in PROMPTS]
    many = tuple(map(hf._tokenizer.decode, range(60, 290)))  # more than vLLM lists at once
    asked.append(Request(PROMPTS[0], 0, many))
    rows = vllm_engines.positions(3, pool)
    found, expected = (one.generate(rows, [asked] * 3) for one in (engine, hf))
    assert np.allclose(vllm_engines.logprobs(found), vllm_engines.logprobs(expected), atol=2e-4)
    for row, other in zip(found, expected, strict=True):
        for said, same in zip(row, other, strict=True):
            assert (said.greedy, said.choice_tokens) == (same.greedy, same.choice_tokens)
            assert (said.prompt_tokens, said.new_tokens) == (same.prompt_tokens, same.new_tokens)


def test_tells_the_likeliest_tokens(engine: VLLMEngine, hf: HFEngine, pool: Pool) -> None:
    asked = [Request(PROMPTS[0], 5, top_logprobs=top) for top in (30, 3, -1, 1000)]
    # Beside choices vLLM's sampler would tell those instead.
    asked += [*vllm_engines.scoring(PROMPTS), Request(PROMPTS[3], 5)]
    rows = vllm_engines.positions(1, pool)
    for said, same in zip(*(one.generate(rows, [asked])[0] for one in (engine, hf)), strict=True):
        assert [one.text for one in said.tokens] == [one.text for one in same.tokens]
        for token, other in zip(said.tokens, same.tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [text for text, _ in token.top] == [text for text, _ in other.top]


def test_draws_by_seed_and_sample(engine: VLLMEngine, pool: Pool) -> None:
    asked = [
        Request(PROMPTS[0], 12, temperature=2.0, seed=seed, sample=sample)
        for seed in (0, 1)
        for sample in (0, 1)
    ]
    rows = vllm_engines.positions(1, pool)
    first, again = (engine.generate(rows, [asked])[0] for _ in range(2))
    assert first == again and len({said.text for said in first}) == 4


def test_what_does_not_fit_is_named_and_nothing_stays(engine: VLLMEngine, pool: Pool) -> None:
    rows = vllm_engines.positions(1, pool)
    with pytest.raises(UserError, match="max_position_embeddings"):
        engine.generate(rows, [[Request("no", 5), Request("one " * 600, 5)]])
    assert not engine._scheduler._engine.has_unfinished_requests()  # type: ignore[union-attr]
    assert engine.generate(rows, [[Request("no", 5)]])[0][0].new_tokens


def test_never_stale(family: tuple[Path, Path], pool: Pool) -> None:
    """Other weights, the same long prompts: as a fresh engine says it, and exact when back."""
    asked = vllm_engines.scoring(
        [vllm_engines.PREFIX + tail for tail in ("yes or no?", "one?", "answer:")]
    )
    first, second = vllm_engines.positions(3, pool, 1), vllm_engines.positions(3, pool, 2)
    with vllm_engines.opened(family[0], pool) as engine:
        before = vllm_engines.logprobs(engine.generate(first, [asked] * 3))
        assert engine._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        after = vllm_engines.logprobs(engine.generate(second, [asked] * 3))
        back = vllm_engines.logprobs(engine.generate(first, [asked] * 3))
    with vllm_engines.opened(family[0], pool) as engine:
        fresh = vllm_engines.logprobs(engine.generate(second, [asked] * 3))
    assert np.allclose(after, fresh, atol=1e-5) and np.array_equal(before, back)
    assert np.abs(after - before).max() > 0.1, "the weights change nothing"


def test_what_is_not_finite_names_its_position(family: tuple[Path, Path], pool: Pool) -> None:
    """Of generated tokens and of choices; the engine answers as before afterwards."""
    rows = vllm_engines.positions(6, pool)
    texts, choices = [Request(PROMPTS[0], 3)], vllm_engines.scoring(PROMPTS[:2])
    with vllm_engines.opened(family[0], pool) as engine:
        sound = engine.generate(rows, [texts + choices] * 6)
        for asked in (texts, choices):
            for place in (1, 5):
                spoiled = rows.copy()
                spoiled[place] *= 1e25
                with pytest.raises(NotFinite) as error:
                    engine.generate(spoiled, [asked] * 6)
                assert (error.value.position, error.value.quantity) == (place, "weights")
        assert engine.generate(rows, [texts + choices] * 6) == sound
        for scale in (1e41, 1e60):
            spoiled = rows.copy()
            spoiled[2] *= scale
            with pytest.raises(NotFinite) as error:
                engine.generate(spoiled, [texts] * 6)
            assert (error.value.position, error.value.quantity) == (2, "weights")


def test_one_engine_ends_and_another_goes_on(
    engine: VLLMEngine, hf: HFEngine, family: tuple[Path, Path], pool: Pool
) -> None:
    with vllm_engines.opened(family[0], pool):
        pass
    rows = vllm_engines.positions(1, pool, 7)
    asked = [[Request(PROMPTS[0], 5)]]
    assert engine.generate(rows, asked) == hf.generate(rows, asked)


def check_agreement(base: Path, pool: Pool | FullModelPool) -> None:
    asked, rows = [vllm_engines.scoring(PROMPTS[:2])] * 2, vllm_engines.positions(2, pool)
    expected = vllm_engines.logprobs(vllm_engines.reference(base, pool).generate(rows, asked))
    with vllm_engines.opened(base, pool) as engine:
        assert np.allclose(vllm_engines.logprobs(engine.generate(rows, asked)), expected, atol=2e-4)


@pytest.mark.parametrize(
    "settings", [{"space": "delta"}, {"groups": "attention_mlp"}, {"control": "random"}]
)
def test_every_kind_of_pool(settings: dict[str, object], family: tuple[Path, Path]) -> None:
    check_agreement(family[0], Pool(family[1], **settings).open())  # type: ignore[arg-type]


def test_layers_with_a_bias(tmp_path: Path) -> None:
    base, folder = vllm_engines.family(tmp_path, "qwen2")
    check_agreement(base, Pool(folder).open())


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_full_models(kind: str, tmp_path: Path) -> None:
    """One is a DoRA in its base; Gemma's output layer is tied to the embedding."""
    first, second = (
        tiny.model(tmp_path / str(seed), kind, seed, vllm_engines.HEAD) for seed in (0, 1)
    )
    dora = tiny.expert(first, tmp_path / "dora", use_dora=True)
    merged = PeftModel.from_pretrained(tiny.load(first), dora).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    models = [str(first), str(second), str(tmp_path / "merged")]
    check_agreement(first, FullModelPool(models, BaseModel(models[0], dtype="float32")))


def test_a_prompt_that_is_read_in_pieces(
    hf: HFEngine, family: tuple[Path, Path], pool: Pool
) -> None:
    asked = [[Request(PROMPTS[1], 0, (TEXT, " yes", TEXT[:30])), Request(PROMPTS[1], 4)]] * 2
    rows = vllm_engines.positions(2, pool)
    expected = hf.generate(rows, asked)
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 3}
    with vllm_engines.opened(family[0], pool, **few) as engine:
        found = engine.generate(rows, asked)
    assert np.allclose(vllm_engines.logprobs(found), vllm_engines.logprobs(expected), atol=2e-4)
    assert [row[1] for row in found] == [row[1] for row in expected]
