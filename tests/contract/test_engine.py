"""One contract of all engines, against plain loops over transformers and PEFT."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from swarm.engine import decode
from swarm.engine.base import UpdateCost, choose_plan
from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine, HFModel
from swarm.engine.lora import LoraLayers
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.engine.tokenization import CachedEncoder, encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.loop.context import check_context
from swarm.models.base import Message, Request
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Task, TaskRun

PROMPTS = (
    "please answer with one word",
    "a graph of 5 nodes has edges between 1 and 2: is there a path from 1 to 2? answer:",
    "",
    "the answer is not (B) or (C) but",
)
TEXT = " the final answer is 12, because seven friendly birds flew over mountains and rivers."
CHOICES = ((" (A)", " yes or no", " B", ""), (" 12",), (TEXT,), (" (B)", TEXT[:60]))
MIXED = (0.7, 0.6, -0.3)
SHARES = ((0.5, 0.5, 0.0), (0.2, 0.3, 0.5), (1.4, -0.4, 0.0), (0.0, 2.0, -1.0))


class Case(NamedTuple):
    """An open engine, positions, and the next token's log probabilities at them by other means."""

    engine: Any
    pool: Any
    positions: np.ndarray
    logprobs: Callable[[int, list[int]], torch.Tensor]


def said(network: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)


def opened(engine: Any, base: BaseModel, pool: Any) -> Any:
    engine.check(base, pool)
    engine.open(base, pool, "cpu")
    return engine


def adapters(folder: Path, kind: str, plan: Any, **how: Any) -> Case:
    """Experts alone, by PEFT, and a mixture, by PEFT from what is saved of it."""
    base = tiny.model(folder / "base", kind)
    pool = Pool(tiny.mixed_pool(base, folder / "pool"), **how).open()
    positions = np.array([*np.eye(4), (*MIXED, 0.0)])
    pool.save(positions[4], folder / "best")
    paths = [*(folder / "pool" / name for name in pool.names), folder / "best"]
    networks = [PeftModel.from_pretrained(tiny.load(base), path).eval() for path in paths]
    # So few tokens a batch that a long choice is read in pieces.
    engine = opened(HFEngine(plan, 900), BaseModel(str(base)), pool)
    return Case(engine, pool, positions, lambda p, ids: said(networks[p], ids))


def full(folder: Path, kind: str) -> Case:
    """Models alone, and a mixture from what is saved of it."""
    models = [tiny.model(folder / str(seed), kind, seed) for seed in range(3)]
    pool = FullModelPool(list(map(str, models)))
    pool.save(MIXED, folder / "best")
    networks = [tiny.load(path) for path in (*models, folder / "best")]
    engine = opened(FullWeightsEngine(), pool.base, pool)
    return Case(engine, pool, np.array([*np.eye(3), MIXED]), lambda p, ids: said(networks[p], ids))


def tokens(folder: Path, kind: str) -> Case:
    """Mixed probabilities in float64, of a third model or an adapter of the first one."""
    base, gemma = tiny.model(folder / "llama"), tiny.model(folder / "gemma", "gemma", 1)
    networks = [tiny.load(base), tiny.load(gemma)]
    if kind == "adapter":
        third = tiny.expert(base, folder / "third", 2)
        networks.append(PeftModel.from_pretrained(tiny.load(base), third).eval())
    else:
        third = tiny.model(folder / "third", kind, 2)
        networks.append(tiny.load(third))
    pool = ModelEnsemble([str(base), str(gemma), str(third)])
    positions = np.array([*np.eye(3), *SHARES])

    def mixed(p: int, ids: list[int]) -> torch.Tensor:
        each = [said(one, ids)[: tiny.WORDS].softmax(-1) for one in networks]
        total = sum(w * one for w, one in zip(positions[p], each, strict=True)).clamp(min=0)  # type: ignore[union-attr]
        return (total / total.sum()).log()

    return Case(opened(TokenEnsembleEngine(), pool.open().base, pool), pool, positions, mixed)


