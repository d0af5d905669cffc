"""Optimizer protocols (ask and tell) and what most optimizers share: checks, turns, exact state.

Also contains `CoefficientBounds`, the region of allowed positions: a box of coefficients, or its
part where they sum to 1.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from swarm.errors import UserError
from swarm.optimizers import random_streams

Rule = tuple[type, Callable[[Any], bool], str]
MAX_VALUE = 1e6
"""Maximum of any number; beyond it, sums of coefficients lose float precision."""

NOT_NEGATIVE: Rule = (
    float,
    lambda value: 0 <= value <= MAX_VALUE,
    f"a number from 0 to {MAX_VALUE:g}",
)
POSITIVE: Rule = (
    float,
    lambda value: 0 < value <= MAX_VALUE,
    f"a number above 0, at most {MAX_VALUE:g}",
)
STEP: Rule = (float, lambda value: 0 < value <= 100, "a number above 0, at most 100")
SHARE: Rule = (float, lambda value: 0 < value <= 1, "a number above 0, at most 1")
PROBABILITY: Rule = (float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
MOST_ROWS = 10_000
"""Maximum number of positions of an ask, or items of a batch; each is evaluated separately."""

ROWS: Rule = (int, lambda value: 1 <= value <= MOST_ROWS, f"an integer from 1 to {MOST_ROWS:,}")
AT_LEAST_ONE: Rule = (int, lambda value: value >= 1, "an integer, 1 or more")
COUNT: Rule = (int, lambda value: value >= 0, "an integer, 0 or more")
SWITCH: Rule = (bool, lambda value: True, "true or false")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that the option `name` has one of the allowed values.

    Raises:
        UserError: It has not.
    """
    if value not in allowed:
        raise UserError(f"optimizer.{name}={value}: must be one of {', '.join(allowed)}")


def check_number(name: str, value: Any, rule: Rule, advice: str) -> None:
    """Check the option `name` against its rule.

    Raises:
        UserError: The rule is violated; the message ends with the advice.
    """
    kind, allowed, wording = rule
    kinds = (int, float) if kind is float else kind
    right_kind = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
    if not (right_kind and allowed(value)):
        raise UserError(f"optimizer.{name}={value}: must be {wording}, {advice}")


def check_particles(particles: Any, minimum: int, advice: str) -> None:
    """Check that optimizer.particles is null or a valid number of rows.

    Raises:
        UserError: It is not.
    """
    if particles is not None:
        wording = f"an integer, {minimum} or more, at most {MOST_ROWS:,}"
        rule: Rule = (int, lambda value: minimum <= value <= MOST_ROWS, wording)
        check_number("particles", particles, rule, advice)


def check_pool_size(experts: int, particles: int | None) -> None:
    """Check that this many particles can contain all experts; None is as many as needed.

    Raises:
        UserError: Fewer than 2 experts, or fewer particles than experts.
    """
    if experts < 2:
        raise UserError(f"""pool.experts: {experts} given; a search mixes 2 or more, list more
            with pool.experts=[...]""")
    if particles is not None and particles < experts:
        raise UserError(f"""optimizer.particles={particles} is fewer than the pool's {experts}
            experts; allowed: {experts} or more; raise it or list fewer experts in
            pool.experts=[...]""")


def check_saved_state(
    state: dict[str, Any], name: str, particles: int | None, groups: int | None
) -> None:
    """Check that a saved state fits this optimizer; None accepts any number.

    Raises:
        UserError: The state belongs to another optimizer, number of particles or groups.
    """
    if state.get("optimizer") != name:
        raise UserError(f"""optimizer: the saved search is of {state.get("optimizer")!r}, not
            of {name!r}; resume with that optimizer, or start a new run""")
    if particles not in (None, count := len(state["positions"])):
        raise UserError(f"""optimizer.particles={particles}: must be {count}, as in the
            saved search; start a new run to change it""")
    if groups not in (None, count := state["groups"]):
        raise UserError(f"""pool.groups: gives {groups} groups of modules, and the saved search has
            {count}; restore the value, or start a new run to change it""")


