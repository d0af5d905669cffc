"""What tests of experiments share: settings of their own, and an endpoint that repeats."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import endpoints
import pytest

from swarm.compare import Config, ModelAdapter
from swarm.compare.sampling import ModelCall, Outcome, SampleRequest, Script
from swarm.models.base import Completion

KEY = "sk-secret-0123456789"
"""A key that nothing may write."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Settings as they are at first, no keys, and a cache of the test's own; gives its folder."""
    for name in list(os.environ):
        if "API_KEY" in name or name == "OPENAI_BASE_URL":
            monkeypatch.delenv(name)
    Config.reset()
    ModelAdapter.reset()
    Config.cache_dir = tmp_path / "cache"
    yield tmp_path / "cache"
    Config.reset()
    ModelAdapter.reset()


def repeats(asked: endpoints.Asked) -> endpoints.Reply:
    """The last turn again; "bad" is refused."""
    text = asked.body["messages"][-1]["content"]
    if text == "bad":
        return endpoints.Reply({"error": {"message": "I do not answer that"}}, 400)
    return endpoints.chat(f"so: {text}")


@contextmanager
def endpoint(
    answer: Callable[[endpoints.Asked], endpoints.Reply] = repeats, variable: str = "FAKE_API_KEY"
) -> Iterator[endpoints.Endpoint]:
    """An endpoint that is the only one where models are looked for."""
    with endpoints.endpoint(answer) as running:
        Config.url_key_pairs = [(running.url, KEY, variable)]
        yield running


def asked(text: Any = "hello", model: str = "small", **params: Any) -> ModelCall:
    """One user turn to a model."""
    return ModelCall(
        model, {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **params}
    )


def script(what: ModelCall, sample: int = 0) -> Script[Outcome]:
    """One want."""
    [heard] = yield [SampleRequest(what, sample)]
    return heard


def texts(heard: Sequence[Outcome]) -> list[str | None]:
    """What was said; `None` where it failed."""
    return [one.text if isinstance(one, Completion) else None for one in heard]
