"""The way of one request through a consortium: its iterations, and which of them is the answer."""

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarm.collab import Answer, Slot
from swarm.collab.collaboration import Way, reasons, sampled
from swarm.collab.deliberation.arbiter import MEMBER, again
from swarm.collab.deliberation.planning import calls
from swarm.collab.deliberation.said import answer_of
from swarm.collab.deliberation.strategies import JUDGES, UNSURE, Sitting
from swarm.collab.deliberation.verdicts import Deliberation, Iteration, Opinion
from swarm.collab.history import Turns, told, turns_of
from swarm.collab.rounds import EMPTY, Call, Script
from swarm.errors import UserError
from swarm.models import Completion, Request
from swarm.models.stops import cut

if TYPE_CHECKING:
    from swarm.collab.consortium import Consortium, Seat


class Deliberating(Way[Deliberation]):
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
        super().__init__(consortium, request, Deliberation(), logged)
        self.consortium, self._tell, self.seats = consortium, tell, list(consortium.seats)

    def script(self) -> Script[Deliberation]:
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
                iteration = yield from self._iteration(len(done) + 1)
            except UserError as error:
                if not done:
                    raise
                self.warn(f"{error}; the answer is that of an iteration before")
                self.stages.stopped = f"iteration {len(done) + 1} failed"
                break
            done.append(iteration)
            self._tell(iteration)
            self.stages.stopped = self._enough(iteration)
        best = max(done, key=lambda one: (_sure(one), one.number))
        self.stages.best = best.number
        return self.ended(cut(Completion(best.verdict.synthesis, finish="stop"), self.request.stop))

    def _iteration(self, number: int) -> Generator[list[Call], list[Answer], Iteration]:
        """One iteration; who does worst in it may have to leave."""
        seats = self.seats
        opinions = yield from self.opinions(number)
        sitting = Sitting(self, number, opinions)
        verdict = yield from JUDGES[self.consortium.strategy](sitting)
        if self.consortium.strategy == "elimination":
            stay = sitting.staying(verdict)
            verdict = replace(verdict, needs_iteration=len(stay) < len(seats))
            self.seats = [seats[place] for place in stay]
        return Iteration(number, tuple(opinions), verdict)

    def opinions(self, number: int) -> Generator[list[Call], list[Answer], list[Opinion]]:
        """What each member says in an iteration.

        Raises:
            UserError: Too few answered, or what they are told is too long.
        """
        came = yield self._asked(number)
        self.stages.layers.append(came)
        opinions = [_opinion(seat, answer) for seat, answer in zip(self.seats, came, strict=True)]
        answers = [one.answer for one in opinions]
        missing = reasons(answers)
        answered = sum(not answer.error for answer in answers)
        if answered < self.consortium.quorum:
            raise UserError(
                f"iteration {number}: {answered} of {len(came)} members answered and quorum is "
                f"{self.consortium.quorum}: {'; '.join(missing)}"
            )
        for reason in missing:
            self.warn(f"iteration {number}: {reason}")
        return opinions

    def _asked(self, number: int) -> list[Call]:
        """A call for each member."""
        asked = [(seat.slot.model, self._request(seat, number)) for seat in self.seats]
        numbered = sampled(asked, self.request.sample)
        return [
            self.call(seat.slot, request, number, "member", seat.sample)
            for seat, request in zip(self.seats, numbered, strict=True)
        ]

    def call(self, slot: Slot, request: Request, number: int, role: str, sample: int = 0) -> Call:
        """One call of an iteration."""
        return Call(slot, sample, request, number, self.consortium.max_iterations, role)

    def request_of(self, slot: Slot, prompt: str | Turns, most: int, **asked: Any) -> Request:
        """What a slot is asked, `most` new tokens where it says nothing else."""
        return replace(
            self.request,
            prompt=prompt,
            max_new_tokens=slot.max_tokens or most,
            temperature=self.request.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
            **asked,
        )

    def enough(self, read: Callable[[str], bool] | None = None) -> Callable[[str], bool] | None:
        """When a reply about answers is: where `read` says so, or nobody waits for it any more."""
        decided = self.request.decided
        if decided is None:
            return read
        return lambda text: decided("") or bool(read and read(text))

    def _request(self, seat: "Seat", number: int) -> Request:
        own = self.consortium.system
        system = MEMBER if own is None else own

        def write(turns: Turns) -> Turns:
            for text in (system, seat.slot.system, seat.role):
                turns = told(turns, text if text and text.strip() else None)
            if number == 1:
                return turns
            return again(turns, self.stages.iterations[-1], self.key(number))

        prompt = self.request.prompt
        written = self.written(write)
        if isinstance(prompt, str) and written == turns_of(prompt):
            return self.request_of(seat.slot, prompt, self.request.max_new_tokens)
        return self.request_of(seat.slot, written, self.request.max_new_tokens)

    def key(self, number: int) -> str:
        """What chance in one iteration follows from."""
        return json.dumps([self.consortium.seed, number, self.request.sample, self.request.prompt])

    def room(self, more: int = 1) -> bool:
        """Whether so many further calls are within the budget."""
        budget = self.consortium.budget
        return budget is None or len(self.stages.answers) + more <= budget

    def _enough(self, iteration: Iteration) -> str:
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
            return self._spent(f"max_cost={consortium.max_cost:g}", f"{spent:g} is spent")
        if not self.room(more := calls(consortium.strategy, len(self.seats))):
            made = len(self.stages.answers)
            return self._spent(f"budget={consortium.budget}", f"{made} calls made, {more} to come")
        return ""

    def _spent(self, limit: str, words: str) -> str:
        self.warn(f"{limit}: no further iteration, {words}")
        return limit


def _sure(iteration: Iteration) -> float:
    """The confidence; one that is unknown is lowest."""
    sure = iteration.verdict.confidence
    return -1.0 if sure is None else sure


def _opinion(seat: "Seat", answer: Answer) -> Opinion:
    """What the others get to read of an answer; one of thoughts alone is none."""
    if answer.error:
        return Opinion(answer, seat.instance)
    text, confidence = answer_of(answer.text)
    if not text:
        answer = replace(answer, error=EMPTY)
    return Opinion(answer, seat.instance, text, confidence)
