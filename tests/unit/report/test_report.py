"""The report of a run folder: what it says, and that nothing of it can do harm."""

import json
import re
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
from click.testing import CliRunner
from run_folders import write_state

from swarm._util.files import short_digest
from swarm._util.terminal import format_number
from swarm.errors import UserError
from swarm.report import __main__ as entry
from swarm.report.charts import render_svg
from swarm.report.document import ChangedItems, Chart, Report, Series, TableBlock
from swarm.report.page import build_report, render_page
from swarm.report.paired_comparison import MAX_ITEMS_SHOWN, PairedComparison, iterate_data_items
from swarm.runs.folder import RunFolder, read_state
from swarm.runs.verdict import HeldOut, NoiseFloor, Verdict, Vote, format_gain
from swarm.stats.significance import PairedTest
from swarm.tasks.metrics import Measured

KINDS = {
    "plain": {},
    "running": {"finished": False},
    "no test": {"test": None},
    "mixture": {"parts": ("hearsay", "citation")},
    "signed": {"lowest": -3.0},
    "two particles, no iteration": {"particles": 2, "experts": 2, "iterations": 0},
    "three groups": {"groups": ("first", "middle", "last")},
    "sixty groups": {"groups": tuple(f"layer {n} q_proj" for n in range(60)), "iterations": 1},
    "hostile": {"text": run_folders.HOSTILE},
    "forty experts": {"experts": 40, "particles": 40, "iterations": 1},
}

GAINS = "Best found less best expert, item by item"


def blocks_of(found: Report, key: str, kind: type) -> list[Any]:
    return [one for one in run_folders.section(found, key).blocks if isinstance(one, kind)]


