"""Fine-tuning on this machine: chats become a LoRA that is an expert."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from finetuning_server import chats

from swarm.compare.finetuning import FinetuningManager, LocalTrainingParams
from swarm.compare.finetuning.dataset import parse_examples, tokenize_examples
from swarm.engine.base_model import BaseModel
from swarm.errors import InvalidArgument, UserError
from swarm.models.base import Message, Request

SETTINGS: dict[str, Any] = {"epochs": 12, "batch_size": 4, "learning_rate": 0.01, "lora_rank": 4}


def wanted(base: Path, tmp_path: Path, **more: Any) -> LocalTrainingParams:
    """A short training of the tiny model."""
    file = tmp_path / "bird_names.jsonl"
    if not file.exists():
        chats(file, 6)
    given = {
        "file_name": str(file),
        "base_model": str(base),
        "expert_folder": str(tmp_path / "pool"),
    }
    return LocalTrainingParams(**(SETTINGS | given | more))


def test_only_the_assistants_words_of_weight_are_learnt(tiny_llama: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "no", "weight": 0},
        {
            "role": "user",
            "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}],
        },
        {"role": "assistant", "content": "yes", "weight": 1},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "(A)"},
    ]
    found = parse_examples(b"\n" + json.dumps({"messages": chat}).encode())
    assert [(one.line, one.answer, len(one.turns)) for one in found] == [
        (2, "yes", 4),
        (2, "(A)", 6),
    ]
    assert found[0].turns[3] == Message("user", "two")
    tokenizer = BaseModel(str(tiny_llama)).load_tokenizer(tiny_llama)
    (asked, answer), (_, last) = tokenize_examples(found, tokenizer, 512)
    assert tokenizer.decode(asked).endswith("two<eos>\n<|assistant|>\n")
    assert tokenizer.decode(answer) == "yes<eos>" and tokenizer.decode(last) == "(A)<eos>"
    # A template of which the answer is no continuation of the prompt.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}think:{% endif %}"
    )
    (asked, answer), _ = tokenize_examples(found, tokenizer, 512)
    assert tokenizer.decode(asked).endswith("two;think:") and tokenizer.decode(answer) == "yes<eos>"
    with pytest.raises(InvalidArgument, match=r"line 2: \d+ tokens exceed the .*context of 20"):
        tokenize_examples(found, tokenizer, 20)
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    with pytest.raises(InvalidArgument, match="line 1: tools cannot be trained"):
        parse_examples(json.dumps({"messages": [call]}).encode())
    image = {"role": "user", "content": [{"type": "image_url"}]}
    with pytest.raises(InvalidArgument, match="line 1: images cannot be trained"):
        parse_examples(json.dumps({"messages": [image]}).encode())


def test_a_training_makes_an_expert_that_answers_and_can_be_searched_over(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    from swarm.finetune.trainer import evaluate_loss
    from swarm.pool.pool import Pool
    from swarm.registry.local_models import LocalModels
    from swarm.registry.registry import Roster

    manager = FinetuningManager(tmp_path / "data")
    name = manager.create_job(wanted(tiny_llama, tmp_path), blocking=True)
    pool = tmp_path / "pool"
    assert name == f"local/{pool}/bird-names"
    row = manager.store.list_rows("jobs")[0]
    assert row["state"] == "succeeded" and row["step"] == row["steps"] == 18
    assert row["losses"][-1] < row["losses"][0]
    # The loss that the adapter has, as it was saved, against the base's.
    learnt = tokenize_examples(
        parse_examples((tmp_path / "bird_names.jsonl").read_bytes()),
        BaseModel(str(tiny_llama)).load_tokenizer(tiny_llama),
        512,
    )
    before = evaluate_loss(tiny.load(tiny_llama), learnt, 4)
    tuned = PeftModel.from_pretrained(tiny.load(tiny_llama), pool / "bird-names")
    after = evaluate_loss(tuned, learnt, 4)
    assert before and after and after < 0.7 * before
    tiny.expert(tiny_llama, pool / "amber", 1)
    assert Pool(pool).open(str(tiny_llama)).names == ["amber", "bird-names"]
    asked = Request((Message("user", "name bird 3"),), max_new_tokens=8, choices=())
    for roster, called in ((Roster(pool=pool), "local/bird-names"), (Roster(), name)):
        assert roster.model(called).generate([asked])[0].text
    same = LocalModels(str(tiny_llama), pool).get_model("base").generate([asked])[0].text
    assert Roster(pool=pool).model("local/bird-names").generate([asked])[0].text != same
    models = manager.get_models()
    assert models["learning_rate"][0] == 0.01 and models["lora_rank"][0] == 4
    assert models["seed"][0] == 42 and models["checkpoint_step"][0] == 18
    assert manager.get_model_list(base_model=str(tiny_llama)) == [name]
    # The same again is a second expert; nothing is overwritten.
    again = manager.create_job(wanted(tiny_llama, tmp_path, epochs=1, seed=3), blocking=True)
    assert again == f"{name}-2"
    manager.delete(again)
    assert not (pool / "bird-names-2").exists() and (pool / "bird-names").is_dir()
    manager.store.update_row("jobs", row["id"], expert="amber")
    with pytest.raises(UserError, match="is not an output of job-"):
        manager.delete(name)
    assert (pool / "amber").is_dir()


def test_what_cannot_be_trained_is_said_and_kept(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = FinetuningManager(tmp_path / "data")
    with pytest.raises(UserError, match="no such folder"):
        manager.create_job(wanted(Path("no/where/at-all"), tmp_path))
    with pytest.raises(UserError, match="targets has 'zzz', which is not a linear layer of"):
        manager.create_job(wanted(tiny_llama, tmp_path, target_modules=["zzz"]), blocking=True)
    assert list(manager.get_jobs()["state"]) == ["failed"]
    with pytest.raises(UserError, match="loss is not finite at step"):
        manager.create_job(wanted(tiny_llama, tmp_path, learning_rate=1e6), blocking=True)
    for more, words in (
        ({"epochs": "auto"}, "epochs='auto': must be an integer"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"target_modules": "q_proj"}, "must be a list"),
        ({"suffix": "../evil"}, "must contain only letters"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            wanted(tiny_llama, tmp_path, **more)
    assert not (tmp_path / "pool").exists()


def test_an_interrupted_one_goes_on_to_the_same_weights(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from swarm.finetune.trainer import Trainer

    look = Trainer._evaluate

    def stopped(self: Trainer, step: int, *more: Any) -> None:
        if step > 10:
            raise KeyboardInterrupt
        look(self, step, *more)

    manager = FinetuningManager(tmp_path / "data")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_evaluate", stopped)
        manager.create_job(wanted(tiny_llama, tmp_path), blocking=True)
    manager.update_jobs()
    assert "interrupted at step 10 of 18" in capsys.readouterr().out
    manager.create_job(wanted(tiny_llama, tmp_path), blocking=True)
    assert "resuming after step 10" in capsys.readouterr().out and len(manager.get_jobs()) == 1
    whole = FinetuningManager(tmp_path / "whole")
    whole.create_job(
        wanted(tiny_llama, tmp_path, expert_folder=str(tmp_path / "other")), blocking=True
    )
    first, second = (
        tmp_path / one / "bird-names" / "adapter_model.safetensors" for one in ("pool", "other")
    )
    assert first.read_bytes() == second.read_bytes()


def test_a_killed_training_is_shown_as_interrupted_and_resumes(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, wish = tmp_path / "data", wanted(tiny_llama, tmp_path, epochs=100)
    command = ["create", wish.file_name, "--local", "--base-model", tiny_llama, "--data-dir", data]
    command += ["--expert-folder", wish.expert_folder, "--epochs", 100, "--batch-size", 4]
    command += ["--learning-rate", 0.01, "--lora-rank", 4]
    words = [sys.executable, "-m", "swarm.compare.finetuning", *map(str, command)]
    manager = FinetuningManager(data)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while not (jobs := manager.store.list_rows("jobs")) or (jobs[0].get("step") or 0) <= 10:
            assert process.poll() is None
            time.sleep(0.02)
        manager.update_jobs()
        assert "running, step" in capsys.readouterr().out
        with pytest.raises(UserError, match=rf"in process {jobs[0]['pid']}; stop"):
            manager.cancel(jobs[0]["id"])
        os.kill(jobs[0]["pid"], signal.SIGKILL)
    manager.update_jobs()
    assert "interrupted at step" in capsys.readouterr().out
    assert manager.create_job(wish) == jobs[0]["id"]
    assert "resuming after step" in capsys.readouterr().out
    assert manager.get_model_list() == [f"local/{tmp_path}/pool/bird-names"]
    manager.store.update_row("jobs", jobs[0]["id"], state="running")
    manager.cancel(jobs[0]["id"])
    assert list(manager.get_jobs()["state"]) == ["cancelled"]
