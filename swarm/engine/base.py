"""The engine answers requests for many positions at once; the only room with much torch in it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.models.base import Completion, Example, Request

if TYPE_CHECKING:
    from swarm.engine.gradient import Gradient
    from swarm.pool.discovery import NamedModel


class ExpertPool(Protocol):
    """What a position mixes: a pool of adapters, or a panel of whole models.

    Attributes:
        names: Of the K experts, in the order of a position's coefficients; there once it is open.
        saves: What `save` writes, in a word.
        groups: Of the modules with coefficients of their own; one for all of them is "all".
    """

    names: list[str]
    saves: str
    groups: Sequence[str]

    @property
    def own(self) -> int:
        """How many of the names, the first ones, are models that the user has, not made up here."""
        ...

    def open(self, base: "str | NamedModel | None" = None) -> "ExpertPool":
        """Read what there is, but no weights; quick, and may be called again. Gives itself.

        Args:
            base: The base model that the experts have to belong to, or its name, if they have one.

        Raises:
            UserError: Something is missing or does not go together.
        """
        ...

    def check(self) -> None:
        """Make sure, before anything is written, that the weights are there and are numbers.

        Raises:
            UserError: They are not.
        """
        ...

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the experts."""
        ...

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write what a position [K] stands for, and a swarm.json that says so, with `extra`."""
        ...


class Engine(Protocol):
    """Answers requests with mixtures of experts.

    Attributes:
        context: Tokens that the model can have, known after `check`; infinity where nothing says.
    """

    context: float

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """Do what `open` does without any weights; gives the tokenizer that writes the prompts.

        Raises:
            UserError: What `open` would raise, as far as shapes and settings show it.
        """
        ...

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The pool does not fit the base, or the device has no room for them.
        """
        ...

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer, for each of the P positions [P, K], its own list of requests, order kept."""
        ...


@runtime_checkable
class DifferentiableEngine(Engine, Protocol):
    """An engine that has derivatives by the mixing coefficients."""

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> "Gradient":
        """The loss of the examples' gold answers at a position [G * K], and its derivative.

        Args:
            slope: `False` leaves the derivative out, which saves the backward pass.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """An engine that holds more than its own memory."""

    def close(self) -> None:
        """Give back what `open` took; it may be opened again."""
        ...


@runtime_checkable
class MultiGpuEngine(Protocol):
    """An engine that takes the first devices that its process sees.

    Attributes:
        devices: How many GPUs one engine takes.
    """

    devices: int
