"""A consortium: models answer apart, an arbiter judges, and that is repeated until it is sure."""

import json
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil
from typing import Any

from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Stream
from swarm.models.postprocess import truncate_at_stop
from swarm.models.trace import Trace
from swarm.multi_agent.collaboration import (
    Collaboration,
    RequestContext,
    failure_reasons,
    map_events,
    number_samples,
    stream_events,
)
from swarm.multi_agent.consortium.legacy_config import LEGACY_STRATEGIES as OLDER
from swarm.multi_agent.consortium.parsing import split_confidence
from swarm.multi_agent.consortium.prompts import (
    MEMBER_PROMPT,
    ROLES,
    add_previous_iteration,
    role_prompt,
)
from swarm.multi_agent.consortium.results import ConsortiumTranscript, Iteration, MemberAnswer
from swarm.multi_agent.consortium.strategies import STRATEGY_FUNCTIONS, UNSURE, JudgingRound
from swarm.multi_agent.scheduler import (
    EMPTY_ANSWER,
    AgentCall,
    Script,
    ignore_event,
    run_in_lockstep,
)
from swarm.multi_agent.types import (
    AgentAnswer,
    AgentSpec,
    Messages,
    OnEvent,
    add_system_text,
    prompt_to_messages,
)

# How many calls a consortium's answer takes, before anybody is asked.


@dataclass(frozen=True, slots=True)
class CallBudget:
    """What one request may take.

    Attributes:
        calls: Of the first iteration, if all answer and each reply can be read.
        least: In all, if no iteration is needed but those that there are in any case.
        most: In all, at worst; no more than the budget.
        words: The same for people.
    """

    calls: int
    least: int
    most: int
    words: str


def calls_per_iteration(strategy: str, members: int) -> int:
    """Calls of one iteration of so many members, if each reply can be read."""
    if strategy == "vote":
        return members
    return members + 1 + (members if strategy == "peer-review" and members > 1 else 0)


def iteration_bounds(consortium: "Consortium") -> tuple[int, int]:
    """How many there are at least and at most."""
    least, most = consortium.min_iterations, consortium.max_iterations
    if consortium.strategy == "elimination":
        rounds = 1 + ceil((len(consortium.seats) - consortium.keep) / consortium.eliminate)
        least = most = min(most, max(least, rounds))
    # Who chooses or ranks says nothing of how sure it is.
    return least, least if consortium.strategy in ("pick-one", "rank") else most


def plan_calls(consortium: "Consortium") -> CallBudget:
    """The calls of a consortium for one request; those inside a nested one are not counted."""
    least, most = iteration_bounds(consortium)
    members = [len(consortium.seats)] * most
    if consortium.strategy == "elimination":
        gone = [consortium.eliminate * number for number in range(most)]
        members = [max(consortium.keep, members[0] - one) for one in gone]
    each = [calls_per_iteration(consortium.strategy, some) for some in members]
    # A reply that cannot be read is written anew; a call that fails goes to the fallback.
    more = 0 if consortium.arbiter is None else 2 if consortium.fallback else 1
    more += consortium.strategy == "vote" and consortium.arbiter is not None  # a tie
    at_least, at_most = sum(each[:least]), sum(each) + more * most
    if consortium.budget is not None:
        # It ends at the latest where the next iteration has no room.
        room = consortium.budget + 1 - max(each[1:least], default=0)
        at_least = min(at_least, max(each[0], room))
        at_most = min(at_most, consortium.budget)
    who = ", ".join(
        slot.name if slot.count == 1 else f"{slot.name} x {slot.count}"
        for slot in consortium.proposers
    )
    arbiter = consortium.arbiter.name if consortium.arbiter else "nobody"
    rounds = f"{least}" if least == most else f"{least} to {most}"
    rounds += " iteration" if most == 1 else " iterations"
    limit = "" if consortium.budget is None else f", budget {consortium.budget}"
    return CallBudget(
        each[0],
        at_least,
        at_most,
        "\n".join(
            [
                f"strategy {consortium.strategy}; members {who}; arbiter {arbiter}",
                f"{rounds}, the first of {each[0]} calls; {at_least} to {at_most} calls in "
                f"all{limit}",
            ]
        ),
    )


# The way of one request through a consortium: its iterations, and which of them is the answer.


