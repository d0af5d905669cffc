"""Fine-tunings at a server: followed, found again after any crash, and without a leaked key."""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finetuning_server import Fault, Finetuner, chats, serving

from swarm.compare.finetuning import (
    FinetuningManager,
    LocalTrainingParams,
    OpenaiTrainingParams,
    TinkerTrainingParams,
    remote,
)
from swarm.compare.finetuning.__main__ import main
from swarm.compare.finetuning.client import ApiKeyRing
from swarm.compare.finetuning.dataset import validate_dataset
from swarm.compare.finetuning.manager import MODEL_COLUMNS, build_frame
from swarm.compare.finetuning.params import OPENAI_BASE_URL, estimate_cost
from swarm.errors import InvalidArgument, UserError
from swarm.models.http_errors import AccessDenied, BadRequest, RequestError

KEY, OTHER = "sk-test-one-0123456789", "sk-test-two-9876543210"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finetuner]:
    for name in [name for name in os.environ if name.startswith("OPENAI_API_KEY")]:
        monkeypatch.delenv(name)
    with serving({KEY: "alpha", OTHER: "beta"}) as made:
        yield made


@pytest.fixture
def manager(tmp_path: Path) -> FinetuningManager:
    return FinetuningManager(tmp_path / "data", timeout=10, poll_seconds=0.01)


def wanted(server: Finetuner, tmp_path: Path, **more: Any) -> OpenaiTrainingParams:
    """Parameters of a job on twelve chats."""
    file = tmp_path / "bird_names.jsonl"
    if not file.exists():
        chats(file)
    given = {"api_key": KEY, "file_name": str(file), "base_model": "gpt-x", "base_url": server.url}
    return OpenaiTrainingParams(**(given | more))


def finished(manager: FinetuningManager, rounds: int = 4) -> None:
    for _ in range(rounds):
        manager.update_jobs()


def test_a_job_is_created_followed_and_listed_with_its_checkpoints(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = chats(tmp_path / "check.jsonl", 2)
    params = wanted(server, tmp_path, epochs=3, seed=7, validation_file_name=str(check))
    made = manager.create_job(params)
    assert made == manager.get_jobs()["id"][0] and len(server.files) == 2
    assert server.bodies[0] == {
        "model": "gpt-x",
        "training_file": "file-1",
        "validation_file": "file-2",
        "seed": 7,
        "suffix": "bird-names",
        "metadata": {"model_swarms": made},
        "method": {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "batch_size": "auto",
                    "learning_rate_multiplier": "auto",
                    "n_epochs": 3,
                }
            },
        },
    }
    server.jobs["ftjob-1"]["method"] = json.loads(json.dumps(server.jobs["ftjob-1"]["method"]))
    assert manager.get_model_list() == []
    capsys.readouterr()
    finished(manager, 3)
    said = capsys.readouterr().out
    assert "… bird-names (gpt-x): queued" in said
    assert "running, trained at about" in said and "(1 h 02 min)" in said
    assert "last event: Step 7/30: training loss=1.5" in said
    assert "✓ bird-names: succeeded → ft:gpt-x:bird-names:ftjob-1 and 2 checkpoints" in said
    assert said.endswith("running: 0, succeeded: 1, failed: 0\n")
    models = manager.get_models()
    final = "ft:gpt-x:bird-names:ftjob-1"
    assert list(models["model"]) == [final, f"{final}:ckpt-step-20", f"{final}:ckpt-step-10"]
    assert list(models["epochs"]) == [3, 2, 1] and list(models["checkpoint_step"]) == [30, 20, 10]
    first = models.iloc[0]
    assert (first["batch_size"], first["learning_rate_multiplier"], first["seed"]) == (4, 1.8, 7)
    assert manager.get_jobs()["job"][0] == "ftjob-1"
    asked = len(server.asked)
    manager.update_jobs()
    assert len(server.asked) == asked, "what is over is not asked about"


