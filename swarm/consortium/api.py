"""A consortium in a Python program: `create_consortium(...)` and `orchestrate(prompt)`."""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from swarm._util.terminal import WarningCollector
from swarm.consortium.cli.options import MemberRegistry, default_arbiter
from swarm.consortium.run_log import RunLog
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.multi_agent.collaboration import Cancelled, map_events, stream_events
from swarm.multi_agent.consortium.config import (
    ConsortiumSettings,
    build_consortium,
    parse_member,
)
from swarm.multi_agent.consortium.consortium import Consortium, format_event
from swarm.multi_agent.consortium.legacy_config import convert_settings
from swarm.multi_agent.consortium.member_spec import member_from_config
from swarm.multi_agent.consortium.result_json import partial_result_to_json, result_to_json
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.consortium.strategies import UNSURE
from swarm.multi_agent.types import AgentAnswer, OnEvent

# One question put to a consortium, and what came of it, as JSON and in the record of runs.

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
        found: What had come by then; see
            `swarm.multi_agent.consortium.result_json.partial_result_to_json`.
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


logger = logging.getLogger(__name__)

LEGACY_ARGUMENTS = {"minimum_iterations": "min_iterations", "judging_method": "strategy"}
"""What arguments were called by older programs."""


def create_consortium(
    models: Sequence[str],
    confidence_threshold: float = 0.8,
    max_iterations: int = 3,
    min_iterations: int = 1,
    arbiter: str | None = None,
    system_prompt: str | None = None,
    default_count: int = 1,
    raw: bool = False,
    strategy: str = "default",
    log: bool = False,
    temperature: float | None = None,
    max_tokens: int = MAX_TOKENS,
    members: MemberRegistry | None = None,
    **settings: Any,
) -> "Orchestrator":
    """A consortium that answers prompts, with the argument names of llm-consortium.

    Args:
        models: Who answers: a name, or with a count and options as in "gpt-4o:2,temperature=1".
        confidence_threshold: See `Consortium`; a
            threshold is from 0 to 1, or 10 to 100 as percent. `minimum_iterations` and
            `judging_method` are older names.
        max_iterations: See `confidence_threshold`.
        min_iterations: See `confidence_threshold`.
        strategy: See `confidence_threshold`.
        arbiter: Who judges; `None`: see `swarm.consortium.cli.options.default_arbiter`.
        system_prompt: What members are told; `None` is a text of the house.
        default_count: Answers of each model that says no number.
        raw: Whether results have the arbiter's replies word by word, too.
        log: Whether runs are recorded in consortium.db in llm's folder, failed ones too.
        temperature: Of calls that say none; `None` leaves it to each model.
        max_tokens: New tokens of an answer that says nothing of it.
        members: Finds the models; `None`: `Members()`.
        **settings: All else that a `Config` has, such as `quorum` or `roles`.

    Raises:
        UserError: A value is not allowed, or a model, a package or a key is missing.
    """
    given = {
        "confidence_threshold": confidence_threshold,
        "max_iterations": max_iterations,
        "min_iterations": min_iterations,
        "strategy": strategy,
    }
    for old, new in LEGACY_ARGUMENTS.items():
        if old in settings:
            given[new] = settings.pop(old)
    if isinstance(models, (str, Mapping)) or not models:
        raise UserError(f"models={models!r}: must be a list of names, one at least")
    found = members or MemberRegistry()
    who = [parse_member(one, found.is_known_name, default_count) for one in models]
    if arbiter is None:
        judge = default_arbiter(str(given["strategy"]), who)
    else:
        judge = parse_member(arbiter, found.is_known_name)
    config = ConsortiumSettings.from_dict(
        {"system": system_prompt, **given, **settings, "members": who, "arbiter": judge}
    )
    if (
        confidence_threshold != ConsortiumSettings.confidence_threshold
        and config.strategy in UNSURE
    ):
        logger.warning("confidence_threshold has no effect with strategy %s", config.strategy)
    return Orchestrator(config, found, raw, log, temperature, max_tokens)


