"""Page Models: models, sliders that mix experts, questions to mixtures and their scores, pools."""

import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from nicegui import ui

from swarm._util.terminal import format_interval, format_p, format_signed
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.evaluation.positions import MixtureScoring
from swarm.merging.positions import describe_position
from swarm.moa.cli import format_endpoint
from swarm.pool.adapter import Adapter
from swarm.pool.inspection import PoolInspection, inspect_folder, list_remarks, table_of_experts
from swarm.report.document import TableBlock
from swarm.ui import expert_mixer
from swarm.ui.chat import MIXTURE_PREFIX, ChatColumn, ChatPanel, ChatSettings
from swarm.ui.layout import (
    JobButton,
    draw_alert,
    draw_empty,
    draw_heading,
    draw_table,
    draw_text,
    draw_when_loaded,
    page_frame,
)
from swarm.ui.pages.new_search import group_options
from swarm.ui.state import AppState

DEFAULT_TASK = "nlgraph_mini"

MIN_COEFFICIENT, MAX_COEFFICIENT = -0.5, 1.5
"""Initial range of a slider, which is extended for coefficients outside of it."""

NORM_HELP = (
    "Norms and cosines are of the updates s B A over all modules (Frobenius). No base model is "
    "loaded. The same in a terminal: python -m swarm.pool check FOLDER"
)


def register_page(home: AppState) -> None:
    """Register the pages at /models and /pool?folder=FOLDER."""

    @ui.page("/models")
    def models_page(run: str = "") -> None:
        def load() -> tuple[Any, ...]:
            experts, bests = list(expert_mixer.list_experts(home)), expert_mixer.list_bests(home)
            parts = expert_mixer.list_parts(home, run)
            endpoints: Mapping[str, Any] | UserError
            try:
                endpoints = home.roster.providers
            except UserError as error:  # of the user's file; the rest of the page is of use
                endpoints = error
            return run, parts, experts, bests, expert_mixer.list_model_names(home), endpoints

        with page_frame("Models"):
            draw_when_loaded(load, lambda found: _draw_models(home, *found))

    @ui.page("/pool")
    def pool_page(folder: str = "") -> None:
        def open_pool() -> None:
            ui.navigate.to(f"/pool?{urlencode({'folder': field.value or ''})}")

        with page_frame("Pool", "Start"):
            chosen = folder.strip() or home.pool
            with ui.row().classes("items-center gap-2 w-full no-wrap"):
                field = ui.input("Pool folder", value=chosen).classes("grow min-w-0")
                ui.button("Inspect", on_click=open_pool).props("outline")
            draw_when_loaded(lambda: inspect_folder(chosen), draw_inspection)


def _draw_models(
    home: AppState,
    run: str,
    parts: Mapping[str, float],
    found: list[Adapter | str],
    bests: Mapping[str, str],
    names: list[str],
    providers: Mapping[str, Any] | UserError,
) -> None:
    experts = [one for one in found if isinstance(one, Adapter)]
    for wrong in (one for one in found if isinstance(one, str)):
        draw_alert(wrong)
    if parts:
        _ExpertMixer(home, run, parts, list(bests))
    with ui.row().classes("items-baseline gap-4"):
        draw_heading("Adapters")
        ui.link("Inspect the pool", f"/pool?{urlencode({'folder': home.pool})}")
    with ui.card().classes("w-full gap-0"):
        _draw_row("local/base", "the base model alone")
        for one in experts:
            _draw_row(f"local/{one.name}", expert_mixer.describe_expert(one))
        if not experts:
            ui.label(f"There are no adapters in {home.pool}; set another folder with --pool.")
    draw_heading("Best models of runs")
    with ui.card().classes("w-full gap-0"):
        for name, words in bests.items():
            _draw_row(f"{expert_mixer.RUN_PREFIX}{name}", words)
        if not bests:
            draw_empty("No search has finished yet.", "Start a search", "/start")
    draw_heading("Other models")
    with ui.card().classes("w-full gap-0"):
        for name in expert_mixer.list_saved_mixtures(home):
            _draw_row(name, "saved mixture")
        for name in names:
            if not name.startswith("local/"):
                _draw_row(name, expert_mixer.describe_members(name))
        if isinstance(providers, UserError):
            draw_alert(str(providers))
            return
        with ui.expansion(f"Endpoints: {len(providers)}"):
            for name, provider in providers.items():
                _draw_row(f"{name}/MODEL", format_endpoint(provider), linked=False)


