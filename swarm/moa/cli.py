"""Command line of the mixture of agents; everything is checked before a model is loaded."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from swarm._util.files import conf_folder
from swarm._util.options import CONTEXT, SettingType, settings_options
from swarm._util.settings import Count, Number, Positive, PositiveNumber, Text, parse_settings
from swarm._util.terminal import WarningCollector, escape_control_chars, is_tty
from swarm.errors import UserError
from swarm.moa.chat import ChatOptions, ChatSession, run_chat
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

TEMPERATURE, MAX_TOKENS = 0.7, 512

DIRECT_OPTIONS = ("strategy", "prompt", "quorum", "seed", "context", "window", "reserve")
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
@click.option("--providers", type=click.Path(path_type=Path), help="Yaml file of own endpoints.")
@click.option(
    "--base",
    type=SettingType(Text),
    help="Base model of local/ names: an option of conf/model or a folder.",
)
@click.option("--pool", type=SettingType(Text), help="Folder of the experts of local/ names.")
@click.option("--device", type=SettingType(Text), help="Device of local models: cpu, cuda, cuda:1.")
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
    warnings = WarningCollector()
    logging.getLogger("swarm").addHandler(warnings)
    if options["listed"]:
        for line in format_available_models(options):
            click.echo(line)
        return 0
    if options["as_json"] and options["no_stream"]:
        raise UserError("--no-stream has no effect with --json; leave it out", 2)
    asked = _read_question(question, options)
    settings, origin = build_settings(options)
    request: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    for key in ("temperature", "max_tokens", "system", "seed"):
        if options[key] is not None:
            request[key] = options[key]
    from swarm.registry.registry import Roster  # imports numpy, which takes a third of a second

    quiet = options["quiet"]
    cache: Literal["default"] | None = None if options["no_cache"] else "default"
    roster = Roster(load_providers(options), cache=cache, **_given(options, LOCAL_OPTIONS))
    mixture = build_mixture(settings, roster.model)
    if not quiet:
        _print_note(f"{origin}: {summarize_mixture(mixture)}")
    mixture.check()
    if options["trace"]:
        header = {"preset": settings.model_dump(mode="json"), "request": request}
        mixture.trace = Trace(options["trace"], header)
    if any(_is_local(str(agent.model)) for agent in settings.agents):
        from swarm.engine.base_model import choose_device

        device = choose_device(options["device"])
        if not quiet:
            _print_note(f"loading the local models on {device}; the first time downloads the base")
        mixture.open(device)
    session = ChatSession(
        mixture,
        ChatOptions(
            **request,
            multi_turn=options["multi_turn"] is not False,
            json=options["as_json"],
            streamed=not options["no_stream"],
            quiet=quiet,
        ),
        warnings,
    )
    if asked is None:
        return run_chat(session)
    session.answer_question(asked)
    return 0


def _print_note(text: str) -> None:
    print(escape_control_chars(text), file=sys.stderr, flush=True)


def _given(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return those of these options that are given."""
    return {name: options[name] for name in names if options[name] not in (None, ())}


def _is_local(model: str) -> bool:
    """Return whether a name may involve a local model; nested mixtures are assumed to."""
    return model.startswith(("local/", "moa/"))


def _read_question(question: str | None, options: Mapping[str, Any]) -> str | None:
    """Return the single question; `None` for a chat.

    Raises:
        UserError: It is empty, or an option is for a chat only.
    """
    if question == "-" or (question is None and not is_tty(sys.stdin)):
        question = sys.stdin.read() if sys.stdin else ""
    if question is None:
        return None
    if not question.strip():
        raise UserError('the question is empty; give one, as in python -m swarm.moa "Why?"', 2)
    if options["multi_turn"] is not None:
        raise UserError("--multi-turn has no effect with a single question, only in a chat", 2)
    return question.strip()


def build_settings(options: Mapping[str, Any]) -> tuple[MixtureSettings, str]:
    """Return the settings of the command, and where they come from.

    Raises:
        UserError: An option has no effect, or the preset does not exist.
    """
    start, origin = _find_start(options)
    given = {**(dict(start) if start else {}), **_given(options, DIRECT_OPTIONS)}
    if pairs := parse_counted_names(options["reference_models"]):
        given["proposers"] = [{"model": name, "count": count} for name, count in pairs]
    if model := options["aggregator"]:
        before = start.aggregator.model_dump() if start else {}
        given["aggregator"] = {**before, "model": model}
    if options["fallback"]:
        given["fallback"] = options["fallback"]
    layers, rounds = options["layers"], options["rounds"]
    if layers is not None and rounds is not None and layers != rounds + 1:
        raise UserError("--layers and --rounds contradict each other: layers are rounds + 1", 2)
    if layers is not None or rounds is not None:
        given["layers"] = layers or rounds + 1
    found = parse_settings(MixtureSettings, given)
    if model is None and any(agent.model is None for agent in found.agents):
        raise UserError("the preset names no model; give one with --model NAME", 2)
    each = _given(options, ("temperature", "max_tokens", "timeout"))
    changed = {}
    for key in ("aggregator", "fallback"):
        agent = getattr(found, key)
        changed[key] = agent and agent.model_copy(update={"model": agent.model or model, **each})
    changed["proposers"] = tuple(
        agent.model_copy(update={"model": agent.model or model, **each})
        for agent in found.proposers
    )
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
    """Check that all options affect this mixture.

    Raises:
        UserError: An option has no effect.
    """
    names = [str(agent.model) for agent in mixture.agents]
    remote = any(not name.startswith(("local/", "function/", "llm/")) for name in names)
    useless = {
        **dict.fromkeys(() if any(map(_is_local, names)) else LOCAL_OPTIONS, "no model is local"),
        **dict.fromkeys(() if remote else REMOTE_OPTIONS, "all models are local"),
        **dict.fromkeys(PROPOSER_OPTIONS if mixture.layers == 1 else (), "there are no proposers"),
    }
    for name, reason in useless.items():
        if options[name] not in (None, ()):
            raise UserError(f"--{name.replace('_', '-')} has no effect: {reason}; leave it out", 2)


def load_providers(options: Mapping[str, Any]) -> Providers:
    """Load the endpoints, with the concurrency limit of the command line if given.

    Raises:
        UserError: The file is invalid.
    """
    found = Providers.load(options["providers"])
    if not (number := options["num_proc"]):
        return found
    return Providers(
        {
            name: one.model_copy(update={"limits": replace(one.limits, concurrency=number)})
            for name, one in found.items()
        }
    )


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
    if mixture.options.layers == 1:
        return f"{mixture.aggregator.name} answers alone"
    names = ", ".join(
        slot.name if slot.count == 1 else f"{slot.count} x {slot.name}"
        for slot in mixture.proposers
    )
    rounds = f" in {mixture.options.layers - 1} rounds" if mixture.options.layers > 2 else ""
    one = len(mixture.proposers) == 1 and mixture.proposers[0].count == 1
    last = f"{mixture.aggregator.name} {STRATEGY_PHRASES[mixture.options.strategy]}"
    return f"{names} propose{'s' * one}{rounds}, {last}; {mixture.calls} calls per question"
