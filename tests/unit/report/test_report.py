"""The report of a run folder: what it says, and that nothing of it can do harm."""

import json
import re
import shutil
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_folders
from click.testing import CliRunner
from run_folders import write_state

from swarm._util.files import short_digest
from swarm._util.terminal import format_number
from swarm.errors import UserError
from swarm.report import __main__ as entry
from swarm.report.analyses import measure_economy
from swarm.report.charts import render_svg
from swarm.report.document import (
    ChangedItems,
    Chart,
    Report,
    Series,
    TableBlock,
)
from swarm.report.page import build_report, render_page, write_report
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
    "many groups": {"groups": tuple(f"layers.{n}" for n in range(6)), "experts": 3},
    "sixty groups": {"groups": tuple(f"layer {n} q_proj" for n in range(60)), "iterations": 1},
    "hostile": {"text": run_folders.HOSTILE},
    "forty experts": {"experts": 40, "particles": 40, "iterations": 1},
}


def tables(found: Report, key: str) -> dict[str, list[list[Any]]]:
    return {
        block.caption: [list(row) for row in block.rows]
        for block in run_folders.section(found, key).blocks
        if isinstance(block, TableBlock)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_sound_and_asks_nothing_of_anywhere(kind: str, tmp_path: Path) -> None:
    text = render_page(build_report(run_folders.folder(tmp_path / "run", **KINDS[kind])))
    document = run_folders.Document(text)
    assert document.open == []
    assert not any(document.all(tag) for tag in ("script", "img", "iframe"))
    links = [one.get("href", "") for tag in ("a", "link") for one in document.all(tag)]
    assert all(link and link.startswith(("#", "data:")) for link in links)
    assert not any("src" in one or "onclick" in one for _, one in document.tags)
    ids = [one["id"] for _, one in document.tags if "id" in one]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link and link.startswith("#")} <= set(ids)


