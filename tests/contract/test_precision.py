"""`engine.precision`: products in bfloat16 during a search, and a verdict in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
import searches
import tiny
import torch

from swarm.engine.base_model import BaseModel, quicker_dtype
from swarm.engine.batched_lora import BFloat16Linear
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.loop.evaluator import answers_agree, choose_precision
from swarm.loop.score_cache import ScoreCache
from swarm.models.base import Example, Request
from swarm.pool.pool import Pool
from swarm.runs.run_folder import PRECISION_KEY, RunRecord
from swarm.tasks.base import Score
from swarm.tasks.multiple_choice import MultipleChoice

PROMPTS = ["please answer with one word", "no", "a graph of 5 nodes has edges between 1 and 2"]


@pytest.fixture(scope="module", params=tiny.KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HFEngine, Pool]:
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny.model(folder / "base", request.param)
    pool = Pool(tiny.mixed_pool(base, folder / "pool")).open()
    made = HFEngine("swap")
    made.open(BaseModel(str(base)), pool, "cpu")
    return made, pool


def logprobs(engine: HFEngine, pool: Pool, precision: str | None) -> np.ndarray:
    """Of three choices to each prompt, at every expert, stacked."""
    engine.set_precision(precision)
    asked = [[Request(p, 0, (" yes", " no", " none of the above")) for p in PROMPTS]]
    found = engine.generate(np.eye(len(pool.names)), asked * len(pool.names))
    return np.array([[one.logprobs for one in row] for row in found])


def test_only_products_are_rounded(engine: tuple[HFEngine, Pool]) -> None:
    """Near float32 and not equal to it; back in float32 it is the same bit for bit."""
    made, pool = engine
    before = logprobs(made, pool, None)
    quick = logprobs(made, pool, "bfloat16")
    difference = np.abs(quick - before).max()
    assert 0 < difference < 0.05 * np.abs(before).max()
    assert np.array_equal(logprobs(made, pool, None), before)
    made.set_precision("bfloat16")
    model = made._model
    layers = [m for m in model.modules() if isinstance(m, BFloat16Linear)]
    assert layers and all(layer.weight.dtype == torch.float32 for layer in layers)
    assert not isinstance(model.get_output_embeddings(), BFloat16Linear)
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert {t.dtype for t in (out.logits, *out.hidden_states)} == {torch.float32}
    made.set_precision(None)


def test_plans_agree_in_bfloat16(engine: tuple[HFEngine, Pool]) -> None:
    """Stacked and one after the other, as far as bfloat16 allows; merging is never chosen."""
    made, pool = engine
    made.set_precision("bfloat16")
    asked = [[Request(p, 6) for p in PROMPTS]] * len(pool.names)
    texts = {}
    for plan in ("swap", "stacked", "auto"):
        made.plan = plan
        texts[plan] = [[c.text for c in row] for row in made.generate(np.eye(len(asked)), asked)]
    made.plan = "swap"
    flat = [[text for row in texts[plan] for text in row] for plan in texts]
    same = np.mean([a == b for a, b in zip(flat[0], flat[1], strict=True)])
    assert same >= 0.8 and texts["auto"] == texts["stacked"]
    assert all(layer.merged is None for layer in made._stack._layers.values())
    made.set_precision(None)


def test_gradients_in_bfloat16_point_the_same_way(engine: tuple[HFEngine, Pool]) -> None:
    made, pool = engine
    examples = [Example(prompt, (" yes", " no")) for prompt in PROMPTS]
    position = np.full(len(pool.names) * len(pool.groups), 0.2)
    slopes = []
    for precision in (None, "bfloat16"):
        made.set_precision(precision)
        slopes.append(made.compute_gradient(position, examples).slope)
    made.set_precision(None)
    one, other = slopes
    assert not np.array_equal(one, other)
    assert one @ other > 0.99 * np.linalg.norm(one) * np.linalg.norm(other)


@pytest.mark.parametrize(
    ("settings", "dtype", "on_gpu", "words"),
    [
        ({"precision": "bfloat16"}, "bfloat16", False, "needs model.dtype=float32"),
        ({"precision": "float32"}, "bfloat16", False, "needs model.dtype=float32"),
        ({"precision": "bfloat16"}, "auto", True, "for CPUs"),
        ({"precision": "bfloat16", "plan": "merged"}, "auto", False, "engine.plan"),
    ],
)
def test_a_precision_without_meaning_is_refused(
    settings: dict[str, str], dtype: str, on_gpu: bool, words: str
) -> None:
    engine, base = HFEngine(**settings), BaseModel("somewhere", dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        engine.requested_precision(base, on_gpu)
    engine.precision = "auto"
    assert engine.requested_precision(base, on_gpu) is None


def test_int8_is_not_allowed() -> None:
    with pytest.raises(
        UserError, match=r"precision=int8: must be null or one of auto, float32, bfloat16"
    ):
        HFEngine(precision="int8")


@pytest.mark.parametrize(("wrong", "search"), [(0, "bfloat16"), (3, "bfloat16"), (4, "float32")])
def test_auto_needs_98_percent_of_the_answers(wrong: int, search: str) -> None:
    def ask(items: list[int], precision: str | None) -> list[list[Score]]:
        rows = [[Score(0.0, f"{item}") for item in items] for _ in range(9)]
        if precision:
            rows[0][:wrong] = [Score(0.0, "other")] * wrong
        return rows

    found = choose_precision(ask, 9, range(100), 1000, 11)  # type: ignore[arg-type]
    assert (found["search"], found["answers"]) == (search, 180)
    assert found["agreement"] == pytest.approx(1 - wrong / 180)


def test_a_short_search_is_in_float32_and_compares_nothing() -> None:
    found = choose_precision(lambda *_: pytest.fail("asked"), 9, range(100), 30, 11)
    assert found["search"] == "float32" and "short" in found["reason"]


def test_answers_agree_by_their_text_or_within_a_percent() -> None:
    assert answers_agree(Score(1.0, "a"), Score(1.0, "a"))
    assert not answers_agree(Score(0.0, "a"), Score(0.0, "b"))
    assert answers_agree(Score(-2.0, "-2.0"), Score(-2.01, "-2.01"))
    assert not answers_agree(Score(-2.0, "-2.0"), Score(-2.1, "-2.1"))


def test_cached_answers_know_their_precision(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cache.set_context({"weights": 1})
    cache.save_scores([0.5], "dev", [0], [Score(1.0, "quick")], "bfloat16")
    assert cache.load_scores([0.5], "dev", [0]) is None
    cache.save_scores([0.5], "dev", [0], [Score(1.0, "exact")])
    found = [cache.load_scores([0.5], "dev", [0], p) for p in (None, "bfloat16")]
    assert [rows[0].answer for rows in found if rows] == ["exact", "quick"]


def test_a_search_in_bfloat16_ends_in_float32(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Its verdict is what float32 answers; it resumes identically, and in bfloat16 only."""

    def command(name: str, precision: str) -> list[str]:
        return searches.arguments(
            tmp_path, tiny_llama, tiny_pool, name, engine__precision=precision
        )

    done = searches.run(command("run", "bfloat16"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "search" / "run"
    state = json.loads((folder / "state.json").read_text())
    assert state["identity"][PRECISION_KEY] == "bfloat16"
    metrics = state["metrics"]
    found = metrics["precision"]
    assert found["search"] == "bfloat16" and len(found["finalists"]) == 6
    assert found["answers"] == 6 * 12
    assert found["ending"]["again"] == metrics["ending_best_validation_utility"]
    iteration, particle = found["ending"]["place"]
    position = state["rounds"][iteration]["positions"][particle]
    assert found["ending"]["searched"] == state["rounds"][iteration]["utilities"][particle]
    assert "The search asked in bfloat16" in " ".join(done.stdout.split())

    # The best found, asked by an engine that knows no other precision.
    task = MultipleChoice("mmlu", str(tmp_path / "tiny.json"), scoring="logits")
    engine = HFEngine()
    pool = Pool(str(tiny_pool), space="factor", groups=1).open()
    engine.open(BaseModel(str(tiny_llama)), pool, "cpu")
    items = list(task.items("dev"))
    (scores,) = run_tasks_lockstep(task, engine, np.array([position]), items, JobUsage())
    assert task.utility(scores) == found["ending"]["again"]

    killed = tmp_path / "search" / "killed"
    assert searches.run_killed(command("killed", "bfloat16"), killed, few=True)
    assert searches.differences(folder, killed) == []

    record, identity = RunRecord(folder), dict(state["identity"])
    assert record.load_state({**identity, PRECISION_KEY: "auto"}), "auto continues with the choice"
    del identity[PRECISION_KEY]
    with pytest.raises(UserError, match=r"engine.precision: 'bfloat16' then, None now"):
        record.load_state(identity)


@pytest.mark.skipif(quicker_dtype() == "float32", reason="this CPU is quicker in float32")
def test_auto_is_decided_once_and_recorded(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """A search that may become long compares the experts' answers before its first iteration."""
    longest = {"optimizer__max_iterations": 30, "optimizer__patience": 1}
    command = searches.arguments(
        tmp_path, tiny_llama, tiny_pool, engine__precision="auto", **longest, test="false"
    )
    done = searches.run(command)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "search" / "run"
    state = json.loads((folder / "state.json").read_text())
    found, experts = state["precision"], state["own"]
    assert found["answers"] == 12 * experts
    quick = found["agreement"] >= 0.98
    assert found["search"] == ("bfloat16" if quick else "float32")
    assert state["identity"].get(PRECISION_KEY) == ("bfloat16" if quick else None)
    assert ("precision" in state["metrics"]) == quick
    assert f"engine.precision=auto: {found['search']}" in (folder / "log.txt").read_text()
