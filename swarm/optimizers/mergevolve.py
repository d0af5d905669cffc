"""MERGEvolve (Wang et al. 2026, arXiv 2606.28373) on mixing coefficients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.optimizers.base import Optimizer, Particles, Rows, rank_weights
from swarm.optimizers.random_streams import expert_positions, initial_population


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class MergeEvolve(Optimizer):
    """An evolution strategy with additive noise that starts from a merged model.

    The merged model theta is the sum of the experts with weights softmax(z / tau), where z are the
    z-scores of their utilities. Each iteration scores theta and n perturbations theta + sigma eps_i
    with eps_i ~ N(0, 1), and moves theta by alpha / (sigma n) sum_i u_i eps_i, where u are the rank
    weights of CMA-ES minus their mean. The result is the best position ever scored.

    Sources: the paper's abstract and the authors' code (github.com/xiaofangxd/MERGEvolve, commit
    6963b8c) for the procedure and the constants. Its command line has n = 5 where its configuration
    has 10, and advises tau = 0.1 for models of 7B. The paper's appendix finds little difference
    between sigma = 0.0001 and 0.1.

    Differences from that code:

    - Noise is added to coefficients; there it is added to every entry of A and B, which no
      coefficients can express. Noise on coefficients leaves the convex hull of the experts (sums
      are free, signs too) but not their span.
    - sigma = 0.1 is a tenth of an expert here, and a tenth of a weight's unit there.
    - Perturbations of equal utility share the mean of their rank weights; there the order of
      evaluation decides.
    - Failed evaluations are treated as not drawn.
    - The first ask scores the experts as there; its remaining rows are the uniform mean and
      crossover children, as N is the same in every ask.

    Args:
        particles: N, the rows of every ask; None is n + 1, or K if larger.
        samples: n, perturbations per iteration; at most N - 1.
        sigma: Standard deviation of the noise on a coefficient.
        alpha: Learning rate.
        tau: Temperature of the first merge; higher is closer to the uniform mean.
    """

    NAME: ClassVar[str] = "mergevolve"
    STATE = (*Optimizer.STATE, "theta")

    particles: Particles | None = None
    max_iterations: Positive = 50
    samples: Rows = 10
    sigma: PositiveNumber = 0.1
    alpha: PositiveNumber = 0.1
    tau: PositiveNumber = 1.0

    def _population_size(self, experts: int) -> int:
        return max(experts, self.samples + 1)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        rows = initial_population(experts, count, self.seed, groups=self.groups)
        rows[experts : experts + 1] = 1 / experts
        self.theta = np.full(self.groups * experts, 1 / experts)
        return rows

    def _propose_positions(self) -> np.ndarray:
        samples = min(self.samples, len(self.positions) - 1)
        noise = self._iteration_rng().normal(size=(samples, len(self.theta)))
        return np.vstack([self.theta, self.theta + self.sigma * noise])

    def _update_state(self, utilities: np.ndarray) -> None:
        first = self.iteration == 0
        self.theta = (self._merge_experts if first else self._gradient_step)(utilities)

    def _merge_experts(self, utilities: np.ndarray) -> np.ndarray:
        """Return the merged model, [G x K], without unmeasured experts."""
        found = np.flatnonzero(np.isfinite(utilities[: self.experts]))
        if not len(found):
            found, utilities = np.arange(self.experts), np.zeros(self.experts)
        z = utilities[found] - utilities[found].mean()
        spread = z.std()
        logits = (z / spread if spread > 0 else 0 * z) / self.tau
        weights = np.exp(logits - logits.max())
        return weights / weights.sum() @ expert_positions(self.experts, self.groups)[found]

    def _gradient_step(self, utilities: np.ndarray) -> np.ndarray:
        """Return theta after a step along the estimated natural gradient, [G x K]."""
        evaluated = np.flatnonzero(self.evaluate)[1:]  # the first row is theta itself
        found = evaluated[np.isfinite(utilities[evaluated])]
        if not len(found):
            return self.theta
        noise = (self.positions[found] - self.theta) / self.sigma
        weights = rank_weights(utilities[found])
        return self.theta + self.alpha / (self.sigma * len(found)) * weights @ noise
