"""The commands about saved consortia: save, list, show, remove, export, import, strategies."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from swarm.collab.configs import Config, build, preset_names, read_preset
from swarm.collab.deliberation.roles import ROLES
from swarm.collab.shelf import Shelf, config_of
from swarm.consortium import telling
from swarm.consortium.options import asked, begin, how, members_of, places, start, who
from swarm.errors import UserError
from swarm.files import write_whole
from swarm.printing import harmless

as_json = click.option("--json", "as_json", is_flag=True, help="Show JSON.")

STRATEGIES = {
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
@who
@how
@asked
@begin
@click.option("--replace", "over", is_flag=True, help="Replace a consortium of this name.")
@places
def save(name: str, over: bool, **given: Any) -> None:
    """Save a consortium as a model: llm -m NAME."""
    vote = given["strategy"] == "vote"
    if not given["consortium"] and not given["models"]:
        raise UserError("save needs its members: name them by -m, or begin with --consortium", 2)
    if not given["consortium"] and not given["arbiter"] and not vote:
        raise UserError("save needs --arbiter MODEL; only --strategy vote does without", 2)
    for key in ("base", "pool", "device", "providers"):
        if given[key]:
            raise UserError(f"--{key} has no effect: it is not saved; local models are looked for "
                            "where the question is asked", 2)  # fmt: skip
    _free(name)
    shelf = Shelf()
    if name in shelf.names() and not over:
        raise UserError(f"{name}: a consortium of this name is saved; --replace replaces it")
    members = members_of(given)
    config = start(given, members, ("temperature", "max_tokens", "timeout")).config
    _see_no_circle(name, config, shelf)
    build(config, members.model)
    shelf.put(name, config, replace=over)
    for warning in telling.doubts(config):
        click.echo(f"warning: {harmless(warning)}", err=True)
    click.echo(f"saved {name}: llm -m {name} asks it; so does consortium/{name} everywhere here")


def _free(name: str) -> None:
    """See that no other model has this name, by which llm would ask that one.

    Raises:
        UserError: One has.
    """
    if find_spec("llm") is None:
        return
    import llm

    found = llm.get_model_aliases().get(name)
    if found is not None and not type(found).__module__.startswith("swarm.consortium."):
        raise UserError(f"{name}: llm has a model of this name already; choose another one")


def _see_no_circle(name: str, config: Config, shelf: Shelf) -> None:
    """See that a consortium is in none of those that it is made of.

    Raises:
        UserError: It is.
    """
    way, met = [(name, config)], set()
    while way:
        inside, one = way.pop()
        for member in (*one.members, one.arbiter, one.fallback):
            saved = member.model.removeprefix("llm/").removeprefix("consortium/") if member else ""
            if saved == name:
                by = "" if inside == name else f", by {inside}"
                raise UserError(f"{name} would contain itself{by}; choose another name")
            if saved in shelf.names() and saved not in met:
                met.add(saved)
                way.append((saved, shelf.get(saved)))


@click.command("list")
@as_json
def listed(as_json: bool) -> None:
    """Name the saved consortia and the presets."""
    shelf = Shelf()
    configs = dict(_readable(shelf))
    if as_json:
        saved = [{"name": name, **config.to_dict()} for name, config in configs.items()]
        click.echo(json.dumps(saved, indent=1))
        return
    for name, config in configs.items():
        click.echo(harmless(f"{name}: {telling.summary(config)}"))
    if not configs:
        click.echo("none is saved; save one: llm consortium save NAME -m MODEL ... --arbiter MODEL")
    for name in preset_names():
        click.echo(f"preset {name}: {telling.summary(read_preset(name))}")
    for file, names in shelf.foreign().items():
        click.echo(f"{', '.join(names)}: of an older program; llm consortium import {file} "
                   "takes them over", err=True)  # fmt: skip


def _readable(shelf: Shelf) -> Iterator[tuple[str, Config]]:
    """The saved ones; what cannot be read is a warning."""
    for name in shelf.names():
        try:
            yield name, shelf.get(name)
        except UserError as error:
            click.echo(f"warning: {harmless(str(error))}", err=True)


@click.command()
@click.argument("name")
@as_json
def show(name: str, as_json: bool) -> None:
    """Tell a saved consortium's settings."""
    config = config_of(name)
    if as_json:
        click.echo(json.dumps({"name": name, **config.to_dict()}, indent=1))
        return
    for line in telling.settings(name, config):
        click.echo(harmless(line))


@click.command()
@click.argument("name")
def remove(name: str) -> None:
    """Forget a saved consortium; its runs are kept."""
    Shelf().remove(name)
    click.echo(f"removed {name}")


@click.command()
@click.argument("name")
@click.option("--output", type=click.Path(path_type=Path), help="Write it there.")
def export(name: str, output: Path | None) -> None:
    """Give a consortium as yaml, for `import`."""
    import yaml

    settings = {key: value for key, value in config_of(name).to_dict().items() if value is not None}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if output:
        write_whole(output.expanduser(), text.encode())
    else:
        click.echo(text, nl=False)


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--name", help="Of what a yaml holds; its file's name without this.")
@click.option("--replace", "over", is_flag=True, help="Replace a consortium of this name.")
def imported(file: Path | None, name: str | None, over: bool) -> None:
    """Take over what llm-consortium saved, or a yaml.

    FILE is a database of llm-consortium (logs.db, consortium_logs.db), or a yaml; without it, the
    databases in llm's folder are looked for.
    """
    shelf = Shelf()
    if file and file.suffix in (".yaml", ".yml"):
        name = name or file.stem
        _free(name)
        shelf.put(name, read_preset(file), replace=over)
        click.echo(f"saved {name}")
        return
    if name or over:
        raise UserError("--name and --replace are for a yaml; a database has names of its own", 2)
    files = [file] if file else list(shelf.foreign())
    if not files:
        click.echo("there is nothing to import: llm's folder has no other saved consortia")
    for one in files:
        came = shelf.import_from(one)
        click.echo(f"{one}: saved {', '.join(came.put) or 'none'}")
        if came.there:
            click.echo(f"left as they are: {', '.join(came.there)}")
        for wrong, why in came.wrong.items():
            click.echo(f"warning: {harmless(f'{wrong} is not taken over: {why}')}", err=True)


@click.command()
def strategies() -> None:
    """Tell how one answer may be made of many."""
    width = max(map(len, STRATEGIES))
    for name, words in STRATEGIES.items():
        click.echo(f"{name:<{width}}  {words}")
    click.echo(f"roles by name: {', '.join(ROLES)}; or any words of yours")
