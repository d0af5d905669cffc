"""The command: builds the mixture that was asked for, and puts questions to it."""

import logging
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from swarm.collab.moa import MixtureOfAgents
from swarm.collab.presets import build
from swarm.errors import UserError
from swarm.moa.chat import Chat
from swarm.moa.describing import models, summary
from swarm.moa.reading import keyboard
from swarm.moa.session import Session
from swarm.moa.settings import Settings, settings
from swarm.models.trace import Replay, Trace
from swarm.printing import Remarks, harmless, on_terminal, standard
from swarm.track import Shown, named
from swarm.track.during import during
from swarm.track.talks import Turns, folder

if TYPE_CHECKING:
    from swarm.models.providers import Providers


def run(given: Namespace) -> int:
    """Do what the command line says; gives the exit code.

    Raises:
        UserError: It cannot be done, or the one question has no answer.
    """
    typed, answers, notes = standard()
    remarks = Remarks()
    logging.getLogger("swarm").addHandler(remarks)
    if given.list:
        from swarm.moa.listing import listed
        from swarm.roster.local import Locals

        for line in listed(providers(given), Locals(**_local(given, "base", "pool"))):
            print(line, file=answers)
        return 0
    question = _question(given, typed)
    replay = Replay(given.replay) if given.replay else None
    wanted = settings(given, replay.about if replay else {})
    mixture = _mixture(given, wanted, replay)
    tracker = named(given.tracker)
    tracker.check()
    if not given.quiet:
        print(harmless(f"{wanted.origin}: {summary(mixture)}"), file=notes, flush=True)
    device = _device(given, notes) if wanted.local and not replay else None
    mixture.check()
    if given.trace:
        mixture.trace = Trace(given.trace, wanted.about)
    if device:
        mixture.open(device)
    turns = Turns(tracker)
    session = Session(mixture, wanted.manner(given), answers, notes, remarks, turns.add)
    with during(tracker, Shown("moa", folder("moa"), wanted.about)) as found:
        try:
            return _talked(given, session, question)
        finally:
            found |= turns.close()


def _talked(given: Namespace, session: Session, question: str | None) -> int:
    """Ask the one question, or whatever a person types; gives the exit code."""
    if question is not None:
        session.ask(question)
        return 0
    if not given.quiet:
        print("/help lists the commands; exit leaves", file=session.notes, flush=True)
    ask = keyboard(None if given.json else session.answers, session.notes)
    return Chat(session, ask, models(session.mixture)).talk()


def _question(given: Namespace, typed: TextIO | None) -> str | None:
    """The one question; `None` where a person types.

    Raises:
        UserError: There is none, or an option is for a chat alone.
    """
    question = given.question
    if question in (None, "-") and (question or not on_terminal(typed)):
        question = typed.read() if typed else ""
    if question is None:
        return None
    if not question.strip():
        raise UserError('the question is empty; give one, as in python -m swarm.moa "Why?"', 2)
    if given.multi_turn is not None:
        raise UserError("--multi_turn has no effect: it is for a chat, and this is one question", 2)
    return str(question).strip()


def _mixture(given: Namespace, wanted: Settings, replay: Replay | None) -> MixtureOfAgents:
    """The mixture with its models; nothing heavy is loaded.

    Raises:
        UserError: There is no such model, or a value is not allowed.
    """
    if replay:
        return build(wanted.heard_of(replay), replay.model)
    from swarm.roster import Roster

    cache: Literal["default"] | None = None if given.no_cache else "default"
    local = _local(given, "base", "pool", "device")
    roster = Roster(providers(given), cache=cache, **local)
    return build(wanted.mixture, roster.model)


def _local(given: Namespace, *names: str) -> dict[str, Any]:
    """What was said of the models of this machine."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def providers(given: Namespace) -> "Providers":
    """The endpoints, each under its limits or the one that was asked for.

    Raises:
        UserError: The file is not as agreed.
    """
    from swarm.models.providers import Providers

    found = Providers.load(given.providers)
    for provider in found.values() if given.num_proc else ():
        provider.limits = replace(provider.limits, concurrency=given.num_proc)
    return found


def _device(given: Namespace, notes: TextIO) -> str:
    """Where the models of this machine are to run; a person is told what takes its time now.

    Raises:
        UserError: There is no such device.
    """
    from swarm.engine.device import chosen_device

    device = chosen_device(given.device)
    if not given.quiet:
        words = f"loading the models of this machine on {device}; the first time fetches the base"
        print(words, file=notes, flush=True)
    return device
