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
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from swarm.pool.pool import Pool

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tiny_pool: Path, tmp_path: Path) -> Path:
    """A pool of two experts, amber and birch, that the test may spoil."""
    for name in ("amber", "birch"):
        shutil.copytree(tiny_pool / name, tmp_path / "pool" / name)
    return tmp_path / "pool"


def refused(pool: Path, name: str, *words: str, base: str | None = None, **settings: Any) -> str:
    """What the pool says when it is opened and read: one line with the folder and `words`."""
    with pytest.raises(UserError) as caught:
        Pool(pool, **settings).open(base).check()
    said = str(caught.value)
    assert "\n" not in said and len(said) < 400 + 3 * len(str(pool))
    assert str(pool / name) in said
    for word in words:
        assert word in said, said
    return said


def rewrite(expert: Path, change: Callable[[Weights], Weights]) -> None:
    """Save the weights of `expert` again after `change`."""
    kept = {key: weight.clone() for key, weight in load_file(expert / WEIGHTS_FILE).items()}
    save_file(change(kept), expert / WEIGHTS_FILE)


def renamed(rule: Callable[[str], str]) -> Callable[[Weights], Weights]:
    """A change of every key by `rule`."""
    return lambda weights: {rule(key): weight for key, weight in weights.items()}


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("use_dora", True, "DoRA"),
        ("bias", "all", "must be none"),
        ("lora_bias", True, "bias"),
        ("modules_to_save", ["lm_head"], "replaced"),
        ("layer_replication", [[0, 2], [1, 2]], "repeated"),
        ("fan_in_fan_out", True, "transposed"),
        ("target_parameters", ["experts.up"], "parameters"),
        ("trainable_token_indices", [0], "embedding"),
        ("use_qalora", True, "QA-LoRA"),
        ("alora_invocation_tokens", [5, 6], "activated"),
        ("use_bdlora", {"nblocks": 2}, "block-diagonal"),
        ("arrow_config", {"top_k": 3}, "Arrow"),
        ("kasa_config", {"beta": 1e-4}, "KaSA"),
        ("monteclora_config", {"num_samples": 4}, "Monte Carlo"),
        ("init_lora_weights", "pissa_niter_4", "base weight"),
        ("peft_type", "LOHA", "must be LORA"),
        ("use_a_later_idea", 1, "unknown"),
        ("r", 0, "r=0: must be an integer, at least 1"),
        ("r", 5, "but 5 in"),
        ("lora_alpha", "much", "lora_alpha=much: must be a number"),
        ("rank_pattern", ["q_proj"], "must be a mapping"),
        ("alpha_pattern", {"(": 3}, "not a valid pattern"),
    ],
)
def test_settings_that_do_not_combine(folder: Path, setting: str, value: Any, word: str) -> None:
    tiny.change(folder / "birch", **{setting: value})
    refused(folder, "birch", setting, word)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("eva_config", {"rho": 2.0}),
        ("corda_config", {"corda_method": "ipm"}),
        ("lora_dropout", 0.1),
        ("bias", None),
        ("alora_invocation_tokens", None),
        ("velora_config", {"num_groups": 64}),
        ("use_a_later_idea", False),
        ("qalora_group_size", 16),
    ],
)
def test_settings_that_change_nothing_pass(folder: Path, setting: str, value: Any) -> None:
    tiny.change(folder / "birch", **{setting: value})
    assert Pool(folder).open().names == ["amber", "birch"]


def test_a_config_as_old_peft_wrote_it_passes(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": None, "enable_lora": None, "merge_weights": False}
    (folder / "birch" / CONFIG_FILE).write_text(json.dumps(config))
    assert Pool(folder).open().rank == 4


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (f"{Q}.lora_magnitude_vector", "DoRA"),
        (f"{Q}.lora_B.bias", "bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        (f"{Q}.lora_diag.default", "other than A and B"),
        ("base_model.model.lm_head.weight", "unknown"),
    ],
)
def test_weights_that_are_no_a_and_b(folder: Path, key: str, word: str) -> None:
    rewrite(folder / "birch", lambda weights: weights | {key: torch.ones(4, 4)})
    refused(folder, "birch", key, word)


