"""What the page Compare does: answers to one question in a data frame, and viewers of answers."""

import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare import Config, Question
from swarm.compare.view.application import Viewer
from swarm.compare.view.reading import columns_of
from swarm.compare.view.table import Table
from swarm.errors import UserError
from swarm.models import Completion, Model, Request, attempt
from swarm.roster.identity import identity
from swarm.serve.guard import Guard
from swarm.ui.home import Home

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN = 200
"""Files that are listed."""

MOUNTED = "/compare/view"
"""Where viewers are."""

START = {"sort": "", "seed": "0"}
"""How a viewer begins: in the order of its data."""

_asking = threading.Lock()


class Known:
    """A model of the page's own roster, so that a base is in memory once.

    It is told apart from others of its name by all that its answers depend on.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.Model`."""
        return self._model.generate(requests)

    def attempt(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.attempt`."""
        return attempt(self._model, requests)

    def fingerprint(self) -> str:
        """See `swarm.roster.identity`."""
        return json.dumps(identity(self._model), sort_keys=True)


def asked(
    home: Home, names: Sequence[str], question: str, samples: int, temperature: float, tokens: int
) -> "tuple[pd.DataFrame, bytes, str]":
    """What the models answer, each a group of its own, the plot of it as PNG, and remarks.

    Answers are kept as those of `python -m swarm.compare` are.

    Raises:
        UserError: There are fewer than two models, or one that is none; the question is empty; or
            all answers failed.
    """
    if len(set(names)) < 2:
        raise UserError("models: choose two or more to compare")
    if not question.strip():
        raise UserError("the question is empty; type one")
    made = Question.create(
        type="free_form", paraphrases=[question.strip()], samples_per_paraphrase=samples,
        temperature=temperature, max_tokens=tokens,
    )  # fmt: skip
    models: dict[str, Any] = {name: Known(home.roster.model(name)) for name in names}
    for name in models:
        if check := getattr(home.roster.model(name), "check", None):
            check()
    # The settings of experiments are those of the process.
    override = Config.override(models={**Config.models, **models})
    # What the command writes to a terminal is shown on the page.
    with _asking, override, redirect_stderr(io.StringIO()) as told:
        df = made.df({name: [name] for name in models})
    if df["error"].notna().all():
        raise UserError(str(df["error"].iloc[0]))
    return df, png(made.plot(df)), told.getvalue().strip()


def png(figure: "Figure") -> bytes:
    """A figure as a picture."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, bbox_inches="tight")
    return stream.getvalue()


def files(home: Home) -> list[str]:
    """The files of answers that runs of compare have written, newest first, from the folder."""
    found: Iterator[Path] = (home.folder / "compare").glob("**/data.jsonl")
    newest = sorted(found, key=lambda file: -file.stat().st_mtime)
    return [str(file.relative_to(home.folder)) for file in newest[:SHOWN]]


def file_of(home: Home, path: str) -> Path:
    """A file below the folder where the page was started.

    Raises:
        UserError: It lies elsewhere, or is not there.
    """
    if not path.strip():
        raise UserError("name a file: a .jsonl, .csv or .parquet with a column answer")
    folder = home.folder.resolve()
    try:
        file = (folder / path.strip()).resolve()
        there = file.is_file()
    except (OSError, ValueError) as error:
        raise UserError(f"{path!r:.80} is no path: {error}") from None
    if not file.is_relative_to(folder):
        raise UserError(
            f"{path}: lies outside of the folder where the page was started, {folder}; "
            "start the page there, or open the file with python -m swarm.compare.view"
        )
    if not there:
        raise UserError(f"{path}: there is no such file below {folder}")
    return file


class Viewers:
    """The viewers that were opened, each below a number; an application of ASGI."""

    def __init__(self) -> None:
        self._viewers: list[Any] = []
        self._numbers: dict[tuple[str, int] | None, int] = {}

    def show(self, data: Any, name: str) -> str:
        """Open one; gives its address. A file that has not changed since has the same one.

        Raises:
            UserError: The data cannot be shown.
        """
        key = (str(data), data.stat().st_mtime_ns) if isinstance(data, Path) else None
        if key is None or key not in self._numbers:
            viewer = Viewer(Table(columns_of(data, name), name), START, Guard(None, True))
            self._viewers.append(viewer.app)
            self._numbers[key] = len(self._viewers) - 1
        return f"{MOUNTED}/{self._numbers[key]}/"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand a request on to the viewer that its path names."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        first, _, _ = path.lstrip("/").partition("/")
        if first.isdecimal() and int(first) < len(self._viewers):
            inner = {**scope, "root_path": f"{scope.get('root_path', '')}/{first}"}
            return await self._viewers[int(first)](inner, receive, send)
        body = b"this viewer has ended; open the file again at /compare\n"
        kind = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 404, "headers": kind})
        await send({"type": "http.response.body", "body": body})
