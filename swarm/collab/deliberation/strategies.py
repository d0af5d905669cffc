"""Strategies: how the answers of one iteration become a verdict."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarm.collab import Answer
from swarm.collab.collaboration import sampled
from swarm.collab.course import PICK_TOKENS, pick, picked
from swarm.collab.deliberation.arbiter import (
    PARTS,
    PICK,
    PICK_FORM,
    RANK,
    RANK_FORM,
    REVIEW,
    VERDICT,
    shuffled,
)
from swarm.collab.deliberation.rankings import ranking
from swarm.collab.deliberation.reading import verdict
from swarm.collab.deliberation.said import OPENS, without_thoughts
from swarm.collab.deliberation.sitting import UNBOUND, Sitting
from swarm.collab.deliberation.verdicts import Verdict
from swarm.collab.deliberation.votes import groups
from swarm.collab.history import told
from swarm.collab.rounds import Call

VERDICT_TOKENS = 1024
"""How many more than the answer the arbiter may write, for what stands around it."""

CHOICE_TOKENS = 1024
"""The most that an arbiter may write to choose or to rank; most of it is room for thoughts."""

STRAYED = 240
"""Characters without a choice, after which a reply that begins with no thoughts is given up."""

Judging = Generator[list[Call], list[Answer], Verdict]


def synthesis(sitting: Sitting, reviews: Sequence[str] = (), order: Sequence[int] = ()) -> Judging:
    """The arbiter writes the answer."""
    former = sitting.way.stages.iterations
    write = sitting.writing(
        VERDICT, list(sitting.labels), former=former, reviews=reviews, order=order
    )
    most = sitting.way.request.max_new_tokens + VERDICT_TOKENS
    reply = yield from sitting.consult(write, verdict, PARTS, most)
    places = tuple(sitting.labels[label] for label in order)
    if reply is None:
        return replace(sitting.own(None, places or sitting.surest()), ranking=places)
    if reply.found is None:
        said = without_thoughts(reply.text)
        return Verdict(said, ranking=places, how="fallback", raw=reply.text)
    found: Verdict = reply.found
    return replace(found, how=reply.how, ranking=places)


def pick_one(sitting: Sitting, labels: Sequence[int] = ()) -> Judging:
    """The arbiter chooses one answer, of those with these numbers."""
    labels = labels or list(sitting.labels)

    def read(said: str) -> int | None:
        number = pick(without_thoughts(said), max(labels))
        return number if number in labels else None

    most = min(max(sitting.way.request.max_new_tokens, PICK_TOKENS), CHOICE_TOKENS)
    write = sitting.writing(PICK, labels)
    decided = lambda said: picked(said) or strayed(said)  # noqa: E731
    reply = yield from sitting.consult(write, read, PICK_FORM, most, decided)
    if reply is None or reply.found is None:
        places = [sitting.labels[label] for label in labels]
        return sitting.own(reply, [place for place in sitting.surest() if place in places])
    place = (sitting.labels[reply.found],)
    return Verdict(sitting.text(reply.found), ranking=place, how=reply.how, raw=reply.text)


def strayed(said: str) -> bool:
    """Whether a reply that is being written is a text and no choice; one of thoughts goes on."""
    return len(said) > STRAYED and not OPENS.search(said)


def rank(sitting: Sitting) -> Judging:
    """The arbiter puts the answers in order."""
    labels = list(sitting.labels)
    least = PICK_TOKENS + 8 * len(labels)
    most = min(max(sitting.way.request.max_new_tokens, least), CHOICE_TOKENS + least)
    read, write = partial(ranking, labels=labels), sitting.writing(RANK, labels)
    reply = yield from sitting.consult(write, read, RANK_FORM, most)
    if reply is None or reply.found is None:
        return sitting.own(reply, sitting.surest())
    places = tuple(sitting.labels[label] for label in reply.found)
    return Verdict(sitting.text(reply.found[0]), ranking=places, how=reply.how, raw=reply.text)


def vote(sitting: Sitting) -> Judging:
    """The answer that most members gave; its share of the votes is the confidence."""
    places = sorted(sitting.labels.values())
    consortium = sitting.way.consortium
    texts = [sitting.opinions[place].text for place in places]
    found = sorted(groups(texts, consortium.similarity), key=len, reverse=True)
    order = [places[one] for group in found for one in group]
    counts = ", ".join(f"{len(group)}" for group in found)
    share = len(found[0]) / len(places)
    first = Verdict(texts[found[0][0]], share, f"votes: {counts}", ranking=tuple(order),
                    how="counted")  # fmt: skip
    tied = [places[group[0]] for group in found if len(group) == len(found[0])]
    if len(tied) == 1:
        return first
    if consortium.arbiter is None or not sitting.way.room():
        sitting.warn(f"the vote is tied ({counts}); the first answer is taken")
        return first
    labels = [label for label, place in sitting.labels.items() if place in tied]
    chosen = yield from pick_one(sitting, labels)
    return replace(chosen, confidence=share, analysis=first.analysis)


def peer_review(sitting: Sitting) -> Judging:
    """Each member judges the others' answers, then the arbiter all of it."""
    if len(sitting.labels) < 2:
        return (yield from synthesis(sitting))
    shown = {label: _others(sitting, label) for label in sitting.labels}
    came = yield _reviewing(sitting, shown)
    sitting.way.stages.layers.append(came)
    reviews: list[str] = []
    points: dict[int, list[float]] = {label: [] for label in sitting.labels}
    for answer, others in zip(came, shown.values(), strict=True):
        said = without_thoughts(answer.text)
        order = sorted(others) if len(others) == 1 else ranking(said, sorted(others))
        if answer.error or not said or order is None:
            sitting.warn(f"{answer.name}: {answer.error or 'its review could not be read'}")
            continue
        reviews.append(said)
        for place, label in enumerate(order):
            points[label].append(1 - place / max(1, len(order) - 1))
    # Nobody reviews itself, so that not all are judged equally often: the mean counts (Borda).
    mean = {label: sum(given) / len(given) if given else 0.0 for label, given in points.items()}
    order = sorted(mean, key=lambda label: (-mean[label], sitting.labels[label]))
    return (yield from synthesis(sitting, reviews, order if reviews else ()))


