"""Page Models: models, sliders that mix experts, questions to mixtures and their scores, pools."""

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from nicegui import ui

from swarm._util.terminal import escape_control_chars, format_interval, format_p, format_signed
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.evaluation.positions import MixtureScoring, ScoredPosition
from swarm.merging.positions import describe_position
from swarm.moa.cli import format_endpoint
from swarm.pool.adapter import Adapter
from swarm.pool.inspection import (
    PoolInspection,
    inspect_folder,
    list_remarks,
    table_of_experts,
)
from swarm.ui import charts, chat, expert_mixer, layout
from swarm.ui.chat import ChatColumn, ChatPanel, ChatSettings
from swarm.ui.layout import (
    CoefficientSliders,
    draw_heading,
    draw_plain_table,
    draw_when_loaded,
    page_frame,
)
from swarm.ui.pages.new_search import group_options
from swarm.ui.state import AppState

DEFAULT_TASK = "nlgraph_mini"

REFRESH_S = 0.3
"""Interval between progress updates in seconds."""


def register_page(home: AppState) -> None:
    """Register the page at /models."""

    @ui.page("/models")
    def models_page() -> None:
        ui.add_css(chat.STYLE + layout.SLIDER_STYLE + STYLE)
        with page_frame("Models"):
            draw_when_loaded(lambda: _list_models(home), lambda found: _draw_models(home, *found))


def _list_models(
    home: AppState,
) -> tuple[list[Adapter | str], list[expert_mixer.BestOfRun], list[str]]:
    """Return experts or their errors, bests of runs, and names of models."""
    return (
        list(expert_mixer.list_experts(home)),
        expert_mixer.list_bests(home),
        expert_mixer.list_model_names(home),
    )


def _draw_models(
    home: AppState,
    found: list[Adapter | str],
    bests: list[expert_mixer.BestOfRun],
    names: list[str],
) -> None:
    experts = [one for one in found if isinstance(one, Adapter)]
    for wrong in (one for one in found if isinstance(one, str)):
        ui.label(escape_control_chars(wrong)).classes("chat-wrong text")

    @ui.refreshable
    def draw_others() -> None:
        _draw_others(home, names)

    if experts:
        _ExpertMixer(home, [one.name for one in experts], bests, draw_others.refresh)
    _draw_experts(home, experts)
    _draw_bests(bests)
    draw_others()


STYLE = """
.models-row { display: flex; flex-wrap: wrap; gap: .1rem 1rem; width: 100%; padding: .45rem 0;
              border-top: 1px solid var(--line); }
.models-row:first-child { border-top: 0; }
.models-row > :first-child { flex: 0 0 13rem; max-width: 100%; }
.models-row > :last-child { flex: 1 1 16rem; min-width: 0; }
"""


class _ExpertMixer:
    """Sliders, presets for them, and the resulting mixture: its score, and a conversation.

    Args:
        names: Names of the experts.
        on_saved: Called after a mixture was saved.
    """

    def __init__(
        self,
        home: AppState,
        names: list[str],
        bests: list[expert_mixer.BestOfRun],
        on_saved: Callable[[], Any],
    ) -> None:
        self._home, self._on_saved = home, on_saved
        draw_heading("Mix by hand")
        with ui.card().classes("w-full gap-3"):
            self._sliders = CoefficientSliders(names)
            self._draw_presets(names, bests)
            with ui.row().classes("items-center gap-2 w-full"):
                name = ui.input(placeholder="name").props("dense outlined aria-label='Name'")
                save = ui.button(
                    "Save as adapter", on_click=lambda: self._save_mixture(name.value or "")
                )
                save.props("unelevated no-caps")
        draw_heading("Score the mixture")
        _ScoreForm(home, lambda: dict(self._sliders.coefficients))
        draw_heading("Ask the mixture")
        with ui.card().classes("w-full gap-3"):
            self._beside_base = ui.switch("Ask the base too")
            with ui.expansion("Settings").classes("w-full").props("dense"):
                manners = ChatSettings(0.0)
            ChatPanel(self._chat_columns, manners)

    def _draw_presets(self, names: list[str], bests: list[expert_mixer.BestOfRun]) -> None:
        """Draw the controls that set the sliders."""
        run_bests = {f"best of {one.run}": one.coefficients for one in bests if one.coefficients}
        every = {name: {name: 1.0} for name in names}
        with ui.row().classes("items-center gap-2 w-full"):
            uniform = dict.fromkeys(names, 1 / len(names))
            ui.button("Uniform", on_click=lambda: self._sliders.set_coefficients(uniform)).props(
                "outline no-caps"
            )
            ui.button("Sum to 1", on_click=self._normalize_sliders).props("outline no-caps")
            ui.button("All 0", on_click=lambda: self._sliders.set_coefficients({})).props(
                "outline no-caps"
            )
            for label, choices in (("One expert", every), ("A run's best", run_bests)):
                if choices:
                    self._draw_chooser(label, choices)

    def _draw_chooser(self, label: str, choices: Mapping[str, Mapping[str, float]]) -> None:
        field = ui.select(list(choices), label=label).props("dense outlined")
        field.classes("min-w-40")
        field.on_value_change(lambda event: self._sliders.set_coefficients(choices[event.value]))

    def _normalize_sliders(self) -> None:
        try:
            self._sliders.set_coefficients(
                expert_mixer.normalize_coefficients(self._sliders.coefficients)
            )
        except UserError as error:
            ui.notify(str(error), type="warning")

    def _chat_columns(self) -> list[ChatColumn]:
        roster = self._home.roster
        current = dict(self._sliders.coefficients)
        name = f"{chat.MIXTURE_PREFIX}{_format_position(current)}"
        found = [ChatColumn("mixture", name, partial(roster.blend, current))]
        if self._beside_base.value:
            found.append(ChatColumn("base", "local/base", partial(roster.model, "local/base")))
        return found

    async def _save_mixture(self, name: str) -> None:
        shares = dict(self._sliders.coefficients)
        try:
            model = await run_in_thread(expert_mixer.save_mixture, self._home, shares, name)
        except UserError as error:
            ui.notify(escape_control_chars(str(error)), type="warning")
            return
        ui.notify(f"saved as model {model}", type="positive", timeout=10_000)
        self._on_saved()


