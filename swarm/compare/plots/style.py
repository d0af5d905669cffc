"""Figures without global matplotlib state: layout, fonts, colours and atomic saving."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure

from swarm._util.files import write_atomic
from swarm._util.terminal import pluralize
from swarm.errors import InvalidArgument, UserError
from swarm.report.charts import escape_undrawable, figure_to_bytes, prepare_texts
from swarm.stats.answer_values import OTHER_ANSWERS, UNSEEN_ANSWERS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from swarm.stats.answer_values import AnswerMatrix

MAX_LABEL_CHARS = 48
"""Maximum characters of a label; longer ones are truncated."""


TICK = 13
"""Characters per line of a category's label, if labels are side by side."""

LEAST = 1.0
"""Minimum height of axes in inches, without labels."""

LARGEST = 60.0
"""Maximum size of a figure in inches when it is enlarged to fit its texts."""


class NotebookFigure(Figure):
    """A figure that a notebook displays as the last value of a cell.

    Attributes:
        min_widths: Minimum width of each axes in inches, without labels.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.min_widths: dict[Any, float] = {}

    def _repr_png_(self) -> bytes:
        return figure_to_bytes(self, "png", dpi=110, bbox_inches="tight")


def create_axes(width: float, height: float, *beside: float) -> tuple[NotebookFigure, Any]:
    """Create a figure with one axes, without matplotlib's global state (pyplot).

    Args:
        width: Width in inches.
        height: Height in inches.
        beside: Widths of further axes on the right, which are then returned with the first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = NotebookFigure(figsize=(width + sum(beside), height), layout="constrained", dpi=110)
    FigureCanvasAgg(picture)
    found = picture.subplots(1, 1 + len(beside), squeeze=False, width_ratios=[width, *beside])[0]
    for one, least in zip(found, (width / 2, *(0.7 * w for w in beside)), strict=True):
        one.spines[["top", "right"]].set_visible(False)
        picture.min_widths[one] = least
    return picture, found if beside else found[0]


def finish_figure(
    picture: NotebookFigure, title: str | None, note: str, filename: str | Path | None, show: bool
) -> NotebookFigure:
    """Add title and note, make texts legible, then save and show the figure.

    Raises:
        UserError: It cannot be saved, or there is no display.
    """
    if title:
        picture.axes[0].set_title(title, fontsize=11, loc="left")
    if note:
        picture.supxlabel(note, fontsize=8, color="#404040", x=0.01, ha="left")
    prepare_texts(picture)  # before the layout, which depends on their sizes
    make_room(picture)
    if title:
        wrap_title(picture)
    if filename is not None:
        save_figure(picture, filename)
    if show:
        _open_window(picture)
    return picture


def make_room(picture: NotebookFigure) -> None:
    """Rotate or thin out overlapping x labels, and widen axes that texts squeeze."""
    _widen(picture)
    for one in picture.min_widths:
        for turn in (_turned, _upright, _thinned):
            if not _overlap(one):
                break
            height = _names_height(one)
            turn(one)
            picture.set_figheight(picture.get_figheight() + max(0.0, _names_height(one) - height))
    _widen(picture)


def wrap_title(picture: NotebookFigure) -> None:
    """Break the title where it would reach a colour bar or the figure's edge."""
    from textwrap import wrap

    axes, found = picture.axes[0], picture.axes[0].get_title("left")
    inside = axes.get_window_extent()
    single_axes = len(picture.axes) == len(picture.min_widths)
    end = picture.bbox.x1 if single_axes else inside.x1
    max_chars = max(20, int((end - inside.x0) / picture.dpi / 0.09))
    lines = [one for line in found.split("\n") for one in wrap(line, max_chars) or [""]]
    axes.set_title("\n".join(lines), loc="left")
    _widen(picture)


def _widen(picture: NotebookFigure) -> None:
    """Enlarge a figure until its axes have their minimum sizes; may not converge."""
    for _ in range(10):
        width, height = _lacking(picture)
        if max(width, height) <= 0.02 or max(picture.get_size_inches()) >= LARGEST:
            return
        picture.set_figwidth(min(LARGEST, picture.get_figwidth() + width))
        picture.set_figheight(min(LARGEST, picture.get_figheight() + height))


def _lay_out(picture: NotebookFigure) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # squeezed axes are widened afterwards
        engine = picture.get_layout_engine()
        assert engine
        engine.execute(picture)


