"""Drawn tokens, stop texts, told chances: right, and the same whatever else is asked."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoTokenizer

from swarm.engine.base_model import BaseModel
from swarm.engine.decode import gumbel_noise, random_key
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.engine.tokenization import clip_new_tokens, encode_prompt
from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request
from swarm.pool.pool import Pool

PROMPT = "the question is which of the answers is right"
WARM = Request(PROMPT, 10, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tiny_pool: Path) -> HFEngine:
    made = HFEngine("stacked")
    made.open(BaseModel(str(tiny_llama)), Pool(tiny_pool).open(), "cpu")
    return made


def ask(engine: HFEngine, *requests: Request, expert: int = 0) -> list[Completion]:
    return engine.generate(np.eye(4)[[expert]], [requests])[0]


def shares(engine: HFEngine, prompt: str, expert: int = 0) -> torch.Tensor:
    """The expert's log probabilities of what follows a prompt, in float64."""
    engine._mixer.set_positions(torch.eye(4)[[expert]])
    with torch.inference_mode():
        logits = engine._model(torch.tensor([engine._prompt_ids(prompt)])).logits[0, -1]
    return torch.log_softmax(logits.double(), -1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_from_the_tempered_softmax(engine: HFEngine, temperature: float) -> None:
    """Chi-square on 3,000 first tokens, each by the log probability that it is told with."""
    count = 3000
    asked = [
        Request(PROMPT, 1, temperature=temperature, sample=i, top_logprobs=-1) for i in range(count)
    ]
    own = shares(engine, PROMPT)
    expected = count * torch.softmax(own / temperature, -1)
    drawn = torch.zeros(len(own))
    for said in ask(engine, *asked):
        # An end token is not said; a told chance names a token of this model.
        token = said.tokens[0].logprob if said.tokens else float(own[2])
        place = int((own - token).abs().argmin())
        assert abs(float(own[place]) - token) < 1e-4
        drawn[place] += 1
    common = expected >= 5
    cells = [
        *zip(drawn[common].tolist(), expected[common].tolist(), strict=True),
        (float(drawn[~common].sum()), float(expected[~common].sum())),
    ]
    square = sum((seen - due) ** 2 / due for seen, due in cells)
    # Wilson and Hilferty's approximation: five standard deviations are one in three million.
    freedom = len(cells) - 1
    assert freedom > 5
    spread = 2 / 9 / freedom
    deviations = ((square / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread)
    assert -5 < deviations < 5


def test_noise_is_gumbels_and_neighbours_know_nothing_of_each_other() -> None:
    like = torch.empty(1, 1 << 20)
    keys = [random_key(b"a" * 16, 0), random_key(b"a" * 16, 1), random_key(b"b" * 16, 0)]
    rows = gumbel_noise(torch.tensor(keys, dtype=torch.int32), like)
    assert torch.isfinite(rows).all() and rows.max() < 23
    quantiles = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999])
    expected = -torch.log(-torch.log(quantiles))
    for row in rows:
        found = torch.quantile(row, quantiles)
        assert (found - expected).abs().max() < 0.12
        assert abs(float(torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1])) < 0.005
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.005


def test_an_answer_does_not_depend_on_what_else_is_asked(engine: HFEngine) -> None:
    """Alone, among others, in another order, under every plan: the same tokens."""
    alone = ask(engine, WARM)[0]
    others = [replace(WARM, prompt="no", sample=i) for i in range(3)] + [Request("the answer", 12)]
    for asked in ([WARM, *others], [*others, WARM]):
        assert ask(engine, *asked)[asked.index(WARM)] == alone
    rows = engine.generate(np.eye(4), [[WARM, *others]] * 4)
    assert rows[0][0] == alone and rows[1][0] != alone
    engine.plan = "merged"
    try:
        assert ask(engine, *others, WARM)[-1] == alone
    finally:
        engine.plan = "stacked"


def test_greedy_rows_are_greedy_beside_drawn_ones(engine: HFEngine) -> None:
    cold = [Request(PROMPT, 12), Request("no", 5, temperature=0.0)]
    assert ask(engine, *cold, WARM)[:2] == ask(engine, *cold)
    # So cold that only a tie could be drawn otherwise, and nothing overflows.
    freezing = [replace(one, temperature=1e-30) for one in cold]
    assert ask(engine, *freezing) == ask(engine, *cold)


def test_seed_sample_and_prompt_make_the_difference(engine: HFEngine) -> None:
    asked = [
        WARM,
        replace(WARM, seed=6),
        replace(WARM, sample=1),
        replace(WARM, seed=None),
        replace(WARM, seed=0),
    ]
    texts = [said.text for said in ask(engine, *asked)]
    assert len(set(texts)) == 4 and texts[3] == texts[4]
    cold = [Request(PROMPT, 10, sample=i, seed=i) for i in range(3)]
    assert len({said.text for said in ask(engine, *cold)}) == 1


