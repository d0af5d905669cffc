"""Brings over what llmcomp has cached, so that what was paid for there is not asked again."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import ModelCall
from swarm.compare.jsonl import read_jsonl
from swarm.compare.older.answers import CacheImportResult, as_rating, parse_completion, store_answers, build_sent_call
from swarm.compare.older.judges import import_judgements
from swarm.errors import UserError
from swarm.models import Completion

if TYPE_CHECKING:
    from swarm.compare.questions import Question

UNKNOWN_PARAMS = "the file does not say how it was asked; give the question"


def import_cache(
    folder: str | Path, base_url: str | None = None, questions: "Sequence[Question]" = ()
) -> CacheImportResult:
    """Keep the answers in a cache folder of llmcomp 1.x; what is kept already stays.

    Args:
        folder: With "question" or "judge" in it.
        base_url: The endpoint that answered. `None`: the one that has the model now.
        questions: Those that were asked, with their judges: needed for caches of versions before
            1.5, and for judges with settings other than the default ones, as the files say neither.

    Raises:
        UserError: There is no such folder, or a file in it is none of llmcomp's.
    """
    from swarm.compare.config import Config

    place = Path(folder).expanduser()
    if not any((place / part).is_dir() for part in ("question", "judge")):
        raise UserError(f"{place}: has no folder question or judge; it is no cache of llmcomp")
    done = CacheImportResult()
    pairs = [(base_url, "", "IMPORT")]
    with nullcontext() if base_url is None else Config.override(url_key_pairs=pairs):
        _import_answers(place / "question", questions, done)
        import_judgements(place / "judge", questions, done)
    return done


def _import_answers(folder: Path, questions: "Sequence[Question]", done: CacheImportResult) -> None:
    """Samples of the same are numbered on, from the oldest file to the newest."""
    files = [(read_jsonl(path), path) for path in sorted(folder.glob("*/*.jsonl"))]
    asked: dict[str, ModelCall] = {}
    answers: dict[str, list[Completion]] = defaultdict(list)
    for lines, path in sorted(files, key=lambda one: _last_update(one[0])):
        if not lines or not isinstance(lines[0], dict) or "model" not in lines[0]:
            raise UserError(f"{path}: is no cache file of llmcomp; its first line names no model")
        for row in lines[1:]:
            params = _request_params(lines[0], row, questions)
            answer = parse_completion(row.get("answer"))
            if params is None:
                done.left_out[UNKNOWN_PARAMS] += 1
            elif not params or answer is None:
                done.failed += 1
            else:
                key = json.dumps([lines[0]["model"], params], sort_keys=True)
                asked.setdefault(key, build_sent_call(lines[0]["model"], params))
                answers[key].append(answer)
    for key, some in answers.items():
        new = store_answers(asked[key], some, done)
        done.answers += new
        if some[0].tokens:
            store_answers(build_sent_call(asked[key].model, as_rating(asked[key].params)), some, done)


def _last_update(lines: list[Any]) -> str:
    return str(lines[0].get("last_update")) if lines and isinstance(lines[0], dict) else ""


def _request_params(
    head: Mapping[str, Any], row: Mapping[str, Any], questions: "Sequence[Question]"
) -> dict[str, Any] | None:
    """What was sent, without the timeout; empty if it failed, `None` if it is not known."""
    if "api_kwargs" in row:
        return {key: value for key, value in row["api_kwargs"].items() if key != "timeout"}
    for question in questions:
        if question.name == head.get("name") and row.get("messages") in question.as_messages():
            told = ModelCall(head["model"], question.params(row["messages"])).api_kwargs
            return {key: value for key, value in told.items() if key != "timeout"}
    return None
