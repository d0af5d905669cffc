"""Backend of the page Compare: answers of several models to a question, and answer viewers."""

import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare import Config, Question
from swarm.compare.dataframe import build_frame
from swarm.compare.question import QuestionPlan
from swarm.compare.sampling.scheduler import as_completed
from swarm.compare.view.app import ViewerApp
from swarm.compare.view.load import load_columns
from swarm.compare.view.table import AnswerTable
from swarm.errors import UserError
from swarm.models.base import Completion, Model, Request, generate_each
from swarm.registry.name_resolution import model_identity
from swarm.serve.errors import ApiKeyGuard
from swarm.stats.summary_table import detectable
from swarm.ui.state import AppState

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MAX_FILES_SHOWN = 200
"""Maximum number of answer files listed."""

VIEWER_PATH = "/compare/view"
"""Mount path of the viewers."""

INITIAL_QUERY = {"sort": "", "seed": "0"}
"""Initial query of a viewer, which leaves rows in the order of the data."""

_models_lock = threading.Lock()


class RosterModel:
    """Model of the page's roster, which loads each base only once.

    Its fingerprint contains everything that its answers depend on, so that cached answers are not
    mixed up between models with the same name.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`."""
        return self._model.generate(requests)

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """See `swarm.models.base.generate_each`."""
        return generate_each(self._model, requests)

    def fingerprint(self) -> str:
        """See `swarm.registry.name_resolution.model_identity`."""
        return json.dumps(model_identity(self._model), sort_keys=True)


class CompareWorker:
    """One question to several models, each a group of one, run as by `python -m swarm.compare`.

    Answers are cached like those of the command. `stop` can be called from any thread.

    Args:
        home: State with the roster of models.
        names: Names of two or more models.
        question: The question.
        samples: Number of samples per model.
        temperature: Sampling temperature.
        tokens: Maximum number of new tokens.

    Attributes:
        came, wanted: Number of answers received, and in total.

    Raises:
        UserError: There are fewer than two models, or the question is empty.
    """

    def __init__(
        self,
        home: AppState,
        names: Sequence[str],
        question: str,
        samples: int,
        temperature: float,
        tokens: int,
    ) -> None:
        if len(set(names)) < 2:
            raise UserError("models: choose at least two to compare")
        if not question.strip():
            raise UserError("the question is empty; type one")
        self._home, self._names = home, names
        self._question: Any = Question.create(
            type="free_form",
            paraphrases=[question.strip()],
            samples_per_paraphrase=samples,
            temperature=temperature,
            max_tokens=tokens,
        )
        self.came, self.wanted = 0, len(set(names)) * samples
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._frame: pd.DataFrame | None = None
        self._error: UserError | None = None

    def stop(self) -> None:
        """Stop waiting; sampling ends after the next answer."""
        self._stopped.set()
        self._ended.set()

    def run(self) -> "tuple[pd.DataFrame, bytes, str]":
        """Run the comparison; return the answers, their plot as PNG, and remarks.

        Raises:
            UserError: It was stopped, a model does not exist, or all answers failed.
        """
        threading.Thread(target=self._run_worker, name="swarm-page", daemon=True).start()
        self._ended.wait()
        if self._error:
            raise self._error
        df = self._frame
        if df is None:
            raise UserError("stopped; answers so far are stored, and the same comparison resumes")
        if df["error"].notna().all():
            raise UserError(str(df["error"].iloc[0]))
        return df, figure_to_png(self._question.plot(df)), "\n".join(self._iterate_remarks(df))

    def _run_worker(self) -> None:
        try:
            self._frame = self._collect_answers()
        except UserError as error:
            self._error = error
        except Exception as error:  # shown on the page instead of a traceback
            self._error = UserError(f"failed with {type(error).__name__}: {error}")
        self._ended.set()

    def _collect_answers(self) -> "pd.DataFrame | None":
        """Return the answers; `None` if stopped."""
        found = {name: self._home.roster.model(name) for name in self._names}
        for model in found.values():
            getattr(model, "check", lambda: None)()
        # `Config` is global to the process, which runs nothing but the pages.
        with _models_lock:
            Config.models = {
                **Config.models,
                **{name: RosterModel(one) for name, one in found.items()},
            }
        part = QuestionPlan(self._question, {name: [name] for name in found})
        rows: dict[int, list[Any]] = {}
        with ExitStack() as during:
            scripts = self._question.scripts(part.iter_requests(), during)
            with closing(as_completed(scripts, silent=True)) as coming:
                for number, row in coming:
                    if self._stopped.is_set():
                        return None
                    rows[number] = row if isinstance(row, list) else [row]
                    self.came += len(rows[number])
        ordered = chain.from_iterable(rows[number] for number in sorted(rows))
        return build_frame(self._question.layout, part.groups, part.take_blocks(ordered))

    def _iterate_remarks(self, df: "pd.DataFrame") -> Iterator[str]:
        """Yield remarks on each model with failed answers and on the detectable difference."""
        for model, rows in df.groupby("model", sort=False):
            errors = rows["error"].dropna()
            if len(errors):
                yield f"{model}: {len(errors)} of {len(rows)} answers failed: {errors.iloc[0]}"
        groups = {name: [name] for name in dict.fromkeys(self._names)}
        yield detectable(groups, 1, self._question.samples_per_paraphrase)


