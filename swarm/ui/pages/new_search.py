"""Page Start: a form for a new search, checked by the command line, with the equivalent command."""

import asyncio
from pathlib import Path
from urllib.parse import quote

from nicegui import run, ui

from swarm.errors import UserError
from swarm.runs.lock import running_info
from swarm.ui import search_form
from swarm.ui.launcher import check_search, format_command, output_path, read_failure
from swarm.ui.layout import draw_heading, page_frame
from swarm.ui.state import AppState

GROUP_LABELS = {
    "task": "Task",
    "optimizer": "Optimizer",
    "pool": "Pool",
    "model": "Model",
    "engine": "Engine",
    "tracker": "Tracker",
}

POLL_S = 0.3


def register_page(home: AppState) -> None:
    """Register the page at /start."""

    @ui.page("/start")
    def start_page() -> None:
        with page_frame("Start a search", "Start"):
            SearchForm(home)


class SearchForm:
    """Form of one browser window.

    Args:
        home: State that the pages share.
    """

    def __init__(self, home: AppState) -> None:
        self._home = home
        self._chosen: dict[str, ui.select] = {}
        self._numbers: dict[str, ui.input] = {}
        chosen, lines = search_form.initial_form(home)
        with ui.card().classes("w-full gap-4"):
            with ui.element("div").classes(
                "w-full grid grid-cols-1 md:grid-cols-2 gap-x-6 gap-y-3"
            ):
                for group, option in chosen.items():
                    self._draw_group(group, option)
            with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-6 gap-3"):
                for key, label in search_form.NUMBER_FIELDS.items():
                    field = ui.input(label, on_change=self._refresh_command).props("dense outlined")
                    self._numbers[key] = field.props('inputmode=numeric placeholder="default"')
            self._name = ui.input(
                "Name",
                value=search_form.default_run_name(self._chosen["task"].value),
                on_change=self._refresh_command,
            ).props("dense outlined")
            self._name.classes("w-full")
            self._lines = ui.textarea(
                "Further keys, one key=value per line", value=lines, on_change=self._refresh_command
            )
            self._lines.props("dense outlined autogrow input-class=font-mono").classes("w-full")
        self._draw_command()
        self._plan.set_visibility(False)
        self._set_busy("")
        self._refresh_command()

    def _draw_command(self) -> None:
        with ui.card().classes("w-full gap-2"):
            draw_heading("The command")
            with ui.row().classes("w-full items-start no-wrap gap-2"):
                self._command = ui.label("").classes("log grow min-w-0")
                ui.button(icon="content_copy", on_click=self._copy_command).props(
                    "flat dense aria-label='Copy the command'"
                )
            self._error = ui.label("").classes("text text-negative").props("role=alert")
            with ui.row().classes("w-full items-center gap-2"):
                self._check = ui.button("Check", icon="rule", on_click=self._check_search)
                self._check.props("outline no-caps")
                self._start = ui.button("Start", icon="play_arrow", on_click=self._start_search)
                self._start.props("unelevated no-caps")
                self._busy = ui.spinner(size="1.5rem")
                self._doing = ui.label("").classes("quiet")
            self._plan = ui.label("").classes("log").props("data-plan tabindex=0")

    def _draw_group(self, group: str, option: str) -> None:
        helps = search_form.group_options(group)
        with ui.column().classes("gap-0 min-w-0"):
            field = ui.select(
                list(helps), value=option, label=GROUP_LABELS[group], with_input=len(helps) > 10
            )
            field.props("dense outlined options-dense").classes("w-full")
            help_label = ui.label(helps[field.value]).classes("quiet text text-sm q-mt-xs")
        self._chosen[group] = field

        def on_change() -> None:
            help_label.set_text(helps.get(field.value, ""))
            if group == "task" and field.value:
                self._name.set_value(search_form.default_run_name(field.value))
            self._refresh_command()

        field.on_value_change(on_change)

    def _build_arguments(self) -> list[str]:
        return search_form.build_arguments(
            self._home,
            self._name.value or "",
            {group: field.value for group, field in self._chosen.items() if field.value},
            {key: field.value or "" for key, field in self._numbers.items()},
            self._lines.value or "",
        )

    def _refresh_command(self) -> None:
        """Show the command for the present form, or the error in it."""
        self._plan.set_visibility(False)
        try:
            arguments = self._build_arguments()
        except UserError as error:
            self._show_error(str(error))
            return
        self._show_error("")
        self._command.set_text(format_command(arguments))

    def _show_error(self, text: str) -> None:
        self._error.set_text(text)
        self._error.set_visibility(bool(text))
        for button in (self._check, self._start):
            button.set_enabled(True)

    def _set_busy(self, doing: str) -> None:
        """Show an activity and disable the buttons; an empty string enables them."""
        self._doing.set_text(doing)
        self._busy.set_visibility(bool(doing))
        for button in (self._check, self._start):
            button.set_enabled(not doing)

    async def _check_search(self) -> None:
        arguments = self._arguments_or_error()
        if arguments is None:
            return
        self._plan.set_visibility(False)
        self._set_busy("Checking data, pool and model.")
        found = await run.io_bound(check_search, arguments, self._home.folder)
        if found is None:
            return
        valid, output = found
        self._set_busy("")
        self._show_error("" if valid else output)
        self._plan.set_text(output)
        self._plan.set_visibility(valid)

    def _arguments_or_error(self) -> list[str] | None:
        try:
            return self._build_arguments()
        except UserError as error:
            self._show_error(str(error))
            return None

    async def _start_search(self) -> None:
        arguments = self._arguments_or_error()
        if arguments is None:
            return
        path = self._home.run_path(self._name.value.strip())
        self._set_busy("Starting; everything is checked before anything is written.")
        try:
            await run.io_bound(self._home.launcher.start_search, path, arguments, self._home.folder)
            await self._wait_until_started(path)
        except UserError as error:
            self._set_busy("")
            self._show_error(str(error))
            return
        ui.navigate.to(f"/runs/{quote(path.name, safe='')}")

    async def _wait_until_started(self, path: Path) -> None:
        """Wait until the search holds its folder or has ended.

        Raises:
            UserError: It ended with an error.
        """
        while running_info(path) is None and self._home.launcher.is_starting(path):
            await asyncio.sleep(POLL_S)
        if not self._home.launcher.is_starting(path) and (error := read_failure(output_path(path))):
            raise UserError(error)

    def _copy_command(self) -> None:
        ui.clipboard.write(self._command.text)
        ui.notify("Copied.")
