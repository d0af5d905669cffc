"""Write the pages of the documentation site: python scripts/site_pages.py [FOLDER].

The folder, by default build/pages, receives docs/, the pages that lie elsewhere in the repository,
a page for each file or folder that a page links to, and the content of markers in docs/reference:

    <!-- keys: search.yaml pool -->       tables of the keys of files and folders of conf/
    <!-- yaml: experiment -->             the text of files and folders of conf/
    <!-- options: task -->                a table of the files of a folder of conf/
    <!-- help: search, compare run -->    the output of python -m swarm.search --help and others
"""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "initial_experts/README.md": "initial_experts.md",
    "search/README.md": "run_folder.md",
}
"""Pages of the site for files outside docs/; docs/index.md takes the place of the README."""

SOURCES = {page: source for source, page in PAGES.items() if page != "index.md"}
LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
MARKER = re.compile(r"^<!-- (keys|yaml|options|help): ([^>]+?) -->$", re.MULTILINE)
KEY = re.compile(r"^(\s*)(- )?([\w./@-]+|\"[^\"]+\"):(?: +(.*))?$")
NOTE = re.compile(r"<!-- repository -->.*?<!-- /repository -->\n*", re.DOTALL)
"""What only readers of the repository see."""

VALUE = re.compile(r"""((?:"[^"]*"|'[^']*'|[^#"']|(?<! )#)*?)\s*(?:(?:^|(?<=\s))# ?(.*))?$""")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".jsonl": "json", ".sh": "bash"}


