"""Studies over tasks, methods, budgets and seeds: run small by the command line, and analysed."""

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import yaml

from swarm.errors import UserError
from swarm.report.charts import render_image
from swarm.report.document import Chart, Series
from swarm.stats.significance import exact_sign_flip_p
from swarm.studies import suite_analysis
from swarm.studies.suite import (
    Suite,
    cell_words,
    describe_missing_time,
    find_missing,
    list_cells,
    read_suite,
    result_path,
    select_cells,
)
from swarm.studies.suite_runner import write_result

SUITES = sorted((searches.ROOT / "conf" / "suite").glob("*.yaml"))

GIVEN: dict[str, Any] = {
    "budgets": [6, 8],
    "words": ["ensemble=0"],
    "references": ["a"],
    "tasks": {
        "one": {"words": ["task=nlgraph_mini"], "dev": 4},
        "two": {"words": ["task=mmlu"], "dev": 5},
    },
    "methods": {"a": {"words": ["optimizer=recipes"]}, "b": {}, "c": {"varies": []}},
}


def made(folder: Path, **changes: Any) -> Suite:
    """A suite from a yaml in `folder`, whose results lie there too."""
    path = folder / "mine.yaml"
    given = {**GIVEN, "seeds": 2, "results": str(folder / "results"), **changes}
    path.write_text(yaml.safe_dump(given))
    return read_suite(str(path), runs=str(folder / "search"))


def command(folder: Path, base: Path, pool: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "swarm.compare_methods",
        "suite=smoke",
        "seeds=1",
        f"folder={folder / 'search'}",
        f"results={folder / 'results'}",
        "model=local",
        f"model.path={base}",
        f"pool.folder={pool}",
        *words,
    ]


def run(line: list[str], timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        line,
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        capture_output=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_that_ships_reads(path: Path) -> None:
    suite = read_suite(path.stem)
    every = list_cells(suite)
    assert len(every) == len(set(every)) and every[0].task == suite.tasks[0]
    seeds = [cell.seed for cell in every if cell.seed is not None]
    assert seeds == sorted(seeds), "by seed first, so that a part is balanced"
    assert len({result_path(suite, cell) for cell in every}) == len(every)
    lines = path.read_text().splitlines()
    keys = [line for line in lines if line[:1].isalpha() and line != "methods:"]
    assert lines[0][0] == "#" and all("  # " in line for line in keys), "each key is explained"


def test_cells_run_once_for_what_they_do_not_depend_on(tmp_path: Path) -> None:
    suite = made(tmp_path, methods={**GIVEN["methods"], "b": {"skip": ["two"]}})
    names = [f"{cell.task.name}/{cell.name}" for cell in list_cells(suite)]
    assert names[:4] == [
        "one/a_dev4_budget6_seed0",
        "one/b_dev4_budget6_seed0",
        "one/c_dev4",
        "one/a_dev4_budget8_seed0",
    ]
    assert names.count("one/c_dev4") == 1 and not any("two/b" in name for name in names)
    assert len(names) == 2 * 2 * 2 + 2 * 2 + 2
    part = select_cells(suite, ["two", "seed1", 8])
    assert [cell.name for cell in part] == ["c_dev5", "a_dev5_budget8_seed1"]
    assert cell_words(suite, part[1]) == [
        "ensemble=0",
        "task=mmlu",
        "++task.dev_limit=5",
        "++task.dev_seed=1",
        "optimizer=recipes",
    ]


def test_the_time_of_what_is_missing_is_that_of_stored_results(tmp_path: Path) -> None:
    suite = made(tmp_path, seeds=3)
    every = list_cells(suite)
    (words,) = describe_missing_time(suite, every)
    listed = "one budget 6: 6, one budget 8: 6, no budget: 2, two budget 6: 6, two budget 8: 6"
    assert words.startswith("no time for 26 of the 26 missing results (")
    assert sorted(re.findall(r"\((.*)\)", words)[0].split(", ")) == sorted(listed.split(", "))
    for seed, seconds in ((0, 60.0), (1, 180.0)):
        cell = next(c for c in every if (c.method.name, c.budget, c.seed) == ("a", 6, seed))
        path = result_path(suite, cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"words": cell_words(suite, cell), "cpu_seconds": seconds}))
    missing = find_missing(suite, every)
    first, second, third = describe_missing_time(suite, missing)
    assert first.startswith("about 2 min 00 s of CPU time for 1 of the 24 missing results, by the")
    assert "of other seeds," in first
    assert second.startswith("about 6 min 00 s of CPU time for 3 of") and "other methods" in second
    assert third.startswith("no time for 20 of the 24")


