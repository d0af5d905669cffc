"""What llmcomp's judges said, as answers that are kept here."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import ModelCall
from swarm.compare.older.answers import CacheImportResult, as_rating, parse_completion, store_answers, build_sent_call
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.compare.judges import BaseJudge
    from swarm.compare.questions import Question

LLMCOMP_CACHE_VERSION = 3
UNKNOWN_JUDGE = "a judge with settings that are not the default ones; give the question that has it"


def import_judgements(folder: Path, questions: "Sequence[Question]", done: CacheImportResult) -> None:
    """Keep what is in the files of judges.

    Raises:
        UserError: A file is none of llmcomp's.
    """
    from swarm.compare.judges.judging import record_judged_pairs

    for path in sorted(folder.glob("*/*.json")):
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            head, data = whole["metadata"], whole["data"]
            judge = match_judge(head, questions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no cache file of llmcomp: {error!r}") from None
        if judge is None:
            done.left_out[UNKNOWN_JUDGE] += sum(map(len, data.values()))
            continue
        pairs = []
        for question, answer, said in iter_judgements(data, judge.uses_question):
            completion = parse_completion(said)
            if completion is None or completion.text == "":
                done.failed += 1
                continue
            asked = judge.build_call(judge.template.fill(question, answer))
            done.judgements += store_answers(asked, [completion], done)
            if completion.tokens:
                store_answers(build_sent_call(asked.model, as_rating(asked.api_kwargs)), [completion], done)
            pairs.append((question, answer))
        record_judged_pairs(judge.cache_key, pairs)


def iter_judgements(data: Mapping[str, Any], uses_question: bool) -> Iterator[tuple[str, str, Any]]:
    """Question, or "" where the judge does not see it, answer, and what the judge said."""
    for question, answers in data.items():
        for answer, said in answers.items():
            yield question if uses_question else "", answer, said


def match_judge(head: Mapping[str, Any], questions: "Sequence[Question]") -> "BaseJudge | None":
    """The judge that a file is of; the hash in it tells whether the settings are the same."""
    from swarm.compare.judges import FreeFormJudge, BaseJudge, RatingJudge

    told = {key: head[key] for key in ("name", "model")} | {"paraphrases": [head["prompt"]]}
    given: list[Any] = [*questions]
    for question in questions:
        given += (getattr(question, "judges", None) or {}).values()
    possible = [FreeFormJudge(**told), RatingJudge(**told), *given]
    for judge in possible:
        if isinstance(judge, BaseJudge) and llmcomp_judge_hash(judge, head["name"]) == head["hash"]:
            return judge
    return None


def llmcomp_judge_hash(judge: "BaseJudge", name: str) -> str:
    """llmcomp's hash of a judge."""
    from swarm.compare.judges import RatingJudge

    messages = judge.turns(judge.template.text)
    params: dict[str, Any] = {"messages": messages}
    if isinstance(judge, RatingJudge):
        params["top_logprobs"] = judge.bounds.top_logprobs
        if judge.logit_bias is not None:
            params["logit_bias"] = judge.logit_bias
    else:
        params = judge.params(messages)
    told = {k: v for k, v in ModelCall(judge.model, params).api_kwargs.items() if k != "timeout"}
    whole = {"name": name, "type": judge.type(), "inputs": [{"prepared_params": told}]}
    text = json.dumps({**whole, "_version": LLMCOMP_CACHE_VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
