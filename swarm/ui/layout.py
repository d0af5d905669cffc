"""Page layout: header, navigation, light and dark theme, and widgets shared by several pages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from nicegui import Client, app, ui
from nicegui.page import page

from swarm._util.terminal import escape_control_chars
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.ui.run_data import describe_unreadable
from swarm.ui.state import UNREADABLE_ERRORS

T = TypeVar("T")

NAVIGATION = {
    "Runs": "/",
    "Start": "/start",
    "Models": "/models",
    "Talk": "/talk",
    "Compare": "/compare",
}

STYLE = """
:root { --nicegui-default-padding: 1rem; --paper: #fcfcfb; --card: #ffffff; --ink: #1c2126;
        --quiet: #5a636d; --line: #dfe3e7; }
body.body--dark { --paper: #14171b; --card: #1c2126; --ink: #e6e9ec; --quiet: #a3acb6;
                  --line: #343b43; }
body.body--dark { --q-primary: #7fb2e5 !important; --q-negative: #ff9a90 !important; }
/* Of important rules the earlier layer's counts, and Quasar's are in the last layer. */
@layer overrides {
  .body--dark .bg-primary, .body--dark .bg-negative { color: #14171b !important; }
}
.q-select .q-chip { height: auto; max-width: 100%; }
.q-select .q-chip .ellipsis { white-space: normal; overflow-wrap: anywhere; }
body { background: var(--paper) !important; color: var(--ink); }
.q-card, .q-table__container { background: var(--card) !important; }
.q-card { border: 1px solid var(--line); box-shadow: none !important; }
.frame-head { background: var(--card) !important; color: var(--ink) !important;
              border-bottom: 1px solid var(--line); }
.frame-head a { color: var(--ink); text-decoration: none; padding: .35rem .6rem;
                border-radius: .35rem; }
.frame-head a:hover { background: var(--line); }
.frame-head a.here { font-weight: 600; box-shadow: inset 0 -2px 0 var(--q-primary); }
.frame-head a.skip { position: absolute; left: -99rem; background: var(--card); z-index: 9; }
.frame-head a.skip:focus { left: 1rem; }
:focus-visible { outline: 3px solid var(--q-primary); outline-offset: 2px; }
#main:focus, .q-field :focus-visible { outline: none; }
.run-name { white-space: normal !important; overflow-wrap: anywhere; }
@media (max-width: 599px) {
  .q-table th.q-table--col-auto-width, .q-table td.q-table--col-auto-width { padding-right: 0; }
  .q-table__grid-item-row { display: flex; gap: 1rem; justify-content: space-between; }
  .q-table__grid-item-title { flex: none; line-height: 1.5; }
  .q-table__grid-item-value { min-width: 0; overflow-wrap: anywhere; text-align: right; }
  .q-table td.run-name { padding: .6rem .8rem .6rem 0; }
}
.answers svg { width: 100%; height: auto; max-width: 50rem; }
.quiet { color: var(--quiet); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.log { white-space: pre-wrap; overflow-wrap: anywhere; font: .8rem/1.45 ui-monospace, monospace;
       max-height: 22rem; overflow: auto; width: 100%; background: var(--paper);
       border: 1px solid var(--line); border-radius: .35rem; padding: .6rem; }
.ends { display: flex; flex-direction: column-reverse; }
.nicegui-content { max-width: 75rem; margin: 0 auto; width: 100%; min-width: 0; }
.nicegui-content > *, .q-card, .q-table__container { max-width: 100%; min-width: 0; }
h3 { font-size: 1rem; line-height: 1.4; font-weight: 600; margin: .6rem 0 .2rem; }
summary { cursor: pointer; }
details.flip { border-bottom: 1px solid var(--line); }
details.flip > summary { padding: .4rem 0; }
.flip .id { color: var(--quiet); margin-right: .5rem; }
.flip .said { display: block; color: var(--quiet); padding-left: 1.1rem; }
.flip .said, .flip .question, .flip pre { overflow-wrap: anywhere; }
.flip .texts { padding: 0 0 .6rem 1.1rem; }
.flip h4 { font-size: .85rem; line-height: 1.4; margin: .3rem 0 0; color: var(--quiet); }
.flip pre { margin: 0; white-space: pre-wrap; font: .85rem/1.45 ui-monospace, monospace; }
details.more > summary { color: var(--q-primary); padding: .4rem 0; }
h1 { font-size: 1.5rem; line-height: 1.3; font-weight: 600; overflow-wrap: anywhere; margin: 0; }
h2 { font-size: 1.1rem; line-height: 1.4; font-weight: 600; margin: 0; }
"""

RESTORE_THEME_JS = """() => {
  const kept = localStorage.getItem('dark');
  if (kept !== null) Quasar.Dark.set(kept === 'true');
}"""
TOGGLE_THEME_JS = """() => {
  Quasar.Dark.toggle();
  localStorage.setItem('dark', Quasar.Dark.isActive);
}"""


@contextmanager
def page_frame(title: str, here: str | None = None) -> Iterator[None]:
    """Draw the frame of a page; the block draws its content.

    Args:
        title: Heading and window title.
        here: Entry of `NAVIGATION` that the page belongs to; `title` by default.
    """
    here = title if here is None else here
    ui.page_title(f"{title} · model-swarms")
    ui.colors(primary="#2f6fab")
    ui.add_css(STYLE)
    with ui.header().classes("frame-head items-center gap-1 px-4 py-2 no-wrap"):
        skip = ui.link("Skip to the page", "#main").classes("skip")
        skip.on("click", js_handler="() => document.getElementById('main').focus()")
        ui.link("model-swarms", "/").classes("text-base font-semibold")
        with ui.element("nav").classes("gt-xs flex items-center gap-1").props("aria-label=Pages"):
            for name, path in NAVIGATION.items():
                _draw_link(name, path, here)
        ui.space()
        ui.button(icon="contrast").props("flat round dense aria-label='Light or dark'").on(
            "click", js_handler=TOGGLE_THEME_JS
        )
        with (
            ui.button(icon="menu").props("flat round dense aria-label=Menu").classes("lt-sm"),
            ui.menu(),
        ):
            for name, path in NAVIGATION.items():
                ui.menu_item(name, lambda path=path: ui.navigate.to(path))
    ui.run_javascript(f"({RESTORE_THEME_JS})()")
    with ui.column().classes("w-full gap-4").props("id=main tabindex=-1 role=main"):
        ui.html(f"<h1>{escape(title)}</h1>", sanitize=False)
        yield


def _draw_link(name: str, path: str, current: str) -> None:
    link = ui.link(name, path)
    if name == current:
        link.classes("here").props("aria-current=page")


def register_not_found_page(home: object) -> None:
    """Register the page of an address that does not exist, with status 404."""

    @app.exception_handler(404)
    async def not_found_page(request: Request, error: Exception) -> Response:
        path = request.url.path
        if path.startswith("/_nicegui") or request.method != "GET":
            return PlainTextResponse("not found\n", 404)
        with Client(page(""), request=request) as client, page_frame("Page not found", ""):
            ui.label(f"There is no page at {path}.").classes("text")
            with ui.row().classes("gap-4"):
                for name, target in NAVIGATION.items():
                    ui.link(name, target)
        return client.build_response(request, 404)


def draw_when_loaded(load: Callable[[], T], draw: Callable[[T], Any]) -> None:
    """Draw a spinner, and what `load` returns once a thread has loaded it; its error in its place.

    The page itself is sent at once, however busy the machine is.
    """
    with ui.column().classes("w-full gap-4") as place:
        ui.spinner(size="2rem").props("role=status aria-label=Loading")

    async def fill() -> None:
        try:
            found = await run_in_thread(load)
        except (UserError, *UNREADABLE_ERRORS) as error:
            place.clear()
            message = str(error) if isinstance(error, UserError) else describe_unreadable(error)
            with place:
                ui.label(escape_control_chars(message)).classes("text text-negative").props(
                    "role=alert"
                )
            return
        place.clear()
        with place:
            draw(found)

    ui.timer(0, fill, once=True)


def draw_heading(text: str) -> None:
    """Draw the heading of a section."""
    ui.html(f"<h2>{escape(text)}</h2>", sanitize=False)


def draw_facts(found: Iterable[tuple[str, str]]) -> None:
    """Draw short facts, as (label, value)."""
    with ui.row().classes("w-full gap-x-8 gap-y-2"):
        for label, value in found:
            with ui.column().classes("gap-0"):
                ui.label(label).classes("quiet text-sm")
                ui.label(value).classes("text-base")


def draw_plain_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], align: str = "right"
) -> ui.table:
    """Draw a table of text; on a phone each row becomes a card.

    Args:
        align: Alignment of all columns but the first.
    """
    columns = [
        {"name": f"c{n}", "label": title, "field": f"c{n}", "align": align if n else "left"}
        for n, title in enumerate(header)
    ]
    found = [
        {"key": n, **{f"c{m}": str(cell) for m, cell in enumerate(row)}}
        for n, row in enumerate(rows)
    ]
    table = ui.table(columns=columns, rows=found, row_key="key").classes("w-full")
    return table.props(
        "flat bordered dense wrap-cells hide-pagination :rows-per-page-options=[0] "
        ":grid=Quasar.Screen.lt.sm"
    )


MIN_COEFFICIENT, MAX_COEFFICIENT = -0.5, 1.5
"""Initial range of a slider, which is extended for coefficients outside of it."""

SLIDER_STYLE = """
.mix-row { display: grid; grid-template-columns: minmax(5rem, 8rem) minmax(0, 1fr) 5.5rem;
           gap: .75rem; align-items: center; width: 100%; }
@media (max-width: 599px) {
  .mix-row { grid-template-columns: minmax(0, 1fr) 5.5rem; gap: 0 1rem; }
  .mix-row > :first-child { grid-column: 1 / -1; }
}
"""


class CoefficientSliders:
    """Draws a slider and a number field for each expert in the current container.

    Args:
        names: Names of the experts.

    Attributes:
        coefficients: Current coefficients by expert; values set by code are not rounded.
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
            self._set_coefficient(name, float(value), by_slider=True)

    def _on_number_typed(self, name: str) -> None:
        value = self._numbers[name].value
        self._set_coefficient(name, 0.0 if value is None else float(value))

    def _set_coefficient(self, name: str, value: float, by_slider: bool = False) -> None:
        self.coefficients[name] = value
        self._numbers[name].set_value(value)
        slider = self._sliders[name]
        if not by_slider:
            slider.props(
                f":min={min(MIN_COEFFICIENT, value):.2f} :max={max(MAX_COEFFICIENT, value):.2f}"
            )
            slider.set_value(value)
        self._sum.set_text(f"sum {sum(self.coefficients.values()):.3f}")

    def set_coefficients(self, coefficients: Mapping[str, float]) -> None:
        """Set all coefficients; experts that are not named are set to 0."""
        for name in self.coefficients:
            self._set_coefficient(name, float(coefficients.get(name, 0.0)))
