"""AlpacaEval 2: pairwise comparison of a model's answers with those of a reference.

File formats are those of Dubois et al. 2024 (2404.04475). Each pair is shown in both orders, which
cancels the judge's preference for a place.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from swarm._util.files import find_path, parse_json, short_digest, write_json
from swarm._util.jsonl import (
    FieldTypes,
    JsonRow,
    read_json_rows,
    shorten_text,
    sibling_path,
    write_json_rows,
)
from swarm._util.terminal import format_table
from swarm.errors import UserError
from swarm.judge.cli import FILE, Options, batch_options, option, sampling_options, token_option
from swarm.judge.pairwise import (
    ORDERS,
    READINGS,
    AnswerPair,
    PairVerdict,
    build_requests,
    mean_preference,
    orders_disagree,
    parse_verdict,
)
from swarm.judge.pipeline import (
    BatchResult,
    OutputJob,
    Record,
    RecordSteps,
    build_sampled_request,
    format_usage,
    usage_to_json,
)
from swarm.judge.win_rates import (
    MIN_RELIABLE_INSTRUCTIONS,
    length_controlled_win_rate,
    mean_win_rate,
)
from swarm.models.base import Completion, Model, Request
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec
from swarm.stats.significance import MeanInterval

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

ACTIONS = {
    "generate": "write a model's answers",
    "judge": "compare answers with those of a reference",
    "show": "win rates of judged answers, as a table",
}


EXAMPLES = {
    "generate": "--model moa/lite --output outputs/moa.json",
    "judge": "--outputs outputs/moa.json --reference outputs/base.json --judge gpt-4o --out lite",
    "show": "lite",
}


def list_options(action: str) -> list[click.Parameter]:
    """Return the options of an action; see `swarm.judge.cli.JudgeFormat`."""
    if action == "show":
        return [click.Argument(["folders"], nargs=-1, required=True, metavar="FOLDER...")]
    if action == "judge":
        reading = (
            "Source of a preference: the most likely tokens of a one-token reply, the "
            "probabilities of two given replies (local models), or a verdict at the end of a text."
        )
        export = "Also write the annotations in the format of alpaca_eval."
        return [
            option("--outputs", required=True, metavar="A.json", help="The model's answers."),
            option("--reference", required=True, metavar="B.json", help="Answers to compare with."),
            option("--reading", type=click.Choice(READINGS), default="logprobs", help=reading),
            token_option(512, "a reply with --reading text"),
            option("--export", type=FILE, help=export),
            *batch_options(),
        ]
    questions = (
        'Objects with an "instruction" and optionally a "dataset", as a JSON list or one per line.'
    )
    paths = (
        "Files of proposers' answers, of which --model makes one, as the aggregator of a mixture."
    )
    return [
        option("--questions", default=QUESTIONS_FILE, metavar="FILE", help=questions),
        option("--generator", metavar="NAME", help="The model's name in the file."),
        option("--reference-paths", metavar="A.json,B.json", help=paths),
        *sampling_options(),
        *batch_options(),
    ]


def key_rows(rows: Sequence[JsonRow]) -> dict[str, tuple[int, JsonRow]]:
    """Return the rows, each with the number of previous ones of its instruction, by key.

    The key is the instruction, with a counter appended from its second occurrence on. Rows of
    different files with equal keys belong together, regardless of their order.
    """
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        text = row["instruction"]
        seen[text] += 1
        key = text if seen[text] == 1 else f"{text}\n#{seen[text]}"
        found[key] = (seen[text] - 1, row)
    return found


def build_answer_job(given: Options) -> OutputJob:
    """Return the job of generating answers; a repeated instruction gets another sample.

    Raises:
        UserError: A file is invalid, or two options contradict each other.
    """
    rows = read_json_rows(find_path(given.questions), {"instruction": str})[: given.limit]
    files = [one for one in (given.reference_paths or "").split(",") if one]
    if files and given.reference_models:
        raise UserError(
            "--reference_paths and --reference_models: give one of them; answers of proposers are "
            "either read or asked for",
            2,
        )
    # Without a quorum, empty answers are left out like those of a failed proposer.
    proposers = [AgentSpec(RecordedModel(path, rows), Path(path).stem) for path in files]

    def wrap(model: Model) -> Model:
        aggregator = AgentSpec(model, given.model)
        return MixtureOfAgents(proposers, aggregator, quorum=0) if files else model

    def write(written: Sequence[JsonRow], replies: BatchResult) -> list[str]:
        return _write_answers(given, files, written, replies)

    records = [
        Record((), _answer(key, row, sample, given))
        for key, (sample, row) in key_rows(rows).items()
    ]
    return OutputJob(records, given.output, "answers", write=write, wrap=wrap)


def _answer(key: str, row: JsonRow, sample: int, given: Options) -> RecordSteps:
    (reply,) = yield {key: build_sampled_request(row["instruction"], given, sample)}
    return {
        "instruction": row["instruction"],
        "dataset": str(row.get("dataset", "")),
        "output": reply.text,
        "generator": given.generator or given.model,
    }


def _write_answers(
    given: Options, files: Sequence[str], rows: Sequence[JsonRow], replies: BatchResult
) -> list[str]:
    """Write AlpacaEval's rows, and a summary with the settings and the usage."""
    usage = usage_to_json(replies.answers.values())
    write_json(given.output, list(rows))
    options = ("model", "temperature", "max_tokens", "system", "seed")
    summary = {
        **{name: getattr(given, name) for name in options},
        "references": files,
        "reference_models": given.reference_models,
        "rounds": given.rounds,
        "spent": usage,
    }
    write_json(sibling_path(given.output, "summary.json"), summary)
    empty = sum(not row["output"].strip() for row in rows)
    return [
        format_usage(given.model, usage),
        *([f"{empty} of the answers are empty"] if empty else []),
        f"wrote {given.output}",
    ]


