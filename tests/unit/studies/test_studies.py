"""Studies: what they run, and their numbers against those by hand."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.stats.significance import exact_sign_flip_p
from swarm.studies import analysis
from swarm.studies.plan import Cell, Study, read_study
from swarm.study import describe_missing, parse_words

STUDIES = sorted((conf_folder() / "study").glob("*.yaml"))

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


ONE: dict[str, Any] = {"budgets": [6], "tasks": {"one": GIVEN["tasks"]["one"]}}
TWO: dict[str, Any] = {**ONE, "methods": {"a": {}, "b": {}}}


def made(folder: Path, **changes: Any) -> Study:
    """A study from a yaml in `folder`, whose results lie there too."""
    path = folder / "mine.yaml"
    given = {**GIVEN, "seeds": 2, "results": str(folder / "results"), **changes}
    path.write_text(yaml.safe_dump(given))
    return read_study(str(path), folder=str(folder / "search"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_that_ships_reads(path: Path) -> None:
    study = read_study(path.stem)
    every = study.cells()
    assert len(every) == len(set(every)) and every[0].task == next(iter(study.file.tasks))
    seeds = [cell.seed for cell in every if cell.seed is not None]
    assert seeds == sorted(seeds), "by seed first, so that a part is balanced"
    assert len({cell.path for cell in every}) == len(every)


def test_cells_run_once_for_what_they_do_not_depend_on(tmp_path: Path) -> None:
    study = made(tmp_path, methods={**GIVEN["methods"], "b": {"skip": ["two"]}})
    names = [f"{cell.task}/{cell.name}" for cell in study.cells()]
    assert names[:4] == [
        "one/a_dev4_budget6_seed0",
        "one/b_dev4_budget6_seed0",
        "one/c_dev4",
        "one/a_dev4_budget8_seed0",
    ]
    assert names.count("one/c_dev4") == 1 and not any("two/b" in name for name in names)
    assert len(names) == 2 * 2 * 2 + 2 * 2 + 2
    part = study.select(["two", "seed1", 8])
    assert [cell.name for cell in part] == ["c_dev5", "a_dev5_budget8_seed1"]
    assert study.defining_words(part[1]) == [
        "ensemble=0",
        "task=mmlu",
        "++task.dev_limit=5",
        "++task.dev_seed=1",
        "optimizer=recipes",
    ]


def test_missing_results_have_the_time_of_stored_ones(tmp_path: Path) -> None:
    study = made(tmp_path, **ONE)
    record(study, ["01", "01"], method="a")
    remove(study, study.select(["a", "seed1"])[0])
    missing = study.missing(study.cells())
    *names, cost, time_, unknown = describe_missing(study, missing)
    assert cost == f"at most {3 * 6 * 4} prompt-equivalents on dev"
    assert names[0] == "one/b_dev4_budget6_seed0" and len(names) == 4
    assert time_.startswith("about 3 s of CPU time for 3 of the 4 missing results")
    assert unknown.startswith("no time for 1 of them (one: 1)")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budgets": [0]}, "budgets.0.=0: must be a list, each an integer, at least 1"),
        ({"bugets": [1]}, "bugets: no such key; did you mean budgets"),
        ({"unit": "hours"}, "unit=hours: must be positions or prompts"),
        ({"references": ["d"]}, "references: no method d"),
        ({"tasks": {"one": {"words": []}}}, "tasks"),
        ({"methods": {"a": {"kind": "dance"}}}, "methods"),
        ({"methods": {"a": {"skip": ["x"]}}, "references": []}, "methods.a.skip: no task x"),
        ({"methods": {"one": {}}, "references": []}, "one: names of tasks and methods must differ"),
        ({"seeds": 0}, "seeds=0: must be an integer, at least 1"),
        ({"methods": {}, "references": []}, "needs methods, or a sampler"),
    ],
)
def test_a_wrong_study_is_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error) as caught:
        made(tmp_path, **changes)
    assert "mine" in str(caught.value) and "\n" not in str(caught.value)


def test_words_are_divided_and_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only=three: not in the study; allowed: one, two, a, b"):
        made(tmp_path).select(["three"])
    with pytest.raises(UserError, match="no such study; allowed: ablation, compare, main"):
        read_study("large")
    options, rest = parse_words(["seeds=3", "only=[a,36]", "model=local", "gpus=0,1"])
    assert (options.seeds, options.only, rest) == (3, ["a", 36], ["model=local", "gpus=0,1"])
    with pytest.raises(UserError, match="parallel=0: must be an integer, at least 1"):
        parse_words(["parallel=0"])


def test_a_sampler_goes_on_by_the_results_there_are(tmp_path: Path) -> None:
    """The next settings follow from the results alone: the same at every start."""
    space = {"optimizer.inertia": [0.1, 0.2, 0.3], "optimizer.repel": [0.0, 0.05]}
    sampler = {"trials": 3, "space": space}
    given = {**ONE, "methods": {}, "references": [], "seeds": 1, "sampler": sampler}
    for number in range(3):
        study = made(tmp_path, **given)
        assert list(study.methods) == [f"trial_{n:02d}" for n in range(number + 1)]
        assert not study.sample_methods(), "nothing new before its result"
        record(study, ["01"], method=f"trial_{number:02d}", dev=number / 3)
        assert study.sample_methods() == (number < 2)
    words = study.methods["trial_02"].words
    assert words[0].startswith("optimizer.inertia=0.") and made(tmp_path, **given) == study
    assert "trial_01" in "\n".join(analysis.format_summary(analysis.analyse_study(study)))


def remove(study: Study, cell: Cell) -> None:
    """Remove a cell's line, as a user who wants it to run again."""
    path = study.results / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(one for one in lines if json.loads(one)["cell"] != cell.path))
    study.__post_init__()


