"""The report in a real browser, at the widths of a desk and of a telephone, light and dark."""

import re
from pathlib import Path
from typing import Any

import pytest
import run_folders
from headless_browser import SIZES, shown

from swarm.report.build import build_report
from swarm.report.html import render_page

KINDS = {
    "big": {"particles": 20, "iterations": 50, "experts": 9, "items": 60, "test": 300},
    "running": {"finished": False, "text": run_folders.HOSTILE},
    "groups": {"groups": [f"layers.{n}" for n in range(5)], "parts": ["hearsay", "citation"]},
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of a written report of each kind."""
    home = tmp_path_factory.mktemp("pages")
    found = {}
    for kind, made in KINDS.items():
        folder = run_folders.folder(home / kind, **made)
        run_folders.data_file(folder, "What", made.get("test", 40))
        path = folder / "report.html"
        path.write_bytes(render_page(build_report(folder)).encode("utf-8", "replace"))
        found[kind] = path.as_uri()
    return found


DRAWN = """svg => {
  const paths = [...svg.querySelectorAll('path.line, path.dot')];
  const box = path => { const b = path.getBBox(); return b.width + b.height; };
  return [svg.clientWidth, paths.length, paths.filter(path => box(path) > 0).length];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_drawn_and_nothing_sticks_out(
    browser: Any, pages: dict[str, str], kind: str, size: str, scheme: str
) -> None:
    with shown(browser, pages[kind], size, scheme) as view:
        width = SIZES[size]["width"]
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        seen = [svg for svg in view.query_selector_all(".plot > svg") if svg.is_visible()]
        assert len(seen) >= 7 and len(seen) == sum(
            figure.is_visible() for figure in view.query_selector_all("figure")
        )
        for svg in seen:
            wide, paths, real = svg.evaluate(DRAWN)
            assert 250 < wide <= width and paths and real == paths
            letters = svg.evaluate("s => 12 * s.clientWidth / s.viewBox.baseVal.width")
            assert letters >= 10.5, "the small print is too small"
        for row in view.query_selector_all(".facts, .lead, h1, .legend"):
            if not row.is_visible():
                continue
            box = row.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        paper = view.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(252, 252, 251)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_keys_alone_reach_everything(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["groups"]) as view:
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.className") == "skip"
        view.keyboard.press("Enter")
        assert view.evaluate("document.activeElement.id") == "main"
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.closest('main') !== null")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert view.evaluate(outline) == "solid"


def test_the_toggle_turns_the_page_and_back(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["running"], scheme="dark") as view:
        paper = "getComputedStyle(document.body).backgroundColor"
        dark = view.evaluate(paper)
        button = view.get_by_role("button", name="Light page")
        button.focus()
        view.keyboard.press("Enter")
        light = view.evaluate(paper)
        assert light != dark and view.locator("#theme").inner_text() == "Dark page"
        view.keyboard.press("Space")
        assert view.evaluate(paper) == dark


def test_a_chart_is_read_by_keys_and_by_pointer(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["big"]) as view:
        plot = view.locator("#figure-particles .plot")
        tip = plot.locator(".tip")
        plot.focus()
        view.keyboard.press("ArrowRight")
        first = tip.inner_text()
        view.keyboard.press("ArrowRight")
        assert "iteration 0" in first and "iteration 1" in tip.inner_text()
        name = first.split(":")[0]
        view.keyboard.press("ArrowDown")
        assert tip.inner_text().split(":")[0] != name and plot.locator(".ring:visible").count()
        view.keyboard.press("Escape")
        assert tip.inner_text() == "" and plot.locator(".lit").count() == 0
        best = view.locator("#figure-best .plot")
        best.scroll_into_view_if_needed()
        box = best.bounding_box()
        view.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
        for step in range(20):
            view.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * step / 20)
            if best.locator(".tip").inner_text():
                break
        told = best.locator(".tip")
        assert told.inner_text().startswith("best so far: iteration ")
        edge = told.bounding_box()
        assert (
            edge["x"] >= box["x"] - 1 and edge["x"] + edge["width"] <= box["x"] + box["width"] + 1
        )


def test_tables_are_ordered_by_keys(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["big"]) as view:
        table = view.locator("#coefficients table", has_text="Experts, alone").first
        head = table.get_by_role("button", name="alone on dev")
        cells = table.locator("tbody tr td:nth-of-type(1)")
        head.focus()
        view.keyboard.press("Enter")
        down = [float(words) for words in cells.all_inner_texts()]
        assert down == sorted(down, reverse=True) and len(set(down)) > 3
        assert table.locator("th[aria-sort=descending]").count() == 1
        view.keyboard.press("Enter")
        assert [float(words) for words in cells.all_inner_texts()] == down[::-1]
        table.get_by_role("button", name="expert").first.click()
        names = table.locator("tbody th").all_inner_texts()
        assert names == sorted(names, reverse=True)


def test_items_open_and_groups_are_chosen(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["groups"], "telephone") as view:
        flip = view.locator("details.flip").first
        flip.locator("summary").focus()
        assert not flip.locator("pre").first.is_visible()
        view.keyboard.press("Enter")
        assert flip.locator("pre").first.is_visible()
        assert view.locator("#flips > .flips > details.flip").count() <= 20
        select = view.get_by_label("Group of modules")
        assert view.locator(".choice figure:visible").count() == 1
        select.focus()
        view.keyboard.press("ArrowDown")
        assert "layers.1" in view.locator(".choice figure:visible figcaption").inner_text()
        numbers = view.locator("#figure-best details")
        numbers.locator("summary").click()
        assert numbers.locator("table").is_visible()
        assert view.evaluate("document.documentElement.scrollWidth") <= 390


def test_it_prints_light_and_whole(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["big"], scheme="dark") as view:
        view.emulate_media(media="print")
        assert not view.locator("nav").is_visible() and not view.locator("#theme").is_visible()
        ink = view.evaluate("getComputedStyle(document.body).color")
        assert ink == "rgb(29, 33, 39)"
        view.set_viewport_size({"width": 700, "height": 1000})
        assert view.evaluate("document.documentElement.scrollWidth") <= 700
        pdf = view.pdf(prefer_css_page_size=True)
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1, "it is one page of print"
        shown_in_print = view.locator("section:visible").evaluate_all(
            "all => all.map(one => one.id)"
        )
        assert shown_in_print == ["result", "ends", "progress"]


def test_without_a_script_it_is_all_there(browser: Any, pages: dict[str, str]) -> None:
    context = browser.new_context(java_script_enabled=False)
    view = context.new_page()
    view.goto(pages["groups"])
    assert view.locator(".choice figure:visible").count() == 5
    assert view.locator("#theme").is_hidden()
    context.close()


def test_hostile_text_did_nothing(browser: Any, pages: dict[str, str]) -> None:
    with shown(browser, pages["running"]) as view:
        view.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert view.locator("img").count() == 0
        assert "<script>alert('x')</script>" in view.locator("details.flip pre").first.inner_text()
        path = Path(pages["running"].removeprefix("file://"))
        assert path.stat().st_size < 1_000_000
