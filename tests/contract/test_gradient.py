"""The gradient of a position: losses, derivatives, tasks' examples, and searches that descend."""

import json
import math
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import tiny
import torch
from safetensors.torch import load_file, save_file

from swarm.engine import gradient
from swarm.engine.base_model import BaseModel
from swarm.engine.gradient import TokenizedExample, batch_examples
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.models.base import Example, Request
from swarm.optimizers.gradient import Descent
from swarm.pool.pool import Pool
from swarm.runs.folder import RunFolder, read_state
from swarm.runs.verdict import list_caveats
from swarm.scorers.function import FunctionTask
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.perplexity import Perplexity

EXAMPLES = [
    Example("a graph of 5 nodes has edges between 1 and 2: answer:", (" yes",)),
    Example("please answer with one word:", (" no", " yes or no", " true"), gold=1),
    Example("which of the answers is right", (" A", " B", " C"), gold=2, weight=2.5),
    Example("the question is", (" which of the answers is right",), unit=7.0),
    Example("the answer", (" 12",), final=True),
    Example("please answer:", (" no", " the question is true"), gold=1, units=(2.0, 20.0)),
]


def opened(base: Path, folder: Path, **how: Any) -> tuple[HFEngine, Pool]:
    pool = Pool(folder, **how).open()
    engine = HFEngine()
    engine.open(BaseModel(str(base)), pool, "cpu")
    return engine, pool


