"""Page Start: a form for a new search, with the equivalent command and what it would cost."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlencode

import yaml
from nicegui import run, ui

from swarm._util.config_help import first_comment
from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.runs.lock import running_info
from swarm.ui.launcher import check_search, format_command, output_path, read_failure
from swarm.ui.layout import draw_heading, page_frame
from swarm.ui.state import AppState

CONFIG_GROUPS = ("task", "optimizer", "pool", "model", "engine", "tracker")
"""Configuration groups with a field in the form."""

NUMBER_FIELDS = {
    "optimizer.max_iterations": "Iterations",
    "optimizer.particles": "Particles",
    "seed": "Seed",
    "budget": "Budget, dev prompts",
    "minutes": "Minutes",
    "task.dev_limit": "Dev items",
    "task.test_limit": "Test items",
}
"""Keys with a field for an integer, and their labels."""

TEXT_FIELDS = {
    "pool.folder": "Pool folder",
    "model.path": "Model folder or id",
    "gpus": "GPUs",
    "task.file": "Task file",
}
"""Keys with a text field, and their labels."""

RESERVED_KEYS = ("name", "folder", "dry_run", *CONFIG_GROUPS)
"""Keys that the free lines may not set."""

OVERRIDE_LINE = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w./@-]*)(=.*)?", re.DOTALL)

POLL_S = 0.3

CHECK_DELAY_S = 1.5
"""Seconds without a change of the form after which it is checked and its cost is computed."""


def group_options(group: str, config_dir: Path | None = None) -> dict[str, str]:
    """Return the options of a group with their descriptions, the first comment of each file.

    Args:
        config_dir: Folder of further options, as of `--config-dir`; its options come last.
    """
    return {
        path.stem: first_comment(path)
        for folder in (conf_folder(), *([config_dir] if config_dir else ()))
        for path in sorted((folder / group).glob("*.yaml"))
    }


def default_options() -> dict[str, str]:
    """Return the default option of each group of a search."""
    tree = yaml.safe_load((conf_folder() / "search.yaml").read_text(encoding="utf-8"))
    named = [one for one in tree["defaults"] if isinstance(one, dict)]
    return {group: str(option) for one in named for group, option in one.items()}


def default_run_name(task: str) -> str:
    """Return a free run name, in the form of the command line's default."""
    return f"{task}_{datetime.now():%Y-%m-%d_%H-%M-%S}"


def initial_form(home: AppState) -> tuple[dict[str, str], dict[str, str]]:
    """Return the initial form: options by group, and fields for the application's arguments."""
    usual = default_options()
    chosen = {group: usual[group] for group in CONFIG_GROUPS}
    fields = {}
    if home.pool != "initial_experts":
        fields["pool.folder"] = home.pool
    if home.base in group_options("model"):
        chosen["model"] = home.base or ""
    elif home.base:
        chosen["model"] = "local"
        fields["model.path"] = home.base
    if home.device and home.device.startswith("cuda"):
        fields["gpus"] = home.device.partition(":")[2] or "0"
    return chosen, fields


def build_arguments(
    home: AppState, name: str, chosen: Mapping[str, str], fields: Mapping[str, str], lines: str
) -> list[str]:
    """Build the arguments of `python -m swarm.search`.

    Args:
        name: Name of the run.
        chosen: Option of each group; default options are left out, except a default task.
        fields: Number and text fields as typed; empty ones are left out.
        lines: Further `key=value` settings, one per line.

    Raises:
        UserError: A field or a line is invalid.
    """
    name = name.strip()
    run = home.run_path(name)
    if not re.fullmatch(r"[\w.+-]+", name):
        raise UserError(f"Name: {name!r:.80} may contain letters, digits and . _ + - only")
    if run.exists():
        raise UserError(
            f"Name: the run {name} already exists; open it to resume it, or choose another name"
        )
    usual = default_options()
    arguments = [f"--config-dir={home.config_dir}"] if home.config_dir else []
    arguments += [
        f"{group}={option}"
        for group, option in chosen.items()
        if option != usual.get(group) or group == "task"
    ]
    for key, typed in fields.items():
        if not (text := typed.strip()):
            continue
        if key == "gpus":
            if not re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
                raise UserError(f"GPUs: {text!r:.40} is not a list of numbers such as 0,1")
            arguments.append(f"gpus=[{re.sub(' ', '', text)}]")
        elif key in TEXT_FIELDS:
            arguments.append(f"{key}={_quote_value(text)}")
        elif not re.fullmatch(r"\d{1,12}", text):
            raise UserError(f"{NUMBER_FIELDS[key]}: {text!r:.40} is not an integer")
        else:
            arguments.append(f"{key}={int(text)}")
    return [*arguments, *_parse_lines(lines), f"name={name}"]


def _quote_value(text: str) -> str:
    """Quote a value for the command line's grammar, unless it is a plain path."""
    if re.fullmatch(r"[\w./@:~+-]+", text):
        return text
    escaped = text.replace("'", r"\'")
    return f"'{escaped}'"


