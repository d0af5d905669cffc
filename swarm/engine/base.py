"""Protocols of engines, which answer requests for many positions at once, and of expert pools."""

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
    """The experts that a position mixes: a pool of adapters, or a panel of full models.

    Attributes:
        names: Names of the K experts, in the order of a position's coefficients; set by `open`.
        saves: The kind of artifact that `save` writes ("model").
        groups: Names of the module groups with separate coefficients; a single group is "all".
    """

    names: list[str]
    saves: str
    groups: Sequence[str]

    @property
    def expert_count(self) -> int:
        """Number of leading names that are the user's models, as opposed to generated experts."""
        ...

    def open(self, base: "str | NamedModel | None" = None) -> "ExpertPool":
        """Read the pool without any weights, and return it; fast, and may be called again.

        Args:
            base: The base model that the experts have to belong to, or its name, if they have one.

        Raises:
            UserError: Something is missing or inconsistent.
        """
        ...

    def check(self) -> None:
        """Check, before anything is written, that the weights exist and are finite.

        Raises:
            UserError: They are not.
        """
        ...

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the experts."""
        ...

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the artifact of a position [K], and a swarm.json describing it, with `extra`."""
        ...


class Engine(Protocol):
    """Answers requests with mixtures of experts.

    Attributes:
        context: Context length in tokens, known after `check`; infinity if the model sets none.
    """

    context: float

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """Check everything that `open` needs, without weights, and return the prompts' tokenizer.

        Raises:
            UserError: What `open` would raise, as far as shapes and settings show it.
        """
        ...

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The pool does not fit the base, or the device is out of memory.
        """
        ...

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer each of the P positions' [P, K] own list of requests, in order."""
        ...


@runtime_checkable
class DifferentiableEngine(Engine, Protocol):
    """An engine with derivatives with respect to the mixing coefficients."""

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> "Gradient":
        """Return the loss of the examples' gold answers at a position [G * K], and its derivative.

        Args:
            slope: `False` leaves the derivative out, which saves the backward pass.
        """
        ...


@runtime_checkable
class SupportsPrecision(Engine, Protocol):
    """An engine that can answer in a lower precision than its weights have.

    Attributes:
        precision: What a search asks in: "auto" (bfloat16 if the answers agree; see
            `swarm.loop.evaluator.choose_precision`), "float32", or "bfloat16" for the products with
            the base's matrices, all else in float32; `None` is that of `model.dtype`.
    """

    precision: str | None

    def requested_precision(self, base: BaseModel, on_gpu: bool) -> str | None:
        """Return "auto" or "bfloat16" if a search may ask in it here, else `None`.

        Raises:
            UserError: `precision` is not "auto", and this model or device does not have it.
        """
        ...

    def set_precision(self, precision: str | None) -> None:
        """Answer in "bfloat16", or in that of `model.dtype` (`None`), from the next call on.

        Raises:
            UserError: The open model or its device does not have it.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """An engine that holds resources besides its own memory."""

    def close(self) -> None:
        """Release what `open` acquired; the engine may be opened again."""
        ...


@runtime_checkable
class MultiGpuEngine(Protocol):
    """An engine that uses the first devices visible to its process.

    Attributes:
        devices: Number of GPUs per engine.
    """

    devices: int
