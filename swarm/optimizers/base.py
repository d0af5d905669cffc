"""What all optimizers but the particle swarms share: checks, turns and an exact state."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from swarm.optimizers import random_streams
from swarm.optimizers.checks import (
    AT_LEAST_ONE,
    MAX_VALUE,
    Rule,
    check_choice,
    check_number,
    check_particles,
    check_pool_size,
    check_saved_state,
)

# An optimizer says which mixing coefficients to look at and is told what they were worth.


class Optimizer(Protocol):
    """Ask / tell over positions: vectors of G x K mixing coefficients over a pool of K experts.

    The modules of the model are in G groups, one or more, each with K coefficients of its own:
    `position.reshape(G, K)`. Expert k is the position that has a 1 for it in every group.

    It never calls the objective and touches neither weights nor files. What it needs beside
    numpy it imports where it uses it.
    All randomness comes from (seed, iteration, particle), so that a resumed run is the same run.
    """

    max_iterations: int
    """The most times that `ask` will be answered after the first."""

    evaluate: np.ndarray
    """[N] bool: the rows of the last `ask` whose utility is wanted; the others may be told NaN. The
    experts, in the first round, are scored and told in any case."""

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """Begin a search over K experts in G groups; called once, before the first `ask`.

        Raises:
            UserError: The parameters do not fit so many experts.
        """
        ...

    def ask(self) -> np.ndarray:
        """The positions of all particles, [N, G x K] float64; first of all, the K experts.

        The same array until `tell` is called, and the same N throughout: what is not new in an
        ask stands still and is not wanted (`evaluate`).
        """
        ...

    def tell(self, utilities: np.ndarray) -> None:
        """Take the utilities of the last `ask`, [N] float64; NaN where none was measured."""
        ...

    def stop_reason(self) -> str | None:
        """Why there is nothing more to ask, or `None` while there is."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All it takes to go on, as JSON-ready numbers and lists; exact."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state()`; called instead of `start`, or after it.

        Raises:
            UserError: The state is another optimizer's, of another number of particles, or of
                other groups than those that it was started with.
        """
        ...


@runtime_checkable
class SupportsEarlyStopping(Optimizer, Protocol):
    """An optimizer that needs no utility of a particle that did not beat its own best.

    One that ranks a whole population is none: it needs every utility.
    """

    personal_utilities: np.ndarray
    """[N]: the highest utility of each particle so far, NaN for none; there after `start`."""

    def tell(self, utilities: np.ndarray, stopped: np.ndarray | None = None) -> None:
        """As `Optimizer.tell`.

        Args:
            utilities: [N]; NaN for the stopped ones too.
            stopped: [N] bool: evaluated, and found out not to beat the own best before the last
                item. They count as measured and not improved; they may be the swarm's worst, but
                nobody knows.
        """
        ...


@runtime_checkable
class SupportsGroupHierarchy(Protocol):
    """An optimizer that needs to know how coarser divisions of the modules contain the groups."""

    def set_group_hierarchy(
        self, parents: Callable[[str], list[int]], positions: int | None
    ) -> None:
        """Take the division; called before `start`.

        Args:
            parents: For the name of a coarser division, the number of its group for each of the G
                groups of a position.
            positions: The most positions that the search can evaluate; `None` is no limit.

        Raises:
            UserError: The optimizer's options do not fit the groups.
        """
        ...


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A loss, wanted at one position on some dev items.

    Attributes:
        position: [G * K].
        items: Numbers of dev items, from 0, an item as often as it is there.
        slope: Whether the derivative is wanted too; it costs two prompts an item more.
        entropy: The loss is the entropy of the answers' distribution, without gold answers, and
            its derivative is wanted; else it is that of the gold answers.
        particle: Whose position it is, for messages; `None` where there is but one.
    """

    position: np.ndarray
    items: tuple[int, ...]
    slope: bool = True
    entropy: bool = False
    particle: int | None = None

    @property
    def prompt_cost(self) -> int:
        """In prompt-equivalents: a forward pass is one, a forward and backward pass are three."""
        return len(self.items) * (3 if self.slope else 1)


class LossGradient(Protocol):
    """What is wanted: means over the items.

    Attributes:
        loss: Nats.
        slope: [G * K], its derivative by the coefficients.
    """

    @property
    def loss(self) -> float: ...

    @property
    def slope(self) -> np.ndarray: ...


@runtime_checkable
class SupportsGradients(Optimizer, Protocol):
    """An optimizer that can use derivatives of the gold answers' loss."""

    @property
    def needs_gradients(self) -> bool | None:
        """Whether it cannot do without; `None` if it does not want them."""
        ...

    def descend(self, items: int) -> Generator[list[LossRequest], list[LossGradient], None]:
        """Ask for derivatives before an `ask`; it may be closed at any time, as budgets end.

        Args:
            items: How many dev items the search sees.
        """
        ...


@runtime_checkable
class MultiObjectiveOptimizer(Optimizer, Protocol):
    """An optimizer of several objectives: the parts of a task, each to be maximized."""

    def name_objectives(self, names: Sequence[str]) -> None:
        """Name the M objectives, in the order of `tell`'s columns; called once after `start`.

        Raises:
            UserError: An option refers to another one.
        """
        ...

    def tell(self, utilities: np.ndarray, objectives: np.ndarray | None = None) -> None:
        """As `Optimizer.tell`.

        Args:
            utilities: [N]; NaN where none was measured.
            objectives: [N, M], higher is better; NaN where `utilities` are.
        """
        ...


@dataclass(frozen=True, slots=True)
class SearchResources:
    """What there is to choose a method by.

    Attributes:
        gradients: Whether the task has gold answers, and the engine derivatives.
        positions: How many positions the budget allows; `None` is no limit.
    """

    gradients: bool = False
    positions: int | None = None


@runtime_checkable
class ResourceAware(Protocol):
    """An optimizer that chooses something by what there is to go by."""

    def set_resources(self, offer: SearchResources) -> None:
        """Take what there is to go by; called before `start`."""
        ...


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
        return random_streams.counter_rng(self.seed, self.iteration, 0, purpose)


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


# The positions that a search may visit: a box of coefficients, or its part where they sum to 1.

LOW: Rule = (float, lambda value: -MAX_VALUE <= value <= 0, f"a number from -{MAX_VALUE:g} to 0")
HIGH: Rule = (float, lambda value: 1 <= value <= MAX_VALUE, f"a number from 1 to {MAX_VALUE:g}")

BOUND_RULES: dict[str, tuple[Rule, str]] = {
    "low": (LOW, "experts have 0s"),
    "high": (HIGH, "experts have a 1"),
}
"""What the two bounds of a coefficient may be."""


class CoefficientBounds:
    """All c with low <= c_j <= high and, with `sum_to_one`, sum c = 1; the experts are in it.

    Where they sum to 1 there are K - 1 free coordinates y, with c = 1/K + B y and the columns of
    B orthonormal and orthogonal to (1, ..., 1): distances are those of the coefficients, and no
    expert is special. Of several groups it is the product: each has its own K coefficients c and
    its own coordinates, D in all, G (K - 1) or G K.

    Args:
        experts: K.
        low: At most 0.
        high: At least 1.
        sum_to_one: Off, the sum is free.
        groups: G.
    """

    def __init__(
        self, experts: int, low: float, high: float, sum_to_one: bool = True, groups: int = 1
    ) -> None:
        self.low, self.high, self.sum_to_one, self.experts = low, high, sum_to_one, experts
        self._centre = np.full(groups * experts, 1 / experts if sum_to_one else 0.0)
        basis = helmert_basis(experts) if sum_to_one else np.eye(experts)
        self._basis = np.kron(np.eye(groups), basis)

    def to_coordinates(self, rows: np.ndarray) -> np.ndarray:
        """[M, G x K] to [M, D]."""
        return (rows - self._centre) @ self._basis

    def to_positions(self, coordinates: np.ndarray) -> np.ndarray:
        """The inverse of `coordinates`."""
        return self._centre + coordinates @ self._basis.T

    def contains(self, row: np.ndarray) -> bool:
        """Whether a row [G x K] is inside of the box."""
        return bool(((row >= self.low) & (row <= self.high)).all())

    def project(self, rows: np.ndarray) -> np.ndarray:
        """The nearest position of the region to each of [M, G x K] rows."""
        if not self.sum_to_one:
            return np.clip(rows, self.low, self.high)
        shape, rows = rows.shape, rows.reshape(-1, self.experts)
        # It is clip(c - t) with one t a row (Lagrange); the sum falls as t rises, so bisect.
        below = (rows - self.high).min(axis=1, keepdims=True)
        above = (rows - self.low).max(axis=1, keepdims=True)
        for _ in range(60):
            middle = (below + above) / 2
            heavy = np.clip(rows - middle, self.low, self.high).sum(axis=1, keepdims=True) > 1
            below, above = np.where(heavy, middle, below), np.where(heavy, above, middle)
        return np.clip(rows - (below + above) / 2, self.low, self.high).reshape(shape)


def helmert_basis(experts: int) -> np.ndarray:
    """B [K, K - 1]: orthonormal columns, each orthogonal to (1, ..., 1)."""
    basis = np.zeros((experts, experts - 1))
    for column in range(1, experts):
        basis[:column, column - 1] = 1.0
        basis[column, column - 1] = -column
    return basis / np.sqrt((basis**2).sum(axis=0))
