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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("racing")
    searches.choice_file(folder / "tiny.json", dev=DEV, test=4)
    return folder


@pytest.fixture(scope="module")
def search(place: Path, tiny_llama: Path, tiny_pool: Path) -> Any:
    """Runs a search under a name, gives its folder; the same name is not run again."""

    def run(name: str, **more: Any) -> Path:
        keys = {"optimizer__max_iterations": ITERATIONS, "optimizer__patience": 50, "test": "false"}
        command = searches.arguments(place, tiny_llama, tiny_pool, name, **{**keys, **more})
        if not (place / "search" / name).exists():
            with initialize_config_dir(str(conf_folder()), version_base="1.3"):
                made, config = build_run(compose("search", overrides=command))
            made.search(config)
        return place / "search" / name

    return run


def state(folder: Path) -> Any:
    return read_state(folder)


def raced(search: Any, seed: int, rule: str, **more: Any) -> Path:
    more = {"seed": seed, "racing": rule, "optimizer__repel": 0, **more}
    return search(f"{rule}_{seed}", **more, **({} if rule == "off" else {"racing.chunk": 4}))


def test_an_exact_race_changes_nothing_but_the_global_worst(search: Any) -> None:
    plain, exact = (raced(search, 0, rule) for rule in ("off", "exact"))
    ours, theirs = state(exact), state(plain)
    assert len(ours["rounds"]) == len(theirs["rounds"]) >= ITERATIONS
    for mine, other in zip(ours["rounds"], theirs["rounds"], strict=True):
        assert json.dumps(mine["positions"]) == json.dumps(other["positions"])
        for u, full in zip(mine["utilities"], other["utilities"], strict=True):
            assert u in (None, full)
    pads = [json.loads((f / "utility_scratchpad.json").read_text()) for f in (exact, plain)]
    bests = ["g", "g_history", *(f"particle_{i}_best" for i in range(6))]
    assert [pads[0][name] for name in bests] == [pads[1][name] for name in bests]
    for name in ("global_best", *(f"particle_{i}/personal_best" for i in range(6))):
        assert searches.tree(exact / name) == searches.tree(plain / name)
    assert read_verdict(ours).cost < read_verdict(theirs).cost


@pytest.mark.parametrize("rule", ["off", "exact", "z"])
def test_prompts_add_up(search: Any, rule: str) -> None:
    found, known = state(raced(search, 0, rule)), set()
    for entry in found["rounds"]:
        rows = [tuple(row) for row in entry["positions"]]
        asked: dict[Any, int] = {}
        for row, count in zip(rows, entry["items_scored"], strict=True):
            if row not in known:
                asked[row] = max(count, asked.get(row, 0))
        assert entry["prompts_scored"] == sum(asked.values())
        assert entry["prompts_scored"] + entry["prompts_saved"] == len(asked) * DEV
        known |= {row for row, count in asked.items() if count == DEV}
    for name in ("prompts_scored", "prompts_saved"):
        assert read_verdict(found).costs[name] == sum(entry[name] for entry in found["rounds"])
    assert (read_verdict(found).costs["prompts_saved"] > 0) == (rule != "off")
    assert found["rounds"][0]["prompts_saved"] == 0, "the first iteration was raced"


@pytest.mark.parametrize("rule", ["exact", "z"])
def test_nothing_comes_of_a_partial_score(search: Any, rule: str) -> None:
    folder = raced(search, 0, rule)
    found = state(folder)
    stopped = 0
    for number, entry in enumerate(found["rounds"]):
        rows = searches.answers(folder, number)
        for i, (u, count) in enumerate(zip(entry["utilities"], entry["items_scored"], strict=True)):
            mine = rows[str(i)]
            assert (u is None) == (count < DEV) and len(mine) == count
            assert [row["id"] for row in mine] == sorted(row["id"] for row in mine)
            if u is None:
                stopped += 1
            else:
                assert u == pytest.approx(np.mean([row["value"] for row in mine]))
    assert stopped
    for name in ("global_best", *(f"particle_{i}/personal_best" for i in range(6))):
        lines = (folder / name / "answers_dev.jsonl").read_text().splitlines()
        assert len(lines) == DEV
    pad = json.loads((folder / "utility_scratchpad.json").read_text())
    for i in range(6):
        history = pad[f"particle_{i}_history"]
        for t, entry in enumerate(found["rounds"]):
            if entry["utilities"][i] is None:
                assert history[t] == history[t - 1]


def test_processes_race_alike(search: Any) -> None:
    one = raced(search, 0, "exact", optimizer__max_iterations=4)
    many = {"racing": "exact", "racing.chunk": 4, "seed": 0, "optimizer__repel": 0}
    many |= {"executor": "processes", "executor.workers": 2, "executor.threads": 1}
    other = search("processes", **many, job__particles=5, optimizer__max_iterations=4)
    rounds = state(other)["rounds"]
    assert rounds == state(one)["rounds"][: len(rounds)]
    assert any(None in entry["utilities"] for entry in rounds)