def test_models_are_filtered_by_column_and_an_unknown_one_is_named(
    server: Finetuner, manager: FinetuningManager, tmp_path: Path
) -> None:
    columns = list(manager.get_models().columns)
    assert columns[:3] == ["model", "base_model", "file_name"] and "lora_rank" in columns
    assert manager.get_models(suffix="bird-names").empty
    assert manager.get_model_list() == [] and manager.get_jobs().empty
    assert not (tmp_path / "data").exists(), "to look makes no folder"
    cats = chats(tmp_path / "cats.jsonl", word="cat")
    manager.create_job(wanted(server, tmp_path))
    manager.create_job(wanted(server, tmp_path, file_name=str(cats), base_model="gpt-y"))
    finished(manager)
    assert manager.get_model_list(suffix="cats") == ["ft:gpt-y:cats:ftjob-2"]
    assert manager.get_model_list(base_model="gpt-x") == ["ft:gpt-x:bird-names:ftjob-1"]
    md5 = manager.get_models(file_name=str(cats))["file_md5"][0]
    assert manager.get_model_list(file_md5=md5, epochs=1) == ["ft:gpt-y:cats:ftjob-2"]
    assert manager.get_models(suffix="cats", base_model="gpt-x").empty
    with pytest.raises(
        InvalidArgument, match="flavour: no such column; there are model, base_model"
    ):
        manager.get_models(flavour="sweet")


def test_a_suffix_belongs_to_one_file_and_one_content(
    server: Finetuner, manager: FinetuningManager, tmp_path: Path
) -> None:
    manager.create_job(wanted(server, tmp_path, suffix="s"))
    other = chats(tmp_path / "other.jsonl")
    with pytest.raises(
        ValueError, match=r"suffix='s' is already used for .*bird_names.jsonl .*give"
    ):
        manager.create_job(wanted(server, tmp_path, suffix="s", file_name=str(other)))
    chats(tmp_path / "bird_names.jsonl", 13)
    with pytest.raises(InvalidArgument, match="whose content has changed since"):
        manager.create_job(wanted(server, tmp_path, suffix="s"))
    with pytest.raises(InvalidArgument, match="suffix='s'"):
        manager.create_job(LocalTrainingParams(file_name=str(other), suffix="s"))
    chats(tmp_path / "bird_names.jsonl")
    assert manager.create_job(wanted(server, tmp_path, suffix="s", seed=2))
    assert len(server.jobs) == 2


def test_a_file_is_uploaded_again_only_where_it_is_needed(
    server: Finetuner, manager: FinetuningManager, tmp_path: Path
) -> None:
    manager.create_job(wanted(server, tmp_path))
    manager.create_job(wanted(server, tmp_path, seed=2))
    assert server.count("POST /files") == 1
    # Another project does not see it.
    manager.create_job(wanted(server, tmp_path, api_key=OTHER))
    assert server.count("POST /files") == 2
    server.files.clear()
    manager.create_job(wanted(server, tmp_path, seed=3))
    assert server.count("POST /files") == 3
    assert set(manager.get_models().columns) and len(server.jobs) == 4


