"""A consortium: models answer apart, an arbiter judges, and that is repeated until it is sure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from swarm.collab import AgentSpec, OnEvent
from swarm.collab.collaboration import Collaboration
from swarm.collab.deliberation.deliberating import ConsortiumRun
from swarm.collab.deliberation.planning import CallBudget, calls_per_iteration, plan_calls
from swarm.collab.deliberation.progress import format_event
from swarm.collab.deliberation.roles import ROLES, role_prompt
from swarm.collab.deliberation.verdicts import ConsortiumTranscript, MemberAnswer
from swarm.collab.following import map_events, stream_events
from swarm.collab.older import LEGACY_STRATEGIES as OLDER
from swarm.collab.rounds import Script, run_in_lockstep, ignore_event
from swarm.errors import UserError
from swarm.models import Delta, Request, Stream
from swarm.models.trace import Trace

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
        roles: With "roles": names of `swarm.collab.deliberation.roles.ROLES` or texts, for one
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
            ("max_iterations", 1), ("min_iterations", 1), ("quorum", 1), ("seed", 0),
            ("context", 1), ("budget", 1), ("eliminate", 1), ("keep", 1),
        ):  # fmt: skip
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
        roles = [role_prompt(role) for role in self.roles or ROLES] if self.strategy == "roles" else []
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

    def collect_member_answers(self, request: Request, watch: OnEvent = ignore_event) -> list[MemberAnswer]:
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
