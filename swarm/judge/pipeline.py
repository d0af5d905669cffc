"""The pipeline of judged benchmarks: requests, rows, reports.

Answers and judgements are both an `OutputJob`: a file whose rows are built from the replies of one
model. A format (`alpaca_eval`, `mt_bench`, `flask`) reads its files and describes each row as a
`Record`; this module sends the requests and writes the rows.
"""

import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Options
from typing import Any, NamedTuple

from swarm._util.jsonl import JsonRow, merge_rows, shorten_text
from swarm._util.terminal import format_cost
from swarm.errors import UserError
from swarm.models.base import (
    Completion,
    Message,
    Model,
    Request,
    sum_usage,
)
from swarm.scorers.llm_judge import make_fence

BATCH_SIZE = 32
"""Requests per batch."""

MAX_FAILURES_SHOWN = 5

QuestionId = int | str

RecordSteps = Generator[Mapping[str, Request], list[Completion], JsonRow]
"""Yields requests by a key of the job, receives the replies in the same order, and returns
the row. The requests of one step may depend on the replies to the previous one.
"""


class Record(NamedTuple):
    """A row that is built from replies.

    Attributes:
        identity: Values of `OutputJob.fields`.
        steps: The requests and the row; see `RecordSteps`.
    """

    identity: tuple[Any, ...]
    steps: RecordSteps


@dataclass
class BatchResult:
    """Results of requests.

    Attributes:
        answers: Answers by key.
        failures: Reasons for missing answers, by key.
        kept: Number of answers that were in the cache.
    """

    answers: dict[str, Completion] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    def add(self, other: "BatchResult") -> None:
        """Add the results of further requests."""
        self.answers |= other.answers
        self.failures |= other.failures
        self.kept += other.kept

    def format_report(self, what: str = "answers") -> list[str]:
        """Return lines with the number of answers and the failures."""
        total = len(self.answers) + len(self.failures)
        kept = f", {self.kept} of them from earlier" if self.kept else ""
        lines = [f"{len(self.answers)} of {total} {what}{kept}"]
        for key, reason in list(self.failures.items())[:MAX_FAILURES_SHOWN]:
            lines.append(f"failed: {shorten_text(key)}: {reason}")
        if len(self.failures) > MAX_FAILURES_SHOWN:
            lines.append(f"and {len(self.failures) - MAX_FAILURES_SHOWN} more failed")
        return lines + ["the same command asks only these again"] * bool(self.failures)


@dataclass(frozen=True)
class OutputJob:
    """An output file, and the records of its rows.

    Attributes:
        records: One per row.
        output: The file.
        noun: The replies in reports, such as "answers".
        finish: Returns further lines of the report, from the rows and the results.
        fields: Fields that identify a row in `output`, into which the rows are merged; records with
            a failed request are removed. Without fields, `finish` writes the output, once all
            requests are answered.
        notes: Lines to print before anything is sent.
        wrap: Builds the model that answers from the given one.
    """

    records: Sequence[Record]
    output: Path
    noun: str
    finish: Callable[[Sequence[JsonRow], BatchResult], Sequence[str]] = lambda rows, replies: ()
    fields: Sequence[str] = ()
    notes: Sequence[str] = ()
    wrap: Callable[[Model], Model] = lambda model: model


def run_job(job: OutputJob, model: Model, name: str, batch: int = BATCH_SIZE) -> int:
    """Send a job's requests, write its output, print a report, and return the exit code."""
    replies, rows, gone = collect_rows(model, name, job.records, batch)
    report = replies.format_report(job.noun)
    if job.fields:
        merge_rows(job.output, job.fields, rows, gone)
        usage = format_usage(name, usage_to_json(replies.answers.values()))
        wrote = [f"wrote {job.output}"] * job.output.exists()
        report = [*job.finish(rows, replies), *report, usage, *wrote]
    elif replies.failures:
        report.append(f"{job.output} is written when all are there")
    else:
        report += job.finish(rows, replies)
    print("\n".join(report))
    return 1 if replies.failures else 0


