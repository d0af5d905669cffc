"""Generation of answers in AlpacaEval's format, also by a mixture with recorded proposals."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swarm._util.files import short_digest
from swarm._util.jsonl import JsonRow, read_json_rows, shorten_text
from swarm.errors import UserError
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
