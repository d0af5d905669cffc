"""Page Talk: a conversation with one model or several side by side."""

from functools import partial

from nicegui import ui

from swarm._util.threads import run_in_thread
from swarm.ui import chat, expert_mixer
from swarm.ui.chat import ChatColumn, ChatPanel, ChatSettings
from swarm.ui.layout import page_frame
from swarm.ui.state import AppState

MODEL_NAME_HELP = """\
Any model name: local/base, an expert, a run's best, PROVIDER/MODEL, moa/PRESET,
consortium/NAME. Several models answer independently."""


def register_page(home: AppState) -> None:
    """Register the page at /talk."""

    @ui.page("/talk", response_timeout=60)
    async def chat_page(model: str = "") -> None:
        ui.add_css(chat.STYLE)
        with page_frame("Talk"):
            names = await run_in_thread(expert_mixer.list_model_names, home)
            _draw_chat(home, names, [one for one in (model,) if one])


def _draw_chat(home: AppState, names: list[str], chosen: list[str]) -> None:
    with ui.card().classes("w-full gap-2"):
        field = ui.select(
            list(dict.fromkeys([*names, *chosen])),
            label="Models",
            value=chosen,
            multiple=True,
            with_input=True,
            new_value_mode="add-unique",
        )
        field.props("use-chips outlined dense hint='search, or type a name and press Enter'")
        field.classes("w-full")
        ui.label(MODEL_NAME_HELP).classes("quiet text-sm")
        with ui.expansion("Settings").classes("w-full").props("dense"):
            manners = ChatSettings(0.7)

    def selected_columns() -> list[ChatColumn]:
        picked = [name.strip() for name in field.value if name.strip()]
        if not picked:
            ui.notify("choose a model first", type="warning")
        return [ChatColumn(name, name, partial(home.roster.model, name)) for name in picked]

    ChatPanel(selected_columns, manners)