class ConsortiumRun(RequestContext[ConsortiumTranscript]):
    """One request on its way; `script` is run by `swarm.multi_agent.scheduler`.

    Args:
        consortium: Whose.
        request: To be answered.
        logged: Warnings that the log has already.
        tell: Is told of each iteration when it is over.

    Attributes:
        seats: The members that are still asked.
    """

    def __init__(
        self,
        consortium: "Consortium",
        request: Request,
        logged: set[str],
        tell: Callable[[Any], None],
    ) -> None:
        super().__init__(consortium, request, ConsortiumTranscript(), logged)
        self.consortium, self._tell, self.seats = consortium, tell, list(consortium.seats)

    def iterate_rounds(self) -> Script[ConsortiumTranscript]:
        """Iterate until the verdict is sure enough.

        Raises:
            UserError: Choices are to be scored, or of the first iteration too few answered, or what
                they said is too long.
        """
        if self.request.choices:
            raise UserError(
                "a consortium writes text and cannot score choices; have the task read the text "
                "instead (task.scoring=generate)"
            )
        done = self.stages.iterations
        while not self.stages.stopped:
            try:
                iteration = yield from self._run_iteration(len(done) + 1)
            except UserError as error:
                if not done:
                    raise
                self.add_warning(f"{error}; the answer is that of an iteration before")
                self.stages.stopped = f"iteration {len(done) + 1} failed"
                break
            done.append(iteration)
            self._tell(iteration)
            self.stages.stopped = self._stop_reason(iteration)
        best = max(done, key=lambda one: (_confidence_or_lowest(one), one.number))
        self.stages.best = best.number
        return self.build_transcript(
            truncate_at_stop(Completion(best.verdict.synthesis, finish="stop"), self.request.stop)
        )

    def _run_iteration(
        self, number: int
    ) -> Generator[list[AgentCall], list[AgentAnswer], Iteration]:
        """One iteration; who does worst in it may have to leave."""
        seats = self.seats
        opinions = yield from self.collect_member_answers(number)
        sitting = JudgingRound(self, number, opinions)
        verdict = yield from STRATEGY_FUNCTIONS[self.consortium.strategy](sitting)
        if self.consortium.strategy == "elimination":
            stay = sitting.remaining_members(verdict)
            verdict = replace(verdict, needs_iteration=len(stay) < len(seats))
            self.seats = [seats[place] for place in stay]
        return Iteration(number, tuple(opinions), verdict)

    def collect_member_answers(
        self, number: int
    ) -> Generator[list[AgentCall], list[AgentAnswer], list[MemberAnswer]]:
        """What each member says in an iteration.

        Raises:
            UserError: Too few answered, or what they are told is too long.
        """
        came = yield self._build_member_calls(number)
        self.stages.layers.append(came)
        opinions = [
            _to_member_answer(seat, answer) for seat, answer in zip(self.seats, came, strict=True)
        ]
        answers = [one.answer for one in opinions]
        missing = failure_reasons(answers)
        answered = sum(not answer.error for answer in answers)
        if answered < self.consortium.quorum:
            raise UserError(
                f"iteration {number}: {answered} of {len(came)} members answered and quorum is "
                f"{self.consortium.quorum}: {'; '.join(missing)}"
            )
        for reason in missing:
            self.add_warning(f"iteration {number}: {reason}")
        return opinions

    def _build_member_calls(self, number: int) -> list[AgentCall]:
        """A call for each member."""
        asked = [(seat.slot.model, self._build_member_request(seat, number)) for seat in self.seats]
        numbered = number_samples(asked, self.request.sample)
        return [
            self.build_call(seat.slot, request, number, "member", seat.sample)
            for seat, request in zip(self.seats, numbered, strict=True)
        ]

    def build_call(
        self, slot: AgentSpec, request: Request, number: int, role: str, sample: int = 0
    ) -> AgentCall:
        """One call of an iteration."""
        return AgentCall(slot, sample, request, number, self.consortium.max_iterations, role)

    def build_request(
        self, slot: AgentSpec, prompt: str | Messages, most: int, **asked: Any
    ) -> Request:
        """What a slot is asked, `most` new tokens where it says nothing else."""
        return replace(
            self.request,
            prompt=prompt,
            max_new_tokens=slot.max_tokens or most,
            temperature=self.request.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
            **asked,
        )

    def stop_condition(
        self, read: Callable[[str], bool] | None = None
    ) -> Callable[[str], bool] | None:
        """When a reply about answers is: where `read` says so, or nobody waits for it any more."""
        decided = self.request.decided
        if decided is None:
            return read
        return lambda text: decided("") or bool(read and read(text))

    def _build_member_request(self, seat: "ConsortiumMember", number: int) -> Request:
        own = self.consortium.system
        system = MEMBER_PROMPT if own is None else own

        def write_prompt(turns: Messages) -> Messages:
            for text in (system, seat.slot.system, seat.role):
                turns = add_system_text(turns, text if text and text.strip() else None)
            if number == 1:
                return turns
            return add_previous_iteration(
                turns, self.stages.iterations[-1], self.random_key(number)
            )

        prompt = self.request.prompt
        written = self.write_within_context(write_prompt)
        if isinstance(prompt, str) and written == prompt_to_messages(prompt):
            return self.build_request(seat.slot, prompt, self.request.max_new_tokens)
        return self.build_request(seat.slot, written, self.request.max_new_tokens)

    def random_key(self, number: int) -> str:
        """What chance in one iteration follows from."""
        return json.dumps([self.consortium.seed, number, self.request.sample, self.request.prompt])

    def has_budget(self, more: int = 1) -> bool:
        """Whether so many further calls are within the budget."""
        budget = self.consortium.budget
        return budget is None or len(self.stages.answers) + more <= budget

    def _stop_reason(self, iteration: Iteration) -> str:
        """Why there is no further iteration; empty if there is one."""
        consortium, verdict = self.consortium, iteration.verdict
        sure, threshold = verdict.confidence, consortium.confidence_threshold
        if iteration.number >= consortium.min_iterations and not verdict.needs_iteration:
            if sure is None and (consortium.strategy in UNSURE or not verdict.raw):
                return "nobody said how sure it is"
            if sure is not None and sure >= threshold:
                return f"confidence {sure:.3g} reached {threshold:g}"
        if iteration.number >= consortium.max_iterations:
            return f"max_iterations={consortium.max_iterations}"
        spent = sum(one.completion.cost for one in self.stages.answers if one.completion)
        if consortium.max_cost is not None and spent >= consortium.max_cost:
            return self._stop_at_limit(f"max_cost={consortium.max_cost:g}", f"{spent:g} is spent")
        if not self.has_budget(more := calls_per_iteration(consortium.strategy, len(self.seats))):
            made = len(self.stages.answers)
            return self._stop_at_limit(
                f"budget={consortium.budget}", f"{made} calls made, {more} to come"
            )
        return ""

    def _stop_at_limit(self, limit: str, words: str) -> str:
        self.add_warning(f"{limit}: no further iteration, {words}")
        return limit


