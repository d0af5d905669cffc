"""Pages are sent before their content is loaded: NiceGUI answers 500 after three seconds."""

import ast

from swarm._util.files import PACKAGE_FOLDER


def test_no_page_waits_for_its_content() -> None:
    """A page that is a coroutine is sent when it has ended; see `layout.draw_when_loaded`."""
    pages, waiting = [], []
    for path in sorted((PACKAGE_FOLDER / "ui").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(ast.unparse(one).startswith("ui.page(") for one in node.decorator_list):
                pages.append(node.name)
                waiting += [node.name] * isinstance(node, ast.AsyncFunctionDef)
    assert len(pages) == 7 and waiting == []
