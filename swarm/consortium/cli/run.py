"""Command `run` of `llm consortium`, and text output of configurations and results."""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from swarm._util.files import write_json
from swarm._util.terminal import (
    WarningCollector,
    align_columns,
    escape_control_chars,
    format_cost,
    is_tty,
    pluralize,
    std_streams,
)
from swarm._util.threads import PeriodicThread
from swarm.consortium.api import (
    ConsortiumQuestion,
    QuestionInterrupted,
    answer_question,
)
from swarm.consortium.cli.options import (
    build_registry,
    combine_options,
    consortium_option,
    location_options,
    member_options,
    request_options,
    resolve_config,
    strategy_options,
)
from swarm.errors import UserError
from swarm.models.base import Message
from swarm.models.trace import Trace
from swarm.multi_agent.consortium.config import ConsortiumSettings, build_consortium
from swarm.multi_agent.consortium.consortium import format_event
from swarm.multi_agent.consortium.member_spec import MemberSpec
from swarm.multi_agent.types import AgentAnswer, CallStarted, OnEvent


def summarize_config(config: ConsortiumSettings) -> str:
    """Summarize members, arbiter and strategy in one line."""
    names = ", ".join(format_member_count(one) for one in config.members)
    arbiter = config.arbiter.model if config.arbiter else "nobody"
    answer = "answers" if len(config.members) == config.members[0].count == 1 else "answer"
    return f"{names} {answer}, {arbiter} judges; strategy {config.strategy}"


def format_member_count(one: MemberSpec) -> str:
    """Return a member's name and count."""
    return one.model if one.count == 1 else f"{one.model} x {one.count}"


def list_config_warnings(config: ConsortiumSettings) -> Iterator[str]:
    """Yield warnings about settings that may degrade answers."""
    names = [one.model for one in config.members]
    ties_only = config.strategy == "vote"  # it judges ties only
    if config.arbiter and config.arbiter.model in names and len(names) > 1 and not ties_only:
        yield f"{config.arbiter.model} is both arbiter and member: models prefer their own"
    if sum(one.count for one in config.members) == 1:
        yield f"{names[0]} is the only member: there is nothing to compare"


def format_confidence(confidence: float | None) -> str:
    """Format a confidence."""
    return "unknown" if confidence is None else f"{confidence:.2f}"


