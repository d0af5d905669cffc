"""State of one request in a consortium, and of one iteration while it is judged."""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm._util.replies import strip_thoughts
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.multi_agent.collaboration import Collaboration, RequestContext
from swarm.multi_agent.consortium.prompts import (
    build_judge_prompt,
    build_repair_prompt,
    shuffled_order,
)
from swarm.multi_agent.consortium.results import ConsortiumTranscript, MemberAnswer, Verdict
from swarm.multi_agent.consortium.settings import ConsortiumOptions
from swarm.multi_agent.scheduler import AgentCall, describe_empty_answer
from swarm.multi_agent.types import AgentAnswer, AgentSpec, Messages, add_system_text

CHOICE_TOKENS = 1024
"""Maximum number of tokens for choosing or ranking, beyond those of the choice."""

UNCONSTRAINED: dict[str, Any] = {"stop": (), "top_logprobs": 0}
"""Overrides of request fields that apply to the answer, but not to text about answers."""


@dataclass(frozen=True, slots=True)
class ConsortiumMember:
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


class ConsortiumBase(Collaboration[ConsortiumTranscript]):
    """What the run of a request reads of its `Consortium`; see there."""

    options: ConsortiumOptions
    arbiter: AgentSpec | None
    fallback: AgentSpec | None
    participants: tuple[ConsortiumMember, ...]


class ConsortiumContext(RequestContext[ConsortiumTranscript]):
    """State of one request in a consortium, and the calls and requests it is made of.

    Args:
        consortium: The consortium.
        request: The request to answer.
        logged: Warnings already logged for requests of the same batch.

    Attributes:
        participants: Members that still take part.
    """

    def __init__(self, consortium: ConsortiumBase, request: Request, logged: set[str]) -> None:
        super().__init__(consortium, request, ConsortiumTranscript(), logged)
        self.consortium, self.participants = consortium, list(consortium.participants)

    def build_call(
        self, slot: AgentSpec, request: Request, number: int, role: str, sample: int = 0
    ) -> AgentCall:
        """Build one call of an iteration."""
        return AgentCall(
            slot, sample, request, number, self.consortium.options.max_iterations, role
        )

    def extend_limit(self, more: int) -> int | None:
        """Return the token limit of a text about the answers, `more` than the request's."""
        limit = self.request.max_new_tokens
        return None if limit is None else limit + more

    def choice_limit(self, least: int) -> int | None:
        """Return the token limit of a choice, of which reasoning takes most."""
        limit = self.request.max_new_tokens
        return None if limit is None else min(max(limit, least), CHOICE_TOKENS + least)

    def stop_condition(
        self, read: Callable[[str], bool] | None = None
    ) -> Callable[[str], bool] | None:
        """Return the stop check of judging replies: `read`, or that the answer is not needed."""
        decided = self.request.stop_check
        if decided is None:
            return read
        return lambda text: decided("") or bool(read and read(text))

    def random_key(self, number: int) -> str:
        """Return the seed of the randomness in one iteration."""
        return json.dumps(
            [self.consortium.options.seed, number, self.request.sample, self.request.prompt]
        )

    def has_budget(self, more: int = 1) -> bool:
        """Return whether the budget allows `more` calls."""
        budget = self.consortium.options.budget
        return budget is None or len(self.stages.answers) + more <= budget


@dataclass(frozen=True, slots=True)
class ArbiterReply:
    """A reply of the arbiter.

    Attributes:
        found: Parsed reply; `None` if it could not be parsed.
        text: The reply verbatim.
        source: "read" or "repaired".
        finish: See `Completion.finish`.
    """

    found: Any
    text: str
    source: str = "read"
    finish: str = ""


