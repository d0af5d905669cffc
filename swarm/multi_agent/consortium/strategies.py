"""Strategies of a consortium: from the answers of one iteration to a verdict."""

import re
import unicodedata
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from swarm._util.replies import (
    OPENING_TAG,
    has_number_pick,
    parse_number_pick,
    parse_ranking,
    strip_thoughts,
)
from swarm.models.base import Completion, Message, Request
from swarm.multi_agent.collaboration import RequestContext
from swarm.multi_agent.consortium import prompts
from swarm.multi_agent.consortium.results import ConsortiumTranscript, MemberAnswer, Verdict
from swarm.multi_agent.consortium.settings import ConsortiumOptions
from swarm.multi_agent.moa import PICK_TOKENS
from swarm.multi_agent.scheduler import AgentCall, explain_empty_answer
from swarm.multi_agent.types import (
    AgentAnswer,
    AgentSpec,
    Messages,
    add_system_text,
    prompt_to_messages,
    shuffle_by_key,
)

VERDICT_TOKENS = 1024
"""Additional tokens for the arbiter's reply, beyond those of the answer."""

CHOICE_TOKENS = 1024
"""Maximum number of tokens for choosing or ranking, beyond those of the choice."""

STRAYED = 240
"""Number of characters without a choice after which a reply that does not start with reasoning is
stopped.
"""

VerdictScript = Generator[list[AgentCall], list[AgentAnswer], Verdict]


class ConsortiumMember(NamedTuple):
    """One member: a sample of an agent, with a role.

    Attributes:
        slot: The agent.
        sample: Index of the agent's sample, from 0.
        instance: Number among the members with this name, from 1.
        role: Role description for its prompt; `None` adds none.
    """

    slot: AgentSpec
    sample: int
    instance: int
    role: str | None = None


class JudgingContext(RequestContext[ConsortiumTranscript]):
    """State of one request in a consortium, as far as answers are judged.

    Attributes:
        options: Settings of the consortium.
        arbiter, fallback: Its agents that judge.
        participants: Members that still take part.
    """

    options: ConsortiumOptions
    arbiter: AgentSpec | None
    fallback: AgentSpec | None
    participants: list[ConsortiumMember]

    def build_judging_request(
        self,
        slot: AgentSpec,
        turns: Messages,
        max_tokens: int | None,
        enough: Callable[[str], bool] | None = None,
    ) -> Request:
        """Build a request for a text about answers, to which some of the request does not apply.

        Args:
            enough: Returns whether the text so far contains all that is parsed.
        """

        def is_over(text: str) -> bool:
            # The request's own check of a text is about answers.
            return self.is_decided() or bool(enough and enough(text))

        check = is_over if self.request.stop_check or enough else None
        return self.build_request(
            slot, turns, max_tokens, stop_check=check, stop=(), top_logprobs=0
        )

    def extend_limit(self, more: int) -> int | None:
        """Return the token limit of a text about the answers, `more` than the request's."""
        limit = self.request.max_new_tokens
        return None if limit is None else limit + more

    def has_budget(self, more: int = 1) -> bool:
        """Return whether the budget allows `more` calls."""
        budget = self.options.budget
        return budget is None or len(self.stages.answers) + more <= budget


