"""Text classifiers that score: labels, softmax and sigmoid, and what is not judged."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scorer_models
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from task_items import Saying, hostile, played, write

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.scorers.classifier import ToxicityClassifier
from swarm.tasks.base import Score, unparsed_rate

CLEAN, TOXIC = "the answer is right", "the answer is a stone"
PARTS = ("toxic", "severe_toxic", "threat")


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier to which a text with the word "stone" is toxic; its two logits are 2 and -2."""
    return scorer_models.classifier(tmp_path_factory.mktemp("judges") / "two", ["neutral", "toxic"])


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multi-label classifier: "stone" is a threat, and nothing is toxic."""
    folder = tmp_path_factory.mktemp("judges") / "three"
    return scorer_models.classifier(folder, PARTS, problem_type="multi_label_classification")


@pytest.fixture
def copy(binary: Path, tmp_path: Path) -> Path:
    """A copy of the classifier that a test may change."""
    return Path(shutil.copytree(binary, tmp_path / "copy"))


def opened(folder: Path, **settings: Any) -> ToxicityClassifier:
    scorer = ToxicityClassifier(str(folder), **settings)
    scorer.check()
    scorer.open("cpu")
    return scorer


def scored(scorer: ToxicityClassifier, texts: Sequence[str]) -> list[Score]:
    return scorer.score([{"id": i} for i in range(len(texts))], texts)


def test_a_toxic_text_is_worth_less(binary: Path) -> None:
    clean, toxic = scored(opened(binary), [CLEAN, TOXIC])
    # Logits of about 2 and -2: a softmax of 1 / (1 + exp(4)).
    assert clean.value == pytest.approx(1 - 1 / (1 + math.exp(4)), abs=0.02)
    assert toxic.value == pytest.approx(1 / (1 + math.exp(4)), abs=0.02)
    for score, text in ((clean, CLEAN), (toxic, TOXIC)):
        assert score.measures["toxicity"] == pytest.approx(1 - score.value)
        assert score.text == score.answer == text


def test_outputs_of_a_multi_label_model_are_sigmoids(apart: Path) -> None:
    sigmoid = 1 / (1 + math.exp(-2))
    _, threat = scored(opened(apart, label="threat"), [CLEAN, TOXIC])
    assert threat.measures["toxicity"] == pytest.approx(sigmoid, abs=0.05)
    (by_default,) = scored(opened(apart), [TOXIC])
    assert by_default.measures["toxicity"] == pytest.approx(1 - sigmoid, abs=0.05)
    (numbered,) = scored(opened(apart, label=2), [TOXIC])
    assert numbered == threat


def test_one_output_is_a_sigmoid(tmp_path: Path) -> None:
    folder = scorer_models.classifier(tmp_path / "one", ["LABEL_0"])
    clean, toxic = scored(opened(folder, label=0), [CLEAN, TOXIC])
    assert toxic.measures["toxicity"] == pytest.approx(1 / (1 + math.exp(-2)), abs=0.05)
    assert clean.measures["toxicity"] == pytest.approx(1 / (1 + math.exp(2)), abs=0.05)


@pytest.mark.parametrize(
    ("labels", "label", "place"),
    [
        (["neutral", "toxic"], None, 1),
        (["TOXICITY", "severe_toxicity"], None, 0),
        (["Toxic", "not-toxic"], None, 0),
        (["non_toxic", "is toxic"], None, 1),
        (["a", "b"], "B", 1),
        (["a", "toxic"], 0, 0),
    ],
)
def test_which_output_means_toxic(
    labels: list[str], label: str | int | None, place: int, copy: Path
) -> None:
    scorer_models.edit(copy, id2label={str(i): name for i, name in enumerate(labels)})
    scorer = ToxicityClassifier(str(copy), label)
    scorer.check()
    assert scorer._output == place


@pytest.mark.parametrize(
    ("labels", "label", "listed"),
    [
        (["good", "bad"], None, "from 0: good, bad"),
        (["very toxic", "a bit toxic"], None, "very toxic, a bit toxic"),
        (["nontoxic", "hate"], None, "nontoxic, hate"),
        (["neutral", "toxic"], "hate", "neutral, toxic"),
        (["neutral", "toxic"], 2, "neutral, toxic"),
        (["neutral", "toxic"], -1, "neutral, toxic"),
        (None, None, "LABEL_0, LABEL_1"),
    ],
)
def test_a_label_that_is_not_clear_lists_them_all(
    labels: list[str] | None, label: str | int | None, listed: str, copy: Path
) -> None:
    named = None if labels is None else {str(i): name for i, name in enumerate(labels)}
    scorer_models.edit(copy, id2label=named)
    with pytest.raises(UserError, match=rf"task\.scorer\.label={label}.*{listed}"):
        ToxicityClassifier(str(copy), label).check()


@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_batches_give_the_same_as_one_by_one(kind: str, tmp_path: Path) -> None:
    folder = scorer_models.classifier(tmp_path / kind, ["neutral", "toxic"], kind=kind)
    texts = [CLEAN, TOXIC, f"{CLEAN} {TOXIC} " * 40, "why is it the answer", *hostile()]
    alone = opened(folder, max_tokens=1)
    single = [scored(alone, [text])[0].value for text in texts]
    for budget in (None, 60):
        together = scored(opened(folder, max_tokens=budget), texts)
        assert [score.value for score in together] == pytest.approx(single, abs=1e-4)
    assert max(single) > 0.9 and min(single) < 0.1


def test_what_is_judged_of_a_text(binary: Path) -> None:
    texts = [f"\n {CLEAN} \nstone no", f" {CLEAN}", "  stone  \n", "", "123456789", "stone 6789"]
    first, plain, *short, ten = scored(opened(binary), texts)
    assert first.value == plain.value > 0.9
    assert [(score.value, score.answer, dict(score.measures)) for score in short] == [
        (0.5, None, {})
    ] * 3
    assert ten.measures and ten.value < 0.5
    scorer = opened(binary, first_line=False, short=0.25)
    assert [score.value for score in scored(scorer, texts[2:5])] == [0.25] * 3
    assert scored(scorer, texts[:1])[0].value < 0.5


def test_texts_that_read_alike_are_judged_once(binary: Path) -> None:
    scorer, asked = opened(binary), []
    ask = scorer.measure_toxicity
    scorer.measure_toxicity = lambda texts: asked.extend(texts) or ask(texts)  # type: ignore[method-assign]
    first, second, _ = scored(scorer, [CLEAN, f" {CLEAN}\n{TOXIC}", TOXIC])
    assert asked == [CLEAN, TOXIC] and first.value == second.value


def test_a_number_that_is_none_is_unparsed(copy: Path) -> None:
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"][:] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    scores = scored(opened(copy), [CLEAN, TOXIC])
    assert unparsed_rate(scores) == 1.0 and {score.value for score in scores} == {0.5}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": ""}, "scorer.model"),
        ({"label": 1.5}, "scorer.label"),
        ({"short": 2}, "scorer.short=2: must be a number from 0 to 1"),
        ({"first_line": "yes"}, "scorer.first_line"),
        ({"device": "tpu"}, "scorer.device"),
        ({"max_tokens": 0}, "scorer.max_tokens"),
        ({"trust_remote_code": 1}, "scorer.trust_remote_code"),
    ],
)
def test_wrong_keys(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ToxicityClassifier(**{"model": "some/model", **settings})


def test_models_of_the_wrong_kind_are_refused(copy: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        ToxicityClassifier(str(tmp_path / "nowhere")).check()
    with pytest.raises(UserError, match=r"LABEL_0, LABEL_1"):
        ToxicityClassifier(str(tiny_llama)).check()
    with pytest.raises(UserError, match=r"not trained to score texts: score\.weight"):
        opened(tiny_llama, label=1)
    scorer_models.edit(copy, problem_type="regression")
    with pytest.raises(UserError, match="regression"):
        ToxicityClassifier(str(copy)).check()
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        ToxicityClassifier(str(copy)).check()


def test_the_task_with_a_classifier(binary: Path, tmp_path: Path) -> None:
    items = [{"prompt": f"once upon {n}", "id": n, "domain": "x"} for n in range(12)]
    file = write(tmp_path / "prompts.json", {"dev": items[:8], "test": items[8:]})
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        keys = [
            "task=realtoxicityprompts",
            "scorer@task.scorer=classifier",
            "name=test",
            f"task.scorer.model={binary}",
            f"task.file={file}",
        ]
        task = instantiate(compose("search", overrides=keys).task)
    task.check()
    task.open("cpu")
    dev = task.items("dev")
    request = next(task.run(dev))[0]
    assert (request.prompt, request.max_new_tokens, request.choices) == ("once upon 0", 20, ())
    clean, toxic, silent = (played(task, dev, Saying([text])) for text in (CLEAN, TOXIC, ""))
    assert task.utility(clean) > 0.9 > 0.5 == task.utility(silent) > 0.1 > task.utility(toxic)
    assert (unparsed_rate(clean), unparsed_rate(silent), task.highest, task.votes) == (
        0.0,
        1.0,
        1.0,
        False,
    )
