"""Multi-objective evolutionary search with pymoo's NSGA-II."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from swarm._util.settings import Share, checked
from swarm.errors import UserError, install_command
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    OPTIMIZER_STREAM,
    CoefficientBounds,
    FourOrMore,
    High,
    Low,
    Optimizer,
)
from swarm.optimizers.static_merges import DEFAULT_LAMBDAS, SCALES, static_start_positions

if TYPE_CHECKING:
    from pymoo.core.algorithm import Algorithm
    from pymoo.core.problem import Problem

BASE_BOUND = "base"
"""Constraint bound that stands for the base model's value."""

MATING_STREAM, SURVIVAL_STREAM = OPTIMIZER_STREAM + 1, OPTIMIZER_STREAM + 2
"""Purpose ids of an iteration's random streams."""

DISTRIBUTION_INDEX = 20.0
"""Of SBX and of the mutation, as in the paper; the larger, the nearer children are to parents."""

TOTAL_RANGE = (0.5, 2.0)
"""Range of a random mixture's sum of coefficients, with free sums."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class NSGA2Search(Optimizer):
    """A population that approaches the Pareto front of M objectives, each to be maximized.

    NSGA-II (Deb et al. 2002, doi 10.1109/4235.996017): survivors are chosen by non-dominated fronts
    and then by crowding distance. Parents are chosen by dominance and then crowding, as pymoo does
    by default; the paper compares ranks first. Probabilities and distribution indices are the
    paper's.

    Generation 0 is the K experts, the base model (position zero) if a constraint refers to it, the
    uniform soup, and mixtures from a uniform Dirichlet distribution. With free sums, static recipes
    times four scales (`static_start_positions`) replace the soup, and the sum of a mixture is drawn
    from U(0.5, 2) in each group. Later generations are N offspring: binary tournament, simulated
    binary crossover (SBX), polynomial mutation of each coefficient with probability 1 / (G K) (at
    most 1/2), then projection to the nearest position inside the region.

    Constraints follow Deb's rules (Deb 2000, doi 10.1016/S0045-7825(99)00389-8): a feasible
    position dominates an infeasible one, of two infeasible ones the smaller sum of violations
    dominates. A `base` bound is the base model's own value, measured in generation 0, and requested
    again, with random mixtures, as long as it is missing.

    pymoo's algorithm is not saved. It is rebuilt by telling it all generations from `rows` [R, G x
    K], `values` [R, M] and `generations` [R]; before each ask and tell its random state is replaced
    by a counter-based generator, so that a resumed search equals an uninterrupted one. Failed
    evaluations are missing from their generation. Without objectives (`tell` with utilities alone)
    the utility is the only objective.

    Args:
        objectives: Names of the parts to be maximized; `None` is all. The others are measured, and
            may be constrained.
        constraints: Lower bound of a part by name, a number or `base`; `None` is none.
        crossover: Probability of a pair to be crossed.
        sum_to_one: Whether coefficients sum to 1 in each group; else each is free within its
            bounds.
        low: Lower bound of a coefficient.
        high: Upper bound of a coefficient.
    """

    NAME: ClassVar[str] = "nsga2"
    has_objectives: ClassVar[bool] = True
    STATE = (
        *Optimizer.STATE,
        *("rows", "values", "generations", "names", "objectives", "constraints"),
    )

    particles: FourOrMore | None = 20
    objectives: Annotated[Sequence[str], Field(min_length=1)] | None = None
    constraints: (
        Mapping[str, Annotated[float, Field(allow_inf_nan=False)] | Literal["base"]] | None
    ) = None
    crossover: Share = 0.9
    sum_to_one: bool = True
    low: Low = -1.0
    high: High = 2.0

    names: list[str] | None = field(default=None, init=False)

    @property
    def needs_base(self) -> bool:
        """True if the base model is part of the first generation."""
        return BASE_BOUND in (self.constraints or {}).values()

    def name_objectives(self, names: Sequence[str]) -> None:
        options = {"objectives": self.objectives or (), "constraints": self.constraints or {}}
        for key, given in options.items():
            if unknown := [name for name in given if name not in names]:
                raise UserError(f"""optimizer.{key}: the task has no part {unknown[0]!r}; it has:
                    {", ".join(names)}""")
        self.names = list(names)

    def tell(
        self,
        utilities: np.ndarray,
        stopped: np.ndarray | None = None,
        objectives: np.ndarray | None = None,
    ) -> None:
        """See `Optimizer.tell`; a ValueError also if not one row of objectives per utility."""
        values = np.asarray(utilities, float)[:, None] if objectives is None else objectives
        if self.names and objectives is None and not np.isfinite(values).any():
            values = values.repeat(len(self.names), axis=1)
        if len(values) != len(self.evaluate) or (self.names and values.shape[1] != len(self.names)):
            raise ValueError(
                f"tell needs {len(self.evaluate)} utilities once per ask, with objectives of "
                f"the parts {self.names}, not {np.shape(values)}"
            )
        self._told = np.asarray(values, float)
        super().tell(utilities)

    def _population_size(self, experts: int) -> int:
        return max(experts + self.needs_base, 4)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        if find_spec("pymoo") is None:
            raise UserError(f"""optimizer={self.NAME}: needs the package pymoo:
                {install_command("multi")}; or use another optimizer""")
        if count < (least := experts + self.needs_base):
            raise UserError(f"""optimizer.particles={count}: the {experts} experts and the base
                model of optimizer.constraints take {least}; allowed: {least} or more""")
        self.rows, self.values = np.zeros((0, self.groups * experts)), np.zeros((0, 0))
        self.generations = np.zeros(0)
        self._reset_algorithm()
        known = random_streams.expert_positions(experts, self.groups)
        base = np.zeros((int(self.needs_base), experts * self.groups))
        scales, lambdas = ((1.0,), ()) if self.sum_to_one else (SCALES, DEFAULT_LAMBDAS)
        recipes = static_start_positions(experts, self.groups, scales, lambdas)[1]
        known = np.vstack([known, base, self._bounds.project(recipes)])[:count]
        return np.vstack([known, self._sample_mixtures(count - len(known))])

    def _propose_positions(self) -> np.ndarray:
        count = len(self.positions)
        if self._algorithm is None:
            rows = self._sample_mixtures(count)
            rows[: self._constraint_bounds() is None] = 0.0
            return rows
        self._algorithm.random_state = self._iteration_rng(MATING_STREAM)
        found = self._algorithm.ask()
        # Mating returns None if it produces only duplicates of the population.
        return self._sample_mixtures(count) if found is None else found.get("X")

    def _update_state(self, utilities: np.ndarray) -> None:
        measured = np.isfinite(utilities) & np.isfinite(self._told).all(axis=1)
        values = self._told[measured]
        self.values = np.vstack([self.values, values]) if len(self.rows) else values
        self.rows = np.vstack([self.rows, self.positions[measured]])
        born = np.full(len(values), float(self.iteration))
        self.generations = np.append(self.generations, born)
        self._update_algorithm()

    def _restore_state(self) -> None:
        # An empty list loses the row length in JSON.
        self.rows = self.rows.reshape(-1, self.positions.shape[1])
        self.values = (
            self.values.reshape(len(self.rows), -1) if len(self.rows) else np.zeros((0, 0))
        )
        self._reset_algorithm()
        self._update_algorithm()

    def _reset_algorithm(self) -> None:
        self._algorithm: Algorithm | None = None
        self._learnt = -1.0

    def _sample_mixtures(self, count: int) -> np.ndarray:
        """Return random positions [count, G x K] of the region."""
        draw = self._iteration_rng()
        rows = random_streams.sample_mixtures(draw, count, self.experts, self.groups)
        if self.sum_to_one:
            return rows
        totals = draw.uniform(*TOTAL_RANGE, size=(count, self.groups))
        return self._bounds.project(rows * totals.repeat(self.experts, axis=1))

    @property
    def _bounds(self) -> CoefficientBounds:
        return CoefficientBounds(self.experts, self.low, self.high, self.sum_to_one, self.groups)

    def _columns(self, names: Iterable[str]) -> list[int]:
        """Return the columns of `values` of these parts."""
        return [(self.names or []).index(name) for name in names]

    def _constraint_bounds(self) -> np.ndarray | None:
        """Return the bounds, one per constraint; `None` while the base model is not measured."""
        constraints = self.constraints or {}
        base = np.flatnonzero(~self.rows.any(axis=1))
        if self.needs_base and not len(base):
            return None
        found = [
            self.values[base[0], column] if bound == BASE_BOUND else bound
            for column, bound in zip(self._columns(constraints), constraints.values(), strict=True)
        ]
        return np.array(found, dtype=float)

    def _update_algorithm(self) -> None:
        """Tell the algorithm every pending generation, once the bounds are known."""
        bounds = self._constraint_bounds()
        if bounds is None or not len(self.rows):
            return
        from pymoo.core.evaluator import Evaluator
        from pymoo.core.population import Population
        from pymoo.problems.static import StaticProblem

        losses = -self.values[:, self._columns(self.objectives or ()) or slice(None)]
        violations = bounds - self.values[:, self._columns(self.constraints or ())]
        # The base model (position zero) is outside the region where coefficients sum to 1.
        inside = self.rows.any(axis=1) | (not self.sum_to_one)
        for born in np.unique(self.generations[self.generations > self._learnt]):
            chosen = (self.generations == born) & inside
            self._learnt = born
            if not chosen.any():
                continue
            if self._algorithm is None:
                self._algorithm = self._build_algorithm(losses.shape[1], violations.shape[1])
            told = StaticProblem(self._algorithm.problem, F=losses[chosen], G=violations[chosen])
            offspring = Population.new("X", self.rows[chosen])
            Evaluator().eval(told, offspring)
            # Survival draws random numbers, too; they must depend on the generation, not on
            # earlier calls.
            draw = random_streams.counter_rng(self.seed, int(born), 0, SURVIVAL_STREAM)
            self._algorithm.random_state = draw
            self._algorithm.tell(infills=offspring)

    def _build_algorithm(self, objectives: int, constraints: int) -> "Algorithm":
        """Return a new algorithm over the box of coefficients."""
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import Problem
        from pymoo.core.repair import Repair
        from pymoo.core.termination import NoTermination
        from pymoo.operators.crossover.sbx import SBX
        from pymoo.operators.mutation.pm import PM

        region, size = self._bounds, self.groups * self.experts

        class Nearest(Repair):
            """Projects offspring to the nearest position of the region."""

            def _do(self, problem: "Problem", X: np.ndarray, **kwargs: Any) -> np.ndarray:
                return region.project(X)

        problem = Problem(
            n_var=size,
            n_obj=objectives,
            n_ieq_constr=constraints,
            xl=np.full(size, self.low),
            xu=np.full(size, self.high),
        )
        algorithm = NSGA2(
            pop_size=len(self.positions),
            crossover=SBX(prob=self.crossover, eta=DISTRIBUTION_INDEX),
            mutation=PM(prob=1.0, eta=DISTRIBUTION_INDEX),
            repair=Nearest(),
        )
        # pymoo's default termination stops on convergence; the search has its own end.
        algorithm.setup(problem, termination=NoTermination())
        return algorithm
