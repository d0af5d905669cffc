"""Whole models of one architecture, mixed in all their weights."""

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

from swarm.engine import full as checkpoint
from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.errors import UserError
from swarm.models.base import Model, Request
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state
from swarm.tasks.multiple_choice import MultipleChoice

MIXED = (0.5, 0.8, -0.3)


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


def pool_of(models: Sequence[Path], dtype: str = "auto", **settings: Any) -> FullModelPool:
    return FullModelPool(
        list(map(str, models)), BaseModel(str(models[0]), dtype=dtype), **settings
    ).open()


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


def change(model: Path, how: Callable[[dict[str, Any]], None]) -> None:
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
    monkeypatch.setattr(checkpoint, "CHUNK_NUMBERS", 500)  # so that the tiny tensors are cut, too
    ours, *others = (tiny.load(model).state_dict() for model in trio)
    for dtype in ("float32", "bfloat16", "float16"):
        network = become(opened(pool_of(trio, dtype)), MIXED)
        assert network.dtype == getattr(torch, dtype)
        for name, weight in network.state_dict().items():
            exact = MIXED[0] * ours[name].double()
            for coefficient, other in zip(MIXED[1:], others, strict=True):
                exact += coefficient * other[name].double()
            assert torch.equal(weight, exact.to(weight.dtype)), name


