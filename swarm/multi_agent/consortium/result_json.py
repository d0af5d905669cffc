"""Results of a consortium as JSON: the format of llm-consortium with additional fields."""

from collections import Counter
from collections.abc import Sequence
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
    consortium: Consortium, prompt: str, deliberation: ConsortiumTranscript, raw: bool = False
) -> dict[str, Any]:
    """Convert the result of a request to JSON.

    "model_responses" and "synthesis" are those of the best iteration; "iterations" contains all. An
    unknown confidence or cost is null. A "ranking" contains indices of the iteration's responses,
    from 0.

    Args:
        consortium: The consortium.
        prompt: The user's prompt.
        deliberation: The transcript.
        raw: Include the arbiter's replies verbatim.
    """
    best = deliberation.iterations[deliberation.best - 1]
    final = deliberation.final
    return {
        "original_prompt": prompt,
        "model_responses": [_response_to_json(opinion) for opinion in best.answers],
        "synthesis": _synthesis_to_json(best.verdict, raw),
        "metadata": {
            "models_used": dict(Counter(member.slot.name for member in consortium.participants)),
            "arbiter": consortium.arbiter.name if consortium.arbiter else None,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "iteration_count": len(deliberation.iterations),
            "best_iteration": deliberation.best,
            "strategy": consortium.strategy,
            "calls": len(deliberation.answers),
            "prompt_tokens": final.prompt_tokens,
            "completion_tokens": final.new_tokens,
            "cost": final.known_cost,
            "unpriced": sum_usage(
                one.completion for one in deliberation.answers if one.completion
            ).unknown_costs,
            "seconds": final.seconds,
            "stopped": deliberation.stopped,
            "warnings": list(deliberation.warnings),
        },
        "iterations": [_iteration_to_json(iteration, raw) for iteration in deliberation.iterations],
    }


def _iteration_to_json(iteration: Iteration, raw: bool) -> dict[str, Any]:
    return {
        "iteration": iteration.number,
        "model_responses": [_response_to_json(opinion) for opinion in iteration.answers],
        "synthesis": _synthesis_to_json(iteration.verdict, raw),
    }


def partial_result_to_json(
    consortium: Consortium,
    prompt: str,
    iterations: Sequence[Iteration],
    answers: Sequence[AgentAnswer],
) -> dict[str, Any]:
    """Convert a stopped request to JSON: like `result_to_json`, without a synthesis.

    Args:
        consortium: The consortium.
        prompt: The user's prompt.
        iterations: The finished iterations.
        answers: All calls that finished or were stopped.
    """
    finished = [_iteration_to_json(one, raw=True) for one in iterations]
    current = max((one.layer for one in answers), default=0)
    pending = [one for one in answers if one.layer == current and one.role == "member"]
    if current > len(finished):
        responses = [
            _response_to_json(MemberAnswer(one, one.sample + 1, one.text, None)) for one in pending
        ]
        finished.append({"iteration": current, "model_responses": responses, "synthesis": None})
    completions = [one.completion for one in answers if one.completion]
    usage = sum_usage(completions)
    return {
        "original_prompt": prompt,
        "model_responses": finished[-1]["model_responses"] if finished else [],
        "synthesis": None,
        "metadata": {
            "models_used": dict(Counter(member.slot.name for member in consortium.participants)),
            "arbiter": consortium.arbiter.name if consortium.arbiter else None,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "iteration_count": len(iterations),
            "strategy": consortium.strategy,
            "calls": len(answers),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.new_tokens,
            "cost": usage.known_cost if completions else None,
            "unpriced": usage.unknown_costs,
            "stopped": "interrupted",
        },
        "iterations": finished,
    }


def _response_to_json(opinion: MemberAnswer) -> dict[str, Any]:
    """Convert a member's answer or error, with confidence and usage, to JSON."""
    answer = opinion.answer
    fields: dict[str, Any] = {"model": answer.name, "instance": opinion.instance}
    if answer.error:
        fields["error"] = answer.error
    else:
        fields |= {"response": opinion.text, "confidence": opinion.confidence}
        completion = answer.completion
        reasoning = completion.reasoning if completion else ""
        fields["reasoning"] = "\n\n".join(
            filter(None, [reasoning.strip(), thoughts_of(answer.text)])
        )
    if completion := answer.completion:
        fields |= {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.new_tokens,
            "cost": completion.known_cost,
            "seconds": completion.seconds,
            "finish": completion.finish,
        }
    return fields


def _synthesis_to_json(verdict: Verdict, raw: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "synthesis": verdict.synthesis,
        "confidence": verdict.confidence,
        "analysis": verdict.analysis,
        "dissent": verdict.dissent,
        "needs_iteration": verdict.needs_iteration,
        "refinement_areas": list(verdict.refinement_areas),
        "reasoning": verdict.reasoning,
        "source": verdict.source,
        "finish": verdict.finish,
    }
    if verdict.ranking:
        fields["ranking"] = list(verdict.ranking)
    return {**fields, "raw_arbiter_response": verdict.raw} if raw else fields
