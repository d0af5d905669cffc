"""Tasks of the lm-evaluation-harness: our numbers are its own."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from lm_eval_tasks import CHOICE, FORCED, GENERATE, tasks_folder
from task_items import Knowing, Mistaken, Silent, Unscored, played

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.models.base import Completion, Model
from swarm.pool.pool import Pool
from swarm.tasks.base import Task
from swarm.tasks.lm_eval_harness import LMEvalTask, cut_at_stops, lm_eval
from swarm.tasks.mixture import Mixture

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("harness") / "base", "llama")


@pytest.fixture(scope="module")
def pool(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.pool(base, tmp_path_factory.mktemp("experts"), ("amber", "birch"))


def utilities(task: Task, base: Path, pool: Path, split: str) -> list[float]:
    """Our utilities of two experts."""
    engine, experts = HFEngine(plan="stacked"), Pool(pool).open()
    engine.open(BaseModel(str(base)), experts, "cpu")
    scores = run_tasks_lockstep(task, engine, np.eye(2), task.items(split), JobUsage())
    return [task.utility(row) for row in scores]


def theirs(name: str, folder: str, base: Path, expert: Path, **more: Any) -> dict[str, Any]:
    """What lm-eval itself says of an expert under PEFT, on the test documents."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from peft import PeftModel
    from transformers import AutoTokenizer

    network = PeftModel.from_pretrained(tiny.load(base), expert).eval()
    model = HFLM(network, tokenizer=AutoTokenizer.from_pretrained(base), batch_size=1, **more)
    manager = TaskManager(include_path=folder, include_defaults=False)
    found = simple_evaluate(model, tasks=[name], task_manager=manager, bootstrap_iters=0)
    return dict(found["results"][name])


@pytest.mark.parametrize("shots", [0, 2])
def test_multiple_choice_is_theirs(tmp_path: Path, base: Path, pool: Path, shots: int) -> None:
    folder = tasks_folder(tmp_path / "mine", CHOICE, "letters", shots=shots)
    for metric in ("acc", "acc_norm"):
        task = LMEvalTask("mine", "letters", folder, metric=metric)
        expected = [
            theirs("letters", folder, base, pool / n)[f"{metric},none"] for n in ("amber", "birch")
        ]
        assert utilities(task, base, pool, "test") == pytest.approx(expected)
        assert 0 < sum(expected) < 2


def test_generation_is_theirs(tmp_path: Path, base: Path, pool: Path) -> None:
    folder = tasks_folder(tmp_path / "mine", GENERATE, "words")
    expected = [theirs("words", folder, base, pool / name) for name in ("amber", "birch")]
    for metric, key in ((None, "first"), ("exact_match,whole", "whole")):
        task = LMEvalTask("mine", "words", folder, metric=metric)
        wanted = [found[f"exact_match,{key}"] for found in expected]
        assert utilities(task, base, pool, "test") == pytest.approx(wanted)
    assert any(found["exact_match,first"] > 0 for found in expected)


def test_forced_texts_are_theirs(tmp_path: Path, base: Path, pool: Path) -> None:
    """The documents are shorter than a window, so that theirs and ours is the same text."""
    folder = tasks_folder(tmp_path / "mine", FORCED, "whole", kind="loglikelihood_rolling", text="")
    ours = utilities(LMEvalTask("mine", "whole", folder), base, pool, "test")
    # By default their text begins with two <bos>, of which the second is scored.
    found = theirs("whole", folder, base, pool / "amber", add_bos_token=False)
    expected = found["bits_per_byte,none"]
    # They weigh documents by their bytes, which here differ by one or two.
    assert -ours[0] == pytest.approx(expected, rel=2e-3) and ours[0] != ours[1]
    folder = tasks_folder(tmp_path / "mine", FORCED, "said", kind="loglikelihood", text="no ")
    said = theirs("said", folder, base, pool / "amber")
    task = LMEvalTask("mine", "said", folder)
    assert utilities(task, base, pool, "test")[0] == said["acc,none"]
    with pytest.raises(UserError, match=r"metric=perplexity.*acc"):
        LMEvalTask("mine", "said", folder, metric="perplexity").items("dev")