def tables(found: Report, key: str) -> dict[str, list[list[Any]]]:
    return {one.caption: [*map(list, one.rows)] for one in blocks_of(found, key, TableBlock)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_sound_and_asks_nothing_of_anywhere(kind: str, tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", **KINDS[kind])
    if kind == "hostile":
        run_folders.data_file(folder, run_folders.HOSTILE, 40)
        state = read_state(folder)
        state["experts"][1] = state["groups"][0] = run_folders.HOSTILE
        write_state(folder, state)
    text = render_page(build_report(folder))
    document = run_folders.Document(text)
    assert document.open == []
    assert not any(document.all(tag) for tag in ("script", "img", "iframe"))
    assert not any("src" in one or "onclick" in one for _, one in document.tags)
    assert text.count("</style>") == 1 and "\x00" not in text
    assert ("&lt;script&gt;alert(&#39;x&#39;)" in text) is (kind == "hostile")
    links = [one.get("href") or "" for tag in ("a", "link") for one in document.all(tag)]
    assert all(link.startswith(("#", "data:")) for link in links)
    ids = [one["id"] for _, one in document.tags if "id" in one]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    shown = re.sub(r"<svg.*?</svg>|<[^>]+>", " ", text[text.index("<body>") :].split("<details")[0])
    assert len(shown.split()) < 900


# What it says


def test_the_result_is_that_of_the_run(tmp_path: Path) -> None:
    def more(verdict: Verdict) -> Verdict:
        (expert,) = verdict.alternatives
        domains = {name: Measured(0.5, 0.0, 1.0, 9) for name in ("maths", "law")}
        found, expert = (
            replace(one, test=replace(one.test, domains=domains)) for one in (verdict.found, expert)
        )
        return replace(verdict, found=found, alternatives=[expert])

    found = build_report(run_folders.folder(tmp_path / "run", more=more))
    verdict = RunFolder(tmp_path / "run").verdict
    gain, p = verdict.start_model.gain.difference, verdict.start_model.gain.p
    assert found.verdict.kind == ("unclear" if p >= 0.05 else "better" if gain > 0 else "worse")
    label = "gain over the best expert (arithmetic)"
    assert found.figures[2] == (label, format_gain(verdict, verdict.strongest))
    results, domains = tables(found, "ends").values()
    assert [row[0] for row in results] == ["best expert (arithmetic)", "best found"]
    assert {row[0] for row in domains} == {"maths", "law"}
    low, high = map(format_number, verdict.found.test.interval)
    assert results[1][2] == f"{format_number(verdict.found.test.utility)} [{low}, {high}]"


def test_before_the_end_it_says_so_and_measures_dev_itself(tmp_path: Path) -> None:
    found = build_report(run_folders.folder(tmp_path / "run", finished=False))
    assert (found.verdict.kind, found.verdict.headline) == ("open", "Still running")
    assert "after 4 rounds" in found.verdict.sentence
    done = RunFolder(run_folders.folder(tmp_path / "done")).verdict
    assert format_number(done.dev.utility) in found.verdict.sentence


def test_measurements_beside_the_test_are_shown_where_they_are(tmp_path: Path) -> None:
    def more(verdict: Verdict) -> Verdict:
        (start,) = verdict.alternatives
        expert, found = Measured(0.5, 0.3, 0.7, 12), Measured(0.25, 0.1, 0.5, 12)
        return replace(
            verdict,
            alternatives=[replace(start, gain=PairedTest(0.0, 0.0, 0.0, 1.0, 40))],
            held_out=HeldOut(expert, found, PairedTest(-0.25, -0.5, 0.0, 0.125, 12), False),
            noise_floor=NoiseFloor(30, 4, 0.0125),
            vote=Vote([(1, 0, 0.7), (2, 1, 0.6)], [0.7, 0.8, 0.75], Measured(0.775, 0.6, 0.9, 40)),
        )

    found = build_report(run_folders.folder(tmp_path / "run", more=more))
    text = render_page(found)
    for words in (
        "vote of the top 2",
        "0.775 [0.600, 0.900]",
        "1: 0.700, 2: 0.800, 3: 0.750; 2 was chosen",
        "4 of 30 dev answers",
        "have equal scores on each of 40 test items.",
    ):
        assert words in text, words
    kept, tested = tables(found, "statistics")[GAINS]
    assert kept == ["held-out part of dev", "−0.250", "[−0.500, 0.000]", "0.125", "12"]
    assert tested[1:3] == ["0.000", "(no item differs)"] and "[0.000, 0.000]" not in text


@pytest.mark.parametrize("finished", [True, False])
def test_numbers_of_a_signal_are_said_to_be_such(finished: bool, tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", iterations=1, finished=finished)
    state = read_state(folder)
    state["identity"]["task.signal"] = "both"
    state["rounds"][0]["utilities"] = [0.1] * 6
    state["rounds"][1]["utilities"] = [0.1] * 5 + [0.2]
    state["finished"] = "1 iteration done" if finished else None
    write_state(folder, state)
    found = build_report(folder)
    text = render_page(found)
    charts = [one for one in found.blocks if isinstance(one, Chart)]
    assert [chart.y_name for chart in charts] == [*["signal (both) on dev"] * 2, "coefficient"]
    for words in (
        "the signal (both) that the search maximized",
        "in 1 round</figcaption>",
    ):
        assert words in text, words
    running = ", still running" * (not finished)
    assert found.about.endswith(f"1 round of 6 mixtures{running}, seed 7")
    assert not re.search(r"\b1 (iterations|times)\b", text)


def test_parts_of_a_mixture(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", parts=("hearsay", "citation"))
    found = build_report(folder)
    rows = tables(found, "ends")["The parts of the mixture"]
    both = ["hearsay", "citation"]
    assert [row[:2] for row in rows] == [[one, on] for on in ("dev", "test") for one in both]
    parts = RunFolder(folder).verdict.found.test.parts
    assert [row[3] for row in rows[2:]] == [format_number(parts[one]) for one in both]
    assert "bootstrap over items, within each part" in render_page(found)


def test_coefficients_of_groups(tmp_path: Path) -> None:
    run = RunFolder(run_folders.folder(tmp_path / "run", groups=("first", "last")))
    found = build_report(run.path)
    chart = found.blocks[-1]
    assert isinstance(chart, Chart) and chart.title.endswith(", means over the groups of modules")
    position = run.positions[run.find_best()].reshape(2, 4)
    ends = {one.name: one.y[-1] for one in chart.series}
    assert [ends[name] for name in run.experts] == pytest.approx(position.mean(axis=0).tolist())
    table = tables(found, "coefficients")["Coefficients of the best found, by group of modules"]
    assert [row[0] for row in table] == run.experts
    shown = [[float(cell) for cell in row[1:]] for row in table]
    assert np.transpose(shown).ravel().tolist() == pytest.approx(
        position.ravel().tolist(), abs=1e-4
    )
    # Coefficients that are the same in every group need no table.
    state = read_state(run.path)
    for one in state["rounds"]:
        one["positions"] = [row[:4] * 2 for row in one["positions"]]
    write_state(run.path, state)
    assert "coefficients" not in [one.key for one in build_report(run.path).sections]


def test_cost_counts_what_was_and_was_not_asked(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", particles=5, iterations=3, items=30)
    state = read_state(folder)
    scored = [30, 30, 30, 20, None]
    state["rounds"][2] |= {"prompts_scored": 90, "prompts_saved": 40, "items_scored": scored}
    write_state(folder, state)
    found = tables(build_report(folder), "cost")
    asked = [["on dev, by the search", "540"], ["on test, at the end", "80"]]
    assert found["Prompts evaluated"] == asked
    assert [row[1] for row in found["Prompts saved"]] == ["40", "20", "30"]


# Item by item


def test_items_won_and_lost_are_those_counted_by_hand(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    run_folders.data_file(folder, "What", 40)
    _, before, after = PairedComparison(RunFolder(folder)).paired_answers() or ("", [], [])
    changes = {b["id"]: a["value"] - b["value"] for b, a in zip(before, after, strict=True)}
    won, lost = ([n for n, one in changes.items() if one == sign] for sign in (1, -1))
    assert won and lost
    blocks = blocks_of(build_report(folder), "flips", ChangedItems)
    assert [[int(flip.item) for flip in block.flips] for block in blocks] == [won, lost]
    first = blocks[0].flips[0]
    assert first.question == f"What number {first.item}?" and first.gold == f"right {first.item}"


def test_questions_of_other_items_are_not_shown_and_no_code_is_run(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    assert "config.json is missing" in render_page(build_report(folder))
    run_folders.data_file(folder, "Which", 40)
    assert "the data file has changed since the run" in render_page(build_report(folder))
    run_folders.data_file(folder, "What", 40)
    (folder / "data.json").unlink()
    shown = render_page(build_report(folder))
    assert "data.json is missing" in shown and "What number" not in shown
    target = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "ran")}
    (folder / "config.json").write_text(json.dumps({"task": {"scorer": target, **target}}))
    build_report(folder)
    assert not (tmp_path / "ran").exists()


def test_many_changed_items_are_cut_and_it_is_said(tmp_path: Path) -> None:
    found = build_report(run_folders.folder(tmp_path / "run", test=900, text="long " * 400))
    blocks = blocks_of(found, "flips", ChangedItems)
    assert len(blocks[0].flips) == MAX_ITEMS_SHOWN
    assert f", {MAX_ITEMS_SHOWN} of them shown)</h3>" in render_page(found)
    assert "more characters)" in blocks[0].flips[0].after[1]


def test_items_are_read_as_tasks_give_them(tmp_path: Path) -> None:
    from swarm.tasks.exact_match import ExactMatch
    from swarm.tasks.mixture import Mixture
    from swarm.tasks.multiple_choice import MultipleChoice

    choices = {"A": "red", "B": "blue"}
    content = [
        {"question": f"q {n}", "choices": choices, "answer": "A", "domain": f"d{n % 3}"}
        for n in range(12)
    ]
    first, second = tmp_path / "first.json", tmp_path / "second.jsonl"
    first.write_text(json.dumps({"dev": content[:5], "test": content[3:], "icl_prompt": "so"}))
    second.write_text("\n".join(json.dumps({"question": f"m {n}", "answer": n}) for n in range(9)))
    one: dict[str, Any] = {"name": "a", "file": str(first), "test_limit": 4}
    two: dict[str, Any] = {"name": "b", "file": str(second)}
    mixture = Mixture("both", {"one": MultipleChoice(**one), "two": ExactMatch(**two)})
    for split in ("dev", "test"):
        expected = short_digest([dict(item) for item in mixture.items(split)])
        read = list(iterate_data_items({"tasks": {"one": one, "two": two}}, split))
        assert short_digest(read) == expected


# Folders, the command, charts


def test_a_folder_of_another_kind_is_named_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search = Path("search")
    for name in ("first", "cmp/random_seed42", "cmp/random_seed43", "swept/trial_00"):
        run_folders.folder(search / name, iterations=0)
    (search / "swept" / ".lock").touch()
    (search / "tuned" / "tuned").mkdir(parents=True)
    (search / "tuned" / "tuning.json").write_text("{}")
    runs = "search/cmp/random_seed42, search/cmp/random_seed43"
    nothing = "contains no search"
    for folder, words in {
        "search/tuned": f"{nothing}, but a fine-tuning: its results are in "
        "search/tuned/tuning.json, its adapter is search/tuned/tuned",
        "search/cmp": f"{nothing}: its runs are {runs}; name one of them",
        "search": f"{nothing}: its runs are search/first, {runs}, search/swept/trial_00; name one "
        "of them",
        "search/swept": "is a study: its runs are search/swept/trial_00; name one of them",
        "search/trial_0": f"{nothing}; did you mean search/swept/trial_00?",
        "first": f"{nothing}; did you mean search/first?",
        "search/first/answers": f"{nothing}; did you mean search/first?",
        "chess": f"{nothing}; allowed: a folder of search/ with a rounds.jsonl",
    }.items():
        with pytest.raises(UserError) as caught:
            RunFolder(folder)
        assert str(caught.value) == f"{folder} {words}"
    assert build_report("search/swept/trial_00").name == "swept/trial_00"


def test_the_command_goes_on_after_a_bad_folder(tmp_path: Path) -> None:
    folders = [run_folders.folder(tmp_path / name, iterations=0) for name in ("a", "d")]
    (folders[1] / "report.html").write_text("an old one")
    given = [str(tmp_path / name) for name in ("a", "nothing", "d")]
    done = CliRunner().invoke(entry.report, given, standalone_mode=False)
    assert done.return_value == 1
    assert all("All models" in (one / "report.html").read_text() for one in folders)
    assert done.stderr.count("contains no search") == 1 and done.stderr.count("\n") == 1
    assert CliRunner().invoke(entry.report, []).exit_code == 2
    told = json.loads(CliRunner().invoke(entry.report, [given[0], "--json"]).stdout)
    assert told["verdict"]["expert"] == "arithmetic" and told["economy"]["evaluations"] == 6


def test_a_chart_draws_what_matplotlib_would_hide_or_interpret() -> None:
    series = [
        Series("_hidden $x$", [0, 1], [float("nan"), 2.0]),
        Series("faint", [0], [1], weight="faint"),
    ]
    drawn = render_svg(Chart("t", "x", "y", series, marks=[("bound", 1.0)]), 7)
    tree = xml.etree.ElementTree.fromstring(drawn)
    assert "_hidden $x$" in "".join(tree.itertext()) and 'id="c7-' in drawn
    assert render_svg(Chart("t", "x", "y", []), 7)
