"""Racing: what it may never change, what it saves, and in searches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
from hydra import compose, initialize_config_dir

from swarm._util.files import conf_folder
from swarm.runs.folder import read_state
from swarm.runs.verdict import read_verdict
from swarm.search import build_run

DEV, ITERATIONS = 40, 10
RULES = {"off": {}, "exact": {"racing.chunk": 4}}


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path) -> Any:
    """Runs a search with a rule, gives its folder and state; none is run twice."""
    place = tmp_path_factory.mktemp("racing")
    searches.choice_file(place / "tiny.json", dev=DEV, test=4)

    def run(rule: str, name: str = "", **more: Any) -> tuple[Path, Any]:
        keys: dict[str, Any] = {
            "racing": rule,
            "optimizer__max_iterations": ITERATIONS,
            "optimizer__patience": 50,
            "optimizer__repel": 0,
            "test": "false",
            "seed": 0,
            **RULES[rule],
            **more,
        }
        folder = place / "search" / (name or rule)
        if not folder.exists():
            command = searches.arguments(place, tiny_llama, tiny_pool, folder.name, **keys)
            with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                made, config = build_run(compose("search", overrides=command))
            made.search(config)
        return folder, read_state(folder)

    return run


BESTS = ("global_best", *(f"particle_{i}/personal_best" for i in range(6)))


def test_an_exact_race_changes_nothing_but_the_global_worst(raced: Any) -> None:
    (plain, theirs), (exact, ours) = raced("off"), raced("exact")
    assert len(ours["rounds"]) == len(theirs["rounds"]) >= ITERATIONS
    for mine, other in zip(ours["rounds"], theirs["rounds"], strict=True):
        assert json.dumps(mine["positions"]) == json.dumps(other["positions"])
        for u, full in zip(mine["utilities"], other["utilities"], strict=True):
            assert u in (None, full)
    pads = [json.loads((f / "utility_scratchpad.json").read_text()) for f in (exact, plain)]
    for name in ("g", "g_history", *(f"particle_{i}_best" for i in range(6))):
        assert pads[0][name] == pads[1][name]
    for name in BESTS:
        assert searches.tree(exact / name) == searches.tree(plain / name)
    assert read_verdict(ours).cost < read_verdict(theirs).cost  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", RULES)
def test_prompts_add_up(raced: Any, rule: str) -> None:
    found, known = raced(rule)[1], set()
    for entry in found["rounds"]:
        asked: dict[Any, int] = {}
        for row, count in zip(map(tuple, entry["positions"]), entry["items_scored"], strict=True):
            if row not in known:
                asked[row] = max(count, asked.get(row, 0))
        assert entry["prompts_scored"] == sum(asked.values())
        assert entry["prompts_scored"] + entry["prompts_saved"] == len(asked) * DEV
        known |= {row for row, count in asked.items() if count == DEV}
    costs = read_verdict(found).costs  # type: ignore[union-attr]
    for name in ("prompts_scored", "prompts_saved"):
        assert costs[name] == sum(entry[name] for entry in found["rounds"])
    assert (costs["prompts_saved"] > 0) == (rule != "off")
    assert found["rounds"][0]["prompts_saved"] == 0, "the first iteration was raced"


def test_nothing_comes_of_a_partial_score(raced: Any) -> None:
    folder, found = raced("exact")
    pad, stopped = json.loads((folder / "utility_scratchpad.json").read_text()), 0
    for number, entry in enumerate(found["rounds"]):
        rows = searches.answers(folder, number)
        for i, (u, count) in enumerate(zip(entry["utilities"], entry["items_scored"], strict=True)):
            mine = rows[str(i)]
            assert (u is None) == (count < DEV) and len(mine) == count
            assert [row["id"] for row in mine] == sorted(row["id"] for row in mine)
            if u is None:
                history = pad[f"particle_{i}_history"]
                stopped += history[number] == history[number - 1]
            else:
                assert u == pytest.approx(np.mean([row["value"] for row in mine]))
    assert stopped == sum(u is None for entry in found["rounds"] for u in entry["utilities"]) > 0
    for name in BESTS:
        assert len((folder / name / "answers_dev.jsonl").read_text().splitlines()) == DEV


def test_processes_race_alike(raced: Any) -> None:
    processes = {"executor": "processes", "executor.workers": 2, "executor.threads": 1}
    rounds = raced(
        "exact", "processes", **processes, job__particles=5, optimizer__max_iterations=4
    )[1]["rounds"]
    assert rounds == raced("exact")[1]["rounds"][: len(rounds)]
    assert any(None in entry["utilities"] for entry in rounds)
