"""What llmcomp's judges said, as answers that are kept here."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.asking import Asked
from swarm.compare.older.answers import Imported, as_rating, completion_of, keep, sent
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.compare.judges import Judge
    from swarm.compare.questions import Question

VERSION = 3
UNKNOWN = "a judge with settings that are not the default ones; give the question that has it"


def judgements(folder: Path, questions: "Sequence[Question]", done: Imported) -> None:
    """Keep what is in the files of judges.

    Raises:
        UserError: A file is none of llmcomp's.
    """
    from swarm.compare.judges.judging import write_down

    for path in sorted(folder.glob("*/*.json")):
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            head, data = whole["metadata"], whole["data"]
            judge = judge_of(head, questions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no cache file of llmcomp: {error!r}") from None
        if judge is None:
            done.left_out[UNKNOWN] += sum(map(len, data.values()))
            continue
        pairs = []
        for question, answer, said in said_in(data, judge.uses_question):
            completion = completion_of(said)
            if completion is None or completion.text == "":
                done.failed += 1
                continue
            asked = judge.asked(judge.template.fill(question, answer))
            done.judgements += keep(asked, [completion], done)
            if completion.tokens:
                keep(sent(asked.model, as_rating(asked.api_kwargs)), [completion], done)
            pairs.append((question, answer))
        write_down(judge.key, pairs)


def said_in(data: Mapping[str, Any], uses_question: bool) -> Iterator[tuple[str, str, Any]]:
    """Question, or "" where the judge does not see it, answer, and what the judge said."""
    for question, answers in data.items():
        for answer, said in answers.items():
            yield question if uses_question else "", answer, said


def judge_of(head: Mapping[str, Any], questions: "Sequence[Question]") -> "Judge | None":
    """The judge that a file is of; the hash in it tells whether the settings are the same."""
    from swarm.compare.judges import FreeFormJudge, Judge, RatingJudge

    told = {key: head[key] for key in ("name", "model")} | {"paraphrases": [head["prompt"]]}
    given: list[Any] = [*questions]
    for question in questions:
        given += (getattr(question, "judges", None) or {}).values()
    possible = [FreeFormJudge(**told), RatingJudge(**told), *given]
    for judge in possible:
        if isinstance(judge, Judge) and hash_of(judge, head["name"]) == head["hash"]:
            return judge
    return None


def hash_of(judge: "Judge", name: str) -> str:
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
    told = {k: v for k, v in Asked(judge.model, params).api_kwargs.items() if k != "timeout"}
    whole = {"name": name, "type": judge.type(), "inputs": [{"prepared_params": told}]}
    text = json.dumps({**whole, "_version": VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
