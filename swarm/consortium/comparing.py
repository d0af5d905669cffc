"""The command that asks several models the same: `llm consortium compare`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click

from swarm.collab import OnEvent
from swarm.collab.configs import ConsortiumSettings, build_consortium, parse_member
from swarm.collab.outcome import responses_to_json
from swarm.consortium import telling
from swarm.consortium.asking import ConsortiumQuestion, answer_question
from swarm.consortium.options import request_options, build_registry, parse_single_member, location_options, read_text_or_file
from swarm.consortium.running import StderrReporter, answer_with_progress, request_settings, read_question
from swarm.errors import UserError
from swarm.models import Message, Request
from swarm.printing import escape_control_chars, std_streams
from swarm.track import TRACKER_NAMES, TrackedRun, tracker_by_name
from swarm.track.during import track_run
from swarm.track.talks import log_deliberation, new_tracking_folder


@click.command()
@click.argument("prompt", required=False)
@click.option("-m", "--model", "--models", "models", multiple=True, metavar="MODEL",
              help="Who is asked, two at least: a model or a consortium.")  # fmt: skip
@click.option("--judge", metavar="MODEL", help="Ranks the answers without their names, in an order "
              "by chance.")  # fmt: skip
@click.option("--system", metavar="TEXT|FILE", help="What all of them are told first.")
@click.option("--seed", type=click.IntRange(0), help="Of sampling, and of the order of answers.")
@request_options
@click.option("--stdin/--no-stdin", default=True, help="Whether standard input belongs to the "
              "prompt; default yes.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Show the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--no-log", is_flag=True, help="Keep no record of what the judge said.")
@click.option("--tracker", type=click.Choice(TRACKER_NAMES), default="none", help="Show it there, too "
              "(docs/wandb.md); default none.")  # fmt: skip
@location_options
def compare(prompt: str | None, **given: Any) -> None:
    """Ask several models the same.

    Their answers are shown with seconds, tokens and cost; without a judge there is no verdict.
    """
    std_streams()
    notes = StderrReporter(given["quiet"])
    members = build_registry(given)
    who = [parse_member(one, members.is_known_name) for one in given["models"]]
    if sum(one.count for one in who) < 2:
        raise UserError("compare needs two models at least: -m A -m B", 2)
    text = read_question(prompt, given["stdin"])
    if given["timeout"]:
        who = [replace(one, timeout=one.timeout or given["timeout"]) for one in who]
    config = ConsortiumSettings(
        tuple(who),
        parse_single_member("judge", given["judge"], members) if given["judge"] else None,
        "rank" if given["judge"] else "vote",
        max_iterations=1,
        system=read_text_or_file(given["system"] or "") or "",
        seed=given["seed"] or 0,
    )
    consortium = build_consortium(config, members.model)
    consortium.check()
    turns = (Message("user", text),)
    recorded = bool(given["judge"]) and not given["no_log"]
    put = ConsortiumQuestion("compare", config, consortium, turns, request_settings(given), recorded)
    tracker = tracker_by_name(given["tracker"])
    tracker.check()
    with track_run(tracker, TrackedRun("consortium", new_tracking_folder("compare"), config.to_dict())) as summary:
        found = answer_with_progress(put, notes, answer_question if given["judge"] else _collect_unjudged)
        summary |= log_deliberation(tracker, found)
    if given["as_json"]:
        click.echo(json.dumps(found, indent=1))
        return
    for line in (*_format_answers(found), *_format_table(found)):
        click.echo(escape_control_chars(line))


def _collect_unjudged(put: ConsortiumQuestion, watch: OnEvent) -> dict[str, Any]:
    """What each said, and no verdict."""
    request = Request(put.turns, **put.asked)
    return responses_to_json(put.turns[-1].content, put.consortium.collect_member_answers(request, watch))


def _format_answers(found: Mapping[str, Any]) -> Iterator[str]:
    """Each one's answer below its name."""
    for response in found["model_responses"]:
        yield f"--- {_response_name(response)}"
        yield response.get("error") or response["response"]
        yield ""


def _format_table(found: Mapping[str, Any]) -> list[str]:
    """What each took, and where the judge put it; the best first."""
    came, ranking = found["model_responses"], found.get("synthesis", {}).get("ranking", [])
    order = [*ranking, *(place for place in range(len(came)) if place not in ranking)]
    rows = []
    for place in order:
        one = came[place]
        rank = ranking.index(place) + 1 if place in ranking else None
        tokens = (one.get("prompt_tokens"), one.get("completion_tokens"))
        rows.append((_response_name(one), rank, one.get("seconds"), *tokens, telling.format_cost(one.get("cost"))))
    heads = ("model", "place", "seconds", "tokens read", "tokens new", "cost")
    return telling.format_table(heads, rows)


def _response_name(response: Mapping[str, Any]) -> str:
    number = response["instance"]
    return response["model"] if number == 1 else f"{response['model']} #{number}"