def test_a_position_answers_as_its_own_generate(trio: list[Path], tmp_path: Path) -> None:
    pool = pool_of(trio)
    engine, tokenizer = opened(pool), AutoTokenizer.from_pretrained(trio[0])
    prompts = ("the question is which of the answers is right", "a graph of 5 nodes")
    positions = np.array([MIXED, (0.0, 1.0, 0.0), (0.2, 0.3, 0.5)])
    rows = engine.generate(positions, [[Request(prompt, 8) for prompt in prompts]] * 3)
    assert len({completion.text for row in rows for completion in row}) > 3
    for number, row in enumerate(rows):
        pool.save(positions[number], tmp_path / "saved")
        network = tiny.load(tmp_path / "saved")
        for prompt, completion in zip(prompts, row, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                out = network.generate(**ids, max_new_tokens=8, do_sample=False)
            new = out[0, ids.input_ids.shape[1] :]
            assert completion.text == tokenizer.decode(new, skip_special_tokens=True)


def test_an_interrupted_rewrite_is_done_again(
    trio: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(pool_of(trio))
    wanted = tiny.logits(become(engine, MIXED))
    part = FullModelPool._mix_rows

    def stops(self: FullModelPool, name: str, *more: Any) -> Any:
        if name == "model.norm.weight":
            raise KeyboardInterrupt
        return part(self, name, *more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FullModelPool, "_mix_rows", stops)
        become(engine, np.eye(3)[1])
    assert torch.equal(tiny.logits(become(engine, MIXED)), wanted)


def test_the_saved_model_is_the_one_that_was_evaluated(trio: list[Path], tmp_path: Path) -> None:
    pool, folder = pool_of(trio, shard_gigabytes=40e-6), tmp_path / "saved"
    wanted = tiny.logits(become(opened(pool), MIXED))
    for _ in range(2):  # the second replaces the first
        pool.save(MIXED, folder, {"iteration": 3})
    network = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    assert torch.equal(tiny.logits(network.eval()), wanted)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2 and all(file.stat().st_size < 44_000 for file in shards)
    index = json.loads((folder / checkpoint.INDEX_FILE).read_text())
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
    for models, dtype, found in (
        (halves[:2], "auto", "bfloat16"),
        (halves[1:], "auto", "float32"),
        (halves[:2], "float16", "float16"),
    ):
        position = MIXED[: len(models)]
        pool_of(models, dtype).save(position, tmp_path / "saved")
        weights = load_file(tmp_path / "saved" / "model.safetensors")
        assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{found}"}
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == found


def test_a_tied_output_layer_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    models = made(tmp_path, "gemma")
    embedding = "model.embed_tokens.weight"

    def spell_out(weights: dict[str, Any], plus: float = 0.0) -> None:
        weights["lm_head.weight"] = weights[embedding] + plus

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

    for model in (copies[0], copies[2]):
        change(model, count)
    pool = pool_of([copies[0], copies[2]])
    pool.check()
    pool.save(MIXED[:2], tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["model.counts"].tolist() == [0, 1, 2, 3, 4]
    change(copies[2], lambda weights: count(weights, 1))
    with pytest.raises(UserError, match=r"model\.counts contains other integers in .*oak"):
        pool_of([copies[0], copies[2]]).check()


def cut(name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        change(model, lambda weights: weights.update({name: weights[name][1:].clone()}))

    return damage


def drop(model: Path) -> None:
    change(model, lambda weights: weights.pop("model.norm.weight"))


def spoil(model: Path) -> None:
    change(model, lambda weights: weights["model.norm.weight"].fill_(float("nan")))


def count_all(model: Path) -> None:
    change(model, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].long()}))


def compress(model: Path) -> None:
    def how(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)

    change(model, how)


def set_config(**settings: Any) -> Callable[[Path], None]:
    def how(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return how


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def rename(model: Path) -> None:
    (model / "model.safetensors").rename(model / "other.safetensors")


DAMAGE = [
    (cut("model.norm.weight"), r"norm\.weight has shape \[31\] in .*oak and \[32\] in .*ash"),
    (drop, r"ash has a tensor model\.norm\.weight of shape \[32\], and .*oak has none"),
    (spoil, r"oak: model\.norm\.weight contains weights that are NaN"),
    (count_all, r"model\.norm\.weight is of type I64 in .*oak and F32 in .*ash"),
    (compress, r"oak: model\.norm\.weight is of type F8_E4M3"),
    (set_config(rms_norm_eps=0.5), r"oak is another architecture than .*ash: rms_norm_eps .* 0\.5"),
    (set_config(architectures=["LlamaModel"]), r"oak is another architecture .*architectures"),
    (set_config(model_type="no_such"), r"oak/config\.json cannot be read"),
    (truncate, r"oak/model\.safetensors is damaged"),
    (pickle, r"pickled weights"),
    (rename, r"oak contains neither model\.safetensors nor model\.safetensors\.index\.json"),
    (shutil.rmtree, r"pool\.models: .*oak: no such folder"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=[said[:30] for _, said in DAMAGE])
def test_what_cannot_be_mixed_is_named(
    damage: Callable[[Path], None], said: str, copies: list[Path]
) -> None:
    damage(copies[2])
    with pytest.raises(UserError, match=said) as caught:
        pool_of(copies).check()
    assert "\n" not in str(caught.value)


def test_shards_have_to_be_there_and_hold_what_the_index_says(copies: list[Path]) -> None:
    path = copies[1] / checkpoint.INDEX_FILE
    index = json.loads(path.read_text())
    index["weight_map"]["model.more"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"elm: .* lists model\.more, which is in no shard"):
        pool_of(copies).check()
    (copies[1] / "model-00002-of-00007.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"lists model-00002-of-00007\.safetensors, which is missing"
    ):
        pool_of(copies).check()
    path.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        pool_of(copies).check()


def test_the_base_has_to_be_of_the_same_architecture(
    trio: list[Path], tiny_gemma: Path, tmp_path: Path
) -> None:
    models = list(map(str, trio))
    with pytest.raises(UserError, match="tiny-gemma is another architecture"):
        FullWeightsEngine().check(
            BaseModel(str(tiny_gemma)), FullModelPool(models, BaseModel(str(tiny_gemma)))
        )
    wide = tmp_path / "wide"
    shutil.copytree(trio[0], wide)
    tiny.load(trio[0]).save_pretrained(wide)
    set_config(vocab_size=400)(wide)
    pool = FullModelPool([str(wide), models[0]])
    with pytest.raises(UserError, match=r"embed_tokens\.weight has shape \[308, 32\] in .*wide"):
        FullWeightsEngine().check(
            pool.base, FullModelPool([str(wide), str(wide / ".." / "wide")], pool.base)
        )


def test_what_transformers_holds_otherwise_is_refused(tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("one", "two")]
    config = MixtralConfig(
        vocab_size=308,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    for model in models:
        tiny.tokenizer(model)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    pool = pool_of(models)
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
    change(copies[2], lambda weights: weights["model.norm.weight"].add_(1))
    seen.append(pool_of(copies).fingerprint())
    assert len(set(seen)) == 3 and pool_of(copies).fingerprint() == seen[-1]


def command(folder: Path, models: Sequence[Path], name: str = "run", **more: Any) -> list[str]:
    """The command line of a small search over whole models."""
    plain = searches.arguments(folder, models[0], models[0], name, **more)
    kept = [one for one in plain if not one.startswith(("model", "pool.", "ensemble"))]
    listed = ",".join(map(str, models))
    return [*kept, "experiment=full_models", f"pool.models=[{listed}]"]


@pytest.fixture(scope="module")
def done(trio: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, commands.Done]:
    """The place and the output of one finished search."""
    place = tmp_path_factory.mktemp("search")
    result = commands.run("swarm.search", *command(place, trio))
    assert result.code == 0, result.err
    return place, result


def test_a_search_saves_the_best_as_a_model(
    done: tuple[Path, commands.Done],
) -> None:
    place, result = done
    folder = place / "search" / "run"
    state = read_state(folder)
    assert state["experts"] == ["ash", "elm", "oak"]
    first = state["rounds"][0]
    assert np.array_equal(np.array(first["positions"])[:3], np.eye(3))
    assert len({u for entry in state["rounds"] for u in entry["utilities"]}) > 2
    last, following = result.out.splitlines()[-2:]
    assert last.startswith(f"best model: {folder / 'global_best'} (after ")
    assert following.endswith(f"python -m swarm.export {folder} to=exported/run (the model)")
    task = MultipleChoice("tiny", str(place / "tiny.json"), scoring="logits")
    best = folder / "global_best"
    engine = HFEngine("stacked")
    engine.load_base(BaseModel(str(best)), "cpu")
    engine.set_adapters({})

    class Saved(Model):
        def generate(self, requests: Sequence[Request]) -> Any:
            return engine.generate(np.zeros((1, 0)), [requests])[0]

    scores = task_items.played(task, task.items("dev"), Saved())
    facts = json.loads((best / "swarm.json").read_text())
    rows = [json.loads(line) for line in (best / "answers_dev.jsonl").read_text().splitlines()]
    assert [score.answer for score in scores] == [row["answer"] for row in rows]
    assert task.utility(scores) == facts["validation_utility"]


def test_personal_bests_are_noted_and_can_be_made(
    done: tuple[Path, commands.Done], trio: list[Path], tmp_path: Path
) -> None:
    folder = done[0] / "search" / "run" / "particle_4" / "personal_best"
    assert sorted(one.name for one in folder.iterdir()) == ["answers_dev.jsonl", "swarm.json"]
    note = json.loads((folder / "swarm.json").read_text())
    FullModelPool(note["models"]).save(note["coefficients"], tmp_path / "mine")
    network = become(opened(pool_of(trio)), note["coefficients"])
    assert torch.equal(tiny.logits(tiny.load(tmp_path / "mine")), tiny.logits(network))


def test_what_does_not_go_together_is_named(
    trio: list[Path], tiny_gemma: Path, tiny_pool: Path
) -> None:
    models = list(map(str, trio))
    for given, said in (
        (None, "two or more"),
        (models[:1], "two or more"),
        ([models[0]] * 2, "more than once"),
    ):
        with pytest.raises(UserError, match=f"pool.models.*{said}"):
            FullModelPool(given)
    for size in (0, -1, True, float("inf"), "2"):
        with pytest.raises(UserError, match=r"pool\.shard_gigabytes="):
            FullModelPool(models, shard_gigabytes=size)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"tiny-gemma is another architecture than .*ash"):
        FullModelPool([models[0], str(tiny_gemma)]).check()
    base = BaseModel(models[0])
    for engine, pool, said in (
        (HFEngine(), FullModelPool(models), "engine=hf mixes adapters"),
        (TokenEnsembleEngine(), FullModelPool(models), "engine=token mixes complete models"),
        (
            FullWeightsEngine(),
            ModelEnsemble(models),
            "engine=full mixes the weights of complete models",
        ),
        (FullWeightsEngine(), Pool(tiny_pool), "engine=full .* for adapters use engine=hf"),
    ):
        with pytest.raises(UserError, match=said):
            engine.check(base, pool.open())