class JudgingRound:
    """The answers of one iteration while they are judged, labelled by numbers from 1.

    Args:
        run: State of the request.
        number: Number of the iteration.
        answers: Answers of all members.

    Attributes:
        labels: Index into `answers` by label, in random order.
    """

    def __init__(self, run: JudgingContext, number: int, answers: Sequence[MemberAnswer]) -> None:
        self.run, self.number, self.answers = run, number, answers
        self.key = run.random_key(number)
        answered = [index for index, one in enumerate(answers) if not one.answer.error]
        self.labels = dict(enumerate(shuffle_by_key(answered, self.key), 1))

    def write_prompt(self, wanted: str, labels: Sequence[int], **more: Any) -> Messages:
        """Return the conversation with these answers and the instructions."""
        answers = [(label, self.answers[self.labels[label]].text) for label in labels]
        turns = prompt_to_messages(self.run.request.prompt)
        return prompts.build_judge_prompt(turns, answers, wanted, self.key, **more)

    def query_arbiter(
        self,
        wanted: prompts.Wanted,
        labels: Sequence[int],
        read: Callable[[str], Any],
        max_tokens: int | None,
        enough: Callable[[str], bool] | None = None,
        **more: Any,
    ) -> Generator[list[AgentCall], list[AgentAnswer], tuple[Any, Verdict]]:
        """Query the arbiter, retrying once if its reply cannot be parsed; otherwise the fallback.

        Args:
            wanted: What is asked for.
            labels: Answers to show.
            read: Parses a reply; returns `None` on failure.
            max_tokens: Maximum number of new tokens; `None` is no limit.
            enough: Returns whether the reply so far contains all that is parsed.
            more: See `prompts.build_judge_prompt`.

        Returns:
            The parsed reply, or `None`; and a verdict without a synthesis, which tells the reply
            and its source. If neither replied, it has an empty reply.
        """
        run = self.run
        for slot, role in ((run.arbiter, "arbiter"), (run.fallback, "fallback")):
            if slot is None or not run.has_budget():
                continue
            turns = self.write_prompt(wanted.prompt, labels, **more)
            for text in (run.options.system, slot.system):  # they apply to the answer, too
                turns = add_system_text(turns, text or None)
            request = run.build_judging_request(slot, turns, max_tokens, enough)
            answer = yield from self._query_agent(slot, role, request)
            if answer is None:
                continue
            found, source = read(answer.text), "read"
            if found is None and run.has_budget():
                repair = Message("user", f"{prompts.REPAIR_PROMPT}{wanted.form}")
                turns = (*turns, Message("assistant", answer.text), repair)
                request = replace(request, prompt=turns, timeout=run.time_left(slot))
                repaired = yield from self._query_agent(slot, role, request)
                found = read(repaired.text) if repaired else None
                if repaired and found is not None:
                    answer, source = repaired, "repaired"
            if found is None:
                self.add_warning(f"{slot.name}: could not parse its reply: {answer.text[:80]!r}")
            return found, Verdict("", source=source, raw=answer.text, finish=answer.finish)
        return None, Verdict("", source="fallback")

    def _query_agent(
        self, slot: AgentSpec, role: str, request: Request
    ) -> Generator[list[AgentCall], list[AgentAnswer], Completion | None]:
        """Return the reply; without one, or with reasoning only, warn and return `None`."""
        (answer,) = yield from self.run.ask([AgentCall(slot, 0, request, self.number, role)])
        error, completion = answer.error, answer.completion
        if completion and not error:
            error = explain_empty_answer(completion, strip_thoughts(completion.text))
        if error:
            self.add_warning(f"{slot.name}: {error}")
            return None
        return completion

    def add_warning(self, words: str) -> None:
        """Add a warning with the iteration's number."""
        self.run.add_warning(f"iteration {self.number}: {words}")

    def rank_by_confidence(self) -> list[int]:
        """Return the indices of the answers, the most confident member's first."""
        indices = sorted(self.labels.values())
        return sorted(indices, key=lambda index: -(self.answers[index].confidence or 0.0))

    def fall_back_to_member(self, reply: Verdict, order: Sequence[int]) -> Verdict:
        """Return a member's answer, the first of these indices, in place of a verdict."""
        one = self.answers[order[0]]
        self.add_warning(f"no verdict; using the answer of {one.answer.name}, {one.instance}")
        return replace(reply, synthesis=one.text, source="fallback")

    def remaining_members(self, verdict: Verdict) -> list[int]:
        """Return the indices of the members that stay after elimination, in order."""
        order = [*(verdict.ranking or self.rank_by_confidence())]
        order += [index for index in range(len(self.answers)) if index not in order]
        options = self.run.options
        return sorted(order[: max(options.keep, len(order) - options.eliminate)])


def synthesize_answer(
    judging: JudgingRound, reviews: Sequence[str] = (), order: Sequence[int] = ()
) -> VerdictScript:
    """The arbiter writes the answer."""
    found, reply = yield from judging.query_arbiter(
        prompts.SYNTHESIS,
        list(judging.labels),
        prompts.parse_verdict,
        judging.run.extend_limit(VERDICT_TOKENS),
        previous=judging.run.stages.iterations,
        reviews=reviews,
        order=order,
    )
    ranking = tuple(judging.labels[label] for label in order)
    if found is not None:
        verdict = replace(found, source=reply.source, finish=reply.finish)
    elif reply.raw:
        verdict = replace(reply, synthesis=strip_thoughts(reply.raw), source="fallback")
    else:
        verdict = judging.fall_back_to_member(reply, ranking or judging.rank_by_confidence())
    return replace(verdict, ranking=ranking)


