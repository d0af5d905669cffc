"""The page Talk: a conversation with any model by its name, or with several side by side."""

from functools import partial

from nicegui import ui

from swarm.models.background import in_thread
from swarm.ui import answer, mixing
from swarm.ui.chat import Chat, Manners, Side
from swarm.ui.frame import frame
from swarm.ui.home import Home

ABOUT = """\
Any name of a model: local/base, an expert, a run's best, PROVIDER/MODEL, moa/PRESET,
consortium/NAME. With several, each answers for itself."""


def register(home: Home) -> None:
    """Define the page."""

    @ui.page("/talk", response_timeout=60)
    async def talk(model: str = "") -> None:
        ui.add_css(answer.STYLE)
        with frame("Talk"):
            names = await in_thread(mixing.names, home)
            _draw(home, names, [one for one in (model,) if one])


def _draw(home: Home, names: list[str], chosen: list[str]) -> None:
    with ui.card().classes("w-full gap-2"):
        field = ui.select(
            list(dict.fromkeys([*names, *chosen])), label="Models", value=chosen, multiple=True,
            with_input=True, new_value_mode="add-unique",
        )  # fmt: skip
        field.props("use-chips outlined dense hint='search, or type a name and press Enter'")
        field.classes("w-full")
        ui.label(ABOUT).classes("quiet text-sm")
        with ui.expansion("Settings").classes("w-full").props("dense"):
            manners = Manners(0.7)

    def sides() -> list[Side]:
        picked = [name.strip() for name in field.value if name.strip()]
        if not picked:
            ui.notify("choose a model first", type="warning")
        return [Side(name, name, partial(home.roster.model, name)) for name in picked]

    Chat(sides, manners)
