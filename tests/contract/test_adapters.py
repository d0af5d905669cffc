"""Every expert that cannot be combined is refused by one line that names its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE, read_adapter
from swarm.pool.pool import Pool

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tiny_pool: Path, tmp_path: Path) -> Path:
    """A pool of two experts, amber and birch, that the test may spoil."""
    for name in ("amber", "birch"):
        shutil.copytree(tiny_pool / name, tmp_path / "pool" / name)
    return tmp_path / "pool"


def refused(pool: Path, name: str, *words: str, **settings: Any) -> None:
    """The pool, opened and read, says one line with the folder and `words`."""
    with pytest.raises(UserError) as caught:
        Pool(pool, **settings).open().check()
    said = str(caught.value)
    assert "\n" not in said and len(said) < 400 + 3 * len(str(pool))
    for word in (str(pool / name), *words):
        assert word in said, said


def rewrite(expert: Path, change: Callable[[Weights], Weights]) -> None:
    """Save the weights of `expert` again after `change`."""
    kept = {key: weight.clone() for key, weight in load_file(expert / WEIGHTS_FILE).items()}
    save_file(change(kept), expert / WEIGHTS_FILE)


VARIANTS: dict[str, Any] = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "fan_in_fan_out": True,
    "alora_invocation_tokens": [5, 6],
    "init_lora_weights": "pissa_niter_4",
    "use_a_later_idea": 1,
}
"""Settings with which an adapter is more than s B A, or may be."""


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        *((setting, value, "only plain LoRA") for setting, value in VARIANTS.items()),
        ("bias", "all", "must be none"),
        ("peft_type", "LOHA", "must be LORA"),
        ("r", 0, "r=0: must be an integer, at least 1"),
        ("r", 5, "but 5 in"),
        ("lora_alpha", 10**7, "must be a "),
        ("use_rslora", "no", "must be true or false"),
        ("target_modules", 5, "must be text, or a list"),
        ("lora_alpha", "much", "lora_alpha=much: must be a number"),
        ("rank_pattern", ["q_proj"], "must be a mapping"),
        ("alpha_pattern", {"(": 3}, "not a valid pattern"),
        ("base_model_name_or_path", "google/gemma-7b-it", "tiny-llama"),
    ],
)
def test_settings_that_do_not_combine(folder: Path, setting: str, value: Any, word: str) -> None:
    tiny.change(folder / "birch", **{setting: value})
    named = str(folder / "amber") if "base" in setting else setting
    refused(folder, "birch", named, word)


def test_settings_that_change_nothing_pass(folder: Path) -> None:
    harmless = {
        "init_lora_weights": "eva",
        "eva_config": {"rho": 2.0},
        "corda_config": {"corda_method": "ipm"},
        "lora_dropout": 0.1,
        "bias": None,
        "alora_invocation_tokens": None,
        "velora_config": {"num_groups": 64},
        "use_a_later_idea": False,
        "qalora_group_size": 16,
    }
    tiny.change(folder / "birch", **harmless)
    assert Pool(folder).open().names == ["amber", "birch"]
    # As old versions of PEFT wrote it.
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": None, "enable_lora": None, "merge_weights": False}
    (folder / "birch" / CONFIG_FILE).write_text(json.dumps(config))
    assert Pool(folder).open().rank == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({f"{Q}.lora_magnitude_vector": torch.ones(4)}, "magnitude_vector is neither A nor B"),
        ({f"{Q}.lora_A.other.weight": torch.ones(4, 32)}, "more than one adapter"),
        ({f"{Q}.lora_A.weight": None}, "q_proj has no lora_A"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 40)}, "maps 40 to 32, but 32 to 32"),
        ({f"{Q}.lora_A.weight": torch.ones(3, 32)}, "rank 3 in lora_A but 4 in lora_B"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 32, 1, 1)}, "only linear layers"),
        ({f"{Q}.lora_B.weight": torch.ones(32, 4, dtype=torch.int8)}, "type I8"),
        ({f"{Q}.lora_A.weight": torch.full((4, 32), float("nan"))}, "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit(
    folder: Path, changed: dict[str, torch.Tensor | None], words: str
) -> None:
    def change(weights: Weights) -> Weights:
        return {key: one for key, one in {**weights, **changed}.items() if one is not None}

    rewrite(folder / "birch", change)
    refused(folder, "birch", "q_proj", words)


def test_other_spellings_of_the_keys_mean_the_same(folder: Path) -> None:
    expected = Pool(folder).open().combine([0.3, 0.7])
    plain = load_file(folder / "birch" / WEIGHTS_FILE)
    for spelling in (
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".weight", ".my-adapter.weight"),
    ):
        save_file({spelling(k): one for k, one in plain.items()}, folder / "birch" / WEIGHTS_FILE)
        combined = Pool(folder).open().combine([0.3, 0.7])
        assert combined.keys() == expected.keys()
        for module in expected:
            assert all(map(torch.equal, combined[module], expected[module]))
    # A lost prefix is noticed.
    lost = {key.removeprefix("base_model.model.model."): one for key, one in plain.items()}
    save_file(lost, folder / "birch" / WEIGHTS_FILE)
    refused(folder, "birch", str(folder / "amber"), "names")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (WEIGHTS_FILE, b"", "is damaged"),
        (WEIGHTS_FILE, b"\x08\0\0\0\0\0\0\0{}", "is damaged"),
        (CONFIG_FILE, b"{", "cannot be read"),
        (CONFIG_FILE, b"[]", "not a JSON object"),
        (CONFIG_FILE, b"\xff", "cannot"),
        (CONFIG_FILE, None, "the download is incomplete"),
    ],
)
def test_damaged_files(folder: Path, file: str, content: bytes | None, words: str) -> None:
    path = folder / "birch" / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for settings in ({}, {"experts": ["amber", "birch"]}):
        refused(folder, "birch", file, words, **settings)


def test_a_pickle_is_refused_and_never_opened(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    (folder / "birch" / WEIGHTS_FILE).unlink()
    torch.save({"weight": Trap()}, folder / "birch" / PICKLE_FILE)
    refused(folder, "birch", "a pickle")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "base",
    [
        None,
        "someone/Tiny-Llama",
        "C:\\models\\tiny-llama",
        "/cache/hub/models--someone--tiny-llama/snapshots/0a1b2c",
    ],
)
def test_copies_of_one_base_model_pass(folder: Path, base: str | None) -> None:
    tiny.change(folder / "birch", base_model_name_or_path=base)
    assert Pool(folder).open("elsewhere/tiny-llama").names == ["amber", "birch"]


def test_patterns_pick_by_the_end_of_the_name(mixed_pool: Path) -> None:
    dune = read_adapter(mixed_pool / "dune")
    ranks = {module: shape[2] for module, shape in dune.shapes.items()}
    assert ranks.pop("model.layers.1.self_attn.q_proj") == 6 and set(ranks.values()) == {4}
    assert dune.scalings["model.layers.1.self_attn.q_proj"] == 8 / 6
    assert dune.scalings["model.layers.1.self_attn.v_proj"] == 5 / 4


def test_missing_pools_and_experts(folder: Path) -> None:
    refused(folder / "nowhere", "", "no such folder")
    refused(folder, "", "pool.experts", "'cedar'", "amber, birch", experts=["amber", "cedar"])
    refused(folder, "", "did you mean 'birch'", experts=["amber", "bich"])
    refused(folder, "", "at least two", experts=["amber"])
    (folder / "cedar").symlink_to(folder / "cedar")
    refused(folder, "cedar", "a symbolic link that is broken")
    (folder / "cedar").unlink()
    (folder / "birch").rename(folder / "bir\nch")
    refused(folder, "", "has a name that", "bir\\nch")
    shutil.rmtree(folder / "bir\nch")
    refused(folder, "", "at least two", "contains 1")
    refused(folder / "amber", "", "at least two", "contains 0")
    for experts in (["amber", "amber"], "amber", ["amber", 3], ["amber", "../pool/birch"], 2):
        with pytest.raises(UserError, match=r"^pool\.experts"):
            Pool(folder, experts).open()  # type: ignore[arg-type]
