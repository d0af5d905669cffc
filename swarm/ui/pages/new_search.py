"""Page Start: three ways to begin, one form, the equivalent command and what it would cost."""

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from nicegui import events, ui

from swarm._util.config_help import first_comment
from swarm._util.files import DATA_SUFFIXES, conf_folder, short_digest
from swarm._util.threads import run_in_thread
from swarm.api.functions import find_free_name
from swarm.errors import UserError
from swarm.pool.discovery import HUB
from swarm.runs.lock import running_info
from swarm.ui.launcher import check_search, format_command, output_path, read_failure
from swarm.ui.layout import (
    REFRESH_S,
    JobButton,
    describe_error,
    draw_command,
    draw_heading,
    page_frame,
)
from swarm.ui.state import AppState


class Beginning(NamedTuple):
    """One of the cards: its picture, heading and text, and the experiment that it sets."""

    icon: str
    title: str
    text: str
    experiment: str = ""


BEGINNINGS = {
    "demo": Beginning(
        "rocket_launch",
        "Try the demo",
        "Nine small adapters, and questions about graphs that none of them was trained for. "
        "2 to 10 minutes on a laptop.",
        "quickstart",
    ),
    "mine": Beginning(
        "folder_open",
        "My adapters and my file",
        "LoRA adapters of one base model, and a file of questions and answers: CSV, JSON or "
        "Parquet.",
    ),
    "paper": Beginning(
        "science",
        "Reproduce the paper",
        "The paper's search, 20 mixtures in up to 50 rounds, with the adapters included here. "
        "Hours without a GPU.",
        "paper",
    ),
}

FIELDS = {
    "gpus": "GPUs",
    "minutes": "Minutes",
    "budget": "Budget, dev prompts",
    "seed": "Seed",
    "task.dev_limit": "Dev items",
    "task.test_limit": "Test items",
    "optimizer.particles": "Mixtures in a round",
    "optimizer.max_iterations": "Rounds",
}
"""Keys with a text field under "More", and their labels."""

UPLOADS_FOLDER = "uploads"
"""Folder of files that were dropped on the page, beside that of the runs."""

CHECK_DELAY_S = 0.4
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


