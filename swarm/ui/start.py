"""Start a search: a form that is checked as the command line is, and the command it stands for."""

import asyncio
from pathlib import Path
from urllib.parse import quote

from nicegui import run, ui

from swarm.errors import UserError
from swarm.running import underway
from swarm.ui import form
from swarm.ui.frame import frame, heading
from swarm.ui.home import Home
from swarm.ui.launching import check, failure, output, words

LABELS = {"task": "Task", "optimizer": "Optimizer", "pool": "Pool", "model": "Model",
          "engine": "Engine", "tracker": "Tracker"}  # fmt: skip

LOOK_S = 0.3


def register(home: Home) -> None:
    """Put the page at /start."""

    @ui.page("/start")
    def start() -> None:
        with frame("Start a search", "Start"):
            Form(home)


class Form:
    """The form in one browser window.

    Args:
        home: Where the search will be.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._chosen: dict[str, ui.select] = {}
        self._numbers: dict[str, ui.input] = {}
        chosen, lines = form.begun(home)
        with ui.card().classes("w-full gap-4"):
            with ui.element("div").classes(
                "w-full grid grid-cols-1 md:grid-cols-2 gap-x-6 gap-y-3"
            ):
                for group, option in chosen.items():
                    self._group(group, option)
            with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-6 gap-3"):
                for key, label in form.NUMBERS.items():
                    field = ui.input(label, on_change=self._changed).props("dense outlined")
                    self._numbers[key] = field.props('inputmode=numeric placeholder="default"')
            self._name = ui.input("Name", value=form.name_now(self._chosen["task"].value),
                                  on_change=self._changed).props("dense outlined")  # fmt: skip
            self._name.classes("w-full")
            self._lines = ui.textarea("Further keys, one key=value a line",
                                      value=lines, on_change=self._changed)  # fmt: skip
            self._lines.props("dense outlined autogrow input-class=font-mono").classes("w-full")
        self._draw_command()
        self._plan.set_visibility(False)
        self._rest("")
        self._changed()

    def _draw_command(self) -> None:
        with ui.card().classes("w-full gap-2"):
            heading("The command")
            with ui.row().classes("w-full items-start no-wrap gap-2"):
                self._command = ui.label("").classes("log grow min-w-0")
                ui.button(icon="content_copy", on_click=self._copy).props(
                    "flat dense aria-label='Copy the command'"
                )
            self._error = ui.label("").classes("text text-negative").props("role=alert")
            with ui.row().classes("w-full items-center gap-2"):
                self._check = ui.button("Check", icon="rule", on_click=self._checked)
                self._check.props("outline no-caps")
                self._start = ui.button("Start", icon="play_arrow", on_click=self._started)
                self._start.props("unelevated no-caps")
                self._busy = ui.spinner(size="1.5rem")
                self._doing = ui.label("").classes("quiet")
            self._plan = ui.label("").classes("log").props("data-plan tabindex=0")

    def _group(self, group: str, option: str) -> None:
        helps = form.options(group)
        with ui.column().classes("gap-0 min-w-0"):
            field = ui.select(list(helps), value=option, label=LABELS[group],
                              with_input=len(helps) > 10)  # fmt: skip
            field.props("dense outlined options-dense").classes("w-full")
            told = ui.label(helps[field.value]).classes("quiet text text-sm q-mt-xs")
        self._chosen[group] = field

        def changed() -> None:
            told.set_text(helps.get(field.value, ""))
            if group == "task" and field.value:
                self._name.set_value(form.name_now(field.value))
            self._changed()

        field.on_value_change(changed)

    def _arguments(self) -> list[str]:
        return form.arguments(
            self._home, self._name.value or "",
            {group: field.value for group, field in self._chosen.items() if field.value},
            {key: field.value or "" for key, field in self._numbers.items()},
            self._lines.value or "",
        )  # fmt: skip

    def _changed(self) -> None:
        """Show the command of the form as it is, or what is wrong with it."""
        self._plan.set_visibility(False)
        try:
            arguments = self._arguments()
        except UserError as error:
            self._wrong(str(error))
            return
        self._wrong("")
        self._command.set_text(words(arguments))

    def _wrong(self, text: str) -> None:
        self._error.set_text(text)
        self._error.set_visibility(bool(text))
        for button in (self._check, self._start):
            button.set_enabled(True)

    def _rest(self, doing: str) -> None:
        """What is being done, and nothing else meanwhile."""
        self._doing.set_text(doing)
        self._busy.set_visibility(bool(doing))
        for button in (self._check, self._start):
            button.set_enabled(not doing)

    async def _checked(self) -> None:
        arguments = self._arguments_or_error()
        if arguments is None:
            return
        self._plan.set_visibility(False)
        self._rest("Checking: data, pool and model are looked at.")
        found = await run.io_bound(check, arguments, self._home.folder)
        if found is None:
            return
        right, said = found
        self._rest("")
        self._wrong("" if right else said)
        self._plan.set_text(said)
        self._plan.set_visibility(right)

    def _arguments_or_error(self) -> list[str] | None:
        try:
            return self._arguments()
        except UserError as error:
            self._wrong(str(error))
            return None

    async def _started(self) -> None:
        arguments = self._arguments_or_error()
        if arguments is None:
            return
        path = self._home.run(self._name.value.strip())
        self._rest("Starting: all is checked before the first byte is written.")
        try:
            await run.io_bound(self._home.launcher.begin, path, arguments, self._home.folder)
            await self._until_begun(path)
        except UserError as error:
            self._rest("")
            self._wrong(str(error))
            return
        ui.navigate.to(f"/runs/{quote(path.name, safe='')}")

    async def _until_begun(self, path: Path) -> None:
        """Wait until the search holds its folder, or is over.

        Raises:
            UserError: It ended with an error.
        """
        while underway(path) is None and self._home.launcher.beginning(path):
            await asyncio.sleep(LOOK_S)
        if not self._home.launcher.beginning(path) and (error := failure(output(path))):
            raise UserError(error)

    def _copy(self) -> None:
        ui.clipboard.write(self._command.text)
        ui.notify("Copied.")
