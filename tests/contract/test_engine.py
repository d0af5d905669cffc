"""The engine against PEFT's own forward and transformers' own generate."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from swarm.engine import decode
from swarm.engine.base import MERGE_FROM_CPU, MERGE_FROM_GPU, Mixer, choose_plan
from swarm.engine.base_model import BaseModel
from swarm.engine.decode import Reader, score_choices
from swarm.engine.hf import HFEngine, HFModel
from swarm.engine.lora import LoraLayers
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.loop.context import check_context
from swarm.models.base import Message, Request
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Task, TaskRun

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


LLAMA_ALONE = pytest.mark.parametrize("family", ["llama"], indirect=True)
"""For what does not depend on the architecture."""


def opened(family: tuple[Path, Path], **settings: object) -> tuple[HFEngine, Pool]:
    base, folder = family
    pool = Pool(folder).open()
    engine = HFEngine(**settings)  # type: ignore[arg-type]
    engine.open(BaseModel(str(base)), pool, "cpu")
    return engine, pool


def position(pool: Pool, *shares: float) -> np.ndarray:
    return np.array([[*shares, *[0.0] * (len(pool.names) - len(shares))]])


def test_stacked_logits_are_pefts(family: tuple[Path, Path]) -> None:
    """All experts in one batch say what each says alone under PEFT."""
    base, folder = family
    pool = Pool(folder).open()
    model = tiny.load(base)
    before = tiny.logits(model)
    layers = LoraLayers(model, {name: pool.expert_factors(name) for name in pool.modules})
    layers.set_positions(torch.eye(len(pool.names), dtype=torch.float64))
    layers.route_rows(torch.arange(len(pool.names)).repeat_interleave(2))
    with tiny.seeded(0), torch.inference_mode():
        tokens = torch.randint(4, tiny.WORDS, (2, 12))
        rows = model(input_ids=tokens.repeat(len(pool.names), 1)).logits
    for number, name in enumerate(pool.names):
        alone = tiny.logits(PeftModel.from_pretrained(tiny.load(base), folder / name).eval())
        assert (rows[2 * number : 2 * number + 2] - alone).abs().max() < 1e-4
        assert (alone - before).abs().max() > 1e-2, "the expert changes nothing"
    layers.remove()
    assert torch.equal(tiny.logits(model), before)


@pytest.mark.parametrize("plan", ["merged", "stacked"])
def test_generates_what_peft_generates(family: tuple[Path, Path], plan: str) -> None:
    """Batched, padded, compacted: the same greedy tokens as one prompt at a time under PEFT."""
    base, folder = family
    engine, pool = opened(family, plan=plan)
    positions = np.eye(len(pool.names))
    asked = [[Request(prompt, max_new_tokens=12) for prompt in PROMPTS]] * len(pool.names)
    answers = engine.generate(positions, asked)
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
    answers = engine.generate(mixture, [[Request(p, max_new_tokens=8) for p in PROMPTS]])[0]
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
    ids = [engine._prompt_ids(prompt) for prompt in prompts]
    assert decode.shared_prefix_length(ids) >= decode.MINIMUM_PREFIX
    asked = [[Request(prompt, max_new_tokens=10) for prompt in prompts]] * 2
    positions = np.eye(len(pool.names))[:2]
    together = engine.generate(positions, asked)
    alone = [
        [engine.generate(positions[p : p + 1], [[request]])[0][0] for request in asked[p]]
        for p in range(2)
    ]
    assert together == alone


@pytest.mark.parametrize("plan", ["merged", "stacked"])
def test_choices_are_scored_as_peft_scores_them(family: tuple[Path, Path], plan: str) -> None:
    """One token, several or none, few choices or many: the sum of PEFT's log probabilities."""
    base, folder = family
    # So few tokens a batch that a long choice is read in pieces.
    engine, pool = opened(family, plan=plan, max_tokens=900)
    choices = [(" (A)", " yes or no", " B", ""), (" 12",), (TEXT,), (" (B)", TEXT[:60])]
    asked = [[Request(p, 0, c) for p, c in zip(PROMPTS, choices, strict=True)]] * len(pool.names)
    answers = engine.generate(np.eye(len(pool.names)), asked)
    for name, row in zip(pool.names, answers, strict=True):
        alone = PeftModel.from_pretrained(tiny.load(base), folder / name).eval()
        for request, completion in zip(asked[0], row, strict=True):
            found = zip(completion.logprobs, completion.greedy, completion.choice_tokens)  # noqa: B905
            for choice, (logprob, greedy, count) in zip(request.choices, found, strict=True):
                start, rest = both(engine, request.prompt, choice)
                steps = forced(alone, start, rest)
                assert logprob == pytest.approx(sum(s for s, _ in steps), abs=1e-4)
                assert greedy == all(likeliest for _, likeliest in steps)
                assert count == len(rest)
            assert completion.new_tokens == sum(max(n - 1, 0) for n in completion.choice_tokens)


