"""How many calls a consortium's answer takes, before anybody is asked."""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.collab.consortium import Consortium


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
    return CallBudget(each[0], at_least, at_most, "\n".join([
        f"strategy {consortium.strategy}; members {who}; arbiter {arbiter}",
        f"{rounds}, the first of {each[0]} calls; {at_least} to {at_most} calls in all{limit}",
    ]))  # fmt: skip
