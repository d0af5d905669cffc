"""Models on this machine by name: found, checked, shared, asked by many threads at once."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from run_folders import measured, write_state
from safetensors.torch import load_file, save_file

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine, HFModel
from swarm.engine.token_ensemble import ModelEnsemble
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Message, Model, Request
from swarm.pool.pool import Pool
from swarm.registry.local_models import LocalModels
from swarm.runs.verdict import EXPERT, FOUND, Compared, Verdict

TURNS = Request((Message("system", "be brief"), Message("user", "yes or no")), 8)
TEXT = Request("the question is", 8)


@pytest.fixture(scope="module")
def home(tiny_llama: Path, tiny_pool: Path) -> LocalModels:
    """Named, and opened by whoever asks first."""
    return LocalModels(str(tiny_llama), tiny_pool)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tiny_pool: Path) -> HFEngine:
    made = HFEngine("stacked")
    made.open(BaseModel(str(tiny_llama)), Pool(tiny_pool).open(), "cpu")
    return made


@pytest.fixture
def rounds(home: LocalModels, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many requests each voice had in each round that the engine of `home` answered."""
    home.get_model("base").open()
    (together,) = home.batchers.values()
    seen: list[list[int]] = []
    answer = together._engine.generate

    def watched(positions: np.ndarray, requests: Any) -> Any:
        seen.append([len(row) for row in requests])
        return answer(positions, requests)

    monkeypatch.setattr(together._engine, "generate", watched)
    return seen


def said(model: Model, *requests: Request) -> list[str]:
    return [one.text for one in model.generate(requests)]


def run_folder(folder: Path, best: Path, base: Path, **state: Any) -> Path:
    """What a finished search leaves: a state, a configuration and its best."""
    dev = measured([{"value": 0.5, "answer": "A"}, {"value": 0.4, "answer": "B"}])
    whole = {
        "experts": ["a"],
        "own": 1,
        "groups": ["all"],
        "optimizer": {},
        "rounds": [{"positions": [[1.0]], "utilities": [0.5]}],
        "finished": "done",
        "verdict": Verdict(
            Compared(FOUND, "best found", dev, None, position=[1.0]),
            "a",
            [Compared(EXPERT, "best expert (a)", dev, None)],
        ).to_dict(),
        "identity": {},
        **state,
    }
    folder.mkdir(parents=True)
    write_state(folder, whole)
    config = {"model": {"_target_": "swarm.engine.base_model.BaseModel", "path": str(base)}}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copytree(best, folder / "global_best")
    return folder


def test_each_name_is_the_model_it_says(
    home: LocalModels, engine: HFEngine, tiny_pool: Path
) -> None:
    names = ["amber", "dune", "base", str(tiny_pool / "birch")]
    positions = np.concatenate([np.eye(4)[[0, 3]], np.zeros((1, 4)), np.eye(4)[[1]]])
    expected = engine.generate(positions, [[TEXT, TURNS]] * 4)
    for name, row in zip(names, expected, strict=True):
        voice = home.get_model(name)
        assert voice.generate([TEXT, TURNS]) == row and voice is home.get_model(name)
        assert [one.model for one in voice.generate([TEXT])] == [name]
    assert len({row[0].text for row in expected}) == 4
    judge = HFModel(home.base)
    judge.open("cpu")
    assert judge.generate([TEXT, TURNS]) == expected[2]
    with pytest.raises(UserError, match="more than the model's 512"):
        judge.generate([TEXT, replace(TEXT, prompt="no " * 600)])
    assert home.get_model("base").generate([]) == []


