"""Scores of judges: boxes with every answer as a dot, and means with their intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.plots import canvas
from swarm.compare.plots.palette import FillStyle, assign_fill_styles
from swarm.compare.plots.ratings import draw_mean
from swarm.compare.statistics import CLUSTER_COLUMNS
from swarm.compare.statistics.resampling import bootstrap_intervals
from swarm.compare.statistics.values import read_answers

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 400
"""Drawn for a category at most; a random choice of more."""


def judge_scores(
    df: "pd.DataFrame",
    score_column: str,
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """A box for each category of a numeric column, its answers as dots, and its mean.

    Raises:
        WrongValue: The column is not one of numbers, or an argument has no such value.
    """
    if filename is not None:
        canvas.check_filename(filename)
    values = read_answers(df, score_column, category_column, selected_categories, measure=True)
    title = canvas.build_title(df, title)
    if not len(values.category):
        return canvas.empty_figure(values, title, filename, show)
    if values.kind != "mean":
        raise InvalidArgument(f"score_column: {score_column} has no numbers; see plots.plot")
    styles = assign_fill_styles(values.categories, colors)
    picture, axes = canvas.create_axes(3 + 1.2 * len(values.categories), 5)
    clusters = values.cluster_codes([name for name in CLUSTER_COLUMNS if name != category_column])
    for place, name in enumerate(values.categories):
        here = values.category == place
        if here.any():
            _draw_box(axes, place, values.matrix[here, 0], styles[name])
            found = bootstrap_intervals(values.matrix[here], [codes[here] for codes in clusters])
            draw_mean(axes, place, found, error_bars)
    canvas.draw_category_axis(axes, values, category_column)
    axes.set_ylabel(score_column)
    note = "Boxes: quartiles. Large dots: means" + ", with 95 % intervals." * error_bars
    return canvas.finish_figure(picture, title, note, filename, show)


def _draw_box(axes: "Axes", place: int, scores: "np.ndarray", look: FillStyle) -> None:
    import numpy as np

    generator = np.random.Generator(np.random.Philox(key=4))
    dots = scores if len(scores) <= MAX_DOTS else generator.choice(scores, MAX_DOTS, replace=False)
    aside = place - 0.25 + generator.uniform(-0.1, 0.1, len(dots))
    axes.plot(aside, dots, "o", color="#555555", markersize=2.5, alpha=0.35, zorder=1)
    if len(scores) > 1:
        box = axes.boxplot([scores], positions=[place], widths=0.22, showfliers=False,
                           patch_artist=True, manage_ticks=False,
                           medianprops={"color": "black"}, zorder=2)  # fmt: skip
        box["boxes"][0].set(facecolor=look.colour, hatch=look.hatch, edgecolor="#333333")
