"""Exports: the adapter, the whole model and their card."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import commands
import finetune_runs
import pytest
import searches
import tiny
import yaml
from hydra import compose, initialize_config_dir

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.export import export
from swarm.export.export import Export
from swarm.merging.positions import describe_position
from swarm.runs.folder import read_state
from swarm.runs.verdict import format_measured, read_verdict, state_verdict
from swarm.search import build_run


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tiny_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search."""
    folder = tmp_path_factory.mktemp("found")
    words = searches.arguments(folder, tiny_llama, tiny_pool, "first", optimizer__max_iterations=2)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        run, config = build_run(compose("search", words))
    run.search(config)
    return folder / "search" / "first"


def front(folder: Path) -> dict[str, Any]:
    text = (folder / "README.md").read_text()
    assert text.startswith("---\n")
    matter: dict[str, Any] = yaml.safe_load(text[4:].partition("\n---\n")[0])
    return matter


def test_the_best_of_a_search_as_an_adapter_with_its_card(
    found: Path, tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel

    told = Export(str(found), str(tmp_path / "mine")).write()
    mine, best = tmp_path / "mine", found / "global_best"
    assert sorted(path.name for path in mine.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "swarm.json",
    ]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (mine / name).read_bytes() == (best / name).read_bytes()
    note = json.loads((best / "swarm.json").read_text())
    assert note["prompt_form"] == "plain"
    wanted = {**note, "exported": {"of": "first", "as": "peft"}}
    assert json.loads((mine / "swarm.json").read_text()) == wanted
    assert told[1] == (
        f"vllm serve {tiny_llama} --enable-lora --max-lora-rank 8 --lora-modules mine={mine}"
    )
    card = (mine / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert code.count("PeftModel.from_pretrained") == 1
    space: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(code, space)
    saved = PeftModel.from_pretrained(tiny.load(tiny_llama), best)
    assert torch.equal(tiny.logits(space["model"]), tiny.logits(saved))
    metrics = read_verdict(read_state(found))
    assert describe_position(note["experts"], note["coefficients"]) in card
    for one in (metrics.start_model, metrics.found):
        assert format_measured(one.dev) in card and format_measured(one.test) in card
    assert str(state_verdict(metrics, found)) in card
    assert "base_model" not in front(mine), "a local folder is no model of the hub"
    assert front(mine)["library_name"] == "peft"
    assert "license" not in front(mine) and "licences of the base model" in card
    # Its own folder is written anew, and no other.
    Export(str(found), str(mine)).write()
    for other in (tiny_pool / "amber", found, found / "global_best"):
        before = searches.tree(other)
        with pytest.raises(UserError, match="something other than an export"):
            Export(str(found), str(other)).write()
        assert searches.tree(other) == before


def test_a_particle_s_best(found: Path, tmp_path: Path) -> None:
    Export(str(found), str(tmp_path / "third"), particle=3).write()
    note = json.loads((found / "particle_3" / "personal_best" / "swarm.json").read_text())
    mine = json.loads((tmp_path / "third" / "swarm.json").read_text())
    assert mine["coefficients"] == note["coefficients"] and mine["particle"] == 3
    assert "it was not tested" in (tmp_path / "third" / "README.md").read_text()
    with pytest.raises(UserError, match=r"particle=99: the search has 0 to 5$"):
        Export(str(found), str(tmp_path / "x"), particle=99)


def test_what_the_verdict_names_instead_of_the_best_found(found: Path, tmp_path: Path) -> None:
    metrics = read_verdict(read_state(found))
    names = {one.name for one in metrics.alternatives} - {"base", "constant", "experts"}
    assert "expert" in names
    for name in names:
        Export(str(found), str(tmp_path / name), baseline=name).write()
        assert (tmp_path / name / "adapter_model.safetensors").is_file()
        assert " on test." in (tmp_path / name / "README.md").read_text()
    mine = json.loads((tmp_path / "expert" / "swarm.json").read_text())
    best = mine["experts"].index(metrics.expert)
    assert mine["coefficients"] == [float(i == best) for i in range(len(mine["experts"]))]
    with pytest.raises(UserError, match=r"baseline=base: .* has these: .*expert$"):
        Export(str(found), str(tmp_path / "x"), baseline="base")
    with pytest.raises(UserError, match="one of these may be set"):
        Export(str(found), str(tmp_path / "x"), baseline="expert", particle=1)


def test_the_card_tells_groups_the_space_and_how_far_an_adapter_is_off(
    tiny_pool: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pool / "amber", tmp_path / "best")
    note = {
        "experts": ["amber", "birch"],
        "groups": ["attention", "mlp"],
        "space": "delta",
        "coefficients": [0.75, 0.25, 0.0, -1.5],
        "validation_utility": 0.5,
        "reconstruction_error": {"overall": 0.0312, "worst": 0.25},
    }
    (tmp_path / "best" / "swarm.json").write_text(json.dumps(note))
    Export(str(tmp_path / "best"), str(tmp_path / "mine")).write()
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "attention: 0.75 amber + 0.25 birch; mlp: - 1.50 birch." in card
    assert "| birch  |    0.2500 | -1.5000 |" in card
    assert "(the delta space)" in card and "by 0.031 of its norm" in card
    assert "Utility 0.5000 on dev" in card
    names = [f"layer {n} q_proj" for n in range(60)]
    note |= {"groups": names, "coefficients": [n / 100 for n in range(120)]}
    (tmp_path / "best" / "swarm.json").write_text(json.dumps(note))
    Export(str(tmp_path / "best"), str(tmp_path / "many")).write()
    card = (tmp_path / "many" / "README.md").read_text()
    assert "| layer 59 q_proj | 1.1800 | 1.1900 |" in card and "mean of 60 groups" in card


@pytest.mark.parametrize("name", ["amber", "cedar"])
def test_a_merged_model_says_what_peft_says(
    name: str, tiny_llama: Path, mixed_pool: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel

    told = Export(str(mixed_pool / name), str(tmp_path / "m"), "merged", dtype="float32").write()
    assert told[1] == f"vllm serve {tmp_path / 'm'}"
    wanted = tiny.logits(PeftModel.from_pretrained(tiny.load(tiny_llama), mixed_pool / name))
    got = tiny.logits(tiny.load(tmp_path / "m"))
    assert torch.allclose(got, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(got, tiny.logits(tiny.load(tiny_llama)), atol=1e-2)


def test_bfloat16_is_the_rounded_float32_sum_in_shards_and_the_base_is_loaded_once(
    found: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "30KB")
    opened = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: opened.append(a) or original(*a, **k),
    )
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    Export(str(found), str(exact), "merged", dtype="float32").write()
    Export(str(found), str(rounded), "merged").write()
    assert len(opened) == 2
    sums, halves = (
        {
            name: tensor
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        for folder in (exact, rounded)
    )
    assert sums.keys() == halves.keys() and len(list(exact.glob("*.safetensors"))) > 2
    assert (exact / "model.safetensors.index.json").is_file()
    for name, tensor in sums.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16(), halves[name])
    config = json.loads((rounded / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert (rounded / "generation_config.json").is_file()
    mine, base = (AutoTokenizer.from_pretrained(folder) for folder in (rounded, tiny_llama))
    assert mine("which is (A)?").input_ids == base("which is (A)?").input_ids
    assert mine.chat_template == base.chat_template
    assert "as bfloat16" in (rounded / "README.md").read_text()
    warning = "measured before the weights were rounded to bfloat16"
    assert warning in " ".join((rounded / "README.md").read_text().split())
    assert "were rounded" not in (exact / "README.md").read_text()
    assert front(rounded)["library_name"] == "transformers"


def test_an_adapted_head_leaves_the_embedding_that_shares_its_weight(
    tiny_gemma: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel

    tiny.expert(tiny_gemma, tmp_path / "head", targets=("q_proj", "lm_head"))
    from safetensors.torch import load_file, save_file

    file = tmp_path / "head" / "adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if ".lora_" in name}
    save_file(kept, file)
    Export(str(tmp_path / "head"), str(tmp_path / "m"), "merged", dtype="float32").write()
    wanted = tiny.logits(PeftModel.from_pretrained(tiny.load(tiny_gemma), tmp_path / "head"))
    got = tiny.logits(tiny.load(tmp_path / "m"))
    assert torch.allclose(got, wanted, atol=1e-5, rtol=0)


def test_a_fine_tuning_and_a_whole_model(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    finetune_runs.tune(
        finetune_runs.words(tmp_path, tiny_llama, tiny_pool, "tuned", expert="amber", steps=5)
    )
    run = tmp_path / "search" / "tuned"
    Export(str(run), str(tmp_path / "mine")).write()
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "fine-tuned by gradient for the task mmlu" in card and "| tuned " in card
    assert "amber, trained further for" in card
    with pytest.raises(UserError, match="particle=0"):
        Export(str(run), str(tmp_path / "x"), particle=0)
    shutil.copytree(tiny_llama, tmp_path / "whole")
    note = {
        "experts": ["mine", "one"],
        "models": [str(tmp_path / "mine"), "owner/one"],
        "coefficients": [0.5, 0.5],
        "space": "weights",
    }
    (tmp_path / "whole" / "swarm.json").write_text(json.dumps(note))
    Export(str(tmp_path / "whole"), str(tmp_path / "copy"), "merged").write()
    assert front(tmp_path / "copy")["base_model"] == ["owner/one"]
    assert "0.50 mine + 0.50 one" in (tmp_path / "copy" / "README.md").read_text()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tiny_llama / name).read_bytes()
    with pytest.raises(UserError, match="is a full model"):
        Export(str(tiny_llama), str(tmp_path / "x"))


def test_a_killed_export_leaves_the_old_one_and_nothing_else(
    found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mine"
    Export(str(found), str(target)).write()
    before = searches.tree(target)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "merge_adapter", killed)
        Export(str(found), str(target), "merged").write()
    assert searches.tree(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    # As a process that had no time to tidy leaves it.
    (tmp_path / ".mine.new").mkdir()
    (tmp_path / ".mine.new" / "model.safetensors").write_text("half")
    Export(str(found), str(target)).write()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"to": None}, "to=null: must be text"),
        ({"format": "onnx"}, "format=onnx"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"format": "merged", "dtype": "auto"}, "dtype=auto"),
        ({"private": "no"}, "private=no: must be true or false"),
        ({"particle": "x"}, "particle=x"),
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


def test_a_base_that_the_adapter_was_not_made_for_is_one_line(
    tiny_llama: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tiny.expert(tiny_llama, tmp_path / "deep")
    file = tmp_path / "deep" / "adapter_model.safetensors"
    save_file({k.replace("layers.1", "layers.7"): v for k, v in load_file(file).items()}, file)
    with pytest.raises(UserError, match="set the base it was trained on"):
        Export(str(tmp_path / "deep"), str(tmp_path / "m"), "merged").write()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_numbers_of_an_adapter_that_was_rounded_afterwards_are_not_its_own(
    found: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(found, tmp_path / "run")
    for place in ("global_best", "particle_3/personal_best"):
        note = json.loads((run / place / "swarm.json").read_text())
        for error, cut in ((1e-8, False), (0.03, True))[place != "global_best" :]:
            told = {**note, "reconstruction_error": {"overall": error, "worst": error}}
            (run / place / "swarm.json").write_text(json.dumps(told))
            searches.reseal(run)
            Export(
                str(run),
                str(tmp_path / "mine"),
                particle=note["particle"] if place != "global_best" else None,
            ).write()
            card = (tmp_path / "mine" / "README.md").read_text()
            assert ("rounded to rank 4, was not measured" in card) is cut
            if place == "global_best":
                assert ("| before rounding to rank 4 " in card) is cut
                assert ("| this one" in card) is not cut


def test_a_mistake_on_the_command_line_is_one_line(found: Path, tmp_path: Path) -> None:
    for words, said in (
        ([], "give one run folder"),
        (["a", "b"], "give one run folder"),
        ([found, "to=x", "particl=3"], "particl: no such key; did you mean particle?"),
        ([found, "to=[a"], "cannot be parsed"),
        ([found], "to: is missing"),
        ([tmp_path, "to=x"], "neither an adapter nor a model"),
    ):
        done = commands.run("swarm.export", *words)
        assert done.code in (1, 2) and said in done.err and len(done.err.splitlines()) == 1
    done = commands.run("swarm.export", found, f"to={tmp_path}/mine", "particle=2", "private=false")
    assert done.code == 0 and (tmp_path / "mine" / "README.md").is_file(), done.err
    assert "push_to_hub" in commands.run("swarm.export", "--help").out
