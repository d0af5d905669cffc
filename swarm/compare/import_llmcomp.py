"""Import of llmcomp 1.x caches, so that answers paid for there are not requested again.

Answers and judgements are stored in this toolkit's answer cache under the keys that the same
requests have here.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import parse_json
from swarm._util.jsonl import read_jsonl
from swarm.compare.sampling.backends import open_answer_cache
from swarm.compare.sampling.resolve import resolve_backend, sample_cache_keys
from swarm.compare.sampling.types import ModelCall, SampleRequest
from swarm.compare.token_probs.numbers import RatingBounds
from swarm.errors import UserError
from swarm.models.base import Completion, Token, completion_to_json

if TYPE_CHECKING:
    from swarm.compare.judges import BaseJudge
    from swarm.compare.question import Question


LENGTH = RatingBounds().max_tokens
"""Tokens of a rating's answer here; llmcomp requested one token."""


@dataclass
class CacheImportResult:
    """Counts of an import.

    Attributes:
        answers, judgements: Number of newly stored entries.
        failed: Empty answers that stand for failures; they will be requested again.
        left_out: Number of other skipped entries by reason.
    """

    answers: int = 0
    judgements: int = 0
    failed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [
            f"{self.answers} answers and {self.judgements} judgements imported",
            *([f"{self.failed} failures left out"] if self.failed else []),
            *(f"{number} left out: {reason}" for reason, number in self.left_out.items()),
        ]
        return "; ".join(parts)


