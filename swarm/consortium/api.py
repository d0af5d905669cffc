"""Python API of consortia: `create_consortium(...)` and `orchestrate(prompt)`.

Also contains the function behind all questions, which returns the result as JSON and records the
run.
"""

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from swarm._util.terminal import WarningCollector
from swarm._util.threads import Cancelled, run_in_thread
from swarm.consortium.cli.options import MemberRegistry, default_arbiter
from swarm.consortium.run_log import RunLog
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.multi_agent.collaboration import map_events, stream_events
from swarm.multi_agent.consortium.config import (
    RENAMED_KEYS,
    ConsortiumSettings,
    MemberSpec,
    build_consortium,
    convert_settings,
    parse_member,
)
from swarm.multi_agent.consortium.consortium import (
    LEGACY_STRATEGIES,
    Consortium,
    format_event,
)
from swarm.multi_agent.consortium.member_spec import member_from_config
from swarm.multi_agent.consortium.result_json import partial_result_to_json, result_to_json
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.consortium.strategies import UNSURE
from swarm.multi_agent.types import AgentAnswer, OnEvent

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ConsortiumQuestion:
    """A question to a consortium.

    Attributes:
        name: Name of the consortium, or `None`.
        config: Its settings.
        consortium: The model.
        turns: The conversation; the last turn is the question.
        request_fields: Request fields other than the prompt.
        recorded: Record the run.
    """

    name: str | None
    config: ConsortiumSettings
    consortium: Consortium
    turns: tuple[Message, ...]
    request_fields: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True


