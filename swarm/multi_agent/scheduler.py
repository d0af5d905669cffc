"""Rounds of calls: what collaborations ask at one time is asked at once, each model in a thread."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from queue import SimpleQueue
from typing import Any, TypeVar

from swarm._util.terminal import align_columns
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, compute_cost, generate_each, stream
from swarm.models.openai_protocol import CHARS_PER_TOKEN
from swarm.models.trace import Trace, TracingModel
from swarm.multi_agent.types import AgentAnswer, AgentSpec, CallStarted, OnEvent, Transcript

S = TypeVar("S", bound=Transcript)
T = TypeVar("T")

EMPTY_ANSWER = "an empty answer"

STOPPED = "stopped"
"""The error of an answer that was under way when somebody stopped it."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One slot that is to be asked once.

    Attributes:
        slot: Who is asked.
        sample: Which of the slot's samples, from 0; `request.sample` is the model's count.
        request: What is asked.
        layer, layers, role: See `Answer` and `Asked`.
        last: Whether the answer is the collaboration's own, as it comes, and so may be streamed.
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
        """The event."""
        return CallStarted(self.layer, self.layers, self.role, self.slot.name, self.sample)

    @property
    def trace_record(self) -> dict[str, Any]:
        """Who is asked, for the trace."""
        who = {"name": self.slot.name, "role": self.role, "layer": self.layer}
        return {**who, "sample": self.sample}

    def build_answer(self, came: Completion | UserError) -> AgentAnswer:
        """What came, as an answer of this call."""
        said = None if isinstance(came, UserError) else came
        error = "" if said and said.text.strip() else EMPTY_ANSWER if said else str(came)
        prompt = self.request.prompt
        return AgentAnswer(self.layer, self.role, self.slot.name, self.sample, prompt, said, error)


def build_stopped_answer(call: AgentCall, text: str = "", reasoning: str = "") -> AgentAnswer:
    """The answer of a call that was under way when somebody stopped it, with what was given of it.

    Endpoints count its tokens and do not say how many: they are estimated by its characters.
    """
    prompt = call.request.prompt
    asked = prompt if isinstance(prompt, str) else "".join(turn.content for turn in prompt)
    read, new = (ceil(len(one) / CHARS_PER_TOKEN) for one in (asked, text + reasoning))
    prices = getattr(call.slot.model, "prices", None)
    said = Completion(
        text,
        prompt_tokens=read,
        new_tokens=new,
        cost=compute_cost({"prompt_tokens": read, "new_tokens": new}, prices or {}),
        reasoning=reasoning,
        finish=STOPPED,
        priced=None if prices is None else bool(prices),
    )
    return replace(call.build_answer(said), error=STOPPED)


Script = Generator[list[AgentCall], list[AgentAnswer], S]
"""How a collaboration goes about one request: it yields rounds of calls, one at least in each, is
sent their answers, and returns what came of it, or raises a `UserError`."""


def ignore_event(number: int, event: Any) -> None:
    """Nobody watches."""


def run_in_lockstep(
    scripts: Sequence[Generator[list[AgentCall], list[AgentAnswer], T]],
    watch: OnEvent = ignore_event,
    trace: Trace | None = None,
) -> list[T | UserError]:
    """What the scripts come to, in their order; a round of all of them is asked at once."""
    done: dict[int, T | UserError] = {}
    waiting: dict[int, Any] = dict.fromkeys(range(len(scripts)))
    while waiting:
        asked: list[tuple[int, AgentCall]] = []
        for number, answers in waiting.items():
            try:
                asked += [(number, call) for call in scripts[number].send(answers)]
            except StopIteration as end:
                done[number] = end.value
            except UserError as error:
                done[number] = error
        waiting = {}
        for (number, _), answer in zip(asked, run_calls(asked, watch, trace), strict=True):
            waiting.setdefault(number, []).append(answer)
    return [done[number] for number in range(len(scripts))]


def stream_final_answer(
    script: Script[S], watch: OnEvent = ignore_event, trace: Trace | None = None
) -> Generator[Delta, None, S]:
    """Gives the last answer piece by piece and returns what the script came to.

    Closing it ends the answer that is under way.

    Raises:
        UserError: As the script's; or the last answer broke off when part of it had been given.
    """
    answers: Any = None
    given = False
    while True:
        try:
            calls = script.send(answers)
        except StopIteration as end:
            stages: S = end.value
            if not given and (stages.final.text or stages.final.reasoning):
                yield Delta(stages.final.text, stages.final.reasoning)
            return stages
        if len(calls) > 1 or not calls[0].last:
            answers = run_calls([(0, call) for call in calls], watch, trace)
            continue
        answer = yield from _stream_call(calls[0], watch, trace)
        given = bool(answer.text)
        answers = [answer]