def _confidence_or_lowest(iteration: Iteration) -> float:
    """The confidence; one that is unknown is lowest."""
    sure = iteration.verdict.confidence
    return -1.0 if sure is None else sure


def _to_member_answer(seat: "ConsortiumMember", answer: AgentAnswer) -> MemberAnswer:
    """What the others get to read of an answer; one of thoughts alone is none."""
    if answer.error:
        return MemberAnswer(answer, seat.instance)
    text, confidence = split_confidence(answer.text)
    if not text:
        answer = replace(answer, error=EMPTY_ANSWER)
    return MemberAnswer(answer, seat.instance, text, confidence)


# What goes on in a consortium, a line an event.


def format_event(consortium: "Consortium", event: Any) -> str:
    """The event in words; empty where it is none to tell."""
    if isinstance(event, AgentAnswer):
        sample = f" #{event.sample + 1}" if event.sample else ""
        who = f"iteration {event.layer}, {event.role} {event.name}{sample}"
        if event.error or event.completion is None:
            return f"{who}: {event.error}"
        tokens = _format_token_count(event.completion.new_tokens)
        return f"{who}: {event.completion.seconds:.1f} s, {tokens}"
    if isinstance(event, Iteration):
        sure = event.verdict.confidence
        words = "unknown" if sure is None else f"{sure:.3g}"
        return (
            f"iteration {event.number} of at most {consortium.max_iterations}: confidence {words}"
        )
    return ""


