"""Options of the particle swarm, their checks, and how to correct them."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.errors import UserError
from swarm.optimizers.base import (
    AT_LEAST_ONE,
    COUNT,
    MAX_VALUE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SHARE,
    STEP,
    SWITCH,
    Rule,
    check_choice,
    check_number,
    check_particles,
)
from swarm.optimizers.gradient import Descent

SOUP_COUNT: Rule = (int, lambda value: 0 <= value <= 5, "an integer from 0 to 5")

NUMBERS: dict[str, tuple[Rule, str]] = {
    "inertia": (NOT_NEGATIVE, "the paper tried 0.1, 0.2 and 0.3"),
    "cognitive": (NOT_NEGATIVE, "the paper tried 0.1 to 0.5"),
    "social": (NOT_NEGATIVE, "the paper tried 0.2 to 0.6"),
    "repel": (NOT_NEGATIVE, "the paper tried 0.01, 0.05 and 0.1; 0 switches it off"),
    "weight_randomness": (SWITCH, "false takes all factors r as 1"),
    "step_length": (STEP, "the paper tried 0.5 to 1.0"),
    "step_length_factor": (SHARE, "1 keeps the step as it is; the paper's is 0.95"),
    "minimum_step_length": (NOT_NEGATIVE, "0 means no floor"),
    "patience": (AT_LEAST_ONE, "to disable it, raise it above optimizer.max_iterations"),
    "max_iterations": (AT_LEAST_ONE, "the paper's is 50"),
    "restart": (SWITCH, "false never restarts a particle"),
    "restart_patience": (POSITIVE, "the paper's is 5 iterations; optimizer.restart=false is off"),
    "restart_cool_down": (COUNT, "0 lets a particle restart every iteration"),
    "crossover_maximum": (POSITIVE, "1 is the paper's, 2 the original code's"),
    "drop_iteration": (PROBABILITY, "it is the probability to skip an iteration's evaluation"),
    "drop_particle": (PROBABILITY, "it is the probability to skip a particle's evaluation"),
    "count_skipped": (SWITCH, "true is as in the original code"),
    "soups": (SOUP_COUNT, "0 is the paper's"),
}
WORDS = {
    "starting_velocity": ("random", "zero", "best"),
    "stale_count": ("after", "including"),
    "restart_unit": ("iterations", "fraction"),
    "crossover_parents": ("experts", "everyone"),
    "worst_tie": ("first", "last"),
}


@dataclass(kw_only=True, eq=False)
class ParticleSwarmOptions:
    """The options of Model Swarms, with the paper's symbols.

    docs/pso.md compares them with its code.

    Args:
        particles: N; None is one per expert and soup, without crossover children.
        inertia: phi_v, of the current velocity; only the ratios of this and the next three matter.
        cognitive: phi_p, towards the personal best.
        social: phi_g, towards the best of the swarm.
        repel: phi_w, away from the worst of the swarm.
        weight_randomness: Each coefficient times its own r ~ U(0, 1), per particle and iteration.
        step_length: lambda of the first iteration.
        step_length_factor: phi_lambda, by which it shrinks once per iteration.
        minimum_step_length: Lower bound of the step length.
        starting_velocity: Towards a `random` other particle, `zero`, towards the `best` of all.
        patience: c, stale iterations of the swarm after which it ends.
        max_iterations: K; the evaluation of the start is not one of them.
        stale_count: Iterations `after` a best are stale, or that of the best too (`including`).
        restart: Stray particles return to their personal best and lose their velocity.
        restart_patience: c_r, stale iterations of a particle that make it a stray.
        restart_unit: Unit of `restart_patience`: `iterations`, or a `fraction` of patience.
        restart_cool_down: Evaluated iterations that must pass before it may restart again.
        crossover_maximum: A child is t * a + (1 - t) * b with t ~ U(0, this).
        crossover_parents: Parents are the `experts` only, or `everyone`, including children.
        worst_tie: Which of equally bad particles of one iteration is the worst, `first` or `last`.
        drop_iteration: Drop-K, the probability that nothing is evaluated in an iteration.
        drop_particle: Drop-N, the probability that a particle is not evaluated in an iteration.
        count_skipped: Skipped evaluations count as stale, for the swarm and the particle.
        soups: Number of particles after the experts that start as uniform soups, with coefficients
            that sum to 1.5, 1, 2, .5 and 3; sums are free from then on. 0 is the paper.
        starts: Further positions to start from, after the soups: K coefficients each, in the order
            of the pool's experts, the same in all groups. None is none.
        active: Number of particles that move and are evaluated, the best after the first iteration
            (with a gradient term by the loss of some items, else by utility); the others do not
            move. None is all of them. "auto" is all of them without a gradient term, and with it
            one for each `ACTIVE_POSITIONS` that the budget allows after the first iteration, at
            most four.
        descent: The gradient term of the velocity; None is none, as in the paper.

    Raises:
        UserError: An option is out of range; the message names the allowed values.
    """

    particles: int | None = None
    inertia: float = 0.2
    cognitive: float = 0.3
    social: float = 0.4
    repel: float = 0.05
    weight_randomness: bool = True
    step_length: float = 0.5
    step_length_factor: float = 0.95
    minimum_step_length: float = 0.1
    starting_velocity: Literal["random", "zero", "best"] = "random"
    patience: int = 10
    max_iterations: int = 50
    stale_count: Literal["after", "including"] = "after"
    restart: bool = True
    restart_patience: float = 5
    restart_unit: Literal["iterations", "fraction"] = "iterations"
    restart_cool_down: int = 5
    crossover_maximum: float = 1.0
    crossover_parents: Literal["experts", "everyone"] = "experts"
    worst_tie: Literal["first", "last"] = "first"
    drop_iteration: float = 0.0
    drop_particle: float = 0.0
    count_skipped: bool = False
    soups: int = 1
    starts: list[list[float]] | None = None
    active: int | Literal["auto"] | None = "auto"
    descent: Descent | None = field(default_factory=Descent)

    def __post_init__(self) -> None:
        _check_options(self)


def _check_options(options: ParticleSwarmOptions) -> None:
    for name, (rule, advice) in NUMBERS.items():
        check_number(name, getattr(options, name), rule, advice)
    check_particles(options.particles, 2, "null is one per expert")
    for name, allowed in WORDS.items():
        check_choice(name, getattr(options, name), allowed)
    if options.minimum_step_length > options.step_length:
        raise UserError(f"""optimizer.minimum_step_length={options.minimum_step_length}: must be at
            most optimizer.step_length={options.step_length}, lower it or raise the other""")
    if options.active not in (None, "auto"):
        check_number("active", options.active, AT_LEAST_ONE, "null lets all particles move")
    if not _are_positions(options.starts):
        raise UserError(f"""optimizer.starts={options.starts!r:.60}: must be null or a list of
            positions, each a list of one finite number per expert, e.g. [[0.5,0.5,0]]""")
    if options.descent is not None and not isinstance(options.descent, Descent):
        raise UserError(f"""optimizer.descent={options.descent}: must be null, or have the keys of
            the gradient term, e.g. optimizer.descent.steps=20""")
    still = not (options.inertia or options.cognitive or options.social or options.repel)
    if still and options.descent is None:
        raise UserError("""optimizer.inertia=0, cognitive=0, social=0, repel=0: must not all be 0,
            as no particle would move; raise one of them""")


def _are_positions(starts: Any) -> bool:
    """Return whether `starts` is None, or lists of finite numbers."""
    if starts is None:
        return True
    return isinstance(starts, list) and all(
        isinstance(row, list) and row and all(_is_finite(one) for one in row) for row in starts
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= MAX_VALUE
