"""What is kept of questions and judges: read again without asking anybody, listed, forgotten."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from swarm.compare.asking import ModelCall, Script, SampleRequest
from swarm.compare.asking.cache import open_answer_cache
from swarm.compare.asking.collecting import reduce_gc_frequency
from swarm.compare.asking.finding import sample_cache_keys, resolve_backend
from swarm.compare.judges import judging
from swarm.compare.judges.templates import content_as_text
from swarm.compare.questions.frames import as_column
from swarm.models import Completion

if TYPE_CHECKING:
    import pandas as pd

    from swarm.compare.judges import BaseJudge
    from swarm.compare.questions import Question

T = TypeVar("T")


class CacheOnlyReplay(Generic[T]):
    """A script that is run on kept answers alone.

    Attributes:
        keys: Of the answers that it wanted, kept or not.
        result: What it came to; `None` if something that it wanted is not kept.
    """

    def __init__(self, script: Script[T]) -> None:
        self.script = script
        self.keys: list[str] = []
        self.result: T | None = None
        self.advance_script(None)

    def advance_script(self, heard: list[Any] | None) -> None:
        """Run on until it wants something or ends."""
        self.wants: Sequence[SampleRequest] = ()
        try:
            self.wants = next(self.script) if heard is None else self.script.send(heard)
        except StopIteration as done:
            self.result = done.value

    def send_cached(self, heard: Mapping[str, Completion], keys: Sequence[str]) -> None:
        """Be sent what is kept of what it wants; it ends where something is missing."""
        self.keys += keys
        if all(key in heard for key in keys):
            self.advance_script([heard[key] for key in keys])
        else:
            self.wants = ()
            self.script.close()


def replay_from_cache(scripts: Iterable[Script[T]]) -> list[CacheOnlyReplay[T]]:
    """Run scripts on kept answers alone, all of them together.

    Raises:
        UserError: A model is not there, or the file of kept answers cannot be read.
    """
    all_of_them = waiting = [CacheOnlyReplay(script) for script in scripts]
    while waiting := [one for one in waiting if one.wants]:
        wants = [want for one in waiting for want in one.wants]
        wanted = sample_cache_keys(wants)
        models = {key: want.asked.model for key, want in zip(wanted, wants, strict=True)}
        sources_of = {name: resolve_backend(name) for name in set(models.values())}
        heard: dict[str, Completion] = {}
        for name, model in sources_of.items():
            heard |= model.get_cached([key for key, other in models.items() if other == name])
        last = 0
        for one in waiting:
            first, last = last, last + len(one.wants)
            one.send_cached(heard, wanted[first:last])
    return all_of_them


def list_judgements(judge: "BaseJudge") -> "pd.DataFrame":
    """What is kept of a judge; see `Judge.get_cache`."""
    import pandas as pd

    pairs = judging.load_judged_pairs(judge.cache_key)
    prompts = [judge.template.fill(question, answer) for question, answer in pairs]
    with reduce_gc_frequency():
        said = replay_from_cache(judge.judge(prompt) for prompt in prompts)
    raw = "_raw_answer" in judge.suffixes
    columns = ["question", "answer", "judge_question", "judge_answer"] + ["judge_raw_answer"] * raw
    rows = []
    for (question, answer), prompt, one in zip(pairs, prompts, said, strict=True):
        if one.result is None or one.result[1] is not None:
            continue
        told = one.result[0]
        row = (question if judge.uses_question else None, answer, prompt, told[""])
        rows.append((*row, told["_raw_answer"]) if raw else row)
    return pd.DataFrame(
        {name: as_column([row[n] for row in rows]) for n, name in enumerate(columns)}
    )


def forget_answers(question: "Question", model: str, judges: bool = False) -> bool:
    """Forget what a model answered to a question; see `Question.clear_cache`."""
    asked = [ModelCall(model, question.params(messages)) for messages in question.as_messages()]
    first, number = 0, question.samples_per_paraphrase
    dropped = 0
    while True:
        # Earlier runs may have had more samples than this question has now.
        rows = [
            (one, replay_from_cache(question.row(one, sample) for sample in range(first, first + number)))
            for one in asked
        ]
        keys = [key for _, some in rows for one in some for key in one.keys]
        if judges:
            keys += [key for one, some in rows for key in _judgement_keys(question, one, some)]
        found = open_answer_cache().delete(list(dict.fromkeys(keys)))
        dropped += found
        if first and not found:
            return dropped > 0
        first, number = first + number, max(number, first)


def _judgement_keys(question: "Question", asked: ModelCall, rows: Sequence[CacheOnlyReplay[Any]]) -> list[str]:
    """The keys of what the question's judges said of these answers."""
    said = content_as_text(asked.params["messages"][-1]["content"])
    answers = {row.result.columns["answer"] for row in rows if row.result}
    judges = (getattr(question, "judges", None) or {}).values()
    prompts = [(judge, judge.template.fill(said, a)) for judge in judges for a in sorted(answers)]
    return [key for one in replay_from_cache(j.judge(prompt) for j, prompt in prompts) for key in one.keys]
