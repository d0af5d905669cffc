"""The page of a report in a real browser, on a desk and on a telephone."""

from pathlib import Path

import pytest
import run_folders
from headless_browser import SIZES, opened, shown

from swarm.report.page import write_report


@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_the_window_and_its_items_open(size: str, tmp_path: Path) -> None:
    folder = run_folders.folder(tmp_path / "run")
    run_folders.data_file(folder, "What", 40)
    address = write_report(folder).as_uri()
    with opened() as browser, shown(browser, address, size) as view:
        assert view.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
        charts = [one for one in view.locator("figure svg").all() if one.is_visible()]
        assert len(charts) == 3 and all(one.bounding_box()["width"] > 300 for one in charts)
        # A column of names is as wide as its words: none is broken.
        cells = "[...document.querySelectorAll('tbody th')]"
        assert (
            view.evaluate(f"Math.max(...{cells}.map(one => one.scrollWidth - one.clientWidth))")
            <= 0
        )
        answer = view.locator("#flips details pre").first
        for summary in ("#flips > summary", "#flips details summary >> nth=0"):
            assert not answer.is_visible()
            view.locator(summary).click()
        assert answer.is_visible() and "What number" in answer.inner_text()