def _format_token_count(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


STRATEGIES = ("default", "pick-one", "rank", "vote", "elimination", "roles", "peer-review")


@dataclass(frozen=True, slots=True)
class ConsortiumMember:
    """One member: a slot's sample, with a role of its own.

    Attributes:
        slot: Whose.
        sample: Which of the slot's samples, from 0.
        instance: Which of the members of this name, from 1.
        role: What it is told of its part; `None` is nothing.
    """

    slot: AgentSpec
    sample: int
    instance: int
    role: str | None = None


class Consortium(Collaboration[ConsortiumTranscript]):
    """A model made of models, after llm-consortium (github.com/irthomasthomas/llm-consortium).

    In each iteration all members are asked at once, each sample as a member of its own. Then their
    answers are judged. It ends when the verdict is as sure as `confidence_threshold` and asks for
    no further iteration. A confidence that cannot be read is not sure enough; strategies that ask
    for none ("pick-one", "rank", "elimination") and an arbiter that cannot be reached end without
    one. From the second iteration on members see what became of the former one. The answer is that
    of the iteration with the highest confidence; of several the last, and an unknown confidence is
    the lowest.

    What a slot does not say is as the request has it; an arbiter may write more than the request's
    answer may be long. `timeout` is for the whole.

    Args:
        members: Who answers.
        arbiter: Who judges; `None` with "vote" alone.
        strategy: "default": the arbiter writes the answer, and how sure it is. "pick-one": it
            chooses one. "rank": it puts all in order, the first is the answer. "vote": the answer
            that most gave; the arbiter chooses where there is a tie. "elimination": as rank, and
            the last `eliminate` members leave until `keep` are left. "roles": as default, and each
            member has a role. "peer-review": members judge each other's answers, then the arbiter.
        confidence_threshold: From 0 to 1.
        max_iterations: Iterations at most and at least.
        min_iterations: See `max_iterations`.
        system: What members are told; `None` is a text of the house that asks for a confidence, ""
            is nothing.
        quorum: How many members have to answer in an iteration.
        fallback: Who judges where the arbiter cannot be reached; `None`: the surest member's answer
            is taken.
        seed: Of the order in which answers are shown.
        context: The most tokens of a prompt, at four characters a token; the oldest exchanges of a
            longer conversation are left out. `None` leaves nothing out.
        budget: The most calls for a request; what does not fit any more is not begun. `None` is no
            limit, as of `max_cost`.
        max_cost: Once as much is spent, there is no further iteration.
        roles: With "roles": names of `swarm.multi_agent.consortium.prompts.ROLES` or texts, for one
            member after the other and from the first again; `None` is all of those.
        eliminate: See "elimination".
        keep: See `eliminate`.
        similarity: With "vote": from which likeness on (by difflib, 0 to 1) texts are one answer;
            1: only if they are the same but for case, marks and articles.
        trace: Where every call is recorded; `None` records none.

    Attributes:
        proposers: The members' slots.
        seats: The members.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        members: Sequence[AgentSpec],
        arbiter: AgentSpec | None,
        strategy: str = "default",
        confidence_threshold: float = 0.8,
        max_iterations: int = 3,
        min_iterations: int = 1,
        system: str | None = None,
        quorum: int = 1,
        fallback: AgentSpec | None = None,
        seed: int = 0,
        context: int | None = None,
        budget: int | None = None,
        max_cost: float | None = None,
        roles: Sequence[str] | None = None,
        eliminate: int = 1,
        keep: int = 2,
        similarity: float = 1.0,
        trace: Trace | None = None,
    ) -> None:
        self.proposers, self.arbiter, self.fallback = tuple(members), arbiter, fallback
        self.strategy, self.confidence_threshold = strategy, confidence_threshold
        self.max_iterations, self.min_iterations = max_iterations, min_iterations
        self.system, self.quorum, self.seed, self.context = system, quorum, seed, context
        self.budget, self.max_cost, self.similarity = budget, max_cost, similarity
        self.roles = None if roles is None else tuple(roles)
        self.eliminate, self.keep, self.trace = eliminate, keep, trace
        self._check_numbers()
        self._check_shape()
        self.seats = self._build_seats()
        self._check_size()

    def _check_numbers(self) -> None:
        for key, least in (
            ("max_iterations", 1),
            ("min_iterations", 1),
            ("quorum", 1),
            ("seed", 0),
            ("context", 1),
            ("budget", 1),
            ("eliminate", 1),
            ("keep", 1),
        ):
            value = getattr(self, key)
            if value is None and key in ("context", "budget"):
                continue
            if type(value) is not int or value < least:
                raise UserError(f"{key}={value!r}: must be a whole number from {least} on")
        for key, most in (("confidence_threshold", 1), ("similarity", 1), ("max_cost", None)):
            value = getattr(self, key)
            if value is None and key == "max_cost":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= (most or float("inf")):
                raise UserError(
                    f"{key}={value!r}: must be a number from 0 {'to 1' if most else 'on'}"
                )
        if self.min_iterations > self.max_iterations:
            raise UserError(
                f"min_iterations={self.min_iterations}: is above max_iterations="
                f"{self.max_iterations}; raise that, or lower this"
            )

    def _check_shape(self) -> None:
        if self.strategy not in STRATEGIES:
            meant = OLDER.get(str(self.strategy))
            near = [meant] if meant else get_close_matches(str(self.strategy), STRATEGIES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}{hint}"
            )
        if not self.proposers:
            raise UserError("members: none is given; name one at least")
        if self.arbiter is None and self.strategy != "vote":
            raise UserError(f"arbiter: strategy={self.strategy} needs one; only vote does without")
        if self.fallback and self.arbiter is None:
            raise UserError("fallback: it stands in for an arbiter, and there is none")
        for slot in (self.arbiter, self.fallback):
            if slot is not None and slot.count != 1:
                raise UserError(f"{slot.name}: count={slot.count}: there is one arbiter")
        if self.system is not None and not isinstance(self.system, str):
            raise UserError(f"system={self.system!r}: must be null or a text")
        if self.roles is not None:
            if self.strategy != "roles":
                raise UserError(f"roles: strategy={self.strategy} has none; set strategy=roles")
            if not self.roles or not all(isinstance(r, str) and r.strip() for r in self.roles):
                raise UserError(f"roles={list(self.roles)!r}: must be null or texts, one at least")

    def _check_size(self) -> None:
        many = len(self.seats)
        if self.quorum > many:
            raise UserError(f"quorum={self.quorum}: there are only {many} members")
        if self.strategy == "elimination" and self.keep >= many:
            raise UserError(f"keep={self.keep}: of {many} members none would be eliminated")
        if self.strategy == "elimination" and self.quorum > self.keep:
            raise UserError(f"quorum={self.quorum}: only keep={self.keep} members are left at last")
        first = calls_per_iteration(self.strategy, many)
        if self.budget is not None and self.budget < first:
            raise UserError(
                f"budget={self.budget}: the first iteration takes {first} calls; raise it, or have "
                "fewer members"
            )

    def _build_seats(self) -> tuple[ConsortiumMember, ...]:
        roles = (
            [role_prompt(role) for role in self.roles or ROLES] if self.strategy == "roles" else []
        )
        seen: Counter[str] = Counter()
        seats: list[ConsortiumMember] = []
        for slot in self.proposers:
            for sample in range(slot.count):
                seen[slot.name] += 1
                role = roles[len(seats) % len(roles)] if roles else None
                seats.append(ConsortiumMember(slot, sample, seen[slot.name], role))
        return tuple(seats)

    @property
    def agent_specs(self) -> list[AgentSpec]:
        """Who may be asked."""
        return [*self.proposers, *(one for one in (self.arbiter, self.fallback) if one)]

    def plan_calls(self) -> CallBudget:
        """What one request may take."""
        return plan_calls(self)

    def stream(self, request: Request) -> Stream:
        """What goes on as reasoning, a line an event, and the answer in one piece at the end.

        Closing it begins no further call.

        Raises:
            UserError: It came to nothing.
        """

        def event_to_reasoning(event: tuple[int, Any]) -> Delta | None:
            told = format_event(self, event[1])
            return Delta(reasoning=f"{told}\n") if told else None

        events = stream_events(lambda watch: self.run([request], watch))
        (came,) = yield from map_events(events, event_to_reasoning)
        if isinstance(came, UserError):
            raise came
        yield Delta(came.final.text)
        return came.final

    def collect_member_answers(
        self, request: Request, watch: OnEvent = ignore_event
    ) -> list[MemberAnswer]:
        """What each member says to the request, of which nobody judges.

        Raises:
            UserError: Too few answered.
        """
        way = ConsortiumRun(self, request, set(), lambda event: None)
        (came,) = run_in_lockstep([way.collect_member_answers(1)], watch, self.trace)
        if isinstance(came, UserError):
            raise came
        return came

    def _iterate_rounds(
        self, request: Request, logged: set[str], tell: Callable[[Any], None]
    ) -> Script[ConsortiumTranscript]:
        return ConsortiumRun(self, request, logged, tell).iterate_rounds()
