"""The way of one request through a consortium: its iterations, and which of them is the answer."""

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarm.collab import AgentAnswer, AgentSpec
from swarm.collab.collaboration import RequestContext, failure_reasons, number_samples
from swarm.collab.deliberation.arbiter import MEMBER_PROMPT, add_previous_iteration
from swarm.collab.deliberation.planning import calls_per_iteration
from swarm.collab.deliberation.said import split_confidence
from swarm.collab.deliberation.strategies import STRATEGY_FUNCTIONS, UNSURE, JudgingRound
from swarm.collab.deliberation.verdicts import ConsortiumTranscript, Iteration, MemberAnswer
from swarm.collab.history import Messages, add_system_text, prompt_to_messages
from swarm.collab.rounds import EMPTY_ANSWER, AgentCall, Script
from swarm.errors import UserError
from swarm.models import Completion, Request
from swarm.models.stops import truncate_at_stop

if TYPE_CHECKING:
    from swarm.collab.consortium import Consortium, ConsortiumMember


class ConsortiumRun(RequestContext[ConsortiumTranscript]):
    """One request on its way; `script` is run by `swarm.collab.rounds`.

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
        return self.build_transcript(truncate_at_stop(Completion(best.verdict.synthesis, finish="stop"), self.request.stop))

    def _run_iteration(self, number: int) -> Generator[list[AgentCall], list[AgentAnswer], Iteration]:
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

    def collect_member_answers(self, number: int) -> Generator[list[AgentCall], list[AgentAnswer], list[MemberAnswer]]:
        """What each member says in an iteration.

        Raises:
            UserError: Too few answered, or what they are told is too long.
        """
        came = yield self._build_member_calls(number)
        self.stages.layers.append(came)
        opinions = [_to_member_answer(seat, answer) for seat, answer in zip(self.seats, came, strict=True)]
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

    def build_call(self, slot: AgentSpec, request: Request, number: int, role: str, sample: int = 0) -> AgentCall:
        """One call of an iteration."""
        return AgentCall(slot, sample, request, number, self.consortium.max_iterations, role)

    def build_request(self, slot: AgentSpec, prompt: str | Messages, most: int, **asked: Any) -> Request:
        """What a slot is asked, `most` new tokens where it says nothing else."""
        return replace(
            self.request,
            prompt=prompt,
            max_new_tokens=slot.max_tokens or most,
            temperature=self.request.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
            **asked,
        )

    def stop_condition(self, read: Callable[[str], bool] | None = None) -> Callable[[str], bool] | None:
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
            return add_previous_iteration(turns, self.stages.iterations[-1], self.random_key(number))

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
            return self._stop_at_limit(f"budget={consortium.budget}", f"{made} calls made, {more} to come")
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
