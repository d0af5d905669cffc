"""Command line of the mixture of agents; everything is checked before a model is loaded."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from swarm._util.files import conf_folder
from swarm._util.options import CONTEXT, SettingType, location_options, settings_options
from swarm._util.settings import Count, Number, Positive, PositiveNumber, Text, parse_settings
from swarm._util.terminal import WarningCollector, is_tty
from swarm.errors import UserError
from swarm.moa.chat import ChatOptions, ChatSession, print_notes, run_chat
from swarm.models.providers import Provider, Providers, parse_counted_names
from swarm.models.trace import Trace
from swarm.multi_agent.moa import (
    MixtureOfAgents,
    MixtureOptions,
    MixtureSettings,
    build_mixture,
    read_preset,
)
from swarm.multi_agent.presets import preset_names
from swarm.multi_agent.types import AgentSettings

TEMPERATURE, MAX_TOKENS = 0.7, 512

DIRECT_OPTIONS = ("strategy", "prompt", "quorum", "seed", "window", "reserve")
"""Options that are settings of the mixture of the same name."""

LOCAL_OPTIONS, REMOTE_OPTIONS = ("base", "pool", "device"), ("num_proc", "providers")
PROPOSER_OPTIONS = ("reference_models", "quorum", "prompt")

EPILOG = """\b
python -m swarm.moa                                  an interactive chat
python -m swarm.moa "Why is the sky blue?"           one answer
echo "Why is the sky blue?" | python -m swarm.moa    the same; "-" also reads standard input
python -m swarm.moa --reference_models qwen2:7b:3,gemma2 --aggregator qwen2:7b
python -m swarm.moa --preset local --rounds 2 "Sort 5 2 9."
python -m swarm.moa --json --quiet "Sort 5 2 9." | jq .answer

MODEL is PROVIDER/NAME, local/rooms (rooms is an expert in initial_experts), moa/lite (a preset) or
another name of docs/models.md; --list shows those available. A NAME alone goes to the server in
OPENAI_BASE_URL, or else to OpenAI or Together if their keys are set. Names of options may be
written with underscores. The answer goes to standard output, all other text to standard error.
"""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("question", required=False)
@click.option(
    "--preset",
    type=SettingType(Text),
    metavar="NAME|FILE",
    help="A mixture of conf/moa, or a yaml file of one; by default together where TOGETHER_API_KEY "
    "is set, else local.",
)
@click.option(
    *("--aggregator", "--model"),
    type=SettingType(Text),
    metavar="MODEL",
    help="Writes the final answer; overrides the preset's.",
)
@click.option(
    "--reference-models",
    multiple=True,
    metavar="A,B:3",
    help="Proposers; replace all of the preset; NAME:3 requests three samples; repeatable.",
)
@click.option(
    "--fallback",
    type=SettingType(Text),
    metavar="MODEL",
    help="Writes the answer if the aggregator fails.",
)
@click.option("--rounds", "--round", type=SettingType(Count), help="Layers of proposers.")
@click.option("--layers", type=SettingType(Positive), help="Rounds + 1, with the aggregator's.")
@click.option("--prompt", type=click.Choice(["safe", "paper"]), help="Form of answers in a prompt.")
@settings_options(MixtureOptions, leave_out=("layers", "prompt"))
@click.option(
    "--temperature",
    type=SettingType(Number),
    help=f"Sampling temperature; default {TEMPERATURE}, or the preset's.",
)
@click.option(
    "--max-tokens",
    type=SettingType(Positive),
    help=f"Maximum tokens of an answer; default {MAX_TOKENS}, or the preset's.",
)
@click.option("--system", metavar="TEXT", help="System prompt of all models.")
@click.option("--timeout", type=SettingType(PositiveNumber), help="Seconds of an answer.")
@click.option("--num-proc", type=SettingType(Positive), help="Maximum of concurrent requests.")
@location_options
@click.option("--no-cache", is_flag=True, help="Do not use the answer cache.")
@click.option("--trace", type=click.Path(path_type=Path), help="Log every call there, as JSON.")
@click.option(
    "--multi-turn/--no-multi-turn",
    default=None,
    help="Include the turns before in a chat's requests; default yes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer.")
@click.option("--no-stream", is_flag=True, help="Show the answer only when it is complete.")
@click.option("--quiet", is_flag=True, help="No progress; warnings and errors are still shown.")
@click.option("--list", "listed", is_flag=True, help="List presets, endpoints and local models.")
@click.pass_context
def moa(ctx: click.Context, question: str | None, **options: Any) -> int:
    """Query several models, and let one of them synthesize their answers (mixture of agents)."""
    warnings = ctx.with_resource(WarningCollector())
    if options["listed"]:
        for line in format_available_models(options):
            click.echo(line)
        return 0
    if options["as_json"] and options["no_stream"]:
        raise UserError("--no-stream has no effect with --json; leave it out", 2)
    asked = _read_question(question, options)
    sources = map(ctx.get_parameter_source, ctx.params)
    if asked == "" and ParameterSource.COMMANDLINE not in sources:
        raise click.exceptions.NoArgsIsHelpError(ctx)
    if asked == "":
        raise UserError('the question is empty; give one, as in python -m swarm.moa "Why?"', 2)
    settings, origin = build_settings(options)
    request: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    request |= _given(options, ("temperature", "max_tokens", "system", "seed"))
    from swarm.registry.registry import Roster  # imports numpy, which takes a third of a second

    quiet = options["quiet"]
    cache: Literal["default"] | None = None if options["no_cache"] else "default"
    roster = Roster(load_providers(options), cache=cache, **_given(options, LOCAL_OPTIONS))
    mixture = build_mixture(settings, roster.model)
    print_notes([] if quiet else [f"{origin}: {summarize_mixture(mixture)}"])
    mixture.check()
    if options["trace"]:
        header = {"preset": settings.model_dump(mode="json"), "request": request}
        mixture.trace = Trace(options["trace"], header)
    if any(_is_local(str(agent.model)) for agent in settings.agents):
        from swarm.engine.base_model import choose_device

        device = choose_device(options["device"])
        note = f"loading the local models on {device}; the first time downloads the base"
        print_notes([] if quiet else [note])
        mixture.open(device)
    chat_options = ChatOptions(
        **request,
        multi_turn=options["multi_turn"] is not False,
        json=options["as_json"],
        streamed=not options["no_stream"],
        quiet=quiet,
    )
    session = ChatSession(mixture, chat_options, warnings)
    if asked is None:
        return run_chat(session)
    session.answer_question(asked)
    return 0


def _given(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return those of these options that are given."""
    return {name: options[name] for name in names if options[name] not in (None, ())}