TEXT = " the final answer is 12, because seven friendly birds flew over mountains and rivers." * 4


def both(engine: HFEngine, prompt: object, choice: str) -> tuple[list[int], list[int]]:
    """The token ids of a prompt and of a choice of it."""
    return engine._prompt_ids(prompt), engine._choice_ids(Request(prompt, 0, (choice,)))[0]  # type: ignore[arg-type]


def forced(network: object, start: list[int], rest: list[int]) -> list[tuple[float, bool]]:
    """Each token's log probability after the ones before it, and whether it is the likeliest."""
    with torch.inference_mode():
        logits = network(torch.tensor([start + rest])).logits[0].float()  # type: ignore[operator]
    scores = torch.log_softmax(logits, -1)
    rows = [scores[len(start) - 1 + i] for i in range(len(rest))]
    return [(row[t].item(), int(row.argmax()) == t) for row, t in zip(rows, rest, strict=True)]


def test_an_empty_prompt_is_the_beginning_of_a_text(family: tuple[Path, Path]) -> None:
    base, _ = family
    engine, pool = opened(family)
    one = position(pool, 1.0)
    scored = engine.generate(one, [[Request("", 0, (TEXT,))]])[0][0]
    start, rest = both(engine, "", TEXT)
    assert start == [engine._tokenizer.bos_token_id]
    engine._mixer.set_positions(torch.from_numpy(one))
    expected = sum(s for s, _ in forced(engine._model, start, rest))
    assert scored.logprobs[0] == pytest.approx(expected, abs=1e-4)
    without = AutoTokenizer.from_pretrained(base)
    without._tokenizer.post_processor = None
    assert encode_prompt(without, "") == start
    without.bos_token = None
    assert encode_prompt(without, "") == [without.eos_token_id]


@LLAMA_ALONE
def test_a_choice_is_cut_into_tokens_as_after_its_prompt(family: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family[0])
    start, whole = tokenizer("the question is").input_ids, tokenizer("the question is 12").input_ids
    assert encode_choice(tokenizer, "the question is", " 12") == whole[len(start) :]
    # "the qu" and "estion" share a token.
    apart = tokenizer("estion", add_special_tokens=False).input_ids
    assert encode_choice(tokenizer, "the qu", "estion") == apart


