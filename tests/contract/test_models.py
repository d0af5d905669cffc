"""What every model keeps to: the endpoint's, llm's, a function, a mixture, weights."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import endpoints
import fake_models
import pytest

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFModel
from swarm.errors import UserError
from swarm.models.base import Completion, Message, Model, Request
from swarm.models.cache import Cache
from swarm.models.function import FunctionModel
from swarm.models.llm import LLM
from swarm.models.openai import OpenAI
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec
from swarm.registry.local_models import SharedLocalModel
from swarm.registry.registry import Roster


@dataclass
class Case:
    """A model, and what may be asked of it.

    Attributes:
        by_rule: Whether it answers by `fake_models.rule`.
    """

    model: Model
    by_rule: bool = True


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with endpoints.endpoint(fake_models.answer) as endpoint:
        yield endpoint.url


@pytest.fixture(scope="module", autouse=True)
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, fake_models.in_llm(fake_models.llm_model()):
        patch.setenv("LLM_USER_PATH", str(tmp_path_factory.mktemp("llm")))
        yield


def together(kind: type[MixtureOfAgents] | type[Consortium]) -> Case:
    """Two members and a last one that are one model, which knows of no verdict."""
    specs = [AgentSpec(FunctionModel("fake_models:function"), name) for name in ("a", "b", "end")]
    return Case(kind(specs[:2], specs[2]), by_rule=False)


def local(base: Path) -> Case:
    model = HFModel(BaseModel(str(base)), "cpu")
    model.open("cpu")
    return Case(model, by_rule=False)


KINDS: dict[str, Callable[..., Case]] = {
    "openai": lambda url, **_: Case(OpenAI("talker", url, None, temperature=0.0)),
    "openai cached": lambda url, file, **_: Case(
        OpenAI("talker", url, None, temperature=None, cache=Cache(file))
    ),
    "llm": lambda **_: Case(LLM("talker")),
    "llm cached": lambda file, **_: Case(LLM("talker", cache=Cache(file))),
    "function": lambda **_: Case(FunctionModel("fake_models:function")),
    "generator": lambda **_: Case(FunctionModel(fake_models.pieces, concurrency=4)),
    "mixture": lambda **_: together(MixtureOfAgents),
    "consortium": lambda **_: together(Consortium),
    "local": lambda base, folder, **_: Case(
        Roster(base=str(base), pool=folder, device="cpu").model("local/base"), by_rule=False
    ),
    "weights": lambda base, **_: local(base),
}


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest, server: str, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    folder = tmp_path_factory.mktemp("models")
    given = {"url": server, "file": str(folder / "answers.sqlite"), "folder": folder}
    if request.param in ("local", "weights"):
        given["base"] = request.getfixturevalue("tiny_llama")
    return KINDS[request.param](**given)


def test_order_is_kept_and_a_batch_is_its_requests(case: Case) -> None:
    requests = fake_models.many()
    together = case.model.generate(requests)
    assert len(together) == 50
    few = range(0, 50, 7)
    assert [together[n] for n in few] == [case.model.generate([requests[n]])[0] for n in few]
    if case.by_rule:
        assert [one.text for one in together] == [fake_models.function(r.prompt) for r in requests]


def test_a_system_turn_is_heard(case: Case) -> None:
    said = [
        case.model.generate(
            [Request((Message("system", system), Message("user", "What is 3 + 4?")))]
        )
        for system in ("Answer with one word.", "the shortest path is 12")
    ]
    assert said[0] != said[1] or not case.by_rule
    if case.by_rule:
        assert "system: Answer with one word." in said[0][0].text


def test_a_failure_stays_in_its_place(case: Case) -> None:
    if isinstance(case.model, HFModel | SharedLocalModel):
        pytest.skip("a model of weights answers everything")
    bad = Request("fail")
    first, failed, last = case.model.generate_each([Request("one"), bad, Request("two")])
    assert isinstance(failed, UserError) and "\n" not in str(failed)
    assert isinstance(first, Completion) and isinstance(last, Completion)
    assert [first, last] == case.model.generate([Request("one"), Request("two")])
    for ask in (
        lambda: case.model.generate([Request("one"), bad]),
        lambda: case.model.stream(bad),
    ):
        with pytest.raises(UserError):
            list(ask())


def test_the_pieces_of_a_stream_are_the_answer(case: Case) -> None:
    request = Request((Message("system", "s"), Message("user", fake_models.ODD)), 40)
    (whole,) = case.model.generate([request])
    talk, texts = case.model.stream(request), []
    while True:
        try:
            texts.append(next(talk).text)
        except StopIteration as end:
            assert "".join(texts) == end.value.text
            assert end.value == whole
            break
    case.model.stream(request).close()
    begun = case.model.stream(request)
    next(begun)
    begun.close()


def test_it_goes_to_another_process_and_works_beside_a_running_event_loop(case: Case) -> None:
    async def inside() -> list[Completion]:
        return case.model.generate([Request("hi", 5)])

    assert case.model.check() is None and case.model.open("cpu") is None
    found = asyncio.run(inside())
    same = [Request("hi", 5, temperature=1.0, sample=n) for n in (0, 1, 1)]
    assert len(case.model.generate(same)) == 3
    again = pickle.loads(pickle.dumps(case.model))
    assert isinstance(again, HFModel) or again.generate([Request("hi", 5)]) == found