def build_arguments(
    home: AppState, name: str, keys: Mapping[str, str], lines: str = ""
) -> list[str]:
    """Build the arguments of `python -m swarm.search`, which checks their values.

    Args:
        name: Name of the run.
        keys: Keys and groups as typed; empty ones are left out. The places of adapters in "pool"
            are separated by commas or line breaks, ids of the hub need no hf://.
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
    found = [f"--config-dir={home.config_dir}"] if home.config_dir else []
    for key, text in keys.items():
        if key == "pool":
            text = ",".join(map(_name_place, re.findall(r"[^\s,][^\n,]*", text)))
        if text := text.strip():
            found.append(f"{key}={text}")
    return [*found, *further, f"name={name}"]


def _name_place(place: str) -> str:
    """Return a place of adapters as the command takes it: an id of the hub with its prefix."""
    place = place.strip()
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+(@\S+)?", place) and not Path(place).exists()
    return f"{HUB}{place}" if on_hub else place


def store_upload(home: AppState, name: str, content: bytes) -> str:
    """Store a file that was dropped on the page; return its path from the application's folder.

    The same content has the same path, and a file is never replaced by another one.
    """
    target = home.folder / UPLOADS_FOLDER / short_digest(content.hex()) / Path(name).name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target.relative_to(home.folder).as_posix()


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
        self._changed, self._checking, self._suggested = 0.0, False, ""
        self._chosen, self._cards = "", dict[str, ui.card]()
        with ui.element("div").classes("w-full grid grid-cols-1 md:grid-cols-3 gap-4"):
            for key, one in BEGINNINGS.items():
                card = ui.card().classes("gap-1 cursor-pointer choice").props("role=button")
                with card.props("tabindex=0").on("click", lambda key=key: self._choose(key)):
                    ui.icon(one.icon, size="2.2rem").classes("text-primary")
                    draw_heading(one.title)
                    ui.label(one.text).classes("quiet")
                self._cards[key] = card.on("keydown.enter", lambda key=key: self._choose(key))
        with ui.card().classes("w-full gap-3") as self._mine:
            self._draw_mine()
        with ui.card().classes("w-full gap-2"):
            self._cost = ui.label("").classes("text-lg").props("role=status data-cost")
            words = "Starting; everything is checked before anything is written."
            self._start = JobButton("Start", self._start_search, lambda: words)
            self._command = draw_command()
            with ui.expansion("What it would do") as self._plan:
                self._plan_text = ui.label("").classes("log").props("data-plan tabindex=0")
            with ui.expansion("More"), ui.column().classes("w-full gap-3"):
                self._draw_more()
        own = home.base or home.pool != AppState.pool
        self._choose("mine" if own else "demo")
        ui.timer(REFRESH_S, self._check_search)

    def _draw_mine(self) -> None:
        """Draw the fields of "My adapters and my file"."""
        usual = "" if self._home.pool == AppState.pool else self._home.pool
        upload = ui.upload(label="Drop a file here", auto_upload=True, on_upload=self._store_file)
        upload.props("flat bordered color=transparent text-color=primary").classes("w-full")
        upload.props(f"accept={','.join(DATA_SUFFIXES)}")
        tasks = group_options("task", self._home.config_dir)
        self._task = self._draw_field(
            "File of questions and answers, or an included task",
            placeholder="mine.csv",
            autocomplete=list(tasks),
        )
        self._task.on_value_change(self._suggest_name)
        described = ui.label().classes("quiet text-sm")
        described.bind_text_from(self._task, "value", lambda value: tasks.get(value, ""))
        self._pool = ui.textarea(
            "Adapters: folders, or ids of the Hugging Face hub",
            value=usual,
            placeholder="the nine included ones",
            on_change=self._refresh_command,
        )
        with self._pool.props("stack-label autogrow rows=1").classes("w-full").add_slot("append"):
            ui.button("Inspect", on_click=self._inspect_pool).props("flat dense")
        base = "SmolLM2-135M-Instruct, or the folder or hub id of another one"
        self._model = self._draw_field("Base model", self._home.base or "", placeholder=base)

    def _draw_more(self) -> None:
        device = self._home.device or ""
        gpus = (device.partition(":")[2] or "0") if device.startswith("cuda") else ""
        with ui.element("div").classes("w-full grid grid-cols-2 md:grid-cols-4 gap-3"):
            options = ["", *group_options("optimizer", self._home.config_dir)]
            optimizer = ui.select(options, value="", label="Method").props("options-dense")
            self._fields = {"optimizer": optimizer.on_value_change(self._refresh_command)} | {
                key: self._draw_field(label, gpus if key == "gpus" else "")
                for key, label in FIELDS.items()
            }
        self._name = self._draw_field("Name")
        self._lines = ui.textarea(
            "Further keys, one key=value per line", on_change=self._refresh_command
        )
        self._lines.props("autogrow input-class=font-mono").classes("w-full")

    def _draw_field(self, label: str, value: str = "", **more: Any) -> ui.input:
        settings = {"placeholder": "default", **more}
        field = ui.input(label, value=value, on_change=self._refresh_command, **settings)
        return field.props("stack-label").classes("w-full")

    def _choose(self, chosen: str) -> None:
        self._chosen = chosen
        for key, card in self._cards.items():
            card.props(f"aria-pressed={'true' if key == chosen else 'false'}")
        self._mine.set_visibility(chosen == "mine")
        self._suggest_name()

    def _suggest_name(self) -> None:
        """Suggest a free name: what is done, with a number where it was done before."""
        task = Path(self._task.value or "mine").stem if self._chosen == "mine" else ""
        name = re.sub(r"[^\w+-]+", "_", task or BEGINNINGS[self._chosen].experiment)
        if self._name.value in ("", self._suggested):
            self._suggested = find_free_name(self._home.runs_folder, name)
            self._name.set_value(self._suggested)
        self._refresh_command()

    async def _store_file(self, event: events.UploadEventArguments) -> None:
        content = await event.file.read()
        self._task.set_value(store_upload(self._home, event.file.name, content))

    def _inspect_pool(self) -> None:
        folder = (self._pool.value or "").strip().replace("\n", ",") or self._home.pool
        ui.navigate.to(f"/pool?{urlencode({'folder': folder})}", new_tab=True)

    def _build_arguments(self) -> list[str]:
        keys = {key: str(field.value or "") for key, field in self._fields.items()}
        first = {"experiment": BEGINNINGS[self._chosen].experiment}
        if self._chosen == "mine":
            named = {"task": self._task, "pool": self._pool, "model": self._model}
            first = {key: field.value or "" for key, field in named.items()}
        lines = self._lines.value or ""
        return build_arguments(self._home, self._name.value or "", first | keys, lines)

    def _refresh_command(self) -> None:
        self._plan.set_visibility(False)
        self._start.error.set_text("")
        self._arguments, self._changed = None, time.monotonic()
        missing = self._chosen == "mine" and not self._task.value
        self._cost.set_text("Drop a file, or type its path." if missing else "")
        self._start.set_enabled(not missing)
        if missing:
            self._command.set_text("")
            return
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
        try:
            valid, result = await run_in_thread(check_search, arguments)
        except Exception as error:  # shown on the page instead of a traceback
            valid, result = False, describe_error(error)
        self._checking = False
        if self._arguments is not arguments:  # the form changed meanwhile
            return
        self._arguments = None
        cost, _, plan = result.partition("\n")
        self._cost.set_text(cost if valid else "")
        self._start.error.set_text("" if valid else result)
        self._plan_text.set_text(plan)
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
