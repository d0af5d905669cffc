"""Sliders on a page, one an expert: the coefficients of a mixture by hand."""

from collections.abc import Mapping, Sequence

from nicegui import ui

MIN_COEFFICIENT, MAX_COEFFICIENT = -0.5, 1.5
"""Of a slider at first; it grows where a coefficient lies beyond."""

SLIDER_STYLE = """
.mix-row { display: grid; grid-template-columns: minmax(5rem, 8rem) minmax(0, 1fr) 5.5rem;
           gap: .75rem; align-items: center; width: 100%; }
@media (max-width: 599px) {
  .mix-row { grid-template-columns: minmax(0, 1fr) 5.5rem; gap: 0 1rem; }
  .mix-row > :first-child { grid-column: 1 / -1; }
}
"""


class CoefficientSliders:
    """Draws a slider and a number for each expert where it is made.

    Args:
        names: Of the experts.

    Attributes:
        coefficients: As they are now, by expert; what was set by a program is not rounded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.coefficients = dict.fromkeys(names, 0.0)
        self._sliders: dict[str, ui.slider] = {}
        self._numbers: dict[str, ui.number] = {}
        for name in names:
            self._draw_slider(name)
        self._sum = ui.label().classes("quiet text-sm").props("role=status")
        self.set_coefficients(dict.fromkeys(names, 1 / len(names)) if names else {})

    def _draw_slider(self, name: str) -> None:
        with ui.element("div").classes("mix-row"):
            ui.label(name).classes("text")
            slider = ui.slider(min=MIN_COEFFICIENT, max=MAX_COEFFICIENT, step=0.01, value=0)
            slider.props(f'aria-label="coefficient of {name}"')
            slider.on("update:model-value", lambda event: self._on_slider_moved(name, event.args))
            number = ui.number(value=0, step=0.05, format="%.3f").props(
                f'dense outlined aria-label="{name}"'
            )
            number.on("change", lambda event: self._on_number_typed(name))
        self._sliders[name], self._numbers[name] = slider, number

    def _on_slider_moved(self, name: str, value: float | None) -> None:
        if value is not None:
            self._set_coefficient(name, float(value), moved=True)

    def _on_number_typed(self, name: str) -> None:
        value = self._numbers[name].value
        self._set_coefficient(name, 0.0 if value is None else float(value))

    def _set_coefficient(self, name: str, value: float, moved: bool = False) -> None:
        self.coefficients[name] = value
        self._numbers[name].set_value(value)
        slider = self._sliders[name]
        if not moved:
            slider.props(f":min={min(MIN_COEFFICIENT, value):.2f} :max={max(MAX_COEFFICIENT, value):.2f}")
            slider.set_value(value)
        self._sum.set_text(f"sum {sum(self.coefficients.values()):.3f}")

    def set_coefficients(self, coefficients: Mapping[str, float]) -> None:
        """Put all where they are said to be; those that are not named to 0."""
        for name in self.coefficients:
            self._set_coefficient(name, float(coefficients.get(name, 0.0)))
