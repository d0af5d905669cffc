"""Consortium: members answer independently, an arbiter judges, until it is confident enough.

Contains the call budget, the run of one request through its iterations, and the model.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from math import ceil
from typing import Any, NamedTuple

from swarm._util.settings import parse_settings
from swarm._util.terminal import pluralize
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Model, Request, Stream, sum_usage, truncate_at_stop
from swarm.multi_agent.collaboration import Collaboration, map_events, stream_events
from swarm.multi_agent.consortium.prompts import (
    MEMBER_PROMPT,
    ROLES,
    add_previous_iteration,
    split_confidence,
)
from swarm.multi_agent.consortium.results import ConsortiumTranscript, Iteration, MemberAnswer
from swarm.multi_agent.consortium.settings import (
    UNSURE,
    ConsortiumOptions,
    ConsortiumSettings,
    MemberSpec,
)
from swarm.multi_agent.consortium.strategies import (
    STRATEGY_FUNCTIONS,
    ConsortiumMember,
    JudgingContext,
    JudgingRound,
)
from swarm.multi_agent.scheduler import AgentCall, Script, explain_empty_answer
from swarm.multi_agent.types import AgentAnswer, AgentSpec, Messages, add_system_text, format_call

TIMEOUT = 300.0
"""Default timeout in seconds of remote models: one that hangs would block all others. Local and
composite models have none.
"""

PATIENT = ("local", "search", "initial_experts", "function", "moa", "consortium")
"""Name prefixes, before the slash, of models without a default timeout."""


class CallBudget(NamedTuple):
    """Number of calls that one request may take.

    Attributes:
        calls: Calls of the first iteration, if all succeed and each reply can be parsed.
        minimum: Total calls with the minimum number of iterations.
        maximum: Maximum total calls, at most the budget.
        words: The same as text.
    """

    calls: int
    minimum: int
    maximum: int
    words: str


def calls_per_iteration(strategy: str, members: int) -> int:
    """Return the calls of one iteration, if each reply can be parsed."""
    if strategy == "vote":
        return members
    return members + 1 + (members if strategy == "peer-review" and members > 1 else 0)


class ConsortiumRun(JudgingContext):
    """One request in a consortium; `swarm.multi_agent.scheduler` runs its script.

    Args:
        consortium: The consortium.
        request: The request to answer.
        logged: Warnings already logged for requests of the same batch.
        notify: Receives each finished iteration.
    """

    def __init__(
        self,
        consortium: "Consortium",
        request: Request,
        logged: set[str],
        notify: Callable[[Any], None],
    ) -> None:
        super().__init__(consortium, request, ConsortiumTranscript(), logged)
        self.options, self._notify = consortium.options, notify
        self.arbiter, self.fallback = consortium.arbiter, consortium.fallback
        self.participants = list(consortium.participants)

    def iterate_rounds(self) -> Script[ConsortiumTranscript]:
        """Iterate until the verdict is confident enough.

        Raises:
            UserError: In the first iteration too few members answered.
        """
        iterations = self.stages.iterations
        while not self.stages.stopped:
            number = len(iterations) + 1
            try:
                iteration = yield from self._run_iteration(number)
            except UserError as error:
                if not iterations or self.is_decided():
                    raise
                self.add_warning(f"{error}; using the answer of an earlier iteration")
                self.stages.stopped = f"iteration {number} failed"
                break
            iterations.append(iteration)
            self._notify(iteration)
            self.stages.stopped = self._stop_reason(iteration)
        best = max(iterations, key=_by_confidence)
        self.stages.best = best.number
        final = Completion(best.verdict.synthesis, finish="stop")
        return self.build_transcript(truncate_at_stop(final, self.request.stop))

    def _run_iteration(
        self, number: int
    ) -> Generator[list[AgentCall], list[AgentAnswer], Iteration]:
        """Run one iteration; with "elimination", drop the worst members."""
        participants = self.participants
        asked = [(one.slot, one.sample, self._ask_member(one, number)) for one in participants]
        replies = yield from self.ask(self.build_calls(asked, number, "member"))
        opinions = [
            _to_member_answer(member, answer)
            for member, answer in zip(participants, replies, strict=True)
        ]
        answers = [one.answer for one in opinions]
        self.check_quorum(answers, self.options.quorum, f"iteration {number}", "members")
        judging = JudgingRound(self, number, opinions)
        verdict = yield from STRATEGY_FUNCTIONS[self.options.strategy](judging)
        if self.options.strategy == "elimination":
            remaining = judging.remaining_members(verdict)
            verdict = replace(verdict, needs_iteration=len(remaining) < len(participants))
            self.participants = [participants[index] for index in remaining]
        return Iteration(number, tuple(opinions), verdict)

    def _ask_member(self, member: ConsortiumMember, number: int) -> Request:
        custom = self.options.system
        system = MEMBER_PROMPT if custom is None else custom

        def write_prompt(turns: Messages) -> Messages:
            for text in (system, member.slot.system, member.role):
                turns = add_system_text(turns, text if text and text.strip() else None)
            if number == 1:
                return turns
            before = self.stages.iterations[-1]
            return add_previous_iteration(turns, before, self.random_key(number))

        written = self.write_prompt(write_prompt)
        return self.build_request(member.slot, written, self.request.max_new_tokens)

    def _stop_reason(self, iteration: Iteration) -> str:
        """Return why there is no further iteration; empty if there is one."""
        options, verdict = self.options, iteration.verdict
        confidence, threshold = verdict.confidence, options.confidence_threshold
        if iteration.number >= options.min_iterations and not verdict.needs_iteration:
            if confidence is None and (options.strategy in UNSURE or not verdict.raw):
                return "no confidence was reported"
            if confidence is not None and confidence >= threshold:
                return f"confidence {confidence:.3g} reached {threshold:g}"
        if iteration.number >= options.max_iterations:
            return f"max_iterations={options.max_iterations}"
        limit = details = ""
        spent = sum_usage(one.completion for one in self.stages.answers if one.completion).cost
        more = calls_per_iteration(options.strategy, len(self.participants))
        if options.max_cost is not None and spent >= options.max_cost:
            limit, details = f"max_cost={options.max_cost:g}", f"{spent:g} is spent"
        elif not self.has_budget(more):
            limit = f"budget={options.budget}"
            details = f"{len(self.stages.answers)} calls made, {more} needed"
        if limit:
            self.add_warning(f"{limit}: no further iteration, {details}")
        return limit


def _by_confidence(iteration: Iteration) -> tuple[float, int]:
    """Return the sort key of iterations: the confidence, unknown lowest; then the number."""
    confidence = iteration.verdict.confidence
    return (-1.0 if confidence is None else confidence), iteration.number


def _to_member_answer(member: ConsortiumMember, answer: AgentAnswer) -> MemberAnswer:
    """Convert an answer to the form shown to others; one with reasoning only counts as empty."""
    if answer.error or answer.completion is None:
        return MemberAnswer(answer, member.instance)
    text, confidence = split_confidence(answer.text)
    answer = replace(answer, error=explain_empty_answer(answer.completion, text))
    return MemberAnswer(answer, member.instance, text, confidence)


def format_event(consortium: "Consortium", event: Any) -> str:
    """Format an event in one line; empty if it is not to be shown."""
    if isinstance(event, AgentAnswer):
        return format_call(event, "iteration")
    if not isinstance(event, Iteration):
        return ""
    confidence = event.verdict.confidence
    shown = "unknown" if confidence is None else f"{confidence:.3g}"
    most = consortium.options.max_iterations
    return f"iteration {event.number} of at most {most}: confidence {shown}"


class Consortium(Collaboration[ConsortiumTranscript]):
    """Consortium, after llm-consortium (github.com/irthomasthomas/llm-consortium), as a model.

    In each iteration all members are called concurrently, each sample as a separate member, and
    then their answers are judged. Iteration ends when the confidence of the verdict reaches
    `confidence_threshold` and it requests no further iteration. A confidence that cannot be parsed
    does not reach it; strategies without a confidence ("pick-one", "rank", "elimination") and an
    unreachable arbiter end the iteration. From the second iteration on, members see the previous
    verdict. The answer is that of the iteration with the highest confidence, the last one on ties;
    an unknown confidence is lowest.

    Agent settings default to the request's; an arbiter may generate more tokens than the request's
    limit. `timeout` is for the complete answer.

    Args:
        members: Agents that answer.
        arbiter: Agent that judges; `None` is possible with "vote" only.
        strategy: "default": the arbiter writes the answer and its confidence. "pick-one": it
            chooses one answer. "rank": it ranks all, the first is the answer. "vote": the most
            frequent answer; the arbiter breaks ties. "elimination": like rank, and the last
            `eliminate` members leave until `keep` are left. "roles": like default, and each member
            has a role. "peer-review": members review each other's answers, then the arbiter judges.
        fallback: Agent that judges if the arbiter cannot be reached; `None`: the most confident
            member's answer is used.
        **options: See `ConsortiumOptions`. The default system prompt requests a confidence. What
            exceeds the budget is not started. Roles are names of
            `swarm.multi_agent.consortium.prompts.ROLES` or texts; `None` is all of those.

    Attributes:
        proposers: The members' agents.
        participants: The members, one per sample of an agent.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        members: Sequence[AgentSpec],
        arbiter: AgentSpec | None,
        strategy: str = "default",
        fallback: AgentSpec | None = None,
        **options: Any,
    ) -> None:
        self.proposers, self.arbiter, self.fallback = tuple(members), arbiter, fallback
        self.options = parse_settings(ConsortiumOptions, {**options, "strategy": strategy})
        self.participants = self._build_participants()
        self._check_agents()

    def with_budget(self, budget: int) -> "Consortium":
        """Return the same consortium with at most this number of calls per question.

        Raises:
            UserError: They do not suffice for an iteration.
        """
        found = copy(self)
        found.options = self.options.model_copy(update={"budget": budget})
        found._check_agents()
        return found

    def _build_participants(self) -> tuple[ConsortiumMember, ...]:
        with_roles = self.options.strategy == "roles"
        roles = [role_prompt(role) for role in self.options.roles or ROLES] if with_roles else []
        seen: Counter[str] = Counter()
        participants: list[ConsortiumMember] = []
        for slot in self.proposers:
            for sample in range(slot.count):
                seen[slot.name] += 1
                role = roles[len(participants) % len(roles)] if roles else None
                participants.append(ConsortiumMember(slot, sample, seen[slot.name], role))
        return tuple(participants)

    def _check_agents(self) -> None:
        options, count = self.options, len(self.participants)
        first = calls_per_iteration(options.strategy, count)
        judges = [slot for slot in (self.arbiter, self.fallback) if slot]
        several = [f"{slot.name}: count={slot.count}" for slot in judges if slot.count != 1]
        least = options.keep if options.strategy == "elimination" else None
        mistakes = {
            "members: name at least one": not count,
            f"arbiter: required by strategy={options.strategy}; only vote works without": (
                self.arbiter is None and options.strategy != "vote"
            ),
            "fallback: has no effect without an arbiter": bool(self.fallback and not self.arbiter),
            f"{', '.join(several)}: must be 1 for the arbiter": bool(several),
            f"quorum={options.quorum}: there are only {count} members": options.quorum > count,
            f"keep={least}: with {count} members none would be eliminated": (least or 0) >= count,
            f"quorum={options.quorum}: must be at most keep={least}": (
                least is not None and options.quorum > least
            ),
            f"budget={options.budget}: the first iteration takes {first} calls; raise it, or "
            "have fewer members": options.budget is not None and options.budget < first,
        }
        for message, is_made in mistakes.items():
            if is_made:
                raise UserError(message)

    @property
    def agent_specs(self) -> list[AgentSpec]:
        """All agents that may be called."""
        return [*self.proposers, *filter(None, (self.arbiter, self.fallback))]

    def plan_calls(self) -> CallBudget:
        """Compute the number of calls for one request, without those inside nested consortia."""
        options = self.options
        least, highest = self._iteration_bounds()
        members = [len(self.participants)] * highest
        if options.strategy == "elimination":
            eliminated = [options.eliminate * number for number in range(highest)]
            members = [max(options.keep, members[0] - one) for one in eliminated]
        each = [calls_per_iteration(options.strategy, members_left) for members_left in members]
        # An unparsable reply is requested again; a failed call goes to the fallback.
        more = 0 if self.arbiter is None else 2 if self.fallback else 1
        more += options.strategy == "vote" and self.arbiter is not None  # ties
        at_least, at_most = sum(each[:least]), sum(each) + more * highest
        if options.budget is not None:
            # It ends at the latest when the next iteration exceeds the budget.
            max_first = options.budget + 1 - max(each[1:least], default=0)
            at_least = min(at_least, max(each[0], max_first))
            at_most = min(at_most, options.budget)
        names = [s.name if s.count == 1 else f"{s.name} x {s.count}" for s in self.proposers]
        arbiter = self.arbiter.name if self.arbiter else "none"
        rounds = f"{least} to {highest} iterations"
        rounds = pluralize(highest, "iteration") if least == highest else rounds
        limit = "" if options.budget is None else f", budget {options.budget}"
        words = (
            f"strategy {options.strategy}; members {', '.join(names)}; arbiter {arbiter}\n"
            f"{rounds}, the first of {each[0]} calls; {at_least} to {at_most} calls in all{limit}"
        )
        return CallBudget(each[0], at_least, at_most, words)

    def _iteration_bounds(self) -> tuple[int, int]:
        """Return the minimum and maximum number of iterations."""
        options = self.options
        least, highest = options.min_iterations, options.max_iterations
        if options.strategy == "elimination":
            rounds = 1 + ceil((len(self.participants) - options.keep) / options.eliminate)
            least = highest = min(highest, max(least, rounds))
        # These strategies yield no confidence, so that only the minimum applies.
        return least, least if options.strategy in ("pick-one", "rank") else highest

    def stream(self, request: Request) -> Stream:
        """Stream the events as reasoning, one line each, and then the answer in one piece.

        Closing the generator prevents further calls.

        Raises:
            UserError: The request failed.
        """

        def to_reasoning(event: Any) -> Delta | None:
            line = format_event(self, event)
            return Delta(reasoning=f"{line}\n") if line else None

        events = stream_events(lambda watch: self.run([request], watch))
        (outcome,) = yield from map_events(events, to_reasoning)
        if isinstance(outcome, UserError):
            raise outcome
        yield Delta(outcome.final.text)
        return outcome.final

    def _iterate_rounds(
        self, request: Request, logged: set[str], notify: Callable[[Any], None]
    ) -> Script[ConsortiumTranscript]:
        return ConsortiumRun(self, request, logged, notify).iterate_rounds()


