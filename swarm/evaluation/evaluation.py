"""One evaluation: a candidate on a split of a task, stored in a folder."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import TypeAdapter

from swarm._util.files import (
    as_path,
    encode_json,
    make_folder,
    parse_json,
    path_fault,
    write_json,
)
from swarm._util.jsonl import read_jsonl, write_json_rows
from swarm._util.secrets import identity_values
from swarm._util.settings import checked
from swarm._util.terminal import NO_PRICE, format_cost, pluralize
from swarm.engine.base_model import choose_device
from swarm.errors import UserError
from swarm.evaluation.base import Candidate, JobUsage
from swarm.loop.context import check_context
from swarm.loop.evaluator import scores_to_records
from swarm.loop.identity import digest_items, task_source_digests
from swarm.loop.prompt_form import FORM_ITEMS, describe_form
from swarm.loop.selection import spaced_items
from swarm.models.base import Usage
from swarm.runs.verdict import (
    MAX_DOMAINS,
    Compared,
    compare_constant_answers,
    describe_difference,
    format_measured,
    format_most_common_answer,
    format_one_answer_warnings,
    shorten_text,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import Measured, measure, paired_gain


@dataclass(frozen=True, slots=True)
class SplitScores:
    """Scores of a candidate on a split.

    Attributes:
        names: Names of its voters.
        items: Items of the split.
        scores: One list per voter, in the order of the items.
        usage: Requests to models and their tokens, counted for each of several members; includes
            requests about dev to compute weights, and the cost of cached answers when they were
            generated.
        seconds: Time of answering, without loading.
        account: Usage of each voter's answers, empty if unknown.
    """

    names: list[str]
    items: Sequence[Item]
    scores: list[list[Score]]
    usage: Usage
    seconds: float
    account: Sequence[Mapping[str, Any]] = ()


def prepare_candidate(candidate: Candidate, task: Task, device: str = "cpu") -> None:
    """Check and load a candidate, once; then `score_candidate` works on any split.

    Raises:
        UserError: As `check_candidate`, or something cannot be opened.
    """
    check_candidate(candidate, task)
    task.open(device)
    candidate.open(device)


def check_candidate(
    candidate: Candidate, task: Task, splits: Sequence[str] = ("dev", "test")
) -> None:
    """Check that a candidate and a task are compatible, before anything is loaded.

    A task with a scale measured on experts takes that of the candidate's run, if there is one.

    Args:
        splits: The splits to be scored; only their items have to fit into the models' contexts, and
            those of dev if the candidate answers them too.

    Raises:
        UserError: As `Candidate.check`, or the task lacks something.
    """
    task.check()
    candidate.check(task.metric_task)
    used = dict.fromkeys(("dev", *splits) if candidate.reads_dev else splits)
    for tokenizer, context in candidate.model_contexts():
        check_context(task.metric_task, tokenizer, context, list(used))
    if candidate.scale is not None:
        task.restore_scale(candidate.scale)
    task.metric_task.check_scale()


def score_candidate(candidate: Candidate, task: Task, split: str) -> SplitScores:
    """Score a prepared candidate on "dev" or "test", by the task's metric."""
    task, meter = task.metric_task, JobUsage()
    items = task.items(split)
    began = time.monotonic()
    scores = candidate.score_items(task, items, meter)
    seconds = time.monotonic() - began
    return SplitScores(candidate.names, items, scores, meter, seconds, candidate.usage_per_voter())


RESULT_FILE, ANSWERS_FILE = "result.json", "answers.jsonl"


