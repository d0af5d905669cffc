"""Secrets stay out of everything that is written; what is written is for its owner alone."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import searches
from endpoints import Asked, Reply, endpoint
from judge_endpoints import rated
from omegaconf import OmegaConf

from swarm._util.files import write_json
from swarm._util.secrets import (
    HIDDEN,
    FromEnvironment,
    check_secrets,
    clean,
    clean_words,
    plain_config,
    read_config,
    remember,
)
from swarm.errors import UserError
from swarm.export.export import Export
from swarm.loop.identity import identity_settings
from swarm.models.base import Request
from swarm.models.cache import Cache
from swarm.models.openai import OpenAI
from swarm.report.page import write_report
from swarm.runs.folder import RunFolder, load_command
from swarm.ui.launcher import SearchLauncher

LITERAL = "literal-0123456789-abcdef"
HEADER = "header-0123456789-abcdef"
ROTATED = "another-0123456789-abcdef"


def judged(folder: Path, base: Path, pool: Path, url: str, name: str, **keys: Any) -> list[str]:
    """A search with a judge whose request has one secret as it is and one of the environment."""
    items = [{"prompt": f"which of the answers is right, number {n}", "id": n} for n in range(8)]
    file = folder / "topic.json"
    file.write_text(json.dumps({"dataset": "t", "dev": items[:4], "test": items[4:]}))
    more = {
        "task": "human",
        "task__file": file,
        "task__max_new_tokens": 4,
        "task__scorer__model__base_url": url,
        "task__scorer__model__model": "small",
        "task__scorer__model__api_key_env": "null",
        "task__scorer__model__limits__retries": 0,
        "task__scorer__model__body": f"{{api_key: {LITERAL}, signed: 'Bearer "
        f"${{oc.env:JUDGE_TOKEN}}'}}",
        "optimizer__particles": 4,
        "optimizer__max_iterations": 1,
        "ensemble": 0,
        **keys,
    }
    words = searches.arguments(folder, base, pool, name, **more)
    return [word for word in words if not word.startswith("task.scoring")]


def holders(folder: Path, *secrets: str) -> list[Path]:
    """The files below a folder that hold one of the texts."""
    texts = [secret.encode() for secret in secrets]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if any(text in path.read_bytes() for text in texts)]


def open_to_others(folder: Path) -> list[Path]:
    """What others may read or enter."""
    all_ = [folder, *folder.rglob("*")]
    return [path for path in all_ if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_a_judged_search_leaves_no_secret_and_goes_on_with_another(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", HEADER)
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))

    def limited(asked: Asked) -> Reply:
        return rated(asked) if len(server.asked) <= 17 else Reply({"error": LITERAL}, 503)

    with endpoint(limited) as server:
        words = judged(tmp_path, tiny_llama, tiny_pool, server.url, "run")
        first = searches.run(words)
        assert first.returncode == 1 and "503" in first.stderr, first.stderr
        sent = server.asked[0].body
        assert (sent["api_key"], sent["signed"]) == (LITERAL, f"Bearer {HEADER}")
        run = tmp_path / "search" / "run"
        assert holders(tmp_path, LITERAL, HEADER) == []
        # Another value of either is the same search, and what was paid is not paid again.
        server.answer, asked = rated, len(server.asked)
        monkeypatch.setenv("JUDGE_TOKEN", ROTATED)
        rotated = [word.replace(LITERAL, ROTATED + "2") for word in words]
        again = searches.run(rotated)
        assert again.returncode == 0, again.stderr
        assert "resumes" in again.stdout, again.stdout
        assert server.asked[-1].body["api_key"] == ROTATED + "2" and len(server.asked) > asked
    write_report(run)
    Export(str(run), str(tmp_path / "exported")).write()
    assert "task.scorer.model.base_url=" in (tmp_path / "exported" / "README.md").read_text()
    for name in ("report.html", "config.json", "command.json", "rounds.jsonl", "run.json"):
        assert (run / name).is_file()
    assert holders(tmp_path, LITERAL, HEADER, ROTATED) == []
    assert "${oc.env:JUDGE_TOKEN}" in (run / "config.json").read_text()
    assert any("${oc.env:JUDGE_TOKEN}" in word for word in load_command(run)["arguments"])  # type: ignore[index]
    assert open_to_others(run) == [] and open_to_others(tmp_path / "cache") == []
    # The page cannot go on with a secret that nobody kept, and says so.
    with pytest.raises(UserError, match="not stored"):
        SearchLauncher().resume_search(run)
    with pytest.raises(UserError, match=r"api_key=\(hidden\).*oc.env"):
        check_secrets(RunFolder(run).config)


def test_hydras_own_files_are_clean(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", HEADER)
    words = judged(tmp_path, tiny_llama, tiny_pool, "http://127.0.0.1:9/v1", "run")
    done = searches.run(["-m", *words, "seed=1", "hydra.output_subdir=hydra", "dry_run=true"])
    assert done.returncode == 0, done.stderr
    written = list((tmp_path / "search").rglob("*.yaml"))
    assert {path.name for path in written} == {
        "multirun.yaml",
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }
    assert holders(tmp_path / "search", LITERAL, HEADER) == []
    assert all(not path.stat().st_mode & 0o077 for path in written)
    assert "${oc.env:JUDGE_TOKEN}" in written[0].read_text() + written[1].read_text()


def test_a_text_of_the_environment_is_resolved_in_use_and_not_where_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_KEY", HEADER)
    monkeypatch.setenv("PLACE", "here")
    tree = {
        "a": "Bearer ${oc.env:SOME_KEY}",
        "b": "${a}",
        "c": "${oc.env:ABSENT,'x y'}",
        "d": ["${oc.env:PLACE}/data"],
        "e": "${oc.decode:${oc.env:NUMBER,3}}",
        "f": "plain",
    }
    found = plain_config(OmegaConf.create(tree))
    assert found["a"] == f"Bearer {HEADER}" == found["b"] and found["c"] == "x y"
    assert found["d"] == ["here/data"] and found["e"] == 3
    written = clean(found)
    assert written["a"] == "Bearer ${oc.env:SOME_KEY}" == written["b"]
    assert written["c"] == "${oc.env:ABSENT,'x y'}" and written["d"] == ["${oc.env:PLACE}/data"]
    assert json.loads(json.dumps(written)) == written
    again = read_config(written)
    assert again == found and clean(again) == written and isinstance(again["a"], FromEnvironment)
    monkeypatch.delenv("SOME_KEY")
    assert read_config(written)["a"] == written["a"]
    # OmegaConf's own resolver is there again.
    assert OmegaConf.create({"a": "${oc.env:PLACE}"}).a == "here"


def test_an_identity_has_no_secret_and_changes_with_other_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {"task": {"name": "${oc.env:TASK}", "scorer": {"key": "k", "b": "x ${oc.env:MY_KEY}"}}}

    def identity(task: str, key: str) -> dict[str, Any]:
        monkeypatch.setenv("TASK", task)
        monkeypatch.setenv("MY_KEY", key)
        return identity_settings(plain_config(OmegaConf.create(tree)))

    one = identity("mmlu", HEADER)
    assert one["task.scorer.key"] == HIDDEN and one["task.scorer.b"] == f"x {HIDDEN}"
    assert identity("mmlu", ROTATED) == one != identity("gsm8k", HEADER)
    assert "mmlu" not in one["task.name"]


SECRETS = "api_key OPENAI_API_KEY x-api-key apiKey hf_token password Authorization client_secret"


def test_names_of_secrets() -> None:
    for name in (*SECRETS.split(), "task.scorer.model.body.key"):
        assert clean({name: "v"}) == {name: HIDDEN}
    plain = {"api_key_env": "MY_KEY", "tokens_field": "max_tokens", "max_tokens": 3}
    assert clean(plain) == plain


def test_a_known_secret_is_found_in_any_text() -> None:
    new = "known-0123456789-abcdef"
    assert clean(f"refused {new}") == f"refused {new}"
    remember({"body": [{"api_key": new}]})
    assert clean({"error": f"refused {new}"}) == {"error": f"refused {HIDDEN}"}
    shaped = "sk-proj-" + "Ab1" * 10
    assert clean([f"key {shaped}."]) == [f"key {HIDDEN}."]


def test_words_of_a_command_are_cleaned() -> None:
    for word in (
        "task.scorer.model.body={api_key: v4lue}",
        "+task.scorer.model.body.api_key=v4lue",
        "b={a: 1, 'token': 'v4lue x', c: 2}",
        '+b={"X-Api-Key": "v4lue"}',
    ):
        assert "v4lue" not in clean_words([word])[0] and HIDDEN in clean_words([word])[0]
    kept = ["task.scorer.model.api_key_env=MY_KEY", "body.api_key=${oc.env:MY_KEY}", "name=x"]
    assert clean_words(kept) == kept


def test_a_file_is_no_more_open_than_its_folder(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        for mode, file_mode in ((0o700, 0o600), (0o750, 0o640), (0o755, 0o644)):
            folder = tmp_path / f"{mode:o}"
            folder.mkdir()
            folder.chmod(mode)
            write_json(folder / "deeper" / "a.json", 1)
            assert stat.S_IMODE((folder / "deeper").stat().st_mode) == mode
            assert stat.S_IMODE((folder / "deeper" / "a.json").stat().st_mode) == file_mode
        Cache(str(tmp_path / "new" / "c.sqlite")).put("a", 1)
        assert open_to_others(tmp_path / "new") == []
    finally:
        os.umask(mask)


def test_a_key_in_the_body_is_no_part_of_an_answers_key() -> None:
    models = [OpenAI("m", "http://x", body={"api_key": key}) for key in ("1", "2")]
    one, two = (model.prepare(Request("q")) for model in models)
    assert one.key == two.key and one.body and one.body["api_key"] == "1"
