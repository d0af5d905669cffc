"""What a search has come to, for Python code and notebooks: its best, its history, its report."""

from collections.abc import Sequence
from functools import cached_property, partial
from html import escape
from importlib import import_module
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request
from swarm.registry.local_models import LocalModels
from swarm.registry.model_groups import base_of_run
from swarm.report import sections as told
from swarm.report.document import COLOURS, GREY
from swarm.report.test_comparison import TestComparison
from swarm.runs.describe import describe_position
from swarm.runs.run_reader import PositionIndex, RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The course of a search, as a table and as a picture.

COLUMNS = ("iteration", "particle", "utility", "best")
PROMPTS = ("prompts_asked", "prompts_saved")


def history_frame(run: RunFolder) -> "pd.DataFrame":
    """A row a particle and iteration, 0 being the start.

    Columns: `iteration`, `particle`, `utility` on dev (NaN where none was measured), `best` (the
    highest so far, of all particles); each expert's coefficient under its name, the mean where
    groups of modules have their own; `prompts_asked` and `prompts_saved` of the whole iteration.
    An expert that is called like one of these columns is "expert NAME".

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
    for place, name in enumerate(run.experts):
        taken = name in (*COLUMNS, *PROMPTS)
        columns[f"expert {name}" if taken else name] = run.means[..., place].ravel()
    for name in PROMPTS:
        columns[name] = np.repeat([entry.get(name, 0) for entry in run.rounds], particles)
    return pandas.DataFrame(columns)


def history_figure(run: RunFolder) -> "Figure":
    """Above best-so-far and all particles, below the coefficients of the best so far, stacked.

    Shares below 0 are stacked downwards, so that what stands above less what hangs below is the
    sum of the coefficients. Made without a window; a notebook shows it.

    Raises:
        UserError: matplotlib is not installed.
    """
    figures = import_optional("matplotlib.figure")
    made: Figure = figures.Figure(figsize=(8, 6), layout="constrained")
    above, below = made.subplots(2, sharex=True)
    _plot_utilities(above, run)
    _plot_coefficients(below, run)
    # A notebook that has not loaded pyplot does not know how to show a figure.
    made._repr_png_ = partial(figure_to_png, made)  # type: ignore[attr-defined]
    return made


def figure_to_png(figure: "Figure") -> bytes:
    """A figure as a PNG file."""
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _plot_utilities(axes: "Axes", run: RunFolder) -> None:
    when = np.arange(len(run.utilities))
    axes.plot(when, run.utilities, ".", color=GREY, label="_")
    axes.plot([], [], ".", color=GREY, label="particles")
    axes.step(when, run.best_so_far(), where="post", color=COLOURS[0], label="best so far")
    axes.set_ylabel("utility on dev")
    axes.legend(loc="lower right")


def _plot_coefficients(axes: "Axes", run: RunFolder) -> None:
    shares = np.array([run.means[place] for place in best_indices(run)])
    when = np.arange(len(shares))
    tops, bottoms = np.zeros(len(shares)), np.zeros(len(shares))
    for place, name in enumerate(run.experts):
        share = shares[:, place]
        base = np.where(share >= 0, tops, bottoms)
        hatch = "" if place < len(COLOURS) else "//"
        axes.bar(
            when, share, 0.9, base, color=COLOURS[place % len(COLOURS)], hatch=hatch, label=name
        )
        tops, bottoms = tops + np.maximum(share, 0), bottoms + np.minimum(share, 0)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("iteration")
    axes.set_ylabel("coefficients of the best so far")
    axes.xaxis.set_major_locator(import_optional("matplotlib.ticker").MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def best_indices(run: RunFolder) -> list[tuple[int, int]]:
    """(iteration, particle) of the first highest utility up to each iteration."""
    known = np.where(np.isnan(run.utilities), -np.inf, run.utilities)
    found: list[tuple[int, int]] = []
    for number, row in enumerate(known):
        place = (number, int(row.argmax()))
        found.append(place if not found or known[place] > known[found[-1]] else found[-1])
    return found


def import_optional(package: str) -> Any:
    """A package that not every installation has.

    Raises:
        UserError: It is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise UserError(
            f"{package.partition('.')[0]} is not installed, which tables and plots need: "
            'pip install "model-swarms[compare]"'
        ) from None


def open_run(folder: str | Path) -> "Result":
    """The result of a run's folder, finished or not, whoever has begun it.

    Raises:
        UserError: The folder holds no search, or one without an iteration.
    """
    return Result(folder)