def _stream_call(
    call: AgentCall, watch: OnEvent, trace: Trace | None
) -> Generator[Delta, None, AgentAnswer]:
    """One call's answer as it comes; one that fails before its text begins is a failed answer."""
    watch(0, call.started_event)
    model = call.slot.model
    if trace:
        model = TracingModel(model, call.slot.name, trace, call.trace_record)
    pieces = stream(model, call.request)
    begun = False
    given: list[Delta] = []
    try:
        while True:
            delta = next(pieces)
            begun = begun or bool(delta.text)
            given.append(delta)
            yield delta
    except StopIteration as end:
        answer = call.build_answer(end.value)
    except UserError as error:
        answer = call.build_answer(error)
        if begun:
            watch(0, answer)
            raise
    except (KeyboardInterrupt, GeneratorExit):
        texts = ("".join(one.text for one in given), "".join(one.reasoning for one in given))
        watch(0, build_stopped_answer(call, *texts))
        raise
    finally:
        pieces.close()
    watch(0, answer)
    return answer


def run_calls(
    asked: Sequence[tuple[int, AgentCall]],
    watch: OnEvent = ignore_event,
    trace: Trace | None = None,
) -> list[AgentAnswer]:
    """Answers to all calls, in their order; each distinct model gets its own as one batch.

    Args:
        asked: Each call with the number of the request that it is for.
    """
    batches: dict[int, list[int]] = {}
    for place, (number, call) in enumerate(asked):
        batches.setdefault(id(call.slot.model), []).append(place)
        watch(number, call.started_event)
    places = list(batches.values())
    work = []
    for some in places:
        calls = [asked[place][1] for place in some]
        work.append(partial(generate_each, calls[0].slot.model, [call.request for call in calls]))
    answers: dict[int, AgentAnswer] = {}
    try:
        for batch, came in run_concurrently(work):
            for place, one in zip(places[batch], came, strict=True):
                number, call = asked[place]
                if trace:
                    trace.add_call(call.trace_record, call.request, one)
                answers[place] = call.build_answer(one)
                watch(number, answers[place])
    except KeyboardInterrupt:
        for place, (number, call) in enumerate(asked):
            if place not in answers:
                watch(number, build_stopped_answer(call))
        raise
    return [answers[place] for place in range(len(asked))]


def run_concurrently(work: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
    """Number and result of each piece of work, as they come; all are under way at the same time.

    An interrupt is not kept waiting: the threads then end by themselves, or with the process.
    """
    if len(work) == 1:
        yield 0, work[0]()
        return
    came: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run_one(number: int) -> None:
        try:
            came.put((number, work[number](), None))
        except BaseException as error:
            came.put((number, None, error))

    for number in range(len(work)):
        name = f"swarm-collab-{number}"
        threading.Thread(target=run_one, args=(number,), name=name, daemon=True).start()
    for _ in work:
        number, result, error = came.get()
        if error is not None:
            raise error
        yield number, result


# What was spent: calls, tokens and cost of each model, and nothing guessed.

NO_PRICE = "no price known"


@dataclass(slots=True)
class ModelUsage:
    """One model's part, or the sum of several.

    Attributes:
        calls: All, those that failed or were kept too.
        cached, failed: Of those, the kept answers and the calls without an answer.
        prompt_tokens, new_tokens: Of what was asked now, as the models count them.
        cost: Of what was asked now, in the currency of the prices.
        priced, unpriced: Calls asked now whose price is known, and those of which it is not.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0
    priced: int = 0
    unpriced: int = 0

    def add(self, answer: AgentAnswer) -> None:
        """Count one call."""
        self.calls += 1
        self.failed += bool(answer.error)
        if answer.completion is None:
            return
        if answer.completion.cached:
            self.cached += 1
            return
        self.prompt_tokens += answer.completion.prompt_tokens
        self.new_tokens += answer.completion.new_tokens
        self.cost += answer.completion.cost
        known = answer.completion.known_cost is not None
        self.priced += known
        self.unpriced += not known

    @property
    def known_cost(self) -> float | None:
        """The cost; `None` where no call asked now came with a price."""
        return None if self.unpriced and not self.priced else self.cost

    def format_cost(self) -> str:
        """The cost in words."""
        if self.known_cost is None:
            return NO_PRICE
        rest = f" and {self.unpriced} calls, {NO_PRICE}" if self.unpriced else ""
        return f"{self.cost:.6f}{rest}"


def sum_usage(answers: Iterable[AgentAnswer]) -> ModelUsage:
    """The account of all answers together."""
    found = ModelUsage()
    for answer in answers:
        found.add(answer)
    return found


def format_usage_table(answers: Sequence[AgentAnswer]) -> list[str]:
    """Each model's account and their sum, in columns."""
    names = list(dict.fromkeys(answer.name for answer in answers))
    accounts = [sum_usage(answer for answer in answers if answer.name == name) for name in names]
    rows = [("model", "calls", "cached", "failed", "tokens read", "tokens new", "cost")]
    for name, one in zip([*names, "total"], [*accounts, sum_usage(answers)], strict=True):
        counts = (one.calls, one.cached, one.failed, one.prompt_tokens, one.new_tokens)
        rows.append((name, *map(str, counts), one.format_cost()))  # type: ignore[arg-type]
    return align_columns(rows)
