"""Results of a consortium: iterations, member answers and verdicts; and their JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

from swarm._util.replies import thoughts_of
from swarm.multi_agent.types import AgentAnswer, Transcript


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the answers of an iteration.

    Attributes:
        synthesis: The synthesized or chosen answer.
        confidence: Confidence from 0 to 1 that it is correct; `None` if unknown, which is not 0.
        reasoning: The arbiter's reasoning.
        analysis: Agreements and differences of the answers.
        dissent: Relevant points that contradict the synthesis.
        needs_iteration: True if the arbiter requests another iteration.
        refinement_areas: Topics of that iteration.
        ranking: Indices of the iteration's answers, from 0, best first; empty without a ranking.
        source: "read": from the arbiter's reply; "repaired": from its second attempt; "fallback":
            the reply was missing or could not be parsed; "counted": from votes.
        raw: The arbiter's reply verbatim.
        finish: The reply's finish reason; see `Completion.finish`.
    """

    synthesis: str
    confidence: float | None = None
    reasoning: str = ""
    analysis: str = ""
    dissent: str = ""
    needs_iteration: bool = False
    refinement_areas: tuple[str, ...] = ()
    ranking: tuple[int, ...] = ()
    source: str = "read"
    raw: str = ""
    finish: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON; without a ranking there is no such key."""
        found = {**asdict(self), "raw_arbiter_response": self.raw}
        del found["raw"]
        found["refinement_areas"] = list(self.refinement_areas)
        ranking = found.pop("ranking")
        return {**found, "ranking": list(ranking)} if ranking else found


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """A member's answer in an iteration.

    Attributes:
        answer: Result of the call.
        instance: Number among the members with this name, from 1.
        text: Text shown to others: without reasoning and confidence.
        confidence: The member's confidence, from 0 to 1; `None` if it gave none.
    """

    answer: AgentAnswer
    instance: int
    text: str = ""
    confidence: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the answer or the error, with confidence and usage, to JSON."""
        answer, completion = self.answer, self.answer.completion
        found: dict[str, Any] = {"model": answer.name, "instance": self.instance}
        if answer.error:
            found["error"] = answer.error
        else:
            reasoning = [completion.reasoning.strip() if completion else ""]
            reasoning.append(thoughts_of(answer.text))
            found |= {"response": self.text, "confidence": self.confidence}
            found["reasoning"] = "\n\n".join(filter(None, reasoning))
        if completion:
            found |= {
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": completion.new_tokens,
                "cost": completion.known_cost,
                "seconds": completion.seconds,
                "finish": completion.finish,
            }
        return found


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration; also emitted as an event when it is finished.

    Attributes:
        number: From 1.
        answers: Answers of the members, in order, including failed ones.
        verdict: The verdict on them.
    """

    number: int
    answers: tuple[MemberAnswer, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        responses = [one.to_json() for one in self.answers]
        return {
            "iteration": self.number,
            "model_responses": responses,
            "synthesis": self.verdict.to_json(),
        }


@dataclass(slots=True)
class ConsortiumTranscript(Transcript):
    """Everything that led to a consortium's answer.

    Attributes:
        iterations: The iterations in order.
        best: Number of the iteration with the answer, from 1.
        stopped: Reason why there was no further iteration.
    """

    iterations: list[Iteration] = field(default_factory=list)
    best: int = 1
    stopped: str = ""