class Optimizer(Protocol):
    """Ask-and-tell optimizer over positions.

    A position is a vector of G x K mixing coefficients over a pool of K experts. The model's
    modules are in G >= 1 groups, each with its own K coefficients: `position.reshape(G, K)`. Expert
    k is the position with a 1 for it in every group.

    It never calls the objective and touches neither weights nor files. Optional dependencies are
    imported where they are used. All randomness is derived from (seed, iteration, particle), so
    that a resumed run equals an uninterrupted one.
    """

    max_iterations: int
    """Maximum number of asks after the first."""

    evaluate: np.ndarray
    """[N] bool: rows of the last `ask` whose utility is requested.

    The others may be told NaN. The experts are always scored and told in the first iteration.
    """

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """Start a search over K experts in G groups; called once, before the first `ask`.

        Raises:
            UserError: The parameters do not fit this number of experts.
        """
        ...

    def ask(self) -> np.ndarray:
        """Return the positions of all particles, [N, G x K] float64.

        The first ask begins with the K experts. Returns the same array until `tell` is called, and
        the same N throughout: rows that are not new are repeated and not marked in `evaluate`.
        """
        ...

    def tell(self, utilities: np.ndarray) -> None:
        """Set the utilities of the last `ask`, [N] float64; NaN where none was measured."""
        ...

    def stop_reason(self) -> str | None:
        """Return why the search has ended, or `None` while it has not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state needed to resume, as JSON-serializable numbers and lists."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`; called instead of `start`, or after it.

        Raises:
            UserError: The state belongs to another optimizer, or has another number of particles,
                or other groups than those it was started with.
        """
        ...


@runtime_checkable
class SupportsEarlyStopping(Optimizer, Protocol):
    """An optimizer that needs no utility of a particle that did not beat its personal best.

    Optimizers that rank a complete population need every utility and do not qualify.
    """

    personal_utilities: np.ndarray
    """[N]: highest utility of each particle so far, NaN if none; available after `start`."""

    def tell(self, utilities: np.ndarray, stopped: np.ndarray | None = None) -> None:
        """See `Optimizer.tell`.

        Args:
            utilities: [N]; NaN for stopped particles too.
            stopped: [N] bool: evaluated, but stopped before the last item as unable to beat the
                personal best. They count as measured and not improved; they may be the swarm's
                worst, but their utility is unknown.
        """
        ...


@runtime_checkable
class SupportsGroupHierarchy(Protocol):
    """An optimizer that needs to know how coarser divisions contain the groups."""

    def set_group_hierarchy(
        self, parents: Callable[[str], list[int]], positions: int | None
    ) -> None:
        """Set the hierarchy; called before `start`.

        Args:
            parents: Maps the name of a coarser division to the index of its group for each of the G
                groups of a position.
            positions: Maximum number of positions that the search can evaluate; `None` is no limit.

        Raises:
            UserError: The optimizer's options do not fit the groups.
        """
        ...


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A request for the loss, and optionally its gradient, at one position on some dev items.

    Attributes:
        position: [G * K].
        items: Indices of dev items, from 0; repeated items count repeatedly.
        slope: Whether the gradient is requested too; it costs two more prompts per item.
        entropy: Use the entropy of the answers' distribution, without gold answers (with its
            gradient), instead of the gold answers' loss.
        particle: Particle of the position, for messages; `None` if there is only one.
    """

    position: np.ndarray
    items: tuple[int, ...]
    slope: bool = True
    entropy: bool = False
    particle: int | None = None

    @property
    def prompt_cost(self) -> int:
        """Cost in prompt-equivalents: 1 for a forward pass, 3 for forward and backward."""
        return len(self.items) * (3 if self.slope else 1)


class LossGradient(Protocol):
    """Answer to a `LossRequest`: means over its items.

    Attributes:
        loss: In nats.
        slope: [G * K], gradient with respect to the coefficients.
    """

    @property
    def loss(self) -> float: ...

    @property
    def slope(self) -> np.ndarray: ...


@runtime_checkable
class SupportsGradients(Optimizer, Protocol):
    """An optimizer that can use gradients of the gold answers' loss."""

    @property
    def needs_gradients(self) -> bool | None:
        """True if gradients are required, False if optional, `None` if unused."""
        ...

    def descend(self, items: int) -> Generator[list[LossRequest], list[LossGradient], None]:
        """Request gradients before an `ask`; may be closed at any time when the budget ends.

        Args:
            items: Number of dev items that the search sees.
        """
        ...


@runtime_checkable
class MultiObjectiveOptimizer(Optimizer, Protocol):
    """An optimizer of several objectives: the parts of a task, each to be maximized."""

    def name_objectives(self, names: Sequence[str]) -> None:
        """Name the M objectives, in the order of `tell`'s columns; called once after `start`.

        Raises:
            UserError: An option refers to an unknown objective.
        """
        ...

    def tell(self, utilities: np.ndarray, objectives: np.ndarray | None = None) -> None:
        """See `Optimizer.tell`.

        Args:
            utilities: [N]; NaN where none was measured.
            objectives: [N, M], higher is better; NaN where `utilities` are.
        """
        ...