def _is_local(model: str) -> bool:
    """Return whether a name may involve a local model; nested mixtures are assumed to."""
    return model.startswith(("local/", "moa/"))


def _read_question(question: str | None, options: Mapping[str, Any]) -> str | None:
    """Return the single question, which may be empty; `None` for a chat."""
    if question == "-" or (question is None and not is_tty(sys.stdin)):
        question = sys.stdin.read() if sys.stdin else ""
    if question is not None and options["multi_turn"] is not None:
        raise UserError("--multi-turn has no effect with a single question, only in a chat", 2)
    return question and question.strip()


def build_settings(options: Mapping[str, Any]) -> tuple[MixtureSettings, str]:
    """Return the settings of the command, and where they come from."""
    start, origin = _find_start(options)
    given = {**(dict(start) if start else {}), **_given(options, (*DIRECT_OPTIONS, "fallback"))}
    if pairs := parse_counted_names(options["reference_models"]):
        given["proposers"] = [{"model": name, "count": count} for name, count in pairs]
    if model := options["aggregator"]:
        before = start.aggregator.model_dump() if start else {}
        given["aggregator"] = {**before, "model": model}
    layers, rounds = options["layers"], options["rounds"]
    if layers is not None and rounds is not None and layers != rounds + 1:
        raise UserError("--layers and --rounds contradict each other: layers are rounds + 1", 2)
    if layers is not None or rounds is not None:
        given["layers"] = layers or rounds + 1
    found = parse_settings(MixtureSettings, given)
    if model is None and any(agent.model is None for agent in found.agents):
        raise UserError("the preset names no model; give one with --model NAME", 2)
    each = _given(options, ("temperature", "max_tokens", "timeout"))

    def complete(agent: AgentSettings) -> AgentSettings:
        return agent.model_copy(update={"model": agent.model or model, **each})

    changed: dict[str, Any] = {
        "proposers": tuple(map(complete, found.proposers)),
        "aggregator": complete(found.aggregator),
        "fallback": found.fallback and complete(found.fallback),
    }
    found = found.model_copy(update=changed)
    _check_unused_options(options, found)
    return found, origin


