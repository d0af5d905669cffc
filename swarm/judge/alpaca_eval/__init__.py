"""AlpacaEval 2: pairwise comparison of a model's answers with those of a reference."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util.files import find_path, short_digest, write_json
from swarm._util.jsonl import (
    FieldTypes,
    JsonRow,
    read_json_rows,
    shorten_text,
    sibling_path,
    write_json_rows,
)
from swarm.errors import UserError
from swarm.judge import pairwise
from swarm.judge.alpaca_eval import leaderboard
from swarm.judge.batch_requests import format_usage, send_requests, usage_to_json
from swarm.judge.cli import (
    add_batch_options,
    add_generation_options,
    add_mixture_options,
    add_model_options,
    load_answering_model,
    load_model,
    parse_folder,
    parse_output_file,
    parse_positive_int,
)
from swarm.models.base import Completion, Message, Model, Request
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec


class GenerationSettings(NamedTuple):
    """Sampling settings of the answers; `None` is the model's default."""

    temperature: float | None
    max_tokens: int
    system: str | None
    seed: int | None


def instruction_keys(rows: Sequence[JsonRow]) -> list[str]:
    """Return a key per row: its instruction, with a counter appended from its second occurrence on.

    Rows of different files with equal keys belong together, regardless of their order.
    """
    seen: Counter[str] = Counter()
    keys = []
    for row in rows:
        text = row["instruction"]
        seen[text] += 1
        keys.append(text if seen[text] == 1 else f"{text}\n#{seen[text]}")
    return keys


def build_requests(rows: Sequence[JsonRow], asking: GenerationSettings) -> dict[str, Request]:
    """Build the requests by `instruction_keys`; a repeated instruction gets another sample."""
    before = (Message("system", asking.system),) if asking.system else ()
    seen: Counter[str] = Counter()
    found = {}
    for place, row in zip(instruction_keys(rows), rows, strict=True):
        turns = (*before, Message("user", row["instruction"]))
        found[place] = Request(
            turns,
            asking.max_tokens,
            temperature=asking.temperature,
            seed=asking.seed,
            sample=seen[row["instruction"]],
        )
        seen[row["instruction"]] += 1
    return found


def to_alpaca_rows(
    rows: Sequence[JsonRow], answers: Mapping[str, Completion], generator: str
) -> list[dict[str, str]]:
    """Convert the answers to AlpacaEval's rows of instruction, dataset, output and generator."""
    return [
        {
            "instruction": row["instruction"],
            "dataset": str(row.get("dataset", "")),
            "output": answers[place].text,
            "generator": generator,
        }
        for place, row in zip(instruction_keys(rows), rows, strict=True)
    ]


