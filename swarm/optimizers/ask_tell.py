"""What all optimizers but the particle swarms share: checks, turns and an exact state."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from swarm.optimizers import draws
from swarm.optimizers.checks import (
    AT_LEAST_ONE,
    Rule,
    check_number,
    check_particles,
    check_pool_size,
    check_saved_state,
    check_choice,
)

OPTIMIZER_STREAM = 16
"""Purpose of the draws of an iteration; `populate` has the ones below it."""


@dataclass(kw_only=True, eq=False)
class BaseOptimizer:
    """Asks the experts first, then the rows that `_next` proposes, until `max_iterations`.

    A subclass says how it begins, proposes and learns; what it learns lies in arrays that it names
    in ARRAYS, so that saving and loading them is all there is to going on. `positions` [N, G x K]
    is the last ask, `evaluate` [N] says which of its rows are new; the others stand still.

    Args:
        particles: N, the rows of every `ask`.
        max_iterations: The most asks after the first.

    Raises:
        UserError: An option is out of its range; named with what is allowed.
    """

    NAME: ClassVar[str]
    LEAST: ClassVar[int] = 2
    NUMBERS: ClassVar[dict[str, tuple[Rule, str]]] = {}
    WORDS: ClassVar[dict[str, tuple[str, ...]]] = {}
    ARRAYS: ClassVar[tuple[str, ...]] = ()

    particles: int | None = 20
    max_iterations: int = 50

    def __post_init__(self) -> None:
        check_number("max_iterations", self.max_iterations, AT_LEAST_ONE, "it bounds the budget")
        check_particles(self.particles, self.LEAST, "the experts are among them")
        for name, (rule, advice) in self.NUMBERS.items():
            check_number(name, getattr(self, name), rule, advice)
        for name, allowed in self.WORDS.items():
            check_choice(name, getattr(self, name), allowed)

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """As `Optimizer.start`.

        Raises:
            UserError: Fewer than 2 experts, or fewer particles than experts.
        """
        check_pool_size(experts, self.particles)
        self.experts, self.groups = experts, groups
        count = self._population_size(experts) if self.particles is None else self.particles
        self.seed, self.iteration, self.told = int(seed), 0, False
        self.evaluate = np.ones(count, bool)
        self.positions = freeze_array(self._initial_population(experts, count))

    def ask(self) -> np.ndarray:
        """Positions [N, G x K]; after a `tell`, new ones in the rows that `evaluate` marks."""
        if self.told:
            self.iteration, self.told = self.iteration + 1, False
            rows = self._propose_positions()
            places = self._proposal_rows(len(rows))
            positions = self.positions.copy()
            positions[places] = rows
            self.positions = freeze_array(positions)
            self.evaluate = np.isin(np.arange(len(positions)), places)
        return self.positions

    def tell(self, utilities: np.ndarray) -> None:
        """Take utilities [N]; what is not finite counts as not measured.

        Raises:
            ValueError: Not one utility per row, or told twice without an `ask`.
        """
        u = np.asarray(utilities, dtype=np.float64)
        if u.shape != self.evaluate.shape or self.told:
            raise ValueError(f"tell {len(self.evaluate)} utilities once per ask, not {u.shape}")
        self._update_state(np.where(np.isfinite(u) & self.evaluate, u, np.nan))
        self.told = True

    def stop_reason(self) -> str | None:
        """The number of iterations is the only end."""
        finished = self.iteration if self.told else self.iteration - 1
        words = f"{finished} iteration{'s' * (finished != 1)} done"
        return words if finished >= self.max_iterations else None

    def state_dict(self) -> dict[str, Any]:
        """Everything `load` needs; floats are exact, None stands for an unmeasured utility."""
        arrays = {name: _to_json_list(getattr(self, name)) for name in ("positions", *self.ARRAYS)}
        turn = {name: getattr(self, name) for name in ("seed", "groups", "iteration", "told")}
        return {"optimizer": self.NAME, **turn, "evaluate": self.evaluate.tolist(), **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state()`, between ask and tell or after it.

        Raises:
            UserError: The state is another optimizer's, of another number of particles or groups.
        """
        check_saved_state(state, self.NAME, self.particles, getattr(self, "groups", None))
        for name in ("seed", "groups", "iteration", "told"):
            setattr(self, name, state[name])
        self.evaluate = np.array(state["evaluate"], bool)
        for name in ("positions", *self.ARRAYS):
            setattr(self, name, freeze_array(np.array(state[name], float)))
        self.experts = self.positions.shape[1] // self.groups
        self._restore_state()

    def _population_size(self, experts: int) -> int:
        """N where `particles` is None."""
        return max(experts, self.LEAST)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        """The first rows, [N, G x K], the experts first; makes the arrays."""
        raise NotImplementedError

    def _propose_positions(self) -> np.ndarray:
        """Rows to look at next, at most N of them, [M, G x K]."""
        raise NotImplementedError

    def _update_state(self, utilities: np.ndarray) -> None:
        """Learn from the utilities of `positions`, [N], NaN where not asked or not measured."""
        raise NotImplementedError

    def _restore_state(self) -> None:
        """Make of the loaded arrays what else there is."""

    def _proposal_rows(self, count: int) -> np.ndarray:
        """The rows of the ask that so many new positions take."""
        return np.arange(count)

    def _iteration_rng(self, purpose: int = OPTIMIZER_STREAM) -> np.random.Generator:
        """A generator of this iteration, whatever was drawn in others or for another purpose."""
        return draws.counter_rng(self.seed, self.iteration, 0, purpose)


class HistoryOptimizer(BaseOptimizer):
    """Keeps `rows` [M, G x K], all positions that were measured, and their `utilities` [M]."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("rows", "utilities")

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """As `AskTell.start`."""
        self.rows, self.utilities = np.empty((0, groups * experts)), np.empty(0)
        super().start(experts, seed, groups)

    def _update_state(self, utilities: np.ndarray) -> None:
        measured = np.isfinite(utilities)
        self.rows = freeze_array(np.vstack([self.rows, self.positions[measured]]))
        self.utilities = freeze_array(np.append(self.utilities, utilities[measured]))

    def _restore_state(self) -> None:
        # A list of no rows does not say how long they are.
        self.rows = self.rows.reshape(-1, self.positions.shape[1])


def freeze_array(array: np.ndarray) -> np.ndarray:
    """The array itself, never to be written again."""
    array.flags.writeable = False
    return array


def _to_json_list(array: np.ndarray) -> list[Any]:
    return np.where(np.isnan(array), None, array.astype(object)).tolist()  # type: ignore[call-overload, no-any-return]
