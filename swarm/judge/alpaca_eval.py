"""AlpacaEval 2: a model's answers to instructions, each compared with a reference's answer."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.files import write_json
from swarm.judge import board, pairs
from swarm.judge.answering import Asking, after, in_form, places, requests
from swarm.judge.asking import ask, spent, spent_line
from swarm.judge.files import Kinds, Row, beside, read_rows, short, write_lines
from swarm.judge.options import (
    add_answering,
    add_asking,
    add_mixture,
    add_models,
    answering,
    file,
    folder,
    named,
    whole,
)
from swarm.models import Completion
from swarm.places import find

QUESTIONS = "data/questions/alpaca_eval.json"
ANNOTATIONS = "annotations.jsonl"

ANSWER: Kinds = {"instruction": str, "output": str, "generator": str}
JUDGED: Kinds = {**ANSWER, "reference_output": str, "reference_generator": str, "judge": str,
    "reading": str, "preference": (int, float, type(None)), "orders": list}  # fmt: skip


def subcommands(parser: argparse.ArgumentParser) -> None:
    """Add the actions: generate, judge, show."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    made = actions.add_parser("generate", help="write a model's answers")
    _generating(made)
    made.set_defaults(run=generate)
    made = actions.add_parser("judge", help="compare answers with those of a reference")
    _judging(made)
    made.set_defaults(run=judge)
    made = actions.add_parser("show", help="win rates of what was judged, as a table")
    made.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="one or several of judge's --out"
    )
    made.add_argument("--json", action="store_true", help="numbers for programs")
    made.set_defaults(run=show)


def _generating(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="who answers; moa/lite, local/base, ...")
    add("--questions", default=QUESTIONS, metavar="FILE", help='objects with an "instruction" and '
        'perhaps a "dataset", as a JSON list or one a line (%(default)s)')  # fmt: skip
    add("--output", required=True, type=file, metavar="FILE.json", help="where the answers go")
    add("--generator", metavar="NAME", help="what the file calls the model; its name by default")
    add("--reference_paths", metavar="A.json,B.json", help="answers of proposers that are there "
        "already: --model makes one of them, as the aggregator of a mixture")  # fmt: skip
    add_mixture(parser)
    add_answering(parser, 2048, 0.7)
    add_asking(parser)
    add_models(parser)


