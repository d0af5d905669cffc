"""Who may import whom: the table of docs/architecture.md against the import statements."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import searches

PACKAGE = searches.ROOT / "swarm"
EVERYWHERE = {"errors", "_version"}


def table() -> dict[str, set[str]]:
    """Room -> the rooms it may import, read from the architecture's table."""
    text = (searches.ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \|([^|]*)\|", text, re.MULTILINE)
    return {room: set(re.findall(r"`([\w.]+)`", allowed)) for room, allowed in rows}


def room(module: str) -> str:
    """The part of a module's name that the table speaks of."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports() -> list[tuple[str, str, str]]:
    """(importing room, imported room, file) for every import of ours."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here = room(".".join(("swarm", *path.relative_to(PACKAGE).with_suffix("").parts)))
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "swarm":
                    names = [f"swarm.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("swarm."):
                    found.append((here, room(name), str(path.relative_to(PACKAGE))))
    return found


def test_imports_keep_to_the_table() -> None:
    allowed = table()
    assert allowed, "docs/architecture.md has no table"
    wrong = [
        f"{file}: {here} imports {there}"
        for here, there, file in imports()
        if here != there and there not in EVERYWHERE | allowed.get(here, set())
    ]
    assert wrong == []


def test_the_table_has_no_cycle_and_no_stranger() -> None:
    allowed = table()
    rooms = {
        p.stem if p.is_file() else p.name
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    } - {"__init__"}
    assert set(allowed) | EVERYWHERE >= rooms, "a room is missing from the table"
    left = dict(allowed)
    while left:
        free = [r for r, needs in left.items() if not needs & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        for r in free:
            del left[r]


def test_modules_import_each_other_without_circles() -> None:
    """Every import statement counts: those in functions and for type checking, too."""
    paths = {
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    needs: dict[str, set[str]] = {}
    for name, path in paths.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    names.add(full if full in paths else node.module)
        needs[name] = names & set(paths)
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    # What remains is on a circle, or imports a module on one.
    assert sorted(needs) == []


@pytest.mark.parametrize(
    "module", ["swarm", "swarm.pool", "swarm.loop.run", "swarm.search", "swarm.optimizers.pso"]
)
def test_nothing_heavy_is_imported_before_it_is_used(module: str) -> None:
    heavy = ("torch", "transformers", "wandb")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        env=searches.environment(),
        check=True,
    )
    assert out.stdout.strip() == "[]"


def test_a_function_fits_on_a_screen() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert length <= 65, f"{path}: {node.name} has {length} lines"


def test_modules_say_what_they_are() -> None:
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        assert ast.get_docstring(ast.parse(path.read_text())), path