def test_dev_is_another_split_than_test(tmp_path: Path) -> None:
    for splits, counts in (
        ({"train": 8, "validation": 10, "test": 12}, (10, 12)),
        ({"train": 8, "validation": 10}, (8, 10)),
        ({"test": 13}, (7, 6)),
    ):
        name = "_".join(splits)
        folder = tasks_folder(tmp_path / "mine", CHOICE, name, splits)
        task = LMEvalTask("mine", name, folder)
        dev, test = task.items("dev"), task.items("test")
        assert (len(dev), len(test)) == counts
        questions = [item["doc"]["question"] for item in (*dev, *test)]
        assert len(set(questions)) == len(questions)
        if len(splits) == 1:
            other = LMEvalTask("mine", name, folder, seed=1).items("dev")
            assert [i["doc"] for i in other] != [i["doc"] for i in dev]
        limited = LMEvalTask("mine", name, folder, dev_limit=3)
        assert limited.items("dev") == dev[:3] and limited.items("test") == test


def test_no_dev_document_is_among_its_own_examples(tmp_path: Path) -> None:
    """Examples come from the training split, which is dev here; a draw of 6 of 8 would hit."""
    folder = tasks_folder(tmp_path / "mine", CHOICE, "shown", {"train": 8, "test": 12}, shots=6)
    task = LMEvalTask("mine", "shown", folder)
    for item in task.items("dev"):
        assert item["prompt"].count(item["doc"]["question"]) == 1
        assert item["prompt"].count("which of the answers") == 7
    fewer = LMEvalTask("mine", "shown", folder, num_fewshot=1).items("dev")[0]
    assert fewer["prompt"].count("which of the answers") == 2


def test_models_that_know_and_that_do_not(tmp_path: Path) -> None:
    folder = tasks_folder(tmp_path / "mine", CHOICE, "letters")
    tasks_folder(tmp_path / "mine", GENERATE, "words", first=1000)
    both = lm_eval("both", ["letters", "words"], include_path=folder)
    assert isinstance(both, Mixture) and both.votes is False
    for task in (LMEvalTask("mine", "letters", folder), both):
        again = pickle.loads(pickle.dumps(task))
        for items in (task.items("dev"), again.items("test")):
            right, wrong = (played(again, items, m(items)) for m in (Knowing, Mistaken))
            assert task.utility(right) == 1.0 and task.utility(wrong) < 1.0
            graded = [task.grade(i, s.answer) for i, s in zip(items, right, strict=True)]
            assert graded == [score.value for score in right]
    letters = LMEvalTask("mine", "letters", folder)
    nothing = [Completion("", (float("nan"),) * 4)]
    scores = played(letters, letters.items("dev")[:1], Saying(nothing))
    assert scores[0].value == 0.0 and scores[0].answer is None
    with pytest.raises(UserError, match="log probabilities"):
        played(letters, letters.items("dev"), Unscored())


def test_a_lost_document_weighs_no_more_than_the_worst(tmp_path: Path) -> None:
    whole = tasks_folder(tmp_path / "mine", FORCED, "whole", kind="loglikelihood_rolling", text="")
    task = LMEvalTask("mine", "whole", whole)
    item = task.items("dev")[0]
    assert played(task, [item], Saying([Completion("", (float("nan"),))]))[0].value == -8.0
    with pytest.raises(UserError, match="combine=harmonic: whole can be negative"):
        lm_eval("both", ["whole"] * 2, "harmonic", include_path=whole).items("dev")


