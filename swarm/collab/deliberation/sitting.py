"""The answers of one iteration while they are judged: who may be asked about them, and how."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarm.collab import Answer, Slot
from swarm.collab.deliberation.arbiter import judged, repaired, shuffled
from swarm.collab.deliberation.said import without_thoughts
from swarm.collab.deliberation.verdicts import Opinion, Verdict
from swarm.collab.history import Turns, told
from swarm.collab.rounds import Call
from swarm.errors import UserError
from swarm.models import Request

if TYPE_CHECKING:
    from swarm.collab.deliberation.deliberating import Deliberating

UNBOUND: dict[str, Any] = {"stop": (), "top_logprobs": 0}
"""What holds for an answer does not hold for what is written about answers."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the arbiter was asked for.

    Attributes:
        found: As it was read; `None` if it could not be.
        text: Word by word.
        how: "read" or "repaired".
    """

    found: Any
    text: str
    how: str = "read"


class Sitting:
    """The answers of one iteration while they are judged; they are called by numbers from 1.

    Args:
        way: The request's.
        number: The iteration's.
        opinions: Of all members.

    Attributes:
        labels: For each number the place of its answer in `opinions`, in an order by chance.
    """

    def __init__(self, way: "Deliberating", number: int, opinions: Sequence[Opinion]) -> None:
        self.way, self.number, self.opinions = way, number, opinions
        heard = [place for place, one in enumerate(opinions) if not one.answer.error]
        order = shuffled(len(heard), way.key(number))
        self.labels = {label: heard[place] for label, place in enumerate(order, 1)}

    def text(self, label: int) -> str:
        """What the answer of this number says."""
        return self.opinions[self.labels[label]].text

    def writing(self, wanted: str, labels: Sequence[int], **more: Any) -> Callable[[Turns], Turns]:
        """Puts to a conversation these answers, and what is to be written about them."""
        answers = [(label, self.text(label)) for label in labels]
        key = self.way.key(self.number)
        return lambda turns: judged(turns, answers, wanted, key, **more)

    def consult(
        self,
        write: Callable[[Turns], Turns],
        read: Callable[[str], Any],
        form: str,
        most: int,
        enough: Callable[[str], bool] | None = None,
    ) -> Generator[list[Call], list[Answer], Reply | None]:
        """Ask the arbiter, and once more where its reply cannot be read; or else the fallback.

        Args:
            write: Puts to the conversation what is asked.
            read: Reads a reply; `None` if it cannot.
            form: What a reply should look like.
            most: New tokens.
            enough: Whether of a reply there is all that is read.

        Returns:
            `None` if nobody replied.
        """
        consortium = self.way.consortium
        for slot, role in ((consortium.arbiter, "arbiter"), (consortium.fallback, "fallback")):
            if slot is None or not self.way.room():
                continue
            try:
                turns = self.way.written(write)
            except UserError as error:
                self.warn(str(error))
                return None
            for text in (consortium.system, slot.system):  # what holds for the answer, too
                turns = told(turns, text or None)
            request = self.way.request_of(
                slot, turns, most, decided=self.way.enough(enough), **UNBOUND
            )
            said = yield from self._ask(slot, role, request)
            if not said or not without_thoughts(said):
                continue
            found, how = read(said), "read"
            if found is None and self.way.room():
                anew = replace(request, prompt=repaired(turns, said, form),
                               timeout=self.way.time_left(slot))  # fmt: skip
                once_more = yield from self._ask(slot, role, anew)
                found = read(once_more) if once_more else None
                said, how = (said, how) if found is None else (once_more, "repaired")
            if found is None:
                self.warn(f"{slot.name}: its reply could not be read: {said[:80]!r}")
            return Reply(found, said, how)
        return None

    def _ask(
        self, slot: Slot, role: str, request: Request
    ) -> Generator[list[Call], list[Answer], str]:
        """The reply; empty where there is none, which is a warning."""
        came = yield [self.way.call(slot, request, self.number, role)]
        self.way.stages.layers.append(came)
        if came[0].error:
            self.warn(f"{slot.name}: {came[0].error}")
            return ""
        return came[0].text

    def warn(self, words: str) -> None:
        """Tell it with the iteration's number."""
        self.way.warn(f"iteration {self.number}: {words}")

    def surest(self) -> list[int]:
        """Places of the answers, the one first whose member is surest of it."""
        places = sorted(self.labels.values())
        return sorted(places, key=lambda place: -(self.opinions[place].confidence or 0.0))

    def own(self, reply: Reply | None, order: Sequence[int]) -> Verdict:
        """A member's own answer, where the arbiter was of no use: of these places the first."""
        one = self.opinions[order[0]]
        self.warn(f"there is no verdict; the answer is that of {one.answer.name}, {one.instance}")
        return Verdict(one.text, how="fallback", raw=reply.text if reply else "")

    def staying(self, verdict: Verdict) -> list[int]:
        """Places of the members that stay when the worst ones leave, in their order."""
        order = [*(verdict.ranking or self.surest())]
        order += [place for place in range(len(self.opinions)) if place not in order]
        keep, eliminate = self.way.consortium.keep, self.way.consortium.eliminate
        return sorted(order[: max(keep, len(order) - eliminate)])
