"""Plugin of the llm command: the group `llm consortium`, and saved consortia as models."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import llm

if TYPE_CHECKING:
    import click

warned_messages: set[str] = set()
"""Warnings already printed: llm registers models several times per command."""


@llm.hookimpl(trylast=True)
def register_commands(cli: "click.Group") -> None:
    """Add the command group; modules of its commands are imported on use.

    Registered last, so that it takes precedence over an installed llm-consortium.
    """
    from swarm.consortium.cli import consortium

    existing = cli.commands.get("consortium")
    consortium.hides_another = existing not in (None, consortium)  # type: ignore[attr-defined]
    cli.add_command(consortium)


@llm.hookimpl(trylast=True)
def register_models(register: Callable[..., None], model_aliases: Iterable[Any]) -> None:
    """Register every saved consortium whose name is not taken by another model.

    Problems only cause warnings: an exception would break every llm command.
    """
    try:
        from swarm.multi_agent.consortium.store import ConsortiumStore

        store = ConsortiumStore()
        if not (names := store.list_names()):
            return
        from swarm.consortium.llm_plugin import AsyncConsortiumModel, ConsortiumModel
    except Exception as error:
        return _warn_once(f"cannot read the saved consortia: {error}")
    taken_names = {one.model.model_id for one in model_aliases if one.model}
    taken_names |= {alias for one in model_aliases for alias in one.aliases}
    for name in names:
        if name in taken_names:
            _warn_once(f"the consortium {name} is not registered: another model has its name")
            continue
        try:
            config = store.get(name)
            register(ConsortiumModel(name, config), AsyncConsortiumModel(name, config))
        except Exception as error:
            _warn_once(f"the consortium {name} cannot be used: {error}")


def _warn_once(message: str) -> None:
    """Print a warning to standard error, once."""
    from swarm._util.terminal import escape_control_chars

    if message not in warned_messages:
        warned_messages.add(message)
        line = escape_control_chars(" ".join(message.split()))
        print(f"warning: model-swarms: {line}", file=sys.stderr)
