"""The particle swarm without its barrier: a few particles move at a time, by the newest bests."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from swarm.errors import UserError
from swarm.optimizers.checks import ROWS, check_number
from swarm.optimizers.descent import Descent
from swarm.optimizers.pso import ParticleSwarm


@dataclass(kw_only=True, eq=False)
class AsynchronousSwarm(ParticleSwarm):
    """Particles move in turn, `batch` at a time, as soon as their own last score is there.

    A particle never waits for the rest of the swarm: it sees the best and the worst of all scores
    told before its own move (the asynchronous updates of Carlisle and Dozier, "An off-the-shelf
    PSO", 2001), so that a good find steers the next move instead of the next round.

    What the result depends on: the configuration, `batch` with it, and the seed; never on the
    number of workers or on who is done first. A swarm whose particles moved in the order in which
    they happen to be finished would be another run on another machine, so the order is fixed.
    What that costs: workers wait for the slowest of `batch` particles. Give them a batch that
    keeps all of them busy, such as job.particles times their number.

    Args:
        batch: Particles that move in an iteration; more than N are N, which is the plain swarm.
        max_iterations: Counts moves of a batch. Patience, restart_patience and step_length_factor
            still count rounds of the whole swarm, as in the plain one.

    Raises:
        UserError: An option is out of its range; named with what is allowed.
    """

    NAME: ClassVar[str] = "pso_async"

    batch: int = 5
    max_iterations: int = 200
    particles: int | None = 20
    soups: int = 0
    active: int | Literal["auto"] | None = None
    descent: Descent | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("batch", self.batch, ROWS, "it is how many particles move together")
        if self.drop_iteration:
            raise UserError(f"""optimizer.drop_iteration={self.drop_iteration}: must be 0, as only
                a few particles move in an iteration; use optimizer.drop_particle""")

    def _moving_particles(self, iteration: int) -> np.ndarray:
        count = len(self.evaluate)
        step = min(self.batch, count)
        places = (step * (iteration - 1) + np.arange(step)) % count
        return np.isin(np.arange(count), places) & self.moving

    def _moving_share(self) -> float:
        return min(1.0, self.batch / len(self.evaluate))
