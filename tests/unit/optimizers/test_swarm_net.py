"""The paper's swarm, bit by bit: 200 random configurations against recorded digests.

A change of `swarm.optimizers` that should change nothing keeps them; one that should change the
swarm records them again: python tests/unit/optimizers/test_swarm_net.py, and says why.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.optimizers.pso import Deviations, ParticleSwarm
from swarm.optimizers.swarm import MemeticSwarm
from swarm.runs.folder import build_scratchpad

RECORDED = Path(__file__).with_name("swarm_net.json")
CONFIGURATIONS, ITERATIONS, RESUME = 200, 10, 5


def draw_options(number: int) -> tuple[dict[str, Any], Deviations, int, int]:
    """Options of the paper's swarm, quirks of its code, the number of experts and of groups."""
    draw = np.random.default_rng(number)
    experts, groups = int(draw.integers(2, 7)), int(draw.choice([1, 1, 3]))
    weights = draw.choice([0.0, 0.05, 0.2, 0.4, 0.9], 4)
    options: dict[str, Any] = {
        "particles": None if draw.random() < 0.3 else experts + int(draw.integers(0, 6)),
        "inertia": float(weights[0]),
        "cognitive": float(weights[1]),
        "social": float(weights[2]),
        "repel": float(weights[3]) or 0.05,
        "weight_randomness": bool(draw.random() < 0.8),
        "step_length": float(draw.choice([0.5, 0.8, 1.0])),
        "step_length_factor": float(draw.choice([0.9, 0.95, 1.0])),
        "minimum_step_length": float(draw.choice([0.0, 0.1, 0.4])),
        "starting_velocity": str(draw.choice(["random", "zero", "best"])),
        "patience": int(draw.integers(1, 12)),
        "max_iterations": 50,
    }
    best_is_stale = bool(draw.choice(["after", "including"]) == "including")
    options["restart"] = bool(draw.random() < 0.8)
    options["restart_patience"] = float(draw.choice([0.5, 1, 2, 5]))
    patience_is_share = bool(draw.choice(["iterations", "fraction"]) == "fraction")
    options["restart_cool_down"] = int(draw.integers(0, 6))
    options["crossover_maximum"] = float(draw.choice([1.0, 2.0]))
    children_are_parents = bool(draw.choice(["experts", "everyone"]) == "everyone")
    last_is_worst = bool(draw.choice(["first", "last"]) == "last")
    options["drop_iteration"] = float(draw.choice([0.0, 0.0, 0.3]))
    options["drop_particle"] = float(draw.choice([0.0, 0.0, 0.3]))
    skipped_is_stale = bool(draw.random() < 0.5)
    deviations = Deviations(
        best_is_stale, patience_is_share, children_are_parents, last_is_worst, skipped_is_stale
    )
    return options, deviations, experts, groups


PLAIN: dict[str, Any] = {"soups": 0, "active": None, "descent": None}
"""Options with which the default swarm is the paper's."""


def digest_run(number: int, kind: type[ParticleSwarm] = ParticleSwarm) -> str:
    """Run a configuration, resumed in the middle; return a digest of all that a record keeps."""
    options, deviations, experts, groups = draw_options(number)

    def started() -> ParticleSwarm:
        swarm = kind(**options, **(PLAIN if kind is MemeticSwarm else {}))
        swarm.deviations = deviations
        swarm.start(experts, number, groups)
        return swarm

    swarm = started()
    goal = np.random.default_rng(number + 1000).normal(0.4, 0.5, experts * groups)
    rounds, kept = [], []
    for iteration in range(ITERATIONS + 1):
        positions = swarm.ask()
        # Rounded: many ties, as of utilities on few items.
        distance = np.abs(positions - goal).max(axis=1)
        utilities = np.where(swarm.evaluate, np.round(1 / (1 + distance), 2), np.nan)
        rows = [[float(c).hex() for c in row] for row in positions]
        values = [None if np.isnan(u) else float(u) for u in utilities]
        rounds.append({"positions": rows, "utilities": values})
        swarm.tell(utilities)
        kept.append(swarm.stop_reason())
        if iteration == RESUME:
            state = json.loads(json.dumps(swarm.state_dict()))
            swarm = started()
            swarm.load_state_dict(state)
    # Recorded of the default swarm, of which only some particles may move.
    state = {"moving": [True] * len(positions)} | swarm.state_dict()
    told = [rounds, build_scratchpad(rounds), kept, state]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("kind", [ParticleSwarm, MemeticSwarm])
def test_the_swarm_is_the_recorded_one_to_the_bit(kind: type[ParticleSwarm]) -> None:
    recorded = json.loads(RECORDED.read_text())
    found = [digest_run(number, kind) for number in range(CONFIGURATIONS)]
    differ = [number for number, (a, b) in enumerate(zip(found, recorded, strict=True)) if a != b]
    assert not differ, f"configurations {differ[:10]} of {len(differ)} differ"


if __name__ == "__main__":
    RECORDED.write_text(json.dumps([digest_run(n) for n in range(CONFIGURATIONS)]) + "\n")