def test_dev_items_are_a_dimension(tmp_path: Path) -> None:
    suite = made(tmp_path, dev_items=[3, 9], seeds=1)
    assert {(cell.task.name, cell.dev) for cell in list_cells(suite)} == {
        (task, dev) for task in ("one", "two") for dev in (3, 9)
    }


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budgets": [0]}, "budgets=[0] must be a list of positive integers"),
        ({"bugets": [1]}, "unknown key bugets; allowed: budgets"),
        ({"unit": "hours"}, "unit=hours must be positions or prompts"),
        ({"references": ["d"]}, "references has 'd', which is not one of"),
        ({"tasks": {"one": {"words": []}}}, "tasks.one needs all of: words, dev"),
        ({"methods": {"a": {"kind": "dance"}}}, "methods.a: kind must be one of search, finetune"),
        ({"methods": {"a": {"skip": ["x"]}}}, "methods.a: 'x' is not allowed there"),
        ({"methods": {"one": {}}}, "'one' names more than one"),
        ({"methods": {"a": {"word": []}}}, "methods.a has 'word'; allowed: kind, words"),
        ({"seeds": 0}, "seeds=0: must be an integer"),
    ],
)
def test_a_wrong_suite_is_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error.replace("[", r"\[")):
        made(tmp_path, **changes)


def test_only_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="only=three: not a task or method of the suite; allowed: tasks one"
    ):
        select_cells(made(tmp_path), ["three"])
    with pytest.raises(UserError, match="no such suite; allowed: black_box, dev_items, over"):
        read_suite("large")


def record(suite: Suite, values: list[str | list[float]], **more: Any) -> None:
    """Write results, a value list for each cell that `more` leaves (method=, task=, budget=)."""
    some = [
        cell
        for cell in list_cells(suite)
        if all(
            more.get(key) in (None, value)
            for key, value in (
                ("task", cell.task.name),
                ("method", cell.method.name),
                ("budget", cell.budget),
            )
        )
    ]
    assert len(some) == len(values)
    for cell, mine in zip(some, values, strict=True):
        numbers = [float(v) for v in mine]
        write_result(
            result_path(suite, cell),
            {
                "method": cell.method.name,
                "seed": cell.seed,
                "words": cell_words(suite, cell),
                "start": {"expert": "amber", "dev": 0.5, "test": 0.25, "values": "01"},
                "constant": {"answer": "Yes", "test": 0.125, "by_domain": 0.25},
                "dev": more.get("dev", 0.75),
                "dev_no_gradient": more.get("dev_no_gradient"),
                "test": round(float(np.mean(numbers)), 6),
                "values": mine,
                "found": "1.00 amber",
                "prompt_equivalents": 24,
                "seconds": 2.0,
                "cpu_seconds": 1.0,
                "test_digest": "t",
                "experts_digest": "e",
                "base_digest": "b",
            },
        )


def test_numbers_are_those_by_hand(tmp_path: Path) -> None:
    """Two methods, one task, two seeds of eight binary items."""
    suite = made(
        tmp_path, budgets=[6], tasks={"one": GIVEN["tasks"]["one"]}, methods={"a": {}, "b": {}}
    )
    record(suite, ["00000000", "00000000"], method="a")
    record(suite, ["11111111", "11111110"], method="b", dev=1.0, dev_no_gradient=0.5)
    found = suite_analysis.analyse_suite(suite)
    assert (found["there"], found["expected"]) == (4, 4)
    (block,) = found["blocks"]
    a, b = block["methods"]
    assert (a["test"], b["test"], b["tests"]) == (0, 15 / 16, [1.0, 0.875])
    assert a["gap"] == 0.75 and b["gap"] == 1 - 15 / 16
    against = b["against"]["a"]
    # Differences 1 (seven times) and 1/2: all signs alike, 2 of 2^8 ways are as far from 0.
    assert against["p"] == pytest.approx(2 / 2**8) == against["p_holm"]
    assert against["difference"] == 15 / 16 and a["against"] == {}
    (summary,) = found["summaries"]
    assert [row["no_gradient_gap"] for row in summary["methods"]] == [None, 0.5 - 15 / 16]
    assert "-0.438" in "\n".join(suite_analysis.format_summary(found))
    ranks = {row["method"]: row["rank"]["rank"] for row in summary["methods"]}
    assert ranks == {"a": 2, "b": 1}
    counts = {row["method"]: row["against"]["a"] for row in summary["methods"]}
    assert counts["b"] == {"tasks": 1, "better": 1, "worse": 0}
    assert block["constant"] == {"answers": ["Yes"], "test": 0.125, "by_domain": 0.25}
    assert block["best_expert"] == {"names": ["amber"], "dev": 0.5, "test": 0.25}


