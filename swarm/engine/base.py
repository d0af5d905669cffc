"""Engines, which answer requests for many positions at once, and the pools of experts they mix.

Also the choice of the plan by which an engine answers several positions.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Message, Request
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    import torch

    from swarm.pool.learned import LearnedAdapter

P = TypeVar("P", bound=ExpertPool)


class Mixer:
    """A model's part that depends on positions; its answers are those of the positions last set.

    Attributes:
        version: Changes whenever tensors that a CUDA graph may contain have new addresses.
    """

    version = 0

    @abstractmethod
    def set_positions(self, coefficients: "torch.Tensor", merge: bool = False) -> None:
        """Set P positions [P, G * K].

        Args:
            merge: Add the update to a copy of the weights; for a single position.
        """

    def set_learned(self, adapters: "Sequence[LearnedAdapter | None]") -> None:
        """Set the learned adapter of each of the next positions; empty for none.

        Only layers of an engine that `learns` get one.
        """

    def route_rows(self, particles: "torch.Tensor") -> None:
        """Set the positions [R], by index, of the rows of the next forward passes."""

    @property
    def graph_key(self) -> object:
        """What CUDA graphs of the model depend on, besides the shape of a step."""
        return self.version

    def remove(self) -> None:
        """Restore the model as it was."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The loss of some examples at one position; sums over examples, so that parts can be added.

    Attributes:
        loss: The sum of the weighted losses, nats.
        slope: [G * K] float64, its derivative by the coefficients; zeros if not computed.
    """

    loss: float
    slope: np.ndarray

    def __add__(self, other: "Gradient") -> "Gradient":
        return Gradient(self.loss + other.loss, self.slope + other.slope)

    def mean_over(self, count: int) -> "Gradient":
        """Return the mean over `count` examples."""
        return Gradient(self.loss / count, self.slope / count)


class Engine:
    """Answers requests with mixtures of experts.

    Attributes:
        context: Context length in tokens, known after `check`; infinity if the model sets none.
        embeds: Whether `embed_prompts` is implemented.
        differentiable: Whether `compute_gradient` is implemented, and positions may have learned
            adapters.
        learned: Files of the learned adapters of positions, by position; a position that is not in
            it has none. Set before positions are answered.
        exchanges: Whether `set_pool` is implemented.
        devices: Number of GPUs of one engine.
        first_devices: Whether it uses the first GPUs visible to its process, not a named one.
    """

    context = math.inf
    embeds = False
    differentiable = exchanges = False
    learned: Mapping[tuple[float, ...], str] = {}
    devices = 1
    first_devices = False

    @abstractmethod
    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """Check everything that `open` needs, without weights, and return the prompts' tokenizer.

        Raises:
            UserError: What `open` would raise, as far as shapes and settings show it.
        """

    @abstractmethod
    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The pool does not fit the base, or the device is out of memory.
        """

    def set_pool(self, pool: ExpertPool) -> None:
        """Exchange the experts of the open engine; the base stays loaded.

        Raises:
            UserError: The pool does not fit the base, or a weight is not finite.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` acquired besides memory; the engine may be opened again."""

    @abstractmethod
    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer each of the P positions' [P, G * K] own list of requests, in order.

        Raises:
            NotFinite: The numbers of a position are not finite.
        """

    def embed_prompts(
        self, prompts: Sequence[str | tuple[Message, ...]], layers: Sequence[int] | None = None
    ) -> dict[int, np.ndarray]:
        """Return the base's mean hidden states of T prompts after some layers, [T, D] by layer.

        The states are transformers' `hidden_states[layer]`, averaged over the tokens of a prompt.

        Args:
            layers: Numbers of layers; `None` is a third, a half and two thirds of them.
        """
        raise NotImplementedError

    def compute_gradient(
        self,
        positions: np.ndarray,
        examples: Sequence[Example],
        slope: bool = True,
        routes: Sequence[int] = (),
        learned: "LearnedAdapter | None" = None,
    ) -> Gradient:
        """Return the loss of examples, and its derivative.

        Args:
            positions: [R, G * K], or [G * K]; the derivative is by all of them, flattened.
            slope: `False` leaves the derivative out, which saves the backward pass.
            routes: Index of the position of each example; empty is the first for all.
            learned: An adapter of all positions; its factors' gradients are accumulated.
        """
        raise NotImplementedError

    def open_adapter(self, file: str | None, rank: int, seed: int) -> "LearnedAdapter":
        """Return the learned adapter in a file, or a new one whose update is zero."""
        raise NotImplementedError


def as_pool(pool: ExpertPool, kind: type[P], engine: str) -> P:
    """Return the pool as one of the kind that an engine mixes."""
    if isinstance(pool, kind):
        return pool
    raise UserError(
        f"engine={engine} does not mix the experts of this pool: pool=adapters needs engine=hf or "
        "vllm, pool=models engine=token, and pool=full_models engine=full or vllm"
    )


STEP_CPU, STEP_GPU = 40, 500
"""What a decoding step costs besides its own tokens, in tokens read: a CPU reads all weights, and a
GPU waits for its kernels (SmolLM2 in float32 on an AMD EPYC: 28 with one row and 40 with eight;
Llama 1B on an H100: both plans took the same time at 200 requests of 150 tokens and 8 steps)."""


class UpdateCost(NamedTuple):
    """Cost of the experts' update, by its shapes; R is the sum of the experts' ranks.

    Attributes:
        share: Products of a stacked update per token, divided by those of the base: the sum of
            R (in + out) over the adapted layers, divided by that of in * out over all layers.
        tokens: Tokens for which this costs as much as adding the update to the weights: in * out /
            (in + out) on average. It does not depend on R.
    """

    share: float
    tokens: float


def choose_plan(
    positions: int, tokens: float, steps: int, cost: UpdateCost, gpu: bool, exact: bool, room: bool
) -> tuple[str, str]:
    """Return the plan for several positions, and the reason.

    Merging runs one position at a time at the base's own speed: it saves a share of each token's
    products beyond the tokens that adding the update costs, and decodes each position alone. In 16
    bits it rounds the update away: of one that is 1 % of the weight's norm, bfloat16's 8 bits leave
    an error of 17 %, unmerged 0.2 %.

    Args:
        tokens: Prompt tokens of a position, mean.
        steps: Decoding steps.
        exact: Whether the model is in float32.
        room: Whether a copy of the adapted weights fits in the free memory.
    """
    if not exact:
        return "stacked", "merging would round the update away in 16 bits"
    if not room:
        return "stacked", "a copy of the adapted weights does not fit in the memory left"
    if positions == 1:
        return "merged", "a single position runs as fast as the base alone"
    alone = (steps + 1) * (STEP_GPU if gpu else STEP_CPU) * (1 - 1 / positions)
    least = cost.tokens + (alone / cost.share if cost.share else math.inf)
    if tokens < least:
        return "stacked", "few tokens per position, so that adding updates would cost more"
    return "merged", "enough tokens per position to gain by running as fast as the base alone"


def available_memory_bytes() -> int:
    """Return the bytes of main memory that are free or reclaimable; a large number if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 60
    found = {name: int(rest.split()[0]) for name, _, rest in (row.partition(":") for row in lines)}
    return found.get("MemAvailable", 1 << 50) * 1024
