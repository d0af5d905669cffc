"""Batches of requests to one model, with a journal that makes them resumable."""

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm._util.files import short_digest
from swarm._util.format import format_cost
from swarm._util.jsonl import JsonlJournal, shorten_text, sibling_path
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Model,
    Request,
    completion_from_json,
    completion_to_json,
    generate_each,
    request_to_json,
    sum_usage,
)

BATCH_SIZE = 32
"""Requests per batch; each batch is stored before the next is sent."""

MAX_FAILURES_SHOWN = 5
"""Maximum number of failures to print."""


@dataclass(slots=True)
class BatchResult:
    """Results of requests.

    Attributes:
        answers: Answers by key, in request order.
        failures: Reasons for missing answers, by key.
        kept: Number of answers that were already in the journal.
    """

    answers: dict[str, Completion] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if all requests were answered."""
        return 1 if self.failures else 0

    def format_report(self, what: str = "answers") -> list[str]:
        """Return lines with the number of answers and the failures."""
        total = len(self.answers) + len(self.failures)
        kept = f", {self.kept} of them from earlier" if self.kept else ""
        lines = [f"{len(self.answers)} of {total} {what}{kept}"]
        for key, reason in list(self.failures.items())[:MAX_FAILURES_SHOWN]:
            lines.append(f"failed: {shorten_text(key)}: {reason}")
        if len(self.failures) > MAX_FAILURES_SHOWN:
            lines.append(f"and {len(self.failures) - MAX_FAILURES_SHOWN} more failed")
        if self.failures:
            lines.append("the same command asks only these again")
        return lines


def send_requests(
    model: Model,
    who: str,
    requests: Mapping[str, Request],
    output: Path,
    batch: int = BATCH_SIZE,
) -> BatchResult:
    """Answer every request that is not in the journal, and store the answers there.

    A stored answer is reused if its key, the model (name and `model_identity`) and the request are
    equal: a different prompt, temperature or preset is a different request. Failures are not
    stored. If all requests of a batch fail for the same reason, the remaining ones are not sent.

    Args:
        model: The model.
        who: Its name.
        requests: Requests by a key that is unique in the journal, such as a question's id.
        output: Output file of the answers; the journal is beside it.
        batch: Number of requests per batch.

    Raises:
        UserError: The journal cannot be read or written; nothing is sent then.
    """
    from swarm.registry.name_resolution import model_identity

    kept = JsonlJournal(sibling_path(output, "replies.jsonl"))
    whose = [who, model_identity(model)]
    marks = {key: short_digest([whose, request_to_json(one)]) for key, one in requests.items()}
    open_ = [key for key in requests if kept.rows.get(key, {}).get("asked") != marks[key]]
    failures: dict[str, str] = {}
    if open_:
        kept.append_rows([])
    for first in range(0, len(open_), batch):
        some = open_[first : first + batch]
        found = generate_each(model, [requests[key] for key in some])
        came = dict(zip(some, found, strict=True))
        kept.append_rows(
            [
                {"key": key, "asked": marks[key], "answer": completion_to_json(one)}
                for key, one in came.items()
                if isinstance(one, Completion)
            ]
        )
        failed = {key: str(one) for key, one in came.items() if isinstance(one, UserError)}
        failures |= failed
        _print_progress(who, first + len(some), len(open_))
        if len(failed) == len(some) > 1 and len(set(failed.values())) == 1:
            rest = open_[first + len(some) :]
            failures |= dict.fromkeys(rest, "not asked, after a whole batch failed")
            break
    answers = {
        key: completion_from_json(kept.rows[key]["answer"])
        for key in requests
        if key not in failures
    }
    return BatchResult(answers, failures, len(requests) - len(open_))


def usage_to_json(completions: Iterable[Completion]) -> dict[str, Any]:
    """Return the number of answers, their tokens, and the cost in the currency of the prices."""
    usage = sum_usage(completions)
    return {
        "answers": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "new_tokens": usage.new_tokens,
        "cost": usage.cost,
        "unpriced": usage.unknown_costs,
    }


def format_usage(what: str, taken: Mapping[str, Any]) -> str:
    """Format the result of `usage_to_json` in one line."""
    older = 0 if taken["cost"] else taken["answers"]
    unpriced = taken.get("unpriced", older)
    known = taken["cost"] or unpriced < taken["answers"]
    cost = format_cost(taken["cost"] if known else None, unpriced, "answer")
    return (
        f"{what}: {taken['answers']} answers, {taken['prompt_tokens']:,} tokens read, "
        f"{taken['new_tokens']:,} written, {'cost ' * bool(known)}{cost}"
    )


def report_result(replies: BatchResult, what: str, who: str, output: Path) -> int:
    """Print the number of replies, their usage and the output path; return the exit code."""
    lines = [
        *replies.format_report(what),
        format_usage(who, usage_to_json(replies.answers.values())),
    ]
    print("\n".join([*lines, *([f"wrote {output}"] if output.exists() else [])]))
    return replies.exit_code


def describe_missing_answers(
    questions: Collection[Any], answers: Mapping[str, Mapping[Any, Any]]
) -> list[str]:
    """Return a line per model with unanswered questions.

    Args:
        questions: Ids of the questions.
        answers: Answers by model and question id.
    """
    lines = []
    for model, mine in answers.items():
        if none := [str(id_) for id_ in questions if id_ not in mine]:
            some = ", ".join(none[:5]) + (", …" if len(none) > 5 else "")
            lines.append(f"{model}: no answer to {len(none)} of {len(questions)} questions: {some}")
    if lines:
        lines.append("if they were asked other questions, name their file with --questions")
    return lines


def _print_progress(who: str, done: int, total: int) -> None:
    print(f"{who}: {done} of {total} asked", file=sys.stderr, flush=True)
