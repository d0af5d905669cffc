"""Coefficients of their own for prompts of different kinds: the router, and everything after it."""

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import tiny
import torch
import yaml
from peft import PeftModel

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.evaluation.checkpoints import BestCandidate
from swarm.executors.worker import JobUsage
from swarm.export.export import Export
from swarm.loop.evaluator import EvaluatedPositions, mean_by_route
from swarm.merging.positions import describe_position
from swarm.models.base import Example, Message, Request
from swarm.optimizers.base import SearchResources
from swarm.optimizers.swarm import MemeticSwarm
from swarm.pool.adapter import ROUTER_FILE, read_adapter, read_routed_adapter
from swarm.pool.pool import Pool
from swarm.pool.prompt_router import PromptRouter, choose_kinds, read_router
from swarm.registry.local_models import LocalModels, RoutedModel
from swarm.report.paired_comparison import PairedComparison
from swarm.report.sections import configuration_blocks
from swarm.runs.folder import RunFolder, RunRecord
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch

ROADS = "Roads: {} to {} 2 km. How far is {}?"
SORTS = "Sort these numbers: {} {} {}."


def prompts(count: int = 24) -> list[str]:
    return [
        (SORTS if i % 3 == 0 else ROADS).format(*(f"x{i * k % 17}" for k in (1, 2, 3)))
        for i in range(count)
    ]


def draw_states(count: int, kinds: int, noise: float = 0.3, seed: int = 0) -> dict[int, np.ndarray]:
    """States in which the kinds are apart at layer 2, and nothing is at layer 1."""
    draw = np.random.default_rng(seed)
    centres, row = 5 + draw.normal(size=(kinds, 16)), np.arange(count) % kinds
    return {
        1: draw.normal(size=(count, 16)),
        2: centres[row] + noise * draw.normal(size=(count, 16)),
    }


def open_engine(base: Path, pool: Pool, plan: str = "stacked") -> HFEngine:
    engine = HFEngine(plan)
    engine.open(BaseModel(str(base)), pool, "cpu")
    return engine


@pytest.fixture(scope="module")
def router(tiny_llama: Path, tiny_pool: Path) -> PromptRouter:
    """Of the tiny model, for two kinds."""
    texts = prompts()
    states = open_engine(tiny_llama, Pool(tiny_pool, space="delta").open()).embed_prompts(texts)
    values = np.array([[float(i % 3 == 0) for i in range(24)], [0.3] * 24])
    found = choose_kinds(states, texts, values, 2).router
    assert found
    return found


def test_kinds_are_those_whose_best_starts_differ() -> None:
    """By the layer that tells them apart, and only if that pays."""
    count, kinds = 90, 3
    states, row = draw_states(count, kinds), np.arange(count) % kinds
    texts = [f"{('sort', 'road', 'date')[kind]} number {i}" for i, kind in enumerate(row)]
    draw = np.random.default_rng(1)
    right = draw.random((4, count)) < 0.1
    values = np.where(row == np.arange(4)[:, None], draw.random(count) < 0.8, right).astype(float)
    found = choose_kinds(states, texts, values)
    assert found.router and found.router.layer == 2
    assert found.each > 0.7 and found.single < 0.4 and found.error < 0.1
    assert len(found.router.names) == 3 and len(np.unique(found.router.assign(states))) == 3
    for kind, (name, example) in enumerate(
        zip(found.router.names, found.router.examples, strict=True)
    ):
        mine = np.flatnonzero(found.router.assign(states) == kind)
        assert len({*row[mine]}) == 1 and example in {texts[i] for i in mine}
        assert name.startswith(example.split()[0])
    # Two kinds have the same best expert.
    both = values[[0, 1, 3]]
    both[1] = np.maximum(values[1], values[2])
    found = choose_kinds(states, texts, both)
    assert found.router and len(found.router.names) == 2 and len(found.router.centroids) >= 3
    # One expert is the best for all; nobody is good at anything; everything is noise.
    for other in (
        np.vstack([np.ones(count), values]),
        np.zeros((4, count)),
        draw.integers(0, 2, (9, count)).astype(float),
    ):
        found = choose_kinds(states, texts, other)
        assert found.router is None
    assert choose_kinds(states, texts, values, 5).router is not None
    with pytest.raises(UserError, match=r"pool.routes=16: the 10 dev prompts"):
        choose_kinds({2: states[2][:10]}, texts[:10], values[:, :10], 16)


