"""The command line of the mixture of agents, read and checked before anything is loaded."""

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
from swarm.moa.format import format_models, summarize_mixture
from swarm.models.providers import Provider, Providers, parse_counted_names
from swarm.models.trace import Replay, Trace
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.presets import build_mixture, preset_names, read_preset
from swarm.registry.local_models import LocalModels
from swarm.trackers import TrackedRun, tracker_by_name
from swarm.trackers.base import track_run
from swarm.trackers.records import MoATracker, new_tracking_folder

if TYPE_CHECKING:
    from swarm.models.providers import Providers


# What can be named: presets, endpoints and the models of this machine.


def format_available_models(providers: Providers, local: LocalModels) -> Iterator[str]:
    """Lines that tell of them."""
    yield "presets (--preset NAME, or the path of a yaml):"
    for name in preset_names():
        first = (conf_folder() / "moa" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")[0]
        yield f"  {name:<12}{first.lstrip('# ')}"
    yield "endpoints (PROVIDER/MODEL; which models they have is theirs to say):"
    for name, provider in providers.items():
        yield f"  {name:<12}{format_endpoint(provider)}"
    yield "on this machine:"
    yield from (f"  local/{name}" for name in local.list_names())
    yield "  local/FOLDER, llm/NAME, function/MODULE:NAME, moa/PRESET"


def format_endpoint(provider: Provider) -> str:
    """Where an endpoint is, and whether its key is there."""
    key = provider.api_key_env
    there = key and os.environ.get(key, "").strip()
    told = f"{key} is {'' if there else 'not '}set" if key else "no key needed"
    where = (
        f"the URL in {provider.base_url_env}" if provider.is_url_overridden else provider.base_url
    )
    return f"{where}, {told}"


# The mixture that the command line asks for: a preset, and over it what was said.

DIRECT_OPTIONS = ("strategy", "prompt", "quorum", "seed", "context")
"""Options that a preset has as keys of the same name."""

REQUEST_OPTIONS = ("temperature", "max_tokens", "system", "seed")
"""Options that are no part of a mixture, but of what it is asked."""


class MixtureSettings(NamedTuple):
    """What is to be asked.

    Attributes:
        mixture: As a preset has it.
        asked: Temperature, max_tokens, system and seed of what it is asked.
        origin: Where the mixture comes from, in words.
    """

    mixture: dict[str, Any]
    asked: dict[str, Any]
    origin: str

    @property
    def trace_header(self) -> dict[str, Any]:
        """For the header of a trace; a replay begins with it."""
        return {"preset": self.mixture, "asked": self.asked}

    @property
    def uses_local_models(self) -> bool:
        """Whether a model of this machine may be asked."""
        return _names_local_model(slot["model"] for slot in iterate_slots(self.mixture))

    def with_replayed_models(self, replay: Replay) -> dict[str, Any]:
        """The mixture with the models of a trace, where a fallback is often not met."""
        if fallback := self.mixture.get("fallback"):
            try:
                replay.get_model(fallback["model"])
            except UserError:
                return {**self.mixture, "fallback": None}
        return self.mixture

    def build_chat_options(self, given: Namespace) -> ChatOptions:
        """How a session asks."""
        return ChatOptions(
            **self.asked,
            multi_turn=given.multi_turn is not False,
            json=given.json,
            streamed=not given.no_stream,
            quiet=given.quiet,
        )


def _names_local_model(models: Iterable[str]) -> bool:
    """Whether one of them may be of this machine; what is in a mixture is not known here."""
    return any(name.startswith(("local/", "moa/")) for name in models)


def iterate_slots(mixture: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The proposers, the aggregator, and the fallback where there is one."""
    yield from mixture["proposers"] if mixture.get("layers", 2) > 1 else []
    yield mixture["aggregator"]
    if mixture.get("fallback"):
        yield mixture["fallback"]


def build_settings(given: Namespace, recorded: Mapping[str, Any]) -> MixtureSettings:
    """What the command line comes to.

    Args:
        given: As `swarm.moa.cli.parse_arguments` gives it.
        recorded: The header of the trace that is replayed; empty without one.

    Raises:
        UserError: An option has no effect, or there is no such preset.
    """
    mixture, origin = _initial_mixture(given, recorded)
    if pairs := parse_counted_names(given.reference_models or []):
        mixture["proposers"] = [{"model": name, "count": count} for name, count in pairs]
    if given.aggregator:
        mixture["aggregator"] = {**mixture.get("aggregator", {}), "model": given.aggregator}
    if given.fallback:
        mixture["fallback"] = {"model": given.fallback}
    if given.rounds is not None:
        mixture["layers"] = given.rounds + 1
    mixture.update(
        {key: getattr(given, key) for key in DIRECT_OPTIONS if getattr(given, key) is not None}
    )
    _fill_open_slots(mixture, given.aggregator)
    # What the command line says holds for all, whatever the preset says of one of them.
    for slot in iterate_slots(mixture):
        for key in ("temperature", "max_tokens", "timeout"):
            if getattr(given, key) is not None:
                slot[key] = getattr(given, key)
    asked = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, **recorded.get("asked", {})}
    asked.update(
        {key: getattr(given, key) for key in REQUEST_OPTIONS if getattr(given, key) is not None}
    )
    _check_unused_options(given, mixture)
    return MixtureSettings(mixture, asked, origin)


def _initial_mixture(given: Namespace, recorded: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The mixture before the command line has changed it, and where it comes from."""
    if given.preset:
        return read_preset(given.preset), f"preset {given.preset}"
    if "preset" in recorded:
        return dict(recorded["preset"]), f"as in {given.replay}"
    if given.aggregator and given.reference_models:
        return {"proposers": []}, "no preset"
    key = bool(os.environ.get("TOGETHER_API_KEY", "").strip())
    remote = [
        name
        for name, _ in parse_counted_names(given.reference_models or [])
        if not _names_local_model([name])
    ]
    if remote and not key:
        raise UserError(
            f"--aggregator: name the model that makes one answer of those of {', '.join(remote)}; "
            "the default without a key (preset local) is a model of 135 million parameters",
            2,
        )
    name = "together" if key else "local"
    return read_preset(name), f"preset {name}, as TOGETHER_API_KEY is {'' if key else 'not '}set"


def _fill_open_slots(mixture: dict[str, Any], model: str | None) -> None:
    """Give the slots that leave the model open the one that was named.

    Raises:
        UserError: None was.
    """
    for slot in iterate_slots(mixture):
        if slot.get("model") is None and model is None:
            raise UserError("this preset leaves the model to you: name one, --model NAME", 2)
        slot["model"] = slot.get("model") or model


def _check_unused_options(given: Namespace, mixture: Mapping[str, Any]) -> None:
    """See that no option is without effect on this mixture.

    Raises:
        UserError: One is.
    """
    models = [slot["model"] for slot in iterate_slots(mixture)]
    remote = any(not name.startswith(("local/", "function/", "llm/")) for name in models)
    alone = mixture.get("layers", 2) == 1
    calls = "nobody is called in a replay"
    useless = [
        *((name, calls) for name in CALL_OPTIONS if given.replay),
        *(
            (name, "no model here is local/...")
            for name in LOCAL_OPTIONS
            if not _names_local_model(models)
        ),
        *((name, "all models here are on this machine") for name in REMOTE_OPTIONS if not remote),
        *((name, "there is no layer of proposers") for name in PROPOSER_OPTIONS if alone),
    ]
    for name, why in useless:
        if getattr(given, name) not in (None, False):
            raise UserError(f"--{name} has no effect: {why}; leave it out", 2)


LOCAL_OPTIONS = ("base", "pool", "device")
REMOTE_OPTIONS = ("num_proc", "providers")
CALL_OPTIONS = (*LOCAL_OPTIONS, *REMOTE_OPTIONS, "timeout", "no_cache")
PROPOSER_OPTIONS = ("reference_models", "quorum", "prompt")


# The command: builds the mixture that was asked for, and puts questions to it.


def run(given: Namespace) -> int:
    """Do what the command line says; gives the exit code.

    Raises:
        UserError: It cannot be done, or the one question has no answer.
    """
    typed, answers, notes = std_streams()
    remarks = WarningCollector()
    logging.getLogger("swarm").addHandler(remarks)
    if given.list:
        from swarm.registry.local_models import LocalModels

        for line in format_available_models(
            load_providers(given), LocalModels(**_local_options(given, "base", "pool"))
        ):
            print(line, file=answers)
        return 0
    question = _read_question(given, typed)
    replay = Replay(given.replay) if given.replay else None
    wanted = build_settings(given, replay.about if replay else {})
    mixture = _build_mixture(given, wanted, replay)
    tracker = tracker_by_name(given.tracker)
    tracker.check()
    if not given.quiet:
        print(
            escape_control_chars(f"{wanted.origin}: {summarize_mixture(mixture)}"),
            file=notes,
            flush=True,
        )
    device = _choose_device(given, notes) if wanted.uses_local_models and not replay else None
    mixture.check()
    if given.trace:
        mixture.trace = Trace(given.trace, wanted.trace_header)
    if device:
        mixture.open(device)
    turns = MoATracker(tracker)
    session = ChatSession(
        mixture, wanted.build_chat_options(given), answers, notes, remarks, turns.log_turn
    )
    with track_run(
        tracker, TrackedRun("moa", new_tracking_folder("moa"), wanted.trace_header)
    ) as found:
        try:
            return _run_session(given, session, question)
        finally:
            found |= turns.log_tables()


def _run_session(given: Namespace, session: ChatSession, question: str | None) -> int:
    """Ask the one question, or whatever a person types; gives the exit code."""
    if question is not None:
        session.answer_question(question)
        return 0
    if not given.quiet:
        print("/help lists the commands; exit leaves", file=session.notes, flush=True)
    ask = make_line_reader(None if given.json else session.answers, session.notes)
    return TerminalChat(session, ask, format_models(session.mixture)).run_loop()


def _read_question(given: Namespace, typed: TextIO | None) -> str | None:
    """The one question; `None` where a person types.

    Raises:
        UserError: There is none, or an option is for a chat alone.
    """
    question = given.question
    if question in (None, "-") and (question or not is_tty(typed)):
        question = typed.read() if typed else ""
    if question is None:
        return None
    if not question.strip():
        raise UserError('the question is empty; give one, as in python -m swarm.moa "Why?"', 2)
    if given.multi_turn is not None:
        raise UserError("--multi_turn has no effect: it is for a chat, and this is one question", 2)
    return str(question).strip()


def _build_mixture(
    given: Namespace, wanted: MixtureSettings, replay: Replay | None
) -> MixtureOfAgents:
    """The mixture with its models; nothing heavy is loaded.

    Raises:
        UserError: There is no such model, or a value is not allowed.
    """
    if replay:
        return build_mixture(wanted.with_replayed_models(replay), replay.get_model)
    from swarm.registry.registry import Roster

    cache: Literal["default"] | None = None if given.no_cache else "default"
    local = _local_options(given, "base", "pool", "device")
    roster = Roster(load_providers(given), cache=cache, **local)
    return build_mixture(wanted.mixture, roster.model)


def _local_options(given: Namespace, *names: str) -> dict[str, Any]:
    """What was said of the models of this machine."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def load_providers(given: Namespace) -> "Providers":
    """The endpoints, each under its limits or the one that was asked for.

    Raises:
        UserError: The file is not as agreed.
    """
    from swarm.models.providers import Providers

    found = Providers.load(given.providers)
    for provider in found.values() if given.num_proc else ():
        provider.limits = replace(provider.limits, concurrency=given.num_proc)
    return found


def _choose_device(given: Namespace, notes: TextIO) -> str:
    """Where the models of this machine are to run; a person is told what takes its time now.

    Raises:
        UserError: There is no such device.
    """
    from swarm.engine.base_model import choose_device

    device = choose_device(given.device)
    if not given.quiet:
        words = f"loading the models of this machine on {device}; the first time fetches the base"
        print(words, file=notes, flush=True)
    return device
