"""Commands of `llm consortium`: questions, saved consortia, and earlier runs."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm._util.files import write_json
from swarm._util.options import CONTEXT, SettingType, location_options, settings_options
from swarm._util.settings import Number, Positive, PositiveNumber, parse_settings
from swarm._util.terminal import (
    WarningCollector,
    escape_control_chars,
    escape_unencodable,
    format_cost,
    is_tty,
    pluralize,
)
from swarm.consortium.api import (
    Orchestrator,
    QuestionInterrupted,
    check_unused_options,
    default_arbiter,
)
from swarm.errors import UserError
from swarm.models.llm import LLM
from swarm.models.providers import Providers
from swarm.models.trace import Trace
from swarm.multi_agent.consortium.consortium import build_consortium, format_event
from swarm.multi_agent.consortium.prompts import ROLES
from swarm.multi_agent.consortium.settings import (
    ConsortiumOptions,
    ConsortiumSettings,
    MemberSpec,
    parse_member,
    read_preset,
)
from swarm.multi_agent.consortium.store import ConsortiumStore, RunLog, load_config
from swarm.multi_agent.presets import preset_names
from swarm.multi_agent.progress import CallProgress
from swarm.registry.registry import Roster

STRATEGIES = {
    "default": "the arbiter synthesizes the answers and reports its confidence",
    "pick-one": "the arbiter chooses one answer, returned verbatim",
    "rank": "the arbiter ranks the answers; the first is returned verbatim",
    "vote": "the most frequent answer; the arbiter, which is optional, decides ties",
    "elimination": "as rank; each iteration removes the last --eliminate members, down to --keep",
    "roles": "as default, with a different role for each member (--role)",
    "peer-review": "the members rank each other's answers anonymously, then the arbiter "
    "synthesizes",
}


def print_lines(lines: Iterable[str], err: bool = False) -> None:
    """Print lines to standard output, or to standard error."""
    for line in lines:
        click.echo(escape_control_chars(line), err=err)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=1))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table to standard output; the last column is cut to the terminal's width."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in heads[:-1]:
        table.add_column(head, overflow="fold")
    table.add_column(heads[-1], no_wrap=True)
    for row in rows:
        table.add_row(*(escape_control_chars("-" if c in (None, "") else str(c)) for c in row))
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 160
    if table.rows:
        console.print(table)


# Options


CONFIG_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option(
        *("-m", "--model", "--models", "models"),
        multiple=True,
        metavar="MODEL",
        help="A member: NAME, NAME:3 for three answers, NAME,temperature=1,role=critic; "
        "repeatable.",
    ),
    click.option(
        "-n", "--count", type=SettingType(Positive), help="Answers of each member without a count."
    ),
    click.option(
        *("--arbiter", "--arbiter-model"),
        metavar="MODEL",
        help="Model that judges and synthesizes the answers.",
    ),
    click.option("--fallback", metavar="MODEL", help="Arbiter if the first one fails."),
    click.option(
        "--consortium",
        metavar="NAME",
        help="A saved consortium, a preset or a yaml file to start from.",
    ),
    settings_options(ConsortiumOptions),
    click.option("--temperature", type=SettingType(Number), help="Default temperature of members."),
    click.option("--max-tokens", type=SettingType(Positive), help="Maximum tokens of an answer."),
    click.option("--timeout", type=SettingType(PositiveNumber), help="Seconds of an answer."),
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a consortium."""
    for option in reversed(CONFIG_OPTIONS):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Show JSON.")


def resolve_config(
    options: Mapping[str, Any], members: Roster, of_each: Sequence[str]
) -> tuple[ConsortiumSettings, str | None]:
    """Return the settings of the options, and the name of the consortium that they change.

    Args:
        options: Options by name.
        members: Registry of model names.
        of_each: Options that become settings of each model without its own.
    """
    if options["count"] and not options["models"]:
        raise UserError("--count has no effect without -m; name the members", 2)
    known, settings = members.is_known_name, ConsortiumOptions.model_fields
    changes = {key: options[key] for key in settings if options[key] not in (None, ())}
    if options["models"]:
        count = options["count"] or 1
        changes["members"] = [parse_member(one, known, count) for one in options["models"]]
    for key in ("arbiter", "fallback"):
        if options[key]:
            changes[key] = parse_member(options[key], known)
            if changes[key].count > 1:
                raise UserError(
                    f"--{key} {options[key]}: cannot have several samples; leave the number out", 2
                )
    if options["roles"]:
        changes.setdefault("strategy", "roles")
    if options["system"] is not None:
        changes["system"] = read_text_or_file(options["system"])
    name = options["consortium"]
    if not name and not options["models"]:
        name = _require_classic()
    if name:
        config = load_config(name).changed(**changes)
    else:
        strategy = changes.get("strategy", "default")
        if "arbiter" not in changes:
            changes["arbiter"] = default_arbiter(strategy, changes["members"])
        config = parse_settings(ConsortiumSettings, changes)
    check_unused_options(options, config.strategy)
    each = {key: options[key] for key in of_each if options[key] is not None}

    def with_settings(one: MemberSpec) -> MemberSpec:
        return one.model_copy(update={**each, **one.own_settings})

    found = config.changed(
        members=list(map(with_settings, config.members)),
        arbiter=config.arbiter and with_settings(config.arbiter),
        fallback=config.fallback and with_settings(config.fallback),
    )
    return found, name


