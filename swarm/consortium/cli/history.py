"""Commands `compare`, `runs`, `run-info` and `leaderboard` of `llm consortium`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click

from swarm._util.terminal import escape_control_chars, std_streams
from swarm.consortium.api import ConsortiumQuestion, answer_question
from swarm.consortium.cli import run
from swarm.consortium.cli import run as telling
from swarm.consortium.cli.options import (
    POSITIVE_INT,
    build_registry,
    combine_options,
    location_options,
    parse_single_member,
    read_text_or_file,
    request_options,
)
from swarm.consortium.cli.run import (
    StderrReporter,
    answer_with_progress,
    read_question,
    request_settings,
)
from swarm.consortium.run_log import RunLog
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.multi_agent.consortium.config import (
    ConsortiumSettings,
    build_consortium,
    parse_member,
)
from swarm.multi_agent.consortium.result_json import responses_to_json
from swarm.multi_agent.types import OnEvent
from swarm.trackers import TRACKER_NAMES, TrackedRun, tracker_by_name
from swarm.trackers.base import track_run
from swarm.trackers.records import log_deliberation, new_tracking_folder


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "-m",
    "--model",
    "--models",
    "models",
    multiple=True,
    metavar="MODEL",
    help="A model or consortium to compare; give at least two.",
)
@click.option(
    "--judge",
    metavar="MODEL",
    help="Model that ranks the answers, anonymously and in random order.",
)
@click.option("--system", metavar="TEXT|FILE", help="System prompt of all models.")
@click.option(
    "--seed", type=click.IntRange(0), help="Random seed of sampling and of the order of answers."
)
@request_options
@click.option(
    "--stdin/--no-stdin",
    default=True,
    help="Append standard input to the prompt; default yes.",
)
@click.option("--json", "as_json", is_flag=True, help="Show the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--no-log", is_flag=True, help="Do not record the judge's ranking.")
@click.option(
    "--tracker",
    type=click.Choice(TRACKER_NAMES),
    default="none",
    help="Also track the run there (docs/wandb.md); default none.",
)
@location_options
def compare(prompt: str | None, **options: Any) -> None:
    """Compare the answers of several models to one prompt.

    Answers are shown with seconds, tokens and cost; without a judge there is no verdict.
    """
    std_streams()
    notes = StderrReporter(options["quiet"])
    members = build_registry(options)
    specs = [parse_member(one, members.is_known_name) for one in options["models"]]
    if sum(one.count for one in specs) < 2:
        raise UserError("compare needs at least two models: -m A -m B", 2)
    text = read_question(prompt, options["stdin"])
    if options["timeout"]:
        specs = [replace(one, timeout=one.timeout or options["timeout"]) for one in specs]
    config = ConsortiumSettings(
        tuple(specs),
        parse_single_member("judge", options["judge"], members) if options["judge"] else None,
        "rank" if options["judge"] else "vote",
        max_iterations=1,
        system=read_text_or_file(options["system"] or "") or "",
        seed=options["seed"] or 0,
    )
    consortium = build_consortium(config, members.model)
    consortium.check()
    turns = (Message("user", text),)
    recorded = bool(options["judge"]) and not options["no_log"]
    put = ConsortiumQuestion(
        "compare", config, consortium, turns, request_settings(options), recorded
    )
    tracker = tracker_by_name(options["tracker"])
    tracker.check()
    with track_run(
        tracker, TrackedRun("consortium", new_tracking_folder("compare"), config.to_dict())
    ) as summary:
        found = answer_with_progress(
            put, notes, answer_question if options["judge"] else _collect_unjudged
        )
        summary |= log_deliberation(tracker, found)
    if options["as_json"]:
        click.echo(json.dumps(found, indent=1))
        return
    for line in (*_format_answers(found), *_format_table(found)):
        click.echo(escape_control_chars(line))


def _collect_unjudged(put: ConsortiumQuestion, on_event: OnEvent) -> dict[str, Any]:
    """Return the answers without a verdict."""
    request = Request(put.turns, **put.request_fields)
    return responses_to_json(
        put.turns[-1].content, put.consortium.collect_member_answers(request, on_event)
    )


def _format_answers(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield each answer with its model's name."""
    for response in found["model_responses"]:
        yield f"--- {_response_name(response)}"
        yield response.get("error") or response["response"]
        yield ""


