"""Rounds of calls: what collaborations ask at one time is asked at once, each model in a thread."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from queue import SimpleQueue
from typing import Any, TypeVar

from swarm.collab import Answer, Asked, Slot, Stages, Watch
from swarm.errors import UserError
from swarm.models import Completion, Delta, Request, attempt, stream
from swarm.models.chat import CHARACTERS_A_TOKEN
from swarm.models.spending import cost_of
from swarm.models.trace import Trace, Traced

S = TypeVar("S", bound=Stages)
T = TypeVar("T")

EMPTY = "an empty answer"

STOPPED = "stopped"
"""The error of an answer that was under way when somebody stopped it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One slot that is to be asked once.

    Attributes:
        slot: Who is asked.
        sample: Which of the slot's samples, from 0; `request.sample` is the model's count.
        request: What is asked.
        layer, layers, role: See `Answer` and `Asked`.
        last: Whether the answer is the collaboration's own, as it comes, and so may be streamed.
    """

    slot: Slot
    sample: int
    request: Request
    layer: int
    layers: int
    role: str
    last: bool = False

    @property
    def asked(self) -> Asked:
        """The event."""
        return Asked(self.layer, self.layers, self.role, self.slot.name, self.sample)

    @property
    def record(self) -> dict[str, Any]:
        """Who is asked, for the trace."""
        who = {"name": self.slot.name, "role": self.role, "layer": self.layer}
        return {**who, "sample": self.sample}

    def answered(self, came: Completion | UserError) -> Answer:
        """What came, as an answer of this call."""
        said = None if isinstance(came, UserError) else came
        error = "" if said and said.text.strip() else EMPTY if said else str(came)
        prompt = self.request.prompt
        return Answer(self.layer, self.role, self.slot.name, self.sample, prompt, said, error)


def stopped(call: Call, text: str = "", reasoning: str = "") -> Answer:
    """The answer of a call that was under way when somebody stopped it, with what was given of it.

    Endpoints count its tokens and do not say how many: they are estimated by its characters.
    """
    prompt = call.request.prompt
    asked = prompt if isinstance(prompt, str) else "".join(turn.content for turn in prompt)
    read, new = (ceil(len(one) / CHARACTERS_A_TOKEN) for one in (asked, text + reasoning))
    prices = getattr(call.slot.model, "prices", None)
    said = Completion(
        text,
        prompt_tokens=read,
        new_tokens=new,
        cost=cost_of({"prompt_tokens": read, "new_tokens": new}, prices or {}),
        reasoning=reasoning,
        finish=STOPPED,
        priced=None if prices is None else bool(prices),
    )
    return replace(call.answered(said), error=STOPPED)


Script = Generator[list[Call], list[Answer], S]
"""How a collaboration goes about one request: it yields rounds of calls, one at least in each, is
sent their answers, and returns what came of it, or raises a `UserError`."""


def unwatched(number: int, event: Any) -> None:
    """Nobody watches."""


def in_step(
    scripts: Sequence[Generator[list[Call], list[Answer], T]],
    watch: Watch = unwatched,
    trace: Trace | None = None,
) -> list[T | UserError]:
    """What the scripts come to, in their order; a round of all of them is asked at once."""
    done: dict[int, T | UserError] = {}
    waiting: dict[int, Any] = dict.fromkeys(range(len(scripts)))
    while waiting:
        asked: list[tuple[int, Call]] = []
        for number, answers in waiting.items():
            try:
                asked += [(number, call) for call in scripts[number].send(answers)]
            except StopIteration as end:
                done[number] = end.value
            except UserError as error:
                done[number] = error
        waiting = {}
        for (number, _), answer in zip(asked, ask(asked, watch, trace), strict=True):
            waiting.setdefault(number, []).append(answer)
    return [done[number] for number in range(len(scripts))]


def streamed(
    script: Script[S], watch: Watch = unwatched, trace: Trace | None = None
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
            answers = ask([(0, call) for call in calls], watch, trace)
            continue
        answer = yield from _pieces(calls[0], watch, trace)
        given = bool(answer.text)
        answers = [answer]


def _pieces(call: Call, watch: Watch, trace: Trace | None) -> Generator[Delta, None, Answer]:
    """One call's answer as it comes; one that fails before its text begins is a failed answer."""
    watch(0, call.asked)
    model = call.slot.model
    if trace:
        model = Traced(model, call.slot.name, trace, call.record)
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
        answer = call.answered(end.value)
    except UserError as error:
        answer = call.answered(error)
        if begun:
            watch(0, answer)
            raise
    except (KeyboardInterrupt, GeneratorExit):
        texts = ("".join(one.text for one in given), "".join(one.reasoning for one in given))
        watch(0, stopped(call, *texts))
        raise
    finally:
        pieces.close()
    watch(0, answer)
    return answer


def ask(
    asked: Sequence[tuple[int, Call]], watch: Watch = unwatched, trace: Trace | None = None
) -> list[Answer]:
    """Answers to all calls, in their order; each distinct model gets its own as one batch.

    Args:
        asked: Each call with the number of the request that it is for.
    """
    batches: dict[int, list[int]] = {}
    for place, (number, call) in enumerate(asked):
        batches.setdefault(id(call.slot.model), []).append(place)
        watch(number, call.asked)
    places = list(batches.values())
    work = []
    for some in places:
        calls = [asked[place][1] for place in some]
        work.append(partial(attempt, calls[0].slot.model, [call.request for call in calls]))
    answers: dict[int, Answer] = {}
    try:
        for batch, came in at_once(work):
            for place, one in zip(places[batch], came, strict=True):
                number, call = asked[place]
                if trace:
                    trace.add(call.record, call.request, one)
                answers[place] = call.answered(one)
                watch(number, answers[place])
    except KeyboardInterrupt:
        for place, (number, call) in enumerate(asked):
            if place not in answers:
                watch(number, stopped(call))
        raise
    return [answers[place] for place in range(len(asked))]


def at_once(work: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
    """Number and result of each piece of work, as they come; all are under way at the same time.

    An interrupt is not kept waiting: the threads then end by themselves, or with the process.
    """
    if len(work) == 1:
        yield 0, work[0]()
        return
    came: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def do(number: int) -> None:
        try:
            came.put((number, work[number](), None))
        except BaseException as error:
            came.put((number, None, error))

    for number in range(len(work)):
        name = f"swarm-collab-{number}"
        threading.Thread(target=do, args=(number,), name=name, daemon=True).start()
    for _ in work:
        number, result, error = came.get()
        if error is not None:
            raise error
        yield number, result
