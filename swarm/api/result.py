"""Results for Python code and notebooks: of a search, and of an evaluation."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError, install_command
from swarm.evaluation.evaluation import format_result
from swarm.loop.evaluator import records_to_scores
from swarm.merging.positions import describe_position
from swarm.models.base import PROMPT_FORMS, Completion, Message, Model, Request, with_prompt_form
from swarm.registry.local_models import LocalModels
from swarm.registry.model_groups import base_of_run
from swarm.report import sections
from swarm.report.charts import draw_bands, figure_to_bytes
from swarm.report.document import COLOURS, GREY
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import ParticleIndex, RunFolder
from swarm.runs.verdict import describe_difference
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Task
from swarm.tasks.metrics import paired_gain

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


COLUMNS = ("iteration", "particle", "utility", "best")
PROMPTS = ("prompts_scored", "prompts_saved")


def history_frame(run: RunFolder) -> "pd.DataFrame":
    """Return a data frame with a row per particle and iteration, 0 being the start.

    Columns: `iteration`, `particle`, `utility` on dev (NaN where none was measured), `best` (the
    highest so far, of all particles); each expert's coefficient under its name, the mean if groups
    of modules have their own; `prompts_scored` and `prompts_saved` of the complete iteration. An
    expert with the name of one of these columns is "expert NAME".

    Raises:
        UserError: pandas is not installed.
    """
    pandas = import_optional("pandas")
    iterations, particles = run.utilities.shape
    number, particle = np.indices((iterations, particles))
    columns: dict[str, Any] = dict(
        zip(
            COLUMNS,
            (
                number.ravel(),
                particle.ravel(),
                run.utilities.ravel(),
                np.repeat(run.best_so_far(), particles),
            ),
            strict=True,
        )
    )
    for index, name in enumerate(run.experts):
        taken = name in (*COLUMNS, *PROMPTS)
        columns[f"expert {name}" if taken else name] = run.means[..., index].ravel()
    for name in PROMPTS:
        columns[name] = np.repeat([entry.get(name, 0) for entry in run.rounds], particles)
    return pandas.DataFrame(columns)


def history_figure(run: RunFolder) -> "Figure":
    """Plot best-so-far and all particles above, and stacked coefficients of the best so far below.

    Negative coefficients are stacked downwards, so that the upper minus the lower stack is the sum
    of the coefficients. Created without a window; a notebook displays it.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 6), layout="constrained")
    above, below = made.subplots(2, sharex=True)
    when = np.arange(len(run.utilities))
    above.plot(when, run.utilities, ".", color=GREY, label="_")
    above.plot([], [], ".", color=GREY, label="particles")
    above.step(when, run.best_so_far(), where="post", color=COLOURS[0], label="best so far")
    above.set_ylabel("utility on dev")
    above.legend(loc="lower right")
    draw_bands(below, run.experts, np.array([run.means[index] for index in best_indices(run)]))
    below.set_xlabel("iteration")
    below.set_ylabel("coefficients of the best so far")
    below.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    # Without pyplot loaded, a notebook has no formatter for figures.
    made._repr_png_ = partial(figure_to_bytes, made, "png")  # type: ignore[attr-defined]
    return made


def best_indices(run: RunFolder) -> list[tuple[int, int]]:
    """Return (iteration, particle) of the first highest utility up to each iteration."""
    known = np.where(np.isnan(run.utilities), -np.inf, run.utilities)
    found: list[tuple[int, int]] = []
    for number, row in enumerate(known):
        index = (number, int(row.argmax()))
        found.append(index if not found or known[index] > known[found[-1]] else found[-1])
    return found


