"""One question put to a consortium, and what came of it, as JSON and in the record of runs."""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.collab import Watch
from swarm.collab.configs import Config
from swarm.collab.consortium import Consortium
from swarm.collab.deliberation.progress import line
from swarm.collab.following import followed
from swarm.collab.outcome import result
from swarm.consortium.runs import Runs
from swarm.errors import UserError
from swarm.models import Message, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TOKENS = 2048
"""New tokens of an answer, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of whom.

    Attributes:
        name: The consortium's; `None` where it has none.
        config: Its settings.
        consortium: Who is asked.
        turns: The conversation; the last turn is the question.
        asked: What the request says beside the conversation.
        recorded: Whether a record of the run is kept.
    """

    name: str | None
    config: Config
    consortium: Consortium
    turns: tuple[Message, ...]
    asked: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True


def ask(question: Question, watch: Watch | None = None) -> dict[str, Any]:
    """The result, with the arbiter's replies word by word.

    Raises:
        UserError: There is no answer.
    """
    prompt = question.turns[-1].content
    (came,) = question.consortium.run([Request(question.turns, **question.asked)], watch)
    if isinstance(came, UserError):
        _record(question, {"original_prompt": prompt}, str(came))
        raise came
    found = result(question.consortium, prompt, came, raw=True)
    _record(question, found)
    return found


def _record(question: Question, found: dict[str, Any], error: str = "") -> None:
    """Keep a record, whose id the result is told; that it fails does not cost the answer."""
    if not question.recorded:
        return
    try:
        number = Runs().add(question.name, question.config, found, error)
    except UserError as why:
        log.warning("the run is not recorded: %s", why)
    else:
        found.setdefault("metadata", {})["run"] = number


def followed_lines(question: Question) -> Generator[str, None, dict[str, Any]]:
    """Gives what goes on, a line an event, and returns the result; closing it asks no further."""
    events = followed(lambda watch: ask(question, watch))
    while True:
        try:
            _, event = next(events)
        except StopIteration as end:
            found: dict[str, Any] = end.value
            return found
        if told := line(question.consortium, event):
            yield told


async def apart(function: Callable[..., T], *given: Any) -> T:
    """What a function gives, called in a thread for which the end of the program does not wait.

    For that of `asyncio.to_thread` it does: after Ctrl-C, until a slow member has answered.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if came.done():
            return
        if error is None:
            came.set_result(value)
        else:
            came.set_exception(error)

    def work() -> None:
        value, wrong = None, None
        try:
            value = function(*given)
        except BaseException as error:
            wrong = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, wrong)

    threading.Thread(target=work, name="swarm-apart", daemon=True).start()
    return await came
