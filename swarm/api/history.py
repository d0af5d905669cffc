"""The course of a search, as a table and as a picture."""

from functools import partial
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.errors import UserError
from swarm.report.folder import RunFolder
from swarm.report.pictures import COLOURS, GREY

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    columns: dict[str, Any] = dict(zip(COLUMNS, (
        number.ravel(), particle.ravel(), run.utilities.ravel(),
        np.repeat(run.best_so_far(), particles),
    ), strict=True))  # fmt: skip
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
        axes.bar(when, share, 0.9, base, color=COLOURS[place % len(COLOURS)], hatch=hatch,
                 label=name)  # fmt: skip
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
