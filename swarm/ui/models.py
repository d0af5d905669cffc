"""The page Models: what there is, and experts mixed by hand and asked at once."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from nicegui import ui

from swarm.adapters import Adapter
from swarm.errors import UserError
from swarm.moa.listing import place
from swarm.models.background import in_thread
from swarm.printing import harmless
from swarm.ui import answer, mixing, sliders
from swarm.ui.chat import Chat, Manners, Side
from swarm.ui.frame import frame, heading
from swarm.ui.home import Home
from swarm.ui.sliders import Sliders
from swarm.words import sentence

ASIDE = "the mixture alone"


def register(home: Home) -> None:
    """Define the page."""

    @ui.page("/models", response_timeout=60)
    async def models() -> None:
        ui.add_css(answer.STYLE + sliders.STYLE + STYLE)
        with frame("Models"):
            found = await in_thread(lambda: list(mixing.experts(home)))
            bests = await in_thread(mixing.bests, home)
            experts = [one for one in found if isinstance(one, Adapter)]
            for wrong in (one for one in found if isinstance(one, str)):
                ui.label(harmless(wrong)).classes("chat-wrong text")
            if experts:
                _Mixer(home, [one.name for one in experts], bests)
            _experts(home, experts)
            _bests(bests)
            _others(home, await in_thread(mixing.names, home))


STYLE = """
.models-row { display: flex; flex-wrap: wrap; gap: .1rem 1rem; width: 100%; padding: .45rem 0;
              border-top: 1px solid var(--line); }
.models-row:first-child { border-top: 0; }
.models-row > :first-child { flex: 0 0 13rem; max-width: 100%; }
.models-row > :last-child { flex: 1 1 16rem; min-width: 0; }
"""


class _Mixer:
    """The sliders, what sets them, and the conversation with what they come to."""

    def __init__(self, home: Home, names: list[str], bests: list[mixing.Found]) -> None:
        self._home = home
        heading("Mix by hand")
        with ui.card().classes("w-full gap-3"):
            self._sliders = Sliders(names)
            self._settings(names, bests)
            with ui.row().classes("items-center gap-2 w-full"):
                name = ui.input(placeholder="name").props("dense outlined aria-label='Name'")
                save = ui.button("Save as adapter", on_click=lambda: self._save(name.value or ""))
                save.props("unelevated no-caps")
        heading("Ask the mixture")
        with ui.card().classes("w-full gap-3"):
            self._aside = ui.select(self._asides(), value=ASIDE, label="Beside it")
            self._aside.props("dense outlined").classes("w-full max-w-sm")
            self._aside.on_value_change(self._hold)
            with ui.expansion("Settings").classes("w-full").props("dense"):
                manners = Manners(0.0)
            Chat(self._sides, manners)
        self._held: dict[str, float] = {}

    def _settings(self, names: list[str], bests: list[mixing.Found]) -> None:
        """What puts the sliders somewhere."""
        there = {f"best of {one.run}": one.coefficients for one in bests if one.coefficients}
        every = {name: {name: 1.0} for name in names}
        with ui.row().classes("items-center gap-2 w-full"):
            uniform = dict.fromkeys(names, 1 / len(names))
            ui.button("Uniform", on_click=lambda: self._sliders.set(uniform)).props(
                "outline no-caps"
            )
            ui.button("Sum to 1", on_click=self._normalise).props("outline no-caps")
            ui.button("All 0", on_click=lambda: self._sliders.set({})).props("outline no-caps")
            for label, choices in (("One expert", every), ("A run's best", there)):
                if choices:
                    self._chooser(label, choices)

    def _chooser(self, label: str, choices: Mapping[str, Mapping[str, float]]) -> None:
        field = ui.select(list(choices), label=label).props("dense outlined")
        field.classes("min-w-40")
        field.on_value_change(lambda event: self._sliders.set(choices[event.value]))

    def _normalise(self) -> None:
        try:
            self._sliders.set(mixing.normalised(self._sliders.coefficients))
        except UserError as error:
            ui.notify(str(error), type="warning")

    def _asides(self) -> dict[str, str]:
        held = {"held": "another mixture: the sliders as they are when this is chosen"}
        return {ASIDE: ASIDE, "base": "the base", **held}

    def _hold(self, event: Any) -> None:
        if event.value == "held":
            self._held = dict(self._sliders.coefficients)

    def _sides(self) -> list[Side]:
        roster = self._home.roster
        now = dict(self._sliders.coefficients)
        found = [Side("mixture", f"{answer.MIXED}{_words(now)}", partial(roster.blend, now))]
        if self._aside.value == "base":
            found.append(Side("base", "local/base", partial(roster.model, "local/base")))
        if self._aside.value == "held":
            held = dict(self._held)
            found.append(Side("held", f"{answer.MIXED}{_words(held)}", partial(roster.blend, held)))
        return found

    async def _save(self, name: str) -> None:
        shares = dict(self._sliders.coefficients)
        try:
            model = await in_thread(mixing.save, self._home, shares, name)
        except UserError as error:
            ui.notify(harmless(str(error)), type="warning")
            return
        ui.notify(f"saved; its name as a model is {model}", type="positive", timeout=10_000)


def _words(coefficients: Mapping[str, float]) -> str:
    return sentence(list(coefficients), list(coefficients.values()))


def _row(name: str, details: str, model: str | None = None) -> None:
    """A model with what is said of it; its name leads to Talk where it can be asked."""
    with ui.element("div").classes("models-row"):
        if model:
            ui.link(name, f"/talk?model={quote(model)}").classes("text")
        else:
            ui.label(name).classes("text")
        ui.label(harmless(details)).classes("quiet text")


def _experts(home: Home, experts: list[Adapter]) -> None:
    heading("Experts")
    if not experts:
        ui.label(f"There are none in {home.pool}; python -m swarm.ui --pool FOLDER names others.")
        return
    with ui.card().classes("w-full gap-0"):
        _row("local/base", "the base without an expert", "local/base")
        for one in experts:
            _row(f"local/{one.name}", mixing.about(one), f"local/{one.name}")


def _bests(bests: list[mixing.Found]) -> None:
    heading("What runs have found")
    if not bests:
        ui.label("No search has ended yet.").classes("quiet")
        return
    with ui.card().classes("w-full gap-0"):
        for one in bests:
            numbers = [f"{split} {told}" for split, told in (("dev", one.dev), ("test", one.test))
                       if told]  # fmt: skip
            by_hand = f"no sliders for it: {one.why}" if one.why else ""
            model = f"local/search/{one.run}"
            _row(model, "; ".join(filter(None, [one.words, *numbers, by_hand])), model)


def _others(home: Home, names: list[str]) -> None:
    heading("Other models")
    kept = mixing.kept(home)
    with ui.card().classes("w-full gap-0"):
        for name in kept:
            _row(name, "a mixture that was saved", name)
        for name in names:
            if not name.startswith("local/"):
                _row(name, mixing.members(name), name)
        try:
            providers = home.roster.providers
        except UserError as error:
            ui.label(harmless(str(error))).classes("chat-wrong text")
            return
        with ui.expansion(f"Endpoints: {len(providers)}").classes("w-full").props("dense"):
            for name, one in providers.items():
                _row(f"{name}/MODEL", place(one))