CASES: dict[str, tuple[Callable[..., Case], tuple[str, ...], dict[str, str]]] = {
    "llama, merged": (adapters, ("llama", "merged"), {}),
    "llama, stacked": (adapters, ("llama", "stacked"), {"space": "delta"}),
    "gemma, stacked": (adapters, ("gemma", "stacked"), {}),
    "qwen2, merged": (adapters, ("qwen2", "merged"), {"space": "delta"}),
    "sliding window": (adapters, ("mistral", "stacked"), {}),
    "full models": (full, ("gemma",), {}),
    "token ensemble": (tokens, ("llama",), {}),
    "token ensemble with an adapter": (tokens, ("adapter",), {}),
    "token ensemble with a sliding window": (tokens, ("mistral",), {}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, given, more = CASES[request.param]
    return make(tmp_path_factory.mktemp("case"), *given, **more)


def test_texts_are_those_of_a_plain_loop(case: Case) -> None:
    """Batched, padded, compacted, cached: the greedy tokens, one after the other from nothing."""
    asked = [[Request(prompt, 12) for prompt in PROMPTS]] * len(case.positions)
    rows = case.engine.generate(case.positions, asked)
    assert len({one.text for row in rows for one in row}) > 2 * len(PROMPTS)
    tokenizer = case.engine._tokenizer
    for p, row in enumerate(rows):
        for prompt, completion in zip(PROMPTS, row, strict=True):
            start, new = encode_prompt(tokenizer, prompt), list[int]()
            while len(new) < 12:
                token = int(case.logprobs(p, start + new)[: tiny.WORDS + 8].argmax())
                if token == tokenizer.eos_token_id:
                    break
                new.append(token)
            assert completion.text == tokenizer.decode(new, skip_special_tokens=True)
            assert (completion.prompt_tokens, completion.new_tokens) == (len(start), len(new))


def test_choices_have_the_sum_of_their_tokens_log_probabilities(case: Case) -> None:
    """One token, several or none, few choices or many, after a prompt or nothing."""
    requests = [Request(p, 0, c) for p, c in zip(PROMPTS, CHOICES, strict=True)]
    rows = case.engine.generate(case.positions, [requests] * len(case.positions))
    tokenizer = case.engine._tokenizer
    for p, row in enumerate(rows):
        for request, completion in zip(requests, row, strict=True):
            start = encode_prompt(tokenizer, request.prompt)
            for number, choice in enumerate(request.choices):
                rest = encode_choice(tokenizer, request.prompt, choice)
                steps = [case.logprobs(p, start + rest[:i]) for i in range(len(rest))]
                each = [float(step[t]) for step, t in zip(steps, rest, strict=True)]
                if min(each, default=0.0) > -60:
                    assert completion.logprobs[number] == pytest.approx(sum(each), abs=2e-3)
                else:  # what is impossible has a floor
                    assert -99 * len(rest) < completion.logprobs[number] < -60
                likeliest = [int(s.argmax()) == t for s, t in zip(steps, rest, strict=True)]
                assert completion.greedy[number] == all(likeliest)
                assert completion.choice_tokens[number] == len(rest)
            read = sum(max(count - 1, 0) for count in completion.choice_tokens)
            assert completion.new_tokens == read


def test_particles_may_ask_different_things(case: Case) -> None:
    """As in the second round of a game: other prompts, other choices, or none; some begin alike."""
    prefix = "a graph has edges. please answer with one word. " * 2
    asked = [
        [Request("yes or no", 4), *(Request(prefix + t, 10) for t in ("1 2 3 4 5 6", "no"))],
        [Request(prefix + "no", 6), Request("a graph of 5 nodes", 2), Request("no", 0, (TEXT,))],
        [Request("yes or no", 0, (" (A)", " no")), Request("the answer is", 5)],
    ]
    ids = encode_prompt(case.engine._tokenizer, prefix)
    assert len(ids) > decode.MINIMUM_PREFIX
    together = case.engine.generate(case.positions[:3], asked)
    for position, requests, row in zip(case.positions[:3], asked, together, strict=True):
        for request, completion in zip(requests, row, strict=True):
            alone = case.engine.generate(position[None], [[request]])[0][0]
            assert completion.text == alone.text and completion.greedy == alone.greedy
            assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, mixed_pool: Path) -> HFEngine:
    return opened(HFEngine(), BaseModel(str(tiny_llama)), Pool(mixed_pool).open())


def test_layers_answer_for_all_positions_and_are_removed(
    tiny_llama: Path, mixed_pool: Path
) -> None:
    pool, model = Pool(mixed_pool).open(), tiny.load(tiny_llama)
    before = tiny.logits(model)
    layers = LoraLayers(model, {name: pool.expert_factors(name) for name in pool.modules})
    layers.set_positions(torch.eye(4, dtype=torch.float64))
    layers.route_rows(torch.arange(4).repeat_interleave(2))
    with tiny.seeded(0), torch.inference_mode():
        rows = model(input_ids=torch.randint(4, tiny.WORDS, (2, 12)).repeat(4, 1)).logits
    for number, name in enumerate(pool.names):
        peft = PeftModel.from_pretrained(tiny.load(tiny_llama), mixed_pool / name).eval()
        alone = tiny.logits(peft)
        assert (rows[2 * number : 2 * number + 2] - alone).abs().max() < 1e-4
        assert (alone - before).abs().max() > 1e-2, "the expert changes nothing"
    layers.remove()
    assert torch.equal(tiny.logits(model), before)


def test_prompts_and_choices_as_tokens(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    start, whole = tokenizer("the question is").input_ids, tokenizer("the question is 12").input_ids
    assert encode_choice(tokenizer, "the question is", " 12") == whole[len(start) :]
    # "the qu" and "estion" share a token.
    apart = tokenizer("estion", add_special_tokens=False).input_ids
    assert encode_choice(tokenizer, "the qu", "estion") == apart
    assert encode_prompt(tokenizer, "") == [tokenizer.bos_token_id]
    tokenizer._tokenizer.post_processor = tokenizer.bos_token = None
    assert encode_prompt(tokenizer, "") == [tokenizer.eos_token_id]


def test_prompts_that_never_come_again_do_not_fill_the_memory() -> None:
    made: list[str] = []

    def encode(text: str) -> list[int]:
        made.append(text)
        return [7] * len(text)

    cached = CachedEncoder(encode, 300)
    for number in range(40):
        assert cached("x" * 10 + str(number)) == [7] * len("x" * 10 + str(number))
        assert cached("again") == [7] * 5
    # The 300 tokens are exceeded once; then all is encoded anew.
    assert made.count("again") == 2 and len(made) == 42


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


def test_turns_need_a_chat_template(tiny_llama: Path, tmp_path: Path) -> None:
    plain = tiny.plain(tiny_llama, tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    assert encode_prompt(tokenizer, "yes or no")
    with pytest.raises(UserError, match=r"plain has no chat template.*task\.chat=false"):
        encode_prompt(tokenizer, (Message("user", "yes or no"),))
    for act in (
        HFModel(BaseModel(str(plain))).check,
        lambda: check_context(Mixed(), tokenizer, 512),  # every kind of prompt is tried
    ):
        with pytest.raises(UserError, match="no chat template"):
            act()
    HFModel(BaseModel(str(tiny_llama))).check()
    check_context(Mixed(), AutoTokenizer.from_pretrained(tiny_llama), 512)


def test_generation_stops_once_decided(engine: HFEngine) -> None:
    free = [Request(prompt, 12) for prompt in PROMPTS]
    settled = [replace(one, stop_check=lambda text: len(text) >= 3) for one in free]
    long, short = (engine.generate(np.eye(4)[:1], [asked])[0] for asked in (free, settled))
    assert sum(c.new_tokens for c in short) < sum(c.new_tokens for c in long)
    for whole, part in zip(long, short, strict=True):
        # A character may still lack some of its bytes.
        assert whole.text.startswith(part.text.rstrip("\ufffd"))


def test_wrong_settings_and_pools_are_named(tiny_qwen2: Path, tmp_path: Path) -> None:
    for wrong in ({"plan": "magic"}, {"max_tokens": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            HFEngine(**wrong)  # type: ignore[arg-type]
    wide = tiny.model(tmp_path / "wide", head=16)
    pool = Pool(tiny.pool(tiny_qwen2, tmp_path / "pool", ("amber", "birch"))).open()
    for act in (HFEngine().check, lambda *both: HFEngine().open(*both, "cpu")):
        with pytest.raises(
            UserError, match=r"do not fit the base: .* of 64 x 32, and the base has 128 x 64"
        ):
            act(BaseModel(str(wide)), pool)


@pytest.mark.parametrize(
    ("positions", "tokens", "steps", "gpu", "exact", "room", "plan"),
    [
        (5, 300, 0, False, True, True, "stacked"),
        (5, 600, 0, False, True, True, "merged"),  # beyond what adding the update costs
        (5, 600, 8, False, True, True, "stacked"),  # as each position would decode alone
        (5, 3000, 8, False, True, True, "merged"),
        (1, 4, 8, False, True, True, "merged"),
        (5, 3000, 8, True, True, True, "stacked"),
        (5, 30000, 8, True, True, True, "merged"),
        (5, 30000, 0, True, False, True, "stacked"),
        (5, 30000, 0, False, True, False, "stacked"),
    ],
)
def test_the_plan_follows_shapes_type_and_memory(
    positions: int, tokens: int, steps: int, gpu: bool, exact: bool, room: bool, plan: str
) -> None:
    cost = UpdateCost(0.25, 350.0)
    found, why = choose_plan(positions, tokens, steps, cost, gpu, exact, room)
    assert found == plan and why


@pytest.mark.parametrize("space", ["delta", "factor"])
def test_an_update_costs_by_its_shapes(space: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Ranks raise the share, and not the tokens from which merging gains."""
    costs = []
    for rank in (2, 6):
        folder = tmp_path / f"rank {rank}"
        tiny.expert(tiny_llama, folder / "amber", 1, r=rank)
        tiny.expert(tiny_llama, folder / "birch", 2, r=rank)
        pool = Pool(folder, space=space).open()
        basis = {name: pool.expert_factors(name) for name in pool.modules}
        layers = LoraLayers(tiny.load(tiny_llama), basis)
        sizes = [inputs * outputs for inputs, outputs, _ in pool.modules.values()]
        assert layers.adapted_weights == sum(sizes)
        costs.append(layers.update_cost)
    assert costs[1] == (pytest.approx(3 * costs[0].share), pytest.approx(costs[0].tokens))
