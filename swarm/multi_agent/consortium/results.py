"""What a consortium came to: the iterations of a request, and what was judged of each."""

from dataclasses import dataclass, field

from swarm.multi_agent.types import AgentAnswer, Transcript


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an iteration's answers were judged to come to.

    Attributes:
        synthesis: The answer that was made of them, or the one that was chosen.
        confidence: From 0 to 1, that it is right; `None` where nobody said, which is not 0.
        reasoning: How the arbiter came to it.
        analysis: What the answers agree and differ in.
        dissent: What of them is at odds with the synthesis and worth knowing.
        needs_iteration: Whether the arbiter wants another iteration.
        refinement_areas: What that should be about.
        ranking: Places in the iteration's answers, from 0, best first; empty if nobody ranked.
        how: "read": from the arbiter's reply; "repaired": from its second writing of it;
            "fallback": its reply could not be read, or there was none; "counted": without one.
        raw: The arbiter's reply, word by word.
    """

    synthesis: str
    confidence: float | None = None
    reasoning: str = ""
    analysis: str = ""
    dissent: str = ""
    needs_iteration: bool = False
    refinement_areas: tuple[str, ...] = ()
    ranking: tuple[int, ...] = ()
    how: str = "read"
    raw: str = ""


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """What one member said in an iteration.

    Attributes:
        answer: The call, as it came.
        instance: Which of the members of this name, from 1.
        text: What the others get to read: without thoughts and without the confidence.
        confidence: Its own, from 0 to 1; `None` where it said none.
    """

    answer: AgentAnswer
    instance: int
    text: str = ""
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration; an event, too, as soon as it is over.

    Attributes:
        number: From 1.
        opinions: Of the members that were asked, in their order, those that failed too.
        verdict: What they came to.
    """

    number: int
    opinions: tuple[MemberAnswer, ...]
    verdict: Verdict


@dataclass(slots=True)
class ConsortiumTranscript(Transcript):
    """All that led to a consortium's answer.

    Attributes:
        iterations: In their order.
        best: Which of them is the answer, from 1.
        stopped: Why there was no further iteration, in words.
    """

    iterations: list[Iteration] = field(default_factory=list)
    best: int = 1
    stopped: str = ""