def test_a_base_is_in_memory_once_whoever_comes_late(
    tiny_llama: Path, tiny_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[BaseModel] = []
    load = BaseModel.load

    def counted(self: BaseModel, device: str) -> Any:
        loaded.append(self)
        return load(self, device)

    monkeypatch.setattr(BaseModel, "load", counted)
    home = LocalModels(BaseModel(str(tiny_llama)), tiny_pool, device="cpu")
    early = [home.get_model(name) for name in ("base", "amber")]
    for voice in early:
        voice.check()
    assert loaded == []
    before = [said(voice, TEXT, TURNS) for voice in early]
    late = home.get_model("birch")
    assert said(late, TEXT) not in [texts[:1] for texts in before]
    assert [said(voice, TEXT, TURNS) for voice in early] == before
    # The base's folder by its path is the base.
    assert said(home.get_model(str(tiny_llama)), TEXT) == before[0][:1]
    assert len(loaded) == 1 and len(home.batchers) == 1


def test_runs_models_and_mixtures_are_voices_too(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(Path("search/first"), tiny_pool / "cedar", tiny_llama)
    run_folder(Path("search/swept/trial_00"), tiny_pool / "cedar", tiny_llama)
    run_folder(Path("search/begun"), tiny_pool / "cedar", tiny_llama, finished=None, verdict=None)
    other = tiny.model(tmp_path / "other", seed=3)
    ModelEnsemble([str(tiny_llama), str(other)]).open().save([0, 1], tmp_path / "mixture")
    home = LocalModels(None, tiny_pool, device="cpu")
    cedar = said(home.get_model("cedar"), TEXT, TURNS)
    assert said(home.get_model("search/first"), TEXT, TURNS) == cedar
    assert said(home.get_model(str(tmp_path / "search" / "first")), TEXT, TURNS) == cedar
    whole = said(home.get_model("other"), TEXT)
    assert whole != cedar[:1] and said(home.get_model("mixture"), TEXT) == whole
    # The experts' base, the other model, the mixture of the two.
    assert len(home.batchers) == 3
    runs = ["search/begun", "search/first", "search/swept/trial_00"]
    assert home.list_names() == ["base", *tiny.NAMES, *runs]
    assert said(home.get_model("search/swept/trial_00"), TEXT, TURNS) == cedar
    with pytest.raises(UserError, match=r"not finished.*or use .*local/search/begun/global_best"):
        home.get_model("search/begun")
    assert said(home.get_model("search/begun/global_best"), TEXT, TURNS) == cedar


def test_a_name_that_is_none_says_what_there_is(
    home: LocalModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("ambre", r"local/ambre: .*did you mean local/amber\? available: base,"),
        ("gpt-9", r"no such model; available: base, amber, .* or a folder"),
        ("", "no such model"),
        (" ", "no such model"),
        ("empty", "empty contains no search"),
    ):
        with pytest.raises(UserError, match=says):
            home.get_model(name)
    with pytest.raises(UserError, match="device=gpu"):
        LocalModels(device="gpu")


def test_what_is_wrong_is_said_before_anything_is_loaded(
    tiny_llama: Path, tiny_gemma: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    pool = shutil.copytree(tiny_pool, tmp_path / "pool")
    file = pool / "birch" / "adapter_model.safetensors"
    save_file({name: weight * np.nan for name, weight in load_file(file).items()}, file)
    (pool / "cedar" / "adapter_model.safetensors").unlink()
    tiny.expert(tiny_llama, pool / "dune", 4, targets=("q_proj",), r=2)
    home = LocalModels(str(tiny_llama), pool, "cpu")
    wrong = {"birch": "NaN or infinite", "cedar": r"no adapter_model\.safetensors"}
    for expert, says in wrong.items():
        with pytest.raises(UserError, match=says):
            home.get_model(expert).check()
        assert str(home.get_model(expert).generate_each([TEXT])[0]).count("pool/") == 1
    with pytest.raises(UserError, match=f"{tmp_path}/none: no such folder"):
        LocalModels(str(tmp_path / "none"), pool).get_model("base").check()
    named = BaseModel(str(tiny_gemma), name="tiny-gemma")
    with pytest.raises(UserError, match="belongs to the base model"):
        LocalModels(named, pool).get_model("amber").check()
    with pytest.raises(UserError, match=r"device=cuda:\d+: no such GPU"):
        LocalModels(str(tiny_llama), pool, "cuda:97").get_model("base").open()
    # Others of the pool do not suffer.
    assert said(home.get_model("amber"), TEXT) and said(home.get_model("dune"), TEXT)


def test_an_adapter_of_another_base_brings_it(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    other = tiny.model(tmp_path / "another", seed=5)
    tiny.expert(other, tmp_path / "mine", 6)
    home = LocalModels(None, tiny_pool, "cpu")
    assert home.base.path == str(tiny_llama)
    assert home.get_model(str(tmp_path / "mine")).base == BaseModel(str(other))
    assert said(home.get_model(str(tmp_path / "mine")), TEXT) != said(home.get_model("base"), TEXT)
    shipped = LocalModels(None, tmp_path / "nowhere").base
    assert shipped.path == "HuggingFaceTB/SmolLM2-135M-Instruct" and shipped.wheel
    assert LocalModels(shipped.path).base == shipped


def together(*calls: Any) -> list[Any]:
    """What the calls give, made at the same moment by a thread each."""
    barrier = threading.Barrier(len(calls))

    def call(function: Any) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call, one) for one in calls]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Any:
    """To be called where threads have to meet on a busy machine too."""

    def call() -> None:
        # One that still looks whether anybody waits would take the first who ask now.
        for one in threading.enumerate():
            if one.name == "swarm-local":
                one.join()
        monkeypatch.setattr("swarm.registry.local_models.BATCH_WAIT_S", 1.0)

    return call


def test_who_asks_at_the_same_time_shares_batches(
    home: LocalModels, rounds: list[list[int]], patient: Any
) -> None:
    voices = [home.get_model(name) for name in (*tiny.NAMES, "base")]
    alone = [voice.generate([TEXT]) for voice in voices]
    assert rounds == [[1]] * 5
    rounds.clear()
    patient()
    assert together(*[lambda v=voice: v.generate([TEXT]) for voice in voices]) == alone
    assert rounds == [[1] * 5]


def test_drawn_answers_are_each_voices_own(home: LocalModels) -> None:
    warm = replace(TURNS, temperature=1.0, seed=3)
    asked = [warm, replace(warm, sample=1), replace(warm, seed=4), replace(warm, seed=None)]
    amber, base = (home.get_model(name).generate(asked) for name in ("amber", "base"))
    assert len({one.text for one in [*amber, *base]}) == 8
    again = together(
        *[lambda n=n: home.get_model(n).generate(asked[::-1]) for n in ("base", "amber")]
    )
    assert again == [base[::-1], amber[::-1]]


def pieces(answer: Iterator[Delta]) -> tuple[list[str], Completion]:
    """The pieces of a stream, and the whole."""
    texts = []
    while True:
        try:
            texts.append(next(answer).text)
        except StopIteration as end:
            return texts, end.value


def test_an_answer_comes_piece_by_piece(home: LocalModels) -> None:
    voice = home.get_model("amber")
    long = replace(TURNS, max_new_tokens=30)
    whole = voice.generate([long])[0]
    texts, answer = pieces(voice.stream(long))
    assert answer == whole and "".join(texts) == whole.text and len(texts) > 10
    stop = (whole.text[20:23], "never")
    cut = voice.generate([replace(long, stop=stop)])[0]
    texts, answer = pieces(voice.stream(replace(long, stop=stop)))
    assert answer == cut and "".join(texts) == cut.text == whole.text[: len(cut.text)]
    assert cut.finish == "stop" and 0 < len(cut.text) < len(whole.text)
    with pytest.raises(UserError, match="more than the model's 512"):
        next(voice.stream(replace(TEXT, prompt="no " * 600)))


class Gate:
    """Settles nothing, and lets no more than three tokens through before it is opened."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, text: str) -> bool:
        self.seen.append(text)
        if len(self.seen) >= 3:
            self.reached.set()
            assert self.opened.wait(20)
        return False


def test_who_goes_away_ends_what_is_written_for_them(home: LocalModels) -> None:
    voice, gate = home.get_model("amber"), Gate()
    long = replace(TEXT, max_new_tokens=40)
    assert voice.generate([long])[0].new_tokens == 40
    answer = voice.stream(replace(long, stop_check=gate))
    assert next(answer).text
    answer.close()
    gate.opened.set()
    assert said(voice, TEXT) and len(gate.seen) <= 3


def test_a_fault_in_the_engine_reaches_all_who_wait(
    home: LocalModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    voices = [home.get_model(name) for name in ("amber", "birch")]
    for voice in voices:
        voice.open()
    (one,) = home.batchers.values()

    def broken(*_: Any) -> Any:
        raise UserError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(one._engine, "generate", broken)
        found = together(*[lambda v=v: v.generate_each([TEXT]) for v in voices])
    assert [str(row[0]) for row in found] == [
        f"local/{name}: out of memory" for name in ("amber", "birch")
    ]
    assert said(voices[0], TEXT)