class _ScoreForm:
    """Form that scores the mixture on dev items, beside the uniform soup and the nearest expert.

    Args:
        mixture: Returns the coefficients.
    """

    def __init__(self, home: AppState, mixture: Callable[[], dict[str, float]]) -> None:
        self._home, self._mixture = home, mixture
        self._scoring: MixtureScoring | None = None
        with ui.card().classes("w-full gap-2"):
            with ui.element("div").classes("chat-settings w-full"):
                tasks = list(group_options("task", home.config_dir))
                self._task = ui.select(tasks, value=DEFAULT_TASK, label="Task", with_input=True)
                self._items = ui.number("Dev items", value=50, min=2, precision=0)
                self._keys = ui.input("Further keys", placeholder="task.file=FILE")
            for field in (self._task, self._items, self._keys):
                field.props("dense outlined stack-label")
            with ui.row().classes("items-center gap-2"):
                self._button = ui.button("Score", on_click=self._score_mixture)
                self._button.props("unelevated no-caps")
                self._stop = ui.button("Stop", on_click=self._stop_scoring)
                self._stop.props("outline no-caps aria-label='Stop scoring'")
                self._spinner = ui.spinner(size="1.5em")
                self._state = ui.label().classes("quiet text").props("role=status data-scoring")
            self._wrong = ui.label().classes("chat-wrong text").props("role=alert")
            self._shown = ui.column().classes("w-full gap-2")
        self._refresh_state()
        ui.timer(REFRESH_S, self._refresh_state)
        ui.context.client.on_delete(self._stop_scoring)

    async def _score_mixture(self) -> None:
        self._wrong.set_text("")
        mixture = self._mixture()
        try:
            self._scoring = expert_mixer.score_mixture(
                self._home,
                mixture,
                str(self._task.value),
                split_words(self._keys.value or ""),
                int(self._items.value or 0),
            )
            self._refresh_state()
            found = await run_in_thread(self._scoring.run)
        except UserError as error:
            self._wrong.set_text(escape_control_chars(str(error)))
            return
        except Exception as error:  # shown on the page instead of a traceback
            words = f"failed with {type(error).__name__}: {error}"
            self._wrong.set_text(escape_control_chars(words))
            return
        finally:
            self._scoring = None
        self._shown.clear()
        with self._shown:
            draw_scores(found)

    def _stop_scoring(self) -> None:
        if self._scoring:
            self._scoring.stop()

    def _refresh_state(self) -> None:
        """Update the progress."""
        scoring = self._scoring
        words = ""
        if scoring:
            words = f"{scoring.done} of {scoring.total} items" if scoring.total else "loading"
        self._state.set_text(words)
        for element in (self._spinner, self._stop):
            element.set_visibility(scoring is not None)
        self._button.set_enabled(scoring is None)