class CoefficientSliders:
    """Draws a slider and a number field for each expert in the current container.

    Args:
        parts: First coefficients by the name of a local model.

    Attributes:
        coefficients: Current coefficients; values set by code are not rounded.
    """

    def __init__(self, parts: Mapping[str, float]) -> None:
        self.coefficients = dict.fromkeys(parts, 0.0)
        self._fields = {name: self._draw_row(name) for name in parts}
        self._sum = ui.label().classes("quiet text-sm").props("role=status")
        self.set_all(parts)

    def _draw_row(self, name: str) -> tuple[ui.slider, ui.number]:
        with ui.element("div").classes("mix-row"):
            short = name.removesuffix(f"/{expert_mixer.BEST_FOLDER}").rpartition("/")[2]
            ui.label(short)
            slider = ui.slider(min=MIN_COEFFICIENT, max=MAX_COEFFICIENT, step=0.01, value=0)
            slider.props(f'aria-label="coefficient of {name}"')
            number = ui.number(value=0, step=0.05, format="%.3f").props(f'aria-label="{name}"')
        slider.on("update:model-value", lambda event: self._set(name, event.args, dragged=True))
        number.on("change", lambda event: self._set(name, number.value))
        return slider, number

    def _set(self, name: str, value: float | None, dragged: bool = False) -> None:
        value = float(value or 0.0)
        self.coefficients[name] = value
        slider, number = self._fields[name]
        number.set_value(value)
        if not dragged:
            low, high = min(MIN_COEFFICIENT, value), max(MAX_COEFFICIENT, value)
            slider.props(f":min={low:.2f} :max={high:.2f}").set_value(value)
        self._sum.set_text(f"sum {sum(self.coefficients.values()):.3f}")

    def set_all(self, coefficients: Mapping[str, float]) -> None:
        """Set all coefficients; experts that are not named are set to 0."""
        for name in self.coefficients:
            self._set(name, coefficients.get(name, 0.0))


class _ExpertMixer:
    """Sliders, presets for them, and the resulting mixture: its score, and a conversation.

    Args:
        run: Run whose best is among the parts; empty for none.
        parts: First coefficients by the name of a local model.
        runs: Names of the finished runs.
    """

    def __init__(
        self, home: AppState, run: str, parts: Mapping[str, float], runs: list[str]
    ) -> None:
        self._home = home
        draw_heading("Mix by hand")
        with ui.card().classes("w-full gap-3"):
            if runs:
                choices = {"": "the adapters alone", **{one: f"the best of {one}" for one in runs}}
                field = ui.select(choices, value=run if run in choices else "", label="Begin with")
                field.on_value_change(lambda event: _open_sliders(event.value)).classes("w-full")
            self._sliders = CoefficientSliders(parts)
            self._draw_presets(parts)
            self._name = ui.input("Name")
            JobButton("Save as adapter", self._save, lambda: "saving")
        draw_heading("Score the mixture")
        _ScoreForm(home, self._sliders)
        draw_heading("Ask the mixture")
        with ui.card().classes("w-full gap-3"):
            self._beside_base = ui.switch("Ask the base too")
            names = [f"{expert_mixer.RUN_PREFIX}{run}"] * bool(run)
            example = partial(expert_mixer.example_question, home, names)
            ChatPanel(self._chat_columns, ChatSettings(0.0), example)

    def _draw_presets(self, parts: Mapping[str, float]) -> None:
        """Draw the buttons that set the sliders."""
        with ui.row().classes("items-center gap-2 w-full"):
            for label, act in (
                ("As it was", partial(self._sliders.set_all, parts)),
                ("Sum to 1", self._normalize),
                ("All 0", partial(self._sliders.set_all, {})),
            ):
                ui.button(label, on_click=act).props("outline")

    def _normalize(self) -> None:
        shares = self._sliders.coefficients
        if abs(total := sum(shares.values())) < 1e-9:
            ui.notify("the coefficients sum to 0 and cannot be scaled to 1", type="warning")
        else:
            self._sliders.set_all({name: share / total for name, share in shares.items()})

    def _chat_columns(self) -> list[ChatColumn]:
        roster, now = self._home.roster, dict(self._sliders.coefficients)
        name = f"{MIXTURE_PREFIX}{describe_position(list(now), list(now.values()))}"
        found = [ChatColumn("mixture", name, partial(roster.blend, now))]
        if self._beside_base.value:
            found.append(ChatColumn("base", "local/base", partial(roster.model, "local/base")))
        return found

    async def _save(self) -> None:
        shares, name = dict(self._sliders.coefficients), self._name.value or ""
        model = await run_in_thread(expert_mixer.save_mixture, self._home, shares, name)
        _draw_row(model, "saved mixture")