@pytest.mark.parametrize(
    "rule",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".my-adapter.weight"),
    ],
)
def test_other_spellings_of_the_keys_mean_the_same(
    folder: Path, rule: Callable[[str], str]
) -> None:
    expected = Pool(folder).open().combine([0.3, 0.7])
    rewrite(folder / "birch", renamed(rule))
    combined = Pool(folder).open().combine([0.3, 0.7])
    assert combined.keys() == expected.keys()
    for module in expected:
        assert all(map(torch.equal, combined[module], expected[module]))


def test_a_lost_prefix_is_noticed(folder: Path) -> None:
    rewrite(folder / "birch", renamed(lambda key: key.removeprefix("base_model.model.model.")))
    refused(folder, "birch", str(folder / "amber"), "names")


def test_two_adapters_in_one_file(folder: Path) -> None:
    other = {f"{Q}.lora_A.other.weight": torch.ones(4, 32)}
    rewrite(folder / "birch", lambda weights: weights | other)
    refused(folder, "birch", "more than one adapter")


@pytest.mark.parametrize("side", "AB")
def test_half_a_module(folder: Path, side: str) -> None:
    def lose(weights: Weights) -> Weights:
        del weights[f"{Q}.lora_{side}.weight"]
        return weights

    rewrite(folder / "birch", lose)
    refused(folder, "birch", f"q_proj has no lora_{side}")


@pytest.mark.parametrize(
    ("side", "weight", "word"),
    [
        ("A", torch.ones(4, 40), "maps 40 to 32, but 32 to 32"),
        ("B", torch.ones(48, 4), "maps 32 to 48, but 32 to 32"),
        ("A", torch.ones(3, 32), "rank 3 in lora_A but 4 in lora_B"),
        ("A", torch.ones(4, 32, 1, 1), "only linear layers"),
        ("B", torch.ones(32, 4, dtype=torch.int8), "type I8"),
        ("A", torch.full((4, 32), float("nan")), "NaN or infinite"),
        ("B", torch.full((32, 4), float("inf"), dtype=torch.bfloat16), "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, side: str, weight: torch.Tensor, word: str) -> None:
    rewrite(folder / "birch", lambda weights: weights | {f"{Q}.lora_{side}.weight": weight})
    refused(folder, "birch", "q_proj", word)


@pytest.mark.parametrize("kept", [0, -1])
def test_a_truncated_file(folder: Path, kept: int) -> None:
    path = folder / "birch" / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, "birch", "is damaged")


def test_a_pickle_is_refused_and_never_opened(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    (folder / "birch" / WEIGHTS_FILE).unlink()
    torch.save({"weight": Trap()}, folder / "birch" / "adapter_model.bin")
    refused(folder, "birch", "a pickle")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("text", "word"), [("{", "cannot be read"), ("[]", "not a JSON object"), ("\xff", "cannot")]
)
def test_a_config_that_is_no_json(folder: Path, text: str, word: str) -> None:
    (folder / "birch" / CONFIG_FILE).write_text(text, encoding="latin-1")
    refused(folder, "birch", CONFIG_FILE, word)


def test_an_expert_without_a_config(folder: Path) -> None:
    (folder / "birch" / CONFIG_FILE).unlink()
    refused(folder, "birch", f"there is no {CONFIG_FILE}", experts=["amber", "birch"])


def test_another_base_model_than_the_others(folder: Path) -> None:
    tiny.change(folder / "birch", base_model_name_or_path="google/gemma-7b-it")
    refused(folder, "birch", "google/gemma-7b-it", "tiny-llama", str(folder / "amber"))


@pytest.mark.parametrize(
    "base",
    [
        None,
        "",
        "someone/Tiny-Llama",
        "/models/tiny-llama/",
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


def test_a_missing_pool_and_a_missing_expert(folder: Path) -> None:
    refused(folder / "nowhere", "", "no such folder")
    said = refused(folder, "", "'cedar'", "amber, birch", experts=["amber", "cedar"])
    assert said.startswith("pool.experts")


def test_fewer_than_two_experts(folder: Path) -> None:
    refused(folder, "", "at least two", experts=["amber"])
    shutil.rmtree(folder / "birch")
    refused(folder, "", "at least two", "contains 1")
    refused(folder / "amber", "", "at least two", "contains 0")


@pytest.mark.parametrize(
    "experts",
    [["amber", "amber"], "amber", ["amber", 3], ["amber", "../pool/birch"], ["amber", ".."], 2],
)
def test_lists_of_experts_that_can_never_work(folder: Path, experts: Any) -> None:
    with pytest.raises(UserError, match=r"^pool\.experts"):
        Pool(folder, experts).open()