class RecordedModel(Model):
    """A model that repeats another model's recorded answers.

    Args:
        path: Answers in AlpacaEval's format; rows are looked up by instruction.
        rows: Instructions to answer.

    Raises:
        UserError: The file cannot be read, or lacks an instruction.
    """

    def __init__(self, path: str, rows: Sequence[JsonRow]) -> None:
        self.recorded = read_json_rows(path, {"instruction": str, "output": str})
        by_key = key_rows(self.recorded)
        self.answers: dict[tuple[str, int], str] = {}
        for key, (sample, row) in key_rows(rows).items():
            text = row["instruction"]
            if key not in by_key and text not in by_key:
                raise UserError(
                    f'{path}: has no answer to "{shorten_text(text)}"; it must have one to each'
                )
            _, found = by_key.get(key) or by_key[text]
            self.answers[text, sample] = found["output"]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the recorded answers to the last turns; see `Model.generate`."""
        return [
            Completion(self.answers[_last_user_text(request), request.sample])
            for request in requests
        ]

    def fingerprint(self) -> str:
        """Return a string that depends on the file."""
        return short_digest(self.recorded)


def _last_user_text(request: Request) -> str:
    return request.prompt if isinstance(request.prompt, str) else request.prompt[-1].content


def build_judge_job(given: Options) -> OutputJob:
    """Return the job of judging every pair in both orders.

    Raises:
        UserError: A file cannot be read, or the reference lacks an instruction.
    """
    rows = pair_answers(given.outputs, given.reference)[: given.limit]

    def write(annotations: Sequence[JsonRow], replies: BatchResult) -> list[str]:
        return _write_annotations(given, annotations, replies)

    records = [Record((), _annotate(row, given)) for row in rows]
    return OutputJob(records, given.out / ANNOTATIONS_FILE, "judgements", write=write)


def pair_answers(outputs: str, reference: str) -> list[JsonRow]:
    """Return the model's answers, each with the reference's to the same instruction.

    A numeric "difficulty" of the reference's rows is included.

    Raises:
        UserError: A file cannot be read, or the reference lacks an instruction.
    """
    own = key_rows(read_json_rows(outputs, ANSWER_FIELDS))
    others = key_rows(read_json_rows(reference, ANSWER_FIELDS))
    rows = []
    for key, (_, row) in own.items():
        if key not in others:
            raise UserError(f'{reference}: has no answer to "{shorten_text(key)}" of {outputs}')
        _, other = others[key]
        if not isinstance(other.get("difficulty", 0), (int, float)):
            raise UserError(f'{reference}: the difficulty of "{shorten_text(key)}" is no number')
        rows.append(
            {
                "key": key,
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


def _annotate(row: JsonRow, given: Options) -> RecordSteps:
    """Build a pair's row with the verdicts in both orders, and the preference, 0 to 1 or null."""
    pair = AnswerPair(row["key"], row["instruction"], row["output"], row["reference_output"])
    requests = build_requests(pair, given.reading, given.max_tokens)
    replies = (yield requests) if requests else []
    verdicts = [
        parse_verdict(reply, order) for reply, order in zip(replies, ORDERS, strict=bool(requests))
    ]
    return {
        **{name: value for name, value in row.items() if name != "key"},
        "judge": given.judge,
        "reading": given.reading,
        "preference": mean_preference(verdicts),
        "orders": [
            {"order": order, **verdict._asdict()}
            for order, verdict in zip(ORDERS, verdicts, strict=bool(requests))
        ],
    }


