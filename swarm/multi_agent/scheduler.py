"""Concurrent rounds of agent calls, one thread per model; usage totals of the calls."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

from swarm._util.threads import run_concurrently
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Delta,
    Request,
    Usage,
    compute_cost,
)
from swarm.models.openai import CHARS_PER_TOKEN
from swarm.models.trace import Trace
from swarm.multi_agent.types import AgentAnswer, AgentSpec, CallStarted, OnEvent, Transcript

S = TypeVar("S", bound=Transcript)
T = TypeVar("T")


def describe_empty_answer(completion: Completion) -> str:
    """Return why an answer contains no text."""
    if completion.finish != "length":
        return "an empty answer"
    return (
        f"no answer: its limit of {completion.new_tokens} new tokens was used up by its reasoning; "
        "raise max_tokens, or set none"
    )


STOPPED = "stopped"
"""Error of an answer in progress when the user stopped it."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of an agent.

    Attributes:
        slot: The agent.
        sample: Index of the agent's sample, from 0; `request.sample` counts per model.
        request: The request.
        layer, layers, role: See `AgentAnswer` and `CallStarted`.
        last: True if the answer is that of the collaboration, and may be streamed.
    """

    slot: AgentSpec
    sample: int
    request: Request
    layer: int
    layers: int
    role: str
    last: bool = False

    @property
    def started_event(self) -> CallStarted:
        """Event at the start of the call."""
        return CallStarted(self.layer, self.layers, self.role, self.slot.name, self.sample)

    @property
    def trace_record(self) -> dict[str, Any]:
        """Description of the call for the trace."""
        fields = {"name": self.slot.name, "role": self.role, "layer": self.layer}
        return {**fields, "sample": self.sample}

    def build_answer(self, outcome: Completion | UserError) -> AgentAnswer:
        """Build the answer of this call from its result."""
        completion = None if isinstance(outcome, UserError) else outcome
        error = (
            ""
            if completion and completion.text.strip()
            else describe_empty_answer(completion)
            if completion
            else str(outcome)
        )
        prompt = self.request.prompt
        return AgentAnswer(
            self.layer, self.role, self.slot.name, self.sample, prompt, completion, error
        )


def build_stopped_answer(call: AgentCall, text: str = "", reasoning: str = "") -> AgentAnswer:
    """Build the answer of a call that the user stopped, with the text received so far.

    Endpoints bill its tokens without reporting them: they are estimated from the number of
    characters.
    """
    prompt = call.request.prompt
    prompt_text = prompt if isinstance(prompt, str) else "".join(turn.content for turn in prompt)
    read, new = (ceil(len(one) / CHARS_PER_TOKEN) for one in (prompt_text, text + reasoning))
    prices = call.slot.model.prices
    completion = Completion(
        text,
        prompt_tokens=read,
        new_tokens=new,
        cost=compute_cost({"prompt_tokens": read, "new_tokens": new}, prices),
        reasoning=reasoning,
        finish=STOPPED,
        priced=None if prices is None else bool(prices),
    )
    return replace(call.build_answer(completion), error=STOPPED)


Script = Generator[list[AgentCall], list[AgentAnswer], S]
"""Script of one request: yields rounds of at least one call, is sent their answers, and returns the
transcript or raises a `UserError`.
"""


def ignore_event(number: int, event: Any) -> None:
    """Do nothing."""


def run_in_lockstep(
    scripts: Sequence[Generator[list[AgentCall], list[AgentAnswer], T]],
    on_event: OnEvent = ignore_event,
    trace: Trace | None = None,
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
    on_event(0, call.started_event)
    pieces = call.slot.model.stream(call.request)
    if trace:
        pieces = trace.record_stream(call.trace_record, call.request, pieces)
    started = False
    deltas: list[Delta] = []
    try:
        while True:
            delta = next(pieces)
            started = started or bool(delta.text)
            deltas.append(delta)
            yield delta
    except StopIteration as end:
        answer = call.build_answer(end.value)
    except UserError as error:
        answer = call.build_answer(error)
        if started:
            on_event(0, answer)
            raise
    except (KeyboardInterrupt, GeneratorExit):
        texts = ("".join(one.text for one in deltas), "".join(one.reasoning for one in deltas))
        on_event(0, build_stopped_answer(call, *texts))
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
        on_event(number, call.started_event)
    groups = list(batches.values())
    work = []
    for group in groups:
        batch = [calls[index][1] for index in group]
        work.append(partial(batch[0].slot.model.generate_each, [call.request for call in batch]))
    answers: dict[int, AgentAnswer] = {}
    try:
        for number_of_batch, outcomes in run_concurrently(work, name="swarm-agent"):
            for index, one in zip(groups[number_of_batch], outcomes, strict=True):
                number, call = calls[index]
                if trace:
                    trace.add_call(call.trace_record, call.request, one)
                answers[index] = call.build_answer(one)
                on_event(number, answers[index])
    except KeyboardInterrupt:
        for index, (number, call) in enumerate(calls):
            if index not in answers:
                on_event(number, build_stopped_answer(call))
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
