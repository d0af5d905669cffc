"""The command that asks several models the same: `llm consortium compare`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click

from swarm.collab import Watch
from swarm.collab.configs import Config, build, member
from swarm.collab.outcome import responses
from swarm.consortium import telling
from swarm.consortium.asking import Question, ask
from swarm.consortium.options import asked, members_of, one_of, places, text_of
from swarm.consortium.running import Notes, answered, of_request, question
from swarm.errors import UserError
from swarm.models import Message, Request
from swarm.printing import harmless, standard
from swarm.track import NAMES, Shown, named
from swarm.track.during import during
from swarm.track.talks import deliberation, folder


@click.command()
@click.argument("prompt", required=False)
@click.option("-m", "--model", "--models", "models", multiple=True, metavar="MODEL",
              help="Who is asked, two at least: a model or a consortium.")  # fmt: skip
@click.option("--judge", metavar="MODEL", help="Ranks the answers without their names, in an order "
              "by chance.")  # fmt: skip
@click.option("--system", metavar="TEXT|FILE", help="What all of them are told first.")
@click.option("--seed", type=click.IntRange(0), help="Of sampling, and of the order of answers.")
@asked
@click.option("--stdin/--no-stdin", default=True, help="Whether standard input belongs to the "
              "prompt; default yes.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Show the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--no-log", is_flag=True, help="Keep no record of what the judge said.")
@click.option("--tracker", type=click.Choice(NAMES), default="none", help="Show it there, too "
              "(docs/wandb.md); default none.")  # fmt: skip
@places
def compare(prompt: str | None, **given: Any) -> None:
    """Ask several models the same.

    Their answers are shown with seconds, tokens and cost; without a judge there is no verdict.
    """
    standard()
    notes = Notes(given["quiet"])
    members = members_of(given)
    who = [member(one, members.known) for one in given["models"]]
    if sum(one.count for one in who) < 2:
        raise UserError("compare needs two models at least: -m A -m B", 2)
    text = question(prompt, given["stdin"])
    if given["timeout"]:
        who = [replace(one, timeout=one.timeout or given["timeout"]) for one in who]
    config = Config(
        tuple(who),
        one_of("judge", given["judge"], members) if given["judge"] else None,
        "rank" if given["judge"] else "vote",
        max_iterations=1,
        system=text_of(given["system"] or "") or "",
        seed=given["seed"] or 0,
    )
    consortium = build(config, members.model)
    consortium.check()
    turns = (Message("user", text),)
    recorded = bool(given["judge"]) and not given["no_log"]
    put = Question("compare", config, consortium, turns, of_request(given), recorded)
    tracker = named(given["tracker"])
    tracker.check()
    with during(tracker, Shown("consortium", folder("compare"), config.to_dict())) as summary:
        found = answered(put, notes, ask if given["judge"] else _unjudged)
        summary |= deliberation(tracker, found)
    if given["as_json"]:
        click.echo(json.dumps(found, indent=1))
        return
    for line in (*_answers(found), *_table(found)):
        click.echo(harmless(line))


def _unjudged(put: Question, watch: Watch) -> dict[str, Any]:
    """What each said, and no verdict."""
    request = Request(put.turns, **put.asked)
    return responses(put.turns[-1].content, put.consortium.opinions(request, watch))


def _answers(found: Mapping[str, Any]) -> Iterator[str]:
    """Each one's answer below its name."""
    for response in found["model_responses"]:
        yield f"--- {_name(response)}"
        yield response.get("error") or response["response"]
        yield ""


def _table(found: Mapping[str, Any]) -> list[str]:
    """What each took, and where the judge put it; the best first."""
    came, ranking = found["model_responses"], found.get("synthesis", {}).get("ranking", [])
    order = [*ranking, *(place for place in range(len(came)) if place not in ranking)]
    rows = []
    for place in order:
        one = came[place]
        rank = ranking.index(place) + 1 if place in ranking else None
        tokens = (one.get("prompt_tokens"), one.get("completion_tokens"))
        rows.append((_name(one), rank, one.get("seconds"), *tokens, telling.money(one.get("cost"))))
    heads = ("model", "place", "seconds", "tokens read", "tokens new", "cost")
    return telling.table(heads, rows)


def _name(response: Mapping[str, Any]) -> str:
    number = response["instance"]
    return response["model"] if number == 1 else f"{response['model']} #{number}"