def _others(sitting: Sitting, label: int) -> list[int]:
    """The numbers that the member behind this one gets to see, in an order of its own."""
    others = [other for other in sitting.labels if other != label]
    key = f"{sitting.way.key(sitting.number)} {label}"
    return [others[place] for place in shuffled(len(others), key)]


def _reviewing(sitting: Sitting, shown: Mapping[int, Sequence[int]]) -> list[Call]:
    """A call for each member that answered, about the answers that it is shown."""
    way = sitting.way
    most = way.request.max_new_tokens + VERDICT_TOKENS
    asked = []
    for label, others in shown.items():
        seat = way.seats[sitting.labels[label]]
        turns = told(way.written(sitting.writing(REVIEW, others)), seat.slot.system)
        asked.append(
            (seat, way.request_of(seat.slot, turns, most, decided=way.enough(), **UNBOUND))
        )
    numbered = sampled([(seat.slot.model, request) for seat, request in asked], way.request.sample)
    return [
        way.call(seat.slot, request, sitting.number, "reviewer", seat.sample)
        for (seat, _), request in zip(asked, numbered, strict=True)
    ]


UNSURE = ("pick-one", "rank", "elimination")
"""Strategies of which no verdict says how sure it is, so that a threshold is without effect."""

JUDGES: dict[str, Callable[[Sitting], Judging]] = {
    "default": synthesis,
    "pick-one": pick_one,
    "rank": rank,
    "vote": vote,
    "elimination": rank,
    "roles": synthesis,
    "peer-review": peer_review,
}
