"""Static merges beside PEFT's and beside the papers' formulas, written again here in numpy."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from swarm import merging
from swarm.merging import MERGE_NAMES, lora_math, merge_factors
from swarm.merging.positions import position_label
from swarm.optimizers.static_merges import StaticMerges
from swarm.pool.pool import Pool

EXPERTS = ["amber", "birch", "cedar"]
NUMBER = len(EXPERTS)
MODULES = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
Pair = tuple[torch.Tensor, torch.Tensor]


class Merged:
    """Three experts with one scaling, as PEFT has them and as a recipe gets them."""

    def __init__(self, base: Path, folder: Path, alpha: int) -> None:
        from peft import PeftModel

        self.folder = folder
        first, *others = [
            tiny.expert(base, folder / name, j, lora_alpha=alpha) for j, name in enumerate(EXPERTS)
        ]
        self.model = PeftModel.from_pretrained(tiny.load(base), first, first.name)
        for other in others:
            self.model.load_adapter(other, other.name)

    def pair(self, module: str, name: str) -> Pair:
        layer = self.model.base_model.model.get_submodule(module)
        weights = layer.lora_A[name].weight, layer.lora_B[name].weight
        return weights[0].detach(), weights[1].detach() * layer.scaling[name]

    def experts(self, module: str) -> list[Pair]:
        return [self.pair(module, name) for name in EXPERTS]

    def peft(
        self, kind: str, weight: float, density: float | None = None, rank: int | None = None
    ) -> torch.Tensor:
        """Merge in PEFT, as "merged"; gives the generator's state before the draws for that."""
        # To inject an adapter draws, too: how much is shown by a merge that draws no more.
        states: list[torch.Tensor] = []
        quiet = "svd" if kind.endswith("svd") else "linear"
        for name, what in (("quiet", quiet), ("merged", kind)):
            if name in self.model.peft_config:
                self.model.delete_adapter(name)
            torch.manual_seed(7)
            self.model.add_weighted_adapter(
                EXPERTS, [weight] * len(EXPERTS), name, what, density=density, svd_rank=rank
            )
            states.append(torch.get_rng_state())
        return states[0]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """The scaling of LoRA is 1."""
    return Merged(tiny_llama, tmp_path_factory.mktemp("plain"), 4)


