"""The end of a search: what is confirmed, judged, voted and told, and what it may cost."""

import gzip
import json
import random
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import yaml

from swarm._util.files import read_gzip_json
from swarm.errors import UserError
from swarm.loop.evaluator import split_dev_holdout
from swarm.loop.score_cache import ScoreCache
from swarm.merging.positions import describe_position, position_label
from swarm.runs.folder import read_state
from swarm.runs.verdict import describe_difference, read_verdict
from swarm.stats.significance import PairedTest, interval_over_seeds, smallest_gain
from swarm.studies.runner import lock_study_folder
from swarm.tasks.base import Score

Search = Callable[..., tuple[Path, dict[str, Any], str]]


@pytest.fixture
def search(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> Search:
    """Run a small search with these keys; give its folder, its state and what it printed."""

    def run(name: str = "run", **keys: Any) -> tuple[Path, dict[str, Any], str]:
        done = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool, name, **keys))
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "search" / name
        report = unescape((folder / "report.html").read_text())
        return folder, read_state(folder) or {}, " ".join(f"{done.stdout} {report}".split())

    return run


def test_a_kept_part_of_dev_confirms_beside_noise_floor_and_vote(
    search: Search, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    folder, state, output = search(confirm=0.34)
    verdict = read_verdict(state)
    assert verdict and verdict.held_out and verdict.noise_floor and verdict.vote
    searched = {row["id"] for rows in searches.answers(folder, 0).values() for row in rows}
    kept_files = list((folder / "answers").glob("confirm_*.json.gz"))
    assert len(searched) == 8 and verdict.held_out.found.n == 4
    assert 1 <= len(kept_files) <= 2, "best initial and best found"
    for file in kept_files:
        assert not searched & {row["id"] for row in read_gzip_json(file)}
    assert "4 held-out dev items" in output and "Noise floor" in output
    assert verdict.noise_floor.n == 8 and 0 <= verdict.noise_floor.changed_answers <= 8
    assert list((folder / "answers").glob("again_*.json.gz"))
    by_size = verdict.vote.dev_by_size
    assert len(by_size) == 3, "ensemble=3 is the limit"
    assert len(verdict.vote.members) == by_size.index(max(by_size)) + 1
    assert by_size[0] == pytest.approx(verdict.dev.utility)
    content = yaml.safe_load((folder / "ensemble.yaml").read_text())
    assert len(content["members"]) == len(verdict.vote.members)
    for member in content["members"]:
        note = json.loads((folder / member["folder"] / "swarm.json").read_text())
        assert note["validation_utility"] == member["utility"]
    # Folders of a single search and of several are kept apart.
    with pytest.raises(UserError, match="contains a single search"), lock_study_folder(folder):
        pass
    several = tmp_path / "search" / "several"
    several.mkdir()
    (several / ".lock").touch()
    done = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool, "several"))
    assert done.returncode and "is the folder of several searches" in done.stderr
    assert not (several / "rounds.jsonl").exists()


def test_kept_items_choose_among_finalists(search: Search) -> None:
    """By successive halving: whoever was asked all kept items is no better than the chosen one."""
    folder, state, output = search(confirm=0.5, choose="kept", optimizer__max_iterations=2)
    iteration, particle = state["chosen"]["ending"]
    best = state["rounds"][iteration]["positions"][particle]
    saved = json.loads((folder / "global_best" / "swarm.json").read_text())
    assert saved["coefficients"] == best == read_verdict(state).found.position  # type: ignore[union-attr]
    asked: dict[str, list[float]] = {}
    for file in (folder / "answers").glob("confirm_*.json.gz"):
        rows = read_gzip_json(file)
        asked.setdefault(str(sorted(row["id"] for row in rows)), []).append(len(rows))
    assert sorted(map(sum, asked.values()))[-1] >= 2 * 5, "several finalists met the first items"
    assert "It was chosen among" in output