def write_pages(folder: Path) -> None:
    """Write the Markdown of the complete site to `folder`, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    shutil.copy(ROOT / "swarm" / "report" / "icon.svg", folder)
    for page, source in SOURCES.items():
        shutil.copy(ROOT / source, folder / page)
    texts = {
        path.relative_to(folder).as_posix(): NOTE.sub("", path.read_text("utf-8"))
        for path in sorted(folder.rglob("*.md"))
    }
    texts = fill_markers(texts)
    for target in sorted({one for page, text in texts.items() for one in shown_files(page, text)}):
        path = folder / file_page(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_files(target), "utf-8")
    for page, text in texts.items():
        (folder / page).write_text(rewrite_links(page, text), "utf-8")


def rewrite_links(page: str, text: str) -> str:
    """Return the text with links that hold in the repository as links that hold on the site."""

    def moved(match: re.Match[str]) -> str:
        target = repository_path(page, match[1])
        if target is None:
            return match[0]
        there = posixpath.relpath(site_page(target), posixpath.dirname(page) or ".")
        return f"]({there}{match[2] or ''})"

    return LINK.sub(moved, text)


def repository_path(page: str, link: str) -> str | None:
    """Return the path from the repository's root that a link refers to, if it exists."""
    shown = page.removeprefix("files/").removesuffix(".md")  # as `file_page`
    source = shown if page.startswith("files/") else SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def site_page(target: str) -> str:
    """Return the page of the site for a path of the repository."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else file_page(target)


def file_page(target: str) -> str:
    """Return the page that shows a file or folder of the repository."""
    return f"files/{target}.md"


def shown_files(page: str, text: str) -> set[str]:
    """Return the linked files and folders of the repository that are not pages themselves."""
    found = {repository_path(page, link) for link, _ in LINK.findall(text)}
    return {one for one in found if one and one not in PAGES and not one.startswith("docs/")}


def render_files(target: str) -> str:
    """Return a page with a notebook, the text of a file, or of all text files of a folder."""
    path = ROOT / target
    if path.suffix == ".ipynb":
        return UNSEARCHED + rewrite_links(file_page(target), render_notebook(path))
    files = [path]
    if path.is_dir():
        files = sorted(Path(where, name) for where, _, names in os.walk(path) for name in names)
    parts = [UNSEARCHED, f"# `{target}`", ""]
    for file in files:
        plain = "text" if file.suffix in ("", ".md", ".toml") else None
        language = LANGUAGES.get(file.suffix, plain)
        if language is None:
            continue
        if path.is_dir():
            parts += [f"## `{file.relative_to(path).as_posix()}`", ""]
        parts += [f"````{language}", file.read_text("utf-8").rstrip(), "````", ""]
    return "\n".join(parts)


def render_notebook(path: Path) -> str:
    """Return the cells of a notebook."""
    cells = [
        (one["cell_type"], "".join(one["source"])) for one in json.loads(path.read_text())["cells"]
    ]
    return "\n\n".join(f"```python\n{one}\n```" if kind == "code" else one for kind, one in cells)


def fill_markers(texts: dict[str, str]) -> dict[str, str]:
    """Return the pages, by name, with the markers replaced by what they stand for."""
    found = (match for text in texts.values() for match in MARKER.finditer(text))
    lists = [match[2].split(", ") for match in found if match[1] == "help"]
    printed = run_helps(sorted({command for commands in lists for command in commands}))

    def filled(match: re.Match[str]) -> str:
        kind, words = match.groups()
        if kind == "help":
            named = words.split(", ")
            return "\n\n".join(f"### {name}\n\n```text\n{printed[name]}\n```" for name in named)
        paths = [one for word in words.split() for one in list_yaml(ROOT / "conf" / word)]
        if kind == "options":
            rows = [f"| `{one.stem}` | {escape(read_yaml(one)[0])} |" for one in paths]
            return "\n".join(["| | |", "| --- | --- |", *rows])
        render = render_keys if kind == "keys" else render_yaml
        return "\n\n".join(render(one) for one in paths)

    return {page: MARKER.sub(filled, text) for page, text in texts.items()}


PRINT_HELPS = """
import contextlib, io, json, runpy, sys
printed = []
for words in json.load(sys.stdin):
    sys.argv = [words[0], *words[1:], "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_module(f"swarm.{words[0]}", run_name="__main__", alter_sys=True)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def run_helps(commands: list[str]) -> dict[str, str]:
    """Return the output of `python -m swarm.COMMAND --help`, without this machine's paths.

    Commands with the same first word share a process.
    """
    by_module: dict[str, list[str]] = {}
    for one in commands:
        by_module.setdefault(one.split()[0], []).append(one)

    def run(some: list[str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PRINT_HELPS],
            input=json.dumps([one.split() for one in some]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "88", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
        )
        texts = json.loads(done.stdout) if done.returncode == 0 else [""]
        if not all(texts):
            sys.exit(f"--help of {', '.join(some)}: {done.stderr.strip()}")
        return [text.replace(f"{ROOT}/", "").rstrip() for text in texts]

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(run, by_module.values())
        return {
            one: text
            for some, texts in zip(by_module.values(), found, strict=True)
            for one, text in zip(some, texts, strict=True)
        }


def list_yaml(path: Path) -> list[Path]:
    """Return a yaml, or every yaml of a folder."""
    return sorted(path.glob("*.yaml")) if path.is_dir() else [path]


def title(path: Path) -> str:
    """Return the heading of a yaml: `group=option`, or the file's name outside a group."""
    group = path.parent.name
    return f"### `{path.name if group == 'conf' else f'{group}={path.stem}'}`"


def render_yaml(path: Path) -> str:
    """Return a section with the text of a yaml of conf/."""
    return f"{title(path)}\n\n```yaml\n{path.read_text('utf-8').rstrip()}\n```"


def render_keys(path: Path) -> str:
    """Return a section with a table of the keys of a yaml of conf/."""
    prefix = "" if path.parent.name == "conf" else f"{path.parent.name}."
    about, rows = read_yaml(path)
    lines = [title(path), "", escape(about), ""]
    if rows:
        lines += ["| key | value | |", "| --- | --- | --- |"]
    for key, value, comment in rows:
        shown = f"`{escape(value)}`" if value else ""
        lines.append(f"| `{prefix}{key}` | {shown} | {escape(comment)} |")
    return "\n".join(lines)


def read_yaml(path: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the first comment of a yaml, and (key, value, comment) of its keys in order.

    A key without a comment on its line has the comment lines directly above it. Hydra's own
    sections, `defaults` and `_target_` are left out.
    """
    lines = path.read_text("utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("# @package")]
    first = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    about = " ".join(line.lstrip("# ").rstrip() for line in lines[:first])
    rows: list[tuple[str, str, str]] = []
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in lines[first:]:
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("#"):
            text = line.strip().lstrip("# ")
            if rows and indent > parents[-1][0] + 2 and not above:  # a comment that goes on
                rows[-1] = (*rows[-1][:2], f"{rows[-1][2]} {text}")
            else:
                above.append(text)
            continue
        match = KEY.match(line)
        if not match or match[2]:
            above = []
            continue
        parents = [one for one in parents if one[0] < indent]
        parents.append((indent, match[3]))
        key = ".".join(name for _, name in parents)
        value, comment = split_comment(match[4] or "")
        comment = comment or " ".join(above)
        above = []
        hidden = parents[0][1] in ("hydra", "defaults") or match[3] == "_target_"
        if not hidden and (value or comment):
            rows.append((key, value, comment))
    return about, rows


def split_comment(text: str) -> tuple[str, str]:
    """Split the text after a key into its value and its comment."""
    found = VALUE.match(text)
    return (found[1].strip(), (found[2] or "").strip()) if found else (text, "")


def escape(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "pages"))