def test_domains_are_kinds_where_clusters_are_not() -> None:
    """Three kinds along a line of one direction, in the midst of larger differences."""
    draw, count = np.random.default_rng(2), 120
    row = np.arange(count) % 3
    vectors = 3 * draw.normal(size=(count, 4)) * [1, 1, 1, 0]
    vectors[:, 3] = row * 2.5
    values = (row == np.arange(3)[:, None]).astype(float)
    texts = [f"prompt {i}" for i in range(count)]
    alone = choose_kinds({1: vectors}, texts, values)
    labelled = choose_kinds({1: vectors}, texts, values, "auto", [f"d{kind}" for kind in row])
    assert labelled.each > alone.each


def test_a_router_is_read_as_written_and_nothing_else_is(router: PromptRouter) -> None:
    again = read_router(json.loads(json.dumps(router.to_dict())))
    assert again == router and again.digest() == router.digest()
    for wrong in (
        {},
        {**router.to_dict(), "names": ["one"]},
        {**router.to_dict(), "names": ["..", "a/b"]},
        {**router.to_dict(), "mean": [1.0]},
        {**router.to_dict(), "routes": [0, 0]},
        {**router.to_dict(), "routes": [0, 1, 1]},
    ):
        with pytest.raises(UserError, match=r"pool.routes: not a router"):
            read_router(wrong)


