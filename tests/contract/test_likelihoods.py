"""Log probabilities of texts as tasks score them, against a forward pass of transformers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from task_items import choice_items, match_items, played, write
from transformers import AutoTokenizer

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.loop.context import check_context
from swarm.models.base import Completion, Model, Request
from swarm.pool.pool import Pool
from swarm.scorers.rules import Regex
from swarm.tasks.abstain import Abstain
from swarm.tasks.base import Task
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.perplexity import Perplexity, count_bytes

WORDS = " ".join(f"word {n}, and {n * n % 97} more;\n" for n in range(200))


def test_bits_per_byte(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    """The whole task, by hand: one forward a window, summed over all bytes."""
    pool = Pool(tiny_pool).open()
    (tmp_path / "text.txt").write_text(WORDS)
    task = Perplexity(file=str(tmp_path / "text.txt"), window=150, context=80, dev_limit=9)
    engine = HFEngine()
    engine.open(BaseModel(str(tiny_llama)), pool, "cpu")
    items = task.items("dev")
    found = run_tasks_lockstep(task, engine, np.eye(len(pool.names)), items, JobUsage())
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for name, scores in zip(pool.names, found, strict=True):
        alone = PeftModel.from_pretrained(tiny.load(tiny_llama), tiny_pool / name).eval()
        nats = 0.0
        for item in items:
            start = len(tokenizer(item["prompt"]).input_ids)
            ids = torch.tensor([tokenizer(item["prompt"] + item["answer"]).input_ids])
            labels = ids.clone()
            labels[:, :start] = -100
            with torch.inference_mode():
                nats += float(alone(ids, labels=labels).loss) * (ids.shape[1] - start)
        bits = nats / math.log(2) / sum(count_bytes(item["answer"]) for item in items)
        assert task.utility(scores) == pytest.approx(-bits, abs=1e-4)


@pytest.mark.parametrize("chat", [False, True])
def test_nats_of_a_gold_answer(chat: bool, tmp_path: Path, tiny_llama: Path) -> None:
    engine = HFEngine()
    engine.load_base(BaseModel(str(tiny_llama)), "cpu")
    engine.set_adapters({})
    model, words = tiny.load(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    letters = str(write(tmp_path / "letters.json", {"dev": choice_items(4)}))
    golds = str(write(tmp_path / "golds.json", {"dev": match_items(6)}))
    for task in (
        MultipleChoice("letters", letters, signal="logprob", chat=chat),
        ExactMatch("golds", golds, signal="logprob", chat=chat),
    ):
        items = task.items("dev")
        requests = next(task.run(items))
        said = engine.generate(np.zeros((1, 0)), [requests])[0]
        for item, request, completion in zip(items, requests, said, strict=True):
            start = encode_prompt(words, request.prompt)
            gold = encode_choice(words, request.prompt, request.choices[0])
            with torch.inference_mode():
                chances = model(torch.tensor([start + gold])).logits[0].log_softmax(-1)
            each = [float(chances[len(start) + i - 1, token]) for i, token in enumerate(gold)]
            (score,) = played(task, [item], Given(completion))
            assert score.value == pytest.approx(sum(each) / len(each), abs=1e-4)


class Given(Model):
    """Gives one completion."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.completion for _ in requests]


# Prompts that do not fit into a model's context.

LONG = "the question is which of the answers is right " * 60


def long_file(folder: Path, field: str = "question") -> str:
    """Four dev and four test items; number 2 and number 11 are long."""

    def item(number: int) -> dict[str, Any]:
        text = LONG * (1 + number % 10) if number in (2, 11) else "which one"
        choices = {"A": f"one {number}", "B": "two"}
        return {"id": number, field: f"{text}, {number}?", "choices": choices, "answer": "A"}

    splits = {"dev": [item(n) for n in range(4)], "test": [item(n) for n in range(10, 14)]}
    return str(write(folder / "items.json", splits))


LIMITED: dict[str, Any] = {
    "generate": lambda folder, **more: MultipleChoice("t", long_file(folder), **more),
    "text": lambda folder, **more: MultipleChoice("t", long_file(folder), scoring="text", **more),
    "chat": lambda folder, **more: MultipleChoice("t", long_file(folder), chat=True, **more),
    "logprob": lambda folder, **more: ExactMatch("t", long_file(folder), signal="logprob", **more),
    "abstain": lambda folder, **more: Abstain("t", long_file(folder), **more),
    "free": lambda folder, **more: FreeText(
        "t", long_file(folder, "prompt"), scorer=Regex("(a)"), **more
    ),
    "mixture": lambda folder, **more: Mixture(
        "both", {"one": MultipleChoice("t", long_file(folder), **more)}, "mean"
    ),
}


@pytest.mark.parametrize("kind", LIMITED)
def test_the_longest_item_is_named_or_left_out(
    kind: str, tmp_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = AutoTokenizer.from_pretrained(tiny_llama)
    task: Task = LIMITED[kind](tmp_path)
    with pytest.raises(UserError) as error:
        check_context(task, words, 512)
    said = str(error.value)
    assert "1 of 4 dev items do not fit" in said and "item 2, needs" in said and "\n" not in said
    assert said.endswith(
        "task.tasks.one.max_prompt_tokens" if kind == "mixture" else "task.max_prompt_tokens"
    )
    task = LIMITED[kind](tmp_path, max_prompt_tokens=400)
    check_context(task, words, 512)
    assert [str(item["id"])[-1] for item in task.items("dev")] == ["0", "1", "3"]
    assert len(task.items("test")) == 3 and "1 of 4 test items are left out" in caplog.text
    check_context(task, words, 512)
    with pytest.raises(UserError, match="max_prompt_tokens=2: leaves no dev item"):
        check_context(LIMITED[kind](tmp_path, max_prompt_tokens=2), words, 512)


def test_the_answer_needs_room_too(tmp_path: Path, tiny_llama: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny_llama)
    task = ExactMatch("t", long_file(tmp_path), max_new_tokens=510)
    with pytest.raises(UserError, match="4 of 4 dev items do not fit"):
        check_context(task, words, 512)
    rows = {"dev": match_items(4), "test": [{"question": LONG * 3, "answer": "1"}]}
    task = ExactMatch("t", str(write(tmp_path / "test.json", rows)))
    check_context(task, words, 512, ["dev"])  # a split that is not used may be of any length
    with pytest.raises(UserError, match="1 of 1 test items"):
        check_context(task, words, 512)
