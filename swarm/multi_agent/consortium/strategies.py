"""Strategies of a consortium: from the answers of one iteration to a verdict."""

import re
import unicodedata
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from difflib import SequenceMatcher
from functools import partial

from swarm._util.replies import (
    OPENING_TAG,
    has_number_pick,
    parse_number_pick,
    parse_ranking,
    strip_thoughts,
)
from swarm.multi_agent.collaboration import number_samples
from swarm.multi_agent.consortium.judging import UNCONSTRAINED, ArbiterReply, JudgingRound
from swarm.multi_agent.consortium.parsing import parse_verdict
from swarm.multi_agent.consortium.prompts import (
    PARTS_FORMAT,
    PICK_FORMAT,
    PICK_PROMPT,
    RANK_FORMAT,
    RANK_PROMPT,
    REVIEW_PROMPT,
    SYNTHESIS_PROMPT,
    shuffled_order,
)
from swarm.multi_agent.consortium.results import Verdict
from swarm.multi_agent.moa import PICK_TOKENS
from swarm.multi_agent.scheduler import AgentCall
from swarm.multi_agent.types import AgentAnswer, add_system_text

NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CHOICE_PATTERN = re.compile(
    r"(?:(?:\A|\b(?:answer|option|choice)(?: is)?:?)[\s*_(\[]*|[(\[])(?P<end>[A-J])[\s*_)\].:]*\Z"
    r"|\A[*_(]*(?P<begin>[A-J])\)",
    re.IGNORECASE,
)
ARTICLES = re.compile(r"\b(?:the|a|an)\b")


def comparison_key(text: str) -> tuple[str, str]:
    """Return a key for comparing answers: a choice's letter, a number or a text.

    A letter from A to J that is the last line, or ends it in brackets or after "answer", or begins
    it as in "B) Paris"; otherwise the last number of the last line; otherwise the text without
    case, punctuation and articles.
    """
    last = text.strip().rsplit("\n", 1)[-1]
    if choice := CHOICE_PATTERN.search(last):
        return "choice", (choice["end"] or choice["begin"]).upper()
    if numbers := NUMBER_PATTERN.findall(last):
        number = Decimal(numbers[-1].replace(",", ""))
        exact = f"{number:f}"  # `normalize` would round long numbers
        return "number", (
            exact.rstrip("0").rstrip(".") if "." in exact else exact
        ) if number else "0"
    plain = unicodedata.normalize("NFKC", text).casefold()
    normalized = re.sub(r"\W+", " ", ARTICLES.sub(" ", plain)).strip()
    return "text", normalized or text


def group_equal_answers(texts: Sequence[str], similarity: float = 1.0) -> list[list[int]]:
    """Group the indices of equal answers, ordered by their first members.

    An answer joins the first group that it agrees with completely.

    Args:
        texts: The answers.
        similarity: Minimum similarity of equal texts; numbers and choices must be identical.
    """
    keys = [comparison_key(text) for text in texts]
    found: list[list[int]] = []
    for index, key in enumerate(keys):
        for group in found:
            if all(_answers_agree(key, keys[other], similarity) for other in group):
                group.append(index)
                break
        else:
            found.append([index])
    return found


def _answers_agree(one: tuple[str, str], other: tuple[str, str], similarity: float) -> bool:
    if one == other:
        return True
    if similarity >= 1 or one[0] != "text" or other[0] != "text":
        return False
    first, second = sorted((one[1], other[1]))  # SequenceMatcher is not symmetric
    return SequenceMatcher(None, first, second, autojunk=False).ratio() >= similarity


VERDICT_TOKENS = 1024
"""Additional tokens for the arbiter's reply, beyond those of the answer."""

STRAYED = 240
"""Number of characters without a choice after which a reply that does not start with reasoning is
stopped.
"""

VerdictScript = Generator[list[AgentCall], list[AgentAnswer], Verdict]


def synthesize_answer(
    judging: JudgingRound, reviews: Sequence[str] = (), order: Sequence[int] = ()
) -> VerdictScript:
    """The arbiter writes the answer."""
    previous = judging.run.stages.iterations
    write = judging.prompt_writer(
        SYNTHESIS_PROMPT, list(judging.labels), previous=previous, reviews=reviews, order=order
    )
    max_tokens = judging.run.extend_limit(VERDICT_TOKENS)
    reply = yield from judging.query_arbiter(write, parse_verdict, PARTS_FORMAT, max_tokens)
    ranking = tuple(judging.labels[label] for label in order)
    if reply is None:
        return replace(
            judging.fall_back_to_member(None, ranking or judging.rank_by_confidence()),
            ranking=ranking,
        )
    if reply.found is None:
        answer = strip_thoughts(reply.text)
        return Verdict(
            answer, ranking=ranking, source="fallback", raw=reply.text, finish=reply.finish
        )
    found: Verdict = reply.found
    return replace(found, source=reply.source, ranking=ranking, finish=reply.finish)


def pick_one(judging: JudgingRound, labels: Sequence[int] = ()) -> VerdictScript:
    """The arbiter chooses one of the answers with these labels."""
    labels = labels or list(judging.labels)

    def parse_label(reply: str) -> int | None:
        number = parse_number_pick(strip_thoughts(reply), max(labels))
        return number if number in labels else None

    max_tokens = judging.run.choice_limit(PICK_TOKENS)
    write = judging.prompt_writer(PICK_PROMPT, labels)
    decided = lambda said: has_number_pick(said) or strayed(said)  # noqa: E731
    reply = yield from judging.query_arbiter(write, parse_label, PICK_FORMAT, max_tokens, decided)
    if reply is None or reply.found is None:
        candidates = [judging.labels[label] for label in labels]
        return judging.fall_back_to_member(
            reply, [index for index in judging.rank_by_confidence() if index in candidates]
        )
    return _chosen_verdict(judging, reply, [reply.found])