class JudgingRound:
    """The answers of one iteration while they are judged, labelled by numbers from 1.

    Args:
        run: State of the request.
        number: Number of the iteration.
        answers: Answers of all members.

    Attributes:
        labels: Index into `answers` by label, in random order.
    """

    def __init__(
        self, run: ConsortiumContext, number: int, answers: Sequence[MemberAnswer]
    ) -> None:
        self.run, self.number, self.answers = run, number, answers
        answered = [index for index, one in enumerate(answers) if not one.answer.error]
        order = shuffled_order(len(answered), run.random_key(number))
        self.labels = {label: answered[index] for label, index in enumerate(order, 1)}

    def answer_text(self, label: int) -> str:
        """Return the text of the answer with this label."""
        return self.answers[self.labels[label]].text

    def prompt_writer(
        self, wanted: str, labels: Sequence[int], **more: Any
    ) -> Callable[[Messages], Messages]:
        """Return a function that adds these answers and the instructions to a conversation."""
        answers = [(label, self.answer_text(label)) for label in labels]
        key = self.run.random_key(self.number)
        return lambda turns: build_judge_prompt(turns, answers, wanted, key, **more)

    def query_arbiter(
        self,
        write: Callable[[Messages], Messages],
        read: Callable[[str], Any],
        form: str,
        max_tokens: int | None,
        enough: Callable[[str], bool] | None = None,
    ) -> Generator[list[AgentCall], list[AgentAnswer], ArbiterReply | None]:
        """Query the arbiter, retrying once if its reply cannot be parsed; otherwise the fallback.

        Args:
            write: Adds the instructions to the conversation.
            read: Parses a reply; returns `None` on failure.
            form: Description of the expected format.
            max_tokens: Maximum number of new tokens; `None` is no limit.
            enough: Returns whether the reply so far contains all that is parsed.

        Returns:
            The reply, or `None` if neither replied.
        """
        consortium = self.run.consortium
        for slot, role in ((consortium.arbiter, "arbiter"), (consortium.fallback, "fallback")):
            if slot is None or not self.run.has_budget():
                continue
            try:
                turns = self.run.write_within_context(write)
            except UserError as error:
                self.add_warning(str(error))
                return None
            for text in (consortium.options.system, slot.system):  # they apply to the answer, too
                turns = add_system_text(turns, text or None)
            request = self.run.build_request(
                slot, turns, max_tokens, stop_check=self.run.stop_condition(enough), **UNCONSTRAINED
            )
            answer = yield from self._query_agent(slot, role, request)
            if answer is None:
                continue
            found, how = read(answer.text), "read"
            if found is None and self.run.has_budget():
                repair = replace(
                    request,
                    prompt=build_repair_prompt(turns, answer.text, form),
                    timeout=self.run.time_left(slot),
                )
                repaired = yield from self._query_agent(slot, role, repair)
                found = read(repaired.text) if repaired else None
                if repaired and found is not None:
                    answer, how = repaired, "repaired"
            if found is None:
                self.add_warning(f"{slot.name}: could not parse its reply: {answer.text[:80]!r}")
            return ArbiterReply(found, answer.text, how, answer.finish)
        return None

    def _query_agent(
        self, slot: AgentSpec, role: str, request: Request
    ) -> Generator[list[AgentCall], list[AgentAnswer], Completion | None]:
        """Return the reply; without one, or with reasoning only, warn and return `None`."""
        answers = yield [self.run.build_call(slot, request, self.number, role)]
        self.run.stages.layers.append(answers)
        error, completion = answers[0].error, answers[0].completion
        if completion and not error and not strip_thoughts(completion.text):
            error = describe_empty_answer(completion)
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

    def fall_back_to_member(self, reply: ArbiterReply | None, order: Sequence[int]) -> Verdict:
        """Return a member's answer, the first of these indices, in place of a verdict."""
        one = self.answers[order[0]]
        self.add_warning(f"no verdict; using the answer of {one.answer.name}, {one.instance}")
        raw, finish = (reply.text, reply.finish) if reply else ("", "")
        return Verdict(one.text, source="fallback", raw=raw, finish=finish)

    def remaining_members(self, verdict: Verdict) -> list[int]:
        """Return the indices of the members that stay after elimination, in order."""
        order = [*(verdict.ranking or self.rank_by_confidence())]
        order += [index for index in range(len(self.answers)) if index not in order]
        options = self.run.consortium.options
        return sorted(order[: max(options.keep, len(order) - options.eliminate)])
