"""A task whose answers the user's Python function scores: f(prompt, answer, item) -> float."""

import ast
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from swarm._util.settings import FiniteNumber, checked
from swarm._util.threads import PARSING
from swarm.errors import UserError
from swarm.models.function import describe_exception, function_name, import_function
from swarm.tasks.base import Item, Score
from swarm.tasks.free_text import FreeText, Scorer

IDENTIFIER = re.compile(r"[^\W\d]\w*")


@checked("task")
@dataclass(eq=False)
class FunctionScorer(Scorer):
    """Scores texts by a function that is called with the prompt, the text and the item.

    A blank text is unparsed, but is passed to the function like any other.

    Args:
        function: The function, or its dotted path, "module.name", importable from Python's path or
            the current folder. `None` fails in `check`.
        highest: Upper bound of the function's values; `None` if there is none.
        template: The prompt, with the item's fields in braces.
    """

    function: str | Callable[..., Any] | None
    highest: FiniteNumber | None = None
    template: str = "{prompt}"

    needs_setup = True

    def __post_init__(self) -> None:
        self.path = function_name(self.function) if callable(self.function) else self.function

    def check(self) -> None:
        """See `Setup.check`.

        Raises:
            UserError: The function cannot be imported, or not be called with three arguments.
        """
        try:
            inspect.signature(self._load_function()).bind("prompt", "answer", {})
        except TypeError as error:
            raise UserError(f"""task.function: {self.path} cannot be called with (prompt, answer,
                item): {error}.""") from None
        except ValueError:
            pass  # Some functions written in C have no signature.

    def source_digests(self) -> dict[str, str]:
        """See `Setup.source_digests`: the function, and what it uses from its own folder."""
        return {"function source": source_digest(self._load_function())}

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """See `Scorer.score`.

        Raises:
            UserError: The function failed or returned no finite number; the message names the item.
        """
        function = self._load_function()
        return [
            Score(self._call_function(function, item, text), text if text.strip() else None, text)
            for item, text in zip(items, texts, strict=True)
        ]

    def _call_function(self, function: Callable[..., Any], item: Item, text: str) -> float:
        try:
            given = function(self.template.format_map(item), text, dict(item))
        except Exception as error:
            described = describe_exception(error, function)
            raise UserError(f"{self.path} failed on item {item['id']!r}: {described}.") from error
        returned = f"{self.path} returned {given!r:.80} for item {item['id']!r}"
        try:
            # A number of any type, such as a bool or one of numpy; a text is none.
            value = float("nan") if isinstance(given, str | bytes) else float(given)
        except (TypeError, ValueError, OverflowError):
            value = float("nan")
        if not isfinite(value):
            raise UserError(f"{returned}: must be a finite number.")
        if self.highest is not None and value > self.highest:
            raise UserError(f"{returned}, which is more than task.highest={self.highest}.")
        return value

    def _load_function(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            UserError: It cannot be imported.
        """
        if callable(self.function):
            return self.function
        if not self.function:
            raise UserError("task.function is missing: set task.function=module.name.")
        module, _, name = self.function.rpartition(".")
        if not module:
            raise UserError(f"task.function: {self.function!r} is not module.name.")
        return import_function(module, name, "task.function")


@checked("task")
@dataclass(eq=False)
class FunctionTask(FreeText):
    """Items with a prompt, whose answers a Python function scores.

    The utility is the mean of the function's values.

    Args:
        function, highest: See `FunctionScorer`.

    The others are those of `FreeText`.
    """

    scorer: Scorer = field(init=False)
    function: str | Callable[..., Any] | None = None
    highest: FiniteNumber | None = None

    def __post_init__(self) -> None:
        self.scorer = FunctionScorer(self.function, self.highest, self.template)
        super().__post_init__()


def source_digest(function: Callable[..., Any]) -> str:
    """Return 16 hexadecimal digits that change with a function's source and its dependencies.

    These are the definitions of its module under names that occur in it, recursively, and modules
    in the module's folder that they import. Other definitions of the module do not count, so that a
    script can contain the function and start the search.
    """
    parts = []
    while isinstance(function, partial):
        parts.append(repr((function.args, function.keywords)))
        function = function.func
    target: Any = inspect.unwrap(function)
    if not (hasattr(target, "__code__") or inspect.isclass(target) or inspect.isroutine(target)):
        target = type(target)  # an object with __call__
    try:
        with PARSING:  # the source of a class is found by ast.parse
            source = inspect.getsource(target)
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        source = repr((code.co_code, code.co_consts) if code else target)
    file = getattr(inspect.getmodule(target), "__file__", None)
    parts += [source, *(_used_definitions(Path(file), source, {Path(file)}) if file else [])]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def _used_definitions(file: Path, source: str, seen: set[Path]) -> list[str]:
    """Return the definitions of a file that a source uses, and the local files they import."""
    try:
        text = file.read_text(encoding="utf-8")
        with PARSING:
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return []
    used: dict[int, tuple[ast.stmt, str]] = {}
    names = set(IDENTIFIER.findall(source))
    count = -1
    while count < len(used):  # until no further definition is used
        count = len(used)
        for node in tree.body:
            if node.lineno not in used and names & _defined_names(node):
                used[node.lineno] = node, ast.get_source_segment(text, node) or ""
                names |= set(IDENTIFIER.findall(used[node.lineno][1]))
    found = [segment for _, (_, segment) in sorted(used.items())]
    for node, _ in used.values():
        for imported in sorted(_imported_files(file, node) - seen):
            seen.add(imported)
            source_text = imported.read_text(encoding="utf-8", errors="replace")
            found += [source_text, *_used_definitions(imported, source_text, seen)]
    return found


def _defined_names(node: ast.stmt) -> set[str]:
    """Return the names that a module-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return set()
    # table["key"] = 1 and thing.attribute = 1 change what the name stands for, too.
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for tree in targets for one in ast.walk(tree) if isinstance(one, ast.Name)}


def _imported_files(file: Path, statement: ast.stmt) -> set[Path]:
    """Return the files in a module's folder that a statement imports."""
    named: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            named += [node.module or "", *(prefix + alias.name for alias in node.names)]
    paths = [file.parent / name.replace(".", "/") for name in named if name]
    both = [one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py")]
    return {one for one in both if one.is_file() and one != file}
