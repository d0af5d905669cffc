"""Python API of consortia: `create_consortium(...)` and `orchestrate(prompt)`.

The `Orchestrator` is behind the questions of commands and llm, too: it returns the result as JSON
and records the run.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from swarm._util.settings import parse_settings
from swarm._util.threads import Cancelled, run_in_thread
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.models.llm import LLM
from swarm.multi_agent.consortium.consortium import build_consortium, result_to_json
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.consortium.settings import (
    UNSURE,
    ConsortiumSettings,
    MemberSpec,
    parse_member,
    read_preset,
)
from swarm.multi_agent.consortium.store import RunLog
from swarm.multi_agent.scheduler import ignore_event
from swarm.multi_agent.types import AgentAnswer, OnEvent
from swarm.registry.registry import Roster

log = logging.getLogger(__name__)


class QuestionInterrupted(KeyboardInterrupt):
    """A question was interrupted.

    Attributes:
        found: Partial result; see `swarm.multi_agent.consortium.consortium.result_to_json`.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found


def default_arbiter(strategy: str, members: Sequence[MemberSpec]) -> MemberSpec | None:
    """Return the default arbiter: llm-consortium's if llm has it, else the first member.

    For the strategy "vote" there is none.
    """
    if strategy == "vote":
        return None
    classic = read_preset("classic").arbiter
    try:
        LLM(classic.model if classic else "").check()
    except UserError:
        return MemberSpec(model=members[0].model)
    return classic


def check_unused_options(given: Mapping[str, Any], strategy: str, flag: str = "--") -> None:
    """Check that all options have an effect; an unused threshold only causes a warning.

    Args:
        given: Options by name.
        strategy: The resulting strategy.
        flag: Prefix of option names in messages.

    Raises:
        UserError: An option has no effect.
    """
    for key in ("eliminate", "keep"):
        if given.get(key) is not None and strategy != "elimination":
            raise UserError(
                f"{flag}{key} has no effect with strategy {strategy}; add {flag}strategy "
                "elimination",
                2,
            )
    if given.get("confidence_threshold") is not None and strategy in UNSURE:
        log.warning(
            "confidence_threshold has no effect with strategy %s, which reports none", strategy
        )


ORIGINAL_ARGUMENTS = (
    *("models", "system_prompt", "confidence_threshold", "max_iterations"),
    *("minimum_iterations", "arbiter"),
)
"""Arguments of llm-consortium's configuration, in its order."""


class ConsortiumConfig(ConsortiumSettings):
    """`ConsortiumSettings` with the argument names of llm-consortium, and its keys in `to_dict`.

    Arguments may be given by position, as `ORIGINAL_ARGUMENTS`. Without an arbiter it is the
    default one of the strategy.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(self, *positional: Any, **settings: Any) -> None:
        named = dict(zip(ORIGINAL_ARGUMENTS, positional, strict=False))
        if len(named) < len(positional) or named.keys() & settings.keys():
            raise TypeError(f"by position only once each, and only {', '.join(ORIGINAL_ARGUMENTS)}")
        given = settings | named
        found = parse_settings(ConsortiumSettings, given)
        chosen = found.arbiter or default_arbiter(found.strategy, found.members)
        super().__init__(**{**dict(found), "arbiter": chosen})

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON; members and arbiter are names and counts where they set nothing else."""
        found = super().to_dict()
        found["system_prompt"] = found.pop("system")
        found["minimum_iterations"] = found.pop("min_iterations")
        members = found.pop("members")
        plain = not any(one.own_settings for one in self.members)
        found["models"] = {one["model"]: one["count"] for one in members} if plain else members
        if self.arbiter and not self.arbiter.own_settings:
            found["arbiter"] = self.arbiter.model
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ConsortiumConfig":
        """Return the settings that `to_dict` has written.

        Raises:
            UserError: A value is invalid.
        """
        return cls(**values)


