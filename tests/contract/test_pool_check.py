"""`python -m swarm.pool check`, and a search on the same folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.pool.__main__ import main
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from swarm.pool.inspection import inspect_folder, update_gram
from swarm.pool.pool import Pool


@pytest.fixture
def varied(tiny_llama: Path, tmp_path: Path) -> Path:
    """Adapters as people have them: of several trainers, ranks, targets and names of one base."""
    folder = tiny.mixed_pool(tiny_llama, tmp_path / "varied")
    bases = {
        "amber": "someone/tiny-llama",
        "birch": "unsloth/Tiny-Llama-bnb-4bit",
        "cedar": "/content/drive/my_base",
        "dune": str(tiny_llama),
    }
    for name, base in bases.items():
        tiny.change(folder / name, base_model_name_or_path=base)
    return folder


def test_norms_and_cosines_equal_those_of_the_full_matrices(varied: Path) -> None:
    adapters = [read_adapter(path) for path in sorted(varied.iterdir())]
    modules = sorted({(m, a.shapes[m][:2]) for a in adapters for m in a.shapes})
    vectors = []
    for one in adapters:
        parts = []
        for module, (inputs, outputs) in modules:
            a, b = torch.zeros(1, inputs).double(), torch.zeros(outputs, 1).double()
            if module in one.shapes:
                a, b = one.load_factors(module)
            parts.append((b @ a).flatten())
        vectors.append(torch.cat(parts))
    expected = (torch.stack(vectors) @ torch.stack(vectors).T).numpy()
    found, norms = inspect_folder(varied), np.sqrt(expected.diagonal())
    assert [one.norm for one in found.experts] == pytest.approx(norms, rel=1e-12)
    cosines = expected / np.outer(norms, norms)
    np.testing.assert_allclose(found.cosines, cosines, rtol=0, atol=1e-12)
    np.testing.assert_allclose(update_gram(adapters), expected, rtol=1e-12, atol=1e-12)


def test_a_varied_folder_is_opened_unchanged(
    varied: Path,
    tiny_llama: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main(["check", str(varied), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["used"] == ["amber", "birch", "cedar", "dune"]
    by_name = {one["name"]: one for one in found["experts"]}
    assert by_name["cedar"]["ranks"] == [8] and by_name["dune"]["ranks"] == [4, 6]
    assert by_name["birch"]["targets"] == {"q_proj": 2, "up_proj": 2}
    assert by_name["cedar"]["scales"] == [pytest.approx(4 / 8**0.5)]
    assert len(Pool(varied).open(BaseModel(str(tiny_llama))).names) == 4
    assert "cedar: names the base model /content/drive/my_base" in caplog.text


def test_what_a_search_would_refuse_is_named_with_its_reason(
    varied: Path, tiny_gemma: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("twin", "other", "dora", "half", "broken", "trained/checkpoint-9", "zero"):
        shutil.copytree(varied / "amber", varied / name)
    shutil.copytree(varied / "birch", varied / "loud")
    tiny.change(varied / "other", base_model_name_or_path="google/gemma-7b-it")
    tiny.change(varied / "dora", use_dora=True)
    (varied / "half" / CONFIG_FILE).unlink()
    tiny.expert(tiny_gemma, varied / "wide", 5)
    tiny.change(varied / "wide", base_model_name_or_path=None)
    for name, factor in (("broken", np.nan), ("zero", 0.0), ("loud", 500.0)):
        weights = load_file(varied / name / WEIGHTS_FILE)
        scaled = {k: w * (factor if "lora_B" in k else 1.0) for k, w in weights.items()}
        save_file(scaled, varied / name / WEIGHTS_FILE)
    assert main(["check", str(varied), "--matrix"]) == 1
    said = capsys.readouterr().out
    reasons = {
        "other": "belongs to the base model google/gemma-7b-it",
        "dora": "use_dora is set to True",
        "half": f"and no {CONFIG_FILE}: the download is incomplete",
        "broken": "NaN or infinite",
    }
    for name, reason in reasons.items():
        assert f"refused: {name}: " in said and reason in said, said
    assert "no adapter: trained" in said and "in checkpoint-9" in said
    assert "doubles: amber, twin have equal weights" in said
    assert "zero: zero changes nothing" in said
    assert "huge: the update of loud is " in said and said.count("huge: ") == 1
    found = inspect_folder(varied)
    # Its verdicts are the pool's: each of the refused ones is refused there, the others open.
    for one in found.experts:
        names = ["birch", one.name] if one.name != "birch" else ["birch", "dune"]
        pool = Pool(varied, experts=names)
        if one.reason:
            with pytest.raises(UserError):
                pool.open(found.base).check()
        else:
            pool.open(found.base).check()
    Pool(varied, experts=found.used).open(found.base).check()
    assert f"pool.experts=[{','.join(found.used)}]" in said
    with pytest.raises(UserError):
        Pool(varied).open(found.base)


def test_a_wrong_folder_and_a_single_adapter(
    varied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "none")]) == 1
    assert main(["check", str(varied / "amber")]) == 1
    said = capsys.readouterr().err
    assert "no such folder" in said and "is one adapter" in said and said.count("\n") == 2
    for name in ("birch", "cedar", "dune"):
        shutil.rmtree(varied / name)
    assert main(["check", str(varied)]) == 1
    assert "needs at least two experts, and there are 1" in capsys.readouterr().out


def test_a_missing_folder_identifies_no_base_but_a_hub_id_does(varied: Path) -> None:
    tiny.change(varied / "cedar", base_model_name_or_path="someone/another-base")
    with pytest.raises(UserError, match="cedar: belongs to the base model someone/another-base"):
        Pool(varied).open("owner/tiny-llama")
    tiny.change(varied / "cedar", base_model_name_or_path="C:\\models\\another-base")
    assert len(Pool(varied).open("owner/tiny-llama").names) == 4