def test_a_budget_ends_a_search_in_mid_iteration(search: Search) -> None:
    folder, state, _ = search(budget=12 * 9, test="false")
    asked = [entry["prompts_scored"] for entry in state["rounds"]]
    assert asked == [12 * 6, 12 * 3] and "budget of 108" in state["finished"]
    utilities = state["rounds"][1]["utilities"]
    assert [u is not None for u in utilities] == [True] * 3 + [False] * 3
    assert [entry["beyond_budget"] for entry in state["rounds"]] == [0, 3]
    before = searches.tree(folder)
    search(budget=12 * 9, test="false")
    assert searches.tree(folder) == before


def test_a_time_limit_ends_a_search_in_time_for_its_test(search: Search) -> None:
    """It ends by what the record has of the clock, and a larger limit continues it."""
    endless = {"optimizer__max_iterations": 9999, "optimizer__patience": 9999}
    _, state, _ = search(minutes=1e-6, **endless)
    assert len(state["rounds"]) == 1 and read_verdict(state).tested  # type: ignore[union-attr]
    folder, state, output = search(minutes=0.08, **endless)
    assert "to end after 4.8 s" in output and len(state["rounds"]) > 2
    reason = "time limit of 0.08 minutes; a larger minutes= continues"
    assert state["finished"] == reason and f"search ends: {reason}" in output
    assert sum(entry["seconds"] for entry in state["rounds"]) < 4.8
    before = searches.tree(folder)
    for minutes in (0.08, 0.01):
        assert search(minutes=minutes, **endless)[1] == state
        assert searches.tree(folder) == before
    found = search(minutes=0.12, **endless)[1]["rounds"]
    assert len(found) > len(state["rounds"]) and found[: len(state["rounds"])] == state["rounds"]


def test_what_another_search_asked_is_not_asked_again(search: Search, tmp_path: Path) -> None:
    shared = {"shared": tmp_path / "answers", "test": "false"}
    with_store = search("run", **shared)[1]["rounds"]
    without = search("alone", test="false")[1]["rounds"]
    for one, two in zip(with_store, without, strict=True):
        assert one["utilities"] == two["utilities"] and one["positions"] == two["positions"]
    start = search("other", seed=7, **shared)[1]["rounds"][0]
    assert start["prompts_scored"] == 12 * 6, "charged for all particles"
    assert start["prompts_shared"] >= 12 * 4, "the experts are known"


SCORES = [Score(n / 100, f"A{n}", f"{n} text " * 9, "part", {"x": float(n)}) for n in range(100)]


@pytest.fixture
def shared(tmp_path: Path) -> tuple[ScoreCache, Path]:
    """A cache with scores of one position, and their file."""
    cache = ScoreCache(tmp_path)
    cache.set_context({"pool weights": "one"})
    cache.save_scores([0.5], "dev", range(100), SCORES)
    (file,) = tmp_path.glob("*/*.gz")
    return cache, file


def test_a_store_knows_what_its_answers_depend_on(shared: tuple[ScoreCache, Path]) -> None:
    cache, items = shared[0], range(100)
    assert cache.load_scores([0.5], "dev", items) == SCORES
    assert cache.load_scores([0.5], "test", items) is None
    assert cache.load_scores([0.5], "dev", items[::-1]) is None
    assert cache.load_scores([0.6], "dev", items) is None
    cache.save_scores([0.6], "dev", [0], [Score(float("-inf"), None)])
    assert cache.load_scores([0.6], "dev", [0]) is None, "not finite, and so not shared"
    cache.set_context({"pool weights": "other"})
    assert cache.load_scores([0.5], "dev", items) is None


def test_no_flipped_bit_changes_a_shared_score(shared: tuple[ScoreCache, Path]) -> None:
    cache, file = shared
    data, chance = file.read_bytes(), random.Random(0)
    for bit in chance.sample(range(8 * len(data)), 200):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert cache.load_scores([0.5], "dev", range(100)) in (None, SCORES), bit