def test_what_models_write_is_never_markup(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", text=run_folders.HOSTILE)
    run_folders.data_file(folder, run_folders.HOSTILE, 40)
    assert "missing" not in str(run_folders.section(build_report(folder), "flips"))
    state = read_state(folder)
    state["experts"][1] = state["groups"][0] = run_folders.HOSTILE
    write_state(folder, state)
    found = build_report(folder)
    text = render_page(found)
    assert run_folders.Document(text).open == []
    assert text.count("</style>") == 1 and "<script>alert" not in text and "<img" not in text
    assert "\x00" not in text and "&lt;script&gt;alert(&#39;x&#39;)" in text


# What it says


def test_the_result_is_that_of_the_run(tmp_path: Path) -> None:
    found = build_report(run_folders.folder(tmp_path / "run"))
    metrics = RunFolder(tmp_path / "run").verdict
    gain, p = metrics.start_model.gain.difference, metrics.start_model.gain.p
    verdict = found.verdict
    assert verdict.kind == ("unclear" if p >= 0.05 else "better" if gain > 0 else "worse")
    assert metrics.strongest is not None and metrics.strongest.gain.difference == gain
    label = "gain over the best initial expert (arithmetic)"
    assert found.figures[2] == (label, format_gain(metrics, metrics.strongest))
    assert found.figures[2][1] in verdict.sentence
    rows = next(iter(tables(found, "ends").values()))
    assert [row[0] for row in rows] == ["best initial expert (arithmetic)", "best found"]
    low, high = metrics.found.test.interval
    accuracy = metrics.found.test.utility
    assert rows[1][2] == f"{format_number(accuracy)} [{format_number(low)}, {format_number(high)}]"


def test_before_the_end_it_says_so_and_measures_dev_itself(tmp_path: Path) -> None:
    found = build_report(run_folders.folder(tmp_path / "run", finished=False))
    assert (found.verdict.kind, found.verdict.headline) == ("open", "Still running")
    assert "after 4 iterations" in found.verdict.sentence
    done = build_report(run_folders.folder(tmp_path / "done"))
    old, new = (next(iter(tables(one, "ends").values())) for one in (found, done))
    assert [row[1] for row in old] == [row[1] for row in new]
    mixed = build_report(run_folders.folder(tmp_path / "mix", finished=False, parts=("a", "b")))
    rows = next(iter(tables(mixed, "ends").values()))
    assert not any("[" in cell for row in rows for cell in row)


def test_new_metrics_are_shown_where_they_are(tmp_path: Path) -> None:
    def more(verdict: Verdict) -> Verdict:
        gain = PairedTest(-0.25, -0.5, 0.0, 0.125, 12)
        expert, found = Measured(0.5, 0.3, 0.7, 12), Measured(0.25, 0.1, 0.5, 12)
        return replace(
            verdict,
            held_out=HeldOut(expert, found, gain, False),
            noise_floor=NoiseFloor(30, 4, 0.0125),
            vote=Vote([(1, 0, 0.7), (2, 1, 0.6)], [0.7, 0.8, 0.75], Measured(0.775, 0.6, 0.9, 40)),
            signal="logprob",
        )

    folder = run_folders.folder(tmp_path / "run", more=more)
    text = render_page(build_report(folder))
    for words in (
        "held-out part of dev, n = 12",
        "0.250 [0.100, 0.500]",
        "vote of the top 2",
        "0.775 [0.600, 0.900]",
        "1: 0.700, 2: 0.800, 3: 0.750; 2 was chosen",
        "4 of 30 dev answers",
        "signal (logprob) on dev",
    ):
        assert words in text, words
    rows = tables(build_report(folder), "statistics")[
        "Best found less best initial expert, item by item"
    ]
    assert rows[0] == ["held-out part of dev", "−0.250", "[−0.500, 0.000]", "0.125", "12"]


def test_where_no_item_differs_no_interval_is_told(tmp_path: Path) -> None:
    def more(verdict: Verdict) -> Verdict:
        (expert,) = verdict.alternatives
        gain = PairedTest(0.0, 0.0, 0.0, 1.0, 40)
        return replace(verdict, alternatives=[replace(expert, gain=gain)])

    folder = run_folders.folder(tmp_path / "run", more=more)
    text = render_page(build_report(folder))
    assert "have equal scores on each of 40 test items." in text
    assert "[0.000, 0.000]" not in text
    assert tables(build_report(folder), "statistics")[
        "Best found less best initial expert, item by item"
    ][0][1:3] == ["0.000", "(no item differs)"]


@pytest.mark.parametrize("finished", [True, False])
def test_numbers_of_a_signal_are_said_to_be_such(finished: bool, tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", finished=finished)
    state = read_state(folder)
    state["identity"]["task.signal"] = "both"
    write_state(folder, state)
    found = build_report(folder)
    progress = run_folders.section(found, "progress")
    assert "the signal (both) that the search maximized" in str(progress.blocks)
    charts = [one for one in progress.blocks if isinstance(one, Chart)]
    assert len(charts) == 2
    for chart in charts:
        assert chart.y_name == "signal (both) on dev"
        assert chart.alt_text.endswith(", by the signal (both)")
    text = render_page(found)
    assert "Particles by their best signal (both) on dev" in text
    assert "alone, signal (both) on dev" in text


def test_one_is_not_many(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", iterations=1)
    state = read_state(folder)
    state["rounds"][0]["utilities"] = [0.1] * 6
    state["rounds"][1]["utilities"] = [0.1] * 5 + [0.2]
    state["finished"] = "1 iteration done"
    write_state(folder, state)
    found = build_report(folder)
    text = render_page(found)
    assert found.about.endswith("6 particles, 1 iteration, seed 7")
    assert "in 1 iteration, with 1 rise, last at iteration 1" in text
    assert not re.search(r"\b1 (iterations|times)\b", text)


def test_the_navigation_has_every_section(tmp_path: Path) -> None:
    text = render_page(build_report(run_folders.folder(tmp_path / "run")))
    shown = re.findall(r'<section [^>]*?id="(\w+)"|<section id="(\w+)"', text)
    links = re.findall(r'<li><a href="#(\w+)">', text)
    assert links == [one or other for one, other in shown] and links[0] == "result"


def test_parts_of_a_mixture(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", parts=("hearsay", "citation"))
    metrics = RunFolder(folder).verdict
    rows = tables(build_report(folder), "ends")["The parts of the mixture"]
    assert [row[:2] for row in rows] == [
        ["hearsay", "dev"],
        ["citation", "dev"],
        ["hearsay", "test"],
        ["citation", "test"],
    ]
    assert rows[3][3] == format_number(metrics.found.test.parts["citation"])
    assert "bootstrap over items, within each part" in render_page(build_report(folder))


def test_coefficients_of_groups(tmp_path: Path) -> None:
    run = RunFolder(run_folders.folder(tmp_path / "run", groups=("first", "last")))
    blocks = run_folders.section(build_report(run.path), "coefficients").blocks
    charts = {block.title: block for block in blocks if isinstance(block, Chart)}
    best = "Coefficients of the best so far"
    assert list(charts) == [f"{best}, mean over groups", "Coefficients, mean of the swarm"]
    position = run.positions[run.find_best()].reshape(2, 4)
    found = {one.name: one.y[-1] for one in charts[f"{best}, mean over groups"].series}
    wanted = position.mean(axis=0).tolist()
    assert [found[name] for name in run.experts] == pytest.approx(wanted)
    table = tables(build_report(run.path), "coefficients")[
        "Coefficients of the best found, by group of modules"
    ]
    for row, mine in zip(table, position, strict=True):
        shown = sorted(float(cell.replace("−", "-")) for cell in row[1:])
        assert shown == pytest.approx(sorted(mine), abs=0.0051)
    # Expert k alone is the same in every group, which one chart tells.
    state = read_state(run.path)
    for one in state["rounds"]:
        one["positions"] = [row[:4] * 2 for row in one["positions"]]
    write_state(run.path, state)
    alike = [
        one.title
        for one in run_folders.section(build_report(run.path), "coefficients").blocks
        if isinstance(one, Chart)
    ]
    assert alike == [f"{best}, the same in all groups", "Coefficients, mean of the swarm"]
    # An expert has the same place, and so the same colour, in each.
    assert len({tuple(one.name for one in chart.series) for chart in charts.values()}) == 1


# Item by item


def test_flips_are_those_counted_by_hand(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    run_folders.data_file(folder, "What", 40)
    _, before, after = PairedComparison(RunFolder(folder)).paired_answers() or ("", [], [])
    won = [b["id"] for b, a in zip(before, after, strict=True) if a["value"] > b["value"]]
    lost = [b["id"] for b, a in zip(before, after, strict=True) if a["value"] < b["value"]]
    assert won and lost
    blocks = [
        b
        for b in run_folders.section(build_report(folder), "flips").blocks
        if isinstance(b, ChangedItems)
    ]
    assert [[int(flip.item) for flip in block.flips] for block in blocks] == [won, lost]
    first = blocks[0].flips[0]
    assert first.question == f"What number {first.item}?" and first.gold == f"right {first.item}"


def test_questions_of_other_items_are_not_shown(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    assert "config.json is missing" in str(run_folders.section(build_report(folder), "flips"))
    run_folders.data_file(folder, "Which", 40)
    assert "the data file has changed since the run" in render_page(build_report(folder))
    run_folders.data_file(folder, "What", 40)
    (folder / "data.json").unlink()
    shown = str(run_folders.section(build_report(folder), "flips"))
    assert "data.json is missing" in shown and "What number" not in shown


def test_many_flips_are_cut_and_it_is_said(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", test=900, text="long " * 400)
    found = run_folders.section(build_report(folder), "flips")
    blocks = [block for block in found.blocks if isinstance(block, ChangedItems)]
    total = sum(block.total for block in blocks)
    assert (
        total > MAX_ITEMS_SHOWN
        and abs(sum(len(block.flips) for block in blocks) - MAX_ITEMS_SHOWN) <= 1
    )
    assert f"Of these {total} items {MAX_ITEMS_SHOWN} are shown" in str(found)
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
    parts = {
        "one": {"name": "a", "file": str(first), "test_limit": 4},
        "two": {"name": "b", "file": str(second)},
    }
    mixture = Mixture(
        "both", {"one": MultipleChoice(**parts["one"]), "two": ExactMatch(**parts["two"])}
    )
    for split in ("dev", "test"):
        expected = short_digest([dict(item) for item in mixture.items(split)])
        assert short_digest(list(iterate_data_items({"tasks": parts}, split))) == expected


def test_no_code_that_a_configuration_names_is_run(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    target = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "ran")}
    (folder / "config.json").write_text(json.dumps({"task": {"scorer": target, **target}}))
    build_report(folder)
    assert not (tmp_path / "ran").exists()


# Cost


def test_cost_counts_what_was_and_was_not_asked(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", particles=5, iterations=3, items=30)
    state = read_state(folder)
    state["rounds"][2] |= {
        "prompts_scored": 90,
        "prompts_saved": 40,
        "items_scored": [30, 30, 30, 20, None],
    }
    write_state(folder, state)
    found = tables(build_report(folder), "cost")
    assert found["Prompts evaluated"] == [
        ["on dev, by the search", "540"],
        ["on test, at the end", "80"],
    ]
    saved = [row[1] for row in found["Prompts saved"]]
    assert saved == ["40", "20", "30"]
    assert measure_economy(RunFolder(folder))["prompts"][-1] == 540


# Files


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
    runs = "its runs are search/cmp/random_seed42, search/cmp/random_seed43; name one of them"
    for folder, words in {
        "search/tuned": "search/tuned contains no search, but a fine-tuning: its results are in "
        "search/tuned/tuning.json, its adapter is search/tuned/tuned",
        "search/cmp": f"search/cmp contains no search: {runs}",
        "search": "search contains no search: its runs are search/first, search/cmp/random_seed42, "
        "search/cmp/random_seed43, search/swept/trial_00; name one of them",
        "search/trial_0": "search/trial_0 contains no search; did you mean search/swept/trial_00?",
        "search/swept": "search/swept is a study: its runs are search/swept/trial_00; name one of "
        "them",
        "first": "first contains no search; did you mean search/first?",
        "search/frist": "search/frist contains no search; did you mean search/first?",
        "search/first/answers": "search/first/answers contains no search; did you mean "
        "search/first?",
        "chess": "chess contains no search; allowed: a folder of search/ with a rounds.jsonl",
    }.items():
        with pytest.raises(UserError) as caught:
            RunFolder(folder)
        assert str(caught.value) == words
    names = [RunFolder(f"search/{name}").name for name in ("first", "swept/trial_00")]
    assert (
        names == ["first", "swept/trial_00"]
        and build_report("search/swept/trial_00").name == names[1]
    )


def test_a_report_is_written_over_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folders.folder(tmp_path / "run", finished=False)
    write_report(folder)
    done = run_folders.folder(tmp_path / "done")
    for name in ("rounds.jsonl", "run.json"):
        shutil.copy(done / name, folder / name)
    shutil.copytree(tmp_path / "done" / "answers", folder / "answers", dirs_exist_ok=True)
    write_report(folder)
    assert "Still running" not in (folder / "report.html").read_text()
    assert not list(folder.rglob(".*.tmp"))


# Charts


def test_tables_of_the_result_come_first(tmp_path: Path) -> None:
    def more(verdict: Verdict) -> Verdict:
        (expert,) = verdict.alternatives
        domains = {name: Measured(0.5, 0.0, 1.0, 9) for name in ("maths", "law")}
        found, expert = (
            replace(one, test=replace(one.test, domains=domains))
            for one in (verdict.found, expert)
            if one.test
        )
        return replace(verdict, found=found, alternatives=[expert])

    made = build_report(run_folders.folder(tmp_path / "run", more=more)).sections[0]
    captions = [one.caption for one in made.blocks[:2] if isinstance(one, TableBlock)]
    assert [words.split(";")[0] for words in captions] == [
        "Utilities with 95 % intervals, and the rate of unparsed answers",
        "Utilities by domain",
    ]


def test_the_command_goes_on_after_a_bad_folder(tmp_path: Path) -> None:
    folders = [run_folders.folder(tmp_path / name, iterations=0) for name in ("a", "d")]
    given = [str(tmp_path / name) for name in ("a", "nothing", "d")]
    done = CliRunner().invoke(entry.report, given, standalone_mode=False)
    assert done.return_value == 1 and all((folder / "report.html").is_file() for folder in folders)
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