def strayed(said: str) -> bool:
    """Return whether a reply so far is running text without a choice, and not reasoning."""
    return len(said) > STRAYED and not OPENING_TAG.search(said)


def rank_answers(judging: JudgingRound) -> VerdictScript:
    """The arbiter ranks the answers."""
    labels = list(judging.labels)
    least = PICK_TOKENS + 8 * len(labels)
    max_tokens = judging.run.choice_limit(least)
    read, write = partial(parse_ranking, labels=labels), judging.prompt_writer(RANK_PROMPT, labels)
    reply = yield from judging.query_arbiter(write, read, RANK_FORMAT, max_tokens)
    if reply is None or reply.found is None:
        return judging.fall_back_to_member(reply, judging.rank_by_confidence())
    return _chosen_verdict(judging, reply, reply.found)


def _chosen_verdict(judging: JudgingRound, reply: ArbiterReply, labels: Sequence[int]) -> Verdict:
    """Return the verdict of a reply that chose these labels, best first."""
    return Verdict(
        judging.answer_text(labels[0]),
        ranking=tuple(judging.labels[label] for label in labels),
        source=reply.source,
        raw=reply.text,
        finish=reply.finish,
    )


def vote_on_answers(judging: JudgingRound) -> VerdictScript:
    """Return the most frequent answer; its share of the votes is the confidence."""
    indices = sorted(judging.labels.values())
    consortium = judging.run.consortium
    texts = [judging.answers[index].text for index in indices]
    found = sorted(group_equal_answers(texts, consortium.options.similarity), key=len, reverse=True)
    order = [indices[one] for group in found for one in group]
    counts = ", ".join(f"{len(group)}" for group in found)
    share = len(found[0]) / len(indices)
    first = Verdict(
        texts[found[0][0]], share, f"votes: {counts}", ranking=tuple(order), source="counted"
    )
    tied = [indices[group[0]] for group in found if len(group) == len(found[0])]
    if len(tied) == 1:
        return first
    if consortium.arbiter is None or not judging.run.has_budget():
        judging.add_warning(f"the vote is tied ({counts}); using the first answer")
        return first
    labels = [label for label, index in judging.labels.items() if index in tied]
    chosen = yield from pick_one(judging, labels)
    return replace(chosen, confidence=share, analysis=first.analysis)


def peer_review(judging: JudgingRound) -> VerdictScript:
    """Each member reviews the others' answers, then the arbiter judges."""
    if len(judging.labels) < 2:
        return (yield from synthesize_answer(judging))
    reviewed = {label: _other_labels(judging, label) for label in judging.labels}
    answers = yield _build_review_calls(judging, reviewed)
    judging.run.stages.layers.append(answers)
    reviews: list[str] = []
    points: dict[int, list[float]] = {label: [] for label in judging.labels}
    for answer, others in zip(answers, reviewed.values(), strict=True):
        review = strip_thoughts(answer.text)
        order = sorted(others) if len(others) == 1 else parse_ranking(review, sorted(others))
        if answer.error or not review or order is None:
            judging.add_warning(f"{answer.name}: {answer.error or 'its review could not be read'}")
            continue
        reviews.append(review)
        for rank, label in enumerate(order):
            points[label].append(1 - rank / max(1, len(order) - 1))
    # Members do not review themselves, so that answers have unequal numbers of reviews: use the
    # mean Borda score.
    mean = {label: sum(scores) / len(scores) if scores else 0.0 for label, scores in points.items()}
    order = sorted(mean, key=lambda label: (-mean[label], judging.labels[label]))
    return (yield from synthesize_answer(judging, reviews, order if reviews else ()))


def _other_labels(judging: JudgingRound, label: int) -> list[int]:
    """Return the labels of the other members' answers, in an order specific to this member."""
    others = [other for other in judging.labels if other != label]
    key = f"{judging.run.random_key(judging.number)} {label}"
    return [others[index] for index in shuffled_order(len(others), key)]


def _build_review_calls(
    judging: JudgingRound, reviewed: Mapping[int, Sequence[int]]
) -> list[AgentCall]:
    """Build a call per member that answered, to review the answers shown to it."""
    run = judging.run
    max_tokens = run.extend_limit(VERDICT_TOKENS)
    requests = []
    for label, others in reviewed.items():
        member = run.participants[judging.labels[label]]
        turns = add_system_text(
            run.write_within_context(judging.prompt_writer(REVIEW_PROMPT, others)),
            member.slot.system,
        )
        requests.append(
            (
                member,
                run.build_request(
                    member.slot, turns, max_tokens, stop_check=run.stop_condition(), **UNCONSTRAINED
                ),
            )
        )
    numbered = number_samples(
        [(member.slot.model, request) for member, request in requests], run.request.sample
    )
    return [
        run.build_call(member.slot, request, judging.number, "reviewer", member.sample)
        for (member, _), request in zip(requests, numbered, strict=True)
    ]


STRATEGY_FUNCTIONS: dict[str, Callable[[JudgingRound], VerdictScript]] = {
    "default": synthesize_answer,
    "pick-one": pick_one,
    "rank": rank_answers,
    "vote": vote_on_answers,
    "elimination": rank_answers,
    "roles": synthesize_answer,
    "peer-review": peer_review,
}
