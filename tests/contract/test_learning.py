"""What a swarm learns from its own scored answers, and the adapter that it learns beside."""

import json
import math
import time
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import torch
from test_gradient import EXAMPLES, drawn, logprobs, opened, searched, spent

from swarm.engine.gradient import expected_score_loss
from swarm.executors.worker import DESCENT, DescentJob, ItemLearner
from swarm.loop.descents import CandidatePool, choose_signal
from swarm.models.base import Example, Request
from swarm.optimizers.gradient import Descent
from swarm.pool.adapter import read_adapter
from swarm.pool.learned import LearnedAdapter
from swarm.pool.pool import Pool
from swarm.runs.folder import LEARNED_FOLDER, RunFolder, read_state
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice

SCORED = Example("the answer", (" 12", " yes", " no"), values=(0.5, 1.0, 0.0), final=True)


def test_the_loss_by_scores() -> None:
    p, values = np.array([0.3, 0.1, 0.2]), np.array([1.0, 0.5, 0.0])
    tokens = np.array([1.0, 3.0, 2.0])
    tensors = [torch.tensor(one) for one in (np.log(p), values, tokens)]
    assert float(expected_score_loss(*tensors)) == pytest.approx(-math.log(values @ p) / 2)
    q = p ** (1 / tokens)
    relative = float(expected_score_loss(*tensors, relative=True))
    ratio = -math.log(values @ q / q.sum())
    assert relative == pytest.approx((ratio - math.log(values @ p) / 2) / 2)


def test_loss_and_slopes_of_a_position_with_an_adapter(
    tiny_llama: Path, mixed_pool: Path, tmp_path: Path
) -> None:
    """By transformers on merged weights, and by central differences in coefficients and factors."""
    engine, pool = opened(tiny_llama, mixed_pool, space="delta", new_adapter=3)
    position, file = drawn(pool), tmp_path / "one.safetensors"
    adapter = engine.open_adapter(None, 3, seed=0)
    assert len(adapter.factors) > len(pool.modules), "it adapts all linear layers"
    before = engine.compute_gradient(position, [SCORED]).loss
    zero = engine.compute_gradient(position, [SCORED], learned=adapter).loss
    assert zero == pytest.approx(before, rel=1e-6)
    for _, b in adapter.factors.values():
        b.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    file.write_bytes(adapter.encode())
    adapter = engine.open_adapter(str(file), 3, seed=0)
    adapter.train(0.01, 0.0)
    found = engine.compute_gradient(position, [SCORED], learned=adapter)

    pool.learned = {tuple(position): str(file)}
    nats = np.array(logprobs(tiny_llama, pool, position, SCORED))
    p, values = np.exp(nats), np.array(SCORED.values)
    expected = -math.log(values @ p) / 2  # of two tokens each
    assert found.loss == pytest.approx(expected, abs=1e-3)
    golds = EXAMPLES[:3]
    for one in adapter.factors.values():
        one[0].grad = one[1].grad = None
    slope = engine.compute_gradient(position, golds, learned=adapter).slope
    a, b = adapter.factors[min(adapter.factors)]
    for x, known in ((position, slope), (a, a.grad), (b, b.grad)):
        rough, width = np.zeros(tuple(x.shape)), 0.01
        for place in np.ndindex(*x.shape):
            with torch.no_grad():
                losses = []
                for step in (width, -2 * width):
                    x[place] += step
                    losses.append(engine.compute_gradient(position, golds, False, (), adapter).loss)
                x[place] += width
            rough[place] = (losses[0] - losses[1]) / (2 * width)
        exact = np.asarray(known)
        assert np.abs(exact).max() > 1e-3
        np.testing.assert_allclose(rough, exact, atol=0.05 * np.abs(exact).max())


def test_an_adapter_continues_with_its_moments(tmp_path: Path) -> None:
    """Two steps are the same whether its file was read between them or not."""
    ends = []
    for through_file in (False, True):
        adapter = LearnedAdapter.draw({"layer": (4, 3)}, 2, 0, "cpu")
        a, b = adapter.factors["layer"]
        assert a.abs().max() <= 0.5 and not b.any()
        adapter.train(0.1, 0.0)
        for size in (1.0, 0.01, math.nan):
            for one in adapter.factors["layer"]:
                one.grad = torch.full_like(one, size)
            adapter.step(0.5)
            if through_file:
                (tmp_path / "file").write_bytes(adapter.encode())
                adapter = LearnedAdapter.load(tmp_path / "file", moments=True)
                adapter.train(0.1, 0.0)
            if size == 0.01:
                ends.append(adapter.factors["layer"][1].detach().clone())
        assert torch.equal(adapter.factors["layer"][1], ends[-1]), "NaN moves nothing"
    assert torch.equal(*ends) and ends[0].any()


