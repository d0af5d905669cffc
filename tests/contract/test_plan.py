"""The choice of a plan, and the rounding that keeps bfloat16 weights from being merged."""

import pytest
import torch

from swarm.engine.base import STACK_BELOW, DeviceProfile, choose_plan, limit_cache_tokens

CPU = DeviceProfile(gpu=False, exact_merge=True, copy_bytes=1, free_bytes=2)


@pytest.mark.parametrize(
    ("particles", "rows", "facts", "plan"),
    [
        (5, STACK_BELOW - 1, CPU, "stacked"),
        (5, STACK_BELOW, CPU, "merged"),
        (1, 4, CPU, "merged"),
        (5, 50, DeviceProfile(True, False, 1, 2), "stacked"),
        (5, 500, DeviceProfile(True, False, 1, 2), "stacked"),
        (1, 500, DeviceProfile(True, False, 1, 2), "swap"),
        (5, 200, DeviceProfile(False, True, 3, 2), "swap"),
    ],
)
def test_the_plan_follows_rows_type_and_memory(
    particles: int, rows: int, facts: DeviceProfile, plan: str
) -> None:
    found, why = choose_plan(particles, rows, facts)
    assert found == plan and why


def test_merging_rounds_a_small_update_away_in_bfloat16() -> None:
    """At 1 % of the weight's norm: an error of about 17 % merged, 0.2 % unmerged."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 512, generator=generator).bfloat16().float()
    update = torch.randn(512, 512, generator=generator)
    update *= 0.01 * weight.norm() / update.norm()
    merged = (weight + update).bfloat16().float() - weight
    error = float((merged - update).norm() / update.norm())
    alone = float((update.bfloat16().float() - update).norm() / update.norm())
    assert 0.1 < error < 0.25 and alone < 0.003


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(80 << 30, 4 * 65536), (6 << 30, 65536), (9 << 30, 2 * 65536), (1 << 20, 65536)],
)
def test_slots_take_at_most_half_of_the_memory_left_but_hold_a_batch(
    free: int, tokens: int
) -> None:
    assert limit_cache_tokens(65536, 32768, free) == tokens