def _parse_lines(lines: str) -> Sequence[str]:
    """Parse the lines, skipping empty ones.

    Raises:
        UserError: A line is not key=value, or its key has a field.
    """
    found = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not (text := line.strip()):
            continue
        parts = OVERRIDE_LINE.fullmatch(text)
        if not parts or (parts[3] is None and parts[1] != "~"):
            raise UserError(f"Further keys, line {number}: {text!r:.60} is not a key=value")
        key = parts[2]
        if key in RESERVED_KEYS or key.startswith("hydra"):
            has = "has a field above" if key in (*CONFIG_GROUPS, "name") else "cannot be set here"
            raise UserError(f"Further keys, line {number}: {key} {has}")
        found.append(text)
    return found


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
        self._fields: dict[str, ui.input] = {}
        self._changed: float | None = None
        self._checking = False
        chosen, given = initial_form(home)
        columns = "w-full grid grid-cols-1 md:grid-cols-2 gap-x-6 gap-y-3"
        with ui.card().classes("w-full gap-4"):
            with ui.element("div").classes(columns):
                for group, option in chosen.items():
                    self._draw_group(group, option)
            with ui.element("div").classes(columns):
                for key, label in TEXT_FIELDS.items():
                    field = self._draw_field(key, label, given.get(key, ""))
                    if key == "pool.folder":
                        with field.add_slot("append"):
                            ui.button("Inspect", on_click=self._inspect_pool).props(
                                "flat dense no-caps"
                            )
            with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-6 gap-3"):
                for key, label in NUMBER_FIELDS.items():
                    self._draw_field(key, label, "").props("inputmode=numeric")
            self._name = ui.input(
                "Name", value=default_run_name(chosen["task"]), on_change=self._refresh_command
            )
            self._name.props("dense outlined").classes("w-full")
            self._lines = ui.textarea(
                "Further keys, one key=value per line", on_change=self._refresh_command
            )
            self._lines.props("dense outlined autogrow input-class=font-mono").classes("w-full")
        self._draw_command()
        self._set_busy("")
        self._refresh_command()
        ui.timer(POLL_S, self._check_search)

    def _draw_command(self) -> None:
        with ui.card().classes("w-full gap-2"):
            draw_heading("The command")
            with ui.row().classes("w-full items-start no-wrap gap-2"):
                self._command = ui.label("").classes("log grow min-w-0")
                ui.button(icon="content_copy", on_click=self._copy_command).props(
                    "flat dense aria-label='Copy the command'"
                )
            self._cost = ui.label("").classes("text").props("role=status data-cost")
            self._error = ui.label("").classes("text text-negative").props("role=alert")
            with ui.row().classes("w-full items-center gap-2"):
                self._start = ui.button("Start", icon="play_arrow", on_click=self._start_search)
                self._start.props("unelevated no-caps")
                self._busy = ui.spinner(size="1.5rem")
                self._doing = ui.label("").classes("quiet")
            with ui.expansion("What it would do").classes("w-full").props("dense") as self._plan:
                self._plan_text = ui.label("").classes("log").props("data-plan tabindex=0")

    def _draw_field(self, key: str, label: str, value: str) -> ui.input:
        field = ui.input(label, value=value, on_change=self._refresh_command)
        field.props("dense outlined stack-label placeholder=default")
        self._fields[key] = field
        return field

    def _draw_group(self, group: str, option: str) -> None:
        helps = group_options(group, self._home.config_dir)
        with ui.column().classes("gap-0 min-w-0"):
            field = ui.select(
                list(helps), value=option, label=group.capitalize(), with_input=len(helps) > 10
            )
            field.props("dense outlined options-dense").classes("w-full")
            help_label = ui.label(helps[field.value]).classes("quiet text text-sm q-mt-xs")
        self._chosen[group] = field

        def on_change() -> None:
            help_label.set_text(helps.get(field.value, ""))
            if group == "task" and field.value:
                self._name.set_value(default_run_name(field.value))
            self._refresh_command()

        field.on_value_change(on_change)

    def _inspect_pool(self) -> None:
        folder = (self._fields["pool.folder"].value or "").strip() or self._home.pool
        ui.navigate.to(f"/pool?{urlencode({'folder': folder})}", new_tab=True)

    def _build_arguments(self) -> list[str] | None:
        """Return the arguments of the present form; `None`, with the error shown, if it has one."""
        try:
            found = build_arguments(
                self._home,
                self._name.value or "",
                {group: field.value for group, field in self._chosen.items() if field.value},
                {key: field.value or "" for key, field in self._fields.items()},
                self._lines.value or "",
            )
        except UserError as error:
            self._show_error(str(error))
            return None
        self._show_error("")
        return found

    def _refresh_command(self) -> None:
        self._plan.set_visibility(False)
        self._cost.set_text("")
        arguments = self._build_arguments()
        self._changed = time.monotonic() if arguments else None
        if arguments:
            self._command.set_text(format_command(arguments))

    async def _check_search(self) -> None:
        """Show the plan and its cost, by a dry run, after the form has not changed for a while."""
        changed = self._changed
        if changed is None or self._checking or self._busy.visible:
            return
        if time.monotonic() - changed < CHECK_DELAY_S or not (arguments := self._build_arguments()):
            return
        self._checking = True
        self._cost.set_text("Computing the cost …")
        found = await run.io_bound(check_search, arguments, self._home.folder)
        self._checking = False
        if found is None or self._changed != changed:  # the form changed meanwhile
            return
        self._changed = None
        valid, output = found
        self._cost.set_text(output.split("\n")[0] if valid else "")
        self._show_error("" if valid else output)
        self._plan_text.set_text(output)
        self._plan.set_visibility(valid)

    def _show_error(self, text: str) -> None:
        self._error.set_text(text)
        self._error.set_visibility(bool(text))

    def _set_busy(self, doing: str) -> None:
        """Show an activity and disable the button; an empty string enables it."""
        self._doing.set_text(doing)
        self._busy.set_visibility(bool(doing))
        self._start.set_enabled(not doing)

    async def _start_search(self) -> None:
        if (arguments := self._build_arguments()) is None:
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