def match(folder: Path, parser: str, answers: list[str], **more: Any) -> ExactMatch:
    items = [{"id": n, "question": f"{n}?", "answer": text} for n, text in enumerate(answers)]
    test = [{"question": "last?", "answer": "none"}]
    (folder / "items.json").write_text(json.dumps({"dev": items, "test": test}))
    return ExactMatch("mine", str(folder / "items.json"), parser=parser, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parser", "gold", "text", "part"),
    [
        ("anchored", "Yes", " Yes, there is\n", (" Yes", False)),
        ("anchored", "12", " 12\n\nQ", (" 12", False)),
        ("anchored", "12", " 1", (" 1", False)),
        ("anchored", "12", " none", (" none", True)),
        ("whole", "cat", " cat", (" cat", True)),
        ("whole", "cat", " cat\nand", (" cat\nand", False)),
    ],
)
def test_the_part_of_a_text_that_is_scored(
    tmp_path: Path, parser: str, gold: str, text: str, part: tuple[str, bool]
) -> None:
    task = match(tmp_path, parser, [gold])
    assert task.scored_part(task.items("dev")[0], text) == part


def test_candidates_are_distinct_and_differ_in_score(tmp_path: Path) -> None:
    task = match(tmp_path, "anchored", ["12", "7", "5", "9"])

    def scores(texts: dict[int, list[str]]) -> list[tuple[int, Score]]:
        items = task.items("dev")
        found = []
        for number, mine in texts.items():
            for text in mine:
                part = task.scored_part(items[number], text)[0].strip()
                found.append((number, Score(task.grade(items[number], part), part, text)))
        return found

    texts = {0: [" 12\n", " 12.", " 3"], 1: [" 1", " 2"], 2: [" 5", ""], 3: []}
    pool = CandidatePool(task, task.items("dev"))
    pool.add(scores(texts))
    assert [pool.is_solved(number) for number in range(4)] == [True, False, True, False]
    first, wrong, right, nothing = pool.choose(4)
    assert first == [(" 12", False, 1.0)] and right == [(" 5", False, 1.0)]
    assert wrong == nothing == []
    example = task.scored_example(task.items("dev")[0], first)
    assert example.choices == (" 12",) and example.values == (1.0,)
    # Grades: the best, then the latest, each against the others.
    pool._known[1] = {("a", True): 0.1, ("b", True): 0.3, ("c", True): 0.2, ("d", True): 0.1}
    graded = pool.choose(3)[1]
    assert [one.text for one in graded] == ["b", "d", "c"]
    assert [one.value for one in graded] == pytest.approx([1.0, 0.0, 0.5])
    assert task.scored_example(task.items("dev")[0], graded).relative


def test_each_part_of_a_mixture_has_its_own_candidates(tmp_path: Path) -> None:
    """Of right or wrong answers the right ones; of graded ones all, in the parts' own forms."""
    (tmp_path / "a").mkdir()
    exact = match(tmp_path / "a", "anchored", ["12"])
    graded = match(tmp_path, "whole", ["cat"])
    mixed = Mixture("mixed", {"exact": exact, "graded": graded})
    pool = CandidatePool(mixed, mixed.items("dev"))
    texts = [(0, 1.0, " 12, and"), (0, 0.0, " 3"), (1, 0.4, " dog"), (1, 0.9, " cats")]
    pool.add((n, Score(value, text, text, ("exact", "graded")[n])) for n, value, text in texts)
    assert [pool.is_solved(number) for number in range(2)] == [True, False]
    right, both = pool.choose(4)
    assert right == [(" 12", False, 1.0)]
    assert both == [(" cats", True, 1.0), (" dog", True, 0.0)]
    assert mixed.scored_example(mixed.items("dev")[1], both).choices == (" cats", " dog")


def test_what_teaches(tmp_path: Path) -> None:
    texts = match(tmp_path, "anchored", ["1"])
    letters = MultipleChoice("l", str(searches.choice_file(tmp_path / "t.json")), scoring="logits")
    for wanted, task, signal in (
        ("auto", texts, "gold"),
        ("scores", texts, "scores"),
        ("auto", letters, "gold"),
        ("scores", letters, None),
    ):
        found, reason = choose_signal(wanted, task)
        assert found == signal and bool(reason) == (signal is None)
        assert "no single text" in reason or signal