def _write_annotations(
    given: Options, annotations: Sequence[JsonRow], replies: BatchResult
) -> list[str]:
    """Write the annotations, a summary with the win rates, and alpaca_eval's form if asked for."""
    write_json_rows(given.out / ANNOTATIONS_FILE, annotations)
    judging, generating = usage_to_json(replies.answers.values()), _read_usage(given.outputs)
    summary = {
        "judging": judging,
        **({"generating": generating} if generating else {}),
        **summarize_annotations(annotations),
    }
    write_json(given.out / "summary.json", summary)
    lines = []
    if given.export:
        write_json(given.export, [to_alpaca_eval(one) for one in annotations])
        lines.append(f"wrote {given.export}")
    if generating:
        lines.append(format_usage(summary["generator"], generating))
    return [*lines, format_usage(given.judge, judging), *format_leaderboard([summary])]


def _read_usage(outputs: str) -> dict[str, Any]:
    """Return the usage of generating the answers, if `generate` wrote it."""
    path = sibling_path(Path(outputs), "summary.json")
    try:
        usage: dict[str, Any] = parse_json(path.read_bytes())["spent"]
        format_usage("", usage)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return usage


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


def compute_tables(given: Options) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the win rates of one or several folders, best first, and their table.

    Raises:
        UserError: A folder has no annotations.
    """
    found = [summarize_annotations(read_annotations(Path(one))) for one in given.folders]
    return rank_models(found), format_leaderboard(found)


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


HEADER = (
    "model",
    "length-controlled",
    "win rate",
    "n",
    "unparsed",
    "orders disagree",
    "first preferred",
    "characters",
    "reference's",
)

MIN_LETTERS_SHARE = 0.5
"""Total probability of the two letters, below which a note is added."""


def summarize_annotations(annotations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize a model's annotations, as `judge` writes them.

    Rates are in percent with 95 % intervals, over the instructions whose two replies could both be
    parsed; `None` if there are none. "order_disagreement" is the share of those in which the two
    orders prefer different answers, and "first_preferred" the mean preference for the answer shown
    first: 0.5 is a judge without position bias. "soft" is the share of replies with probabilities,
    and "letters_share" the mean total probability of the two letters in them.
    """
    read = [one for one in annotations if one["preference"] is not None]
    both = [_parse_verdicts(one) for one in read if one["orders"]]
    shares = [one.share for pair in both for one in pair if one.share is not None]
    return {
        "generator": _join_distinct(annotations, "generator"),
        "reference": _join_distinct(annotations, "reference_generator"),
        "judge": _join_distinct(annotations, "judge"),
        "reading": _join_distinct(annotations, "reading"),
        "instructions": len(annotations),
        "reference_digest": short_digest(
            sorted((one["instruction"], one["reference_output"]) for one in annotations)
        ),
        "n": len(read),
        "unparsed": len(annotations) - len(read),
        "equal_answers": sum(not one["orders"] for one in annotations),
        "soft": len(shares) / (2 * len(both)) if both else None,
        "letters_share": fmean(shares) if shares else None,
        "order_disagreement": fmean(map(orders_disagree, both)) if both else None,
        "first_preferred": fmean(map(_first_preference, both)) if both else None,
        "mean_length": fmean(len(one["output"]) for one in annotations),
        "reference_mean_length": fmean(len(one["reference_output"]) for one in annotations),
        **_compute_rates(read),
    }