def role_prompt(role: str) -> str:
    """Return the prompt of a named role, or the text itself if it is not a name."""
    return ROLES.get(role.strip().lower(), role)


def build_consortium(settings: ConsortiumSettings, model_of: Callable[[str], Model]) -> Consortium:
    """Build the consortium of a configuration.

    Args:
        settings: The settings.
        model_of: Returns the model of a name; called once per name.

    Raises:
        UserError: A value is invalid, or `model_of` has no such model.
    """
    model_of = cache(model_of)
    strategy, roles = settings.strategy, settings.roles
    if strategy == "roles" and any(one.role for one in settings.members):
        own = [one.role for one in settings.members for _ in range(one.count)]
        others = roles or tuple(ROLES)
        roles = tuple(role or others[index % len(others)] for index, role in enumerate(own))

    def build_agent(one: MemberSpec) -> AgentSpec:
        given = one.model_dump(exclude={"model", "role"})
        if one.timeout is None and one.model.partition("/")[0] not in PATIENT:
            given["timeout"] = TIMEOUT
        role = one.role if strategy != "roles" else None
        texts = (one.system, role and role_prompt(role))
        given["system"] = "\n\n".join(text for text in texts if text) or None
        return AgentSpec(model_of(one.model), one.model, **given)

    options = {key: getattr(settings, key) for key in ConsortiumOptions.model_fields}
    return Consortium(
        [build_agent(one) for one in settings.members],
        build_agent(settings.arbiter) if settings.arbiter else None,
        fallback=build_agent(settings.fallback) if settings.fallback else None,
        **{**options, "roles": roles},
    )