def split_words(text: str) -> list[str]:
    """Split keys as a shell does.

    Raises:
        UserError: A quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"further keys: {error}") from None


def draw_scores(found: list[ScoredPosition]) -> None:
    """Draw the scores of a mixture and its neighbours, with paired tests."""
    rows = []
    for one in found:
        difference = "–"
        if gain := one.gain:
            interval = f"[{format_signed(gain.low)}, {format_signed(gain.high)}]"
            difference = f"{format_signed(gain.difference)} {interval}, {format_p(gain.p)}"
        name = escape_control_chars(f"{one.name}: {one.words}")
        utility = f"{format_interval(one.utility, one.interval)}, n = {one.items}"
        rows.append([name, utility, difference])
    draw_plain_table(["position", "utility, 95 %", "mixture minus it, 95 %"], rows, "left")


def register_pool_page(home: AppState) -> None:
    """Register the page at /pool?folder=FOLDER."""

    @ui.page("/pool")
    def pool_page(folder: str = "") -> None:
        with page_frame("Pool", "Start"):
            chosen = folder.strip() or home.pool
            with ui.row().classes("items-center gap-2 w-full no-wrap"):
                field = ui.input("Pool folder", value=chosen).props("dense outlined")
                field.classes("grow min-w-0")
                ui.button("Inspect", on_click=lambda: open_pool(field.value or "")).props(
                    "outline no-caps"
                )
            draw_when_loaded(lambda: inspect_folder(chosen), draw_inspection)


def open_pool(folder: str) -> None:
    """Open the page of a pool's folder."""
    ui.navigate.to(f"/pool?{urlencode({'folder': folder})}")


def draw_inspection(found: PoolInspection) -> None:
    """Draw what a folder contains: adapters, what a search refuses and why, and cosines."""
    verdict = f"A search would not take this folder: {found.fault}."
    if not found.fault:
        verdict = f"A search takes this folder as it is: {len(found.used)} experts."
    ui.label(verdict).classes("text-base text").props("role=status")
    with ui.column().classes("gap-1"):
        for remark in list_remarks(found):
            ui.label(escape_control_chars(remark)).classes("text")
    base, header, rows = table_of_experts(found)
    if base:
        ui.label(f"Base model: {escape_control_chars(base)}").classes("quiet text")
    if rows:
        draw_plain_table(header, [[*map(escape_control_chars, row)] for row in rows], "left")
    ui.label(NORM_HELP).classes("quiet text-sm text")
    if len(found.used) > 1:
        with ui.card().classes("w-full max-w-3xl gap-2"):
            draw_heading("Cosines of the updates")
            side = f"{max(16, 2 * len(found.used) + 8)}rem"
            ui.echart(charts.cosine_chart(found.used, found.cosines)).classes("w-full").style(
                f"height: {side}"
            ).props('role=img aria-label="Cosines of the updates"')


NORM_HELP = (
    "Norms and cosines are of the updates s B A over all modules (Frobenius). No base model is "
    "loaded. The same in a terminal: python -m swarm.pool check FOLDER"
)


def _format_position(coefficients: Mapping[str, float]) -> str:
    return describe_position(list(coefficients), list(coefficients.values()))


def _draw_row(name: str, details: str, model: str | None = None) -> None:
    """Draw a model with its description; the name links to Talk if the model can be queried."""
    with ui.element("div").classes("models-row"):
        if model:
            ui.link(name, f"/talk?model={quote(model)}").classes("text")
        else:
            ui.label(name).classes("text")
        ui.label(escape_control_chars(details)).classes("quiet text")


def _draw_experts(home: AppState, experts: list[Adapter]) -> None:
    with ui.row().classes("items-baseline gap-4"):
        draw_heading("Experts")
        ui.link("Inspect the pool", f"/pool?{urlencode({'folder': home.pool})}")
    if not experts:
        ui.label(
            f"There are no experts in {home.pool}; set another folder with python -m "
            f"swarm.ui --pool FOLDER."
        )
        return
    with ui.card().classes("w-full gap-0"):
        _draw_row("local/base", "the base without an expert", "local/base")
        for one in experts:
            _draw_row(f"local/{one.name}", expert_mixer.describe_expert(one), f"local/{one.name}")


def _draw_bests(bests: list[expert_mixer.BestOfRun]) -> None:
    draw_heading("Best models of runs")
    if not bests:
        ui.label("No search has finished yet.").classes("quiet")
        return
    with ui.card().classes("w-full gap-0"):
        for one in bests:
            numbers = [
                f"{split} {score}"
                for split, score in (("dev", one.dev), ("test", one.test))
                if score
            ]
            by_hand = f"cannot be mixed here: {one.reason}" if one.reason else ""
            model = f"local/search/{one.run}"
            _draw_row(model, "; ".join(filter(None, [one.words, *numbers, by_hand])), model)


def _draw_others(home: AppState, names: list[str]) -> None:
    draw_heading("Other models")
    saved = expert_mixer.list_saved_mixtures(home)
    with ui.card().classes("w-full gap-0"):
        for name in saved:
            _draw_row(name, "saved mixture", name)
        for name in names:
            if not name.startswith("local/"):
                _draw_row(name, expert_mixer.describe_members(name), name)
        try:
            providers = home.roster.providers
        except UserError as error:
            ui.label(escape_control_chars(str(error))).classes("chat-wrong text")
            return
        with ui.expansion(f"Endpoints: {len(providers)}").classes("w-full").props("dense"):
            for name, one in providers.items():
                _draw_row(f"{name}/MODEL", format_endpoint(one))
