"""The gradient of a position: losses, derivatives, tasks' examples, and searches that descend."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import tiny
import torch
from test_descent import finish

from swarm.engine import gradient
from swarm.engine.base_model import BaseModel
from swarm.engine.gradient import TokenizedExample, batch_examples, can_pack_choices
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.models.base import Example, Request
from swarm.optimizers.gradient import Descent
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state
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
def test_the_loss_is_that_of_merged_weights(
    tiny_llama: Path, mixed_pool: Path, way: dict[str, Any]
) -> None:
    engine, pool = opened(tiny_llama, mixed_pool, **way)
    position = drawn(pool)
    for example in EXAMPLES:
        found = engine.compute_gradient(position, [example], slope=False)
        assert found.loss == pytest.approx(loss(tiny_llama, pool, position, example), abs=1e-3)
        assert not found.slope.any()
    whole = engine.compute_gradient(position, EXAMPLES)
    alone = [engine.compute_gradient(position, [example]).loss for example in EXAMPLES]
    assert whole.loss == pytest.approx(sum(alone), abs=1e-4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_slope_is_the_losses_difference(
    tiny_llama: Path, mixed_pool: Path, way: dict[str, Any]
) -> None:
    """Central differences of a float32 loss agree to about three digits."""
    engine, pool = opened(tiny_llama, mixed_pool, **way)
    position = drawn(pool)
    slope = engine.compute_gradient(position, EXAMPLES).slope
    assert slope.shape == position.shape
    width, rough = 3e-3, []
    for place in range(len(position)):
        step = np.zeros(len(position))
        step[place] = width
        up, down = (
            engine.compute_gradient(x, EXAMPLES, False).loss
            for x in (position + step, position - step)
        )
        rough.append((up - down) / (2 * width))
    assert np.abs(slope).max() > 0.1
    np.testing.assert_allclose(slope, rough, atol=0.02 * np.abs(slope).max())


def test_batches_and_checkpointing_change_nothing(tiny_llama: Path, tiny_pool: Path) -> None:
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position = drawn(pool)
    whole = engine.compute_gradient(position, EXAMPLES * 2)
    engine._budget = 40
    parts = engine.compute_gradient(position, EXAMPLES * 2)
    engine.checkpointing = True
    recomputed = engine.compute_gradient(position, EXAMPLES * 2)
    for other in (parts, recomputed):
        assert other.loss == pytest.approx(whole.loss, rel=1e-5)
        np.testing.assert_allclose(other.slope, whole.slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_packed_choices_have_the_loss_and_slope_of_single_ones(tmp_path: Path, kind: str) -> None:
    base = tiny.model(tmp_path / "base", kind)
    engine, pool = opened(base, tiny.mixed_pool(base, tmp_path / "pool"), space="delta")
    position, found = drawn(pool), []
    for packed in (True, False):
        engine._packs_choices = packed
        found.append(engine.compute_gradient(position, EXAMPLES * 2))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    np.testing.assert_allclose(found[0].slope, found[1].slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("line", [20, 60, 1000])
def test_rows_that_share_a_line_attend_to_themselves(
    tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch, line: int
) -> None:
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position = drawn(pool)
    alone = [engine.compute_gradient(position, [example]) for example in EXAMPLES]
    monkeypatch.setattr(gradient, "LINE_TOKENS", line)
    together = engine.compute_gradient(position, EXAMPLES)
    assert together.loss == pytest.approx(sum(one.loss for one in alone), rel=1e-5)
    slope = np.sum([one.slope for one in alone], axis=0)
    np.testing.assert_allclose(together.slope, slope, rtol=1e-3, atol=1e-4)


def test_lines_hold_every_row_with_little_padding() -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 99, size).tolist() for size in random.integers(5, 90, 200)]
    rows = [TokenizedExample(prompt, [[1, 2]], EXAMPLES[0], i) for i, prompt in enumerate(prompts)]
    seen, padded, tokens = [], 0, 0
    for batch in batch_examples(rows, pad=0, budget=2000, packed=True):
        padded += batch.ids.size
        tokens += int((batch.ids > 0).sum())
        assert batch.ids.size <= 2200 and batch.ids.shape[1] <= 300
        for row in range(batch.rows.max() + 1):
            mine = batch.rows == row
            seen.append(batch.ids[mine].tolist())
            assert batch.positions[mine].tolist() == list(range(mine.sum()))
            (route,) = {batch.routes[place] for place in np.flatnonzero(mine)}
            assert [*prompts[route], 1] == seen[-1]
            # The last two tokens of a row predict the two of its answer.
            assert set(np.flatnonzero(mine)[-2:]) <= set(batch.predicting)
    assert len(seen) == 200
    assert padded < 1.1 * tokens


def test_whether_choices_are_packed_is_measured(tiny_llama: Path, tiny_pool: Path) -> None:
    engine, pool = opened(tiny_llama, tiny_pool)
    # Positions of an earlier batch do not decide.
    engine.generate(np.stack([drawn(pool)] * 3), [[Request("the answer", 2)]] * 3)
    engine.compute_gradient(drawn(pool), EXAMPLES)
    assert engine._packs_choices
    model = tiny.load(tiny_llama)
    assert can_pack_choices(model)
    # A model that makes its own mask, as those with positions in the mask do.
    forward = model.forward
    model.forward = lambda attention_mask, **rest: forward(**rest)
    assert not can_pack_choices(model)


def test_answers_after_a_gradient_are_as_before(tiny_llama: Path, tiny_pool: Path) -> None:
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position = drawn(pool)[None]
    asked = [[Request("the answer is", 8), Request("a", 0, (" b", " c"))]]
    before = engine.generate(position, asked)
    engine.compute_gradient(position[0] + 1, EXAMPLES)
    assert engine.generate(position, asked) == before


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

    (tmp_path / "numbers.json").write_text(
        json.dumps(
            {
                split: [
                    {"id": n, "question": f"{split} {n} and 1?\nAnswer:", "answer": str(n + 1)}
                    for n in range(4)
                ]
                for split in ("dev", "test")
            }
        )
    )
    match = ExactMatch("numbers", str(tmp_path / "numbers.json"))
    (example,) = match.gold_examples([match.items("dev")[1]])
    assert (example.prompt, example.choices) == ("dev 1 and 1?\nAnswer:", (" 2",))

    both = Mixture("both", {"few": match, "many": choice}, "weights", {"few": 3, "many": 1})
    items = both.items("dev")
    by_part: dict[str, float] = {}
    for one, made in zip(items, both.gold_examples(items), strict=True):
        by_part[one["part"]] = by_part.get(one["part"], 0.0) + made.weight / len(items)
    assert by_part == pytest.approx({"few": 0.75, "many": 0.25})


def test_the_loss_of_a_text_is_minus_its_utility(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(" ".join(tiny.TEXT))
    task = Perplexity(file=str(tmp_path / "text.txt"), window=60, context=30)
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position, items = drawn(pool), task.items("dev")
    scores = finish(task.run(items), lambda asked: engine.generate(position[None], [asked])[0])
    found = engine.compute_gradient(position, task.gold_examples(items)).loss / len(items)
    assert found == pytest.approx(-task.utility(scores), rel=1e-4)


def test_the_likeliest_text_has_the_greatest_share(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """The answer that is read and the loss agree: n losses, each with another choice as gold."""
    file = str(searches.choice_file(tmp_path / "tiny.json"))
    task = MultipleChoice("tiny", file, scoring="text")
    engine, pool = opened(tiny_llama, tiny_pool, space="delta")
    position, items = drawn(pool), task.items("dev")[:4]
    scores = finish(task.run(items), lambda asked: engine.generate(position[None], [asked])[0])
    for example, item, score in zip(task.gold_examples(items), items, scores, strict=True):
        losses = [
            engine.compute_gradient(position, [replace(example, gold=gold)], False).loss
            for gold in range(len(example.choices))
        ]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1, abs=1e-5)
        assert score.answer == list(item["choices"])[int(np.argmin(losses))]


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


@pytest.mark.parametrize("optimizer", ["gradient", "auto"])
def test_a_huge_expert_moves_in_small_steps(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, optimizer: str
) -> None:
    """An update of many times the median hardly counts in the soup and in the steps."""
    from safetensors.torch import load_file, save_file

    from swarm.runs.folder import RunFolder

    pool = shutil.copytree(tiny_pool, tmp_path / "pool")
    file = pool / tiny.NAMES[0] / "adapter_model.safetensors"
    weights = {k: v * (40.0 if "lora_B" in k else 1.0) for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    words = searches.arguments(
        tmp_path,
        tiny_llama,
        pool,
        optimizer=optimizer,
        optimizer__particles="null",
        optimizer__max_iterations=1,
        pool__groups="global",
        pool__space="delta",
    )
    out = commands.run("swarm.search", *words)
    assert out.code == 0, out.err
    assert f"the updates of {tiny.NAMES[0]} are more than 4 times" in out.out + out.err
    first, last = (np.array(r["positions"]) for r in RunFolder(tmp_path / "search" / "run").rounds)
    moved = np.abs(last - first).max(axis=0)
    norms = np.array(Pool(pool).open().update_norms())
    share = moved[0] / np.median(moved[1:])
    factor = (4 * np.median(norms) / norms[0]) ** 2
    assert factor < 0.1 and norms[1:].max() < 4 * norms[1:].min()
    assert 0 < share < 3 * factor
    assert first[len(norms)][0] == pytest.approx(factor * first[len(norms)][1])


def test_a_search_descends_within_its_budget(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """Loss falls on what is learnt from, and what it took is in the record."""
    from swarm.runs.folder import RunFolder

    words = descending(tmp_path, tiny_llama, tiny_pool, budget=220)
    plan = " ".join(commands.run("swarm.search", *words, "dry_run=true").out.split())
    out = commands.run("swarm.search", *words)
    assert out.code == 0, out.err
    assert "gradient steps: 1 position, 3 steps of 4 items" in out.out
    run = RunFolder(tmp_path / "search" / "run")
    rounds = run.rounds
    spent = sum(
        r["prompts_scored"] + r.get("losses_computed", 0) + 3 * r.get("gradients_computed", 0)
        for r in rounds
    )
    assert spent <= 220 and run.verdict.cost == spent
    descents = [r for r in rounds if r.get("gradients_computed")]
    assert descents
    assert "at most 220 prompts on dev (a gradient counts as three)" in plan
    before, after = (np.array(r["positions"][4]) for r in (rounds[0], rounds[-1]))
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(rounds[0]["positions"], rounds[-1]["positions"], strict=True)
    ]
    assert sum(moved) == 1, "one particle descends, the others stay"
    assert before.shape == after.shape
    state = read_state(run.path)
    descent = Descent()
    seed = state["optimizer"]["seed"]
    descent.load_state_dict(state["optimizer"]["descent"], 1, seed, np.arange(1))
    untouched, (number, row) = descent.items_without_gradient(12), run.verdict.places[1]
    rows = searches.answers(run.path, number)[str(row)]
    measured = [rows[i]["value"] for i in untouched]
    assert number and len(untouched) == run.verdict.no_gradient.n == 3
    assert run.verdict.no_gradient.utility == pytest.approx(sum(measured) / 3)
    assert "No gradient used 3 of the 12 dev items that the search saw. On these" in out.out


def test_a_task_without_gold_answers_is_refused(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    items = [{"id": n, "prompt": f"number {n}"} for n in range(4)]
    (tmp_path / "texts.json").write_text(json.dumps({"dev": items[:3], "test": items[3:]}))
    words = descending(tmp_path, tiny_llama, tiny_pool)
    words = [word for word in words if not word.startswith("task")]
    task = ["task=function", "task.function=builtins.print"]
    out = commands.run("swarm.search", *words, *task, f"task.file={tmp_path / 'texts.json'}")
    assert out.code != 0 and "no gold answers" in out.err and "nes" in out.err
    assert len(out.err.strip().splitlines()) == 1
    assert not (tmp_path / "search" / "run").exists()


def test_the_swarm_moves_without_what_a_task_has_not(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """A black box: optimizer=auto says what it takes, and the swarm says what it leaves out."""
    items = [{"id": n, "prompt": f"number {n}"} for n in range(5)]
    (tmp_path / "texts.json").write_text(json.dumps({"dev": items[:3], "test": items[3:]}))
    words = searches.arguments(tmp_path, tiny_llama, tiny_pool, dry_run="true")
    words = [word for word in words if not word.startswith(("task", "optimizer"))]
    words += ["task=function", "task.function=builtins.print", f"task.file={tmp_path}/texts.json"]
    descent = "optimizer.descent={_target_: swarm.optimizers.gradient.Descent}"
    chosen = commands.run("swarm.search", *words, "optimizer=auto")
    assert "optimizer=auto chooses" in chosen.out, chosen.err
    assert "black box with 4 coefficients" in " ".join(chosen.out.split())
    without = commands.run(
        "swarm.search", *words, "optimizer=pso", "optimizer.particles=6", descent
    )
    said = " ".join(without.out.split())
    assert "without its gradient term: task function has no gold answers" in said, without.err
    gold = searches.arguments(tmp_path, tiny_llama, tiny_pool, dry_run="true", optimizer="auto")
    assert "chooses gradient: gold answers" in " ".join(
        commands.run("swarm.search", *gold).out.split()
    )


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


def test_the_gradient_mutates_on_a_black_box(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """All particles move, and the best one descends too, within the budget."""
    from swarm.runs.folder import RunFolder

    words = searches.mutating(tmp_path, tiny_llama, tiny_pool, budget=150)
    said = " ".join(commands.run("swarm.search", *words, "dry_run=true").out.split())
    assert "gradient is of the reference texts' loss" in said and ": 1 position, " in said
    out = commands.run("swarm.search", *words)
    assert out.code == 0, out.err
    run = RunFolder(tmp_path / "search" / "run")
    first, second = run.rounds[:2]
    assert len(second["positions"][0]) == 4, "one group: utilities rank the positions"
    assert second["gradients_computed"] and not second["losses_computed"] > 6
    moved = [a != b for a, b in zip(first["positions"], second["positions"], strict=True)]
    assert all(moved), "a black box moves the whole swarm"
    spent = sum(
        r["prompts_scored"] + r.get("losses_computed", 0) + 3 * r.get("gradients_computed", 0)
        for r in run.rounds
    )
    assert spent <= 150
    without = commands.run("swarm.search", *words, "name=without", "optimizer.descent=null")
    assert without.code == 0, without.err
    plain = RunFolder(tmp_path / "search" / "without").rounds[1]
    differ = [a != b for a, b in zip(second["positions"], plain["positions"], strict=True)]
    assert sum(differ) == 1, "the mutant alone differs"


def test_auto_mutates_on_a_black_box(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    words = searches.mutating(tmp_path, tiny_llama, tiny_pool, dry_run="true")
    words = [word for word in words if not word.startswith("optimizer")]
    for budget, chosen in (
        (6 * 200, "pso: a black box, mutated by the gradient of the reference texts' loss"),
        (6 * 36, "; only optimizer=pso and gradient use the reference texts"),
    ):
        out = commands.run("swarm.search", *words, "optimizer=auto", f"budget={budget}")
        assert chosen in " ".join(out.out.split()), out.err
    wrong = commands.run("swarm.search", *words, "optimizer=auto", "task.reference=preferred")
    assert wrong.code != 0 and 'none of 6 dev items have a text in "preferred"' in wrong.err
    assert len(wrong.err.strip().splitlines()) == 1
