"""The interface of optimizers (ask and tell), and what all of them share: turns, exact state.

Also contains `CoefficientBounds`, the region of allowed positions: a box of coefficients, or its
part where they sum to 1.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from swarm.errors import UserError
from swarm.optimizers import random_streams

MOST_ROWS = 10_000
"""Maximum number of positions of an ask, or items of a batch; each is evaluated separately."""

Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Particles = Annotated[int, Field(ge=2, le=MOST_ROWS)]
FourOrMore = Annotated[int, Field(ge=4, le=MOST_ROWS)]
Fraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Low = Annotated[float, Field(le=0, allow_inf_nan=False)]
"""Lower bound of a coefficient: experts have coefficients of 0."""
High = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""Upper bound of a coefficient: experts have a coefficient of 1."""


GRADIENT_COST = 3
"""Cost of a forward and a backward pass in prompt-equivalents, of which a forward pass is 1."""


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A request for the mean loss at a position [R * G * K] on some dev items, by their numbers."""

    position: np.ndarray
    items: tuple[int, ...]
    descent: Any


@dataclass(frozen=True, slots=True)
class DescentRequest:
    """A request for a particle's gradient steps before an iteration, see `Descent.run`.

    Attributes:
        position: [R * G * K], where they begin.
        particle: Number of the particle.
        descent: Its extract of the descent.
    """

    position: np.ndarray
    particle: int
    descent: Any


class Reached(Protocol):
    """Answer to a `DescentRequest`: the position reached, and the descent after its steps."""

    @property
    def position(self) -> np.ndarray: ...

    @property
    def descent(self) -> Any: ...


class LossGradient(Protocol):
    """Means over items: nats, and [G * K] by the coefficients."""

    @property
    def loss(self) -> float: ...

    @property
    def slope(self) -> np.ndarray: ...


Descending = Generator[list[LossRequest] | list[DescentRequest], list[Any], None]
"""Yields requests, receives a `LossGradient` or `Reached` each; may be closed by the budget."""


class DescentPlan(NamedTuple):
    """Size of the gradient steps before an iteration, at most.

    Attributes:
        particles: Number of positions that descend.
        steps: Steps of each.
        batch: Dev items per step.
        held_out: Dev items per position whose loss is computed before its first step and after
            its last.
        samples: Texts drawn per position, to be scored.
    """

    particles: int
    steps: int
    batch: int
    held_out: int = 0
    samples: int = 0

    @property
    def gradients(self) -> int:
        """Number of examples with a gradient."""
        return self.particles * self.steps * self.batch

    @property
    def forwards(self) -> int:
        """Number of prompts that are only read or answered."""
        return self.particles * (2 * self.held_out + self.samples)

    @property
    def cost(self) -> int:
        """Cost in prompt-equivalents."""
        return GRADIENT_COST * self.gradients + self.forwards


@dataclass(frozen=True, slots=True)
class SearchResources:
    """What a task, an engine and a budget offer to an optimizer.

    Attributes:
        gradients: Whether the engine computes gradients of a loss that the task has.
        draws_texts: Whether that loss is of scores, for which texts are drawn.
        positions: Number of positions that the budget allows; `None` is no limit.
        norms: Reads the weights, and returns the norm of each expert's update; 0 is no update, and
            `None` unknown.
        routes: R, the number of kinds of prompts with coefficients of their own
            (`swarm.pool.prompt_router`); the groups of an optimizer are then those of R routes, one
            after the other.
    """

    gradients: bool = False
    draws_texts: bool = False
    positions: int | None = None
    norms: Callable[[], Sequence[float]] | None = None
    routes: int = 1


OPTIMIZER_STREAM = 16
"""Purpose id of an iteration's random stream; `random_streams` uses the ids below it."""


