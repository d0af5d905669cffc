"""Scorers with a model or an API: reward models, classifiers of toxicity, the Perspective API."""

import math
import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import scorer_models
import torch
from endpoints import Asked, Reply, endpoint, in_turn
from judge_endpoints import felt
from safetensors.torch import load_file, save_file
from task_items import hostile

from swarm.errors import UserError
from swarm.loop.evaluator import calibrate_scale
from swarm.models.cache import Cache
from swarm.models.rate_limit import Limits
from swarm.scorers.classifier import ToxicityClassifier
from swarm.scorers.perspective import PerspectiveScorer
from swarm.scorers.reward_model import RewardModelScorer
from swarm.tasks.base import Score
from swarm.tasks.free_text import Scorer
from swarm.tasks.reward_model import Mode, RewardModelTask

TEXTS = ("friendly birds", "a graph of 5 nodes", "", "the answer is friendly, 3 + 4 is 12", "no")
CLEAN, TOXIC = "the answer is right", "the answer is a stone"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the reward model that a test may change."""
    return Path(shutil.copytree(scorer_models.liking_friendly(), tmp_path / "copy"))


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier to which a text with the word "stone" is toxic; its two logits are 2 and -2."""
    return scorer_models.classifier(tmp_path_factory.mktemp("judges") / "two", ["neutral", "toxic"])


def opened(scorer: Scorer) -> Any:
    scorer.check()
    scorer.open("cpu")
    return scorer


def scored(scorer: Scorer, texts: Sequence[str]) -> list[Score]:
    return scorer.score([{"prompt": "why is it", "id": i} for i in range(len(texts))], texts)


def rewards(folder: Path, texts: Sequence[str], **settings: Any) -> list[float]:
    scores = scored(opened(RewardModelScorer(str(folder), **settings)), texts)
    return [score.measures["reward"] for score in scores]


def spoil(folder: Path) -> None:
    """Make a model's outputs NaN."""
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# The scale of rewards.


class Scripted(Scorer):
    def score(self, items: Sequence[Any], texts: Sequence[str]) -> list[Score]:
        return [measured(0.0, 5) for _ in texts]


def measured(reward: float, length: float) -> Score:
    return Score(reward, "text", "text", measures={"reward": reward, "length": length})


def rewarded(mode: str = "default", **settings: Any) -> RewardModelTask:
    return RewardModelTask("small", scorer=Scripted(), mode=mode, **settings)


PAPER = {"low": -3.060546875, "high": 2.65625, "length_low": 10, "length_high": 201}

# With the paper's limits: q = (r + 3.060546875) / 5.716796875 and l = (n - 10) / 191, clipped.
Q = 4.060546875 / 5.716796875
BY_HAND = [
    (2.65625, 201, (1.0, 1.0, 0.5, -1.0)),
    (-3.060546875, 10, (0.0, 0.0, 0.5, -0.5)),
    (-0.2021484375, 10, (0.5, 0.25, 0.75, -0.75)),
    (9.0, 3, (1.0, 0.5, 1.0, -1.0)),
    (-9.0, 500, (0.0, 0.5, 0.0, -0.5)),
    (1.0, 48.2, (Q, (Q + 0.2) / 2, (Q + 0.8) / 2, -(Q + 1) / 2)),
]


@pytest.mark.parametrize(("reward", "length", "wanted"), BY_HAND)
def test_modes_by_hand(reward: float, length: float, wanted: Sequence[float]) -> None:
    for mode, value in zip(get_args(Mode), wanted, strict=True):
        task = rewarded(mode, **PAPER)
        score = task.apply_scale(measured(reward, length))
        assert score.value == pytest.approx(value, abs=1e-12)
        assert score.value <= task.highest and task.apply_scale(score) == score
        unread = Score(-math.inf, None, "text", measures={"length": 7})
        assert task.apply_scale(unread).value == task.lowest


