"""One question put to a consortium, and what came of it, as JSON and in the record of runs."""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.collab import Answer, Watch
from swarm.collab.configs import Config
from swarm.collab.consortium import Consortium
from swarm.collab.deliberation.progress import line
from swarm.collab.deliberation.verdicts import Iteration
from swarm.collab.following import changed, followed
from swarm.collab.outcome import result, unfinished
from swarm.consortium.runs import Runs
from swarm.errors import UserError
from swarm.models import Message, Request
from swarm.printing import Remarks

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


class Interrupted(KeyboardInterrupt):
    """Somebody stopped a question.

    Attributes:
        found: What had come by then; see `swarm.collab.outcome.unfinished`.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found


def ask(question: Question, watch: Watch | None = None) -> dict[str, Any]:
    """The result, with the arbiter's replies word by word.

    Raises:
        UserError: There is no answer.
        Interrupted: It was stopped; what members had answered is in the record of the run.
    """
    prompt = question.turns[-1].content
    over: list[Iteration] = []
    answers: list[Answer] = []

    def note(number: int, event: Any) -> None:
        if isinstance(event, Answer):
            answers.append(event)
        elif isinstance(event, Iteration):
            over.append(event)
        if watch:
            watch(number, event)

    try:
        (came,) = question.consortium.run([Request(question.turns, **question.asked)], note)
    except KeyboardInterrupt:
        found = unfinished(question.consortium, prompt, over, answers)
        _record(question, found, "stopped")
        raise Interrupted(found) from None
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


def followed_lines(
    question: Question, with_warnings: bool = True
) -> Generator[str, None, dict[str, Any]]:
    """Gives what goes on, and returns the result; closing it asks no further.

    Args:
        question: What is asked of whom.
        with_warnings: Whether what this toolkit logs as a warning meanwhile is taken, and told
            before the event with which it came. Questions under way at once share them.

    Raises:
        UserError: There is no answer.
    """
    remarks, told = Remarks(), set[str]()

    def new() -> list[str]:
        words = [one for one in dict.fromkeys(remarks.take()) if one not in told]
        told.update(words)
        return [f"warning: {one}" for one in words]

    def work(watch: Watch) -> dict[str, Any]:
        def tell(number: int, event: Any) -> None:
            words: Any = [*new(), line(question.consortium, event)]
            watch(number, words)

        return ask(question, tell)

    def joined(event: tuple[int, list[str]]) -> str | None:
        return "\n".join(filter(None, event[1])) or None

    with remarks if with_warnings else nullcontext():
        try:
            found = yield from changed(followed(work), joined)
        except UserError:
            yield from new()
            raise
        yield from new()
        return found


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