def finish(course: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Answer what a generator yields to its end; return its value."""
    try:
        wanted = next(course)
        while True:
            wanted = course.send(answer(wanted))
    except StopIteration as end:
        return end.value


def drawn(pool: Pool, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 0.4, len(pool.groups) * len(pool.names))


def logprobs(base: Path, pool: Pool, position: np.ndarray, example: Example) -> list[float]:
    """Of each choice, by transformers alone on weights to which the position's update is added."""
    from transformers import AutoTokenizer

    model, tokenizer = tiny.load(base), AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        for name, (a, b) in pool.combine(position.tolist()).items():
            model.get_submodule(name).weight += (b.double() @ a.double()).float()
        found = []
        for choice in example.choices:
            prompt = tokenizer(example.prompt).input_ids
            whole = tokenizer(f"{example.prompt}{choice}").input_ids
            assert whole[: len(prompt)] == prompt
            whole += [tokenizer.eos_token_id] * example.final
            said = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            places = range(len(prompt), len(whole))
            found.append(sum(float(said[i - 1, whole[i]]) for i in places))
    return found


def loss(base: Path, pool: Pool, position: np.ndarray, example: Example) -> float:
    from transformers import AutoTokenizer

    known = logprobs(base, pool, position, example)
    if len(known) == 1:
        tokens = AutoTokenizer.from_pretrained(base)(example.choices[0], add_special_tokens=False)
        nats = -known[0] / (example.unit or len(tokens.input_ids) + example.final)
    else:
        if example.units:
            known = [nats / unit for nats, unit in zip(known, example.units, strict=True)]
        nats = math.log(sum(map(math.exp, known))) - known[example.gold]
    return example.weight * nats


WAYS: list[dict[str, Any]] = [
    {"space": "delta"},
    {"space": "factor"},
    {"space": "delta", "groups": "per_module"},
    {"space": "factor", "groups": "kind"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_loss_and_slope_are_those_of_merged_weights(
    tiny_llama: Path, mixed_pool: Path, way: dict[str, Any]
) -> None:
    """Central differences of a float32 loss agree to about three digits."""
    engine, pool = opened(tiny_llama, mixed_pool, **way)
    position = drawn(pool)
    for example in EXAMPLES:
        found = engine.compute_gradient(position, [example], slope=False)
        assert found.loss == pytest.approx(loss(tiny_llama, pool, position, example), abs=1e-3)
        assert not found.slope.any()
    slope = engine.compute_gradient(position, EXAMPLES).slope
    assert slope.shape == position.shape
    width, rough = 3e-3, []
    for step in width * np.eye(len(position)):
        up, down = (
            engine.compute_gradient(x, EXAMPLES, False).loss
            for x in (position + step, position - step)
        )
        rough.append((up - down) / (2 * width))
    assert np.abs(slope).max() > 0.1
    np.testing.assert_allclose(slope, rough, atol=0.02 * np.abs(slope).max())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_batches_lines_and_checkpointing_change_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share a line, or a row that several choices share, attend to themselves."""
    base = tiny.model(tmp_path / "base", kind)
    engine, pool = opened(base, tiny.mixed_pool(base, tmp_path / "pool"), space="delta")
    position, examples = drawn(pool), EXAMPLES * 2
    alone = [engine.compute_gradient(position, [example]) for example in examples]
    slope = np.sum([one.slope for one in alone], axis=0)
    for packed, line, budget, again in (
        (True, 128, 4096, False),
        (False, 128, 4096, False),
        (True, 20, 4096, False),
        (True, 60, 4096, False),
        (True, 1000, 4096, False),
        (True, 128, 40, False),
        (True, 128, 40, True),
    ):
        monkeypatch.setattr(gradient, "LINE_TOKENS", line)
        engine._packs_choices, engine._budget, engine.checkpointing = packed, budget, again
        found = engine.compute_gradient(position, examples)
        assert found.loss == pytest.approx(sum(one.loss for one in alone), rel=1e-5)
        np.testing.assert_allclose(found.slope, slope, rtol=1e-3, atol=1e-4)


def test_lines_hold_every_row_with_little_padding() -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 99, size).tolist() for size in random.integers(5, 90, 200)]
    rows = [TokenizedExample(prompt, [[1, 2]], EXAMPLES[0], i) for i, prompt in enumerate(prompts)]
    seen, padded = [], 0
    for batch in batch_examples(rows, pad=0, budget=2000, packed=True):
        padded += batch.ids.size
        assert batch.ids.size <= 2200 and batch.ids.shape[1] <= 300
        for row in range(batch.rows.max() + 1):
            mine = batch.rows == row
            (route,) = {batch.routes[place] for place in np.flatnonzero(mine)}
            assert batch.ids[mine].tolist() == [*prompts[route], 1]
            seen.append(route)
    assert sorted(seen) == list(range(200))
    assert padded < 1.1 * sum(len(prompt) + 1 for prompt in prompts)


def test_answers_after_a_gradient_are_as_before(tiny_llama: Path, tiny_pool: Path) -> None:
    engine, pool = opened(tiny_llama, tiny_pool)
    positions = np.stack([drawn(pool)] * 3)
    asked = [[Request("the answer is", 8), Request("a", 0, (" b", " c"))]] * 3
    before = engine.generate(positions, asked)
    engine.compute_gradient(drawn(pool) + 1, EXAMPLES)
    assert engine._packs_choices and engine.generate(positions, asked) == before


def test_examples_of_tasks(tmp_path: Path) -> None:
    choice = MultipleChoice("tiny", file := str(searches.choice_file(tmp_path / "tiny.json")))
    item = choice.items("dev")[0]
    (example,) = choice.gold_examples([item])
    assert example.prompt.endswith("The answer is")
    assert example.choices == (" A", " B", " C", " D", " E")
    assert example.choices[example.gold] == f" {item['answer']}" and not example.units
    texts = MultipleChoice("tiny", file, scoring="text", template="{question}")
    (example,) = texts.gold_examples([item])
    assert example.prompt == item["question"]
    assert example.choices == tuple(f" {text}" for text in item["choices"].values())
    assert list(item["choices"])[example.gold] == item["answer"]
    assert example.units == tuple(map(len, item["choices"].values()))

    rows = [{"id": n, "question": f"{n} and 1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "numbers.json").write_text(json.dumps({"dev": rows, "test": rows[:1]}))
    match = ExactMatch("numbers", str(tmp_path / "numbers.json"))
    (example,) = match.gold_examples([match.items("dev")[1]])
    assert "1 and 1?" in example.prompt and example.choices == (" 2",)
    both = Mixture("both", {"few": match, "many": choice}, "weights", {"few": 3, "many": 1})
    items = both.items("dev")
    by_part: dict[str, float] = {}
    for one, made in zip(items, both.gold_examples(items), strict=True):
        by_part[one["part"]] = by_part.get(one["part"], 0.0) + made.weight / len(items)
    assert by_part == pytest.approx({"few": 0.75, "many": 0.25})


def test_losses_agree_with_what_tasks_score(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """A text's loss is minus its utility, and n losses, each with another choice as gold, are of
    shares of which the answer has the greatest."""
    (tmp_path / "text.txt").write_text(" ".join(tiny.TEXT))
    text = Perplexity(file=str(tmp_path / "text.txt"), window=60, context=30)
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position = drawn(pool)

    def answer(asked: Sequence[Request]) -> Any:
        return engine.generate(position[None], [asked])[0]

    items = text.items("dev")
    found = engine.compute_gradient(position, text.gold_examples(items)).loss / len(items)
    assert found == pytest.approx(-text.utility(finish(text.run(items), answer)), rel=1e-4)
    file = str(searches.choice_file(tmp_path / "tiny.json"))
    choice = MultipleChoice("tiny", file, scoring="text")
    items = choice.items("dev")[:4]
    scores = finish(choice.run(items), answer)
    for example, item, score in zip(choice.gold_examples(items), items, scores, strict=True):
        losses = [
            engine.compute_gradient(position, [replace(example, gold=gold)], False).loss
            for gold in range(len(example.choices))
        ]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1, abs=1e-5)
        assert score.answer == list(item["choices"])[int(np.argmin(losses))]


def searched(folder: Path, words: list[str], name: str = "run") -> tuple[RunFolder, str]:
    """A finished search, and what it wrote."""
    out = commands.run("swarm.search", *words, f"name={name}")
    assert out.code == 0, out.err
    return RunFolder(folder / "search" / name), out.out + out.err


def spent(run: RunFolder) -> int:
    """Prompts on dev, where a gradient counts as three."""
    kinds = {"prompts_scored": 1, "losses_computed": 1, "gradients_computed": 3}
    return sum(cost * r.get(kind, 0) for r in run.rounds for kind, cost in kinds.items())


def planned(words: Sequence[str], *more: str) -> str:
    return " ".join(commands.run("swarm.search", *words, *more, "dry_run=true").out.split())


def moved(first: dict[str, Any], last: dict[str, Any]) -> int:
    """How many positions of one round differ from those of another."""
    return sum(a != b for a, b in zip(first["positions"], last["positions"], strict=True))


def descending(folder: Path, base: Path, pool: Path, **more: Any) -> list[str]:
    keys = {
        "optimizer": "gradient",
        "optimizer__max_iterations": 3,
        "pool__space": "delta",
        "pool__groups": "per_module",
        "optimizer__particles": "null",
        "optimizer__descent__steps": 3,
        "optimizer__descent__batch": 4,
        **more,
    }
    return searches.arguments(folder, base, pool, **keys)


def test_a_huge_expert_moves_in_small_steps(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """An update of many times the median hardly counts in the soup and in the steps."""
    pool = Path(shutil.copytree(tiny_pool, tmp_path / "pool"))
    file = pool / tiny.NAMES[0] / "adapter_model.safetensors"
    weights = {k: v * (40.0 if "lora_B" in k else 1.0) for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    more = {"optimizer": "gradient", "optimizer__max_iterations": 1, "pool__groups": "global"}
    words = [w for w in descending(tmp_path, tiny_llama, pool, **more) if "descent" not in w]
    run, out = searched(tmp_path, words)
    assert f"the updates of {tiny.NAMES[0]} are more than 4 times" in out
    first, last = (np.array(r["positions"]) for r in run.rounds)
    steps = np.abs(last - first).max(axis=0)
    norms = np.array(Pool(pool).open().update_norms())
    factor = (4 * np.median(norms) / norms[0]) ** 2
    assert factor < 0.1 and norms[1:].max() < 4 * norms[1:].min()
    assert 0 < steps[0] / np.median(steps[1:]) < 3 * factor
    assert first[len(norms)][0] == pytest.approx(factor * first[len(norms)][1])


def test_a_search_descends_within_its_budget(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """Loss falls on what is learnt from, and what it took is in the record."""
    more = {"optimizer__descent__steps": 20, "optimizer__descent__rate": 0.3}
    words = descending(tmp_path, tiny_llama, tiny_pool, budget=400, **more)
    assert "at most 400 prompts on dev (a gradient counts as three)" in planned(words)
    run, out = searched(tmp_path, words)
    assert "training 1 mixture, 20 steps of 4 items" in out
    assert spent(run) <= 400 and run.verdict.cost == spent(run)
    assert any(r.get("gradients_computed") for r in run.rounds)
    assert moved(run.rounds[0], run.rounds[-1]) == 1, "one particle descends, the others stay"
    state, descent = read_state(run.path)["optimizer"], Descent()
    descent.load_state_dict(state["descent"], 1, state["seed"], 1)
    untouched, (number, row) = descent.items_without_gradient(12), run.verdict.places[1]
    rows = searches.answers(run.path, number)[str(row)]
    measured = [rows[i]["value"] for i in untouched]
    assert number and len(untouched) == run.verdict.no_gradient.n == 3
    assert run.verdict.no_gradient.utility == pytest.approx(sum(measured) / 3)
    caveats = " ".join(list_caveats(run.verdict))
    assert "No gradient used 3 of the 12 dev items that the search saw. On these" in caveats


def test_a_task_without_gold_answers(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    """Scores teach it, and where gold answers are wanted a search says that there are none."""
    items = [{"id": n, "prompt": f"number {n}", "words": ["a"]} for n in range(5)]
    (tmp_path / "texts.json").write_text(json.dumps({"dev": items[:3], "test": items[3:]}))
    box = [
        "task=function",
        "task.function=examples.own_tasks.stories.score",
        f"task.file={tmp_path}/texts.json",
    ]
    kept = descending(tmp_path, tiny_llama, tiny_pool, dry_run="true")
    words = [*(word for word in kept if not word.startswith("task")), *box]
    assert "on the scores of its own answers" in commands.run("swarm.search", *words).out
    out = commands.run("swarm.search", *words, "optimizer.descent.signal=gold")
    assert out.code != 0 and "no gold answers" in out.err and "nes" in out.err
    assert len(out.err.strip().splitlines()) == 1
    assert not (tmp_path / "search" / "run").exists()


def referring(folder: Path, references: Sequence[Any], **how: Any) -> FunctionTask:
    """A task scored by a function; an item whose reference is `None` has none."""
    items = [
        {"id": n, "prompt": f"number {n}?", **({} if text is None else {"reference": text})}
        for n, text in enumerate(references)
    ]
    (folder / "texts.json").write_text(json.dumps({"dev": items, "test": [{"prompt": "other"}]}))
    how = {"file": str(folder / "texts.json"), **how}
    return FunctionTask("mine", function="examples.own_tasks.stories.score", **how)


def test_reference_texts_are_gold_examples_of_a_black_box(tmp_path: Path) -> None:
    task = referring(tmp_path, ["the answer", ["best", "next best"], 12, "\n    return 1\n"])
    assert task.gold_error is None and task.black_box
    found = [example.choices[0] for example in task.gold_examples(task.items("dev"))]
    assert found == [" the answer", " best", " 12", "\n    return 1"]
    assert all(example.final for example in task.gold_examples(task.items("dev")))
    after = referring(tmp_path, ["the answer"], template="Q: {prompt}\nA: ")
    (example,) = after.gold_examples(after.items("dev"))
    assert (example.prompt, example.choices) == ("Q: number 0?\nA: ", ("the answer",))
    assert Mixture("both", {"mine": task}).black_box


@pytest.mark.parametrize(
    ("references", "words"),
    [
        ([None, None], "none of 2 dev items"),
        (["the answer", None], "only 1 of 2 dev items"),
        (["the answer", " "], "item 1: it is empty"),
        (["the answer", []], "item 1: neither a text"),
    ],
)
def test_reference_texts_are_in_all_items_or_not_used(
    tmp_path: Path, references: list[Any], words: str
) -> None:
    task = referring(tmp_path, references)
    assert task.items("dev") and words in str(task.gold_error)
    with pytest.raises(UserError, match=f"task.reference=reference: .*{words}"):
        referring(tmp_path, references, reference="reference").items("dev")
    with pytest.raises(
        UserError, match=r"task.reference=prompt: must not be a field of the template"
    ):
        referring(tmp_path, references, reference="prompt")
    assert words in str(Mixture("both", {"mine": task}).gold_error)
