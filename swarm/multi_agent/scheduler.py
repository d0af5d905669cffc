"""Concurrent rounds of agent calls, one thread per model; usage totals of the calls."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, TypeVar

from swarm._util.threads import run_concurrently
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Usage, compute_cost
from swarm.models.openai import CHARS_PER_TOKEN
from swarm.models.trace import Trace
from swarm.multi_agent.types import (
    AgentAnswer,
    AgentSpec,
    CallStarted,
    OnEvent,
    Transcript,
    prompt_to_messages,
)

S = TypeVar("S", bound=Transcript)
T = TypeVar("T")

STOPPED = "stopped"
"""Error of an answer in progress when the user stopped it."""


def explain_empty_answer(completion: Completion, text: str) -> str:
    """Return why an answer contains no text; empty if it does."""
    if text.strip():
        return ""
    if completion.finish != "length":
        return "an empty answer"
    return (
        f"no answer: its limit of {completion.new_tokens} new tokens was used up by its reasoning; "
        "raise max_tokens, or set none"
    )


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of an agent.

    Attributes:
        slot: The agent.
        sample: Index of the agent's sample, from 0; `request.sample` counts per model.
        request: The request.
        layer, role: See `AgentAnswer`.
        last: True if the answer is that of the collaboration, and may be streamed.
    """

    slot: AgentSpec
    sample: int
    request: Request
    layer: int
    role: str
    last: bool = False

    @property
    def started(self) -> CallStarted:
        """Event at the start of the call, and its description in a trace."""
        return CallStarted(self.slot.name, self.role, self.layer, self.sample)

    def build_answer(self, outcome: Completion | UserError, error: str = "") -> AgentAnswer:
        """Build the answer of this call from its result."""
        completion = None
        if isinstance(outcome, UserError):
            error = str(outcome)
        else:
            completion = outcome
            error = error or explain_empty_answer(outcome, outcome.text)
        place = (self.layer, self.role, self.slot.name, self.sample)
        return AgentAnswer(*place, self.request.prompt, completion, error)

    def build_stopped_answer(self, deltas: Sequence[Delta] = ()) -> AgentAnswer:
        """Build the answer of a call that the user stopped, with the text received so far.

        Endpoints bill its tokens without reporting them: they are estimated from the number of
        characters.
        """
        text, reasoning = "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)
        turns = prompt_to_messages(self.request.prompt)
        read = ceil(sum(len(turn.content) for turn in turns) / CHARS_PER_TOKEN)
        new = ceil(len(text + reasoning) / CHARS_PER_TOKEN)
        prices = self.slot.model.prices
        completion = Completion(
            text,
            prompt_tokens=read,
            new_tokens=new,
            cost=compute_cost({"prompt_tokens": read, "new_tokens": new}, prices),
            reasoning=reasoning,
            finish=STOPPED,
            priced=None if prices is None else bool(prices),
        )
        return self.build_answer(completion, STOPPED)


Script = Generator[list[AgentCall], list[AgentAnswer], T]
"""Script of one request: yields rounds of at least one call, is sent their answers, and returns the
transcript or raises a `UserError`.
"""


def ignore_event(number: int, event: Any) -> None:
    """Do nothing."""


def run_in_lockstep(
    scripts: Sequence[Script[T]], on_event: OnEvent = ignore_event, trace: Trace | None = None
) -> list[T | UserError]:
    """Run scripts concurrently and return their results in order; each round is one batch."""
    results: dict[int, T | UserError] = {}
    pending: dict[int, Any] = dict.fromkeys(range(len(scripts)))
    while pending:
        calls: list[tuple[int, AgentCall]] = []
        for number, answers in pending.items():
            try:
                calls += [(number, call) for call in scripts[number].send(answers)]
            except StopIteration as end:
                results[number] = end.value
            except UserError as error:
                results[number] = error
        pending = {}
        for (number, _), answer in zip(calls, run_calls(calls, on_event, trace), strict=True):
            pending.setdefault(number, []).append(answer)
    return [results[number] for number in range(len(scripts))]


def stream_final_answer(
    script: Script[S], on_event: OnEvent = ignore_event, trace: Trace | None = None
) -> Generator[Delta, None, S]:
    """Run a script; yield the pieces of the final answer and return the transcript.

    Closing the generator cancels the answer in progress.

    Raises:
        UserError: Raised by the script; or the final answer was cut off after its first piece.
    """
    answers: Any = None
    yielded = False
    while True:
        try:
            calls = script.send(answers)
        except StopIteration as end:
            stages: S = end.value
            if not yielded and (stages.final.text or stages.final.reasoning):
                yield Delta(stages.final.text, stages.final.reasoning)
            return stages
        if len(calls) > 1 or not calls[0].last:
            answers = run_calls([(0, call) for call in calls], on_event, trace)
            continue
        answer = yield from _stream_call(calls[0], on_event, trace)
        yielded = bool(answer.text)
        answers = [answer]


def _stream_call(
    call: AgentCall, on_event: OnEvent, trace: Trace | None
) -> Generator[Delta, None, AgentAnswer]:
    """Stream one call; a failure before the first text is returned as a failed answer."""
    on_event(0, call.started)
    pieces = call.slot.model.stream(call.request)
    if trace:
        pieces = trace.record_stream(call.started._asdict(), call.request, pieces)
    deltas: list[Delta] = []
    try:
        while True:
            deltas.append(next(pieces))
            yield deltas[-1]
    except StopIteration as end:
        answer = call.build_answer(end.value)
    except UserError as error:
        answer = call.build_answer(error)
        if any(delta.text for delta in deltas):
            on_event(0, answer)
            raise
    except (KeyboardInterrupt, GeneratorExit):
        on_event(0, call.build_stopped_answer(deltas))
        raise
    finally:
        pieces.close()
    on_event(0, answer)
    return answer


def run_calls(
    calls: Sequence[tuple[int, AgentCall]],
    on_event: OnEvent = ignore_event,
    trace: Trace | None = None,
) -> list[AgentAnswer]:
    """Run all calls, as one batch per distinct model; return the answers in order.

    Args:
        calls: Calls, each with the index of its request.
    """
    batches: dict[int, list[int]] = {}
    for index, (number, call) in enumerate(calls):
        batches.setdefault(id(call.slot.model), []).append(index)
        on_event(number, call.started)
    groups = list(batches.values())
    work = []
    for group in groups:
        model = calls[group[0]][1].slot.model
        work.append(partial(model.generate_each, [calls[index][1].request for index in group]))
    answers: dict[int, AgentAnswer] = {}
    try:
        for number_of_batch, outcomes in run_concurrently(work, name="swarm-agent"):
            for index, one in zip(groups[number_of_batch], outcomes, strict=True):
                number, call = calls[index]
                if trace:
                    trace.add_call(call.started._asdict(), call.request, one)
                answers[index] = call.build_answer(one)
                on_event(number, answers[index])
    except KeyboardInterrupt:
        for index, (number, call) in enumerate(calls):
            if index not in answers:
                on_event(number, call.build_stopped_answer())
        raise
    return [answers[index] for index in range(len(calls))]


def sum_usage(answers: Iterable[AgentAnswer]) -> Usage:
    """Sum up the usage of calls; the tokens and costs of cached answers are left out."""
    found = Usage()
    for answer in answers:
        found.failed += bool(answer.error)
        if answer.completion is None or answer.completion.cached:
            found.calls += 1
            found.cached += answer.completion is not None
        else:
            found.add(answer.completion)
    return found