class ConsortiumConfig(ConsortiumSettings):
    """A `Config` that is made with the argument names of llm-consortium.

    Args:
        models: Names, or names with their counts; `members` in `Config`.
        system_prompt: `system` in `Config`.
        confidence_threshold, max_iterations: As there.
        minimum_iterations: `min_iterations` in `Config`.
        arbiter: `None`: see `swarm.consortium.cli.options.default_arbiter`.
        **settings: All else that a `Config` has, or had in llm-consortium.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        models: Mapping[str, int] | Sequence[str] | None = None,
        system_prompt: str | None = None,
        confidence_threshold: float = 0.8,
        max_iterations: int = 3,
        minimum_iterations: int | None = None,
        arbiter: Any = None,
        **settings: Any,
    ) -> None:
        given = {
            **settings,
            "confidence_threshold": confidence_threshold,
            "max_iterations": max_iterations,
        }
        older = {
            "models": models,
            "system_prompt": system_prompt,
            "minimum_iterations": minimum_iterations,
            "arbiter": arbiter,
        }
        given |= {key: value for key, value in older.items() if value is not None}
        found, remarks = convert_settings(given)
        for words in remarks:
            logger.warning("%s", words)
        if found.get("arbiter") is None and isinstance(found.get("members"), (list, tuple)):
            names = [member_from_config("members", one) for one in found["members"]]
            found["arbiter"] = default_arbiter(str(found["strategy"]), names)
        made = ConsortiumSettings.from_dict(found)
        super().__init__(
            **{field.name: getattr(made, field.name) for field in fields(ConsortiumSettings)}
        )


class Orchestrator:
    """Puts prompts to a consortium; each is answered for itself, several may be under way at once.

    Args:
        config: The consortium's settings.
        members: Finds its models.
        raw, log, temperature, max_tokens: See `create_consortium`.

    Attributes:
        consortium: The model behind it.

    Raises:
        UserError: A model, a package or a key is missing.
    """

    def __init__(
        self,
        config: ConsortiumSettings,
        members: MemberRegistry | None = None,
        raw: bool = False,
        log: bool = False,
        temperature: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.config, self.raw, self.log = config, raw, log
        self.asked = {"temperature": temperature, "max_new_tokens": max_tokens}
        self.consortium = build_consortium(config, (members or MemberRegistry()).model)
        self.consortium.check()

    def orchestrate(
        self, prompt: str | Sequence[Message], watch: OnEvent | None = None
    ) -> dict[str, Any]:
        """What the consortium came to; see
        `swarm.multi_agent.consortium.result_json.result_to_json`.

        Works beside a running event loop, as in a notebook, which then waits.

        Args:
            prompt: The question, or a conversation of which it is the last turn.
            watch: Is told of each event.

        Raises:
            UserError: There is no answer.
        """
        turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        if not turns or not turns[-1].content.strip():
            raise UserError(
                "the prompt is empty; give a question, or a conversation that ends with it"
            )
        question = ConsortiumQuestion(
            None, self.config, self.consortium, turns, self.asked, self.log
        )
        found = answer_question(question, watch)
        if not self.raw:
            for verdict in (found["synthesis"], *(one["synthesis"] for one in found["iterations"])):
                verdict.pop("raw_arbiter_response", None)
        return found

    async def aorchestrate(self, prompt: str | Sequence[Message]) -> dict[str, Any]:
        """As `orchestrate`, while the event loop goes on; cancelled, it begins no further call."""
        left = threading.Event()

        def raise_if_cancelled(number: int, event: Any) -> None:
            if left.is_set():
                raise Cancelled

        try:
            return await run_in_daemon_thread(self.orchestrate, prompt, raise_if_cancelled)
        finally:
            left.set()


ConsortiumOrchestrator = Orchestrator
"""Its name in llm-consortium."""