def _compute_rates(read: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not read:
        return {"win_rate": None, "length_controlled": None}
    preferences = [one["preference"] for one in read]
    lengths = [len(one["output"]) - len(one["reference_output"]) for one in read]
    known = all("difficulty" in one for one in read)
    difficulty = [one["difficulty"] for one in read] if known else None
    controlled = length_controlled_win_rate(preferences, lengths, difficulty)
    return {
        "win_rate": _interval_to_dict(mean_win_rate(preferences)),
        "length_controlled": {
            **_interval_to_dict(controlled.rate),
            "standard_error": controlled.standard_error,
            "length_effect": controlled.length_effect,
            "difficulty_used": known,
        },
    }


def _interval_to_dict(interval: MeanInterval) -> dict[str, float]:
    return {"rate": interval.mean, "low": interval.low, "high": interval.high}


def _parse_verdicts(row: Mapping[str, Any]) -> list[PairVerdict]:
    return [PairVerdict(one["preference"], one["share"], one["reply"]) for one in row["orders"]]


def _first_preference(verdicts: Sequence[PairVerdict]) -> float:
    """Return the mean preference for the answer shown first; verdicts are ordered as `ORDERS`."""
    model_first, reference_first = (one.preference or 0.0 for one in verdicts)
    return (model_first + 1 - reference_first) / 2


def _join_distinct(rows: Sequence[Mapping[str, Any]], field: str) -> str:
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def rank_models(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort by length-controlled rate, highest first; those without one last."""
    return sorted(found, key=lambda one: -(one["length_controlled"] or {"rate": -1})["rate"])


def format_leaderboard(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the leaderboard, with notes on how to interpret it."""
    lines = format_table(HEADER, [_leaderboard_row(one) for one in rank_models(found)])
    judges = " and ".join(dict.fromkeys(one["judge"] for one in found))
    references = " and ".join(dict.fromkeys(one["reference"] for one in found))
    lines.append(f"Judged by {judges}, against {references}; each pair in both orders. Rates in %.")
    if len({(one["judge"], one["reading"], one["reference_digest"]) for one in found}) > 1:
        lines.append(
            "These rates cannot be compared: the judge, how it is read, the instructions "
            "or the reference's answers are not the same."
        )
    if any(one["length_controlled"] and one["n"] < MIN_RELIABLE_INSTRUCTIONS for one in found):
        lines.append(
            f"Length-controlled rates of fewer than {MIN_RELIABLE_INSTRUCTIONS} instructions "
            "depend on the fit's "
            "penalty by up to several points; see docs/judging.md."
        )
    return lines + [note for one in found for note in _quality_notes(one)]


def _quality_notes(one: Mapping[str, Any]) -> list[str]:
    """Return notes on problems of a model's judgements."""
    name, notes = one["generator"], []
    if one["unparsed"]:
        counts = f"{one['unparsed']} of {one['instructions']} instructions"
        notes.append(f"{name}: {counts} are in no rate: a reply about them could not be read.")
    if one["soft"] is not None and one["soft"] < 1 and one["reading"] != "text":
        share = f"{1 - one['soft']:.0%}"
        notes.append(
            f"{name}: {share} of the replies gave a verdict without probabilities: this "
            "judge tells none, and --reading text lets it compare first."
        )
    if one["letters_share"] is not None and one["letters_share"] < MIN_LETTERS_SHARE:
        share = f"{one['letters_share']:.0%}"
        notes.append(
            f"{name}: A and B together had a probability of {share} only: this judge does "
            "not reply as it is asked, and its preferences say little."
        )
    return notes


def _leaderboard_row(one: Mapping[str, Any]) -> list[str]:
    return [
        str(one["generator"]),
        _format_rate(one["length_controlled"]),
        _format_rate(one["win_rate"]),
        str(one["n"]),
        str(one["unparsed"]),
        _format_share(one["order_disagreement"]),
        _format_share(one["first_preferred"]),
        f"{one['mean_length']:.0f}",
        f"{one['reference_mean_length']:.0f}",
    ]


def _format_rate(found: Mapping[str, float] | None) -> str:
    return f"{found['rate']:.1f} [{found['low']:.1f}, {found['high']:.1f}]" if found else "-"


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
