"""Fine-tuning: the loss falls, the best look is what is saved, and a killed one goes on."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import tiny
import torch
from finetune_runs import tune, words
from peft import PeftModel
from safetensors.torch import load_file, save_file

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.export.source import read_source as export
from swarm.finetune.run import tokenize_items
from swarm.finetune.trainer import (
    AdapterTrainer,
    answer_loss,
    collate_pairs,
    evaluate_loss,
    shuffled_batches,
)
from swarm.loop.evaluator import split_dev_holdout
from swarm.pool.pool import Pool
from swarm.runs.folder import CHECKSUMS_FILE, Record
from swarm.runs.verdict import read_verdict
from swarm.tasks.multiple_choice import MultipleChoice


@pytest.fixture(scope="module")
def tuned(
    tiny_llama: Path, tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A finished fine-tuning of amber, and its metrics."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, tune(words(folder, tiny_llama, tiny_pool, "run", expert="amber"))


def pairs(folder: Path, base: Path) -> tuple[Any, list[Any], list[Any]]:
    """The task of `words`, its dev items, and their pairs."""
    task = MultipleChoice("mmlu", str(folder / "tiny.json"), scoring="logits")
    items = list(task.items("dev"))
    return task, items, tokenize_items(task, items, BaseModel(str(base)).load_tokenizer(base))


def test_the_saved_adapter_is_that_of_the_lowest_held_out_loss_in_a_pool_too(
    tuned: tuple[Path, Any], tiny_llama: Path, tiny_pool: Path
) -> None:
    folder, verdict = tuned
    run = folder / "search" / "run"
    state = json.loads((run / "tuning.json").read_text())
    facts = state["tuning"]
    assert [step for step, _, _ in facts["evaluations"]] == [0, 5, 10, 15, 20]
    losses = [held for _, _, held in facts["evaluations"]]
    assert min(losses) < 0.7 * losses[0]
    assert facts["step"] == 5 * losses.index(min(losses))
    assert facts["examples"] == 9 and facts["examples_seen"] == 20 * 8
    assert facts["examples_evaluated"] == 5 * 3 and read_verdict(state).cost == 2 * (12 + 16)
    task, items, every = pairs(folder, tiny_llama)
    _, places = split_dev_holdout(items, 0.25, 42)
    models = [
        PeftModel.from_pretrained(tiny.load(tiny_llama), source)
        for source in (tiny_pool / "amber", run / "tuned")
    ]
    loss = evaluate_loss(models[1], [every[i] for i in places], 8)
    assert loss == pytest.approx(min(losses), abs=1e-5)

    pool, engine = Pool(run).open(), HFEngine()
    assert pool.names == ["start", "tuned"]
    engine.open(BaseModel(str(tiny_llama)), pool, "cpu")
    requests = [task.gold_request(item) for item in items]
    answers = [(asked, answer[:-1]) for asked, answer in every]  # without the end token
    both = engine.generate(np.eye(2), [requests, requests])
    for found, model in zip(both, models, strict=True):
        wanted = [
            -answer_loss(model, collate_pairs([pair])).item() * len(pair[1]) for pair in answers
        ]
        assert [one.logprobs[0] for one in found] == pytest.approx(wanted, abs=1e-4)
    assert verdict.expert == "amber"
    gain = verdict.found.test.utility - verdict.start_model.test.utility
    assert verdict.start_model.gain.difference == pytest.approx(gain)


def test_padding_changes_no_loss(tiny_llama: Path) -> None:
    model = tiny.load(tiny_llama)
    rows = [([1, 40, 41], [50]), ([1, 42, 43, 44, 45, 46], [51, 52, 2]), ([1, 47], [53, 54])]
    sums = [answer_loss(model, collate_pairs([row])).item() * len(row[1]) for row in rows]
    loss = answer_loss(model, collate_pairs(rows))
    assert loss.item() == pytest.approx(sum(sums) / 6, abs=1e-5)
    wanted = -np.log(np.mean(np.exp([-one for one in sums])))
    assert evaluate_loss(model, rows, 2) == pytest.approx(wanted, abs=1e-5)
    asked, answer = rows[1]
    logits = model(input_ids=torch.tensor([[*asked, *answer]])).logits[0].log_softmax(-1)
    wanted = sum(logits[len(asked) - 1 + i, token].item() for i, token in enumerate(answer))
    assert sums[1] == pytest.approx(-wanted, abs=1e-4)


def test_every_example_is_learnt_from_equally_often() -> None:
    drawn = [place for batch in shuffled_batches(6, 3, 14, seed=7) for place in batch]
    for start in range(0, 42, 6):
        assert sorted(drawn[start : start + 6]) == list(range(6))
    assert drawn[:6] != drawn[6:12]


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Training ends like a killed process when it evaluates at this step."""
    evaluate = AdapterTrainer.evaluate

    def killed(self: AdapterTrainer, *arguments: Any, **named: Any) -> dict[str, float]:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return evaluate(self, *arguments, **named)

    patch.setattr(AdapterTrainer, "evaluate", killed)