def test_wrong_numbers_of_routes_are_refused(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    for value in (0, 17, True, "two"):
        with pytest.raises(UserError, match=r"pool.routes=.*at least 1, at most 16"):
            Pool("pool", routes=value)
    words = command(tmp_path, tiny_llama, tiny_pool, pool__routes=9)
    done = commands.run("swarm.search", *words, "task.dev_limit=8")
    assert done.code == 1 and "pool.routes=9: there are" in done.err
    assert not (tmp_path / "search").exists()


def test_prompts_are_embedded_as_by_the_base_alone(tiny_llama: Path, tiny_pool: Path) -> None:
    """With positions set, in batches of several lengths, turns too."""
    engine = open_engine(tiny_llama, Pool(tiny_pool, space="delta").open())
    asked: list[Any] = [*prompts(5), "x", (Message("user", "How far is Rome?"),)]
    size = len(Pool(tiny_pool).open().names)
    engine.generate(np.full((1, size), 0.3), [[Request("x", 2)]])
    base = tiny.load(tiny_llama)
    for budget in (4096, 30):
        engine._budget = budget
        found = engine.embed_prompts(asked, [1, 2])
        assert {*engine.embed_prompts(asked)} <= {1, 2}
        for i, prompt in enumerate(asked):
            ids = torch.tensor([engine._prompt_ids(prompt)])
            with torch.no_grad():
                states = base(input_ids=ids, output_hidden_states=True).hidden_states[1]
            np.testing.assert_allclose(found[1][i], states[0].mean(dim=0), atol=1e-5)


@pytest.mark.parametrize("space", ["delta", "factor"])
def test_a_gradient_is_that_of_each_route_through_an_adapted_head(
    tiny_llama: Path, tmp_path: Path, space: str
) -> None:
    """Its product depends on each position's route, in lines of several prompts or of one."""
    from safetensors.torch import load_file, save_file

    targets = ("q_proj", "lm_head")
    for seed in (1, 2):
        folder = tmp_path / "pool" / f"e{seed}"
        file = tiny.expert(tiny_llama, folder, seed, targets=targets) / "adapter_model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if ".lora_" in name}
        save_file(kept, file)
    how: dict[str, Any] = {"space": space, "groups": "kind"}
    pool = Pool(tmp_path / "pool", **how).open()
    size = len(pool.names) * len(pool.groups)
    rows = np.random.default_rng(1).normal(0, 0.7, (2, size))
    examples = [Example(text, (" 2 3 4" if i % 2 else " 5",)) for i, text in enumerate(prompts(7))]
    routes = [0, 1, 1, 0, 1, 1, 0]
    engine = open_engine(tiny_llama, pool)
    alone = [
        engine.compute_gradient(rows[route], [one])
        for route, one in zip(routes, examples, strict=True)
    ]
    for packed in (True, False):
        engine._packs_choices = packed
        found = engine.compute_gradient(rows, examples, routes=routes)
        assert found.loss == pytest.approx(sum(one.loss for one in alone), rel=1e-5)
        for number, slope in enumerate(found.slope.reshape(len(rows), -1)):
            mine = [one.slope for one, route in zip(alone, routes, strict=True) if route == number]
            np.testing.assert_allclose(slope, np.sum(mine, axis=0), rtol=1e-3, atol=1e-5)


def test_the_swarm_composes_what_is_best_on_each_route() -> None:
    swarm = MemeticSwarm(descent=None)
    swarm.set_resources(SearchResources(routes=2))
    swarm.start(3, seed=0, groups=4)
    first = swarm.ask()
    assert swarm.composed == 4 and swarm.evaluate.tolist() == [True] * 4 + [False]
    values = np.array([[0.1, 0.9], [0.5, 0.0], [0.2, 0.9], [0.5, 0.3], [np.nan, np.nan]])
    swarm.tell_routes(values)
    swarm.tell(np.array([0.5, 0.25, 0.55, 0.4, np.nan]))
    state = json.loads(json.dumps(swarm.state_dict()))
    second = swarm.ask()
    assert swarm.evaluate.tolist() == [False] * 4 + [True]
    # Route 0: a tie, decided by the utility on all routes. Route 1: the same.
    assert np.array_equal(second[4], np.concatenate([first[3][:6], first[2][6:]]))
    assert np.array_equal(second[:4], first[:4])
    again = MemeticSwarm(descent=None)
    again.set_resources(SearchResources(routes=2))
    again.start(3, seed=0, groups=4)
    again.load_state_dict(state)
    assert np.array_equal(again.ask(), second)
    swarm.tell(np.array([np.nan] * 4 + [0.7]))
    assert swarm.best_utility == 0.7
    moved = swarm.ask()
    assert swarm.evaluate.all() and not np.array_equal(moved[:4], first[:4])


def test_routes_with_equal_coefficients_are_one_folder(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """What two adapters and many kinds give: no two folders with the same weights."""
    texts = [*prompts(), *(f"{i} + {i * 3} =" for i in range(12))]
    plain = Pool(tiny_pool, space="delta").open()
    engine = open_engine(tiny_llama, plain)
    states = engine.embed_prompts(texts)
    values = np.random.default_rng(0).random((3, len(texts)))
    routes = choose_kinds(states, texts, values, 3).router
    assert routes and len(routes.names) == 3
    pool = Pool(tiny_pool, space="delta", routes=routes.to_dict()).open()
    first, second = np.random.default_rng(1).normal(0, 0.7, (2, len(pool.names)))
    position = np.concatenate([first, second, first])
    pool.save(position, tmp_path / "best")
    found = read_routed_adapter(tmp_path / "best")
    assert found
    router, folders = found
    assert [one.name for one in folders] == [routes.names[0], routes.names[1]]
    assert sorted(one.name for one in (tmp_path / "best").iterdir() if one.is_dir()) == sorted(
        router.names
    )
    kinds = [[0, 1, 0][one] for one in routes.assign(states)]
    assert router.assign(states).tolist() == kinds
    requests = [Request(text, 5) for text in texts]
    each = engine.generate(np.stack([first, second]), [requests, requests])
    saved = LocalModels(base=str(tiny_llama)).get_model(str(tmp_path / "best"))
    wanted = [each[kind][i].text for i, kind in enumerate(kinds)]
    assert [one.text for one in saved.generate(requests)] == wanted
    words = describe_position(pool.names, position.tolist(), pool.groups)
    assert words.startswith(f"{routes.names[0]} and 1 more: ") and words.count(": ") == 2
    pool.save(np.tile(first, 3), tmp_path / "one")
    assert read_adapter(tmp_path / "one").shapes


def task_file(folder: Path) -> Path:
    """Questions of two kinds, with answers that an untrained model gives now and then."""
    items = [
        {"id": i, "question": text, "answer": "e" if i % 3 else "a"}
        for i, text in enumerate(prompts(40))
    ]
    file = folder / "kinds.json"
    file.write_text(json.dumps({"dev": items[:24], "test": items[24:]}))
    return file


def command(folder: Path, base: Path, pool: Path, name: str = "run", **more: Any) -> list[str]:
    """A search of the default swarm on questions of two kinds."""
    keys: dict[str, Any] = {
        "optimizer": "pso",
        "optimizer__particles": "null",
        "optimizer__soups": 1,
        "optimizer__active": 1,
        "optimizer__descent": "{_target_: swarm.optimizers.gradient.Descent, steps: 3, batch: 4}",
        "optimizer__max_iterations": 4,
        "pool__space": "delta",
        "pool__groups": "auto",
        "pool__routes": 2,
        "baselines": "[base,soup,routes]",
        **more,
    }
    words = [
        word
        for word in searches.arguments(folder, base, pool, name, **keys)
        if not word.startswith("task")
    ]
    task = ["task=nlgraph_mini", f"task.file={task_file(folder)}", "task.parser=original"]
    return [*words, *task, "task.max_new_tokens=6"]


def test_a_search_from_the_first_prompt_to_an_exported_adapter(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    done = commands.run("swarm.search", *command(tmp_path, tiny_llama, tiny_pool))
    assert done.code == 0, done.out + done.err
    assert "2 kinds of prompts have coefficients of their own" in done.out
    folder = tmp_path / "search" / "run"
    run = RunFolder(folder)
    routes = run.config["pool"]["routes"]
    assert len(routes["names"]) == 2 and len(run.groups) % 2 == 0
    assert all(" / " in group for group in run.groups)
    # The best of each route needs no answers: those of the first iteration are its own.
    second = run.rounds[1]
    composed = len(run.rounds[0]["positions"]) - 1
    assert second["utilities"][composed] is not None and second["prompts_scored"] == 0
    start = [one for one in run.rounds[0]["utilities"] if one is not None]
    assert second["utilities"][composed] >= max(start)
    found = read_routed_adapter(folder / f"particle_{composed}" / "personal_best")
    assert found and [one.name for one in found[1]] == routes["names"]
    assert "routes" in {one.name for one in run.verdict.alternatives}
    words = describe_position(run.experts, run.positions[1, composed].tolist(), run.groups)
    assert all(f"{name}: " in words for name in routes["names"])
    shown = str(configuration_blocks(PairedComparison(run)))
    assert f"['kinds of prompts', '2: {', '.join(routes['names'])}']" in shown
    saved_answers_are_the_searchs(run, composed, tiny_llama)
    for name in ("routes", "expert"):
        Export(str(folder), str(tmp_path / name), base=str(tiny_llama), baseline=name).write()
    assert (tmp_path / "expert" / "adapter_config.json").is_file()
    exports_work(folder, composed, tiny_llama, tmp_path)
    first, items = run.rounds[0], len(run.load_answers((0, 0)))
    assert first["prompts_embedded"] == items
    evaluated = [one for one in first["utilities"] if one is not None]
    assert first["prompts_scored"] == len(evaluated) * items, "each is charged, once"
    for keys in ({"pool__space": "factor"}, {"optimizer__soups": 0}):
        name = next(iter(keys))
        more = {"test": "false", "optimizer__max_iterations": 1, "pool__routes": "auto", **keys}
        words = command(tmp_path, tiny_llama, tiny_pool, name, **more)
        assert commands.run("swarm.search", *words).code == 0
        assert RunFolder(tmp_path / "search" / name).config["pool"]["routes"] == 1
        assert not RunFolder(tmp_path / "search" / name).verdict.kinds


def test_rejected_kinds_change_nothing_but_the_cost(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """The starts are scored once, for the kinds and for the first iteration."""
    more: dict[str, Any] = {"optimizer__max_iterations": 1, "optimizer__descent": "null"}
    found = {}
    for routes in ("auto", 1):
        words = command(tmp_path, tiny_llama, tiny_pool, f"r{routes}", pool__routes=routes, **more)
        done = commands.run("swarm.search", *words)
        assert done.code == 0, done.out + done.err
        found[routes] = RunFolder(tmp_path / "search" / f"r{routes}")
        assert ("considered and rejected" in done.out) == (routes == "auto")
    considered, plain = found["auto"], found[1]
    assert considered.config["pool"]["routes"] == 1
    assert "considered and rejected" in considered.verdict.kinds
    assert considered.rounds[0].pop("prompts_embedded") == len(plain.load_answers((0, 0)))
    assert considered.rounds == plain.rounds


def test_a_search_with_kinds_resumes_exactly(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """After the first iteration, before it, and by the stored kinds of test items."""
    for name in ("whole", "cut"):
        words = command(tmp_path, tiny_llama, tiny_pool, name)
        assert commands.run("swarm.search", *words).code == 0
    record = tmp_path / "search" / "cut" / "rounds.jsonl"
    whole = RunFolder(tmp_path / "search" / "whole")
    lines = record.read_bytes().splitlines(keepends=True)
    second = next(i for i, line in enumerate(lines) if re.search(rb'"iteration": ?2\b', line))
    for kept in (second, 2):
        record.write_bytes(b"".join(lines[:kept]))
        (record.parent / "run.json").unlink(missing_ok=True)
        for saved in ("global_best", *(f"particle_{i}" for i in range(9))):  # of later bests
            shutil.rmtree(record.parent / saved, ignore_errors=True)
        done = commands.run("swarm.search", *words)
        assert done.code == 0, done.out + done.err
        again = RunFolder(record.parent)
        assert again.rounds == whole.rounds
        assert again.verdict.found == whole.verdict.found


def saved_answers_are_the_searchs(run: RunFolder, particle: int, base: Path) -> None:
    """As a local model and as a candidate."""
    saved = run.path / f"particle_{particle}" / "personal_best"
    keys = ("name", "file", "parser", "max_new_tokens")
    task = ExactMatch(**{key: run.config["task"][key] for key in keys})
    items = task.items("dev")
    model = LocalModels(base=str(base)).get_model(str(saved))
    assert isinstance(model, RoutedModel)
    given = [one.text for one in model.generate([task.build_request(item) for item in items])]
    assert given == [row["text"] for row in run.load_answers(run.find_best(particle))]
    assert model.fingerprint() != LocalModels(base=str(base)).get_model("base").fingerprint()
    best = BestCandidate(str(run.path))
    best.check(task)
    best.open("cpu")
    (scores,) = best.score_items(task, items, JobUsage())
    expected = [row["text"] for row in run.load_answers(run.find_best())]
    assert [score.text for score in scores] == expected


def exports_work(folder: Path, particle: int, base: Path, home: Path) -> None:
    """Of all routes, whose card chooses the adapter of a prompt without this package; of one."""
    saved = folder / f"particle_{particle}" / "personal_best"
    Export(str(saved), str(home / "all"), base=str(base)).write()
    routed = read_routed_adapter(home / "all")
    assert routed
    router, card = routed[0], (home / "all" / "README.md").read_text()
    assert "Each kind of prompt" in card and ROUTER_FILE in card
    code = card.partition("```python\n")[2].partition("```")[0]
    space: dict[str, Any] = {}
    with contextlib.chdir(home), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        exec(code, space)
        sys.modules.pop("routed")
    assert "import swarm" not in (home / "all" / "routed.py").read_text()
    model, engine = space["model"], HFEngine("stacked")
    engine.load_base(BaseModel(str(base)), "cpu")
    engine.set_adapters({})
    texts = [*prompts(9), "7 - 2 =", "Sort how far, Rome"]
    names = [router.names[i] for i in router.assign(engine.embed_prompts(texts))]
    assert len(set(names)) > 1
    words = engine._tokenizer(texts, return_tensors="pt", padding=True)
    assert model.choose_adapters(**words) == names
    limits = {"max_new_tokens": 4, "do_sample": False}
    written = model.generate(**words, **limits)[:, -4:].tolist()
    for name, text, ids in zip(names, texts, written, strict=True):
        single = PeftModel.from_pretrained(tiny.load(base), home / "all" / name)
        alone = engine._tokenizer(text, return_tensors="pt")
        assert single.generate(**alone, **limits)[0, -4:].tolist() == ids
        assert model.generate(**alone, **limits)[0, -4:].tolist() == ids
    rules = yaml.safe_load((home / "all" / "semantic_router.yaml").read_text())
    shown = rules["routing"]["signals"]["embeddings"]
    assert [(one["name"], *one["candidates"]) for one in shown] == [
        *zip(router.names, router.examples, strict=True)
    ]
    hub = Export(str(saved), str(home / "all"), push_to_hub="user/name")
    code = hub.render_card().partition("```python\n")[2].partition("```")[0]
    assert 'append(snapshot_download("user/name"))' in code and compile(code, "card", "exec")
    for kind in ("merged", "parts"):
        with pytest.raises(UserError, match=rf"format={kind}: .*export one of its folders"):
            Export(str(saved), str(home / "x"), kind)
    one = saved / router.names[1]
    Export(str(one), str(home / "y"), "merged", base=str(base)).write()


def test_a_route_without_dev_items_is_left_out() -> None:
    """A stored router, and dev items of some of its kinds."""
    routes = np.array([0, 0, 2])
    scores = {1: [Score(1.0, "a"), Score(0.0, "b"), Score(1.0, "c")]}
    found = mean_by_route(scores, routes, 4, 2)
    np.testing.assert_array_equal(found[1], [0.5, np.nan, 1.0, np.nan])
    assert np.isnan(found[0]).all()
    known = EvaluatedPositions(RunRecord(Path("nothing")), routes, 4)
    known.add_iteration(0, [[1.0, 2.0, 3.0, 4.0]], [0.5])
    assert [1.0, 9.0, 3.0, 9.0] in known and [1.0, 2.0, 9.0, 4.0] not in known
