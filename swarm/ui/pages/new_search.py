"""Page Start: a form for a new search, checked by the command line, with the equivalent command."""

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from nicegui import run, ui

from swarm._util.config_help import first_comment
from swarm._util.files import conf_folder, parse_json
from swarm.errors import UserError
from swarm.merging.positions import describe_position
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
"""Keys with a field in the form, and their labels."""

TEXT_FIELDS = {
    "pool.folder": "Pool folder",
    "model.path": "Model folder or id",
    "gpus": "GPUs",
    "task.file": "Task file",
}
"""Keys with a text field in the form, and their labels."""

EMPTY_MEANINGS = {
    "optimizer.particles": "automatic",
    "budget": "no limit",
    "minutes": "no limit",
    "task.dev_limit": "all",
    "task.test_limit": "all",
}
"""What null means, shown in the empty field of a key that may be null."""

GPUS_HINT = "CPU; or numbers such as 0,1"

RESERVED_KEYS = ("name", "folder", "dry_run", "experiment", *CONFIG_GROUPS)
"""Keys that the free lines may not set; an experiment would change what the fields show."""

OVERRIDE_LINE = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w./@-]*)(=.*)?", re.DOTALL)


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


def _find_option(group: str, option: str, config_dir: Path | None) -> Path:
    """Return the file of an option; as in a search, that of conf/ comes first."""
    file = conf_folder() / group / f"{option}.yaml"
    return config_dir / group / file.name if config_dir and not file.is_file() else file


@cache
def default_options() -> dict[str, str]:
    """Return the default option of each group of a search."""
    import yaml

    tree = yaml.safe_load((conf_folder() / "search.yaml").read_text(encoding="utf-8"))
    named = [one for one in tree["defaults"] if isinstance(one, dict)]
    return {group: str(option) for one in named for group, option in one.items()}


def default_run_name(task: str) -> str:
    """Return a free run name, in the form of the command line's default."""
    return f"{task}_{datetime.now():%Y-%m-%d_%H-%M-%S}"


def initial_form(home: AppState) -> tuple[dict[str, str], dict[str, str]]:
    """Return the initial form: options by group, and fields for the application's arguments."""
    chosen = {group: default_options()[group] for group in CONFIG_GROUPS}
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


def field_defaults(chosen: Mapping[str, str], config_dir: Path | None = None) -> dict[str, str]:
    """Return the default of each field, as the form shows it; empty for null or no such key.

    Args:
        chosen: Option of each group.
        config_dir: Folder of further options.
    """
    found = {}
    for key in (*TEXT_FIELDS, *NUMBER_FIELDS):
        group, _, name = key.rpartition(".")
        option = chosen[group] if group else "search"
        value = _load_options(group, option, config_dir).get(name)
        # A list is gpus; an interpolation is resolved by the search, from other keys.
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        found[key] = "" if value is None or "${" in text else text
    return found


