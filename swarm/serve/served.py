"""Which models are served, and which of them a client means."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.models import Model
from swarm.models.trace import Trace, TracingModel
from swarm.serve.refusals import HttpError

if TYPE_CHECKING:
    from swarm.roster import Roster

MAX_NAMES_SHOWN = 10
"""Names that an error lists."""


def resolve_name(name: str, models: Mapping[str, Model]) -> str:
    """The served name that a client means: the whole, or what follows its first word alone.

    Raises:
        Refused: There is none, or there are several.
    """
    if name in models:
        return name
    short = [one for one in models if one.partition("/")[2] == name]
    if len(short) == 1:
        return short[0]
    whole = {one.partition("/")[2]: one for one in models} | {one: one for one in models}
    near = short or [whole[one] for one in get_close_matches(name, whole, 1)]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    more = f" and {len(models) - MAX_NAMES_SHOWN} more" if len(models) > MAX_NAMES_SHOWN else ""
    there = f"{', '.join(list(models)[:MAX_NAMES_SHOWN])}{more}"
    what = f"model {name!r:.200}: is not served here; {meant}there are {there}"
    raise HttpError(what, 404, "model", "model_not_found")


def select_models(roster: "Roster", names: Sequence[str]) -> dict[str, Model]:
    """The models of these names, ready to be asked; nothing is loaded yet.

    Raises:
        UserError: There is no such model, or something of it is missing.
    """
    models = {name: roster.model(name) for name in names}
    for model in models.values():
        _check_model(model)
    return models


def discover_models(roster: "Roster", local: Sequence[str]) -> tuple[dict[str, Model], list[str]]:
    """The base, the experts, what runs have found, the mixtures and the consortia.

    Args:
        roster: Where they are found.
        local: Names of models of this machine, without local/.

    Returns:
        Those that can be asked, and the names of the others: a key or a file of them is missing,
        say, which `wanted` tells.
    """
    found: dict[str, Model] = {}
    left_out = []
    for name in [*(f"local/{name}" for name in local), *_list_collaborations()]:
        try:
            found.update(select_models(roster, [name]))
        except UserError:
            left_out.append(name)
    return found, left_out


def trace_models(models: Mapping[str, Model], trace: Trace) -> dict[str, Model]:
    """The models with their calls recorded: a collaboration's own, or else those of the model."""
    made = {}
    for name, model in models.items():
        if hasattr(model, "trace"):
            model.trace = trace
        made[name] = model if hasattr(model, "trace") else TracingModel(model, name, trace)
    return made


def _list_collaborations() -> list[str]:
    """The mixtures that ship, and the consortia that are saved or ship.

    Raises:
        UserError: The file of the saved ones cannot be read.
    """
    from swarm.collab import configs, presets
    from swarm.collab.shelf import ConsortiumStore

    consortia = dict.fromkeys([*ConsortiumStore().list_names(), *configs.preset_names()])
    moa = [f"moa/{name}" for name in presets.preset_names()]
    return [*moa, *(f"consortium/{name}" for name in consortia)]


def _check_model(model: Model) -> None:
    if check := getattr(model, "check", None):
        check()