def test_a_model_with_a_sliding_window_is_scored_alike(tmp_path: Path) -> None:
    """Its cache cannot be copied, so every choice is read with its prompt."""
    model = tiny.load(tiny.model(tmp_path, "mistral"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    reader = Reader(model, Mixer(), tokenizer.pad_token_id)
    assert not reader.copies
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    choices = [
        [tokenizer(c, add_special_tokens=False).input_ids for c in (" (A)", TEXT[:80], "")]
        for _ in PROMPTS
    ]
    choices[2] = choices[2][:1]
    for positions in (1, 1000):
        scored = score_choices(reader, prompts, choices, [0] * len(prompts), positions)
        for prompt, row, found in zip(prompts, choices, scored, strict=True):
            for rest, (logprob, greedy) in zip(row, found, strict=True):
                steps = forced(model, prompt, rest)
                assert logprob == pytest.approx(sum(s for s, _ in steps), abs=1e-4)
                assert greedy == all(likeliest for _, likeliest in steps)


def test_turns_need_a_chat_template(tiny_llama: Path, tmp_path: Path) -> None:
    plain = tiny.plain(tiny_llama, tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    assert encode_prompt(tokenizer, "yes or no")
    with pytest.raises(UserError, match=r"plain has no chat template.*task\.chat=false"):
        encode_prompt(tokenizer, (Message("user", "yes or no"),))
    with pytest.raises(UserError, match="no chat template"):
        HFModel(BaseModel(str(plain))).check()
    HFModel(BaseModel(str(tiny_llama))).check()


class Mixed(Task):
    """The first of its items is asked as text, the others as turns."""

    name = "mixed"

    def items(self, split: str) -> list[Item]:
        return [{"id": i} for i in range(3)]

    def run(self, items: Sequence[Item]) -> TaskRun:
        texts = {item["id"]: f"number {item['id']}" for item in items}
        yield [Request((Message("user", t),) if number else t) for number, t in texts.items()]
        return []

    def grade(self, item: Item, answer: str | None) -> float:
        return 0.0


def test_every_kind_of_prompt_is_tried(tiny_llama: Path, tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(tiny.plain(tiny_llama, tmp_path / "plain"))
    check_context(Mixed(), AutoTokenizer.from_pretrained(tiny_llama), 512)
    with pytest.raises(UserError, match="no chat template"):
        check_context(Mixed(), plain, 512)


@LLAMA_ALONE
def test_prompts_that_never_come_again_do_not_fill_the_memory(family: tuple[Path, Path]) -> None:
    engine, pool = opened(family)
    engine._tokens.limit = 300
    mixture = position(pool, 0.5, 0.5)
    own = [[Request(prompt, 4) for prompt in PROMPTS]]
    expected = engine.generate(mixture, own)
    largest = 0
    for number in range(40):
        asked = [Request(f"the answer is {number}", 2), Request(f"{number}: ", 0, (" (A)", " 12"))]
        engine.generate(mixture, [asked])
        largest = max(largest, engine._tokens.token_count)
        kept = sum(map(len, engine._tokens._found.values()))
        assert kept == engine._tokens.token_count < 400
    assert largest > 250 and engine.generate(mixture, own) == expected


@LLAMA_ALONE
def test_generation_stops_once_decided(family: tuple[Path, Path]) -> None:
    engine, pool = opened(family)
    free = [[Request(prompt, 12) for prompt in PROMPTS]]
    settled = [[Request(prompt, 12, stop_check=has_three) for prompt in PROMPTS]]
    long, short = (engine.generate(position(pool, 1.0), asked)[0] for asked in (free, settled))
    assert sum(c.new_tokens for c in short) < sum(c.new_tokens for c in long)
    for whole, part in zip(long, short, strict=True):
        # A character may still lack some of its bytes.
        assert whole.text.startswith(part.text.rstrip("\ufffd"))


def has_three(text: str) -> bool:
    return len(text) >= 3


def test_a_pool_of_another_base_is_refused(tiny_qwen2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    wide = tmp_path / "wide"
    tiny.tokenizer(wide)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    pool = Pool(tiny.pool(tiny_qwen2, tmp_path / "pool", ("amber", "birch"))).open()
    with pytest.raises(UserError, match="do not fit the base"):
        HFEngine().open(BaseModel(str(wide)), pool, "cpu")


@pytest.mark.parametrize("wrong", [{"plan": "magic"}, {"max_tokens": 0}])
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        HFEngine(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "rows", "gpu", "exact", "room", "plan"),
    [
        (5, MERGE_FROM_CPU - 1, False, True, True, "stacked"),
        (5, MERGE_FROM_CPU, False, True, True, "merged"),
        (1, 4, False, True, True, "merged"),
        (5, MERGE_FROM_GPU - 1, True, True, True, "stacked"),
        (5, MERGE_FROM_GPU, True, True, True, "merged"),
        (5, 500, True, False, True, "stacked"),
        (5, 200, False, True, False, "stacked"),
    ],
)
def test_the_plan_follows_rows_type_and_memory(
    positions: int, rows: int, gpu: bool, exact: bool, room: bool, plan: str
) -> None:
    found, why = choose_plan(positions, rows, gpu, exact, room)
    assert found == plan and why