def test_changed_shared_scores_are_evaluated_again(
    shared: tuple[ScoreCache, Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache, file = shared
    stored = json.loads(gzip.decompress(file.read_bytes()))
    for scores in ([[0.99, "A", ""], *stored["scores"][1:]], stored["scores"][:-1], None):
        changed = json.dumps({**stored, "scores": scores}).encode()
        file.write_bytes(gzip.compress(changed))
        caplog.clear()
        assert cache.load_scores([0.5], "dev", range(100)) is None
        assert f"{file.name} is damaged; evaluated again" in caplog.text


def test_dev_is_divided_in_each_part() -> None:
    items = [{"part": part} for part in ["a"] * 10 + ["b"] * 4]
    searched, kept = split_dev_holdout(items, 0.3, 5)
    assert sorted(searched + kept) == list(range(14)) and not set(searched) & set(kept)
    assert sum(place < 10 for place in kept) == 3 and sum(place >= 10 for place in kept) == 1
    assert split_dev_holdout(items, 0.3, 5) == (searched, kept) != split_dev_holdout(items, 0.3, 6)
    assert split_dev_holdout(items, 0.0, 5) == (list(range(14)), [])
    with pytest.raises(UserError, match=r"confirm=0\.3"):
        split_dev_holdout([{"part": "a"}], 0.3, 5)


def test_a_difference_in_plain_words() -> None:
    line = describe_difference(PairedTest(0.035, 0.01, 0.06, 0.004, 1000), "test items", True)
    assert line == (
        "The gain of 3.5 points on 1000 test items is distinguishable from chance "
        "(p = 0.004; 95 % interval +1 to +6)."
    )
    loss = describe_difference(PairedTest(-0.02, -0.3, 0.2, 0.4, 50), "test items", False)
    assert loss.startswith("The loss of 0.02 on 50 test items is not distinguishable")
    none = describe_difference(PairedTest(0.0, 0.0, 0.0, 1.0, 3), "test items", True)
    assert none.startswith("No difference: none of 3")


def test_what_a_test_can_show() -> None:
    # 16 to 5 of 21 changed items is p = 0.027, 15 to 6 is 0.078; 9 of 30: 8 to 1 is 0.039.
    assert smallest_gain(70, 0.3) == pytest.approx(11 / 70)
    assert smallest_gain(30, 0.3) == pytest.approx(7 / 30)
    assert smallest_gain(10, 0.3) == 0.6 and smallest_gain(5, 1.0) is None


def test_a_position_in_words() -> None:
    state = {"rows": [[1.0, 0.0], [0.5, 0.5]], "labels": ["expert", "mean of all"]}
    assert position_label(state, [0.5, 0.5]) == "mean of all"
    assert position_label(state, [0.1, 0.9]) is position_label({}, [0.5, 0.5]) is None
    names, position = ("a", "b"), [0.5, 0.5, 1.0, 0.0]
    words = describe_position(names, position, ("low", "high"))
    assert words == "low: 0.50 a + 0.50 b; high: 1.00 a"
    assert describe_position(names, [0.5, 0.5] * 2, ("low", "high")) == "0.50 a + 0.50 b"
    assert describe_position(names, position * 2, tuple("wxyz")).endswith("(mean of 4 groups)")


def test_an_interval_over_seeds_and_items() -> None:
    rng = np.random.default_rng(0)
    same = np.repeat(rng.integers(0, 2, (1, 200)), 4, axis=0).astype(float)
    apart = np.stack([np.full(200, value) for value in (0.1, 0.3, 0.5, 0.7)])
    low, high = interval_over_seeds(same)
    assert low < same.mean() < high and 0.08 < high - low < 0.2, "the items' alone"
    low, high = interval_over_seeds(apart)
    assert high - low > 0.25, "the seeds' alone"