def figure_to_png(figure: "Figure") -> bytes:
    """Render a figure as PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, bbox_inches="tight")
    return stream.getvalue()


def list_answer_files(home: AppState) -> list[str]:
    """List the answer files written by compare runs, newest first, relative to the folder."""
    found: Iterator[Path] = (home.folder / "compare").glob("**/data.jsonl")
    newest = sorted(found, key=lambda file: -file.stat().st_mtime)
    return [str(file.relative_to(home.folder)) for file in newest[:MAX_FILES_SHOWN]]


def resolve_file(home: AppState, path: str) -> Path:
    """Resolve a path below the folder in which the application was started.

    Raises:
        UserError: The path is outside of the folder, or does not exist.
    """
    if not path.strip():
        raise UserError("give a .jsonl, .csv or .parquet file with a column answer")
    folder = home.folder.resolve()
    try:
        file = (folder / path.strip()).resolve()
        exists = file.is_file()
    except (OSError, ValueError) as error:
        raise UserError(f"{path!r:.80} is not a path: {error}") from None
    if not file.is_relative_to(folder):
        raise UserError(
            f"{path}: is outside of the folder where the page was started, {folder}; "
            "start the page there, or open the file with python -m swarm.compare.view"
        )
    if not exists:
        raise UserError(f"{path}: no such file below {folder}")
    return file


class MountedViewers:
    """ASGI application that mounts the open viewers, each under a number."""

    def __init__(self) -> None:
        self._viewers: list[Any] = []
        self._numbers: dict[tuple[str, int] | None, int] = {}

    def open_viewer(self, data: Any, name: str) -> str:
        """Open a viewer and return its URL; an unchanged file has the same URL again.

        Raises:
            UserError: The data cannot be shown.
        """
        key = (str(data), data.stat().st_mtime_ns) if isinstance(data, Path) else None
        if key is None or key not in self._numbers:
            viewer = ViewerApp(
                AnswerTable(load_columns(data, name), name), INITIAL_QUERY, ApiKeyGuard(None, True)
            )
            self._viewers.append(viewer.app)
            self._numbers[key] = len(self._viewers) - 1
        return f"{VIEWER_PATH}/{self._numbers[key]}/"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a request to the viewer given by its path."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        first, _, _ = path.lstrip("/").partition("/")
        if first.isdecimal() and int(first) < len(self._viewers):
            inner = {**scope, "root_path": f"{scope.get('root_path', '')}/{first}"}
            return await self._viewers[int(first)](inner, receive, send)
        body = b"this viewer has ended; open the file again at /compare\n"
        kind = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 404, "headers": kind})
        await send({"type": "http.response.body", "body": body})