class RecordedModel:
    """A model that repeats another model's recorded answers.

    Args:
        path: Answers in AlpacaEval's format; rows are looked up by instruction.
        rows: Instructions to answer.

    Raises:
        UserError: The file cannot be read, or lacks an instruction.
    """

    def __init__(self, path: str, rows: Sequence[JsonRow]) -> None:
        self.written = read_json_rows(path, {"instruction": str, "output": str})
        by_place = dict(zip(instruction_keys(self.written), self.written, strict=True))
        self.answers: dict[tuple[str, int], str] = {}
        seen: Counter[str] = Counter()
        for place, row in zip(instruction_keys(rows), rows, strict=True):
            text = row["instruction"]
            mine = by_place.get(place) or by_place.get(text)
            if mine is None:
                raise UserError(
                    f'{path}: has no answer to "{shorten_text(text)}"; it must have one to each'
                )
            self.answers[text, seen[text]] = mine["output"]
            seen[text] += 1

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the recorded answers to the last turns; see `Model.generate`."""
        return [
            Completion(self.answers[_last_user_text(request), request.sample])
            for request in requests
        ]

    def fingerprint(self) -> str:
        """Return a string that depends on the file."""
        return short_digest(self.written)


def _last_user_text(request: Request) -> str:
    return request.prompt if isinstance(request.prompt, str) else request.prompt[-1].content


def aggregate_recorded(
    aggregator: Model, name: str, files: Sequence[str], rows: Sequence[JsonRow]
) -> Model:
    """Return the aggregator of a mixture whose proposals were recorded earlier.

    Args:
        aggregator: Any model, including a mixture.
        name: Its name.
        files: One file per proposer; see `RecordedModel`.
        rows: Instructions to answer.

    Raises:
        UserError: See `RecordedModel`.
    """
    proposers = [AgentSpec(RecordedModel(path, rows), Path(path).stem) for path in files]
    # Without a quorum, empty answers are left out like those of a failed proposer.
    return MixtureOfAgents(proposers, AgentSpec(aggregator, name), quorum=0)


QUESTIONS_FILE = "data/questions/alpaca_eval.json"
ANNOTATIONS_FILE = "annotations.jsonl"

ANSWER_FIELDS: FieldTypes = {"instruction": str, "output": str, "generator": str}
ANNOTATION_FIELDS: FieldTypes = {
    **ANSWER_FIELDS,
    "reference_output": str,
    "reference_generator": str,
    "judge": str,
    "reading": str,
    "preference": (int, float, type(None)),
    "orders": list,
}


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Add the actions: generate, judge, show."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    made = actions.add_parser("generate", help="write a model's answers")
    _add_generate_options(made)
    made.set_defaults(run=generate)
    made = actions.add_parser("judge", help="compare answers with those of a reference")
    _add_judge_options(made)
    made.set_defaults(run=judge)
    made = actions.add_parser("show", help="win rates of what was judged, as a table")
    made.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="one or several of judge's --out"
    )
    made.add_argument("--json", action="store_true", help="numbers for programs")
    made.set_defaults(run=show)


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="who answers; moa/lite, local/base, ...")
    add(
        "--questions",
        default=QUESTIONS_FILE,
        metavar="FILE",
        help='objects with an "instruction" and '
        'perhaps a "dataset", as a JSON list or one a line (%(default)s)',
    )
    add(
        "--output",
        required=True,
        type=parse_output_file,
        metavar="FILE.json",
        help="where the answers go",
    )
    add("--generator", metavar="NAME", help="what the file calls the model; its name by default")
    add(
        "--reference_paths",
        metavar="A.json,B.json",
        help="answers of proposers that are there "
        "already: --model makes one of them, as the aggregator of a mixture",
    )
    add_mixture_options(parser)
    add_generation_options(parser, 2048, 0.7)
    add_batch_options(parser)
    add_model_options(parser)


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--outputs", required=True, metavar="A.json", help="the model's answers")
    add("--reference", required=True, metavar="B.json", help="the answers they are compared with")
    add("--judge", required=True, metavar="NAME", help="who compares; any model")
    add("--out", required=True, type=parse_folder, metavar="FOLDER", help="where the judgements go")
    add(
        "--reading",
        choices=pairwise.READINGS,
        default="logprobs",
        help="how a preference is read: "
        "from the likeliest tokens of a one-token reply, from the probabilities of two given "
        "replies (local models), or from a verdict at the end of a text (%(default)s)",
    )
    add(
        "--max_tokens",
        type=parse_positive_int,
        default=512,
        metavar="N",
        help="of a reply with --reading text (%(default)s)",
    )
    add(
        "--export",
        type=parse_output_file,
        metavar="FILE",
        help="the annotations as alpaca_eval keeps them, too",
    )
    add_batch_options(parser)
    add_model_options(parser)


def generate(given: argparse.Namespace) -> int:
    """Write a model's answers once all instructions are answered; return the exit code."""
    rows = read_json_rows(find_path(given.questions), {"instruction": str})[: given.limit]
    written = [one for one in (given.reference_paths or "").split(",") if one]
    if written and given.reference_models:
        raise UserError(
            "--reference_paths and --reference_models: give one of them; answers of proposers are "
            "either read or asked for",
            2,
        )
    model = load_answering_model(given)
    if written:
        model = aggregate_recorded(model, given.model, written, rows)
    asking = GenerationSettings(given.temperature, given.max_tokens, given.system, given.seed)
    replies = send_requests(
        model, given.model, build_requests(rows, asking), given.output, given.batch
    )
    print("\n".join(replies.format_report()))
    if replies.failures:
        print(f"{given.output} is written when all are there")
        return replies.exit_code
    taken = usage_to_json(replies.answers.values())
    write_json(given.output, to_alpaca_rows(rows, replies.answers, given.generator or given.model))
    summary = {
        "model": given.model,
        **asking._asdict(),
        "references": written,
        "reference_models": given.reference_models,
        "rounds": given.rounds,
        "spent": taken,
    }
    write_json(sibling_path(given.output, "summary.json"), summary)
    print(format_usage(given.model, taken))
    if empty := sum(not one.text.strip() for one in replies.answers.values()):
        print(f"{empty} of the answers are empty")
    print(f"wrote {given.output}")
    return 0