class Orchestrator:
    """Answers prompts with a consortium, independently; several may run concurrently.

    Args:
        config: Settings of the consortium.
        config_name: Its name in recorded runs.
        members: Registry of its models.
        raw, log, temperature, max_tokens: See `create_consortium`.
        **request_fields: Further fields of `Request`, such as `seed`.

    Attributes:
        consortium: The underlying model.

    Raises:
        UserError: A value is invalid, or a model is unknown.
    """

    def __init__(
        self,
        config: ConsortiumSettings,
        config_name: str | None = None,
        members: Roster | None = None,
        raw: bool = False,
        log: bool = False,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **request_fields: Any,
    ) -> None:
        self.config, self.config_name, self.raw, self.log = config, config_name, raw, log
        limits = {"temperature": temperature, "max_new_tokens": max_tokens}
        self.request_fields = {**limits, **request_fields}
        self.consortium = build_consortium(config, (members or Roster(cache=None)).member)

    def orchestrate(
        self, prompt: str | Sequence[Message], watch: OnEvent = ignore_event
    ) -> dict[str, Any]:
        """Answer a prompt; see `swarm.multi_agent.consortium.consortium.result_to_json`.

        Works beside a running event loop, as in a notebook, which is then blocked.

        Args:
            prompt: The question, or a conversation that ends with it.
            watch: Receives each event.

        Raises:
            UserError: A model cannot be used, or there is no answer.
            QuestionInterrupted: It was interrupted; the members' answers so far are recorded.
        """
        turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        if not turns or not turns[-1].content.strip():
            raise UserError(
                "the prompt is empty; give a question, or a conversation that ends with one"
            )
        self.consortium.check()  # before any member is paid
        question = turns[-1].content
        iterations: list[Iteration] = []
        answers: list[AgentAnswer] = []

        def collect_event(number: int, event: Any) -> None:
            if isinstance(event, AgentAnswer):
                answers.append(event)
            elif isinstance(event, Iteration):
                iterations.append(event)
            watch(number, event)

        try:
            request = Request(turns, **self.request_fields)
            (outcome,) = self.consortium.run([request], collect_event)
        except KeyboardInterrupt:
            found = result_to_json(self.consortium, question, iterations, answers)
            self._record_run(found, "stopped")
            raise QuestionInterrupted(found) from None
        if isinstance(outcome, UserError):
            self._record_run({"original_prompt": question}, str(outcome))
            raise outcome
        found = result_to_json(
            self.consortium, question, outcome.iterations, outcome.answers, outcome
        )
        self._record_run(found)
        if not self.raw:
            for verdict in (found["synthesis"], *(one["synthesis"] for one in found["iterations"])):
                verdict.pop("raw_arbiter_response", None)
        return found

    def _record_run(self, found: dict[str, Any], error: str = "") -> None:
        """Record a run and add its id to the result; a failure to record is only logged."""
        if not self.log:
            return
        try:
            number = RunLog().add(self.config_name, self.config, found, error)
        except UserError as why:
            log.warning("could not record the run: %s", why)
        else:
            found.setdefault("metadata", {})["run"] = number

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


def create_consortium(
    models: Sequence[str] | Mapping[str, int],
    confidence_threshold: float | None = None,
    max_iterations: int = 3,
    min_iterations: int = 1,
    arbiter: str | None = None,
    system_prompt: str | None = None,
    default_count: int = 1,
    raw: bool = False,
    log: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
    members: Roster | None = None,
    config_name: str | None = None,
    **settings: Any,
) -> Orchestrator:
    """Create a consortium, with the argument names of llm-consortium.

    Args:
        models: Members: names, optionally with a count and options as in "gpt-4o:2,temperature=1",
            or a mapping of names to counts.
        confidence_threshold, max_iterations, min_iterations: See `ConsortiumOptions`;
            `minimum_iterations` and `judging_method` are accepted, too.
        arbiter: Model that judges; `None`: see `default_arbiter`.
        system_prompt: `system` in `ConsortiumOptions`.
        default_count: Number of answers of members without a count.
        raw: Include the arbiter's verbatim replies in results.
        log: Record runs, including failed ones, in consortium.db in llm's folder.
        temperature: Default temperature of calls; `None` leaves it to each model.
        max_tokens: Default maximum number of new tokens of an answer; `None` sends no limit to an
            endpoint.
        members: Registry of models; `None`: one without a cache, as users of llm expect.
        config_name: Name of the consortium in recorded runs.
        **settings: Others of `ConsortiumOptions`, such as `strategy` or `quorum`.

    Raises:
        UserError: A value is invalid, or a model, a package or a key is missing.
    """
    registry = members or Roster(cache=None)
    if isinstance(models, str) or not models:
        raise UserError(
            f"models={models!r}: must be a list of at least one name, or a mapping to counts"
        )
    named: Any = models
    if not isinstance(models, Mapping):
        named = [parse_member(one, registry.is_known_name, default_count) for one in models]
    judge = arbiter and parse_member(arbiter, registry.is_known_name)
    least = settings.pop("minimum_iterations", min_iterations)
    if system_prompt is not None:
        settings["system_prompt"] = system_prompt
    if confidence_threshold is not None:
        settings["confidence_threshold"] = confidence_threshold
    config = ConsortiumConfig(
        models=named,
        max_iterations=max_iterations,
        min_iterations=least,
        arbiter=judge or None,
        **settings,
    )
    check_unused_options({"confidence_threshold": confidence_threshold}, config.strategy)
    made = Orchestrator(config, config_name, registry, raw, log, temperature, max_tokens)
    made.consortium.check()
    return made
