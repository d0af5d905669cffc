"""Page Models: list of models, and sliders that mix experts for immediate questions."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from nicegui import ui

from swarm._util.terminal import escape_control_chars
from swarm._util.threads import run_in_thread
from swarm.errors import UserError
from swarm.moa.cli import format_endpoint
from swarm.pool.adapter import Adapter
from swarm.runs.describe import describe_position
from swarm.ui import chat, expert_mixer, layout
from swarm.ui.chat import ChatColumn, ChatPanel, ChatSettings
from swarm.ui.layout import CoefficientSliders, draw_heading, page_frame
from swarm.ui.state import AppState

MIXTURE_ALONE = "only the mixture"


def register_page(home: AppState) -> None:
    """Register the page at /models."""

    @ui.page("/models", response_timeout=60)
    async def models_page() -> None:
        ui.add_css(chat.STYLE + layout.SLIDER_STYLE + STYLE)
        with page_frame("Models"):
            found = await run_in_thread(lambda: list(expert_mixer.list_experts(home)))
            bests = await run_in_thread(expert_mixer.list_bests, home)
            experts = [one for one in found if isinstance(one, Adapter)]
            for wrong in (one for one in found if isinstance(one, str)):
                ui.label(escape_control_chars(wrong)).classes("chat-wrong text")
            if experts:
                _ExpertMixer(home, [one.name for one in experts], bests)
            _draw_experts(home, experts)
            _draw_bests(bests)
            _draw_others(home, await run_in_thread(expert_mixer.list_model_names, home))


STYLE = """
.models-row { display: flex; flex-wrap: wrap; gap: .1rem 1rem; width: 100%; padding: .45rem 0;
              border-top: 1px solid var(--line); }
.models-row:first-child { border-top: 0; }
.models-row > :first-child { flex: 0 0 13rem; max-width: 100%; }
.models-row > :last-child { flex: 1 1 16rem; min-width: 0; }
"""


class _ExpertMixer:
    """Sliders, presets for them, and a conversation with the resulting mixture."""

    def __init__(
        self, home: AppState, names: list[str], bests: list[expert_mixer.BestOfRun]
    ) -> None:
        self._home = home
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
        draw_heading("Ask the mixture")
        with ui.card().classes("w-full gap-3"):
            self._aside = ui.select(
                self._comparison_choices(), value=MIXTURE_ALONE, label="Beside it"
            )
            self._aside.props("dense outlined").classes("w-full max-w-sm")
            self._aside.on_value_change(self._hold_mixture)
            with ui.expansion("Settings").classes("w-full").props("dense"):
                manners = ChatSettings(0.0)
            ChatPanel(self._chat_columns, manners)
        self._held: dict[str, float] = {}

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

    def _comparison_choices(self) -> dict[str, str]:
        snapshot = {"held": "another mixture: the present sliders"}
        return {MIXTURE_ALONE: MIXTURE_ALONE, "base": "the base", **snapshot}

    def _hold_mixture(self, event: Any) -> None:
        if event.value == "held":
            self._held = dict(self._sliders.coefficients)

    def _chat_columns(self) -> list[ChatColumn]:
        roster = self._home.roster
        current = dict(self._sliders.coefficients)
        found = [
            ChatColumn(
                "mixture",
                f"{chat.MIXTURE_PREFIX}{_format_position(current)}",
                partial(roster.blend, current),
            )
        ]
        if self._aside.value == "base":
            found.append(ChatColumn("base", "local/base", partial(roster.model, "local/base")))
        if self._aside.value == "held":
            snapshot = dict(self._held)
            found.append(
                ChatColumn(
                    "held",
                    f"{chat.MIXTURE_PREFIX}{_format_position(snapshot)}",
                    partial(roster.blend, snapshot),
                )
            )
        return found

    async def _save_mixture(self, name: str) -> None:
        shares = dict(self._sliders.coefficients)
        try:
            model = await run_in_thread(expert_mixer.save_mixture, self._home, shares, name)
        except UserError as error:
            ui.notify(escape_control_chars(str(error)), type="warning")
            return
        ui.notify(f"saved as model {model}", type="positive", timeout=10_000)


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
    draw_heading("Experts")
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
