"""The command: builds the mixture that was asked for, and puts questions to it."""

import logging
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from swarm.collab.moa import MixtureOfAgents
from swarm.collab.presets import build_mixture
from swarm.errors import UserError
from swarm.moa.chat import TerminalChat
from swarm.moa.describing import format_models, summarize_mixture
from swarm.moa.reading import make_line_reader
from swarm.moa.session import ChatSession
from swarm.moa.settings import MixtureSettings, build_settings
from swarm.models.trace import Replay, Trace
from swarm.printing import WarningCollector, escape_control_chars, is_tty, std_streams
from swarm.track import TrackedRun, tracker_by_name
from swarm.track.during import track_run
from swarm.track.talks import MoATracker, new_tracking_folder

if TYPE_CHECKING:
    from swarm.models.providers import Providers


def run(given: Namespace) -> int:
    """Do what the command line says; gives the exit code.

    Raises:
        UserError: It cannot be done, or the one question has no answer.
    """
    typed, answers, notes = std_streams()
    remarks = WarningCollector()
    logging.getLogger("swarm").addHandler(remarks)
    if given.list:
        from swarm.moa.listing import format_available_models
        from swarm.roster.local import LocalModels

        for line in format_available_models(load_providers(given), LocalModels(**_local_options(given, "base", "pool"))):
            print(line, file=answers)
        return 0
    question = _read_question(given, typed)
    replay = Replay(given.replay) if given.replay else None
    wanted = build_settings(given, replay.about if replay else {})
    mixture = _build_mixture(given, wanted, replay)
    tracker = tracker_by_name(given.tracker)
    tracker.check()
    if not given.quiet:
        print(escape_control_chars(f"{wanted.origin}: {summarize_mixture(mixture)}"), file=notes, flush=True)
    device = _choose_device(given, notes) if wanted.uses_local_models and not replay else None
    mixture.check()
    if given.trace:
        mixture.trace = Trace(given.trace, wanted.trace_header)
    if device:
        mixture.open(device)
    turns = MoATracker(tracker)
    session = ChatSession(mixture, wanted.build_chat_options(given), answers, notes, remarks, turns.log_turn)
    with track_run(tracker, TrackedRun("moa", new_tracking_folder("moa"), wanted.trace_header)) as found:
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


def _build_mixture(given: Namespace, wanted: MixtureSettings, replay: Replay | None) -> MixtureOfAgents:
    """The mixture with its models; nothing heavy is loaded.

    Raises:
        UserError: There is no such model, or a value is not allowed.
    """
    if replay:
        return build_mixture(wanted.with_replayed_models(replay), replay.get_model)
    from swarm.roster import Roster

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
    from swarm.engine.device import choose_device

    device = choose_device(given.device)
    if not given.quiet:
        words = f"loading the models of this machine on {device}; the first time fetches the base"
        print(words, file=notes, flush=True)
    return device