def result_to_json(
    consortium: Consortium,
    prompt: str,
    iterations: Sequence[Iteration],
    answers: Sequence[AgentAnswer],
    transcript: ConsortiumTranscript | None = None,
) -> dict[str, Any]:
    """Convert a request to JSON, in the format of llm-consortium with additional fields.

    "model_responses" and "synthesis" are those of the best iteration; "iterations" contains all. An
    unknown confidence or cost is null. A "ranking" contains indices of the iteration's responses,
    from 0. A stopped request has no synthesis, and its last iteration the answers so far.

    Args:
        consortium: The consortium.
        prompt: The user's prompt.
        iterations: The finished iterations.
        answers: All calls, finished or stopped.
        transcript: The result; `None` if the request was stopped.
    """
    listed = [one.to_json() for one in iterations]
    current = max((one.layer for one in answers), default=0)
    if transcript is None and current > len(listed):
        members = [one for one in answers if one.layer == current and one.role == "member"]
        unread = [MemberAnswer(one, one.sample + 1, one.text).to_json() for one in members]
        listed.append({"iteration": current, "model_responses": unread, "synthesis": None})
    best = listed[transcript.best - 1 if transcript else -1] if listed else {}
    usage = sum_usage(one.completion for one in answers if one.completion)
    about: dict[str, Any] = {
        "models_used": dict(Counter(member.slot.name for member in consortium.participants)),
        "arbiter": consortium.arbiter.name if consortium.arbiter else None,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration_count": len(iterations),
        "strategy": consortium.options.strategy,
        "calls": len(answers),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "cost": usage.known_cost if usage.calls else None,
        "unpriced": usage.unknown_costs,
        "stopped": transcript.stopped if transcript else "interrupted",
    }
    if transcript:
        about |= {"best_iteration": transcript.best, "seconds": transcript.final.seconds}
        about["warnings"] = list(transcript.warnings)
    return {
        "original_prompt": prompt,
        "model_responses": best.get("model_responses", []),
        "synthesis": best["synthesis"] if transcript else None,
        "metadata": about,
        "iterations": listed,
    }