def learning(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    """A search that learns from its scores alone, on texts scored by a function."""
    keys = {"pool__new_adapter": 2, "optimizer__descent": "{_target_: "
            "swarm.optimizers.gradient.Descent, steps: 4, batch: 2, new_rate: 0.01}"}  # fmt: skip
    return searches.mutating(folder, base, pool, name, **{**keys, **more})


def test_what_a_route_has_kept_is_measured_with_its_own_adapter(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """The second kind has none, the first one the latest, with which both go on."""
    engine, pool = opened(tiny_llama, tiny_pool, space="delta", new_adapter=2)
    adapter = engine.open_adapter(None, 2, 0)
    for _, b in adapter.factors.values():
        b += 1.0
    (tmp_path / "0001").write_bytes(adapter.encode())
    task = match(tmp_path, "anchored", ["1", "2"])
    descent, position = Descent(), tuple(np.full(2 * len(pool.names), 0.4).tolist())
    descent.start(1, 2, len(pool.names), seed=0, routes=2)
    files = str(tmp_path / "0001"), ""

    def losses(learned: tuple[str, ...], *, moved: bool = False) -> list[float]:
        job = DescentJob(
            0, (position,), DESCENT, (0, 1), learned=learned, descent=descent, routes=(0, 1), rank=2
        )
        learner = ItemLearner(engine, task, task.items("dev"), job)
        if moved:
            learner.step(0.0)
        return [learner.measure(np.array(position), [i], slope=False).loss for i in (0, 1)]

    of_file, of_none = losses((files[0],) * 2), losses(("", ""))
    assert of_file[0] != of_none[0] and of_file[1] != of_none[1]
    rows = np.array(position).reshape(2, -1)
    for item, bounded in zip(task.items("dev"), of_none, strict=True):
        loss = engine.compute_gradient(rows[0], task.gold_examples([item]), slope=False).loss
        assert bounded == pytest.approx(1 - math.exp(-loss))
    assert losses(files) == [of_file[0], of_none[1]]
    assert losses(files, moved=True) == of_file


def test_an_adapter_that_nothing_learns_is_refused(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    words = learning(tmp_path, tiny_llama, tiny_pool, optimizer__descent="null")
    done = commands.run("swarm.search", *words)
    assert done.code == 1 and "pool.new_adapter=2: nothing learns it" in done.err


def test_a_search_learns_from_scores_alone_with_an_adapter(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """Adapters are those of positions: stored, saved with the best, dropped where not needed."""
    words = learning(tmp_path, tiny_llama, tiny_pool, test="true")
    run, out = searched(tmp_path, words)
    assert "it also trains, on the scores of its own answers" in out
    descents = [entry for entry in run.rounds if entry.get("gradients_computed")]
    assert descents and all(entry["learned"] for entry in descents)
    assert spent(run) == run.prompts_spent()
    files = {path.name for path in (run.path / LEARNED_FOLDER).iterdir()}
    known = run.learned_files()
    particles = len(run.rounds[0]["utilities"])
    assert 0 < len(files) <= 2 * particles
    assert {Path(file).name for file in known.values()} >= files

    # What is saved answers as the search did.
    place = max(
        (
            (n, int(i))
            for n, entry in enumerate(run.rounds)
            for i, (file,) in entry.get("learned", {}).items()
            if Path(file).name in files
        ),
        key=lambda index: run.utility_at(index) or -1.0,
    )
    position, pool = run.position_at(place), Pool(tiny_pool, space="delta", groups="global")
    pool.open().learned = known
    for name in ("one", "other"):  # a pool has two or more
        pool.save(position, tmp_path / "saved" / name)
    ranks = {shape[2] for shape in read_adapter(tmp_path / "saved" / "one").shapes.values()}
    assert len(ranks) == 2 and min(ranks) == 2, "the adapter alone, and after the experts"
    engine, _ = opened(tiny_llama, tmp_path / "saved", space="delta")
    rows = run.load_answers(place)
    asked = [[Request(f"number {row['id']}?", 4) for row in rows]]
    found = engine.generate(np.eye(2)[:1], asked)[0]
    assert [one.text for one in found] == [row["text"] for row in rows]


@pytest.mark.parametrize("way", ["killed", "damaged", "processes"])
def test_a_search_with_adapters_is_the_same_resumed_or_on_workers(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, way: str
) -> None:
    other, more = tmp_path / "search" / "other", {"optimizer__max_iterations": 5}
    words = learning(tmp_path, tiny_llama, tiny_pool, "other", **more)
    run, _ = searched(tmp_path, learning(tmp_path, tiny_llama, tiny_pool, **more))
    if way == "processes":
        searched(tmp_path, [*words, "executor=processes", "executor.workers=2"], "other")
    elif way == "killed":
        assert len(searches.run_killed(words, other, few=True)) == 3
    else:
        search = searches.start(words)
        while len((read_state(other) or {"rounds": []})["rounds"]) < 4:
            assert search.poll() is None
            time.sleep(0.01)
        search.kill()
        search.communicate()
        newest = max((other / LEARNED_FOLDER).iterdir())
        newest.write_bytes(newest.read_bytes()[:-1])
        _, out = searched(tmp_path, words, "other")
        assert f"{LEARNED_FOLDER}/{newest.name} is damaged or missing" in out
    again = RunFolder(other)
    assert len(again.rounds) == len(run.rounds)
    for one, two in zip(run.rounds, again.rounds, strict=True):
        assert one["positions"] == two["positions"] and one["utilities"] == two["utilities"]
        assert one.get("learned") == two.get("learned")
    assert not searches.differences(run.path / LEARNED_FOLDER, other / LEARNED_FOLDER)
