"""Commands of `llm consortium`: questions, saved consortia, and earlier runs."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm._util.files import write_json
from swarm._util.options import CONTEXT, SettingType, settings_options
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
    ConsortiumQuestion,
    MemberRegistry,
    QuestionInterrupted,
    answer_question,
    check_unused_options,
    default_arbiter,
)
from swarm.consortium.run_log import RunLog
from swarm.errors import UserError
from swarm.models.base import Message
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
from swarm.multi_agent.consortium.store import ConsortiumStore, load_config
from swarm.multi_agent.presets import preset_names
from swarm.multi_agent.progress import CallProgress

ClickCommand = Callable[..., Any]

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

# Options


def combine_options(*made: ClickCommand) -> Callable[[ClickCommand], ClickCommand]:
    """Return a decorator that adds options in this order."""

    def decorate(function: ClickCommand) -> ClickCommand:
        for one in reversed(made):
            function = one(function)
        return function

    return decorate


config_options = combine_options(
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

location_options = combine_options(
    click.option("--base", help="Base model of local/ names: an option of conf/model or a folder."),
    click.option("--pool", metavar="FOLDER", help="Folder of the experts of local/ names."),
    click.option("--device", help="Device of local models: cpu, cuda, cuda:1."),
    click.option(
        "--providers", type=click.Path(path_type=Path), help="Yaml file of custom endpoints."
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Show JSON.")


class ResolvedConfig(NamedTuple):
    """Configuration resulting from the options.

    Attributes:
        config: The settings.
        name: Name of the saved consortium or preset; `None` if built from options alone.
        origin: Source of the settings, for messages.
    """

    config: ConsortiumSettings
    name: str | None
    origin: str


def build_registry(given: Mapping[str, Any]) -> MemberRegistry:
    """Build the registry of models.

    Raises:
        UserError: The file of providers is invalid.
    """
    local = {key: given[key] for key in ("base", "pool", "device") if given.get(key)}
    providers = Providers.load(given["providers"]) if given.get("providers") else None
    return MemberRegistry(providers, **local)


def resolve_config(
    options: Mapping[str, Any], members: MemberRegistry, of_each: Sequence[str]
) -> ResolvedConfig:
    """Resolve the options: a saved consortium or a preset, overridden by the options.

    Args:
        options: Options by name.
        members: Registry of model names.
        of_each: Options that become settings of each model without its own.

    Raises:
        UserError: A value is unknown or invalid.
    """
    if options["count"] and not options["models"]:
        raise UserError("--count has no effect without -m; name the members", 2)
    changes = {
        key: options[key]
        for key in ConsortiumOptions.model_fields
        if options[key] not in (None, ())
    }
    if options["models"]:
        count = options["count"] or 1
        changes["members"] = [
            parse_member(m, members.is_known_name, count) for m in options["models"]
        ]
    for key in ("arbiter", "fallback"):
        if options[key]:
            changes[key] = parse_member(options[key], members.is_known_name)
            if changes[key].count > 1:
                raise UserError(
                    f"--{key} {options[key]}: cannot have several samples; leave the number out", 2
                )
    if options["roles"]:
        changes.setdefault("strategy", "roles")
    if options["system"] is not None:
        changes["system"] = read_text_or_file(options["system"])
    name, start = _find_start(options)
    if start is None and "arbiter" not in changes:
        strategy = changes.get("strategy", "default")
        changes["arbiter"] = default_arbiter(strategy, changes["members"])
    config = start.changed(**changes) if start else parse_settings(ConsortiumSettings, changes)
    check_unused_options(options, config.strategy)
    each = {key: options[key] for key in of_each if options[key] is not None}
    origin = "as the options say" if name is None else f"consortium {name}"
    return ResolvedConfig(_set_for_each(config, each), name, origin)


def _find_start(options: Mapping[str, Any]) -> tuple[str | None, ConsortiumSettings | None]:
    """Return the name and the settings that the options change; `None` if they are complete.

    Raises:
        UserError: They name no models, and a default model or its key is missing.
    """
    if name := options["consortium"]:
        return name, load_config(name)
    if options["models"]:
        return None, None
    classic = read_preset("classic")
    for one in classic.agents:
        try:
            LLM(one.model).check()
        except UserError as error:
            raise UserError(
                "no models are given: store a key (llm keys set openai) and name them (-m gpt-4o), "
                "or take those of this machine (--consortium local); the default needs llm-"
                f"consortium's four models, and {error}"
            ) from None
    return "classic", classic


def _set_for_each(config: ConsortiumSettings, each: Mapping[str, Any]) -> ConsortiumSettings:
    def with_settings(one: MemberSpec | None) -> MemberSpec | None:
        return one and one.model_copy(update={**each, **one.own_settings})

    found = {key: with_settings(getattr(config, key)) for key in ("arbiter", "fallback")}
    return config.changed(members=[with_settings(one) for one in config.members], **found)


FILE_NAME_PATTERN = re.compile(r"[\w.~/\\-]*\.(?:txt|md|prompt|yaml|json)")
"""Matches words that must be meant as a file name."""


def read_text_or_file(given: str) -> str | None:
    """Return a text, or the content of the file of this name; blank text is `None`.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        is_file = "\n" not in given and len(given) < 1024 and os.path.isfile(given)
        text = Path(given).read_text(encoding="utf-8") if is_file else given
        if not is_file and FILE_NAME_PATTERN.fullmatch(given):
            raise UserError(
                f"--system {given}: no such file; a prompt given as text needs several words"
            )
    except (OSError, ValueError) as error:
        raise UserError(f"--system {given}: the file cannot be read: {error}") from None
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
    for key in ("output", "raw", "as_json", "trace") if dry else ():
        if options[key]:
            raise UserError(f"--{key[-4:]} has no effect with --dry-run; leave one out", 2)
    if options["raw"] and options["as_json"]:
        raise UserError("--raw has no effect with --json, which includes everything", 2)
    text = None if dry and not prompt else read_question(prompt, options["stdin"])
    _check_writable(options["output"])
    members = build_registry(options)
    config, name, origin = resolve_config(options, members, ("timeout",))
    consortium = build_consortium(config, members.model)
    print_notes([] if quiet else [f"{origin}: {config}"])
    print_notes(f"warning: {one}" for one in (*warnings.pop_messages(), *list_doubts(config)))
    if dry or text is None:
        click.echo(escape_control_chars(consortium.plan_calls().words))
        return
    consortium.check()
    if members.uses_local and not quiet:
        print_notes(["local models are loaded at the first request"])
    if options["trace"]:
        consortium.trace = Trace(options["trace"], {"consortium": config.to_dict()})
    request = {key: options[key] for key in ("temperature", "seed") if options[key] is not None}
    request["max_new_tokens"] = options["max_tokens"]
    turns, recorded = (Message("user", text),), not options["no_log"]
    question = ConsortiumQuestion(name, config, consortium, turns, request, recorded)
    answer = answer_question
    if ctx.parent and ctx.parent.parent and recorded:  # a command of llm: also in llm's log
        from swarm.consortium.llm_plugin import run_logged

        answer = run_logged  # type: ignore[assignment]
    try:
        with CallProgress(lambda event: format_event(consortium, event), quiet) as progress:
            result = answer(question, progress)
    except QuestionInterrupted as stopped:
        if options["output"]:
            write_json(options["output"].expanduser(), stopped.found)
        raise
    finally:
        print_notes(f"warning: {one}" for one in dict.fromkeys(warnings.pop_messages()))
    _print_result(result, options)


