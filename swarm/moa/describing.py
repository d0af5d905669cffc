"""What the chat's commands tell: stages, costs, models and turns, as lines of text."""

from collections.abc import Iterable, Sequence

from swarm.collab import AgentAnswer, AgentSpec
from swarm.collab.moa import MixtureOfAgents
from swarm.errors import UserError
from swarm.moa import accounts
from swarm.moa.turns import ChatTurn


def format_outcome(answer: AgentAnswer) -> str:
    """What a call came to, in a few words."""
    if answer.completion is None:
        return "failed"
    said = answer.completion
    took = "from the cache" if said.cached else f"{said.seconds:.1f} s"
    empty = ", empty" if answer.error else ""
    return f"{took}, {pluralize(said.new_tokens, 'token')}{empty}"


def pluralize(count: int, what: str) -> str:
    """So many of something."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_layer(layer: int, layers: int, asked: int, answers: Sequence[AgentAnswer]) -> str:
    """What a layer came to, in one line."""
    good = sum(not answer.error for answer in answers)
    parts = "; ".join(f"{answer_label(answer)} {format_outcome(answer)}" for answer in answers)
    return f"layer {layer} of {layers}: {good} of {asked} answered ({parts or 'none yet'})"


def answer_label(answer: AgentAnswer) -> str:
    """Who was asked, and which time where it is not the first."""
    return f"{answer.name} #{answer.sample + 1}" if answer.sample else answer.name


def format_stages(turn: ChatTurn, which: str) -> Iterable[str]:
    """All answers of a turn; with a number, that one and all that it was asked.

    Raises:
        UserError: There is no such answer.
    """
    if not turn.answers:
        raise UserError("/stages: the last turn has no answers")
    if not which:
        for number, answer in enumerate(turn.answers, 1):
            yield from (format_heading(number, answer), answer.error or answer.text, "")
        return
    if not which.isdecimal() or not 1 <= int(which) <= len(turn.answers):
        raise UserError(f"/stages {which}: the last turn has answers 1 to {len(turn.answers)}")
    answer = turn.answers[int(which) - 1]
    yield format_heading(int(which), answer)
    if isinstance(answer.prompt, str):
        yield from ("[prompt]", answer.prompt, "")
    else:
        for message in answer.prompt:
            yield from (f"[{message.role}]", message.content, "")
    if answer.completion and answer.completion.reasoning:
        yield from ("[reasoning]", answer.completion.reasoning, "")
    yield from ("[error]" if answer.error else "[answer]", answer.error or answer.text)


def format_heading(number: int, answer: AgentAnswer) -> str:
    """A call's number, place and outcome."""
    asked = answer.completion and not answer.completion.cached
    cost = f", {accounts.sum_usage([answer]).format_cost()}" if asked else ""
    who = f"layer {answer.layer}, {answer.role} {answer_label(answer)}"
    return f"--- {number}: {who}: {format_outcome(answer)}{cost}"


def format_costs(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """What the last turn and all of them took."""
    for title, some in (("last turn", turns[-1:]), ("session", turns)):
        answers = [answer for turn in some for answer in turn.answers]
        yield f"{title}, {pluralize(len(some), 'question')}:"
        yield from accounts.format_usage_table(answers)


def format_history(turns: Sequence[ChatTurn]) -> Iterable[str]:
    """Questions and answers."""
    for turn in turns:
        yield f">>> {turn.question}"
        yield turn.text


def summarize_mixture(mixture: MixtureOfAgents) -> str:
    """Who speaks, in one line."""
    last = f"{mixture.aggregator.name} {STRATEGY_PHRASES[mixture.strategy]}"
    if mixture.layers == 1:
        return f"{mixture.aggregator.name} answers alone"
    names = ", ".join(_format_agent_count(slot) for slot in mixture.proposers)
    rounds = "" if mixture.layers == 2 else f" in {mixture.layers - 1} rounds"
    one = len(mixture.proposers) == 1 and mixture.proposers[0].count == 1
    return f"{names} propose{'s' * one}{rounds}, {last}; {mixture.calls} calls a question"


def format_models(mixture: MixtureOfAgents) -> Iterable[str]:
    """Every slot, and what it says of itself."""
    rounds = range(1, mixture.layers)
    layers = f"layers {rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else "layer 1"
    for slot in mixture.proposers if rounds else ():
        yield f"{layers}: {_format_agent_count(slot)}{_format_agent_settings(slot)}"
    last, fallback = mixture.aggregator, mixture.fallback
    yield f"layer {mixture.layers}: {last.name} {STRATEGY_PHRASES[mixture.strategy]}{_format_agent_settings(last)}"
    if fallback:
        yield f"if that fails: {fallback.name}{_format_agent_settings(fallback)}"
    yield f"{mixture.calls} calls a question; quorum {mixture.quorum}, prompt {mixture.prompt.form}"


STRATEGY_PHRASES = {
    "aggregate": "answers",
    "rank": "chooses one",
    "sequential": "answers, a few proposals at a time",
}


def _format_agent_count(slot: AgentSpec) -> str:
    return slot.name if slot.count == 1 else f"{slot.count} x {slot.name}"


def _format_agent_settings(slot: AgentSpec) -> str:
    """What holds for the slot alone."""
    keys = ("temperature", "max_tokens", "timeout", "system")
    told = [f"{key} {value!r}" for key in keys if (value := getattr(slot, key)) is not None]
    return f" ({', '.join(told)})" if told else ""