def as_rating(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as a `Rating` sends them here."""
    name = "max_completion_tokens" if "max_completion_tokens" in params else "max_tokens"
    return {**params, name: LENGTH}


def build_sent_call(model: str, params: Mapping[str, Any]) -> ModelCall:
    """Build a call whose parameters are final: no `ModelAdapter` handler is applied."""
    call = ModelCall(model, params)
    call.prepared_kwargs = dict(params)
    return call


def parse_completion(answer: Any) -> Completion | None:
    """Parse a text, or a token's probabilities or log probabilities; `None` if it is neither.

    Probabilities averaged over several requests become those of one answer.
    """
    if isinstance(answer, str):
        return Completion(answer)
    if not isinstance(answer, dict) or not answer:
        return None
    top = sorted(answer.items(), key=lambda one: -one[1])
    if any(p > 0 for p in answer.values()):
        top = [(text, math.log(p)) for text, p in top if p > 0]
    return Completion(top[0][0], finish="length", tokens=(Token(*top[0], tuple(top)),))


def store_answers(call: ModelCall, answers: Sequence[Completion], done: CacheImportResult) -> int:
    """Store answers as the first samples of a call and return how many of them are new."""
    try:
        keys = sample_cache_keys([SampleRequest(call, sample) for sample in range(len(answers))])
    except UserError as error:
        done.left_out[str(error)] += len(answers)
        return 0
    stored = open_answer_cache().get(keys)
    new = {
        key: {"prompt_tokens": 0, "new_tokens": 0, **completion_to_json(answer)}
        for key, answer in zip(keys, answers, strict=True)
        if key not in stored
    }
    if new:
        open_answer_cache().put_many(new, resolve_backend(call.model).label)
    return len(new)


LLMCOMP_CACHE_VERSION = 3
UNKNOWN_JUDGE = "the judge's settings are not the defaults; give the question that has it"


def import_judgements(
    folder: Path, questions: "Sequence[Question]", done: CacheImportResult
) -> None:
    """Store the judgements of llmcomp's judge files.

    Raises:
        UserError: A file is not one of llmcomp's.
    """
    from swarm.compare.judge_cache import record_judged_pairs

    for path in sorted(folder.glob("*/*.json")):
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            head, data = content["metadata"], content["data"]
            judge = match_judge(head, questions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is not a cache file of llmcomp: {error!r}") from None
        if judge is None:
            done.left_out[UNKNOWN_JUDGE] += sum(map(len, data.values()))
            continue
        pairs = []
        for question, answer, reply in iter_judgements(data, judge.uses_question):
            completion = parse_completion(reply)
            if completion is None or completion.text == "":
                done.failed += 1
                continue
            call = judge.build_call(judge.template.fill(question, answer))
            done.judgements += store_answers(call, [completion], done)
            if completion.tokens:
                store_answers(
                    build_sent_call(call.model, as_rating(call.api_kwargs)), [completion], done
                )
            pairs.append((question, answer))
        record_judged_pairs(judge.cache_key, pairs)


def iter_judgements(data: Mapping[str, Any], uses_question: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield (question, or "" where the judge does not see it; answer; judge's reply)."""
    for question, answers in data.items():
        for answer, reply in answers.items():
            yield question if uses_question else "", answer, reply


def match_judge(head: Mapping[str, Any], questions: "Sequence[Question]") -> "BaseJudge | None":
    """Return the judge that wrote a file; the hash in the file verifies that all settings agree."""
    from swarm.compare.judges import BaseJudge, FreeFormJudge, RatingJudge

    arguments = {key: head[key] for key in ("name", "model")} | {"paraphrases": [head["prompt"]]}
    known_judges: list[Any] = [*questions]
    for question in questions:
        known_judges += (getattr(question, "judges", None) or {}).values()
    candidates = [FreeFormJudge(**arguments), RatingJudge(**arguments), *known_judges]
    for judge in candidates:
        if isinstance(judge, BaseJudge) and llmcomp_judge_hash(judge, head["name"]) == head["hash"]:
            return judge
    return None


def llmcomp_judge_hash(judge: "BaseJudge", name: str) -> str:
    """Compute llmcomp's hash of a judge."""
    from swarm.compare.judges import RatingJudge

    messages = judge.turns(judge.template.text)
    params: dict[str, Any] = {"messages": messages}
    if isinstance(judge, RatingJudge):
        params["top_logprobs"] = judge.bounds.top_logprobs
        if judge.logit_bias is not None:
            params["logit_bias"] = judge.logit_bias
    else:
        params = judge.params(messages)
    request_params = {
        k: v for k, v in ModelCall(judge.model, params).api_kwargs.items() if k != "timeout"
    }
    fields = {"name": name, "type": judge.type(), "inputs": [{"prepared_params": request_params}]}
    text = json.dumps({**fields, "_version": LLMCOMP_CACHE_VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


UNKNOWN_PARAMS = "the file does not contain the settings; give the question"


def import_cache(
    folder: str | Path, base_url: str | None = None, questions: "Sequence[Question]" = ()
) -> CacheImportResult:
    """Store the answers of an llmcomp 1.x cache folder; existing entries are not replaced.

    Args:
        folder: Folder that contains "question" or "judge".
        base_url: Endpoint that answered. `None`: the one that has the model now.
        questions: Questions of the cache, with their judges: needed for caches of versions before
            1.5 and for judges with non-default settings, as the files contain neither.

    Raises:
        UserError: The folder does not exist, or a file in it is not one of llmcomp's.
    """
    from swarm.compare.config import Config

    root = Path(folder).expanduser()
    if not any((root / part).is_dir() for part in ("question", "judge")):
        raise UserError(f"{root}: is not a cache of llmcomp: it has no folder question or judge")
    result = CacheImportResult()
    pairs = [(base_url, "", "IMPORT")]
    with nullcontext() if base_url is None else Config.override(url_key_pairs=pairs):
        _import_answers(root / "question", questions, result)
        import_judgements(root / "judge", questions, result)
    return result


def _import_answers(
    folder: Path, questions: "Sequence[Question]", result: CacheImportResult
) -> None:
    """Store the answers; samples of a request are numbered from the oldest file on."""
    files = [(read_jsonl(path), path) for path in sorted(folder.glob("*/*.jsonl"))]
    calls: dict[str, ModelCall] = {}
    answers: dict[str, list[Completion]] = defaultdict(list)
    for lines, path in sorted(files, key=lambda one: _last_update(one[0])):
        if not lines or not isinstance(lines[0], dict) or "model" not in lines[0]:
            raise UserError(
                f"{path}: is not a cache file of llmcomp; its first line names no model"
            )
        for row in lines[1:]:
            params = _request_params(lines[0], row, questions)
            answer = parse_completion(row.get("answer"))
            if params is None:
                result.left_out[UNKNOWN_PARAMS] += 1
            elif not params or answer is None:
                result.failed += 1
            else:
                key = json.dumps([lines[0]["model"], params], sort_keys=True)
                calls.setdefault(key, build_sent_call(lines[0]["model"], params))
                answers[key].append(answer)
    for key, completions in answers.items():
        new = store_answers(calls[key], completions, result)
        result.answers += new
        if completions[0].tokens:
            store_answers(
                build_sent_call(calls[key].model, as_rating(calls[key].params)), completions, result
            )


def _last_update(lines: list[Any]) -> str:
    return str(lines[0].get("last_update")) if lines and isinstance(lines[0], dict) else ""


def _request_params(
    head: Mapping[str, Any], row: Mapping[str, Any], questions: "Sequence[Question]"
) -> dict[str, Any] | None:
    """Return the request parameters without the timeout; empty if it failed, `None` if unknown."""
    if "api_kwargs" in row:
        return {key: value for key, value in row["api_kwargs"].items() if key != "timeout"}
    for question in questions:
        if question.name == head.get("name") and row.get("messages") in question.as_messages():
            request_params = ModelCall(head["model"], question.params(row["messages"])).api_kwargs
            return {key: value for key, value in request_params.items() if key != "timeout"}
    return None
