"""Plots of ratings and scores: cumulative lines, violins, and boxes of judges' scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.compare.plots import style
from swarm.compare.plots.style import COLOURS, LINE_STYLES, FillStyle, assign_fill_styles
from swarm.errors import InvalidArgument
from swarm.stats.answer_values import AnswerMatrix, parse_probabilities, read_answers
from swarm.stats.intervals import ColumnIntervals, bootstrap_intervals
from swarm.stats.summary_table import CLUSTER_COLUMNS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXPECTED_COLUMN = "expected rating"


class RatingDistributions(NamedTuple):
    """Distributions over ratings.

    Attributes:
        values: Expected ratings, [N, 1].
        scale: Possible ratings, [X].
        shares: Probabilities of the ratings, [N, X].
    """

    values: AnswerMatrix
    scale: "np.ndarray"
    shares: "np.ndarray"

    @property
    def rating_step(self) -> int:
        """Smallest distance between two ratings that occur."""
        import numpy as np

        used = self.scale[self.shares.sum(axis=0) > 0.001 * len(self.shares)]
        return int(np.diff(used).min()) if len(used) > 1 else 1

    def category_intervals(
        self, place: int, category_column: str
    ) -> tuple[ColumnIntervals, ColumnIntervals, ColumnIntervals]:
        """Return one category's intervals: mean, mean probabilities, cumulative ones."""
        selected = self.values.category == place
        names = [name for name in CLUSTER_COLUMNS if name != category_column]
        clusters = [codes[selected] for codes in self.values.cluster_codes(names)]
        return (
            bootstrap_intervals(self.values.matrix[selected], clusters),
            bootstrap_intervals(self.shares[selected], clusters, "probabilities"),
            bootstrap_intervals(self.shares[selected].cumsum(axis=1), clusters, "probabilities"),
        )


