"""Whole models of one architecture, mixed in all their weights; the engine: test_engine.py."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import task_items
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from swarm.engine import full
from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine, HFModel
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.errors import UserError
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state
from swarm.tasks.multiple_choice import MultipleChoice

MIXED = (0.5, 0.8, -0.3)
NORM = "model.norm.weight"


def made(folder: Path, kind: str = "llama") -> list[Path]:
    """Three tiny models; the second one is in shards."""
    models = [
        tiny.model(folder / name, kind, seed) for seed, name in enumerate(("ash", "elm", "oak"))
    ]
    network = tiny.load(models[1])
    (models[1] / "model.safetensors").unlink()
    network.save_pretrained(models[1], max_shard_size="20KB")
    return models


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return made(tmp_path_factory.mktemp("models"))


@pytest.fixture
def copies(trio: list[Path], tmp_path: Path) -> list[Path]:
    """The three models, to be changed."""
    return [Path(shutil.copytree(model, tmp_path / model.name)) for model in trio]


def pool_of(models: Sequence[Path], dtype: Any = "auto") -> FullModelPool:
    return FullModelPool(list(map(str, models)), BaseModel(str(models[0]), dtype=dtype)).open()


def opened(pool: FullModelPool) -> FullWeightsEngine:
    engine = FullWeightsEngine()
    pool.check()
    engine.check(pool.base, pool)
    engine.open(pool.base, pool, "cpu")
    return engine


def become(engine: FullWeightsEngine, position: Sequence[float]) -> Any:
    """The engine's model, at a position."""
    engine._mixer.set_positions(torch.tensor([list(position)], dtype=torch.float64))
    return engine._model