@dataclass(kw_only=True, eq=False)
class Optimizer:
    """Ask-and-tell optimizer over positions.

    A position is a vector of G x K mixing coefficients over a pool of K experts. The model's
    modules are in G >= 1 groups, each with its own K coefficients: `position.reshape(G, K)`. Expert
    k is the position with a 1 for it in every group.

    An optimizer never calls the objective and touches neither weights nor files. Optional packages
    are imported where they are used. All randomness is derived from (seed, iteration, particle), so
    that a resumed run equals an uninterrupted one.

    The life of one: `set_resources`, `start`, then `ask` and `tell` in turn until there
    is a `stop_reason`; before each `ask` but the first the loop answers `descend`. A subclass
    defines the initial population, proposals and updates (`_initial_population`,
    `_propose_positions`, `_update_state`); its state is in the attributes named in `STATE`.

    Args:
        particles: N, the rows of every `ask`.
        max_iterations: Maximum number of asks after the first.

    Attributes:
        positions: [N, G x K], the last ask, read-only.
        evaluate: [N] bool: rows of the last ask whose utility is requested; the others may be told
            NaN. The experts are always scored and told in the first iteration.
        iteration: Number of asks after the first.
    """

    NAME: ClassVar[str]
    STATE: ClassVar[tuple[str, ...]] = (
        "seed",
        "groups",
        "iteration",
        "has_utilities",
        "positions",
        "evaluate",
    )
    """Attributes that a resumed search needs: arrays, and values of JSON."""

    can_race: ClassVar[bool] = False
    """Whether a particle that cannot beat its personal best may be stopped, see `tell`."""
    has_objectives: ClassVar[bool] = False
    """Whether `tell` needs the utilities of the task's parts."""

    particles: Particles | None = 20
    max_iterations: Annotated[int, Field(ge=1)] = 50

    resources = SearchResources()

    def set_resources(self, resources: SearchResources) -> None:
        """Set the available resources; called before `start`."""
        self.resources = resources

    def start(self, experts: int, seed: int, groups: int = 1) -> None:
        """Start a search over K experts in G groups; called once, before the first `ask`.

        Raises:
            UserError: Fewer than 2 experts, or fewer particles than experts.
        """
        if experts < 2:
            raise UserError(f"""pool.experts: {experts} given; a search mixes 2 or more, list more
                with pool.experts=[...]""")
        if self.particles is not None and self.particles < experts:
            raise UserError(f"""optimizer.particles={self.particles} is fewer than the pool's
                {experts} experts; allowed: {experts} or more; raise it or list fewer experts in
                pool.experts=[...]""")
        self.experts, self.groups = experts, groups
        count = self._population_size(experts) if self.particles is None else self.particles
        self.seed, self.iteration, self.has_utilities = int(seed), 0, False
        self.evaluate = np.ones(count, bool)
        self.positions = freeze_array(self._initial_population(experts, count))

    def ask(self) -> np.ndarray:
        """Return the positions of all particles, [N, G x K] float64.

        The first ask begins with the K experts. Returns the same array until `tell` is called, and
        the same N throughout: rows that are not new are repeated and not marked in `evaluate`.
        """
        if self.has_utilities:
            self.iteration, self.has_utilities = self.iteration + 1, False
            self._advance()
        return self.positions

    def tell(
        self,
        utilities: np.ndarray,
        stopped: np.ndarray | None = None,
        objectives: np.ndarray | None = None,
    ) -> None:
        """Set the utilities [N] of the last `ask`; non-finite values count as not measured.

        Args:
            stopped: [N] bool: evaluated, but stopped before the last item as unable to beat the
                personal best. Used by optimizers that `can_race`.
            objectives: [N, M], utilities of the task's parts, higher is better; NaN where
                `utilities` are. Used by optimizers with `has_objectives`.

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
        """Return why the search has ended, or `None` while it has not."""
        finished = self.iteration if self.has_utilities else self.iteration - 1
        words = f"{finished} iteration{'s' * (finished != 1)} done"
        return words if finished >= self.max_iterations else None

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state needed to resume, as JSON-serializable numbers and lists."""
        return {"optimizer": self.NAME, **save_state(self, self.STATE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, between ask and tell or after it, started or not.

        Raises:
            UserError: The state belongs to another optimizer, or has another number of particles,
                or other groups than those it was started with.
        """
        if state.get("optimizer") != self.NAME:
            raise UserError(f"""optimizer: the saved search is of {state.get("optimizer")!r}, not
                of {self.NAME!r}; resume with that optimizer, or start a new run""")
        if self.particles not in (None, count := len(state["positions"])):
            raise UserError(f"""optimizer.particles={self.particles}: must be {count}, as in the
                saved search; start a new run to change it""")
        if (groups := vars(self).get("groups")) not in (None, state["groups"]):
            raise UserError(f"""pool.groups: gives {groups} groups of modules, and the saved search
                has {state["groups"]}; restore the value, or start a new run to change it""")
        load_state(self, {name: state[name] for name in self.STATE})
        self.positions = freeze_array(self.positions)
        self.experts = self.positions.shape[1] // self.groups
        self._restore_state()

    # Capabilities. The defaults are those of an optimizer without them.

    @property
    def learns(self) -> bool:
        """Whether its descents also learn an adapter beside the coefficients."""
        return False

    def origins(self, before: np.ndarray) -> np.ndarray:
        """Return the positions [N, G x K] that those of the last `ask` go on from.

        Args:
            before: Positions of the `ask` before.
        """
        return before

    @property
    def new_rows(self) -> int:
        """Maximum number of positions that an `ask` after the first has evaluated."""
        return len(self.positions)

    @property
    def needs_gradients(self) -> bool | None:
        """True if gradients are required, False if optional, `None` if unused; valid before
        `start`."""
        return None

    @property
    def signal(self) -> Literal["auto", "gold", "scores"]:
        """What the gradients are to be of; see `swarm.optimizers.gradient.Descent`."""
        return "gold"

    def descend(self, items: int) -> Descending:
        """Request losses and gradients before an `ask`.

        Args:
            items: Number of dev items that the search sees.
        """
        yield from ()

    def plan_descent(self, items: int) -> DescentPlan | None:
        """Return the size of `descend` on this many dev items; `None` if it requests nothing."""
        return None

    def items_without_gradient(self, items: int) -> tuple[int, ...]:
        """Return the dev items that no gradient has used; for one particle, those held out for it.

        The utility on them is less biased than on all dev items, but not unbiased: all items choose
        the start of a descent, its rate and the best position.
        """
        return ()

    @property
    def damped_experts(self) -> list[int]:
        """Indices of the experts that move less because their update is huge; after `start`."""
        return []

    @property
    def kinds_start(self) -> int:
        """Number of first positions, the same for all kinds of prompts, of which another is
        composed with the best for each kind; 0 if none is."""
        return 0

    @property
    def composes_next(self) -> bool:
        """Whether the next `ask` is that position alone, whose answers are known."""
        return False

    def tell_routes(self, values: np.ndarray) -> None:
        """Set the mean values [N, R] of the last ask on the items of each route, before `tell`.

        Args:
            values: NaN where a position was not measured.
        """

    def name_objectives(self, names: Sequence[str]) -> None:
        """Name the M objectives, in the order of `tell`'s columns; called once after `start`.

        Raises:
            UserError: An option refers to an unknown objective.
        """

    # What a subclass defines.

    def _population_size(self, experts: int) -> int:
        """Return N for `particles=None`."""
        return experts

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        """Return the first rows, [N, G x K], the experts first, and initialize the state."""
        raise NotImplementedError

    def _propose_positions(self) -> np.ndarray:
        """Return at most N rows to evaluate next, [M, G x K]."""
        raise NotImplementedError

    def _update_state(self, utilities: np.ndarray) -> None:
        """Update from the utilities of `positions`, [N]; NaN if not requested or not measured."""
        raise NotImplementedError

    def _restore_state(self) -> None:
        """Rebuild derived state from the loaded one."""

    def _proposal_rows(self, count: int) -> np.ndarray:
        """Return the rows of the ask that this many new positions replace."""
        return np.arange(count)

    def _advance(self) -> None:
        """Set `positions` and `evaluate` of the next ask."""
        rows = self._propose_positions()
        replaced = self._proposal_rows(len(rows))
        positions = self.positions.copy()
        positions[replaced] = rows
        self.positions = freeze_array(positions)
        self.evaluate = np.isin(np.arange(len(positions)), replaced)

    def _iteration_rng(
        self, purpose: int = OPTIMIZER_STREAM, particle: int = 0
    ) -> np.random.Generator:
        """Return a generator for this iteration, independent of others, particles and purposes."""
        return random_streams.counter_rng(self.seed, self.iteration, particle, purpose)


def freeze_array(array: np.ndarray) -> np.ndarray:
    """Return the array itself, made read-only."""
    array.flags.writeable = False
    return array


def save_state(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes as JSON values: an array as nested lists, with None for NaN."""
    found = {name: getattr(owner, name) for name in names}
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            plain = value.astype(object)
            plain[value != value] = None
            found[name] = plain.tolist()
    return found


def load_state(owner: object, state: dict[str, Any]) -> None:
    """Set the attributes of `save_state`; a list of anything but texts is an array."""
    for name, value in state.items():
        if isinstance(value, list) and not (value and isinstance(value[0], str)):
            array = np.array(value)
            value = array.astype(float) if array.dtype == object else array  # of numbers and None
        setattr(owner, name, value)


def rank_weights(utilities: np.ndarray) -> np.ndarray:
    """Return weights [n] of n utilities by rank, which sum to 0; the better half is above 0.

    max(0, log(n / 2 + 1) - log k) for rank k, normalised to a sum of 1, minus 1 / n (Hansen 2016,
    arXiv 1604.00772, section 3.3.1, and Wierstra et al. 2014, JMLR 15). Equal utilities share the
    mean of theirs.
    """
    count = len(utilities)
    weights = np.maximum(0.0, np.log(count / 2 + 1) - np.log(np.arange(1, count + 1)))
    weights = weights / weights.sum() - 1 / count
    _, ranks, sizes = np.unique(-utilities, return_inverse=True, return_counts=True)
    sums = np.add.reduceat(weights, np.cumsum(sizes) - sizes)
    return np.asarray((sums / sizes)[ranks])


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
        from scipy.linalg import helmert

        self._centre = np.full(groups * experts, 1 / experts if sum_to_one else 0.0)
        basis = helmert(experts).T if sum_to_one else np.eye(experts)
        # Contiguous: the order in memory decides the last bit of a product.
        self._basis = np.ascontiguousarray(np.kron(np.eye(groups), basis))

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
