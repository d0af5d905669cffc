"""Commands `runs` and `run-info` of `llm consortium`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from swarm._util.terminal import escape_control_chars
from swarm.consortium.cli import run as telling
from swarm.consortium.cli.options import (
    POSITIVE_INT,
    combine_options,
)
from swarm.consortium.run_log import RunLog
from swarm.errors import UserError

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
