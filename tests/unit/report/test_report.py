"""The report of a run folder: what it says, and that nothing of it can do harm."""

import json
import logging
import re
import shutil
import struct
import warnings
import xml.etree.ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
from run_folders import write_state

from swarm._util.files import short_digest
from swarm._util.terminal import format_number
from swarm.errors import UserError
from swarm.loop.reporter import buffer_log, flush_log_to
from swarm.report import __main__ as entry
from swarm.report.analyses.prompt_efficiency import measure_economy
from swarm.report.build import build_report, write_report
from swarm.report.charts import render_image
from swarm.report.document import (
    ChangedItem,
    ChangedItems,
    Chart,
    Report,
    Series,
    TableBlock,
    axis_ticks,
    tick_label,
)
from swarm.report.html import render_changed_items, render_page
from swarm.report.markdown import render_markdown
from swarm.report.paired_comparison import MAX_ITEMS_SHOWN, PairedComparison, iterate_data_items
from swarm.report.sections import read_log
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
    scripts = [one for one in document.all("script") if one.get("type") != "application/json"]
    assert scripts == [{}] and document.all("img") == [] and document.all("iframe") == []
    links = [one.get("href", "") for tag in ("a", "link") for one in document.all(tag)]
    assert all(link and link.startswith(("#", "data:")) for link in links)
    assert not any("src" in one or "style" in one or "onclick" in one for _, one in document.tags)
    ids = [one["id"] for _, one in document.tags if "id" in one]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link and link.startswith("#")} <= set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_can_be_read_without_eyes(kind: str, tmp_path: Path) -> None:
    text = render_page(build_report(run_folders.folder(tmp_path / "run", **KINDS[kind])))
    document = run_folders.Document(text)
    levels = [int(tag[1]) for tag, _ in document.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    for picture in document.all("svg"):
        assert picture.get("aria-hidden") or (picture["role"] == "img" and picture["aria-label"])
    assert len(document.all("caption")) == len(document.all("table"))
    figures = len(document.all("figure"))
    assert figures and text.count("Numbers of this chart") == figures
    assert len(document.all("figcaption")) == figures
    assert document.all("html")[0]["lang"] == "en" and document.tags[-1]


def test_what_models_write_is_never_markup(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", text=run_folders.HOSTILE)
    run_folders.data_file(folder, run_folders.HOSTILE, 40)
    assert "missing" not in str(run_folders.section(build_report(folder), "flips"))
    state = read_state(folder)
    state["experts"][1] = state["groups"][0] = run_folders.HOSTILE
    write_state(folder, state)
    found = build_report(folder)
    text, told = render_page(found), render_markdown(found, ())
    assert run_folders.Document(text).open == []
    assert text.count("</style>") == 1 and "<script>alert" not in text and "<img" not in text
    assert "\x00" not in text and "&lt;script&gt;alert(&#x27;x&#x27;)" in text
    assert not re.search(r"(?<!\\)<", told)


def test_the_policy_allows_the_own_style_and_script_alone(tmp_path: Path) -> None:
    import base64
    import hashlib

    text = render_page(build_report(run_folders.folder(tmp_path / "run")))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy and policy[1].startswith("default-src 'none'; ") and "unsafe" not in policy[1]
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert content
        hashed = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{hashed}'" in policy[1]


def test_colours_stand_out_on_both_papers() -> None:
    """3 to 1, as WCAG 2.2 asks of graphics, and 4.5 to 1 of text."""
    style = (Path(entry.__file__).parent / "page.css").read_text()
    found = dict(re.findall(r"--(\w+): (light-dark\(.+?\));", style))
    papers = re.findall(r"#\w{6}", found["paper"])
    wanted = {f"c{n}": 3.0 for n in range(7)} | {"ink": 7.0, "soft": 4.5, "link": 4.5, "bad": 4.5}
    for name, least in wanted.items():
        for colour, paper in zip(re.findall(r"#\w{6}", found[name]), papers, strict=True):
            low, high = sorted((luminance(colour), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= least, (name, colour, paper)


def luminance(colour: str) -> float:
    parts = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


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
    assert "the signal (both) that the search maximized" in progress.explanation
    charts = [one for one in progress.blocks if isinstance(one, Chart)]
    charts += [one for one in run_folders.section(found, "cost").blocks if isinstance(one, Chart)]
    assert len(charts) == 3
    for chart in charts:
        assert chart.y_name == "signal (both) on dev"
        assert chart.alt_text.endswith(", by the signal (both)")
    text = render_markdown(found, ())
    assert "Every particle's signal (both) on dev" in text
    assert "alone, signal (both) on dev" in text


def test_one_is_not_many(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", iterations=1)
    state = read_state(folder)
    state["rounds"][0]["utilities"] = [0.1] * 6
    state["rounds"][1]["utilities"] = [0.1] * 5 + [0.2]
    state["finished"] = "1 iteration done"
    write_state(folder, state)
    found = build_report(folder)
    text = render_markdown(found, ())
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
    assert list(charts) == [
        f"{best}, mean over groups",
        "Coefficients, mean of the swarm",
        f"{best}, first",
        f"{best}, last",
    ]
    position = run.positions[run.find_best()].reshape(2, 4)
    wanted = {f"{best}, last": position[1], f"{best}, mean over groups": position.mean(axis=0)}
    for title, expected in wanted.items():
        found = {one.name: one.y[-1] for one in charts[title].series}
        assert [found[name] for name in run.experts] == pytest.approx(list(expected))
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


def test_coefficients_of_many_groups_are_a_table(tmp_path: Path) -> None:
    names = [f"layer {n} q_proj" for n in range(60)]
    run = RunFolder(run_folders.folder(tmp_path / "run", groups=names))
    title = "Coefficients of the best found, by group of modules"
    report = build_report(run.path)
    assert title not in tables(report, "coefficients")
    (summary,) = run_folders.section(report, "coefficients").folded
    ((table,),) = run_folders.section(report, "coefficients").folded.values()
    assert table.caption == title
    rows = table.rows
    # Folded in the page, and in Markdown a pointer to it.
    assert f"<details><summary>{summary}</summary>" in render_page(report)
    markdown = render_markdown(report, ())
    assert f"{summary}: in report.html." in markdown and "| layer 9 q" not in markdown
    assert [row[0] for row in rows] == names
    position = run.positions[run.find_best()].reshape(60, 4)
    for row, wanted in zip(rows, position, strict=True):
        assert sorted(float(cell.replace("−", "-")) for cell in row[1:]) == pytest.approx(
            sorted(wanted), abs=0.0051
        )
    listed = render_page(build_report(run.path))
    assert "60 groups of modules" in listed and "layer 9 q_proj, ..., layer 59 q_proj" in listed


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
    fourfold = tables(build_report(folder), "statistics")["Items of test, counted"]
    assert int(fourfold[0][2]) == len(lost) and int(fourfold[1][1]) == len(won)
    assert sum(int(n) for row in fourfold for n in row[1:]) == 40


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


LOG = """2026-11-21 10:00:00,000 INFO versions: python 3.11, torch 2.9
2026-11-21 10:00:02,000 INFO search begins: task x
2026-11-21 10:00:25,000 INFO iteration 0: best 1, prompts asked 1, saved 0, tokens 100
Traceback
2026-11-21 12:00:00,000 INFO versions: python 3.11, torch 2.9
2026-11-21 12:00:03,000 INFO search resumes after 1 evaluated rounds
2026-11-21 12:00:15,000 INFO iteration 1: best 1, prompts asked 1, saved 0, tokens 23
2026-11-21 12:00:20,000 INFO ending_best_validation_utility: 1.0
"""
"""Of a search that was stopped, and ended two hours later."""


def test_time_counts_no_waiting_between_starts(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    (folder / "log.txt").write_text(LOG)
    assert read_log(RunFolder(folder)) == (45.0, 2, 123)
    before = render_page(build_report(folder))
    again = "2026-11-21 15:00:0{}\n".format
    shown = again("0,000 INFO versions: python 3.12") + again("4,000 INFO search resumes after 2")
    (folder / "log.txt").write_text(LOG + shown)
    assert render_page(build_report(folder)) == before
    measured = again("9,000 INFO ending_best_validation_utility: 1.0")
    (folder / "log.txt").write_text(LOG + shown + measured)
    assert read_log(RunFolder(folder)) == (54.0, 3, 123)
    # Logs of old versions begin a start with the second line.
    (folder / "log.txt").write_text(re.sub(r".* versions: .*\n", "", LOG))
    assert read_log(RunFolder(folder)) == (40.0, 2, 123)


def test_a_log_begins_with_the_versions(tmp_path: Path) -> None:
    held = buffer_log()
    logging.getLogger("swarm.tasks").info("read")
    flush_log_to(tmp_path, held)
    words = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert words[0].startswith("INFO versions: python ") and words[1:] == ["INFO read"]


def test_cost_counts_what_was_and_was_not_asked(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", particles=5, iterations=3, items=30)
    state = read_state(folder)
    state["rounds"][2] |= {
        "prompts_scored": 90,
        "prompts_saved": 40,
        "items_scored": [30, 30, 30, 20, None],
    }
    write_state(folder, state)
    (folder / "log.txt").write_text(LOG)
    found = tables(build_report(folder), "cost")
    assert found["Prompts evaluated"] == [
        ["on dev, by the search", "540"],
        ["on test, at the end", "80"],
    ]
    saved = [row[1] for row in found["Prompts saved"]]
    assert saved == ["40", "20", "30"]
    assert read_log(RunFolder(folder)) == (45.0, 2, 123)
    assert found["Time and tokens"][:2] == [
        ["time from start to end, without pauses between starts", "45 s"],
        ["number of starts", "2"],
    ]
    assert ["versions", "python 3.11, torch 2.9"] in tables(build_report(folder), "setup")[
        "What it ran on"
    ]
    assert measure_economy(RunFolder(folder))["prompts"][-1] == 540


# Files


def test_files_are_small_and_the_same_again(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", 20, 50, 9, 200, test=1000, text="text " * 100)
    texts = [render_page(build_report(folder)) for _ in range(2)]
    assert texts[0] == texts[1] and len(texts[0].encode()) < 1_000_000


def test_pictures_are_written(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    state = json.dumps(read_state(folder))
    strange = json.dumps("$ 数学 \ud800\x00_")
    write_state(folder, json.loads(state.replace('"calendar"', strange)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = write_report(folder)
    names = [path.stem for path in paths if path.suffix == ".png"]
    assert names == [
        "ends",
        "best",
        "particles",
        "coefficients",
        "swarm",
        "diversity",
        "map",
        "budget",
    ]
    for path in paths[2:]:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">2I", head[16:]) == (1280, 720)
    told = (folder / "report.md").read_text()
    named = re.findall(r"\]\((report/\w+\.png)\)", told)
    assert {folder / name for name in named} == set(paths[2:])


def test_markdown_tables_keep_their_columns(tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run", text="a | b\n# c")
    run_folders.data_file(folder, "What | is <b>\n# this", 40)
    lines = render_markdown(build_report(folder), ()).split("\n")
    heads = [line for line in lines if line.startswith("#")]
    assert heads[1:3] == ["## Result", "## Start and end"]
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
    assert len(columns) > 30 and min(columns) >= 3
    for a, b in pairwise(lines):
        if a.startswith("|") and b.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", a)) == len(re.findall(r"(?<!\\)\|", b))


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    with pytest.raises(UserError, match="no iteration has finished yet"):
        folder = run_folders.folder(tmp_path / "run", iterations=0)
        state = read_state(folder)
        write_state(folder, {**state, "rounds": []})
        build_report(folder)


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


def test_one_bad_folder_does_not_keep_the_others_from_their_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [run_folders.folder(tmp_path / name, iterations=0) for name in ("a", "d")]
    given = [str(tmp_path / name) for name in ("a", "nothing", "nowhere", "d")]
    assert entry.main(given) == 1
    assert all((folder / "report.html").is_file() for folder in folders)
    assert capsys.readouterr().err.count("contains no search") == 2


def test_without_a_folder_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.main([])
    assert caught.value.code == 2
    assert "the following arguments are required: search/NAME" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "low, high",
    [
        (0, 1),
        (-3.2, 7.9),
        (0.331, 0.377),
        (0, 50),
        (1e6, 9e7),
        (-1e-5, 2e-5),
        (0, 1080),
        (0.999, 1.0),
    ],
)
@pytest.mark.parametrize("most", [3, 5, 7])
def test_ticks_are_round_and_hold_the_range(low: float, high: float, most: int) -> None:
    found = axis_ticks(low, high, most)
    assert found[0] <= low + 1e-9 * abs(low) and found[-1] >= high - 1e-9 * abs(high)
    assert 2 <= len(found) <= most + 1
    steps = np.diff(found)
    assert np.allclose(steps, steps[0])
    assert any(np.isclose(float(f"{steps[0]:e}".split("e")[0]), n) for n in (1, 2, 5))
    assert len({tick_label(value, found) for value in found}) == len(found)


def test_whole_ticks_are_whole() -> None:
    assert axis_ticks(0, 4, 7, integers=True) == [0, 1, 2, 3, 4]
    assert all(value == int(value) for value in axis_ticks(-0.5, 0.5, 7, integers=True))
    assert (
        tick_label(-0.0, [0.0, 0.5]) == "0.0"
        and tick_label(-0.5, [0.0, 0.5]) == "\N{MINUS SIGN}0.5"
    )


def test_a_chart_alone_is_a_whole_file_and_hides_nothing() -> None:
    nan = float("nan")
    series = [
        Series("one & two", [0, 1, 2], [0.0, nan, 1.0]),
        Series("<b>", [0, 2], [0.5, 0.5], "steps", "strong"),
        Series("grey", [0, 1], [1.0, 0.0], weight="faint"),
        Series("spans", [0.5], [0.2], "points", spans=[(0.1, 1.9)]),
    ]
    chart = Chart("key", "A < B", "x", "y", series, marks=[("mark", 0.4)])
    tree = xml.etree.ElementTree.fromstring(render_image(chart, "svg"))
    words = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A < B", "one & two", "<b>", "spans", "mark", "x", "y"} <= set(words)
    paths = [node.get("d", "") for node in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert all(path.startswith("M") for path in paths) and "nan" not in " ".join(paths)
    groups = {node.get("id", "") for node in tree.iter("{http://www.w3.org/2000/svg}g")}
    assert {f"series-{n}" for n in range(4)} <= groups
    assert render_image(chart, "svg") == render_image(chart, "svg")
    assert [chart.series_style(n) for n in range(4)] == [0, 1, None, 2]


def test_a_chart_of_nothing_is_drawn_too() -> None:
    series = [Series("none", [0, 1], [float("nan")] * 2), Series("empty", [], [])]
    for chart in (Chart("a", "t", "x", "y", series), Chart("b", "t", "x", "y", [])):
        drawn = xml.etree.ElementTree.fromstring(render_image(chart, "svg"))
        assert drawn.tag.endswith("svg") and chart.title in "".join(drawn.itertext())


def test_items_are_folded_after_ten() -> None:
    items = [
        ChangedItem(f"item {n}", "Why?", "", ("a", "a"), ("b", "b"), (0.0, 1.0)) for n in range(12)
    ]
    for count, folded in ((10, 0), (11, 1), (12, 2)):
        html = render_changed_items(ChangedItems("Won", count, ("x", "y"), items[:count]))
        above, _, rest = html.partition('<details class="more">')
        assert above.count('class="flip"') == min(count, 10)
        assert rest.count('class="flip"') == folded and (f"{folded} more" in rest) == bool(folded)


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
