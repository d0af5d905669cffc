"""A hook of mkdocs: pages that lie outside docs/, and what of the repository the pages link to."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "initial_experts/README.md": "initial_experts.md",
    "search/README.md": "run_folder.md",
}
"""Where a page of the repository is on the site."""

SOURCES = {page: source for source, page in PAGES.items() if page != "index.md"}
LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
KINDS = {".py": "python", ".yaml": "yaml", ".json": "json", ".jsonl": "json", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and a page for each file or folder that one links to."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for target in sorted({t for file in files.documentation_pages() for t in targets(file)}):
        files.append(File.generated(config, shown_at(target), content=shown(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links as they hold in the repository into links as they hold on the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        target = repository_path(here, match[1])
        if target is None:
            return match[0]
        there = site_path(target)
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{match[2] or ''})"

    return LINK.sub(moved, markdown)


def repository_path(page: str, link: str) -> str | None:
    """What a page's link means, from the repository's root; `None` where there is no such thing."""
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def site_path(target: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else shown_at(target)


def shown_at(target: str) -> str:
    """The page that shows a file or folder of the repository."""
    return f"files/{target}.md"


def targets(file: File) -> set[str]:
    """The files and folders of the repository that a page links to and that are no pages."""
    if file.src_uri.startswith("files/"):
        return set()
    found = {repository_path(file.src_uri, link) for link, _ in LINK.findall(file.content_string)}
    return {t for t in found if t and t not in PAGES and not t.startswith("docs/")}


def shown(target: str) -> str:
    """A page with a file's text, or with that of all text files of a folder."""
    path = ROOT / target
    files = (
        [path]
        if path.is_file()
        else sorted(Path(where, name) for where, _, names in os.walk(path) for name in names)
    )
    parts = ["---", "search:", "  exclude: true", "---", f"# `{target}`", ""]
    for file in files:
        kind = KINDS.get(file.suffix, "text" if file.suffix in ("", ".md", ".toml") else None)
        if kind is None:
            continue
        if path.is_dir():
            parts += [f"## `{file.relative_to(path).as_posix()}`", ""]
        parts += [f"````{kind}", file.read_text("utf-8").rstrip(), "````", ""]
    return "\n".join(parts)
