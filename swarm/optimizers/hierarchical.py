"""Hierarchical search: an inner optimizer on few groups of modules first, then on finer ones."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import random_streams
from swarm.optimizers.base import (
    AT_LEAST_ONE,
    POSITIVE,
    Optimizer,
    check_number,
    check_particles,
    check_saved_state,
    freeze_array,
)
from swarm.optimizers.nes import NaturalEvolution

GLOBAL_NAMES = ("1", "global")
STAGE_STREAM = 32
"""Purpose id of the random stream of a stage's seed."""


class GroupLevel(NamedTuple):
    """A division of the modules into groups.

    Attributes:
        name: Value of pool.groups.
        parents: For each of the G groups of a position, the index of its group in this division.
        share: Cumulative share of the budget at which the stage ends.
    """

    name: str
    parents: list[int]
    share: float

    @property
    def groups(self) -> int:
        """Number of groups in this division."""
        return 1 + max(self.parents)


@dataclass(kw_only=True, eq=False)
class HierarchicalOptimizer:
    """Runs an optimizer on coarse groups of modules, then anew on finer ones from the best so far.

    Every stage is a search of the inner optimizer over the groups of its division; its positions
    are expanded to the groups of the pool by giving each group the coefficients of the coarse group
    that contains it. From the second stage on the inner optimizer has one additional expert: the
    best position so far, as its coefficients in all groups. All positions are therefore
    combinations of the experts and that position, group by group, which preserves sums of 1 if the
    inner optimizer does, and works with any optimizer. One with `begin_at` (`WarmStartOptimizer`)
    starts around that position and evaluates no recipe again. An expert and the best so far are not
    evaluated twice by a run.

    The divisions are set by `set_group_hierarchy`. Without it only the first, if it is global, and
    the pool's own groups are known. A division with the same groups as the previous one is skipped,
    and the next stage receives its share of the budget.

    A stage ends with its share, or earlier if the inner optimizer ends; the rest is passed to the
    next one. A share is of `max_iterations`, and of the positions that the run's budget allows,
    whichever ends first; experts and the best so far, requested again, are not counted.

    Args:
        optimizer: The inner optimizer; None is `NaturalEvolution`. Its max_iterations is ignored,
            and it receives no gradients.
        groups: Divisions, each finer than the previous one, values of pool.groups. The last must be
            that of the pool.
        shares: Shares of the budget, one per division; normalized by their sum.
        particles: N, of the inner optimizer too; None is its default in each stage, and N the
            largest of them.
        max_iterations: Maximum number of asks after the first, over all stages.

    Raises:
        UserError: An option is out of range.
    """

    NAME: ClassVar[str] = "hierarchical"

    optimizer: Any = None
    groups: Sequence[str] = ("global", "kind", "per_module")
    shares: Sequence[float] = (0.5, 0.2, 0.3)
    particles: int | None = None
    max_iterations: int = 60
    _parents: Callable[[str], list[int]] | None = field(default=None, init=False)
    _positions: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_number("max_iterations", self.max_iterations, AT_LEAST_ONE, "it bounds the budget")
        check_particles(self.particles, 2, "null is the inner optimizer's")
        for name, values in (("groups", self.groups), ("shares", self.shares)):
            if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
                raise UserError(f"optimizer.{name}={values!r}: must be a list, one for each stage")
        if len(self.groups) != len(self.shares):
            raise UserError(f"""optimizer.shares={[*self.shares]}: must be {len(self.groups)}, one
                for each of optimizer.groups={[*self.groups]}""")
        for share in self.shares:
            check_number("shares", share, POSITIVE, "each; 0.4 is two fifths of the budget")
        if self.optimizer is None:
            self.optimizer = NaturalEvolution()
        if not hasattr(self.optimizer, "ask") or isinstance(self.optimizer, HierarchicalOptimizer):
            raise UserError("""optimizer.optimizer: must be another optimizer, such as
                optimizer@optimizer.optimizer=nes""")
        if getattr(self.optimizer, "needs_gradients", None):
            raise UserError(f"""optimizer.optimizer={self.optimizer.NAME}: needs gradients, which
                stages do not support; use it alone with pool.groups, or nes or cmaes""")
        if hasattr(self.optimizer, "name_objectives"):
            raise UserError(f"""optimizer.optimizer={self.optimizer.NAME}: a stage starts at one
                best position, which a front does not have; use it alone, or nes or cmaes""")

    def set_group_hierarchy(
        self, parents: Callable[[str], list[int]], positions: int | None
    ) -> None:
        """See `SupportsGroupHierarchy.set_group_hierarchy`.

        Raises:
            UserError: The last of `groups` is not the division of the pool, or one of them does not
                refine the previous one.
        """
        self._parents, self._positions = parents, positions
        last = str(self.groups[-1])
        try:
            found = parents(last)
        except UserError:
            found = []
        if found != list(range(len(found))) or not found:
            raise UserError(f"""optimizer.groups={[*self.groups]}: must end with the groups of the
                pool; set pool.groups={last}, or remove finer groups from optimizer.groups""")

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """See `Optimizer.start`.

        Raises:
            UserError: The inner optimizer cannot search this many experts, groups or particles.
        """
        self.experts, self.seed, self.count = experts, int(seed), groups
        self.levels = self._build_levels(groups)
        self._check_particles()
        self.size = max(len(self._build_inner(stage).ask()) for stage in range(len(self.levels)))
        self.iteration, self.has_utilities, self.evaluations = 0, False, 0
        self.best, self.best_utility = np.full(groups * experts, 1 / experts), np.nan
        self._enter_stage(0)

    def ask(self) -> np.ndarray:
        """Return positions [N, G x K]."""
        if self.has_utilities:
            self.iteration, self.has_utilities = self.iteration + 1, False
            if self._is_stage_over():
                self._enter_stage(self.stage + 1)
            self._ask_inner()
        return self.positions

    def tell(self, utilities: np.ndarray) -> None:
        """Set the utilities [N]; non-finite values count as not measured.

        Raises:
            ValueError: Not one utility per row, or called twice without an `ask`.
        """
        u = np.asarray(utilities, dtype=np.float64)
        if u.shape != self.evaluate.shape or self.has_utilities:
            raise ValueError(
                f"tell needs {len(self.evaluate)} utilities once per ask, not {u.shape}"
            )
        u = np.where(np.isfinite(u) & self.evaluate, u, np.nan)
        self.inner.tell(u[: len(self.inner.evaluate)])
        again = self.experts + 1 if self.stage and self.iteration == self.stage_start else 0
        self.evaluations += int(np.isfinite(u[again:]).sum())
        if np.isfinite(u).any() and not np.nanmax(u) <= self.best_utility:
            self.best_utility = float(np.nanmax(u))
            self.best = freeze_array(self.positions[np.nanargmax(u)].copy())
        self.has_utilities = True

    def stop_reason(self) -> str | None:
        """Return why the search has ended: the last stage, or the iterations, are finished."""
        finished = self.iteration if self.has_utilities else self.iteration - 1
        if finished >= self.max_iterations:
            return f"{finished} iteration{'s' * (finished != 1)} done"
        if self.stage + 1 < len(self.levels) or not self.has_utilities:
            return None
        words = self.inner.stop_reason()
        return words and f"{self.levels[self.stage].name}: {words}"

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state; None is an unmeasured utility."""
        single = {name: getattr(self, name) for name in SCALARS}
        return {
            "optimizer": self.NAME,
            **single,
            "groups": self.count,
            "budget": self._positions,
            "best_utility": None if np.isnan(self.best_utility) else self.best_utility,
            "levels": [[*level] for level in self.levels],
            **{name: getattr(self, name).tolist() for name in ARRAYS},
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, between ask and tell or after it.

        Raises:
            UserError: The state belongs to another optimizer, another inner one, or has another
                number of particles, or other groups.
        """
        check_saved_state(state, self.NAME, self.particles, getattr(self, "count", None))
        for name in SCALARS:
            setattr(self, name, state[name])
        self.count, self._positions = state["groups"], state["budget"]
        self.levels = [GroupLevel(*level) for level in state["levels"]]
        self.best_utility = np.nan if state["best_utility"] is None else state["best_utility"]
        self.best, self.anchor = (
            freeze_array(np.array(state[n], float)) for n in ("best", "anchor")
        )
        self.inner = self._build_inner(self.stage)
        self.inner.load_state_dict(state["inner"])
        self.positions = freeze_array(np.array(state["positions"], float))
        self.evaluate = np.array(state["evaluate"], bool)

    def _build_levels(self, groups: int) -> list[GroupLevel]:
        total, shares = sum(self.shares), np.cumsum(self.shares).tolist()
        found: list[GroupLevel] = []
        for level, name in enumerate(map(str, self.groups)):
            if level + 1 == len(self.groups):
                parents = list(range(groups))
            elif self._parents is not None:
                parents = self._parents(name)
            elif name in GLOBAL_NAMES:
                parents = [0] * groups
            else:
                continue
            if found and found[-1].groups >= 1 + max(parents):
                found.pop()
            found.append(GroupLevel(name, parents, shares[level] / total))
        return found

    def _check_particles(self) -> None:
        given = self.particles or getattr(self.optimizer, "particles", None)
        minimum = self.experts + (len(self.levels) > 1)
        if self.experts >= 2 and given is not None and given < minimum:
            raise UserError(f"""optimizer.particles={given} is fewer than the pool's {self.experts}
                experts and the best of the stage before; allowed: {minimum} or more""")

    def _build_inner(self, stage: int) -> Optimizer:
        """Return the started inner optimizer of a stage."""
        inner: Any = deepcopy(self.optimizer)
        inner.max_iterations = self.max_iterations
        if self.particles is not None:
            inner.particles = self.particles
        if stage and hasattr(inner, "begin_at"):
            inner.begin_at = self.experts
        seed = self.seed
        if stage:
            seed = int(
                random_streams.counter_rng(self.seed, stage, 0, STAGE_STREAM).integers(2**62)
            )
        inner.start(self.experts + (stage > 0), seed, self.levels[stage].groups)
        made: Optimizer = inner
        return made

    def _enter_stage(self, stage: int) -> None:
        self.stage, self.stage_start, self.anchor = stage, self.iteration, self.best
        self.inner = self._build_inner(stage)
        self._ask_inner()

    def _ask_inner(self) -> None:
        """Ask the inner optimizer and expand its positions to the pool's groups."""
        inner, level = self.inner.ask(), self.levels[self.stage]
        each = inner.reshape(len(inner), level.groups, -1)[:, level.parents]
        rows = each[:, :, : self.experts]
        if self.stage:
            anchor = self.anchor.reshape(self.count, self.experts)
            rows = rows + each[:, :, self.experts :] * anchor
        # N is constant: a stage with fewer rows than another leaves the last rows idle.
        idle = self.size - len(rows)
        self.positions = freeze_array(
            np.pad(rows.reshape(len(rows), -1), ((0, idle), (0, 0)), "edge")
        )
        self.evaluate = np.pad(np.asarray(self.inner.evaluate), (0, idle))

    def _is_stage_over(self) -> bool:
        """Return whether the stage is finished and another one follows."""
        if self.stage + 1 == len(self.levels):
            return False
        share = self.levels[self.stage].share
        spent = self._positions is not None and self.evaluations >= share * self._positions
        late = self.iteration >= share * (self.max_iterations + 1)
        return spent or late or self.inner.stop_reason() is not None


SCALARS = (
    "seed",
    "experts",
    "size",
    "iteration",
    "has_utilities",
    "evaluations",
    "stage",
    "stage_start",
)
ARRAYS = ("positions", "evaluate", "best", "anchor")