def test_the_scale_is_measured_on_the_experts_kept_and_restored() -> None:
    task = rewarded("verbose")
    new = measured(1.0, 30)
    assert task.apply_scale(new) == new
    with pytest.raises(UserError, match=r"the scale of mode verbose.*task\.length_high"):
        task.check_scale()
    first = {
        0: {0: measured(-1.0, 20), 1: measured(3.0, 40)},
        1: {0: measured(0.0, 10), 1: Score(-math.inf, None, "", measures={"length": 90})},
        2: {0: measured(50.0, 500), 1: measured(1.0, 25)},  # a child, no expert
    }
    scale = calibrate_scale(task, first, experts=2)
    assert scale == {"low": -1.0, "high": 3.0, "length_low": 10.0, "length_high": 40.0}
    assert [first[0][0].value, first[0][1].value] == [pytest.approx((0 + 1 / 3) / 2), 1.0]
    assert [first[1][1].value, first[2][0].value, first[2][1].value] == [0.0, 1.0, 0.5]
    other = rewarded("verbose")
    other.restore_scale(scale)
    assert other.apply_scale(new) == task.apply_scale(new) != new
    # Given limits are not measured; equal ones divide nothing by zero.
    half = rewarded("concise", low=-2.0, high=2.0)
    found = half.calibrate([measured(5.0, 10), measured(6.0, 20)])
    assert found == {"low": -2.0, "high": 2.0, "length_low": 10.0, "length_high": 20.0}
    task.calibrate([measured(2.0, 10)] * 3)
    values = [task.apply_scale(measured(r, n)).value for r, n in ((2.0, 10), (2.1, 10), (1.9, 9))]
    assert values == [0.5, 0.75, 0.0]
    with pytest.raises(UserError, match=r"no finite score for any of 2 answers.*float32"):
        task.calibrate([Score(-math.inf, None)] * 2)
    for wrong in ({"mode": "kind"}, {"low": 1.0}, {"low": 2.0, "high": 2.0}, {"low": math.nan}):
        with pytest.raises(UserError, match=rf"task\.{next(iter(wrong))}="):
            rewarded(**wrong)


# Reward models.


def test_a_reward_model_likes_its_word() -> None:
    scores = scored(opened(RewardModelScorer(str(scorer_models.liking_friendly()))), TEXTS)
    assert [score.value > 0 for score in scores] == [True, False, False, True, False]
    assert [score.value for score in scores] == [score.measures["reward"] for score in scores]
    assert [score.answer for score in scores] == [text or None for text in TEXTS]
    assert [scores[2].measures["length"], scores[4].measures["length"]] == [1, 2]  # with <bos>


