"""A mixture of agents whose models are endpoints, and of this machine."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import searches
from endpoints import Asked, Reply, chat, endpoint
from fake_agents import stages

from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.models.openai import OpenAI
from swarm.models.rate_limit import Limits
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec


def served(url: str, name: str, **how: Any) -> AgentSpec:
    limits = Limits(retries=0, timeout=20)
    return AgentSpec(OpenAI(name, url, None, limits=limits), name, **how)


def by_name(asked: Asked) -> Reply:
    """Each model says its name; some are late, dead or silent."""
    name = asked.body["model"]
    reply = chat(f"{name} to {asked.body['messages'][-1]['content'][:4]}")
    return {
        "dead": Reply({"error": "no more"}, 500),
        "silent": Reply(chat("late").body, wait=60.0),
        "slow": Reply(reply.body, wait=0.3),
        "slower": Reply(reply.body, wait=0.4),
    }.get(name, reply)


def test_the_proposers_of_a_layer_run_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(asked: Asked) -> Reply:
        if asked.body["model"] != "last":
            together.wait()
        return by_name(asked)

    with endpoint(answer) as server:
        names = ("slow", "slower", "slow", "slow")
        proposers = [served(server.url, name) for name in names]
        mixture = MixtureOfAgents(proposers, served(server.url, "last"))
        mixture.aggregator.model.generate([Request("why?")])  # what is imported once is
        start = time.monotonic()
        (found,) = mixture.generate([Request("why?")])
        whole_time = time.monotonic() - start
        assert found.text == "last to why?" and server.peak == 4 and len(server.asked) == 6
    assert 0.4 <= found.seconds <= whole_time  # not the sum of all calls


def test_a_dead_and_a_hanging_endpoint_cost_a_warning_and_the_slots_time() -> None:
    with endpoint(by_name) as server:
        proposers = [
            served(server.url, "fine"),
            served(server.url, "dead"),
            served(server.url, "silent", timeout=0.2),
        ]
        mixture = MixtureOfAgents(proposers, served(server.url, "last"))
        start = time.monotonic()
        found = stages(mixture)
        assert time.monotonic() - start < 15
    assert found.final.text == "last to why?"
    assert len(found.warnings) == 2 and "500" in found.warnings[0]
    assert "silent" in found.warnings[1] and "0.2 s" in found.warnings[1]


def test_models_of_this_machine_answer_in_batches(tiny_llama: Path) -> None:
    from swarm.engine.base_model import BaseModel
    from swarm.engine.hf import HFModel

    local = HFModel(BaseModel(path=str(tiny_llama), dtype="float32"))
    slots = [AgentSpec(local, "tiny", system="be kind"), AgentSpec(local, "plain")]
    # It reads no more than 512 tokens.
    mixture = MixtureOfAgents(
        slots, AgentSpec(local, "tiny"), prompt={"form": "paper", "text": "Go."}, quorum=0
    )
    mixture.check()
    mixture.open("cpu")
    requests = [Request((Message("user", text),), 5) for text in ("one", "two", "three")]
    alone = local.generate(requests)
    for request, own, found in zip(requests, alone, mixture.run(requests), strict=True):
        assert not isinstance(found, UserError) and found.layers[0][1].text == own.text
        assert (
            found.final.text
            == local.generate(
                [
                    found.layers[1][0].prompt
                    and Request(found.layers[1][0].prompt, request.max_new_tokens)
                ]
            )[0].text
        )


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (searches.ROOT / "docs" / "moa.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    with endpoint(lambda asked: chat(f"{asked.body['model']} [b]")) as server:
        exec(code.replace("http://localhost:11434/v1", server.url), {})
        assert len(server.asked) == 2 * 7
    assert "2 proposer llama llama3:8b [b]\n" in capsys.readouterr().out