def rating_cumulative_plot(
    df: "pd.DataFrame",
    min_rating: int | None = None,
    max_rating: int | None = None,
    probs_column: str = "probs",
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """Draw for each category the cumulative distribution of ratings.

    Args:
        df: Frame with the columns of `Question.df`.
        min_rating: Start of the axis; by default the lowest rating of the column.
        max_rating: End of the axis; by default the highest.
        probs_column: Column of probabilities by rating.
        category_column, selected_categories, colors, title, filename, error_bars, show: See
            `plots.plot`.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    columns, ends = (probs_column, category_column), (min_rating, max_rating)
    title = style.build_title(df, title)
    ratings = _read_ratings(df, *columns, selected_categories, ends, filename)
    if not len(ratings.values.category):
        return style.empty_figure(ratings.values, title, filename, show)
    picture, axes = style.create_axes(8.5, 5)
    lines = _assign_line_styles(ratings.values.categories, colors)
    for index, name in enumerate(ratings.values.categories):
        mean, _, found = ratings.category_intervals(index, category_column)
        colour, dash = lines[name]
        label = f"{_category_label(ratings.values, index)}{_format_mean_interval(mean)}"
        axes.step(
            ratings.scale,
            found.center,
            color=colour,
            linestyle=dash,
            label=label,
            where="post",
            linewidth=2,
        )
        if error_bars:
            axes.fill_between(
                ratings.scale,
                found.low,
                found.high,
                color=colour,
                alpha=0.18,
                step="post",
                linewidth=0,
            )
    axes.set_xlim(ratings.scale[0], max(ratings.scale[-1], ratings.scale[0] + 1))
    axes.locator_params("x", integer=True)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("rating" if probs_column == "probs" else probs_column)
    axes.set_ylabel("share of ratings ≤ x")
    axes.legend(
        title=category_column,
        frameon=False,
        alignment="left",
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
    )
    note = "Bands, and brackets after means: 95 % intervals." if error_bars else ""
    return style.finish_figure(picture, title, note, filename, show)


def rating_violins(
    df: "pd.DataFrame",
    min_rating: int | None = None,
    max_rating: int | None = None,
    probs_column: str = "probs",
    category_column: str = "group",
    selected_categories: Sequence[Any] | None = None,
    colors: Mapping[Any, str] | None = None,
    title: str | None = None,
    filename: str | Path | None = None,
    error_bars: bool = True,
    show: bool = False,
) -> "Figure":
    """Draw for each category the mean distribution of ratings as a violin, with its mean.

    Without smoothing: the width at a rating is proportional to its probability. Arguments as
    `rating_cumulative_plot`.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    columns, ends = (probs_column, category_column), (min_rating, max_rating)
    title = style.build_title(df, title)
    ratings = _read_ratings(df, *columns, selected_categories, ends, filename)
    if not len(ratings.values.category):
        return style.empty_figure(ratings.values, title, filename, show)
    names = ratings.values.categories
    picture, axes = style.create_axes(3 + 1.2 * len(names), 5)
    styles = assign_fill_styles(names, colors)
    for index, name in enumerate(names):
        mean, found, _ = ratings.category_intervals(index, category_column)
        # False for NaN, of a category without answers.
        if mean.center[0] == mean.center[0]:
            half = 0.42 * found.center / found.center.max()
            axes.barh(
                ratings.scale,
                2 * half,
                ratings.rating_step,
                left=index - half,
                linewidth=0,
                color=styles[name].colour,
                hatch=styles[name].hatch,
            )
            draw_mean(axes, index, mean, error_bars)
    style.draw_category_axis(axes, ratings.values, category_column)
    axes.set_ylabel("rating" if probs_column == "probs" else probs_column)
    note = "Dots: means, with 95 % intervals." if error_bars else "Dots: means."
    return style.finish_figure(picture, title, note, filename, show)


def draw_mean(axes: Any, place: float, mean: ColumnIntervals, error_bars: bool) -> None:
    """Draw a mean as a dot with its interval and number."""
    import numpy as np

    center, low, high = (float(end[0]) for end in mean)
    if error_bars and np.isfinite(low):
        axes.plot([place] * 2, [low, high], color="white", linewidth=4, zorder=4)
        axes.plot([place] * 2, [low, high], color="black", linewidth=1.6, zorder=5, marker="_")
    axes.plot([place], [center], "o", color="black", markeredgecolor="white", zorder=6)
    axes.annotate(
        format_mean_label(center),
        (place, center),
        (9, 0),
        textcoords="offset points",
        zorder=7,
        va="center",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
    )


def format_mean_label(value: float) -> str:
    """Format a mean with about three digits."""
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _read_ratings(
    df: "pd.DataFrame",
    probs_column: str,
    category_column: str,
    selected: Sequence[Any] | None,
    ends: tuple[int | None, int | None],
    filename: Any,
) -> RatingDistributions:
    """Return the ratings; without answers, the scale is empty, too."""
    import numpy as np
    import pandas as pd

    if filename is not None:
        style.check_filename(filename)
    values = _expected_ratings(df, probs_column, category_column, selected)
    if not len(values.category):
        return RatingDistributions(values, np.arange(0), np.zeros((0, 0)))
    probabilities = [parse_probabilities(answer) for answer in values.frame[probs_column]]
    table = pd.DataFrame(probabilities).fillna(0.0)
    first = int(min(table.columns)) if ends[0] is None else ends[0]
    last = int(max(table.columns)) if ends[1] is None else ends[1]
    if last - first > 10_000:
        raise InvalidArgument(f"ratings from {first} to {last} are too many to plot")
    scale = np.arange(first, last + 1)
    shares = table.reindex(columns=list(scale), fill_value=0.0).to_numpy()
    return RatingDistributions(values, scale, shares)


def _expected_ratings(
    df: "pd.DataFrame", probs_column: str, category_column: str, selected: Sequence[Any] | None
) -> AnswerMatrix:
    """Compute the expected rating of each distribution."""
    from swarm.stats.answer_values import get_column

    get_column(df, probs_column, "probs_column")
    means = [
        sum(rating * p for rating, p in found.items()) / sum(found.values())
        if isinstance(answer, Mapping) and any((found := parse_probabilities(answer)).values())
        else None
        for answer in df[probs_column]
    ]
    frame = df.assign(**{EXPECTED_COLUMN: means})
    frame[EXPECTED_COLUMN] = frame[EXPECTED_COLUMN].astype(float)
    return read_answers(frame, EXPECTED_COLUMN, category_column, selected)


def _assign_line_styles(
    names: Sequence[Any], colors: Mapping[Any, str] | None
) -> dict[Any, tuple[str, str]]:
    """Assign a colour and a dash pattern to each name; the dash changes after seven colours."""
    assign_fill_styles(names[: len(COLOURS)], colors)  # raises errors for invalid colours
    if len(names) > (max_lines := len(COLOURS) * len(LINE_STYLES)):
        raise InvalidArgument(
            f"{len(names)} lines are more than can be distinguished ({max_lines}); give "
            f"selected_categories"
        )
    return {
        name: ((colors or {}).get(name, COLOURS[i % 7]), LINE_STYLES[i // 7])
        for i, name in enumerate(names)
    }


def _category_label(values: AnswerMatrix, index: int) -> str:
    return style.build_tick_label(values, index).replace("\n", ", ")


def _format_mean_interval(mean: ColumnIntervals) -> str:
    if mean.center[0] != mean.center[0]:
        return ""
    text = f"\nmean {mean.center[0]:.1f}"
    if mean.low[0] == mean.low[0]:
        text += f" [{mean.low[0]:.1f}, {mean.high[0]:.1f}]"
    return text


MAX_DOTS = 400
"""Maximum dots per category; more answers are sampled at random."""


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
    """Draw a box per category of a numeric column, with its answers as dots, and its mean.

    Raises:
        InvalidArgument: The column is not numeric, or an argument is invalid.
    """
    if filename is not None:
        style.check_filename(filename)
    values = read_answers(df, score_column, category_column, selected_categories, measure=True)
    title = style.build_title(df, title)
    if not len(values.category):
        return style.empty_figure(values, title, filename, show)
    if values.kind != "mean":
        raise InvalidArgument(f"score_column: {score_column} has no numbers; see plots.plot")
    styles = assign_fill_styles(values.categories, colors)
    picture, axes = style.create_axes(3 + 1.2 * len(values.categories), 5)
    clusters = values.cluster_codes([name for name in CLUSTER_COLUMNS if name != category_column])
    for index, name in enumerate(values.categories):
        selected = values.category == index
        if selected.any():
            _draw_box(axes, index, values.matrix[selected, 0], styles[name])
            found = bootstrap_intervals(
                values.matrix[selected], [codes[selected] for codes in clusters]
            )
            draw_mean(axes, index, found, error_bars)
    style.draw_category_axis(axes, values, category_column)
    axes.set_ylabel(score_column)
    note = "Boxes: quartiles. Large dots: means" + ", with 95 % intervals." * error_bars
    return style.finish_figure(picture, title, note, filename, show)


def _draw_box(axes: "Axes", position: int, scores: "np.ndarray", fill: FillStyle) -> None:
    import numpy as np

    generator = np.random.Generator(np.random.Philox(key=4))
    dots = scores if len(scores) <= MAX_DOTS else generator.choice(scores, MAX_DOTS, replace=False)
    aside = position - 0.25 + generator.uniform(-0.1, 0.1, len(dots))
    axes.plot(aside, dots, "o", color="#555555", markersize=2.5, alpha=0.35, zorder=1)
    if len(scores) > 1:
        box = axes.boxplot(
            [scores],
            positions=[position],
            widths=0.22,
            showfliers=False,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black"},
            zorder=2,
        )
        box["boxes"][0].set(facecolor=fill.colour, hatch=fill.hatch, edgecolor="#333333")