def test_a_stop_text_ends_the_answer_and_is_not_in_it(engine: HFEngine) -> None:
    whole = ask(engine, Request(PROMPT, 20))[0]
    assert whole.finish == "length" and whole.new_tokens == 20
    stop = whole.text[12:15]
    cut = ask(engine, Request(PROMPT, 20, stop=("never said", stop), top_logprobs=-1))[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish == "stop"
    assert cut.new_tokens < 20
    told = "".join(token.text for token in cut.tokens)
    assert told.startswith(cut.text) and not told[: -len(cut.tokens[-1].text)].startswith(cut.text)
    last = ask(engine, Request(PROMPT, cut.new_tokens, stop=(stop,)))[0]
    assert (last.text, last.finish) == (cut.text, "stop")


def test_an_answer_that_the_model_ends_says_stop(engine: HFEngine) -> None:
    ends = engine._decoder._ends
    said = ask(engine, Request(PROMPT, 4))[0]
    first = engine._tokenizer(said.text, add_special_tokens=False).input_ids[0]
    likeliest = int(shares(engine, PROMPT).argmax())
    assert first in range(tiny.WORDS) and likeliest not in ends
    engine._decoder._ends = frozenset({likeliest})
    try:
        assert ask(engine, Request(PROMPT, 4, top_logprobs=2)) == [
            Completion("", (), said.prompt_tokens, 0, finish="stop")
        ]
    finally:
        engine._decoder._ends = ends


def test_chances_are_told_of_the_untempered_model(engine: HFEngine) -> None:
    own = shares(engine, PROMPT)
    values, ids = own.topk(3)
    warm, cold, none = ask(
        engine, replace(WARM, top_logprobs=3), Request(PROMPT, 3, top_logprobs=-1), WARM
    )
    assert none == replace(warm, tokens=())
    assert len(warm.tokens) == warm.new_tokens and len(cold.tokens) == 3
    top = warm.tokens[0].top
    assert [text for text, _ in top] == [engine._tokenizer.decode([i]) for i in ids.tolist()]
    assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)
    assert "".join(token.text for token in warm.tokens) == warm.text
    assert cold.tokens[0].logprob == pytest.approx(float(values[0]), abs=1e-4)
    assert all(token.top == () for token in cold.tokens)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be a number from 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_logprobs": -2}, "top_logprobs=-2"),
        ({"stop": ("a", "")}, "stop: must not contain an empty string"),
    ],
)
def test_what_cannot_be_drawn_is_refused(engine: HFEngine, wrong: dict, says: str) -> None:
    for way in (engine.clip_to_context, lambda request: ask(engine, request)):
        with pytest.raises(UserError, match=says):
            way(replace(WARM, **wrong))


def test_the_answer_has_to_fit_into_the_context(engine: HFEngine) -> None:
    long = Request("no " * 600, 16)
    read = len(engine._prompt_ids(long.prompt))
    assert engine.clip_to_context(Request("no", 600)).max_new_tokens == 512 - len(
        engine._prompt_ids("no")
    )
    assert engine.clip_to_context(Request("no", None)) == engine.clip_to_context(Request("no", 600))
    assert engine.clip_to_context(WARM) == WARM
    with pytest.raises(UserError, match=f"^{read} tokens and one to answer make {read + 1}, "):
        engine.clip_to_context(long)
    asked = Request("no " * 40, 0, ("yes " * 600,))
    with pytest.raises(UserError, match=r"and a choice of .* more than the model's 512 "):
        engine.clip_to_context(asked)
    assert clip_new_tokens(math.inf, long, read, 0) == long


def test_a_panel_draws_from_its_mixture(tiny_llama: Path, tmp_path: Path, engine: HFEngine) -> None:
    """A mixture that is one model draws what that model draws alone."""
    panel = ModelEnsemble([str(tiny_llama), str(tiny.model(tmp_path / "other", seed=1))]).open()
    mixed = TokenEnsembleEngine()
    mixed.open(panel.base, panel, "cpu")
    one = engine.generate(np.zeros((1, 4)), [[WARM]])[0]
    asked = [replace(WARM, top_logprobs=2)]
    pure, half, other = mixed.generate(np.array([[1, 0], [0.5, 0.5], [0, 1]]), [asked] * 3)
    assert replace(pure[0], tokens=()) == one[0] and len({pure[0], half[0], other[0]}) == 3
    assert mixed.clip_to_context(Request("no", 600)).max_new_tokens < 512
    assert math.exp(half[0].tokens[0].top[0][1]) < 1


def test_a_system_turn_that_a_template_refuses_is_said_by_the_user(tiny_llama: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny_llama)
    turns = (Message("system", "be brief"), Message("user", "yes or no"))
    assert "<|system|>\nbe brief" in words.decode(encode_prompt(words, turns))
    words.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for one in messages %}{% if (one['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns take turns') }}{% endif %}{% endfor %}" + tiny.CHAT
    )
    text = words.decode(encode_prompt(words, turns))
    assert text.count("be brief") == 1 and "<|user|>\nbe brief\n\nyes or no" in text
    begun = (turns[0], Message("user", "no"), Message("assistant", "yes"), turns[0], turns[1])
    text = words.decode(encode_prompt(words, begun))
    assert "<|user|>\nbe brief\n\nbe brief\n\nno<eos>" in text and text.count("be brief") == 2
    with pytest.raises(UserError, match=r"tiny-llama.*rejects the messages: turns take turns"):
        encode_prompt(words, (Message("user", "a"), Message("user", "b")))
    assert "<|user|>\nbe brief" in words.decode(encode_prompt(words, turns[:1]))