def print_notes(lines: Any) -> None:
    """Print lines to standard error."""
    for line in lines:
        click.echo(escape_control_chars(line), err=True)


def print_lines(lines: Any) -> None:
    """Print lines to standard output."""
    for line in lines:
        click.echo(escape_control_chars(line))


def read_question(prompt: str | None, stdin: bool) -> str:
    """Return the prompt, followed by standard input.

    Raises:
        UserError: Both are empty.
    """
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


def _check_writable(file: Path | None) -> None:
    """Check that the result can be written, before any call.

    Raises:
        UserError: It cannot.
    """
    if file and (file.is_dir() or not os.access(file.expanduser().absolute().parent, os.W_OK)):
        raise UserError(f"--output {file}: cannot be written; choose another path")


def _print_result(result: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Print the answer to standard output, and write the other requested output."""
    if options["as_json"]:
        click.echo(json.dumps(result, indent=1))
    else:
        print_lines([result["synthesis"]["synthesis"]])
    if options["raw"]:
        print_lines([*summarize_result(result), *format_transcript(result)])
    elif not options["quiet"]:
        print_notes(summarize_result(result))
    if options["output"]:
        write_json(options["output"].expanduser(), result)


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
        for response in one["model_responses"]:
            heading = f"--- iteration {one['iteration']}: {response['model']}"
            outcome = "failed"
            if "error" not in response:
                outcome = f"confidence {format_confidence(response['confidence'])}"
            yield from ("", f"{heading} #{response['instance']}, {outcome}")
            yield response.get("error") or response["response"]
        if reply := (one["synthesis"] or {}).get("raw_arbiter_response"):
            arbiter = result["metadata"]["arbiter"]
            yield from ("", f"--- iteration {one['iteration']}: arbiter {arbiter}", reply)


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
    _check_name_free(name)
    store, members = ConsortiumStore(), MemberRegistry()
    config = resolve_config(options, members, ("temperature", "max_tokens", "timeout")).config
    _check_no_cycle(name, config, store)
    build_consortium(config, members.model)
    verb = "replaced" if store.save(name, config) else "saved"
    print_notes(f"warning: {one}" for one in list_doubts(config))
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
            print_notes([f"warning: {error}"])
    if as_json:
        saved = [{"name": name, **config.to_dict()} for name, config in configs.items()]
        click.echo(json.dumps(saved, indent=1))
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
        click.echo(json.dumps({"name": name, **config.to_dict()}, indent=1))
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
    print_table(("strategy", "the answer"), STRATEGIES.items())
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
        click.echo(json.dumps(found, indent=1))
        return
    print_table(
        ("run", "when (UTC)", "consortium", "strategy", "iterations", "confidence", "prompt"),
        [
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
        ],
    )
    if not found:
        click.echo("no run is recorded")


def print_table(heads: Sequence[str], rows: Any) -> None:
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
        click.echo(json.dumps(found, indent=1))
    else:
        print_lines(_format_run(found))


def _format_run(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a run."""
    yield f"run {run['id']} of {run['time'][:19]}: {run['name'] or 'no name'}, {run['strategy']}"
    yield f"prompt: {run['prompt']}"
    if run["error"]:
        yield f"failed: {run['error']}"
        if "iterations" in run["result"]:
            yield from format_transcript(run["result"])
        return
    yield from summarize_result(run["result"])
    yield from format_transcript(run["result"])
    yield from ("", f"--- answer of iteration {run['best']}", run["answer"])


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