def summarize_result(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the confidence and usage of an answer, and its analysis and dissent."""
    synthesis, meta = result["synthesis"], result["metadata"]
    tokens = f"{meta['prompt_tokens']} + {meta['completion_tokens']} tokens"
    rounds = pluralize(meta["iteration_count"], "iteration")
    if meta["best_iteration"] != meta["iteration_count"]:
        rounds += f", best: iteration {meta['best_iteration']}"
    stopped = f" ({meta['stopped']})" if meta["stopped"] else ""
    yield (
        f"confidence {format_confidence(synthesis['confidence'])} after {rounds}{stopped}; "
        f"{pluralize(meta['calls'], 'call')}, {tokens}, {meta['seconds']:.1f} s, "
        f"{format_cost(meta['cost'], meta.get('unpriced', 0))}"
    )
    for key in ("analysis", "dissent"):
        if synthesis[key]:
            yield f"{key}: {synthesis[key]}"


def format_transcript(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the replies of all members and the arbiter, by iteration."""
    arbiter = result["metadata"]["arbiter"]
    for one in result["iterations"]:
        for response in one["model_responses"]:
            yield ""
            yield format_response_heading(one["iteration"], response)
            yield response.get("error") or response["response"]
        if reply := (one["synthesis"] or {}).get("raw_arbiter_response"):
            yield from ("", f"--- iteration {one['iteration']}: arbiter {arbiter}", reply)


def format_response_heading(iteration: int, response: Mapping[str, Any]) -> str:
    """Return the heading of a reply, with its confidence."""
    heading = f"--- iteration {iteration}: {response['model']} #{response['instance']}"
    if "error" in response:
        return f"{heading} failed"
    return f"{heading}, confidence {format_confidence(response['confidence'])}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Format a table."""
    cells = [[format_cell(cell) for cell in row] for row in rows]
    return align_columns([list(heads), *cells])


def format_cell(cell: Any) -> str:
    """Format a cell; "-" if unknown."""
    if cell is None or cell == "":
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else " ".join(str(cell).split())


def format_settings(name: str, config: ConsortiumSettings) -> Iterator[str]:
    """Yield the settings of a configuration, one per line."""
    yield name
    for member in config.members:
        yield f"  member: {describe_member(member)}"
    for key in MEMBER_KEYS[1:]:
        if one := getattr(config, key):
            yield f"  {key}: {describe_member(one)}"
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name in ALWAYS_SHOWN or (
            setting.name not in MEMBER_KEYS and value != setting.default
        ):
            yield f"  {setting.name}: {', '.join(value) if isinstance(value, tuple) else value}"


MEMBER_KEYS = ("members", "arbiter", "fallback")
ALWAYS_SHOWN = ("strategy", "confidence_threshold", "max_iterations", "min_iterations")
"""Settings that are shown even with default values."""


def describe_member(member: MemberSpec) -> str:
    """Format a member with its own settings."""
    values = member.to_dict()
    settings = [f"{key} {values[key]!r}" for key in values if key not in ("model", "count")]
    return format_member_count(member) + (f" ({', '.join(settings)})" if settings else "")


AnswerFn = Callable[[ConsortiumQuestion, OnEvent], dict[str, Any]]

output_options = combine_options(
    click.option(
        "--output", type=click.Path(path_type=Path), help="Write the result to this file, as JSON."
    ),
    click.option(
        "--raw", is_flag=True, help="Also show the replies of all members and of the arbiter."
    ),
    click.option("--json", "as_json", is_flag=True, help="Show the result as JSON."),
    click.option("--quiet", is_flag=True, help="No progress and no summary."),
    click.option("--dry-run", is_flag=True, help="Show the planned calls without making any."),
    click.option(
        "--trace",
        type=click.Path(path_type=Path),
        help="Log every call to this file, as JSON lines.",
    ),
    click.option("--no-log", is_flag=True, help="Do not record the run."),
)


@click.command()
@click.argument("prompt", required=False)
@member_options
@strategy_options
@request_options
@consortium_option
@click.option(
    "--stdin/--no-stdin",
    default=True,
    help="Append standard input to the prompt; default yes.",
)
@output_options
@location_options
@click.pass_context
def run(ctx: click.Context, prompt: str | None, **options: Any) -> None:
    """Ask a consortium and show its answer."""
    std_streams()
    notes = StderrReporter(options["quiet"])
    _check_unused_options(options)
    text = None if options["dry_run"] and not prompt else read_question(prompt, options["stdin"])
    _check_writable(options["output"])
    members = build_registry(options)
    resolved = resolve_config(options, members)
    consortium = build_consortium(resolved.config, members.model)
    notes(f"{resolved.origin}: {summarize_config(resolved.config)}")
    notes.print_log_warnings()
    for warning in list_config_warnings(resolved.config):
        notes.print_warning(warning)
    if text is None or options["dry_run"]:
        click.echo(escape_control_chars(consortium.plan_calls().words))
        return
    consortium.check()
    if members.uses_local:
        notes("local models are loaded at the first request")
    if options["trace"]:
        consortium.trace = Trace(options["trace"], {"consortium": resolved.config.to_dict()})
    turns = (Message("user", text),)
    put = ConsortiumQuestion(
        resolved.name,
        resolved.config,
        consortium,
        turns,
        request_settings(options),
        not options["no_log"],
    )
    try:
        result = answer_with_progress(put, notes, _choose_answer_fn(ctx, put.recorded))
    except QuestionInterrupted as stopped:
        if options["output"]:
            write_json(options["output"].expanduser(), stopped.found)
        raise
    _print_result(result, options, notes)


class StderrReporter:
    """Prints progress and warnings to standard error.

    It captures logged warnings until the command ends.

    Args:
        quiet: Print warnings only.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._warnings = click.get_current_context().with_resource(WarningCollector())

    def __call__(self, words: str) -> None:
        """Print a progress message."""
        if not self.quiet:
            click.echo(escape_control_chars(words), err=True)

    def print_warning(self, words: str) -> None:
        """Print a warning, even if quiet."""
        click.echo(f"warning: {escape_control_chars(words)}", err=True)

    def print_log_warnings(self) -> None:
        """Print the warnings logged since the last call."""
        for message in dict.fromkeys(self._warnings.pop_messages()):
            self.print_warning(message)


def read_question(prompt: str | None, stdin: bool) -> str:
    """Return the prompt, followed by standard input.

    Raises:
        UserError: Both are empty.
    """
    piped = "" if not stdin or sys.stdin is None or is_tty(sys.stdin) else sys.stdin.read()
    text = "\n\n".join(part.strip() for part in (prompt, piped) if part and part.strip())
    if not text:
        raise UserError('the prompt is empty; give one, as in llm consortium "Why?"', 2)
    return text


def _check_unused_options(options: Mapping[str, Any]) -> None:
    """Check that output options have an effect.

    Raises:
        UserError: An option has no effect.
    """
    for key in ("output", "raw", "json", "trace") if options["dry_run"] else ():
        if options["as_json" if key == "json" else key]:
            raise UserError(f"--{key} has no effect with --dry-run; leave one out", 2)
    if options["raw"] and options["as_json"]:
        raise UserError(
            "--raw has no effect with --json, which includes everything; leave it out", 2
        )


def _check_writable(file: Path | None) -> None:
    """Check that the result can be written, before any call.

    Raises:
        UserError: It cannot.
    """
    if file is None:
        return
    folder = file.expanduser().absolute().parent
    if file.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"--output {file}: cannot be written; choose another path")


def request_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields other than the prompt."""
    found = {key: given[key] for key in ("temperature", "seed") if given.get(key) is not None}
    return {**found, "max_new_tokens": given.get("max_tokens")}


EVERY = 10.0
"""Seconds without events before the first waiting message; doubled after each."""


class Waiting:
    """Prints which calls are pending while there are no events."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.start = self.last_event = time.monotonic()
        self._patience = EVERY
        self._pending: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> "Waiting":
        self._thread = PeriodicThread(self._report_pending, EVERY / 4, "swarm-waiting")
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def note(self, event: Any) -> None:
        """Handle an event."""
        with self._lock:
            self.last_event, self._patience = time.monotonic(), EVERY
            if isinstance(event, CallStarted | AgentAnswer):
                self._pending[f"{event.role} {event.name}"] += (
                    1 if isinstance(event, CallStarted) else -1
                )

    def _report_pending(self) -> None:
        with self._lock:
            now = time.monotonic()
            pending = [name for name, count in self._pending.items() if count > 0]
            if now - self.last_event < self._patience or not pending:
                return
            self.last_event, self._patience = now, 2 * self._patience
        self.report(f"{now - self.start:.0f} s: waiting for {', '.join(pending)}")


def answer_with_progress(
    put: ConsortiumQuestion, notes: StderrReporter, logged: AnswerFn = answer_question
) -> dict[str, Any]:
    """Return the result; print progress meanwhile, and warnings at the end.

    Args:
        put: The question.
        notes: Reporter of progress and warnings.
        logged: Function that answers the question, and may log it.

    Raises:
        UserError: There is no answer.
    """

    waiting = Waiting(notes)

    def print_event(number: int, event: Any) -> None:
        waiting.note(event)
        if line := format_event(put.consortium, event):
            notes(line)

    try:
        with waiting:
            return logged(put, print_event)
    finally:
        notes.print_log_warnings()


def _choose_answer_fn(ctx: click.Context, recorded: bool) -> AnswerFn:
    """Return the function that answers questions; as an llm command also written to llm's log."""
    if not (ctx.parent and ctx.parent.parent and recorded):
        return answer_question
    from swarm.consortium.llm_plugin import run_logged

    return run_logged


def _print_result(
    result: dict[str, Any], options: Mapping[str, Any], notes: StderrReporter
) -> None:
    """Print the answer to standard output, and write the other requested output."""
    if options["as_json"]:
        click.echo(json.dumps(result, indent=1))
    else:
        click.echo(escape_control_chars(result["synthesis"]["synthesis"]))
    lines = summarize_result(result)
    if options["raw"] and not options["as_json"]:
        for line in (*lines, *format_transcript(result)):
            click.echo(escape_control_chars(line))
    else:
        for line in lines:
            notes(line)
    if options["output"]:
        write_json(options["output"].expanduser(), result)