def collect_rows(
    model: Model, name: str, records: Sequence[Record], batch: int = BATCH_SIZE
) -> tuple[BatchResult, list[JsonRow], list[tuple[Any, ...]]]:
    """Send the requests of all records, one step of each at a time, and build the rows.

    A record stops at a failed request.

    Returns:
        The results, the rows, and the identities of the records without one.
    """
    results, rows = BatchResult(), dict[int, JsonRow]()
    replies: dict[int, Any] = dict.fromkeys(range(len(records)))  # `None` starts a generator
    while replies:
        asked: dict[int, Mapping[str, Request]] = {}
        merged: dict[str, Request] = {}
        for place, answers in replies.items():
            try:
                asked[place] = records[place].steps.send(answers)
            except StopIteration as end:
                rows[place] = end.value
                continue
            if same := merged.keys() & asked[place].keys():
                raise UserError(
                    f'two requests are called "{min(same)}"; give the questions other ids'
                )
            merged.update(asked[place])
        found = send_requests(model, name, merged, batch)
        results.add(found)
        replies = {
            place: [found.answers[key] for key in requests]
            for place, requests in asked.items()
            if found.failures.keys().isdisjoint(requests)
        }
    gone = [record.identity for place, record in enumerate(records) if place not in rows]
    return results, [rows[place] for place in sorted(rows)], gone


def send_requests(
    model: Model, name: str, requests: Mapping[str, Request], batch: int = BATCH_SIZE
) -> BatchResult:
    """Answer every request.

    If all requests of a batch fail for the same reason, the remaining ones are not sent.

    Args:
        model: The model, whose answers are stored as they arrive.
        name: Its name.
        requests: Requests by key, such as a question's id.
        batch: Number of requests per batch.
    """
    result, keys = BatchResult(), list(requests)
    for first in range(0, len(keys), batch):
        chunk, rest = keys[first : first + batch], keys[first + batch :]
        replies = model.generate_each([requests[key] for key in chunk])
        failed: dict[str, str] = {}
        for key, one in zip(chunk, replies, strict=True):
            if isinstance(one, Completion):
                result.answers[key] = one
                result.kept += one.cached
            else:
                failed[key] = str(one)
        result.failures |= failed
        print(f"{name}: {first + len(chunk)} of {len(keys)}", file=sys.stderr, flush=True)
        if len(failed) == len(chunk) > 1 and len(set(failed.values())) == 1:
            result.failures |= dict.fromkeys(rest, "not asked, after a whole batch failed")
            break
    return result


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


def format_usage(what: str, usage: Mapping[str, Any]) -> str:
    """Format the result of `usage_to_json` in one line."""
    known = usage["cost"] or usage["unpriced"] < usage["answers"]
    cost = format_cost(usage["cost"] if known else None, usage["unpriced"], "answer")
    return (
        f"{what}: {usage['answers']} answers, {usage['prompt_tokens']:,} tokens read, "
        f"{usage['new_tokens']:,} written, {'cost ' * bool(known)}{cost}"
    )


def build_sampled_request(question: str, given: Options, sample: int = 0) -> Request:
    """Build the request of an answer with `swarm.judge.cli.sampling_options`."""
    before = (Message("system", given.system),) if given.system else ()
    return Request(
        (*before, Message("user", question)),
        given.max_tokens,
        temperature=given.temperature,
        seed=given.seed,
        sample=sample,
    )


def build_judge_request(prompt: str, given: Options) -> Request:
    """Build a judge's request; sampling is greedy, so that a judgement can be repeated."""
    return Request(prompt, given.max_tokens, temperature=0.0)


def describe_questions(
    source: str, ids: Collection[Any], answers: Mapping[str, Mapping[Any, Any]]
) -> list[str]:
    """Return a line with the number of questions, and one per model with unanswered ones.

    Args:
        source: File of the questions.
        ids: Their ids.
        answers: Answers by model and question id.
    """
    lines = [f"{len(ids)} questions of {source}"]
    for model, own in answers.items():
        if none := [str(id_) for id_ in ids if id_ not in own]:
            some = ", ".join(none[:5]) + (", …" if len(none) > 5 else "")
            lines.append(f"{model}: no answer to {len(none)} of {len(ids)} questions: {some}")
    if len(lines) > 1:
        lines.append("if they were asked other questions, name their file with --questions")
    return lines


def group_scores(
    scores: Iterable[tuple[Iterable[tuple[Any, ...]], Any, Any]],
) -> dict[tuple[Any, ...], list[list[Any]]]:
    """Group scores for the rows of a table: by the labels of a row, a list per question.

    Args:
        scores: Of each score, the labels of all rows it counts for, its question, and its value.
    """
    groups: dict[tuple[Any, ...], dict[Any, list[Any]]] = {}
    for labels, question, value in scores:
        for label in labels:
            groups.setdefault(label, {}).setdefault(question, []).append(value)
    return {label: list(questions.values()) for label, questions in groups.items()}


def fence_parts(parts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Fence texts that a judge must not take for instructions; see `make_fence`.

    Args:
        parts: Titles and texts.

    Returns:
        The line of the fence, and the titled texts between such lines.
    """
    parts = list(parts)
    line = make_fence(*(text for _, text in parts))
    return line, "\n\n".join(f"{title}:\n{line}\n{text}\n{line}" for title, text in parts)
