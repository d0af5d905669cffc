"""Utilities by domain, the best constant answers, and the warning of one answer throughout."""

import json
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import numpy as np
import pytest
import run_folders
import searches
import small_evaluations
import tiny
from task_items import domains_file, exact_match

from swarm.evaluation.evaluation import format_result
from swarm.export.model_card import describe_numbers
from swarm.finetune.run import domain_lines as by_domain_table
from swarm.finetune.run import scores_table
from swarm.loop.final_evaluation import resolve_baselines
from swarm.report.document import TableBlock
from swarm.report.page import build_report, write_report
from swarm.report.paired_comparison import PairedComparison, iterate_data_items
from swarm.runs.folder import RunFolder, read_state
from swarm.runs.verdict import domain_table, read_verdict
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.ui.run_data import load_run_series


def test_default_baselines_can_be_deployed_as_the_result_can(tmp_path: Path) -> None:
    named = MultipleChoice("doors", str(domains_file(tmp_path / "doors.json")))
    kinds = exact_match(tmp_path, "kinds", ["Yes", "1", "red"], ["Yes", "2", "blue"])
    pool = SimpleNamespace(saves="adapter", expert_count=2, router=None)
    routed = SimpleNamespace(saves="adapter", expert_count=2, router=object())
    assert resolve_baselines("auto", named, pool) == ["base", "recipe"]
    assert resolve_baselines("auto", named, routed) == ["base", "recipe", "routes"]
    assert resolve_baselines(["experts"], kinds, pool) == ["experts"]
    assert resolve_baselines([], named, pool) == []


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """A search with a model that reads only the last token: it gives one letter to every item."""
    from safetensors.torch import load_file, save_file

    place = tmp_path_factory.mktemp("constant")
    base = tiny.model(place / "base")
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    pool = place / "pool"
    for seed, name in enumerate(("amber", "birch"), start=1):
        tiny.expert(base, pool / name, seed, targets=("q_proj", "v_proj"))
    words = searches.arguments(place, base, pool, task__file=domains_file(place / "doors.json"))
    words = [word for word in words if not word.endswith("tiny.json")]
    result = commands.run("swarm.search", *words)
    assert result.code == 0, result.err
    return place / "search" / "run", " ".join(result.out.split()), words


def test_a_search_whose_best_gives_one_answer_says_so(
    constant: tuple[Path, str, list[str]],
) -> None:
    folder, output, _ = constant
    verdict = RunFolder(folder).verdict
    (one,) = verdict.found.test.one_answer
    assert one.domain is None and one.share == 1.0 and one.answers == 40
    answer = one.answer
    warning = f'the best found gives one answer: "{answer}" is 100 % of the 40 parsed answers'
    text = unescape((folder / "report.html").read_text())
    assert warning in text and "best constant answer of each domain" in text
    assert re.search("(Worth it|Not worth it|Not distinguishable): ", output)
    domains = verdict.found.test.domains
    assert {name: found.n for name, found in domains.items()} == {"doors": 20, "paths": 20}
    total = sum(found.utility * found.n for found in domains.values())
    assert total / 40 == pytest.approx(verdict.found.test.utility)
    constant_ = verdict.constant
    assert constant_.choices == {"doors": "A", "paths": "A"}
    gain = verdict.found.test.utility - constant_.test.utility
    assert constant_.gain.difference == pytest.approx(gain)
    header, rows = domain_table(verdict) or ([], [])
    assert header[0] == "domain of test" and [row[0] for row in rows] == ["doors", "paths"]
    assert all(row[-1] == f'"{answer}": 100 % (!)' for row in rows)


def test_report_page_and_card_show_domains_constants_and_warnings(
    constant: tuple[Path, str, list[str]],
) -> None:
    folder, verdict = constant[0], RunFolder(constant[0]).verdict
    write_report(folder)
    text = (folder / "report.html").read_text()
    for words in ("gives one answer", "best constant answer", "doors", "paths"):
        assert words in text, words
    shown = load_run_series(folder).details
    tables = [one for one in shown if isinstance(one, TableBlock)]
    assert any(table.header[0] == "domain of test" for table in tables)
    assert any("best constant answer" in row[0] for table in tables for row in table.rows)
    warned = [one for one in shown if "in all domains of test, the best found" in str(one)]
    assert len(warned) == 1
    lines = [*scores_table(verdict, "start", "end"), *by_domain_table(verdict, "start", "end")]
    text = "\n".join(lines)
    assert "| best constant answer of each domain" in text and "| domain of test " in text
    assert any(words.startswith("Warning:") for words in describe_numbers(verdict))