@checked()
class Evaluation:
    """One candidate on one split of a task; cheap to construct, `run` does the work.

    Args:
        task: The task.
        candidate: The candidate that answers it.
        split: "dev" or "test".
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.
        out: The folder for result.json and answers.jsonl; `None` writes nothing.
    """

    def __init__(
        self,
        task: Task,
        candidate: Candidate,
        split: Literal["dev", "test"] = "test",
        device: str | None = None,
        out: str | Path | None = None,
    ) -> None:
        self.task, self.candidate = task, candidate
        self.split, self.device = split, device
        if out is not None and (fault := path_fault(out)):
            raise UserError(f"out={str(out)[:80]!r} {fault}; must be null or a folder's path")
        self.out = None if out is None else as_path(out)
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise UserError(f"out={out}: must be a folder")
        self.found: SplitScores | None = None

    def run(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate, or read the result of the same evaluation from the folder.

        Args:
            config: The configuration, which identifies the evaluation.

        Returns:
            The content of result.json.

        Raises:
            UserError: An input is invalid; nothing has been written then.
        """
        device = choose_device(self.device)
        self.task.items(self.split)
        check_candidate(self.candidate, self.task, [self.split])
        given = config or {}
        identity = {
            "task": identity_values(given.get("task")),
            "candidate": identity_values(given.get("candidate")),
            "split": self.split,
            "task items": digest_items(self.task, self.split),
            "weights": self.candidate.fingerprint(),
            **task_source_digests(self.task),
        }
        return self._load_known_result(identity) or self._score_candidate(device, identity)

    def _load_known_result(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the folder's result of this evaluation, if it exists.

        Raises:
            UserError: The folder contains another evaluation.
        """
        path = None if self.out is None else self.out / RESULT_FILE
        if path is None or not path.is_file():
            return None
        try:
            found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
            before = found["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"""out={self.out}: {path} is not an evaluation; choose another
                folder""") from None
        current = parse_json(encode_json(identity))
        if differ := [key for key in current if before.get(key) != current[key]]:
            raise UserError(f"""out={self.out}: it contains another evaluation ({", ".join(differ)}
                differ); choose another folder""")
        return found

    def _score_candidate(self, device: str, identity: Mapping[str, Any]) -> dict[str, Any]:
        self.task.open(device)
        self.candidate.open(device)
        if self.task.chat == "auto":
            print(self._choose_form(), file=sys.stderr)
        self.found = found = score_candidate(self.candidate, self.task, self.split)
        task = self.task.metric_task
        account = found.account or [{} for _ in found.names]
        constant = self._compare_constant_answers(task)
        result = {
            "task": self.task.name,
            "split": self.split,
            "items": len(found.items),
            "voices": [
                {"name": name, **asdict(measure(task, scores, found.items)), **took}
                for name, scores, took in zip(found.names, found.scores, account, strict=True)
            ],
            "constant_answers": asdict(constant) if constant else None,
            "prompts": found.usage.calls,
            "tokens": found.usage.tokens,
            "seconds": round(found.seconds, 3),
            "cost": found.usage.cost,
            "unpriced": found.usage.unpriced,
            "device": device,
            "identity": identity,
        }
        if self.candidate.rivals and len(found.names) > 1:
            # Chosen on these very items, so that its utility is biased upward slightly.
            best = max(range(1, len(found.names)), key=lambda i: task.utility(found.scores[i]))
            result["against_best"] = {
                "best": found.names[best],
                "gain": asdict(paired_gain(task, found.scores[0], found.scores[best])),
                "rivals": self.candidate.rivals,
            }
        if self.out:
            make_folder(self.out, private=True)
            # The answers first, so that an existing result implies them.
            write_json_rows(self.out / ANSWERS_FILE, self.answer_rows())
            write_json(self.out / RESULT_FILE, result)
        return result

    def _choose_form(self) -> str:
        """Decide task.chat=auto by the candidate's scores; return the line that says so."""
        contexts = self.candidate.model_contexts()
        means = {False: 0.0, True: 0.0}
        if contexts and all(getattr(one, "chat_template", None) for one, _ in contexts):
            dev = self.task.items("dev")
            items = [dev[place] for place in spaced_items(range(len(dev)), FORM_ITEMS)]
            for chat in means:
                self.task.chat = chat
                voices = self.candidate.score_items(self.task.metric_task, items, JobUsage())
                means[chat] = fmean(score.value for mine in voices for score in mine)
        self.task.chat = means[True] > means[False]
        check_candidate(self.candidate, self.task, [self.split])
        return describe_form(self.task, [*means.values()], "score")

    def _compare_constant_answers(self, task: Task) -> Compared | None:
        """Return the best constant answers, chosen on dev; `None` without grades or a dev split."""
        try:
            dev = task.items("dev") if task.votes else ()
        except UserError:
            return None
        test = task.items("test") if self.split == "test" else ()
        return compare_constant_answers(task, dev, test) if dev else None

    def answer_rows(self) -> list[dict[str, Any]]:
        """Return every answer after `run`, as in answers.jsonl: id, value, answer, text."""
        if self.found is None:
            assert self.out is not None, "nothing was run yet"
            return read_jsonl(self.out / ANSWERS_FILE)
        several = len(self.found.names) > 1
        return [
            {**({"voice": name} if several else {}), **row}
            for name, scores in zip(self.found.names, self.found.scores, strict=True)
            for row in scores_to_records(self.found.items, scores)
        ]


def format_result(result: Mapping[str, Any]) -> str:
    """Format a result in lines."""
    lines = [f"{result['task']}, {result['split']}, {result['items']} items"]
    voices = [(voice, _read_measured(voice)) for voice in result["voices"]]
    for voice, measured in voices:
        unparsed = f"unparsed {100 * measured.unparsed:.1f} %"
        lines.append(f"{voice['name']}: {_format_interval(measured)}, {unparsed}")
        lines += _format_domains(measured)
        if "calls" in voice:
            lines.append(f"  {voice['calls']:,} calls, {voice['tokens']:,} tokens{_cost(voice)}")
    if found := result.get("constant_answers"):
        chosen = "chosen on dev" if result["split"] != "dev" else "chosen on these items"
        measured = _read_measured(found[result["split"]])
        lines.append(f"{found['label']}, {chosen}: {_format_interval(measured)}")
    for voice, measured in voices:
        lines += format_one_answer_warnings(measured.one_answer, voice["name"], result["split"])
    if best := result.get("against_best"):
        first = result["voices"][0]["name"]
        words = describe_difference(PairedTest(**best["gain"]), "items", False)
        lines.append(f"best {best['rivals']}: {best['best']}; {first} against it: {words}")
    lines.append(
        f"{result['prompts']:,} prompts, {result['tokens']:,} tokens{_cost(result)}, "
        f"{result['seconds']:.1f} s on {result['device']}"
    )
    return "\n".join(lines)


def _format_interval(one: Measured) -> str:
    return f"{one.utility:.3f}, 95 % interval {one.low:.3f} to {one.high:.3f}"


def _cost(found: Mapping[str, Any]) -> str:
    """Format the cost of answers and how many have no known price; empty if nothing is paid."""
    cost, unpriced = found["cost"], found.get("unpriced", 0)
    if cost:
        return f", cost {format_cost(cost, unpriced, 'answer')}"
    return f", {NO_PRICE} for {pluralize(unpriced, 'answer')}" if unpriced else ""


def _read_measured(voice: Mapping[str, Any]) -> Measured:
    """Return a voter's result from its entry in result.json, which has further keys."""
    found: Measured = TypeAdapter(Measured).validate_python(dict(voice))
    return found


def _format_domains(voice: Measured) -> list[str]:
    """Format a voter's utilities by domain, or those of a mixture's parts."""
    if not 2 <= len(voice.domains) <= MAX_DOMAINS:
        return [f"  {part}: {value:.3f}" for part, value in voice.parts.items()]
    warned = {one.domain for one in voice.one_answer}
    lines = []
    for name, one in voice.domains.items():
        line = f"  {shorten_text(name)}: {format_measured(one)}, n = {one.n}"
        if one.commonest is not None:
            line += f"; answers: {format_most_common_answer(one, bool(warned & {name, None}))}"
        lines.append(line)
    return lines
