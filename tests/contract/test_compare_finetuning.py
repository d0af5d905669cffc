"""Fine-tunings at a server: created, followed, listed, and without a leaked key."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from finetuning_server import Fault, Finetuner, chats, serving

from swarm.compare.finetuning import FinetuningManager, OpenaiTrainingParams
from swarm.errors import InvalidArgument, UserError

KEY, OTHER = "sk-test-one-0123456789", "sk-test-two-9876543210"
Wanted = Callable[..., OpenaiTrainingParams]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finetuner]:
    for name in [name for name in os.environ if name.startswith("OPENAI_API_KEY")]:
        monkeypatch.delenv(name)
    with serving({KEY: "alpha", OTHER: "beta"}) as made:
        yield made


@pytest.fixture
def manager(tmp_path: Path) -> FinetuningManager:
    return FinetuningManager(tmp_path / "data", timeout=10)


@pytest.fixture
def wanted(server: Finetuner, tmp_path: Path) -> Wanted:
    """Makes parameters of a job on twelve chats."""
    file = chats(tmp_path / "bird_names.jsonl")
    common = {"file_name": str(file), "base_model": "gpt-x", "base_url": server.url}
    return lambda **more: OpenaiTrainingParams(**{"api_key": KEY, **common, **more})


def test_a_job_is_created_followed_and_listed_with_its_checkpoints(
    server: Finetuner,
    manager: FinetuningManager,
    wanted: Wanted,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = chats(tmp_path / "check.jsonl", 2)
    made = manager.create_job(wanted(epochs=3, seed=7, validation_file_name=str(check)))
    assert made == manager.get_jobs()["id"][0] == "ftjob-1" and len(server.files) == 2
    hyper = {"batch_size": "auto", "learning_rate_multiplier": "auto", "n_epochs": 3}
    assert server.bodies[0] == {
        "model": "gpt-x",
        "training_file": "file-1",
        "validation_file": "file-2",
        "seed": 7,
        "suffix": "bird-names",
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyper}},
    }
    assert manager.get_model_list() == []
    for _ in range(3):
        manager.update_jobs()
    said = capsys.readouterr().out
    assert "… bird-names (gpt-x): queued" in said
    assert "running, trained in about 1 h 0" in said
    assert "✓ bird-names: succeeded → ft:gpt-x:bird-names:ftjob-1 and 2 checkpoints" in said
    assert said.endswith("running: 0, succeeded: 1, failed: 0\n")
    models, final = manager.get_models(), "ft:gpt-x:bird-names:ftjob-1"
    assert list(models["model"]) == [final, f"{final}:ckpt-step-20", f"{final}:ckpt-step-10"]
    assert list(models["epochs"]) == [3, 2, 1] and list(models["checkpoint_step"]) == [30, 20, 10]
    first = models.iloc[0]
    assert (first["batch_size"], first["learning_rate_multiplier"], first["seed"]) == (4, 1.8, 7)
    asked = len(server.asked)
    manager.update_jobs()
    assert len(server.asked) == asked, "what is over is not asked about"


def test_a_suffix_belongs_to_one_file_and_a_file_is_uploaded_where_it_is_needed(
    server: Finetuner, manager: FinetuningManager, wanted: Wanted, tmp_path: Path
) -> None:
    manager.create_job(wanted(suffix="s"))
    other = chats(tmp_path / "other.jsonl")
    with pytest.raises(InvalidArgument, match=r"suffix='s' is already used for .*names.jsonl"):
        manager.create_job(wanted(suffix="s", file_name=str(other)))
    chats(tmp_path / "bird_names.jsonl", 13)
    with pytest.raises(InvalidArgument, match="whose content has changed since"):
        manager.create_job(wanted(suffix="s"))
    chats(tmp_path / "bird_names.jsonl")
    manager.create_job(wanted(suffix="s", seed=2))
    assert server.asked.count("POST /files") == 1
    manager.create_job(wanted(api_key=OTHER))
    assert server.asked.count("POST /files") == 2, "another project does not see it"
    server.files.clear()
    manager.create_job(wanted(seed=3))
    assert server.asked.count("POST /files") == 3 and len(server.jobs) == 4


def test_several_keys_find_their_jobs_and_no_key_reaches_a_file_or_a_message(
    manager: FinetuningManager,
    wanted: Wanted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params, bad = wanted(), "sk-wrong-555555555555"
    assert KEY not in repr(params) and KEY not in repr(params.to_job())
    manager.create_job(params)
    monkeypatch.setenv("TUNER_KEY", OTHER)
    manager.create_job(wanted(api_key=OTHER))
    with pytest.raises(UserError) as refused:
        manager.create_job(wanted(api_key=bad, seed=5))
    assert bad not in str(refused.value) and "***" in str(refused.value)
    # Another process, which knows the second key by its variable alone.
    fresh = FinetuningManager(tmp_path / "data", timeout=5)
    fresh.update_jobs()
    out = capsys.readouterr().out
    assert "no key for http://127.0.0.1" in out and "OPENAI_API_KEY" in out
    assert list(fresh.get_jobs()["state"]) == ["validating_files", "queued"]
    FinetuningManager(tmp_path / "data", api_keys=[KEY]).update_jobs()
    assert fresh.get_jobs()["state"][0] == "queued"
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files) + capsys.readouterr().out.encode()
    assert not any(key.encode() in written for key in (KEY, OTHER, bad))


def test_a_refusal_is_told_with_the_servers_reason_and_a_failure_frees_the_suffix(
    server: Finetuner,
    manager: FinetuningManager,
    wanted: Wanted,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = Fault("/jobs", 429, {"error": {"message": "2 a day"}})
    for fault, told in ((limit, f"{server.url}: 2 a day$"), (Fault("/jobs"), "look there before")):
        server.faults = [fault]
        with pytest.raises(UserError, match=told):
            manager.create_job(wanted())
    assert not len(manager.get_jobs()) and server.asked.count("POST /files") == 1
    server.plans["bird-names"] = ("validating_files", "failed")
    manager.create_job(wanted())
    manager.update_jobs()
    assert "✗ bird-names: failed: the file has 3 lines too few" in capsys.readouterr().out
    # A file that was mended may have the name.
    chats(tmp_path / "bird_names.jsonl", 15)
    del server.plans["bird-names"]
    manager.create_job(wanted())
    for _ in range(3):
        manager.update_jobs()
    assert manager.get_model_list(suffix="bird-names") == ["ft:gpt-x:bird-names:ftjob-2"]


def test_a_key_of_the_environment_goes_to_no_server_it_was_not_meant_for(
    server: Finetuner,
    manager: FinetuningManager,
    wanted: Wanted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    manager.create_job(wanted())
    monkeypatch.setenv("OPENAI_API_KEY", OTHER)
    before = len(server.asked)
    FinetuningManager(tmp_path / "data", timeout=5).update_jobs()
    assert len(server.asked) == before
    # Of this name it is meant for the server, and may have been renewed.
    monkeypatch.setenv("TUNER_KEY", OTHER)
    manager.create_job(wanted(api_key=OTHER))
    FinetuningManager(tmp_path / "data", timeout=5).update_jobs()
    assert list(manager.get_jobs()["state"]) == ["validating_files", "queued"]
    assert "GET /fine_tuning/jobs/ftjob-1" not in server.asked[before:]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"api_key": "clé"}, "not a valid key"),
        ({"epochs": 0}, "epochs=0: must be an integer, at least 1, or auto"),
        ({"lr_multiplier": -1}, "lr_multiplier=-1: must be a number, above 0"),
        ({"suffix": "x" * 65}, "suffix="),
        ({"base_url": "ftp://x"}, "http"),
    ],
)
def test_a_wrong_value_is_refused_before_anything(more: dict[str, Any], words: str) -> None:
    given = {"api_key": KEY, "file_name": "f", "base_model": "m"} | more
    with pytest.raises(UserError) as refused:
        OpenaiTrainingParams(**given)
    assert words in str(refused.value) and "clé" not in str(refused.value)


def test_the_command_line_does_all_of_it(server: Finetuner, tmp_path: Path) -> None:
    chats(tmp_path / "dogs.jsonl", word="dog")

    def tune(*words: str, key: str = KEY) -> commands.Done:
        env = {"TUNER_KEY": key}
        return commands.run("swarm.compare", "finetune", *words, cwd=tmp_path, env=env)

    assert "dogs.jsonl: valid; 12 examples" in tune("validate", "dogs.jsonl").out
    line = {"role": "user", "content": "12345678"}, {"role": "assistant", "content": "1234"}
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": line}) + "\nno JSON\n")
    paid = tune("cost", "one.jsonl", "--epochs", "2", "--price", "1000000").out
    assert "about 26 tokens in 2 epochs" in paid and paid.endswith(": 26.00\n")
    assert "has no valid" in tune("cost", "/dev/null").err
    assert tune("models").out == "llmcomp_models: no models\n"
    make = ("create", "dogs.jsonl", "--base-model", "gpt-x", "--base-url", server.url)
    make += ("--api-key-env", "TUNER_KEY", "--epochs", "2")
    assert "error: the environment variable TUNER_KEY is not set" in tune(*make, key="").err
    assert tune(*make).code == 0
    for _ in range(3):
        assert tune("update").code == 0
    said = tune("models", "suffix=dogs", "epochs=2").out + tune("jobs").out
    assert "ft:gpt-x:dogs:ftjob-1" in said and "succeeded" in said and "ckpt" not in said
    assert "error: colour: no such column" in tune("models", "colour=red").err
    (tmp_path / "dogs.jsonl").write_text("{")
    assert tune("validate", "dogs.jsonl").code == 1