def _judging(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--outputs", required=True, metavar="A.json", help="the model's answers")
    add("--reference", required=True, metavar="B.json", help="the answers they are compared with")
    add("--judge", required=True, metavar="NAME", help="who compares; any model")
    add("--out", required=True, type=folder, metavar="FOLDER", help="where the judgements go")
    add("--reading", choices=pairs.READINGS, default="logprobs", help="how a preference is read: "
        "from the likeliest tokens of a one-token reply, from the probabilities of two given "
        "replies (local models), or from a verdict at the end of a text (%(default)s)")  # fmt: skip
    add("--max_tokens", type=whole, default=512, metavar="N",
        help="of a reply with --reading text (%(default)s)")  # fmt: skip
    add(
        "--export", type=file, metavar="FILE", help="the annotations as alpaca_eval keeps them, too"
    )
    add_asking(parser)
    add_models(parser)


def generate(given: argparse.Namespace) -> int:
    """Write a model's answers to all instructions, once there is one to each; the exit code."""
    rows = read_rows(find(given.questions), {"instruction": str})[: given.limit]
    written = [one for one in (given.reference_paths or "").split(",") if one]
    if written and given.reference_models:
        raise UserError(
            "--reference_paths and --reference_models: give one of them; answers of proposers are "
            "either read or asked for",
            2,
        )
    model = answering(given)
    if written:
        model = after(model, given.model, written, rows)
    asking = Asking(given.temperature, given.max_tokens, given.system, given.seed)
    replies = ask(model, given.model, requests(rows, asking), given.output, given.batch)
    print("\n".join(replies.report()))
    if replies.failures:
        print(f"{given.output} is written when all are there")
        return replies.code
    taken = spent(replies.answers.values())
    write_json(given.output, in_form(rows, replies.answers, given.generator or given.model))
    summary = {
        "model": given.model,
        **asking._asdict(),
        "references": written,
        "reference_models": given.reference_models,
        "rounds": given.rounds,
        "spent": taken,
    }
    write_json(beside(given.output, "summary.json"), summary)
    print(spent_line(given.model, taken))
    if empty := sum(not one.text.strip() for one in replies.answers.values()):
        print(f"{empty} of the answers are empty")
    print(f"wrote {given.output}")
    return 0


def judge(given: argparse.Namespace) -> int:
    """Have every pair judged in both orders, write the annotations, and show the win rate."""
    rows = joined(given.outputs, given.reference)[: given.limit]
    found = {row["key"]: pairs.Pair(row["key"], row["instruction"], row["output"],
                                    row["reference_output"]) for row in rows}  # fmt: skip
    asked: dict[str, Any] = {}
    for pair in found.values():
        asked |= pairs.requests(pair, given.reading, given.max_tokens)
    model = named(given, given.judge)
    output = given.out / ANNOTATIONS
    replies = ask(model, given.judge, asked, output, given.batch)
    print("\n".join(replies.report("judgements")))
    if replies.failures:
        print(f"{output} is written when all are there")
        return replies.code
    who = {"judge": given.judge, "reading": given.reading}
    annotations = [annotation(row, found[row["key"]], replies.answers, who) for row in rows]
    write_lines(output, annotations)
    summary = {"judging": spent(replies.answers.values()), **_generated(given.outputs)}
    summary |= board.measured(annotations)
    write_json(given.out / "summary.json", summary)
    if given.export:
        write_json(given.export, [exported(one) for one in annotations])
        print(f"wrote {given.export}")
    if "generating" in summary:
        print(spent_line(summary["generator"], summary["generating"]))
    print(spent_line(given.judge, summary["judging"]))
    print("\n".join(board.table([summary])))
    return 0


def show(given: argparse.Namespace) -> int:
    """Print the win rates of one or several folders, the best first."""
    found = [board.measured(read_annotations(Path(one))) for one in given.folders]
    print(
        json.dumps(board.ranked(found), indent=1) if given.json else "\n".join(board.table(found))
    )
    return 0


def read_annotations(folder: Path) -> list[Row]:
    """What `judge` wrote into a folder.

    Raises:
        UserError: There is nothing of the kind.
    """
    if not (folder / ANNOTATIONS).is_file():
        raise UserError(f"{folder}: has no {ANNOTATIONS}; judge writes one, once all is judged")
    return read_rows(folder / ANNOTATIONS, JUDGED)


def joined(outputs: str, reference: str) -> list[Row]:
    """The model's answers, each with the reference's to the same instruction.

    A row of the reference may have a number "difficulty", which goes along.

    Raises:
        UserError: A file cannot be read, or the reference has no answer to an instruction.
    """
    mine, others = read_rows(outputs, ANSWER), read_rows(reference, ANSWER)
    by_place = dict(zip(places(others), others, strict=True))
    rows = []
    for place, row in zip(places(mine), mine, strict=True):
        other = by_place.get(place)
        if other is None:
            raise UserError(f'{reference}: has no answer to "{short(place)}" of {outputs}')
        if not isinstance(other.get("difficulty", 0), (int, float)):
            raise UserError(f'{reference}: the difficulty of "{short(place)}" is no number')
        rows.append({
            "key": place, "instruction": row["instruction"],
            "dataset": row.get("dataset", ""), "output": row["output"],
            "generator": row["generator"], "reference_output": other["output"],
            "reference_generator": other["generator"],
            **({"difficulty": other["difficulty"]} if "difficulty" in other else {}),
        })  # fmt: skip
    return rows


def annotation(
    row: Row, pair: pairs.Pair, answers: Mapping[str, Completion], who: Mapping[str, str]
) -> dict[str, Any]:
    """A pair with what the judge said of it in both orders, and the preference, 0 to 1, or null."""
    said = {
        order: pairs.verdict(answers[key], order)
        for order in pairs.ORDERS
        if (key := pairs.key(pair, order)) in answers
    }
    orders = [{"order": order, **one._asdict()} for order, one in said.items()]
    mean = pairs.preference(list(said.values()))
    told = {name: value for name, value in row.items() if name != "key"}
    return {**told, **who, "preference": mean, "orders": orders}


def exported(row: Row) -> dict[str, Any]:
    """An annotation in alpaca_eval's form: 1 is the reference's answer, 2 the model's."""
    preference = row["preference"]
    return {
        "instruction": row["instruction"],
        "dataset": row["dataset"],
        "output_1": row["reference_output"],
        "generator_1": row["reference_generator"],
        "output_2": row["output"],
        "generator_2": row["generator"],
        "annotator": row["judge"],
        "preference": None if preference is None else 1 + preference,
        "raw_completion": " | ".join(one["reply"] for one in row["orders"]),
    }


def _generated(outputs: str) -> dict[str, Any]:
    """What it took to make the answers, where `generate` wrote them."""
    path = beside(Path(outputs), "summary.json")
    try:
        taken = json.loads(path.read_bytes())["spent"]
        spent_line("", taken)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {"generating": taken}
