"""Commands for saved consortia: save, list, show, remove, export, import, strategies."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from swarm._util.files import write_atomic
from swarm._util.format import align_columns
from swarm._util.terminal import escape_control_chars
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
    "default": "the arbiter writes one answer of all, and says how sure it is",
    "pick-one": "the arbiter chooses one answer, which is given as it is",
    "rank": "the arbiter puts the answers in order; the first is given as it is",
    "vote": "the answer that most members gave; the arbiter decides a tie, and may be missing",
    "elimination": "as rank, and in each iteration the last --eliminate members leave, until "
    "--keep are left",
    "roles": "as default, and each member looks from a side of its own (--role)",
    "peer-review": "the members rank each other's answers without names, then the arbiter writes",
}


@click.command()
@click.argument("name")
@member_options
@strategy_options
@request_options
@consortium_option
@click.option("--replace", "over", is_flag=True, help="Replace a consortium of this name.")
@location_options
def save(name: str, over: bool, **given: Any) -> None:
    """Save a consortium as a model: llm -m NAME."""
    vote = given["strategy"] == "vote"
    if not given["consortium"] and not given["models"]:
        raise UserError("save needs its members: name them by -m, or begin with --consortium", 2)
    if not given["consortium"] and not given["arbiter"] and not vote:
        raise UserError("save needs --arbiter MODEL; only --strategy vote does without", 2)
    for key in ("base", "pool", "device", "providers"):
        if given[key]:
            raise UserError(
                f"--{key} has no effect: it is not saved; local models are looked for "
                "where the question is asked",
                2,
            )
    _check_name_free(name)
    shelf = ConsortiumStore()
    if name in shelf.list_names() and not over:
        raise UserError(f"{name}: a consortium of this name is saved; --replace replaces it")
    members = build_registry(given)
    config = resolve_config(given, members, ("temperature", "max_tokens", "timeout")).config
    _check_no_cycle(name, config, shelf)
    build_consortium(config, members.model)
    shelf.save(name, config, replace=over)
    for warning in run.list_config_warnings(config):
        click.echo(f"warning: {escape_control_chars(warning)}", err=True)
    click.echo(f"saved {name}: llm -m {name} asks it; so does consortium/{name} everywhere here")


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
        raise UserError(f"{name}: llm has a model of this name already; choose another one")


def _check_no_cycle(name: str, config: ConsortiumSettings, shelf: ConsortiumStore) -> None:
    """Check that a consortium does not contain itself, directly or indirectly.

    Raises:
        UserError: It does.
    """
    way, met = [(name, config)], set()
    while way:
        inside, one = way.pop()
        for member in (*one.members, one.arbiter, one.fallback):
            saved = member.model.removeprefix("llm/").removeprefix("consortium/") if member else ""
            if saved == name:
                by = "" if inside == name else f", by {inside}"
                raise UserError(f"{name} would contain itself{by}; choose another name")
            if saved in shelf.list_names() and saved not in met:
                met.add(saved)
                way.append((saved, shelf.get(saved)))


@click.command("list")
@json_option
def list_saved(as_json: bool) -> None:
    """List the saved consortia and the presets."""
    shelf = ConsortiumStore()
    configs = dict(_readable_configs(shelf))
    if as_json:
        saved = [{"name": name, **config.to_dict()} for name, config in configs.items()]
        click.echo(json.dumps(saved, indent=1))
        return
    for name, config in configs.items():
        click.echo(escape_control_chars(f"{name}: {run.summarize_config(config)}"))
    if not configs:
        click.echo("none is saved; save one: llm consortium save NAME -m MODEL ... --arbiter MODEL")
    for name in preset_names():
        click.echo(f"preset {name}: {run.summarize_config(read_preset(name))}")
    for file, names in shelf.find_importable().items():
        click.echo(
            f"{', '.join(names)}: of an older program; llm consortium import {file} "
            "takes them over",
            err=True,
        )


def _readable_configs(shelf: ConsortiumStore) -> Iterator[tuple[str, ConsortiumSettings]]:
    """Yield the valid saved consortia; print a warning for each invalid one."""
    for name in shelf.list_names():
        try:
            yield name, shelf.get(name)
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
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), help="Write it there.")
def export(name: str, output: Path | None) -> None:
    """Export a consortium as YAML, for `import`."""
    import yaml

    settings = {
        key: value for key, value in load_config(name).to_dict().items() if value is not None
    }
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if output:
        write_atomic(output.expanduser(), text.encode())
    else:
        click.echo(text, nl=False)


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--name", help="Of what a yaml holds; its file's name without this.")
@click.option("--replace", "over", is_flag=True, help="Replace a consortium of this name.")
def import_saved(file: Path | None, name: str | None, over: bool) -> None:
    """Import consortia of llm-consortium, or a YAML file.

    FILE is a database of llm-consortium (logs.db, consortium_logs.db), or a YAML file; by default,
    databases are searched for in llm's folder.
    """
    shelf = ConsortiumStore()
    if file and file.suffix in (".yaml", ".yml"):
        name = name or file.stem
        _check_name_free(name)
        shelf.save(name, read_preset(file), replace=over)
        click.echo(f"saved {name}")
        return
    if name or over:
        raise UserError("--name and --replace are for a yaml; a database has names of its own", 2)
    files = [file] if file else list(shelf.find_importable())
    if not files:
        click.echo("there is nothing to import: llm's folder has no other saved consortia")
    for one in files:
        came = shelf.import_from(one)
        click.echo(f"{one}: saved {', '.join(came.put) or 'none'}")
        if came.there:
            click.echo(f"left as they are: {', '.join(came.there)}")
        for wrong, why in came.wrong.items():
            click.echo(
                f"warning: {escape_control_chars(f'{wrong} is not taken over: {why}')}", err=True
            )


@click.command()
def strategies() -> None:
    """List the strategies for combining answers."""
    for line in align_columns(list(STRATEGY_DESCRIPTIONS.items())):
        click.echo(line)
    click.echo(f"roles by name: {', '.join(ROLES)}; or any words of yours")