def _lacking(picture: NotebookFigure) -> tuple[float, float]:
    """Return the missing width and height of a figure in inches."""
    _lay_out(picture)
    inside = {one: one.get_window_extent().width / picture.dpi for one in picture.min_widths}
    scale = max(least / max(inside[one], 0.1) for one, least in picture.min_widths.items())
    legends = [legend for one in picture.axes if (legend := one.get_legend())]
    ends = [legend.get_window_extent().x1 / picture.dpi for legend in legends]
    outside = max(ends, default=0.0) - picture.get_figwidth()
    high = min(one.get_window_extent().height / picture.dpi for one in picture.min_widths)
    width = max((min(scale, 2.0) - 1) * sum(inside.values()), outside, 0.0)
    tall = max((one.get_window_extent().height / picture.dpi for one in legends), default=0.0)
    return width, max(0.0, LEAST - high, tall + 1.5 - picture.get_figheight())


def _names(axes: "Axes") -> list[Any]:
    return [one for one in axes.get_xticklabels() if one.get_text().strip()]


def _names_height(axes: "Axes") -> float:
    """Return the height of the x labels in inches."""
    found = [one.get_window_extent().height for one in _names(axes)]
    return max(found, default=0.0) / axes.figure.dpi


def _overlap(axes: "Axes") -> bool:
    """Return whether x labels overlap at their current rotation."""
    import math

    names = _names(axes)
    if len(names) < 2 or not axes.xaxis.get_visible():
        return False
    _lay_out(axes.figure)  # type: ignore[arg-type]
    turn = math.radians(names[0].get_rotation())
    if not turn:
        boxes = sorted((one.get_window_extent() for one in names), key=lambda box: box.x0)
        return any(a.x1 > b.x0 - 2 for a, b in pairwise(boxes))
    positions = sorted(axes.transData.transform((x, 0))[0] for x in axes.get_xticks())
    distance = min(b - a for a, b in pairwise(positions)) * math.sin(turn)
    lines = max(one.get_text().count("\n") + 1 for one in names)
    return distance < lines * names[0].get_fontsize() * 1.25 / 72 * axes.figure.dpi


def _turned(axes: "Axes") -> None:
    _turn(axes, 40)


def _upright(axes: "Axes") -> None:
    _turn(axes, 90)


def _turn(axes: "Axes", degrees: float) -> None:
    for one in axes.get_xticklabels():
        one.set(
            rotation=degrees,
            horizontalalignment="right",
            rotation_mode="anchor",
            verticalalignment="center" if degrees == 90 else "top",
        )


def _thinned(axes: "Axes") -> None:
    """Reduce labels to one line each, and to as many as fit."""
    names = axes.get_xticklabels()
    for one in names:
        one.set_text(" ".join(one.get_text().split()))
    ticks, texts = list(axes.get_xticks()), [one.get_text() for one in names]
    for step in range(1, len(ticks)):
        axes.set_xticks(ticks[::step], texts[::step])
        _upright(axes)
        if not _overlap(axes):
            return


def shorten_label(value: Any, max_length: int = MAX_LABEL_CHARS) -> str:
    """Return a label in one line, truncated, with drawable characters only."""
    text = " ".join(str(value).split()) or repr(value)
    return escape_undrawable(text if len(text) <= max_length else f"{text[: max_length - 1]}…")


def shorten_labels(names: Sequence[Any], max_length: int = MAX_LABEL_CHARS) -> list[str]:
    """Shorten labels; the ends of long labels with the same beginning are shown, too."""
    found = [shorten_label(name, max_length) for name in names]
    return [
        escape_undrawable(f"{one[: max_length // 2 - 1]}…{str(name)[-(max_length // 2) :]}")
        if found.count(one) > 1
        else one
        for one, name in zip(found, names, strict=True)
    ]


def build_title(df: "pd.DataFrame", title: str | None, shown: str | None = None) -> str | None:
    """Return the title; by default a paraphrase (`shown` or the first) and the number of others."""
    from textwrap import wrap

    from swarm.stats.answer_values import to_hashable_column

    if title is not None:
        return title
    known = to_hashable_column(df["question"]).dropna().unique() if "question" in df.columns else ()
    questions = list(known) or [shown]
    first = questions[0] if shown is None else shown
    if first is None:
        return None
    lines = wrap(shorten_label(first, 240), 90)[:3]
    if others := len(questions) - 1:
        lines.append(f"and {pluralize(others, 'other paraphrase')}")
    return "\n".join(lines)


def build_tick_label(values: "AnswerMatrix", place: int, width: int = MAX_LABEL_CHARS) -> str:
    """Return a category's label with its number of answers, refusals and errors."""
    from textwrap import wrap

    name = values.categories[place]
    n = int((values.category == place).sum())
    refused, errors = values.refused[name], values.errors[name]
    lines = [*wrap(shorten_label(name), width), f"n = {n}" if n else "no answers"]
    if refused:
        lines.append(f"{refused / (n + refused):.0%} refused")
    if errors:
        lines.append(f"{errors} failed")
    return "\n".join(lines)