def _load_options(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    """Return the keys of an option's file, and of the files of its group that it is based on."""
    path = _find_option(group, option, config_dir)
    tree = _load_yaml(path, path.stat().st_mtime_ns)
    found: dict[str, Any] = {}
    for one in tree.get("defaults", ()):
        known = isinstance(one, str) and one not in ("_self_", option)
        if known and _find_option(group, one, config_dir).is_file():
            found |= _load_options(group, one, config_dir)
    return found | tree


@cache
def _load_yaml(path: Path, changed: int) -> dict[str, Any]:
    """Load a file, again only if the time of its last change has changed."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (ValueError, yaml.YAMLError):
        return {}  # the check of the form shows the error
    return tree if isinstance(tree, dict) else {}


def build_arguments(
    home: AppState, name: str, chosen: Mapping[str, str], numbers: Mapping[str, str], lines: str
) -> list[str]:
    """Build the arguments of `python -m swarm.search`.

    Args:
        name: Name of the run.
        chosen: Option of each group; default options are left out, except a default task.
        numbers: Number and text fields as typed; defaults are left out. An empty field is its
            default, or null for a key of `EMPTY_MEANINGS`.
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
    defaults = field_defaults({**usual, **chosen}, home.config_dir)
    for key, typed in numbers.items():
        text = typed.strip()
        if text == defaults[key]:
            continue
        if not text:
            if key in EMPTY_MEANINGS:
                arguments.append(f"{key}=null")
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


STARTS_HINT = (
    "The search also starts from this mixture (optimizer.starts, of the optimizers pso and "
    "gradient), beside the experts and the soups:"
)

GROUP_LABELS = {
    "task": "Task",
    "optimizer": "Optimizer",
    "pool": "Pool",
    "model": "Model",
    "engine": "Engine",
    "tracker": "Tracker",
}

POLL_S = 0.3

SENTENCE_DELAY_S = 1.5
"""Seconds without a change of the form after which its cost is computed."""


def register_page(home: AppState) -> None:
    """Register the page at /start."""

    @ui.page("/start")
    def start_page(mixture: str = "") -> None:
        with page_frame("Start a search", "Start"):
            try:
                starts = parse_mixture(mixture)
            except UserError as error:
                ui.label(str(error)).classes("text text-negative").props("role=alert")
                starts = {}
            SearchForm(home, starts)


def parse_mixture(text: str) -> dict[str, float]:
    """Parse a mixture, a JSON object of coefficients by expert; empty for an empty text.

    Raises:
        UserError: It is something else.
    """
    try:
        found = parse_json(text or "{}")
        shares = {str(name): float(share) for name, share in found.items()}
    except (ValueError, AttributeError, TypeError):
        shares = {"": math.nan}
    if not all(map(math.isfinite, shares.values())):
        raise UserError("mixture: must be a JSON object of coefficients by expert")
    return shares


class SearchForm:
    """Form of one browser window.

    Args:
        home: State that the pages share.
        mixture: Coefficients of all experts of the pool, to start from; empty for none.
    """

    def __init__(self, home: AppState, mixture: Mapping[str, float] | None = None) -> None:
        self._home = home
        mixture = mixture or {}
        self._chosen: dict[str, ui.select] = {}
        self._numbers: dict[str, ui.input] = {}
        chosen, given = initial_form(home)
        self._defaults: dict[str, str] = field_defaults(chosen, home.config_dir)
        self._changed: float | None = None
        self._computing = False
        if mixture:
            words = describe_position(list(mixture), list(mixture.values()))
            ui.label(f"{STARTS_HINT} {words}").classes("text")
        with ui.card().classes("w-full gap-4"):
            with ui.element("div").classes(
                "w-full grid grid-cols-1 md:grid-cols-2 gap-x-6 gap-y-3"
            ):
                for group, option in chosen.items():
                    self._draw_group(group, option)
            with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-2 gap-3"):
                for key, label in TEXT_FIELDS.items():
                    field = self._draw_field(key, label, given.get(key, self._defaults[key]))
                    if key == "pool.folder":
                        with field.add_slot("append"):
                            ui.button("Inspect", on_click=self._inspect_pool).props(
                                "flat dense no-caps"
                            )
            with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-6 gap-3"):
                for key, label in NUMBER_FIELDS.items():
                    self._draw_field(key, label, self._defaults[key]).props("inputmode=numeric")
            self._name = ui.input(
                "Name",
                value=default_run_name(self._chosen["task"].value),
                on_change=self._refresh_command,
            ).props("dense outlined")
            self._name.classes("w-full")
            coefficients = ",".join(map(repr, mixture.values()))
            self._lines = ui.textarea(
                "Further keys, one key=value per line",
                value=f"optimizer.starts=[[{coefficients}]]" if mixture else "",
                on_change=self._refresh_command,
            )
            self._lines.props("dense outlined autogrow input-class=font-mono").classes("w-full")
        self._draw_command()
        self._plan.set_visibility(False)
        self._set_busy("")
        self._refresh_command()
        ui.timer(POLL_S, self._refresh_sentence)

    def _draw_command(self) -> None:
        with ui.card().classes("w-full gap-2"):
            draw_heading("The command")
            with ui.row().classes("w-full items-start no-wrap gap-2"):
                self._command = ui.label("").classes("log grow min-w-0")
                ui.button(icon="content_copy", on_click=self._copy_command).props(
                    "flat dense aria-label='Copy the command'"
                )
            self._sentence = ui.label("").classes("text").props("role=status data-sentence")
            self._error = ui.label("").classes("text text-negative").props("role=alert")
            with ui.row().classes("w-full items-center gap-2"):
                self._check = ui.button("Check", icon="rule", on_click=self._check_search)
                self._check.props("outline no-caps")
                self._start = ui.button("Start", icon="play_arrow", on_click=self._start_search)
                self._start.props("unelevated no-caps")
                self._busy = ui.spinner(size="1.5rem")
                self._doing = ui.label("").classes("quiet")
            self._plan = ui.label("").classes("log").props("data-plan tabindex=0")

    def _draw_field(self, key: str, label: str, value: str) -> ui.input:
        field = ui.input(label, value=value, on_change=self._refresh_command)
        field.props("dense outlined stack-label")
        field.props["placeholder"] = self._empty_meaning(key)
        self._numbers[key] = field
        return field

    def _inspect_pool(self) -> None:
        folder = (self._numbers["pool.folder"].value or "").strip() or self._defaults["pool.folder"]
        ui.navigate.to(f"/pool?{urlencode({'folder': folder})}", new_tab=True)

    def _empty_meaning(self, key: str) -> str:
        """Return what an empty field means: null, or the default."""
        if key == "gpus" and not self._defaults[key]:
            return GPUS_HINT
        default = self._defaults[key]
        return EMPTY_MEANINGS.get(key) or (f"default: {default}" if default else "none")

    def _follow_defaults(self) -> None:
        """Show the defaults of the chosen options in the fields that show a default."""
        chosen = {group: str(field.value) for group, field in self._chosen.items() if field.value}
        folder = self._home.config_dir
        chosen = {**default_options(), **chosen}
        old, self._defaults = self._defaults, field_defaults(chosen, folder)
        for key, field in self._numbers.items():
            field.props["placeholder"] = self._empty_meaning(key)
            field.update()
            if (field.value or "").strip() == old[key]:
                field.set_value(self._defaults[key])

    def _draw_group(self, group: str, option: str) -> None:
        helps = group_options(group, self._home.config_dir)
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
                self._name.set_value(default_run_name(field.value))
            self._follow_defaults()
            self._refresh_command()

        field.on_value_change(on_change)

    def _build_arguments(self) -> list[str]:
        return build_arguments(
            self._home,
            self._name.value or "",
            {group: field.value for group, field in self._chosen.items() if field.value},
            {key: field.value or "" for key, field in self._numbers.items()},
            self._lines.value or "",
        )

    def _refresh_command(self) -> None:
        """Show the command for the present form, or the error in it."""
        self._plan.set_visibility(False)
        self._changed = time.monotonic()
        try:
            arguments = self._build_arguments()
        except UserError as error:
            self._show_error(str(error))
            return
        self._show_error("")
        self._command.set_text(format_command(arguments))

    async def _refresh_sentence(self) -> None:
        """Show the dry run's sentence, the cost, after the form has not changed for a while."""
        if self._changed is None or self._computing or self._busy.visible:
            return
        if time.monotonic() - self._changed < SENTENCE_DELAY_S:
            return
        computed = self._changed
        arguments = self._arguments_or_error()
        if arguments is None:
            self._changed = None
            self._sentence.set_text("")
            return
        self._computing = True
        self._sentence.set_text("Computing the cost …")
        found = await run.io_bound(check_search, arguments, self._home.folder)
        self._computing = False
        if found is None or self._changed != computed:  # the form changed meanwhile
            return
        self._changed = None
        self._sentence.set_text(found[1].split("\n")[0])

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
