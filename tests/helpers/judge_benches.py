"""Benches on the loopback: the command line, answers that say what they are worth, and a judge."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply, chat, endpoint
from judge_endpoints import FENCED

from swarm.judge.cli import main

BROKEN = Reply({"error": {"message": "no such thing", "code": "broken"}}, 400)
"""A failure that is not tried again."""


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, folder: Path, answer: Callable[[Asked], str | Reply]
) -> Iterator[Endpoint]:
    """A loopback that is the default provider: any bare name is one of its models."""

    def reply(asked: Asked) -> Reply:
        said = answer(asked)
        return said if isinstance(said, Reply) else chat(said)

    with endpoint(reply) as server:
        for name, value in variables(server.url, folder).items():
            monkeypatch.setenv(name, value)
        yield server


def variables(url: str, folder: Path) -> dict[str, str]:
    """The environment in which the loopback is asked, with a cache of the test's own."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "none",
        "MODEL_SWARMS_CACHE": str(folder / "cache"),
    }


def command(*words: object) -> int:
    """Run `python -m swarm.judge` in this process; its exit code."""
    return main([str(word) for word in words])


def typed(words: str) -> int:
    """Run a command line of words without spaces; its exit code."""
    return main(words.split())


def refused(capsys: pytest.CaptureFixture[str], bench: str, *words: object) -> str:
    """The one line with which `generate` ends, before anybody is asked."""
    assert command(bench, "generate", "--model", "x", "--output", "o.jsonl", *words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fenced(asked: Asked) -> list[str]:
    """What a judge was shown as material, block by block."""
    return [text for _, text in FENCED.findall(asked.body["messages"][-1]["content"])]


def worth(text: str) -> float | None:
    """What an answer of a test says it is worth: "worth 7.5 ..."."""
    found = re.search(r"worth (-?[\d.]+)", text)
    return float(found[1]) if found else None
