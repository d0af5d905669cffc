"""Every command in a Python that has the dependencies, and no package of an extra."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from searches import environment

from swarm.__main__ import list_commands

BLOCKED_PACKAGES = """\
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {blocked!r}:
            return super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]
"""

COMMANDS = {
    "cache": ["info"],
    "compare": ["run questions.yaml --models m"],
    "consortium": ["hello --consortium none"],
    "evaluate": ["task=none"],
    "experts": ["fetch --to mine"],
    "export": ["search/first to=mine"],
    "fetch_data": ["--help"],
    "finetune": ["task=none"],
    "judge": ["mt_bench show --out outputs", "alpaca_eval show outputs"],
    "moa": ["hello --preset none"],
    "pool": ["check none"],
    "report": ["search/first"],
    "search": ["task=lm_eval"],
    "serve": ["", "mcp"],
    "study": ["none"],
    "ui": [""],
}
"""Arguments of every command, such that it ends at once."""

EXTRAS = {"serve ": "serve", "serve mcp": "mcp", "ui ": "ui", "search task=lm_eval": "lm-eval"}
"""Commands that need an extra."""


def top_level_packages() -> set[str]:
    """Names of installed packages that no dependency of the project needs without an extra."""
    needed: set[tuple[str, ...]] = set()

    def add(name: str, extras: tuple[str, ...] = ()) -> None:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, *extras) in needed:
            return
        needed.add((key, *extras))
        try:
            found = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return
        for one in map(Requirement, found):
            marker = one.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, "")):
                add(one.name, tuple(sorted(one.extras)))

    add("model-swarms")
    names = {key for key, *_ in needed}
    return {
        package
        for package, owners in metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", one).lower() in names for one in owners)
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that blocks the packages."""
    blocked = top_level_packages()
    assert {"fastapi", "starlette", "uvicorn", "nicegui", "ray", "pandas"} <= blocked
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(BLOCKED_PACKAGES.format(blocked=blocked))
    return folder


def test_every_command_is_here() -> None:
    assert [one.name for one in list_commands()] == [*COMMANDS]


@pytest.mark.parametrize("line", [f"{name} {one}" for name in COMMANDS for one in COMMANDS[name]])
def test_a_command_without_extras_ends_in_one_line(line: str, site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm", *line.split()],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout + done.stderr
    errors = [one for one in done.stderr.splitlines() if re.match("(?i)error: ", one)]
    assert len(errors) == (done.returncode != 0), done.stderr
    if extra := EXTRAS.get(line):
        assert "is not installed: pip install" in errors[0] and f"[{extra}]" in errors[0]