def test_holm_is_over_methods_and_tasks(tmp_path: Path) -> None:
    suite = made(tmp_path, seeds=1, budgets=[6], methods={"a": {}, "b": {}, "d": {}})
    n = 10
    wins = {("one", "b"): 10, ("one", "d"): 8, ("two", "b"): 6, ("two", "d"): 0}
    for task in ("one", "two"):
        record(suite, ["0" * n], task=task, method="a")
        for method in ("b", "d"):
            won = wins[task, method]
            record(suite, ["1" * won + "0" * (n - won)], task=task, method=method)
    found = suite_analysis.analyse_suite(suite)
    pairs = {
        (block["task"], row["method"]): row["against"]["a"]
        for block in found["blocks"]
        for row in block["methods"]
        if row["method"] != "a"
    }
    plain = {key: 2 / 2**won if won else 1.0 for key, won in wins.items()}
    assert {key: pair["p"] for key, pair in pairs.items()} == pytest.approx(plain)
    expected = {
        ("one", "b"): 4 * 2 / 2**10,
        ("one", "d"): 3 * 2 / 2**8,
        ("two", "b"): 2 * 2 / 2**6,
        ("two", "d"): 1.0,
    }
    assert {key: pair["p_holm"] for key, pair in pairs.items()} == pytest.approx(expected)
    (summary,) = found["summaries"]
    rows = {row["method"]: row for row in summary["methods"]}
    assert rows["b"]["against"]["a"] == {"tasks": 2, "better": 1, "worse": 0}
    # On the task two a and d are equal: ranks 1, 2.5, 2.5 there, and 3, 1, 2 on the task one.
    assert {name: row["rank"]["rank"] for name, row in rows.items()} == {
        "a": 2.75,
        "b": 1.0,
        "d": 2.25,
    }


def test_partial_results_rank_on_common_seeds(tmp_path: Path) -> None:
    suite = made(
        tmp_path,
        budgets=[6],
        tasks={"one": GIVEN["tasks"]["one"]},
        methods={"a": {}, "b": {}, "c": {"varies": []}},
    )
    record(suite, ["0000", "1111"], method="a")
    record(suite, ["0011", "0000"], method="b")
    record(suite, ["0001"], method="c")
    result_path(suite, select_cells(suite, ["b", "seed1"])[-1]).unlink()
    found = suite_analysis.analyse_suite(suite)
    rows = {row["method"]: row for row in found["blocks"][0]["methods"]}
    assert [rows[name]["seeds"] for name in "abc"] == [2, 1, 1]
    assert rows["b"]["against"]["a"]["seeds"] == 1 and rows["c"]["test"] == 0.25
    ranks = {row["method"]: row["rank"]["rank"] for row in found["summaries"][0]["methods"]}
    assert ranks == {"a": 3, "b": 1, "c": 2}, "by seed 0, which all have"


