"""The commands about what was asked before: runs, run-info, leaderboard."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from swarm.consortium import telling
from swarm.consortium.options import POSITIVE_INT, combine_options
from swarm.consortium.runs import RunLog
from swarm.errors import UserError
from swarm.printing import escape_control_chars

run_filter_options = combine_options(
    click.option("--limit", type=POSITIVE_INT, default=10, show_default=True, help="So many at most."),
    click.option("--since", metavar="DATE", help="From then on: 2026-01-31, or with a time."),
    click.option("--json", "as_json", is_flag=True, help="Show JSON."),
)

MAX_PROMPT_LENGTH = 60
"""Characters of a prompt in a list."""


@click.command()
@run_filter_options
@click.option("--name", help="Those of one consortium.")
def runs(limit: int, since: str | None, as_json: bool, name: str | None) -> None:
    """List the last runs, the newest first."""
    found = RunLog().list(limit, since, name)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    heads = ("run", "when (UTC)", "consortium", "strategy", "iterations", "confidence", "prompt")
    rows = [
        (row["id"][:12], row["time"][:16].replace("T", " "), row["name"], row["strategy"],
         row["iterations"] if row["status"] == "done" else row["status"], row["confidence"],
         shorten_prompt(row["prompt"]))
        for row in found
    ]  # fmt: skip
    _print_lines(telling.format_table(heads, rows) if rows else ["no run is recorded"])


@click.command("run-info")
@click.argument("run")
@click.option("--json", "--json-output", "as_json", is_flag=True, help="Show JSON.")
def run_info(run: str, as_json: bool) -> None:
    """Show what each member said in one run.

    RUN is its id, or the beginning of it.
    """
    if not run.strip():
        raise UserError("run-info needs a run's id, or the beginning of it; `runs` lists them", 2)
    found = RunLog().get(run)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _print_lines(_format_run(found))


@click.command()
@run_filter_options
@click.option("--model", help="This member alone.")
def leaderboard(limit: int, since: str | None, as_json: bool, model: str | None) -> None:
    """Compare members by how often they won."""
    found = RunLog().leaderboard(limit, since, model)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    heads = ("model", "answers", "failed", "judged", "wins", "win rate (95 %)", "Borda", "seconds",
             "tokens", "cost")  # fmt: skip
    rows = [
        (row["model"], row["answers"], row["failures"], row["judged"], row["wins"], _format_win_rate(row),
         row["borda"], row["seconds"], row["new_tokens"], row["cost"] or None)
        for row in found
    ]  # fmt: skip
    _print_lines(telling.format_table(heads, rows) if rows else ["no run is recorded"])
    if rows:
        click.echo("judged: runs of a strategy that ranks or chooses; Borda: 1 is always first, 0 "
                   "always last")  # fmt: skip


def _format_win_rate(row: Mapping[str, Any]) -> str | None:
    """A share of wins with its interval."""
    if row["win_rate"] is None:
        return None
    return f"{row['win_rate']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _format_run(run: Mapping[str, Any]) -> Iterator[str]:
    """A run for people."""
    yield f"run {run['id']} of {run['time'][:19]}: {run['name'] or 'no name'}, {run['strategy']}"
    yield f"prompt: {run['prompt']}"
    if run["error"]:
        yield f"failed: {run['error']}"
        if "iterations" in run["result"]:
            yield from telling.format_transcript(run["result"])
        return
    yield from telling.summarize_result(run["result"])
    yield from telling.format_transcript(run["result"])
    yield from ("", f"--- answer, of iteration {run['best']}", run["answer"])


def shorten_prompt(text: str | None) -> str:
    """A prompt's beginning, in one line."""
    words = " ".join((text or "").split())
    return words if len(words) <= MAX_PROMPT_LENGTH else f"{words[: MAX_PROMPT_LENGTH - 3]}..."


def _print_lines(lines: Any) -> None:
    for line in lines:
        click.echo(escape_control_chars(line))