def import_optional(package: str) -> Any:
    """Import an optional package.

    Raises:
        UserError: It is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise UserError(
            f"{package.partition('.')[0]} is required for tables: {install_command('compare')}"
        ) from None


def open_run(folder: str | Path) -> "Result":
    """Return the result of a run's folder, finished or not.

    Raises:
        UserError: The folder contains no search, or one without an iteration.
    """
    return Result(folder)


class Best(Model):
    """A position found by a search; usable as a model.

    Attributes:
        folder: Folder of its PEFT adapter, or of the saved model for a pool of full models.
        utility: On dev: the highest of many, hence optimistic.
        iteration, particle: Where it was found.
        position: Its coefficients, G x K, group by group.
        words: Description of its composition, the largest share first.
    """

    def __init__(
        self, run: RunFolder, index: ParticleIndex, folder: Path, models: LocalModels
    ) -> None:
        self._run, self._models, self.folder = run, models, folder
        self.iteration, self.particle = index
        self.utility = float(run.utilities[index])
        self.position: list[float] = run.positions[index].tolist()
        self.words = describe_position(run.experts, self.position, run.groups)

    @property
    def base(self) -> BaseModel:
        """The adapter's base model."""
        return self._models.base

    @property
    def coefficients(self) -> dict[str, float]:
        """Each expert's coefficient; the mean if groups of modules have their own."""
        means = self._run.means[self.iteration, self.particle]
        return dict(zip(self._run.experts, means.tolist(), strict=True))

    @property
    def _model(self) -> Model:
        return self._models.get_model(str(self.folder))

    @property
    def prompt_form(self) -> str | None:
        """See `Model.prompt_form`."""
        return self._model.prompt_form

    def check(self) -> None:
        """See `Model.check`."""
        self._model.check()

    def open(self, device: str) -> None:
        """See `Model.open`."""
        self._model.open(device)

    def fingerprint(self) -> Any:
        """See `Model.fingerprint`."""
        return self._model.fingerprint()

    @overload
    def generate(
        self,
        requests: str,
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool | None = None,
    ) -> str: ...

    @overload
    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def generate(
        self,
        requests: str | Sequence[Request],
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool | None = None,
    ) -> str | list[Completion]:
        """Generate the answer to a text, or to each request; loads the model if needed.

        Args:
            requests: A text, or requests (`swarm.models.base.Model`); the other arguments are for a
                text.
            max_new_tokens: Maximum number of tokens of the answer.
            temperature: Sampling temperature; 0 is greedy.
            seed: Sampling seed; `None` is 0.
            chat: Send the text as one user turn through the model's chat template; false continues
                the text as it is; `None` does what the prompts of the search's task did.

        Raises:
            UserError: The model cannot be opened, or the text is too long for it.
        """
        voice = self._model
        if not isinstance(requests, str):
            return voice.generate(requests)
        turns = (Message("user", requests),)
        request = Request(turns, max_new_tokens, temperature=temperature, seed=seed)
        form = None if chat is None else PROMPT_FORMS[not chat]
        return voice.generate([with_prompt_form(voice, request, form)])[0].text

    def __repr__(self) -> str:
        return f"{self.words} ({self.utility:.3f} on dev, {self.folder})"


