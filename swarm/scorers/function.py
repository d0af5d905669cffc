"""A task whose answers the user's Python function scores: f(prompt, answer, item) -> float."""

import ast
import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from swarm._util.settings import checked
from swarm._util.threads import PARSING, parse_python
from swarm.errors import UserError
from swarm.models.function import function_name
from swarm.tasks.base import Item, Score
from swarm.tasks.free_text import FreeText, Scorer
from swarm.tasks.reward_model import FiniteNumber

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
    highest: FiniteNumber | None = None  # type: ignore[assignment]
    template: str = "{prompt}"

    needs_setup = True

    def __post_init__(self) -> None:
        given = self.function
        self.path = function_name(given) if callable(given) else given
        self._loaded = given if callable(given) else None

    def check(self) -> None:
        """See `Setup.check`.

        Raises:
            UserError: The function cannot be imported, or not be called with three arguments.
        """
        try:
            inspect.signature(self._load_function()).bind("prompt", "answer", {})
        except TypeError as error:
            raise UserError(
                f"task.function: {self.path} cannot be called with (prompt, answer, item): {error}."
            ) from None
        except ValueError:
            pass  # Some functions written in C have no signature.

    def source_digests(self) -> dict[str, str]:
        """See `Setup.source_digests`: the function, and what it uses from its own folder."""
        return {"function source": source_digest(self._load_function())}

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        """See `swarm.tasks.free_text.Scorer`.

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
            value_returned = function(self.template.format_map(item), text, dict(item))
        except Exception as error:
            description = f"{type(error).__name__}: {error}{_error_location(error, function)}"
            raise UserError(f"{self.path} failed on item {item['id']!r}: {description}.") from error
        value = to_finite_float(value_returned)
        if value is None:
            raise UserError(
                f"{self.path} returned {value_returned!r:.80} for item {item['id']!r}: must be "
                f"a finite"
                " number."
            )
        if self.highest is not None and value > self.highest:
            raise UserError(
                f"{self.path} returned {value} for item {item['id']!r}, which is more than"
                f" task.highest={self.highest}."
            )
        return value

    def _load_function(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            UserError: It cannot be imported.
        """
        if self._loaded is not None:
            return self._loaded
        if not self.path:
            raise UserError("task.function is missing: set task.function=module.name.")
        module, _, name = self.path.rpartition(".")
        if not module:
            raise UserError(f"task.function: {self.path!r} is not module.name.")
        try:
            function = getattr(import_module(module), name, None)
        except Exception as error:
            description = f"{type(error).__name__}: {error}{_error_location(error, None)}"
            raise UserError(
                f"task.function: {module} cannot be imported from {Path.cwd()}: {description}."
            ) from error
        if not callable(function):
            raise UserError(f"task.function: {module} has no function {name!r}.")
        return function


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
    highest: FiniteNumber | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.scorer = FunctionScorer(self.function, self.highest, self.template)
        super().__post_init__()


def to_finite_float(value: object) -> float | None:
    """Convert a number of any type (a bool, numpy's) to a float; `None` if it is not finite."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


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
    function = inspect.unwrap(function)
    target: Any = function if hasattr(function, "__code__") else type(function)
    if inspect.isclass(function) or inspect.isroutine(function):
        target = function
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
        tree = parse_python(text)
    except (OSError, ValueError, SyntaxError):
        return []
    defined: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _defined_names(node):
            defined.setdefault(name, []).append(node)
    found: dict[int, str] = {}
    pending = set(IDENTIFIER.findall(source))
    met: set[str] = set()
    while pending:
        name = pending.pop()
        met.add(name)
        for node in defined.get(name, ()):
            if node.lineno in found:
                continue
            found[node.lineno] = ast.get_source_segment(text, node) or ""
            pending |= set(IDENTIFIER.findall(found[node.lineno])) - met
    definitions = [found[line] for line in sorted(found)]
    for line in found.values():
        for imported in _imported_files(file, line) - seen:
            seen.add(imported)
            source_text = imported.read_text(encoding="utf-8", errors="replace")
            definitions += [source_text, *_used_definitions(imported, source_text, seen)]
    return definitions


def _defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a module-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [one.id for tree in targets for one in ast.walk(tree) if isinstance(one, ast.Name)]
    return []


def _imported_files(file: Path, statement: str) -> set[Path]:
    """Return the files in a module's folder that a statement imports."""
    nodes = ast.walk(parse_python(statement)) if "import" in statement else ()
    named: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [alias.name for alias in node.names]
            submodules = [f"{node.module}.{name}" for name in inner]
            named += [node.module, *submodules] if node.module else inner
    paths = [file.parent / name.replace(".", "/") for name in named]
    both = [one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py")]
    return {one for one in both if one.is_file() and one != file}


def _error_location(error: Exception, function: Callable[..., Any] | None) -> str:
    """Return the line of the user's file at which an error was raised, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(function, "__code__", None)
    relevant = [
        frame for frame in frames if code is not None and frame.filename == code.co_filename
    ]
    if code is None:
        relevant = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    return f" ({Path(relevant[-1].filename).name} line {relevant[-1].lineno})" if relevant else ""
