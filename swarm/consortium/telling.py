"""What is told of a consortium and its result, as lines of text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from swarm.collab.configs import ConsortiumSettings
from swarm.collab.members import MemberSpec
from swarm.printing import align_columns


def summarize_config(config: ConsortiumSettings) -> str:
    """Who answers and who judges, in one line."""
    names = ", ".join(format_member_count(one) for one in config.members)
    arbiter = config.arbiter.model if config.arbiter else "nobody"
    answer = "answers" if len(config.members) == config.members[0].count == 1 else "answer"
    return f"{names} {answer}, {arbiter} judges; strategy {config.strategy}"


def format_member_count(one: MemberSpec) -> str:
    """A member's name, and how often it is asked."""
    return one.model if one.count == 1 else f"{one.model} x {one.count}"


def list_config_warnings(config: ConsortiumSettings) -> Iterator[str]:
    """What may make an answer worse than it could be."""
    names = [one.model for one in config.members]
    alone = config.strategy == "vote"  # nobody judges but in a tie
    if config.arbiter and config.arbiter.model in names and len(names) > 1 and not alone:
        yield f"{config.arbiter.model} judges, and is a member, too: models prefer their own"
    if sum(one.count for one in config.members) == 1:
        yield f"{names[0]} is the only member: there is nothing to compare"


def format_confidence(confidence: float | None) -> str:
    """A confidence in words."""
    return "unknown" if confidence is None else f"{confidence:.2f}"


def pluralize(count: int, what: str) -> str:
    """So many of something."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_cost(cost: float | None, unpriced: int = 0) -> str:
    """A cost, and of how many calls it is not known."""
    rest = f" and {pluralize(unpriced, 'call')}, no price known" if unpriced else ""
    return "no price known" if cost is None else f"{cost:.6f}{rest}"


def summarize_result(result: Mapping[str, Any]) -> Iterator[str]:
    """How sure the answer is and what is said against it, in short."""
    said, meta = result["synthesis"], result["metadata"]
    tokens = f"{meta['prompt_tokens']} + {meta['completion_tokens']} tokens"
    rounds = pluralize(meta["iteration_count"], "iteration")
    if meta["best_iteration"] != meta["iteration_count"]:
        rounds += f", of which number {meta['best_iteration']} was the best"
    stopped = f" ({meta['stopped']})" if meta["stopped"] else ""
    yield (
        f"confidence {format_confidence(said['confidence'])} after {rounds}{stopped}; "
        f"{pluralize(meta['calls'], 'call')}, {tokens}, {meta['seconds']:.1f} s, "
        f"{format_cost(meta['cost'], meta.get('unpriced', 0))}"
    )
    for key in ("analysis", "dissent"):
        if said[key]:
            yield f"{key}: {said[key]}"


def format_transcript(result: Mapping[str, Any]) -> Iterator[str]:
    """What every member and the arbiter said, iteration by iteration."""
    arbiter = result["metadata"]["arbiter"]
    for one in result["iterations"]:
        for response in one["model_responses"]:
            yield ""
            yield format_response_heading(one["iteration"], response)
            yield response.get("error") or response["response"]
        if reply := (one["synthesis"] or {}).get("raw_arbiter_response"):
            yield from ("", f"--- iteration {one['iteration']}: arbiter {arbiter}", reply)


def format_response_heading(iteration: int, response: Mapping[str, Any]) -> str:
    """Who said something, and how sure it was."""
    who = f"--- iteration {iteration}: {response['model']} #{response['instance']}"
    if "error" in response:
        return f"{who} failed"
    return f"{who}, confidence {format_confidence(response['confidence'])}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows below their heads."""
    cells = [[format_cell(cell) for cell in row] for row in rows]
    return align_columns([list(heads), *cells])


def format_cell(cell: Any) -> str:
    """A cell as text; of what is not known, a dash."""
    if cell is None or cell == "":
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else " ".join(str(cell).split())


def format_settings(name: str, config: ConsortiumSettings) -> Iterator[str]:
    """All that a configuration says, a line each."""
    yield name
    for member in config.members:
        yield f"  member: {describe_member(member)}"
    for key in MEMBER_KEYS[1:]:
        if one := getattr(config, key):
            yield f"  {key}: {describe_member(one)}"
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name in ALWAYS_SHOWN or (setting.name not in MEMBER_KEYS and value != setting.default):
            yield f"  {setting.name}: {', '.join(value) if isinstance(value, tuple) else value}"


MEMBER_KEYS = ("members", "arbiter", "fallback")
ALWAYS_SHOWN = ("strategy", "confidence_threshold", "max_iterations", "min_iterations")
"""Settings that are told even where they are as usual."""


def describe_member(member: MemberSpec) -> str:
    """A member with all that holds for it alone."""
    own = member.to_dict()
    told = [f"{key} {own[key]!r}" for key in own if key not in ("model", "count")]
    return format_member_count(member) + (f" ({', '.join(told)})" if told else "")
