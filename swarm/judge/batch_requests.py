"""Many requests put to one model; a kill or a failure costs only what is not answered yet."""

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm._util.files import short_digest
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
)

BATCH_SIZE = 32
"""Requests at once; what they come to is kept before the next are asked."""

MAX_FAILURES_SHOWN = 5
"""Failures that are told one by one."""


@dataclass(slots=True)
class BatchResult:
    """What requests came to.

    Attributes:
        answers: By key, in the order of the requests.
        failures: By key, why there is no answer.
        kept: How many of the answers were in the journal already.
    """

    answers: dict[str, Completion] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code: 0 if there is an answer to everything."""
        return 1 if self.failures else 0

    def format_report(self, what: str = "answers") -> list[str]:
        """Lines that say how many there are, and which failed and why."""
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
    """Answer every request that the journal does not answer yet, and keep each answer there.

    An answer counts as kept if its key, the model (its name and its `identity`) and the request are
    the same: whoever changes a prompt, a temperature or a preset is asking something else. A
    failure is never kept. Where all of a batch fail for the same reason, nothing more is asked.

    Args:
        model: Who is asked.
        who: Its name.
        requests: By a key that is unique in the journal, such as a question's id.
        output: What the answers will be in; beside it is the journal of those that there are.
        batch: How many requests are put at once.

    Raises:
        UserError: The journal cannot be read or written; nothing is asked then.
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


def sum_usage(completions: Iterable[Completion]) -> dict[str, Any]:
    """What answers took: how many there are, their tokens, and the cost in the prices' currency."""
    all_ = list(completions)
    return {
        "answers": len(all_),
        "prompt_tokens": sum(one.prompt_tokens for one in all_),
        "new_tokens": sum(one.new_tokens for one in all_),
        "cost": sum(one.cost for one in all_),
        "unpriced": sum(one.known_cost is None for one in all_),
    }


def format_usage(what: str, taken: Mapping[str, Any]) -> str:
    """`spent` as a line for people."""
    older = 0 if taken["cost"] else taken["answers"]
    unpriced = taken.get("unpriced", older)
    rest = f" and {unpriced} answers, no price known" if unpriced else ""
    known = taken["cost"] or unpriced < taken["answers"]
    cost = f"cost {taken['cost']:.4f}{rest}" if known else "no price known"
    return (
        f"{what}: {taken['answers']} answers, {taken['prompt_tokens']:,} tokens read, "
        f"{taken['new_tokens']:,} written, {cost}"
    )


def report_result(replies: BatchResult, what: str, who: str, output: Path) -> int:
    """Print how many replies there are, what they took and where they lie; give the exit code."""
    lines = [*replies.format_report(what), format_usage(who, sum_usage(replies.answers.values()))]
    print("\n".join([*lines, *([f"wrote {output}"] if output.exists() else [])]))
    return replies.exit_code


def describe_missing_answers(
    questions: Collection[Any], answers: Mapping[str, Mapping[Any, Any]]
) -> list[str]:
    """A line for each model that did not answer all of the questions.

    Args:
        questions: Their ids.
        answers: By model and question's id.
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