def _format_table(found: Mapping[str, Any]) -> list[str]:
    """Format a table of usage and the judge's ranks, best first."""
    responses, ranking = found["model_responses"], found.get("synthesis", {}).get("ranking", [])
    order = [*ranking, *(index for index in range(len(responses)) if index not in ranking)]
    rows = []
    for index in order:
        one = responses[index]
        rank = ranking.index(index) + 1 if index in ranking else None
        tokens = (one.get("prompt_tokens"), one.get("completion_tokens"))
        rows.append(
            (
                _response_name(one),
                rank,
                one.get("seconds"),
                *tokens,
                run.format_cost(one.get("cost")),
            )
        )
    header = ("model", "place", "seconds", "tokens read", "tokens new", "cost")
    return run.format_table(header, rows)


def _response_name(response: Mapping[str, Any]) -> str:
    number = response["instance"]
    return response["model"] if number == 1 else f"{response['model']} #{number}"


run_filter_options = combine_options(
    click.option(
        "--limit", type=POSITIVE_INT, default=10, show_default=True, help="Maximum number of runs."
    ),
    click.option(
        "--since", metavar="DATE", help="Runs since then: 2026-01-31, optionally with a time."
    ),
    click.option("--json", "as_json", is_flag=True, help="Show JSON."),
)

MAX_PROMPT_LENGTH = 60
"""Maximum number of characters of a prompt in a list."""


@click.command()
@run_filter_options
@click.option("--name", help="Runs of this consortium.")
def runs(limit: int, since: str | None, as_json: bool, name: str | None) -> None:
    """List the last runs, newest first."""
    found = RunLog().list(limit, since, name)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    header = ("run", "when (UTC)", "consortium", "strategy", "iterations", "confidence", "prompt")
    rows = [
        (
            row["id"][:12],
            row["time"][:16].replace("T", " "),
            row["name"],
            row["strategy"],
            row["iterations"] if row["status"] == "done" else row["status"],
            row["confidence"],
            shorten_prompt(row["prompt"]),
        )
        for row in found
    ]
    _print_lines(telling.format_table(header, rows) if rows else ["no run is recorded"])


@click.command("run-info")
@click.argument("run")
@click.option("--json", "--json-output", "as_json", is_flag=True, help="Show JSON.")
def run_info(run: str, as_json: bool) -> None:
    """Show the members' answers in one run.

    RUN is its id, or the beginning of it.
    """
    if not run.strip():
        raise UserError("run-info needs the id of a run or a prefix of it; `runs` lists them", 2)
    found = RunLog().get(run)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _print_lines(_format_run(found))


@click.command()
@run_filter_options
@click.option("--model", help="Statistics of this member only.")
def leaderboard(limit: int, since: str | None, as_json: bool, model: str | None) -> None:
    """Compare members by how often they won."""
    found = RunLog().leaderboard(limit, since, model)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    header = (
        "model",
        "answers",
        "failed",
        "judged",
        "wins",
        "win rate (95 %)",
        "Borda",
        "seconds",
        "tokens",
        "cost",
    )
    rows = [
        (
            row["model"],
            row["answers"],
            row["failures"],
            row["judged"],
            row["wins"],
            _format_win_rate(row),
            row["borda"],
            row["seconds"],
            row["new_tokens"],
            row["cost"] or None,
        )
        for row in found
    ]
    _print_lines(telling.format_table(header, rows) if rows else ["no run is recorded"])
    if rows:
        click.echo(
            "judged: runs with a strategy that ranks or chooses; Borda: 1 = always first, "
            "0 = always last"
        )


def _format_win_rate(row: Mapping[str, Any]) -> str | None:
    """Format a win rate with its interval."""
    if row["win_rate"] is None:
        return None
    return f"{row['win_rate']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _format_run(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a run."""
    yield f"run {run['id']} of {run['time'][:19]}: {run['name'] or 'no name'}, {run['strategy']}"
    yield f"prompt: {run['prompt']}"
    if run["error"]:
        yield f"failed: {run['error']}"
        if "iterations" in run["result"]:
            yield from telling.format_transcript(run["result"])
        return
    yield from telling.summarize_result(run["result"])
    yield from telling.format_transcript(run["result"])
    yield from ("", f"--- answer of iteration {run['best']}", run["answer"])


def shorten_prompt(text: str | None) -> str:
    """Shorten a prompt to one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= MAX_PROMPT_LENGTH else f"{line[: MAX_PROMPT_LENGTH - 3]}..."


def _print_lines(lines: Any) -> None:
    for line in lines:
        click.echo(escape_control_chars(line))