def test_only_methods_with_results_on_the_most_tasks_are_ranked(tmp_path: Path) -> None:
    """b lacks a task; d does not support it, and keeps its rank; a cell names its missing seeds."""
    suite = made(
        tmp_path,
        picture=str(tmp_path / "ranks.svg"),
        methods={"a": {}, "b": {}, "d": {"skip": ["two"]}, "e": {}},
    )
    record(suite, ["0001", "0001"], task="one", budget=6, method="a")
    record(suite, ["1111", "1111"], task="one", budget=6, method="b")
    record(suite, ["0000", "0000"], task="one", budget=6, method="d")
    record(suite, ["0011", "0011"], task="one", budget=6, method="e")
    record(suite, ["0011", "0011"], task="two", budget=6, method="a")
    record(suite, ["0001", "0001"], task="two", budget=6, method="e")
    record(suite, ["0001", "0001"], task="two", budget=8, method="e")
    result_path(suite, select_cells(suite, ["one", "b", "seed0", 6])[0]).unlink()
    found = suite_analysis.analyse_suite(suite)
    summary, alone = found["summaries"]
    assert [row["rank"] for row in alone["methods"]] == [None]
    picture = suite_analysis.render_picture(suite, found)
    assert picture and b"6 positions" in picture and b"8 positions" not in picture
    ranks = {row["method"]: row["rank"] and row["rank"]["rank"] for row in summary["methods"]}
    # Without b: ranks 2, 3, 1 of a, d, e by both seeds of the task one; 1 and 2 of a, e on two.
    assert ranks == {"a": 1.5, "b": None, "d": 3, "e": 1.5}
    lines = suite_analysis.format_summary(found)
    first = lines[: lines.index("**Budget: 8 positions.**")]
    cells = {line.split("|")[1].strip(): line.replace(" ", "") for line in first if "|" in line}
    assert cells["b"] == "|b|**1.000**(1)||" and cells["d"] == "|d|0.000||"
    assert lines[0].startswith("13 of 28 results; 2 seeds planned. In parentheses: the seeds done")
    assert "Only methods with results on the most tasks are ranked" in lines[-1]
    report = "\n".join(suite_analysis.format_report(found)).replace(" ", "")
    assert "|b|1of2|" in report and "|a|2of2|" in report


def test_results_of_other_items_are_refused(tmp_path: Path) -> None:
    suite = made(
        tmp_path,
        seeds=1,
        budgets=[6],
        tasks={"one": GIVEN["tasks"]["one"]},
        methods={"a": {}, "b": {}},
    )
    record(suite, ["01"], method="a")
    record(suite, ["01"], method="b")
    path = result_path(suite, list_cells(suite)[1])
    path.write_text(path.read_text().replace('"test_digest": "t"', '"test_digest": "u"'))
    with pytest.raises(UserError, match="its results are of different test items"):
        suite_analysis.analyse_suite(suite)
    other = made(
        tmp_path,
        seeds=1,
        budgets=[6],
        tasks={"one": GIVEN["tasks"]["one"]},
        methods={"a": {"words": ["optimizer=cmaes"]}, "b": {}},
    )
    with pytest.raises(UserError, match=r"seed0\.json and 0 more have other settings"):
        find_missing(other, list_cells(other))


def test_what_is_written(tmp_path: Path) -> None:
    """The page's part between its lines, the picture, and a table for each task and budget."""
    page, picture = tmp_path / "page.md", tmp_path / "ranks.svg"
    suite = made(tmp_path, seeds=1, page=str(page), picture=str(picture))
    assert suite_analysis.analyse_suite(suite)["blocks"] == []
    for task in ("one", "two"):
        record(suite, ["0011"] * 2, task=task, method="a")
        record(suite, ["0111"] * 2, task=task, method="b")
        record(suite, ["1111"], task=task, method="c")
    page.write_text("before\n<!-- suite mine: begin -->\nold\n<!-- suite mine: end -->\nafter\n")
    found = suite_analysis.analyse_suite(suite)
    assert set(suite_analysis.write_analysis(suite, found)) >= {page, picture}
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| c  " in text and "**1.000**" in text and "10 of 10 results" in text
    suite_analysis.write_analysis(suite, found)
    assert page.read_text() == text
    report = (suite.results / "README.md").read_text()
    assert "## two, 5 dev items, budget 8" in report and "best constant answer (Yes)" in report
    assert json.loads((suite.results / "analysis.json").read_text()) == found
    assert picture.read_text().count('id="series-') == 2


def test_curves_are_against_dev_items(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    suite = made(
        tmp_path,
        seeds=1,
        budgets=[6],
        dev_items=[10, 20, 80],
        picture=str(picture),
        tasks={"one": GIVEN["tasks"]["one"]},
        methods={"a": {}, "b": {}},
    )
    record(suite, ["0000", "0001", "0011"], method="a")
    record(suite, ["0111"] * 3, method="b")
    found = suite_analysis.analyse_suite(suite)
    tests = {row["method"]: row["mean_test"] for row in found["summaries"][2]["methods"]}
    assert tests == {"a": 0.5, "b": 0.75} and found["summaries"][2]["dev_items"] == 80
    suite_analysis.write_analysis(suite, found)
    drawn = picture.read_text()
    assert all(f">{dev}</text>" in drawn for dev in (10, 20, 80))


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    series = Series("a", [10, 20, 40], [1, 2, 3])
    drawn = render_image(Chart("k", "t", "x", "y", [series], log=True), "svg").decode()
    line = drawn.partition('id="series-0"')[2].partition('d="')[2].partition('"')[0]
    places = [float(part.split()[0]) for part in line.replace("M", "L").split("L")[1:]]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)


