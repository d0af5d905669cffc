"""The documentation site: built strictly, whole, and asking nothing of other machines."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import searches
from headless_browser import SIZES, shown

ROOT = searches.ROOT
SEEN = ["index.html", "concepts.html", "tasks.html", "reference/optimizers.html"]
QUIET = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, or a failure: a warning is one."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Loaded(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = tag in ("script", "img", "iframe", "source") or (
            tag == "link" and given.get("rel") not in ("canonical", "next", "prev")
        )
        self.found += [v for k, v in attrs if loads and k in ("src", "href") and v]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        reader = Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found
        assert [one for one in reader.found if re.match(r"(https?:)?//", one)] == [], page


def test_every_page_of_docs_is_in_the_navigation(site: Path) -> None:
    start = unescape((site / "index.html").read_text(encoding="utf-8"))
    linked = set(re.findall(r'href="([^"#]+\.html)"', start))
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name == "index.html" or name in linked, name
    assert {"contributing.html", "changelog.html", "initial_experts.html"} <= linked


def test_links_to_the_repository_show_its_files(site: Path) -> None:
    page = (site / "tasks.html").read_text(encoding="utf-8")
    assert 'href="files/conf/task/mmlu.yaml.html"' in page
    text = (site / "files" / "conf" / "task" / "mmlu.yaml.html").read_text(encoding="utf-8")
    assert "swarm.tasks.multiple_choice.MultipleChoice" in text
    folder = (site / "files" / "conf" / "consortium.html").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "conf" / "consortium").glob("*.yaml")]
    assert names and all(name in folder for name in names)


def test_the_reference_has_what_is_public(site: Path) -> None:
    wanted = {
        "python": ["swarm.pool.pool.Pool", "swarm.api"],
        "tasks": [
            "swarm.tasks.base.Task",
            "swarm.tasks.exact_match.ExactMatch",
            "swarm.scorers.llm_judge.LLMJudge",
        ],
        "optimizers": ["swarm.optimizers.base.Optimizer", "swarm.optimizers.pso.ParticleSwarm"],
        "models": ["swarm.models.base.Request", "swarm.registry.registry.Roster"],
        "compare": ["swarm.compare.question.Question"],
    }
    for page, names in wanted.items():
        text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        assert all(f'id="{name}' in text for name in names), (page, names)


@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_stays_at_home(browser: Any, address: str, size: str) -> None:
    with shown(browser, address, size, "dark" if size == "telephone" else "light") as view:
        for page in SEEN:
            view.goto(address + page)
            wide = view.evaluate("document.documentElement.scrollWidth")
            assert wide <= SIZES[size]["width"], page
            assert view.locator("h1").first.is_visible()
            broken = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
            assert view.evaluate(broken) == []


def test_the_search_finds_without_a_network(browser: Any, address: str) -> None:
    with shown(browser, address) as view:
        view.keyboard.press("/")
        view.keyboard.type("hill climbing")
        view.locator(".md-search-result__link[href*='contributing']").first.wait_for()