@dataclass(frozen=True, slots=True)
class SearchResources:
    """Resources by which a method is chosen.

    Attributes:
        gradients: Whether the task has gold answers and the engine computes gradients.
        positions: Number of positions that the budget allows; `None` is no limit.
        black_box: Whether the gold answers are reference texts, whose loss is not the utility.
        norms: Reads the weights, and returns the norm of each expert's update; 0 is no update, and
            `None` unknown.
        routes: R, the number of kinds of prompts with coefficients of their own
            (`swarm.pool.prompt_router`); the groups of an optimizer are then those of R routes, one
            after the other.
    """

    gradients: bool = False
    positions: int | None = None
    black_box: bool = False
    norms: Callable[[], Sequence[float]] | None = None
    routes: int = 1


@runtime_checkable
class ResourceAware(Protocol):
    """An optimizer that adapts to the available resources."""

    def set_resources(self, resources: SearchResources) -> None:
        """Set the available resources; called before `start`."""
        ...


@runtime_checkable
class SupportsRoutes(Protocol):
    """An optimizer that composes a position of what is best on each route.

    Attributes:
        composes_routes: Whether it does so with its options; valid before `start`.
        composes_next: Whether the next `ask` is that position alone, whose answers are known.
    """

    composes_routes: bool

    @property
    def composes_next(self) -> bool: ...

    def tell_routes(self, values: np.ndarray) -> None:
        """Set the mean values [N, R] of the last ask on the items of each route, before `tell`.

        Args:
            values: NaN where a position was not measured.
        """
        ...


OPTIMIZER_STREAM = 16
"""Purpose id of an iteration's random stream; `random_streams` uses the ids below it."""


