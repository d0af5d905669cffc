"""An optimizer says which mixing coefficients to look at and is told what they were worth."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


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

    def set_group_hierarchy(self, parents: Callable[[str], list[int]], positions: int | None) -> None:
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
