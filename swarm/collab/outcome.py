"""The outcome of a consortium as JSON, in the shape that llm-consortium gave it, and more."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from swarm.collab.consortium import Consortium
from swarm.collab.deliberation.verdicts import Deliberation, Iteration, Opinion, Verdict


def result(
    consortium: Consortium, prompt: str, deliberation: Deliberation, raw: bool = False
) -> dict[str, Any]:
    """All that came of a request, as JSON values.

    "model_responses" and "synthesis" are those of the best iteration; "iterations" has all. A
    confidence that nobody said is null, and so is a cost where no price is known. Places in a
    "ranking" are those in the iteration's responses, from 0.

    Args:
        consortium: Whose.
        prompt: What was asked, as the user wrote it.
        deliberation: What it came to.
        raw: Whether the arbiter's replies are given word by word, too.
    """
    best = deliberation.iterations[deliberation.best - 1]
    final = deliberation.final
    return {
        "original_prompt": prompt,
        "model_responses": [_response(opinion) for opinion in best.opinions],
        "synthesis": _synthesis(best.verdict, raw),
        "metadata": {
            "models_used": dict(Counter(seat.slot.name for seat in consortium.seats)),
            "arbiter": consortium.arbiter.name if consortium.arbiter else None,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "iteration_count": len(deliberation.iterations),
            "best_iteration": deliberation.best,
            "strategy": consortium.strategy,
            "calls": len(deliberation.answers),
            "prompt_tokens": final.prompt_tokens,
            "completion_tokens": final.new_tokens,
            "cost": final.known_cost,
            "unpriced": sum(
                one.completion.known_cost is None for one in deliberation.answers if one.completion
            ),
            "seconds": final.seconds,
            "stopped": deliberation.stopped,
            "warnings": list(deliberation.warnings),
        },
        "iterations": [_iteration(iteration, raw) for iteration in deliberation.iterations],
    }


def _iteration(iteration: Iteration, raw: bool) -> dict[str, Any]:
    return {
        "iteration": iteration.number,
        "model_responses": [_response(opinion) for opinion in iteration.opinions],
        "synthesis": _synthesis(iteration.verdict, raw),
    }


def responses(prompt: str, opinions: Sequence[Opinion]) -> dict[str, Any]:
    """The same of answers of which nobody judged.

    Args:
        prompt: What was asked, as the user wrote it.
        opinions: What each member said.
    """
    return {"original_prompt": prompt, "model_responses": [_response(one) for one in opinions]}


def _response(opinion: Opinion) -> dict[str, Any]:
    """One member's: its answer and confidence, or its error, and what it took."""
    answer = opinion.answer
    told: dict[str, Any] = {"model": answer.name, "instance": opinion.instance}
    if answer.error:
        told["error"] = answer.error
    else:
        told |= {"response": opinion.text, "confidence": opinion.confidence}
    if said := answer.completion:
        told |= {"prompt_tokens": said.prompt_tokens, "completion_tokens": said.new_tokens,
                 "cost": said.known_cost, "seconds": said.seconds}  # fmt: skip
    return told


def _synthesis(verdict: Verdict, raw: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "synthesis": verdict.synthesis,
        "confidence": verdict.confidence,
        "analysis": verdict.analysis,
        "dissent": verdict.dissent,
        "needs_iteration": verdict.needs_iteration,
        "refinement_areas": list(verdict.refinement_areas),
        "reasoning": verdict.reasoning,
        "how": verdict.how,
    }
    if verdict.ranking:
        told["ranking"] = list(verdict.ranking)
    return {**told, "raw_arbiter_response": verdict.raw} if raw else told