class QuestionInterrupted(KeyboardInterrupt):
    """A question was interrupted.

    Attributes:
        found: Partial result; see
            `swarm.multi_agent.consortium.result_json.partial_result_to_json`.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found


def answer_question(question: ConsortiumQuestion, watch: OnEvent | None = None) -> dict[str, Any]:
    """Answer a question; return the result including the arbiter's verbatim replies.

    Raises:
        UserError: There is no answer.
        QuestionInterrupted: It was interrupted; the members' answers so far are recorded.
    """
    prompt = question.turns[-1].content
    iterations: list[Iteration] = []
    answers: list[AgentAnswer] = []

    def record_event(number: int, event: Any) -> None:
        if isinstance(event, AgentAnswer):
            answers.append(event)
        elif isinstance(event, Iteration):
            iterations.append(event)
        if watch:
            watch(number, event)

    try:
        (outcome,) = question.consortium.run(
            [Request(question.turns, **question.request_fields)], record_event
        )
    except KeyboardInterrupt:
        found = partial_result_to_json(question.consortium, prompt, iterations, answers)
        _record_run(question, found, "stopped")
        raise QuestionInterrupted(found) from None
    if isinstance(outcome, UserError):
        _record_run(question, {"original_prompt": prompt}, str(outcome))
        raise outcome
    found = result_to_json(question.consortium, prompt, outcome, raw=True)
    _record_run(question, found)
    return found


def _record_run(question: ConsortiumQuestion, found: dict[str, Any], error: str = "") -> None:
    """Record a run and add its id to the result; a failure to record is only logged."""
    if not question.recorded:
        return
    try:
        number = RunLog().add(question.name, question.config, found, error)
    except UserError as why:
        log.warning("could not record the run: %s", why)
    else:
        found.setdefault("metadata", {})["run"] = number


def stream_progress_lines(
    question: ConsortiumQuestion, with_warnings: bool = True
) -> Generator[str, None, dict[str, Any]]:
    """Yield progress lines and return the result; closing the generator prevents further calls.

    Args:
        question: The question.
        with_warnings: Capture warnings logged by this package meanwhile, and yield them before the
            next event. Concurrent questions share them.

    Raises:
        UserError: There is no answer.
    """
    warnings, printed = WarningCollector(), set[str]()

    def new_warnings() -> list[str]:
        messages = [one for one in dict.fromkeys(warnings.pop_messages()) if one not in printed]
        printed.update(messages)
        return [f"warning: {one}" for one in messages]

    def run_question(on_event: OnEvent) -> dict[str, Any]:
        def forward_event(number: int, event: Any) -> None:
            lines: Any = [*new_warnings(), format_event(question.consortium, event)]
            on_event(number, lines)

        return answer_question(question, forward_event)

    def join_lines(event: tuple[int, list[str]]) -> str | None:
        return "\n".join(filter(None, event[1])) or None

    with warnings if with_warnings else nullcontext():
        try:
            found = yield from map_events(stream_events(run_question), join_lines)
        except UserError:
            yield from new_warnings()
            raise
        yield from new_warnings()
        return found


logger = logging.getLogger(__name__)

LEGACY_ARGUMENTS = {"minimum_iterations": "min_iterations", "judging_method": "strategy"}
"""Legacy argument names."""


def create_consortium(
    models: Sequence[str] | Mapping[str, int],
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
    max_tokens: int | None = None,
    members: MemberRegistry | None = None,
    config_name: str | None = None,
    **settings: Any,
) -> "Orchestrator":
    """Create a consortium, with the argument names of llm-consortium.

    Args:
        models: Members: names, optionally with a count and options as in "gpt-4o:2,temperature=1",
            or a mapping of names to counts.
        confidence_threshold: See `Consortium`; from 0 to 1, or 10 to 100 as percent.
            `minimum_iterations` and `judging_method` are legacy names of `min_iterations` and
            `strategy`.
        max_iterations: See `Consortium`.
        min_iterations: See `Consortium`.
        strategy: See `Consortium`.
        arbiter: Model that judges; `None`: see `swarm.consortium.cli.options.default_arbiter`.
        system_prompt: System prompt of the members; `None` is the default one.
        default_count: Number of answers of members without a count.
        raw: Include the arbiter's verbatim replies in results.
        log: Record runs, including failed ones, in consortium.db in llm's folder.
        temperature: Default temperature of calls; `None` leaves it to each model.
        max_tokens: Default maximum number of new tokens of an answer; `None` sends no limit to an
            endpoint.
        members: Registry of models; `None`: `MemberRegistry()`.
        config_name: Name of the consortium in recorded runs.
        **settings: Other fields of `ConsortiumSettings`, such as `quorum` or `roles`.

    Raises:
        UserError: A value is invalid, or a model, a package or a key is missing.
    """
    options = {
        "confidence_threshold": confidence_threshold,
        "max_iterations": max_iterations,
        "min_iterations": min_iterations,
        "strategy": strategy,
    }
    for old, new in LEGACY_ARGUMENTS.items():
        if old in settings:
            options[new] = settings.pop(old)
    if isinstance(models, str) or not models:
        raise UserError(
            f"models={models!r}: must be a list of at least one name, or a mapping to counts"
        )
    found = members or MemberRegistry()
    if isinstance(models, Mapping):
        specs = [MemberSpec(name, count) for name, count in models.items()]
    else:
        specs = [parse_member(one, found.is_known_name, default_count) for one in models]
    if arbiter is None:
        judge = default_arbiter(str(options["strategy"]), specs)
    else:
        judge = parse_member(arbiter, found.is_known_name)
    config = ConsortiumSettings.from_dict(
        {"system": system_prompt, **options, **settings, "members": specs, "arbiter": judge}
    )
    if (
        confidence_threshold != ConsortiumSettings.confidence_threshold
        and config.strategy in UNSURE
    ):
        logger.warning("confidence_threshold has no effect with strategy %s", config.strategy)
    return Orchestrator(config, config_name, found, raw, log, temperature, max_tokens)


class ConsortiumConfig(ConsortiumSettings):
    """`ConsortiumSettings` with the argument names of llm-consortium.

    Args:
        models: Names, or a mapping of names to counts; `members` in `ConsortiumSettings`.
        system_prompt: `system` in `ConsortiumSettings`.
        confidence_threshold, max_iterations: See `ConsortiumSettings`.
        minimum_iterations: `min_iterations` in `ConsortiumSettings`.
        arbiter: `None`: see `swarm.consortium.cli.options.default_arbiter`.
        **settings: Other fields of `ConsortiumSettings`, or legacy ones of llm-consortium.

    Raises:
        UserError: A value is invalid.
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
        options = {
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
        options |= {key: value for key, value in older.items() if value is not None}
        found, warnings = convert_settings(options)
        for warning in warnings:
            logger.warning("%s", warning)
        if found.get("arbiter") is None and isinstance(found.get("members"), (list, tuple)):
            names = [member_from_config("members", one) for one in found["members"]]
            found["arbiter"] = default_arbiter(str(found["strategy"]), names)
        validated = ConsortiumSettings.from_dict(found)
        super().__init__(
            **{field.name: getattr(validated, field.name) for field in fields(ConsortiumSettings)}
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON with the keys of llm-consortium; `from_dict` reads it.

        Members and arbiter are names and counts, or mappings if one has settings of its own.
        """
        found = super().to_dict()
        for old, new in RENAMED_KEYS.items():
            found[old] = found.pop(new)
        counts = {one.model: one.count for one in self.members}
        if self.members == tuple(MemberSpec(*pair) for pair in counts.items()):
            found["models"] = counts
        if self.arbiter and self.arbiter == MemberSpec(self.arbiter.model):
            found["arbiter"] = self.arbiter.model
        judging = self.strategy if self.strategy in ("pick-one", "rank") else "default"
        strategy = self.strategy if judging == "default" else "default"
        names = {new: old for old, new in LEGACY_STRATEGIES.items() if new != "default"}
        return {**found, "judging_method": judging, "strategy": names.get(strategy, strategy)}


class Orchestrator:
    """Answers prompts with a consortium, independently; several may run concurrently.

    Args:
        config: Settings of the consortium.
        config_name: Its name in recorded runs.
        members: Registry of its models.
        raw, log, temperature, max_tokens: See `create_consortium`.

    Attributes:
        consortium: The underlying model.

    Raises:
        UserError: A model, a package or a key is missing.
    """

    def __init__(
        self,
        config: ConsortiumSettings,
        config_name: str | None = None,
        members: MemberRegistry | None = None,
        raw: bool = False,
        log: bool = False,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.config, self.config_name, self.raw, self.log = config, config_name, raw, log
        self.request_fields = {"temperature": temperature, "max_new_tokens": max_tokens}
        self.consortium = build_consortium(config, (members or MemberRegistry()).model)
        self.consortium.check()

    def orchestrate(
        self, prompt: str | Sequence[Message], watch: OnEvent | None = None
    ) -> dict[str, Any]:
        """Answer a prompt; see `swarm.multi_agent.consortium.result_json.result_to_json`.

        Works beside a running event loop, as in a notebook, which is then blocked.

        Args:
            prompt: The question, or a conversation that ends with it.
            watch: Receives each event.

        Raises:
            UserError: There is no answer.
        """
        turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        if not turns or not turns[-1].content.strip():
            raise UserError(
                "the prompt is empty; give a question, or a conversation that ends with one"
            )
        question = ConsortiumQuestion(
            self.config_name, self.config, self.consortium, turns, self.request_fields, self.log
        )
        found = answer_question(question, watch)
        if not self.raw:
            for verdict in (found["synthesis"], *(one["synthesis"] for one in found["iterations"])):
                verdict.pop("raw_arbiter_response", None)
        return found

    async def aorchestrate(self, prompt: str | Sequence[Message]) -> dict[str, Any]:
        """Answer like `orchestrate`, without blocking the event loop.

        Cancelling it prevents further calls.
        """
        abandoned = threading.Event()

        def raise_if_cancelled(number: int, event: Any) -> None:
            if abandoned.is_set():
                raise Cancelled

        try:
            return await run_in_thread(self.orchestrate, prompt, raise_if_cancelled)
        finally:
            abandoned.set()


ConsortiumOrchestrator = Orchestrator
"""Its name in llm-consortium."""