def draw_category_axis(axes: "Axes", values: "AnswerMatrix", category_column: str) -> None:
    """Draw the category labels of an x axis."""
    count = len(values.categories)
    width = TICK if count <= 8 else MAX_LABEL_CHARS
    axes.set_xticks(
        range(count), [build_tick_label(values, index, width) for index in range(count)]
    )
    axes.figure.min_widths[axes] = (1.15 if count <= 8 else 0.6) * count  # type: ignore[union-attr]
    if count > 8:
        _turn(axes, 40)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_xlabel(category_column)


def empty_figure(
    values: "AnswerMatrix", title: str | None, filename: Any, show: bool
) -> NotebookFigure:
    """Return a figure with a message that there is nothing to show, and why."""
    refused, errors = sum(values.refused.values()), sum(values.errors.values())
    if refused and not errors:
        message = f"All {refused} answers were refused or could not be read."
    elif refused or errors:
        message = f"No answers: {refused} refused, {errors} failed."
    else:
        message = "No answers: the data frame has no such rows."
    picture, one = create_axes(7, 3)
    one.set_axis_off()
    one.text(0.5, 0.5, message, ha="center", va="center", transform=one.transAxes)
    return finish_figure(picture, title, "", filename, show)


def check_filename(filename: str | Path) -> None:
    """Raise an error if figures cannot be saved in this format."""
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if Path(filename).suffix[1:].lower() not in kinds:
        raise InvalidArgument(
            f"filename: {filename} should end in .png, .svg or .pdf (or .{', .'.join(kinds)})"
        )


def save_figure(picture: Figure, filename: str | Path) -> None:
    """Save a figure atomically; parent folders are created.

    Raises:
        UserError: The extension is not that of an image, or the file cannot be written.
    """
    check_filename(filename)
    kind = Path(filename).suffix[1:].lower()
    image = figure_to_bytes(picture, kind, dpi=150, bbox_inches="tight")
    write_atomic(Path(filename).expanduser(), image)


def _open_window(picture: Figure) -> None:
    """Show a figure in a window, and wait until it is closed."""
    import matplotlib
    from matplotlib import pyplot

    window = pyplot.figure(figsize=picture.get_size_inches())
    try:
        if matplotlib.get_backend().lower() in ("agg", "cairo", "pdf", "ps", "svg", "template"):
            raise UserError("show: no display is available; give filename= to save the figure")
        window.canvas.figure = picture
        picture.set_canvas(window.canvas)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pyplot.show()
    finally:
        pyplot.close(window)


COLOURS = ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
"""Colours of Okabe and Ito (2008, "Color Universal Design") without black, which is used for text.

In an order in which neighbours have the largest distance under deuteranopia and protanopia.
"""

HATCHES = ("", "//", "..", "xx", "--", "\\\\", "oo", "++")

LINE_STYLES = ("-", "--", ":", "-.")

FIXED_COLOURS = {OTHER_ANSWERS: "#9A9A9A", UNSEEN_ANSWERS: "#E8E8E8"}


class FillStyle(NamedTuple):
    """A matplotlib colour and a hatch, empty for none."""

    colour: str
    hatch: str


def assign_fill_styles(
    names: Sequence[Any], colors: Mapping[Any, str] | None = None
) -> dict[Any, FillStyle]:
    """Assign a distinct style to each name; colours in `colors` take precedence.

    Raises:
        InvalidArgument: A colour is invalid, or there are more names than styles.
    """
    fixed = {**FIXED_COLOURS, **_validate_colours(colors or {})}
    free = [
        FillStyle(colour, hatch)
        for hatch in HATCHES
        for colour in COLOURS
        if hatch or colour.lower() not in {str(one).lower() for one in fixed.values()}
    ]
    unnamed = [name for name in names if name not in fixed]
    if len(unnamed) > len(free):
        raise InvalidArgument(
            f"{len(names)} answers are more than can be distinguished by colour and hatch "
            f"({len(free)}); give selected_answers or min_fraction"
        )
    chosen = dict(zip(unnamed, free, strict=False))
    return {name: chosen.get(name) or FillStyle(fixed[name], "") for name in names}


def _validate_colours(colors: Mapping[Any, str]) -> dict[Any, str]:
    from matplotlib.colors import is_color_like

    for name, colour in colors.items():
        if not is_color_like(colour):
            raise InvalidArgument(
                f"colors: {colour!r} for {name!r} is not a colour, as 'red' or '#56B4E9'"
            )
    return dict(colors)


def text_colour_on(colour: str) -> str:
    """Return black or white, whichever has the larger contrast (WCAG 2.2) to a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "white"