@pytest.fixture(scope="module")
def scaled(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """The scaling of LoRA is 4."""
    return Merged(tiny_llama, tmp_path_factory.mktemp("scaled"), 16)


def update(pair: Pair) -> torch.Tensor:
    return pair[1] @ pair[0]


def close(first: torch.Tensor, second: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def drawn(shapes: list[tuple[int, int, int]], seed: int = 0) -> list[Pair]:
    """Random factors of (in, out, rank) each, with something in common."""
    with tiny.seeded(seed):
        inputs, outputs = shapes[0][:2]
        common = torch.randn(99, inputs), torch.randn(outputs, 99)
        return [
            (torch.randn(r, i) + common[0][:r], torch.randn(o, r) + common[1][:, :r])
            for i, o, r in shapes
        ]


def arrays(pairs: list[Pair], space: str) -> list[list[np.ndarray]]:
    """The task vectors as a recipe sees them: A and B apart, or the updates; of one rank."""
    if space == "delta":
        return [[update(pair).double().numpy() for pair in pairs]]
    return [[pair[side].double().numpy() for pair in pairs] for side in (0, 1)]


def check(recipe: str, pairs: list[Pair], space: str, formula: Any, density: float = 0.5) -> None:
    """That a merge is what a formula makes of each list of task vectors."""
    found = merge_factors(recipe, pairs, density, 0, space, 24)
    assert all(side.dtype == torch.float32 for side in found)
    assert (len(found[0]), found[1].shape[1]) == (24, 24)
    wanted = [formula(vectors) for vectors in arrays(pairs, space)]
    if space == "factor":
        rank = len(pairs[0][0])
        np.testing.assert_allclose(found[0][:rank], wanted[0], atol=1e-5)
        np.testing.assert_allclose(found[1][:, :rank], wanted[1], atol=1e-5)
        assert not found[0][rank:].any() and not found[1][:, rank:].any()
    else:
        np.testing.assert_allclose(update(found), wanted[0], atol=2e-4)


# Beside PEFT


def test_ties_of_scaled_factors_is_the_same_update_as_peft_s(scaled: Merged) -> None:
    """PEFT has the root of the scaling in either factor, a pool has all of it in B."""
    scaled.peft("ties", 1.0, 0.5)
    for module in MODULES:
        found = merge_factors("ties", scaled.experts(module), 0.5, 0, "factor", 4)
        close(update(found), update(scaled.pair(module, "merged")))


@pytest.mark.parametrize("kind", ["dare_linear", "dare_ties"])
def test_dare_of_factors_is_peft_s_with_its_own_mask(kind: str, plain: Merged) -> None:
    """A mean of factors is PEFT's weight 1 / K^2, as it takes the root for either of them."""
    weight = {"dare_linear": NUMBER**-2, "dare_ties": 1.0}[kind]
    draw = torch.Generator()
    draw.set_state(plain.peft(kind, weight, 0.6))
    recipe = {"dare_linear": merging.dare_linear, "dare_ties": merging.dare_ties}[kind]
    for module in MODULES:  # in PEFT's order: one stream of numbers
        for side in (0, 1):
            theirs = plain.pair(module, "merged")[side]
            vectors = [pair[side] for pair in plain.experts(module)]
            close(recipe(vectors, theirs.shape, 0.6, draw), theirs)


@pytest.mark.parametrize("kind", ["ties", "dare_linear", "dare_ties"])
def test_updates_merge_as_in_peft_s_svd(kind: str, scaled: Merged) -> None:
    weight = 1 / NUMBER if kind == "dare_linear" else 1.0
    draw = torch.Generator()
    draw.set_state(scaled.peft(f"{kind}_svd", weight, 0.5, rank=16))
    for module in MODULES:
        experts, theirs = scaled.experts(module), update(scaled.pair(module, "merged"))
        if kind == "ties":
            mine = update(merge_factors(kind, experts, 0.5, 0, "delta", 16))
        else:
            recipe = {"dare_linear": merging.dare_linear, "dare_ties": merging.dare_ties}[kind]
            matrix = recipe(map(update, experts), theirs.shape, 0.5, draw)
            mine = update(lora_math.factorize_matrix(matrix, 16, torch.Generator().manual_seed(0)))
        # 16 is all of v_proj; of the others the cut itself is nearly as good as an SVD's.
        near = 1e-5 if "v_proj" in module else 0.02
        assert (mine - theirs).norm() < near * theirs.norm(), module


def test_task_arithmetic_is_peft_s_linear(scaled: Merged) -> None:
    """Of one scaling: PEFT's weight is the square of the coefficient, as it roots it."""
    optimizer = StaticMerges(lambdas=[0.3])
    optimizer.start(NUMBER, 0)
    position = optimizer.ask()[-1]
    assert position_label(optimizer.state_dict(), position.tolist()) == "task arithmetic 0.3"
    for space, kind, weight in (("factor", "linear", 0.3**2), ("delta", "svd", 0.3)):
        scaled.peft(kind, weight, rank=12)
        pool = Pool(scaled.folder, EXPERTS, space).open()
        for module, pair in pool.combine(position).items():
            close(update(pair).float(), update(scaled.pair(module, "merged")), 1e-4)


# Beside the papers


@pytest.mark.parametrize("space", ["factor", "delta"])
@pytest.mark.parametrize("density", [0.3, 0.8])
def test_ties_is_trim_elect_and_disjoint_mean(space: str, density: float) -> None:
    def formula(vectors: list[np.ndarray]) -> np.ndarray:
        trimmed = []
        for one in vectors:
            flat = one.copy().ravel()
            flat[np.argsort(np.abs(flat))[: flat.size - int(density * flat.size)]] = 0
            trimmed.append(flat.reshape(one.shape))
        merged = np.zeros_like(vectors[0])
        for place in np.ndindex(merged.shape):
            values = [one[place] for one in trimmed]
            up, down = (sum(abs(v) for v in values if v * sign > 0) for sign in (1, -1))
            agree = [v for v in values if v * (1 if up >= down else -1) > 0]
            merged[place] = np.mean(agree) if agree else 0
        return merged

    check("ties", drawn([(16, 20, 4)] * 3), space, formula, density)


def arc(first: np.ndarray, second: np.ndarray, t: float) -> np.ndarray:
    """Shoemake's slerp, of vectors as they are."""
    cosine = np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second)
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)