def digests(models: Sequence[Path]) -> list[str]:
    files = [file for model in models for file in sorted(model.iterdir())]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def change(model: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a model in one file."""
    file = model / "model.safetensors"
    weights = load_file(file)
    how(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_one_alone_is_that_model_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """In one file or in shards, tied or not; and the files are never written to."""
    models = made(tmp_path, kind)
    before, engine = digests(models), opened(pool_of(models))
    for position, model in zip(np.eye(3), models, strict=True):
        network = become(engine, position)
        assert torch.equal(tiny.logits(network), tiny.logits(tiny.load(model)))
    become(engine, MIXED)
    assert digests(models) == before


def test_a_position_is_the_sum_of_all_weights_rounded_once(
    trio: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "CHUNK_NUMBERS", 500)  # so that the tiny tensors are cut, too
    ours, *others = (tiny.load(model).state_dict() for model in trio)
    for dtype in ("float32", "bfloat16", "float16"):
        network = become(opened(pool_of(trio, dtype)), MIXED)
        assert network.dtype == getattr(torch, dtype)
        for name, weight in network.state_dict().items():
            exact = MIXED[0] * ours[name].double()
            for coefficient, other in zip(MIXED[1:], others, strict=True):
                exact += coefficient * other[name].double()
            assert torch.equal(weight, exact.to(weight.dtype)), name


def test_an_interrupted_rewrite_is_done_again(
    trio: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(pool_of(trio))
    wanted = tiny.logits(become(engine, MIXED))
    fill = FullModelPool.fill_tensor

    def stops(self: FullModelPool, into: Any, name: str, vector: Sequence[float]) -> None:
        if name == NORM:
            raise KeyboardInterrupt
        fill(self, into, name, vector)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FullModelPool, "fill_tensor", stops)
        become(engine, np.eye(3)[1])
    assert torch.equal(tiny.logits(become(engine, MIXED)), wanted)


def test_the_saved_model_is_the_one_that_was_evaluated(
    trio: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, folder = pool_of(trio), tmp_path / "saved"
    wanted = tiny.logits(become(opened(pool), MIXED))
    for size in (2e9, 40e3):  # the second replaces the first, in shards
        monkeypatch.setattr(full, "SHARD_BYTES", size)
        pool.save(MIXED, folder, {"iteration": 3})
        network = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
        assert torch.equal(tiny.logits(network.eval()), wanted)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and all(file.stat().st_size < 44_000 for file in shards)
    index = json.loads((folder / full.INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == {file.name for file in shards}
    assert AutoTokenizer.from_pretrained(folder)("yes").input_ids
    assert json.loads((folder / "generation_config.json").read_text())
    note = json.loads((folder / "swarm.json").read_text())
    assert note["coefficients"] == list(MIXED) and note["iteration"] == 3
    assert note["experts"] == ["ash", "elm", "oak"] and note["models"] == list(map(str, trio))
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_a_model_is_saved_in_its_experts_type(trio: list[Path], tmp_path: Path) -> None:
    halves = []
    for model, dtype in zip(trio, (torch.bfloat16, torch.bfloat16, torch.float16), strict=True):
        halves.append(tmp_path / model.name)
        shutil.copytree(trio[0], halves[-1])
        tiny.load(model).to(dtype).save_pretrained(halves[-1])
    for models, given, found in (
        (halves[:2], "auto", "bfloat16"),
        (halves[1:], "auto", "float32"),
        (halves[:2], "float16", "float16"),
    ):
        pool_of(models, given).save(MIXED[: len(models)], tmp_path / "saved")
        weights = load_file(tmp_path / "saved" / "model.safetensors")
        assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{found}"}
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == found


def test_a_tied_output_layer_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    models = made(tmp_path, "gemma")

    def spell_out(weights: dict[str, Any], plus: float = 0.0) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + plus

    change(models[2], spell_out)
    pool = pool_of(models)
    assert "lm_head.weight" not in pool.tensors
    engine = opened(pool)
    for position, model in zip(np.eye(3), models, strict=True):
        assert torch.equal(tiny.logits(become(engine, position)), tiny.logits(tiny.load(model)))
    change(models[0], spell_out)
    opened(pool_of([models[0], models[2]]))
    change(models[2], lambda weights: spell_out(weights, 1.0))
    with pytest.raises(UserError, match=r"lm_head.weight.*differ in the files but are tied by"):
        opened(pool_of([models[0], models[2]]))
    with pytest.raises(UserError, match=r"oak has a tensor lm_head\.weight of shape \[308, 32\]"):
        pool_of(models).check()


def test_whole_numbers_are_taken_over_and_have_to_agree(copies: list[Path], tmp_path: Path) -> None:
    def count(weights: dict[str, Any], start: int = 0) -> None:
        weights["model.counts"] = torch.arange(start, start + 5)

    two = [copies[0], copies[2]]
    for model in two:
        change(model, count)
    pool_of(two).check()
    pool_of(two).save(MIXED[:2], tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["model.counts"].tolist() == [0, 1, 2, 3, 4]
    change(copies[2], lambda weights: count(weights, 1))
    with pytest.raises(UserError, match=r"model\.counts in .*oak contains .* other integers"):
        pool_of(two).check()


def norm(how: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    """Damage by another tensor in place of the last norm's."""
    return lambda model: change(model, lambda w: w.update({NORM: how(w[NORM])}))


def set_json(name: str, **settings: Any) -> Callable[[Path], None]:
    def how(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return how


def rename(name: str) -> Callable[[Path], Any]:
    return lambda model: (model / "model.safetensors").rename(model / name)


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


SHARD = "model-00002-of-00007.safetensors"
DAMAGE: list[tuple[int, Callable[[Path], Any], str]] = [
    (
        2,
        norm(lambda w: w[1:].clone()),
        r"norm\.weight is F32 \[31\] in .*oak and F32 \[32\] in .*a",
    ),
    (2, norm(lambda w: w.to(torch.float8_e4m3fn)), r"oak: model\.norm\.weight is of type F8_E4M3"),
    (
        2,
        lambda model: change(model, lambda weights: weights.pop(NORM)),
        r"ash has a tensor model\.norm\.weight of shape \[32\], and .*oak has none",
    ),
    (2, set_json("config.json", rms_norm_eps=0.5), r"oak is another architecture than .*ash: rms_"),
    (2, set_json("config.json", model_type="no_such"), r"oak/config\.json cannot be read"),
    (2, truncate, r"oak: its weights, .*damaged \(SafetensorError"),
    (2, rename("pytorch_model.bin"), "pickled weights"),
    (2, shutil.rmtree, r"pool\.models: .*oak: no such folder"),
    (1, lambda model: (model / SHARD).unlink(), rf"elm: its weights, .* missing .*{SHARD}"),
    (
        1,
        set_json(full.INDEX_FILE, weight_map={"model.more": SHARD}),
        r"elm: .* lists model\.more, which is in no shard",
    ),
]


@pytest.mark.parametrize(("which", "damage", "said"), DAMAGE, ids=[one[2][:30] for one in DAMAGE])
def test_what_cannot_be_mixed_is_named(
    which: int, damage: Callable[[Path], Any], said: str, copies: list[Path]
) -> None:
    damage(copies[which])
    with pytest.raises(UserError, match=said) as caught:
        pool_of(copies).check()
    assert "\n" not in str(caught.value)


def test_the_base_has_to_be_of_the_same_architecture(
    trio: list[Path], tiny_gemma: Path, copies: list[Path], tmp_path: Path
) -> None:
    gemma = BaseModel(str(tiny_gemma))
    with pytest.raises(UserError, match="tiny-gemma is another architecture"):
        FullWeightsEngine().check(gemma, FullModelPool(list(map(str, trio)), gemma))
    for model in copies:
        set_json("config.json", vocab_size=400)(model)
    with pytest.raises(UserError, match=r"embed_tokens\.weight has shape \[308, 32\] in .*ash"):
        FullWeightsEngine().check(pool_of(copies).base, pool_of(copies))
    # transformers holds its experts otherwise than the file.
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    more = {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 2}
    for name in ("one", "two"):
        tiny.tokenizer(tmp_path / name)
        config = MixtralConfig(vocab_size=308, **shape, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    pool = pool_of([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(UserError, match=r"one has no tensor model\.layers\.0.*mixed"):
        FullWeightsEngine().check(pool.base, pool)


def test_a_models_folder_and_another_ones_files_are_not_replaced(
    copies: list[Path], tmp_path: Path
) -> None:
    pool, own = pool_of(copies), tmp_path / "own"
    pool.save(MIXED, own)
    again = pool_of([*copies, own])
    before = digests([*copies, own])
    for folder in (copies[1], own):
        with pytest.raises(UserError, match="a model of the pool, which is not overwritten"):
            again.save((*MIXED, 0.0), folder)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="something other than a saved model"):
        pool.save(MIXED, tmp_path / "notes")
    assert digests([*copies, own]) == before
    with pytest.raises(UserError, match="3 finite numbers"):
        pool.save((1.0, float("nan"), 0.0), own)


def test_the_fingerprint_changes_with_a_weight_and_the_order(copies: list[Path]) -> None:
    seen = [pool_of(copies).fingerprint(), pool_of(copies[::-1]).fingerprint()]
    change(copies[2], lambda weights: weights[NORM].add_(1))
    seen.append(pool_of(copies).fingerprint())
    assert len(set(seen)) == 3 and pool_of(copies).fingerprint() == seen[-1]


def test_a_search_saves_the_best_as_a_model(trio: list[Path], tmp_path: Path) -> None:
    """And notes the personal bests, which can be made from that."""
    plain = searches.arguments(tmp_path, trio[0], trio[0])
    kept = [one for one in plain if not one.startswith(("model", "pool.", "ensemble"))]
    listed = ",".join(map(str, trio))
    words = [*kept, "experiment=full_models", f"pool.models=[{listed}]"]
    result = commands.run("swarm.search", *words)
    assert result.code == 0, result.err
    folder = tmp_path / "search" / "run"
    state = read_state(folder)
    assert state["experts"] == ["ash", "elm", "oak"]
    assert np.array_equal(np.array(state["rounds"][0]["positions"])[:3], np.eye(3))
    assert len({u for entry in state["rounds"] for u in entry["utilities"]}) > 2
    command, report = result.out.splitlines()[-2:]
    assert command.startswith(f"python -m swarm.export {folder} ")
    assert report == f"report: {folder / 'report.html'}"
    best = folder / "global_best"
    model = HFModel(BaseModel(str(best)))
    task = MultipleChoice("tiny", str(tmp_path / "tiny.json"), scoring="logits")
    model.open("cpu")
    scores = task_items.played(task, task.items("dev"), model)
    facts = json.loads((best / "swarm.json").read_text())
    rows = [json.loads(line) for line in (best / "answers_dev.jsonl").read_text().splitlines()]
    assert [score.answer for score in scores] == [row["answer"] for row in rows]
    assert task.utility(scores) == facts["validation_utility"]
    personal = folder / "particle_4" / "personal_best"
    assert sorted(one.name for one in personal.iterdir()) == ["answers_dev.jsonl", "swarm.json"]
    note = json.loads((personal / "swarm.json").read_text())
    FullModelPool(note["models"]).save(note["coefficients"], tmp_path / "mine")
    network = become(opened(pool_of(trio)), note["coefficients"])
    assert torch.equal(tiny.logits(tiny.load(tmp_path / "mine")), tiny.logits(network))


def test_what_does_not_go_together_is_named(trio: list[Path], tiny_pool: Path) -> None:
    models = list(map(str, trio))
    for given in (None, models[:1], [models[0]] * 2):
        with pytest.raises(UserError, match=r"pool.models=.*two or more .*, each once"):
            FullModelPool(given)
    for name, engine, pool in (
        ("hf", HFEngine(), FullModelPool(models)),
        ("token", TokenEnsembleEngine(), FullModelPool(models)),
        ("full", FullWeightsEngine(), ModelEnsemble(models)),
        ("full", FullWeightsEngine(), Pool(tiny_pool)),
    ):
        with pytest.raises(UserError, match=rf"engine={name} does not mix .*needs engine="):
            engine.check(BaseModel(models[0]), pool.open())
