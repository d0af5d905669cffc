"""Exports: the adapter, the whole model and their card."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import commands
import finetune_runs
import gguf
import pytest
import searches
import tiny
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file

from swarm.errors import UserError
from swarm.export import export, gguf_writer
from swarm.export.export import Export
from swarm.merging.positions import describe_position
from swarm.pool.adapter import read_adapter
from swarm.runs.folder import read_state
from swarm.runs.verdict import format_measured, read_verdict, state_verdict


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search with baselines and domains."""
    folder = tmp_path_factory.mktemp("found")
    task = searches.choice_file(folder / "tiny.json")
    content = json.loads(task.read_text())
    for number, item in enumerate([*content["dev"], *content["test"]]):
        item["domain"] = ("hills", "rivers")[number % 2]
    task.write_text(json.dumps(content))
    keys = {"optimizer__max_iterations": 2, "baselines": "[base,soup]"}
    words = searches.arguments(folder, tiny_llama, tiny_pool, "first", **keys)
    done = commands.run("swarm.search", *words)
    assert done.code == 0, done.err
    return folder / "search" / "first"


def written(source: Path, to: Path, *kind: str, **keys: Any) -> str:
    """The card of an export."""
    Export(str(source), str(to), *kind, **keys).write()
    return (to / "README.md").read_text()


def loaded(export: Path) -> Any:
    """The model that the card's lines load beside the export's folder, and let answer."""
    code, *asked = re.findall(r"(?s)```python\n(.*?)```", (export / "README.md").read_text())
    assert sum(" = " in line for line in code.splitlines()) <= 2
    assert not re.search(r"(import|from) swarm", code)
    space: dict[str, Any] = {}
    with contextlib.chdir(export.parent):
        for lines in (code, *asked):
            exec(lines, space)
    return space["model"]


