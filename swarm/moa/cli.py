"""Command line of the mixture of agents: options, effective settings, and the command.

Options are parsed and checked before anything is loaded.
"""

import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from swarm._util.files import conf_folder
from swarm._util.terminal import WarningCollector, escape_control_chars, is_tty, std_streams
from swarm.errors import UserError
from swarm.moa.arguments import MAX_TOKENS, TEMPERATURE
from swarm.moa.chat import ChatOptions, ChatSession, TerminalChat, make_line_reader
from swarm.moa.transcript_format import format_models, summarize_mixture
from swarm.models.providers import Provider, Providers, parse_counted_names
from swarm.models.trace import Replay, Trace
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.presets import build_mixture, preset_names, read_preset
from swarm.registry.local_models import LocalModels

if TYPE_CHECKING:
    from swarm.models.providers import Providers


def format_available_models(providers: Providers, local: LocalModels) -> Iterator[str]:
    """Yield lines that list the available presets, endpoints and local models."""
    yield "presets (--preset NAME, or the path of a yaml file):"
    for name in preset_names():
        first = (conf_folder() / "moa" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")[0]
        yield f"  {name:<12}{first.lstrip('# ')}"
    yield "endpoints (PROVIDER/MODEL; see their documentation for model names):"
    for name, provider in providers.items():
        yield f"  {name:<12}{format_endpoint(provider)}"
    yield "local models:"
    yield from (f"  local/{name}" for name in local.list_names())
    yield "  local/FOLDER, llm/NAME, function/MODULE:NAME, moa/PRESET"


def format_endpoint(provider: Provider) -> str:
    """Return an endpoint's URL and whether its key is set."""
    key = provider.api_key_env
    key_set = key and os.environ.get(key, "").strip()
    key_text = f"{key} is {'' if key_set else 'not '}set" if key else "no key needed"
    location = (
        f"the URL in {provider.base_url_env}" if provider.is_url_overridden else provider.base_url
    )
    return f"{location}, {key_text}"


DIRECT_OPTIONS = ("strategy", "prompt", "quorum", "seed", "context")
"""Options that are preset keys of the same name."""

REQUEST_OPTIONS = ("temperature", "max_tokens", "system", "seed")
"""Options of the request, not of the mixture."""


class MixtureSettings(NamedTuple):
    """Effective settings of a command.

    Attributes:
        mixture: Settings in the form of a preset.
        request_fields: Temperature, max_tokens, system and seed of the requests.
        origin: Source of the mixture, for messages.
    """

    mixture: dict[str, Any]
    request_fields: dict[str, Any]
    origin: str

    @property
    def trace_header(self) -> dict[str, Any]:
        """Header of a trace; a replay starts from it."""
        return {"preset": self.mixture, "request": self.request_fields}

    @property
    def uses_local_models(self) -> bool:
        """True if a local model may be used."""
        return _names_local_model(slot["model"] for slot in iterate_slots(self.mixture))

    def with_replayed_models(self, replay: Replay) -> dict[str, Any]:
        """Return the mixture for a replay, without a fallback that is not in the trace."""
        if fallback := self.mixture.get("fallback"):
            try:
                replay.get_model(fallback["model"])
            except UserError:
                return {**self.mixture, "fallback": None}
        return self.mixture

    def build_chat_options(self, given: Namespace) -> ChatOptions:
        """Build the options of a session."""
        return ChatOptions(
            **self.request_fields,
            multi_turn=given.multi_turn is not False,
            json=given.json,
            streamed=not given.no_stream,
            quiet=given.quiet,
        )


def _names_local_model(models: Iterable[str]) -> bool:
    """Return whether a name may involve a local model; nested mixtures are assumed to."""
    return any(name.startswith(("local/", "moa/")) for name in models)


def iterate_slots(mixture: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the proposers, the aggregator, and the fallback if there is one."""
    yield from mixture["proposers"] if mixture.get("layers", 2) > 1 else []
    yield mixture["aggregator"]
    if mixture.get("fallback"):
        yield mixture["fallback"]


def build_settings(options: Namespace, recorded: Mapping[str, Any]) -> MixtureSettings:
    """Determine the effective settings.

    Args:
        options: Result of `swarm.moa.cli.parse_arguments`.
        recorded: Header of the replayed trace; empty without one.

    Raises:
        UserError: An option has no effect, or the preset does not exist.
    """
    mixture, origin = _initial_mixture(options, recorded)
    if pairs := parse_counted_names(options.reference_models or []):
        mixture["proposers"] = [{"model": name, "count": count} for name, count in pairs]
    if options.aggregator:
        mixture["aggregator"] = {**mixture.get("aggregator", {}), "model": options.aggregator}
    if options.fallback:
        mixture["fallback"] = {"model": options.fallback}
    if options.rounds is not None:
        mixture["layers"] = options.rounds + 1
    mixture.update(
        {key: getattr(options, key) for key in DIRECT_OPTIONS if getattr(options, key) is not None}
    )
    _fill_open_slots(mixture, options.aggregator)
    # Command line options apply to all agents and override the preset's settings.
    for slot in iterate_slots(mixture):
        for key in ("temperature", "max_tokens", "timeout"):
            if getattr(options, key) is not None:
                slot[key] = getattr(options, key)
    request_fields = {
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        **recorded.get("request", {}),
    }
    request_fields.update(
        {key: getattr(options, key) for key in REQUEST_OPTIONS if getattr(options, key) is not None}
    )
    _check_unused_options(options, mixture)
    return MixtureSettings(mixture, request_fields, origin)


def _initial_mixture(options: Namespace, recorded: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the mixture before command line overrides, and its source."""
    if options.preset:
        return read_preset(options.preset), f"preset {options.preset}"
    if "preset" in recorded:
        return dict(recorded["preset"]), f"as in {options.replay}"
    if options.aggregator and options.reference_models:
        return {"proposers": []}, "no preset"
    key = bool(os.environ.get("TOGETHER_API_KEY", "").strip())
    remote = [
        name
        for name, _ in parse_counted_names(options.reference_models or [])
        if not _names_local_model([name])
    ]
    if remote and not key:
        raise UserError(
            f"--aggregator: name the model that synthesizes the answers of {', '.join(remote)}; "
            "the default without a key (preset local) is a model of 135 million parameters",
            2,
        )
    name = "together" if key else "local"
    return read_preset(name), f"preset {name}, as TOGETHER_API_KEY is {'' if key else 'not '}set"


def _fill_open_slots(mixture: dict[str, Any], model: str | None) -> None:
    """Fill in the model of agents without one.

    Raises:
        UserError: No model was named.
    """
    for slot in iterate_slots(mixture):
        if slot.get("model") is None and model is None:
            raise UserError("the preset names no model; give one with --model NAME", 2)
        slot["model"] = slot.get("model") or model


def _check_unused_options(options: Namespace, mixture: Mapping[str, Any]) -> None:
    """Check that all options affect this mixture.

    Raises:
        UserError: An option has no effect.
    """
    models = [slot["model"] for slot in iterate_slots(mixture)]
    remote = any(not name.startswith(("local/", "function/", "llm/")) for name in models)
    no_proposers = mixture.get("layers", 2) == 1
    calls = "a replay calls no model"
    useless = [
        *((name, calls) for name in CALL_OPTIONS if options.replay),
        *((name, "no model is local") for name in LOCAL_OPTIONS if not _names_local_model(models)),
        *((name, "all models are local") for name in REMOTE_OPTIONS if not remote),
        *((name, "there are no proposers") for name in PROPOSER_OPTIONS if no_proposers),
    ]
    for name, reason in useless:
        if getattr(options, name) not in (None, False):
            raise UserError(f"--{name} has no effect: {reason}; leave it out", 2)


LOCAL_OPTIONS = ("base", "pool", "device")
REMOTE_OPTIONS = ("num_proc", "providers")
CALL_OPTIONS = (*LOCAL_OPTIONS, *REMOTE_OPTIONS, "timeout", "no_cache")
PROPOSER_OPTIONS = ("reference_models", "quorum", "prompt")


def run(options: Namespace) -> int:
    """Run the command; return the exit code.

    Raises:
        UserError: It cannot be run, or the single question has no answer.
    """
    typed, answers, notes = std_streams()
    warnings = WarningCollector()
    logging.getLogger("swarm").addHandler(warnings)
    if options.list:
        from swarm.registry.local_models import LocalModels

        for line in format_available_models(
            load_providers(options), LocalModels(**_local_options(options, "base", "pool"))
        ):
            print(line, file=answers)
        return 0
    question = _read_question(options, typed)
    replay = Replay(options.replay) if options.replay else None
    settings = build_settings(options, replay.about if replay else {})
    mixture = _build_mixture(options, settings, replay)
    if not options.quiet:
        print(
            escape_control_chars(f"{settings.origin}: {summarize_mixture(mixture)}"),
            file=notes,
            flush=True,
        )
    device = _choose_device(options, notes) if settings.uses_local_models and not replay else None
    mixture.check()
    if options.trace:
        mixture.trace = Trace(options.trace, settings.trace_header)
    if device:
        mixture.open(device)
    session = ChatSession(mixture, settings.build_chat_options(options), answers, notes, warnings)
    return _run_session(options, session, question)


def _run_session(options: Namespace, session: ChatSession, question: str | None) -> int:
    """Answer the single question, or run the chat; return the exit code."""
    if question is not None:
        session.answer_question(question)
        return 0
    if not options.quiet:
        print("/help lists the commands; exit leaves", file=session.notes, flush=True)
    ask = make_line_reader(None if options.json else session.answers, session.notes)
    return TerminalChat(session, ask, format_models(session.mixture)).run_loop()


def _read_question(options: Namespace, typed: TextIO | None) -> str | None:
    """Return the single question; `None` for a chat.

    Raises:
        UserError: It is empty, or an option is for a chat only.
    """
    question = options.question
    if question in (None, "-") and (question or not is_tty(typed)):
        question = typed.read() if typed else ""
    if question is None:
        return None
    if not question.strip():
        raise UserError('the question is empty; give one, as in python -m swarm.moa "Why?"', 2)
    if options.multi_turn is not None:
        raise UserError(
            "--multi_turn has no effect: it applies to a chat, not to a single question", 2
        )
    return str(question).strip()


def _build_mixture(
    options: Namespace, settings: MixtureSettings, replay: Replay | None
) -> MixtureOfAgents:
    """Build the mixture with its models; nothing heavy is loaded.

    Raises:
        UserError: A model does not exist, or a value is invalid.
    """
    if replay:
        return build_mixture(settings.with_replayed_models(replay), replay.get_model)
    from swarm.registry.registry import Roster

    cache: Literal["default"] | None = None if options.no_cache else "default"
    local = _local_options(options, "base", "pool", "device")
    roster = Roster(load_providers(options), cache=cache, **local)
    return build_mixture(settings.mixture, roster.model)


def _local_options(options: Namespace, *names: str) -> dict[str, Any]:
    """Return the given options of local models."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def load_providers(given: Namespace) -> "Providers":
    """Load the endpoints, with the concurrency limit of the command line if given.

    Raises:
        UserError: The file is invalid.
    """
    from swarm.models.providers import Providers

    found = Providers.load(given.providers)
    for provider in found.values() if given.num_proc else ():
        provider.limits = replace(provider.limits, concurrency=given.num_proc)
    return found


def _choose_device(options: Namespace, notes: TextIO) -> str:
    """Choose the device of local models, and announce that loading takes time.

    Raises:
        UserError: The device does not exist.
    """
    from swarm.engine.base_model import choose_device

    device = choose_device(options.device)
    if not options.quiet:
        message = f"loading the local models on {device}; the first time downloads the base"
        print(message, file=notes, flush=True)
    return device
