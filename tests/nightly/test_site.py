"""The documentation site: built strictly, whole, and loading nothing from other machines."""

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

from swarm.__main__ import list_commands

ROOT = searches.ROOT
SEEN = ["index.html", "concepts.html", "running.html", "reference/optimizers.html"]
FIRST = {
    "own data": "tasks.html",
    "resume": "running.html",
    "own adapter": "tutorial_own_adapters.html",
    "cost": "running.html",
    "GPU": "gpus.html",
}
"""The page that a search of the site shows first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from its pages; a warning is a failure."""
    folder = tmp_path_factory.mktemp("site")
    pages = [sys.executable, ROOT / "scripts" / "site_pages.py", folder / "pages"]
    subprocess.run(pages, cwd=ROOT, check=True)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = config.replace("build/", "")  # paths are relative to this file
    config = config.replace("paths: [.]", f"paths: [{ROOT}]")
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "-f", folder / "mkdocs.yml"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "No issues found" in done.stderr, done.stdout + done.stderr
    return folder / "site"


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
    linked = set(re.findall(r'href="(?:\./)?([^"#]+\.html)"', start))
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name == "index.html" or name in linked, name
    assert {"contributing.html", "changelog.html", "initial_experts.html"} <= linked


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# Start\n\n[gone](gone.md)\n")
    config = "site_name: x\ndocs_dir: pages\nsite_dir: site\nstrict: true\nnav: [index.md]\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0


def test_links_to_the_repository_show_its_files(site: Path) -> None:
    page = (site / "tasks.html").read_text(encoding="utf-8")
    assert re.search(r'href="(\./)?files/conf/task/medqa.yaml.html"', page)
    text = (site / "files" / "conf" / "task" / "medqa.yaml.html").read_text(encoding="utf-8")
    assert "swarm.tasks.multiple_choice.MultipleChoice" in text
    folder = (site / "files" / "conf" / "consortium.html").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "conf" / "consortium").glob("*.yaml")]
    assert names and all(name in folder for name in names)


def text_of(page: Path) -> str:
    """A built page without its tags."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_the_reference_has_every_command(site: Path) -> None:
    text = text_of(site / "reference" / "commands.html")
    for command in list_commands():
        assert f"swarm.{command.name}" in text or f"{command.name}.py" in text, command.name
    assert str(ROOT) not in text and "--confidence-threshold" in text


def test_the_reference_has_every_key(site: Path) -> None:
    pages = (site.parent / "pages" / "reference").glob("keys*.md")
    text = " ".join(" ".join(page.read_text(encoding="utf-8") for page in pages).split())
    text = text.replace("\\|", "|").replace("&lt;", "<")
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        for key, comment in keys(path):
            assert re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text), (path.name, key)
            # Of the tasks of one class, one is shown with its comments.
            if path.parent.name != "task":
                assert " ".join(comment.split()) in text, (path.name, key, comment)


def keys(path: Path) -> Iterator[tuple[str, str]]:
    """Each key of the first level of a yaml that has a comment on its line, with the comment."""
    group = path.parent.name
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"(\w+): +\S.*? +# (.+)$", line)
        if match and match[1] != "defaults" and not match[1].startswith("_") and '"' not in line:
            dotted = group not in ("conf", "experiment", "moa", "consortium", "study")
            yield (f"{group}.{match[1]}" if dotted else match[1]), match[2]


def test_the_reference_has_what_is_public(site: Path) -> None:
    wanted = {
        "python": ["swarm.pool.pool.Pool", "swarm.api"],
        "tasks": [
            "swarm.tasks.base.Task",
            "swarm.tasks.exact_match.ExactMatch",
            "swarm.scorers.llm_judge.LLMJudge",
        ],
        "optimizers": ["swarm.optimizers.base.Optimizer", "swarm.optimizers.swarm.MemeticSwarm"],
        "models": ["swarm.models.base.Request", "swarm.registry.registry.Roster"],
        "compare": ["swarm.compare.question.Question"],
    }
    for page, names in wanted.items():
        text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        assert all(f'id="{name}' in text for name in names), (page, names)


def test_signatures_are_wrapped(site: Path) -> None:
    text = (site / "reference" / "optimizers.html").read_text(encoding="utf-8")
    shown = re.findall(r'class="doc-signature highlight">.*?<code>(.*?)</code>', text, re.DOTALL)
    lines = unescape(re.sub(r"<[^>]+>", "", "\n".join(shown))).splitlines()
    assert len(lines) > 100 and max(map(len, lines)) <= 90


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


SEARCHED = """
() => {
    const walk = node => [...(node.shadowRoot ? walk(node.shadowRoot) : []), ...[...node.children]
        .flatMap(one => [...(one.tagName === "A" ? [one.href] : []), ...walk(one)])];
    const root = [...document.querySelectorAll("*")].filter(one => one.shadowRoot);
    return root.flatMap(one => walk(one.shadowRoot));
}
"""
"""The results of the site's search, which are in shadow trees."""


def test_the_search_finds_the_right_page_first(browser: Any, address: str) -> None:
    with shown(browser, address) as view:
        for query, page in FIRST.items():
            view.goto(address + "index.html")
            view.locator(".md-search__button").click()
            view.wait_for_timeout(500)
            view.keyboard.type(query)
            view.wait_for_function(f"() => ({SEARCHED})().length > 2")
            view.wait_for_timeout(500)
            assert page in view.evaluate(SEARCHED)[0], query
