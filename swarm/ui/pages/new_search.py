"""Page Start: a form for a new search, with the equivalent command and what it would cost."""

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlencode

import yaml
from nicegui import ui

from swarm._util.config_help import first_comment
from swarm._util.files import conf_folder
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.runs.lock import running_info
from swarm.ui.launcher import check_search, format_command, output_path, read_failure
from swarm.ui.layout import REFRESH_S, JobButton, draw_command, draw_heading, page_frame
from swarm.ui.state import AppState

CONFIG_GROUPS = ("task", "optimizer", "pool", "model", "engine", "tracker")
"""Configuration groups with a field in the form."""

FIELDS = {
    "pool.folder": "Pool folder",
    "model.path": "Model folder or id",
    "gpus": "GPUs",
    "task.file": "Task file",
    "optimizer.max_iterations": "Iterations",
    "optimizer.particles": "Particles",
    "seed": "Seed",
    "budget": "Budget, dev prompts",
    "minutes": "Minutes",
    "task.dev_limit": "Dev items",
    "task.test_limit": "Test items",
}
"""Keys with a text field, and their labels."""

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


def initial_form(home: AppState) -> tuple[dict[str, str], dict[str, str]]:
    """Return the initial form: options by group, and fields for the application's arguments."""
    usual = default_options()
    chosen = {group: usual[group] for group in CONFIG_GROUPS}
    fields = {} if home.pool == AppState.pool else {"pool.folder": home.pool}
    if home.base:
        named = home.base in group_options("model")
        chosen["model"] = home.base if named else "local"
        fields |= {} if named else {"model.path": home.base}
    if home.device and home.device.startswith("cuda"):
        fields["gpus"] = home.device.partition(":")[2] or "0"
    return chosen, fields