@pytest.mark.parametrize("padding", [0, None])
def test_batches_give_the_same_as_one_by_one(copy: Path, padding: int | None) -> None:
    """And the same as the logit of the last token of each conversation by transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    scorer_models.edit(copy, pad_token_id=padding)
    texts = [*TEXTS, *hostile(40)]
    single = rewards(copy, texts, max_tokens=1)
    for budget in (None, 200):
        assert rewards(copy, texts, max_tokens=budget) == pytest.approx(single, abs=1e-4)
    network = AutoModelForSequenceClassification.from_pretrained(copy).eval()
    network.config.pad_token_id = None
    words = AutoTokenizer.from_pretrained(copy)
    for text, reward in zip(texts, single, strict=True):
        sound = text.strip().encode("utf-8", "replace").decode()
        said = words.apply_chat_template(scorer_models.turns(sound), tokenize=False)
        ids = words(said, add_special_tokens=False, return_tensors="pt").input_ids
        ids = ids if ids.shape[1] <= 256 else torch.cat([ids[:, :1], ids[:, -255:]], dim=1)
        with torch.inference_mode():
            assert float(network(ids).logits[0, 0]) == pytest.approx(reward, abs=1e-4)


def test_a_batch_that_does_not_fit_is_halved() -> None:
    scorer, seen = RewardModelScorer("a model"), []
    scorer.budget, scorer.where = 1000, "cpu"

    def small_device(places: list[int]) -> list[int]:
        seen.append(len(places))
        if len(places) > 3:
            raise torch.OutOfMemoryError
        return places

    assert scorer.run_batches([50] * 7, small_device) == list(range(7)) and seen == [7, 3, 3, 1]
    assert scorer.run_batches([10, 150, 90], small_device) == [0, 1, 2] and seen[4:] == [1, 1, 1]

    def no_device(places: list[int]) -> list[int]:
        raise torch.OutOfMemoryError

    with pytest.raises(UserError, match=r"50 tokens .* on cpu.*task\.scorer\.device"):
        scorer.run_batches([50] * 2, no_device)


@pytest.mark.parametrize("batches", [True, False])
def test_code_that_comes_with_a_model_runs_only_if_told(
    batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = scorer_models.judge(tmp_path / f"judge_{batches}", tmp_path / "ran", batches=batches)
    scorer = RewardModelScorer(str(folder))
    for step in (scorer.check, lambda: scorer.open("cpu")):
        with pytest.raises(UserError, match=r"judging\.Judge.*scorer\.trust_remote_code=true"):
            step()
    assert not (tmp_path / "ran").exists()
    assert rewards(folder, ["one two", "three"], trust_remote_code=True) == [1.0, 0.5]
    assert (tmp_path / "ran").exists()


def test_models_of_the_wrong_kind_are_refused(
    copy: Path, binary: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    def refused(words: str, scorer: Any) -> None:
        with pytest.raises(UserError, match=words):
            opened(scorer)

    refused("no such folder", RewardModelScorer(str(tmp_path / "nowhere")))
    refused("LlamaForCausalLM.*ForSequenceClassification", RewardModelScorer(str(tiny_llama)))
    refused(r"one output, this one has 2 \(neutral, toxic\)", RewardModelScorer(str(binary)))
    refused("HF_HUB_OFFLINE", RewardModelScorer("nobody/has-this-one"))
    refused("not trained to score texts", ToxicityClassifier(str(tiny_llama), label=1))
    refused("LABEL_0, LABEL_1", ToxicityClassifier(str(tiny_llama)))
    scorer_models.edit(copy, problem_type="regression")
    refused("regression", ToxicityClassifier(str(copy), label=0))
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    refused("safetensors", RewardModelScorer(str(copy)))
    for wrong in ({"device": "gpu0"}, {"dtype": "int8"}, {"max_tokens": 0}, {"model": ""}):
        with pytest.raises(UserError, match=rf"task\.scorer\.{next(iter(wrong))}="):
            RewardModelScorer(**{"model": "x", **wrong})


# Toxicity.


def test_a_toxic_text_is_worth_less(binary: Path, tmp_path: Path) -> None:
    # Logits of about 2 and -2: a softmax of 1 / (1 + exp(4)).
    clean, toxic = scored(opened(ToxicityClassifier(str(binary))), [CLEAN, TOXIC])
    assert clean.value == pytest.approx(1 - 1 / (1 + math.exp(4)), abs=0.02)
    assert toxic.value == pytest.approx(1 / (1 + math.exp(4)), abs=0.02)
    assert clean.measures["toxicity"] == pytest.approx(1 - clean.value)
    # Several labels, or one, are sigmoids.
    parts = ("toxic", "severe_toxic", "threat")
    folder = scorer_models.classifier(
        tmp_path / "parts", parts, problem_type="multi_label_classification"
    )
    sigmoid = 1 / (1 + math.exp(-2))
    for label, value in (("threat", sigmoid), (2, sigmoid), (None, 1 - sigmoid)):
        (score,) = scored(opened(ToxicityClassifier(str(folder), label=label)), [TOXIC])
        assert score.measures["toxicity"] == pytest.approx(value, abs=0.05)


@pytest.mark.parametrize(
    ("labels", "label", "place"),
    [
        ("neutral, toxic", None, 1),
        ("TOXICITY, severe_toxicity", None, 0),
        ("non_toxic, is toxic", None, 1),
        ("a, b", "B", 1),
        ("a, toxic", 0, 0),
        ("good, bad", None, None),
        ("very toxic, a bit toxic", None, None),
        ("neutral, toxic", 2, None),
    ],
)
def test_which_output_means_toxic(
    labels: str, label: str | int | None, place: int | None, copy: Path
) -> None:
    scorer_models.edit(copy, id2label=dict(enumerate(labels.split(", "))))
    scorer = ToxicityClassifier(str(copy), label=label)
    if place is not None:
        scorer.check()
        assert scorer._output == place
        return
    with pytest.raises(UserError, match=rf"task\.scorer\.label={label}.*from 0: {labels}"):
        scorer.check()


def test_what_is_judged_of_a_text(binary: Path, copy: Path) -> None:
    texts = [f"\n {CLEAN} \nstone no", f" {CLEAN}", "  stone  \n", "", "123456789", "stone 6789"]
    first, plain, *short, ten = scored(opened(ToxicityClassifier(str(binary))), texts)
    assert first.value == plain.value > 0.9 and ten.measures and ten.value < 0.5
    assert {(score.value, score.answer) for score in short} == {(0.5, None)}
    scorer = opened(ToxicityClassifier(str(binary), first_line=False, short=0.25))
    assert [score.value for score in scored(scorer, texts[2:5])] == [0.25] * 3
    assert scored(scorer, texts[:1])[0].value < 0.5
    spoil(copy)
    spoiled = scored(opened(ToxicityClassifier(str(copy), label=0)), [CLEAN, TOXIC])
    assert [(s.value, s.answer) for s in spoiled] == [(0.5, None)] * 2
    (score,) = scored(opened(RewardModelScorer(str(copy))), ["friendly"])
    assert (score.answer, score.value, dict(score.measures)) == (None, -math.inf, {"length": 4})


# The Perspective API.

SAID = ["friendly birds fly", "a stone for you", "friendly birds fly"]


def perspective(server: Any, folder: Path | None = None, **more: Any) -> PerspectiveScorer:
    cache = Cache(str(folder / "answers.sqlite")) if folder else None
    given = {"api_key_env": None, "url": server.url, "limits": Limits(retries=1), "cache": cache}
    return PerspectiveScorer(**{**given, **more})


def refusal() -> Reply:
    kind = {"errorType": "LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE"}
    return Reply({"error": {"code": 400, "message": "is", "details": [kind]}}, 400)


def test_the_api_is_asked_once_and_a_refused_text_is_unparsed(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        return refusal() if "ice" in asked.body["comment"]["text"] else felt(asked)

    with endpoint(answer) as server:
        mine = perspective(server, tmp_path)
        texts = [*SAID, "an ice age is near", "short"]
        done = scored(mine, texts)
        assert [s.value for s in done] == pytest.approx([0.875, 0.1, 0.875, 0.5, 0.5])
        assert [s.answer for s in done] == [*SAID, None, None] and len(server.asked) == 3
        assert scored(perspective(server, tmp_path), texts) == done and len(server.asked) == 3
        scored(perspective(server, tmp_path, languages=None), SAID[:1])
    assert server.asked[-1].body == {
        "comment": {"text": SAID[0], "type": "PLAIN_TEXT"},
        "requestedAttributes": {"TOXICITY": {}},
        "doNotStore": True,
    }
    assert server.asked[0].body["languages"] == ["en"]


def test_a_wrong_key_ends_it_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = "AIzaSecret-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    error = {"message": f"not valid: {key}", "details": [{"reason": "API_KEY_INVALID"}]}
    with endpoint(in_turn(Reply({"error": error}, 400))) as server:
        mine = perspective(server, tmp_path, api_key_env="MY_KEY")
        with pytest.raises(UserError, match=r"400 .*not valid: \*\*\*") as caught:
            scored(mine, SAID[:1])
        sent = {name.lower(): value for name, value in server.asked[0].headers.items()}
        assert sent["x-goog-api-key"] == key and key not in server.asked[0].path
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in kept + pickle.dumps((mine, caught.value)) + repr(mine).encode()
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="MY_KEY is not set"):
        mine.check()


def test_wrong_settings_are_named() -> None:
    wrong: dict[str, Any] = {"short": 2, "first_line": 1, "languages": [], "url": "nowhere"}
    for key, value in wrong.items():
        with pytest.raises(UserError, match=f"{key}=" if key != "url" else "http"):
            PerspectiveScorer(**{key: value})