def _open_sliders(run: str) -> None:
    ui.navigate.to(f"/models?{urlencode({'run': run})}" if run else "/models")


class _ScoreForm:
    """Form that scores the mixture on dev items, beside the mean of all and the nearest expert."""

    def __init__(self, home: AppState, sliders: CoefficientSliders) -> None:
        self._home, self._sliders = home, sliders
        self._scoring: MixtureScoring | None = None
        with ui.card().classes("w-full gap-2"):
            with ui.element("div").classes("fields w-full"):
                tasks = list(group_options("task", home.config_dir))
                self._task = ui.select(tasks, value=DEFAULT_TASK, label="Task", with_input=True)
                self._items = ui.number("Dev items", value=50, min=2, precision=0)
                self._keys = ui.input("Further keys", placeholder="task.file=FILE")
            JobButton("Score", self._score, self._describe_progress, self._stop)

    async def _score(self) -> None:
        self._scoring = None
        settings = shlex.split(self._keys.value or "")
        mixture, items = dict(self._sliders.coefficients), int(self._items.value or 0)
        self._scoring = expert_mixer.score_mixture(
            self._home, mixture, str(self._task.value), settings, items
        )
        rows = []
        for one in await run_in_thread(self._scoring.run):
            difference = "–"
            if gain := one.gain:
                interval = f"[{format_signed(gain.low)}, {format_signed(gain.high)}]"
                difference = f"{format_signed(gain.difference)} {interval}, {format_p(gain.p)}"
            utility = f"{format_interval(one.utility, one.interval)}, n = {one.items}"
            rows.append([f"{one.name}: {one.words}", utility, difference])
        header = ["mixture", "score, 95 %", "gain of yours, 95 %"]
        draw_table(TableBlock("", header, rows), "left")

    def _stop(self) -> None:
        if self._scoring:
            self._scoring.stop()

    def _describe_progress(self) -> str:
        scoring = self._scoring
        return (
            f"{scoring.done} of {scoring.total} items" if scoring and scoring.total else "loading"
        )


def _draw_row(name: str, details: str, linked: bool = True) -> None:
    """Draw a model with its description; the name links to Talk if the model can be queried."""
    with ui.element("div").classes("models-row"):
        if linked:
            ui.link(name, f"/talk?model={quote(name)}").classes("text")
        else:
            ui.label(name)
        draw_text(details, "quiet")


def draw_inspection(found: PoolInspection) -> None:
    """Draw what a folder contains: adapters, what a search refuses and why, and cosines."""
    verdict = f"A search takes this folder as it is: {len(found.used)} adapters."
    if found.fault:
        verdict = f"A search would not take this folder: {found.fault}."
    ui.label(verdict).classes("text-base").props("role=status")
    with ui.column().classes("gap-1"):
        for remark in list_remarks(found):
            draw_text(remark)
    base, header, rows = table_of_experts(found)
    if base:
        draw_text(f"Base model: {base}", "quiet")
    if rows:
        draw_table(TableBlock("", header, rows), "left")
    ui.label(NORM_HELP).classes("quiet text-sm")
    if len(found.used) > 1:
        rows = [
            [name, *(f"{cosine:.2f}" for cosine in row)]
            for name, row in zip(found.used, found.cosines, strict=True)
        ]
        draw_heading("Cosines of the updates")
        draw_table(TableBlock("", ["adapter", *found.used], rows))
