"""The coefficient search of LoraHub (Huang et al. 2023, arXiv 2307.13269)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swarm._util.settings import Number, PositiveNumber, checked
from swarm.optimizers.base import High, Low
from swarm.optimizers.cma_es import CMAES
from swarm.optimizers.static_merges import Scales


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class LoraHub(CMAES):
    """CMA-ES from the zero vector, where no expert is used, with an L1 penalty on coefficients.

    As in the paper: K free coefficients (here in each group) in [-1.5, 1.5] that need not sum to 1,
    A and B mixed separately, and alpha times the mean of |c_j| added to the objective to minimize,
    which is a loss there and -utility here. At zero the adapted model is the base itself.

    Unlike it: the experts are scored first, as by every optimizer here, so that all comparisons
    have the same start; the search does not learn from them. The paper's optimizer is Shiwa, of the
    package nevergrad, which chooses among CMA-ES and others by budget and dimension; here it is
    CMA-ES, with nevergrad's first step, a sixth of the range. Its code stops after 40 scores.

    Args:
        l1: alpha.
    """

    NAME: ClassVar[str] = "lorahub"

    step: PositiveNumber | None = 0.5
    sum_to_one: bool = False
    start_scales: Scales | None = ()
    low: Low = -1.5
    high: High = 1.5
    restart: bool = False
    l1: Number = 0.05

    def _population_size(self, experts: int) -> int:
        return max(super()._population_size(experts), experts + 1)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        rows = super()._initial_population(experts, count)
        rows[experts : experts + 1] = 0.0
        return rows

    def _update_state(self, utilities: np.ndarray) -> None:
        if self.iteration == 0:
            utilities = utilities.copy()
            utilities[: self.experts] = np.nan
        super()._update_state(utilities)

    def _initial_mean(self) -> np.ndarray:
        return np.zeros(self.groups * self.experts)

    def _compute_losses(self, rows: np.ndarray, utilities: np.ndarray) -> np.ndarray:
        return self.l1 * np.abs(rows).mean(axis=1) - utilities