def test_several_keys_find_their_jobs_and_no_key_reaches_a_file_or_a_message(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = wanted(server, tmp_path)
    assert KEY not in repr(params) and KEY not in repr(params.to_row())
    manager.create_job(params)
    monkeypatch.setenv("OPENAI_API_KEY_BETA", OTHER)
    manager.create_job(wanted(server, tmp_path, api_key=OTHER))
    bad = "sk-wrong-555555555555"
    with pytest.raises(AccessDenied) as refused:
        manager.create_job(wanted(server, tmp_path, api_key=bad, seed=5))
    assert bad not in str(refused.value) and "***" in str(refused.value)
    # Another process, which knows the second key by its variable alone.
    fresh = FinetuningManager(tmp_path / "data", timeout=5)
    capsys.readouterr()
    finished(fresh, 1)
    out = capsys.readouterr().out
    assert "no key for http://127.0.0.1" in out and "OPENAI_API_KEY" in out
    assert list(fresh.get_jobs()["state"]) == ["validating_files", "queued", "failed"]
    # The first one by its hash; under the same name there may be a newer key.
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    finished(fresh, 1)
    assert fresh.get_jobs()["state"][0] == "queued"
    assert list(fresh.get_jobs(job="ftjob-1")["job"]) == ["ftjob-1"]
    assert "sk-" not in capsys.readouterr().out
    for path in (tmp_path / "data").rglob("*"):
        text = path.read_bytes() if path.is_file() else b""
        assert not any(key.encode() in text for key in (KEY, OTHER, bad)), path


def test_a_key_of_the_environment_goes_to_no_server_it_was_not_meant_for(
    server: Finetuner, manager: FinetuningManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    manager.create_job(wanted(server, tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", OTHER)
    before = len(server.asked)
    FinetuningManager(tmp_path / "data", timeout=5).update_jobs()
    assert len(server.asked) == before
    # Of this name it is meant for the server, and may have been renewed.
    row = manager.store.list_rows("jobs")[0]
    manager.store.update_row("jobs", row["id"], key_variable="TUNER_KEY")
    monkeypatch.setenv("TUNER_KEY", KEY)
    manager.store.update_row("jobs", row["id"], key_print="another")
    FinetuningManager(tmp_path / "data", timeout=5).update_jobs()
    assert len(server.asked) > before
    # At OpenAI's any key that is known may look, but only the one that was chosen may pay.
    keys = ApiKeyRing(manager.store.load_salt(), [KEY])
    job = {"base_url": OPENAI_BASE_URL, "key_print": keys.hash_key("sk-gone"), "key_variable": None}
    assert {key.secret for key in keys.access_keys(job)} == {KEY, OTHER} and keys.creation_keys(
        job
    ) == []
    assert KEY not in repr(keys.access_keys(job))


CREATE = """
import sys
from swarm.compare.finetuning import FinetuningManager, OpenaiTrainingParams
FinetuningManager(sys.argv[1], timeout=10).create_job(OpenaiTrainingParams(
    api_key=sys.argv[2], file_name=sys.argv[3], base_model="gpt-x", base_url=sys.argv[4]))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("path, after", [("/files", True), ("/jobs", False), ("/jobs", True)])
def test_a_killed_creation_is_gone_on_with_and_never_done_twice(
    server: Finetuner, tmp_path: Path, path: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = wanted(server, tmp_path)
    command = [sys.executable, "-c", CREATE, tmp_path / "data", KEY, params.file_name, server.url]
    started: list[subprocess.Popen[bytes]] = []

    def kill() -> None:
        started[0].kill()
        started[0].wait()

    server.faults = [Fault("POST", path, after=after, act=kill)]
    started.append(subprocess.Popen([str(part) for part in command]))
    assert started[0].wait(120) == -signal.SIGKILL
    manager = FinetuningManager(tmp_path / "data", api_keys=[KEY], timeout=10)
    assert list(manager.get_jobs()["state"]) == ["creating"]
    monkeypatch.setattr(remote, "SETTLE_S", 0.0)
    manager.update_jobs()
    assert len(server.jobs) == 1 and server.count("POST /fine_tuning/jobs") == 2 - (
        after or path == "/files"
    )
    assert list(manager.get_jobs()["job"]) == ["ftjob-1"]
    # The same script once more is a job more, and this one is whole.
    assert manager.create_job(params)
    finished(manager)
    assert manager.get_model_list() == [f"ft:gpt-x:bird-names:ftjob-{n}" for n in (1, 2)]


def test_a_lost_answer_is_looked_for_and_not_asked_again_too_soon(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(3):
        manager.create_job(wanted(server, tmp_path, seed=number))
    server.faults = [Fault("POST", "/fine_tuning/jobs", after=True)]
    manager.create_job(wanted(server, tmp_path, seed=4))
    assert len(server.jobs) == 4 and list(manager.get_jobs()["job"])[3] == "ftjob-4"
    server.faults = [Fault("POST", "/fine_tuning/jobs")]
    with pytest.raises(RequestError, match="the connection failed"):
        manager.create_job(wanted(server, tmp_path, seed=5))
    with pytest.raises(UserError, match="may still create the job whose response was lost"):
        manager.create_job(wanted(server, tmp_path, seed=5))
    assert "goes on with jobs-" not in capsys.readouterr().err and len(server.jobs) == 4
    monkeypatch.setattr(remote, "SETTLE_S", 0.0)
    manager.create_job(wanted(server, tmp_path, seed=5))
    assert len(server.jobs) == 5 and len(manager.get_jobs()) == 5
    # A server that keeps no metadata: by the file and the time.
    server.faults = [
        Fault("POST", "/fine_tuning/jobs", 400, {"error": {"message": "metadata: unknown"}}),
        Fault("POST", "/fine_tuning/jobs", after=True),
    ]
    manager.create_job(wanted(server, tmp_path, seed=6))
    assert "metadata" not in server.bodies[-1] and list(manager.get_jobs()["job"])[5] == "ftjob-6"


def test_a_server_that_lists_no_jobs_is_not_asked_for_the_same_one_twice(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "SETTLE_S", 0.0)
    nothing = {"error": {"message": "no such page"}}
    server.faults = [
        Fault("POST", "/fine_tuning/jobs", after=True),
        Fault("GET", "/fine_tuning/jobs", 404, nothing, times=3),
    ]
    with pytest.raises(RequestError, match="no such page"):
        manager.create_job(wanted(server, tmp_path))
    manager.update_jobs()
    assert len(server.jobs) == 1 and list(manager.get_jobs()["state"]) == ["creating"]
    manager.cancel(manager.get_jobs()["id"][0])
    assert "check at the server whether it has the job" in capsys.readouterr().out
    assert list(manager.get_jobs()["state"]) == ["cancelled"]


def test_the_daily_limit_says_when_a_slot_is_free_and_the_job_is_sent_then(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "You have reached the maximum of 2 fine-tuning requests per day."
    limit = {"error": {"message": words, "code": "daily_rate_limit_exceeded"}}
    manager.create_job(wanted(server, tmp_path))
    manager.create_job(wanted(server, tmp_path, seed=1))
    server.jobs["ftjob-1"]["created_at"] -= 23 * 3600
    server.faults = [Fault("POST", "/fine_tuning/jobs", 429, limit)]
    began = time.time()
    made = manager.create_job(wanted(server, tmp_path, seed=2))
    at = [time.strftime("%H:%M", time.localtime(begun + 3600)) for begun in (began, time.time())]
    said = capsys.readouterr().out
    told = re.search(r"a slot is free at about (\d\d:\d\d)", said)
    # The jobs before were made a moment ago, which may have been in the minute before.
    before = time.strftime("%H:%M", time.localtime(began + 3540))
    assert "maximum of 2" in said and made in said
    assert told and told[1] in {before, *at}
    again = {"Retry-After": "7200"}
    server.faults = [Fault("POST", "/fine_tuning/jobs", 429, limit, again)]
    manager.update_jobs()
    assert "a slot is free in 2 h 00 min" in capsys.readouterr().out
    manager.update_jobs()
    assert len(server.jobs) == 3 and list(manager.get_jobs()["job"])[2] == "ftjob-3"
    broke = {"error": {"message": "no money", "code": "insufficient_quota"}}
    server.faults = [Fault("POST", "/fine_tuning/jobs", 429, broke)]
    with pytest.raises(RequestError, match="no money"):
        manager.create_job(wanted(server, tmp_path, seed=3))
    assert list(manager.get_jobs()["state"])[3] == "failed"


def test_failures_are_told_with_the_servers_reason(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.plans["bird-names"] = ("validating_files", "failed")
    with pytest.raises(UserError, match="bird-names: failed: the file has 3 lines too few"):
        manager.create_job(wanted(server, tmp_path), blocking=True)
    assert "✗ bird-names: failed: the file has 3 lines too few" in capsys.readouterr().out
    assert list(manager.get_jobs()["error"]) == ["the file has 3 lines too few"]
    # A file that was mended may have the name.
    chats(tmp_path / "bird_names.jsonl", 15)
    del server.plans["bird-names"]
    model = manager.create_job(wanted(server, tmp_path), blocking=True)
    assert model == "ft:gpt-x:bird-names:ftjob-2"
    refusal = {"error": {"message": "gpt-z cannot be tuned"}}
    server.faults = [Fault("POST", "/fine_tuning/jobs", 400, refusal)]
    with pytest.raises(BadRequest, match="gpt-z cannot be tuned"):
        manager.create_job(wanted(server, tmp_path, base_model="gpt-z"))
    assert list(manager.get_jobs()["state"]) == ["failed", "succeeded", "failed"]


def test_a_dead_server_ends_within_the_timeout_and_others_are_still_asked(
    server: Finetuner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = FinetuningManager(tmp_path / "data", timeout=2)
    for number in range(3):
        manager.create_job(wanted(server, tmp_path, seed=number))
    for row in manager.store.list_rows("jobs")[:2]:
        manager.store.update_row("jobs", row["id"], base_url="http://127.0.0.1:9/v1")
    began = time.monotonic()
    capsys.readouterr()
    manager.update_jobs()
    assert time.monotonic() - began < 40
    said = capsys.readouterr().out
    assert "2 could not be updated" in said and "… bird-names (gpt-x): queued" in said
    server.faults = [Fault("GET", "/ftjob-3", act=lambda: time.sleep(60), status=200)]
    began = time.monotonic()
    manager.update_jobs()
    assert time.monotonic() - began < 40 and "no response within 2 s" in capsys.readouterr().out


def test_a_passing_fault_is_asked_again(
    server: Finetuner, manager: FinetuningManager, tmp_path: Path
) -> None:
    server.faults = [Fault("POST", "/files", 503, {"error": "busy"}, {"Retry-After": "0"})]
    manager.create_job(wanted(server, tmp_path))
    assert server.count("POST /files") == 2 and len(server.jobs) == 1


def test_jobs_are_cancelled_and_models_deleted(
    server: Finetuner,
    manager: FinetuningManager,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = manager.create_job(wanted(server, tmp_path))
    manager.create_job(wanted(server, tmp_path, epochs=2))
    assert one
    with pytest.raises(UserError, match="is validating_files; cancel it first"):
        manager.delete(one)
    manager.cancel(one)
    assert server.jobs["ftjob-1"]["status"] == "cancelled"
    with pytest.raises(UserError, match="is cancelled: it cannot be cancelled"):
        manager.cancel("ftjob-1")
    finished(manager)
    final, early = manager.get_model_list()
    manager.delete(early)
    assert server.models == {final} and manager.get_model_list() == [final]
    server.models.clear()
    manager.delete(final)
    assert "was deleted already" in capsys.readouterr().out and manager.get_model_list() == []
    with pytest.raises(UserError, match="no such job or model"):
        manager.delete(final)
    assert list(manager.get_jobs()["state"]) == ["cancelled"]
    # One that never came to the server, and one whose answer was lost.
    server.faults = [Fault("POST", "/files", times=9)]
    with pytest.raises(RequestError):
        FinetuningManager(tmp_path / "data", timeout=0.5).create_job(
            wanted(server, tmp_path, file_name=str(chats(tmp_path / "cats.jsonl", 11)))
        )
    server.faults = []
    manager.cancel(manager.get_jobs(state="creating")["id"].iloc[0])
    assert list(manager.get_jobs()["state"]) == ["cancelled", "cancelled"]


def test_what_llmcomp_has_kept_is_taken_in(
    server: Finetuner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    job = {
        "file_name": "a.jsonl",
        "base_model": "gpt-x",
        "file_id": "file-7",
        "batch_size": 4,
        "learning_rate_multiplier": 2.0,
        "file_md5": "0" * 32,
    }
    done = {
        **job,
        "id": "ftjob-a",
        "suffix": "old",
        "epochs": 3,
        "seed": 1,
        "model": "ft:old",
        "model-1": "ft:old:ckpt",
        "status": "succeeded",
    }
    left = {**job, "id": "ftjob-b", "suffix": "late", "epochs": "auto", "seed": "auto"}
    lines = [json.dumps(done), json.dumps(left), '{"id": "ftjob-c", "suff']
    (data / "jobs.jsonl").write_text("\n".join(lines))
    file = {"name": "a.jsonl", "md5": "0" * 32, "id": "file-7", "organization_id": "org-1"}
    (data / "files.jsonl").write_text(json.dumps(file) + "\n")
    (data / "models.csv").write_text(
        "model,base_model,file_name,file_id,file_md5,suffix,epochs,learning_rate,lora_rank\n"
        "ft:old,gpt-x,a.jsonl,file-7,0,old,3,,\n"
        "tinker://x,Qwen/Q,b.jsonl,,11,tink,2.0,0.0002,32\n"
    )
    manager = FinetuningManager(data)
    models = manager.get_models()
    assert "jobs.jsonl: line 3 is damaged" in capsys.readouterr().out
    assert list(models["model"]) == ["ft:old", "ft:old:ckpt", "tinker://x"]
    assert list(models["epochs"]) == [3, 2, 2] and models["learning_rate"][2] == 0.0002
    assert manager.get_model_list(lora_rank=32) == ["tinker://x"]
    assert list(FinetuningManager(data).get_jobs()["state"]) == [
        "succeeded",
        "unknown",
        "succeeded",
    ]
    assert [row["file_id"] for row in manager.store.list_rows("files")] == ["file-7"]
    with pytest.raises(InvalidArgument, match="suffix='old' is already used for a"):
        manager.create_job(wanted(server, tmp_path, suffix="old"))
    manager.delete("tinker://x")
    assert manager.get_model_list() == ["ft:old", "ft:old:ckpt"]
    with (data / "jobs.jsonl").open("w") as more:
        more.write(json.dumps({**done, "id": "ftjob-d", "model": "ft:new"}))
    assert FinetuningManager(data).get_model_list(epochs=3) == ["ft:old", "ft:new"]


def told(*messages: Any, **more: Any) -> str:
    """The findings about one example, and no others."""
    result = validate_dataset(json.dumps({"messages": list(messages), **more}).encode(), 1)
    return "; ".join(str(one) for one in (*result.errors, *result.warnings))


ASK = {"role": "user", "content": "?"}
SAY = {"role": "assistant", "content": "!"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages, words",
    [
        ([ASK, SAY], ""),
        (
            [
                ASK,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
                SAY,
            ],
            "",
        ),
        ([{"role": "user", "content": [IMAGE]}, SAY], ""),
        ([], "messages: must be a non-empty list"),
        ([7, SAY], r"messages\[0\]: must be an object"),
        ([{"role": "boss", "content": ""}, SAY], "'boss' is not one of system, user, assistant"),
        ([{**ASK, "weight": 1}, SAY], "user has weight; allowed: content, name, role"),
        ([{"role": "user"}, SAY], r"messages\[0\].content: is missing"),
        ([{"role": "user", "content": 3}, SAY], "must be a string or a list of parts, not int"),
        ([ASK, {**SAY, "content": "a<|endoftext|>"}], r"special token <\|endoftext\|>"),
        ([ASK, {**SAY, "content": [{"type": "text", "text": "<|fim_middle|>"}]}], "special token"),
        ([ASK], "the last message must be from the assistant, not from 'user'; .*nothing to learn"),
        ([ASK, SAY, ASK], "the last message must be from the assistant"),
        ([ASK, {**SAY, "weight": 2}], r"weight: must be 0 or 1, not 2"),
        ([ASK, {**SAY, "weight": 0}], "last assistant message has weight 0"),
        ([ASK, {"role": "assistant", "tool_calls": []}], "a non-empty list"),
        ([ASK, {"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}], r"\[0\].id: must be"),
        (
            [ASK, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}],
            "function.arguments: must be",
        ),
        ([ASK, {"role": "tool", "content": "3"}, SAY], "tool_call_id: must be"),
        ([ASK, {**SAY, "content": [IMAGE]}], "an assistant message cannot contain images"),
        ([ASK, {**SAY, "content": ""}], "an answer without text"),
        ([ASK, {"role": "system", "content": "s"}, SAY], "a system message is not the first"),
    ],
)
def test_what_is_wrong_with_an_example_is_said(messages: list[Any], words: str) -> None:
    import re

    found = told(*messages)
    assert re.search(words, found) if words else found == "", found


def test_a_file_is_judged_line_by_line(
    tmp_path: Path,
    server: Finetuner,
    manager: FinetuningManager,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = chats(tmp_path / "few.jsonl", 3)
    good = file.read_text().splitlines()
    file.write_text("\n".join([good[0], "", "{no", "[1]", good[0], '{"messages": 3}', good[1]]))
    result = manager.openai_validate_file(str(file))
    assert [(one.line, str(one)[:20]) for one in result.errors] == [
        (3, "line 3: not JSON: Ex"),
        (4, "line 4: an example m"),
        (6, "line 6: messages: mu"),
        (0, "6 examples, at least"),
    ]
    assert [str(one) for one in result.warnings] == ["line 5: duplicate of an earlier example"]
    assert result.num_examples == 6 and not result.valid
    file.write_text("\n".join(good[:2]))
    assert manager.openai_validate_file(str(file), min_examples=2).valid
    assert not manager.openai_validate_file(str(tmp_path / "none.jsonl")).valid
    assert manager.create_job(wanted(server, tmp_path, file_name=str(file))) is None
    assert "2 examples, at least 10 are required" in capsys.readouterr().out
    assert server.asked == [] and manager.get_jobs().empty
    with pytest.raises(InvalidArgument, match="cannot be read"):
        manager.create_job(wanted(server, tmp_path, file_name=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    "more, words",
    [
        ({"api_key": " "}, "api_key: is empty"),
        ({"api_key": "clé"}, "not a valid key"),
        ({"epochs": 0}, 'epochs=0: must be an integer, 1 or more or "auto"'),
        ({"batch_size": "big"}, "batch_size='big'"),
        ({"lr_multiplier": -1}, "lr_multiplier=-1: must be a number above 0"),
        ({"suffix": "x" * 65}, "1 to 64 characters"),
        ({"seed": "7"}, "seed='7'"),
        ({"base_url": "ftp://x"}, "http"),
    ],
)
def test_a_wrong_value_is_refused_before_anything(more: dict[str, Any], words: str) -> None:
    given = {"api_key": KEY, "file_name": "f", "base_model": "m"} | more
    with pytest.raises(UserError) as refused:
        OpenaiTrainingParams(**given)
    assert words in str(refused.value) and "clé" not in str(refused.value)
    with pytest.raises(TypeError):
        OpenaiTrainingParams(KEY, "f", "m")  # type: ignore[misc]


def test_the_cost_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.jsonl"
    text = "a" * 40
    file.write_text(json.dumps({"messages": [{"role": "user", "content": text}, SAY]}) + "\nbad\n")
    by_word = estimate_cost(str(file), {"m": 10.0}, epochs=3, count=len)
    # Roles count, 4 tokens a message, 2 an example.
    assert by_word.tokens == len("user") + 40 + len("assistant") + 1 + 2 * 4 + 2 and by_word.exact
    assert by_word.price_for("m") == pytest.approx(by_word.tokens * 3 * 10 / 1e6)
    assert main(["cost", str(file), "--price", "m=10", "--epochs", "2"]) == 0
    said = capsys.readouterr().out
    assert "tokens an epoch" in said and "m  10 a million tokens" in said
    assert main(["cost", str(file)]) == 0
    assert "no price known" in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="epochs=0"):
        estimate_cost(str(file), epochs=0)
    with pytest.raises(InvalidArgument, match="prices: m costs nan"):
        estimate_cost(str(file), {"m": math.nan})
    assert main(["cost", str(file), "--price", "m=much"]) == 2
    assert "error: argument --price: 'm=much' is not MODEL=PRICE" in capsys.readouterr().err
    file.write_text("[" * 100_000)
    assert estimate_cost(str(file)).tokens == 0


def test_a_filter_from_the_command_line_is_text_where_the_column_is() -> None:
    rows = [{"suffix": "7", "epochs": 2, "learning_rate": 0.001}]
    for filters in ({"suffix": "7"}, {"epochs": "2"}, {"epochs": 2}, {"learning_rate": "1e-3"}):
        assert len(build_frame(rows, MODEL_COLUMNS, filters)) == 1, filters
    for filters in ({"epochs": "two"}, {"seed": "1"}):
        assert build_frame(rows, MODEL_COLUMNS, filters).empty, filters


def test_the_command_line_does_all_of_it(
    server: Finetuner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = chats(tmp_path / "dogs.jsonl", word="dog")
    assert main(["validate", "dogs.jsonl"]) == 0 and main(["models"]) == 0
    assert "dogs.jsonl: valid; 12 examples" in (said := capsys.readouterr().out)
    assert "llmcomp_models: no models" in said
    make = [
        "create",
        "dogs.jsonl",
        "--base-model",
        "gpt-x",
        "--base-url",
        server.url,
        "--api-key-env",
        "OPENAI_API_KEY_9",
        "--epochs",
        "2",
    ]
    assert main(make) == 1
    assert "error: the environment variable OPENAI_API_KEY_9 is not set" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY_9", KEY)
    assert main(make) == 0
    for _ in range(3):
        assert main(["update"]) == 0
    capsys.readouterr()
    assert main(["models", "suffix=dogs", "epochs=2"]) == 0 and main(["jobs"]) == 0
    said = capsys.readouterr().out
    assert "ft:gpt-x:dogs:ftjob-1" in said and "succeeded" in said and "ckpt" not in said
    assert main(["delete", "ft:gpt-x:dogs:ftjob-1"]) == 0 and main(["cancel", "ftjob-1"]) == 1
    assert main(["models", "colour=red"]) == 1
    assert "error: colour: no such column" in capsys.readouterr().err
    file.write_text("{")
    assert main(["validate", "dogs.jsonl"]) == 1
    from swarm.compare.finetuning.cli import add_parsers

    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    assert parser.parse_args(["jobs", "--data-dir", "x"]).handler


def test_the_manager_is_found_where_llmcomps_scripts_look() -> None:
    from swarm.compare import FinetuningManager as found

    assert found is FinetuningManager


def test_parameters_of_tinker_are_accepted_and_what_is_missing_is_named(tmp_path: Path) -> None:
    params = TinkerTrainingParams(
        api_key="tml-secret",
        file_name="birds.jsonl",
        base_model="Qwen/Qwen3-8B",
        epochs=2,
        save_every=100,
        renderer_name="qwen3",
        lr_schedule="constant",
    )
    assert params.label == "birds" and "secret" not in repr(params)
    with pytest.raises(UserError, match="tinker-cookbook") as caught:
        FinetuningManager(tmp_path).create_job(params)
    said = str(caught.value)
    assert "save_every" in said and "\n" not in said
    made = re.search(r"LocalTrainingParams\((.*?)\)", said)
    assert made and eval(f"LocalTrainingParams({made[1]})").epochs == 2
    with pytest.raises(InvalidArgument, match="lr_schedule='cosine'"):
        TinkerTrainingParams(api_key="k", file_name="f", base_model="b", lr_schedule="cosine")