def record(study: Study, values: list[str | list[float]], dev: float = 0.75, **more: Any) -> None:
    """Write results, a value list for each cell of a method= and task=."""
    no_gradient = more.pop("dev_no_gradient", None)
    some = [one for one in study.cells() if all(getattr(one, k) == v for k, v in more.items())]
    for cell, mine in zip(some, values, strict=True):
        result = {
            "method": cell.method,
            "seed": cell.seed,
            "words": study.defining_words(cell),
            "start": {"expert": "amber", "dev": 0.5, "test": 0.25, "values": "01"},
            "constant": {"answer": "Yes", "test": 0.125, "by_domain": 0.25},
            "dev": dev,
            "dev_no_gradient": no_gradient,
            "test": round(float(np.mean([float(v) for v in mine])), 6),
            "values": mine,
            "found": "1.00 amber",
            "prompt_equivalents": 24,
            "seconds": 2.0,
            "cpu_seconds": 1.0,
            **{f"{key}_digest": key for key in ("test", "experts", "base")},
        }
        study.add_result(cell, result)


def test_numbers_are_those_by_hand(tmp_path: Path) -> None:
    """Two methods, one task, two seeds of eight binary items."""
    study = made(tmp_path, **TWO)
    record(study, ["00000000", "00000000"], method="a")
    record(study, ["11111111", "11111110"], method="b", dev=1.0, dev_no_gradient=0.5)
    found = analysis.analyse_study(study)
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
    assert "-0.438" in "\n".join(analysis.format_summary(found))
    ranks = {row["method"]: row["rank"]["rank"] for row in summary["methods"]}
    assert ranks == {"a": 2, "b": 1}
    counts = {row["method"]: row["against"]["a"] for row in summary["methods"]}
    assert counts["b"] == {"tasks": 1, "better": 1, "worse": 0}
    assert block["constant"] == {"answers": ["Yes"], "test": 0.125, "by_domain": 0.25}
    assert block["best_expert"] == {"names": ["amber"], "dev": 0.5, "test": 0.25}


def test_holm_is_over_methods_and_tasks(tmp_path: Path) -> None:
    study = made(tmp_path, seeds=1, budgets=[6], methods={"a": {}, "b": {}, "d": {}})
    n = 10
    wins = {("one", "b"): 10, ("one", "d"): 8, ("two", "b"): 6, ("two", "d"): 0}
    for task in ("one", "two"):
        record(study, ["0" * n], task=task, method="a")
        for method in ("b", "d"):
            won = wins[task, method]
            record(study, ["1" * won + "0" * (n - won)], task=task, method=method)
    found = analysis.analyse_study(study)
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
    study = made(tmp_path, **{**TWO, "methods": {**TWO["methods"], "c": {"varies": []}}})
    record(study, ["0000", "1111"], method="a")
    record(study, ["0011", "0000"], method="b")
    record(study, ["0001"], method="c")
    remove(study, study.select(["b", "seed1"])[-1])
    found = analysis.analyse_study(study)
    rows = {row["method"]: row for row in found["blocks"][0]["methods"]}
    assert [rows[name]["seeds"] for name in "abc"] == [2, 1, 1]
    assert rows["b"]["against"]["a"]["seeds"] == 1 and rows["c"]["test"] == 0.25
    ranks = {row["method"]: row["rank"]["rank"] for row in found["summaries"][0]["methods"]}
    assert ranks == {"a": 3, "b": 1, "c": 2}, "by seed 0, which all have"


def test_results_of_other_items_are_refused(tmp_path: Path) -> None:
    study = made(tmp_path, seeds=1, **TWO)
    record(study, ["01"], method="a")
    record(study, ["01"], method="b")
    cell = study.cells()[1]
    study.add_result(cell, {**(study.result(cell) or {}), "test_digest": "u"})
    with pytest.raises(UserError, match="the results of one are of different test items"):
        analysis.analyse_study(study)
    changed = {"a": {"words": ["optimizer=cmaes"]}, "b": {}}
    other = made(tmp_path, seeds=1, **{**TWO, "methods": changed})
    with pytest.raises(UserError, match=r"seed0 and 0 more have other settings"):
        other.missing(other.cells())


def test_tables_are_written(tmp_path: Path) -> None:
    study = made(tmp_path, seeds=1)
    assert analysis.analyse_study(study)["blocks"] == []
    for task in ("one", "two"):
        record(study, ["0011"] * 2, task=task, method="a")
        record(study, ["0111"] * 2, task=task, method="b")
        record(study, ["1111"], task=task, method="c")
    found = analysis.analyse_study(study)
    analysis.write_analysis(study, found)
    text = (study.results / "README.md").read_text()
    assert "| c  " in text and "**1.000**" in text and "10 of 10 results" in text
    assert "## two, 5 dev items, budget 8" in text and "best constant answer (Yes)" in text
    assert json.loads((study.results / "analysis.json").read_text()) == found


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