def front(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    matter: dict[str, Any] = yaml.safe_load(card[4:].partition("\n---\n")[0])
    return matter


def note_of(folder: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((folder / "swarm.json").read_text())
    return note


def test_the_best_of_a_search_as_an_adapter_with_its_card(
    found: Path, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    mine, best = tmp_path / "mine", found / "global_best"
    told = Export(str(found), str(mine)).write()
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(one.name for one in mine.iterdir()) == ["README.md", *files, "swarm.json"]
    assert all((mine / name).read_bytes() == (best / name).read_bytes() for name in files)
    note = note_of(best)
    assert note["prompt_form"] == "plain"
    assert note_of(mine) == {**note, "exported": {"of": "first", "as": "peft"}}
    assert told[1] == (
        f"vllm serve {tiny_llama} --enable-lora --max-lora-rank 8 --lora-modules mine={mine}"
    )
    card = (mine / "README.md").read_text()
    saved = PeftModel.from_pretrained(tiny.load(tiny_llama), best)
    assert torch.equal(tiny.logits(loaded(mine)), tiny.logits(saved))
    state = read_state(found)
    verdict = read_verdict(state)
    assert describe_position(note["experts"], note["coefficients"]) in card
    assert "\n| hills" in card and "\n| rivers" in card
    for one in verdict.alternatives:
        if one.name not in ("expert", "constant"):
            assert f"Gain over the {one.label}, {one.test.utility:.3f} on test: " in card
    part = card.partition("## Reproduce")[2].partition("##")[0]
    assert "python -m swarm.search " in part and "task=mmlu" in part
    assert "python -m swarm.export search/first to=mine" in part
    packages = state["versions"][-1]["packages"]
    assert all(f"{name} {number}" in part for name, number in packages.items())
    for one in (verdict.start_model, verdict.found):
        assert format_measured(one.dev) in card and format_measured(one.test) in card
    assert str(state_verdict(verdict, found)) in card
    # A local folder is no model of the hub.
    assert front(card).keys() == {"library_name", "pipeline_tag", "tags", "model-index"}
    assert front(card)["library_name"] == "peft" and "licences of the base model and" in card
    (result,) = ModelCard(card).data.eval_results
    tested = verdict.found.test
    assert (result.dataset_name, result.metric_value) == ("mmlu", round(tested.utility, 4))
    assert f"{tested.n} items" in result.metric_name
    # Its own folder is written anew, and no other.
    Export(str(found), str(mine)).write()
    for other in (tiny_pool / "amber", found, best):
        before = searches.tree(other)
        with pytest.raises(UserError, match="something other than an export"):
            Export(str(found), str(other)).write()
        assert searches.tree(other) == before


def test_personal_bests_and_alternatives_of_a_search(found: Path, tmp_path: Path) -> None:
    saved = found / "particle_3" / "personal_best"
    card, mine = written(saved, tmp_path / "third"), note_of(tmp_path / "third")
    assert mine["coefficients"] == note_of(saved)["coefficients"] and mine["particle"] == 3
    assert "it was not tested" in card
    verdict = read_verdict(read_state(found))
    names = {one.name for one in verdict.alternatives} - {"base", "constant", "experts"}
    assert "expert" in names
    for name in names:
        assert " on test." in written(found, tmp_path / name, baseline=name)
        assert (tmp_path / name / "adapter_model.safetensors").is_file()
    mine = note_of(tmp_path / "expert")
    assert mine["coefficients"] == [float(name == verdict.expert) for name in mine["experts"]]
    for keys, error in (
        ({"baseline": "base"}, r"baseline=base: .* has these: .*expert$"),
        ({"baseline": "expert", "point": 1}, "one of these may be set"),
    ):
        with pytest.raises(UserError, match=error):
            Export(str(found), str(tmp_path / "x"), **keys)


def test_the_card_tells_groups_the_space_and_how_far_an_adapter_is_off(
    tiny_pool: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pool / "amber", tmp_path / "best")
    note: dict[str, Any] = {
        "experts": ["amber", "birch"],
        "groups": ["attention", "mlp"],
        "space": "delta",
        "coefficients": [0.75, 0.25, 0.0, -1.5],
        "validation_utility": 0.5,
    }
    (tmp_path / "best" / "swarm.json").write_text(json.dumps(note))
    card = written(tmp_path / "best", tmp_path / "mine")
    for words in (
        "attention: 0.75 amber + 0.25 birch; mlp: - 1.50 birch.",
        "| birch  |    0.2500 | -1.5000 |",
        "(the delta space)",
        "Utility 0.5000 on dev",
    ):
        assert words in card, words
    names = [f"layer {n} q_proj" for n in range(60)]
    note |= {"groups": names, "coefficients": [n / 100 for n in range(120)]}
    (tmp_path / "best" / "swarm.json").write_text(json.dumps(note))
    card = written(tmp_path / "best", tmp_path / "many")
    assert "| layer 59 q_proj | 1.1800 | 1.1900 |" in card and "mean of 60 groups" in card


def test_merged_models_say_what_peft_says(
    tiny_llama: Path, tiny_gemma: Path, mixed_pool: Path, tmp_path: Path
) -> None:
    """Of several ranks, and with an adapted head that shares its weight with the embedding."""
    head = tmp_path / "head"
    tiny.expert(tiny_gemma, head, targets=("q_proj", "lm_head"))
    file = head / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if ".lora_" in name}, file)
    for base, adapter in (
        (tiny_llama, mixed_pool / "amber"),
        (tiny_llama, mixed_pool / "cedar"),
        (tiny_gemma, head),
    ):
        told = Export(str(adapter), str(tmp_path / "m"), "merged", dtype="float32").write()
        assert told[1] == f"vllm serve {tmp_path / 'm'}"
        wanted = tiny.logits(PeftModel.from_pretrained(tiny.load(base), adapter))
        got = tiny.logits(tiny.load(tmp_path / "m"))
        assert torch.allclose(got, wanted, atol=1e-5, rtol=0)
        assert not torch.allclose(got, tiny.logits(tiny.load(base)), atol=1e-2)
    save_file({k.replace("layers.1", "layers.7"): v for k, v in load_file(file).items()}, file)
    with pytest.raises(UserError, match="set the base it was trained on"):
        Export(str(head), str(tmp_path / "x"), "merged").write()
    assert not (tmp_path / "x").exists()


def test_bfloat16_is_the_rounded_float32_sum_in_shards_and_the_base_is_loaded_once(
    found: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "30KB")
    opened, original = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: opened.append(a) or original(*a, **k),
    )
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    base = shutil.copytree(tiny_llama, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n")
    full = written(found, exact, "merged", dtype="float32", base=str(base))
    assert front(full)["license"] == "apache-2.0" and "base model (apache-2.0) and" in full
    card = written(found, rounded, "merged")
    assert len(opened) == 2
    sums, halves = (
        {
            name: one
            for file in folder.glob("*.safetensors")
            for name, one in load_file(file).items()
        }
        for folder in (exact, rounded)
    )
    assert sums.keys() == halves.keys() and len(list(exact.glob("*.safetensors"))) > 2
    assert (exact / "model.safetensors.index.json").is_file()
    for name, tensor in sums.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16(), halves[name])
    assert json.loads((rounded / "config.json").read_text())["dtype"] == "bfloat16"
    assert (rounded / "generation_config.json").is_file()
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((rounded / one).read_bytes() == (tiny_llama / one).read_bytes() for one in names)
    assert "as bfloat16" in card and front(card)["library_name"] == "transformers"
    assert "measured before the weights were rounded to bfloat16" in " ".join(card.split())
    assert "were rounded" not in full


