"""Commands for saved consortia: save, list, show, remove, strategies."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import click

from swarm._util.terminal import align_columns, escape_control_chars
from swarm.consortium.cli import run
from swarm.consortium.cli.options import (
    build_registry,
    consortium_option,
    location_options,
    member_options,
    request_options,
    resolve_config,
    strategy_options,
)
from swarm.errors import UserError
from swarm.multi_agent.consortium.config import (
    ConsortiumSettings,
    build_consortium,
    preset_names,
    read_preset,
)
from swarm.multi_agent.consortium.prompts import ROLES
from swarm.multi_agent.consortium.store import ConsortiumStore, load_config

json_option = click.option("--json", "as_json", is_flag=True, help="Show JSON.")

STRATEGY_DESCRIPTIONS = {
    "default": "the arbiter synthesizes the answers and reports its confidence",
    "pick-one": "the arbiter chooses one answer, returned verbatim",
    "rank": "the arbiter ranks the answers; the first is returned verbatim",
    "vote": "the most frequent answer; the arbiter, which is optional, decides ties",
    "elimination": "as rank; each iteration removes the last --eliminate members, down to --keep",
    "roles": "as default, with a different role for each member (--role)",
    "peer-review": "the members rank each other's answers anonymously, then the arbiter "
    "synthesizes",
}


@click.command()
@click.argument("name")
@member_options
@strategy_options
@request_options
@consortium_option
@location_options
def save(name: str, **options: Any) -> None:
    """Save a consortium as a model: llm -m NAME; an existing one of this name is replaced."""
    vote = options["strategy"] == "vote"
    if not options["consortium"] and not options["models"]:
        raise UserError("save needs members: give -m, or start from --consortium", 2)
    if not options["consortium"] and not options["arbiter"] and not vote:
        raise UserError("save needs --arbiter MODEL; only --strategy vote works without", 2)
    for key in ("base", "pool", "device", "providers"):
        if options[key]:
            raise UserError(
                f"--{key} has no effect: it is not saved; local models are "
                "resolved when the question is asked",
                2,
            )
    _check_name_free(name)
    store, members = ConsortiumStore(), build_registry(options)
    config = resolve_config(options, members, ("temperature", "max_tokens", "timeout")).config
    _check_no_cycle(name, config, store)
    build_consortium(config, members.model)
    replaced = store.save(name, config)
    for warning in run.list_config_warnings(config):
        click.echo(f"warning: {escape_control_chars(warning)}", err=True)
    verb = "replaced" if replaced else "saved"
    click.echo(f"{verb} {name}: use it as llm -m {name}, or as the model consortium/{name}")


def _check_name_free(name: str) -> None:
    """Check that no other model has this name, which llm would use instead.

    Raises:
        UserError: Another model has it.
    """
    if find_spec("llm") is None:
        return
    import llm

    found = llm.get_model_aliases().get(name)
    if found is not None and not type(found).__module__.startswith("swarm.consortium."):
        raise UserError(f"{name}: llm already has a model of this name; choose another one")


def _check_no_cycle(name: str, config: ConsortiumSettings, store: ConsortiumStore) -> None:
    """Check that a consortium does not contain itself, directly or indirectly.

    Raises:
        UserError: It does.
    """
    stack, visited = [(name, config)], set()
    while stack:
        inside, one = stack.pop()
        for member in (*one.members, one.arbiter, one.fallback):
            saved = member.model.removeprefix("llm/").removeprefix("consortium/") if member else ""
            if saved == name:
                by = "" if inside == name else f", by {inside}"
                raise UserError(f"{name} would contain itself{by}; choose another name")
            if saved in store.list_names() and saved not in visited:
                visited.add(saved)
                stack.append((saved, store.get(saved)))


@click.command("list")
@json_option
def list_saved(as_json: bool) -> None:
    """List the saved consortia and the presets."""
    store = ConsortiumStore()
    configs = dict(_readable_configs(store))
    if as_json:
        saved = [{"name": name, **config.to_dict()} for name, config in configs.items()]
        click.echo(json.dumps(saved, indent=1))
        return
    for name, config in configs.items():
        click.echo(escape_control_chars(f"{name}: {run.summarize_config(config)}"))
    if not configs:
        click.echo(
            "no consortium is saved; save one with: llm consortium save NAME -m MODEL ... "
            "--arbiter MODEL"
        )
    for name in preset_names():
        click.echo(f"preset {name}: {run.summarize_config(read_preset(name))}")


def _readable_configs(store: ConsortiumStore) -> Iterator[tuple[str, ConsortiumSettings]]:
    """Yield the valid saved consortia; print a warning for each invalid one."""
    for name in store.list_names():
        try:
            yield name, store.get(name)
        except UserError as error:
            click.echo(f"warning: {escape_control_chars(str(error))}", err=True)


@click.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show the settings of a saved consortium."""
    config = load_config(name)
    if as_json:
        click.echo(json.dumps({"name": name, **config.to_dict()}, indent=1))
        return
    for line in run.format_settings(name, config):
        click.echo(escape_control_chars(line))


@click.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove a saved consortium; its runs remain."""
    ConsortiumStore().remove(name)
    click.echo(f"removed {name}")


@click.command()
def strategies() -> None:
    """List the strategies for combining answers."""
    for line in align_columns(list(STRATEGY_DESCRIPTIONS.items())):
        click.echo(line)
    click.echo(f"roles by name: {', '.join(ROLES)}; or any text")