@dataclass(kw_only=True, eq=False)
class BaseOptimizer:
    """Asks the experts first, then the rows from `_propose_positions`, up to `max_iterations`.

    A subclass defines the initial population, proposals and updates. Its state is in the arrays
    named in ARRAYS, so that saving and loading these is enough to resume. `positions` [N, G x K] is
    the last ask, `evaluate` [N] marks its new rows; the others are repeated.

    Args:
        particles: N, the rows of every `ask`.
        max_iterations: Maximum number of asks after the first.

    Raises:
        UserError: An option is out of range; the message names the allowed values.
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
        """See `Optimizer.start`.

        Raises:
            UserError: Fewer than 2 experts, or fewer particles than experts.
        """
        check_pool_size(experts, self.particles)
        self.experts, self.groups = experts, groups
        count = self._population_size(experts) if self.particles is None else self.particles
        self.seed, self.iteration, self.has_utilities = int(seed), 0, False
        self.evaluate = np.ones(count, bool)
        self.positions = freeze_array(self._initial_population(experts, count))

    def ask(self) -> np.ndarray:
        """Return positions [N, G x K]; after a `tell`, with new rows where `evaluate` is True."""
        if self.has_utilities:
            self.iteration, self.has_utilities = self.iteration + 1, False
            rows = self._propose_positions()
            rows_used = self._proposal_rows(len(rows))
            positions = self.positions.copy()
            positions[rows_used] = rows
            self.positions = freeze_array(positions)
            self.evaluate = np.isin(np.arange(len(positions)), rows_used)
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
        self._update_state(np.where(np.isfinite(u) & self.evaluate, u, np.nan))
        self.has_utilities = True

    def stop_reason(self) -> str | None:
        """Return the number of finished iterations once it reaches `max_iterations`."""
        finished = self.iteration if self.has_utilities else self.iteration - 1
        words = f"{finished} iteration{'s' * (finished != 1)} done"
        return words if finished >= self.max_iterations else None

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state; None is an unmeasured utility."""
        arrays = {name: _to_json_list(getattr(self, name)) for name in ("positions", *self.ARRAYS)}
        turn = {
            name: getattr(self, name) for name in ("seed", "groups", "iteration", "has_utilities")
        }
        return {"optimizer": self.NAME, **turn, "evaluate": self.evaluate.tolist(), **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, between ask and tell or after it.

        Raises:
            UserError: The state belongs to another optimizer, number of particles or groups.
        """
        check_saved_state(state, self.NAME, self.particles, getattr(self, "groups", None))
        for name in ("seed", "groups", "iteration", "has_utilities"):
            setattr(self, name, state[name])
        self.evaluate = np.array(state["evaluate"], bool)
        for name in ("positions", *self.ARRAYS):
            setattr(self, name, freeze_array(np.array(state[name], float)))
        self.experts = self.positions.shape[1] // self.groups
        self._restore_state()

    def _population_size(self, experts: int) -> int:
        """Return N for `particles=None`."""
        return max(experts, self.LEAST)

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        """Return the first rows, [N, G x K], the experts first, and initialize the arrays."""
        raise NotImplementedError

    def _propose_positions(self) -> np.ndarray:
        """Return at most N rows to evaluate next, [M, G x K]."""
        raise NotImplementedError

    def _update_state(self, utilities: np.ndarray) -> None:
        """Update from the utilities of `positions`, [N]; NaN if not requested or not measured."""
        raise NotImplementedError

    def _restore_state(self) -> None:
        """Rebuild derived state from the loaded arrays."""

    def _proposal_rows(self, count: int) -> np.ndarray:
        """Return the rows of the ask that this many new positions replace."""
        return np.arange(count)

    def _iteration_rng(self, purpose: int = OPTIMIZER_STREAM) -> np.random.Generator:
        """Return a generator for this iteration, independent of other iterations and purposes."""
        return random_streams.counter_rng(self.seed, self.iteration, 0, purpose)


class HistoryOptimizer(BaseOptimizer):
    """Stores all measured positions, `rows` [M, G x K], and their `utilities` [M]."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("rows", "utilities")

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """See `BaseOptimizer.start`."""
        self.rows, self.utilities = np.empty((0, groups * experts)), np.empty(0)
        super().start(experts, seed, groups)

    def _update_state(self, utilities: np.ndarray) -> None:
        measured = np.isfinite(utilities)
        self.rows = freeze_array(np.vstack([self.rows, self.positions[measured]]))
        self.utilities = freeze_array(np.append(self.utilities, utilities[measured]))

    def _restore_state(self) -> None:
        # An empty list loses the row length in JSON.
        self.rows = self.rows.reshape(-1, self.positions.shape[1])


def freeze_array(array: np.ndarray) -> np.ndarray:
    """Return the array itself, made read-only."""
    array.flags.writeable = False
    return array


def _to_json_list(array: np.ndarray) -> list[Any]:
    return np.where(np.isnan(array), None, array.astype(object)).tolist()  # type: ignore[call-overload, no-any-return]


LOW: Rule = (float, lambda value: -MAX_VALUE <= value <= 0, f"a number from -{MAX_VALUE:g} to 0")
HIGH: Rule = (float, lambda value: 1 <= value <= MAX_VALUE, f"a number from 1 to {MAX_VALUE:g}")

BOUND_RULES: dict[str, tuple[Rule, str]] = {
    "low": (LOW, "experts have 0s"),
    "high": (HIGH, "experts have a 1"),
}
"""Rules of the two bounds of a coefficient."""


class CoefficientBounds:
    """All c with low <= c_j <= high and, with `sum_to_one`, sum c = 1; the experts are inside.

    With `sum_to_one` there are K - 1 free coordinates y, with c = 1/K + B y and the columns of B
    orthonormal and orthogonal to (1, ..., 1): distances are those of the coefficients, and no
    expert is special. Several groups form the product: each has its own K coefficients c and its
    own coordinates, D in total, G (K - 1) or G K.

    Args:
        experts: K.
        low: At most 0.
        high: At least 1.
        sum_to_one: If False, the sum is free.
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
        """Convert positions [M, G x K] to coordinates [M, D]."""
        return (rows - self._centre) @ self._basis

    def to_positions(self, coordinates: np.ndarray) -> np.ndarray:
        """Convert coordinates [M, D] to positions [M, G x K]; the inverse of `to_coordinates`."""
        return self._centre + coordinates @ self._basis.T

    def contains(self, row: np.ndarray) -> bool:
        """Return whether a row [G x K] is inside the box."""
        return bool(((row >= self.low) & (row <= self.high)).all())

    def project(self, rows: np.ndarray) -> np.ndarray:
        """Return the nearest position of the region to each of [M, G x K] rows."""
        if not self.sum_to_one:
            return np.clip(rows, self.low, self.high)
        shape, rows = rows.shape, rows.reshape(-1, self.experts)
        # The solution is clip(c - t) with one t per row (Lagrange multiplier); the sum decreases in
        # t, so bisect.
        below = (rows - self.high).min(axis=1, keepdims=True)
        above = (rows - self.low).max(axis=1, keepdims=True)
        # 60 halvings reach the precision of float64.
        for _ in range(60):
            middle = (below + above) / 2
            heavy = np.clip(rows - middle, self.low, self.high).sum(axis=1, keepdims=True) > 1
            below, above = np.where(heavy, middle, below), np.where(heavy, above, middle)
        return np.clip(rows - (below + above) / 2, self.low, self.high).reshape(shape)


def helmert_basis(experts: int) -> np.ndarray:
    """Return B [K, K - 1]: orthonormal columns, each orthogonal to (1, ..., 1)."""
    basis = np.zeros((experts, experts - 1))
    for column in range(1, experts):
        basis[:column, column - 1] = 1.0
        basis[column, column - 1] = -column
    return basis / np.sqrt((basis**2).sum(axis=0))