def test_gold_answers(tmp_path: Path, base: Path, pool: Path) -> None:
    """What a gradient descends is what the metric reads."""
    folder = tasks_folder(tmp_path / "mine", CHOICE, "letters", shots=1)
    tasks_folder(tmp_path / "mine", GENERATE, "words")
    tasks_folder(tmp_path / "mine", FORCED, "said", kind="loglikelihood", text="no ")
    letters, normed = (LMEvalTask("l", "letters", folder, metric=m) for m in ("acc", "acc_norm"))
    engine, experts = HFEngine(plan="stacked"), Pool(pool).open()
    engine.open(BaseModel(str(base)), experts, "cpu")
    items = letters.items("dev")[:3]
    (said,) = engine.generate(np.eye(2)[:1], [next(letters.run(items))])
    for task in (letters, normed):
        assert task.gold_error is None and not task.black_box
        for item, one, completion in zip(items, task.gold_examples(items), said, strict=True):
            doc = item["doc"]
            assert [text.strip() for text in one.choices] == doc["choices"]
            assert one.gold == doc["label"] and one.prompt == item["context"].rstrip()
            nats = np.array(completion.logprobs)
            if task is normed:
                assert one.units == tuple(map(len, doc["choices"]))
                nats = nats / one.units
            wanted = np.log(np.exp(nats).sum()) - nats[one.gold]
            found = engine.compute_gradient(np.eye(2)[0], [one]).loss
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    words = LMEvalTask("w", "words", folder)
    (text,) = words.gold_examples(words.items("dev")[:1])
    assert text.choices == (f" {words.items('dev')[0]['answer']}",) and text.final
    said = LMEvalTask("s", "said", folder)
    (text,) = said.gold_examples(said.items("dev")[:1])
    assert (text.prompt, text.choices[0].strip()) == ("no", said.items("dev")[0]["answer"])
    both = lm_eval("both", ["letters", "words"], include_path=folder)
    assert pickle.loads(pickle.dumps(both)).gold_error is None


def test_tasks_without_gold_answers_are_named(tmp_path: Path) -> None:
    folder = tasks_folder(tmp_path / "mine", FORCED, "whole", kind="loglikelihood_rolling", text="")
    tasks_folder(tmp_path / "mine", CHOICE, "letters")
    file = tmp_path / "mine" / "letters_validation.jsonl"
    file.write_text(file.read_text().replace('"label": 1', '"label": 9'))
    for name, words in {
        "whole": "mine has no gold answers: whole is of the output type loglikelihood_rolling",
        "letters": "the target of document letters:1 is blank, or none of its choices",
    }.items():
        assert words in str(LMEvalTask("mine", name, folder).gold_error)


class Saying(Model):
    """Gives these completions."""

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions

    def generate(self, requests: Any) -> list[Completion]:
        return self.completions


def test_texts_end_at_a_stop(tmp_path: Path) -> None:
    folder = tasks_folder(tmp_path / "mine", GENERATE, "words")
    task = LMEvalTask("mine", "words", folder)
    (item, *_) = task.items("dev")
    (request,) = next(task.run([item]))
    assert request.max_new_tokens == 12 and request.stop_check is not None
    assert [request.stop_check(text) for text in ("", "out B", "the")] == [False, True, True]
    assert cut_at_stops("one two\n\nthree", ["\n\n", "two", ""]) == "one "
    silent = played(task, [item], Silent())[0]
    assert silent.value == 0.0 and silent.answer is None
    item = next(i for i in task.items("test") if i["answer"] == "a")
    for text, value in ((" a", 1.0), ("aB", 1.0), ("ea", 0.0), ("b", 0.0)):
        assert played(task, [item], Saying([Completion(text)]))[0].value == value


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tasks_folder(tmp_path / "mine", CHOICE, "letters")
    for task, message in (
        (LMEvalTask("mine", "letters", folder, metric="mcc"), r"metric=mcc.*acc, acc_norm"),
        (LMEvalTask("mine", "letters", folder, metric="acc,strict"), "unknown filter"),
        (LMEvalTask("mine", "letters", str(tmp_path / "nowhere")), "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            task.items("dev")
    (tmp_path / "mine" / "letters_train.jsonl").unlink()
    with pytest.raises(UserError, match=r"task.tasks=letters: lm-eval cannot load"):
        LMEvalTask("mine", "letters", folder).items("dev")
    for wrong in ({"tasks": []}, {"tasks": "arc_easy"}, {"num_fewshot": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            lm_eval(**wrong)  # type: ignore[arg-type]
    monkeypatch.setattr("swarm.tasks.lm_eval_harness.find_spec", lambda name: None)
    task = LMEvalTask("mine", "letters", folder)
    for ask in (task.check, lambda: task.items("dev")):
        with pytest.raises(UserError, match=r"pip install -e .*\[lm-eval\]"):
            ask()
