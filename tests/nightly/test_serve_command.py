"""python -m swarm.serve as a person starts it: its options, a real process, curl, llm, Ctrl-C."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import openai
import pytest
import searches

from swarm.registry.registry import Roster
from swarm.serve.__main__ import KEY_VARIABLE, main
from swarm.serve.server import discover_models

SECRET = "sk-served-0123456789"
USUAL = "http://127.0.0.1:8000/v1"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, key or saved consortium of the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    for name in (
        KEY_VARIABLE,
        "MODEL_SWARMS_PROVIDERS",
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "TOGETHER_API_KEY",
        "OPENROUTER_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)


WRONG = {
    "--host 0.0.0.0": "--host 0.0.0.0: others could use it; set a key in SWARM_API_KEY",
    "--port 70000": "70000 is not in the range 0<=x<=65535",
    "--concurrency 0": "0: must be an integer, at least 1",
    "--prot 1": "Did you mean one of: '--pool', '--port'",
    "--model moa/none": "preset 'none': not found",
    "--model function/json:dumps --port {taken}": "--port 0 selects a free one",
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = main(words.format(taken=taken.getsockname()[1]).split())
    out, err = capsys.readouterr()
    assert code in (1, 2) and err.startswith("error: ") and err.count("\n") == 1 and not out
    assert WRONG[words] in err


def test_what_is_served_by_default(
    tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm._util.settings import parse_settings
    from swarm.multi_agent.consortium.settings import ConsortiumSettings
    from swarm.multi_agent.consortium.store import ConsortiumStore

    ConsortiumStore().save(
        "mine",
        parse_settings(ConsortiumSettings, {"models": {"local/amber": 2}, "arbiter": "local/base"}),
    )
    roster = Roster(base=str(tiny_llama), pool=tiny_pool, device="cpu", cache=None)
    found, left_out = discover_models(roster, ["base", "amber", "none"])
    assert list(found)[:2] == ["local/base", "local/amber"] and "consortium/mine" in found
    assert {"local/none", "moa/lite", "moa/self"} <= set(left_out)
    monkeypatch.setenv("TOGETHER_API_KEY", "x")
    assert "moa/lite" in discover_models(roster, [])[0]


ENDLESS = """
import time

def words(prompt):
    while True:
        yield "more "
        time.sleep(0.01)
"""


def lines_until(process: "subprocess.Popen[str]", last: str) -> list[str]:
    assert process.stdout
    lines = [process.stdout.readline().rstrip("\n")]
    while not lines[-1].startswith(last):
        assert process.poll() is None, lines
        lines.append(process.stdout.readline().rstrip("\n"))
    return lines


def test_a_process(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    (tmp_path / "endless.py").write_text(ENDLESS)
    told = {**searches.environment(), KEY_VARIABLE: SECRET, "LLM_USER_PATH": str(tmp_path)}
    words = (
        f"--port 0 --base {tiny_llama} --pool {tiny_pool} --device cpu --model local/base "
        "--model local/amber --model function/endless:words --preload --max-tokens 24 "
        f"--trace {trace}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.serve", *words.split()],
        cwd=tmp_path,
        env=told,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = lines_until(process, "Ctrl-C")
        assert lines[0] == "loading the local models on cpu"
        assert lines[1].startswith("serving 3 models at http://127.0.0.1:")
        assert lines[2:4] == ["  local/base", "  local/amber"]
        url = lines[1].split()[4].rstrip(",")
        done = subprocess.run(lines[-2] + " -sS", shell=True, env=told, capture_output=True)
        answer = json.loads(done.stdout)
        assert answer["model"] == "local/base" and answer["usage"]["completion_tokens"] > 0
        by_llm(url, told, tmp_path, answer["choices"][0]["message"]["content"])
        the_page_says(url, answer)
        client = openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0)
        asked: Any = {"model": "function/endless:words", "messages": HI, "stream": True}
        with pytest.raises(openai.APIError, match="is shutting down"):
            for number, _ in enumerate(client.chat.completions.create(**asked)):
                if number == 10:
                    process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and err.endswith("stopped\n") and "Traceback" not in err
    said = "\n".join(lines) + out + err + trace.read_text()
    assert SECRET not in said
    calls = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert calls[0]["call"] == {"name": "local/base"}
    assert any(one.get("error") == "closed before its end" for one in calls)


def the_page_says(url: str, answer: dict[str, Any]) -> None:
    """The page's commands, at this server."""
    page = (searches.ROOT / "docs" / "serve.md").read_text()
    curl = re.findall(r"^curl .*$", page, re.MULTILINE)[0].replace(USUAL, url)
    sent = ["-sS", "-H", f"Authorization: Bearer {SECRET}"]
    done = subprocess.run([*shlex.split(curl), *sent], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"] == answer["choices"]
    code = page.split("```python\n")[1].split("```")[0].replace(USUAL, url)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setenv(KEY_VARIABLE, SECRET)
        exec(code, {})
    first, rest = said.getvalue().split("\n", 1)
    assert (
        first == "['local/base', 'local/amber', 'function/endless:words']"
        and "CompletionUsage" in rest
    )


def by_llm(url: str, environment: dict[str, str], folder: Path, expected: str) -> None:
    """The same question by the llm command, with the server among its OpenAI-compatible models."""
    model = {"model_id": "swarm-base", "model_name": "local/base", "api_key_name": "swarm"}
    # JSON is yaml.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([{**model, "api_base": url}]))
    (folder / "keys.json").write_text(json.dumps({"swarm": SECRET}))
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    llm = shutil.which("llm", path=os.pathsep.join(places))
    assert llm, "llm is not installed"
    done = subprocess.run(
        [llm, "-m", "swarm-base", "Hello"],
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.stdout.strip() == expected.strip(), done.stderr