def _find_start(options: Mapping[str, Any]) -> tuple[MixtureSettings | None, str]:
    """Return the mixture that the options change, and its name; `None` if they are complete."""
    if options["preset"]:
        return read_preset(options["preset"]), f"preset {options['preset']}"
    if options["aggregator"] and options["reference_models"]:
        return None, "no preset"
    key = bool(os.environ.get("TOGETHER_API_KEY", "").strip())
    names = [name for name, _ in parse_counted_names(options["reference_models"])]
    if (remote := [name for name in names if not _is_local(name)]) and not key:
        raise UserError(
            f"--aggregator: name the model that synthesizes the answers of {', '.join(remote)}; "
            "the default without a key (preset local) is a model of 135 million parameters",
            2,
        )
    name = "together" if key else "local"
    return read_preset(name), f"preset {name}, as TOGETHER_API_KEY is {'' if key else 'not '}set"


def _check_unused_options(options: Mapping[str, Any], mixture: MixtureSettings) -> None:
    """Check that all options affect this mixture."""
    names = [str(agent.model) for agent in mixture.agents]
    remote = any(not name.startswith(("local/", "function/", "llm/")) for name in names)
    useless = {
        **dict.fromkeys(() if any(map(_is_local, names)) else LOCAL_OPTIONS, "no model is local"),
        **dict.fromkeys(() if remote else REMOTE_OPTIONS, "all models are local"),
        **dict.fromkeys(PROPOSER_OPTIONS if mixture.layers == 1 else (), "there are no proposers"),
    }
    for name in _given(options, list(useless)):
        flag = name.replace("_", "-")
        raise UserError(f"--{flag} has no effect: {useless[name]}; leave it out", 2)


def load_providers(options: Mapping[str, Any]) -> Providers:
    """Load the endpoints, with the concurrency limit of the command line if given."""
    found = Providers.load(options["providers"])
    number = options["num_proc"]
    if not number:
        return found
    limited = {
        name: one.model_copy(update={"limits": replace(one.limits, concurrency=number)})
        for name, one in found.items()
    }
    return Providers(limited)


def format_available_models(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines that list the available presets, endpoints and local models."""
    from swarm.registry.local_models import LocalModels

    yield "presets (--preset NAME, or the path of a yaml file):"
    for name in preset_names("moa"):
        first = (conf_folder() / "moa" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")[0]
        yield f"  {name:<12}{first.lstrip('# ')}"
    yield "endpoints (PROVIDER/MODEL; see their documentation for model names):"
    for name, provider in load_providers(options).items():
        yield f"  {name:<12}{format_endpoint(provider)}"
    yield "local models:"
    local = LocalModels(**_given(options, ("base", "pool")))
    yield from (f"  local/{name}" for name in local.list_names())
    yield "  local/FOLDER, llm/NAME, function/MODULE:NAME, moa/PRESET"


def format_endpoint(provider: Provider) -> str:
    """Return an endpoint's URL and whether its key is set."""
    key = provider.api_key_env
    key_set = key and os.environ.get(key, "").strip()
    key_text = f"{key} is {'' if key_set else 'not '}set" if key else "no key needed"
    overridden = f"the URL in {provider.base_url_env}"
    return f"{overridden if provider.is_url_overridden else provider.base_url}, {key_text}"


STRATEGY_PHRASES = {
    "aggregate": "answers",
    "rank": "chooses one",
    "sequential": "synthesizes, a few proposals at a time",
}


def summarize_mixture(mixture: MixtureOfAgents) -> str:
    """Summarize the mixture in one line."""
    options, proposers = mixture.options, mixture.proposers
    if options.layers == 1:
        return f"{mixture.aggregator.name} answers alone"
    names = ", ".join(
        one.name if one.count == 1 else f"{one.count} x {one.name}" for one in proposers
    )
    rounds = f" in {options.layers - 1} rounds" if options.layers > 2 else ""
    verb = "proposes" if sum(one.count for one in proposers) == 1 else "propose"
    last = f"{mixture.aggregator.name} {STRATEGY_PHRASES[options.strategy]}"
    return f"{names} {verb}{rounds}, {last}; {mixture.calls} calls per question"