def judge(given: argparse.Namespace) -> int:
    """Judge every pair in both orders, write the annotations, and print the win rate."""
    rows = pair_answers(given.outputs, given.reference)[: given.limit]
    found = {
        row["key"]: pairwise.AnswerPair(
            row["key"], row["instruction"], row["output"], row["reference_output"]
        )
        for row in rows
    }
    asked: dict[str, Any] = {}
    for pair in found.values():
        asked |= pairwise.build_requests(pair, given.reading, given.max_tokens)
    model = load_model(given, given.judge)
    output = given.out / ANNOTATIONS_FILE
    replies = send_requests(model, given.judge, asked, output, given.batch)
    print("\n".join(replies.format_report("judgements")))
    if replies.failures:
        print(f"{output} is written when all are there")
        return replies.exit_code
    who = {"judge": given.judge, "reading": given.reading}
    annotations = [build_annotation(row, found[row["key"]], replies.answers, who) for row in rows]
    write_json_rows(output, annotations)
    summary = {
        "judging": usage_to_json(replies.answers.values()),
        **_load_generation_cost(given.outputs),
    }
    summary |= leaderboard.summarize_annotations(annotations)
    write_json(given.out / "summary.json", summary)
    if given.export:
        write_json(given.export, [to_alpaca_eval(one) for one in annotations])
        print(f"wrote {given.export}")
    if "generating" in summary:
        print(format_usage(summary["generator"], summary["generating"]))
    print(format_usage(given.judge, summary["judging"]))
    print("\n".join(leaderboard.format_leaderboard([summary])))
    return 0


def show(given: argparse.Namespace) -> int:
    """Print the win rates of one or several folders, best first."""
    found = [
        leaderboard.summarize_annotations(read_annotations(Path(one))) for one in given.folders
    ]
    print(
        json.dumps(leaderboard.rank_models(found), indent=1)
        if given.json
        else "\n".join(leaderboard.format_leaderboard(found))
    )
    return 0


def read_annotations(folder: Path) -> list[JsonRow]:
    """Read the annotations written by `judge` into a folder.

    Raises:
        UserError: There are none.
    """
    if not (folder / ANNOTATIONS_FILE).is_file():
        raise UserError(
            f"{folder}: has no {ANNOTATIONS_FILE}; judge writes one, once all is judged"
        )
    return read_json_rows(folder / ANNOTATIONS_FILE, ANNOTATION_FIELDS)


def pair_answers(outputs: str, reference: str) -> list[JsonRow]:
    """Return the model's answers, each with the reference's to the same instruction.

    A numeric "difficulty" of the reference's rows is included.

    Raises:
        UserError: A file cannot be read, or the reference lacks an instruction.
    """
    mine, others = read_json_rows(outputs, ANSWER_FIELDS), read_json_rows(reference, ANSWER_FIELDS)
    by_place = dict(zip(instruction_keys(others), others, strict=True))
    rows = []
    for place, row in zip(instruction_keys(mine), mine, strict=True):
        other = by_place.get(place)
        if other is None:
            raise UserError(f'{reference}: has no answer to "{shorten_text(place)}" of {outputs}')
        if not isinstance(other.get("difficulty", 0), (int, float)):
            raise UserError(f'{reference}: the difficulty of "{shorten_text(place)}" is no number')
        rows.append(
            {
                "key": place,
                "instruction": row["instruction"],
                "dataset": row.get("dataset", ""),
                "output": row["output"],
                "generator": row["generator"],
                "reference_output": other["output"],
                "reference_generator": other["generator"],
                **({"difficulty": other["difficulty"]} if "difficulty" in other else {}),
            }
        )
    return rows


def build_annotation(
    row: JsonRow,
    pair: pairwise.AnswerPair,
    answers: Mapping[str, Completion],
    who: Mapping[str, str],
) -> dict[str, Any]:
    """Build a pair's row with the verdicts in both orders, and the preference, 0 to 1 or null."""
    said = {
        order: pairwise.parse_verdict(answers[key], order)
        for order in pairwise.ORDERS
        if (key := pairwise.request_key(pair, order)) in answers
    }
    orders = [{"order": order, **one._asdict()} for order, one in said.items()]
    mean = pairwise.mean_preference(list(said.values()))
    told = {name: value for name, value in row.items() if name != "key"}
    return {**told, **who, "preference": mean, "orders": orders}


def to_alpaca_eval(row: JsonRow) -> dict[str, Any]:
    """Convert an annotation to alpaca_eval's format: 1 is the reference's answer, 2 the model's."""
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


def _load_generation_cost(outputs: str) -> dict[str, Any]:
    """Return the usage of generating the answers, if `generate` wrote it."""
    path = sibling_path(Path(outputs), "summary.json")
    try:
        taken = json.loads(path.read_bytes())["spent"]
        format_usage("", taken)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {"generating": taken}
