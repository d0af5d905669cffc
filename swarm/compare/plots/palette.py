"""Colours that the colour-blind tell apart, and hatches where there are too few of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swarm.compare.errors import InvalidArgument
from swarm.compare.statistics.counted import OTHER_ANSWERS, UNSEEN_ANSWERS

COLOURS = ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
"""Okabe and Ito's (2008, "Color Universal Design") without black, which the text has.

Of all orders one in which neighbours stay furthest apart with deuteranopia and protanopia.
"""

HATCHES = ("", "//", "..", "xx", "--", "\\\\", "oo", "++")

LINE_STYLES = ("-", "--", ":", "-.")

FIXED_COLOURS = {OTHER_ANSWERS: "#9A9A9A", UNSEEN_ANSWERS: "#E8E8E8"}


class FillStyle(NamedTuple):
    """How something is filled: a colour of matplotlib's and a hatch, empty for none."""

    colour: str
    hatch: str


def assign_fill_styles(names: Sequence[Any], colors: Mapping[Any, str] | None = None) -> dict[Any, FillStyle]:
    """A look for each, no two alike but as `colors` has it.

    Raises:
        WrongValue: A colour is none, or there are more names than looks.
    """
    given = {**FIXED_COLOURS, **_validate_colours(colors or {})}
    free = [
        FillStyle(colour, hatch)
        for hatch in HATCHES
        for colour in COLOURS
        if hatch or colour.lower() not in {str(one).lower() for one in given.values()}
    ]
    unnamed = [name for name in names if name not in given]
    if len(unnamed) > len(free):
        raise InvalidArgument(
            f"{len(names)} answers are more than can be told apart by colour and hatch "
            f"({len(free)}); give selected_answers or min_fraction"
        )
    chosen = dict(zip(unnamed, free, strict=False))
    return {name: chosen.get(name) or FillStyle(given[name], "") for name in names}


def _validate_colours(colors: Mapping[Any, str]) -> dict[Any, str]:
    from matplotlib.colors import is_color_like

    for name, colour in colors.items():
        if not is_color_like(colour):
            raise InvalidArgument(f"colors: {colour!r} for {name!r} is no colour, as 'red' or '#56B4E9'")
    return dict(colors)


def text_colour_on(colour: str) -> str:
    """Black or white, whichever has the larger contrast (WCAG 2.2) to a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "white"
