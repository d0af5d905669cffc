"""One question put to a consortium, and what came of it, as JSON and in the record of runs."""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.collab import AgentAnswer, OnEvent
from swarm.collab.configs import ConsortiumSettings
from swarm.collab.consortium import Consortium
from swarm.collab.deliberation.progress import format_event
from swarm.collab.deliberation.verdicts import Iteration
from swarm.collab.following import map_events, stream_events
from swarm.collab.outcome import result_to_json, partial_result_to_json
from swarm.consortium.runs import RunLog
from swarm.errors import UserError
from swarm.models import Message, Request
from swarm.printing import WarningCollector

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TOKENS = 2048
"""New tokens of an answer, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class ConsortiumQuestion:
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
    config: ConsortiumSettings
    consortium: Consortium
    turns: tuple[Message, ...]
    asked: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True


class QuestionInterrupted(KeyboardInterrupt):
    """Somebody stopped a question.

    Attributes:
        found: What had come by then; see `swarm.collab.outcome.unfinished`.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found


def answer_question(question: ConsortiumQuestion, watch: OnEvent | None = None) -> dict[str, Any]:
    """The result, with the arbiter's replies word by word.

    Raises:
        UserError: There is no answer.
        Interrupted: It was stopped; what members had answered is in the record of the run.
    """
    prompt = question.turns[-1].content
    over: list[Iteration] = []
    answers: list[AgentAnswer] = []

    def record_event(number: int, event: Any) -> None:
        if isinstance(event, AgentAnswer):
            answers.append(event)
        elif isinstance(event, Iteration):
            over.append(event)
        if watch:
            watch(number, event)

    try:
        (came,) = question.consortium.run([Request(question.turns, **question.asked)], record_event)
    except KeyboardInterrupt:
        found = partial_result_to_json(question.consortium, prompt, over, answers)
        _record_run(question, found, "stopped")
        raise QuestionInterrupted(found) from None
    if isinstance(came, UserError):
        _record_run(question, {"original_prompt": prompt}, str(came))
        raise came
    found = result_to_json(question.consortium, prompt, came, raw=True)
    _record_run(question, found)
    return found


def _record_run(question: ConsortiumQuestion, found: dict[str, Any], error: str = "") -> None:
    """Keep a record, whose id the result is told; that it fails does not cost the answer."""
    if not question.recorded:
        return
    try:
        number = RunLog().add(question.name, question.config, found, error)
    except UserError as why:
        log.warning("the run is not recorded: %s", why)
    else:
        found.setdefault("metadata", {})["run"] = number


def stream_progress_lines(
    question: ConsortiumQuestion, with_warnings: bool = True
) -> Generator[str, None, dict[str, Any]]:
    """Gives what goes on, and returns the result; closing it asks no further.

    Args:
        question: What is asked of whom.
        with_warnings: Whether what this toolkit logs as a warning meanwhile is taken, and told
            before the event with which it came. Questions under way at once share them.

    Raises:
        UserError: There is no answer.
    """
    remarks, told = WarningCollector(), set[str]()

    def new_warnings() -> list[str]:
        words = [one for one in dict.fromkeys(remarks.pop_messages()) if one not in told]
        told.update(words)
        return [f"warning: {one}" for one in words]

    def run_question(watch: OnEvent) -> dict[str, Any]:
        def forward_event(number: int, event: Any) -> None:
            words: Any = [*new_warnings(), format_event(question.consortium, event)]
            watch(number, words)

        return answer_question(question, forward_event)

    def join_lines(event: tuple[int, list[str]]) -> str | None:
        return "\n".join(filter(None, event[1])) or None

    with remarks if with_warnings else nullcontext():
        try:
            found = yield from map_events(stream_events(run_question), join_lines)
        except UserError:
            yield from new_warnings()
            raise
        yield from new_warnings()
        return found


async def run_in_daemon_thread(function: Callable[..., T], *given: Any) -> T:
    """What a function gives, called in a thread for which the end of the program does not wait.

    For that of `asyncio.to_thread` it does: after Ctrl-C, until a slow member has answered.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[T] = loop.create_future()

    def set_outcome(value: Any, error: BaseException | None) -> None:
        if came.done():
            return
        if error is None:
            came.set_result(value)
        else:
            came.set_exception(error)

    def run_function() -> None:
        value, wrong = None, None
        try:
            value = function(*given)
        except BaseException as error:
            wrong = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_outcome, value, wrong)

    threading.Thread(target=run_function, name="swarm-apart", daemon=True).start()
    return await came
