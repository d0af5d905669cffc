"""Reward models: the modes by hand, both kinds of model, batches, and a search on their scale."""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scorer_models
import searches
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from task_items import played, write

from swarm._util.files import conf_folder
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors.inline import InlineExecutor
from swarm.loop.evaluator import Batching, calibrate_scale
from swarm.loop.run import Run
from swarm.models.base import Completion, Message, Model, Request
from swarm.optimizers.swarm import MemeticSwarm
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state
from swarm.runs.verdict import read_verdict
from swarm.scorers.hf_model import TextBatcher
from swarm.scorers.reward_model import RewardModelScorer
from swarm.tasks.base import HasScoreScale, RequiresSetup, Score
from swarm.tasks.reward_model import MODES, RewardModelTask
from swarm.trackers import Tracker

PAPER = {"low": -3.060546875, "high": 2.65625, "length_low": 10, "length_high": 201}
TEXTS = (
    "friendly birds",
    "a graph of 5 nodes",
    "",
    "the answer is friendly, because 3 + 4 is 12",
    "no",
)
HOSTILE = (
    "",
    " ",
    "\n\n",
    "\x00",
    "\ud800 half",
    "é" * 5,
    "日本語のテキスト",
    "🙂" * 40,
    "<eos>",
    "<pad>" * 9,
    "<|user|>\nfriendly<eos>",
    "{{ messages }}",
    "{prompt}",
    "%s %d",
    "</s>[INST]",
    "a" * 20_000,
    "\u202eback",
    "NaN",
    "-1e999",
    '{"reward": 9}',
    "<script>",
    "\t\v\f",
    "\\",
    "'; --",
)


@pytest.fixture
def model() -> Path:
    """A reward model that likes the word "friendly": about 2 with it and about -2 without."""
    return scorer_models.liking_friendly()


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the reward model that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def opened(folder: Path, **settings: Any) -> RewardModelScorer:
    scorer = RewardModelScorer(str(folder), **settings)
    scorer.check()
    scorer.open("cpu")
    return scorer


def rewards(
    scorer: RewardModelScorer, texts: Sequence[str], prompt: str = "why is it"
) -> list[float]:
    scores = scorer.score([{"prompt": prompt, "id": i} for i in range(len(texts))], texts)
    return [score.measures["reward"] for score in scores]


def measured(reward: float, length: int) -> Score:
    return Score(reward, "text", "text", measures={"reward": reward, "length": length})


class Scripted:
    """A scorer that gives the rewards and lengths that it was told."""

    highest, votes = None, False

    def __init__(self, *measures: tuple[float, int]) -> None:
        self.measures = measures

    def item_error(self, item: Any) -> None:
        return None

    def score(self, items: Sequence[Any], texts: Sequence[str]) -> list[Score]:
        return [measured(*pair) for pair, _ in zip(self.measures, texts, strict=False)]


def rewarded(mode: str = "default", **settings: Any) -> RewardModelTask:
    return RewardModelTask("small", Scripted((0.0, 5), (1.0, 7)), mode=mode, **settings)


