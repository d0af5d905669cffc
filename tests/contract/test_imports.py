"""Who may import whom: the order of docs/architecture.md against the import statements."""

import ast
import re
import subprocess
import sys

import pytest
import searches

PACKAGE = searches.ROOT / "swarm"
EVERYWHERE = {"errors", "_version"}

PATHS = {
    ".".join(path.relative_to(searches.ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Module -> its file."""


def rooms_in_order() -> list[str]:
    """The packages and modules of swarm/ in the order of the architecture's tree."""
    text = (searches.ROOT / "docs" / "architecture.md").read_text()
    tree = text[text.index("\nswarm/\n") : text.index("```\n\n", text.index("\nswarm/\n"))]
    lines = re.findall(r"^  (\w+(?:/|\.py)(?:  \w+(?:/|\.py))*)", tree, re.MULTILINE)
    return [name for line in lines for name in re.findall(r"\w+(?=/|\.py)", line)]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    """Module -> our modules it imports anywhere: in functions and for type checking, too."""
    found = {}
    for module, path in PATHS.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                names |= {name if name in PATHS else str(node.module) for name in full}
        found[module] = names & set(PATHS)
    return found


def test_packages_import_what_stands_before_them(needs: dict[str, set[str]]) -> None:
    order = rooms_in_order()
    rooms = {room(module) for module in PATHS} - {"", "__main__", "_version"}
    assert set(order) == rooms and len(order) == len(rooms)
    wrong = [
        f"{module} imports {one}"
        for module, others in needs.items()
        for one in others
        if (here := room(module)) not in ("", "__main__", *EVERYWHERE)
        and (there := room(one)) not in ("", here, *EVERYWHERE)
        and order.index(there) > order.index(here)
    ]
    assert wrong == []


def test_modules_import_each_other_without_circles(needs: dict[str, set[str]]) -> None:
    left = dict(needs)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    # What remains is on a circle, or imports a module on one.
    assert sorted(left) == []


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
    for path in PATHS.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert length <= 65, f"{path}: {node.name} has {length} lines"


def test_modules_say_what_they_are() -> None:
    for path in PATHS.values():
        assert ast.get_docstring(ast.parse(path.read_text())), path