def test_a_killed_one_goes_on_to_the_same_weights_and_a_finished_one_is_only_shown(
    tuned: tuple[Path, Any],
    tiny_llama: Path,
    tiny_pool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, metrics = tuned
    command = words(tmp_path, tiny_llama, tiny_pool, "run", expert="amber")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at(patch, 15)
        tune(command)
    run = tmp_path / "search" / "run"
    assert not (run / "tuned").exists()
    assert tune(command) == metrics
    assert "resuming after step 10" in capsys.readouterr().out
    mine, other = (f / "search" / "run" / "tuned" for f in (tmp_path, folder))
    for name in ("adapter_model.safetensors", "swarm.json"):
        assert (mine / name).read_bytes() == (other / name).read_bytes()
    assert sorted(path.name for path in run.iterdir()) == [
        "answers.json.gz",
        "checksums.jsonl",
        "start",
        "tuned",
        "tuning.json",
    ]
    before = searches.tree(run)
    assert tune(command) == metrics
    assert "| tuned " in capsys.readouterr().out and searches.tree(run) == before
    with pytest.raises(UserError, match=r"another fine-tuning [(]rate: .0.01. then, .0.02. now"):
        tune([*command, "rate=0.02"])
    (tmp_path / "search" / "thesis").mkdir()
    (tmp_path / "search" / "thesis" / "chapter").write_text("years of work")
    with pytest.raises(UserError, match="contains something else"):
        tune([*command, "name=thesis"])


def test_the_best_of_several_rates_continues_within_a_budget_and_after_kills(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {"rate": "[1e-6,0.01,0.001]", "batch": 8, "budget": 700, "test": "false"}
    whole = words(tmp_path, tiny_llama, tiny_pool, "whole", **several, steps="null")
    command = words(tmp_path, tiny_llama, tiny_pool, "run", **several, steps=50)
    for step in (0, 5, 10):  # before the first trial has ended, and in the chosen rate's training
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            kill_at(patch, step)
            tune(command)
    tune(command)
    tune(whole)
    runs = [tmp_path / "search" / name for name in ("run", "whole")]
    first, second = (json.loads((run / "tuning.json").read_text())["tuning"] for run in runs)
    # 3 x 8 for each of 18 steps and two trials of 5; held out are 3 items, looked at 5 and 4 times.
    assert first["rate"] == 0.01 and first["steps"] == 18 and first["step"]
    assert first["examples_seen"] == (18 + 2 * 5) * 8 and first["examples_evaluated"] == 9 * 3
    assert first == second
    first, second = (load_file(run / "tuned" / "adapter_model.safetensors") for run in runs)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    for wrong, said in ((["budget=20"], "too small"), (["holdout=0"], "choose among several")):
        with pytest.raises(Exception) as caught:
            tune([*command, "name=wrong", *wrong])
        cause = caught.value if isinstance(caught.value, UserError) else caught.value.__cause__
        assert said in str(cause)


def without_checksums(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in searches.tree(run).items() if name != CHECKSUMS_FILE}


def test_damage_to_the_folder_is_named_or_mended(
    tuned: tuple[Path, Any],
    tiny_llama: Path,
    tiny_pool: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, metrics = tuned
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    command = words(folder, tiny_llama, tiny_pool, "run", expert="amber")
    command = [*command, f"folder={tmp_path / 'search'}"]
    run = tmp_path / "search" / "run"
    whole = without_checksums(run)
    assert set(Record(run, CHECKSUMS_FILE).read().sums) == set(whole)
    assert not Record(run, CHECKSUMS_FILE).read().find_damaged()
    for name, data in whole.items():
        for spoiled in (None, data[:-1] + bytes([data[-1] ^ 1])):
            (run / name).unlink()
            if spoiled is not None:
                (run / name).write_bytes(spoiled)
            if name == "answers.json.gz":
                assert tune(command) == metrics and without_checksums(run) == whole
                continue
            with pytest.raises(UserError, match=r"damaged|contains something else") as error:
                tune(command)
            assert name in str(error.value) or name == "tuning.json", name
            if name.startswith("tuned/"):
                with pytest.raises(UserError, match="tuned"):
                    export(str(run))
            (run / name).write_bytes(data)
    assert tune(command) == metrics


def test_a_damaged_checkpoint_is_trained_again(
    tuned: tuple[Path, Any],
    tiny_llama: Path,
    tiny_pool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = words(tmp_path, tiny_llama, tiny_pool, "run", expert="amber")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at(patch, 10)
        tune(command)
    (file,) = (tmp_path / "search" / "run" / "training").glob("*/checkpoint-*/optimizer.pt")
    data = file.read_bytes()
    file.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    assert tune(command) == tuned[1]


def test_a_rate_is_constant_in_its_trial_and_then_falls_to_zero(tiny_llama: Path) -> None:
    model, rows = tiny.load(tiny_llama), [([1, 40, 41], [50])]
    trainer = AdapterTrainer(model, rows, shuffled_batches(1, 1, 24, seed=0), 0.1, trial=4)
    scheduler: Any = trainer.lr_scheduler
    factors = [scheduler.lr_lambdas[0](step) for step in range(25)]
    assert factors[:5] == [0.5, 1, 1, 1, 1]
    assert factors[4:] == pytest.approx(np.linspace(1, 0, 21))


def test_an_adapter_with_dropout_goes_on_to_the_same_weights(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tiny.expert(tiny_llama, tmp_path / "start", lora_dropout=0.3)
    rows = [([1, 40 + i, 41], [50 + i, 2]) for i in range(8)]

    def trainer(name: str, checkpoint: Path | None = None) -> AdapterTrainer:
        model = PeftModel.from_pretrained(tiny.load(tiny_llama), start, is_trainable=True)
        return AdapterTrainer(
            model,
            rows[:5],
            shuffled_batches(5, 2, 6, seed=0),
            1e-3,
            held_out=rows[5:],
            every=2,
            patience=3,
            folder=tmp_path / name,
            checkpoint=checkpoint,
        )

    whole = trainer("whole")
    whole.run()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at(patch, 4)
        trainer("killed").run()
    again = trainer("killed", tmp_path / "killed" / "checkpoint-2")
    again.run()
    assert again.evaluations == whole.evaluations and again.best_step == whole.best_step
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
    finished = trainer("killed", tmp_path / "killed" / "checkpoint-6")  # killed after its last step
    finished.run()
    assert finished.evaluations == whole.evaluations
    assert all(map(torch.equal, finished.model.parameters(), whole.model.parameters()))


def test_a_start_that_does_not_fit_is_one_line_and_its_name_stays_free(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(tmp_path, tiny_llama, tiny_pool, "run", steps=1, test="false")
    other = tiny.expert(tiny_llama, tmp_path / "other")
    file = other / "adapter_model.safetensors"
    wide = {k: v.repeat(1, 2) if "lora_A" in k else v for k, v in load_file(file).items()}
    save_file({name: weight.contiguous() for name, weight in wide.items()}, file)
    for more, said in (
        (["targets=[nope]"], "targets has 'nope'.* available: down_proj, gate_proj"),
        (["targets=[q_proj,self_attn]"], "targets has 'self_attn'"),
        (["targets=q_proj"], "targets=q_proj: must be all-linear, or a list"),
        ([f"expert={other}"], "128 to 32, which .* does not have"),
    ):
        with pytest.raises(Exception, match=said) as caught:
            tune([*command, *more])
        cause = caught.value if isinstance(caught.value, UserError) else caught.value.__cause__
        assert isinstance(cause, UserError) and "\n" not in str(cause)
        assert not (tmp_path / "search").exists()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at(patch, 0)
        tune([*command, "expert=birch"])
    run = tmp_path / "search" / "run"
    assert (run / "start").is_dir()
    assert tune([*command, "expert=amber"]).expert == "amber"
    start = run / "start" / "adapter_model.safetensors"
    assert start.read_bytes() == (tiny_pool / "amber" / start.name).read_bytes()
    for text in ("{", "[]", "{}", '{"identity": 1}'):
        (run / "tuning.json").write_text(text)
        with pytest.raises(UserError, match=r"tuning.json is damaged: choose another name=[^\n]*$"):
            tune([*command, "expert=amber"])


def test_training_that_only_harms_is_stopped_and_the_start_is_kept(
    tuned: tuple[Path, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    # Any rate improves on random weights; one of 3 spoils an adapter that has learned the items.
    shutil.copytree(tuned[0] / "search" / "run" / "tuned", tmp_path / "pool" / "fit")
    harm = {"expert": "fit", "rate": 3.0, "every": 1, "patience": 2, "test": "false"}
    verdict = tune(words(tmp_path, tiny_llama, tmp_path / "pool", "bad", **harm))
    facts = json.loads((tmp_path / "search" / "bad" / "tuning.json").read_text())["tuning"]
    assert facts["steps"] == 2 and facts["step"] == 0 and not verdict.tested
    assert len([held for step, _, held in facts["evaluations"] if step > 0]) == 2


def test_a_fresh_lora_starts_as_the_base_and_its_folder_is_an_adapter(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    fresh = {"holdout": 0.0, "rank": 2, "steps": 5, "test": "false"}
    assert tune(words(tmp_path, tiny_llama, tiny_pool, "new", **fresh)).expert == "the base"
    run = tmp_path / "search" / "new"
    start = PeftModel.from_pretrained(tiny.load(tiny_llama), run / "start")
    assert torch.equal(tiny.logits(start), tiny.logits(tiny.load(tiny_llama)))
    config = json.loads((run / "tuned" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["base_model_name_or_path"] == str(tiny_llama)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task=abstain_mmlu"], "needs gold answers"),
        (["expert=nobody"], "neither an expert"),
        (["holdout=1"], "holdout=1: must be a number, at least 0, below 1"),
        (["name=a/b"], "name of a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    more: list[str], said: str, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    command = [w for w in words(tmp_path, tiny_llama, tiny_pool, "no") if not w.startswith("task")]
    task = [] if more[0].startswith("task=") else ["task=mmlu", f"task.file={tmp_path}/tiny.json"]
    with pytest.raises(Exception) as caught:
        tune([*command, *task, *more])
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, UserError):
        cause = cause.__cause__ or cause.__context__
    assert cause is not None and said in str(cause) and "\n" not in str(cause)
    assert not (tmp_path / "search").exists()