class Result:
    """The state of a search folder at the time of opening; reopen it to see progress.

    Attributes:
        folder: The run's folder.
        run: The folder for analysis: positions, utilities, answers.
        verdict: What the search was worth (docs/report.md); `None` before its end.

    Args:
        folder: The run's folder.

    Raises:
        UserError: It contains no search, or one without an iteration.
    """

    def __init__(self, folder: str | Path) -> None:
        self.run = RunFolder(folder)
        self.folder, self.verdict = self.run.path, self.run.verdict

    @cached_property
    def best(self) -> Best:
        """The best position, or the best so far if the search is not over."""
        return Best(self.run, self.run.find_best(), self.folder / "global_best", self._local_models)

    def bests(self, limit: int = 3) -> list[Best]:
        """Return the best distinct personal bests, the best first."""
        utilities = self.run.utilities
        indices = [self.run.find_best(particle) for particle in range(self.run.particles)]
        known = [index for index in indices if not isnan(utilities[index])]
        different: dict[tuple[float, ...], ParticleIndex] = {}
        for index in sorted(known, key=lambda index: (-utilities[index], index)):
            different.setdefault(tuple(self.run.positions[index]), index)
        return [
            Best(
                self.run,
                index,
                self.folder / f"particle_{index[1]}/personal_best",
                self._local_models,
            )
            for index in [*different.values()][:limit]
        ]

    @cached_property
    def _local_models(self) -> LocalModels:
        """Models of this run, which share one base model in memory."""
        return LocalModels(base_of_run(self.run))

    @property
    def history(self) -> "pd.DataFrame":
        """A row per particle and iteration; see `swarm.api.result.history_frame`."""

        return history_frame(self.run)

    def plot(self) -> "Figure":
        """Plot best and particles, and the composition of the best."""

        return history_figure(self.run)

    def report(self) -> Path:
        """Write the report into the folder; return the path of the HTML page.

        Raises:
            UserError: The folder is not writable.
        """
        from swarm.report.page import write_report

        return write_report(self.folder)

    def __str__(self) -> str:
        models = PairedComparison(self.run)
        verdict = sections.summarize_verdict(models)
        facts = [f"{name}: {value}" for name, value in sections.headline_figures(models)]
        made = f"best found = {self.best.words}"
        return "\n".join([str(verdict), *facts, made, f"folder: {self.folder}"])

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}): {self.best.words}, {self.best.utility:.3f} on dev"

    def _repr_html_(self) -> str:
        """Return the HTML shown by a notebook: the text, and the plot."""
        data = b64encode(figure_to_bytes(self.plot(), "png")).decode()
        image = f'<img alt="best, particles and coefficients" src="data:image/png;base64,{data}">'
        return f"<pre>{escape(str(self))}</pre>{image}"


@dataclass(frozen=True)
class Gain:
    """A difference on the same n items, with 95 % interval and two-sided p-value.

    str() is a sentence.
    """

    difference: float
    interval: tuple[float, float]
    p: float
    n: int

    def __str__(self) -> str:
        gain = PairedTest(self.difference, *self.interval, self.p, self.n)
        return describe_difference(gain, "items", False)


@dataclass(frozen=True)
class EvaluationResult:
    """Result of evaluating a model on a split of a task.

    Attributes:
        result: All numbers, as in result.json; several models are listed one after the other.
        rows: One dict per answer: "id", "value", "answer" (as parsed), "text".
        task: The evaluated task.
    """

    result: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    task: Task

    @property
    def utility(self) -> float:
        """The task's utility, of the first model."""
        return float(self.result["voices"][0]["utility"])

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the utility."""
        first = self.result["voices"][0]
        return float(first["low"]), float(first["high"])

    @property
    def n(self) -> int:
        """Number of items."""
        return int(self.result["items"])

    @property
    def cost(self) -> float:
        """Cost of generating the answers, in the currency of the model's prices."""
        return float(self.result.get("cost", 0.0))

    @cached_property
    def items(self) -> "pd.DataFrame":
        """The rows as a data frame; needs pandas."""
        frame: pd.DataFrame = import_optional("pandas").DataFrame(self.rows)
        return frame

    def against(self, other: "EvaluationResult") -> "Gain":
        """Test the difference of this utility from another's on the same items.

        Raises:
            UserError: The items differ.
        """
        mine, others = self._first_model_rows(), other._first_model_rows()
        if [row["id"] for row in mine] != [row["id"] for row in others]:
            raise UserError(
                "against: the two were not evaluated on the same items, so no pairs exist"
            )
        found = paired_gain(
            self.task.metric_task, records_to_scores(mine), records_to_scores(others)
        )
        return Gain(found.difference, (found.low, found.high), found.p, found.n)

    def _first_model_rows(self) -> list[dict[str, Any]]:
        """Return the answers of the first model."""
        name = self.result["voices"][0]["name"]
        return [dict(row) for row in self.rows if row.get("voice", name) == name]

    def __str__(self) -> str:
        return format_result(self.result)