def build_arguments(
    home: AppState, name: str, chosen: Mapping[str, str], fields: Mapping[str, str], lines: str
) -> list[str]:
    """Build the arguments of `python -m swarm.search`, which checks their values.

    Args:
        name: Name of the run.
        chosen: Option of each group; default options are left out, except a default task.
        fields: Fields as typed; empty ones are left out.
        lines: Further `key=value` settings, one per line.

    Raises:
        UserError: The name is invalid or exists, or is set a second time.
    """
    name, further = name.strip(), [line for line in map(str.strip, lines.split("\n")) if line]
    if not re.fullmatch(r"(?!\.)[\w.+-]+", name):
        raise UserError(f"Name: {name!r:.80} may contain letters, digits and . _ + - only")
    if home.run_path(name).exists():
        raise UserError(
            f"Name: the run {name} already exists; open it to resume it, or choose another name"
        )
    for line in further:
        if re.match(r"\W*(name|folder|hydra)\b|-", line):
            raise UserError(f"Further keys: {line:.60} is not a key that can be set here")
    usual = default_options() | {"task": ""}
    found = [f"--config-dir={home.config_dir}"] if home.config_dir else []
    found += [f"{group}={option}" for group, option in chosen.items() if option != usual[group]]
    typed = {key: text.strip() for key, text in fields.items() if text.strip()}
    for key, text in typed.items():
        # Quoted for the command line's grammar; the list of GPUs is not a text.
        plain = key == "gpus" or re.fullmatch(r"[\w./@:~+-]+", text)
        found.append(f"{key}={text}" if plain else f"{key}='" + text.replace("'", r"\'") + "'")
    return [*found, *further, f"name={name}"]


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
        self._arguments: list[str] | None = None  # of a form that is not checked yet
        self._changed, self._checking = 0.0, False
        chosen, given = initial_form(home)
        columns = "w-full grid grid-cols-1 md:grid-cols-2 gap-x-6 gap-y-3"
        with ui.card().classes("w-full gap-4"):
            with ui.element("div").classes(columns):
                self._chosen = {
                    one: self._draw_group(one, option) for one, option in chosen.items()
                }
            with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-4 gap-3"):
                self._fields = {
                    key: self._draw_field(label, given.get(key, ""))
                    for key, label in FIELDS.items()
                }
                with self._fields["pool.folder"].add_slot("append"):
                    ui.button("Inspect", on_click=self._inspect_pool).props("flat dense")
            self._name = self._draw_field("Name").classes("w-full")
            self._lines = ui.textarea(
                "Further keys, one key=value per line", on_change=self._refresh_command
            )
            self._lines.props("autogrow input-class=font-mono").classes("w-full")
        with ui.card().classes("w-full gap-2"):
            draw_heading("The command")
            self._command = draw_command()
            self._cost = ui.label("").props("role=status data-cost")
            words = "Starting; everything is checked before anything is written."
            self._start = JobButton("Start", self._start_search, lambda: words)
            with ui.expansion("What it would do") as self._plan:
                self._plan_text = ui.label("").classes("log").props("data-plan tabindex=0")
        self._suggest_name()
        ui.timer(REFRESH_S, self._check_search)

    def _draw_field(self, label: str, value: str = "") -> ui.input:
        field = ui.input(label, value=value, on_change=self._refresh_command)
        return field.props("stack-label placeholder=default")

    def _draw_group(self, group: str, option: str) -> ui.select:
        helps = group_options(group, self._home.config_dir)
        label, search = group.capitalize(), len(helps) > 10
        with ui.column().classes("gap-0 min-w-0"):
            field = ui.select(list(helps), value=option, label=label, with_input=search)
            field.props("options-dense").classes("w-full")
            described = ui.label().classes("quiet text-sm q-mt-xs")
            described.bind_text_from(field, "value", lambda value: helps.get(value, ""))
        change = self._suggest_name if group == "task" else self._refresh_command
        return field.on_value_change(change)

    def _suggest_name(self) -> None:
        """Suggest a free name, in the form of the command line's default."""
        if task := self._chosen["task"].value:
            self._name.set_value(f"{task}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
        self._refresh_command()

    def _inspect_pool(self) -> None:
        folder = (self._fields["pool.folder"].value or "").strip() or self._home.pool
        ui.navigate.to(f"/pool?{urlencode({'folder': folder})}", new_tab=True)

    def _build_arguments(self) -> list[str]:
        return build_arguments(
            self._home,
            self._name.value or "",
            {group: field.value for group, field in self._chosen.items() if field.value},
            {key: field.value or "" for key, field in self._fields.items()},
            self._lines.value or "",
        )

    def _refresh_command(self) -> None:
        self._plan.set_visibility(False)
        self._cost.set_text("")
        self._start.error.set_text("")
        self._arguments, self._changed = None, time.monotonic()
        try:
            self._arguments = self._build_arguments()
            self._command.set_text(format_command(self._arguments))
        except UserError as error:
            self._start.error.set_text(str(error))

    async def _check_search(self) -> None:
        """Show the plan and its cost, by a dry run, after the form has not changed for a while."""
        arguments, busy = self._arguments, self._checking or self._start.is_running
        if not arguments or busy or time.monotonic() - self._changed < CHECK_DELAY_S:
            return
        self._checking = True
        self._cost.set_text("Computing the cost …")
        valid, result = await run_in_thread(check_search, arguments, self._home.folder)
        self._checking = False
        if self._arguments is not arguments:  # the form changed meanwhile
            return
        self._arguments = None
        self._cost.set_text(result.split("\n")[0] if valid else "")
        self._start.error.set_text("" if valid else result)
        self._plan_text.set_text(result)
        self._plan.set_visibility(valid)

    async def _start_search(self) -> None:
        arguments, launcher = self._build_arguments(), self._home.launcher
        path = self._home.run_path(self._name.value.strip())
        await run_in_thread(launcher.start_search, path, arguments, self._home.folder)
        while running_info(path) is None and launcher.is_starting(path):
            await asyncio.sleep(REFRESH_S)
        if not launcher.is_starting(path) and (error := read_failure(output_path(path))):
            raise UserError(error)
        ui.navigate.to(f"/runs/{quote(path.name, safe='')}")
