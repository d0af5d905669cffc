"""Results for Python code and notebooks: of a search, and of an evaluation."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from html import escape
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.errors import UserError, require_packages
from swarm.evaluation.evaluation import format_result
from swarm.loop.evaluator import records_to_scores
from swarm.merging.positions import describe_position
from swarm.models.base import PROMPT_FORMS, Message, Model, Request, with_prompt_form
from swarm.registry.local_models import LocalModels
from swarm.registry.model_groups import base_of_run
from swarm.report import sections
from swarm.report.charts import draw_bands, figure_to_bytes
from swarm.report.document import COLOURS, GREY
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RunFolder
from swarm.runs.pareto_front import ParticleIndex
from swarm.runs.verdict import describe_difference
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Task
from swarm.tasks.metrics import paired_gain

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def make_frame(columns: Any) -> "pd.DataFrame":
    """Return a data frame.

    Raises:
        UserError: pandas is not installed.
    """
    require_packages("compare", "pandas")
    import pandas

    return pandas.DataFrame(columns)


def best_indices(run: RunFolder) -> list[ParticleIndex]:
    """Return (iteration, particle) of the first highest utility up to each iteration."""
    known = np.where(np.isnan(run.utilities), -np.inf, run.utilities)
    found: list[ParticleIndex] = []
    for number, row in enumerate(known):
        index = (number, int(row.argmax()))
        found.append(index if not found or known[index] > known[found[-1]] else found[-1])
    return found


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
        coefficients: Each expert's coefficient; the mean if groups of modules have their own.
        words: Description of its composition, the largest share first.
        base: The adapter's base model.
    """

    def __init__(
        self, run: RunFolder, index: ParticleIndex, folder: Path, models: LocalModels
    ) -> None:
        self.folder, self.base, self._models = folder, models.base, models
        self.iteration, self.particle = index
        self.utility = float(run.utilities[index])
        self.position: list[float] = run.positions[index].tolist()
        self.coefficients = dict(zip(run.experts, run.means[index].tolist(), strict=True))
        self.words = describe_position(run.experts, self.position, run.groups)

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

    def generate(
        self,
        requests: str | Sequence[Request],
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool | None = None,
    ) -> Any:
        """Generate the answer to a text, or to each request; loads the model if needed.

        Args:
            requests: A text, or requests (`swarm.models.base.Model`); the other arguments are for a
                text.
            max_new_tokens: Maximum number of tokens of the answer.
            temperature: Sampling temperature; 0 is greedy.
            seed: Sampling seed; `None` is 0.
            chat: Send the text as one user turn through the model's chat template; false continues
                the text as it is; `None` does what the prompts of the search's task did.

        Returns:
            The text of the answer, or a completion for each request.

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
    def _models(self) -> LocalModels:
        """Models of this run, which share one base model in memory."""
        return LocalModels(base_of_run(self.run))

    @cached_property
    def best(self) -> Best:
        """The best position, or the best so far if the search is not over."""
        return Best(self.run, self.run.find_best(), self.folder / "global_best", self._models)

    def bests(self, limit: int = 3) -> list[Best]:
        """Return the best distinct personal bests, the best first."""
        run = self.run
        indices = [run.find_best(particle) for particle in range(run.particles)]
        known = [index for index in indices if not isnan(run.utilities[index])]
        different: dict[tuple[float, ...], ParticleIndex] = {}
        for index in sorted(known, key=lambda index: (-run.utilities[index], index)):
            different.setdefault(tuple(run.positions[index]), index)
        folders = {i: self.folder / f"particle_{i}/personal_best" for i in range(run.particles)}
        chosen = [*different.values()][:limit]
        return [Best(run, index, folders[index[1]], self._models) for index in chosen]

    @property
    def history(self) -> "pd.DataFrame":
        """A data frame with a row per particle and iteration, 0 being the start.

        Columns: `iteration`, `particle`, `utility` on dev (NaN where none was measured), `best`
        (the highest so far, of all particles); each expert's coefficient under its name, the mean
        if groups of modules have their own; `prompts_scored` and `prompts_saved` of the complete
        iteration. An expert with the name of one of these columns is "expert NAME".
        """
        run = self.run
        number, particle = np.indices(run.utilities.shape)
        columns: dict[str, Any] = {
            "iteration": number.ravel(),
            "particle": particle.ravel(),
            "utility": run.utilities.ravel(),
            "best": np.repeat(run.best_so_far(), run.particles),
        }
        prompts = {
            name: np.repeat([entry.get(name, 0) for entry in run.rounds], run.particles)
            for name in ("prompts_scored", "prompts_saved")
        }
        for index, name in enumerate(run.experts):
            taken = name in columns or name in prompts
            columns[f"expert {name}" if taken else name] = run.means[..., index].ravel()
        return make_frame(columns | prompts)

    def plot(self) -> "Figure":
        """Plot best-so-far and all particles above, and stacked coefficients of the best below.

        Negative coefficients are stacked downwards, so that the upper minus the lower stack is the
        sum of the coefficients. Created without a window; a notebook displays it.
        """
        from matplotlib.figure import Figure

        run = self.run
        made = Figure(figsize=(8, 6), layout="constrained")
        above, below = made.subplots(2, sharex=True)
        when = np.arange(len(run.utilities))
        above.plot(when, run.utilities, ".", color=GREY, label="_")
        above.plot([], [], ".", color=GREY, label="particles")
        above.step(when, run.best_so_far(), where="post", color=COLOURS[0], label="best so far")
        above.set_ylabel("utility on dev")
        above.legend(loc="lower right")
        draw_bands(below, run.experts, np.array([run.means[index] for index in best_indices(run)]))
        below.set(xlabel="iteration", ylabel="coefficients of the best so far")
        below.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        # Without pyplot loaded, a notebook has no formatter for figures.
        made._repr_png_ = partial(figure_to_bytes, made, "png")  # type: ignore[attr-defined]
        return made

    def report(self) -> Path:
        """Write the report into the folder; return the path of the HTML page.

        Raises:
            UserError: The folder is not writable.
        """
        from swarm.report.page import write_report

        return write_report(self.folder)

    def __str__(self) -> str:
        models = PairedComparison(self.run)
        facts = [f"{name}: {value}" for name, value in sections.headline_figures(models)]
        best = f"best found = {self.best.words}"
        verdict = str(sections.summarize_verdict(models))
        return "\n".join([verdict, *facts, best, f"folder: {self.folder}"])

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}): {self.best.words}, {self.best.utility:.3f} on dev"

    def _repr_html_(self) -> str:
        """Return the HTML shown by a notebook: the text, and the plot."""
        data = b64encode(figure_to_bytes(self.plot(), "png")).decode()
        image = f'<img alt="best, particles and coefficients" src="data:image/png;base64,{data}">'
        return f"<pre>{escape(str(self))}</pre>{image}"


@dataclass(frozen=True)
class Gain(PairedTest):
    """A difference on the same n items, with 95 % interval and two-sided p-value.

    str() is a sentence.
    """

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return self.low, self.high

    def __str__(self) -> str:
        return describe_difference(self, "items", False)


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
        return make_frame(self.rows)

    def against(self, other: "EvaluationResult") -> Gain:
        """Test the difference of this utility from another's on the same items.

        Raises:
            UserError: The items differ.
        """
        mine, others = self._first_model_rows(), other._first_model_rows()
        if [row["id"] for row in mine] != [row["id"] for row in others]:
            raise UserError(
                "against: the two were not evaluated on the same items, so no pairs exist"
            )
        scores = (records_to_scores(rows) for rows in (mine, others))
        return Gain(**asdict(paired_gain(self.task.metric_task, *scores)))

    def _first_model_rows(self) -> list[dict[str, Any]]:
        """Return the answers of the first model."""
        name = self.result["voices"][0]["name"]
        return [dict(row) for row in self.rows if row.get("voice", name) == name]

    def __str__(self) -> str:
        return format_result(self.result)
