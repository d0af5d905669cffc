"""Recipes that need no search: soups and task arithmetic, scored as every other position is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import draws
from swarm.optimizers.ask_tell import BaseOptimizer, freeze_array
from swarm.optimizers.checks import POSITIVE, Rule, check_number
from swarm.optimizers.starts import weighted_soup

EXPERT, UNIFORM, WEIGHTED, GREEDY = "expert", "uniform soup", "weighted soup", "greedy soup"
ARITHMETIC = "task arithmetic {:g}"


@dataclass(kw_only=True, eq=False)
class StaticMerges(BaseOptimizer):
    """Looks at the experts, then at what recipes make of them, and ends.

    - Best single: the experts themselves; all K rows of the pool are scored.
    - Uniform soup: the mean (Wortsman et al. 2022, arXiv 2203.05482).
    - Weighted soup: weights in proportion to the utility above the lowest,
      w_j = (u_j - min u) / sum_i (u_i - min u); the uniform soup where all are equal.
    - Greedy soup (as above, recipe 1): the mean of the best expert and of each that, in the order
      of their utilities, does not let the utility of the mean fall; one position an ask.
    - Task arithmetic (Ilharco et al. 2023, arXiv 2212.04089): lambda times the sum of all.

    The same coefficients stand in all groups of modules. Nothing is random. A lost evaluation is
    not repeated: an expert without a utility is in neither the weighted nor the greedy soup, and a
    mean without one is no gain.

    `rows` [M, G x K] is all that was asked, in this order, `labels` [M] what each is, `utilities`
    [M] what it was worth, NaN if lost; those of the last ask are still to come until `tell`.

    Args:
        particles: N; None is the experts and all that is known before anything is scored.
        lambdas: Of task arithmetic.
        among: So many first rows of the pool are merged, as base, noise, elites and made rows
            come after the experts; None is all.
    """

    NAME: ClassVar[str] = "recipes"
    ARRAYS: ClassVar[tuple[str, ...]] = ("rows", "utilities")

    particles: int | None = None
    max_iterations: int = 100
    lambdas: Sequence[float] = (0.2, 0.3, 0.5)
    among: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lambdas, str) or not isinstance(self.lambdas, Sequence):
            raise UserError(f"optimizer.lambdas={self.lambdas!r}: must be a list of numbers")
        for factor in self.lambdas:
            check_number("lambdas", factor, POSITIVE, "each; [] leaves task arithmetic out")
        if self.among is not None:
            enough: Rule = (int, lambda value: value >= 2, "a whole number, 2 or more")
            check_number("among", self.among, enough, "null merges all rows of the pool")

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """As `AskTell.start`.

        Raises:
            UserError: Fewer rows in the pool than are to be merged, too.
        """
        if self.among is not None and self.among > experts:
            raise UserError(f"""optimizer.among={self.among}: the pool has {experts} rows; allowed:
                2 to {experts}, or null for all""")
        super().start(experts, seed, groups)

    def stop_reason(self) -> str | None:
        """All recipes are through, or the iterations are."""
        if self.told and not self._plan_merges():
            made, known = len(self._greedy_soup()[0]), self._merged_count()
            return f"every recipe is scored; the greedy soup took {made} of {known}"
        return super().stop_reason()

    def state_dict(self) -> dict[str, Any]:
        """As `AskTell.state`."""
        return {**super().state_dict(), "labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `AskTell.load`."""
        super().load_state_dict(state)
        self.labels = list(state["labels"])

    def _population_size(self, experts: int) -> int:
        return experts + 1 + len(self.lambdas)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.utilities = np.empty(0)
        self.labels = [EXPERT] * experts
        self.rows = draws.expert_positions(experts, self.groups)
        self._add_merges(self._plan_merges()[: count - experts])
        self.evaluate[len(self.rows) :] = False
        idle = np.repeat(self.rows[:1], count - len(self.rows), axis=0)
        return np.vstack([self.rows, idle])

    def _propose_positions(self) -> np.ndarray:
        known = len(self.rows)
        self._add_merges(self._plan_merges()[: len(self.positions)])
        return self.rows[known:]

    def _update_state(self, utilities: np.ndarray) -> None:
        self.utilities = freeze_array(np.append(self.utilities, utilities[self.evaluate]))

    def _add_merges(self, proposed: list[tuple[str, np.ndarray]]) -> None:
        for label, mix in proposed:
            self.labels = [*self.labels, label]
            self.rows = freeze_array(np.vstack([self.rows, np.tile(mix, self.groups)]))

    def _plan_merges(self) -> list[tuple[str, np.ndarray]]:
        """What is known now to come next: labels and coefficients [K], without what was asked."""
        ones = self._indicator_vector(range(self._merged_count()))
        fixed = [(UNIFORM, ones / ones.sum())]
        fixed += [(ARITHMETIC.format(factor), factor * ones) for factor in self.lambdas]
        scores = self.utilities[: self._merged_count()]
        if np.isfinite(scores).any():
            fixed.append((WEIGHTED, self._weighted_soup(scores)))
        plan = [one for one in fixed if one[0] not in self.labels]
        soup, candidate = self._greedy_soup()
        if candidate is not None:
            members = self._indicator_vector([*soup, candidate])
            plan.insert(0, (GREEDY, members / members.sum()))
        return plan

    def _weighted_soup(self, scores: np.ndarray) -> np.ndarray:
        weights = np.zeros(self.experts)
        weights[: len(scores)] = weighted_soup(scores)
        return weights

    def _greedy_soup(self) -> tuple[list[int], int | None]:
        """The members of the greedy soup so far, and the expert to try next, if there is one."""
        scores = self.utilities[: self._merged_count()]
        order = [int(j) for j in np.argsort(-scores, kind="stable") if np.isfinite(scores[j])]
        tried = iter(
            utility
            for label, utility in zip(self.labels, self.utilities, strict=False)
            if label == GREEDY
        )
        soup = order[:1]
        best = scores[soup[0]] if soup else np.nan
        for candidate in order[1:]:
            utility = next(tried, None)
            if utility is None:
                return soup, candidate
            if utility >= best:
                soup, best = [*soup, candidate], utility
        return soup, None

    def _indicator_vector(self, members: Sequence[int]) -> np.ndarray:
        ones = np.zeros(self.experts)
        ones[list(members)] = 1.0
        return ones

    def _merged_count(self) -> int:
        return self.among or self.experts