def test_exact_flips_are_the_enumerated_ones() -> None:
    draw = np.random.default_rng(3)
    for gains in (draw.integers(-3, 4, 11) / 3, draw.integers(-1, 2, 12), np.zeros(4)):
        signs = np.array(list(itertools.product((-1, 1), repeat=len(gains))))
        sums = np.abs((signs * gains).sum(axis=1))
        assert exact_sign_flip_p(np.asarray(gains)) == pytest.approx(
            (sums >= abs(gains.sum()) - 1e-9).mean()
        )
    real = draw.normal(0.4, 1.0, 14)
    signs = np.array(list(itertools.product((-1, 1), repeat=14)))
    p = (np.abs(signs @ real) >= abs(real.sum())).mean()
    assert exact_sign_flip_p(real) == pytest.approx(p, rel=0.05)
    # McNemar's exact test: 9 won, 1 lost.
    binary = np.array([1.0] * 9 + [-1.0] + [0.0] * 30)
    assert exact_sign_flip_p(binary) == pytest.approx(2 * (1 + 10) / 2**10)
    assert exact_sign_flip_p(np.ones(400)) == pytest.approx(2.0**-399)


def test_a_suite_runs_and_goes_on_after_a_kill(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    line = command(tmp_path, tiny_llama, tiny_pool, "parallel=2", "only=[letters,8]")
    results = tmp_path / "results" / "letters"
    first = subprocess.Popen(
        line,
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not list(results.glob("*.json")) and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    kept = {path: path.read_bytes() for path in results.glob("*.json")}
    assert first.returncode and 1 <= len(kept) < 5
    again = run(line)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 5 results exist" in again.stderr
    assert again.stderr.count(": begins") == 5 - len(kept)
    assert {path: path.read_bytes() for path in kept} == kept
    names = sorted(path.stem for path in results.glob("*.json"))
    assert names == [
        "finetune_dev10_budget8_seed0",
        "gradient_dev10_budget8_seed0",
        "random_dev10_budget8_seed0",
        "recipes_dev10_budget8_seed0",
        "vote_dev10",
    ]
    found = {name: json.loads((results / f"{name}.json").read_text()) for name in names}
    tuned, descended, searched, *_ = found.values()
    assert descended["gradients"] > 0 and 50 < descended["prompt_equivalents"] <= 80
    assert searched["prompt_equivalents"] == searched["prompts"] == 80
    assert len(searched["coefficients"]) == 4 and len(searched["values"]) == 20
    # Four experts on ten items choose the start; eight examples are learnt from, two held out.
    assert tuned["prompts"] + 3 * tuned["gradients"] == tuned["prompt_equivalents"] <= 80
    assert tuned["prompt_equivalents"] > 40 + 3 and tuned["start"] == searched["start"]
    assert len({one["dev_digest"] for one in (tuned, searched)}) == 1
    assert not list((tmp_path / "search").glob("*/letters/*")), "run folders are not kept"
    assert "| finetune " in again.stdout and "5 of 15 results" in again.stdout
    third = run([*line, "hours=0"])
    assert third.returncode == 0 and third.stdout == again.stdout, third.stderr


def test_time_and_failures(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    """No cell begins after the limit; a method that fails is named, and all others run."""
    late = run(command(tmp_path, tiny_llama, tiny_pool, "hours=0"))
    assert late.returncode == 0 and "time is up" in late.stderr, late.stderr
    assert "begins" not in late.stderr and "0 of 15 results" in late.stdout
    mine = yaml.safe_load((searches.ROOT / "conf" / "suite" / "smoke.yaml").read_text())
    mine["methods"]["random"]["words"] = ["optimizer=random", "optimizer.particles=2"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    line = command(tmp_path, tiny_llama, tiny_pool, "only=[text,8]")
    line[3] = f"suite={tmp_path / 'mine.yaml'}"
    found = run(line)
    assert found.returncode == 1 and len(found.stderr.strip().splitlines()[-1]) < 400
    assert "1 failed, the first is text/random_dev6_budget8_seed0: " in found.stderr
    assert sorted(path.stem for path in (tmp_path / "results" / "text").glob("*")) == [
        "gradient_dev6_budget8_seed0",
        "recipes_dev6_budget8_seed0",
    ]