class Best:
    """A position that a search has found; a model to ask, and a folder.

    Attributes:
        folder: Of its PEFT adapter; of a pool of whole models, what that pool saves.
        utility: On dev: the highest of many, which flatters it.
        iteration, particle: Where it was found.
        position: Its coefficients, G x K, group by group.
        words: What it is made of, the largest share first.
    """

    def __init__(
        self, run: RunFolder, place: PositionIndex, folder: Path, home: LocalModels
    ) -> None:
        self._run, self._home, self.folder = run, home, folder
        self.iteration, self.particle = place
        self.utility = float(run.utilities[place])
        self.position: list[float] = run.positions[place].tolist()
        self.words = describe_position(run.experts, self.position, run.groups)

    @property
    def base(self) -> BaseModel:
        """The base of the adapter."""
        return self._home.base

    @property
    def coefficients(self) -> dict[str, float]:
        """Each expert's coefficient; where groups of modules have their own, the mean of them."""
        means = self._run.means[self.iteration, self.particle]
        return dict(zip(self._run.experts, means.tolist(), strict=True))

    @overload
    def generate(
        self,
        requests: str,
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool = True,
    ) -> str: ...

    @overload
    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def generate(
        self,
        requests: str | Sequence[Request],
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool = True,
    ) -> str | list[Completion]:
        """The answer to a text, or to each request as any model answers it; loads what it needs.

        Args:
            requests: A text, or requests (`swarm.models.base.Model`); what follows is for a text.
            max_new_tokens: The most tokens of the answer.
            temperature: Of sampling; 0 always takes the likeliest token.
            seed: Of sampling; `None` is 0.
            chat: Put the text as one user turn through the model's chat template; false: the model
                goes on with the text as it is.

        Raises:
            UserError: The model cannot be opened, or the text is too long for it.
        """
        voice = self._home.get_model(str(self.folder))
        if not isinstance(requests, str):
            return voice.generate(requests)
        prompt = (Message("user", requests),) if chat else requests
        asked = Request(prompt, max_new_tokens, temperature=temperature, seed=seed)
        return voice.generate([asked])[0].text

    def __repr__(self) -> str:
        return f"{self.words} ({self.utility:.3f} on dev, {self.folder})"


class Result:
    """A search as its folder has it; a search that goes on is opened anew to see more.

    Attributes:
        folder: The run's.
        run: The folder as analyses read it: positions, utilities, answers.
        metrics: What the search came to (docs/report.md); empty before its end.

    Args:
        folder: The run's.

    Raises:
        UserError: It holds no search, or one without an iteration.
    """

    def __init__(self, folder: str | Path) -> None:
        self.run = RunFolder(folder)
        self.folder, self.metrics = self.run.path, self.run.metrics

    @cached_property
    def best(self) -> Best:
        """The best found, and so far that of a search that is not over."""
        return Best(self.run, self.run.find_best(), self.folder / "global_best", self._local_models)

    def bests(self, most: int = 3) -> list[Best]:
        """The best of the particles' own bests, of different positions, the best first."""
        utilities = self.run.utilities
        places = [self.run.find_best(particle) for particle in range(self.run.particles)]
        known = [place for place in places if not isnan(utilities[place])]
        different: dict[tuple[float, ...], PositionIndex] = {}
        for place in sorted(known, key=lambda place: (-utilities[place], place)):
            different.setdefault(tuple(self.run.positions[place]), place)
        return [
            Best(
                self.run,
                place,
                self.folder / f"particle_{place[1]}/personal_best",
                self._local_models,
            )
            for place in [*different.values()][:most]
        ]

    @cached_property
    def _local_models(self) -> LocalModels:
        """All of them share one base in memory."""
        return LocalModels(base_of_run(self.run))

    @property
    def history(self) -> "pd.DataFrame":
        """A row a particle and iteration; see `swarm.api.result.history_frame`."""

        return history_frame(self.run)

    def plot(self) -> "Figure":
        """Best and particles, and below it what the best is made of; needs matplotlib."""

        return history_figure(self.run)

    def report(self) -> Path:
        """Write the report into the folder; gives the HTML page.

        Raises:
            UserError: The folder cannot be written.
        """
        from swarm.report.build import write_report

        return write_report(self.folder)[0]

    def __str__(self) -> str:
        models = TestComparison(self.run)
        _, headline, words = told.summarize_verdict(models)
        facts = [f"{name}: {value}" for name, value in told.headline_figures(models)]
        made = f"best found = {self.best.words}"
        return "\n".join([f"{headline}. {words}", *facts, made, f"folder: {self.folder}"])

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}): {self.best.words}, {self.best.utility:.3f} on dev"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        models = TestComparison(self.run)
        _, headline, words = told.summarize_verdict(models)
        facts = [
            *told.headline_figures(models),
            ("best found", self.best.words),
            ("folder", str(self.folder)),
        ]
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(name)}</th>'
            f'<td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in facts
        )
        said = f"<p><b>{escape(headline)}</b>. {escape(words)}</p>"
        return f"{said}<table>{rows}</table>{self._history_image()}"

    def _history_image(self) -> str:
        from base64 import b64encode

        try:
            data = b64encode(figure_to_png(self.plot())).decode()
        except UserError:  # matplotlib is not there
            return ""
        return f'<img alt="best, particles and coefficients" src="data:image/png;base64,{data}">'
