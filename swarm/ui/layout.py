"""Page layout: header, navigation, light and dark theme, and widgets shared by several pages."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from nicegui import Client, app, ui
from nicegui.page import page

from swarm._util.terminal import escape_control_chars
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.report.document import COLOURS, TableBlock
from swarm.report.page import ICON

T = TypeVar("T")

NAVIGATION = {
    "Runs": "/",
    "Start": "/start",
    "Models": "/models",
    "Talk": "/talk",
    "Compare": "/compare",
}

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")

RESTORE_THEME_JS = """(() => {
  const kept = localStorage.getItem('dark');
  if (kept !== null) Quasar.Dark.set(kept === 'true');
})()"""
TOGGLE_THEME_JS = """() => {
  Quasar.Dark.toggle();
  localStorage.setItem('dark', Quasar.Dark.isActive);
}"""

REFRESH_S = 0.3
"""Interval between progress updates in seconds."""

ui.button.default_props("no-caps")
ui.expansion.default_props("dense").default_classes("w-full")
ui.label.default_classes("text")
for field in (ui.input, ui.number, ui.select, ui.textarea):
    field.default_props("dense outlined")


@contextmanager
def page_frame(title: str, here: str | None = None) -> Iterator[None]:
    """Draw the frame of a page; the block draws its content.

    Args:
        title: Heading and window title.
        here: Entry of `NAVIGATION` that the page belongs to; `title` by default.
    """
    ui.page_title(f"{title} · model-swarms")
    ui.colors(primary=COLOURS[0], positive=COLOURS[2], warning=COLOURS[1])
    ui.add_css(STYLE)
    with ui.header().classes("frame-head items-center gap-1 px-4 py-2 no-wrap"):
        skip = ui.link("Skip to the page", "#main").classes("skip")
        skip.on("click", js_handler="() => document.getElementById('main').focus()")
        ui.link("model-swarms", "/").classes("text-base font-semibold")
        with ui.element("nav").classes("gt-xs flex items-center gap-1").props("aria-label=Pages"):
            for name, path in NAVIGATION.items():
                link = ui.link(name, path)
                if name == (title if here is None else here):
                    link.classes("here").props("aria-current=page")
        ui.space()
        theme = ui.button(icon="contrast").props("flat round dense aria-label='Light or dark'")
        theme.on("click", js_handler=TOGGLE_THEME_JS)
        menu = ui.button(icon="menu").props("flat round dense aria-label=Menu").classes("lt-sm")
        with menu, ui.menu():
            for name, path in NAVIGATION.items():
                ui.menu_item(name, lambda path=path: ui.navigate.to(path))
    ui.run_javascript(RESTORE_THEME_JS)
    with ui.column().classes("w-full gap-4").props("id=main tabindex=-1 role=main"):
        ui.html(f"<h1>{escape(title)}</h1>", sanitize=False)
        yield


def register_not_found_page() -> None:
    """Register the page of an address that does not exist, with status 404."""

    @app.exception_handler(404)
    async def not_found_page(request: Request, error: Exception) -> Response:
        path = request.url.path
        if path.startswith("/_nicegui") or request.method != "GET":
            return PlainTextResponse("not found\n", 404)
        with Client(page(""), request=request) as client, page_frame("Page not found", ""):
            ui.label(f"There is no page at {path}.")
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
            found, error = await run_in_thread(load), ""
        except Exception as raised:  # shown in the place of the content
            error = describe_error(raised)
        place.clear()
        with place:
            if error:
                draw_alert(error)
            else:
                draw(found)

    ui.timer(0, fill, once=True)


def describe_error(error: Exception) -> str:
    """Return the message of an error of the user; of any other one also its type."""
    if isinstance(error, UserError):
        return str(error)
    return escape_control_chars(f"failed with {type(error).__name__}: {error}")


def draw_heading(text: str) -> None:
    """Draw the heading of a section."""
    ui.html(f"<h2>{escape(text)}</h2>", sanitize=False)


def draw_text(words: str, classes: str = "") -> ui.label:
    """Draw text of any origin: it is never markup, and its control characters are visible."""
    return ui.label(escape_control_chars(words)).classes(classes)


def draw_empty(words: str, action: str, target: str) -> None:
    """Draw what an empty list shows: a picture, a sentence and a button."""
    with ui.column().classes("w-full items-center gap-3 py-8"):
        ui.html(ICON.read_text(encoding="utf-8"), sanitize=False).classes("empty")
        ui.label(words).classes("quiet text-base")
        ui.button(action, on_click=lambda: ui.navigate.to(target)).props("unelevated")


def draw_alert(words: str = "") -> ui.label:
    """Draw an error, which is hidden as long as it is empty."""
    alert = draw_text(words, "text-negative").props("role=alert")
    return alert.bind_visibility_from(alert, "text", bool)


def draw_facts(found: Iterable[tuple[str, str]]) -> None:
    """Draw short facts, as (label, value)."""
    with ui.row().classes("w-full gap-x-8 gap-y-2"):
        for label, value in found:
            with ui.column().classes("gap-0"):
                ui.label(label).classes("quiet text-sm")
                ui.label(value).classes("text-base")


def draw_table(found: TableBlock, align: str = "right") -> None:
    """Draw a table of text and its caption; on a phone each row of a wide one becomes a card.

    Args:
        align: Alignment of all columns but the first.
    """
    columns = [
        {"name": f"c{n}", "label": title, "field": f"c{n}", "align": align if n else "left"}
        for n, title in enumerate(found.header)
    ]
    rows = [
        {"key": n, **{f"c{m}": escape_control_chars(str(cell)) for m, cell in enumerate(row)}}
        for n, row in enumerate(found.rows)
    ]
    wide = max(sum(map(len, row)) + 4 * len(row) for row in (found.header, *found.rows)) > 64
    ui.table(columns=columns, rows=rows, row_key="key").classes("w-full").props(
        "flat bordered dense wrap-cells hide-pagination :rows-per-page-options=[0]"
        + " :grid=Quasar.Screen.lt.sm" * wide
    )
    if found.caption:
        ui.label(f"{found.caption}.").classes("quiet")


def draw_command() -> ui.label:
    """Draw a button that copies the text of the label that is returned; hidden without a text."""

    def copy() -> None:
        ui.clipboard.write(command.text)
        ui.notify("Copied.")

    with ui.row().classes("w-full items-start no-wrap gap-2") as row:
        command = ui.label("").classes("log grow min-w-0").style("max-height: 8rem")
        button = ui.button(icon="content_copy", on_click=copy)
        button.props("flat dense aria-label='Copy the command'")
    row.bind_visibility_from(command, "text", bool)
    return command


def draw_model_field(
    labels: Mapping[str, str], label: str, chosen: Sequence[str] = ()
) -> ui.select:
    """Draw a field for names of models: labelled ones, and any that is typed."""
    field = ui.select(
        {**labels, **{name: labels.get(name, name) for name in chosen}},
        label=label,
        value=list(chosen),
        multiple=True,
        with_input=True,
        new_value_mode="add-unique",
        key_generator=lambda name: name,
    )
    field.props("use-chips hint='search, or type a name and press Enter'").classes("w-full")
    return field


class JobButton:
    """A button that runs a job, one that stops it, its progress, its error and its result.

    Args:
        label: Label of the button.
        work: The job. What it draws is shown below; an error that it raises in its place.
        progress: Returns a few words while the job runs.
        stop: Stops the job, whose error says so; `None` if it cannot be stopped.
    """

    def __init__(
        self,
        label: str,
        work: Callable[[], Awaitable[None]],
        progress: Callable[[], str],
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        with ui.row().classes("items-center gap-2"):
            self._button = ui.button(label, on_click=self.run).props("unelevated")
            with ui.row().classes("items-center gap-2") as self._activity:
                if stop:
                    ui.button("Stop", on_click=stop).props(f"outline aria-label='Stop: {label}'")
                    ui.context.client.on_delete(stop)
                ui.spinner(size="1.5em")
                self._state = ui.label().classes("quiet").props("role=status data-job")
        self.error = draw_alert()
        self._place = ui.column().classes("w-full gap-2")
        self._set_running(False)
        ui.timer(REFRESH_S, lambda: self.is_running and self._state.set_text(progress()))

    def _set_running(self, running: bool) -> None:
        self.is_running = running
        self._state.set_text("")
        self._activity.set_visibility(running)
        self._button.set_enabled(not running)

    def set_enabled(self, enabled: bool) -> None:
        """Set whether the job can be run."""
        self._button.set_enabled(enabled)

    async def run(self) -> None:
        """Run the job, as a click on the button does."""
        self.error.set_text("")
        self._place.clear()
        self._set_running(True)
        try:
            with self._place:
                await self._work()
        except Exception as error:  # shown on the page instead of a traceback
            self.error.set_text(describe_error(error))
        finally:
            self._set_running(False)