# With the paper's limits: q = (r + 3.060546875) / 5.716796875 and l = (n - 10) / 191, cut off.
BY_HAND = [
    (2.65625, 201, {"default": 1.0, "verbose": 1.0, "concise": 0.5, "reverse": -1.0}),
    (-3.060546875, 10, {"default": 0.0, "verbose": 0.0, "concise": 0.5, "reverse": -0.5}),
    (-0.2021484375, 10, {"default": 0.5, "verbose": 0.25, "concise": 0.75, "reverse": -0.75}),
    (9.0, 3, {"default": 1.0, "verbose": 0.5, "concise": 1.0, "reverse": -1.0}),
    (-9.0, 500, {"default": 0.0, "verbose": 0.5, "concise": 0.0, "reverse": -0.5}),
    (
        1.0,
        48.2,
        {
            "default": 4.060546875 / 5.716796875,
            "verbose": (4.060546875 / 5.716796875 + 0.2) / 2,
            "concise": (4.060546875 / 5.716796875 + 0.8) / 2,
            "reverse": -(4.060546875 / 5.716796875 + 1) / 2,
        },
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("reward", "length", "wanted"), BY_HAND)
def test_modes_by_hand(mode: str, reward: float, length: float, wanted: dict[str, float]) -> None:
    task = rewarded(mode, **PAPER)
    score = task.apply_scale(measured(reward, length))  # type: ignore[arg-type]
    assert score.value == pytest.approx(wanted[mode], abs=1e-12)
    assert score.value <= task.highest and task.apply_scale(score) == score


@pytest.mark.parametrize(("mode", "lowest"), [("default", 0), ("concise", 0), ("reverse", -1)])
def test_an_answer_without_a_reward_has_the_lowest_value(mode: str, lowest: float) -> None:
    score = Score(-math.inf, None, "text", measures={"length": 7})
    assert rewarded(mode, **PAPER).apply_scale(score).value == lowest


def test_the_scale_is_measured_kept_and_restored() -> None:
    task = rewarded("verbose")
    assert isinstance(task, HasScoreScale) and isinstance(task, RequiresSetup)
    new = measured(1.0, 30)
    assert task.apply_scale(new) == new
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
    other.restore_scale(json.loads(json.dumps(scale)))
    assert other.apply_scale(new) == task.apply_scale(new) != new
    assert other.apply_scale(other.apply_scale(new)) == other.apply_scale(new)


def test_given_limits_are_not_measured() -> None:
    task = rewarded("concise", low=-2, high=2)
    assert task.calibrate([measured(5.0, 10), measured(6.0, 20)]) == {
        "low": -2.0,
        "high": 2.0,
        "length_low": 10.0,
        "length_high": 20.0,
    }
    short = rewarded("reverse", low=-2, high=2)
    assert short.apply_scale(measured(0.0, 9)).value == -0.75
    assert short.calibrate([measured(5.0, 10)]) == {"low": -2.0, "high": 2.0}
    fixed = rewarded(**PAPER)
    assert fixed.apply_scale(measured(9.0, 50)).value == 1.0
    assert fixed.calibrate([measured(5.0, 10)]) == PAPER


def test_equal_rewards_make_no_division_by_zero() -> None:
    task = rewarded("verbose")
    task.calibrate([measured(2.0, 10)] * 3)
    values = [task.apply_scale(measured(r, n)).value for r, n in ((2.0, 10), (2.1, 10), (1.9, 9))]
    assert values == [0.5, 0.75, 0.0]


def test_a_reward_model_that_gives_no_number_at_all_is_said() -> None:
    with pytest.raises(UserError, match=r"no finite score for any of 2 answers.*float32"):
        rewarded().calibrate([Score(-math.inf, None, measures={"length": 7})] * 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "kind"}, r"task\.mode.*default, verbose, concise, reverse"),
        ({"low": 1.0}, r"task\.low=1.0, task\.high=None.*null for both"),
        ({"length_high": 1}, r"task\.length_low=None, task\.length_high=1"),
        ({"low": 2, "high": 2}, r"task\.low=2: must be below task\.high=2"),
        ({"low": True, "high": 2}, "two numbers"),
        ({"low": 0.0, "high": math.nan}, "two numbers"),
    ],
)
def test_wrong_keys_of_the_task(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rewarded(**settings)


def test_the_trained_model_likes_its_word(model: Path) -> None:
    scorer = opened(model)
    scores = scorer.score([{"prompt": "why is it"}] * 5, TEXTS)
    assert [score.value > 0 for score in scores] == [True, False, False, True, False]
    assert [score.value for score in scores] == [score.measures["reward"] for score in scores]
    assert [score.text for score in scores] == list(TEXTS)
    assert [score.answer for score in scores] == [text or None for text in TEXTS]
    assert [scores[2].measures["length"], scores[4].measures["length"]] == [1, 2]  # with <bos>
    assert rewards(scorer, [" \nfriendly birds \n"]) == rewards(scorer, ["friendly birds"])


@pytest.mark.parametrize("padding", ["stated", "none", "negative", "end of text"])
def test_batches_give_the_same_as_one_by_one(copy: Path, padding: str) -> None:
    ids = {"stated": 0, "none": None, "negative": -1, "end of text": 2}
    scorer_models.edit(copy, pad_token_id=ids[padding])
    texts = [*TEXTS, *HOSTILE]
    alone = opened(copy, max_tokens=1)
    single = [rewards(alone, [text])[0] for text in texts]
    for budget in (None, 40, 200):
        assert rewards(opened(copy, max_tokens=budget), texts) == pytest.approx(single, abs=1e-4)
    if padding != "end of text":
        # Where the end of a text is taken for padding, the model reads the token before it.
        assert single == pytest.approx(by_transformers(copy, texts), abs=1e-4)


def by_transformers(folder: Path, texts: Sequence[str]) -> list[float]:
    """The logit of the last token of each conversation, the way a model card says."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    network.config.pad_token_id = None
    words = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        sound = text.strip().encode("utf-8", "replace").decode()
        said = words.apply_chat_template(scorer_models.turns(sound), tokenize=False)
        ids = words(said, add_special_tokens=False, return_tensors="pt").input_ids
        ids = ids if ids.shape[1] <= 256 else torch.cat([ids[:, :1], ids[:, -255:]], dim=1)
        with torch.inference_mode():
            found.append(float(network(ids).logits[0, 0]))
    return found


def test_a_batch_that_does_not_fit_is_halved() -> None:
    batches, seen = TextBatcher(1000, "a model on cpu"), []

    def small_device(places: list[int]) -> list[int]:
        seen.append(len(places))
        if len(places) > 3:
            raise torch.OutOfMemoryError
        return places

    assert batches.run([50] * 7, small_device) == list(range(7))
    assert seen == [7, 3, 3, 1]
    assert batches.run([10, 150, 90], small_device) == [0, 1, 2]
    assert seen[4:] == [1, 1, 1]

    def no_device(places: list[int]) -> list[int]:
        raise torch.OutOfMemoryError

    with pytest.raises(UserError, match=r"50 tokens .* on cpu.*task\.scorer\.device"):
        batches.run([50] * 2, no_device)


def test_without_a_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    scorer = opened(copy)
    wanted = scorer.local.encode("User: why\n\nAssistant: no")
    assert scorer._encode_pair("why", "no") == wanted
    tokens = json.loads((copy / "tokenizer_config.json").read_text())
    write(copy / "tokenizer_config.json", {**tokens, "sep_token": "<eos>"})
    scorer = opened(copy)
    row, parts = (
        scorer._encode_pair("why", "no"),
        [scorer.local.encode(t)["input_ids"] for t in ("why", "no")],
    )
    assert row["input_ids"] == [*parts[0][1:], *parts[1][1:]]  # this tokenizer adds none to pairs
    assert len(rewards(scorer, TEXTS)) == 5


def test_hostile_texts_get_a_reward(model: Path) -> None:
    scorer = opened(model, max_tokens=600)
    for prompt in ("why is it", "\ud800", "<eos>" * 300):
        found = rewards(scorer, HOSTILE, prompt)
        assert len(found) == len(HOSTILE) and all(map(math.isfinite, found))


def test_a_reward_that_is_no_number_is_unparsed(copy: Path) -> None:
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"][:] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    (score,) = opened(copy).score([{"prompt": "why"}], ["friendly"])
    assert (score.answer, score.value, dict(score.measures)) == (None, -math.inf, {"length": 4})


def test_models_of_the_wrong_kind_are_refused(
    model: Path, copy: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    def refused(words: str, folder: str | Path, **settings: Any) -> None:
        with pytest.raises(UserError, match=words):
            opened(Path(folder), **settings)

    refused("no such folder", tmp_path / "nowhere")
    refused("LlamaForCausalLM.*ForSequenceClassification", tiny_llama)
    scorer_models.edit(copy, id2label={"0": "bad", "1": "good"})
    refused(r"one output, this one has 2 \(bad, good\)", copy)
    scorer_models.edit(copy, id2label={"0": "reward"})
    weights = load_file(copy / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused("score.weight is missing", copy)
    torch.save(weights, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    refused("safetensors", copy)
    refused(r"task\.scorer\.device=gpu0", model, device="gpu0")
    refused(r"task\.scorer\.dtype", model, dtype="int8")
    if torch.cuda.device_count() < 99:
        refused("cuda:99: no such GPU", model, device="cuda:99")


def test_a_model_on_another_device_than_the_worker(model: Path) -> None:
    scorer = RewardModelScorer(str(model), device="cpu")
    scorer.open("cuda:0")
    assert scorer.local.where == "cpu" and scorer.local.network.dtype == torch.float32
    assert len(rewards(scorer, TEXTS)) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(model: Path) -> None:
    scorer = RewardModelScorer(str(model))
    scorer.open("cuda:0")
    assert scorer.local.network.dtype == torch.bfloat16
    assert rewards(scorer, TEXTS) == pytest.approx(rewards(opened(model), TEXTS), abs=0.1)


def test_a_hub_model_that_cannot_be_had_is_said_at_once() -> None:
    scorer = RewardModelScorer("nobody/has-this-one")
    for step in (scorer.check, lambda: scorer.open("cpu")):
        with pytest.raises(UserError, match=r"nobody/has-this-one .*HF_HUB_OFFLINE"):
            step()


@pytest.mark.parametrize("batches", [True, False])
def test_code_that_comes_with_a_model_runs_only_if_told(
    batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    marker = tmp_path / "ran"
    folder = scorer_models.judge(tmp_path / f"judge_{batches}", marker, batches=batches)
    with pytest.raises(UserError, match=r"judging\.Judge.*task\.scorer\.trust_remote_code=true"):
        RewardModelScorer(str(folder)).check()
    with pytest.raises(UserError, match="trust_remote_code"):
        RewardModelScorer(str(folder)).open("cpu")
    assert not marker.exists()
    scorer = opened(folder, trust_remote_code=True, max_tokens=30)
    assert marker.exists()
    assert rewards(scorer, ["one", "", "one two three", "one two"]) == [0.5, 0.0, 1.5, 1.0]
    assert rewards(scorer, ["one two three four"]) == [2.0]
    assert len(rewards(scorer, HOSTILE)) == len(HOSTILE)


def test_own_code_without_get_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = scorer_models.judge(tmp_path / "mute", tmp_path / "ran", batches=False)
    code = folder / "judging.py"
    code.write_text(code.read_text().replace("get_score", "other"))
    with pytest.raises(UserError, match="no get_score"):
        opened(folder, trust_remote_code=True)


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return compose("search", overrides=["name=test", *overrides])


@pytest.mark.parametrize("mode", MODES)
def test_the_papers_constants_come_with_its_experiment(mode: str) -> None:
    config = composed(f"task=rm_{mode}", "experiment=paper").task
    assert {key: config[key] for key in PAPER} == PAPER
    assert config.scorer.model == "internlm/internlm2-7b-reward"
    task = instantiate(config)
    assert (task.mode, task.name, task.scale) == (mode, f"rm_{mode}", PAPER)
    plain = composed(f"task=rm_{mode}", "reward.device=cuda:1").task
    assert {plain[key] for key in PAPER} == {None} and plain.scorer.device == "cuda:1"
    assert "reward" not in composed("task=nlgraph", "experiment=paper").task


class Echo(Model):
    """Says the same to everything, and keeps what it was asked."""

    def __init__(self, text: str) -> None:
        self.text, self.asked = text, list[Request]()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        return [Completion(self.text) for _ in requests]


def small_file(folder: Path, dev: int = 8, test: int = 4) -> Path:
    items = [{"prompt": f"why is it {n}, please explain", "id": n} for n in range(dev + test)]
    return write(folder / "prompts.json", {"dev": items[:dev], "test": items[dev:]})


def test_the_task_asks_in_chat_turns_and_compares(model: Path, tmp_path: Path) -> None:
    config = composed(
        "task=rm_default",
        f"task.scorer.model={model}",
        "task.low=-2",
        "task.high=2",
        f"task.file={small_file(tmp_path)}",
    ).task
    task = instantiate(config)
    task.check()
    task.open("cpu")
    items, good, bad = task.items("dev"), Echo("friendly birds"), Echo("a graph")
    likes, dislikes = (task.utility(played(task, items, echo)) for echo in (good, bad))
    assert good.asked[0] == Request((Message("user", items[0]["prompt"]),), 200)
    assert 0.0 <= dislikes < 0.1 and 0.9 < likes <= 1.0
    assert task.grade(items[0], "friendly birds") == pytest.approx(likes, abs=1e-3)


def arguments(folder: Path, base: Path, pool: Path, judge: Path, **more: Any) -> list[str]:
    """The command line of a small search with task=rm_concise."""
    file = folder / "prompts.json"
    keys = {
        "name": "run",
        "folder": folder / "search",
        "model": "local",
        "model.path": base,
        "pool.folder": pool,
        "task": "rm_concise",
        "task.file": file if file.exists() else small_file(folder),
        "task.scorer.model": judge,
        "task.max_new_tokens": 12,
        "optimizer.particles": 6,
        "optimizer.max_iterations": 4,
        "job.items": 3,
        "minutes": "null",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in keys.items()]


def test_a_search_on_a_measured_scale(
    model: Path, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    command = arguments(tmp_path, tiny_llama, tiny_pool, model, racing="exact", racing__chunk=2)
    result = searches.run(command)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "search" / "run"
    state = read_state(folder)
    scale, first = state["scale"], searches.answers(folder, 0)
    raw = [row["measures"] for i in range(4) for row in first[str(i)]]
    for name, low, high in (("reward", "low", "high"), ("length", "length_low", "length_high")):
        values = [mine[name] for mine in raw]
        assert (scale[low], scale[high]) == (min(values), max(values))
    task = rewarded("concise")
    task.restore_scale(scale)
    for number in range(len(state["rounds"])):
        for rows in searches.answers(folder, number).values():
            for row in rows:
                score = measured(row["measures"]["reward"], row["measures"]["length"])
                assert row["value"] == task.apply_scale(score).value
    assert 0 <= read_verdict(state).found.test.utility <= 1
    again = searches.run(command)
    assert (
        again.returncode == 0 and again.stdout.splitlines()[-1:] == result.stdout.splitlines()[-1:]
    )


class Letters:
    """A scorer whose reward is the share of letters in a text, without a model."""

    highest: float | None = None
    votes = False

    def item_error(self, item: Any) -> None:
        return None

    def score(self, items: Sequence[Any], texts: Sequence[str]) -> list[Score]:
        rewards = [sum(map(str.isalpha, text)) / max(1, len(text)) for text in texts]
        return [measured(r, len(text)) for r, text in zip(rewards, texts, strict=True)]


class Shy(MemeticSwarm):
    """Wants only some rows of its first ask, and some experts are not among them."""

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        super().start(experts, seed, groups)
        self.evaluate = np.arange(len(self.positions)) % 2 == 1


class Backwards(MemeticSwarm):
    """Begins with the experts in another order."""

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        super().start(experts, seed, groups)
        self.positions = self.positions[::-1]


def small_search(folder: Path, base: Path, pool: Path, optimizer: MemeticSwarm) -> Run:
    task = RewardModelTask(
        "small", Letters(), "concise", file=str(small_file(folder)), max_new_tokens=8
    )
    parts = (
        BaseModel(str(base)),
        Pool(pool),
        optimizer,
        HFEngine(),
        InlineExecutor(),
        Tracker(),
    )
    return Run("run", task, *parts, Batching(5, 4), folder=str(folder / "search"))


@pytest.mark.parametrize("optimizer", [MemeticSwarm, Shy])
def test_the_scale_is_that_of_all_experts_whatever_an_optimizer_wants(
    optimizer: type[MemeticSwarm], tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    swarm = optimizer(particles=7, active=2, soups=0, descent=None, max_iterations=3)
    run = small_search(tmp_path, tiny_llama, tiny_pool, swarm)
    metrics = run.search()
    state, first = run.record.state, searches.answers(run.record.folder, 0)
    assert {"0", "1", "2", "3"} <= set(first)
    for name, low, high in (("reward", "low", "high"), ("length", "length_low", "length_high")):
        values = [row["measures"][name] for i in range(4) for row in first[str(i)]]
        assert (state["scale"][low], state["scale"][high]) == (min(values), max(values))
        assert len(set(values)) > 1
    scored = [len(searches.answers(run.record.folder, n)) for n in range(len(state["rounds"]))]
    assert scored == [len(first), 2, 2, 2], "only the first round is another's than the optimizer's"
    assert metrics.start_model.dev.utility == max(state["rounds"][0]["utilities"][:4])


def test_an_optimizer_has_to_begin_with_the_experts(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    run = small_search(tmp_path, tiny_llama, tiny_pool, Backwards(particles=7))
    with pytest.raises(UserError, match="first positions of ask must be the 4 experts"):
        run.search()


def test_a_search_that_is_killed_keeps_its_scale(
    model: Path, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    more = {"optimizer__max_iterations": 5, "optimizer__patience": 5}
    plain = arguments(tmp_path, tiny_llama, tiny_pool, model, name="plain", **more)
    killed = arguments(tmp_path, tiny_llama, tiny_pool, model, name="killed", **more)
    folder = tmp_path / "search"
    kills = searches.run_killed(killed, folder / "killed", few=True)
    assert kills == [1, 2, 3]
    assert searches.run(plain).returncode == 0
    assert searches.differences(folder / "plain", folder / "killed") == []


def test_mistakes_are_one_line_and_leave_nothing(
    model: Path, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    judge = scorer_models.judge(tmp_path / "judge", tmp_path / "ran")
    for changes in (
        {"task__scorer__model": "nobody/has-this-one"},
        {"task__scorer__model": tiny_llama},
        {"task__low": 1},
        {"task__scorer__model": judge},
    ):
        result = searches.run(arguments(tmp_path, tiny_llama, tiny_pool, model, **changes))
        assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
        assert result.stderr.startswith("error: task.") and not (tmp_path / "search").exists()
    assert not (tmp_path / "ran").exists()


def test_an_evaluation_knows_the_mode(model: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """Without the experts of a search there is no scale, but a direction."""
    from swarm.evaluation.checkpoints import CheckpointCandidate
    from swarm.evaluation.evaluation import Evaluation

    def mean(mode: str, **limits: Any) -> float:
        task = composed(
            f"task=rm_{mode}",
            f"task.scorer.model={model}",
            f"task.file={small_file(tmp_path)}",
            "task.max_new_tokens=8",
            *(f"task.{key}={value}" for key, value in limits.items()),
        ).task
        evaluation = Evaluation(
            instantiate(task), CheckpointCandidate(BaseModel(str(tiny_llama)), []), out=None
        )
        found: float = evaluation.run()["voices"][0]["utility"]
        return found

    assert mean("reverse") == -mean("default") != 0
    with pytest.raises(UserError, match=r"the scale of mode concise.*task\.length_high"):
        mean("concise")
    limits = {"low": -3, "high": 3, "length_low": 1, "length_high": 20}
    assert 0 < mean("concise", **limits) != mean("verbose", **limits)
