"""The result of a consortium as JSON, in the format of llm-consortium with additional fields."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from swarm._util.replies import thoughts_of
from swarm.models.base import sum_usage
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.results import (
    ConsortiumTranscript,
    Iteration,
    MemberAnswer,
    Verdict,
)
from swarm.multi_agent.types import AgentAnswer


def result_to_json(
    consortium: Consortium,
    prompt: str,
    iterations: Sequence[Iteration],
    answers: Sequence[AgentAnswer],
    transcript: ConsortiumTranscript | None = None,
) -> dict[str, Any]:
    """Convert a request to JSON.

    "model_responses" and "synthesis" are those of the best iteration; "iterations" contains all. An
    unknown confidence or cost is null. A "ranking" contains indices of the iteration's responses,
    from 0. A stopped request has no synthesis, and its last iteration the answers so far.

    Args:
        consortium: The consortium.
        prompt: The user's prompt.
        iterations: The finished iterations.
        answers: All calls, finished or stopped.
        transcript: The result; `None` if the request was stopped.
    """
    listed = [
        _iteration_to_json(one.number, one.answers, _verdict_to_json(one.verdict))
        for one in iterations
    ]
    current = max((one.layer for one in answers), default=0)
    if transcript is None and current > len(listed):
        members = [one for one in answers if one.layer == current and one.role == "member"]
        unread = [MemberAnswer(one, one.sample + 1, one.text) for one in members]
        listed.append(_iteration_to_json(current, unread, None))
    best = listed[transcript.best - 1 if transcript else -1] if listed else {}
    usage = sum_usage(one.completion for one in answers if one.completion)
    about: dict[str, Any] = {
        "models_used": dict(Counter(member.slot.name for member in consortium.participants)),
        "arbiter": consortium.arbiter.name if consortium.arbiter else None,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration_count": len(iterations),
        "strategy": consortium.options.strategy,
        "calls": len(answers),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "cost": usage.known_cost if usage.calls else None,
        "unpriced": usage.unknown_costs,
        "stopped": transcript.stopped if transcript else "interrupted",
    }
    if transcript:
        about |= {"best_iteration": transcript.best, "seconds": transcript.final.seconds}
        about["warnings"] = list(transcript.warnings)
    return {
        "original_prompt": prompt,
        "model_responses": best.get("model_responses", []),
        "synthesis": best["synthesis"] if transcript else None,
        "metadata": about,
        "iterations": listed,
    }


def _iteration_to_json(
    number: int, answers: Sequence[MemberAnswer], verdict: dict[str, Any] | None
) -> dict[str, Any]:
    responses = [_response_to_json(one) for one in answers]
    return {"iteration": number, "model_responses": responses, "synthesis": verdict}


def _response_to_json(opinion: MemberAnswer) -> dict[str, Any]:
    """Convert a member's answer or error, with confidence and usage, to JSON."""
    answer = opinion.answer
    fields: dict[str, Any] = {"model": answer.name, "instance": opinion.instance}
    completion = answer.completion
    if answer.error:
        fields["error"] = answer.error
    else:
        reasoning = [completion.reasoning.strip() if completion else "", thoughts_of(answer.text)]
        fields |= {"response": opinion.text, "confidence": opinion.confidence}
        fields["reasoning"] = "\n\n".join(filter(None, reasoning))
    if completion:
        fields |= {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.new_tokens,
            "cost": completion.known_cost,
            "seconds": completion.seconds,
            "finish": completion.finish,
        }
    return fields


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    fields = {**asdict(verdict), "raw_arbiter_response": verdict.raw}
    del fields["raw"]
    fields["refinement_areas"] = list(verdict.refinement_areas)
    fields["ranking"] = list(verdict.ranking)
    if not verdict.ranking:
        del fields["ranking"]
    return fields