def test_a_fine_tuning_and_a_whole_model(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    finetune_runs.tune(
        finetune_runs.words(tmp_path, tiny_llama, tiny_pool, "tuned", expert="amber", steps=5)
    )
    run = tmp_path / "search" / "tuned"
    card = written(run, tmp_path / "mine")
    assert "fine-tuned by gradient for the task mmlu" in card and "| tuned " in card
    assert "amber, trained further for" in card
    with pytest.raises(UserError, match="baseline=expert"):
        Export(str(run), str(tmp_path / "x"), baseline="expert")
    shutil.copytree(tiny_llama, tmp_path / "whole")
    models = {"experts": ["mine", "one"], "models": [str(tmp_path / "mine"), "owner/one"]}
    note = models | {"coefficients": [0.5, 0.5], "space": "weights"}
    (tmp_path / "whole" / "swarm.json").write_text(json.dumps(note))
    card = written(tmp_path / "whole", tmp_path / "copy", "merged")
    assert front(card)["base_model"] == ["owner/one"] and "0.50 mine + 0.50 one" in card
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tiny_llama / name).read_bytes()
    with pytest.raises(UserError, match="is a full model"):
        Export(str(tiny_llama), str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"to": None}, "to=null: must be text"),
        ({"format": "onnx"}, "format=onnx"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"format": "merged", "quantize": "q8_0"}, "quantize=q8_0: only with format=gguf"),
        ({"point": "x"}, "point=x"),
        ({"push_to_hub": "only-a-name"}, "user/name"),
        ({"push_to_hub": "user/name"}, "HF_HUB_OFFLINE"),
        ({"format": "merged", "base": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    keys: dict[str, Any], said: str, found: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        Export(str(found), **{"to": str(tmp_path / "mine"), **keys}).write()
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_lower_rank_is_the_nearest_there_is_and_says_what_it_loses(
    found: Path, mixed_pool: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    told = Export(str(found), str(tmp_path / "low"), rank=1).write()
    note, card = note_of(tmp_path / "low")["cut"], (tmp_path / "low" / "README.md").read_text()
    assert told[1].startswith("cut to rank 1 by SVD, an error of 0.") and told[2] == note["dev"]
    assert re.match(r"0\.\d+ on dev, 0\.\d+ before; ", note["dev"]) and note["dev"] in card
    assert "| before the cut " in card and "rank=1" in card and "model-index" not in card
    assert "cut to rank 1" in written(found, tmp_path / "gguf", "gguf_lora", rank=1)
    for rank, name in ((2, "amber"), (5, "cedar"), (5, "dune")):
        source = mixed_pool / name
        Export(str(source), str(tmp_path / name), rank=rank).write()
        exact, cut = read_adapter(source), read_adapter(tmp_path / name)
        error = note_of(tmp_path / name)["cut"]["error"]
        distances = {}
        for module, (*_, own) in exact.shapes.items():
            assert cut.shapes[module][2] == min(rank, own)
            one, two = (b @ a for a, b in (e.load_factors(module) for e in (exact, cut)))
            values = torch.linalg.svdvals(one)
            distances[module] = float((one - two).norm() / one.norm())
            nearest = float(values[rank:].norm() / values.norm())
            assert distances[module] == pytest.approx(nearest, rel=1e-5, abs=1e-6)
        assert error["worst"] == pytest.approx(max(distances.values()), rel=1e-4)
        PeftModel.from_pretrained(tiny.load(tiny_llama), tmp_path / name)
    assert note_of(tmp_path / name)["cut"]["dev"].startswith("not measured on dev: dune has no")
    for keys, error in (({"rank": 4}, "has rank 4; give less"), ({"rank": 0}, "rank=0")):
        with pytest.raises(UserError, match=error):
            Export(str(found), str(tmp_path / "x"), **keys).write()


@pytest.mark.parametrize("space", ["delta", "factor"])
def test_parts_are_mixed_by_a_request_into_the_result(
    space: str, tiny_llama: Path, mixed_pool: Path, tmp_path: Path
) -> None:
    """As llama.cpp (W + sum scale B A) and LoRAX (W + sum w B sum w A) compute it."""
    keys: dict[str, Any] = {"pool__space": space, "optimizer__max_iterations": 2}
    if space == "delta":
        keys |= {"optimizer": "gradient", "pool__new_adapter": 2}
    run, to = tmp_path / "search" / "one", tmp_path / "parts"
    words = searches.arguments(tmp_path, tiny_llama, mixed_pool, "one", **keys)
    done = commands.run("swarm.search", *words)
    assert done.code == 0, done.err
    note = note_of(run / "global_best")
    told = Export(str(run), str(to), "parts").write()
    request = json.loads((to / "request.json").read_text())
    assert "`request.json`" in (to / "README.md").read_text()
    exact = read_adapter(run / "global_best")
    wanted = {m: b @ a for m, (a, b) in ((m, exact.load_factors(m)) for m in exact.shapes)}
    config = json.loads((tiny_llama / "config.json").read_text())
    if space == "delta":
        files = told[-1].rpartition(" ")[2].split(",")
        total: dict[str, Any] = {}
        for entry in request["lora"]:
            tensors = gguf.GGUFReader(files[entry["id"]]).tensors
            factors = {one.name: torch.tensor(one.data).double() for one in tensors}
            for name in (n for n in factors if n.endswith("lora_a")):
                update = entry["scale"] * factors[name[:-1] + "b"] @ factors[name]
                total[name] = total.get(name, 0) + update
        assert len(total) == len(wanted)
        assert Path(files[-1]).name == "new.gguf" and request["lora"][-1]["scale"] == 1.0
        Export(str(run), str(tmp_path / "whole")).write()
        Export(str(run), str(tmp_path / "full"), "merged", dtype="float32").write()
        one, two = (tiny.logits(loaded(tmp_path / name)) for name in ("whole", "full"))
        assert torch.allclose(one, two, atol=1e-4)
        for module, update in wanted.items():
            names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
            heads = gguf_writer._count_heads(module, config)
            mine = gguf_writer.interleave_rope_rows(update, heads) if heads else update
            found = total[f"{names.get_name(module)}.weight.lora_a"]
            assert torch.allclose(found, mine, atol=1e-5), module
        return
    mixed = request["parameters"]["merged_adapters"]
    assert mixed["merge_strategy"] == "linear"
    parts = [read_adapter(to / name) for name in mixed["ids"]]
    assert len({part.config["r"] for part in parts}) == 1
    for module, update in wanted.items():
        having = [
            (w, p) for w, p in zip(mixed["weights"], parts, strict=True) if module in p.shapes
        ]
        a, b = (sum(w * p.load_factors(module)[i] for w, p in having) for i in (0, 1))
        assert torch.allclose(b @ a if having else 0 * update, update, atol=1e-5), module
    with pytest.raises(UserError, match="rank=2: not one adapter"):
        Export(str(run), str(to), "parts", rank=2)
    assert sorted(note["experts"]) == ["amber", "birch", "cedar", "dune"]


def test_a_mistake_on_the_command_line_is_one_line(found: Path, tmp_path: Path) -> None:
    for words, said in (
        ([], "give one run folder"),
        (["a", "b"], "give one run folder"),
        ([found, "to=x", "poin=3"], "poin: no such key; did you mean point?"),
        ([found, "to=[a"], "cannot be parsed"),
        ([found], "to: is missing"),
        ([tmp_path, "to=x"], "neither an adapter nor a model"),
    ):
        done = commands.run("swarm.export", *words)
        assert done.code in (1, 2) and said in done.err and len(done.err.splitlines()) == 1
    words = ["to=2026-11-27"]
    done = commands.run("swarm.export", found, *words, cwd=tmp_path)
    assert done.code == 0 and (tmp_path / "2026-11-27" / "README.md").is_file(), done.err
    assert "push_to_hub" in commands.run("swarm.export", "--help").out