def _choose_answers(
    judging: JudgingRound,
    labels: Sequence[int],
    wanted: prompts.Wanted,
    read: Callable[[str], list[int] | None],
    least: int,
    enough: Callable[[str], bool] | None = None,
) -> VerdictScript:
    """The arbiter chooses among the answers with these labels.

    Args:
        wanted, enough: See `JudgingRound.query_arbiter`.
        read: Parses the chosen labels, best first.
        least: Tokens of the choice; reasoning takes most of a reply.
    """
    limit = judging.run.request.max_new_tokens
    if limit is not None:
        limit = min(max(limit, least), CHOICE_TOKENS + least)
    chosen, reply = yield from judging.query_arbiter(wanted, labels, read, limit, enough)
    if chosen is None:
        candidates = {judging.labels[label] for label in labels}
        order = [index for index in judging.rank_by_confidence() if index in candidates]
        return judging.fall_back_to_member(reply, order)
    ranking = tuple(judging.labels[label] for label in chosen)
    return replace(reply, synthesis=judging.answers[ranking[0]].text, ranking=ranking)


def pick_one(judging: JudgingRound, labels: Sequence[int] = ()) -> VerdictScript:
    """The arbiter chooses one of the answers with these labels."""
    labels = labels or list(judging.labels)

    def read(reply: str) -> list[int] | None:
        number = parse_number_pick(strip_thoughts(reply), max(labels))
        return [number] if number and number in labels else None

    def is_decided(said: str) -> bool:
        # Running text without a choice, and not reasoning, has strayed.
        return has_number_pick(said) or (len(said) > STRAYED and not OPENING_TAG.search(said))

    return (
        yield from _choose_answers(judging, labels, prompts.PICK, read, PICK_TOKENS, is_decided)
    )


def rank_answers(judging: JudgingRound) -> VerdictScript:
    """The arbiter ranks the answers."""
    labels = list(judging.labels)
    least, read = PICK_TOKENS + 8 * len(labels), partial(parse_ranking, labels=labels)
    return (yield from _choose_answers(judging, labels, prompts.RANK, read, least))


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
        exact = exact.rstrip("0").rstrip(".") if "." in exact else exact
        return "number", exact if number else "0"
    plain = unicodedata.normalize("NFKC", text).casefold()
    normalized = re.sub(r"\W+", " ", ARTICLES.sub(" ", plain)).strip()
    return "text", normalized or text


def group_equal_answers(texts: Sequence[str]) -> list[list[int]]:
    """Group the indices of equal answers, ordered by their first members."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, text in enumerate(texts):
        found.setdefault(comparison_key(text), []).append(index)
    return list(found.values())


def vote_on_answers(judging: JudgingRound) -> VerdictScript:
    """Return the most frequent answer; its share of the votes is the confidence."""
    indices = sorted(judging.labels.values())
    texts = [judging.answers[index].text for index in indices]
    groups = group_equal_answers(texts)
    found = sorted(groups, key=len, reverse=True)
    order = [indices[one] for group in found for one in group]
    counts = ", ".join(f"{len(group)}" for group in found)
    share = len(found[0]) / len(indices)
    first = Verdict(
        texts[found[0][0]], share, f"votes: {counts}", ranking=tuple(order), source="counted"
    )
    tied = [indices[group[0]] for group in found if len(group) == len(found[0])]
    if len(tied) == 1:
        return first
    if judging.run.arbiter is None or not judging.run.has_budget():
        judging.add_warning(f"the vote is tied ({counts}); using the first answer")
        return first
    labels = [label for label, index in judging.labels.items() if index in tied]
    chosen = yield from pick_one(judging, labels)
    return replace(chosen, confidence=share, analysis=first.analysis)


def peer_review(judging: JudgingRound) -> VerdictScript:
    """Each member reviews the others' answers, then the arbiter judges."""
    run = judging.run
    if len(judging.labels) < 2:
        return (yield from synthesize_answer(judging))
    shown: dict[int, list[int]] = {}
    asked = []
    for label, index in judging.labels.items():
        member = run.participants[index]
        # The order of the others' answers is specific to this member.
        others = [other for other in judging.labels if other != label]
        shown[label] = shuffle_by_key(others, f"{judging.key} {label}")
        prompt = judging.write_prompt(prompts.REVIEW_PROMPT, shown[label])
        turns = add_system_text(prompt, member.slot.system)
        limit = run.extend_limit(VERDICT_TOKENS)
        request = run.build_judging_request(member.slot, turns, limit)
        asked.append((member.slot, member.sample, request))
    answers = yield from run.ask(run.build_calls(asked, judging.number, "reviewer"))
    reviews: list[str] = []
    points: dict[int, list[float]] = {label: [] for label in judging.labels}
    for answer, others in zip(answers, shown.values(), strict=True):
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


STRATEGY_FUNCTIONS: dict[str, Callable[[JudgingRound], VerdictScript]] = {
    "default": synthesize_answer,
    "pick-one": pick_one,
    "rank": rank_answers,
    "vote": vote_on_answers,
    "elimination": rank_answers,
    "roles": synthesize_answer,
    "peer-review": peer_review,
}