def _require_classic() -> str:
    """Return the name of the default preset, whose models and keys must be there."""
    for one in read_preset("classic").agents:
        try:
            LLM(one.model).check()
        except UserError as error:
            raise UserError(
                "no models are given: store a key (llm keys set openai) and name them (-m gpt-4o), "
                "or take those of this machine (--consortium local); the default needs llm-"
                f"consortium's four models, and {error}"
            ) from None
    return "classic"


FILE_NAME_PATTERN = re.compile(r"[\w.~/\\-]*\.(?:txt|md|prompt|yaml|json)")
"""Matches words that must be meant as a file name."""


def read_text_or_file(given: str) -> str | None:
    """Return a text, or the content of the file of this name; `None` if it is blank."""
    try:
        is_file = "\n" not in given and len(given) < 1024 and os.path.isfile(given)
        text = Path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, ValueError) as error:
        raise UserError(f"--system {given}: the file cannot be read: {error}") from None
    if not is_file and FILE_NAME_PATTERN.fullmatch(given):
        raise UserError(
            f"--system {given}: no such file; a prompt given as text needs several words"
        )
    return text.strip() or None


# Questions


@click.command(context_settings=CONTEXT)
@click.argument("prompt", required=False)
@config_options
@click.option(
    "--stdin/--no-stdin", default=True, help="Append standard input to the prompt; default yes."
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the result there, as JSON.")
@click.option("--raw", is_flag=True, help="Also show the replies of all members and the arbiter.")
@json_option
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@click.option("--dry-run", is_flag=True, help="Show the planned calls without making any.")
@click.option("--trace", type=click.Path(path_type=Path), help="Log every call there, as JSON.")
@click.option("--no-log", is_flag=True, help="Do not record the run.")
@location_options
@click.pass_context
def run(ctx: click.Context, prompt: str | None, **options: Any) -> None:
    """Ask a consortium and show its answer."""
    escape_unencodable()  # llm starts this command without our entry
    warnings = ctx.with_resource(WarningCollector())
    quiet, dry = options["quiet"], options["dry_run"]
    output = options["output"] and options["output"].expanduser()
    for key in ("output", "raw", "as_json", "trace") if dry else ():
        if options[key]:
            raise UserError(f"--{key[-4:]} has no effect with --dry-run; leave one out", 2)
    if options["raw"] and options["as_json"]:
        raise UserError("--raw has no effect with --json, which includes everything", 2)
    text = None if dry and not prompt else read_question(prompt, options["stdin"])
    if output and (output.is_dir() or not os.access(output.absolute().parent, os.W_OK)):
        raise UserError(f"--output {output}: cannot be written; choose another path")
    local = {key: options[key] for key in ("base", "pool", "device") if options[key]}
    members = Roster(Providers.load(options["providers"]), cache=None, **local)
    config, name = resolve_config(options, members, ("timeout",))
    request = {key: options[key] for key in ("temperature", "max_tokens", "seed")}
    made = Orchestrator(config, name, members, raw=True, log=not options["no_log"], **request)
    consortium = made.consortium
    origin = f"consortium {name}" if name else "as the options say"
    notes = [] if quiet else [f"{origin}: {config}"]
    notes += [f"warning: {one}" for one in (*warnings.pop_messages(), *list_doubts(config))]
    print_lines(notes, err=True)
    if dry or text is None:
        print_lines([consortium.plan_calls().words])
        return
    consortium.check()
    if not quiet and any(one.model.startswith("local/") for one in config.agents):
        print_lines(["local models are loaded at the first request"], err=True)
    if options["trace"]:
        consortium.trace = Trace(options["trace"], {"consortium": config.to_dict()})
    try:
        with CallProgress(lambda event: format_event(consortium, event), quiet) as progress:
            result = made.orchestrate(text, progress)
    except QuestionInterrupted as stopped:
        if output:
            write_json(output, stopped.found)
        raise
    finally:
        told = dict.fromkeys(warnings.pop_messages())
        print_lines([f"warning: {one}" for one in told], err=True)
    if options["as_json"]:
        print_json(result)
    else:
        print_lines([result["synthesis"]["synthesis"]])
    if options["raw"]:
        print_lines([*summarize_result(result), *format_transcript(result)])
    elif not quiet:
        print_lines(summarize_result(result), err=True)
    if output:
        write_json(output, result)


def read_question(prompt: str | None, stdin: bool) -> str:
    """Return the prompt, followed by standard input; one of them must have text."""
    piped = "" if not stdin or sys.stdin is None or is_tty(sys.stdin) else sys.stdin.read()
    text = "\n\n".join(part.strip() for part in (prompt, piped) if part and part.strip())
    if not text:
        raise UserError('the prompt is empty; give one, as in llm consortium "Why?"', 2)
    return text


def list_doubts(config: ConsortiumSettings) -> Iterator[str]:
    """Yield warnings about settings that may degrade answers."""
    names = [one.model for one in config.members]
    ties_only = config.strategy == "vote"  # it judges ties only
    if config.arbiter and config.arbiter.model in names and len(names) > 1 and not ties_only:
        yield f"{config.arbiter.model} is both arbiter and member: models prefer their own"
    if sum(one.count for one in config.members) == 1:
        yield f"{names[0]} is the only member: there is nothing to compare"


def summarize_result(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the confidence and usage of an answer, and its analysis and dissent."""
    synthesis, meta = result["synthesis"], result["metadata"]
    tokens = f"{meta['prompt_tokens']} + {meta['completion_tokens']} tokens"
    rounds = pluralize(meta["iteration_count"], "iteration")
    if meta["best_iteration"] != meta["iteration_count"]:
        rounds += f", best: iteration {meta['best_iteration']}"
    yield (
        f"confidence {format_confidence(synthesis['confidence'])} after {rounds} "
        f"({meta['stopped']}); {pluralize(meta['calls'], 'call')}, {tokens}, "
        f"{meta['seconds']:.1f} s, {format_cost(meta['cost'], meta['unpriced'])}"
    )
    for key in ("analysis", "dissent"):
        if synthesis[key]:
            yield f"{key}: {synthesis[key]}"


def format_confidence(confidence: float | None) -> str:
    """Format a confidence."""
    return "unknown" if confidence is None else f"{confidence:.2f}"


def format_transcript(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the replies of all members and the arbiter, by iteration."""
    for one in result["iterations"]:
        place = f"--- iteration {one['iteration']}"
        for response in one["model_responses"]:
            outcome = "failed"
            if "error" not in response:
                outcome = f"confidence {format_confidence(response['confidence'])}"
            yield from ("", f"{place}: {response['model']} #{response['instance']}, {outcome}")
            yield response.get("error") or response["response"]
        if reply := (one["synthesis"] or {}).get("raw_arbiter_response"):
            yield from ("", f"{place}: arbiter {result['metadata']['arbiter']}", reply)


# Saved consortia


@click.command(context_settings=CONTEXT)
@click.argument("name")
@config_options
def save(name: str, **options: Any) -> None:
    """Save a consortium as a model: llm -m NAME; an existing one of this name is replaced."""
    if not options["consortium"] and not options["models"]:
        raise UserError("save needs members: give -m, or start from --consortium", 2)
    if not options["consortium"] and not options["arbiter"] and options["strategy"] != "vote":
        raise UserError("save needs --arbiter MODEL; only --strategy vote works without", 2)
    if find_spec("llm"):
        import llm

        found = llm.get_model_aliases().get(name)
        if found is not None and not type(found).__module__.startswith("swarm.consortium."):
            raise UserError(f"{name}: llm already has a model of this name; choose another one")
    store, members = ConsortiumStore(), Roster(cache=None)
    config, _ = resolve_config(options, members, ("temperature", "max_tokens", "timeout"))
    _check_no_cycle(name, config, store)
    build_consortium(config, members.member)
    verb = "replaced" if store.save(name, config) else "saved"
    print_lines([f"warning: {one}" for one in list_doubts(config)], err=True)
    click.echo(f"{verb} {name}: use it as llm -m {name}, or as the model consortium/{name}")


def _check_no_cycle(name: str, config: ConsortiumSettings, store: ConsortiumStore) -> None:
    """Check that a consortium does not contain itself, directly or indirectly."""
    stack, visited = [(name, config)], set()
    while stack:
        inside, one = stack.pop()
        for member in one.agents:
            saved = member.model.removeprefix("llm/").removeprefix("consortium/")
            if saved == name:
                by = "" if inside == name else f", by {inside}"
                raise UserError(f"{name} would contain itself{by}; choose another name")
            if saved in store.list_names() and saved not in visited:
                visited.add(saved)
                stack.append((saved, store.get(saved)))


@click.command("list", context_settings=CONTEXT)
@json_option
def list_saved(as_json: bool) -> None:
    """List the saved consortia and the presets."""
    store = ConsortiumStore()
    configs: dict[str, ConsortiumSettings] = {}
    for name in store.list_names():
        try:
            configs[name] = store.get(name)
        except UserError as error:
            print_lines([f"warning: {error}"], err=True)
    if as_json:
        print_json([{"name": name, **config.to_dict()} for name, config in configs.items()])
        return
    print_lines(f"{name}: {config}" for name, config in configs.items())
    if not configs:
        click.echo(
            "no consortium is saved; save one with: llm consortium save NAME -m MODEL ... "
            "--arbiter MODEL"
        )
    print_lines(f"preset {name}: {read_preset(name)}" for name in preset_names("consortium"))


@click.command(context_settings=CONTEXT)
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show the settings of a saved consortium."""
    config = load_config(name)
    if as_json:
        print_json({"name": name, **config.to_dict()})
        return
    print_lines([name, *(f"  member: {member}" for member in config.members)])
    shown = {key: value for key, value in config if value is not None and key != "members"}
    print_lines(f"  {key}: {value}" for key, value in shown.items())


@click.command(context_settings=CONTEXT)
@click.argument("name")
def remove(name: str) -> None:
    """Remove a saved consortium; its runs remain."""
    ConsortiumStore().remove(name)
    click.echo(f"removed {name}")


@click.command(context_settings=CONTEXT)
def strategies() -> None:
    """List the strategies for combining answers."""
    print_table(("strategy", "the answer"), list(STRATEGIES.items()))
    click.echo(f"roles by name: {', '.join(ROLES)}; or any text")


# Earlier runs


@click.command(context_settings=CONTEXT)
@click.option("--limit", type=SettingType(Positive), default=10, help="Maximum number; default 10.")
@click.option("--since", metavar="DATE", help="Since 2026-01-31, optionally with a time.")
@click.option("--name", help="Runs of this consortium.")
@json_option
def runs(limit: int, since: str | None, name: str | None, as_json: bool) -> None:
    """List the last runs, newest first."""
    found = RunLog().list(limit, since, name)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            row["id"][:12],
            row["time"][:16].replace("T", " "),
            row["name"],
            row["strategy"],
            row["iterations"] if row["status"] == "done" else row["status"],
            row["confidence"] if row["confidence"] is None else f"{row['confidence']:.3g}",
            " ".join((row["prompt"] or "").split()),
        )
        for row in found
    ]
    heads = ("run", "when (UTC)", "consortium", "strategy", "iterations", "confidence", "prompt")
    print_table(heads, rows)
    if not found:
        click.echo("no run is recorded")


@click.command("run-info", context_settings=CONTEXT)
@click.argument("run")
@click.option("--json", "--json-output", "as_json", is_flag=True, help="Show JSON.")
def run_info(run: str, as_json: bool) -> None:
    """Show the members' answers in one run.

    RUN is its id, or the beginning of it.
    """
    if not run.strip():
        raise UserError("run-info needs the id of a run or a prefix of it; `runs` lists them", 2)
    found = RunLog().get(run)
    if as_json:
        print_json(found)
    else:
        print_lines(_format_run(found))


def _format_run(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a run."""
    yield f"run {run['id']} of {run['time'][:19]}: {run['name'] or 'no name'}, {run['strategy']}"
    yield f"prompt: {run['prompt']}"
    if not run["error"]:
        yield from summarize_result(run["result"])
        yield from format_transcript(run["result"])
        yield from ("", f"--- answer of iteration {run['best']}", run["answer"])
        return
    yield f"failed: {run['error']}"
    if "iterations" in run["result"]:
        yield from format_transcript(run["result"])


BY_NAME: dict[str, click.Command] = {
    str(one.name): one for one in (run, save, list_saved, show, remove, runs, run_info, strategies)
}

EXAMPLES = {
    "run": '"Why is the sky blue?" -m gpt-4o:2 -m qwen2:7b --arbiter gpt-4o',
    "save": "council -m gpt-4o -m qwen2:7b --arbiter gpt-4o",
    "show": "council",
    "remove": "council",
    "runs": "--since 2026-01-31",
    "run-info": "3",
}
"""Arguments of each command's example."""