@pytest.mark.parametrize("space", ["factor", "delta"])
@pytest.mark.parametrize("count", [2, 4])
def test_slerp_goes_round_the_experts(space: str, count: int) -> None:
    def formula(vectors: list[np.ndarray]) -> np.ndarray:
        merged = vectors[0]
        for j, one in enumerate(vectors[1:], start=1):
            merged = arc(merged, one, 1 / (j + 1))
        return merged

    pairs = drawn([(16, 20, 4)] * count)
    check("slerp", pairs, space, formula)
    if count > 2:
        there, back = (merge_factors("slerp", p, 0.5, 0, space, 24) for p in (pairs, pairs[::-1]))
        assert (update(there) - update(back)).norm() > 0.01 * update(there).norm()


@pytest.mark.parametrize("space", ["factor", "delta"])
def test_experts_on_a_line(space: str) -> None:
    """Slerp of parallel ones is on it, and of opposite ones finite; their stock is the base."""
    ((a, b),) = drawn([(16, 20, 4)])
    found = merge_factors("slerp", [(a, b), (a, 3 * b)], 0.5, 0, space, 8)
    close(update(found), 2 * update((a, b)), 1e-3)
    opposite = merge_factors("slerp", [(a, b), (a, -b), (a, b)], 0.5, 0, space, 12)
    assert opposite[0].isfinite().all() and opposite[1].isfinite().all()
    stock = merge_factors("model_stock", [(a, b), (a, -b)], 0.5, 0, "delta", 8)
    assert not update(stock).any()


@pytest.mark.parametrize("space", ["factor", "delta"])
@pytest.mark.parametrize("count", [2, 3])
def test_model_stock_lies_between_base_and_mean(space: str, count: int) -> None:
    def formula(vectors: list[np.ndarray]) -> np.ndarray:
        cosine = np.mean([
            np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
            for one, other in itertools.combinations(vectors, 2)
        ])  # fmt: skip
        assert 0.1 < cosine < 0.9
        return count * cosine / (1 + (count - 1) * cosine) * np.mean(vectors, axis=0)

    check("model_stock", drawn([(16, 20, 4)] * count), space, formula)


# Pools as they are


@pytest.mark.parametrize("recipe", MERGE_NAMES)
@pytest.mark.parametrize("space", ["factor", "delta"])
def test_a_merge_is_the_same_again_and_disturbs_nobody(recipe: str, space: str) -> None:
    """An expert that is not there takes no part, but in a mean, where it changes nothing."""
    pairs = drawn([(16, 20, 4), (16, 20, 2)])
    copies = [(a.clone(), b.clone()) for a, b in pairs]
    before = torch.get_rng_state()
    first = merge_factors(recipe, pairs, 0.5, 3, space, 4)
    torch.rand(5)
    second = merge_factors(recipe, pairs, 0.5, 3, space, 4)
    assert all(map(torch.equal, first, second))
    torch.set_rng_state(before)
    merge_factors(recipe, pairs, 0.5, 3, space, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, sum(pairs, ()), sum(copies, ())))

    nothing = torch.zeros(1, 16), torch.zeros(20, 1)
    two, three = (merge_factors(recipe, p, 1.0, 0, space, 7) for p in (pairs, [*pairs, nothing]))
    share = (2 / 3 if space == "delta" else 4 / 9) if recipe == "dare_linear" else 1
    close(update(three), share * update(two), 1e-4)
    assert not update(merge_factors(recipe, [nothing, nothing], 0.5, 0, space, 7)).any()


def test_a_large_matrix_is_cut_nearly_as_well_as_by_its_svd() -> None:
    with tiny.seeded(0):
        matrix = torch.randn(300, 200)  # the worst case: no direction matters more
    pair = lora_math.factorize_matrix(matrix, 20, torch.Generator().manual_seed(0))
    assert pair[0].shape == (20, 200) and pair[1].shape == (300, 20)
    error = (matrix - update(pair)).norm()
    best = torch.linalg.svdvals(matrix)[20:].norm()
    assert best <= error < 1.02 * best