def test_an_evaluation_shows_domains_constants_and_warnings(
    constant: tuple[Path, str, list[str]],
) -> None:
    words = [
        word
        for word in constant[2]
        if word.split("=")[0].split(".")[0] in ("model", "pool", "task")
    ]
    result = small_evaluations.evaluated(
        [*words, "candidate=expert", "candidate.names=amber", "device=cpu", "out=null"]
    )
    (voice,) = result["voices"]
    total = sum(one["utility"] * one["n"] for one in voice["domains"].values())
    assert total / 40 == pytest.approx(voice["utility"])
    lines = format_result(result).splitlines()
    assert lines[2].startswith("  doors: ") and "100 % (!)" in lines[2]
    assert any(line.startswith("best constant answer of each domain") for line in lines)
    assert any(line.startswith("Warning: in all domains of test, amber") for line in lines)


@pytest.fixture(scope="module")
def baselines(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> tuple[list[str], dict[str, Any], str]:
    """A search on two domains with all baselines: its words, its metrics and what it printed."""
    place = tmp_path_factory.mktemp("baselines")
    keys = {"baselines": "[base,soup,recipe,experts]", "pool__space": "delta"}
    file = domains_file(place / "doors.json")
    words = searches.arguments(place, tiny_llama, tiny_pool, task__file=file, **keys)
    words = [word for word in words if not word.endswith("tiny.json")]
    result = commands.run("swarm.search", *words)
    assert result.code == 0, result.err
    state = read_state(place / "search" / "run")
    return words, state, " ".join(result.out.split())


def test_baselines_are_put_to_test(baselines: tuple[list[str], dict[str, Any], str]) -> None:
    words, state, output = baselines
    verdict = read_verdict(state)
    found = {
        one.name: one for one in verdict.alternatives if one.name not in ("expert", "constant")
    }
    assert set(found) == {"base", "soup", "recipe", "experts"}
    reached = verdict.found.test.utility
    for one in found.values():
        assert one.test.n == 40 and set(one.test.domains) == {"doors", "paths"}
        assert one.gain.difference == pytest.approx(reached - one.test.utility)
    settings = dict(word.split("=", 1) for word in words)
    report = build_report(Path(settings["folder"]) / settings["name"])
    assert report.verdict.finding in output
    table = run_folders.section(report, "ends").blocks[0]
    compared = [row[0] for row in table.rows[:-1] if "constant" not in str(row[0])]
    labels = {one.label for one in found.values()}
    assert set(compared) == labels | {f"best expert ({verdict.expert})"}
    models = PairedComparison(RunFolder(Path(settings["folder"]) / settings["name"]))
    assert set(compared) <= set(models.list_baselines())
    for one in found.values():
        split, before, _ = models.paired_answers(one.label) or ("", [], [])
        assert split == "test" and [row["id"] for row in before] == [
            item["id"] for item in iterate_data_items(models.run.config["task"], "test")
        ]
        assert np.mean([row["value"] for row in before]) == pytest.approx(one.test.utility)
    # The best of the recipes is at least the best expert, each domain's best at least the best.
    best = verdict.start_model.dev.utility
    assert found["recipe"].dev.utility >= best
    assert found["experts"].dev.utility >= best
    assert set(found["experts"].choices) == {"doors", "paths"}
    header, rows = domain_table(verdict) or ([], [])
    assert {one.label.split(" (")[0] for one in found.values()} < set(header)
    assert all(len(row) == len(header) for row in rows)


def test_the_base_is_the_model_without_experts(
    baselines: tuple[list[str], dict[str, Any], str], tmp_path: Path
) -> None:
    words, state, _ = baselines
    kept = ("task", "model", "pool.folder")
    keys = [word for word in words if word.startswith(kept)]
    result = commands.run("swarm.evaluate", *keys, "candidate=base", f"out={tmp_path}/e")
    assert result.code == 0, result.err
    whole = json.loads((tmp_path / "e" / "result.json").read_text())
    (voice,) = whole["voices"]
    assert voice["utility"] == next(
        one.test.utility for one in read_verdict(state).alternatives if one.name == "base"
    )
